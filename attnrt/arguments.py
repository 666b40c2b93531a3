# SPDX-License-Identifier: Apache-2.0
"""The arguments of a run that are no operands: its scale, the variant's parameters, and what a graph capture asks for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.device import CPU, Device
from attnrt.errors import ArgumentError, CaptureError, DtypeError
from attnrt.scheduler.base import Plan
from attnrt.tensor import TensorView

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_capture", "check_is_plan", "param_of", "placer", "scale_of"]


def check_is_plan(plan: Any) -> None:
    """Whether it is a Plan at all."""
    if not isinstance(plan, Plan):
        raise DtypeError("plan", "must be a Plan", type(plan).__name__, "attn.plan(index) makes one")


def scale_of(value: Any) -> float:
    """sm_scale as a float; a finite number is asked for."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise DtypeError("sm_scale", "must be a number", type(value).__name__)
    try:
        number = float(value)
    except OverflowError:  # an integer past every float
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError("sm_scale", "must be finite", number)
    return number


def param_of(device: Device, name: str, value: Any) -> Any:
    """A run argument as the variant's table takes it: numbers and host arrays as they are, others read once."""
    if value is None or isinstance(value, (int, float, list, tuple, np.ndarray, np.generic)):
        return value
    try:
        found = TensorView(value)
    except (ArgumentError, DtypeError) as error:
        raise type(error)(name, error.rule, error.got, error.hint) from error
    if found.device is CPU:
        return found.numpy()
    if found.device != device:
        raise ArgumentError(name, f"must be on {device} or on the host", str(found.device))
    return found


def placer(kernel: Any, capturing: bool) -> Callable[[str, np.ndarray], Any] | None:
    """What brings a parameter's host array to where kernels read it; None: they read it where it is.

    Under capture only arrays that are there already are found, since bringing one would allocate and copy.
    """
    place = getattr(kernel, "place", None)
    if place is None or not capturing:
        return place

    def find(name: str, array: np.ndarray) -> Any:
        found = kernel.placed(name, array)
        if found is None:
            hint = "Run once with it before the capture, or give a device array"
            raise CaptureError(name, "must be on the device inside a capture", "a new host array", hint)
        return found

    return find


def check_capture(limits: Any, out: Any, lse: Any, return_lse: bool) -> None:
    """What a captured run must bring."""
    if limits is None:
        raise CaptureError(
            "limits", "must be given for graph capture", None, "Attention(..., limits=attnrt.Limits(...))"
        )
    if out is None:
        raise CaptureError("out", "must be given inside a capture", None, "run() may not allocate there")
    if return_lse and lse is None:
        raise CaptureError("lse", "must be given inside a capture", None, "run() may not allocate there")
