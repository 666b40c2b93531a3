# SPDX-License-Identifier: Apache-2.0
"""The element types attnrt knows, and the one place where anybody's name for one is understood."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from attnrt.errors import DtypeError

__all__ = [
    "ALIASES",
    "DTYPES",
    "Dtype",
    "as_dtype",
    "bfloat16",
    "bool_",
    "dtype_name",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Dtype:
    """One element type. There is one object per type, so ``is`` compares; ``str()`` gives the name.

    Attributes
    ----------
    name : str
        The canonical name, as NumPy and ml_dtypes spell it ("bfloat16", "float8_e4m3fn").
    itemsize : int
        Bytes per element.
    code : int
        DLPack type code (0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 e4m3fn, 12 e5m2).
    numpy : numpy.dtype
        The NumPy dtype; of ml_dtypes for the types that NumPy lacks.
    """

    name: str
    itemsize: int
    code: int
    numpy: np.dtype

    @property
    def bits(self) -> int:
        """Bits per element."""
        return 8 * self.itemsize

    @property
    def is_float(self) -> bool:
        """Whether the numbers are floating point."""
        return self.code not in (_INT, _UINT, _BOOL)

    @property
    def is_native(self) -> bool:
        """Whether NumPy itself knows the type, so that its array interface and DLPack can name it."""
        return self.code in (_INT, _UINT, _FLOAT, _BOOL)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Dtype({self.name!r})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return as_dtype, (self.name,)


_INT, _UINT, _FLOAT, _BFLOAT, _BOOL, _E4M3FN, _E5M2 = 0, 1, 2, 4, 6, 10, 12


def _make(code: int, scalar: type) -> Dtype:
    dtype = np.dtype(scalar)
    return Dtype(name=dtype.name, itemsize=dtype.itemsize, code=code, numpy=dtype)


float64 = _make(_FLOAT, np.float64)
float32 = _make(_FLOAT, np.float32)
float16 = _make(_FLOAT, np.float16)
bfloat16 = _make(_BFLOAT, ml_dtypes.bfloat16)
float8_e4m3fn = _make(_E4M3FN, ml_dtypes.float8_e4m3fn)
float8_e5m2 = _make(_E5M2, ml_dtypes.float8_e5m2)
int8 = _make(_INT, np.int8)
int16 = _make(_INT, np.int16)
int32 = _make(_INT, np.int32)
int64 = _make(_INT, np.int64)
uint8 = _make(_UINT, np.uint8)
uint16 = _make(_UINT, np.uint16)
uint32 = _make(_UINT, np.uint32)
uint64 = _make(_UINT, np.uint64)
bool_ = _make(_BOOL, np.bool_)

_ALL = (
    *(float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2),
    *(int8, int16, int32, int64, uint8, uint16, uint32, uint64, bool_),
)

DTYPES: dict[str, Dtype] = {d.name: d for d in _ALL}
"""Every known type by its canonical name."""

ALIASES: dict[str, str] = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bool_": "bool",
}
"""Other spellings, for strings only: a *dtype object* of ml_dtypes named float8_e4m3 is the type with
infinities, which is none of ours. "float" is the 32-bit type, as in torch and C."""

_BY_NUMPY: dict[np.dtype, Dtype] = {d.numpy: d for d in _ALL}


def as_dtype(dtype: object, label: str = "dtype") -> Dtype:
    """Understand anybody's name for an element type.

    Parameters
    ----------
    dtype : Dtype, str, numpy.dtype, scalar type or a framework's dtype
        "bfloat16", "fp8_e4m3", ``np.float32``, ``ml_dtypes.bfloat16``, ``torch.bfloat16``, ``jnp.bfloat16``.
        Frameworks are read by their printed name; none is imported.
    label : str
        The argument an error names.

    Raises
    ------
    DtypeError
        The type is unknown, or its byte order is not the machine's.
    """
    if type(dtype) is Dtype:
        return dtype
    if isinstance(dtype, str):
        found = _from_name(dtype, allow_alias=True)
    elif isinstance(dtype, np.dtype):
        found = _BY_NUMPY.get(dtype)
    elif str(type(dtype)) == "<class 'torch.dtype'>":
        found = _from_name(str(dtype), allow_alias=False)
    else:
        found = _from_scalar(dtype)
    if found is None:
        raise DtypeError(label, "must be a known dtype", _show(dtype), f"Known: {', '.join(DTYPES)}")
    return found


def dtype_name(dtype: object, label: str = "dtype") -> str:
    """The canonical name of anybody's dtype; as `as_dtype`."""
    return as_dtype(dtype, label).name


def _from_name(text: str, allow_alias: bool) -> Dtype | None:
    name = text.rpartition(".")[2].lower()  # "torch.bfloat16", "jnp.float32"
    if allow_alias:
        name = ALIASES.get(name, name)
    return DTYPES.get(name)


def _from_scalar(dtype: object) -> Dtype | None:
    """A scalar class (np.float32, jnp.bfloat16, float) or an object with a NumPy dtype in ``.dtype``."""
    if dtype is None or dtype is float:  # NumPy reads None and float as float64: too easily meant otherwise
        return None
    inner = getattr(dtype, "dtype", None)
    try:
        return _BY_NUMPY.get(inner if isinstance(inner, np.dtype) else np.dtype(dtype))  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None


def _show(dtype: object) -> str:
    if isinstance(dtype, np.dtype) and dtype.byteorder == ">":
        return f"{dtype} (big-endian)"
    return repr(dtype) if isinstance(dtype, str) else str(dtype)
