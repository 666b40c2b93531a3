# SPDX-License-Identifier: Apache-2.0
"""Reading a user's index arrays: once, checked, owned by us and frozen.

Host arrays become int32, C-contiguous, read-only copies, so nothing the caller does later can change a plan. Wider integers
are converted when every value fits; anything else is a typed error that names the array. Arrays on a device are *bound*:
kept as they are after a look at dtype, rank and shape. The hot path (int32 NumPy in) is written for few calls: a NumPy call
costs more than the work on a batch's lengths, and one native scan finds smallest, largest and order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt import checks
from attnrt.errors import ArgumentError, DtypeError
from attnrt.reading import native
from attnrt.tensor import TensorView

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
    "positions_of",
    "zeros",
]

INT_MAX = 2**31 - 1

_INT32 = np.dtype(np.int32)
_DEVICE_TYPES = (2, 13)  # DLPack: CUDA, CUDA managed


def frozen(array: np.ndarray) -> np.ndarray:
    """The array itself, made read-only."""
    array.setflags(write=False)
    return array


_iota = frozen(np.arange(4096, dtype=np.int32))
_zeros = frozen(np.zeros(4096, dtype=np.int32))


def iota(count: int) -> np.ndarray:
    """Read-only int32 [count], 0, 1, 2, ...: a view of one growing array."""
    global _iota
    known = _iota  # another thread may put a shorter one there meanwhile
    if count > len(known):
        _iota = known = frozen(np.arange(2 * count, dtype=np.int32))
    return known[:count]


def zeros(count: int) -> np.ndarray:
    """Read-only int32 [count] of 0: a view of one growing array."""
    global _zeros
    known = _zeros
    if count > len(known):
        _zeros = known = frozen(np.zeros(2 * count, dtype=np.int32))
    return known[:count]


def is_device(x: Any) -> bool:
    """Whether ``x`` lies on a GPU, by its own word and without importing anything."""
    if type(x) is np.ndarray or isinstance(x, (list, tuple, int)):
        return False
    if hasattr(x, "__cuda_array_interface__"):
        return True
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and int(where()[0]) in _DEVICE_TYPES


def host_ints(name: str, x: Any, *, length: int | None = None, of: str = "", ndim: int = 1) -> np.ndarray:
    """``x`` as an owned, frozen, C-contiguous int32 array.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    x : array or (nested) sequence of integers
        On the host; any integer dtype whose values fit.
    length : int, optional
        Entries that the first axis must have; ``of`` says what they count.
    ndim : int

    Raises
    ------
    DtypeError
        Not integers.
    ArgumentError
        Wrong rank, wrong length, a value that int32 can't hold, or an array on a device.
    """
    if type(x) is np.ndarray and x.dtype is _INT32 and x.ndim == ndim:
        array = x.copy()
    else:
        array = checks.host_ints(x, name, ndim=ndim)
        array = array.copy()
    if length is not None and array.shape[0] != length:
        raise ArgumentError(
            name, f"must have {length} entries ({of})" if of else f"must have {length} entries", len(array)
        )
    array.setflags(write=False)
    return array


def bound_array(
    name: str, x: Any, *, dtype: str = "int32", at_least: int = 0, exactly: int | None = None, of: str = ""
) -> Any:
    """A device array, kept as it is after a look at dtype, rank, length and contiguity."""
    view = TensorView(x)
    if str(view.dtype) != dtype:
        hint = "A bound array is read in place and is never converted."
        raise DtypeError(name, f"must be {dtype} on a device", view.dtype, hint)
    if view.ndim != 1:
        raise ArgumentError(name, "must have 1 axis", f"shape {list(view.shape)}")
    if not view.is_compact:
        raise ArgumentError(name, "must be contiguous on a device", f"strides {list(view.strides)}")
    if exactly is not None and view.shape[0] != exactly:
        raise ArgumentError(
            name,
            f"must have {exactly} entries ({of})" if of else f"must have {exactly} entries",
            view.shape[0],
        )
    if view.shape[0] < at_least:
        raise ArgumentError(name, f"must have at least {at_least} entries", view.shape[0])
    return x


def flat_bound(name: str, x: Any, *, ndim: int) -> tuple[tuple[int, ...], Any]:
    """Shape and flat form of a contiguous int32 device array of ``ndim`` axes."""
    view = TensorView(x)
    if view.ndim != ndim:
        raise ArgumentError(name, f"must have {ndim} axes", f"shape {list(view.shape)}")
    if not view.is_compact:
        hint = "Pass whole rows, not a slice of their columns."
        raise ArgumentError(name, "must be contiguous on a device", f"strides {list(view.strides)}", hint)
    return view.shape, bound_array(name, x.reshape(-1))


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
    low, high, _ = native.scan(array)
    if low < (-1 if holes else 0):
        rule = "must hold block ids of at least 0 (-1: a hole)" if holes else "must not be negative"
        raise ArgumentError(name, rule, f"{low} at {_where(array == low)}")
    return high


def block_ids(name: str, x: Any, count: int, of: str) -> tuple[Any, int]:
    """(ids, largest) of a flat list of ``count`` block ids; a device array is bound, and its largest is -1."""
    if is_device(x):
        return bound_array(name, x, at_least=count), -1
    ids = host_ints(name, x, length=count, of=of)
    return ids, largest(name, ids, holes=True)


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
    if not native.scan(indptr)[2]:
        at = int(np.argmax(indptr[1:] < indptr[:-1]))
        raise ArgumentError(name, "must not fall", f"{indptr[at]}, {indptr[at + 1]} at {at}")
    lens = indptr[1:] - indptr[:-1]
    lens.setflags(write=False)
    return lens, native.scan(lens)[1] if len(lens) else 0


def positions_of(name: str, values: np.ndarray) -> np.ndarray:
    """Computed int64 positions as frozen int32; raises, naming the array that moved them, where one does not fit."""
    if values.size and not (values.min() >= -INT_MAX - 1 and values.max() <= INT_MAX):
        far = values.max() if values.max() > INT_MAX else values.min()
        raise ArgumentError(name, "must keep positions within int32", int(far))
    return frozen(values.astype(np.int32))


def page_size_of(value: Any, name: str = "page_size") -> int:
    """A page size as an int >= 1 that int32 holds."""
    return (
        value
        if type(value) is int and 0 < value <= INT_MAX
        else checks.integer(value, name, low=1, high=INT_MAX)
    )


def _where(flags: np.ndarray) -> str:
    at = [int(i) for i in np.argwhere(flags)[0]]
    return f"entry {at[0] if len(at) == 1 else at}"
