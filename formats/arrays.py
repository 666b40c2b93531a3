# SPDX-License-Identifier: Apache-2.0
"""Reading a user's index arrays: once, checked, owned by us and frozen.

Host arrays become int32, C-contiguous, read-only copies, so nothing the caller does later can change a plan. Wider integers
are converted when every value fits; anything else is a typed error that names the array. Arrays on a device are *bound*:
kept as they are after a look at dtype, rank and shape. The hot path (int32 NumPy in) is written for few NumPy calls: a call
costs more than the work on a batch's lengths. An unsigned view turns "any negative" and "largest" into one reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, DtypeError

__all__ = [
    "INT_MAX",
    "bound_array",
    "flat_bound",
    "frozen",
    "host_ints",
    "indptr_of",
    "iota",
    "is_device",
    "largest",
    "lens_of",
    "page_size_of",
    "zeros",
]

INT_MAX = 2**31 - 1

_DEVICE_TYPES = (2, 13)  # DLPack: CUDA, CUDA managed

_iota = np.arange(0, dtype=np.int32)
_zeros = np.zeros(0, dtype=np.int32)


def frozen(array: np.ndarray) -> np.ndarray:
    """The array itself, made read-only."""
    array.setflags(write=False)
    return array


def iota(count: int) -> np.ndarray:
    """Read-only int32 [count], 0, 1, 2, ...: a view of one growing array."""
    global _iota
    if count > len(_iota):
        _iota = frozen(np.arange(max(4096, 2 * count), dtype=np.int32))
    return _iota[:count]


def zeros(count: int) -> np.ndarray:
    """Read-only int32 [count] of 0: a view of one growing array."""
    global _zeros
    if count > len(_zeros):
        _zeros = frozen(np.zeros(max(4096, 2 * count), dtype=np.int32))
    return _zeros[:count]


def is_device(x: Any) -> bool:
    """Whether ``x`` lies on a GPU, by its own word and without importing anything."""
    if type(x) is np.ndarray or isinstance(x, (list, tuple, int)):
        return False
    if hasattr(x, "__cuda_array_interface__"):
        return True
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and int(where()[0]) in _DEVICE_TYPES


def host_ints(
    name: str, x: Any, *, length: int | None = None, of: str = "", ndim: int = 1, dtype: Any = np.int32
) -> np.ndarray:
    """``x`` as an owned, frozen, C-contiguous integer array.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    x : array or (nested) sequence of integers
        On the host; any integer dtype whose values fit.
    length : int, optional
        Entries that the first axis must have; ``of`` says what they count.
    ndim : int
    dtype : NumPy dtype
        int32, or int64 for slots.

    Raises
    ------
    DtypeError
        Not integers, or a value that int32 can't hold.
    ArgumentError
        Wrong rank, wrong length, or an array on a device.
    """
    if type(x) is not np.ndarray:
        x = _as_host(name, x, ndim)
    if x.ndim != ndim:
        raise ArgumentError(
            name,
            f"must have {ndim} axis" if ndim == 1 else f"must have {ndim} axes",
            f"shape {list(x.shape)}",
        )
    if length is not None and x.shape[0] != length:
        raise ArgumentError(name, f"must have {length} entries ({of})", f"{x.shape[0]}")
    if x.dtype == dtype:
        return frozen(x.copy())
    if x.dtype.kind not in "iu":
        raise DtypeError(
            name,
            f"must be {np.dtype(dtype).name}",
            x.dtype.name,
            "Indices are integers; convert them where they are made.",
        )
    converted = np.ascontiguousarray(x, dtype=dtype)
    if not np.array_equal(converted, x):
        bad = int(x[converted != x].flat[0])
        raise DtypeError(name, f"must hold values that fit {np.dtype(dtype).name}", bad)
    return frozen(converted if converted is not x else converted.copy())


def _as_host(name: str, x: Any, ndim: int) -> np.ndarray:
    """Anything on the host as a NumPy array, without changing a value."""
    if is_device(x):
        raise ArgumentError(
            name,
            "must be a host array",
            type(x).__name__,
            "plan() reads counts and structure; copy it to the host first. Only indices, masks and kv_lens can be bound.",
        )
    if isinstance(x, np.ndarray):
        return np.asarray(x)
    if isinstance(x, (int, float, str, bytes)) or x is None:
        raise ArgumentError(name, "must be an array", repr(x))
    try:
        array = (
            np.asarray(x) if not hasattr(x, "__dlpack__") or hasattr(x, "__array__") else np.from_dlpack(x)
        )
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ArgumentError(name, "must be an array of integers", type(x).__name__, str(error)) from None
    if array.size == 0 and isinstance(x, Sequence):  # [] has no dtype of its own
        array = array.astype(np.int32)
    return array


def bound_array(
    name: str, x: Any, *, dtype: str = "int32", at_least: int = 0, exactly: int | None = None
) -> Any:
    """A device array, kept as it is after a look at dtype, rank, length and contiguity.

    Objects with ``__cuda_array_interface__`` are read through it; those with DLPack alone by ``dtype``, ``shape``.
    """
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        shape = tuple(interface["shape"])
        found = np.dtype(interface["typestr"]).name
        strides = interface.get("strides")
        itemsize = np.dtype(interface["typestr"]).itemsize
    else:
        shape = tuple(x.shape)
        found = str(x.dtype).rsplit(".", maxsplit=1)[-1]
        strides, itemsize = None, 1
    if found != dtype:
        raise DtypeError(
            name,
            f"must be {dtype} on a device",
            found,
            "A bound array is read in place and is never converted.",
        )
    if len(shape) != 1:
        raise ArgumentError(name, "must have 1 axis", f"shape {list(shape)}")
    if strides is not None and shape[0] > 1 and strides[0] != itemsize:
        raise ArgumentError(name, "must be contiguous", f"stride {strides[0]} bytes")
    if exactly is not None and shape[0] != exactly:
        raise ArgumentError(name, f"must have {exactly} entries", shape[0])
    if shape[0] < at_least:
        raise ArgumentError(name, f"must have at least {at_least} entries", shape[0])
    return x


def flat_bound(name: str, x: Any, *, ndim: int) -> tuple[tuple[int, ...], Any]:
    """Shape and flat view of a contiguous int32 device array of ``ndim`` axes."""
    interface = getattr(x, "__cuda_array_interface__", {})
    shape = tuple(interface["shape"] if interface else x.shape)
    if len(shape) != ndim:
        raise ArgumentError(name, f"must have {ndim} axes", f"shape {list(shape)}")
    strides = interface.get("strides")
    if strides is not None and np.prod(shape) > 0:
        packed = [4 * int(np.prod(shape[i + 1 :])) for i in range(ndim)]
        if any(s != p for s, p, size in zip(strides, packed, shape, strict=True) if size > 1):
            hint = "Pass whole rows, not a slice of their columns."
            raise ArgumentError(
                name, "must be contiguous on a device", f"strides {list(strides)} bytes", hint
            )
    flat = x.reshape(-1)
    return shape, bound_array(name, flat, exactly=int(np.prod(shape)))


def indptr_of(lens: np.ndarray) -> np.ndarray:
    """Frozen int32 [len(lens) + 1]: where each list starts when lists of these lengths follow each other."""
    indptr = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=indptr[1:])
    if indptr[-1] > INT_MAX:
        raise ArgumentError("indices", "must have fewer than 2**31 entries", int(indptr[-1]))
    return frozen(indptr.astype(np.int32))


def largest(name: str, array: np.ndarray, *, holes: bool = False) -> int:
    """Largest value of an int32 array, -1 if empty; raises on a negative one (below -1 with ``holes``)."""
    if array.size == 0:
        return -1
    top = int(np.maximum.reduce(array.view(np.uint32), axis=None))
    if top <= INT_MAX:
        return top
    low = int(array.min())
    if low < (-1 if holes else 0):
        rule = "must hold block ids of at least 0 (-1: a hole)" if holes else "must not be negative"
        raise ArgumentError(name, rule, f"{low} at {_where(array == low)}")
    return int(array.max())


def lens_of(name: str, indptr: np.ndarray) -> tuple[np.ndarray, int]:
    """Frozen lengths between the entries of a monotone indptr, and the longest.

    Raises ArgumentError unless indptr starts at 0 and never falls.
    """
    if len(indptr) == 0:
        raise ArgumentError(
            name, "must have at least one entry", "none", "It holds one more entry than there are lists."
        )
    if indptr.item(0) != 0:
        raise ArgumentError(name, "must start at 0", indptr.item(0))
    lens = indptr[1:] - indptr[:-1]
    if len(lens) == 0:
        return lens, 0
    longest = int(np.maximum.reduce(lens.view(np.uint32)))
    # A fall shows as a huge unsigned length; sums that could wrap around are looked at in 64 bits.
    if longest * len(lens) > INT_MAX and int(np.diff(indptr.astype(np.int64)).min()) < 0:
        at = int(np.argmax(np.diff(indptr.astype(np.int64)) < 0))
        raise ArgumentError(name, "must not fall", f"{indptr[at]}, {indptr[at + 1]} at {at}")
    return frozen(lens), longest


def page_size_of(value: Any, name: str = "page_size") -> int:
    """A page size as an int >= 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise ArgumentError(name, "must be an integer of at least 1", repr(value))
    return int(value)


def _where(flags: np.ndarray) -> str:
    at = [int(i) for i in np.argwhere(flags)[0]]
    return f"entry {at[0] if len(at) == 1 else at}"
