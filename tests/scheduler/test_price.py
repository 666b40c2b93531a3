# SPDX-License-Identifier: Apache-2.0
"""Shared keys are read once where that pays, by the traits' prices: never slower than the flat form, in simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
from attnrt.backends.cuda import tables
from attnrt.scheduler import price as pricing
from attnrt.scheduler.price import price
from attnrt.scheduler.verify import verify_plan


def spec(kv_heads):
    return at.AttentionSpec(
        num_qo_heads=32, num_kv_heads=kv_heads, head_dim=128, q_dtype="bfloat16", variant=at.variants.causal()
    )


def shared(rows, prefix, suffix=128, page=16):
    """Requests of one query that begin with the same pages."""
    common, own = prefix // page, -(-(prefix % page + suffix) // page)
    pages = [[*range(common), *range(common + i * own, common + (i + 1) * own)] for i in range(rows)]
    indptr = np.arange(rows + 1, dtype=np.int32) * (common + own)
    lens = np.full(rows, prefix + suffix, np.int32)
    ids = np.concatenate(pages).astype(np.int32)
    flat = at.formats.paged(np.arange(rows + 1, dtype=np.int32), indptr, ids, lens, page)
    return flat, at.formats.share(flat)


def traits_of(s):
    return tables.traits_for(s, 132, "batch", True)


def same_work(a, b):
    return np.array_equal(a.work.items, b.work.items) and np.array_equal(a.merge.rows, b.merge.rows)


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("rows", [2, 16, 64])
@pytest.mark.parametrize("prefix", [128, 1000, 5000, 20011, 32768])
def test_never_slower_than_flat(rows, prefix, kv_heads, monkeypatch):
    s = spec(kv_heads)
    traits = replace(traits_of(s), repeated=1.0)  # the simulated time knows no cache
    flat, index = shared(rows, prefix)
    plan, alone = at.make_plan(s, index, traits), at.make_plan(s, flat, traits)
    monkeypatch.setattr(pricing, "MARGIN", 0.0)  # whether or not it pays
    always = at.make_plan(s, index, traits)
    verify_plan(plan)
    assert same_work(plan, alone) or same_work(plan, always)
    assert price(plan) <= 1.03 * price(alone)
    assert price(plan) <= 1.25 * price(always)  # nor much is given away


def wide_and_other(plan):
    """Lists of the wide team's workers and of the others: how many items each has."""
    counts = np.diff(plan.work.worker_indptr)
    first, end = plan.traits.workers_of(tables.WIDE)
    return counts[first:end], counts[:first]


@pytest.mark.parametrize(("rows", "kv_heads", "count"), [(16, 8, 32), (64, 32, 132), (24, 8, 48)])
def test_workers_beside_a_team_lie_on_few_multiprocessors(rows, kv_heads, count):
    """Four to each, so that the team finds the others free; not where that would be more than half of all."""
    wide, other = wide_and_other(
        at.make_plan(spec(kv_heads), shared(rows, 8192)[1], traits_of(spec(kv_heads)))
    )
    assert wide.any() and len({w % 132 for w in np.flatnonzero(other)}) == count


def test_workers_with_much_to_do_stay_apart():
    """A draft beside long decode steps: sharing multiprocessors would cost them more than it gives the team."""
    s = spec(8)
    kv = np.array([300] + [8192] * 16, np.int32)
    qo = np.array([0, 16, *range(17, 33)], np.int32)
    indptr = np.concatenate([[0], np.cumsum(-(-kv // 16))]).astype(np.int32)
    index = at.formats.paged(qo, indptr, np.arange(indptr[-1], dtype=np.int32), kv, 16)
    wide, other = wide_and_other(at.make_plan(s, index, traits_of(s)))
    assert wide.any() and len({w % 132 for w in np.flatnonzero(other)}) > 64


def test_a_team_without_items_moves_nobody():
    s = spec(8)
    flat, index = shared(16, 1000)
    plan = at.make_plan(s, index, traits_of(s))
    assert same_work(plan, at.make_plan(s, flat, traits_of(s))) and not wide_and_other(plan)[0].any()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("prefix", [5000, 20011, 32768])
def test_wide_items_are_one_for_each_worker(rows, prefix):
    """Where runs of Algorithm 1 would be a few more than there are workers, longer ones are taken."""
    wide, _ = wide_and_other(at.make_plan(spec(32), shared(rows, prefix)[1], traits_of(spec(32))))
    assert wide.max() == 1


@pytest.mark.parametrize("prefix", [5000, 20011])
def test_ends_of_leaves_count(prefix):
    """Where they have a price, items get equal costs and not equal numbers of keys: the longest takes less time."""
    s, index = spec(32), shared(64, prefix)[1]
    priced = traits_of(s)
    free = replace(priced, teams=tuple(replace(team, stored=0.0, folded=0.0) for team in priced.teams))
    longest = []
    for traits in (priced, free):
        work = at.make_plan(s, index, traits).work
        first, end = traits.workers_of(tables.WIDE)
        own = slice(work.worker_indptr[first], work.worker_indptr[end])
        leaves = work["leaf_end"][own] - work["leaf_begin"][own]
        price = np.where(work["fold"][own] == 1, tables.LEAF_FOLDED, tables.LEAF_STORED)
        longest.append((work["kv_end"][own] - work["kv_begin"][own] + leaves * price).max())
        assert len(leaves) <= end - first
    assert longest[0] < 0.95 * longest[1]


def test_what_decides():
    """Many rows over a long prefix share it; a short one is left to its requests, unless a launch costs nothing."""
    s = spec(8)
    traits = traits_of(s)
    for prefix, shares in ((256, False), (32768, True)):
        flat, index = shared(64, prefix)
        assert same_work(at.make_plan(s, index, traits), at.make_plan(s, flat, traits)) != shares
        free = at.make_plan(s, index, replace(traits, launch=0.0))
        assert not same_work(free, at.make_plan(s, flat, traits))
    assert index.flat is flat
    tree = at.formats.tree(index, np.zeros(64, np.int32) - 1)
    assert tree.flat is None  # who changes the parts has no flat form of them


@pytest.mark.parametrize("scheduler", ["lpt", at.scheduler.assign.LPT()])
def test_both_planners_decide_alike(scheduler):
    s = spec(8)
    for prefix in (256, 32768):
        _, index = shared(16, prefix)
        plan = at.make_plan(s, index, traits_of(s), scheduler=scheduler)
        assert (len(plan.parts) > 1) == (prefix > 256)
