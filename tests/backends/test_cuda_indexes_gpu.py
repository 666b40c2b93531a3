# SPDX-License-Identifier: Apache-2.0
"""Every kind of index on a GPU: float64, and bit for bit between forms; bound arrays; pools past 32 bits; hooks in the merge."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.testing.device import execute

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from gpu_arrays import World, spec, to_host
from test_run import KV_HEADS, SIZE, Batch, kinds

f, v = at.formats, at.variants
pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=("nvrtc", "nvcc"))
def cuda(request):
    reasons = at.backends.status(spec(), device="cuda")[request.param]
    assert not reasons, reasons
    return request.param


@pytest.fixture(params=[(1, 1, 1, 1), (3, 1, 8, 2), (0, 40, 1, 5)], ids=["decode", "mixed", "prefill"])
def batch(request):
    b = Batch(np.random.default_rng(), request.param)
    b.q, b.k, b.v = (x.astype(ml_dtypes.bfloat16) for x in (b.q, b.k, b.v))
    return b


def attention(cuda, b, variant, **changes):
    s = at.AttentionSpec(
        num_qo_heads=b.q.shape[1],
        num_kv_heads=KV_HEADS,
        head_dim=b.q.shape[2],
        q_dtype="bfloat16",
        variant=variant,
    )
    return at.Attention(s, backend=cuda, device="cuda", **changes)


def run(attn, index, q, kv, **args):
    plan = attn.plan(index)
    out = np.full(q.shape, np.nan, q.dtype)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    execute(attn, q, kv, out=out, lse=lse, **args)
    return plan, testing.Result(out=out, lse=lse)


def test_every_builder(cuda, batch):
    attns = [attention(cuda, batch, variant) for variant in (v.causal(), v.full())]
    for name, index in kinds(batch):
        for attn in attns:
            plan, got = run(attn, index, batch.q, (batch.k, batch.v))
            try:
                testing.check(plan, batch.q, (batch.k, batch.v), got.out, got.lse)
            except AssertionError as error:
                raise AssertionError(f"{name}, {attn.spec.composed!r}: {error}") from None


def test_forms_of_one_index_have_the_same_bits(cuda, batch):
    b = batch
    attn = attention(cuda, b, v.causal())
    kv = (b.k, b.v)
    want = run(attn, b.flat, b.q, kv)[1]
    prefix = f.paged([0, b.num_qo], [0, 20], b.lists[0][:20], [20 * SIZE], SIZE)
    rest = [ids[20:] for ids in b.lists]
    indptr = np.cumsum([0, *map(len, rest)])
    own = f.paged(b.qo_indptr, indptr, np.concatenate(rest), b.kv_lens - 20 * SIZE, SIZE)
    slots = [
        (ids[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:k]
        for ids, k in zip(b.lists, b.kv_lens, strict=True)
    ]
    starts = np.cumsum([0, *b.kv_lens])
    masks = [np.tri(q, k, k - q, dtype=bool) for q, k in zip(b.qo_lens, b.kv_lens, strict=True)]
    forms = {
        "share": f.share(b.flat, 1),
        "share of two parts": f.share(b.flat, 1, max_parts=2),
        "cascade": f.shared_prefix(prefix, own),
        "page size 1": f.paged(b.qo_indptr, starts, np.concatenate(slots), b.kv_lens, 1),
        "a chain of drafts": f.tree(b.flat, b.chains()),
        "a chain of drafts, shared": f.tree(f.share(b.flat), b.chains()),
        "a causal mask": f.tree(b.flat, mask=masks),
    }
    for name, index in forms.items():
        testing.same(want, run(attn, index, b.q, kv)[1], name)
    parents = np.concatenate([b.rng.integers(-1, np.arange(n)) for n in b.qo_lens])
    drafts, whole = f.tree(b.flat, parents), attention(cuda, b, v.full())
    apart = run(whole, replace(drafts, in_line=None), b.q, kv)[1]
    testing.same(apart, run(whole, drafts, b.q, kv)[1], "drafts in line")
    ragged = tuple(x.reshape(-1, KV_HEADS, x.shape[-1])[np.concatenate(slots)] for x in kv)
    testing.same(want, run(attn, f.ragged(b.qo_indptr, starts), b.q, ragged)[1], "ragged")


VARIANTS = {
    "causal": (v.causal(),),
    "window": (v.causal(), v.sliding_window(20)),
    "rope alibi": (v.rope(64), v.causal(), v.alibi()),
    "sinks": (v.causal(), v.sink_logits(0.25)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_true_lengths_on_the_device(cuda, name):
    """Runs under many true lengths, one plan for the bounds: the bits of the exact plans."""
    world = World(spec(variant=VARIANTS[name]))
    most, qo = [900, 300, 40, 7, 3000], [1, 3, 2, 1, 1]
    lists = world.lists(most)
    ids, indptr = np.concatenate(lists), np.cumsum([0, *map(len, lists)])
    qo_indptr = np.cumsum([0, *qo])
    true = torch.tensor(most, dtype=torch.int32, device="cuda")
    attn = at.Attention(world.spec, backend=cuda, device="cuda")
    attn.plan(f.paged(qo_indptr, indptr, ids, true, 16, max_kv_lens=most))
    q = world.gpu_q[:8]
    for lens in (most, [899, 258, 39, 1, 2049], [300, 3, 2, 0, 1], [1, 0, 1, 7, 2048], [513, 255, 0, 3, 700]):
        true.copy_(torch.tensor(lens))
        out, lse = attn.run(q, world.gpu_kv, return_lse=True)
        short = [x[: -(-n // 16)] for x, n in zip(lists, lens, strict=True)]
        exact = f.paged(qo_indptr, np.cumsum([0, *map(len, short)]), np.concatenate(short), lens, 16)
        want = world.fresh(cuda, exact)
        testing.same(
            want,
            testing.Result(out=to_host(out), lse=to_host(lse)),
            f"lengths {lens} under a plan for {most}:",
        )


def test_page_ids_on_the_device(cuda):
    """One plan; the ids change between runs, and ids outside the pool are holes."""
    world = World(spec())
    lens = [700, 30, 1]
    lists = world.lists(lens)
    indptr = np.cumsum([0, *map(len, lists)])
    ids = torch.zeros(int(indptr[-1]), dtype=torch.int32, device="cuda")
    attn = at.Attention(world.spec, backend=cuda, device="cuda")
    attn.plan(f.paged([0, 1, 3, 4], indptr, ids, lens, 16))
    q = world.gpu_q[:4]
    for _ in range(3):
        now = np.concatenate(world.lists(lens))
        ids.copy_(torch.from_numpy(now))
        out, lse = attn.run(q, world.gpu_kv, return_lse=True)
        want = world.fresh(cuda, f.paged([0, 1, 3, 4], indptr, now, lens, 16))
        testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), "other pages")
    holes = now.copy()
    holes[[2, 7, 11]] = -1
    want = world.fresh(cuda, f.paged([0, 1, 3, 4], indptr, holes, lens, 16))
    for bad in (world.pages, 1 << 20, (1 << 31) - 1, -7, -(1 << 31)):
        holes[[2, 7, 11]] = bad
        ids.copy_(torch.from_numpy(holes))
        out, lse = attn.run(q, world.gpu_kv, return_lse=True)
        testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), f"page id {bad}")


def test_masks_on_the_device(cuda):
    world = World(spec(variant=v.custom_mask()))
    flat = world.index([3, 5], [400, 70])
    rng = np.random.default_rng(5)

    def masks():
        return [rng.random((q, k)) < 0.5 for q, k in ((3, 400), (5, 70))]

    first = f.tree(flat, mask=masks())
    bits = torch.zeros(len(first.mask), dtype=torch.uint8, device="cuda")
    attn = at.Attention(world.spec, backend=cuda, device="cuda")
    features = replace(first.features, bound_mask=True)
    attn.plan(replace(first, mask=bits, features=features))
    for _ in range(3):
        index = f.tree(flat, mask=masks())
        bits.copy_(torch.from_numpy(index.mask.copy()))
        out, lse = attn.run(world.gpu_q[:8], world.gpu_kv, return_lse=True)
        testing.same(
            world.fresh(cuda, index), testing.Result(out=to_host(out), lse=to_host(lse)), "other masks"
        )


def test_hooks_that_read_the_request_where_a_row_is_finished(cuda):
    """Output hook and sink by request and position: in attend, and in the merge of cut and of empty rows."""

    @at.variants.output
    def shifted(ctx, d, o, *, by):
        return o + by[ctx.request] * (ctx.qo_pos + 1) + 0.001 * ctx.kv_len

    s = spec(variant=(v.causal(), shifted))
    world = World(s)
    by = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    plain = World(spec())
    qo, kv = [1, 2, 1, 1], [6000, 40, 0, 4000]
    index = world.index(qo, kv)
    cut = at.Attention(s, backend=cuda, device="cuda")
    plan = cut.plan(index)
    assert len(plan.merge), "nothing is cut: the test shows nothing"
    out = cut.run(world.gpu_q[:5], world.gpu_kv, by=torch.from_numpy(by).cuda())
    base = at.Attention(plain.spec, backend=cuda, device="cuda")
    base.plan(index)
    want = base.run(world.gpu_q[:5], world.gpu_kv).float()
    request, position = np.repeat(np.arange(4), qo), np.array([5999, 38, 39, -1, 3999])
    add = by[request] * (position + 1) + 0.001 * np.array(kv)[request]
    expected = (want + torch.from_numpy(add.astype(np.float32)).cuda()[:, None, None]).cpu()
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2**-7, atol=0.02)


def test_a_pool_past_32_bits(cuda):
    """Only pages just past 2**31 elements live; a 32-bit product reads page 0 or faults."""
    size, heads, dim = 16, 2, 64
    s = spec(num_qo_heads=2, num_kv_heads=heads, kv_dtype="float8_e4m3fn")
    first = (1 << 31) // (size * heads * dim)
    kv = [
        torch.zeros(first + 3, size, heads, dim, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
        for _ in "kv"
    ]
    for x in kv:
        x[first:] = torch.randn(3, size, heads, dim, device="cuda").to(torch.float8_e4m3fn)
    q = torch.randn(2, 2, dim, device="cuda", dtype=torch.bfloat16)
    attn = at.Attention(s, backend=cuda, device="cuda")
    results = []
    for ids, caches in (([first + 1, first, first + 2], kv), ([1, 0, 2], [x[first:].clone() for x in kv])):
        plan = attn.plan(f.paged([0, 2], [0, 3], ids, [40], size))
        out, lse = attn.run(q, tuple(caches), return_lse=True)
        results.append(testing.Result(out=to_host(out), lse=to_host(lse)))
    testing.check(plan, to_host(q), tuple(to_host(x) for x in caches), results[1].out, results[1].lse)
    testing.same(*results, "a pool past 32-bit offsets")
    rows = torch.randn(1, heads, dim, device="cuda", dtype=torch.bfloat16)
    attn.append(rows, rows, tuple(kv), slots=[(first + 2) * size + 15])
    attn.copy_pages(tuple(kv), [first + 2], [first])
    for x in kv:
        assert torch.equal(x[first + 2, 15].float(), rows[0].to(torch.float8_e4m3fn).float())
        assert torch.equal(x[first].float(), x[first + 2].float())
