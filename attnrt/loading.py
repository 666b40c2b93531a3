# SPDX-License-Identifier: Apache-2.0
"""From a plan's host arrays to views in device memory: staging, writing, and the records a backend reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt import layout as lay
from attnrt.backends.base import Loaded, PartViews
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
    "LoadedAt",
    "OpenLoaded",
    "Resident",
    "ResidentLater",
    "Staging",
    "Uploads",
    "bound_views",
    "loaded_at",
    "make_resident",
    "write_all",
    "write_plan",
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
    host: np.ndarray | None = None  # uint8 over it, where the host writes device memory itself


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
        if found is None or len(found) < nbytes:
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
        self.staging.sent(self.ops.send(area.address, staged, nbytes, stream))
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


class ResidentLater(Resident):
    """A Resident whose views are made when somebody asks for them."""

    __slots__ = ("make",)

    make: Callable[[], Resident]

    @staticmethod
    def of(parts: tuple[BlockSparse, ...], requests: Requests, make: Callable[[], Resident]) -> ResidentLater:
        """An index that lies where ``make`` says."""
        found = ResidentLater.__new__(ResidentLater)
        found.parts, found.requests, found.make = parts, requests, make
        return found

    def __getattr__(self, name: str) -> Any:
        if name not in ("views", "qo_lens", "kv_lens", "bound_kv_lens"):
            raise AttributeError(name)
        made = self.make()
        self.views, self.qo_lens, self.kv_lens = made.views, made.qo_lens, made.kv_lens
        self.bound_kv_lens = made.bound_kv_lens
        return getattr(self, name)


class LoadedAt(Loaded):
    """A loaded plan whose views of the plan area are made when somebody asks for them: most kernels read addresses alone.

    Where ``make`` was set, all but the plan is made so.
    """

    __slots__ = ("addresses", "make", "places")

    addresses: tuple[int, ...]
    places: tuple[Device, Any]
    make: Callable[[], LoadedAt]

    def __getattr__(self, name: str) -> Any:
        number = _PLAN_VIEWS.get(name)
        if number is None:
            if name not in _LATER:
                raise AttributeError(name)
            made = self.make()
            for field in _LATER:
                object.__setattr__(self, field, getattr(made, field))
            return getattr(self, name)
        plan, (device, owner) = self.plan, self.places
        arrays = (
            plan.work.items,
            plan.work.worker_indptr,
            plan.merge.rows,
            plan.merge.slots,
            plan.merge.leaves,
        )
        shape = arrays[number].shape
        at, steps = self.addresses[number], _LINE if len(shape) == 1 else (shape[1], 1)
        found = native.make(at, shape, steps, int32, device, owner, "attnrt", False, False)
        object.__setattr__(self, name, found)
        return found


_PLAN_VIEWS = {
    name: i for i, name in enumerate(("work", "worker_indptr", "merge_rows", "merge_slots", "merge_leaves"))
}


#: What a LoadedAt of a later making does not have yet.
_LATER = (
    *("parts", "header", "qo_lens", "kv_lens", "bound_kv_lens", "partial_acc", "partial_ml"),
    *("addresses", "places", "counters", "room"),
)


class OpenLoaded(Loaded):
    """A LoadedAt while it is filled in (see scheduler/values.py)."""

    __slots__ = ("addresses", "make", "places")
    __setattr__ = object.__setattr__  # type: ignore[assignment]


def loaded_at(
    plan: Plan,
    plan_span: tuple[tuple[int, ...], int],
    resident: Resident,
    counters: int,
    home: tuple[tuple[Any, Any, Any], Area, lay.CellLayout],
    device: Device,
) -> LoadedAt:
    """The record that backends read, filled in by hand: a load is on every step's way.

    ``plan_span``: offsets of the plan's arrays (layout.plan_offsets) and their bytes; ``home``: what a load does not move
    (Workspace.fixed), the cell that holds the plan and its layout.
    """
    (acc, ml, header), cell, size = home
    plan_at, plan_bytes = plan_span
    start = cell.address + size.plan - plan_bytes
    bound = resident.bound_kv_lens
    made: Any = OpenLoaded.__new__(OpenLoaded)
    made.plan, made.parts, made.header = plan, resident.views, header
    made.qo_lens, made.kv_lens, made.bound_kv_lens = resident.qo_lens, resident.kv_lens, bound
    made.partial_acc, made.partial_ml = acc, ml
    rest = (
        resident.qo_lens.ptr,
        resident.kv_lens.ptr,
        0 if bound is None else bound.ptr,
        acc.ptr,
        ml.ptr,
    )
    indptr, rows, slots, leaves, work, counts = plan_at
    made.addresses = (start + work, start + indptr, start + rows, start + slots, start + leaves, *rest)
    made.places = (device, cell.owner)
    made.counters = (start + counts if counters else 0, counters)
    made.room = (size.plan, size.index)
    made.__class__ = LoadedAt
    return made  # type: ignore[no-any-return]


def write_plan(target: np.ndarray, base: int, loaded: Loaded, at: tuple[int, ...]) -> None:
    """Copy a plan's arrays, in the order of layout.PLAN_FIELDS, to byte offsets from ``base``, and zeros to count from."""
    plan, counters = loaded.plan, loaded.counters[1]
    work, merge = plan.work, plan.merge
    native.stage(
        target, base, (work.worker_indptr, merge.rows, merge.slots, merge.leaves, work.items), at[:5]
    )
    if counters:
        target[base + at[5] : base + at[5] + 4 * counters] = 0


def write_all(target: np.ndarray, base: int, arrays: list[Any], at: list[int]) -> None:
    """Copy contiguous arrays to byte offsets from ``base``; None takes no room."""
    native.stage(target, base, tuple(arrays), tuple(at))
