# SPDX-License-Identifier: Apache-2.0
"""CUDA arrays of torch, CuPy and JAX: addresses, dtypes, strides, devices, current streams, results."""

import numpy as np
import pytest

from attnrt import dtypes
from attnrt.device import as_device, stream_handle
from attnrt.errors import ArgumentError
from attnrt.results import empty_like_caller, to_caller
from attnrt.tensor import TensorView, current_stream, signature

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8", "bool")


@pytest.mark.parametrize("name", NAMES)
def test_torch(name):
    t = torch.zeros(4, 6, 8, dtype=torch.uint8, device="cuda").to(getattr(torch, name))
    for x in (t, t.transpose(0, 2), t[1:, ::2, 3:]):
        v = TensorView(x)
        assert (v.ptr, v.shape, v.strides) == (x.data_ptr(), tuple(x.shape), x.stride())
        assert v.dtype.name == name and v.device == as_device(x.device) and v.framework == "torch"
        assert signature(x)[1] == (v.ptr,)
    with pytest.raises(ArgumentError, match="CPU memory"):
        v.numpy()


def test_torch_grad_and_pinned():
    with pytest.raises(ArgumentError, match="detach"):
        TensorView(torch.zeros(3, device="cuda", requires_grad=True))
    pinned = torch.arange(3.0).pin_memory()
    v = TensorView(pinned)
    assert str(v.device) == "cpu" and v.ptr == pinned.data_ptr() and list(v.numpy()) == [0, 1, 2]


def test_torch_current_stream():
    t = torch.zeros(3, device="cuda")
    assert current_stream(t) == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert current_stream(t) == current_stream(TensorView(t)) == side.cuda_stream == stream_handle(side)


def test_reading_does_not_synchronise():
    """A captured graph may read arrays: nothing is enqueued, waited for or asked of the driver that capture forbids."""
    t = torch.zeros(3, device="cuda")
    cupy = pytest.importorskip("cupy")
    c = cupy.zeros(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert TensorView(t).ptr == t.data_ptr() and TensorView(c).ptr == c.data.ptr
        t.add_(1)


@pytest.mark.parametrize("name", ["float32", "float16", "int32", "uint8", "bool"])
def test_cupy(name):
    cupy = pytest.importorskip("cupy")
    x = cupy.zeros((4, 6, 8), name)
    for y in (x, x.transpose(2, 0, 1), x[::-1, ::2], x[1:]):
        v = TensorView(y)
        assert v.ptr == y.data.ptr and v.shape == y.shape and v.framework == "cupy"
        assert v.strides == tuple(s // y.itemsize for s in y.strides)
        assert v.dtype.name == name and str(v.device) == "cuda:0"
    v = TensorView(x.view(np.uint8), "float8_e4m3fn") if name == "uint8" else v
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert current_stream(x) == stream.ptr == stream_handle(stream)
    out = empty_like_caller(v, (3, 5), "float16")
    assert isinstance(out, cupy.ndarray) and out.shape == (3, 5) and out.dtype == np.float16
    assert TensorView(empty_like_caller(v, (3,), "bfloat16"), "bfloat16").dtype.name == "bfloat16"


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int32"])
def test_jax(name):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    x = jax.numpy.ones((4, 6), name) + jax.numpy.ones((4, 6), name)
    for stream in (None, torch.cuda.current_stream().cuda_stream or 1):
        v = TensorView(x, stream=stream)
        assert v.ptr == x.unsafe_buffer_pointer() and v.strides == (6, 1) and v.immutable
        assert v.dtype.name == name and str(v.device) == "cuda:0" and v.framework == "jax"
    assert current_stream(x) is None


def test_numba_device_array():
    cuda = pytest.importorskip("numba.cuda")
    x = cuda.to_device(np.arange(12, dtype=np.float32).reshape(3, 4))
    v = TensorView(x)
    assert (
        v.ptr == x.__cuda_array_interface__["data"][0] and str(v.device) == "cuda:0" and v.strides == (4, 1)
    )


@pytest.mark.parametrize("name", NAMES)
def test_torch_results(name):
    v = TensorView(torch.zeros(3, device="cuda"))
    out = to_caller(empty_like_caller(v, (2, 5), name), "torch")
    assert out.device == torch.device("cuda", 0) and out.dtype is getattr(torch, name) and out.shape == (2, 5)
    assert TensorView(out).dtype is dtypes.DTYPES[name]


def test_views_of_device_memory_go_out():
    t = torch.arange(12.0, device="cuda").reshape(3, 4)
    v = TensorView(t[:, ::2])
    assert "data" in v.__cuda_array_interface__
    back = torch.from_dlpack(_Unordered(v))
    assert back.data_ptr() == t.data_ptr() and torch.equal(back, t[:, ::2])
    cupy = pytest.importorskip("cupy")
    assert float(cupy.asarray(v).sum()) == float(t[:, ::2].sum())


class _Unordered:
    """Exports without ordering: no backend is loaded here that could order."""

    def __init__(self, view):
        self.view = view

    def __dlpack_device__(self):
        return self.view.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **rest):
        return self.view.__dlpack__(stream=-1, **rest)
