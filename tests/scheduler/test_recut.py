# SPDX-License-Identifier: Apache-2.0
"""A prefix that ends inside a leaf: its last keys stay with the requests' own lists, without a bridge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
from attnrt.backends.cuda import tables
from attnrt.scheduler.base import WORK_FIELDS
from attnrt.scheduler.recut import recut
from attnrt.scheduler.verify import verify_plan

GROUP = 4


def spec():
    return at.AttentionSpec(
        num_qo_heads=8,
        num_kv_heads=8 // GROUP,
        head_dim=128,
        q_dtype="bfloat16",
        variant=at.variants.causal(),
    )


def traits():
    return replace(tables.traits_for(spec(), 132, "batch", True), launch=0.0)  # what is shared stays shared


def shared(prefixes, suffix, qo=1, page=16):
    """Groups of three requests; those of a group begin with the same pages."""
    rng, lists, lens, first = np.random.default_rng(), [], [], 0
    for prefix in prefixes:
        common = list(range(first, first + prefix // page))
        first += len(common)
        for _ in range(3):
            own = -(-(prefix % page + suffix) // page)
            lists.append([*common, *range(first, first + own)])
            first += own
            lens.append(prefix + suffix - int(rng.integers(3)))
    indptr = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int32)
    qo_indptr = np.arange(len(lists) + 1, dtype=np.int32) * qo
    ids = np.concatenate(lists).astype(np.int32)
    return at.formats.paged(qo_indptr, indptr, ids, np.array(lens, np.int32), page)


def columns(plan, *names):
    return [plan.work.items[:, WORK_FIELDS.index(name)] for name in names]


@pytest.mark.parametrize("suffix", [16, 128, 700])
def test_cuts_lie_at_leaf_boundaries(suffix):
    s, t = spec(), traits()
    prefixes = [1000, 1024, 5000, 3999]
    index = at.formats.share(shared(prefixes, suffix))
    assert len(index.parts) == 2
    parts = recut(index, t, GROUP)
    assert sorted(parts[0].kv_end.tolist()) == [896, 1024, 3840, 4608]
    assert parts[1].kv_begin.tolist() == np.repeat([896, 1024, 4608, 3840], 3).tolist()
    assert recut(index, t, GROUP) is parts
    plan = at.make_plan(s, index, t)
    verify_plan(plan)
    assert len(plan.parts) == 2
    # The same leaves as with a bridge, in fewer items.
    bridged = at.make_plan(s, replace(index, flat=None), t)
    assert len(bridged.parts) > 2 and len(plan.work) <= len(bridged.work)
    assert np.array_equal(plan.merge.rows[:, 0], bridged.merge.rows[:, 0])


def test_a_prefix_shorter_than_a_leaf_is_not_shared():
    s, t = spec(), traits()
    index = at.formats.share(shared([120], 30))
    plan = at.make_plan(s, index, t)
    verify_plan(plan)
    (part,) = columns(plan, "part")
    assert set(part.tolist()) == {1}


def test_what_is_left_to_bridges():
    """Lists of another builder, and sharers of two classes."""
    t = traits()
    index = at.formats.share(shared([1000], 128))
    assert recut(replace(index, flat=None), t, GROUP) is index.parts
    other = replace(index.flat, indices=index.flat.indices.copy())
    assert recut(replace(index, flat=other), t, GROUP) is index.parts
    flat = shared([1000], 128)
    qo_indptr = np.array([0, 1, 2, 22], np.int32)  # 20 * GROUP rows are no decode step
    mixed = at.formats.share(
        at.formats.paged(qo_indptr, flat.indptr, flat.indices, flat.requests.kv_lens, 16)
    )
    assert recut(mixed, t, GROUP)[0].kv_end.tolist() == mixed.parts[0].kv_end.tolist()
    plan = at.make_plan(spec(), mixed, t)
    verify_plan(plan)
