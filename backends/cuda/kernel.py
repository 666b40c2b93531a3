# SPDX-License-Identifier: Apache-2.0
"""The kernels of one spec on one device: two launches whose arguments are one struct, packed per call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from attnrt.backends.cuda import driver, pack
from attnrt.backends.cuda.render import ATTEND, MERGE, SMEM, THREADS
from attnrt.device import as_device
from attnrt.dtypes import as_dtype
from attnrt.memory import ops_of
from attnrt.tensor import TensorView, make_view

if TYPE_CHECKING:
    from attnrt.backends.base import AppendCall, Call, Loaded
    from attnrt.backends.cuda.append import Appender
    from attnrt.spec import AttentionSpec

__all__ = ["CudaKernel", "DriverModule", "Module"]

#: CTAs of the merge kernel per multiprocessor: fixed, for a captured graph; four warps each take (row, head) pairs in turn.
MERGE_CTAS = 4


class Module(Protocol):
    """Loaded code of one text; both compilers' forms of it."""

    def launch(self, name: str, grid: int, arguments: bytes, stream: int) -> None:
        """Enqueue a kernel whose only parameter is the struct in ``arguments``."""
        ...


class DriverModule:
    """A cubin, loaded and launched through the driver shim."""

    def __init__(self, device: int, image: bytes, names: tuple[str, ...], has_tiles: bool) -> None:
        self.ffi, self.lib = driver.shim()
        self.library = driver.Library(device, image)
        self._launches = {}
        for name in names:
            smem = self.library.number(SMEM) if has_tiles and name == ATTEND else 0
            launch = self.ffi.new("attnrt_launch_t *")
            launch.device, launch.threads, launch.smem = device, THREADS, smem
            launch.kernel = self.library.kernel(name, smem)
            self._launches[name] = launch

    def launch(self, name: str, grid: int, arguments: bytes, stream: int) -> None:
        launch = self._launches[name]
        launch.grid = grid
        code = self.lib.attnrt_cuda_launch(launch, self.ffi.from_buffer(arguments), stream)
        driver.check(code, f"launch of {name}")


class CudaKernel:
    """attend, merge and append of one (spec, device)."""

    def __init__(self, spec: AttentionSpec, device: int, module: Module, appender: Appender) -> None:
        self.spec, self.module, self.appender = spec, module, appender
        self.device = as_device(f"cuda:{device}")
        self._placed: dict[tuple[str, str, tuple[int, ...], bytes], TensorView] = {}
        self.itemsize = as_dtype(spec.kv_dtype).itemsize
        self.merge_grid = driver.device_attribute(device, driver.MULTIPROCESSORS) * MERGE_CTAS

    def pack_header(self, loaded: Loaded, target: np.ndarray) -> None:
        """Write what the kernels read of a plan (pack.HEADER)."""
        pack.fill_header(loaded, target)

    def _arguments(self, call: Call) -> bytes:
        table: Any = call.params.table
        return pack.fill_run(call, self.itemsize).tobytes() + (table.tobytes() or bytes(64))

    def attend(self, call: Call) -> None:
        """Run every work item: one CTA per worker of the plan's traits."""
        grid = call.loaded.plan.traits.num_workers
        self.module.launch(ATTEND, grid, self._arguments(call), call.stream)

    def merge(self, call: Call) -> None:
        """Fold and finish the rows of the merge list; the count is read on the device."""
        self.module.launch(MERGE, self.merge_grid, self._arguments(call), call.stream)

    def place(self, name: str, array: np.ndarray) -> TensorView:
        """A parameter's host array on the device; equal arrays are copied once, so that a captured run finds them there."""
        key = (name, array.dtype.str, array.shape, array.tobytes())
        found = self._placed.get(key)
        if found is None:
            ops = ops_of(self.device)
            address, owner = ops.allocate(array.nbytes)
            ops.copy(address, array, array.nbytes, 0)
            found = make_view(address, array.shape, array.dtype.name, self.device, owner=owner)
            self._placed[key] = found
        return found

    def append(self, call: AppendCall) -> None:
        """Store new rows of K and V."""
        self.appender.run(call)
