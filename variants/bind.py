# SPDX-License-Identifier: Apache-2.0
"""Check parameter values and pack them for a kernel.

Values travel as one 64-byte record per parameter (``ParamRef`` of include/attnrt_variant.h): a number in
place, or the address, strides and sizes of an array. Nothing of a value enters compiled code. Numbers and
per-head arrays are checked to be finite; arrays indexed by ctx are not scanned (they can be large and may
hold -inf on purpose).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, DtypeError
from attnrt.variants.variant import Param

__all__ = [
    "PARAM_REF",
    "BoundParams",
    "Place",
    "bind_params",
    "check_default",
    "check_names",
    "host_value",
    "read_value",
]

#: Layout of ParamRef, 64 bytes. ptr: address or 0; imm: the number's bits if ptr is 0; strides: elements,
#: 64-bit.
PARAM_REF = np.dtype(
    [("ptr", "<u8"), ("imm", "<u8"), ("strides", "<i8", (4,)), ("sizes", "<i4", (4,))], align=False
)
assert PARAM_REF.itemsize == 64

#: Copies a host array to where kernels can read it: (name, array) -> object with ptr, shape, strides, dtype.
Place = Callable[[str, np.ndarray], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundParams:
    """Parameter values ready for a launch.

    Attributes
    ----------
    table : numpy.ndarray
        [params] of PARAM_REF, in slot order; its bytes are what a kernel gets.
    host : mapping
        Name to NumPy array (0-d for a number) where the value is in host memory, else None.
    keep : tuple
        Objects whose memory the table points to; hold them until the launch is done.
    """

    table: np.ndarray
    host: Mapping[str, np.ndarray | None]
    keep: tuple[Any, ...]


def _number(param: Param, value: Any) -> np.ndarray:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__float__") or isinstance(value, str):
        raise DtypeError(param.name, f"must be a {param.dtype} number or array", type(value).__name__)
    if (
        isinstance(value, int) and abs(value) >= 2**127
    ):  # too large for a float: Python would raise OverflowError
        raise ArgumentError(
            param.name, f"must fit in {param.dtype}", f"a number of {value.bit_length()} bits"
        )
    if param.dtype == "float32":
        return _rounded(param, np.asarray(float(value)))
    if not math.isfinite(value) or value != int(value):
        raise ArgumentError(param.name, "must be a whole number", value)
    half = 2 ** (31 if param.dtype == "int32" else 63)
    if not -half <= int(value) < half:
        raise ArgumentError(param.name, f"must fit in {param.dtype}", value)
    return np.asarray(int(value), dtype=param.dtype)


def _rounded(param: Param, value: np.ndarray) -> np.ndarray:
    """Floats as float32, to the nearest; a finite one that float32 does not reach is refused."""
    with np.errstate(all="ignore"):
        new = value.astype(np.float32)
    over = np.isinf(new) & np.isfinite(value)
    if over.any():
        raise ArgumentError(param.name, "must fit in float32", value[over].flat[0])
    return new


def _cast(param: Param, value: np.ndarray) -> np.ndarray:
    """To the parameter's dtype: floats are rounded to float32, all else converts only if no value changes."""
    if value.dtype == np.dtype(param.dtype):
        return value
    if value.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2") and param.dtype == "float32":
        return value.astype(np.float32)  # of ml_dtypes, which NumPy calls kind V; float32 holds them all
    if value.dtype.kind not in "iuf":
        raise DtypeError(param.name, f"must be {param.dtype}", value.dtype)
    if value.dtype.kind == "f" and param.dtype == "float32":
        return _rounded(param, value)
    with np.errstate(all="ignore"):
        nan = np.isnan(value)
        new = value.astype(param.dtype)
        same = (new.astype(value.dtype) == value) | nan
    if not same.all() or nan.any():
        raise DtypeError(param.name, f"must be {param.dtype}: converting would change values", value.dtype)
    return new


def _check_values(param: Param, value: np.ndarray) -> None:
    if param.rank > 0:
        return
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ArgumentError(
            param.name, "must be finite", value if value.ndim == 0 else "an array with inf or NaN"
        )
    if param.rule == "positive" and not (value > 0).all():
        raise ArgumentError(param.name, "must be above 0", value.min())
    if param.rule == "window" and not (value >= -1).all():
        raise ArgumentError(param.name, "must be >= 0, or -1 for unbounded", value.min())


def host_value(param: Param, value: Any) -> np.ndarray:
    """A number or host array in the parameter's dtype, checked except for head counts."""
    if isinstance(value, (list, tuple)):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.ndim:
        array = _cast(param, value)
    else:
        array = _number(param, value.item() if isinstance(value, (np.ndarray, np.generic)) else value)
    if param.rank == 0 and array.ndim > 1:
        raise ArgumentError(
            param.name, "must be a number, an array [1] or an array [heads]", list(array.shape)
        )
    _check_array_shape(param, array.shape)
    _check_values(param, array)
    return array


def _check_array_shape(param: Param, shape: tuple[int, ...]) -> None:
    if param.rank == 0:
        return
    if len(shape) != param.rank:
        raise ArgumentError(param.name, f"must be an array of rank {param.rank}", f"rank {len(shape)}")
    if param.shape is not None and tuple(shape) != param.shape:
        raise ArgumentError(param.name, f"must have shape {list(param.shape)}", list(shape))
    if 0 in shape or max(shape) >= 2**31:
        raise ArgumentError(param.name, "must have sizes from 1 to 2**31 - 1", list(shape))


def check_default(param: Param) -> Param:
    """The parameter with its default checked and converted, so that a bad one fails where it was written."""
    if param.default is None or callable(param.default):
        return param
    value = host_value(param, param.default)
    if value.ndim:
        value = value.copy()
        value.flags.writeable = False
        return dataclasses.replace(param, default=value)
    return dataclasses.replace(param, default=value.item())


def check_names(params: tuple[Param, ...], values: Mapping[str, Any]) -> None:
    """Raise on a value that no parameter takes."""
    known = {p.name for p in params}
    for name in values:
        if name not in known:
            hint = f"parameters of this variant: {', '.join(sorted(known)) or 'none'}"
            raise ArgumentError(f"argument {name}", "is not a parameter of the variant", hint=hint)


def bind_params(
    params: tuple[Param, ...],
    values: Mapping[str, Any],
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    place: Place | None = None,
) -> BoundParams:
    """Check ``values`` (defaults fill what is missing) and pack them.

    Parameters
    ----------
    params : tuple of Param
        The table of a compiled variant.
    values : mapping
        Name to number, or to an array of any framework (TensorView reads it).
    num_qo_heads, num_kv_heads : int
        Lengths that an array with one number per head must have.
    place : callable or None
        Copies host arrays to the device; None: kernels read host memory, and device arrays are refused. That
        a device array lies on the right device is the caller's check.

    Raises
    ------
    ArgumentError
        Unknown or missing names, shapes, ranges, not finite.
    DtypeError
        A dtype that would change values by more than rounding to float32.
    """
    check_names(params, values)
    records: list[tuple] = []
    host: dict[str, np.ndarray | None] = {}
    keep: list[Any] = []
    for param in params:
        heads = num_qo_heads if param.heads == "qo" else num_kv_heads
        value = values.get(param.name)
        if value is None:
            value = param.default(heads) if callable(param.default) else param.default
        if value is None:
            raise ArgumentError(param.name, "must be given", hint=f"run(..., {param.name}=...)")
        record, array, owner = _pack(param, value, heads, place)
        records.append(record)
        host[param.name] = array
        if owner is not None:
            keep.append(owner)
    return BoundParams(table=np.array(records, dtype=PARAM_REF), host=host, keep=tuple(keep))


def read_value(value: Any) -> Any:
    """Arrays of other frameworks: host memory as NumPy over the same memory, device memory as a view."""
    if isinstance(value, (numbers.Real, np.ndarray, np.generic, list, tuple, str)):
        return value
    if not hasattr(value, "ptr") and (
        hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    ):
        from attnrt.tensor import TensorView

        value = TensorView(value)
    if hasattr(value, "ptr") and value.device.kind == "cpu":
        return value.numpy()
    return value


def _device_record(param: Param, value: Any, heads: int, place: Place | None) -> tuple:
    if place is None:
        raise ArgumentError(
            param.name, "must be in host memory for this backend", f"memory of {value.device}"
        )
    if str(value.dtype) != param.dtype:
        raise DtypeError(param.name, f"must be {param.dtype}", value.dtype)
    _check_array_shape(param, tuple(value.shape))
    return _array_record(param, value.ptr, tuple(value.shape), tuple(value.strides), heads)


def _pack(param: Param, value: Any, heads: int, place: Place | None) -> tuple[tuple, np.ndarray | None, Any]:
    value = read_value(value)
    if hasattr(value, "ptr"):
        return _device_record(param, value, heads, place), None, value
    array = host_value(param, value)
    if param.rank == 0 and array.size == 1:
        bits = int(array.reshape(()).view(f"<u{array.itemsize}"))
        return (0, bits, (0,) * 4, (1,) * 4), array.reshape(()), None
    owner: Any = array
    if place is not None:
        _array_record(param, 0, array.shape, (0,) * array.ndim, heads)  # checked before anything is copied
        owner = place(param.name, np.ascontiguousarray(array))
        return _array_record(param, owner.ptr, array.shape, tuple(owner.strides), heads), array, owner
    strides = tuple(s // array.itemsize for s in array.strides)
    if any(s % array.itemsize for s in array.strides):
        array = owner = np.ascontiguousarray(array)
        strides = tuple(s // array.itemsize for s in array.strides)
    return _array_record(param, array.ctypes.data, array.shape, strides, heads), array, owner


def _array_record(
    param: Param, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], heads: int
) -> tuple:
    if param.rank == 0:
        count = int(np.prod(shape, dtype=np.int64))
        if len(shape) > 1 or count not in (1, heads):
            rule = f"must be a number, an array [1] or an array [{heads}] (one per {param.heads} head)"
            raise ArgumentError(param.name, rule, list(shape))
        if count == 1:
            shape, strides = (1,), (0,)
    pad = 4 - len(shape)
    return (ptr, 0, tuple(strides) + (0,) * pad, tuple(shape) + (1,) * pad)
