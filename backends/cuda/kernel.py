# SPDX-License-Identifier: Apache-2.0
"""The kernels of one spec on one device: launches whose arguments are one struct, packed once per form of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from attnrt.backends.cuda import driver, pack
from attnrt.backends.cuda.render import (
    ATTEND,
    DECODE,
    DECODE_SMEM,
    MERGE,
    MERGE_CTAS,
    SMEM,
    THREADS,
)
from attnrt.backends.cuda.select import limits_decode, plan_decodes
from attnrt.device import as_device
from attnrt.dtypes import as_dtype
from attnrt.errors import CaptureError
from attnrt.memory import ops_of
from attnrt.tensor import TensorView, make_view

if TYPE_CHECKING:
    from attnrt.backends.base import AppendCall, Call, Loaded, PagedView
    from attnrt.backends.cuda.append import AppendAgain, Appender
    from attnrt.backends.cuda.programs import Programs
    from attnrt.layout import Limits
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec

__all__ = ["CudaKernel", "DriverModule", "Module", "launch"]

#: (row, head) pairs that a CTA of the merge kernel folds at a time.
MERGE_WARPS = THREADS // 32

#: Where a module says how much dynamic shared memory a kernel needs.
_SMEM = {ATTEND: SMEM, DECODE: DECODE_SMEM}
_RUN_OFFSETS = pack.run_offsets()


class Module(Protocol):
    """Loaded code of one text; both compilers' forms of it."""

    def entry(self, name: str) -> Any:
        """attnrt_launch_t of a kernel, without its grid."""
        ...


def launch_record(device: int, kernel: int, smem: int, dependent: bool) -> Any:
    """A new attnrt_launch_t; ``dependent``: CTAs may start while the kernel before ends (sm_90), and begin with a wait."""
    ffi, _ = driver.shim()
    record = ffi.new("attnrt_launch_t *")
    record.device, record.kernel, record.threads, record.smem = device, kernel, THREADS, smem
    record.pdl = dependent and driver.device_attribute(device, driver.MAJOR) >= 9
    return record


def launch(entry: Any, grid: int, arguments: bytes, stream: int) -> None:
    """Enqueue a kernel whose only parameter is the struct in ``arguments``."""
    ffi, lib = driver.shim()
    mine = ffi.new("attnrt_launch_t *", entry[0])  # threads share entries
    mine.grid = grid
    driver.check(lib.attnrt_cuda_launch(mine, ffi.from_buffer(arguments), stream), "cuLaunchKernelEx")


class DriverModule:
    """A cubin, loaded through the driver shim."""

    def __init__(self, device: int, image: bytes, names: tuple[str, ...], dependent: bool) -> None:
        self.library = driver.Library(device, image)
        self._entries = {}
        for name in names:
            smem = self.library.number(_SMEM[name]) if name in _SMEM else 0
            self._entries[name] = launch_record(device, self.library.kernel(name, smem), smem, dependent)

    def entry(self, name: str) -> Any:
        return self._entries[name]


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

    __slots__ = ("_args", "_heads", "_kernel", "_limits", "_names", "_params", "_record", "_run", "native")

    def __init__(self, kernel: CudaKernel, call: Call, limits: Limits | None) -> None:
        ffi, lib = driver.shim()
        table = call.params.table.tobytes() or bytes(64)
        self._kernel, self._params, self._heads = kernel, call.params, call.q.shape[1]
        self._names: tuple[str, ...] = ()
        self._limits = limits
        self._args = ffi.new("char[]", pack.fill_run(call, kernel.itemsize) + table)
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
        record = self._record
        driver.shim()[0].cast("uint64_t *", self._args)[0] = loaded.header.ptr  # type: ignore[union-attr]
        kernel = self._kernel
        names = kernel.needs(loaded.plan, self._limits)
        if names != self._names:
            for i, name in enumerate(names):
                record.launches[i] = kernel.programs.entry(name)[0]
            self._names, record.num_launches = names, len(names)
        for i, (most, now) in zip(range(len(names)), kernel.grids(loaded, self._heads), strict=False):
            record.launches[i].grid, record.eager_grid[i] = most, now

    def __call__(self, addresses: tuple[int, ...], sm_scale: float, stream: int) -> None:
        """Enqueue; ``addresses`` of q, k, v (0: k's), out, lse (0: none)."""
        q, k, v, out, lse = addresses
        code = self._run(self._record, q, k, v or k, out, lse, sm_scale, stream)
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
        self._needs: tuple[Any, tuple[str, ...]] = (None, ())

    def needs(self, plan: Plan, limits: Limits | None) -> tuple[str, ...]:
        """Kernels that runs of a plan launch, in order.

        A captured graph outlives its plan: with limits they choose, else the plan.
        """
        if limits is not None:
            return self.needs_of(limits)
        if self._needs[0] is not plan:
            names = (DECODE if plan_decodes(plan) else ATTEND, *((MERGE,) if len(plan.merge) else ()))
            self._needs = (plan, names)
        return self._needs[1]

    def needs_of(self, limits: Limits | None) -> tuple[str, ...]:
        """Kernels that runs of any plan within limits launch; of None: all that there are."""
        if limits is None:
            return self.programs.names
        return (DECODE if limits_decode(self.spec, limits) else ATTEND, MERGE)

    def prepare(self, plan: Plan | None, limits: Limits | None) -> None:
        """Compile what a plan (None: any plan within the limits) needs, so that its runs do not."""
        for name in self.needs_of(limits) if plan is None else self.needs(plan, limits):
            self.programs.entry(name)

    def grids(self, loaded: Loaded, num_qo_heads: int) -> tuple[tuple[int, int], ...]:
        """(grid that serves every later plan within the limits, grid that this plan needs) of each entry.

        attend: one CTA per worker of the plan's traits. merge: the count is read on the device.
        """
        plan = loaded.plan
        rows = loaded.merge_rows.shape[0] * num_qo_heads
        workers = plan.traits.num_workers
        return (workers, workers if loaded.work.shape[0] else 0), (
            self.merge_grid,
            min(self.merge_grid, -(-rows // MERGE_WARPS)),
        )

    def pack_header(self, loaded: Loaded, target: np.ndarray) -> None:
        """Write what the kernels read of a plan (pack.HEADER)."""
        classes = loaded.plan.traits.classes
        if self._rulers[0] is not classes:
            self._rulers = (classes, pack.pack_rulers(classes))
        pack.fill_header(loaded, target, self._rulers[1])

    def repeat(self, call: Call, limits: Limits | None) -> Repeat:
        """What runs a call, and later ones that differ in addresses, scale and stream alone."""
        return Repeat(self, call, limits)

    def _arguments(self, call: Call) -> bytes:
        table: Any = call.params.table
        return pack.fill_run(call, self.itemsize) + (table.tobytes() or bytes(64))

    def attend(self, call: Call) -> None:
        """Run every work item."""
        plan = call.loaded.plan
        entry = self.programs.entry(self.needs(plan, None)[0])
        launch(entry, plan.traits.num_workers, self._arguments(call), call.stream)

    def merge(self, call: Call) -> None:
        """Fold and finish the rows of the merge list."""
        launch(self.programs.entry(MERGE), self.merge_grid, self._arguments(call), call.stream)

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

    def copy_pages(
        self, pools: tuple[PagedView, ...], pages: tuple[TensorView, TensorView], stream: int
    ) -> None:
        """Copy pages of K and V to other pages of the same pools."""
        self.appender.copy_pages(pools, pages, stream)
