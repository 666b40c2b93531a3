# SPDX-License-Identifier: Apache-2.0
"""The bitwise oracles on every backend of the CPU: what may change nothing changes no bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.scheduler.verify import verify_plan

v = at.variants

SPECS = {
    "float32 causal": {"variant": v.causal(), "q_dtype": "float32"},
    "bfloat16 window softcap": {
        "variant": (v.causal(), v.sliding_window(37), v.softcap(3.0)),
        "q_dtype": "bfloat16",
        "kv_layout": "HND",
    },
    "float16 sigmoid": {"variant": (v.causal(), v.sigmoid()), "q_dtype": "float16"},
    "float32 rope sinks": {"variant": (v.rope(16), v.causal(), v.sink_logits(0.5)), "q_dtype": "float32"},
}


def make(name: str, backend: str) -> testing.Case:
    # The reference computes in float64; a result in float32 would round most differences away.
    out = {"out_dtype": "float64"} if backend == "reference" else {}
    spec = at.AttentionSpec(num_qo_heads=6, num_kv_heads=2, head_dim=24, head_dim_vo=16, **SPECS[name], **out)
    # decode over many leaves, prefill, a whole prompt, empty in both ways, one key, more queries than keys
    qo, kv = [1, 30, 70, 0, 3, 1, 5], [1400, 77, 70, 9, 0, 1, 2]
    return testing.make_case(spec, qo, kv)


@pytest.fixture(params=SPECS)
def case(request, backend):
    return make(request.param, backend)


def test_poison(case, backend):
    testing.poison(case, backend)


def test_placement(case, backend):
    testing.placement(case, backend)


def test_layout(case, backend):
    testing.layout_invariance(case, backend, page_size=5)


def test_capacity(case, backend):
    testing.capacity(case, backend)


def test_workers(case, backend):
    testing.workers(case, backend)


def test_batch(case, backend):
    testing.batch_invariance(case, backend)


def test_page_size(case, backend):
    testing.page_size_invariance(case, backend)


def test_sentinel(case, backend):
    testing.sentinel(case, backend)


@pytest.mark.parametrize("other", [[0], [5, 2, 0, 1, 3, 4, 6, 1], [4]])
def test_history(case, backend, other):
    testing.history(case, testing.take(case, other), backend)


def shared_case(
    prefix: int, own: list[int], qo: list[int], seed: int = 1, out_dtype: str = "float32"
) -> testing.Case:
    """Requests whose first ``prefix`` keys are the same."""
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", variant=v.causal()
    )
    case = testing.make_case(spec, qo, [prefix + n for n in own], seed=seed)
    for r in range(1, len(own)):
        case.k[r][:prefix], case.v[r][:prefix] = case.k[0][:prefix], case.v[0][:prefix]
    return case


@pytest.mark.parametrize("prefix", [64, 320, 1000])
@pytest.mark.parametrize("page_size", [1, 16])
def test_shared_prefix_is_flat(backend, prefix, page_size):
    """The prefix stored once and read by all at once, against every request with pages of its own."""
    out_dtype = "float64" if backend == "reference" else "float32"
    case = shared_case(prefix, [3, 200, 17], [1, 2, 1], out_dtype=out_dtype)
    flat = testing.run_batch(case, testing.lay_out(case, page_size=page_size), backend)
    batch, index = _stored_once(case, prefix, page_size)
    alone = testing.run_batch(case, batch, backend)
    testing.same(flat, alone, "one copy of the prefix")
    shared = formats.share(index, min_tokens=16)
    assert len(shared.parts) > 1, "nothing was shared: the test says nothing"
    both = testing.run_batch(case, testing.Batch(index=shared, q=batch.q, kv=batch.kv, params={}), backend)
    testing.same(flat, both, "reading the prefix once")


def _stored_once(case: testing.Case, prefix: int, size: int) -> tuple[testing.Batch, at.formats.BlockSparse]:
    """All requests list the pages of request 0's prefix, as far as whole pages go."""
    batch = testing.lay_out(case, page_size=size)
    index = batch.index
    indices, whole = index.indices.copy(), prefix // size
    for r in range(1, len(case.q)):
        start = index.indptr[r]
        for x in batch.kv:
            x[indices[start : start + whole]] = np.nan  # the copies are dead now
        indices[start : start + whole] = indices[:whole]
    lens = case.kv_lens
    qo = np.concatenate([[0], np.cumsum(case.qo_lens)])
    stored = formats.paged(qo, index.indptr, indices, lens, size)
    return testing.Batch(index=stored, q=batch.q, kv=batch.kv, params={}), stored


def test_token_mode_ignores_qo_len(backend):
    """Prefill in one go, in chunks, and token by token give a position the same bits."""
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="bfloat16", variant=v.causal()
    )
    case = testing.make_case(spec, [90], [300], seed=2)
    whole = testing.run_batch(case, testing.lay_out(case), backend, deterministic="token")
    for begin, end in ((0, 1), (1, 33), (33, 90)):
        kv = 300 - 90 + end
        chunk = testing.Case(spec=spec, q=(case.q[0][begin:end],), k=(case.k[0][:kv],), v=(case.v[0][:kv],))
        part = testing.run_batch(chunk, testing.lay_out(chunk), backend, deterministic="token")
        want = testing.Result(out=whole.out[begin:end], lse=whole.lse[begin:end])
        testing.same(want, part, f"queries {begin}..{end} alone")


def test_keys_past_a_row_do_not_reach_it(backend):
    """batch mode: a query's bits do not change when later keys of its request do."""
    case = shared_case(40, [8], [8])
    first = testing.run_batch(case, testing.lay_out(case), backend)
    case.k[0][45:], case.v[0][45:] = np.inf, np.nan
    second = testing.run_batch(case, testing.lay_out(case), backend)
    pick = slice(0, 5)
    testing.same(
        testing.Result(out=first.out[pick], lse=first.lse[pick]),
        testing.Result(out=second.out[pick], lse=second.lse[pick]),
        "what lies past a row",
    )


def test_drafts_in_line_have_the_bits_of_drafts_apart(backend):
    """A variant without positions reads a tree's keys where they lie; with one that asks, drafts are a part of tokens."""
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="bfloat16", variant=v.custom_mask()
    )
    rng = np.random.default_rng()
    case = testing.make_case(spec, [1, 40, 7, 3], [300, 1400, 7, 90])
    batch = testing.lay_out(case, page_size=16)
    parents = [int(rng.integers(-1, i)) for n in case.qo_lens for i in range(n)]
    drafts = formats.tree(batch.index, parents)
    got = [testing.run_batch(case, replace(batch, index=drafts), backend)]
    got.append(testing.run_batch(case, replace(batch, index=replace(drafts, in_line=None)), backend))
    testing.same(*got, "drafts apart")
    traits = at.Traits.of("h200")
    for variant, parts in ((v.custom_mask(), 1), ((v.causal(), v.custom_mask()), 2)):
        plan = at.make_plan(replace(spec, variant=variant), drafts, traits)
        verify_plan(plan)
        assert all((part is drafts.in_line[0]) == (parts == 1) for part in plan.parts[:1])
        plan = at.make_plan(replace(spec, variant=variant), replace(drafts, in_line=None), traits)
        verify_plan(plan)
