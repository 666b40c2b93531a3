# SPDX-License-Identifier: Apache-2.0
"""Memory: what is counted is what is bound, limits hold before anything is written, sharing."""

from __future__ import annotations

import itertools
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.layout import PART_FIELDS, limit_part_sizes, offsets
from attnrt.memory import ALIGN

sys.path.insert(0, str(Path(__file__).parent))
from small_batches import LIMITS, batch_of, spec_of

v = at.variants


# ------------------------------------------------------------------------------------------------- layout


def test_counted_is_bound(backend):
    """nbytes allocates nothing and is what the workspace takes; a buffer of that size is enough, one byte less is not."""
    specs = [spec_of(), spec_of(head_dim=32), spec_of(q_dtype="bfloat16")]
    total = at.Workspace.nbytes(specs, LIMITS, backend=backend)
    assert at.Workspace(specs, LIMITS, backend=backend).report()["nbytes"] == total
    ws = at.Workspace(specs, LIMITS, buffer=np.empty(total, np.uint8), backend=backend)
    assert ws.report()["nbytes"] == total
    with pytest.raises(at.LimitError) as caught:
        at.Workspace(specs, LIMITS, buffer=np.empty(total - 1, np.uint8), backend=backend)
    assert (caught.value.limit, caught.value.needed, caught.value.given) == ("buffer", total, total - 1)


def test_slots_are_aligned_and_disjoint(backend):
    ws = at.Workspace([spec_of(), spec_of(head_dim=24)], LIMITS, backend=backend)
    attn = at.Attention(ws.tenants[0].spec, backend=backend, workspace=ws)
    batch = batch_of(attn.spec, [1, 3], [30, 9])
    attn.plan(batch.index)
    loaded = attn._runtime.tenant.loaded
    views = [getattr(loaded, f.name) for f in fields(loaded) if f.name not in ("plan", "parts")]
    views += [getattr(part, f.name) for part in loaded.parts for f in fields(part)]
    spans = sorted((x.ptr, x.nbytes) for x in views if isinstance(x, at.TensorView) and x.nbytes)
    assert all(ptr % ALIGN == 0 for ptr, _ in spans)
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans)), "slots overlap"


def test_guard_words_stay(backend):
    """Loads and runs at the limits write nothing around the buffer."""
    spec = spec_of()
    total = at.Workspace.nbytes([spec], LIMITS, backend=backend)
    block = np.full(total + 2 * 4096, 0x7F, np.uint8)
    ws = at.Workspace([spec], LIMITS, buffer=block[4096:-4096], backend=backend)
    attn = at.Attention(spec, backend=backend, workspace=ws)
    for qo, kv in (([3, 3, 3, 3], [64, 64, 64, 64]), ([1], [300]), ([], [])):
        batch = batch_of(spec, qo, kv)
        plan = attn.plan(batch.index)
        out, lse = attn.run(batch.q, batch.kv, return_lse=True)
        testing.check(plan, batch.q, batch.kv, out, lse)
    assert (block[:4096] == 0x7F).all() and (block[-4096:] == 0x7F).all()


def test_totals_over_parts_fit():
    """Dividing the listed blocks among parts in any way stays inside the layout counted for the limits."""
    limits = at.Limits(4, 10, 100, max_parts=3, max_mask_bytes=700)
    rng = np.random.default_rng(0)
    counted = offsets([n for p in range(3) for n in limit_part_sizes(limits, 2, p == 0)])[1]
    names = list(PART_FIELDS)
    for _ in range(200):
        cuts, masks = (np.sort(rng.integers(0, top + 1, 2)) for top in (100, 700))
        sizes = []
        for p in range(3):
            entries = int(np.diff([0, *cuts, 100])[p])
            mask = int(np.diff([0, *masks, 700])[p])
            one = dict(zip(names, limit_part_sizes(limits, 2, p == 0), strict=True))
            sizes += list((one | {"indices": 4 * entries, "block_pos": 4 * entries, "mask": mask}).values())
        assert offsets(sizes)[1] <= counted


def test_partials_follow_the_backend():
    """The reference keeps float64 states, every other backend float32."""
    spec = spec_of()
    reference = at.Workspace([spec], LIMITS, backend="reference").tenants[0].layout
    assert reference.acc == 40 * 4 * 16 * 8


# ------------------------------------------------------------------------------------------------- limits


PAST = {
    "max_requests": ([1] * 5, [4] * 5, {}),
    "max_qo_tokens": ([13], [40], {}),
    "max_index_entries": ([1], [81 * 4], {}),
    "num_pages": ([1], [40], {"spare": 400}),
}


@pytest.mark.parametrize("name", PAST)
def test_limits_are_named_and_nothing_is_written(backend, name):
    spec = spec_of()
    qo, kv, layout = PAST[name]
    total = at.Workspace.nbytes([spec], LIMITS, backend=backend)
    memory_of_ours = np.zeros(total, np.uint8)
    ws = at.Workspace([spec], LIMITS, buffer=memory_of_ours, backend=backend)
    attn = at.Attention(spec, backend=backend, workspace=ws)
    good = batch_of(spec, [2, 1], [30, 8])
    plan = attn.plan(good.index)
    want = attn.run(good.q, good.kv)
    before = memory_of_ours.tobytes()
    bad = batch_of(spec, qo, kv, **layout)
    with pytest.raises(at.LimitError) as caught:
        attn.plan(bad.index)
    assert caught.value.limit == name and caught.value.needed > caught.value.given
    with pytest.raises(at.LimitError):
        attn.load(at.make_plan(spec, bad.index, attn._runtime.machine.traits(bad.index.features)))
    assert memory_of_ours.tobytes() == before, "something was written"
    assert attn.run(good.q, good.kv, plan=plan).tobytes() == want.tobytes()


def test_pad_to_counts_as_rows(backend):
    attn = at.Attention(spec_of(), backend=backend, limits=LIMITS)
    batch = batch_of(attn.spec, [2], [9])
    with pytest.raises(at.LimitError, match="max_qo_tokens"):
        attn.plan(batch.index, pad_to=13)
    attn.plan(batch.index, pad_to=12)


def test_a_plan_of_more_workers_is_refused(backend):
    limits = at.Limits(4, 12, 200, max_workers=1)
    attn = at.Attention(spec_of(), backend=backend, limits=limits)
    batch = batch_of(attn.spec, [1, 1], [700, 30])
    wide = at.make_plan(attn.spec, batch.index, attn._runtime.machine.traits(batch.index.features))
    if len(wide.work.worker_indptr) > 2:
        with pytest.raises(at.LimitError, match="max_workers"):
            attn.load(wide)
    assert len(attn.plan(batch.index).work.worker_indptr) == 2


@pytest.mark.parametrize("bad", [-1, 1.5, "8", None, True])
def test_limits_are_checked(bad):
    with pytest.raises(at.ArgumentError, match=r"limits\.max_requests"):
        at.Limits(bad, 1, 1)


def test_limits_read():
    assert at.Limits(np.int64(3), 4, 5).max_requests == 3
    with pytest.raises(at.ArgumentError, match="max_parts"):
        at.Limits(1, 1, 1, max_parts=0)
    with pytest.raises(at.ArgumentError, match="kv_alignment must be a power of two"):
        at.Limits(1, 1, 1, kv_alignment=24)
    with pytest.raises(at.ArgumentError, match=r"limits\.min_qo_len must be at most max_qo_len, 1; got 3"):
        at.Limits(1, 1, 1, max_qo_len=1, min_qo_len=3)
    assert at.Limits(1, 1, 1, max_qo_len=3, min_qo_len=3).min_qo_len == 3
    with pytest.raises(at.ArgumentError, match="limits must be given with buffer"):
        at.Workspace([spec_of()], buffer=np.empty(10, np.uint8), backend="reference")


def test_rows_of_padding(backend):
    attn = at.Attention(spec_of(), backend=backend, limits=at.Limits(2, 9, 200, max_padding=2))
    index = at.formats.ragged(np.array([0, 2, 5], np.int32), np.array([0, 41, 110], np.int32))
    attn.plan(index, pad_to=7)
    with pytest.raises(at.LimitError, match="max_padding must be at least 3"):
        attn.plan(index, pad_to=8)


def test_blocks_that_lie_at_multiples(backend):
    """Pages of 32 and ragged lists keep a promise of 16, pages of 24 and single tokens do not."""
    attn = at.Attention(spec_of(), backend=backend, limits=at.Limits(2, 9, 200, kv_alignment=16))
    ends, keys = np.array([0, 2, 9], np.int32), np.array([40, 70], np.int32)

    def pages(size):
        counts = -(-keys // size)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return at.formats.paged(ends, starts, np.arange(starts[-1], dtype=np.int32), keys, size)

    attn.plan(at.formats.ragged(ends, np.array([0, 41, 110], np.int32)))
    attn.plan(pages(32))
    for size, needed in ((24, 8), (1, 1)):
        with pytest.raises(at.LimitError, match="kv_alignment must be at most") as caught:
            attn.plan(pages(size))
        assert (caught.value.limit, caught.value.needed, caught.value.given) == ("kv_alignment", needed, 16)


def test_long_rows_stay_whole_without_slots(backend):
    """When partial slots run out the planner stops cutting."""
    attn = at.Attention(spec_of(), backend=backend, limits=at.Limits(1, 1, 2000, max_partial_slots=0))
    batch = batch_of(attn.spec, [1], [5000])
    plan = attn.plan(batch.index)
    assert plan.num_slots == 0
    out, lse = attn.run(batch.q, batch.kv, return_lse=True)
    testing.check(plan, batch.q, batch.kv, out, lse)


# ------------------------------------------------------------------------------------------------- growth


def test_memory_grows_and_old_plans_are_gone(backend):
    spec = spec_of()
    attn = at.Attention(spec, backend=backend)
    sizes = []
    for qo, kv in (([1], [3]), ([1] * 9, [50] * 9), ([1], [3]), ([40], [4000]), ([1] * 64, [33] * 64)):
        batch = batch_of(spec, qo, kv)
        plan = attn.plan(batch.index)
        out, lse = attn.run(batch.q, batch.kv, return_lse=True)
        testing.check(plan, batch.q, batch.kv, out, lse)
        sizes.append(attn.workspace.report()["nbytes"])
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3], "memory does not grow, or shrinks"


# ------------------------------------------------------------------------------------------------- sharing


@pytest.mark.parametrize("limits", [None, LIMITS])
def test_attentions_share_an_index(backend, limits):
    """Window and full layers of one model: one copy of the index, own plans, right results in any order."""
    specs = [spec_of(), spec_of(variant=(v.causal(), v.sliding_window(5)))]
    ws = at.Workspace(specs, limits, backend=backend)
    attns = [at.Attention(s, backend=backend, workspace=ws) for s in specs]
    with pytest.raises(at.ArgumentError, match="free seat"):
        at.Attention(specs[0], backend=backend, workspace=ws)
    steps = [batch_of(specs[0], [1, 2], [40 + i, 9], seed=i) for i in range(4)]
    for step in steps:
        plans = [a.plan(step.index) for a in attns]
        views = [a._runtime.tenant.loaded.parts[0].indices.ptr for a in attns]
        assert views[0] == views[1], "the index was copied twice"
        for _ in range(2):
            for attn, plan in zip(attns, plans, strict=True):
                out, lse = attn.run(step.q, step.kv, plan=plan, return_lse=True)
                testing.check(plan, step.q, step.kv, out, lse)


@pytest.mark.parametrize("limits", [None, LIMITS])
def test_each_keeps_its_own_plan(backend, limits):
    """Target and draft: one loads new indexes while the other's stays, in every order of loads."""
    specs = [spec_of(), spec_of(head_dim=32), spec_of()]
    rng = np.random.default_rng(0)
    ws = at.Workspace(specs, limits, backend=backend)
    attns = [at.Attention(s, backend=backend, workspace=ws) for s in specs]
    held = [None] * 3
    shared = batch_of(specs[0], [2, 1], [20, 33])
    for step in range(40):
        who = int(rng.integers(3))
        if who == 1 or rng.integers(2):
            count = int(rng.integers(0, 4))
            batch = batch_of(specs[who], rng.integers(0, 4, count), rng.integers(0, 60, count), seed=step)
        else:
            batch = shared
        held[who] = (attns[who].plan(batch.index), batch)
        for attn, what in zip(attns, held, strict=True):
            if what is not None:
                plan, batch = what
                out, lse = attn.run(batch.q, batch.kv, plan=plan, return_lse=True)
                testing.check(plan, batch.q, batch.kv, out, lse)


# ------------------------------------------------------------------------------------------------- a late device


@pytest.mark.parametrize("prefix", [64, 96, 700, 1000])
def test_bridges_of_a_composite_have_room(backend, prefix):
    """A plan of two levels may have more parts than the index; the limit counts the index's."""
    spec = spec_of()
    own, count = [5, 70, 300], 3
    pages = [-(-n // 4) for n in own]
    levels = (
        at.formats.paged([0, count], [0, prefix // 4], np.arange(prefix // 4), [prefix], 4),
        at.formats.paged(
            np.arange(count + 1), np.r_[0, np.cumsum(pages)], prefix // 4 + np.arange(sum(pages)), own, 4
        ),
    )
    index = at.formats.cascade(*levels)
    case = testing.make_case(spec, [count], [prefix + 4 * sum(pages)], seed=3)
    kv = (case.k[0], case.v[0])
    limits = at.Limits(3, 3, 2000, max_parts=2)
    attn = at.Attention(spec, backend=backend, limits=limits)
    plan = attn.plan(index)
    out, lse = attn.run(case.q[0], kv, return_lse=True)
    testing.check(plan, case.q[0], kv, out, lse)
    with pytest.raises(at.LimitError) as caught:
        at.Attention(spec, backend=backend, limits=at.Limits(3, 3, 2000)).plan(index)
    assert caught.value.limit == "max_parts" and (caught.value.needed, caught.value.given) == (2, 1)


@pytest.mark.parametrize("specs", ["x", 3, [], [None], ["x"], "spec"])
def test_specs_must_be_specs(backend, specs):
    for make in (lambda s: at.Workspace(s, backend=backend), lambda s: at.Workspace.nbytes(s, LIMITS)):
        with pytest.raises((at.ArgumentError, at.DtypeError), match=r"^specs must"):
            make(specs)
    with pytest.raises(at.DtypeError, match="specs must hold AttentionSpec values only; got str"):
        at.Workspace([spec_of(), "x"], backend=backend)


def test_a_tree_in_line_is_one_part(backend):
    """Limits count the parts that are planned: drafts in line need no part of their own."""
    index = at.formats.tree(at.formats.paged([0, 3], [0, 2], [1, 0], [30], 16), [-1, 0, 0])
    spec = at.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=16, variant=at.variants.custom_mask())
    limits = at.Limits(1, 3, 2, max_mask_bytes=16)
    at.Attention(spec, backend=backend, device="cpu", limits=limits).plan(index)
    asks = replace(spec, variant=(at.variants.causal(), at.variants.custom_mask()))
    with pytest.raises(at.errors.LimitError, match="max_parts"):
        at.Attention(asks, backend=backend, device="cpu", limits=limits).plan(index)
