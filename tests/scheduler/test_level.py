# SPDX-License-Identifier: Apache-2.0
"""Levelled workers: nobody has more to do than before, items stay in their sections, both planners agree; whole tiles."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from attnrt.scheduler import plan, plan_native
from attnrt.scheduler.assign import LPT
from attnrt.scheduler.level import level
from attnrt.scheduler.plan import make_plan
from tests.scheduler import plan_cases


def spread(order, indptr, costs):
    loads = [costs[order[a:b]].sum() for a, b in itertools.pairwise(indptr)]
    return max(loads), max(loads) - min(loads)


def dealt(sections, costs, workers):
    """Longest first to the least loaded, section after section."""
    taken, loads = [[] for _ in range(workers)], np.zeros(workers)
    for item in np.lexsort((-costs, sections)):
        worker = int(loads.argmin())
        taken[worker].append(int(item))
        loads[worker] += costs[item]
    return taken, loads.tolist()


@pytest.mark.parametrize("workers", [1, 3, 20])
def test_workers_are_levelled(workers):
    rng = np.random.default_rng()
    gains = []
    for _ in range(20):
        count = int(rng.integers(0, 15 * workers))
        sections, costs = np.sort(rng.integers(0, 5, count)), rng.integers(2, 9, count).astype(float)
        taken, loads = dealt(sections, costs, workers)
        before = Counter((w, int(sections[i])) for w, items in enumerate(taken) for i in items), max(loads)
        level(taken, loads, sections.tolist(), costs.tolist())
        assert Counter((w, int(sections[i])) for w, items in enumerate(taken) for i in items) == before[0]
        assert sorted(i for items in taken for i in items) == list(range(count))
        assert np.allclose(loads, [costs[items].sum() for items in taken])
        gains.append(before[1] - max(loads))
        order, indptr = LPT().assign_sections(sections, costs, workers)
        assert spread(order, indptr, costs)[0] == max(loads)
        for begin, end in itertools.pairwise(indptr):  # by section, longest first
            own = order[begin:end]
            assert own.tolist() == own[np.lexsort((own, -costs[own], sections[own]))].tolist()
    assert min(gains) >= 0 and (workers == 1 or max(gains) > 0)


def test_nothing_to_swap():
    for items, loads in (([[0], [1]], [3.0, 1.0]), ([[0], []], [3.0, 0.0]), ([[0, 1], [2, 3]], [5.0, 4.0])):
        costs, sections = [3.0, 1.0, 1.0, 3.0], [0, 1, 0, 1]
        kept = [list(own) for own in items]
        level(items, list(loads), sections, costs)
        assert items == kept


@pytest.mark.skipif(plan_native.lib is None, reason="the C++ planner is not built")
@pytest.mark.parametrize("fixed", [7.0, 1 / 3])
def test_both_planners_level_alike(monkeypatch, fixed):
    rng = np.random.default_rng()
    swapped = 0
    for workers in (5, 40):
        lens = rng.integers(1, 400, 30)
        index = plan_cases.paged(lens, lens + rng.integers(0, 90, 30), 16)
        machine = plan_cases.traits(workers, q_tile=8, team=(1, 900))
        machine = replace(machine, teams=(replace(machine.teams[0], fixed=fixed),))
        spec = plan_cases.spec(qo_heads=8, kv_heads=4, right=0)
        native = make_plan(spec, index, machine)
        with monkeypatch.context() as m:
            m.setattr(plan, "can_plan", lambda _: False)
            assert make_plan(spec, index, machine).digest == native.digest
            m.setattr("attnrt.scheduler.assign.level", lambda *_: None)
            swapped += make_plan(spec, index, machine).digest != native.digest
    assert swapped


def test_costs_of_a_team_count_whole_tiles():
    machine = plan_cases.traits(4, team=(1, 10_000))
    team = replace(machine.teams[0], fixed=100.0, beta=2.0, alpha=0.0, beta_rows=0.0, tile=64)
    index = plan_cases.paged([300, 65, 64], [900, 65, 64], 16)
    plan_ = make_plan(
        plan_cases.spec(left=150, right=0), index, replace(machine, teams=(replace(team, num_workers=3),))
    )
    work = plan_.work
    theirs = work["klass"] > 0
    tiles = -(-work["kv_end"] // 64) - work["kv_begin"] // 64
    assert theirs.any() and (work["kv_begin"] % 64 > 0).any()
    assert (work["cost"] == 100 + 128 * tiles)[theirs].all()
