# SPDX-License-Identifier: Apache-2.0
"""Hard cases of variants: windows, causal's corner, slopes, scales, sinks, rotary pairings, rows that see nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing

v = at.variants


def visible(kit, backend, spec, index, num_qo, kv):
    """bool [num_qo, kv]: which keys reach a row, read off V."""
    values = np.zeros((kv, 1, 32), np.float32)
    values[np.arange(kv), 0, np.arange(kv)] = 1.0
    q = np.zeros((num_qo, spec.num_qo_heads, 8), np.float32)
    return (
        kit.run(backend, spec, index, q, (np.zeros((kv, 1, 8), np.float32), values))
        .out[:, 0, :kv]
        .astype(float)
        > 0
    )


SMALL = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 8, "head_dim_vo": 32}


def test_c26_window_counts(backend, kit):
    """window_left 3 sees four keys; decode is the last row of prefill for every window; 0: self only; -1: off."""
    spec = kit.spec(backend, v.causal(), v.sliding_window(3), **SMALL)
    rows = visible(kit, backend, spec, formats.ragged([0, 16], [0, 16]), 16, 16)
    assert rows.sum(1).tolist() == [1, 2, 3] + [4] * 13
    spec = kit.spec(backend, v.causal(), v.sliding_window(2), **SMALL)
    rows = visible(kit, backend, spec, formats.ragged([0, 3], [0, 7]), 3, 7)
    assert [np.flatnonzero(r).tolist() for r in rows] == [[2, 3, 4], [3, 4, 5], [4, 5, 6]]
    for left in [*range(17), -1]:
        spec = kit.spec(backend, v.causal(), v.sliding_window(left), **SMALL)
        decode = visible(kit, backend, spec, formats.ragged([0, 1], [0, 16]), 1, 16)
        prefill = visible(kit, backend, spec, formats.ragged([0, 16], [0, 16]), 16, 16)
        assert (decode[0] == prefill[-1]).all()
        assert decode.sum() == (16 if left == -1 else min(left + 1, 16))
    for bad in (-2, -127, 1.5, True):
        with pytest.raises(at.ArgumentError, match="left must be an integer >= 0, or -1"):
            v.sliding_window(bad)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("layout", ["decode", "prefill", "ragged", "cascade"])
def test_c36_scales_on_every_path(backend, kit, kv_dtype, layout):
    """k_scale 0.25, v_scale 0.5: logits, lse and the result as if K and V were scaled before; one number, one per head, None."""
    q_dtype = "float16"
    heads = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 16, "q_dtype": q_dtype, "kv_dtype": kv_dtype}
    spec, plain = (
        kit.spec(backend, v.causal(), v.fp8_scales(), **heads),
        kit.spec(backend, v.causal(), **heads),
    )
    qo = [0, 1, 2] if layout == "decode" else [0, 3, 5]
    size = 4 if layout == "cascade" else 1
    pages, lens = np.random.default_rng(0).permutation(16 // size * 2)[: 24 // size], [16, 16]
    if layout == "ragged":
        index = formats.ragged(qo, [0, 16, 32])
    elif layout == "cascade":
        index = formats.cascade(
            formats.paged([0, qo[-1]], [0, 2], pages[:2], [8], 4),
            formats.paged(qo, [0, 2, 4], pages[2:], [8, 8], 4),
        )
    else:
        index = formats.paged(qo, [0, 16, 32], np.r_[pages[:16], pages[8:]], lens, 1)
    q = kit.draw(1, qo[-1], 8, 16)
    shape = (32, 2, 16) if layout == "ragged" else (32 // size, size, 2, 16)
    k, values = kit.draw(2, *shape) * 4, kit.draw(3, *shape)
    got = kit.right(backend, spec, index, q, (k, values), k_scale=0.25, v_scale=0.5)
    k8, v8 = (kit.cast(x, kv_dtype).astype(np.float32) for x in (k, values))
    scaled = kit.run(backend, plain, index, q, (k8 * 0.25, v8 * 0.5))  # powers of two: exact in fp8
    np.testing.assert_allclose(got.out.astype(float), scaled.out.astype(float), atol=4e-3)
    np.testing.assert_allclose(got.lse, scaled.lse, atol=1e-4)
    ones = kit.run(backend, spec, index, q, (k, values))
    assert np.abs(ones.lse - got.lse).max() > 0.1, "the scale did not reach the logits"
    per_head = np.array([0.25, 0.25], np.float32)
    testing.same(
        got,
        kit.run(backend, spec, index, q, (k, values), k_scale=per_head, v_scale=per_head * 2),
        "one per head",
    )
    testing.same(ones, kit.run(backend, spec, index, q, (k, values), k_scale=None, v_scale=None), "None")


def test_c38_slopes_of_any_head_count(backend, kit):
    np.testing.assert_allclose(v.alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    np.testing.assert_allclose(
        v.alibi_slopes(12)[8:], [0.70710678, 0.35355339, 0.1767767, 0.08838835], rtol=1e-6
    )
    assert v.alibi_slopes(8)[0] == 0.5
    spec = kit.spec(backend, v.causal(), v.alibi(), num_qo_heads=6, num_kv_heads=3, head_dim=8)
    q, k, values = np.zeros((1, 6, 8), np.float32), kit.draw(2, 9, 3, 8), kit.draw(3, 9, 3, 8)
    result = kit.right(backend, spec, formats.ragged([0, 1], [0, 9]), q, (k, values))
    for head, slope in enumerate(
        [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    ):  # of the query head, not of its group
        want = math.log(sum(math.exp(-slope * d) for d in range(9)))
        np.testing.assert_allclose(result.lse[0, head], want, rtol=1e-5)
    half = kit.spec(
        backend, v.causal(), v.alibi(v.alibi_slopes(12)[6:]), num_qo_heads=6, num_kv_heads=3, head_dim=8
    )
    rank = kit.right(backend, half, formats.ragged([0, 1], [0, 9]), q, (k, values))
    want = [math.log(sum(math.exp(-float(s) * d) for d in range(9))) for s in v.alibi_slopes(12)[6:]]
    np.testing.assert_allclose(rank.lse[0], want, rtol=1e-5)


@v.logits
def additive(score, ctx, *, bias):
    return score + bias[ctx.qo_pos, ctx.kv_pos]


@pytest.mark.parametrize("form", ["bits", "additive -inf"])
def test_c46_rows_of_a_mask_that_are_all_false(backend, kit, form):
    mask = np.random.default_rng(1).random((8, 8)) < 0.6
    mask[:4, 0], mask[4:] = True, False
    flat = formats.ragged([0, 8], [0, 8])
    q, k, values = kit.draw(1, 8, 4, 8), kit.draw(2, 8, 2, 8), kit.draw(3, 8, 2, 8)
    want = kit.right(
        backend,
        kit.spec(backend, v.custom_mask(), head_dim=8),
        formats.tree(flat, mask=[mask]),
        q,
        (k, values),
    )
    result = want
    if form == "additive -inf":
        bias = np.where(mask, 0, -np.inf).astype(np.float32)
        spec = kit.spec(backend, additive, head_dim=8)
        result = kit.run(backend, spec, flat, q, (k, values), bias=bias)
        kit.close(result.out, want.out.astype(float), backend)
    assert not result.out[4:].any() and np.isneginf(result.lse[4:]).all()
    assert np.isfinite(result.lse[:4]).all()


def test_c47_causal_is_bottom_right(backend, kit):
    spec = kit.spec(backend, **SMALL)
    rows = visible(kit, backend, spec, formats.ragged([0, 2], [0, 6]), 2, 6)
    assert rows.astype(int).tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert visible(kit, backend, spec, formats.ragged([0, 1], [0, 6]), 1, 6).all()
    masked = formats.tree(formats.ragged([0, 2], [0, 6]), parents=[-1, 0])
    assert (visible(kit, backend, spec, masked, 2, 6) == rows).all()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_c69_a_sink_counts_once(backend, kit, workers):
    """Logits 0, 0 and a sink of 0 over V = 1, 0: one third. Cut into leaves, the first of them empty too."""
    spec = kit.spec(backend, v.full(), v.sink_logits(0.0), num_qo_heads=1, num_kv_heads=1, head_dim=8)
    zero = np.zeros((2, 1, 8), np.float32)
    values = np.array([1.0, 0.0], np.float32)[:, None, None] * np.ones((1, 1, 8), np.float32)
    result = kit.right(backend, spec, formats.ragged([0, 1], [0, 2]), zero[:1], (zero, values))
    kit.close(result.out, 1 / 3, backend)
    np.testing.assert_allclose(result.lse, math.log(3), rtol=1e-6)

    @v.mask
    def late(ctx):
        return ctx.kv_pos >= 1500

    spec = kit.spec(backend, late, v.sink_logits(0.0), num_qo_heads=1, num_kv_heads=1, head_dim=8)
    kv = np.zeros((2000, 1, 8), np.float32)
    attn = kit.attention(backend, spec, limits=at.Limits(1, 1, 9, max_workers=workers))
    result = kit.right(backend, spec, formats.ragged([0, 1], [0, 2000]), kv[:1], (kv, kv + 1), attn=attn)
    kit.close(result.out, 500 / 501, backend)
    np.testing.assert_allclose(result.lse, math.log(501), rtol=1e-6)


def rotated(x, position, theta, dim, interleaved):
    """The formula, one head row: pairs (2i, 2i+1) or (i, i + dim/2)."""
    y = x.astype(np.float64).copy()
    for i in range(dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dim // 2)
        angle = position * theta ** (-2 * i / dim)
        y[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        y[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "dim", "theta"), [(64, 64, 1e7), (80, 32, 1e4)])
def test_c74_rotary_pairing(backend, kit, interleaved, head_dim, dim, theta):
    """Both conventions against the formula at positions 0, 1, 5, 1000 and 131071, the rest of a head untouched."""
    spec = kit.spec(
        backend,
        v.rope(dim, theta, interleaved),
        v.causal(),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
    )
    q, k = (kit.cast(kit.draw(s, 2, 1, head_dim), spec.q_dtype) for s in (1, 2))
    for position in (0, 1, 5, 1000, 131_071):
        index = formats.ragged([0, 1], [0, 2], qo_pos=[position], kv_pos=[position - 1])
        result = kit.run(backend, spec, index, q[:1], (k, k))
        query = rotated(q[0, 0].astype(float), position, theta, dim, interleaved)
        s = [
            float(query @ rotated(k[j, 0].astype(float), position - 1 + j, theta, dim, interleaved))
            * head_dim**-0.5
            for j in range(2)
        ]
        wide = 4e-3 if kit.cuda(backend) else 2e-5
        np.testing.assert_allclose(result.lse[0, 0], np.logaddexp(*s), atol=wide)
