# SPDX-License-Identifier: Apache-2.0
"""What counts as a GPU time: one protocol for ours and for every peer.

A time is the median of CUDA events around one replay of a captured graph, and beside it around the call itself, with the L2
cache cold and clean (clock.py). All providers of a case are prepared first; then their times are taken in rounds, each form of
each provider in turn, and medians over the rounds are kept, with the clock of the multiprocessors: at large sizes a GPU is at its
limit of power, and who is timed after an idle second has a tenth more of it than who is timed last. The events themselves cost
about 3 µs: the empty graph is timed in the same run and printed beside. A time counts only if

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
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from cases import Case, error_of
from clock import Clock, captured, empty_graphs, kernels_of  # noqa: F401  (scripts of experiments ask here)
from report import OURS, Row, Target, save
from shapes import Shape

#: Bytes per second and dense 16-bit FLOP per second that no kernel passes (NVIDIA H200 data sheet); of 8 bits twice as many.
MEMORY_LIMIT, TENSOR_LIMIT = 4.8e12, 989e12
#: Largest relative error of a result against float64, ||out - ref|| / ||ref|| over the sampled rows, where products are of
#: 16-bit numbers; and of 8-bit ones, whose weights are rounded by up to 2^-4.
TOLERANCE, TOLERANCE_8 = 1e-2, 6e-2
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


@dataclass(slots=True, eq=False)
class Trial:
    """A provider that is right on a case and has its times taken in turns, eager and as a graph."""

    case: Case
    provider: Provider
    ready: Ready
    version: str
    kernels: list[str]
    error: float
    replay: Callable[[], Any]
    returned: Any
    note: str
    taken: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"eager": [], "graph": []})

    @classmethod
    def of(cls, case: Case, provider: Provider, clock: Any) -> Trial:
        """Prepared, checked and captured.

        Raises
        ------
        Absent
            The provider cannot take the case.
        AssertionError
            Wrong result.
        """
        version, ready = provider.version(), provider.prepare(case)
        if ready.out is not None:
            ready.out.fill_(float("nan"))
        returned = ready.run()
        clock.synchronize()
        error = _checked(case, provider, ready.result(returned))
        names = clock.kernels(ready.run)
        replay, note = ready.run, "" if ready.graph else "no graph"
        if ready.graph:
            try:
                replay, returned = clock.captured(ready.run)
            except Exception as failure:  # a peer's call may synchronise or allocate
                if provider.name.startswith(OURS):
                    raise
                note = f"no graph ({type(failure).__name__})"
                clock.synchronize()
        return cls(case, provider, ready, version, names, error, replay, returned, note)

    def turn(self, form: str, clock: Any) -> None:
        """One more time of a form."""
        self.taken[form].append(clock.turn(self.replay if form == "graph" else self.ready.run))

    def row(self, clock: Any) -> Row:
        """Medians over the rounds, after a last replay has been checked.

        Raises
        ------
        AssertionError
            Wrong result, or impossible time.
        """
        written = self.ready.out if self.ready.out is not None else self.returned
        if isinstance(written, torch.Tensor):
            written.fill_(float("nan"))
        returned = self.replay()
        clock.synchronize()
        found = self.ready.result(returned if self.note else self.returned)
        error = max(self.error, _checked(self.case, self.provider, found, " after replays"))
        (us, ghz), (eager_us, eager_ghz) = (
            tuple(median(column) for column in zip(*self.taken[form], strict=True))
            for form in ("graph", "eager")
        )
        case, mine = self.case, self.provider.name.startswith(OURS)
        tensor_limit = TENSOR_LIMIT * (1 + is_narrow(case))
        least = max(case.nbytes / MEMORY_LIMIT, case.flops / tensor_limit) * 1e6
        assert min(us, eager_us) >= least, (
            f"{self.provider.name} on {case.name}: {min(us, eager_us):.2f} µs beats {least:.2f}, a limit of the machine"
        )
        return Row(
            case=case.name,
            provider=self.provider.name,
            version=self.version,
            us=us,
            eager_us=eager_us,
            ghz=round(ghz, 3),
            eager_ghz=round(eager_ghz, 3),
            nbytes=case.nbytes,
            flops=case.flops,
            error=error,
            kernels=sorted(set(self.kernels)),
            note=self.note,
            fallback=mine
            and (GENERAL in self.kernels or not any("attnrt_" in name for name in self.kernels)),
        )


def is_narrow(case: Case) -> bool:
    """Whether q, and so the products, have 8 bits."""
    return case.q.element_size() == 1


def _checked(case: Case, provider: Provider, out: torch.Tensor, when: str = "") -> float:
    error = error_of(case, out)
    assert error < (TOLERANCE_8 if is_narrow(case) else TOLERANCE), (
        f"{provider.name} on {case.name}: error {error:.2e}{when}"
    )
    return error


@dataclass
class Run:
    """A table in the making: providers over shapes within a budget of time.

    Attributes
    ----------
    seconds : float
        No case is begun after so many; what was left out is in ``left_out``.
    faults : list of str
        What failed, ours and peers'.
    absent : dict of str to list of str
        Cases that a provider leaves out, by provider and reason.
    """

    clock: Any
    seconds: float = float("inf")
    device: str = "cuda"
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    absent: dict[str, list[str]] = field(default_factory=dict)
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
            try:
                self._case(shape, providers, gone)
            except KeyboardInterrupt:  # or the end of a time limit: what there is becomes a table
                self.seconds = 0.0
                self.left_out.append(shape.name)
        if self.left_out:
            print(f"out of time, not measured: {', '.join(self.left_out)}", flush=True)

    def _case(self, shape: Shape, providers: Sequence[Provider], gone: set[str]) -> None:
        with self.timed("data and references"):
            case = Case(shape, self.device)
            case.samples  # noqa: B018  (computed here so that it is counted here)
        waiting = [provider for provider in providers if provider.name not in gone]
        while waiting:
            trials = self._prepared(case, waiting, gone)
            with self.timed("rounds"):
                self._rounds(trials)
            while trials:
                self._finish(trials.pop(0))
            if waiting:
                self._free()
        del case
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _prepared(self, case: Case, waiting: list[Provider], gone: set[str]) -> list[Trial]:
        """Trials of the providers that wait, taken off the list: of all, unless memory ends before."""
        trials: list[Trial] = []
        while waiting:
            provider = waiting[0]
            try:
                with self.timed(provider.name), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    trials.append(Trial.of(case, provider, self.clock))
            except ImportError as error:
                print(f"{provider.name}: skipped, {error}", flush=True)
                gone.add(provider.name)
            except Absent as reason:
                self._miss(case, provider, str(reason))
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) and trials:
                    break
                if type(error).__name__ == "MissingJITCacheError":  # FLASHINFER_DISABLE_JIT is set
                    self._miss(case, provider, "its module was not compiled beforehand")
                else:
                    self._fault(case, provider, error)
            waiting.pop(0)
        return trials

    def _miss(self, case: Case, provider: Provider, why: str) -> None:
        self.absent.setdefault(f"{provider.name}: {why}", []).append(case.name)

    def _rounds(self, trials: list[Trial]) -> None:
        """Times of all in turns, forwards and backwards by turns, so that none always follows the same one."""
        turns = [(trial, form) for trial in trials for form in ("eager", "graph")]
        for _ in range(self.clock.rounds):
            for trial, form in turns:
                if trial in trials:
                    try:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            trial.turn(form, self.clock)
                    except Exception as error:
                        self._fault(trial.case, trial.provider, error)
                        trials.remove(trial)
            turns.reverse()

    def _finish(self, trial: Trial) -> None:
        try:
            row = trial.row(self.clock)
        except Exception as error:
            self._fault(trial.case, trial.provider, error)
            return
        self.rows.append(row)
        print(
            f"{row.case:34s} {row.provider:20s} {row.us:9.2f} µs  eager {row.eager_us:9.2f}  at {row.ghz:5.3f} "
            f"{row.eager_ghz:5.3f} GHz  {row.tb_s:5.2f} TB/s {row.tflops:6.1f} TFLOP/s  {row.error:.1e} "
            f"{'FALLBACK ' if row.fallback else ''}{row.note} {row.kernels}",
            flush=True,
        )

    def _fault(self, case: Case, provider: Provider, error: Exception) -> None:
        text = str(error).strip() or repr(error)
        self.faults.append(f"{provider.name} on {case.name}: {type(error).__name__} {text[:300]}")
        print("FAULT " + self.faults[-1], flush=True)


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
    query = [
        "nvidia-smi",
        "-i",
        "0",
        "--query-gpu=driver_version,clocks.sm,clocks.mem",
        "--format=csv,noheader",
    ]
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

    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
    for key in ("faults", "left_out"):
        if getattr(run, key):
            about[key.replace("_", " ")] = getattr(run, key)
    if run.absent:
        about["absent"] = [f"{why} ({len(cases)} cases)" for why, cases in run.absent.items()]
    print(save(args.out, name, run.rows, about, rate=rate, targets=targets, groups=groups))
    ours = [fault for fault in run.faults if fault.startswith(OURS)]
    fallen = [row.case for row in run.rows if row.fallback]
    for text in ours:
        print(f"FAULT {text}")
    if fallen:
        print(f"FALLBACK on {', '.join(fallen)}")
    return 1 if ours or fallen else 0
