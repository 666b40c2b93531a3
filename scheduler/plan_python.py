# SPDX-License-Identifier: Apache-2.0
"""The planner in readable form: the oracle of the C++ planner, and the one that runs custom schedulers.

Six steps: (1) cut block rows into query tiles of one numeric class and find the keys each tile may see; (2) find which tiles
hold all keys of their rows; (3) for each way to share KV heads among items, cut long runs of keys at leaf boundaries
(Algorithm 1 of the FlashInfer paper, arXiv 2501.01005) while partial slots last; (4) cost and assign; (5) keep the best;
(6) list the rows that must merge. Only 3 to 5 know about workers, and nothing in them can change a bit: every run ends at a
leaf boundary, and states fold in leaf order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from attnrt.errors import LimitError, PlanError
from attnrt.scheduler.assign import LPT, check_assignment, gathered, split_limit, spread
from attnrt.scheduler.base import DIRECT, MERGE_FIELDS, WORK_FIELDS, MergeList, WorkList
from attnrt.scheduler.costs import (
    BESIDE,
    Candidate,
    Crew,
    Run,
    item_time,
    least,
    score,
    time_of,
    total,
    unit_cost,
    whole_run,
)
from attnrt.scheduler.crews import form_crews
from attnrt.scheduler.problem import Problem
from attnrt.scheduler.tiles import Tile, find_tiles, mark_rows, rows_of, units_of

__all__ = ["GOOD_BALANCE", "MANY_ITEMS", "plan_python"]

#: Stop looking for a better split of heads once nothing was cut and the longest worker is within this factor of the mean.
GOOD_BALANCE = 1.05

#: Nor go on once items outnumber workers by this factor: finer items could not gain much, and planning takes time.
MANY_ITEMS = 4

#: Cut runs shorter than Algorithm 1 asks only if the time is over the mean by more than this factor,
BAD_BALANCE = 1.1

#: to these parts of its limit.
SHORTER_RUNS = (2, 4, 8)

#: And not where runs of equal cost, one for each worker at most, have a time that is over the mean by no more than this: what
#: they lack is leaves to cut at, and second items cost more than the rest.
EVEN_BALANCE = 1.25

#: Items of equal cost are looked for until the longest is known to this part of it.
STEPS = 128

_INT32_MAX = (1 << 31) - 1

#: Runs of a tile under so many KV heads.
Cutter = Callable[[Tile, int], list[Run]]


def plan_python(problem: Problem) -> tuple[WorkList, MergeList, int]:
    """Work, merges and the number of partial slots of ``problem``.

    Raises
    ------
    LimitError
        Parts or the pairwise tree need more partial slots than there are even without a cut.
    PlanError
        A custom scheduler returned something else than an assignment.
    """
    tiles = find_tiles(problem)
    mark_rows(problem, tiles)
    if len(problem.parts) > 1:
        tiles = [tile for tile in tiles if tile.keys]
    crews, found = form_crews(problem, tiles), []
    needed = [_whole_slots(problem, crew.tiles) for crew in crews]
    if sum(needed) > problem.max_slots:
        raise LimitError(
            "max_partial_slots",
            sum(needed),
            problem.max_slots,
            "These states do not come from cuts: more parts need more slots.",
        )
    first = 0
    for i, crew in enumerate(crews):
        found.append(_best(problem, crew, first, problem.max_slots - sum(needed[i + 1 :])))
        first += found[-1].slots
    _gather(problem, crews, found)
    items = [best.items[best.order] for best in found]
    ends = np.cumsum([0, *(len(chosen) for chosen in items)]).tolist()
    indptr = [best.worker_indptr[i > 0 :] + ends[i] for i, best in enumerate(found)]
    work = WorkList(
        items=np.ascontiguousarray(np.concatenate(items)),
        worker_indptr=np.concatenate(indptr).astype(np.int32),
    )
    runs = [run for best in found for run in best.runs]
    return work, _merges(problem, [tile for crew in crews for tile in crew.tiles], runs), first


def _gather(problem: Problem, crews: list[Crew], found: list[Candidate]) -> None:
    """Put the machine's own workers on few multiprocessors, where they have little to do beside a team."""
    own, sharing = found[0], crews[0].sharing
    beside = max((crew.time_beside(best) for crew, best in zip(crews, found, strict=True)), default=0.0)
    if sharing is None or beside <= 0.0 or not isinstance(problem.scheduler, LPT):
        return
    at = own.worker_indptr.tolist()
    loads = [total(own.costs[own.order[lo:hi]].tolist()) for lo, hi in itertools.pairwise(at)]
    if max(loads) <= BESIDE * beside:
        own.order, own.worker_indptr = gathered(own.order, own.worker_indptr, sharing.workers)


def _best(problem: Problem, crew: Crew, first_slot: int, max_slots: int) -> Candidate:
    """Items of fewer and fewer heads, then, if the time is still far off, shorter or longer runs; the best of these.

    A split of heads needs no merge, so it comes first. Algorithm 1 alone lets a run be as long as a worker's fair share, which
    leaves the longest worker up to twice the mean; halving its limit costs merges and is charged for them. Longer runs are
    weighed against both. Where ends of leaves have a price, runs of equal cost come before these.
    """
    heads, workers = problem.num_kv_heads, crew.workers
    divisors = [1]
    if problem.traits.split_heads and getattr(problem.scheduler, "split_heads", True):
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        if crew.sections:
            divisors = [heads]
    keys = np.asarray([float(tile.keys * tile.heads) for tile in crew.tiles])
    limit = split_limit(problem.scheduler, keys, workers)
    room = first_slot, max_slots
    best, width = None, heads
    for n in divisors:
        width = heads // n
        candidate = _candidate(problem, crew, width, limit, room)
        if n < divisors[-1] and item_time(problem, crew, candidate.longest) > GOOD_BALANCE * candidate.mean:
            continue  # one item alone is too long: fewer heads per item must be better
        _assign(problem, crew, candidate)
        best = (
            candidate
            if best is None or score(problem, crew, candidate) < score(problem, crew, best)
            else best
        )
        if not candidate.cuts and candidate.time <= GOOD_BALANCE * candidate.mean:
            break
        if len(candidate.items) >= MANY_ITEMS * workers:
            break
    assert best is not None
    if hasattr(problem.scheduler, "split"):
        return best
    if best.cuts and crew.counts_ends:
        even = _even(problem, crew, width, best.time)
        if even is not None:
            candidate = _candidate(problem, crew, width, even, room)
            _assign(problem, crew, candidate)
            best = candidate if score(problem, crew, candidate) < score(problem, crew, best) else best
            if best.time <= EVEN_BALANCE * best.mean:
                return best
    count = first = len(best.items)
    for finer in SHORTER_RUNS:
        if best.time <= BAD_BALANCE * best.mean or count >= 4 * MANY_ITEMS * workers:
            break
        candidate = _candidate(problem, crew, width, limit / finer, room)
        if len(candidate.items) <= count:
            continue  # no leaf to cut at
        count = len(candidate.items)
        _assign(problem, crew, candidate)
        best = candidate if score(problem, crew, candidate) < score(problem, crew, best) else best
    count = first
    for longer in crew.longer if best.cuts else ():
        candidate = _candidate(problem, crew, width, limit * longer, room)
        if len(candidate.items) >= count or least(problem, crew, candidate) >= score(problem, crew, best):
            continue
        count = len(candidate.items)
        _assign(problem, crew, candidate)
        best = candidate if score(problem, crew, candidate) < score(problem, crew, best) else best
    return best


def _even(problem: Problem, crew: Crew, heads: int, most: float) -> Cutter | None:
    """Cuts into items of equal cost, no more of them than workers: of no more than ``most``, and of as little as there is."""

    def cutter(cost: float) -> Cutter:
        return lambda tile, step: _cut_by_cost(problem, crew, tile, cost / step)

    def few(cost: float) -> bool:
        cut, items = cutter(cost), 0
        for tile in crew.tiles:
            step = min(heads, tile.heads)
            items += tile.heads // step * len(cut(tile, step))
        return items <= crew.workers

    if not few(most):
        return None
    low = most / 2
    while most - low > most / STEPS:
        cost = (low + most) / 2
        if few(cost):
            most = cost
        else:
            low = cost
    return cutter(most)


def _candidate(
    problem: Problem, crew: Crew, heads: int, limit: float | Cutter, room: tuple[int, int]
) -> Candidate:
    """``limit``: the longest run in keys x KV heads, or what cuts otherwise."""
    runs, slots, cuts = _cut(problem, crew.tiles, heads, limit, room)
    rows: list[tuple[int, ...]] = []
    costs: list[float] = []
    requests: list[int] = []
    sections: list[int] = []
    for tile, tile_runs in zip(crew.tiles, runs, strict=True):
        step = min(heads, tile.heads)
        for head in range(tile.head_begin, tile.head_end, step):
            for lo, hi, leaf_begin, leaf_end, slot, fold in tile_runs:
                run = lo, hi, leaf_begin, leaf_end
                costs.append(step * unit_cost(problem, crew, tile, run, bool(fold)))
                where = (tile.part, tile.row, tile.q_begin, tile.q_end, head, head + step)
                rows.append((*where, lo, hi, leaf_begin, leaf_end, slot, tile.klass, fold, 0))
                requests.append(int(problem.parts[tile.part].request[tile.q_begin]))
                sections.append(crew.sections.get((tile.part, tile.row, head), 0))
    items = np.asarray(rows, np.int32).reshape(-1, len(WORK_FIELDS))
    cost = _costs(problem.scheduler, items, np.asarray(costs, np.float64))
    items[:, -1] = np.minimum(np.rint(cost), _INT32_MAX).astype(np.int32)
    return Candidate(
        runs=runs,
        slots=slots,
        cuts=cuts,
        items=items,
        costs=cost,
        requests=np.asarray(requests, np.int64),
        sections=np.asarray(sections, np.int64),
        mean=crew.mean(total(cost.tolist())),
        longest=float(cost.max(initial=0.0)),
        states=max(
            (
                _slots(t, own, problem.tree == "pairwise") // t.queries
                for t, own in zip(crew.tiles, runs, strict=True)
            ),
            default=0,
        ),
    )


def _assign(problem: Problem, crew: Crew, candidate: Candidate) -> None:
    cost, workers = candidate.costs, crew.workers
    if hasattr(problem.scheduler, "assign_requests"):
        result = problem.scheduler.assign_requests(candidate.requests, cost, workers)
    elif crew.sections and hasattr(problem.scheduler, "assign_sections"):
        result = problem.scheduler.assign_sections(candidate.sections, cost, workers)
    elif crew.early:
        result = problem.scheduler.assign_late(cost, np.asarray(crew.begins))
    else:
        result = problem.scheduler.assign(cost, workers)
    candidate.order, candidate.worker_indptr = check_assignment(result, len(cost), workers)
    at = candidate.worker_indptr
    begins = crew.begins
    loads = [sum(cost[candidate.order[at[w] : at[w + 1]]].tolist(), begins[w]) for w in range(workers)]
    candidate.time = time_of(problem, crew, candidate.mean, loads)
    candidate.worker_indptr = spread(at, crew.traits.num_workers)


def _costs(scheduler: object, items: np.ndarray, own: np.ndarray) -> np.ndarray:
    cost = getattr(scheduler, "cost", None)
    if cost is None:
        return own
    given = np.asarray(cost(items.copy()), np.float64)
    if given.shape != own.shape:
        raise PlanError("scheduler.cost", f"must return {own.shape} numbers", given.shape)
    if not np.isfinite(given).all() or (given < 0).any():
        raise PlanError("scheduler.cost", "must return finite numbers of at least 0", given.tolist()[:8])
    return given


def _whole_slots(problem: Problem, tiles: list[Tile]) -> int:
    """Partial slots of tiles that are not cut."""
    return sum(_slots(tile, [whole_run(tile)], problem.tree == "pairwise") for tile in tiles)


def _cut(
    problem: Problem, tiles: list[Tile], heads: int, limit: float | Cutter, room: tuple[int, int]
) -> tuple[list, int, int]:
    """Runs of every tile, partial slots used, tiles cut. Item heads share a tile's slots: they write other heads of them.

    ``room``: the first slot that is free, and how many there are with those before it.
    """
    pairwise = problem.tree == "pairwise"
    used = room[0] + _whole_slots(problem, tiles)
    runs, cuts, next_slot = [], 0, room[0]
    for tile in tiles:
        cut, step = [whole_run(tile)], min(heads, tile.heads)
        if callable(limit) or limit < math.inf:
            if callable(limit):
                more = limit(tile, step)
            else:
                more = _cut_tile(problem, tile, max(1, math.ceil(limit / step)))
            extra = _slots(tile, more, pairwise) - _slots(tile, cut, pairwise)
            if len(more) > 1 and used + extra <= room[1]:
                cut, used, cuts = more, used + extra, cuts + 1
        runs.append(_place(tile, cut, next_slot, pairwise))
        next_slot += _slots(tile, cut, pairwise)
    return runs, used - room[0], cuts


def _cut_tile(problem: Problem, tile: Tile, longest: int) -> list[Run]:
    """Runs of about ``longest`` keys, rounded up to leaves; an eighth more is not worth a cut."""
    ruler = problem.traits.classes[tile.klass].ruler
    runs, begin, leaf = [], tile.kv_begin, tile.leaf_begin
    while tile.kv_end - begin > longest + longest // 8:
        next_leaf = ruler.leaf_of(begin + longest - 1) + 1
        end = ruler.start(next_leaf)
        if end >= tile.kv_end:
            break
        runs.append((begin, end, leaf, next_leaf))
        begin, leaf = end, next_leaf
    return [*runs, (begin, tile.kv_end, leaf, tile.leaf_end)]


def _cut_by_cost(problem: Problem, crew: Crew, tile: Tile, most: float) -> list[Run]:
    """Runs that cost ``most`` for one KV head at most, each as long as may be; one of a single leaf may cost more."""
    ruler = problem.traits.classes[tile.klass].ruler
    runs: list[Run] = []
    begin, leaf, fold = tile.kv_begin, tile.leaf_begin, tile.first and problem.tree != "pairwise"
    while True:
        run = None
        for end in range(leaf + 1, tile.leaf_end + 1):
            longer = (begin, ruler.start(end) if end < tile.leaf_end else tile.kv_end, leaf, end)
            if run is not None and unit_cost(problem, crew, tile, longer, fold) > most:
                break
            run = longer
        if run is None:
            return runs or [whole_run(tile)]
        runs.append(run)
        begin, leaf, fold = run[1], run[3], False


def _is_direct(tile: Tile, runs: list, pairwise: bool) -> bool:
    return tile.whole and len(runs) == 1 and not (pairwise and tile.leaf_end - tile.leaf_begin > 1)


def _slots(tile: Tile, runs: list, pairwise: bool) -> int:
    if _is_direct(tile, runs, pairwise):
        return 0
    states = tile.leaf_end - tile.leaf_begin
    if tile.first and not pairwise:
        states -= runs[0][3] - runs[0][2] - 1
    return states * tile.queries


def _place(tile: Tile, runs: list, slot: int, pairwise: bool) -> list[tuple[int, int, int, int, int, int]]:
    """Give each run its first slot and say whether it folds."""
    if _is_direct(tile, runs, pairwise):
        return [(*runs[0], DIRECT, 1)]
    placed = []
    for i, run in enumerate(runs):
        fold = int(i == 0 and tile.first and not pairwise)
        placed.append((*run, slot, fold))
        slot += (1 if fold else run[3] - run[2]) * tile.queries
    return placed


def _merges(problem: Problem, tiles: list[Tile], all_runs: list[list]) -> MergeList:
    """One entry per row and head range that no item finishes; rows that nothing covers are entries without slots."""
    units = problem.units
    states: dict[tuple[int, int], list[tuple[int, int]]] = {}
    done = np.zeros((problem.num_rows, units), bool)
    for tile, runs in zip(tiles, all_runs, strict=True):
        unit_range = range(*units_of(problem, tile).indices(units))
        for i, row in enumerate(rows_of(problem, tile).tolist()):
            for unit in unit_range:
                done[row, unit] |= runs[0][4] == DIRECT
                for _, _, leaf_begin, leaf_end, slot, fold in runs:
                    if slot != DIRECT:
                        leaves = [leaf_begin] if fold else range(leaf_begin, leaf_end)
                        entry = states.setdefault((row, unit), [])
                        entry.extend((leaf, slot + k * tile.queries + i) for k, leaf in enumerate(leaves))
    rows: list[tuple[int, ...]] = []
    slots: list[int] = []
    leaves_out: list[int] = []
    width = problem.num_kv_heads // units
    for row in range(problem.num_rows):
        for unit in range(units):
            if done[row, unit]:
                continue
            entry = sorted(states.get((row, unit), []))
            empty_before = not entry and rows and rows[-1][0] == row and rows[-1][3] == rows[-1][4]
            if empty_before and rows[-1][2] == unit * width:
                rows[-1] = (*rows[-1][:2], (unit + 1) * width, *rows[-1][3:])
                continue
            rows.append((row, unit * width, (unit + 1) * width, len(slots), len(slots) + len(entry)))
            slots.extend(slot for _, slot in entry)
            leaves_out.extend(leaf for leaf, _ in entry)
    return MergeList(
        rows=np.asarray(rows, np.int32).reshape(-1, len(MERGE_FIELDS)),
        slots=np.asarray(slots, np.int32),
        leaves=np.asarray(leaves_out, np.int32),
    )
