# SPDX-License-Identifier: Apache-2.0
"""Argument checks: small functions that return the checked value or raise a typed error that names the argument."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, DtypeError
from attnrt.reading import native
from attnrt.tensor import TensorView

__all__ = [
    "check_dtype",
    "check_shape",
    "flag",
    "host_ints",
    "indptr",
    "integer",
    "one_of",
    "real",
]

_INT32 = np.dtype(np.int32)
_INT32_MAX = 2**31 - 1


def integer(value: Any, label: str, low: int | None = None, high: int | None = None) -> int:
    """An integer in [low, high] (each optional, inclusive); bool and float are refused, NumPy integers taken."""
    if isinstance(value, (bool, np.bool_)):
        raise DtypeError(label, "must be an integer", f"{value!r} (bool)")
    try:
        number = operator.index(value)
    except TypeError:
        raise DtypeError(label, "must be an integer", f"{value!r} ({type(value).__name__})") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise ArgumentError(label, f"must be {_range(low, high)}", number)
    return number


def real(value: Any, label: str, low: float | None = None, above: float | None = None) -> float:
    """A finite number, at least ``low`` or greater than ``above``; bool, complex, strings and arrays are refused."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise DtypeError(label, "must be a number", f"{value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:  # an integer past every float
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(label, "must be finite", number)
    if low is not None and number < low:
        raise ArgumentError(label, f"must be at least {low}", number)
    if above is not None and number <= above:
        raise ArgumentError(label, f"must be greater than {above}", number)
    return number


def flag(value: Any, label: str) -> bool:
    """True or False; nothing that merely counts as one."""
    if not isinstance(value, (bool, np.bool_)):
        raise DtypeError(label, "must be True or False", f"{value!r} ({type(value).__name__})")
    return bool(value)


def one_of(value: Any, label: str, choices: tuple[Any, ...]) -> Any:
    """One of a few values."""
    if value not in choices:
        raise ArgumentError(label, f"must be one of {', '.join(map(repr, choices))}", repr(value))
    return value


def check_shape(view: TensorView, label: str, shape: tuple[int | None, ...], names: str = "") -> TensorView:
    """``view`` if its shape is ``shape`` (None: any size); ``names`` says what the axes are ("[rows, heads]")."""
    have = view.shape
    if len(have) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, have, strict=True)
    ):
        return view
    want = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
    raise ArgumentError(label, f"must have shape {names + ' = ' if names else ''}{want}", list(have))


def check_dtype(view: TensorView, label: str, *allowed: Any) -> TensorView:
    """``view`` if its dtype is one of ``allowed`` (Dtype objects)."""
    if view.dtype not in allowed:
        raise DtypeError(label, f"must be {' or '.join(map(str, allowed))}", view.dtype)
    return view


def host_ints(
    x: Any,
    label: str,
    *,
    length: int | None = None,
    low: int | None = None,
    high: int | None = None,
    monotone: bool = False,
    ndim: int = 1,
) -> np.ndarray:
    """A host array of int32 for the index machinery.

    Parameters
    ----------
    x : array or sequence of integers
        NumPy, a list, a CPU tensor of a framework. Other integer types are converted if no value changes;
        floats and bools are refused, for a list too.
    length : int, optional
        Required number of entries along the first axis.
    low, high : int, optional
        Inclusive range of the values.
    monotone : bool
        Whether the values must never fall (1-D).
    ndim : int
        Required rank.

    Returns
    -------
    ndarray, int32, row-major and compact
        The caller's own memory where that is what it gave: copy it to keep it.

    Raises
    ------
    DtypeError, ArgumentError
        They name the first entry that breaks a rule.
    """
    array = x if type(x) is np.ndarray else _host_array(x, label)
    if array.ndim != ndim:
        raise ArgumentError(
            label, f"must have {ndim} axis{'' if ndim == 1 else 'es'}", f"shape {array.shape}"
        )
    if length is not None and array.shape[0] != length:
        raise ArgumentError(label, f"must have {length} entries", array.shape[0])
    if array.dtype is not _INT32 or not array.flags.c_contiguous:
        array = _to_int32(array, label)
    if (low is not None or high is not None or monotone) and array.size:
        least, most, rising = native.scan(array)
        if low is not None and least < low:
            _fail(array, array < low, label, f"must be at least {low}")
        if high is not None and most > high:
            _fail(array, array > high, label, f"must be at most {high}")
        if monotone and not rising:
            _fail(array, np.diff(array, prepend=array[:1]) < 0, label, "must never fall")
    return array


def indptr(x: Any, label: str, *, length: int | None = None, total: int | None = None) -> np.ndarray:
    """Offsets of a ragged array: int32, at least one entry, the first 0, never falling.

    Parameters
    ----------
    length : int, optional
        Required number of entries (rows + 1).
    total : int, optional
        Required last entry.
    """
    array = host_ints(x, label, length=length, monotone=True)
    if array.shape[0] == 0:
        raise ArgumentError(label, "must have at least one entry", 0, "No rows is [0]")
    if array[0] != 0:
        raise ArgumentError(label, "must begin with 0", f"{label}[0] = {array[0]}")
    if total is not None and array[-1] != total:
        raise ArgumentError(label, f"must end with {total}", f"{label}[-1] = {array[-1]}")
    return array


def _range(low: int | None, high: int | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"from {low} to {high}"


def _fail(array: np.ndarray, bad: np.ndarray, label: str, rule: str) -> None:
    where = np.unravel_index(int(np.argmax(bad)), array.shape)
    place = ", ".join(str(int(i)) for i in where)
    raise ArgumentError(label, rule, f"{label}[{place}] = {array[where]}")


def _host_array(x: Any, label: str) -> np.ndarray:
    if isinstance(x, (list, tuple, range)):
        return _from_sequence(x, label)
    try:
        view = TensorView(x)
    except (ArgumentError, DtypeError) as error:
        raise type(error)(label, error.rule, error.got, error.hint) from error
    if view.device.kind != "cpu":
        raise ArgumentError(
            label, "must be a host array", view.device, "Counts and structure are read by plan()"
        )
    return view.numpy()


def _from_sequence(x: Any, label: str) -> np.ndarray:
    """A list; an element that is not an integer is an error, though NumPy would make room for it."""
    try:
        array = np.asarray(x)
    except (ValueError, OverflowError) as error:
        raise ArgumentError(label, "must be a rectangular array of integers", str(error)) from error
    if array.size == 0:
        return np.empty(array.shape, np.int32)
    if array.dtype.kind == "O":
        raise ArgumentError(label, "must hold integers that fit in int32", "objects or larger numbers")
    return array


def _to_int32(array: np.ndarray, label: str) -> np.ndarray:
    if array.dtype.kind not in "iu":
        raise DtypeError(
            label, "must be int32", array.dtype, "Convert it; only integer types are taken as they are"
        )
    if array.size and (array.dtype.itemsize > 4 or array.dtype == np.uint32):
        if array.dtype == np.int64 and array.flags.c_contiguous:
            least, most, _ = native.scan(array)
        else:
            least, most = int(array.min()), int(array.max())
        if least < -_INT32_MAX - 1 or most > _INT32_MAX:
            raise ArgumentError(label, "must hold values that fit in int32", f"values from {least} to {most}")
    return np.ascontiguousarray(array, np.int32)
