# SPDX-License-Identifier: Apache-2.0
"""verify_plan finds planted faults, each in a plan that was right before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plan_cases
import pytest

from attnrt.errors import PlanError
from attnrt.scheduler.base import DIRECT, WORK_FIELDS, MergeList, WorkList
from attnrt.scheduler.plan import make_plan
from attnrt.scheduler.verify import verify_plan

AT = {name: i for i, name in enumerate(WORK_FIELDS)}


@pytest.fixture
def plan():
    """Cut, shared and whole rows: states, folds, bridges and DIRECT items."""
    flat = plan_cases.paged([1, 1, 1, 9], [700, 600, 5, 40], 4)
    indices = flat.indices.copy()
    indices[175 : 175 + 25] = indices[:25]
    flat = plan_cases.replace(flat, indices=indices)
    index = plan_cases.cut_levels(flat, [[[0, 1], [2], [3]]], [[100, 0, 0]])
    made = make_plan(plan_cases.spec(right=0), index, plan_cases.traits(8), pad_to=13)
    verify_plan(made)
    assert len(made.parts) == 3 and made.num_slots > 4 and (made.work["slot"] == DIRECT).any()
    assert (made.work["fold"] == 0).any()
    return made


def edit(plan, **arrays):
    work = WorkList(
        items=arrays.get("items", plan.work.items),
        worker_indptr=arrays.get("worker_indptr", plan.work.worker_indptr),
    )
    merge = MergeList(
        rows=arrays.get("rows", plan.merge.rows),
        slots=arrays.get("slots", plan.merge.slots),
        leaves=arrays.get("leaves", plan.merge.leaves),
    )
    return replace(plan, work=work, merge=merge, num_slots=arrays.get("num_slots", plan.num_slots))


def item_with(plan, **want):
    for i, item in enumerate(plan.work.items.tolist()):
        if all(item[AT[name]] == value for name, value in want.items()):
            return i
    raise AssertionError(want)


def changed(plan, i, **values):
    items = plan.work.items.copy()
    for name, value in values.items():
        items[i, AT[name]] = value
    return items


def test_items_that_are_wrong(plan):
    direct = item_with(plan, slot=DIRECT, klass=0)
    state = int(np.flatnonzero(plan.work["fold"] == 0)[0])
    end = int(plan.work["kv_end"][direct])
    faults = {
        "a key dropped": changed(plan, direct, kv_end=end - 1),
        "a key too many leaves": changed(plan, direct, leaf_end=int(plan.work["leaf_end"][direct]) + 1),
        "a head dropped": changed(plan, direct, head_end=int(plan.work["head_begin"][direct])),
        "another class": changed(plan, direct, klass=1),
        "another part": changed(plan, state, part=(int(plan.work["part"][state]) + 1) % 3),
        "a slot outside": changed(plan, state, slot=plan.num_slots),
        "a slot shared": changed(plan, state, slot=0),
        "written at once": changed(plan, state, slot=DIRECT),
        "folded": changed(plan, state, fold=1),
        "dropped": np.delete(plan.work.items, direct, axis=0),
        "doubled": np.concatenate((plan.work.items, plan.work.items[direct : direct + 1])),
        "query of another row": changed(plan, direct, q_begin=int(plan.work["q_begin"][direct]) - 1),
    }
    for name, items in faults.items():
        indptr = plan.work.worker_indptr.copy()
        indptr[-1] = len(items)
        if len(items) < len(plan.work):
            indptr = np.minimum(indptr, len(items))
        with pytest.raises(PlanError):
            verify_plan(edit(plan, items=items, worker_indptr=indptr))
            pytest.fail(name)


def test_merges_that_are_wrong(plan):
    rows, slots, leaves = plan.merge.rows, plan.merge.slots, plan.merge.leaves
    several = int(np.flatnonzero(rows[:, 4] - rows[:, 3] > 1)[0])
    a, b = rows[several, 3:5]
    swapped = slots.copy()
    swapped[[a, a + 1]] = swapped[[a + 1, a]]
    short = rows.copy()
    short[several, 4] -= 1
    for arrays in (
        {"slots": swapped},
        {"leaves": leaves + 1},
        {"rows": short},
        {"rows": rows[:-1]},
        {"rows": np.concatenate((rows, rows[:1]))},
        {"num_slots": plan.num_slots - 1},
    ):
        with pytest.raises(PlanError):
            verify_plan(edit(plan, **arrays))
    assert b > a


def test_workers_that_are_wrong(plan):
    good = plan.work.worker_indptr
    for bad in (good[:-1], good + 1, good[::-1].copy()):
        with pytest.raises(PlanError):
            verify_plan(edit(plan, worker_indptr=bad))


def test_keys_read_from_another_place(plan):
    for name in ("indices", "kv_pos"):
        parts = list(plan.parts)
        for i, part in enumerate(parts):
            other = getattr(part, name).copy()
            other[0] += 1
            parts[i] = replace(part, **{name: other})
        with pytest.raises(PlanError):
            verify_plan(replace(plan, parts=tuple(parts)))
