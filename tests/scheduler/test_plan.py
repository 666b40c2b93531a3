# SPDX-License-Identifier: Apache-2.0
"""Plans are right, and nothing that they are free to choose shows in what they compute."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import plan_cases
import pytest
from hypothesis import given, settings
from plan_cases import cases

import attnrt as at
from attnrt.errors import ArgumentError, LimitError, PlanError, UnsupportedError
from attnrt.scheduler.base import DIRECT, WORK_FIELDS, Traits
from attnrt.scheduler.plan import make_plan
from attnrt.scheduler.verify import verify_plan


def expression(plan, row, head):
    """What a run computes for (row, head), as a value: leaves in fold order, each the slots and positions that it reads."""
    leaf_of_slot, direct = {}, []
    for item in plan.work.items.tolist():
        f = dict(zip(WORK_FIELDS, item, strict=True))
        part = plan.parts[f["part"]]
        rows = np.arange(f["q_begin"], f["q_end"])
        rows = (rows if part.qo_index is None else part.qo_index[rows]).tolist()
        if row not in rows or not f["head_begin"] <= head < f["head_end"]:
            continue
        i, ruler = rows.index(row), plan.traits.classes[f["klass"]].ruler
        leaves = []
        for leaf in range(f["leaf_begin"], f["leaf_end"]):
            lo, hi = max(f["kv_begin"], ruler.start(leaf)), min(f["kv_end"], ruler.start(leaf + 1))
            leaves.append((f["klass"], leaf, _seen(plan, part, f["row"], f["q_begin"] + i, head, lo, hi)))
        if f["slot"] == DIRECT:
            direct += leaves
        elif f["fold"]:
            leaf_of_slot[f["slot"] + i] = leaves
        else:
            for k, leaf in enumerate(leaves):
                leaf_of_slot[f["slot"] + k * len(rows) + i] = [leaf]
    for qo_row, head_begin, head_end, begin, end in plan.merge.rows.tolist():
        if qo_row == row and head_begin <= head < head_end:
            assert not direct
            direct = [leaf for slot in plan.merge.slots[begin:end].tolist() for leaf in leaf_of_slot[slot]]
    return tuple(leaf for leaf in direct if leaf[2])  # empty leaves are skipped


def _seen(plan, part, row, q, head, lo, hi):
    entry = row * part.heads + (head if part.heads > 1 else 0)
    C, seen, window = part.block_size[1], [], plan.spec.composed
    for offset in range(lo, hi):
        j = offset - int(part.kv_offset[row])
        block = int(part.indptr[entry]) + j // C
        pos = int(part.kv_pos[row]) + j if part.block_pos is None else int(part.block_pos[block]) + j % C
        if window.left is not None and pos < part.qo_pos[q] - window.left:
            continue
        if window.right is not None and pos > part.qo_pos[q] + window.right:
            continue
        seen.append((offset, int(part.indices[block]) * C + j % C, pos))
    return tuple(seen)


@settings(max_examples=70, deadline=None)
@given(cases())
def test_plan_is_right(case):
    for tree in ("sequential", "pairwise"):
        more = {"max_partial_slots": None} if tree == "pairwise" else {}
        plan = case.plan(tree=tree, **more)
        verify_plan(plan)
        assert plan.digest == case.plan(tree=tree, **more).digest


@settings(max_examples=30, deadline=None)
@given(cases())
def test_free_choices_do_not_show(case):
    """Workers, scheduler, slots, head split, sharing, pad: the same leaves in the same order for every row."""
    plan = case.plan()
    others = [
        case.plan(index=case.flat, max_partial_slots=0),
        make_plan(case.spec, case.flat, plan_cases.traits(133)),
        make_plan(case.spec, case.index, plan_cases.traits(5, fixed=0.0, split_heads=False)),
        make_plan(case.spec, case.flat, plan_cases.traits(40), tree="pairwise"),
    ]
    for row in range(case.flat.num_qo):
        for head in range(2):
            want = expression(plan, row, head)
            for other in others:
                assert expression(other, row, head) == want


@settings(max_examples=30, deadline=None)
@given(cases(heads=(1,), share=(False,)))
def test_a_request_alone_has_the_leaves_it_has_in_a_batch(case):
    plan, flat = case.plan(), case.flat
    for r in range(len(flat.requests)):
        alone = plan_cases.paged(flat.requests.qo_lens[r : r + 1], flat.requests.kv_lens[r : r + 1], 7)
        other = make_plan(case.spec, alone, plan_cases.traits(2))
        for i in range(int(flat.requests.qo_lens[r])):
            row = int(flat.qo_indptr[r]) + i
            got, want = expression(plan, row, 1), expression(other, i, 1)
            drop_slots = [[(k, n, [(o, p) for o, _, p in keys]) for k, n, keys in e] for e in (got, want)]
            assert drop_slots[0] == drop_slots[1]


def test_pad_rows_and_missing_rows_are_empty_sets():
    plan = make_plan(plan_cases.spec(), plan_cases.paged([1, 0], [5, 3]), plan_cases.traits(), pad_to=3)
    assert plan.merge.rows.tolist() == [[1, 0, 2, 0, 0], [2, 0, 2, 0, 0]]
    verify_plan(plan)


def test_a_row_without_a_visible_key_is_an_empty_direct_item():
    plan = make_plan(plan_cases.spec(right=0), plan_cases.paged([1, 3], [0, 1]), plan_cases.traits(q_tile=2))
    empty = plan.work.items[plan.work["kv_begin"] == plan.work["kv_end"]]
    assert len(empty) and (empty[:, WORK_FIELDS.index("slot")] == DIRECT).all()
    verify_plan(plan)


def test_empty_batch():
    plan = make_plan(plan_cases.spec(), plan_cases.paged([], []), plan_cases.traits())
    assert len(plan.work) == 0 and len(plan.merge) == 0 and plan.num_slots == 0
    assert plan.work.worker_indptr.tolist() == [0, 0, 0, 0]
    verify_plan(plan)


@pytest.mark.parametrize("count", [16385, 65536, 80000])
def test_nothing_has_a_fixed_capacity(count):
    index = plan_cases.paged(np.ones(count, np.int32), np.full(count, 16, np.int32), 16)
    plan = make_plan(plan_cases.spec(64, 8), index, Traits.of("h200"))
    rows = np.sort(plan.work["q_begin"][plan.work["head_begin"] == 0])
    assert (rows == np.arange(count)).all() and (plan.work["slot"] == DIRECT).all()
    assert len(plan.merge) == 0


def test_one_long_request_fills_the_machine():
    plan = make_plan(plan_cases.spec(32, 8), plan_cases.paged([1], [1_000_000], 16), Traits.of("h200"))
    stats = plan.stats()
    assert stats["max_over_mean"] < 1.1
    assert (np.diff(plan.work.worker_indptr) > 0).all()


def test_slots_run_out_rows_stay_whole():
    index = plan_cases.paged([1] * 4, [5000] * 4, 16)
    for slots in (0, 1, 7, 1000):
        plan = make_plan(plan_cases.spec(), index, plan_cases.traits(50), max_partial_slots=slots)
        assert plan.num_slots <= slots
        verify_plan(plan)


def test_parts_need_slots_that_nothing_can_save():
    flat = plan_cases.paged([1, 1], [300, 300], 4)
    indices = flat.indices.copy()
    indices[75:100] = indices[:25]
    flat = plan_cases.replace(flat, indices=indices)
    shared = plan_cases.cut_levels(flat, [[[0, 1]]], [[100]])
    with pytest.raises(LimitError) as caught:
        make_plan(plan_cases.spec(), shared, plan_cases.traits(), max_partial_slots=1)
    assert caught.value.limit == "max_partial_slots" and caught.value.needed > 1
    verify_plan(make_plan(plan_cases.spec(), shared, plan_cases.traits()))


def test_capacity_of_the_cache_does_not_show():
    """Lengths alone decide, however many pages a request's list or the pool has."""
    plans = []
    for spare in (0, 1000):
        index = plan_cases.paged([1, 2], [4096, 700], 16)
        lists = [index.indices[:256], np.zeros(spare, np.int32), index.indices[256:]]
        indptr = np.asarray([0, 256 + spare, 256 + spare + 44], np.int32)
        index = plan_cases.replace(
            index, indices=np.concatenate(lists), indptr=indptr, max_block=10_000 + spare
        )
        plans.append(make_plan(plan_cases.spec(), index, plan_cases.traits(9)))
    assert plans[0].work.items.tobytes() == plans[1].work.items.tobytes()


class Custom:
    def __init__(self, result=None, **more):
        self.result = result
        self.__dict__.update(more)

    def assign(self, costs, num_workers):
        if self.result is not None:
            return self.result
        order = np.arange(len(costs))[::-1]
        return order, np.asarray([0] * num_workers + [len(costs)])


def test_a_custom_scheduler_is_asked_and_checked():
    index, s, t = plan_cases.paged([1, 1, 6], [300, 40, 90]), plan_cases.spec(), plan_cases.traits(4)
    costs = Custom(cost=lambda items: np.full(len(items), 7.0), split=lambda keys, workers: 64.0)
    plan = make_plan(s, index, t, scheduler=costs)
    verify_plan(plan)
    assert set(plan.work["cost"].tolist()) == {7} and plan.num_slots > 0
    one_item = Custom(split_heads=False, split=lambda keys, workers: np.inf)
    assert len(make_plan(s, index, t, scheduler=one_item).work) == 3
    for bad in (
        Custom((np.asarray([0, 0, 1]), np.asarray([0, 3, 3, 3, 3])), split_heads=False),
        Custom((np.asarray([0, 1, 2]), np.asarray([0, 3, 2, 3, 3])), split_heads=False),
        Custom((np.asarray([0, 1, 2]), np.asarray([0, 3])), split_heads=False),
        Custom(7),
        Custom(cost=lambda items: np.ones(1)),
        Custom(cost=lambda items: np.full(len(items), np.nan)),
        Custom(split=lambda keys, workers: "long"),
        Custom(split=lambda keys, workers: 0.0),
    ):
        bad.split = getattr(bad, "split", lambda keys, workers: np.inf)
        with pytest.raises(PlanError):
            make_plan(s, index, t, scheduler=bad)


def test_bad_arguments_are_named():
    index, s, t = plan_cases.paged([1], [9]), plan_cases.spec(), plan_cases.traits()
    for more in (
        {"tree": "balanced"},
        {"pad_to": 0},
        {"pad_to": True},
        {"max_partial_slots": -1},
        {"scheduler": "fastest"},
        {"scheduler": object()},
        {"deterministic": "never"},
    ):
        with pytest.raises(ArgumentError) as caught:
            make_plan(s, index, t, **more)
        assert caught.value.label == next(iter(more))
    with pytest.raises(ArgumentError):
        make_plan(s, [1, 2], t)
    with pytest.raises(ArgumentError):
        make_plan(s, index, "h200")
    with pytest.raises(ArgumentError):
        make_plan(plan_cases.spec(6, 3), plan_cases.paged([1], [9], heads=2), t)
    with pytest.raises(UnsupportedError):
        make_plan(s, index, t, deterministic="token")
    token = make_plan(s, index, Traits.of("h200-token"), deterministic="token")
    assert token.deterministic == "token"


def test_a_team_takes_its_classes_section_by_section():
    """Items of the team's classes lie with its workers, lists of one section before those of the next, longest first inside."""
    s = plan_cases.spec(qo_heads=8, kv_heads=4, right=0)
    index = plan_cases.paged([1, 100, 90, 3, 120], [50, 200, 90, 77, 120])
    machine = plan_cases.traits(2, team=(1, 500))
    plan = make_plan(s, index, machine)
    verify_plan(plan)
    at, work = plan.work.worker_indptr, plan.work
    assert len(at) == machine.all_workers + 1 == 5
    mine, theirs = slice(0, int(at[2])), slice(int(at[2]), None)
    assert set(work["klass"][mine].tolist()) == {0} and set(work["klass"][theirs].tolist()) == {2}
    assert (work["head_end"] - work["head_begin"])[theirs].tolist() == [1] * len(work["klass"][theirs])
    before = {1: 0, 2: 4 * 200, 4: 4 * 290}
    keys = {1: 200, 2: 90, 4: 120}
    for worker in (2, 3):
        items = range(int(at[worker]), int(at[worker + 1]))
        order = [
            (
                (before[int(work["row"][i])] + int(work["head_begin"][i]) * keys[int(work["row"][i])]) // 500,
                -int(work["cost"][i]),
            )
            for i in items
        ]
        assert order == sorted(order) and len({section for section, _ in order}) == 4
    flat = make_plan(s, index, replace(machine, teams=(replace(machine.teams[0], section=0),)))
    assert flat.digest != plan.digest


def test_block_rows_of_a_request_run_head_by_head():
    """Rows of a sparse matrix choose among the same keys: workers take all rows of one head before those of the next."""
    rng = np.random.default_rng()
    kept = rng.random((12, 40)) < 0.2
    starts = np.concatenate([[0], np.cumsum(kept.sum(1))]).astype(np.int32)
    index = at.formats.bsr(starts, np.nonzero(kept)[1].astype(np.int32), (16, 16), num_cols=640)
    plan = make_plan(plan_cases.spec(qo_heads=8, kv_heads=8), index, plan_cases.traits(2, team=(1, 640)))
    verify_plan(plan)
    lists, heads = plan.work.worker_indptr, plan.work["head_begin"]
    assert lists[-1] > lists[2]
    for worker in (2, 3):
        own = heads[lists[worker] : lists[worker + 1]].tolist()
        assert own == sorted(own)


def test_a_team_leaves_workers_to_the_others():
    """With ``overlap`` as few workers of the last team have items as cost no time; it is alone where the others have nothing."""
    s = plan_cases.spec(qo_heads=8, kv_heads=4, right=0)
    machine = plan_cases.traits(40, team=(1, 0, 0.5))
    first, end = machine.workers_of("team")
    used = []
    for decodes, prompts in ((0, 6), (1, 6), (40, 6), (40, 0)):
        index = plan_cases.paged([1] * decodes + [100] * prompts, [300] * decodes + [200] * prompts)
        plan = make_plan(s, index, machine)
        verify_plan(plan)
        busy = np.flatnonzero(np.diff(plan.work.worker_indptr[first : end + 1]) > 0)
        used.append(len(busy))
        if 0 < len(busy) < end - first:  # by twos, with as many idle pairs between them everywhere
            assert busy[0] == 0 and (busy[1::2] == busy[::2][: len(busy[1::2])] + 1).all()
            assert np.ptp(np.diff(busy[::2])) <= 2 and (busy[::2] % 2 == 0).all()
    assert used[0] == end - first >= used[1] > used[2] > used[3] == 0


class Together:  # without assign_late
    name = "together"

    def assign(self, costs, num_workers):
        return at.scheduler.assign.LPT().assign(costs, num_workers)


def _beside(scheduler="lpt", decodes=400, keys=128):
    """Decode steps of a machine of 10 multiprocessors beside two prompts: loads of these, and workers that prompts have."""
    sharing = plan_cases.Sharing(
        workers=4, alone=3.0, warp=2.0, scattered=2.0, run=4, busy=1.0, merge=50.0, fold=5.0
    )
    machine = plan_cases.traits(40, leaf=64, team=(1, 0, 0.45), sharing=sharing)
    team = replace(machine.teams[0], num_workers=10, beta_rows=0.0)
    machine = replace(machine, teams=(team,))
    index = plan_cases.paged([1] * decodes + [100] * 2, [keys] * decodes + [400] * 2)
    plan = make_plan(plan_cases.spec(qo_heads=8, kv_heads=4, right=0), index, machine, scheduler=scheduler)
    verify_plan(plan)
    at_worker = plan.work.worker_indptr
    costs = [plan.work["cost"][at_worker[w] : at_worker[w + 1]].sum() for w in range(machine.all_workers)]
    return np.reshape(costs[:40], (4, 10)).sum(0), int(np.count_nonzero(costs[40:]))


def test_workers_beside_a_team_have_more_where_it_leaves_multiprocessors():
    """The first multiprocessors, all that a team leaves but one, have longer lists than those whose workers wait for its end, as
    much more as they read meanwhile; a scheduler that knows nothing of it gives all the same."""
    loads, busy = _beside()
    early = 10 - busy - 1
    assert early == 4
    assert loads[:early].min() > 1.5 * loads[early:].max()
    even, _ = _beside(Together())
    assert even.max() < 1.5 * even.min() and even.sum() == loads.sum()


def test_workers_beside_a_long_team_have_even_shares():
    """Where a team leaves less than a quarter of the multiprocessors, their workers come and go several times meanwhile."""
    loads, busy = _beside(decodes=100)
    assert 0 < 4 * (10 - busy - 1) < 10
    assert loads.max() <= 2 * loads.min()


def test_few_items_of_a_team_are_cut_by_what_ends_first():
    """Tiles of 32 rows are 1.2 as long as those of 16 and twice as long as those of 8: 8 where all have a worker of their own, 16
    or 32 by the longest worker, 32 where there are three items a worker."""
    rows = []
    for workers in (1, 2, 3, 4, 6, 8, 40):
        machine = plan_cases.traits(2, team=(2, 0), sizes=((8, 60), (16, 100), (32, 120)))
        machine = replace(machine, teams=(replace(machine.teams[0], num_workers=workers),))
        plan = make_plan(plan_cases.spec(1, 1), plan_cases.paged([96, 1], [96, 9]), machine)
        verify_plan(plan)
        theirs = slice(*plan.work.worker_indptr[[2, 2 + workers]])
        lengths = (plan.work["q_end"] - plan.work["q_begin"])[theirs]
        rows.append(int(lengths.max()))
    assert rows == [32, 32, 32, 32, 16, 16, 8]


@pytest.mark.parametrize(("again", "items"), [(0.0, 12), (500.0, 4)])
def test_second_items_of_a_team_have_a_price(again, items):
    """Where a second start costs a team much, its cuts leave no worker more than one item."""
    machine = plan_cases.traits(12, wide=8)
    machine = replace(machine, teams=tuple(replace(team, again=again) for team in machine.teams))
    plan = make_plan(plan_cases.spec(8, 1), plan_cases.paged([2] * 2, [681] * 2), machine)
    verify_plan(plan)
    first, end = machine.workers_of("wide")
    assert plan.work.worker_indptr[end] - plan.work.worker_indptr[first] == len(plan.work) == items
    assert end - first == 5


@pytest.mark.parametrize(
    ("sharing", "items"),
    [
        (None, 24),
        ({}, 12),
        ({"alone": 1.2}, 24),
        ({"alone": 1.2, "warp": 0.6}, 12),
        ({"alone": 1.2, "scattered": 0.6}, 24),
        ({"alone": 1.2, "scattered": 0.6, "run": 16}, 12),
        ({"alone": 4.0, "warp": 4.0, "merge": 500.0}, 6),
    ],
)
def test_workers_that_share_a_multiprocessor(sharing, items):
    """Fewer and longer items where a worker with idle neighbours is as fast as several: where it reads enough by itself, and
    where what one loading warp brings (of runs or of scattered blocks) holds it back; none where merges
    cost more than they bring."""
    fixed = {"workers": 4, "alone": 2.0, "warp": 2.0, "scattered": 2.0, "run": 4, "busy": 0.5, "merge": 1.0}
    sharing = None if sharing is None else plan_cases.Sharing(**{**fixed, **sharing})
    spec, index = plan_cases.spec(2, 2), plan_cases.paged([1] * 3, [128] * 3)
    traits = plan_cases.traits(24, leaf=32, fixed=16.0, sharing=sharing)
    plan = make_plan(
        spec, index, replace(traits, classes=(replace(traits.classes[0], ruler=at.scheduler.Ruler(tail=32)),))
    )
    verify_plan(plan)
    assert len(plan.work) == items
