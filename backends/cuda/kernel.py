# SPDX-License-Identifier: Apache-2.0
"""The kernels of one spec on one device: launches whose arguments are one struct, packed once per form of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.backends.cuda import boxes, driver, first_lines, pack, select, structs
from attnrt.backends.cuda.modules import launch
from attnrt.backends.cuda.render import (
    ATTEND,
    DECODE,
    DECODE_THREADS,
    HOPPER,
    HOPPER_BOXES,
    HOPPER_BOXES_FOLD,
    HOPPER_GATHER,
    HOPPER_GATHER_FOLD,
    MERGE,
    MERGE_CTAS,
    THREADS,
    WIDE,
    maps_offset,
)
from attnrt.backends.cuda.select import (
    decode_queries,
    limits_decode,
    limits_fold,
    limits_short,
    limits_team,
    limits_wide,
    merge_counters,
    plan_decodes,
)
from attnrt.backends.cuda.tables import HOPPER as TEAM
from attnrt.backends.cuda.tables import WIDE as CREW
from attnrt.device import as_device
from attnrt.dtypes import as_dtype
from attnrt.errors import CaptureError, PlanError
from attnrt.latest import Latest
from attnrt.memory import ops_of
from attnrt.tensor import TensorView, make_view

if TYPE_CHECKING:
    from attnrt.backends.base import AppendCall, Call, Loaded, PagedView
    from attnrt.backends.cuda.append import AppendAgain, Appender
    from attnrt.backends.cuda.programs import Programs
    from attnrt.layout import Limits
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec

__all__ = ["CudaKernel"]

#: (row, head) pairs that a CTA of the merge kernel folds at a time.
MERGE_WARPS = THREADS // 32

_RUN_OFFSETS = structs.run_offsets()
#: Forms of the Hopper kernel: for items of one leaf, and of several.
_BY_BOXES, _BY_KEY = (HOPPER_BOXES, HOPPER_BOXES_FOLD), (HOPPER_GATHER, HOPPER_GATHER_FOLD)


def _contents(name: str, array: np.ndarray) -> tuple[str, str, tuple[int, ...], bytes]:
    return name, array.dtype.str, array.shape, array.tobytes()


class Repeat:
    """A run that comes again with other addresses: its arguments lie packed, the shim writes what differs and launches.

    Parameters
    ----------
    kernel : CudaKernel
    call : Call
        The first of them.
    limits : Limits or None
        None: refuse a stream that is being captured.
    """

    __slots__ = (
        *("_aligned", "_any_team", "_args", "_box", "_call", "_encoded", "_heads", "_kernel", "_limits"),
        *("_loaded", "_mapped", "_maps", "_memory", "_names", "_params", "_record", "_run", "native"),
    )

    def __init__(self, kernel: CudaKernel, call: Call, limits: Limits | None) -> None:
        ffi, lib = driver.shim()
        self._kernel, self._params, self._heads = kernel, call.params, call.q.shape[1]
        self._names: tuple[str, ...] = ()
        self._limits, self._call = limits, call
        self._any_team = limits is not None and limits_team(kernel.spec, limits)
        self._memory, self._args = kernel.arguments(call)
        self._maps = self._args + kernel.maps_at if kernel.maps_at else None
        self._box = self._encoded = boxes.NO_BOXES  # of the Hopper kernel, and of the maps
        self._aligned = 0  # log2 of the tokens that lie side by side in every plan within limits; 0: too few
        self._mapped: tuple[int, bool] | None = None  # what the maps were chosen for
        record = self._record = ffi.new("attnrt_run_t *")
        record.args, record.forbid_capture = self._args, limits is None
        record.aligned_k = pack.aligned(call.k, kernel.itemsize)
        record.aligned_v = pack.aligned(call.v, kernel.itemsize)
        for name, at in _RUN_OFFSETS.items():
            setattr(record, f"at_{name}", at)
        self._run = lib.attnrt_cuda_run
        #: Addresses of the C function and of its record, for who calls it without Python (native/repeats.h).
        self.native = driver.run_address(), int(ffi.cast("uintptr_t", record))
        self.reload(call.loaded)

    def reload(self, loaded: Loaded) -> None:
        """The same form of arrays under another loaded plan."""
        self._loaded = loaded
        header, before, behind = pack.plan_place(loaded)
        words = driver.shim()[0].cast("uint64_t *", self._args)
        words[0], words[1] = header, before | behind << 32
        if self._maps is not None and (self._any_team or select.has_items(loaded.plan, TEAM)):
            self._box = boxes.box_of(loaded.plan, self._call, self._kernel.spec)
            self._aligned = boxes.promised(self._limits, self._box, self._call)
            if self._aligned:  # later plans of a graph read these maps, too
                self._box = min(self._box, self._aligned)
        self._choose()

    def _new_maps(self, names: tuple[str, ...]) -> None:
        # A captured graph keeps the maps of the plan at hand: the wide kernel does without where that has no items of its own.
        kernel = self._kernel
        wide = WIDE in names and (self._box == boxes.NO_BOXES or select.has_items(self._loaded.plan, CREW))
        wanted = self._box, wide
        if wanted == self._mapped:
            return
        self._mapped = wanted
        box = boxes.encoded(*wanted, self._call, kernel.spec)
        if box != self._encoded:
            boxes.encode(kernel.device.index, self._maps, self._call, box, kernel.spec)
            self._encoded = box
        self._record.at_maps = kernel.maps_at if box != boxes.NO_BOXES else 0

    def _choose(self, maps: bool = True) -> None:
        """Which kernels run, and how wide; without ``maps``, all of them key by key."""
        record, kernel, loaded = self._record, self._kernel, self._loaded
        names = kernel.needs(loaded.plan, self._limits, self._box, self._aligned)
        if self._maps is not None:
            self._new_maps(names if maps else ())
        if names != self._names:
            kernel.programs.prepare(names)
            for i, name in enumerate(names):
                record.launches[i] = kernel.programs.entry(name)[0]
            self._names, record.num_launches = names, len(names)
        for i, name in enumerate(names):
            most, now = kernel.grid(name, loaded, self._heads, self._box)
            record.launches[i].grid, record.eager_grid[i] = most, now

    def __call__(self, addresses: tuple[int, ...], sm_scale: float, stream: int) -> None:
        """Enqueue; ``addresses`` of q, k, v (0: k's), out, lse (0: none)."""
        q, k, v, out, lse = addresses
        if self._encoded != boxes.NO_BOXES and (k | v) & 15:  # seldom: arrays of this form off 16-byte lines
            kept, self._box = self._box, boxes.NO_BOXES
            try:
                self._choose(maps=False)
                self._enqueue(q, k, v or k, out, lse, sm_scale, stream)
            finally:
                self._box = kept
                self._choose()
            return
        self._enqueue(q, k, v or k, out, lse, sm_scale, stream)

    def _enqueue(self, q: int, k: int, v: int, out: int, lse: int, sm_scale: float, stream: int) -> None:
        code = self._run(self._record, q, k, v, out, lse, sm_scale, stream)
        if code:
            self.failed(code)

    def failed(self, code: int) -> None:
        """Raise what a code of the shim means."""
        if code == driver.CAPTURING:
            raise CaptureError(
                "limits",
                "must be given for graph capture",
                None,
                "Attention(..., limits=attnrt.Limits(...))",
            )
        driver.check(code, "cuLaunchKernelEx")


class CudaKernel:
    """attend, merge, append and copy_pages of one (spec, device)."""

    def __init__(self, spec: AttentionSpec, device: int, programs: Programs, appender: Appender) -> None:
        self.spec, self.programs, self.appender = spec, programs, appender
        self.device = as_device(f"cuda:{device}")
        self._placed: dict[tuple[str, str, tuple[int, ...], bytes], TensorView] = {}
        self.itemsize = as_dtype(spec.kv_dtype).itemsize
        self.merge_grid = driver.device_attribute(device, driver.MULTIPROCESSORS) * MERGE_CTAS
        self._rulers: tuple[Any, bytes] = (None, b"")
        self._parts: Latest[bytes] = Latest()
        self._needs: Latest[tuple[str, ...]] = Latest()
        hopper = HOPPER_BOXES in programs.names
        #: Runs items of more rows than a tile of the decode kernel has.
        self.wide = WIDE if WIDE in programs.names else ATTEND
        self.maps_at = maps_offset(len(spec.composed.params)) if hopper else 0

    def needs(
        self, plan: Plan, limits: Limits | None, box: int | None = None, aligned: int = 0
    ) -> tuple[str, ...]:
        """Kernels that runs of a plan launch, in order; ``box`` is that of their arrays' maps (None: as large as the plan's),
        ``aligned`` what limits promise of every plan's (``boxes.promised``).

        All but the merge overlap, so those with the largest CTAs come first, and the decode kernel's fill the multiprocessors
        that these leave. A captured graph outlives its plan: with limits they choose, else the plan.
        """
        if limits is not None:
            names_within = self.needs_of(limits, box, aligned)
            if not self._serve(names_within, plan):
                raise PlanError(
                    "plan", "must be made within this attention's limits", None, "attn.plan(index)"
                )
            return names_within
        known = self._needs.get(plan, box)
        if known is not None:
            return known
        names: list[str] = []
        if select.has_items(plan, TEAM):
            plain, folding = _BY_KEY if self._by_key(plan, box) else _BY_BOXES
            names.append(folding if select.plan_folds(plan) else plain)
        if select.has_items(plan, CREW):
            names.append(self.wide)
        if select.has_items(plan, None):
            names.append(DECODE if plan_decodes(plan) else ATTEND)
        if len(plan.merge) and names != [DECODE]:  # that one merges itself
            names.append(MERGE)
        return self._needs.put(tuple(names), plan, box)

    def _serve(self, names: tuple[str, ...], plan: Plan) -> bool:
        """Whether all items of a plan are those of some of these kernels."""
        short = DECODE if plan_decodes(plan) else ATTEND
        if self.wide not in names and select.has_items(plan, CREW):
            return False
        if short not in names and select.has_items(plan, None):
            return False
        if MERGE not in names and names != (DECODE,) and len(plan.merge):
            return False
        folding = HOPPER_BOXES_FOLD in names or HOPPER_GATHER_FOLD in names
        return folding or not select.has_items(plan, TEAM) or not select.plan_folds(plan)

    def needs_of(self, limits: Limits | None, box: int | None = None, aligned: int = 0) -> tuple[str, ...]:
        """Kernels that runs of any plan within limits launch; of None: all that there are."""
        if limits is None:
            return self.programs.names
        team = bool(self.maps_at) and limits_team(self.spec, limits)
        names: list[str] = []
        if not team or limits_short(self.spec, limits):
            names += () if limits_decode(self.spec, limits) else (self.wide,)
            alone = self.wide == WIDE and limits_wide(self.spec, limits)
            names += (DECODE,) if decode_queries(self.spec) and not alone else ()
        if limits.max_parts > 1 and not team:
            # Of rows that share keys or not, as the planner finds: where they do not, the wide kernel's CTAs end as soon as
            # those of the decode kernel make room for them.
            names.reverse()
        if team:
            # No launch of the Hopper kernel starts while one before it runs: forms that are seldom meant go last. The form
            # that folds could do all, but takes 3 to 10 % longer (performance.md, Form 6).
            folds = limits_fold(self.spec, limits)
            # Whole rows, and all of them requests': there is nothing to merge.
            alone = not names and not folds and limits.max_parts == 1 and limits.max_padding == 0
            by_key = _BY_KEY[folds]
            if box == boxes.NO_BOXES:
                names = [by_key, *names]
            else:
                seldom = () if aligned else (by_key,)
                names = [HOPPER_BOXES, *names, *seldom, *((HOPPER_BOXES_FOLD,) if folds else ())]
            if alone:
                return tuple(names)
        return (DECODE,) if names == [DECODE] else (*names, MERGE)

    def counters(self, plan: Plan, limits: Limits | None) -> int:
        """How many counters the decode kernel wants for the rows that it merges itself: where nobody else has items."""
        if (
            DECODE not in self.needs(plan, limits)
            or select.has_items(plan, CREW)
            or select.has_items(plan, TEAM)
        ):
            return 0
        return merge_counters(plan)

    def steady(self, loaded: Loaded, limits: Limits | None) -> tuple[bytes, int, int, bool, tuple[int, ...]]:
        """What a load of one part without a team's items needs beside its arrays, whatever its lengths: (a header, where its
        first part lies, counters for each merge row, whether runs of the loaded plan have the launches that its runs will
        have, what writes the workers' first items)."""
        plan = loaded.plan
        alone = decode_queries(self.spec) > 0
        header = np.zeros(structs.HEADER.itemsize, np.uint8)
        self.pack_header(loaded, header)
        per_row = 1 if plan.parts[0].heads > 1 else self.spec.num_kv_heads
        fits = alone and len(plan.work) > 0 and self.needs(plan, limits) == (DECODE,)
        return (
            header.tobytes(),
            structs.AT_PARTS,
            per_row if alone else 0,
            fits,
            first_lines.first_writer(loaded),
        )

    def prepare(self, plan: Plan | None, limits: Limits | None) -> None:
        """Compile what a plan (None: any plan within the limits) needs, so that its runs do not."""
        self.programs.prepare(self.needs_of(limits) if plan is None else self.needs(plan, limits))

    @staticmethod
    def _by_key(plan: Plan, box: int | None) -> bool:
        """Whether the Hopper kernel fetches a plan's K and V key by key, under maps of such boxes."""
        return boxes.of_plan(plan)[0] < 0 if box is None else box == boxes.NO_BOXES

    def grid(self, name: str, loaded: Loaded, num_qo_heads: int, box: int) -> tuple[int, int]:
        """(grid that serves every later plan within the limits, grid that this plan needs) of a kernel.

        attend: one CTA, decode: one group of a CTA per worker of the plan's traits. merge: the count is read on the device.
        """
        plan = loaded.plan
        if name == MERGE:
            rows = 0 if loaded.counters[1] else len(plan.merge) * num_qo_heads
            return self.merge_grid, min(self.merge_grid, -(-rows // MERGE_WARPS))
        if name in HOPPER:
            workers = self._workers(plan, TEAM)
            mine = (name in _BY_KEY) == self._by_key(plan, box) and select.has_items(plan, TEAM)
            mine = mine and (name in _BY_KEY or (name == HOPPER_BOXES_FOLD) == select.plan_folds(plan))
            return workers, workers if mine else 0
        crew = CREW if name == self.wide and self._workers(plan, CREW) else None
        workers = self._workers(plan, crew)
        if name == DECODE:
            workers = -(-workers * DECODE_THREADS // self.programs.entry(DECODE).threads)
        return workers, workers if select.has_items(plan, crew) or (name == DECODE and len(plan.merge)) else 0

    @staticmethod
    def _workers(plan: Plan, crew: str | None) -> int:
        first, end = plan.traits.workers_of(crew)
        return end - first

    def pack_header(self, loaded: Loaded, target: np.ndarray) -> None:
        """Write what the kernels read of a plan (structs.HEADER)."""
        classes, first = loaded.plan.traits.classes, loaded.parts[0]
        known, rulers = self._rulers
        if known is not classes:
            rulers = pack.pack_rulers(classes)
            self._rulers = (classes, rulers)
        parts = self._parts.get(first)
        if parts is None:
            parts = self._parts.put(pack.parts_of(loaded), first)
        pack.fill_header(loaded, target, rulers, parts)

    def repeat(self, call: Call, limits: Limits | None) -> Repeat:
        """What runs a call, and later ones that differ in addresses, scale and stream alone."""
        return Repeat(self, call, limits)

    def arguments(self, call: Call) -> tuple[Any, Any]:
        """(memory, address in it) of the packed Launch of a call: on a multiple of 64 bytes, tensor maps that nobody uses."""
        ffi, _ = driver.shim()
        table: Any = call.params.table
        packed = pack.fill_run(call, self.itemsize) + (table.tobytes() or bytes(64))
        memory = ffi.new("char[]", max(len(packed), self.maps_at + boxes.MAPS_BYTES) + 64)
        at = memory + -int(ffi.cast("uintptr_t", memory)) % 64
        ffi.memmove(at, packed, len(packed))
        if self.maps_at:
            boxes.encode(self.device.index, at + self.maps_at, call, boxes.NO_BOXES, self.spec)
        return memory, at

    def attend(self, call: Call) -> None:
        """Run every work item."""
        self._launch(call, merges=False)

    def merge(self, call: Call) -> None:
        """Fold and finish the rows of the merge list."""
        self._launch(call, merges=True)

    def _launch(self, call: Call, merges: bool) -> None:
        plan, box = call.loaded.plan, boxes.NO_BOXES
        memory, at = self.arguments(call)
        if self.maps_at and select.has_items(plan, TEAM):
            box = boxes.box_of(plan, call, self.spec)
        names = self.needs(plan, None, box)
        if self.maps_at:
            maps = boxes.encoded(box, WIDE in names, call, self.spec)
            boxes.encode(self.device.index, at + self.maps_at, call, maps, self.spec)
        for name in names:
            _, grid = self.grid(name, call.loaded, call.q.shape[1], box)
            if (name == MERGE) == merges and grid:
                launch(self.programs.entry(name), grid, at, call.stream)
        del memory

    def place(self, name: str, array: np.ndarray) -> TensorView:
        """A parameter's host array on the device; equal arrays are copied once, so that a captured run finds them there."""
        found = self.placed(name, array)
        if found is None:
            ops = ops_of(self.device)
            address, owner = ops.allocate(array.nbytes)
            ops.copy(address, array, array.nbytes, 0)
            found = make_view(address, array.shape, array.dtype.name, self.device, owner=owner)
            self._placed[_contents(name, array)] = found
        return found

    def placed(self, name: str, array: np.ndarray) -> TensorView | None:
        """The device's copy of an array that has been placed."""
        return self._placed.get(_contents(name, array))

    def append(self, call: AppendCall) -> AppendAgain:
        """Store new rows of K and V; returns what stores those of another call of the same form."""
        return self.appender.run(call)

    def gather(self, call: AppendCall) -> None:
        """Bring rows of the cache side by side."""
        self.appender.gather(call)

    def copy_pages(
        self, pools: tuple[PagedView, ...], pages: tuple[TensorView, TensorView], stream: int
    ) -> None:
        """Copy pages of K and V to other pages of the same pools."""
        self.appender.copy_pages(pools, pages, stream)
