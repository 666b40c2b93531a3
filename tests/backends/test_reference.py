# SPDX-License-Identifier: Apache-2.0
"""Plans against dense float64: every builder, variant and dtype, both trees, every backend of the CPU."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.dtypes import as_dtype

v = at.variants


@v.logits
def gravity(score, ctx, strength=0.5):
    return score - strength * v.log(1.0 + v.absolute(ctx.qo_pos - ctx.kv_pos))


@v.mask(bounds=(12, 0))
def every_third(ctx):
    return ((ctx.qo_pos - ctx.kv_pos) % 3 == 0) & (ctx.kv_pos <= ctx.qo_pos) & (ctx.qo_pos - ctx.kv_pos <= 12)


VARIANTS = {
    "full": (),
    "causal": (v.causal(),),
    "window": (v.sliding_window(5, 3),),
    "softcap": (v.causal(), v.softcap(2.0)),
    "alibi": (v.causal(), v.alibi()),
    "sigmoid": (v.causal(), v.sigmoid()),
    "rope": (v.rope(16), v.causal()),
    "rope interleaved": (v.rope(8, interleaved=True), v.causal()),
    "sinks": (v.causal(), v.sink_logits(0.3)),
    "scales": (v.causal(), v.fp8_scales(0.5, 2.0, 0.25, 0.5)),
    "traced": (gravity, every_third),
}
DTYPES = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "bf16 x e4m3": ("bfloat16", "float8_e4m3fn"),
    "f16 x e5m2": ("float16", "float8_e5m2"),
}


def spec_of(variants, dtypes=("float32", "float32"), **changes):
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_vo": 24}
    return at.AttentionSpec(**(fields | changes), variant=variants, q_dtype=dtypes[0], kv_dtype=dtypes[1])


def checked(spec, backend, index, q, kv, **run):
    attn = at.Attention(spec, backend=backend)
    plan = attn.plan(index)
    if spec.composed.use_softmax:
        out, lse = attn.run(q, kv, return_lse=True, **run)
    else:
        out, lse = attn.run(q, kv, **run), None
    return testing.check(plan, q, kv, out, lse, **run)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_and_dtypes(backend, name, dtypes):
    spec = spec_of(VARIANTS[name], DTYPES[dtypes])
    case = testing.make_case(spec, [1, 9, 3], [300, 20, 2], seed=1)
    batch = testing.lay_out(case, page_size=7)
    checked(spec, backend, batch.index, batch.q, batch.kv)


def pool(spec, slots, seed):
    rng = np.random.default_rng(seed)
    kind = as_dtype(spec.kv_dtype).numpy
    return tuple(
        rng.standard_normal((slots, spec.num_kv_heads, dim)).astype(kind)
        for dim in (spec.head_dim, spec.head_dim_vo)
    )


def _paged(rng):
    return formats.paged([0, 2, 3, 3], [0, 3, 8, 9], rng.permutation(30)[:9], [11, 17, 2], 4)


def _holes(rng):
    ids = rng.permutation(30)[:9].astype(np.int32)
    ids[[1, 4]] = -1
    return formats.paged([0, 2, 3, 3], [0, 3, 8, 9], ids, [11, 17, 2], 4)


def _positions(rng):
    ids = rng.permutation(30)[:9]
    return formats.paged(
        [0, 2, 3, 3], [0, 3, 8, 9], ids, [11, 17, 2], 4, qo_pos=[20, 3, -1], kv_pos=[15, -4, 7]
    )


def _ragged(rng):
    return formats.ragged([0, 2, 3, 3], [0, 11, 28, 30])


def _table(rng):
    return formats.block_table([0, 2, 3], rng.permutation(30)[:10].reshape(2, 5), [11, 17], 4)


def _bsr(rng):
    return formats.bsr([0, 2, 3, 6], [0, 2, 1, 0, 1, 3], (3, 5), 18, num_rows=8)


def _tokens(rng):
    return formats.token_sparse([0, 2, 3], [0, 5, 9], rng.permutation(120)[:9], [0, 3, 4, 8, 9, 2, 7, 8, 30])


def _per_head(rng):
    pages = rng.permutation(30)[:24].reshape(2, 2, 6)
    return formats.pages_per_head([0, 2, 3], pages, [[5, 2], [3, 6]], [19, 23], 4)


def _radix(rng):
    return formats.radix(
        [0, 1, 3, 4], [-1, 0, 0, 1], [0, 70, 75, 90, 99], rng.permutation(110)[:99], [1, 2, 3]
    )


def _shared(rng):
    return formats.share(_radix(rng), min_tokens=16)


def _cascade(rng):
    prefix = formats.paged([0, 4], [0, 4], rng.permutation(10)[:4], [16], 4)
    own = formats.paged([0, 1, 3, 4], [0, 2, 3, 5], 10 + rng.permutation(15)[:5], [5, 4, 7], 4)
    return formats.cascade(prefix, own)


def _streaming(rng):
    return formats.streaming(_paged(rng), sinks=3, recent=4)


def _streaming_cache(rng):
    return formats.streaming(_paged(rng), sinks=3, recent=4, positions="cache")


def _tree(rng):
    return formats.tree(
        formats.paged([0, 4, 5], [0, 4, 6], rng.permutation(30)[:6], [14, 5], 4), parents=[-1, 0, 0, 2, -1]
    )


def _masked(rng):
    mask = [rng.random((2, 11)) < 0.5, np.zeros((1, 17), bool), rng.random((0, 2)) < 0.5]
    return formats.tree(_paged(rng), mask=mask)


BUILDERS = {
    f.__name__[1:]: f
    for f in (
        *(_paged, _holes, _positions, _ragged, _table, _bsr, _tokens, _per_head, _radix, _shared, _cascade),
        *(_streaming, _streaming_cache, _tree, _masked),
    )
}


@pytest.mark.parametrize("variant", ["full", "causal", "window", "sigmoid", "rope", "sinks", "traced"])
@pytest.mark.parametrize("name", BUILDERS)
def test_builders_and_variants(backend, name, variant):
    index = BUILDERS[name](np.random.default_rng(3))
    index.check(full=True)
    spec = spec_of(VARIANTS[variant])
    kv = pool(spec, 120, 4)
    q = np.random.default_rng(5).standard_normal((index.num_qo, 4, 16)).astype(np.float32)
    checked(spec, backend, index, q, kv)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 192, 256, 576])
def test_head_dims(backend, head_dim):
    spec = spec_of((v.causal(),), head_dim=head_dim, head_dim_vo=None)
    case = testing.make_case(spec, [1, 3], [20, 5], seed=6)
    batch = testing.lay_out(case)
    checked(spec, backend, batch.index, batch.q, batch.kv)


@pytest.mark.parametrize("variant", ["causal", "sinks", "sigmoid"])
def test_pairwise_tree(backend, variant):
    """The other tree is right too, and its bits do not depend on where rows were cut."""
    spec = spec_of(VARIANTS[variant])
    case = testing.make_case(spec, [1, 2, 1], [3000, 700, 100], seed=7)
    batch = testing.lay_out(case)
    attn = at.Attention(spec, backend=backend)
    results = []
    for workers in (1, 3, 40):
        traits = attn._runtime.machine.traits(batch.index.features)
        traits = type(traits)(**{f: getattr(traits, f) for f in traits.__slots__} | {"num_workers": workers})
        plan = at.make_plan(spec, batch.index, traits, tree="pairwise")
        attn.load(plan)
        out = attn.run(batch.q, batch.kv)
        testing.check(plan, batch.q, batch.kv, out)
        results.append(out.tobytes())
    assert len(set(results)) == 1


def test_plans_are_really_cut():
    """The cases above reach partial states and the merge list."""
    spec = spec_of(VARIANTS["causal"])
    case = testing.make_case(spec, [1], [3000], seed=7)
    plan = at.make_plan(spec, testing.lay_out(case).index, at.Traits.of("cpu", 16))
    assert plan.num_slots > 0 and len(plan.merge) > 0


def test_a_mask_of_the_index_always_counts(backend):
    """With or without custom_mask() in the variant: what the index hides stays hidden."""
    index = _masked(np.random.default_rng(8))
    q = np.random.default_rng(9).standard_normal((3, 4, 16)).astype(np.float32)
    results = []
    for variants in ((v.causal(),), (v.causal(), v.custom_mask())):
        spec = spec_of(variants)
        kv = pool(spec, 120, 4)
        checked(spec, backend, index, q, kv)
        attn = at.Attention(spec, backend=backend)
        attn.plan(index)
        results.append(attn.run(q, kv))
    assert results[0].tobytes() == results[1].tobytes()
    assert not results[0][2].any(), "the row whose mask is empty sees something"
