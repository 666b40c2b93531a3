# SPDX-License-Identifier: Apache-2.0
"""Ranges of host masks hold every bit, and plans that end where masks do still cover what queries see; both planners agree."""

from __future__ import annotations

import numpy as np
import plan_cases
import pytest
from test_plan_native import both  # noqa: F401  (a fixture)

import attnrt as at
from attnrt.scheduler import plan_native
from attnrt.scheduler.mask_range import mask_range
from attnrt.scheduler.plan import make_plan
from attnrt.scheduler.verify import verify_plan

pytestmark = pytest.mark.skipif(plan_native.lib is None, reason="the planner's module is not built")


def batch(rng, count=4):
    """Requests with bands, triangles, random bits and nothing at all; some with keys that the mask does not speak of."""
    qo = rng.integers(1, 60, count).astype(np.int32)
    kv = (qo + rng.integers(0, 200, count)).astype(np.int32)
    begin = np.where(rng.random(count) < 0.5, 0, rng.integers(0, kv + 1)).astype(np.int32)
    masks = []
    for n, keys, b in zip(qo, kv, begin, strict=True):
        place, query = np.arange(b, keys)[None, :], np.arange(n)[:, None] + keys - n
        low, high = rng.choice([0, 20, 300], 2)
        bits = (place <= query + high) & (place >= query - low)
        masks.append(bits & (rng.random(bits.shape) < rng.choice([0.0, 0.1, 1.0])))
    qo_indptr, indptr = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (qo, kv))
    index = at.formats.tree(at.formats.ragged(qo_indptr, indptr), mask=masks, mask_begin=begin)
    return index, masks, begin


def test_ranges_hold_every_bit():
    rng = np.random.default_rng()
    for _ in range(20):
        index, masks, begin = batch(rng)
        part = index.parts[0] if hasattr(index, "parts") else index
        lo, hi = mask_range(part)
        query = 0
        for bits, b in zip(masks, begin, strict=True):
            for row in bits:
                seen = np.concatenate([np.ones(b, bool), row]).nonzero()[0]
                if len(row):
                    assert not len(seen) or (lo[query] <= seen[0] and seen[-1] < hi[query])
                    most = b + len(row) if not len(seen) else max(b + 8 * ((seen[-1] - b) // 8 + 1), b)
                    assert hi[query] <= most
                query += 1


def test_both_planners_end_where_masks_do(both):  # noqa: F811
    rng = np.random.default_rng()
    for _ in range(10):
        index, *_ = batch(rng)
        verify_plan(make_plan(plan_cases.spec(), index, plan_cases.traits()))
        # A window and a mask take away keys of each query together, not of a tile's queries one after the other.
        for left in (0, 30):
            verify_plan(make_plan(plan_cases.spec(left=left, right=0), index, plan_cases.traits()))
    # Parts of which alignment leaves one, because the other has no keys.
    flat = at.formats.paged([0, 5, 6], [0, 10, 20], np.arange(20), [160, 160], 16)
    empty = at.formats.paged([0, 6], [0, 0], [], [0], 8)
    masked = at.formats.tree(flat, mask=[np.tile(np.arange(160) >= 100, (n, 1)) for n in (5, 1)])
    index = at.formats.concat(masked, at.formats.shared_prefix(empty, flat))
    plan = make_plan(plan_cases.spec(), index, plan_cases.traits())
    assert len(index.parts) == 2 and len(plan.parts) == 1 and 96 in plan.work["kv_begin"]
    verify_plan(plan)
    assert both


def test_drafts_that_nobody_sees_need_not_be_covered():
    """A tree is planned over its pages where no key's position is asked for; what its mask hides from all is then left out."""
    pages = at.formats.paged([0, 2, 3], [0, 3, 5], [3, 0, 1, 2, 4], [40, 20], 16)
    hidden = [np.array([[1, 0], [1, 0]], bool), np.zeros((1, 1), bool)]
    spec = at.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    for mask in (hidden, [np.zeros((2, 2), bool), np.ones((1, 1), bool)]):
        index = at.formats.tree(pages, [-1, 0, -1], mask=mask)
        for workers in (1, 132):
            verify_plan(make_plan(spec, index, plan_cases.traits(workers)))
            verify_plan(make_plan(spec, index, at.Traits.of("h200", workers)))


def test_a_triangle_costs_half():
    n = 512
    spec, traits = plan_cases.spec(), plan_cases.traits()
    square = at.formats.ragged([0, n], [0, n])
    triangle = at.formats.tree(square, mask=[np.tril(np.ones((n, n), bool))])
    keys = [
        int(((p.work["kv_end"] - p.work["kv_begin"]) * (p.work["q_end"] - p.work["q_begin"])).sum())
        for p in (make_plan(spec, index, traits) for index in (square, triangle))
    ]
    assert 0.5 * keys[0] <= keys[1] < 0.6 * keys[0]


def test_drafts_past_a_query_need_not_be_covered():
    """Positions of a chain of drafts follow by one, so the list that the planner makes of its leaf is cut where a query's end."""
    pages = at.formats.paged([0, 9], [0, 6], np.arange(6), [87], 16)
    index = at.formats.tree(pages, np.arange(9) - 1, mask=[np.ones((9, 9), bool)])
    spec = at.AttentionSpec(num_qo_heads=14, num_kv_heads=2, head_dim=64, variant=at.variants.causal())
    for traits in (plan_cases.traits(1, q_tile=1), at.Traits.of("cpu", 1)):
        verify_plan(make_plan(spec, index, traits))
