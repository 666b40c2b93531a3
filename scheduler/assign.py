# SPDX-License-Identifier: Apache-2.0
"""Who computes what: the built-in schedulers, their registry, and the check on what a scheduler returns.

A scheduler is any object with ``assign(costs, num_workers) -> (order, worker_indptr)``. It may have more:

- ``cost(items) -> float64 [items]``: its own costs of int32 items [n, len(WORK_FIELDS)] instead of the traits';
- ``split(keys, num_workers) -> float``: the longest run in keys x KV heads, given keys x KV heads of every query tile
  (float64 [tiles]); ``inf`` never cuts. Without it runs are cut by Algorithm 1;
- ``split_heads = False``: items keep all KV heads of their list;
- ``assign_late(costs, begins)``: called instead of ``assign`` where some workers begin later than others, with what the early
  ones have done by the time that each begins (float64 [num_workers], in costs); without it all count as beginning together;
- ``assign_requests(requests, costs, num_workers)``: called instead of ``assign`` where it exists, with each item's request;
- ``assign_sections(sections, costs, num_workers)``: the same for a machine whose team has sections (Team.section), with each
  item's section.

None of these can change a bit of the result (docs/determinism.md): they only choose among cuts at leaf boundaries.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, PlanError
from attnrt.registry import Registry
from attnrt.scheduler.level import level

__all__ = [
    "BUILTIN",
    "LPT",
    "SCHEDULERS",
    "OneCtaPerRequest",
    "RoundRobin",
    "check_assignment",
    "find",
    "gathered",
    "split_limit",
    "spread",
]


class LPT:
    """Longest first to the least-loaded worker (Algorithm 1 of the FlashInfer paper); ties by item id, then by worker."""

    name = "lpt"

    def assign(self, costs: np.ndarray, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
        taken, _ = self._deal(np.argsort(-costs, kind="stable"), costs, [0.0] * num_workers)
        return _pack(taken)

    def assign_late(self, costs: np.ndarray, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Longest first to the worker that would begin it first."""
        taken, _ = self._deal(np.argsort(-costs, kind="stable"), costs, begins.tolist())
        return _pack(taken)

    def assign_sections(
        self, sections: np.ndarray, costs: np.ndarray, num_workers: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same section after section, then levelled (``scheduler/level.py``)."""
        in_order = np.lexsort((-costs, sections))  # stable: ties by item id
        taken, loads = self._deal(in_order, costs, [0.0] * num_workers)
        level(taken, loads, sections.tolist(), costs.tolist())
        place = np.argsort(in_order)
        return _pack([sorted(items, key=place.__getitem__) for items in taken])

    @staticmethod
    def _deal(
        in_order: np.ndarray, costs: np.ndarray, begins: list[float]
    ) -> tuple[list[list[int]], list[float]]:
        """Each worker's items, and its load with what it begins with."""
        heap = [(begin, worker) for worker, begin in enumerate(begins)]
        heapq.heapify(heap)
        taken: list[list[int]] = [[] for _ in begins]
        for item in in_order.tolist():
            load, worker = heap[0]
            taken[worker].append(item)
            heapq.heapreplace(heap, (load + float(costs[item]), worker))
        return taken, [load for load, _ in sorted(heap, key=lambda entry: entry[1])]


class RoundRobin:
    """Item i on worker i mod num_workers, nothing cut: what a launch of one block per query tile does."""

    name = "round_robin"
    split_heads = False

    def split(self, keys: np.ndarray, num_workers: int) -> float:
        return math.inf

    def assign(self, costs: np.ndarray, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
        return _by_worker(np.arange(len(costs)) % num_workers, num_workers)


class OneCtaPerRequest:
    """All items of request i on worker i mod num_workers, nothing cut: the baseline that the paper measures against."""

    name = "one_cta_per_request"
    split_heads = False

    def split(self, keys: np.ndarray, num_workers: int) -> float:
        return math.inf

    def assign(self, costs: np.ndarray, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
        return _by_worker(np.arange(len(costs)) % num_workers, num_workers)

    def assign_requests(
        self, requests: np.ndarray, costs: np.ndarray, num_workers: int
    ) -> tuple[np.ndarray, np.ndarray]:
        return _by_worker(requests % num_workers, num_workers)


#: Names of what this package brings.
BUILTIN = ("lpt", "round_robin", "one_cta_per_request")

#: Schedulers by name; packages add theirs by an entry point in the group attnrt.schedulers (an object, or a class without
#: arguments).
SCHEDULERS: Registry[Any] = Registry("scheduler", "attnrt.schedulers")
for _builtin in (LPT(), RoundRobin(), OneCtaPerRequest()):
    SCHEDULERS.register(_builtin.name, _builtin)


def find(scheduler: Any) -> Any:
    """The scheduler of a name, or the object itself if it is one.

    Raises
    ------
    ArgumentError
        Unknown name, an object without ``assign``, or a class in place of an object.
    """
    if isinstance(scheduler, type):
        raise ArgumentError(
            "scheduler", "must be an object, not a class", scheduler.__name__, "Give an instance"
        )
    found = SCHEDULERS.get(scheduler, "scheduler") if isinstance(scheduler, str) else scheduler
    if isinstance(found, type):  # an entry point may name a class
        found = found()
    if not callable(getattr(found, "assign", None)):
        raise ArgumentError(
            "scheduler", "must be a name or an object with assign(costs, num_workers)", type(found).__name__
        )
    return found


def split_limit(scheduler: Any, keys: np.ndarray, num_workers: int) -> float:
    """Longest run in keys x KV heads: the scheduler's own, else Algorithm 1's ``sum(keys) / num_workers``."""
    split = getattr(scheduler, "split", None)
    if split is None:
        return float(keys.sum()) / num_workers
    limit = split(keys, num_workers)
    try:
        number = float(limit)
    except (TypeError, ValueError):
        raise PlanError("scheduler.split", "must return a number", repr(limit)) from None
    if math.isnan(number) or number <= 0:
        raise PlanError("scheduler.split", "must return a positive number of keys", number)
    return number


def check_assignment(result: Any, num_items: int, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
    """What ``assign`` returned, as int32 arrays.

    Raises
    ------
    PlanError
        Not a pair of integer arrays, ``order`` not a permutation, ``worker_indptr`` not rising from 0 to num_items.
    """
    try:
        order, indptr = (np.asarray(a) for a in result)
    except (TypeError, ValueError):
        raise PlanError(
            "scheduler.assign", "must return (order, worker_indptr)", type(result).__name__
        ) from None
    for label, array, length in (("order", order, num_items), ("worker_indptr", indptr, num_workers + 1)):
        if array.shape != (length,):
            raise PlanError(f"scheduler.assign: {label}", f"must have shape ({length},)", array.shape)
        if array.size and array.dtype.kind not in "iu":
            raise PlanError(f"scheduler.assign: {label}", "must hold integers", array.dtype)
    if num_items and (order.min() < 0 or order.max() >= num_items or len(np.unique(order)) != num_items):
        raise PlanError(
            "scheduler.assign: order", f"must be a permutation of 0 .. {num_items - 1}", "another list"
        )
    if indptr[0] != 0 or indptr[-1] != num_items or np.any(np.diff(indptr.astype(np.int64)) < 0):
        raise PlanError(
            "scheduler.assign: worker_indptr", f"must rise from 0 to {num_items}", indptr.tolist()[:8]
        )
    return order.astype(np.int32), indptr.astype(np.int32)


def gathered(order: np.ndarray, worker_indptr: np.ndarray, share: int) -> tuple[np.ndarray, np.ndarray]:
    """An assignment with the workers that have items on as few multiprocessors as hold them, ``share`` on each, where that is
    half of all at most: workers w, w + m, w + 2 * m, ... of m multiprocessors are one's."""
    workers = len(worker_indptr) - 1
    busy = np.flatnonzero(np.diff(worker_indptr)).tolist()
    if workers % share or 2 * len(busy) > workers:
        return order, worker_indptr
    count = workers // share
    place = {i % share * count + i // share: worker for i, worker in enumerate(busy)}
    lists = [
        order[worker_indptr[place[w]] : worker_indptr[place[w] + 1]] if w in place else order[:0]
        for w in range(workers)
    ]
    ends = np.cumsum([0, *(len(own) for own in lists)])
    return np.concatenate(lists).astype(np.int32), ends.astype(np.int32)


def spread(worker_indptr: np.ndarray, num_workers: int) -> np.ndarray:
    """The lists of a few workers as those of ``num_workers``, two neighbours with items after as many idle pairs everywhere:
    neighbours share what leads from them to memory, and further ones, among many, another part of it."""
    busy = len(worker_indptr) - 1
    if busy == num_workers:
        return worker_indptr
    pairs = -(-busy // 2)
    lengths = np.zeros(num_workers, np.int64)
    lengths[[i // 2 * (num_workers // 2) // pairs * 2 + i % 2 for i in range(busy)]] = np.diff(worker_indptr)
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def _by_worker(worker: np.ndarray, num_workers: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(worker, kind="stable").astype(np.int32)
    counts = np.bincount(worker, minlength=num_workers) if len(worker) else np.zeros(num_workers, np.int64)
    return order, np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _pack(taken: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    order = np.asarray([item for items in taken for item in items], np.int32)
    return order, np.cumsum([0, *(len(items) for items in taken)]).astype(np.int32)
