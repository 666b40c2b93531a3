# SPDX-License-Identifier: Apache-2.0
"""Cuts between parts move to leaf boundaries; lists, heads, masks and positions survive."""

from __future__ import annotations

import numpy as np
import plan_cases
import pytest
from plan_cases import replace

from attnrt.errors import UnsupportedError
from attnrt.formats.base import HOLE, Composite
from attnrt.formats.check import trusted
from attnrt.scheduler.plan import make_plan
from attnrt.scheduler.verify import verify_plan


def shared(end, qo_lens=(1, 1, 1), kv_lens=(300, 290, 310), page_size=4, heads=1):
    flat = plan_cases.paged(list(qo_lens), list(kv_lens), page_size, heads=heads)
    indices = flat.indices.copy()
    pages = -(-end // page_size)
    for r in range(1, len(qo_lens)):
        for h in range(heads):
            at = flat.indptr[r * heads + h]
            indices[at : at + pages] = indices[flat.indptr[h] : flat.indptr[h] + pages]
    flat = replace(flat, indices=indices)
    return flat, plan_cases.cut_levels(flat, [[list(range(len(qo_lens)))]], [[end]])


def plan_of(index, **more):
    """A plan of parts as they are: their features and device arrays are as real as alignment looks at."""
    plan = make_plan(plan_cases.spec(right=0), trusted(index), plan_cases.traits(5), **more)
    verify_plan(plan)
    return plan


def test_a_cut_on_a_boundary_stays():
    _, index = shared(64)
    assert plan_of(index).parts is index.parts


@pytest.mark.parametrize(("end", "size"), [(100, 4), (99, 1)])
def test_a_cut_inside_a_leaf_gets_a_bridge(end, size):
    """64-key steps: leaf [64, 128) straddles 99 and 100; at 100 both sides meet at a page's edge, so pages are listed."""
    _, index = shared(end)
    plan = plan_of(index)
    bridge = plan.parts[2]
    assert bridge.block_size == (1, size)
    assert [part.kv_end.max() for part in plan.parts[:1]] == [64]
    low = bridge.kv_offset + bridge.kv_begin
    assert low.tolist() == [64] * 3 and (bridge.kv_offset + bridge.kv_end).tolist() == [128] * 3
    assert (plan.parts[1].kv_offset + plan.parts[1].kv_begin).tolist() == [128] * 3


def test_one_leaf_takes_all_into_lists_of_its_own():
    _, index = shared(100, qo_lens=(40, 1, 1))
    plan = plan_of(index)
    prefill = np.flatnonzero(plan.work["klass"] == 2)
    assert {int(p) for p in plan.work["part"][prefill]} == {2}
    assert set(plan.work["kv_begin"][prefill].tolist()) == {0}
    assert 40 not in plan.parts[0].request  # decode rows alone are left in the shared part
    assert set(plan.parts[0].request.tolist()) == {1, 2}


def test_a_shared_part_may_vanish():
    _, index = shared(20, qo_lens=(20, 20, 20))
    plan = plan_of(index)
    assert len(plan.parts) == 1 and plan.num_slots == 0


def test_lists_per_head():
    for end in (64, 99, 100):
        _, index = shared(end, heads=2)
        assert plan_of(index).parts[-1].heads == 2


def test_heads_that_end_apart():
    """Each head has a cut of its own; the shorter list is padded with holes so that both share offsets."""
    flat, index = shared(100, heads=2)
    first, second = index.parts
    ends = first.kv_end.copy()
    ends[1] = 90
    pages, at = second.indices, second.indptr
    lists, begin, end = [], [], []
    for r in range(3):
        for h in range(2):
            lists.append(flat.indices[flat.indptr[2 * r + h] + 22 : flat.indptr[2 * r + h + 1]])
            begin.append((100 if h == 0 else 90) - 88)
            end.append(int(flat.kv_end[2 * r + h]) - 88)
    assert len(pages) < sum(map(len, lists)) and len(at) == 7
    second = replace(
        second,
        indices=np.concatenate(lists),
        indptr=np.concatenate(([0], np.cumsum([len(x) for x in lists]))).astype(np.int32),
        kv_begin=np.asarray(begin, np.int32),
        kv_end=np.asarray(end, np.int32),
        kv_offset=np.full(3, 88, np.int32),
        kv_pos=np.full(3, 88, np.int32),
    )
    first = replace(first, kv_end=ends)
    plan = plan_of(Composite(parts=(first, second)))
    assert len(plan.parts) == 3


def test_positions_that_are_not_affine():
    flat, index = shared(100)
    first, second = index.parts
    block_pos = (np.arange(len(second.indices)) * 4 + 1000).astype(np.int32)
    index = Composite(parts=(first, replace(second, kv_pos=None, block_pos=block_pos)))
    plan = plan_of(index)
    bridge = plan.parts[2]
    assert bridge.kv_pos is None and bridge.block_pos is not None and flat.num_qo == 3


def test_holes_stay_holes():
    _, index = shared(99)
    first, second = index.parts
    indices = first.indices.copy()
    indices[20] = HOLE
    plan = plan_of(Composite(parts=(replace(first, indices=indices), second)))
    bridge = plan.parts[2]
    assert (bridge.indices.reshape(3, 64)[:, 16:20] == HOLE).all() and (bridge.indices >= 0).sum() == 3 * 60


@pytest.mark.parametrize("in_first", [False, True])
def test_masks_are_packed_anew(in_first):
    rng = np.random.default_rng(3)
    _, index = shared(99, qo_lens=(2, 2, 2))
    parts = list(index.parts)
    which = 0 if in_first else 1
    part = parts[which]
    begin = np.full(part.num_rows, 10 if in_first else 110, np.int32)
    bits = rng.integers(0, 2, 6 * 400).astype(bool)
    offsets = np.arange(6, dtype=np.int64) * 400
    offsets[1] = -1
    parts[which] = replace(
        part, mask=np.packbits(bits, bitorder="little"), mask_offset=offsets, mask_begin=begin
    )
    plan = plan_of(Composite(parts=tuple(parts)))
    bridge = plan.parts[2]
    got = np.unpackbits(bridge.mask, bitorder="little")
    places = {int(row): q for q, row in enumerate(parts[which].qo_index)}
    for row in range(bridge.num_rows):
        for q in range(bridge.qo_indptr[row], bridge.qo_indptr[row + 1]):
            source = places[int(bridge.qo_index[q])]
            for offset in range(64, 128):
                want = 1
                inside = offset < 99 if in_first else offset >= 99
                if inside and offset >= begin[0] and offsets[source] >= 0:
                    want = int(bits[offsets[source] + offset - begin[0]])
                assert got[bridge.mask_offset[q] + offset - bridge.mask_begin[row]] == want


class OnDevice:
    """Stands for a device array: the planner may not look inside."""

    shape = (1000,)


def test_bound_indices_need_aligned_cuts():
    _, index = shared(64)
    bound = Composite(parts=tuple(replace(part, indices=OnDevice()) for part in index.parts))
    plan_of(bound)
    _, index = shared(100)
    bound = Composite(parts=(index.parts[0], replace(index.parts[1], indices=OnDevice())))
    with pytest.raises(UnsupportedError) as caught:
        plan_of(bound)
    assert "leaf boundaries" in caught.value.hint


def test_a_bound_mask_is_kept_where_it_alone_speaks():
    _, index = shared(100)
    first, second = index.parts
    mask = OnDevice()
    masked = replace(
        second, mask=mask, mask_offset=np.arange(3, dtype=np.int64) * 64, mask_begin=np.full(3, 120, np.int32)
    )
    bridge = plan_of(Composite(parts=(first, masked))).parts[2]
    assert (
        bridge.mask is mask
        and bridge.mask_offset.tolist() == [0, 64, 128]
        and bridge.mask_begin.tolist() == [120] * 3
    )
    with pytest.raises(UnsupportedError):
        plan_of(
            Composite(
                parts=(
                    replace(
                        first, mask=mask, mask_offset=np.zeros(3, np.int64), mask_begin=np.zeros(1, np.int32)
                    ),
                    second,
                )
            )
        )


def test_mixed_classes_in_a_row_keep_their_own_rulers():
    _, index = shared(200, qo_lens=(1, 6, 1, 12, 1), kv_lens=(300, 290, 310, 305, 260))
    plan = plan_of(index)
    kinds = plan.work["klass"][plan.work["part"] == 0]
    assert set(kinds.tolist()) == {0, 1}


def test_order_of_parts_does_not_matter():
    flat, index = shared(99)
    a, b = plan_of(index), plan_of(Composite(parts=index.parts[::-1]))
    assert sorted(a.merge.leaves.tolist()) == sorted(b.merge.leaves.tolist()) and flat.num_qo == 3


def test_a_list_of_all_heads_before_lists_per_head():
    """Head 1 has no keys behind the shared list; the leaf that the cut straddles moves for both heads alike."""
    flat, index = shared(100, qo_lens=(1, 1), kv_lens=(300, 310))
    first, second = index.parts
    lists, begin, end = [], [], []
    for r in range(2):
        lists += [second.indices[second.indptr[r] : second.indptr[r + 1]], second.indices[:0]]
        begin += [int(second.kv_begin[r]), 0]
        end += [int(second.kv_end[r]), 0]
    second = replace(
        second,
        heads=2,
        indices=np.concatenate(lists),
        indptr=np.concatenate(([0], np.cumsum([len(x) for x in lists]))).astype(np.int32),
        kv_begin=np.asarray(begin, np.int32),
        kv_end=np.asarray(end, np.int32),
    )
    plan = plan_of(Composite(parts=(first, second)))
    bridge = plan.parts[2]
    assert bridge.heads == 2 and (bridge.kv_offset[0] + bridge.kv_end[:2]).tolist() == [128, 100]
    assert plan.parts[0].kv_end.tolist() == [64] and flat.num_qo == 2


@pytest.mark.parametrize("levels", [1, 2])
def test_three_levels_in_one_pool(levels):
    """16, 8 and 3 tokens, page 4, batch 4 in 2 groups: the leaves of the flat index."""
    flat = plan_cases.paged([1] * 4, [27] * 4, 4)
    indices = flat.indices.reshape(4, 7).copy()
    indices[1:, :4] = indices[0, :4]
    indices[1, 4:6], indices[3, 4:6] = indices[0, 4:6], indices[2, 4:6]
    flat = replace(flat, indices=indices.reshape(-1))
    groups, ends = [[[0, 1, 2, 3]], [[0, 1], [2, 3]]], [[16], [24, 24]]
    index = plan_cases.cut_levels(flat, groups[:levels], ends[:levels])
    small = plan_cases.traits(3, leaf=8)
    plan = make_plan(plan_cases.spec(right=0), index, small)
    verify_plan(plan)
    assert (plan.parts is index.parts) == (
        levels == 1
    )  # leaves end at 8, 16, 32: a cut at 16 stays, one at 24 does not
    uneven = plan_cases.cut_levels(flat, groups[:levels], [[e - 3 for e in row] for row in ends[:levels]])
    verify_plan(make_plan(plan_cases.spec(right=0), uneven, small))
