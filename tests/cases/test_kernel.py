# SPDX-License-Identifier: Apache-2.0
"""Hard cases of the kernels: empty sets, masked garbage, strides, offsets past 32 bits, heads and dims of every size."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.dtypes import as_dtype

v = at.variants


def merged(kit, backend, va, la, vb, lb, in_place=None):
    """merge_state where the backend merges; ``in_place``: 0 or 1, the part whose memory the result takes."""
    arrays = [x.copy() for x in (va, la, vb, lb)]
    out, out_lse = np.full_like(arrays[0], np.nan), np.full_like(arrays[1], np.nan)
    if in_place is not None:
        out, out_lse = arrays[2 * in_place : 2 * in_place + 2]
    views, back = kit.device_arrays(backend, *arrays, out, out_lse)
    at.merge_state(*views[:4], out=views[4], out_lse=views[5])
    back(out)
    back(out_lse)
    return out, out_lse


def bits(x):
    return np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("in_place", [None, 0, 1])
def test_c01_two_empty_partial_states(backend, kit, in_place):
    nothing, never = np.zeros((1, 1, 64), np.float16), np.full((1, 1), -np.inf, np.float32)
    out, lse = merged(kit, backend, nothing, never, nothing, never, in_place)
    assert not out.view(np.uint16).any() and np.isneginf(lse).all()
    va, vb, la, lb = kit.draw(1, 40, 3, 8), kit.draw(2, 40, 3, 8), kit.draw(3, 40, 3), kit.draw(4, 40, 3)
    dead = np.arange(40) % 4
    la[dead == 0], lb[dead == 0] = -np.inf, -np.inf  # a quarter of the rows: both parts empty
    lb[dead == 1], vb[dead == 1] = -np.inf, np.nan
    la[dead == 2], va[dead == 2] = -np.inf, np.nan
    out, lse = merged(kit, backend, va, la, vb, lb, in_place)
    assert not np.isnan(out).any() and not np.isnan(lse).any()
    assert not out[dead == 0].any() and np.isneginf(lse[dead == 0]).all()
    for rows, x, s in ((dead == 1, va, la), (dead == 2, vb, lb)):
        assert bits(out[rows]) == bits(x[rows]) and bits(lse[rows]) == bits(s[rows])


@pytest.mark.parametrize("dead", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("shared", [False, True])
def test_c02_nan_in_unused_slots_of_the_last_page(backend, kit, dead, shared):
    changes = {"shared_kv": True, "sm_scale": 0.3, "head_dim_vo": 8} if shared else {}
    spec = kit.spec(backend, **changes)
    index = formats.paged([0, 2, 3], [0, 4, 5], [3, 0, 2, 5, 1], [13, 3], 4)
    q, k, values = kit.draw(1, 3, 4, 16), kit.draw(2, 6, 4, 2, 16), kit.draw(3, 6, 4, 2, 16)
    live = np.zeros((6, 4), bool)
    for page, count in ((3, 4), (0, 4), (2, 4), (5, 1), (1, 3)):
        live[page, :count] = True
    results = []
    for fill in (0.0, dead):
        with np.errstate(over="ignore"):
            caches = [kit.cast(np.where(live[..., None, None], x, fill), spec.kv_dtype) for x in (k, values)]
        results.append(kit.right(backend, spec, index, q, caches[0] if shared else tuple(caches)))
    testing.same(*results, f"{dead} in dead slots")


def test_c02_padded_batches(backend, kit):
    """Lengths far below a capacity of 128, the rest NaN."""
    spec = kit.spec(backend, v.full())
    case = testing.make_case(spec, [1, 1, 1, 1], [32, 64, 96, 48], seed=1)
    device = "cuda" if kit.cuda(backend) else "cpu"
    results = [
        testing.run_batch(case, testing.lay_out(case, page_size=128, fill=fill), backend, device=device)
        for fill in (0.0, math.nan)
    ]
    testing.same(*results, "NaN past the lengths")


@pytest.mark.parametrize("workers", [None, 1])
def test_c03_a_request_without_keys_is_written(backend, kit, workers):
    spec = kit.spec(backend)
    limits = None if workers is None else at.Limits(4, 8, 99, max_workers=workers)
    for qo, lens in (([0, 1, 2], [0, 7]), ([0, 3, 4], [0, 7]), ([0, 1, 2], [7, 0]), ([0, 2, 4], [0, 0])):
        index = formats.block_table(qo, [[1, 0], [2, 3]], lens, 4)
        attn = kit.attention(backend, spec, limits=limits)
        result = kit.right(
            backend, spec, index, kit.draw(1, qo[-1], 4, 16), (kit.draw(2, 4, 4, 2, 16),) * 2, attn=attn
        )
        empty = np.repeat(np.array(lens) == 0, np.diff(qo))
        assert not result.out[empty].any() and np.isneginf(result.lse[empty]).all()


def test_c03_chunks_that_run_out(backend, kit):
    """Prefixes of 10 and 3 keys in chunks of 4: the second chunk has 4 and 0 keys."""
    spec = kit.spec(backend, v.full())
    q, k, values = kit.draw(1, 2, 4, 16), kit.draw(2, 13, 2, 16), kit.draw(3, 13, 2, 16)
    parts = []
    for begin in (0, 4, 8):
        lens = [max(0, min(4, n - begin)) for n in (10, 3)]
        base = [begin, 10 + begin]
        slots = np.concatenate([np.arange(b, b + n) for b, n in zip(base, lens, strict=True)]).astype(int)
        index = formats.paged([0, 1, 2], np.r_[0, np.cumsum(lens)], slots, lens, 1)
        parts.append(kit.right(backend, spec, index, q, (k, values)))
    assert np.isneginf(parts[1].lse[1]).all() and not parts[1].out[1].any()
    out, _ = at.merge_states(
        np.stack([p.out.astype(np.float32) for p in parts]), np.stack([p.lse for p in parts])
    )
    whole = kit.right(backend, spec, formats.ragged([0, 1, 2], [0, 10, 13]), q, (k, values))
    kit.close(out, whole.out.astype(np.float64), backend)


def test_c04_causal_with_more_queries_than_keys(backend, kit):
    spec = kit.spec(backend, num_qo_heads=1, num_kv_heads=1, head_dim=8)
    q, k, values = kit.draw(1, 5, 1, 8), kit.draw(2, 2, 1, 8), kit.draw(3, 2, 1, 8)
    result = kit.right(backend, spec, formats.ragged([0, 5], [0, 2]), q, (k, values))
    assert not result.out[:3].any() and np.isneginf(result.lse[:3]).all()
    kit.close(result.out[3], values[0], backend)
    assert np.isfinite(result.lse[3:]).all()
    for qo, kv in ((130, 2), (3, 0), (1056, 5)):
        result = kit.right(
            backend,
            spec,
            formats.ragged([0, qo], [0, kv]),
            kit.draw(4, qo, 1, 8),
            (kit.draw(5, kv, 1, 8),) * 2,
        )
        assert np.isneginf(result.lse[: qo - kv]).all() and np.isfinite(result.lse[qo - kv :]).all()


def test_c06_lse_is_natural(backend, kit):
    spec = kit.spec(backend, v.full(), num_qo_heads=1, num_kv_heads=1, head_dim=8)
    k = np.ones((10, 1, 8), np.float32)
    values = np.r_[np.ones(8), np.zeros(2)].astype(np.float32)[:, None, None] * np.ones((1, 1, 8), np.float32)
    q = np.zeros((1, 1, 8), np.float32)
    whole = kit.right(backend, spec, formats.ragged([0, 1], [0, 10]), q, (k, values))
    kit.close(whole.out, 0.8, backend)
    np.testing.assert_allclose(whole.lse, 2.302585, atol=1e-6)
    a, b = (
        kit.run(backend, spec, formats.ragged([0, 1], [0, n]), q, (k[:n], x))
        for n, x in ((8, values[:8]), (2, values[8:]))
    )
    out, lse = merged(kit, backend, a.out, a.lse, b.out, b.lse)
    kit.close(out, 0.8, backend)  # base 2 numbers in a merge of base e: 0.8808; the reverse: 0.7233
    np.testing.assert_allclose(lse, 2.302585, atol=1e-6)


@v.mask
def only_515_to_575(ctx):
    return (ctx.kv_pos >= 515) & (ctx.kv_pos <= 575)


@v.mask
def ends_only(ctx):
    return (ctx.kv_pos < 3) | (ctx.kv_pos >= 690)


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("name", ["first tiles", "middle tiles", "window"])
def test_c09_tiles_without_a_visible_key(backend, kit, name, workers):
    variant, kv = {
        "first tiles": (only_515_to_575, 700),
        "middle tiles": (ends_only, 700),
        "window": (v.sliding_window(10), 1536),
    }[name]
    spec = kit.spec(backend, v.causal(), variant, head_dim=8)
    for qo in (1, 9):
        attn = kit.attention(backend, spec, limits=at.Limits(1, 9, 99, max_workers=workers))
        result = kit.right(
            backend,
            spec,
            formats.ragged([0, qo], [0, kv]),
            kit.draw(1, qo, 4, 8),
            (kit.draw(2, kv, 2, 8),) * 2,
            attn=attn,
        )
        assert np.isfinite(result.lse).all()


@pytest.mark.parametrize("power", [31, 32])
def test_c19_pages_past_32_bits_of_elements(host, kit, power):
    """A latent cache, page 32 x 512: its last page lies past 2**power elements, and nothing else lives."""
    size, dim = 32, 512
    spec = kit.spec(
        host, v.full(), num_kv_heads=1, head_dim=dim, head_dim_vo=64, shared_kv=True, sm_scale=0.05,
        q_dtype="float32", kv_dtype="float8_e4m3fn",
    )  # fmt: skip
    page = (1 << power) // (size * dim)
    cache = np.zeros((page + 1, size, 1, dim), np.uint8).view(as_dtype("float8_e4m3fn").numpy)
    cache[page] = kit.draw(1, size, 1, dim).astype(cache.dtype)
    q = kit.draw(2, 1, 4, dim)
    far = kit.run(host, spec, formats.paged([0, 1], [0, 1], [page], [30], size), q, cache)
    near = kit.right(host, spec, formats.paged([0, 1], [0, 1], [0], [30], size), q, cache[page:].copy())
    testing.same(near, far, "a page past 32 bits")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvrtc", "nvcc"])
def test_c19_large_pools_on_a_gpu(name, kit):
    torch = pytest.importorskip("torch")
    size, heads, dim = 16, 8, 128
    spec = kit.spec(name, num_qo_heads=8, num_kv_heads=heads, head_dim=dim)
    page = (1 << 32) // (size * heads * dim)
    cache = torch.zeros((page + 1, size, heads, dim), dtype=torch.float16, device="cuda")
    cache[page] = torch.from_numpy(kit.draw(1, size, heads, dim)).half()
    q = torch.from_numpy(kit.draw(2, 1, 8, dim)).half().cuda()
    attn = kit.attention(name, spec)
    attn.plan(formats.paged([0, 1], [0, 1], [page], [13], size))
    out, lse = attn.run(q, (cache, cache), return_lse=True)
    near = cache[page:].cpu().numpy()
    want = kit.right(
        name, spec, formats.paged([0, 1], [0, 1], [0], [13], size), q.cpu().numpy(), (near, near)
    )
    assert bits(out.cpu().numpy()) == bits(want.out) and bits(lse.cpu().numpy()) == bits(want.lse)


GROUPS = [(24, 8), (40, 8), (24, 4), (28, 4), (64, 4), (71, 1), (64, 1), (32, 32), (12, 1)]


@pytest.mark.parametrize("heads", GROUPS, ids=str)
def test_c23_any_group(backend, kit, heads):
    """Any ratio; K and V as if each head of the cache were repeated for its group (repeat, not tile)."""
    spec = kit.spec(backend, num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=8)
    q, k, values = kit.draw(1, 3, heads[0], 8), kit.draw(2, 9, heads[1], 8), kit.draw(3, 9, heads[1], 8)
    index = formats.ragged([0, 1, 3], [0, 4, 9])
    result = kit.right(backend, spec, index, q, (k, values))
    repeated = kit.spec(backend, num_qo_heads=heads[0], num_kv_heads=heads[0], head_dim=8)
    group = heads[0] // heads[1]
    full = kit.right(backend, repeated, index, q, tuple(np.repeat(x, group, 1) for x in (k, values)))
    kit.close(result.out, full.out.astype(np.float64), backend)


def test_c23_heads_that_do_not_divide(backend, kit):
    with pytest.raises(at.ArgumentError, match="num_qo_heads must be a multiple"):
        kit.spec(backend, num_qo_heads=10, num_kv_heads=4)


@pytest.mark.parametrize("dim", [40, 72, 80, 96, 112, 192, 224, 3, 576])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("builder", ["paged", "ragged"])
def test_c24_any_head_dim_or_an_error(backend, kit, dim, fp8, builder):
    """Right, or a typed error that names head_dim before anything is compiled; never another number."""
    spec = kit.spec(backend, head_dim=dim, kv_dtype="float8_e4m3fn" if fp8 else None)
    case = testing.make_case(spec, [1, 5], [40, 7], seed=dim)
    batch = testing.lay_out(case, builder=builder, page_size=5)
    try:
        attn = kit.attention(backend, spec)
    except at.UnsupportedError as error:
        assert dim % 8 and "head_dim" in str(error)
        return
    result = testing.run_batch(case, batch, backend, attn=attn)
    testing.compare(spec, testing.oracle_answer(spec, batch.index, batch.q, batch.kv), result.out, result.lse)


def test_c34_tree_mask_across_tiles(backend, kit):
    """100 keys before 40 drafts with two children each; siblings never see each other, also in other tiles."""
    spec = kit.spec(backend, num_qo_heads=8, num_kv_heads=1, head_dim=8)
    parents = np.array([(i - 1) // 2 if i else -1 for i in range(40)], np.int32)
    index = formats.tree(formats.ragged([0, 40], [0, 140]), parents)
    q, k, values = kit.draw(1, 40, 8, 8), kit.draw(2, 140, 1, 8), kit.draw(3, 140, 1, 8)
    result = kit.right(backend, spec, index, q, (k, values))
    seen = np.zeros((40, 140), bool)
    seen[:, :100] = True
    for i in range(40):
        node = i
        while node >= 0:
            seen[i, 100 + node] = True
            node = parents[node]
    q, k, values = (kit.cast(x, spec.q_dtype).astype(float) for x in (q, k, values))
    s = np.where(seen[:, None], np.einsum("qhd,kd->qhk", q, k[:, 0]) * 8**-0.5, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("qhk,kd->qhd", p / p.sum(-1, keepdims=True), values[:, 0])
    kit.close(result.out, want, backend) if not kit.cuda(backend) else np.testing.assert_allclose(
        result.out.astype(float), want, atol=4e-3
    )


def test_c60_more_than_65535_of_anything(backend, kit):
    """Requests, rows of one request, and rows of a merge past a 16-bit grid (fewer for the reference, which is Python)."""
    count = 300 if backend == "reference" else 65_537
    spec = kit.spec(backend, num_qo_heads=2, num_kv_heads=1, head_dim=8)
    k = kit.draw(1, count, 1, 8)
    every = np.arange(count + 1)
    result = kit.run(backend, spec, formats.ragged(every, every), kit.draw(2, count, 2, 8), (k, k))
    assert (result.out == kit.cast(k, spec.out_dtype)).all(), "one key each: its V itself"
    one = kit.spec(backend, v.sliding_window(0), num_qo_heads=2, num_kv_heads=1, head_dim=8)
    result = kit.run(backend, one, formats.ragged([0, count], [0, count]), kit.draw(2, count, 2, 8), (k, k))
    assert (result.out == kit.cast(k, spec.out_dtype)).all()
    parts, lses = kit.draw(3, count, 1, 8), np.zeros((count, 1), np.float32)
    out, lse = merged(kit, backend, parts, lses, parts, lses)
    np.testing.assert_allclose(out, parts, atol=1e-6)
    np.testing.assert_allclose(lse, np.log(2), atol=1e-6)


@pytest.mark.parametrize("workers", [1, 4, 40])
def test_c68_one_writer_of_lse(backend, kit, workers):
    """A V wider than any value tile, four times as many workers as blocks: every lse is written, and right."""
    spec = kit.spec(backend, head_dim=16, head_dim_vo=320)
    attn = kit.attention(backend, spec, limits=at.Limits(2, 6, 99, max_workers=workers))
    for qo, kv in (([1, 5], [12, 9]), ([1, 1], [1100, 3])):
        case = testing.make_case(spec, qo, kv, seed=1)
        batch = testing.lay_out(case, builder="ragged")
        result = testing.run_batch(case, batch, backend, attn=attn)
        answer = testing.oracle_answer(spec, batch.index, batch.q, batch.kv)
        testing.compare(spec, answer, result.out, result.lse)


def test_c71_merge_of_other_strides(backend, kit):
    """The prefix's V has a head stride of 192, everything else strides of its own: same bits."""
    va, vb, la, lb = kit.draw(1, 7, 4, 128), kit.draw(2, 7, 4, 128), kit.draw(3, 7, 4), kit.draw(4, 7, 4)
    want, want_lse = merged(kit, backend, va, la, vb, lb)
    wide = np.full((7, 4, 192), np.nan, np.float32)
    wide[..., :128] = va
    turned = vb.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    strided = np.full((7, 12), np.nan, np.float32)
    strided[:, ::3] = la
    out, out_lse = np.full((7, 5, 130), 7, np.float32), np.full((4, 7), 7, np.float32)
    arrays = (wide[..., :128], strided[:, ::3], turned, lb.T.copy().T)
    views, back = kit.device_arrays(backend, *arrays, out[:, :4, :128], out_lse.T)
    at.merge_state(*views[:4], out=views[4], out_lse=views[5])
    back(out)
    back(out_lse)
    assert bits(out[:, :4, :128]) == bits(want) and bits(out_lse.T) == bits(want_lse)
    assert (out[:, 4] == 7).all() and (out[..., 128:] == 7).all(), "memory beside the result was written"


def test_c77_no_limit_on_the_context(backend, kit):
    spec = kit.spec(backend, num_qo_heads=1, num_kv_heads=1, head_dim=8)
    for kv in (16_000, 131_072, 1_000_000)[: 1 if backend == "reference" else 3]:
        k = np.zeros((kv, 1, 8), np.float32)
        values = np.zeros((kv, 1, 8), np.float32)
        values[::2] = 1.0
        result = kit.run(backend, spec, formats.ragged([0, 1], [0, kv]), kit.draw(1, 1, 1, 8), (k, values))
        kit.close(result.out, 0.5, backend)
        np.testing.assert_allclose(result.lse, math.log(kv), rtol=1e-5)


@pytest.mark.parametrize("qo", [1, 2, 4, 8])
def test_c78_window_with_several_rows_and_fp8(backend, kit, qo):
    """q_len 8, 16-bit q, fp8 cache, HND, lengths around the window; and shapes scaled down on the slow backend."""
    small = backend == "reference"
    window, dim, heads = (63, 32, (4, 2)) if small else (1023, 256, (8, 4))
    spec = kit.spec(
        backend, v.causal(), v.sliding_window(window), num_qo_heads=heads[0], num_kv_heads=heads[1],
        head_dim=dim, q_dtype="bfloat16", kv_dtype="float8_e4m3fn", kv_layout="HND",
    )  # fmt: skip
    lens = [window + 1 + d for d in (range(-8, 9) if small else (-8, -1, 0, 1, 8))]
    if not small and qo == 8:
        lens.append(1100)
    case = testing.make_case(spec, [qo] * len(lens), lens, seed=qo)
    batch = testing.lay_out(case, page_size=16)
    attn = kit.attention(backend, spec)
    result = testing.run_batch(case, batch, backend, attn=attn)
    picked = [0, len(lens) - 1] if not small else range(len(lens))
    for r in picked:  # the oracle is slow: the ends of the sweep in full
        one = testing.take(case, [r])
        laid = testing.lay_out(one, builder="ragged")
        answer = testing.oracle_answer(spec, laid.index, laid.q, laid.kv)
        mine = testing.rows_of(result, case, r)
        testing.compare(spec, answer, mine.out, mine.lse)


def test_c80_q_with_an_inner_stride(host, kit):
    """Refused by name before anything is written, or computed from a copy by the caller; never misread."""
    spec = kit.spec(host)
    index = formats.ragged([0, 3], [0, 9])
    q, k = kit.draw(1, 3, 4, 16), kit.draw(2, 9, 2, 16)
    attn = kit.attention(host, spec)
    attn.plan(index)
    want = attn.run(q, (k, k))
    turned = np.ascontiguousarray(q.transpose(0, 2, 1)).transpose(0, 2, 1)
    with pytest.raises(at.ArgumentError, match="q must have a last stride of 1"):
        attn.run(turned, (k, k))
    for label, kv in (("k", (np.repeat(k, 2, 2)[..., ::2], k)), ("v", (k, np.repeat(k, 2, 2)[..., ::2]))):
        with pytest.raises(at.ArgumentError, match=f"{label} must have a last stride of 1"):
            attn.run(q, kv)
    assert bits(attn.run(np.ascontiguousarray(turned), (k, k))) == bits(want)


def test_c80_a_mask_with_stride_0(host, kit):
    """A mask of one column, broadcast to all keys, is read as the copy of it is."""
    spec = kit.spec(host, v.custom_mask())
    flat = formats.ragged([0, 4], [0, 6])
    column = np.array([[True], [False], [True], [True]])
    q, k = kit.draw(1, 4, 4, 16), kit.draw(2, 6, 2, 16)
    results = [
        kit.right(host, spec, formats.tree(flat, mask=[mask]), q, (k, k))
        for mask in (np.broadcast_to(column, (4, 6)), np.repeat(column, 6, 1))
    ]
    testing.same(*results, "a broadcast mask")


def test_c100_products_past_half_precision(backend, kit):
    """q.k = 70000 before the scale: larger than any float16."""
    spec = kit.spec(backend, v.full(), head_dim=64, q_dtype="float16", sm_scale=1 / 70_000)
    q = np.full((1, 4, 64), math.sqrt(70_000 / 64), np.float32)
    k = q[:, :2].repeat(9, 0)
    values = kit.draw(1, 9, 2, 64)
    result = kit.right(backend, spec, formats.ragged([0, 1], [0, 9]), q, (k, values))
    assert np.isfinite(result.out.astype(float)).all()
    want = kit.cast(values, "float16").astype(float).mean(0).repeat(2, 0)
    np.testing.assert_allclose(result.out[0].astype(float), want, atol=2e-3)
