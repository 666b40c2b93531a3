# SPDX-License-Identifier: Apache-2.0
"""Every kind of index, bound arrays and hooks of the merge by the emulated CUDA kernels (emulated_cuda.py), no GPU needed."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import testing

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from test_run import KV_HEADS, SIZE, Batch, kinds

emulated_cuda = pytest.importorskip("emulated_cuda")
EmulatedCuda = emulated_cuda.EmulatedCuda
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

f, v = at.formats, at.variants


@pytest.fixture(scope="module")
def cuda():
    """Few workers, so that rows are cut; each index picks its kernel as on a GPU."""
    return EmulatedCuda(multiprocessors=3)


@pytest.fixture(params=[(1, 1, 1, 1), (3, 1, 8, 2), (0, 20, 1, 5)], ids=["decode", "mixed", "prefill"])
def batch(request):
    b = Batch(np.random.default_rng(), request.param)
    b.q, b.k, b.v = (x.astype(ml_dtypes.bfloat16) for x in (b.q, b.k, b.v))
    return b


def attention(cuda, b, variant, **changes):
    s = at.AttentionSpec(
        out_dtype="float32",
        num_qo_heads=b.q.shape[1],
        num_kv_heads=KV_HEADS,
        head_dim=b.q.shape[2],
        q_dtype="bfloat16",
        variant=variant,
    )
    return at.Attention(s, backend=cuda, device="cpu", **changes)


def run(attn, q, kv, **args):
    out = np.full(q.shape, np.nan, np.float32 if attn.spec.out_dtype == "float32" else q.dtype)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    attn.run(q, kv, out=out, lse=lse, **args)
    return testing.Result(out=out, lse=lse)


def test_every_builder(cuda, batch):
    attn = attention(cuda, batch, v.causal())
    for name, index in kinds(batch):
        plan = attn.plan(index)
        got = run(attn, batch.q, (batch.k, batch.v))
        try:
            testing.check(plan, batch.q, (batch.k, batch.v), got.out, got.lse)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("window", [None, 450])
def test_forms_of_one_index_have_the_same_bits(cuda, batch, window):
    """Under a window, too: items then begin inside a tile, elsewhere in each form."""
    b = batch
    attn = attention(cuda, b, v.causal() if window is None else (v.causal(), v.sliding_window(window)))
    kv = (b.k, b.v)
    attn.plan(b.flat)
    want = run(attn, b.q, kv)
    prefix = f.paged([0, b.num_qo], [0, 20], b.lists[0][:20], [20 * SIZE], SIZE)
    rest = [ids[20:] for ids in b.lists]
    indptr = np.cumsum([0, *map(len, rest)])
    own = f.paged(b.qo_indptr, indptr, np.concatenate(rest), b.kv_lens - 20 * SIZE, SIZE)
    masks = [np.tri(q, k, k - q, dtype=bool) for q, k in zip(b.qo_lens, b.kv_lens, strict=True)]
    forms = {
        "share": f.share(b.flat, 1),
        "cascade": f.shared_prefix(prefix, own),
        "a chain of drafts, shared": f.tree(f.share(b.flat), b.chains()),
        "a causal mask": f.tree(b.flat, mask=masks),
    }
    for name, index in forms.items():
        attn.plan(index)
        testing.same(want, run(attn, b.q, kv), name)
    parents = np.concatenate([b.rng.integers(-1, np.arange(n)) for n in b.qo_lens])
    drafts, whole = f.tree(b.flat, parents), attention(cuda, b, v.full())
    whole.plan(replace(drafts, in_line=None))
    apart = run(whole, b.q, kv)
    whole.plan(drafts)
    testing.same(apart, run(whole, b.q, kv), "drafts in line")


def bind(index, **arrays):
    """The index with kv_lens, indices or mask bound to given arrays."""
    features = {f"bound_{name}": True for name in arrays}
    changes = {name: arrays[name] for name in ("indices", "mask") if name in arrays}
    if "kv_lens" in arrays:
        changes["requests"] = replace(index.requests, bound_kv_lens=arrays["kv_lens"])
    return replace(index, **changes, features=replace(index.features, **features), max_block=-1)


VARIANTS = {
    "causal": (v.causal(),),
    "window": (v.causal(), v.sliding_window(20)),
    "rope alibi": (v.rope(16), v.causal(), v.alibi()),
    "sinks": (v.causal(), v.sink_logits(0.25)),
}


def small(variant):
    return at.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="bfloat16", variant=variant)


@pytest.mark.parametrize("name", VARIANTS)
def test_true_lengths_are_read_by_every_run(cuda, name):
    """One plan for the upper bounds; runs under many true lengths have the bits of the exact plans."""
    s, most, qo = small(VARIANTS[name]), [900, 300, 40, 7], [1, 3, 2, 1]
    case = testing.make_case(s, qo, most, seed=1)
    batch = testing.lay_out(case, page_size=8)
    true = np.array(most, np.int32)
    attn, exact = (at.Attention(s, backend=cuda, device="cpu") for _ in range(2))
    attn.plan(bind(batch.index, kv_lens=true))
    for lens in (most, [899, 258, 39, 1], [300, 3, 2, 0], [1, 0, 1, 7], [513, 255, 0, 3], [0, 0, 40, 7]):
        true[:] = lens
        got = run(attn, batch.q, batch.kv)
        cut = {side: tuple(x[:n] for x, n in zip(getattr(case, side), lens, strict=True)) for side in "kv"}
        short = replace(case, **cut)
        want = testing.run_batch(short, testing.lay_out(short, page_size=8), cuda, attn=exact)
        testing.same(want, got, f"lengths {lens} under a plan for {most}:")


def test_ids_outside_the_pool_are_never_read(cuda):
    s = small(v.causal())
    batch = testing.lay_out(testing.make_case(s, [1], [300], seed=3))
    ids = batch.index.indices.copy()
    attn = at.Attention(s, backend=cuda, device="cpu")
    attn.plan(bind(batch.index, indices=ids))
    ids[[2, 7, 11]] = -1
    holes = run(attn, batch.q, batch.kv)
    for bad in (len(batch.kv[0]), 1 << 20, (1 << 31) - 1, -7, -(1 << 31)):
        ids[[2, 7, 11]] = bad
        testing.same(holes, run(attn, batch.q, batch.kv), f"block id {bad}")


def test_masks_are_read_by_every_run(cuda):
    s = small(v.custom_mask())
    batch = testing.lay_out(testing.make_case(s, [3], [20], seed=4), page_size=4)
    rng = np.random.default_rng(5)
    masks = [rng.random((3, 20)) < 0.5 for _ in range(3)]
    bits = f.tree(batch.index, mask=[masks[0]]).mask.copy()
    attn = at.Attention(s, backend=cuda, device="cpu")
    plan = attn.plan(bind(f.tree(batch.index, mask=[masks[0]]), mask=bits))
    for mask in masks:
        bits[:] = f.tree(batch.index, mask=[mask]).mask
        got = run(attn, batch.q, batch.kv)
        testing.check(plan, batch.q, batch.kv, got.out, got.lse)


def test_hooks_that_read_the_request_where_a_row_is_finished(cuda):
    """Output hook by request, position and length: in attend, in the merge of cut rows, in rows without a key, in padding."""

    @at.variants.output
    def shifted(ctx, d, o, *, by):
        return o + by[ctx.request] * (ctx.qo_pos + 1) + ctx.kv_len

    by, qo, kv = np.array([1.0, -2.0, 0.5, 3.0], np.float32), [1, 2, 1, 1], [1200, 40, 0, 700]
    s = small((v.causal(), shifted))
    case = testing.make_case(s, qo, kv, by=by)
    batch = testing.lay_out(case)
    shared = f.share(batch.index, 1)
    attn = at.Attention(s, backend=cuda, device="cpu")
    plain = at.Attention(small(v.causal()), backend=cuda, device="cpu")
    request, position = np.repeat(np.arange(4), qo), np.array([1199, 38, 39, -1, 699])
    for index in (batch.index, shared):
        assert len(attn.plan(index, pad_to=7).merge), "nothing is merged: the test shows nothing"
        plain.plan(index, pad_to=7)
        q = np.concatenate([batch.q, np.zeros_like(batch.q[:2])])
        got, want = run(attn, q, batch.kv, by=by).out[:5], run(plain, q, batch.kv).out[:5]
        add = by[request] * (position + 1) + np.array(kv)[request]
        expected = want.astype(np.float32) + add[:, None, None]
        np.testing.assert_allclose(got.astype(np.float32), expected, rtol=2**-7, atol=0.02)


@pytest.mark.parametrize("keys", [300, 700])
def test_lists_for_all_heads_beside_lists_per_head(keys):
    """A row whose heads have merge rows of their own, while one item holds several of them: each head's states are its own."""
    rng = np.random.default_rng(keys)
    per_head = f.pages_per_head([0, 1], rng.permutation(8).reshape(1, 2, 4), [[3, 4]], [60], 16)
    pages = -(-keys // 16)
    prefix = f.paged([0, 1], [0, pages], 8 + np.arange(pages), [keys], 16)
    own = f.paged([0, 1], [0, 4], 8 + pages + np.arange(4), [50], 16)
    index = f.concat(per_head, f.shared_prefix(prefix, own))
    spec = at.AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64, q_dtype="bfloat16")
    q = rng.standard_normal((2, 8, 64)).astype(ml_dtypes.bfloat16)
    k, value = (rng.standard_normal((12 + pages, 16, 2, 64)).astype(ml_dtypes.bfloat16) for _ in "kv")
    backend = EmulatedCuda(multiprocessors=1)
    attn = at.Attention(spec, backend=backend, device="cpu", scheduler="round_robin")  # which splits no heads
    work = attn.plan(index).work
    assert ((work["head_end"] - work["head_begin"] > 1) & (work["slot"] >= 0)).any()
    for _ in range(6):  # whose states are the last ones is chance
        got = run(attn, q, (k, value))
        for head in range(8):
            keys_of, values = index.gather((k, value), 1, head // 4)
            weights = np.exp(keys_of.astype(np.float64) @ q[1, head].astype(np.float64) / 8)
            want = weights @ values.astype(np.float64) / weights.sum()
            np.testing.assert_allclose(got.out[1, head].astype(np.float64), want, rtol=0.02, atol=0.01)
