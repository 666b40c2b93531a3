# SPDX-License-Identifier: Apache-2.0
"""merge_state(s) on a GPU against the host's, on the strides and empty parts that the host tests use."""

import numpy as np
import pytest

import attnrt as at
from attnrt.backends.cuda import merge_parts
from attnrt.backends.cuda.merge_parts import MERGE_PARTS, render_merge_parts
from attnrt.errors import DtypeError
from attnrt.tensor import TensorView


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_compiles_without_spills(dtype):
    nvrtc = pytest.importorskip("attnrt.backends.cuda.nvrtc")
    if nvrtc.why_not_nvrtc():
        pytest.skip(nvrtc.why_not_nvrtc())
    code, log = nvrtc.compile_source(render_merge_parts(dtype), "sm_90a", "merge")
    assert MERGE_PARTS.encode() in code and nvrtc.spilled(log) == 0 and not nvrtc.warnings_of(log)


def draw(rng, parts, rows=37, heads=5, dim=136):
    v = rng.normal(size=(parts, rows, heads, dim)).astype(np.float32)
    lse = rng.normal(0, 5, (parts, rows, heads)).astype(np.float32)
    dead = rng.random(lse.shape) < 0.25
    dead[:, 0] = True
    lse[dead] = -np.inf
    v[dead] = np.nan
    return v, lse


def views(x):
    return tuple(TensorView(part) for part in x)


def items(x):
    return tuple(s // x.itemsize for s in x.strides)


def test_parts_at_one_distance_are_one_segment():
    v, lse = draw(np.random.default_rng(), 5)
    (got,) = merge_parts._segments(views(v), views(lse))
    assert got == (v.ctypes.data, lse.ctypes.data, *items(v), *items(lse), 5)
    (got,) = merge_parts._segments(views(v[::-1]), None)
    assert got == (v[4].ctypes.data, 0, *items(v[::-1]), 0, 0, 0, 5)


def test_two_arrays_of_other_strides_are_two_segments():
    v, lse = draw(np.random.default_rng(), 2)
    wide = np.zeros((37, 5, 200), np.float32)[..., :136]
    a, b = merge_parts._segments(views([v[0], wide]), views(lse))
    assert a == (v.ctypes.data, lse.ctypes.data, 0, *items(v[0]), 0, *items(lse[0]), 1)
    assert b == (wide.ctypes.data, lse[1].ctypes.data, 0, *items(wide), 0, *items(lse[1]), 1)


gpu = pytest.mark.gpu


def cuda(x):
    import torch

    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


@gpu
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("dim", [8, 64, 136, 512])
def test_against_the_host(parts, dim):
    v, lse = draw(np.random.default_rng(), parts, dim=dim)
    want, want_lse = at.merge_states(v, lse)
    out, out_lse = at.merge_states(cuda(v), cuda(lse))
    np.testing.assert_allclose(out.cpu().numpy(), want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(out_lse.cpu().numpy(), want_lse, rtol=1e-6, atol=1e-6)
    added, none = at.merge_states(cuda(np.nan_to_num(v)), None)
    assert none is None
    assert np.array_equal(added.cpu().numpy(), at.merge_states(np.nan_to_num(v), None)[0])


@gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types(dtype):
    import torch

    v, lse = draw(np.random.default_rng(), 3)
    half = torch.from_numpy(v).to(getattr(torch, dtype))
    want, _ = at.merge_states(half, torch.from_numpy(lse))
    out, _ = at.merge_states(half.cuda(), cuda(lse))
    assert out.dtype == half.dtype
    tolerance = 2e-3 if dtype == "float16" else 1.6e-2
    torch.testing.assert_close(out.cpu(), want, rtol=0, atol=tolerance)


@gpu
def test_empty_parts_are_the_identity_bit_for_bit_and_in_place():
    v, lse = draw(np.random.default_rng(), 1)
    v, lse = cuda(v[0]), cuda(lse[0])
    keep, keep_lse = v.nan_to_num(), lse.clone()  # rows that are empty themselves come out as 0
    nothing, never = v * float("nan"), lse * 0 - float("inf")
    never[:] = -float("inf")
    for args in ((v, lse, nothing, never), (nothing, never, v, lse)):
        out, out_lse = at.merge_state(*args)
        assert out.equal(keep) and out_lse.equal(keep_lse)
    w, s = draw(np.random.default_rng(), 2)
    want = at.merge_states(cuda(w), cuda(s))
    a, b, la, lb = cuda(w[0]), cuda(w[1]), cuda(s[0]), cuda(s[1])
    at.merge_state(a, la, b, lb, out=b, out_lse=lb)
    assert b.equal(want[0]) and lb.equal(want[1])


@gpu
def test_strides_streams_and_graphs():
    import torch

    v, lse = (cuda(x) for x in draw(np.random.default_rng(), 4))
    want = at.merge_states(v, lse)
    wide = torch.full((37, 4, 5, 200), float("nan"), device="cuda")
    wide[..., :136] = v.transpose(0, 1)
    out, out_lse = torch.zeros_like(want[0]), torch.zeros(37, 5, 3, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        at.merge_states(wide.transpose(0, 1)[..., :136], lse, out=out, out_lse=out_lse[..., 1])
    side.synchronize()
    assert out.equal(want[0]) and out_lse[..., 1].equal(want[1]) and not out_lse[..., ::2].any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        at.merge_states(v, lse, out=out, out_lse=out_lse[..., 1])
    lse.copy_(lse.flip(0))
    v.copy_(v.flip(0))
    graph.replay()
    again = at.merge_states(v, lse)
    assert out.equal(again[0]) and out_lse[..., 1].equal(again[1])


@gpu
def test_other_frameworks():
    v, lse = draw(np.random.default_rng(), 3)
    want = [x.cpu().numpy() for x in at.merge_states(cuda(v), cuda(lse))]
    cupy = pytest.importorskip("cupy")
    out, out_lse = at.merge_states(cupy.asarray(v), cupy.asarray(lse))
    assert isinstance(out, cupy.ndarray)
    assert np.array_equal(out.get(), want[0]) and np.array_equal(out_lse.get(), want[1])
    jax = pytest.importorskip("jax")
    if jax.default_backend() == "gpu":
        out, out_lse = at.merge_states(jax.numpy.asarray(v), jax.numpy.asarray(lse))
        assert isinstance(out, jax.Array)
        assert np.array_equal(np.asarray(out), want[0]) and np.array_equal(np.asarray(out_lse), want[1])


@gpu
def test_float64_is_refused():
    with pytest.raises(DtypeError, match="on a GPU"):
        at.merge_states(cuda(np.zeros((2, 3, 1, 8))), cuda(np.zeros((2, 3, 1))))
