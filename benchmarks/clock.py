# SPDX-License-Identifier: Apache-2.0
"""How one GPU time is taken: events around a run with L2 cold and *clean*, in turns that all begin alike, and the clock of the
multiprocessors meanwhile.

Before each run a buffer several times the size of L2 is read (a flush that writes leaves dirty lines, whose eviction costs the
next kernel 4 to 23 %). A GPU at its limit of power changes its clock within milliseconds, so what ran just before counts: a turn
begins with the same load for all.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Clock", "captured", "empty_graphs", "kernels_of"]

FLUSH_BYTES = 256 << 20

#: Cycles and nanoseconds at one point of a stream, on every multiprocessor.
_STAMP = """
extern "C" __global__ void stamp(ulonglong2* out) {
  unsigned sm;
  ulonglong2 now;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now.x));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now.y));
  out[sm] = now;
}
"""


class Stamps:
    """What clock the multiprocessors ran at between two points of the current stream."""

    def __init__(self) -> None:
        from attnrt.backends.cuda.nvrtc import compile_source

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        image, _ = compile_source(_STAMP, f"sm_{properties.major}{properties.minor}", "stamp")
        self._ctas = 2 * properties.multi_processor_count  # one on each at least
        self._found = torch.zeros(2, self._ctas, 2, dtype=torch.int64, device="cuda")
        self._driver, self._module, self._kernel = (
            ctypes.CDLL("libcuda.so.1"),
            ctypes.c_void_p(),
            ctypes.c_void_p(),
        )
        self._check(self._driver.cuModuleLoadData(ctypes.byref(self._module), image))
        self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._kernel), self._module, b"stamp"))
        self._ways = [(ctypes.c_void_p * 1)() for _ in range(2)]
        self._places = [ctypes.c_uint64(self._found[point].data_ptr()) for point in range(2)]
        for way, place in zip(self._ways, self._places, strict=True):
            way[0] = ctypes.cast(ctypes.byref(place), ctypes.c_void_p)

    @staticmethod
    def _check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA driver: error {code}")

    def note(self, point: int) -> None:
        """Note point 0 or 1."""
        if point == 0:
            self._found.zero_()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = (self._ctas, 1, 1, 32, 1, 1, 0)
        self._check(self._driver.cuLaunchKernel(self._kernel, *shape, stream, self._ways[point], None))

    def ghz(self) -> float:
        """Between the points, median over multiprocessors; waits for both."""
        first, last = self._found.cpu()
        seen = (first[:, 1] > 0) & (last[:, 1] > first[:, 1])
        cycles, ns = (last - first)[seen].double().unbind(1)
        return float((cycles / ns).median()) if len(ns) else math.nan


class Clock:
    """Times with a cold, clean L2.

    Parameters
    ----------
    repeats : int
        Times of which the median is taken, in so many ``rounds`` or in one.
    rounds : int
    """

    def __init__(self, repeats: int = 21, rounds: int = 5) -> None:
        self.rounds, self._each = rounds, -(-repeats // rounds)
        self._other = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        self._stamps: Stamps | None = None

    def prepare(self) -> None:
        """What the first measurement would wait for: the profiler takes seconds to start."""
        self.flush()
        self.turn(self.flush)
        kernels_of(self.flush)

    def flush(self) -> None:
        """Fill L2 with lines that need not be written back."""
        self._other.max()

    def load(self) -> None:
        """What comes before every turn."""
        for _ in range(4):
            self.flush()

    def turn(self, run: Callable[[], Any]) -> tuple[float, float]:
        """(µs of ``run``, median of a few; GHz of the multiprocessors meanwhile), after the load that all turns begin with."""
        if self._stamps is None:
            self._stamps = Stamps()
        self.load()
        run()
        self._stamps.note(0)
        us = self._times(run, self._events[: self._each], lambda: self._stamps.note(1))  # type: ignore[union-attr]
        return us, self._stamps.ghz()

    def median(self, run: Callable[[], Any]) -> float:
        """µs of ``run``, median of all repeats in one go."""
        for _ in range(3):
            run()
        return self._times(run, self._events)

    def _times(
        self, run: Callable[[], Any], events: list[Any], after: Callable[[], Any] = lambda: None
    ) -> float:
        for start, stop in events:
            self.flush()
            start.record()
            run()
            stop.record()
        after()
        torch.cuda.synchronize()
        times = sorted(start.elapsed_time(stop) * 1e3 for start, stop in events)
        return times[len(times) // 2]

    def kernels(self, run: Callable[[], Any]) -> list[str]:
        """Names of the kernels that one run launches, in order."""
        return kernels_of(run)

    def captured(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        return captured(run)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def captured(run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
    """(replay of ``run``, what it returned while it was captured); the graph lives as long as the replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        returned = run()
    return graph.replay, returned


def kernels_of(run: Callable[[], Any]) -> list[str]:
    """Names of the kernels that one run launches, in order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == DeviceType.CUDA]
    return [
        e.name.split("(")[0].split("<")[0].removeprefix("void ")[:80]
        for e in sorted(events, key=lambda e: e.time_range.start)
    ]


def empty_graphs(clock: Clock) -> dict[str, float]:
    """µs between the events around a graph of one and of two kernels that do next to nothing."""
    x = torch.zeros(1, device="cuda")
    one, two = captured(lambda: x.add_(1)), captured(lambda: (x.add_(1), x.add_(1)))
    return {"one node": round(clock.median(one[0]), 2), "two nodes": round(clock.median(two[0]), 2)}
