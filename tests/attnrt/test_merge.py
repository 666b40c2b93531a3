# SPDX-License-Identifier: Apache-2.0
"""Merging finished pairs against float64, on any strides and frameworks, with exact rules on empty parts."""

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import memory
from attnrt import merge as merge_module
from attnrt.errors import ArgumentError, DtypeError, UnsupportedError
from attnrt.tensor import TensorView, make_view

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")


def oracle(v, lse):
    v, lse = v.astype(np.float64), lse.astype(np.float64)
    dead = np.isneginf(lse)
    with np.errstate(all="ignore"):
        top = np.where(dead.all(0), 0, lse.max(0))
        w = np.where(dead, 0, np.exp(lse - top))
        total = w.sum(0)
        out = (w[..., None] * np.where(dead[..., None], 0, v)).sum(0) / total[..., None]
        return np.where(dead.all(0)[..., None], 0, out), np.where(dead.all(0), -np.inf, top + np.log(total))


def draw(rng, parts=4, rows=6, heads=3, dim=8):
    v = rng.normal(size=(parts, rows, heads, dim)).astype(np.float32)
    lse = rng.normal(0, 5, (parts, rows, heads)).astype(np.float32)
    dead = rng.random(lse.shape) < 0.25
    dead[:, 0] = True
    dead[1:, 1], dead[:1, 1] = True, False
    lse[dead] = -np.inf
    v[dead] = np.nan  # an empty part's v is never read
    return v, lse


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and np.array_equal(
        np.ascontiguousarray(a).view("u1"), np.ascontiguousarray(b).view("u1")
    )


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_against_float64(parts, rng):
    v, lse = draw(rng, parts)
    out, out_lse = at.merge_states(v, lse)
    want, want_lse = oracle(v, lse)
    assert out.dtype == out_lse.dtype == np.float32
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(out_lse, want_lse, rtol=1e-6, atol=1e-6)
    double, _ = at.merge_states(v.astype(np.float64), lse.astype(np.float64))
    np.testing.assert_allclose(double, want, rtol=0, atol=1e-13)


def test_two_parts_are_merge_state(rng):
    v, lse = draw(rng, 2)
    a, b = at.merge_state(v[0], lse[0], v[1], lse[1]), at.merge_states(v, lse)
    assert same_bits(a[0], b[0]) and same_bits(a[1], b[1])


def test_c01_empty_parts(rng):
    zero, none = np.zeros((1, 1, 64), np.float16), np.full((1, 1), -np.inf, np.float32)
    out, lse = at.merge_state(zero, none, zero, none)
    assert out.dtype == np.float16 and not out.view(np.uint16).any() and np.isneginf(lse).all()
    v = rng.normal(size=(5, 2, 8)).astype(np.float32)
    s = rng.normal(0, 30, (5, 2)).astype(np.float32)
    v[0, 0], s[0, 0] = -0.0, -0.0
    empty, never = np.full_like(v, np.nan), np.full_like(s, -np.inf)
    for pair in (at.merge_state(v, s, empty, never), at.merge_state(empty, never, v, s)):
        assert same_bits(pair[0], v) and same_bits(pair[1], s)
    many = at.merge_states(np.stack([empty, empty, v, empty]), np.stack([never, never, s, never]))
    assert same_bits(many[0], v) and same_bits(many[1], s)


def test_c01_in_place(rng):
    v, lse = draw(rng, 2)
    want = at.merge_states(v, lse)
    for i in (0, 1):
        vs, ls = v.copy(), lse.copy()
        out, out_lse = at.merge_state(vs[0], ls[0], vs[1], ls[1], out=vs[i], out_lse=ls[i])
        assert same_bits(vs[i], want[0]) and same_bits(ls[i], want[1])
        assert np.shares_memory(out, vs) and np.shares_memory(out_lse, ls)


def test_c06_natural_log():
    lse_a, lse_b = (np.full((1, 1), np.log(n), np.float32) for n in (8, 2))
    out, lse = at.merge_state(np.ones((1, 1, 4), np.float32), lse_a, np.zeros((1, 1, 4), np.float32), lse_b)
    np.testing.assert_allclose(out, 0.8, atol=1e-7)
    np.testing.assert_allclose(lse, 2.302585, atol=1e-6)


def test_c71_all_six_operands_strided(rng):
    rows, heads, dim = 7, 4, 128
    v, lse = draw(rng, 2, rows, heads, dim)
    want = at.merge_states(v, lse)

    def padded(x, width):  # head stride wider than the head
        buffer = np.full((*x.shape[:-1], width), np.nan, x.dtype)
        buffer[..., : x.shape[-1]] = x
        return buffer[..., : x.shape[-1]]

    va, vb = padded(v[0], 192), v[1].transpose(1, 0, 2).copy().transpose(1, 0, 2)
    la, lb = padded(lse[0], 9), lse[1].T.copy()[:, ::-1].T[::-1]
    out = padded(np.zeros((rows, heads, dim), np.float32), 130)
    out_lse = np.full((rows, heads, 3), 7, np.float32)
    got = at.merge_state(va, la, vb, lb, out=out, out_lse=out_lse[..., 1])
    assert got[0] is out
    assert same_bits(out, want[0]) and same_bits(out_lse[..., 1], want[1])
    assert np.isnan(out.base[..., dim:]).all() and (out_lse[..., ::2] == 7).all()
    stacked = np.full((rows, 2, heads, dim + 8), np.nan, np.float32)
    stacked[..., :dim] = v.swapaxes(0, 1)
    again = at.merge_states(stacked.swapaxes(0, 1)[..., :dim], lse[::-1].copy()[::-1])
    assert same_bits(again[0], want[0]) and same_bits(again[1], want[1])


def test_torch_and_jax(rng):
    v, lse = draw(rng)
    want = at.merge_states(v, lse)
    for make, kind in ((torch.from_numpy, torch.Tensor), (jax.numpy.asarray, jax.Array)):
        out, out_lse = at.merge_states(make(v), make(lse))
        assert isinstance(out, kind) and isinstance(out_lse, kind)
        assert same_bits(out, want[0]) and same_bits(out_lse, want[1])
    out = torch.zeros(want[0].shape)
    assert at.merge_states(torch.from_numpy(v), torch.from_numpy(lse), out=out)[0] is out
    assert same_bits(out, want[0])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_values_are_summed_in_float32_and_rounded_once(dtype, rng):
    v, lse = draw(rng)
    v = v.astype(dtype)
    out, out_lse = at.merge_states(v, lse)
    wide, wide_lse = at.merge_states(v.astype(np.float32), lse)
    assert out.dtype == dtype and same_bits(out, wide.astype(dtype)) and same_bits(out_lse, wide_lse)


def test_softmax_free_parts_are_added_in_order(rng):
    v = rng.normal(size=(3, 5, 2, 4)).astype(np.float32)
    out, lse = at.merge_states(v, None)
    assert lse is None and same_bits(out, (v[0] + v[1]) + v[2])
    out, lse = at.merge_state(v[0], None, v[1], None)
    assert lse is None and same_bits(out, v[0] + v[1])
    with pytest.raises(ArgumentError, match="out_lse"):
        at.merge_states(v, None, out_lse=np.zeros((5, 2), np.float32))
    with pytest.raises(ArgumentError, match="lse_b must be given exactly if"):
        at.merge_state(v[0], None, v[1], np.zeros((5, 2), np.float32))


@pytest.mark.parametrize("shape", [(2, 0, 3, 8), (2, 3, 0, 8), (2, 3, 4, 0)])
def test_zero_sizes(shape):
    out, lse = at.merge_states(np.zeros(shape, np.float32), np.zeros(shape[:3], np.float32))
    assert out.shape == shape[1:] and lse.shape == shape[1:3]


def test_refusals_leave_the_outputs_alone(rng):
    v, lse = draw(rng)
    out, out_lse = np.full(v.shape[1:], 12345, np.float32), np.full(lse.shape[1:], 12345, np.float32)
    frozen = out.copy()
    frozen.flags.writeable = False
    bad = [
        (ArgumentError, "v must be .parts, rows, heads, dim", (v[0], lse[0]), {}),
        (ArgumentError, "at least one part", (v[:0], lse[:0]), {}),
        (ArgumentError, "lse must be .parts, rows, heads.", (v, lse[:, :2]), {}),
        (DtypeError, "lse must be float32; got float64", (v, lse.astype(np.float64)), {}),
        (DtypeError, "v must be float32, float16, bfloat16", (np.zeros(v.shape, np.int32), lse), {}),
        (DtypeError, "v must be an array", ([1], lse), {}),
        (ArgumentError, "out must have shape", (v, lse), {"out": out[:, :1]}),
        (DtypeError, "out must be float32", (v, lse), {"out": out.astype(np.float16)}),
        (ArgumentError, "out must be writable", (v, lse), {"out": frozen}),
        (ArgumentError, "out must be writable", (v, lse), {"out": jax.numpy.asarray(out)}),
        (
            DtypeError,
            "out_lse must be float32",
            (v, lse),
            {"out": out, "out_lse": out_lse.astype(np.float64)},
        ),
    ]
    for kind, text, args, kwargs in bad:
        with pytest.raises(kind, match=text):
            at.merge_states(*args, **({"out": out, "out_lse": out_lse} | kwargs))
    with pytest.raises(ArgumentError, match="vb must have shape"):
        at.merge_state(v[0], lse[0], v[1][:2], lse[1])
    with pytest.raises(DtypeError, match="vb must be float32"):
        at.merge_state(v[0], lse[0], v[1].astype(np.float16), lse[1])
    assert (out == 12345).all() and (out_lse == 12345).all()


def test_devices_go_to_their_own_implementation(monkeypatch):
    monkeypatch.setattr(merge_module, "_implementations", dict(merge_module._implementations))
    merge_module._implementations.pop("cuda", None)
    monkeypatch.setattr(memory, "_PROVIDERS", {})
    data = np.zeros((2, 3, 2, 4), np.float32)
    v = make_view(data.ctypes.data, data.shape, "float32", "cuda:1", owner=data)
    lse = make_view(data.ctypes.data, data.shape[:3], "float32", "cuda:1", owner=data)
    out = make_view(data.ctypes.data, data.shape[1:], "float32", "cuda:1", owner=data)
    out_lse = make_view(data.ctypes.data, data.shape[1:3], "float32", "cuda:1", owner=data)
    with pytest.raises(UnsupportedError, match="nobody provides cuda"):
        at.merge_states(v, lse, out=out, out_lse=out_lse)
    calls = []
    merge_module.register_merge("cuda", calls.append)
    got = at.merge_states(v, lse, out=out, out_lse=out_lse, stream=99)
    assert got == (out, out_lse) and len(calls) == 1
    call = calls[0]
    assert [x.shape for x in call.v] == [(3, 2, 4)] * 2 and call.stream == 99
    assert call.v[1].ptr == v.ptr + 24 * 4 and call.lse[1].ptr == v.ptr + 6 * 4
    with pytest.raises(ArgumentError, match="vb must be on cuda:1"):
        at.merge_state(call.v[0], call.lse[0], TensorView(data[1]), call.lse[1], out=out, out_lse=out_lse)
