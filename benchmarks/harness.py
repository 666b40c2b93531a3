# SPDX-License-Identifier: Apache-2.0
"""How GPU times are taken: one protocol for ours and for every peer.

A time is the median of CUDA events around one replay of a captured graph, with the L2 cache cold and *clean*: before each
replay a buffer several times its size is read (a flush that writes leaves dirty lines, whose eviction costs the next kernel 4 to
23 %). The events themselves cost about 3 µs: the empty graph is timed in the same run and printed beside. A time counts only if

- random (row, head) pairs of the result agree with a float64 reference in the same process,
- it does not beat the memory or the tensor cores of the machine,
- the kernels that ran are the ones that were meant (each row names them).
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch

#: Bytes per second and dense 16-bit FLOP per second that no kernel passes (NVIDIA H200 data sheet).
MEMORY_LIMIT, TENSOR_LIMIT = 4.8e12, 989e12
#: Largest relative error of a result in 16 bits against float64: ||out - ref|| / ||ref|| over the sampled rows.
TOLERANCE = 1e-2
FLUSH_BYTES = 256 << 20


class Absent(Exception):
    """A peer cannot take a case here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A provider that is set up for a case.

    Attributes
    ----------
    run : callable
        Enqueues once on the current stream; may be captured if ``graph``.
    out : torch.Tensor
        What run writes, [rows, heads, head_dim].
    graph : bool
    keep : object
        What must stay alive.
    """

    run: Callable[[], Any]
    out: torch.Tensor
    graph: bool = True
    keep: Any = None


class Provider(Protocol):
    """One library, or one way to call it."""

    name: str

    def version(self) -> str:
        """Of the library; raises ImportError where it is not installed."""
        ...

    def prepare(self, case: Any) -> Ready:
        """Set up a case; raises Absent if this provider cannot take it."""
        ...


@dataclass(slots=True, kw_only=True)
class Row:
    """One time. ``nbytes`` and ``flops`` are what any implementation must move and do."""

    case: str
    provider: str
    version: str
    us: float
    nbytes: int
    flops: int = 0
    error: float = float("nan")
    kernels: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def tb_s(self) -> float:
        return self.nbytes / self.us / 1e6


class Clock:
    """Times of graphs with a cold, clean L2.

    Parameters
    ----------
    repeats : int
        Replays of which the median is taken.
    """

    def __init__(self, repeats: int = 21) -> None:
        self.repeats = repeats
        self._other = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]

    def flush(self) -> None:
        """Fill L2 with lines that need not be written back."""
        self._other.max()

    def median(self, run: Callable[[], Any]) -> float:
        """µs of ``run``, median."""
        for _ in range(3):
            run()
        for start, stop in self._events:
            self.flush()
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        times = sorted(start.elapsed_time(stop) * 1e3 for start, stop in self._events)
        return times[len(times) // 2]


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """A replay of ``run``; the graph lives as long as what is returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


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


def measure(
    case: Any,
    provider: Provider,
    clock: Clock,
    reference: Callable[[Any, torch.Tensor], float],
    expect: Sequence[str] = (),
) -> Row:
    """The checked time of one provider on one case.

    Parameters
    ----------
    case : object with name, nbytes, flops
    provider : Provider
    clock : Clock
    reference : callable (case, out) -> float
        Relative error over random rows.
    expect : sequence of str
        Every kernel's name must contain one of these (empty: any).

    Raises
    ------
    Absent
        The provider cannot take the case.
    AssertionError
        Wrong result, impossible time, or another kernel than was meant.
    """
    version = provider.version()
    ready = provider.prepare(case)
    ready.out.fill_(float("nan"))
    ready.run()
    torch.cuda.synchronize()
    error = reference(case, ready.out)
    assert error < TOLERANCE, f"{provider.name} on {case.name}: error {error:.2e}"
    names = kernels_of(ready.run)
    stray = [name for name in names if expect and not any(part in name for part in expect)]
    assert not stray, f"{provider.name} on {case.name}: ran {stray}"
    replay = captured(ready.run) if ready.graph else ready.run
    us = clock.median(replay)
    error = max(error, reference(case, ready.out))
    assert error < TOLERANCE, f"{provider.name} on {case.name}: error {error:.2e} after replays"
    least = max(case.nbytes / MEMORY_LIMIT, case.flops / TENSOR_LIMIT) * 1e6
    # What fits into L2 may come from there even after a flush, if the flush missed it; nothing else may.
    assert us >= least, (
        f"{provider.name} on {case.name}: {us:.2f} µs is less than the {least:.2f} that the data take"
    )
    return Row(
        case=case.name,
        provider=provider.name,
        version=version,
        us=us,
        nbytes=case.nbytes,
        flops=case.flops,
        error=error,
        kernels=sorted(set(names)),
        note="" if ready.graph else "eager",
    )


def empty_graphs(clock: Clock) -> dict[str, float]:
    """µs between the events around a graph of one and of two kernels that do next to nothing."""
    x = torch.zeros(1, device="cuda")
    return {
        "one node": clock.median(captured(lambda: x.add_(1))),
        "two nodes": clock.median(captured(lambda: (x.add_(1), x.add_(1)))),
    }


def setting() -> dict[str, str]:
    """Commit, device and date of a run."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    clocks = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "driver, clocks after": clocks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def save(folder: Path, name: str, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """``name``.jsonl (the setting, then one row a line) and ``name``.md (one line per case, ratios to the best peer)."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(about)] + [json.dumps({**asdict(row), "tb_s": round(row.tb_s, 3)}) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / f"{name}.md").write_text(table(rows, about))


def table(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Markdown: our time, its rate, every peer's time, and best peer / ours."""
    peers = sorted({row.provider for row in rows if row.provider != "attnrt"})
    text = [f"{key}: {value}" for key, value in about.items()]
    text += [
        "",
        "| case | attnrt µs | TB/s | " + " | ".join(f"{peer} µs" for peer in peers) + " | best peer / ours |",
    ]
    text.append("|---" * (4 + len(peers)) + "|")
    for case in dict.fromkeys(row.case for row in rows):
        times = {row.provider: row for row in rows if row.case == case}
        ours = times.get("attnrt")
        others = [times[peer].us for peer in peers if peer in times]
        ratio = f"{min(others) / ours.us:.2f}" if ours and others else ""
        cells = [f"{ours.us:.1f} | {ours.tb_s:.2f}" if ours else " | "]
        cells += [f"{times[peer].us:.1f}" if peer in times else "" for peer in peers]
        text.append(f"| {case} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(text) + "\n"
