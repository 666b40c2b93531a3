# SPDX-License-Identifier: Apache-2.0
"""Whether keys that requests share are worth reading once.

It saves bytes. It costs a kernel more where the sharers' rows are too many for the others, states of every sharer for both
parts, a merge launched for them, and whole leaves of a request's own where the shared part ends. Whoever builds a composite does
not know the machine, so the planner decides, by the traits' prices: where sharing does not pay it plans the flat form, whose rows
have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from attnrt.formats.base import BlockSparse
    from attnrt.scheduler.base import Plan, Team, Traits

__all__ = ["price", "sharing_pays"]

#: Sharing has to win by so much: estimates are no finer.
MARGIN = 1.12
#: Of its price what the longest item takes where others leave it the memory (measured: performance.md, E10).
ALONE = 0.5


def price(plan: Plan) -> float:
    """Simulated time of a plan in units of its traits' costs: each crew's workers, launches, states. (Repeated reads of a key
    cost here what the first one does.)"""
    traits, indptr = plan.traits, plan.work.worker_indptr
    worker = np.repeat(np.arange(traits.all_workers), np.diff(indptr))
    load = np.bincount(worker, plan.work["cost"].astype(np.float64), traits.all_workers)
    times = []
    for team in (None, *traits.teams):
        first, end = traits.workers_of(None if team is None else team.name)
        if indptr[first] < indptr[end]:
            busy = load[first:end]
            longest = max(float(busy.mean()), ALONE * float(busy.max()))
            times.append(longest * (1.0 if team is None else team.unit))
    return _total(traits, times, len(plan.merge.slots) * plan.spec.num_qo_heads)


def _total(traits: Traits, times: list[float], states: float) -> float:
    """Of kernels one after the other, the first of which is free, and of a merge, which takes as long inside a kernel."""
    launches = len(times) - 1 + (states > 0)
    return sum(times) + traits.launch * launches + traits.state * states / traits.num_workers


def sharing_pays(flat: BlockSparse, parts: tuple[BlockSparse, ...], facts: Any, traits: Traits) -> bool:
    """Whether the parts of a composite take less time than its flat form, from lengths alone.

    Parameters
    ----------
    flat : BlockSparse
    parts : tuple of BlockSparse
        The composite, aligned.
    facts : Facts
    traits : Traits
    """
    if traits.launch <= 0.0 or flat.heads > 1:
        return True
    shared = _Estimate(traits, facts)
    for part in parts:
        shared.add(part)
    alone = _Estimate(traits, facts)
    alone.add(flat)
    # What many read comes from a cache that they share; both forms read as many keys for the first time.
    repeated = max(0.0, alone.keys - shared.keys) * (1.0 - traits.repeated)
    states = alone.queries if alone.cut() else 0
    return MARGIN * shared.time(states=shared.queries - flat.num_qo) <= alone.time(repeated, states)


class _Estimate:
    """Costs of parts by crew: near what a plan's workers would have."""

    def __init__(self, traits: Traits, facts: Any) -> None:
        self.traits, self.group, self.heads = traits, facts.group, facts.num_kv_heads
        crews = 1 + len(traits.teams)
        self.cost, self.longest = [0.0] * crews, [0.0] * crews
        self.keys, self.queries = 0.0, 0
        self.whole = 0  # rows of lists under one head, uncut

    def add(self, part: BlockSparse) -> None:
        queries = part.qo_indptr[1:] - part.qo_indptr[:-1]
        keys, ends, first = part.kv_end - part.kv_begin, part.kv_offset + part.kv_end, part.qo_indptr[:-1]
        if not queries.all():
            live = np.flatnonzero(queries)
            queries, keys, ends, first = queries[live], keys[live], ends[live], first[live]
        if not len(queries):
            return
        # Costs are linear in the keys: rows of as many queries, of requests as long, count together.
        kind = queries.astype(np.int64) << 32 | part.requests.qo_lens[part.request[first]]
        self.queries += int(queries.sum())
        self.whole += len(keys) * self.heads
        if (kind == kind[0]).all():
            return self._rows(int(kind[0]), keys, ends)
        for one in np.unique(kind).tolist():
            mine = kind == one
            self._rows(one, keys[mine], ends[mine])

    def _rows(self, kind: int, keys: np.ndarray, ends: np.ndarray) -> None:
        traits, queries, length = self.traits, kind >> 32, kind & 0xFFFFFFFF
        klass = traits.class_of(length * self.group)
        step = max(1, traits.classes[klass].q_tile // self.group)
        ruler, end = traits.classes[klass].ruler, int(ends.max())
        last = ruler.start(ruler.leaf_of(max(0, end - 1)))
        before = last - ruler.start(ruler.leaf_of(last - 1)) if last else 0
        most = min(int(keys.max()), max(end - last, before))  # the longest leaf, which nobody cuts
        total, count = float(keys.sum(dtype=np.int64)), len(keys)
        for tile, tiles in ((step, queries // step), (queries % step, 1)):
            if not tile or not tiles:
                continue
            rows = float(tile * self.group)
            crew = traits.crew_of(klass, int(rows))
            of: Traits | Team = traits.teams[crew - 1] if crew else traits
            fixed, each = of.fixed + of.alpha * rows, of.beta + of.beta_rows * rows
            self.cost[crew] += tiles * self.heads * (fixed * count + each * total)
            self.longest[crew] = max(self.longest[crew], fixed + each * most)
            self.keys += tiles * total

    def cut(self) -> bool:
        """Whether whole rows would leave half of the workers idle."""
        return 2 * self.whole <= self.traits.num_workers

    def time(self, spared: float = 0.0, states: float = 0.0) -> float:
        """Of plans; ``spared``: keys that cost nothing, ``states`` of queries (of all heads)."""
        traits, times = self.traits, []
        crews = [(traits.num_workers, 1.0), *((team.num_workers, team.unit) for team in traits.teams)]
        for i, (workers, unit) in enumerate(crews):
            if not self.cost[i]:
                continue
            cost = self.cost[i] - (spared * self.heads if i == 0 else 0.0)
            times.append(max(cost / workers, ALONE * self.longest[i]) * unit)
        return _total(traits, times, states * self.heads * self.group)
