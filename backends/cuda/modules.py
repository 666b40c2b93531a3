# SPDX-License-Identifier: Apache-2.0
"""Loaded device code: entries that the driver shim launches, whatever compiler they are of."""

from __future__ import annotations

from typing import Any, Protocol

from attnrt.backends.cuda import driver
from attnrt.backends.cuda.render import (
    ATTEND,
    DECODE,
    DECODE_SMEM,
    DECODE_TOP,
    HOPPER,
    HOPPER_SMEM,
    SMEM,
    THREADS,
    WIDE,
    WIDE_SMEM,
)
from attnrt.backends.cuda.tables import DECODE_GROUPS

__all__ = ["DriverModule", "Module", "launch"]

#: Where a module says how much dynamic shared memory a kernel needs.
_SMEM = {ATTEND: SMEM, DECODE: DECODE_SMEM, WIDE: WIDE_SMEM, **dict.fromkeys(HOPPER, HOPPER_SMEM)}


class Module(Protocol):
    """Loaded code of one text; both compilers' forms of it. ``groups``: of a CTA of its last kernel (``groups_of``)."""

    groups: int

    def entry(self, name: str) -> Any:
        """attnrt_launch_t of a kernel, without its grid."""
        ...


def launch_record(device: int, name: str, kernel: int, smem: int, dependent: bool) -> Any:
    """A new attnrt_launch_t; ``dependent``: CTAs begin with a wait and may start while the kernel before ends (sm_90). Those of
    the Hopper kernel, which take a multiprocessor each, may not: they would start 10 to 30 us later (docs/performance.md)."""
    ffi, _ = driver.shim()
    dependent = dependent and name not in HOPPER
    record = ffi.new("attnrt_launch_t *")
    record.device, record.kernel, record.threads, record.smem = device, kernel, THREADS, smem
    record.pdl = dependent and driver.device_attribute(device, driver.MAJOR) >= 9
    return record


def groups_of(device: int, name: str, smem: int) -> tuple[int, int]:
    """(groups of a CTA, its dynamic shared memory) of a kernel whose text asks for ``smem`` bytes: the decode kernel asks for
    each group, and has as many as the device holds."""
    if name != DECODE:
        return 1, smem
    most = (driver.device_attribute(device, driver.SHARED_OPTIN) - DECODE_TOP) // smem
    groups = max(1, min(DECODE_GROUPS, most))
    return groups, groups * smem + DECODE_TOP


def launch(entry: Any, grid: int, arguments: Any, stream: int) -> None:
    """Enqueue a kernel whose only parameter is the struct in ``arguments`` (bytes, or its address)."""
    ffi, lib = driver.shim()
    mine = ffi.new("attnrt_launch_t *", entry[0])  # threads share entries
    mine.grid = grid
    where = ffi.from_buffer(arguments) if isinstance(arguments, bytes) else arguments
    driver.check(lib.attnrt_cuda_launch(mine, where, stream), "cuLaunchKernelEx")


class DriverModule:
    """A cubin, loaded through the driver shim."""

    def __init__(self, device: int, image: bytes, names: tuple[str, ...], dependent: bool) -> None:
        self.library = driver.Library(device, image)
        self._entries = {}
        for name in names:
            asked = self.library.number(_SMEM[name]) if name in _SMEM else 0
            self.groups, smem = groups_of(device, name, asked)
            self._entries[name] = launch_record(
                device, name, self.library.kernel(name, smem), smem, dependent
            )

    def entry(self, name: str) -> Any:
        return self._entries[name]
