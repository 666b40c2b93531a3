# SPDX-License-Identifier: Apache-2.0
"""From a plan's host arrays to views in device memory: staging, writing, and the records a backend reads."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt import layout as lay
from attnrt.backends.base import PartViews
from attnrt.device import Device
from attnrt.dtypes import Dtype, as_dtype, int32
from attnrt.errors import ArgumentError
from attnrt.layout import PART_FIELDS
from attnrt.memory import DeviceOps
from attnrt.tensor import TensorView, make_view, native

if TYPE_CHECKING:
    from attnrt.formats.base import BlockSparse, Requests
    from attnrt.scheduler.base import Plan

__all__ = [
    "Area",
    "Resident",
    "Staging",
    "Uploads",
    "bound_views",
    "flat",
    "make_resident",
    "rows",
    "write_all",
]

#: Staging buffers: the host may run this many loads ahead of the device before it waits.
RING = 3
#: A buffer or area that must grow becomes this much larger than what is needed or what it was.
GROWTH = 1.5
_LINE = (1,)


@dataclass(slots=True, eq=False)
class Area:
    """A span of device memory; ``address`` 0: none yet."""

    address: int = 0
    nbytes: int = 0
    owner: Any = None
    host: Any = None  # uint8 over it, where the host writes device memory itself


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


class Uploads:
    """Small host arrays where kernels can read them: one area for each (stream, place), reused in the stream's order.

    A read-only array that lies there already is not sent again (the slots of a plan, for every layer's append).
    """

    def __init__(self, ops: DeviceOps, device: Device) -> None:
        self.ops, self.device = ops, device
        self.staging = Staging(ops)
        self.sent = 0
        self.areas: dict[tuple[int, int], tuple[Area, Any, TensorView]] = {}

    def bring(self, array: np.ndarray, stream: int, place: int) -> TensorView:
        """The device's copy of a contiguous array, for work that is enqueued on ``stream`` now."""
        area, source, seen = self.areas.get((stream, place), (Area(), None, None))
        if source is array and seen is not None:
            return seen
        nbytes = max(array.nbytes, 1)
        if area.nbytes < nbytes:
            size = lay.align(int(nbytes * GROWTH))
            area = _area(self.ops, size)
        staged = self.staging.take(nbytes)
        staged[: array.nbytes] = array.reshape(-1).view(np.uint8)
        self.ops.copy(area.address, staged, nbytes, stream)
        self.staging.sent(self.ops.record(stream))
        self.sent += 1
        seen = make_view(area.address, array.shape, array.dtype, self.device, owner=area.owner)
        self.areas[stream, place] = (area, None if array.flags.writeable else array, seen)
        return seen


def _area(ops: DeviceOps, nbytes: int) -> Area:
    address, owner = ops.allocate(nbytes)
    return Area(address, nbytes, owner)


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
    arrays: list[Any],
    spots: tuple[int, list[int]],
    bound: dict[tuple[int, str], TensorView],
    device: Device,
    owner: Any,
) -> Resident:
    """Views of an index whose arrays (``layout.index_arrays``) lie at ``address + at[i]``; ``spots`` is (address, at)."""
    address, at = spots
    make = native.make
    views: list[Any] = [
        None
        if array is None
        else make(address + spot, array.shape, _LINE, kind, device, owner, "attnrt", False, False)
        for array, spot, kind in zip(arrays, at, index_kinds(len(plan.parts)), strict=True)
    ]
    width, parts = len(PART_FIELDS), []
    for number, part in enumerate(plan.parts):
        fields: dict[str, Any] = dict(
            zip(PART_FIELDS, views[2 + number * width : 2 + (number + 1) * width], strict=True)
        )
        if bound:
            fields |= {name: view for (owner_part, name), view in bound.items() if owner_part == number}
        parts.append(PartViews(block_size=part.block_size[1], heads=part.heads, **fields))
    return Resident(
        plan.parts, plan.index.requests, tuple(parts), views[0], views[1], bound.get((-1, "bound_kv_lens"))
    )


@functools.cache
def index_kinds(parts: int) -> tuple[Dtype, ...]:
    """Dtypes of the arrays of an index area."""
    return (int32, int32, *[as_dtype(dtype) for dtype in PART_FIELDS.values()] * parts)


def flat(address: int, count: int, device: Device, owner: Any) -> TensorView:
    """int32 [count] at an address."""
    return native.make(address, (count,), _LINE, int32, device, owner, "attnrt", False, False)


def rows(address: int, count: int, width: int, device: Device, owner: Any) -> TensorView:
    """int32 [count, width] at an address."""
    return native.make(address, (count, width), (width, 1), int32, device, owner, "attnrt", False, False)


def write_all(target: np.ndarray, arrays: list[Any], at: list[int]) -> None:
    """Copy arrays (1-D, or C-contiguous 2-D) to byte offsets of target; None and empty ones take no room."""
    words = target[: len(target) // 8 * 8]
    typed = {1: target, 4: words.view(np.int32), 8: words.view(np.int64)}
    for array, spot in zip(arrays, at, strict=True):
        if array is not None and array.size:
            first = spot // array.itemsize
            typed[array.itemsize][first : first + array.size] = array if array.ndim == 1 else array.ravel()
