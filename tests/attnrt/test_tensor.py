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
