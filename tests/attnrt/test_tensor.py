# SPDX-License-Identifier: Apache-2.0
"""Reading arrays: what a view says is what the producer's own array says, and what cannot be read says why."""

import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import dtypes
from attnrt.errors import ArgumentError, DtypeError
from attnrt.tensor import TensorView, make_view, moved, signature, view, views

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def random_bits(rng, shape, name):
    """Random bytes as an array of any known dtype, NaN patterns included."""
    dtype = dtypes.DTYPES[name]
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return raw.view(dtype.numpy)[..., 0]


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def to_torch(array, name):
    width = dtypes.DTYPES[name].itemsize
    if name == "bool":
        return torch.from_numpy(array)
    carrier = torch.from_numpy(np.ascontiguousarray(array).view(f"int{8 * width}"))
    return carrier.view(getattr(torch, name))


@pytest.mark.parametrize("name", list(dtypes.DTYPES))
def test_numpy_every_dtype(name, rng):
    x = random_bits(rng, (3, 4, 5), name)
    v = TensorView(x)
    assert (v.ptr, v.shape, v.dtype.name) == (x.ctypes.data, (3, 4, 5), name)
    assert v.strides == tuple(s // x.itemsize for s in x.strides)
    assert v.framework == "numpy" and str(v.device) == "cpu" and not v.readonly and not v.immutable
    assert v.numpy() is x


@pytest.mark.parametrize("name", list(dtypes.DTYPES))
def test_torch_every_dtype(name, rng):
    x = random_bits(rng, (3, 4, 5), name)
    t = to_torch(x, name)
    v = TensorView(t)
    assert (v.ptr, v.shape, v.strides, v.dtype.name) == (t.data_ptr(), tuple(t.shape), t.stride(), name)
    assert v.framework == "torch"
    back = v.numpy()
    assert back.dtype == dtypes.DTYPES[name].numpy
    assert np.array_equal(bits(back), bits(x))
    assert back.ctypes.data == t.data_ptr()


@pytest.mark.parametrize("name", [*FLOATS[1:], "int32", "uint8", "bool"])
def test_jax_every_dtype(name, rng):
    x = random_bits(rng, (3, 4), name)
    j = jnp.asarray(x)
    v = TensorView(j)
    assert v.framework == "jax" and v.immutable and v.readonly
    assert v.shape == (3, 4) and v.dtype.name == name
    assert np.array_equal(bits(v.numpy()), bits(np.asarray(j)))
    assert not v.numpy().flags.writeable


LAYOUTS = {
    "transposed": lambda x: x.transpose(2, 0, 1),
    "strided": lambda x: x[::2, 1:, ::3],
    "padded": lambda x: x[..., :4],
    "one": lambda x: x[1:2, :, 2:3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8"])
def test_c80_c82_strided_views(layout, name, rng):
    base = random_bits(rng, (4, 6, 7), name)
    x = LAYOUTS[layout](base)
    if layout == "transposed":
        t = to_torch(base, name).permute(2, 0, 1)
    else:
        t = LAYOUTS[layout](to_torch(base, name))
    for array, address in ((x, x.ctypes.data), (t, t.data_ptr())):
        v = TensorView(array)
        assert v.ptr == address
        assert np.array_equal(bits(v.numpy()), bits(x))
        for n, have, own in zip(v.shape, v.strides, TensorView(x).strides, strict=True):
            assert n == 1 or have == own


def test_c80_stride_zero(rng):
    t = torch.randn(3, 1).expand(3, 5)
    assert TensorView(t).strides == (1, 0)
    x = np.broadcast_to(np.float32(3), (2, 2))
    v = TensorView(x)
    assert v.strides == (0, 0) and v.readonly


def test_strides_that_cannot_matter_are_canonical():
    x = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (1, 4, 1), (999 * 4, 4, 0))
    assert TensorView(x).strides == (4, 1, 1)
    assert TensorView(x).is_compact
    assert TensorView(torch.zeros(4).as_strided((1, 4, 1), (999, 1, 0))).strides == (4, 1, 1)


def test_c82_byte_offset_is_folded_in(producer):
    data = np.arange(9, dtype=np.float32)
    p = producer(data, shape=(8,), byte_offset=4)
    v = TensorView(p)
    assert v.ptr == data.ctypes.data + 4
    assert np.array_equal(v.numpy(), data[1:])
    t = torch.arange(9.0)[8:]
    assert TensorView(t).numpy()[0] == 8.0
    again = np.from_dlpack(v)
    assert again.ctypes.data == v.ptr


def test_c82_alignment_is_checked_after_the_offset(producer):
    data = np.arange(9, dtype=np.float32)
    with pytest.raises(ArgumentError, match="aligned to its items of 4 bytes"):
        TensorView(producer(data, shape=(8,), byte_offset=2))
    raw = np.zeros(41, np.uint8)[1:].view(np.float32)
    with pytest.raises(ArgumentError, match="aligned"):
        TensorView(raw)


@pytest.mark.parametrize("shape", [(1, 8, 0, 128), (0, 0, 0), (0,)])
def test_c84_zero_size(shape, producer):
    compact = TensorView(np.zeros(shape, np.float32)).strides
    for x in (
        np.zeros(shape, ml_dtypes.bfloat16),
        torch.zeros(shape),
        jnp.zeros(shape),
        producer(np.zeros(1, np.float32), shape=shape, null=True),
        producer(np.zeros(1, np.float32), shape=shape, strides=(7,) * len(shape), null=True),
        at.empty(shape),
    ):
        v = TensorView(x)
        assert v.shape == shape and v.size == 0 and v.nbytes == 0 and v.strides == compact
        assert v.numpy().shape == shape


def test_null_pointer_with_elements(producer):
    with pytest.raises(ArgumentError, match="null pointer"):
        TensorView(producer(np.zeros(1, np.float32), shape=(3,), null=True))


def test_scalar_array():
    v = TensorView(np.array(2.5, np.float32))
    assert v.shape == () and v.strides == () and v.numpy() == 2.5
    assert TensorView(torch.tensor(2.5)).numpy() == 2.5


def test_c86_negative_strides():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for y in (x[:, ::-1], x[::-1], x[::-1, ::-2]):
        v = TensorView(y)
        assert v.strides == tuple(s // 4 for s in y.strides) and v.ptr == y.ctypes.data
        other = make_view(v.ptr, v.shape, v.dtype, strides=v.strides, owner=v)
        assert np.array_equal(other.numpy(), y)
        with pytest.raises(ArgumentError, match="no negative stride"):  # a consumer may abort on it
            other.__dlpack__(max_version=(1, 0))


def test_strides_of_half_items():
    record = np.zeros(5, [("a", "f4"), ("b", "i2")])
    with pytest.raises(ArgumentError, match="whole items"):
        TensorView(record["a"])


@pytest.mark.parametrize("name", FLOATS[2:])
def test_unsigned_arrays_hold_the_bits(name, rng):
    x = random_bits(rng, (3, 8), name)
    unsigned = x.view(f"uint{8 * x.itemsize}")
    for array in (unsigned, jnp.asarray(unsigned), torch.from_numpy(unsigned)):
        v = TensorView(array, name)
        assert v.dtype.name == name and v.framework == TensorView(array).framework
        assert np.array_equal(bits(v.numpy()), bits(x))
    assert TensorView(x, name).dtype.name == name
    assert TensorView(TensorView(unsigned), name).dtype.name == name


@pytest.mark.parametrize(
    ("have", "want"),
    [
        ("float32", "float16"),
        ("int16", "float16"),
        ("uint8", "float16"),
        ("bfloat16", "float16"),
        ("uint16", "int16"),
    ],
)
def test_another_dtype_is_refused(have, want, rng):
    with pytest.raises(DtypeError, match=f"must be {want}.*got {have}"):
        TensorView(random_bits(rng, (4,), have), want)


def test_a_view_of_a_view_is_itself():
    v = TensorView(np.zeros(3))
    assert TensorView(v) is v and view(v) is v


def test_frozen():
    v = TensorView(np.zeros(3))
    for name in ("ptr", "shape", "owner"):
        with pytest.raises(AttributeError):
            setattr(v, name, 1)
    with pytest.raises(AttributeError):
        v.other = 1


def test_the_view_keeps_the_memory_alive():
    class Array(np.ndarray):
        pass

    x = np.zeros(3).view(Array)
    dead = weakref.ref(x)
    v = TensorView(x)
    array = v.numpy()
    del x, v
    gc.collect()
    assert dead() is not None and array[0] == 0
    del array
    gc.collect()
    assert dead() is None


def test_a_cycle_through_the_owner_is_collected():
    class Array(np.ndarray):
        pass

    x = np.zeros(3).view(Array)
    x.back = TensorView(x)
    dead = weakref.ref(x)
    del x
    gc.collect()
    assert dead() is None


def test_no_reference_is_leaked():
    x, t, b = np.zeros((2, 3)), torch.zeros(2, 3), np.zeros(3, ml_dtypes.bfloat16)
    for array in (x, t, b):
        before = sys.getrefcount(array)
        for _ in range(100):
            TensorView(array)
            views(array, array)
            signature(array, array)
        assert sys.getrefcount(array) == before
    watched = dtypes.float64
    before = sys.getrefcount(watched)
    for _ in range(1000):
        TensorView(x)
    assert sys.getrefcount(watched) - before < 10


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


class TestSignature:
    def test_equal_exactly_if_all_but_the_addresses_agree(self):
        t = torch.zeros(4, 6)
        key, pointers = signature(t, None, np.zeros(3))
        assert pointers[:2] == (t.data_ptr(), 0)
        assert signature(torch.ones(4, 6), None, np.ones(3))[0] == key
        for other in (
            *(
                torch.zeros(6, 4).T,
                torch.zeros(4, 5),
                torch.zeros(4, 6, dtype=torch.float64),
                torch.zeros(4, 6, 1),
            ),
            *(np.zeros((4, 6), np.float32), torch.zeros(24)),
        ):
            assert signature(other, None, np.zeros(3))[0] != key
        assert signature(t, np.zeros(3), None)[0] != key
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        assert signature(t, None, frozen)[0] != key

    def test_views(self):
        x = np.zeros((4, 6), np.float32)
        key, pointers = signature(TensorView(x))
        assert pointers == (x.ctypes.data,) and key == signature(x)[0]
        k, v = at.kv_interleaved(np.zeros((5, 2, 3)))
        key, pointers = signature(k, v)
        assert pointers == (k.ptr, v.ptr) and key == signature(v, k)[0] != signature(at.empty((5, 3)), v)[0]
        frozen = jnp.zeros((4, 6))
        assert signature(TensorView(frozen))[0] not in (key, signature(x)[0])

    def test_what_needs_the_slow_way(self):
        assert signature(jnp.zeros(3)) is None
        assert signature(torch.zeros(3), 7) is None
        with pytest.raises(ValueError, match="at most"):
            signature(*[np.zeros(1)] * 17)


def test_take_and_unstack(rng):
    x = rng.normal(size=(3, 4, 5)).astype(np.float32)[::-1, :, ::2]
    v = TensorView(x)
    for axis in (0, 1, 2, -1):
        for i in range(x.shape[axis]):
            assert np.array_equal(v.take(axis, i).numpy(), np.take(x, i, axis))
    assert [np.array_equal(part.numpy(), y) for part, y in zip(v.unstack(), x, strict=True)] == [True] * 3
    assert [part.shape for part in TensorView(np.zeros((2, 0, 3))).unstack()] == [(0, 3)] * 2
    for axis, i in ((3, 0), (-4, 0), (0, 3), (0, -1)):
        with pytest.raises(ArgumentError, match="inside axis"):
            v.take(axis, i)


def test_moved():
    x, y = np.zeros((2, 3)), np.ones((2, 3))
    v = moved(TensorView(x), y.ctypes.data, (y,))
    assert (v.numpy() == 1).all() and v.owner[0] is y and v.strides == (3, 1)
    part = moved(
        TensorView(x[:, :1]), x.ctypes.data + 8, x
    )  # an owner of another shape, then of another address
    assert part.numpy().shape == (2, 1) and part.numpy().ctypes.data == x.ctypes.data + 8
    assert moved(TensorView(x), y.ctypes.data, x).numpy().ctypes.data == y.ctypes.data
    for bad in ((x, 1, None), (v, -1, None), (v, 1)):
        with pytest.raises((TypeError, OverflowError)):
            moved(*bad)


def test_kv_interleaved(rng):
    x = random_bits(rng, (5, 2, 4, 3, 8), "bfloat16")
    k, v = at.kv_interleaved(x)
    assert np.array_equal(bits(k.numpy()), bits(x[:, 0])) and np.array_equal(bits(v.numpy()), bits(x[:, 1]))
    k, v = at.kv_interleaved(torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).transpose(0, 1), axis=0)
    assert np.array_equal(bits(v.numpy()), bits(x[:, 1]))
    k, _ = at.kv_interleaved(x.view(np.uint16), dtype="bfloat16")
    assert k.dtype.name == "bfloat16" and np.array_equal(bits(k.numpy()), bits(x[:, 0]))
    for bad in (0, 2, 9, -9):
        with pytest.raises(ArgumentError, match="size 2 along axis"):
            at.kv_interleaved(x, axis=bad)
