# SPDX-License-Identifier: Apache-2.0
"""The values between an index and a backend: what a backend tells the planner, and what the planner tells a backend.

The fold is fixed, the split is free (docs/design.md section 4). A ``Ruler`` fixes the leaves, so numbers never depend on a
plan; a ``Plan`` says which worker computes which leaves and where their states go, so time does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from attnrt.formats.base import Index
    from attnrt.spec import AttentionSpec

__all__ = [
    "DIRECT",
    "MERGE_FIELDS",
    "WORK_FIELDS",
    "MergeList",
    "NumericClass",
    "Plan",
    "Ruler",
    "Scheduler",
    "Sharing",
    "Team",
    "Traits",
    "WorkList",
]

#: Destination of an item that holds whole rows: it finishes them and writes out and lse itself.
DIRECT = -1

#: Columns of ``WorkList.items``.
WORK_FIELDS = (
    "part",  # index part
    "row",  # block row of that part
    "q_begin",  # first query, into the part's qo_index / request / qo_pos (absolute, within qo_indptr[row:row + 2])
    "q_end",  # one past the last query
    "head_begin",  # first KV head
    "head_end",  # one past the last KV head
    "kv_begin",  # first key, offset in the request; what the item need not look at is already cut off
    "kv_end",  # one past the last key
    "leaf_begin",  # leaf of kv_begin, by index in the request
    "leaf_end",  # one past the leaf of kv_end - 1 (= leaf_begin for an empty item)
    "slot",  # first partial slot, or DIRECT
    "klass",  # numeric class, an index into Traits.classes
    "fold",  # 1: the run starts at the rows' first leaf, fold all leaves into one state; 0: one state per leaf
    "cost",  # the scheduler's cost, rounded; for stats and pictures
)

#: Columns of ``MergeList.rows``.
MERGE_FIELDS = (
    "qo_row",  # row of q, out and lse
    "head_begin",  # first KV head
    "head_end",  # one past the last KV head
    "slot_begin",  # into MergeList.slots / leaves
    "slot_end",  # equal to slot_begin: an empty set, out = 0 and lse = -inf
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruler:
    """Leaf boundaries as a pure function of a key's offset in its request.

    Attributes
    ----------
    steps : tuple of (count, size)
        ``count`` leaves of ``size`` keys, in order.
    tail : int
        Size of every leaf after the steps.
    """

    steps: tuple[tuple[int, int], ...] = ()
    tail: int = 1 << 30

    def leaf_of(self, offset: int) -> int:
        """Leaf that holds the key at ``offset`` (>= 0)."""
        leaf = 0
        for count, size in self.steps:
            if offset < count * size:
                return leaf + offset // size
            offset -= count * size
            leaf += count
        return leaf + offset // self.tail

    def start(self, leaf: int) -> int:
        """Offset of the first key of ``leaf``."""
        offset = 0
        for count, size in self.steps:
            if leaf < count:
                return offset + leaf * size
            offset += count * size
            leaf -= count
        return offset + leaf * self.tail


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericClass:
    """All that decides a row's bits besides its data: one instruction family, tile and ruler.

    Attributes
    ----------
    name : str
    max_rows : int or None
        The class takes requests with ``qo_len * group <= max_rows`` (None: all). Classes are listed in rising order and the
        first that fits takes the request.
    kv_tile : int
        Keys per tile; tiles start at multiples of it from the start of their leaf.
    q_tile : int
        Most query-head rows (queries * group) per item; changes time, never bits.
    ruler : Ruler
    """

    name: str
    max_rows: int | None
    kv_tile: int
    q_tile: int
    ruler: Ruler


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Workers of a further kernel, which takes the last classes of a machine, or tiles of many rows.

    Its items are cut, costed and assigned apart from the others', with its own number of workers and its own costs.

    Attributes
    ----------
    name : str
    first_class : int
        It takes tiles of ``Traits.classes[first_class:]``
    rows : int
        with more query-head rows (queries * group) than so many. Where two teams would take a tile, the later one does.
    num_workers : int
    alpha, beta, beta_rows, fixed : float
        As in Traits, in a unit of its own.
    section : int
        Keys times KV heads whose K and V a cache close to the workers holds together. Workers take the items of one section
        after those of the section before, and longest first only within one, so that items which read the same keys run at
        the same time. 0: all items are one section. With sections every item has one KV head.
    unit : float
        Time of one unit of its costs, in units of the traits' costs.
    overlap : float
        0: it has the machine to itself. Else its kernel runs beside those of the crews before it, which want memory where it
        wants arithmetic: it leaves workers without items, on whose multiprocessors the others run meanwhile. A multiprocessor
        there reads what all of them could, divided by this part of them, until memory is busy.
    again : float
        Cost of second items: of workers that have to start once more.
    stored, folded : float
        Cost of the end of a leaf whose state is stored, and of one that is folded: items get equal costs where they are cut, and
        not equal numbers of keys. 0: ends cost nothing.
    tile : int
        Costs count keys by so many: a kernel multiplies whole tiles, which lie at multiples of their size. 0: one by one.
    sizes : tuple of (int, int)
        Query-head rows that a tile may have at most, rising, and what a key costs a tile of no more, in hundredths. Where it has
        fewer than three items a worker, its classes' tiles are cut by that size with which its longest worker ends first. (): by
        ``q_tile``.
    """

    name: str
    first_class: int
    num_workers: int
    rows: int = 0
    alpha: float = 0.0
    beta: float = 1.0
    beta_rows: float = 0.0
    fixed: float = 0.0
    section: int = 0
    unit: float = 1.0
    overlap: float = 0.0
    again: float = 0.0
    stored: float = 0.0
    folded: float = 0.0
    tile: int = 0
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What workers of one multiprocessor share: costs are those of a worker while all others read as well, and whoever has
    neighbours without work is faster, the more so as their loading warps load for it. A plan takes as long as the slowest worker
    at the rate that its neighbours leave it, or as memory takes for all: the mean worker's time and some of what the busiest
    multiprocessor has more.

    Attributes
    ----------
    workers : int
        Of a multiprocessor: workers w, w + m, w + 2 * m, ... of m multiprocessors.
    alone : float
        Times its share that a worker reads at most, whoever loads for it.
    warp : float
        Times a worker's share that one loading warp brings. As many load for a worker as there are in its multiprocessor for each
        worker that has work, but no more than two while every multiprocessor has work.
    scattered : float
        The same from lists of blocks that are no multiples of ``run`` tokens.
    run : int
    busy : float
        How much counts of what the busiest multiprocessor has more than the mean one.
    again : float
        Cost of second items: of workers that have to start once more.
    merge, fold : float
        Cost of a merge that cuts make necessary, and of each state in the longest one.
    """

    workers: int
    alone: float
    warp: float
    scattered: float
    run: int
    busy: float
    again: float = 0.0
    merge: float = 0.0
    fold: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """A backend's pure answer to the planner.

    Attributes
    ----------
    name : str
    num_workers : int
        Persistent workers (CTAs, threads) that take items.
    classes : tuple of NumericClass
    alpha, beta, fixed : float
        Cost of an item of one KV head, ``fixed + alpha * query rows + beta * keys`` in any one unit, summed over heads
        (Algorithm 1 of the FlashInfer paper, arXiv 2501.01005).
    beta_rows : float
        Cost per (query row, key) pair: compute-bound items.
    max_partial_slots : int
        Row slots for partial states; when they run out the planner stops cutting.
    split_heads : bool
        Whether items may take a range of KV heads.
    teams : tuple of Team
        Further kernels, at most two; their workers come after these ``num_workers`` in a work list, team by team.
    launch : float
        Cost of one more kernel in a run, on every worker. 0: keys that requests share are read once whatever that costs.
    state : float
        Cost of a partial state of one query head, written and read.
    repeated : float
        Cost of a key that other items have read, of one that they have not.
    sharing : Sharing or None
        None: workers share nothing that counts, a plan takes as long as its busiest worker, and a merge that cuts make
        necessary costs ``fixed`` times the KV heads.
    """

    name: str
    num_workers: int
    classes: tuple[NumericClass, ...]
    alpha: float = 0.0
    beta: float = 1.0
    beta_rows: float = 0.0
    fixed: float = 0.0
    max_partial_slots: int = 1 << 20
    split_heads: bool = True
    teams: tuple[Team, ...] = ()
    launch: float = 0.0
    state: float = 0.0
    repeated: float = 1.0
    sharing: Sharing | None = None

    @property
    def all_workers(self) -> int:
        """Workers with the teams'."""
        return self.num_workers + sum(team.num_workers for team in self.teams)

    def workers_of(self, name: str | None) -> tuple[int, int]:
        """First worker of a team (None: those of no team) and one past its last; equal where there is no such team."""
        first = 0
        for crew in (None, *self.teams):
            own = self.num_workers if crew is None else crew.num_workers
            if name == (None if crew is None else crew.name):
                return first, first + own
            first += own
        return first, first

    def crew_of(self, klass: int, rows: int) -> int:
        """Who takes a tile of so many query-head rows: 0 these workers, i + 1 the workers of team i."""
        found = 0
        for i, team in enumerate(self.teams):
            if klass >= team.first_class and rows > team.rows:
                found = i + 1
        return found

    @staticmethod
    def of(name: str, num_workers: int | None = None) -> Traits:
        """Traits of a known machine ("h200", "a100", "cpu"), for plans made without it."""
        from attnrt.scheduler.machines import traits_of

        return traits_of(name, num_workers)

    def class_of(self, rows: int) -> int:
        """Index of the class that takes a request of ``rows = qo_len * group``."""
        for i, klass in enumerate(self.classes):
            if klass.max_rows is None or rows <= klass.max_rows:
                return i
        raise AssertionError("the last class takes all")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkList:
    """Items in the order in which workers take them: worker w has ``worker_indptr[w] : worker_indptr[w + 1]``.

    ``items`` is int32 [num_items, len(WORK_FIELDS)], C-contiguous; ``worker_indptr`` int32 [traits.all_workers + 1], the
    teams' workers last. Each field of
    WORK_FIELDS is also a column view, ``work["slot"]``.

    Partial state of query i of an item (counted from q_begin) and its state k (0 if ``fold``, else the leaf counted from
    leaf_begin) lies in slot ``slot + k * (q_end - q_begin) + i``; an item writes the heads of its range there.
    """

    items: np.ndarray
    worker_indptr: np.ndarray

    def __getitem__(self, field: str) -> np.ndarray:
        return self.items[:, WORK_FIELDS.index(field)]

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergeList:
    """Rows that no single item finishes: fold ``slots[slot_begin:slot_end]`` in order, finish, write.

    ``rows`` int32 [num_merges, len(MERGE_FIELDS)]; ``slots`` int32 [entries]; ``leaves`` int32 [entries], first leaf of each
    state (the pairwise tree reads it). Rows padded past the index's queries are entries without slots.
    """

    rows: np.ndarray
    slots: np.ndarray
    leaves: np.ndarray

    def __getitem__(self, field: str) -> np.ndarray:
        return self.rows[:, MERGE_FIELDS.index(field)]

    def __len__(self) -> int:
        return len(self.rows)


class _Later:
    """Room for what the two lists of a plan are made of when somebody looks at them."""

    __slots__ = ("__weakref__", "later")

    later: tuple[Any, int, int, int]  # bytes as attnrt_take writes them; items, merges, entries


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Plan(_Later):
    """A schedule of one index under one spec. Immutable; loads into any Attention of that spec.

    Attributes
    ----------
    spec : AttentionSpec
    index : Index
        As the user gave it.
    parts : tuple of BlockSparse
        What the kernels read: the index's parts, cut at leaf boundaries (scheduler/align.py).
    traits : Traits
    work : WorkList
    merge : MergeList
    num_slots : int
        Partial slots used; each holds float32 (m, l) [num_qo_heads] and acc [num_qo_heads, head_dim_vo].
    num_rows : int
        Rows of q and out that a run must bring: the index's, or pad_to.
    tree : {"sequential", "pairwise"}
    deterministic : {"batch", "token", "run"}
    """

    spec: AttentionSpec
    index: Index
    parts: tuple[Any, ...]
    traits: Traits
    work: WorkList
    merge: MergeList
    num_slots: int
    num_rows: int
    tree: str = "sequential"
    deterministic: str = "batch"

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there: a step whose plan goes to the device by itself makes no lists (attnrt/step.py).
        if name not in ("work", "merge"):
            raise AttributeError(f"'Plan' object has no attribute {name!r}")
        from attnrt.scheduler.plan_native import lists_of

        work, merge = lists_of(*self.later, self.traits.all_workers)
        object.__setattr__(self, "work", work)
        object.__setattr__(self, "merge", merge)
        return work if name == "work" else merge

    def __repr__(self) -> str:
        work, merge = self.work, self.merge
        return (
            f"Plan({self.num_rows} rows, {len(work)} items of {self.traits.all_workers} workers, {len(merge)} rows to merge, "
            f"{self.num_slots} slots, {self.traits.name}, deterministic={self.deterministic!r})"
        )

    @property
    def digest(self) -> str:
        """sha256 over every array of the plan, hex: same lengths, same plan, same digest."""
        from attnrt.scheduler.report import digest

        return digest(self)

    def stats(self) -> dict[str, float]:
        """Makespan, mean, max/mean of the workers' cost, items, partial bytes."""
        from attnrt.scheduler.report import stats

        return stats(self)

    def trace(self, path: str) -> None:
        """Write the schedule as Chrome trace-event JSON."""
        from attnrt.scheduler.report import trace

        trace(self, path)

    def explain(self, row: int, head: int) -> str:
        """Which items and slots make row ``row``, query head ``head`` of the output, in words."""
        from attnrt.scheduler.report import explain

        return explain(self, row, head)


class Scheduler(Protocol):
    """Anything with ``assign``; ``cost`` and ``split`` are optional. None of them can change a bit of the result."""

    def assign(self, costs: np.ndarray, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
        """Order and cut the items.

        Parameters
        ----------
        costs : float64 [items]
        num_workers : int

        Returns
        -------
        order : int32 [items], a permutation: items in the order workers take them.
        worker_indptr : int32 [num_workers + 1]
        """
        ...
