# SPDX-License-Identifier: Apache-2.0
"""The workspace: fixed memory that plans are loaded into, shared by the attentions of one stream.

A *tenant* is one attention's seat: its cell (layout.py), its loaded plan, its kernel's header. Tenants share the scratch for
partial states, because they run one after the other, and the device copy of an index that several of them load. There
are as many index areas as tenants: a tenant that loads lets go of the index it held, so one area is always free.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnrt import layout as lay
from attnrt.backends.base import Loaded
from attnrt.device import Device
from attnrt.errors import ArgumentError, CaptureError, DtypeError, LimitError
from attnrt.formats.base import Features
from attnrt.layout import CellLayout, Limits
from attnrt.loading import (
    GROWTH,
    Area,
    Resident,
    Staging,
    bound_views,
    loaded_at,
    make_resident,
    write_all,
    write_plan,
)
from attnrt.memory import ALIGN, ops_of
from attnrt.tensor import TensorView, make_view

if TYPE_CHECKING:
    from attnrt.backends.base import Backend
    from attnrt.scheduler.base import Plan, Traits
    from attnrt.spec import AttentionSpec

__all__ = ["Limits", "Tenant", "Workspace"]


@dataclass(slots=True, eq=False)
class Tenant:
    """One attention's seat in a workspace."""

    spec: AttentionSpec
    traits: Traits
    header: int
    number: int
    itemsize: int
    layout: CellLayout
    cell: Area = field(default_factory=Area)
    holds: int = -1
    claimed: bool = False
    loaded: Any = None  # Loaded, once there is a plan
    event: Any = None
    run_stream: int | None = None
    fixed: Any = None  # views that loads do not move; made anew when memory grows
    ordered: set[int] = field(default_factory=set)  # streams whose work comes after the load

    @property
    def partial_dtype(self) -> str:
        """Dtype of the partial states."""
        return "float64" if self.itemsize == 8 else "float32"


class Workspace:
    """Device memory for the plans, indexes and partial states of one or more attentions.

    Parameters
    ----------
    specs : sequence of AttentionSpec
        One seat for each attention that will share the workspace (a spec may appear twice).
    limits : Limits, optional
        None: memory grows when a plan needs it, addresses change, and graph capture is refused.
    device : device, optional
        None: as for Attention.
    buffer : array, optional
        The caller's own device memory, at least ``Workspace.nbytes(specs, limits, ...)`` bytes, contiguous; needs limits.
    backend : str or Backend
        As for Attention.

    Raises
    ------
    LimitError
        The buffer is too small (limit "buffer").
    ArgumentError, UnsupportedError
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        limits: Limits | None = None,
        device: Any = None,
        buffer: Any = None,
        *,
        backend: str | Backend = "auto",
    ) -> None:
        if buffer is not None and limits is None:
            raise ArgumentError("limits", "must be given with buffer", None, "A buffer of yours cannot grow")
        if limits is not None and not isinstance(limits, Limits):
            raise ArgumentError("limits", "must be an attnrt.Limits", type(limits).__name__)
        self.limits = limits
        self.device, self.tenants = _tenants(specs, limits, device, backend)
        self.ops = ops_of(self.device)
        self.lock = threading.Lock()
        self.residents: list[Resident | None] = [None] * len(self.tenants)
        self._scratch = Area()
        self._staging = Staging(self.ops)
        self.most_sent = 0  # bytes of the largest load so far
        if limits is not None:
            self._carve(buffer)

    @staticmethod
    def nbytes(
        specs: Sequence[AttentionSpec],
        limits: Limits,
        device: Any = None,
        *,
        backend: str | Backend = "auto",
    ) -> int:
        """Bytes that ``Workspace(specs, limits, device)`` takes, exactly; allocates nothing."""
        return _total(_tenants(specs, limits, device, backend)[1])

    def seat(self, spec: AttentionSpec) -> Tenant:
        """Claim the first free seat of this spec."""
        for tenant in self.tenants:
            if tenant.spec == spec and not tenant.claimed:
                tenant.claimed = True
                return tenant
        raise ArgumentError(
            "workspace",
            "must have a free seat for this spec",
            f"{len(self.tenants)} seats",
            "List the spec again",
        )

    def report(self) -> dict[str, Any]:
        """What lies where, in bytes: cells with their areas, scratch, and the total."""
        cells = [
            {"address": t.cell.address, "nbytes": t.cell.nbytes, **lay.report_of(t.layout)}
            for t in self.tenants
        ]
        total = (
            _total(self.tenants)
            if self.limits
            else sum(t.cell.nbytes for t in self.tenants) + self._scratch.nbytes
        )
        scratch = {"address": self._scratch.address, "nbytes": self._scratch.nbytes}
        return {"device": str(self.device), "nbytes": total, "cells": cells, "scratch": scratch}

    # ------------------------------------------------------------------------------------------- loading

    def load(self, tenant: Tenant, plan: Plan, kernel: Any, stream: int) -> Loaded:
        """Bring a plan within the limits to the device by one copy; if anything is wrong, the workspace is as it was."""
        counting = getattr(kernel, "counters", None)
        counters = counting(plan, self.limits) if counting is not None else 0
        plan_at, plan_bytes = lay.plan_offsets(plan, counters)
        place = self._resident(plan)
        if place == tenant.number and plan_bytes > tenant.layout.plan:
            place = -1  # the cell is about to move, and the index with it
        resident = None if place < 0 else self.residents[place]
        index: tuple[list[Any], list[int], int] = ([], [], 0)
        if resident is None:
            place = self._place(tenant)
            arrays = lay.index_arrays(plan.index, plan.parts)
            index = (arrays, *lay.offsets(lay.byte_sizes(arrays)))
            bound = bound_views(plan, self.device)
        self._reserve(tenant, place, plan_bytes, index[2], plan.num_slots, stream)
        if not self.ops.direct:
            self._order_load(tenant, stream)
        if resident is None:
            home = self.tenants[place]
            spots = (home.cell.address + home.layout.base, index[1])
            resident = make_resident(plan, index[0], spots, bound, self.device, home.cell.owner)
            self.residents[place] = None
        loaded = self._loaded(tenant, plan, (plan_at, plan_bytes), resident, counters)
        self._send(tenant, place, loaded, kernel, (plan_at, plan_bytes), index, stream)
        self.residents[place], tenant.holds = resident, place
        tenant.loaded, tenant.ordered = loaded, {stream}
        if len(self.tenants) > 1:  # let go of what nobody holds, so that its arrays can be freed
            for number in range(len(self.tenants)):
                if all(t.holds != number for t in self.tenants):
                    self.residents[number] = None
        return loaded

    def order_run(self, tenant: Tenant, stream: int) -> None:
        """Make a run on another stream than its load's wait for the load."""
        if not self.ops.capturing(stream):  # who replays a graph orders it after the load
            self.ops.wait_stream(stream, tenant.event)
            tenant.ordered.add(stream)

    def _resident(self, plan: Plan) -> int:
        """Area whose index is this plan's, or -1."""
        requests, parts = plan.index.requests, plan.parts
        for number, found in enumerate(self.residents):
            if found is None or found.requests is not requests or len(found.parts) != len(parts):
                continue
            if all(map(operator.is_, found.parts, parts)):
                return number
        return -1

    def _place(self, tenant: Tenant) -> int:
        """An index area that no other tenant reads, the tenant's own first (then the load is one span)."""
        taken = {t.holds for t in self.tenants if t is not tenant}
        order = [tenant.number, *range(len(self.tenants))]
        return next(number for number in order if number not in taken)

    def _order_load(self, tenant: Tenant, stream: int) -> None:
        """What is about to be overwritten may still be read by runs enqueued on other streams."""
        if len(self.tenants) == 1 and tenant.run_stream in (None, stream):
            return  # the common case
        for other in {t.run_stream for t in self.tenants if t.run_stream is not None} - {stream}:
            self.ops.wait_stream(stream, self.ops.record(other))
        for t in self.tenants:  # what comes on this stream now comes after those runs
            t.run_stream = None if t.run_stream is None else stream

    def _send(
        self,
        tenant: Tenant,
        place: int,
        loaded: Loaded,
        kernel: Any,
        plan_span: tuple[tuple[int, ...], int],
        index: tuple[list[Any], list[int], int],
        stream: int,
    ) -> None:
        """Write plan, header and index to staging (or to their place) and copy them: one span where they touch."""
        plan_at, plan_bytes = plan_span
        head = plan_bytes + tenant.layout.header
        arrays, index_at, index_bytes = index
        home = self.tenants[place]
        if self.ops.direct:
            write_plan(self._host(tenant), tenant.layout.plan - plan_bytes, loaded, plan_at)
            if tenant.header:
                start = tenant.layout.plan
                kernel.pack_header(loaded, self._host(tenant)[start : start + tenant.header])
            if index_bytes:
                write_all(self._host(home), home.layout.base, arrays, index_at)
            return
        self.most_sent = max(self.most_sent, head + index_bytes)
        staged = self._staging.take(head + index_bytes)
        write_plan(staged, 0, loaded, plan_at)
        if tenant.header:
            kernel.pack_header(loaded, staged[plan_bytes : plan_bytes + tenant.header])
        if index_bytes:
            write_all(staged, head, arrays, index_at)
        start = tenant.cell.address + tenant.layout.plan - plan_bytes
        if place == tenant.number or not index_bytes:
            tenant.event = self.ops.send(start, staged, head + index_bytes, stream)
        else:
            target = home.cell.address + home.layout.base
            self.ops.copy(start, staged, head, stream)
            tenant.event = self.ops.send(target, staged[head:], index_bytes, stream)
        self._staging.sent(tenant.event)

    def _host(self, tenant: Tenant) -> Any:
        """The bytes of a cell, where the host writes them itself."""
        cell = tenant.cell
        if cell.host is None:
            cell.host = self.ops.host(cell.address, cell.nbytes, cell.owner)
        return cell.host

    def _loaded(
        self,
        tenant: Tenant,
        plan: Plan,
        plan_span: tuple[tuple[int, ...], int],
        resident: Resident,
        counters: int,
    ) -> Loaded:
        home = (self.fixed(tenant), tenant.cell, tenant.layout)
        return loaded_at(plan, plan_span, resident, counters, home, self.device)

    def fixed(self, tenant: Tenant) -> tuple[TensorView, TensorView, TensorView | None]:
        """Partial states and header: what a load does not move."""
        if tenant.fixed is None:
            tenant.fixed = self._fixed(tenant)
        return tenant.fixed  # type: ignore[no-any-return]

    def _fixed(self, tenant: Tenant) -> tuple[TensorView, TensorView, TensorView | None]:
        spec, size, scratch = tenant.spec, tenant.layout, self._scratch
        dtype = tenant.partial_dtype
        acc = (size.slots, spec.num_qo_heads, spec.head_dim_vo)
        ml = (size.slots, spec.num_qo_heads, 2)
        header = None
        if tenant.header:
            address = tenant.cell.address + size.plan
            header = make_view(address, (tenant.header,), "uint8", self.device, owner=tenant.cell.owner)
        return (
            make_view(scratch.address, acc, dtype, self.device, owner=scratch.owner),
            make_view(scratch.address + size.acc, ml, dtype, self.device, owner=scratch.owner),
            header,
        )

    # ------------------------------------------------------------------------------------------- memory

    def _carve(self, buffer: Any) -> None:
        """One block for all cells and the scratch."""
        total = _total(self.tenants)
        if buffer is None:
            address, owner = self.ops.allocate(total)
        else:
            address, owner = _own_buffer(buffer, self.device, total)
        address = lay.align(address)
        for tenant in self.tenants:
            tenant.cell = Area(address, tenant.layout.cell, owner)
            address += tenant.layout.cell
        self._scratch = Area(address, max(t.layout.scratch for t in self.tenants), owner)

    def _reserve(
        self, tenant: Tenant, place: int, plan_bytes: int, index_bytes: int, slots: int, stream: int
    ) -> None:
        """Make room; with limits there is room, without them areas grow by new memory."""
        if self.limits is not None:
            home = self.tenants[place].layout
            assert plan_bytes <= tenant.layout.plan and index_bytes <= home.index, (
                "the layout bounds every plan"
            )
            return
        small = plan_bytes > tenant.layout.plan or slots > tenant.layout.slots
        if not (small or index_bytes > self.tenants[place].layout.index or tenant.cell.address == 0):
            return
        if self.ops.capturing(stream):
            raise CaptureError("load", "would allocate inside a capture", None, "Give limits")
        self._grow(tenant, plan_bytes, index_bytes if place == tenant.number else 0, slots)
        if place != tenant.number:
            self._grow(self.tenants[place], 0, index_bytes, 0)

    def _grow(self, tenant: Tenant, plan_bytes: int, index_bytes: int, slots: int) -> None:
        old = tenant.layout
        plan, index = _grown(old.plan, plan_bytes), _grown(old.index, index_bytes)
        count = slots if slots <= old.slots else max(slots, int(old.slots * GROWTH))
        acc, ml = lay.scratch_sizes(tenant.spec, max(count, old.slots), tenant.itemsize)
        new = CellLayout(
            plan=plan, header=old.header, index=index, slots=max(count, old.slots), acc=acc, ml=ml
        )
        if new.cell > tenant.cell.nbytes or tenant.cell.address == 0:
            address, owner = self.ops.allocate(max(new.cell, ALIGN))
            tenant.cell = Area(address, max(new.cell, ALIGN), owner)
            self._forget(tenant)
        if new.scratch > self._scratch.nbytes or self._scratch.address == 0:
            address, owner = self.ops.allocate(max(new.scratch, ALIGN))
            self._scratch = Area(address, max(new.scratch, ALIGN), owner)
        tenant.layout = new
        tenant.fixed = None

    def _forget(self, tenant: Tenant) -> None:
        """The index in the tenant's old cell keeps its old memory alive through its views, but is not found again."""
        self.residents[tenant.number] = None
        for other in self.tenants:
            if other.holds == tenant.number:
                other.holds = -1


def _grown(old: int, needed: int) -> int:
    return old if needed <= old else lay.align(max(int(old * GROWTH), needed))


def _tenants(
    specs: Sequence[AttentionSpec], limits: Limits | None, device: Any, backend: str | Backend
) -> tuple[Device, list[Tenant]]:
    """Seats with their layouts; allocates nothing."""
    from attnrt.dispatch import resolve
    from attnrt.spec import AttentionSpec

    if isinstance(specs, str) or not isinstance(specs, Sequence) or not specs:
        raise ArgumentError("specs", "must be a list of at least one AttentionSpec", type(specs).__name__)
    found: list[Tenant] = []
    where: Any = device
    for spec in specs:
        if not isinstance(spec, AttentionSpec):
            raise DtypeError("specs", "must hold AttentionSpec values only", type(spec).__name__)
        chosen, where = resolve(spec, Features(), where, backend)
        traits = chosen.traits(spec, Features(), where)
        header = int(getattr(chosen, "header_nbytes", 0))
        within = getattr(chosen, "traits_within", None)
        crews = traits if limits is None or within is None else within(spec, traits, limits)
        ranges = [crews.workers_of(name) for name in (None, *getattr(chosen, "header_teams", ()))]
        workers = sum(end - first for first, end in ranges)
        header += int(getattr(chosen, "header_nbytes_per_worker", 0)) * workers
        itemsize = int(getattr(chosen, "partial_itemsize", 4))
        if limits is None:
            layout = CellLayout(plan=0, header=lay.align(header), index=0, slots=0, acc=0, ml=0)
        else:
            layout = lay.layout_at_limits(spec, traits, limits, header, itemsize)
        found.append(
            Tenant(
                spec=spec, traits=traits, header=header, number=len(found), itemsize=itemsize, layout=layout
            )
        )
    return where, found


def _total(tenants: list[Tenant]) -> int:
    """Cells, one scratch for all, and what aligning the start can cost."""
    return sum(t.layout.cell for t in tenants) + max(t.layout.scratch for t in tenants) + ALIGN


def _own_buffer(buffer: Any, device: Device, total: int) -> tuple[int, Any]:
    view = TensorView(buffer)
    if view.device != device:
        raise ArgumentError("buffer", f"must be on {device}", str(view.device))
    if not view.is_compact or view.readonly:
        raise ArgumentError("buffer", "must be contiguous and writable", repr(view))
    if view.nbytes < total:
        raise LimitError(
            "buffer", total, view.nbytes, "Workspace.nbytes(...) gives the bytes that are needed"
        )
    return view.ptr, view
