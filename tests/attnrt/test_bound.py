# SPDX-License-Identifier: Apache-2.0
"""Bound arrays: read in place by every run, so that their contents may change without a new plan.

On the CPU no builder binds, because every array is the host's; the arrays of an index are bound here by hand, which reaches the
same code of planner, workspace and kernels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
from attnrt import testing

v = at.variants

VARIANTS = {
    "causal": (v.causal(),),
    "window": (v.causal(), v.sliding_window(20)),
    "full": (),
    "rope alibi": (v.rope(8), v.causal(), v.alibi()),
    "sinks": (v.causal(), v.sink_logits(0.25)),
}


def bind(index, **arrays):
    """The index with kv_lens, indices or mask bound to given arrays."""
    features = {f"bound_{name}": True for name in arrays}
    changes = {name: arrays[name] for name in ("indices", "mask") if name in arrays}
    if "kv_lens" in arrays:
        changes["requests"] = replace(index.requests, bound_kv_lens=arrays["kv_lens"])
    return replace(index, **changes, features=replace(index.features, **features), max_block=-1)


def results(attn, batch):
    out = np.full((len(batch.q), 4, 16), np.nan, np.float32)
    lse = np.full((len(batch.q), 4), np.nan, np.float32)
    attn.run(batch.q, batch.kv, out=out, lse=lse)
    return testing.Result(out=out, lse=lse)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("workers", [1, 40])
def test_true_lengths_are_read_by_every_run(backend, name, workers):
    """One plan for the upper bounds; runs under many true lengths have the bits of the exact plans."""
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", variant=VARIANTS[name]
    )
    most, qo = [900, 300, 40, 7], [1, 3, 2, 1]
    case = testing.make_case(spec, qo, most, seed=1)
    batch = testing.lay_out(case, page_size=8)
    true = np.array(most, np.int32)
    limits = at.Limits(4, 7, 1000, max_workers=workers)
    attn = at.Attention(spec, backend=backend, limits=limits)
    exact = at.Attention(spec, backend=backend)
    plan = attn.plan(bind(batch.index, kv_lens=true))
    for lens in (most, [899, 258, 39, 1], [300, 3, 2, 0], [1, 0, 1, 7], [513, 255, 0, 3]):
        true[:] = lens
        got = results(attn, batch)
        short = replace(
            case,
            k=tuple(k[:n] for k, n in zip(case.k, lens, strict=False)),
            v=tuple(x[:n] for x, n in zip(case.v, lens, strict=False)),
        )
        same = testing.lay_out(short, page_size=8)
        want = testing.run_batch(short, same, backend, attn=exact)
        testing.same(want, got, f"lengths {lens} under a plan for {most}:")
        testing.check(plan, batch.q, batch.kv, got.out, got.lse)


def test_indices_are_read_by_every_run(backend):
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", variant=v.causal()
    )
    case = testing.make_case(spec, [1, 2], [300, 20], seed=2)
    ids = None
    attn = at.Attention(spec, backend=backend)
    want = testing.run_batch(case, testing.lay_out(case), backend)
    for seed in range(4):
        batch = testing.lay_out(case, seed=seed)
        if ids is None:
            ids = batch.index.indices.copy()
            attn.plan(bind(batch.index, indices=ids))
        ids[:] = batch.index.indices
        testing.same(want, results(attn, batch), "moving the pages of a bound index")


def test_ids_outside_the_pool_are_never_read(backend):
    """Nobody checks bound ids on the host: kernels guard each, and what lies outside is as a hole."""
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", variant=v.causal()
    )
    case = testing.make_case(spec, [1], [300], seed=3)
    batch = testing.lay_out(case)
    ids = batch.index.indices.copy()
    attn = at.Attention(spec, backend=backend)
    attn.plan(bind(batch.index, indices=ids))
    ids[[2, 7, 11]] = -1
    holes = results(attn, batch)
    for bad in (len(batch.kv[0]), 1 << 20, (1 << 31) - 1, -7, -(1 << 31)):
        ids[[2, 7, 11]] = bad
        testing.same(holes, results(attn, batch), f"block id {bad}")


def test_masks_are_read_by_every_run(backend):
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", variant=v.custom_mask()
    )
    case = testing.make_case(spec, [3], [20], seed=4)
    batch = testing.lay_out(case, page_size=4)
    rng = np.random.default_rng(5)
    masks = [rng.random((3, 20)) < 0.5 for _ in range(4)]
    index = at.formats.tree(batch.index, mask=[masks[0]])
    bits = index.mask.copy()
    bound = bind(index, mask=bits)
    attn = at.Attention(spec, backend=backend)
    plan = attn.plan(bound)
    for mask in masks:
        bits[:] = at.formats.tree(batch.index, mask=[mask]).mask
        got = results(attn, batch)
        testing.check(plan, batch.q, batch.kv, got.out, got.lse)
        want = testing.run_batch(
            case,
            testing.Batch(index=at.formats.tree(batch.index, mask=[mask]), q=batch.q, kv=batch.kv, params={}),
            backend,
        )
        testing.same(want, got, "a bound mask")


def test_bound_arrays_are_checked(backend):
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", variant=v.causal()
    )
    batch = testing.lay_out(testing.make_case(spec, [1], [30]))
    attn = at.Attention(spec, backend=backend)
    with pytest.raises(at.DtypeError, match="must be int32"):
        attn.plan(bind(batch.index, indices=batch.index.indices.astype(np.int64)))
    with pytest.raises(at.ArgumentError, match="indices must be contiguous"):
        attn.plan(bind(batch.index, indices=np.repeat(batch.index.indices, 2)[::2]))
