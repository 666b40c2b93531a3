# SPDX-License-Identifier: Apache-2.0
"""Alignment in C++ gives the parts and limits of the readable form, byte for byte."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import plan_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cases, cut_levels, replace

from attnrt import formats
from attnrt.errors import AttnrtError, PlanError, UnsupportedError
from attnrt.formats.base import HOLE, BlockSparse, Composite
from attnrt.formats.check import trusted
from attnrt.scheduler import plan as plan_module
from attnrt.scheduler import plan_native
from attnrt.scheduler.align import align
from attnrt.scheduler.align_native import align_native
from attnrt.scheduler.base import Traits
from attnrt.scheduler.plan import make_plan
from attnrt.scheduler.problem import classes_of
from attnrt.scheduler.verify import verify_plan

pytestmark = pytest.mark.skipif(plan_native.lib is None, reason="the planner's module is not built")


def same_values(want, got, name):
    if isinstance(want, np.ndarray):
        assert isinstance(got, np.ndarray) and got.dtype == want.dtype and got.shape == want.shape, name
        assert got.flags.c_contiguous and want.tobytes() == got.tobytes(), name
    elif name in ("indices", "mask", "requests"):  # bound arrays and the requests are the very objects
        assert want is got, name
    else:
        assert want == got and type(want) is type(got), name


def compare(spec, index, traits, *, answered=True):
    """Both forms' alignment of an index, field by field; returns the native one."""
    facts = plan_module._facts.get(id(spec)) or plan_module._new_facts(spec)
    parts = index.parts
    want = align(parts, classes_of(index.requests, traits, facts.group), traits, facts.num_kv_heads)
    got = align_native(parts, facts, traits, index.num_qo)
    assert answered == (got is not None)
    if got is None:
        return None
    assert (want.parts is parts) == (got.parts is parts)
    assert len(want.parts) == len(got.parts) == len(want.limits) == len(got.limits)
    for a, b in zip(want.parts, got.parts, strict=True):
        for field in fields(BlockSparse):
            same_values(getattr(a, field.name), getattr(b, field.name), field.name)
    for a, b in zip(want.limits, got.limits, strict=True):
        assert (a is None) == (b is None)
        for x, y in zip(a or (), b or (), strict=True):
            same_values(x, y, "limits")
    return got


def compare_plans(spec, index, traits, **more):
    """Digests of the plan over either alignment, with and without structs that alignment has filled in."""
    compare(spec, index, traits)
    got = make_plan(spec, index, traits, **more)
    kept, plan_module.align_native = plan_module.align_native, lambda *_: None
    try:
        want = make_plan(spec, index, traits, **more)
    finally:
        plan_module.align_native = kept
    assert got.digest == want.digest
    if index.num_qo < 64:  # more would take many seconds, and equal plans are as right as the readable form's
        verify_plan(got)
    return got


def test_drawn_composites():
    seen = []

    @settings(max_examples=150, deadline=None)
    @given(cases(share=(True,)), st.sampled_from([8, 32, 50]), st.booleans())
    def run(case, leaf, turned):
        index = case.composite
        if turned:
            index = Composite(parts=index.parts[::-1], features=index.features)
        got = compare(case.spec, index, plan_cases.traits(case.workers, leaf=leaf))
        seen.append(got.parts is not index.parts)

    run()
    assert 30 < sum(seen) < len(seen)


def dress(rng, index, kv_heads):
    """The composite with masks, holes, positions of single blocks, moved offsets, in some of its parts."""
    parts = []
    for part in index.parts:
        more = {}
        if rng.random() < 0.4:
            width = 1200
            more["mask"] = rng.integers(0, 256, part.num_qo * width // 8 + 1, dtype=np.uint8)
            more["mask_offset"] = np.where(
                rng.random(len(part.request)) < 0.2, -1, rng.permutation(len(part.request)) * width
            ).astype(np.int64)
            more["mask_begin"] = (part.kv_offset + rng.integers(-40, 200, part.num_rows)).astype(np.int32)
            starts = part.kv_offset + part.kv_begin.reshape(part.num_rows, -1).min(axis=1)
            more["mask_begin"] = np.maximum(more["mask_begin"], starts).astype(np.int32)
        if rng.random() < 0.3 and len(part.indices):
            indices = part.indices.copy()
            indices[rng.random(len(indices)) < 0.1] = HOLE
            more["indices"] = indices
        if rng.random() < 0.3:
            row = np.repeat(np.arange(part.num_rows * part.heads), np.diff(part.indptr)) // part.heads
            step = np.arange(len(row)) - np.repeat(part.indptr[:-1], np.diff(part.indptr))
            positions = part.kv_pos[row] + step * part.block_size[1]
            if rng.random() < 0.7:
                positions = positions + rng.integers(0, 2, len(row)) * 1000
            more.update(kv_pos=None, block_pos=positions.astype(np.int32))
        parts.append(replace(part, **more))
    return Composite(parts=tuple(parts), features=index.features)


def test_masks_holes_and_positions():
    seen = []

    @settings(max_examples=150, deadline=None)
    @given(cases(share=(True,)), st.integers(0, 2**32 - 1), st.sampled_from([32, 64]))
    def run(case, seed, leaf):
        index = dress(np.random.default_rng(seed), case.composite, 2)
        got = compare(case.spec, index, plan_cases.traits(case.workers, leaf=leaf))
        bridges = [
            part for part in got.parts[1:] if part.requests is index.requests and part.mask is not None
        ]
        seen.append(len(bridges))

    run()
    assert sum(map(bool, seen)) > 20


@pytest.mark.parametrize("count", [2, 64, 256])
@pytest.mark.parametrize("prefix", [1000, 1024, 1040])
def test_shared_prefixes(count, prefix):
    rng = np.random.default_rng(count + prefix)
    spec = plan_cases.spec(32, 8, right=0)
    pages = -(-rng.integers(1, 1100, count) // 16)
    head = -(-prefix // 16)
    lists = [np.arange(head)] * count if prefix % 16 == 0 else [np.arange(prefix // 16)] * count
    own = rng.permutation(int(pages.sum())) + head
    ends = np.cumsum(pages)
    lists = [np.concatenate((a, own[e - n : e])) for a, e, n in zip(lists, ends, pages, strict=True)]
    kv_indptr = np.concatenate(([0], np.cumsum([len(x) for x in lists]))).astype(np.int32)
    kv_lens = (np.diff(kv_indptr) * 16 - rng.integers(0, 16, count)).astype(np.int32)
    qo_lens = rng.choice([1, 1, 1, 5, 40], count)
    qo_indptr = np.concatenate(([0], np.cumsum(qo_lens))).astype(np.int32)
    kv_lens = np.maximum(kv_lens, 1)
    flat = formats.paged(qo_indptr, kv_indptr, np.concatenate(lists).astype(np.int32), kv_lens, 16)
    index = formats.share(flat)
    assert len(index.parts) >= 2
    compare_plans(spec, index, Traits.of("h200"))
    compare_plans(spec, index, Traits.of("h200"), tree="pairwise", pad_to=index.num_qo + 3)


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("count", [5, 64])
def test_draft_trees(page_size, sharing, count):
    rng = np.random.default_rng(page_size)
    drafts = 8
    kv_lens = rng.integers(1024, 2049, count).astype(np.int32)
    pages = -(-kv_lens // page_size)
    kv_indptr = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
    indices = rng.permutation(int(kv_indptr[-1])).astype(np.int32)
    if sharing:
        for r in range(1, count):
            indices[kv_indptr[r] : kv_indptr[r] + 700 // page_size] = indices[: 700 // page_size]
    qo_indptr = (np.arange(count + 1) * drafts).astype(np.int32)
    index = formats.paged(qo_indptr, kv_indptr, indices, kv_lens, page_size)
    if sharing:
        index = formats.share(index)
    parents = np.concatenate(
        [[rng.integers(-1, max(1, i)) if i else -1 for i in range(drafts)] for _ in range(count)]
    )
    index = formats.tree(index, parents.astype(np.int32))
    assert len(index.parts) == 2 + sharing
    compare_plans(plan_cases.spec(32, 8, right=0), index, Traits.of("h200"))
    compare_plans(plan_cases.spec(32, 8, left=300, right=0), index, Traits.of("cpu"))


def test_cascades_of_three_levels():
    rng = np.random.default_rng(11)
    for lens in ((600, 300), (1024, 256), (1, 1)):
        flat = plan_cases.paged([1] * 32, (sum(lens) + rng.integers(1, 900, 32)).tolist(), 16, rng=rng)
        groups = [[list(range(32))], [list(range(g, g + 8)) for g in range(0, 32, 8)]]
        index = cut_levels(flat, groups, [[lens[0]], [sum(lens)] * 4])
        compare(plan_cases.spec(32, 8, right=0), index, Traits.of("h200"))


class OnDevice:
    """Stands for a device array."""

    shape = (1000,)


def test_a_bound_mask_stays_or_is_refused_by_the_readable_form():
    flat = plan_cases.paged([1, 1, 1], [300, 290, 310], 4)
    first, second = cut_levels(flat, [[[0, 1, 2]]], [[100]]).parts
    values = dict(mask=OnDevice(), mask_offset=np.arange(3, dtype=np.int64) * 64)
    masked = replace(second, mask_begin=np.full(3, 120, np.int32), **values)
    got = compare(plan_cases.spec(right=0), Composite(parts=(first, masked)), plan_cases.traits(5))
    assert got.parts[2].mask is masked.mask
    masked = replace(first, mask_begin=np.zeros(1, np.int32), **values)
    index = trusted(Composite(parts=(masked, second)))
    spec, traits = plan_cases.spec(right=0), plan_cases.traits(5)
    assert align_native(index.parts, plan_module._new_facts(spec), traits, 3) is None
    with pytest.raises(UnsupportedError):
        make_plan(spec, index, traits)


def test_bound_indices_are_never_read():
    flat = plan_cases.paged([1, 1, 1], [300, 290, 310], 4)
    for end, fits in ((64, True), (100, False)):
        parts = cut_levels(flat, [[[0, 1, 2]]], [[end]]).parts
        index = trusted(Composite(parts=tuple(replace(part, indices=OnDevice()) for part in parts)))
        spec = plan_cases.spec(right=0)
        if fits:
            compare(spec, index, plan_cases.traits(5))
            continue
        with pytest.raises(UnsupportedError):
            make_plan(spec, index, plan_cases.traits(5))


@pytest.mark.parametrize("broken", [{"request": [0, 1, 9]}, {"qo_index": [0, 1, 9]}, {"qo_indptr": [0, 7]}])
def test_a_part_that_points_outside_is_refused(broken):
    flat = plan_cases.paged([1, 1, 1], [300, 290, 310], 4)
    first, second = cut_levels(flat, [[[0, 1, 2]]], [[100]]).parts
    first = replace(first, **{name: np.asarray(x, np.int32) for name, x in broken.items()})
    with pytest.raises(PlanError) as caught:  # what check() would have refused
        make_plan(plan_cases.spec(), trusted(Composite(parts=(first, second))), plan_cases.traits())
    assert caught.value.label == "index"


def test_lists_that_end_outside_their_indices_are_not_read():
    flat = plan_cases.paged([1, 1, 1], [300, 290, 310], 4)
    first, second = cut_levels(flat, [[[0, 1, 2]]], [[100]]).parts
    for part in (replace(first, indices=first.indices[:18]), replace(first, indptr=first.indptr - 40)):
        facts = plan_module._new_facts(plan_cases.spec())
        assert align_native((part, second), facts, plan_cases.traits(5), 3) is None


def test_masks_shorter_than_they_say_are_not_read():
    flat = plan_cases.paged([1, 1, 1], [300, 290, 310], 4)
    first, second = cut_levels(flat, [[[0, 1, 2]]], [[100]]).parts
    values = dict(mask=np.zeros(19, np.uint8), mask_offset=np.arange(3, dtype=np.int64) * 64)
    masked = replace(second, mask_begin=np.full(3, 100, np.int32), **values)
    facts = plan_module._new_facts(plan_cases.spec())
    assert align_native((first, masked), facts, plan_cases.traits(5), 3) is None


def test_slots_past_int32_are_left_to_the_readable_form():
    flat = plan_cases.paged([1, 1, 1], [300, 290, 310], 4)
    first, second = cut_levels(flat, [[[0, 1, 2]]], [[99]]).parts
    high = replace(first, indices=first.indices + np.int32(1 << 29))
    with pytest.raises(AttnrtError):
        make_plan(plan_cases.spec(right=0), Composite(parts=(high, second)), plan_cases.traits(5))


def test_affine_parts():
    """Keys of a contiguous buffer: slots follow from kv_base, and the bridge lists them."""
    flat = plan_cases.paged([1, 2, 1], [300, 290, 310], 1)
    first, second = cut_levels(flat, [[[0, 1, 2]]], [[99]]).parts
    affine = replace(second, indices=None, kv_base=np.asarray([100, 5000, 9000], np.int64))
    got = compare(plan_cases.spec(right=0), Composite(parts=(first, affine)), plan_cases.traits(5))
    assert got.parts[2].indices.max() >= 9000


def test_threads_and_other_plans_between():
    """What alignment leaves for the planner is used once, by the same thread, for the same parts."""
    flats = [plan_cases.paged([1] * n, [300 + n] * n, 4) for n in (3, 5, 9)]
    indexes = [cut_levels(flat, [[list(range(len(flat.requests)))]], [[100]]) for flat in flats]
    specs = [plan_cases.spec(right=0), plan_cases.spec(left=40, right=0)]
    traits = plan_cases.traits(5)
    want = [[make_plan(spec, index, traits).digest for index in indexes] for spec in specs]

    def work(i):
        make_plan(specs[0], flats[i % 3], traits)
        return make_plan(specs[i % 2], indexes[i % 3], traits).digest == want[i % 2][i % 3]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(60)))
