# SPDX-License-Identifier: Apache-2.0
"""How GPU times are taken: one protocol for ours and for every peer.

A time is the median of CUDA events around one replay of a captured graph, and beside it around the call itself, with the L2
cache cold and *clean*: before each a buffer several times its size is read (a flush that writes leaves dirty lines, whose
eviction costs the next kernel 4 to 23 %). The events themselves cost about 3 µs: the empty graph is timed in the same run and
printed beside. A time counts only if

- random (row, head) pairs of the result agree with a float64 reference in the same process, before and after the replays,
- it does not beat the memory or the tensor cores of the machine,
- the kernels that ran are the ones that were meant (each row names them; a row of a fallback counts for nothing).

Planning, conversion of layouts and whatever else an engine does once per step or once per model happens in ``prepare`` and is
not timed, for ours and for peers alike.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Protocol

import torch
from cases import Case, error_of
from report import OURS, Row, Target, save
from shapes import Shape

#: Bytes per second and dense 16-bit FLOP per second that no kernel passes (NVIDIA H200 data sheet).
MEMORY_LIMIT, TENSOR_LIMIT = 4.8e12, 989e12
#: Largest relative error of a result in 16 bits against float64: ||out - ref|| / ||ref|| over the sampled rows.
TOLERANCE = 1e-2
FLUSH_BYTES = 256 << 20
#: The kernel that takes anything: where it runs in place of a kernel made for the case, the row is a fallback's.
GENERAL = "attnrt_attend"


class Absent(Exception):
    """A provider cannot take a case here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A provider that is set up for a case.

    Attributes
    ----------
    run : callable
        Enqueues once on the current stream; may be captured if ``graph``. Returns the result [rows, heads, head_dim_vo] (or a
        tensor that ``view`` makes it of), unless ``out`` is what it writes.
    out : torch.Tensor, optional
    view : callable, optional
    graph : bool
    keep : object
        What must stay alive.
    """

    run: Callable[[], Any]
    out: torch.Tensor | None = None
    view: Callable[[Any], torch.Tensor] | None = None
    graph: bool = True
    keep: Any = None

    def result(self, returned: Any) -> torch.Tensor:
        """The result in the case's shape, after ``run`` returned ``returned``."""
        found = returned if self.out is None else self.out
        return found if self.view is None else self.view(found)


class Provider(Protocol):
    """One library, or one way to call it."""

    name: str

    def version(self) -> str:
        """Of the library; raises ImportError where it is not installed."""
        ...

    def prepare(self, case: Case) -> Ready:
        """Set up a case; raises Absent if this provider cannot take it."""
        ...


class Clock:
    """Times with a cold, clean L2.

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

    def prepare(self) -> None:
        """What the first measurement would wait for: the profiler takes seconds to start."""
        self.flush()
        kernels_of(self.flush)

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


def measure(case: Case, provider: Provider, clock: Any) -> Row:
    """The checked times of one provider on one case.

    Raises
    ------
    Absent
        The provider cannot take the case.
    AssertionError
        Wrong result, or impossible time.
    """
    version, mine = provider.version(), provider.name.startswith(OURS)
    ready = provider.prepare(case)
    label = f"{provider.name} on {case.name}"
    if ready.out is not None:
        ready.out.fill_(float("nan"))
    returned = ready.run()
    clock.synchronize()
    error = error_of(case, ready.result(returned))
    assert error < TOLERANCE, f"{label}: error {error:.2e}"
    names = clock.kernels(ready.run)
    eager_us = clock.median(ready.run)
    replay, note = ready.run, "" if ready.graph else "no graph"
    if ready.graph:
        try:
            replay, returned = clock.captured(ready.run)
        except Exception as failure:  # a peer's call may synchronise or allocate
            if mine:
                raise
            note = f"no graph ({type(failure).__name__})"
            clock.synchronize()
    written = ready.out if ready.out is not None else returned
    if isinstance(written, torch.Tensor):
        written.fill_(float("nan"))
    us = clock.median(replay)
    if note == "":
        error = max(error, error_of(case, ready.result(returned)))
        assert error < TOLERANCE, f"{label}: error {error:.2e} after replays"
    least = max(case.nbytes / MEMORY_LIMIT, case.flops / TENSOR_LIMIT) * 1e6
    assert min(us, eager_us) >= least, (
        f"{label}: {min(us, eager_us):.2f} µs beats {least:.2f}, a limit of the machine"
    )
    return Row(
        case=case.name,
        provider=provider.name,
        version=version,
        us=us,
        eager_us=eager_us,
        nbytes=case.nbytes,
        flops=case.flops,
        error=error,
        kernels=sorted(set(names)),
        note=note,
        fallback=mine and (GENERAL in names or not any("attnrt_" in name for name in names)),
    )


@dataclass
class Run:
    """A table in the making: providers over shapes within a budget of time.

    Attributes
    ----------
    seconds : float
        No case is begun after so many; what was left out is in ``left_out``.
    faults : list of str
        What failed, ours and peers'.
    """

    clock: Any
    seconds: float = float("inf")
    device: str = "cuda"
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)

    def over(self) -> bool:
        return time.perf_counter() - self.begun > self.seconds

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spent[what] = round(self.spent.get(what, 0.0) + time.perf_counter() - start, 2)

    def add(self, shapes: Sequence[Shape], providers: Sequence[Provider]) -> None:
        """Rows of every provider on every shape, ours first; what goes wrong is printed and kept in ``faults``."""
        gone: set[str] = set()
        for shape in shapes:
            if self.over():
                self.left_out.append(shape.name)
                continue
            with self.timed("data and references"):
                case = Case(shape, self.device)
                case.samples  # noqa: B018  (computed here so that it is counted here)
            for provider in providers:
                if provider.name not in gone:
                    self._one(case, provider, gone)
            del case
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
        if self.left_out:
            print(f"out of time, not measured: {', '.join(self.left_out)}", flush=True)

    def _one(self, case: Case, provider: Provider, gone: set[str]) -> None:
        try:
            with self.timed(provider.name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = measure(case, provider, self.clock)
        except ImportError as error:
            print(f"{provider.name}: skipped, {error}", flush=True)
            gone.add(provider.name)
            return
        except Absent as reason:
            self.absent.append(f"{provider.name} on {case.name}: {reason}")
            return
        except Exception as error:
            if type(error).__name__ == "MissingJITCacheError":  # FLASHINFER_DISABLE_JIT is set
                self.absent.append(f"{provider.name} on {case.name}: its module was not compiled beforehand")
                return
            text = str(error).strip() or repr(error)
            self.faults.append(f"{provider.name} on {case.name}: {type(error).__name__} {text[:300]}")
            print("FAULT " + self.faults[-1], flush=True)
            return
        self.rows.append(row)
        print(
            f"{row.case:34s} {row.provider:20s} {row.us:9.2f} µs  eager {row.eager_us:9.2f}  {row.tb_s:5.2f} TB/s "
            f"{row.tflops:6.1f} TFLOP/s  {row.error:.1e} {'FALLBACK ' if row.fallback else ''}{row.note} {row.kernels}",
            flush=True,
        )


def empty_graphs(clock: Clock) -> dict[str, float]:
    """µs between the events around a graph of one and of two kernels that do next to nothing."""
    x = torch.zeros(1, device="cuda")
    one, two = captured(lambda: x.add_(1)), captured(lambda: (x.add_(1), x.add_(1)))
    return {"one node": round(clock.median(one[0]), 2), "two nodes": round(clock.median(two[0]), 2)}


def setting() -> dict[str, str]:
    """Commit, device and date of a run."""
    commit = (
        Path(__file__).resolve().parent.parent / "COMMIT"
    )  # a copy without its repository says so in a file
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    clocks = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit.read_text().strip() if commit.exists() else asked,
        "device": torch.cuda.get_device_name(),
        "driver, clocks after": clocks,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }


def parser(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """Options that every table has."""
    found = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    found.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    found.add_argument("--only", default="", help="cases whose name contains one of these (separated by |)")
    found.add_argument("--provider", default="", help="providers whose name contains one of these (|)")
    found.add_argument(
        "--seconds", type=float, default=seconds, help="no case is begun after so many seconds"
    )
    found.add_argument("--repeats", type=int, default=15)
    found.add_argument(
        "--compile-only", action="store_true", help="compile our kernels into the cache on disk, and stop"
    )
    return found


def begin(args: argparse.Namespace, shapes: Sequence[Shape], kv_layout: str = "NHD") -> Run:
    """A run for the table that ``args`` are of, after our kernels for the shapes have been compiled."""
    from specs import warm

    shapes = [shape for shape in shapes if chosen(OURS, args.provider)]
    if args.compile_only:
        warm(shapes, kv_layout)
        raise SystemExit(0)
    run = Run(Clock(args.repeats), args.seconds)
    with run.timed("compile"):
        warm(shapes, kv_layout, meanwhile=run.clock.prepare)
    return run


def chosen(name: str, text: str) -> bool:
    """Whether a name contains one of the parts of ``text``."""
    return any(part in name for part in text.split("|"))


def finish(
    run: Run,
    args: argparse.Namespace,
    name: str,
    title: str,
    *,
    rate: str = "tb_s",
    targets: Sequence[Target] = (),
    more: dict[str, Any] | None = None,
    groups: dict[str, Sequence[str]],
) -> int:
    """Save and print the table; 1 if something of ours failed or fell back, else 0."""
    about: dict[str, Any] = {"title": title, **setting(), **(more or {})}
    about["empty graph, µs"] = empty_graphs(run.clock)
    about["versions"] = {row.provider: row.version for row in run.rows}
    about["seconds"] = {**run.spent, "all": round(time.perf_counter() - run.begun, 1)}
    for key in ("faults", "absent", "left_out"):
        if getattr(run, key):
            about[key.replace("_", " ")] = getattr(run, key)
    print(save(args.out, name, run.rows, about, rate=rate, targets=targets, groups=groups))
    ours = [fault for fault in run.faults if fault.startswith(OURS)]
    fallen = [row.case for row in run.rows if row.fallback]
    for text in ours:
        print(f"FAULT {text}")
    if fallen:
        print(f"FALLBACK on {', '.join(fallen)}")
    return 1 if ours or fallen else 0
