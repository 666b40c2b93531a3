# SPDX-License-Identifier: Apache-2.0
"""Hard cases of layouts: windows in batches, masks of wrong shape, strides, dead rows, page lengths, reserved pages, levels."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing

v = at.variants


def seen(kit, backend, spec, index, num_qo, slots):
    """bool [num_qo, slots]: which slots a query's result depends on, read off a run: each V names its slot."""
    values = np.zeros((slots, spec.num_kv_heads, spec.head_dim_vo), np.float32)
    values[np.arange(slots), :, np.arange(slots)] = 1.0
    k = np.zeros((slots, spec.num_kv_heads, spec.head_dim), np.float32)
    q = np.zeros((num_qo, spec.num_qo_heads, spec.head_dim), np.float32)
    return kit.run(backend, spec, index, q, (k, values)).out[:, 0].astype(float) > 0


@pytest.mark.parametrize("order", ["causal first", "window alone"])
def test_c27_window_is_inside_causal(backend, kit, order):
    """16 tokens, window 4; and two requests whose queries are fewer than their keys, each from its own anchor."""
    variants = (v.causal(), v.sliding_window(3)) if order == "causal first" else (v.sliding_window(3),)
    wide, narrow = (kit.spec(backend, *x, head_dim=8, head_dim_vo=32) for x in ((v.causal(),), variants))
    for qo, kv in (([0, 16], [0, 16]), ([0, 3, 8], [0, 7, 17])):
        index = formats.ragged(qo, kv)
        mask = seen(kit, backend, narrow, index, qo[-1], 32)
        causal = seen(kit, backend, wide, index, qo[-1], 32)
        assert not (mask & ~causal).any() and (mask & causal).sum() < causal.sum()
        for r in range(len(qo) - 1):
            rows, keys = qo[r + 1] - qo[r], kv[r + 1] - kv[r]
            j, i = np.arange(32) - kv[r], np.arange(rows)[:, None] + keys - rows
            want = (j >= 0) & (j <= i) & (j >= i - 3)
            assert (mask[qo[r] : qo[r + 1]] == want).all()


def test_c32_masks_of_wrong_shape(host, kit):
    flat = formats.paged([0, 10], [0, 5], [4, 1, 0, 3, 2], [20], 4)
    good = np.random.default_rng(0).random((10, 20)) < 0.5
    for bad in ((10, 15), (20, 10), (9, 20), (10, 20, 1)):
        with pytest.raises(at.ArgumentError, match="mask"):
            formats.tree(flat, mask=[np.ones(bad, bool)])
    with pytest.raises(at.ArgumentError, match="mask"):
        formats.tree(flat, mask=[good.T])
    for wrong in (good.astype(np.uint8) * 2, good.astype(np.float32), good.astype(np.int64) - 1):
        with pytest.raises((at.ArgumentError, at.DtypeError), match="mask"):
            formats.tree(flat, mask=[wrong])
    two = formats.ragged([0, 2, 5], [0, 4, 11])
    right = 2 * 4 + 3 * 7
    for count in (right - 1, right + 1, 2 * 5 * 7, 19):  # the padded [batch, most, most] among them
        with pytest.raises(at.ArgumentError, match=f"mask.*{right}"):
            formats.tree(two, mask=np.ones(count, bool))
    q, kv = kit.draw(1, 10, 4, 16), (kit.draw(2, 5, 4, 2, 16),) * 2
    spec = kit.spec(host, v.custom_mask())
    results = [
        kit.right(host, spec, formats.tree(flat, mask=[mask]), q, kv)
        for mask in (good, good.astype(np.uint8), np.asfortranarray(good), np.repeat(good, 2, 1)[:, ::2])
    ]
    for other in results[1:]:
        testing.same(results[0], other, "the same bits in another array")


FORMS = ("strided", "transposed", "interleaved", "pool")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_c40_strides_of_k_are_not_those_of_v(backend, kit, layout):
    """K every second token of a longer buffer, V dense; V transposed, K dense; every pair of memory orders: same bits."""
    spec = kit.spec(backend, kv_layout=layout, head_dim=16, head_dim_vo=8)
    case = testing.make_case(spec, [1, 9], [30, 40], seed=1)
    device = "cuda" if kit.cuda(backend) else "cpu"
    plain = testing.lay_out(case, page_size=4)
    want = testing.run_batch(case, plain, backend, device=device)
    answer = testing.oracle_answer(spec, plain.index, plain.q, plain.kv)
    testing.compare(spec, answer, want.out, want.lse)
    for one in FORMS[:3]:
        k, values = (testing.lay_out(case, page_size=4, form=f).kv for f in (one, "plain"))
        for kv in ((k[0], values[1]), (values[0], k[1])):
            mixed = testing.Batch(index=plain.index, q=plain.q, kv=kv, params={})
            testing.same(want, testing.run_batch(case, mixed, backend, device=device), f"{one} beside plain")


def test_c40_strided_scales(backend, kit):
    """Scale arrays with strides, and V = K.transpose of another buffer."""
    spec = kit.spec(backend, v.causal(), v.fp8_scales(), num_kv_heads=4)
    index = formats.ragged([0, 3], [0, 20])
    q, k, values = kit.draw(1, 3, 4, 16), kit.draw(2, 20, 4, 16), kit.draw(3, 20, 4, 16)
    scales = np.array([0.25, 9, 0.5, 9, 2.0, 9, 1.0, 9], np.float32)
    dense = kit.right(
        backend, spec, index, q, (k, values), k_scale=scales[::2].copy(), v_scale=scales[::2].copy()
    )
    turned = values.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    strided = kit.run(backend, spec, index, q, (k, turned), k_scale=scales[::2], v_scale=scales[::2])
    testing.same(dense, strided, "strided scales and V")


@pytest.mark.parametrize("fill", [math.nan, math.inf, 1e30])
def test_c52_ragged_rows_past_the_total(backend, kit, fill):
    """64 rows of K and V, 37 live; out longer than the queries: dead rows stay as they were."""
    spec = kit.spec(backend)
    index = formats.ragged([0, 5, 9], [0, 20, 37])
    q, k, values = kit.draw(1, 9, 4, 16), kit.draw(2, 37, 2, 16), kit.draw(3, 37, 2, 16)
    want = kit.right(backend, spec, index, q, (k, values))
    with np.errstate(over="ignore"):
        tail = kit.cast(np.full((27, 2, 16), fill, np.float32), spec.kv_dtype)
    long = tuple(np.concatenate([kit.cast(x, spec.kv_dtype), tail]) for x in (k, values))
    testing.same(want, kit.run(backend, spec, index, q, long), f"{fill} past the total")
    attn = kit.attention(backend, spec)
    attn.plan(index)
    from attnrt.testing.device import execute

    out = np.full((14, 4, 16), 12345.0, np.float32).astype(want.out.dtype)
    lse = np.full((14, 4), 12345.0, np.float32)
    mark = out[0, 0, 0]
    execute(attn, kit.cast(q, spec.q_dtype), long, out=out[:9], lse=lse[:9])
    assert (out[9:] == mark).all() and (lse[9:] == 12345.0).all(), "a dead row was touched"
    testing.same(want, testing.Result(out=out[:9], lse=lse[:9]), "a longer out")


def test_c53_last_page_lengths(backend, kit):
    assert formats.last_page_lens([100, 96, 1, 16, 17, 0], 16).tolist() == [4, 16, 1, 16, 1, 0]
    assert formats.kv_lens_of([0, 7, 13, 13], [4, 16, 99], 16).tolist() == [100, 96, 0]
    for bad in (0, 17, -1):
        with pytest.raises(at.ArgumentError, match="last_page_len must be from 1 to 16"):
            formats.kv_lens_of([0, 7], [bad], 16)
    with pytest.raises(at.ArgumentError, match="kv_lens must not exceed"):
        formats.paged([0, 1], [0, 7], np.arange(7), [113], 16)
    spec = kit.spec(backend, head_dim=8)
    for kv in (100, 96, 1, 16, 17):
        case = testing.make_case(spec, [1], [kv], seed=kv)
        batch = testing.lay_out(case, page_size=16)
        lens = formats.kv_lens_of(batch.index.indptr, formats.last_page_lens([kv], 16), 16)
        index = formats.paged([0, 1], batch.index.indptr, batch.index.indices, lens, 16)
        kit.right(backend, spec, index, batch.q, batch.kv)


def test_c56_a_reserved_page_of_nan(backend, kit):
    """Page 0 holds what padding rows wrote; the table is padded with it; 5 keys in pages of 4, window 2."""
    spec = kit.spec(backend, v.sliding_window(2))
    q, k, values = kit.draw(1, 1, 4, 16), kit.draw(2, 4, 4, 2, 16), kit.draw(3, 4, 4, 2, 16)
    results = []
    for fill in (0.0, math.nan):
        k[0], values[0] = fill, fill
        results.append(
            kit.run(backend, spec, formats.block_table([0, 1], [[3, 1, 0, 0]], [5], 4), q, (k, values))
        )
    testing.same(*results, "NaN in the padding page")
    direct = formats.token_sparse([0, 1], [0, 3], [14, 15, 4], [2, 3, 4])
    want = kit.right(
        backend, kit.spec(backend, v.full()), direct, q, (np.nan_to_num(k), np.nan_to_num(values))
    )
    kit.close(results[1].out, want.out.astype(float), backend)


@pytest.mark.parametrize("size", [3, 24, 48, 256, 512, 544])
def test_c58_pages_of_any_size(backend, kit, size):
    spec = kit.spec(backend, head_dim=8)
    case = testing.make_case(spec, [1, 4], [700, 50], seed=1)
    device = "cuda" if kit.cuda(backend) else "cpu"
    want = testing.run_batch(case, testing.lay_out(case, builder="ragged"), backend, device=device)
    got = testing.run_batch(case, testing.lay_out(case, page_size=size), backend, device=device)
    testing.same(want, got, f"pages of {size}")


def test_c73_three_levels_of_one_pool(backend, kit):
    """16, 8 and 3 tokens in one pool of pages of 4, four requests in two groups: the flat index's bits."""
    spec = kit.spec(backend)
    ids = np.random.default_rng(0).permutation(20)
    top, middle, own = ids[:4], ids[4:8].reshape(2, 2), ids[8:12]
    rows = [0, 1, 3, 4, 6]
    levels = (
        formats.paged([0, 6], [0, 4], top, [16], 4),
        formats.paged([0, 3, 6], [0, 2, 4], middle.reshape(-1), [8, 8], 4),
        formats.paged(rows, [0, 1, 2, 3, 4], own, [3] * 4, 4),
    )
    listed = np.concatenate([np.r_[top, middle[r // 2], own[r]] for r in range(4)])
    flat = formats.paged(rows, np.arange(5) * 7, listed, [27] * 4, 4)
    q, kv = kit.draw(1, 6, 4, 16), (kit.draw(2, 20, 4, 2, 16), kit.draw(3, 20, 4, 2, 16))
    want = kit.right(backend, spec, flat, q, kv)
    for index in (formats.cascade(*levels), formats.share(flat, 1)):
        testing.same(want, kit.run(backend, spec, index, q, kv), "levels")
