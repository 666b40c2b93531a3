# SPDX-License-Identifier: Apache-2.0
"""The slow way of reading an array: every protocol in turn, and a typed error for each way it can fail.

The compiled reader takes the plain cases (a torch tensor, a NumPy array in order). What it is not sure about
comes here: arrays that only speak ``__dlpack__`` or an array interface, and all arrays that something is
wrong with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from attnrt.device import CPU, Device, as_device, from_dlpack_device
from attnrt.dtypes import DTYPES, Dtype, as_dtype
from attnrt.errors import ArgumentError, DtypeError

try:
    from attnrt import _tensor_native as native
except ImportError as error:
    raise ImportError(
        f"attnrt's C++ parts are not built in {Path(__file__).parent}. Run `pip install -e .` in the checkout (or `python "
        "setup.py build_ext --inplace`); after `pip install .` work outside of it: inside, Python finds the sources"
    ) from error
if getattr(native, "REVISION", 0) != 5:  # the number in native/tensor.cpp: a stale build says so at once
    raise ImportError(
        "attnrt._tensor_native is out of date; in a checkout run: python setup.py build_ext --inplace"
    )

__all__ = ["coerce", "compact_strides", "native", "read_slow"]

_BY_CODE = {(d.code, d.bits): d for d in DTYPES.values()}
_UINT = 1


def read_slow(x: Any, dtype: object, stream: object) -> Any:
    """Read any array into a TensorView; see `attnrt.tensor.TensorView` for what is taken and what is refused."""
    framework = type(x).__module__.partition(".")[0]
    framework = "jax" if framework == "jaxlib" else framework
    if isinstance(x, np.ndarray):
        view = _from_numpy(x)
    elif framework == "jax":
        view = _from_jax(x, stream)
    elif framework == "cupy" and hasattr(x, "__cuda_array_interface__"):
        # not DLPack: there CuPy divides negative byte strides as unsigned numbers
        view = _from_interface(x, x.__cuda_array_interface__, framework, _device_of_cuda(x))
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        view = _from_dlpack(x, framework, stream)
    elif hasattr(x, "__cuda_array_interface__"):
        view = _from_interface(x, x.__cuda_array_interface__, framework, _device_of_cuda(x))
    elif hasattr(x, "__array_interface__") and not isinstance(x, np.generic):
        view = _from_interface(x, x.__array_interface__, framework, CPU)
    else:
        raise DtypeError(
            "array",
            "must be an array with __dlpack__ or an array interface",
            type(x).__name__,
            "Wrap lists and numbers with numpy.asarray",
        )
    return coerce(view, dtype)


def coerce(view: Any, dtype: object) -> Any:
    """Return ``view`` as ``dtype`` (None: as it is): itself, or its bits where an unsigned array holds them.

    Raises
    ------
    DtypeError
        The array has another dtype and is no unsigned array of the same width.
    """
    if dtype is None:
        return view
    want = as_dtype(dtype)
    have: Dtype = view.dtype
    if have is want:
        return view
    if not (have.code == _UINT and want.is_float and have.itemsize == want.itemsize):
        unsigned = f" or uint{want.bits} with its bits" if want.is_float else ""
        raise DtypeError("array", f"must be {want}{unsigned}", have)
    return native.make(
        *(view.ptr, view.shape, view.strides, want, view.device, view.owner),
        *(view.framework, view.readonly, view.immutable),
    )


def _build(
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: Dtype,
    device: Device,
    **rest: Any,
) -> Any:
    """Check what every protocol can get wrong and make the view; ``rest``: owner, framework, readonly, immutable."""
    if any(n < 0 for n in shape):
        raise ArgumentError("array", "must have sizes of at least 0", shape)
    if 0 not in shape:
        if ptr == 0:
            raise ArgumentError("array", "must have an address", f"a null pointer with shape {shape}")
        if ptr % dtype.itemsize:
            raise ArgumentError(
                "array",
                f"must be aligned to its items of {dtype.itemsize} bytes",
                f"address {ptr:#x}",
                "Copy it to fresh memory",
            )
    if strides is None:
        strides = compact_strides(shape)
    return native.make(
        *(ptr, shape, strides, dtype, device, rest["owner"]),
        *(rest["framework"], rest.get("readonly", False), rest.get("immutable", False)),
    )


def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a compact array of this shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _item_strides(
    strides: tuple[int, ...] | None, shape: tuple[int, ...], itemsize: int
) -> tuple[int, ...] | None:
    """Byte strides to element strides; those of dimensions that are never stepped along do not matter."""
    if strides is None:
        return None
    moved = [s for s, n in zip(strides, shape, strict=True) if n > 1]
    if 0 not in shape and any(s % itemsize for s in moved):
        raise ArgumentError(
            "array",
            f"must have strides of whole items ({itemsize} bytes)",
            strides,
            "Copy it (numpy.ascontiguousarray)",
        )
    return tuple(s // itemsize for s in strides)


def _from_numpy(x: np.ndarray) -> Any:
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentError("array", "must not be a masked array", type(x).__name__, "Use .filled() or .data")
    dtype = as_dtype(x.dtype, "array")
    shape = tuple(x.shape)
    return _build(
        x.__array_interface__["data"][0],
        shape,
        _item_strides(tuple(x.strides), shape, dtype.itemsize),
        dtype,
        CPU,
        owner=x,
        framework="numpy",
        readonly=not x.flags.writeable,
    )


def _from_interface(x: Any, interface: dict[str, Any], framework: str, device: Device) -> Any:
    if interface.get("mask") is not None:
        raise ArgumentError("array", "must not carry a mask", type(x).__name__, "Fill it first")
    dtype = _interface_dtype(x, interface["typestr"])
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise ArgumentError("array", "must give its address in the array interface", type(data).__name__)
    return _build(
        int(data[0] or 0),
        shape,
        _item_strides(None if strides is None else tuple(int(s) for s in strides), shape, dtype.itemsize),
        dtype,
        device,
        owner=(x, interface),  # an interface computed on request may itself own the memory
        framework=framework,
        readonly=bool(data[1]),
    )


def _interface_dtype(x: Any, typestr: str) -> Dtype:
    """The object's own NumPy dtype if it has one (types of ml_dtypes show as "<V2" or "<f1"), else the string's."""
    own = getattr(x, "dtype", None)
    if isinstance(own, np.dtype):
        return as_dtype(own, "array")
    try:
        return as_dtype(np.dtype(typestr), "array")
    except TypeError as error:
        raise DtypeError("array", "must have a known dtype", repr(typestr)) from error


def _device_of_cuda(x: Any) -> Device:
    device = getattr(x, "device", None)
    return as_device("cuda" if device is None else device, "array")


def _from_jax(x: Any, stream: object) -> Any:
    name = type(x).__name__
    if "Tracer" in name:
        raise DtypeError(
            "array",
            "must hold values",
            f"a JAX tracer ({name})",
            "Call attnrt outside of jit, or through jax.pure_callback",
        )
    if not hasattr(x, "__dlpack__"):
        raise DtypeError("array", "must be a JAX array", name)
    sharding = getattr(x, "sharding", None)
    if sharding is not None and len(sharding.device_set) > 1:
        raise ArgumentError(
            "array",
            "must lie on one device",
            f"a JAX array over {len(sharding.device_set)} devices",
            "Pass the shards (x.addressable_shards[i].data), or jax.device_put it to one device",
        )
    if x.is_deleted():
        raise ArgumentError("array", "must hold values", "a deleted or donated JAX array")
    return _from_dlpack(x, "jax", stream)


def _from_dlpack(x: Any, framework: str, stream: object) -> Any:
    if getattr(x, "requires_grad", False) is True:
        raise ArgumentError("array", "must not require grad", type(x).__name__, "Pass x.detach()")
    is_neg = getattr(x, "is_neg", None)
    if framework == "torch" and is_neg is not None and is_neg():
        raise ArgumentError(
            "array", "must hold its numbers", "a lazily negated view", "Pass x.resolve_neg() or x.clone()"
        )
    device = from_dlpack_device(_ask_device(x), "array")
    capsule = _ask_capsule(x, _stream_argument(framework, device, stream))
    try:
        ptr, shape, strides, code, bits, lanes, kind, index, readonly, owner = native.read_capsule(capsule)
    except ValueError as error:
        raise ArgumentError(
            "array", "must give a DLPack capsule of version 0 or 1 that nobody has taken", str(error)
        ) from error
    if lanes != 1:
        raise DtypeError("array", "must have scalar items", f"{lanes} lanes", "View them as one more axis")
    dtype = _BY_CODE.get((code, bits))
    if dtype is None:
        raise DtypeError(
            "array",
            "must have a known dtype",
            f"DLPack code {code} with {bits} bits ({getattr(x, 'dtype', 'no name')})",
            f"Known: {', '.join(DTYPES)}",
        )
    immutable = framework == "jax"
    return _build(
        *(ptr, shape, strides, dtype, from_dlpack_device((kind, index), "array")),
        owner=(x, owner),
        framework=framework,
        readonly=readonly or immutable,
        immutable=immutable,
    )


def _stream_argument(framework: str, device: Device, stream: object) -> dict[str, object]:
    """The ``stream`` to ask with. Reading does not order anything by itself: the caller enqueues on the
    array's own stream, hence -1 (no synchronisation); JAX refuses -1 and has no stream one could know, so it orders itself."""
    if device.kind == "cpu":
        return {}
    if stream is not None:
        return {"stream": stream}
    return {} if framework == "jax" else {"stream": -1}


def _ask_device(x: Any) -> tuple[Any, ...]:
    try:
        return tuple(x.__dlpack_device__())
    except Exception as error:
        _refused(x, error)


def _ask_capsule(x: Any, stream: dict[str, object]) -> Any:
    try:
        try:
            return x.__dlpack__(max_version=(1, 1), **stream)
        except TypeError:  # a producer from before DLPack 1.0
            return x.__dlpack__(**stream)
    except Exception as error:
        _refused(x, error)


def _refused(x: Any, error: Exception) -> NoReturn:
    reason = str(error).partition("\n")[0]
    torch = sys.modules.get("torch")
    hint = "Pass a plain, dense array with its own memory"
    if torch is not None and isinstance(x, torch.Tensor) and x.layout != torch.strided:
        hint = "Pass x.to_dense()"
    raise ArgumentError(
        "array", "must be readable through DLPack", f"{type(x).__name__}: {reason}", hint
    ) from error
