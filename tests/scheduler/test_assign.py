# SPDX-License-Identifier: Apache-2.0
"""Built-in schedulers, their registry, the check on assignments."""

from __future__ import annotations

import itertools

import numpy as np
import plan_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrt.errors import ArgumentError, PlanError
from attnrt.scheduler import assign
from attnrt.scheduler.plan import make_plan


def loads(costs, order, indptr):
    return [costs[order[a:b]].sum() for a, b in itertools.pairwise(indptr)]


@given(st.lists(st.integers(0, 1000), max_size=80), st.integers(1, 12), st.sampled_from(assign.BUILTIN))
def test_every_item_has_one_worker(costs, workers, name):
    costs = np.asarray(costs, np.float64)
    order, indptr = assign.check_assignment(assign.find(name).assign(costs, workers), len(costs), workers)
    assert sorted(order.tolist()) == list(range(len(costs)))
    assert order.dtype == indptr.dtype == np.int32


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.integers(1, 12))
def test_lpt_keeps_its_bound(costs, workers):
    """Graham's bound: at most mean + (1 - 1 / workers) * longest item; and no worker idles while another has two items."""
    costs = np.asarray(costs, np.float64)
    load = loads(costs, *assign.LPT().assign(costs, workers))
    assert max(load) <= costs.sum() / workers + (1 - 1 / workers) * costs.max() + 1e-9
    order, indptr = assign.LPT().assign(costs, workers)
    counts = np.diff(indptr)
    assert counts.min() > 0 or counts.max() == 1
    for a, b in itertools.pairwise(indptr):
        assert (np.diff(costs[order[a:b]]) <= 0).all()


def test_lpt_breaks_ties_by_item_then_worker():
    order, indptr = assign.LPT().assign(np.full(5, 2.0), 3)
    assert (order.tolist(), indptr.tolist()) == ([0, 3, 1, 4, 2], [0, 2, 4, 5])


def test_lpt_begins_late_workers_late():
    costs = np.asarray([3.0, 3.0, 2.0, 2.0, 1.0])
    order, indptr = assign.LPT().assign_late(costs, np.asarray([0.0, 4.0, 4.5]))
    assert (order.tolist(), indptr.tolist()) == ([0, 1, 4, 2, 3], [0, 3, 4, 5])
    assert (
        assign.LPT().assign_late(costs, np.zeros(3))[1].tolist() == assign.LPT().assign(costs, 3)[1].tolist()
    )


def test_busy_workers_are_spread_by_twos():
    indptr = np.asarray([0, 2, 3, 7, 7, 9], np.int32)
    assert assign.spread(indptr, 12).tolist() == [0, 2, 3, 3, 3, 7, 7, 7, 7, 9, 9, 9, 9]
    assert assign.spread(indptr, 5) is indptr
    for busy in range(1, 133):
        lengths = np.diff(assign.spread(np.arange(busy + 1), 132))
        assert lengths.sum() == busy and lengths.max() == 1 and len(lengths) == 132


def test_one_cta_per_request_keeps_a_request_together():
    index = plan_cases.paged([40, 1, 40], [40, 10, 90])
    plan = make_plan(plan_cases.spec(), index, plan_cases.traits(3), scheduler="one_cta_per_request")
    for worker in range(3):
        mine = slice(*plan.work.worker_indptr[worker : worker + 2])
        assert set(index.request[plan.work["q_begin"][mine]].tolist()) == {worker}


def test_registered_objects_and_classes_are_found():
    class Last(assign.RoundRobin):
        name = "test_last"

        def assign(self, costs, num_workers):
            return np.arange(len(costs)), np.asarray([0] * num_workers + [len(costs)])

    assign.SCHEDULERS.register("test_last", Last)
    plan = make_plan(
        plan_cases.spec(), plan_cases.paged([1, 1], [9, 9]), plan_cases.traits(), scheduler="test_last"
    )
    assert plan.work.worker_indptr.tolist() == [0, 0, 0, 2]
    with pytest.raises(ArgumentError):
        assign.SCHEDULERS.register("lpt", Last())
    with pytest.raises(ArgumentError) as caught:
        assign.find("fastest")
    assert caught.value.label == "scheduler" and "lpt" in str(caught.value)


@pytest.mark.parametrize(
    "result",
    [
        None,
        7,
        ([0, 1, 2], [0, 3], 5),
        ([0, 1, 1], [0, 1, 3]),
        ([0, 1, 3], [0, 1, 3]),
        ([0, 1, -1], [0, 1, 3]),
        ([0, 1], [0, 1, 3]),
        ([0.0, 1.0, 2.0], [0, 1, 3]),
        ([0, 1, 2], [0, 1, 2]),
        ([0, 1, 2], [1, 1, 3]),
        ([0, 1, 2], [0, 4, 3]),
        ([0, 1, 2], [0, 3]),
    ],
)
def test_bad_assignments_are_named(result):
    with pytest.raises(PlanError) as caught:
        assign.check_assignment(result, 3, 2)
    assert caught.value.label.startswith("scheduler.assign")


def test_a_class_is_no_scheduler():
    with pytest.raises(ArgumentError, match="scheduler must be an object, not a class; got RoundRobin"):
        assign.find(assign.RoundRobin)
