# SPDX-License-Identifier: Apache-2.0
"""The C++ planner gives what the readable planner gives, byte for byte."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import plan_cases
import pytest
from hypothesis import given, settings
from plan_cases import cases

from attnrt.backends.cuda.tables import traits_for
from attnrt.errors import LimitError, PlanError
from attnrt.formats.check import trusted
from attnrt.scheduler import plan as plan_module
from attnrt.scheduler import plan_native
from attnrt.scheduler.assign import find
from attnrt.scheduler.base import Traits
from attnrt.scheduler.plan import make_plan
from attnrt.scheduler.plan_python import plan_python
from attnrt.scheduler.problem import Problem
from attnrt.scheduler.verify import verify_plan
from attnrt.spec import AttentionSpec

pytestmark = pytest.mark.skipif(plan_native.lib is None, reason="the planner's module is not built")


def arrays(result):
    work, merge, slots = result
    return [work.items, work.worker_indptr, merge.rows, merge.slots, merge.leaves, np.asarray(slots)]


@pytest.fixture
def both(monkeypatch):
    """Run both planners on every problem; a list of how many were compared."""
    compared = []

    def run(*args):
        parts, limits, facts, traits, scheduler, tree, num_rows, max_slots = args
        problem = Problem(
            parts=parts,
            limits=limits,
            composed=facts.composed,
            traits=traits,
            scheduler=find(scheduler),
            tree=tree,
            num_kv_heads=facts.num_kv_heads,
            group=facts.group,
            num_rows=num_rows,
            max_slots=max_slots,
        )
        window = facts.composed
        reach = facts._replace(reach=(window.left, window.right))
        got = _result(lambda: plan_native.plan_native(parts, limits, reach, *args[3:]))
        asked = _result(lambda: plan_native.plan_native(parts, limits, facts._replace(reach=None), *args[3:]))
        want = _result(lambda: plan_python(problem))
        compared.append(1)
        for other in (got, asked):
            if isinstance(want, Exception):
                assert str(want) == str(other)
                continue
            for a, b in zip(arrays(want), arrays(other), strict=True):
                assert a.shape == b.shape and np.array_equal(a, b)
            assert [a.dtype for a in arrays(want)[:5]] == [np.dtype(np.int32)] * 5
        if isinstance(got, Exception):
            raise got
        return got

    monkeypatch.setattr(plan_module, "plan_native", run)
    return compared


def _result(call):
    try:
        return call()
    except LimitError as error:
        return error


def test_same_plans(both):
    @settings(max_examples=100, deadline=None)
    @given(cases())
    def run(case):
        for tree in ("sequential", "pairwise"):
            try:
                case.plan(tree=tree)
            except LimitError:
                assert case.max_slots is not None

    run()
    assert len(both) >= 100


@pytest.mark.parametrize("workers", [1, 3, 132, 1000])
def test_same_plans_at_full_size(both, workers):
    rng = np.random.default_rng(workers)
    for count in (1, 31, 300):
        for top in (1500, 40_000):
            index = plan_cases.paged(rng.choice([1, 1, 1, 4, 300], count), rng.integers(1, top, count), 16)
            for left in (None, 1000):
                make_plan(plan_cases.spec(32, 8, left=left, right=0), index, Traits.of("h200", workers))
    assert len(both) == 12


@pytest.mark.parametrize("kv_heads", [8, 32])
def test_same_plans_of_shared_prefixes_and_drafts(both, kv_heads):
    """With the traits of an H200, whose team has prices of leaves' ends."""
    rng = np.random.default_rng(kv_heads)
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=kv_heads, head_dim=128, q_dtype="bfloat16")
    traits = traits_for(spec, 132, "batch", hopper=True)
    for rows in (16, 24, 64, 70):
        for prefix in (256, 1000, 3000, 5000, 8192, 20011, 32768, 70000):
            flat = plan_cases.paged([1] * rows, prefix + rng.integers(1, 700, rows), 16)
            index = plan_cases.cut_levels(flat, [[list(range(rows))]], [[prefix]])
            plan = make_plan(plan_cases.spec(32, kv_heads, head_dim=128), index, traits)
            if rows == 16 and prefix < 10_000:
                verify_plan(plan)
    for count, queries, keys in ((64, 8, 4096), (16, 4, 1024), (5, 16, 9000), (40, 3, 700)):
        index = plan_cases.paged([queries] * count, rng.integers(keys // 2, keys + 1, count), 16)
        make_plan(plan_cases.spec(32, kv_heads, right=0, head_dim=128), index, traits)
    assert len(both) == 36


def test_same_plans_of_mixed_batches(both):
    """Prompts beside decode steps on an H200: workers that begin late, a team's workers spread over the machine."""
    rng = np.random.default_rng(11)
    staggered = 0
    for kv_heads in (8, 2):
        spec = AttentionSpec(num_qo_heads=32, num_kv_heads=kv_heads, head_dim=128, q_dtype="bfloat16")
        traits = traits_for(spec, 132, "batch", hopper=True)
        for prompts, length, decodes, keys in (
            (2, 2048, 128, 2048),
            (1, 1024, 64, 4096),
            (4, 3000, 64, 3000),
            (1, 900, 40, 9000),
            (6, 500, 7, 700),
        ):
            for low in (1.0, 0.1):
                lengths = rng.integers(int(low * length), length + 1, prompts)
                others = rng.integers(int(low * keys), keys + 1, decodes)
                index = plan_cases.paged([*lengths, *[1] * decodes], [*lengths, *others], 16)
                plan = make_plan(plan_cases.spec(32, kv_heads, right=0, head_dim=128), index, traits)
                items = np.concatenate([[0], np.cumsum(plan.work["cost"], dtype=np.int64)])
                loads = np.diff(items[plan.work.worker_indptr[: 4 * 132 + 1]]).reshape(4, 132).sum(0)
                staggered += int(loads[:20].sum() > 2 * loads[-20:].sum() > 0)
    assert len(both) == 20 and staggered >= 5


def test_costs_that_are_no_dyadic_numbers(both):
    rng = np.random.default_rng(5)
    index = plan_cases.paged(np.ones(200, np.int32), rng.integers(1, 9000, 200), 16)
    for seed in range(5):
        alpha, beta, rows, fixed = np.random.default_rng(seed).random(4).tolist()
        numbers = {"alpha": alpha, "beta": beta, "beta_rows": rows, "fixed": fixed}
        make_plan(plan_cases.spec(32, 8), index, plan_cases.traits(17, leaf=100, **numbers))
    assert len(both) == 5


def test_bound_lengths_keep_what_shorter_requests_may_see(both):
    index = plan_cases.paged([1, 4], [900, 700], 16)
    requests = plan_cases.replace(index.requests, bound_kv_lens=object())
    shorter = trusted(plan_cases.replace(index, requests=requests))
    bound = make_plan(plan_cases.spec(left=64, right=0), shorter, plan_cases.traits(1))
    assert (bound.work["kv_begin"].min() == 0) and set(bound.work["kv_end"]) == {900, 700}
    exact = make_plan(plan_cases.spec(left=64, right=0), index, plan_cases.traits(1))
    assert set(exact.work["kv_begin"]) == {899 - 64, 696 - 64}


@pytest.mark.parametrize(
    "broken",
    [
        {"request": [0, 0, 2]},
        {"request": [0, -1, 1]},
        {"qo_index": [0, 1, 3]},
        {"qo_index": [-1, 1, 2]},
        {"qo_indptr": [0, 3, 2]},
        {"qo_indptr": [0, 1, 9]},
        {"qo_indptr": [1, 2, 3]},
    ],
)
def test_an_index_that_points_outside_is_refused(broken):
    index = plan_cases.paged([1, 2], [9, 20])
    arrays = {name: np.asarray(values, np.int32) for name, values in broken.items()}
    with pytest.raises(PlanError) as caught:  # what check() would have refused
        make_plan(plan_cases.spec(), trusted(plan_cases.replace(index, **arrays)), plan_cases.traits())
    assert caught.value.label == "index"


def test_threads_do_not_share_scratch():
    cases_of = [plan_cases.paged([1] * n, [100 * (i + 1)] * n, 16) for i, n in enumerate((1, 7, 40, 300))]
    want = [make_plan(plan_cases.spec(), index, Traits.of("h200")).digest for index in cases_of]

    def work(i):
        return [make_plan(plan_cases.spec(), cases_of[i % 4], Traits.of("h200")).digest for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for i, digests in enumerate(pool.map(work, range(8))):
            assert set(digests) == {want[i % 4]}
