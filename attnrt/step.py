# SPDX-License-Identifier: Apache-2.0
"""Decode steps from an index to the device by one call (native/step.cpp): the planner and the load without Python.

A decode step's batch is like the one before: other lengths and pages, everything else the same. What stays is packed into one
struct after a load that went the long way; the C code plans, writes plan, header and index to pinned memory and sends them.
Python's values (the plan's lists, the loaded views) are made when somebody looks at them. The bytes on the device are those of
the long way, which every other step takes, among them all that are wrong.

Where the launches of a plan's runs are those of the plan before and its needs are met by the arrays that have run, nothing that
runs remember is forgotten either, so that the first run after a load costs what the others do.
"""

from __future__ import annotations

import contextlib
import struct
import weakref
from typing import TYPE_CHECKING, Any

from attnrt import layout as lay
from attnrt.formats.base import BlockSparse
from attnrt.loading import (
    GROWTH,
    RING,
    LoadedAt,
    OpenLoaded,
    Resident,
    ResidentLater,
    loaded_at,
    make_resident,
)
from attnrt.memory import ALIGN
from attnrt.operands import Needs
from attnrt.scheduler.plan import facts_of, plan_of
from attnrt.scheduler.plan_native import fixed_numbers

if TYPE_CHECKING:
    from attnrt.runtime import Runtime
    from attnrt.scheduler.base import Plan

_Step: Any = None  # a checkout that has not been built, or not since: every step goes the long way
with contextlib.suppress(ImportError):
    from attnrt import _step_native

    if _step_native.REVISION == 5:
        _Step = _step_native.Step

__all__ = ["Stepper"]

#: The struct Fixed of native/step.cpp.
_FIXED = struct.Struct("<5Q26q3Qq4Q6q")
#: Bytes of a staging buffer at least: steps of a few hundred requests. What is larger than all before goes the long way once.
_LEAST_STAGING = 1 << 18


class Stepper:
    """The short way of one attention, alone in its workspace.

    Parameters
    ----------
    runtime : Runtime
    """

    __slots__ = (
        *("_alive", "_fits", "_held", "_key", "_native", "_per_row", "_ring", "_stale", "_traits"),
        "deterministic",
    )

    def __init__(self, runtime: Runtime) -> None:
        # The runtime holds this: its memory goes when it goes, not when cycles are looked for.
        self._held = weakref.ref(runtime)
        self.deterministic = runtime.deterministic
        self._native: Any = None
        self._key: tuple[Any, ...] = ()
        self._traits: Any = None
        self._alive: Any = None
        self._ring: tuple[Any, ...] = ()
        self._per_row = 0
        self._stale = True  # a load went the long way since
        self._fits = False  # what the runs of the plan before remember holds for plans like those of this way

    @staticmethod
    def of(runtime: Runtime) -> Stepper | None:
        """None where no step can go this way."""
        workspace = runtime.workspace
        ways = _Step is not None and hasattr(runtime.ops, "step_calls")
        alone = len(workspace.tenants) == 1 and not runtime.spec.composed.reads_index_mask
        return Stepper(runtime) if ways and alone else None

    @property
    def _runtime(self) -> Runtime:
        runtime = self._held()
        assert runtime is not None  # its own methods alone call this
        return runtime

    def pause(self) -> None:
        """A load goes the long way: what this way knows is to be compared with what it leaves."""
        self._stale = True

    def step(self, index: Any, scheduler: Any, stream: int) -> Plan | None:
        """Plan and load; None: nothing was done, the long way is to be taken."""
        runtime = self._runtime
        tenant = runtime.tenant
        if tenant.loaded is None or tenant.run_stream not in (None, stream):
            return None
        if self._stale and not self._renew(index, scheduler):
            return None
        if scheduler != self._key[0]:
            return None
        done = self._native.load(index, stream)
        if done.__class__ is not tuple:  # a number is the driver's error, which the long way meets and raises
            return None
        later, used, turn = done
        plan = plan_of(runtime.spec, index, self._traits, self.deterministic, later, used)
        self._note(runtime, plan, self._ring[1][turn], stream)
        needs = before = runtime.needs
        size = index.block_size[1]
        same = before.num_rows == index.num_qo and before.unit == before.page_size == size
        slots, affine = (index.max_block + 1) * size, index.kv_base is not None
        if not same or before.slots != slots or before.affine != affine:  # else even the record is the same
            needs = Needs.of(plan)
        runtime.follow(plan, needs, same and self._fits and needs.slots <= runtime.capacity)
        self._fits = self._per_row > 0
        return plan

    def _note(self, runtime: Runtime, plan: Plan, event: Any, stream: int) -> None:
        """What Workspace.load leaves behind, its records made when somebody asks for them."""
        workspace, tenant, device = runtime.workspace, runtime.tenant, runtime.device
        index, cell, size = plan.index, tenant.cell, tenant.layout
        resident = workspace.residents[0]
        if resident is None or resident.parts[0] is not index or resident.requests is not index.requests:

            def make_index() -> Resident:
                arrays = lay.index_arrays(index, plan.parts)
                spots = (cell.address + size.base, lay.offsets(lay.byte_sizes(arrays))[0])
                return make_resident(plan, arrays, spots, {}, device, cell.owner)

            resident = workspace.residents[0] = ResidentLater.of(plan.parts, index.requests, make_index)
        home, per_row, found = (workspace.fixed(tenant), cell, size), self._per_row, resident

        def make() -> LoadedAt:
            counters = len(plan.merge) * per_row
            return loaded_at(plan, lay.plan_offsets(plan, counters), found, counters, home, device)

        made: Any = OpenLoaded.__new__(OpenLoaded)
        made.plan, made.make = plan, make
        made.__class__ = LoadedAt
        tenant.loaded, tenant.holds, tenant.event, tenant.ordered = made, 0, event, {stream}

    # ------------------------------------------------------------------------------------------- after a long load

    def _renew(self, index: Any, scheduler: Any) -> bool:
        """Make what stays from step to step fit the plan that was loaded last, or keep it if it does."""
        runtime = self._runtime
        tenant, last = runtime.tenant, runtime.tenant.loaded
        if index.__class__ is not BlockSparse or scheduler.__class__ is not str:
            return False
        place = (tenant.layout, tenant.cell.address)
        key = (scheduler, runtime.kernel, index.features, index.block_size[1], index.heads, *place)
        steady = getattr(runtime.kernel, "steady", None)
        moved = last.header is not runtime.workspace.fixed(tenant)[2]  # memory grew and then the load failed
        if steady is None or len(last.parts) != 1 or moved:
            return False
        template = steady(last, runtime.workspace.limits)
        if self._native is not None and key == self._key and self._roomy():
            self._native.forget()
        elif not self._make(key, template, index):
            return False
        self._stale, self._fits = False, template[3]
        return True

    def _make(
        self, key: tuple[Any, ...], steady: tuple[bytes, int, int, bool, tuple[int, ...]], index: Any
    ) -> bool:
        runtime = self._runtime
        tenant, last, spec = runtime.tenant, runtime.tenant.loaded, runtime.spec
        flags = index.features
        if last.plan.index.features is not flags or last.plan.index.block_size[1] != index.block_size[1]:
            return False
        if (
            flags.num_parts != 1
            or flags.masked
            or flags.bound_indices
            or flags.bound_kv_lens
            or flags.bound_mask
        ):
            return False
        traits = runtime.machine.planning_traits(runtime.machine.traits(flags))
        found = fixed_numbers(facts_of(spec), traits, key[0], traits.max_partial_slots)
        if found is None:
            return False
        planner, alive = found
        plan, take, *rest = planner
        header, part_at, self._per_row, _fits, first = steady
        limits, size = runtime.workspace.limits, tenant.layout
        ops: Any = runtime.ops  # of a kind that has step_calls
        bounds = [-1] * 7
        if limits is not None:
            given = (
                *(limits.max_requests, limits.max_qo_tokens, limits.max_index_entries, limits.num_pages),
                *(limits.max_qo_len, limits.max_kv_len, limits.min_qo_len),
            )
            bounds = [-1 if n is None else n for n in given]
        send, wait, device = ops.step_calls()
        staging = self._staging()
        buffers, events = staging
        fixed = _FIXED.pack(
            *(plan, take, send, wait, *rest),
            *(traits.all_workers, traits.num_workers),
            *bounds,
            *(ALIGN, device, tenant.cell.address, size.plan, size.header, size.index, size.slots),
            *(part_at, self._per_row, index.block_size[1], index.heads),
            *(buffer.ctypes.data for buffer in buffers),
            len(buffers[0]),
            *(event.handle for event in events),
            *first,
            0 if traits.sharing is None else traits.sharing.run,
        )
        self._native = _Step(fixed, header, BlockSparse, flags)
        self._key, self._traits, self._ring, self._alive = key, traits, staging, alive
        return True

    def _roomy(self) -> bool:
        """Whether the ring's buffers hold loads such as there have been."""
        return len(self._ring) > 0 and len(self._ring[0][0]) >= self._runtime.workspace.most_sent

    def _staging(self) -> tuple[Any, ...]:
        """(buffers, events) of the ring: as they are, or new ones where loads have grown."""
        runtime = self._runtime
        ops: Any = runtime.ops
        for event in (
            self._ring[1] if self._ring else ()
        ):  # who takes over knows nothing of copies on their way
            ops.wait_host(event)
        if self._roomy():
            return self._ring
        need = lay.align(max(_LEAST_STAGING, int(GROWTH * runtime.workspace.most_sent)))
        return [ops.staging(need) for _ in range(RING)], [ops.event() for _ in range(RING)]
