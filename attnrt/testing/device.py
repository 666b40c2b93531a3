# SPDX-License-Identifier: Apache-2.0
"""Run an attention on host arrays wherever its device is, so that one oracle serves every backend.

Whole buffers travel, with their gaps and borders: a kernel that writes between the rows of ``out`` or past them is found by
whoever looks at the host array afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt.memory import bytes_at, ops_of
from attnrt.tensor import TensorView, make_view

__all__ = ["execute"]


def _buffer(x: np.ndarray) -> np.ndarray:
    """The array that owns the memory of a view."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


class _Mirror:
    """Device copies of host buffers, each once, so that views that share memory still do."""

    def __init__(self, device: Any) -> None:
        self.device, self.ops = device, ops_of(device)
        self.copies: dict[int, tuple[np.ndarray, int, Any, int]] = {}

    def view(self, x: np.ndarray) -> TensorView:
        """The device's view of x: same strides, at the same place of its buffer."""
        root = _buffer(x)
        low, high = np.lib.array_utils.byte_bounds(root)
        if low not in self.copies:
            address, owner = self.ops.allocate(max(high - low, 1))
            self.ops.copy(address, bytes_at(low, high - low, root), high - low, 0)
            self.copies[low] = (root, address, owner, high - low)
        _, address, owner, _ = self.copies[low]
        strides = tuple(step // x.itemsize for step in x.strides)
        at = address + x.ctypes.data - low if x.size else 0
        return make_view(at, x.shape, x.dtype.name, self.device, strides=strides, owner=owner)

    def bring_back(self, x: np.ndarray) -> None:
        """Overwrite the host buffer of x with what the device has."""
        root = _buffer(x)
        low = np.lib.array_utils.byte_bounds(root)[0]
        _, address, _, nbytes = self.copies[low]
        bytes_at(low, nbytes, root)[:] = self.ops.fetch(address, nbytes)  # type: ignore[attr-defined]


def execute(
    attn: Any, q: np.ndarray, kv: Any, *, out: np.ndarray, lse: np.ndarray | None = None, **args: Any
) -> None:
    """``attn.run(q, kv, out=out, lse=lse, **args)`` with everything on the host; done when it returns."""
    if attn.device.kind == "cpu":
        attn.run(q, kv, out=out, lse=lse, **args)
        return
    mirror = _Mirror(attn.device)
    caches = tuple(mirror.view(x) for x in kv) if isinstance(kv, tuple) else mirror.view(kv)
    placed = {name: mirror.view(x) if isinstance(x, np.ndarray) and x.ndim else x for name, x in args.items()}
    results = {"out": mirror.view(out), "lse": None if lse is None else mirror.view(lse)}
    attn.run(mirror.view(q), caches, **results, **placed)
    mirror.bring_back(out)
    if lse is not None:
        mirror.bring_back(lse)
