# SPDX-License-Identifier: Apache-2.0
"""Reading arrays of others: capsules, devices, streams, interfaces, and what is refused with which words."""

import gc
import sys

import ml_dtypes
import numpy as np
import pytest

from attnrt.errors import ArgumentError, DtypeError
from attnrt.tensor import TensorView, signature

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
@pytest.mark.parametrize("takes_version", [True, False])
def test_c89_capsule_lifetime(producer, version, takes_version):
    data = np.arange(6, dtype=np.float32)
    p = producer(data, shape=(2, 3), version=version, takes_version=takes_version)
    v = TensorView(p)
    assert v.strides == (3, 1) and np.array_equal(v.numpy(), data.reshape(2, 3))
    assert p.asked == [{"max_version": (1, 1)} if takes_version else {}]
    sub = v.take(0, 1)
    del v
    gc.collect()
    assert p.deleted == 0
    assert list(sub.numpy()) == [3, 4, 5]
    del sub
    gc.collect()
    assert p.deleted == 1


def test_c89_a_capsule_is_taken_once(producer, name_of_capsule):
    p = producer(np.zeros(3, np.float32), shape=(3,))
    capsule = p.__dlpack__()

    class Twice:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return capsule

    v = TensorView(Twice())
    assert name_of_capsule(capsule) == "used_dltensor_versioned"
    with pytest.raises(ArgumentError, match="nobody has taken; got consumed"):
        TensorView(Twice())
    del v
    gc.collect()
    assert p.deleted == 1


def test_a_newer_major_version_is_refused_and_not_consumed(producer):
    p = producer(np.zeros(3, np.float32), shape=(3,), version=(2, 0))
    with pytest.raises(ArgumentError, match="DLPack version 2"):
        TensorView(p)
    assert p.deleted == 0


def test_readonly_flag(producer):
    p = producer(np.zeros(3, np.float32), shape=(3,), flags=1)
    assert TensorView(p).readonly and not TensorView(p).numpy().flags.writeable
    x = np.zeros(3)
    x.flags.writeable = False
    assert TensorView(x).readonly


def test_c90_lanes_and_unknown_codes(producer):
    data = np.zeros(16, np.float32)
    with pytest.raises(DtypeError, match="4 lanes"):
        TensorView(producer(data, shape=(4,), lanes=4))
    for code, width in ((5, 64), (7, 8), (17, 4), (2, 128), (3, 64)):
        with pytest.raises(DtypeError, match=f"code {code} with {width} bits"):
            TensorView(producer(data, shape=(2,), code=code, bits=width))


def test_devices_of_producers(producer):
    data = np.zeros(4, np.float32)
    v = TensorView(producer(data, shape=(4,), device=(2, 1)))
    assert str(v.device) == "cuda:1" and v.__dlpack_device__() == (2, 1)
    with pytest.raises(ArgumentError, match="CPU memory; got cuda:1"):
        v.numpy()
    with pytest.raises(ArgumentError, match=r"DLPack device \(10, 0\)"):
        TensorView(producer(data, shape=(4,), device=(10, 0)))


def test_c87_stream_that_a_consumer_passes(producer):
    p = producer(np.zeros(4, np.float32), shape=(4,), device=(2, 0))
    TensorView(p)
    TensorView(p, stream=1234)
    assert [k["stream"] for k in p.asked] == [-1, 1234]
    cpu = producer(np.zeros(4, np.float32), shape=(4,))
    TensorView(cpu, stream=1234)
    assert "stream" not in cpu.asked[0]


class _CudaInterface:
    def __init__(self, **changes):
        self.data = np.zeros(12, np.float32)
        self.changes = changes

    @property
    def __cuda_array_interface__(self):
        own = {"shape": (3, 4), "typestr": "<f4", "data": (self.data.ctypes.data, True), "version": 3}
        return own | self.changes


def test_cuda_array_interface():
    x = _CudaInterface()
    v = TensorView(x)
    assert (str(v.device), v.strides, v.readonly, v.ptr) == ("cuda:0", (4, 1), True, x.data.ctypes.data)
    assert v.__cuda_array_interface__["data"] == (v.ptr, True)
    assert not hasattr(v, "__array_interface__")
    assert TensorView(_CudaInterface(strides=(4, -4), shape=(2, 2))).strides == (1, -1)
    with pytest.raises(ArgumentError, match="mask"):
        TensorView(_CudaInterface(mask=object()))
    with pytest.raises(DtypeError, match="known dtype"):
        TensorView(_CudaInterface(typestr="<c8"))


def test_array_interface_of_someone_elses_type():
    class Wrapper:
        def __init__(self, x):
            self.__array_interface__ = x.__array_interface__
            self.dtype = x.dtype
            self.x = x

    for x in (np.arange(6.0).reshape(2, 3).T, np.ones(3, ml_dtypes.bfloat16), np.zeros(2, bool)):
        v = TensorView(Wrapper(x))
        assert v.dtype.numpy == x.dtype and np.array_equal(bits(v.numpy()), bits(x))


class TestRefusals:
    def test_requires_grad(self):
        with pytest.raises(ArgumentError, match=r"not require grad.*detach"):
            TensorView(torch.zeros(3, requires_grad=True))
        with pytest.raises(ArgumentError, match="detach"):
            TensorView(torch.nn.Parameter(torch.zeros(3)))
        assert signature(torch.zeros(3, requires_grad=True)) is None

    @pytest.mark.parametrize("shape", [(4,), (), (3, 1), (2, 3)])
    def test_negation_bit(self, shape):
        z = torch.randn(shape, dtype=torch.complex64).conj().imag
        assert z.is_neg()
        with pytest.raises(ArgumentError, match="resolve_neg"):
            TensorView(z)
        assert np.array_equal(TensorView(z.resolve_neg()).numpy(), z.resolve_neg().numpy())
        real = torch.randn(shape, dtype=torch.complex64).real
        assert np.array_equal(TensorView(real).numpy(), real.numpy())

    def test_torch_tensors_without_strided_memory(self):
        with pytest.raises(ArgumentError, match="to_dense"):
            TensorView(torch.eye(3).to_sparse())
        with pytest.raises(ArgumentError):
            TensorView(torch.zeros(3, device="meta"))
        with pytest.raises((ArgumentError, DtypeError)):
            TensorView(torch.zeros(3, dtype=torch.complex64))
        with pytest.raises((ArgumentError, DtypeError)):
            TensorView(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8))

    def test_fake_tensor(self):
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode() as mode, pytest.raises((ArgumentError, DtypeError)):
            TensorView(mode.from_tensor(torch.zeros(3)))

    def test_jax_tracers(self):
        with pytest.raises(DtypeError, match=r"JAX tracer.*pure_callback"):
            jax.jit(lambda x: TensorView(x).ptr)(jnp.zeros(3))
        with pytest.raises(DtypeError, match="JAX tracer"):
            jax.vmap(lambda x: TensorView(x).ptr)(jnp.zeros((3, 2)))

    def test_deleted_jax_array(self):
        x = jnp.zeros(3) + 1
        x.delete()
        with pytest.raises(ArgumentError, match="deleted"):
            TensorView(x)

    def test_masked_array(self):
        with pytest.raises(ArgumentError, match=r"masked.*filled"):
            TensorView(np.ma.masked_array(np.zeros(3), mask=[0, 1, 0]))

    @pytest.mark.parametrize("dtype", [">f4", "c8", "O", "S3", "M8[s]"])
    def test_numpy_dtypes(self, dtype):
        with pytest.raises(DtypeError, match="known dtype"):
            TensorView(np.zeros(3, dtype))

    @pytest.mark.parametrize("x", [[1, 2], 3.0, None, "abc", np.float32(3), (), object(), np.zeros])
    def test_not_an_array(self, x):
        with pytest.raises(DtypeError, match=r"must be an array.*asarray"):
            TensorView(x)

    def test_a_producer_that_raises(self):
        class Broken:
            def __dlpack_device__(self):
                return (1, 0)

            def __dlpack__(self, **_):
                raise BufferError("the dog ate it")

        with pytest.raises(ArgumentError, match="the dog ate it"):
            TensorView(Broken())


def test_sharded_jax_arrays():
    """Two CPU devices need a fresh process."""
    import subprocess

    code = (
        "import jax, numpy as np, pytest\n"
        "import attnrt as at\n"
        "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "mesh = Mesh(np.array(jax.devices()), ('i',))\n"
        "for spec in (P('i'), P()):\n"
        "    x = jax.device_put(jax.numpy.arange(4.0), NamedSharding(mesh, spec))\n"
        "    with pytest.raises(at.ArgumentError, match='addressable_shards'):\n"
        "        at.TensorView(x)\n"
        "    assert at.TensorView(x.addressable_shards[0].data).size == (2 if spec == P('i') else 4)\n"
    )
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
