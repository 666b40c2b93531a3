# SPDX-License-Identifier: Apache-2.0
"""What items cost, and how long a way to cut takes, for the readable planner: the prices of the traits, and the model of workers
that share a multiprocessor (``scheduler/base.py``, Sharing; fitted to measured runs, docs/performance.md E11).

``native/costs.h`` is the same in C++, with sums in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnrt.scheduler.base import Sharing, Team
from attnrt.scheduler.problem import Problem, scattered
from attnrt.scheduler.tiles import Tile

__all__ = [
    "BESIDE",
    "Candidate",
    "Crew",
    "Run",
    "folds",
    "item_time",
    "least",
    "one_head",
    "score",
    "time_of",
    "total",
    "unit_cost",
    "whole_cost",
    "whole_run",
]

#: kv_begin, kv_end, leaf_begin, leaf_end.
Run = tuple[int, int, int, int]

#: Workers on few multiprocessors are up to three times as slow as alone; that pays as long as none has more to do than so many
#: times what a team does meanwhile (performance.md, E15).
BESIDE = 2.0

#: Where workers share multiprocessors, fewer of them may be as fast: runs this many times as long, which need fewer merges.
LONGER_RUNS = (1.25, 2, 3, 4)

#: Warps that load for a worker at most while every multiprocessor has work.
WARPS = 2

#: A team's items cost much to start: runs this many times as long may be one for each worker where Algorithm 1's, rounded up to
#: leaves, are a few more.
LONGER_ITEMS = (1.125, 1.25)


@dataclass(slots=True, kw_only=True)
class Crew:
    """Workers that share a kernel: number and costs of them (a Traits or a Team), their tiles, and the section of each list."""

    traits: Any
    tiles: list[Tile]
    sections: dict[tuple[int, int, int], int]
    workers: int  # that may have items
    #: Multiprocessors, the first ones, whose workers begin at once; the others' begin when a team has left them (0: all begin
    #: together). ``begin`` is the time then, ``ahead`` what each of the early workers has done by then.
    early: int = 0
    begin: float = 0.0
    ahead: float = 0.0

    @property
    def sharing(self) -> Sharing | None:
        """None: these workers share nothing, as those of a team."""
        return getattr(self.traits, "sharing", None)

    @property
    def begins(self) -> list[float]:
        """What the early workers have done when each one begins."""
        if not self.early or self.sharing is None:
            return [0.0] * self.workers
        count = self.workers // self.sharing.workers
        return [0.0 if worker % count < self.early else self.ahead for worker in range(self.workers)]

    def mean(self, cost: float) -> float:
        """Time at best of items that cost so much in all."""
        if not self.early or self.sharing is None:
            return cost / self.workers
        return self.begin + max(0.0, cost - self.early * self.sharing.workers * self.ahead) / self.workers

    def time_beside(self, candidate: Candidate) -> float:
        """Of a team that takes rows of every class: its kernel starts on multiprocessors that the machine's own workers leave."""
        beside = isinstance(self.traits, Team) and self.traits.first_class == 0
        return candidate.time * self.traits.unit if beside else 0.0

    @property
    def counts_ends(self) -> bool:
        """Whether ends of leaves have a price."""
        return isinstance(self.traits, Team) and self.traits.stored + self.traits.folded > 0.0

    @property
    def longer(self) -> tuple[float, ...]:
        """Longer runs that are weighed: these times Algorithm 1's."""
        if self.sharing:
            return LONGER_RUNS
        return LONGER_ITEMS if isinstance(self.traits, Team) and not self.traits.section else ()


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One way to cut: runs (kv_begin, kv_end, leaf_begin, leaf_end, slot, fold) per tile, and what came of it."""

    runs: list[list[tuple[int, int, int, int, int, int]]]
    slots: int
    cuts: int
    items: np.ndarray
    costs: np.ndarray
    requests: np.ndarray
    sections: np.ndarray
    mean: float
    longest: float
    states: int  # of the row with most
    order: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    worker_indptr: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    time: float = 0.0


def whole_cost(problem: Problem, crew: Crew) -> float:
    """Cost of a crew's tiles without a cut."""
    return total(tile.heads * one_head(problem, crew, tile) for tile in crew.tiles)


def one_head(problem: Problem, crew: Crew, tile: Tile) -> float:
    """Cost of a tile without a cut for one KV head."""
    return unit_cost(problem, crew, tile, whole_run(tile), folds(problem, tile))


def whole_run(tile: Tile) -> Run:
    return (tile.kv_begin, tile.kv_end, tile.leaf_begin, tile.leaf_end)


def folds(problem: Problem, tile: Tile) -> bool:
    """Whether a tile that is not cut folds its leaves."""
    one = tile.whole and tile.leaf_end - tile.leaf_begin <= 1
    return tile.first and (one or problem.tree != "pairwise")


def unit_cost(problem: Problem, crew: Crew, tile: Tile, run: Run, fold: bool) -> float:
    """Cost of these keys of a tile for one KV head."""
    t, rows = crew.traits, float(tile.queries * problem.group)
    begin, end, leaf_begin, leaf_end = run
    size = getattr(t, "tile", 0)
    keys = float((-(-end // size) - begin // size) * size if size else end - begin)
    ends = getattr(t, "folded" if fold else "stored", 0.0) * float(leaf_end - leaf_begin)
    return t.fixed + t.alpha * rows + t.beta * keys + t.beta_rows * rows * keys + ends


def score(problem: Problem, crew: Crew, candidate: Candidate) -> float:
    """Time, and what cuts cost beside it."""
    return candidate.time + _cost_of_cuts(problem, crew, candidate)


def least(problem: Problem, crew: Crew, candidate: Candidate) -> float:
    """What a candidate scores at least, however its items are assigned."""
    if crew.sharing is None:
        return candidate.longest + _cost_of_cuts(problem, crew, candidate)
    alone = candidate.longest / _rate(problem, crew.sharing, 1, True)
    return max(candidate.mean, alone) + _cost_of_cuts(problem, crew, candidate)


def _cost_of_cuts(problem: Problem, crew: Crew, candidate: Candidate) -> float:
    """Of merges, and of second items."""
    sharing = crew.sharing
    if sharing is None:
        again, merge = getattr(crew.traits, "again", 0.0), crew.traits.fixed * problem.num_kv_heads
    else:
        again, merge = sharing.again, sharing.merge + sharing.fold * candidate.states
    return (merge if candidate.cuts else 0.0) + (again if len(candidate.items) > crew.workers else 0.0)


def _rate(problem: Problem, sharing: Sharing, busy: int, spare: bool) -> float:
    """Times its share that a worker reads beside so many that have work; ``spare``: some multiprocessor has none."""
    one = sharing.scattered if scattered(problem.parts, sharing.run) else sharing.warp
    warps = sharing.workers // busy
    return min(sharing.alone, one * (warps if spare else min(warps, WARPS)))


def time_of(problem: Problem, crew: Crew, mean: float, loads: list[float]) -> float:
    """The busiest worker's; where workers share multiprocessors, as Sharing says, from the time on at which all have begun.
    ``loads``: with ``begins``."""
    sharing = crew.sharing
    if sharing is None:
        return max(loads, default=0.0)
    if crew.early:
        loads = [max(0.0, load - crew.ahead) for load in loads]  # what is left when the last ones begin
    count = -(-len(loads) // sharing.workers)
    of = [loads[m::count] for m in range(count)]  # each multiprocessor's
    busiest = max(map(total, of), default=0.0) / sharing.workers
    if crew.early:
        # A loading warp loads for one worker here, and a multiprocessor reads as the early ones do.
        slowest = max(loads) / _rate(problem, sharing, sharing.workers, False)
        return crew.begin + max(mean - crew.begin, busiest * crew.begin / crew.ahead, slowest)
    busy = [sum(load > 0.0 for load in own) for own in of]
    rates = [_rate(problem, sharing, n, 0 in busy) if n else math.inf for n in busy]
    slowest = max((max(own) / rate for own, rate in zip(of, rates, strict=True)), default=0.0)
    return max(mean + sharing.busy * (busiest - mean), slowest)


def item_time(problem: Problem, crew: Crew, cost: float) -> float:
    """When an item that a late worker begins with has ended; where all begin together, its cost."""
    if not crew.early or crew.sharing is None:
        return cost
    return crew.begin + cost / _rate(problem, crew.sharing, crew.sharing.workers, False)


def total(values: Iterable[float]) -> float:
    """Left to right, as the C++ planner adds (NumPy adds pairwise)."""
    return sum(values, 0.0)
