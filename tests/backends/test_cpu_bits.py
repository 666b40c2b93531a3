# SPDX-License-Identifier: Apache-2.0
"""A row's bits depend on its own request alone: the oracles of attnrt.testing, on both numeric classes and every family."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.backends.cpu import CpuBackend
from attnrt.backends.cpu.families import families

v = at.variants

VARIANTS = {
    "causal": v.causal(),
    "window": (v.causal(), v.sliding_window(90)),
    "softcap": (v.causal(), v.softcap(2.0)),
    "sinks": (v.causal(), v.sink_logits(0.3)),
    "sigmoid": (v.causal(), v.sigmoid()),
}
#: (qo_lens, kv_lens): decode rows, packed rows, rows of both, empty ones; more than one leaf.
LENGTHS = {
    "decode": ([1, 1, 1, 1], [700, 33, 1, 300]),
    "chunks": ([40, 7, 130], [400, 64, 130]),
    "mixed": ([1, 25, 3, 0, 6, 2], [1400, 90, 3, 50, 0, 257]),
}


@pytest.fixture(params=families())
def cpu(request):
    return CpuBackend(family=request.param)


def case_of(variant="causal", lengths="mixed", seed=0, **changes):
    fields = {"num_qo_heads": 6, "num_kv_heads": 2, "head_dim": 24, "head_dim_vo": 40, "q_dtype": "float32"}
    spec = at.AttentionSpec(**(fields | changes), variant=VARIANTS[variant])
    return testing.make_case(spec, *LENGTHS[lengths], seed=seed)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_batch(cpu, variant, lengths):
    testing.batch_invariance(case_of(variant, lengths), cpu)


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("float16", "float8_e5m2"), ("float32", "float8_e4m3fn")]
)
def test_batch_in_small_dtypes(cpu, dtypes):
    testing.batch_invariance(case_of(q_dtype=dtypes[0], kv_dtype=dtypes[1], head_dim=64, head_dim_vo=64), cpu)


@pytest.mark.parametrize("variant", ["causal", "window", "sinks"])
def test_workers_and_schedulers(cpu, variant):
    testing.workers(case_of(variant), cpu)


@pytest.mark.parametrize("variant", ["causal", "window"])
def test_page_sizes(cpu, variant):
    testing.page_size_invariance(case_of(variant), cpu)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [24, 64])
def test_memory(cpu, dim, kv_layout):
    case = case_of(head_dim=dim, head_dim_vo=dim, kv_layout=kv_layout)
    testing.layout_invariance(case, cpu)
    testing.placement(case, cpu)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_poison(cpu, variant, dtype):
    case = case_of(variant, kv_dtype=dtype)
    testing.poison(case, cpu, page_size=7)
    testing.poison(case, cpu, builder="ragged")


def test_capacity_history_sentinel(cpu):
    case = case_of()
    testing.capacity(case, cpu)
    testing.history(case, case_of(lengths="decode", seed=2), cpu)
    testing.sentinel(case, cpu)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads(threads):
    case = case_of()
    batch = testing.lay_out(case)
    one, many = (testing.run_batch(case, batch, CpuBackend(num_threads=n)) for n in (1, threads))
    testing.same(one, many, f"{threads} threads")


class Altered(CpuBackend):
    """The backend with other traits: what a planner may choose freely."""

    def __init__(self, family, changes):
        super().__init__(family=family)
        self.changes = changes

    def traits(self, spec, features, device, deterministic="batch"):
        return replace(super().traits(spec, features, device, deterministic), **self.changes)


def test_items(cpu):
    """Items of one head, of all heads, of few or many rows, more workers than rows, no partial slots: same bits."""
    case = case_of()
    batch = testing.lay_out(case)
    classes = cpu.traits(case.spec, batch.index.features, at.device.CPU).classes
    plain = testing.run_batch(case, batch, cpu)
    for changes in (
        {"split_heads": False},
        {"num_workers": 132},
        {"num_workers": 17, "fixed": 0.0},
        {"num_workers": 132, "max_partial_slots": 0},
        {"classes": tuple(replace(c, q_tile=max(c.q_tile // 4, 3)) for c in classes)},
        {"classes": tuple(replace(c, q_tile=4 * c.q_tile) for c in classes)},
    ):
        testing.same(plain, testing.run_batch(case, batch, Altered(cpu.family, changes)), str(changes))


@pytest.mark.parametrize("prefix", [256, 300, 700])
def test_cascade_is_flat(cpu, prefix):
    """A shared prefix read once gives the bits of the flat index."""
    spec = case_of().spec
    rng = np.random.default_rng(4)
    own = [30, 5, 64]
    slots = rng.permutation(1200).astype(np.int32)
    head, rest = slots[:prefix], slots[prefix:]
    begin = np.r_[0, np.cumsum(own)].astype(np.int32)
    flat_ids = np.concatenate([np.r_[head, rest[a:b]] for a, b in itertools.pairwise(begin)])
    qo = [0, 1, 3, 4]
    lens = np.array(own) + prefix
    flat = formats.paged(qo, np.r_[0, np.cumsum(lens)], flat_ids, lens, 1)
    cascade = formats.cascade(
        formats.paged([0, 4], [0, prefix], head, [prefix], 1),
        formats.paged(qo, begin, rest[: begin[-1]], own, 1),
    )
    shared = formats.share(flat, min_tokens=64)
    kv = tuple(rng.standard_normal((1200, 2, d), np.float32) for d in (24, 40))
    q = rng.standard_normal((4, 6, 24), np.float32)
    results = []
    for index in (flat, cascade, shared):
        attn = at.Attention(spec, backend=cpu, device="cpu")
        plan = attn.plan(index)
        out, lse = attn.run(q, kv, return_lse=True)
        testing.check(plan, q, kv, out, lse)
        results.append(out.tobytes() + lse.tobytes())
    assert len(set(results)) == 1


def test_token_mode_decode_is_prefill(cpu):
    """One position, one set of bits: whole prefill, chunks of any length, decode."""
    spec = case_of().spec
    case = testing.make_case(spec, [150], [150], seed=6)
    whole = testing.run_batch(case, testing.lay_out(case), cpu, deterministic="token")
    for begin, end in ((0, 1), (0, 20), (77, 78), (100, 117), (149, 150)):
        part = replace(case, q=(case.q[0][begin:end],), k=(case.k[0][:end],), v=(case.v[0][:end],))
        got = testing.run_batch(part, testing.lay_out(part), cpu, deterministic="token")
        testing.same(
            testing.Result(out=whole.out[begin:end], lse=whole.lse[begin:end]), got, f"chunk {begin}:{end}"
        )
