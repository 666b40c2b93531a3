# SPDX-License-Identifier: Apache-2.0
"""From a plan's host arrays to views in device memory: staging, writing, and the records a backend reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt import layout as lay
from attnrt.backends.base import PartViews
from attnrt.device import Device
from attnrt.errors import ArgumentError
from attnrt.layout import PART_FIELDS
from attnrt.memory import DeviceOps
from attnrt.tensor import TensorView, make_view

if TYPE_CHECKING:
    from attnrt.formats.base import BlockSparse, Requests
    from attnrt.scheduler.base import Plan

__all__ = ["Area", "Resident", "Staging", "bound_views", "make_resident", "write_index", "write_plan"]

#: Staging buffers: the host may run this many loads ahead of the device before it waits.
RING = 3
#: A buffer or area that must grow becomes this much larger than what is needed or what it was.
GROWTH = 1.5
_INT32 = np.dtype(np.int32)


@dataclass(slots=True, eq=False)
class Area:
    """A span of device memory; ``address`` 0: none yet."""

    address: int = 0
    nbytes: int = 0
    owner: Any = None


@dataclass(slots=True, eq=False)
class Resident:
    """An index in device memory: the parts it was made from (held, so that identity stays meaningful) and their views."""

    parts: tuple[BlockSparse, ...]
    requests: Requests
    views: tuple[PartViews, ...]
    qo_lens: TensorView
    kv_lens: TensorView
    bound_kv_lens: TensorView | None


class Staging:
    """A ring of host buffers; each is free again when the copy from it is done."""

    def __init__(self, ops: DeviceOps) -> None:
        self.ops = ops
        self.buffers: list[np.ndarray | None] = [None] * RING
        self.events: list[Any] = [None] * RING
        self.turn = 0

    def take(self, nbytes: int) -> np.ndarray:
        """The next buffer, at least nbytes long; waits for its last copy."""
        if self.events[self.turn] is not None:
            self.ops.wait_host(self.events[self.turn])
            self.events[self.turn] = None
        found = self.buffers[self.turn]
        if found is None or found.nbytes < nbytes:
            found = self.buffers[self.turn] = self.ops.staging(lay.align(int(nbytes * GROWTH)))
        return found

    def sent(self, event: Any) -> None:
        """The buffer's copy has been enqueued and ``event`` follows it."""
        self.events[self.turn] = event
        self.turn = (self.turn + 1) % RING


def bound_views(plan: Plan, device: Device) -> dict[tuple[int, str], TensorView]:
    """Views of the arrays that runs read in place: (part, field), and (-1, "bound_kv_lens")."""
    found: dict[tuple[int, str], TensorView] = {}
    arrays = [(-1, "bound_kv_lens", plan.index.requests.bound_kv_lens, "int32")]
    for number, part in enumerate(plan.parts):
        for name, dtype in (("indices", "int32"), ("mask", "uint8")):
            if lay.is_bound(part, name):
                arrays.append((number, name, getattr(part, name), dtype))
    for number, name, array, dtype in arrays:
        if array is None:
            continue
        view = TensorView(array, dtype)
        if view.device != device:
            raise ArgumentError(name, f"must be on {device}, where it is read", str(view.device))
        if not view.is_compact:
            raise ArgumentError(name, "must be contiguous", repr(view))
        found[number, name] = view
    return found


def make_resident(
    plan: Plan,
    address: int,
    at: list[int],
    bound: dict[tuple[int, str], TensorView],
    device: Device,
    owner: Any,
) -> Resident:
    """Views of an index whose slots lie at ``address + at[i]``."""
    spots = iter(at)
    requests = plan.index.requests
    lens = [
        make_view(address + next(spots), array.shape, "int32", device, owner=owner)
        for array in (requests.qo_lens, requests.kv_lens)
    ]
    parts = []
    for number, part in enumerate(plan.parts):
        views: dict[str, TensorView | None] = {}
        for name, dtype in PART_FIELDS.items():
            spot = next(spots)
            array = getattr(part, name)
            if (number, name) in bound:
                views[name] = bound[number, name]
            elif array is None:
                views[name] = None
            else:
                views[name] = make_view(address + spot, array.shape, dtype, device, owner=owner)
        parts.append(PartViews(block_size=part.block_size[1], heads=part.heads, **views))
    return Resident(plan.parts, requests, tuple(parts), *lens, bound.get((-1, "bound_kv_lens")))


def _put(target: np.ndarray, at: int, array: np.ndarray) -> None:
    if array.nbytes:
        target[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)


def write_plan(target: np.ndarray, at: list[int], plan: Plan) -> None:
    merge = plan.merge
    arrays = (plan.work.worker_indptr, merge.rows, merge.slots, merge.leaves, plan.work.items)
    for spot, array in zip(at, arrays, strict=True):
        assert array.dtype == _INT32 and array.flags.c_contiguous
        _put(target, spot, array)


def write_index(target: np.ndarray, at: list[int], plan: Plan) -> None:
    spots = iter(at)
    requests = plan.index.requests
    _put(target, next(spots), requests.qo_lens)
    _put(target, next(spots), requests.kv_lens)
    for part in plan.parts:
        for name, dtype in PART_FIELDS.items():
            spot = next(spots)
            array = getattr(part, name)
            if array is not None and not lay.is_bound(part, name):
                assert array.dtype == dtype and array.flags.c_contiguous, name
                _put(target, spot, array)
