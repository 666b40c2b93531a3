# SPDX-License-Identifier: Apache-2.0
"""Our own memory and the way out: at.empty, DLPack export, results in the caller's framework."""

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import dtypes, memory
from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.results import empty_like_caller, to_caller
from attnrt.tensor import TensorView, current_stream, make_view

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")


@pytest.mark.parametrize("name", list(dtypes.DTYPES))
def test_empty(name):
    x = at.empty((3, 4), name)
    assert x.ptr % 64 == 0 and x.shape == (3, 4) and x.strides == (4, 1) and x.dtype.name == name
    assert x.framework == "attnrt" and not x.readonly
    array = x.numpy()
    assert array.dtype == dtypes.DTYPES[name].numpy and array.flags.writeable
    array[...] = np.ones((3, 4)).astype(array.dtype)
    assert np.array_equal(np.asarray(x).astype(np.float64), np.ones((3, 4)))
    assert np.asarray(x).ctypes.data == x.ptr


def test_empty_arguments():
    assert at.empty(5).shape == (5,)
    assert at.empty(()).numpy().shape == ()
    with pytest.raises(ArgumentError, match="at least 0"):
        at.empty((2, -1))
    with pytest.raises(MemoryError):
        at.empty((2**40, 2**22), "uint8")


def test_np_asarray_with_dtype_and_copy():
    x = at.empty(4, "bfloat16")
    x.numpy()[...] = np.arange(4)
    assert list(np.asarray(x, np.float32)) == [0, 1, 2, 3]
    copy = np.array(x)
    assert copy.dtype == ml_dtypes.bfloat16 and copy.ctypes.data != x.ptr


def test_export_to_each_framework():
    x = at.empty((2, 3))
    x.numpy()[...] = np.arange(6).reshape(2, 3)
    for out in (np.from_dlpack(x), torch.from_dlpack(x), jax.numpy.from_dlpack(x)):
        assert np.array_equal(np.asarray(out), x.numpy())
    assert torch.from_dlpack(x).data_ptr() == x.ptr
    torch.from_dlpack(x)[1, 2] = 77
    assert x.numpy()[1, 2] == 77


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "float16"])
def test_export_of_types_that_numpy_lacks(name):
    x = at.empty(256 // dtypes.DTYPES[name].itemsize, name)
    x.numpy().view(np.uint8)[...] = np.arange(256) if name != "bool" else np.arange(256) % 2
    t = torch.from_dlpack(x)
    assert t.dtype is getattr(torch, name)
    assert np.array_equal(t.view(torch.uint8).numpy(), x.numpy().view(np.uint8))


def test_the_exported_array_keeps_the_memory_alive():
    t = torch.from_dlpack(at.empty(1000))
    t.fill_(3)
    gc.collect()
    blocks = [at.empty(1000) for _ in range(20)]
    for block in blocks:
        block.numpy()[...] = 0
    assert bool((t == 3).all())


def _counted():
    """A view whose owner can be watched."""

    class Owner:
        pass

    array = np.zeros(4, np.float32)
    owner = Owner()
    owner.array = array
    return make_view(array.ctypes.data, (4,), "float32", owner=owner), weakref.ref(owner)


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1), (7, 0)])
def test_c89_export_without_import_frees(max_version, name_of_capsule):
    x, dead = _counted()
    for _ in range(10_000):
        x.__dlpack__(max_version=max_version)
    capsule = x.__dlpack__(max_version=max_version)
    versioned = max_version is not None and max_version >= (1, 0)
    assert name_of_capsule(capsule) == ("dltensor_versioned" if versioned else "dltensor")
    del x
    gc.collect()
    assert dead() is not None
    del capsule
    gc.collect()
    assert dead() is None


def test_c89_consumed_export_is_freed_by_its_consumer_in_any_thread():
    x, dead = _counted()
    held = [torch.from_dlpack(x)]
    del x
    gc.collect()
    assert dead() is not None
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert dead() is None


def test_c87_stream_on_the_cpu():
    x = at.empty(3)
    x.__dlpack__(stream=None)
    for stream in (0, 1, -1, 77):
        with pytest.raises(ArgumentError, match="None for CPU"):
            x.__dlpack__(stream=stream)


@pytest.fixture
def no_cuda(monkeypatch):
    """No backend has told how to reach CUDA devices."""
    monkeypatch.setattr(memory, "_factories", {k: v for k, v in memory._factories.items() if k == "cpu"})
    monkeypatch.setattr(memory, "_ops", {})
    monkeypatch.setattr(memory, "_PROVIDERS", {"cuda": "no_such_module_anywhere"})


@pytest.fixture
def cuda_memory(no_cuda):
    """A stand-in for a CUDA backend: host memory that says it is a device's, and a list of what was ordered."""
    ordered = []

    class Ops(memory.HostOps):
        def __init__(self, index):
            self.index = index

        def order(self, stream):
            ordered.append((self.index, stream))

    memory.register_ops("cuda", Ops)
    return ordered


def test_c87_stream_on_cuda(cuda_memory):
    x = at.empty(3, device="cuda:1")
    assert x.__dlpack_device__() == (2, 1)
    for stream in (None, 1, 2, -1, 4711):
        x.__dlpack__(stream=stream)
    assert cuda_memory == [(1, 1), (1, 1), (1, 2), (1, 4711)]
    for stream in (0, -2, True, "1", 1.0):
        with pytest.raises(ArgumentError, match="legacy default"):
            x.__dlpack__(stream=stream)


def test_cuda_memory_needs_a_backend(no_cuda):
    with pytest.raises(UnsupportedError, match=r"a backend can reach; got cuda:0.*no_such_module"):
        at.empty(3, device="cuda")


def test_dl_device_and_copy():
    x = at.empty((2, 3))
    x.numpy()[...] = 5
    x.__dlpack__(dl_device=(1, 0))
    with pytest.raises(ArgumentError, match="dl_device"):
        x.__dlpack__(dl_device=(2, 0))
    copied = np.from_dlpack(x, copy=True)
    assert copied.ctypes.data != x.ptr and np.array_equal(copied, x.numpy())


def test_read_only_memory_is_exported_only_with_its_flag():
    array = np.zeros(3)
    array.flags.writeable = False
    x = TensorView(array)
    with pytest.raises(ArgumentError, match="read-only"):
        x.__dlpack__()
    assert TensorView(np.from_dlpack(x)).readonly
    assert np.from_dlpack(x, copy=True).flags.writeable
    assert x.__array_interface__["data"] == (x.ptr, True)


def test_strided_views_go_out_as_they_are(rng):
    array = rng.standard_normal((4, 6)).astype(np.float32)[::2, ::3]
    x = TensorView(array)
    assert np.array_equal(np.from_dlpack(x), array)
    assert np.from_dlpack(x).strides == array.strides
    turned = TensorView(array[:, ::-1])
    assert np.array_equal(np.asarray(turned), array[:, ::-1])
    with pytest.raises(ArgumentError, match="no negative stride"):
        np.from_dlpack(turned)
    assert np.array_equal(np.from_dlpack(turned, copy=True), array[:, ::-1])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "float16"])
def test_results_in_the_callers_framework(name):
    numpy_dtype = dtypes.DTYPES[name].numpy
    callers = {
        "numpy": np.zeros(2, np.float32),
        "torch": torch.zeros(2),
        "jax": jax.numpy.zeros(2),
        "attnrt": at.empty(2),
    }
    for framework, caller in callers.items():
        like = TensorView(caller)
        result = empty_like_caller(like, (3, 5), name)
        TensorView(result).numpy()[...] = np.arange(15).reshape(3, 5).astype(numpy_dtype)
        result = to_caller(result, framework)
        assert type(result) is type(caller)
        out = TensorView(result)
        assert out.dtype.name == name and out.framework == framework
        assert np.array_equal(out.numpy().astype(np.float32), np.arange(15).reshape(3, 5))


def test_torch_results_ignore_the_default_device():
    with torch.device("meta"):
        out = empty_like_caller(TensorView(torch.zeros(2, device="cpu")), (3,), "float32")
    assert out.device.type == "cpu"


def test_current_stream_of_cpu_arrays():
    assert current_stream(torch.zeros(2)) is None
    assert current_stream(np.zeros(2)) is None


@pytest.mark.parametrize("versioned", [False, True])
def test_c89_deleter_without_the_interpreter_lock_and_in_a_foreign_thread(versioned, take_over):
    """ctypes lets go of the lock around the call; the thread is one that Python has not seen."""
    x, dead = _counted()
    capsule = x.__dlpack__(max_version=(1, 0) if versioned else None)
    delete = take_over(capsule)
    del x, capsule
    gc.collect()
    assert dead() is not None
    thread = threading.Thread(target=delete)
    thread.start()
    thread.join()
    gc.collect()
    assert dead() is None


def test_export_survives_the_interpreter(tmp_path):
    """A consumer may free at exit, after the interpreter is gone."""
    import os
    import subprocess
    import sys

    code = "import torch, attnrt as at\nt = torch.from_dlpack(at.empty(3))\ntorch.keep = t\nc = at.empty(3).__dlpack__()\n"
    env = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(at.__file__))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
