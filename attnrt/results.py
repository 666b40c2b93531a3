# SPDX-License-Identifier: Apache-2.0
"""Results in the caller's framework: new arrays of its own where it lets us write them, else memory of ours handed over."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.dtypes import Dtype, as_dtype
from attnrt.tensor import TensorView, empty

if TYPE_CHECKING:
    from attnrt.device import Device

__all__ = ["empty_like_caller", "to_caller"]


def empty_like_caller(like: TensorView, shape: tuple[int, ...], dtype: object) -> Any:
    """A new array for a result, in the framework and on the device of the caller's array ``like``.

    Returns
    -------
    array
        NumPy, torch or CuPy's own; memory of ours for every other framework, which `to_caller` turns into the
        caller's once it is written.
    """
    kind = as_dtype(dtype)
    maker = _MAKERS.get(like.framework)
    if maker is None:
        return empty(shape, kind, like.device)
    return maker(like, tuple(shape), kind)


def _empty_numpy(like: TensorView, shape: tuple[int, ...], dtype: Dtype) -> Any:
    return np.empty(shape, dtype.numpy)


def _empty_torch(like: TensorView, shape: tuple[int, ...], dtype: Dtype) -> Any:
    kind, device = _torch_names(dtype, like.device)
    return sys.modules["torch"].empty(shape, dtype=kind, device=device)


@functools.lru_cache(maxsize=256)
def _torch_names(dtype: Dtype, device: Device) -> tuple[Any, Any]:
    """torch's own dtype and device: to look them up takes as long as to allocate."""
    torch = sys.modules["torch"]
    return getattr(torch, dtype.name), torch.device(str(device))


def _empty_cupy(like: TensorView, shape: tuple[int, ...], dtype: Dtype) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(like.device.index):
        try:
            return cupy.empty(shape, dtype.numpy)
        except (TypeError, ValueError):  # a CuPy without this type: the bits in an unsigned array
            return cupy.empty(shape, f"uint{dtype.bits}")


_MAKERS = {"numpy": _empty_numpy, "torch": _empty_torch, "cupy": _empty_cupy}


def to_caller(result: Any, framework: str) -> Any:
    """Hand a written result to the caller: an array of ours becomes a JAX array; others are what they should
    be.

    Parameters
    ----------
    result : array
        From `empty_like_caller`.
    framework : str
        ``view.framework`` of the array it was made like.
    """
    if type(result) is not TensorView or framework not in ("jax", "numpy", "torch"):
        return result
    if framework == "numpy":
        return result.numpy()
    if framework == "torch":
        return sys.modules["torch"].from_dlpack(result)
    return sys.modules["jax"].numpy.from_dlpack(result)
