# SPDX-License-Identifier: Apache-2.0
"""append(): rows land at the plan's or the caller's slots, rounded and rotated as the contract says, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.dtypes import as_dtype

sys.path.insert(0, str(Path(__file__).parent))
from small_caches import make, tokens

v = at.variants
RNG = np.random.default_rng


def rows(count, attn, seed=0, scale=1.0):
    rng, spec = RNG(seed), attn.spec
    kind = as_dtype(spec.q_dtype).numpy
    return [
        (rng.standard_normal((count, spec.num_kv_heads, dim)) * scale).astype(kind)
        for dim in (spec.head_dim, spec.head_dim_vo)
    ]


def caches(attn, pages, size, fill=7.0):
    spec = attn.spec
    kind = as_dtype(spec.kv_dtype).numpy
    inner = (spec.num_kv_heads, size) if spec.kv_layout == "HND" else (size, spec.num_kv_heads)
    return tuple(np.full((pages, *inner, dim), fill, kind) for dim in (spec.head_dim, spec.head_dim_vo))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("size", [1, 5, 16])
def test_the_plans_slots(backend, kv_layout, size):
    attn = make(backend, kv_layout=kv_layout)
    kv_lens, qo = np.array([23, 4, 0, 1]), np.array([0, 3, 7, 7, 8])
    pages = -(-kv_lens // size)
    indptr = np.r_[0, np.cumsum(pages)]
    ids = RNG(1).permutation(60)[: indptr[-1]]
    attn.plan(formats.paged(qo, indptr, ids, kv_lens, size))
    kv, (k, values) = caches(attn, 60, size), rows(8, attn)
    attn.append(k, values, kv)
    slots = []
    for r in range(4):
        for i in range(qo[r], qo[r + 1]):
            j = kv_lens[r] - (qo[r + 1] - i)
            slots.append(ids[indptr[r] + j // size] * size + j % size)
    for cache, new in zip(kv, (k, values), strict=True):
        flat = tokens(cache, kv_layout)
        np.testing.assert_array_equal(flat[slots], new)
        rest = np.delete(flat, slots, axis=0)
        assert (rest == 7.0).all(), "a slot that is nobody's was written"


def test_given_slots_skip_the_negative(backend):
    attn = make(backend)
    kv, (k, values) = caches(attn, 5, 4), rows(4, attn)
    for slots in (np.array([19, -1, 0, 7]), [19, -1, 0, 7], np.array([19, -1, 0, 7], np.int32)):
        for cache in kv:
            cache[...] = 7.0
        attn.append(k, values, kv, slots=slots)
        for cache, new in zip(kv, (k, values), strict=True):
            flat = tokens(cache, "NHD")
            np.testing.assert_array_equal(flat[[19, 0, 7]], new[[0, 2, 3]])
            assert (np.delete(flat, [19, 0, 7], axis=0) == 7.0).all()


BAD = {
    "too few slots": (at.ArgumentError, "slots must be", {"slots": [1, 2]}),
    "slot past the pool": (at.ArgumentError, "slots must be below the pool's 20", {"slots": [0, 1, 2, 20]}),
    "float slots": (at.ArgumentError, "slots must be integers", {"slots": [0.0, 1, 2, 3]}),
    "no plan": (at.PlanError, "plan must be loaded", {}),
    "unknown scale": (at.ArgumentError, "k_scale", {"slots": [0, 1, 2, 3], "k_scale": 2.0}),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(backend, name):
    attn = make(backend)
    kv, (k, values) = caches(attn, 5, 4), rows(4, attn)
    error, match, arguments = BAD[name]
    with pytest.raises(error, match=match):
        attn.append(k, values, kv, **arguments)
    assert all((cache == 7.0).all() for cache in kv), "a refused append wrote"


def test_refuses_other_arrays(backend):
    attn = make(backend, kv_dtype="float16", out_dtype="float32")
    both, halves = caches(attn, 5, 4), rows(4, attn)[1].astype(np.float16)
    with pytest.raises(at.ArgumentError, match="v must have k's 4 rows and dtype float32; got float16"):
        attn.append(rows(4, attn)[0], halves, both, slots=[0, 1, 2, 3])
    attn = make(backend)
    kv, (k, values) = caches(attn, 5, 4), rows(4, attn)
    slots = [0, 1, 2, 3]
    fixed = tuple(cache.copy() for cache in kv)
    for cache in fixed:
        cache.flags.writeable = False
    cases = [
        (at.ArgumentError, "k must be", (k[:, :1], values, kv)),
        (at.ArgumentError, "v must have k's 4 rows", (k, values[:3], kv)),
        (at.DtypeError, "k must be float32", (k.astype(np.float16), values, kv)),
        (at.ArgumentError, "k_cache must be writable", (k, values, fixed)),
        (at.ArgumentError, "kv must be a pair", (k, values, kv[0])),
        (at.ArgumentError, "v_cache must have k_cache's", (k, values, (kv[0], kv[1][:4]))),
    ]
    for error, match, arguments in cases:
        with pytest.raises(error, match=match):
            attn.append(*arguments, slots=slots)
    with pytest.raises(at.ArgumentError, match=r"argument k_scale .*\. parameters of this variant: none"):
        attn.append(k, values, kv, slots=slots, k_scale=2.0)  # as run() says it
    attn.plan(formats.ragged([0, 3], [0, 20]))
    with pytest.raises(at.ArgumentError, match="k must have the loaded plan's 3 rows"):
        attn.append(k, values, tuple(tokens(cache, "NHD") for cache in kv))
    assert all((cache == 7.0).all() for cache in kv)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_rows_in_outs_dtype(backend, out_dtype):
    """Queries of 8 bits say nothing of what a projection gives: rows come as out does, and are rounded as those in q's dtype."""
    attn = make(backend, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", out_dtype=out_dtype)
    kv, kind = caches(attn, 5, 4), as_dtype("float8_e4m3fn").numpy
    k, values = (RNG(3).standard_normal((4, *cache.shape[2:])) for cache in kv)
    k, values = (x.astype(as_dtype(out_dtype).numpy) for x in (k, values))
    attn.append(k, values, kv, slots=[19, 0, 7, 3])
    for cache, new in zip(kv, (k, values), strict=True):
        flat = tokens(cache, "NHD")[[19, 0, 7, 3]]
        np.testing.assert_array_equal(flat.astype(np.float32), new.astype(kind).astype(np.float32))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16"])
def test_rounds_to_nearest_even_and_saturates(backend, kv_dtype):
    attn = make(backend, kv_dtype=kv_dtype)
    k, values = rows(64, attn, scale=200.0)
    k.flat[:9] = [1e9, -1e9, 448.0, 460.0, -464.0, 0.0, 1e-12, 57344.0, 60000.0]
    kv = caches(attn, 16, 4)
    attn.append(k, values, kv, slots=np.arange(64))
    top = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(kv_dtype)
    kind = as_dtype(kv_dtype).numpy
    for cache, new in zip(kv, (k, values), strict=True):
        with np.errstate(over="ignore"):
            want = (new if top is None else np.clip(new, -top, top)).astype(kind)
        assert tokens(cache, "NHD").tobytes() == want.tobytes()


def test_rows_in_the_type_of_results(backend):
    """A projection's, where q has 8 bits like the cache: rounded as rows in q's type of 16 bits are."""
    narrow = make(backend, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn", out_dtype="float16")
    wide = make(backend, q_dtype="float16", kv_dtype="float8_e4m3fn")
    k, values = rows(9, wide, scale=100.0)
    stored = []
    for attn in (narrow, wide):
        kv = caches(attn, 3, 4)
        attn.append(k, values, kv, slots=np.arange(9))
        stored.append([x.tobytes() for x in kv])
    assert stored[0] == stored[1]


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_rows_of_the_caches_type_keep_their_bits(backend, kv_dtype):
    """Infinities and both signs of NaN too, where the scale is 1; a head with another scale is rounded."""
    attn = make(backend, kv_dtype=kv_dtype, variant=(v.causal(), v.fp8_scales()))
    kind = as_dtype(kv_dtype).numpy
    k, values = (np.resize(np.arange(256, dtype=np.uint8), x.shape).view(kind) for x in rows(64, attn))
    for given in ({}, {"k_scale": np.array([1.0, 2.0], np.float32)}):
        kv = caches(attn, 16, 4)
        attn.append(k, values, kv, slots=np.arange(64), **given)
        stored = tokens(kv[0], "NHD"), tokens(kv[1], "NHD")
        assert stored[0][:, 0].tobytes() == k[:, 0].tobytes()
        assert stored[1].tobytes() == values.tobytes()
        if not given:
            assert stored[0].tobytes() == k.tobytes()
        else:
            finite = np.isfinite(k[:, 1].astype(np.float32))
            halves = (k[:, 1].astype(np.float32) / 2).astype(kind)
            np.testing.assert_array_equal(stored[0][:, 1][finite], halves[finite])


@pytest.mark.parametrize(
    "scales", [(0.25, 0.5), (np.array([0.5, 2.0], np.float32), np.array([4.0, 0.125], np.float32))]
)
def test_scales_divide(backend, scales):
    """x / scale, to nearest even, saturated; a run with the same scales reads back x."""
    attn = make(backend, kv_dtype="float8_e4m3fn", variant=(v.causal(), v.fp8_scales()))
    kv, (k, values) = caches(attn, 16, 4), rows(64, attn)
    attn.append(k, values, kv, slots=np.arange(64), k_scale=scales[0], v_scale=scales[1])
    for cache, new, scale in zip(kv, (k, values), scales, strict=True):
        divided = new / np.broadcast_to(np.asarray(scale, np.float32), (2,))[None, :, None]
        want = np.clip(divided, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        assert tokens(cache, "NHD").tobytes() == want.tobytes()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_what_a_run_would_fuse(backend, interleaved):
    """Rotated at append and read plainly, or stored plainly and rotated in the run: the same attention."""
    rope = v.rope(8, theta=1000.0, interleaved=interleaved)
    plain, fused = make(backend), make(backend, variant=(rope, v.causal()))
    case = testing.make_case(plain.spec, [40], [40], seed=2)
    batch = testing.lay_out(case, page_size=4)
    for attn in (plain, fused):
        attn.plan(batch.index)
    kv = caches(plain, 16, 4, fill=np.nan)
    plain.append(case.k[0], case.v[0], kv, rope=rope)
    hooks = fused.spec.composed.numpy(fused.spec.composed.bind({}, num_qo_heads=4, num_kv_heads=2))
    q = hooks.query({"qo_pos": np.arange(40)[:, None]}, batch.q.astype(np.float64)).astype(np.float32)
    stored = plain.run(q, kv)
    np.testing.assert_allclose(stored, fused.run(batch.q, batch.kv), atol=2e-5, rtol=1e-4)
    assert np.abs(stored - plain.run(batch.q, batch.kv)).max() > 0.01, "the rotation did nothing"


def test_shared_kv(backend):
    attn = make(backend, num_kv_heads=1, head_dim=24, head_dim_vo=16, shared_kv=True, sm_scale=0.2)
    rng = RNG(3)
    k = rng.standard_normal((6, 1, 24)).astype(np.float32)
    cache = np.full((4, 4, 1, 24), 7.0, np.float32)
    attn.append(k, None, cache, slots=np.arange(3, 9))
    flat = cache.reshape(16, 1, 24)
    np.testing.assert_array_equal(flat[3:9], k)
    assert (np.delete(flat, np.arange(3, 9), 0) == 7.0).all()
    with pytest.raises(at.ArgumentError, match="v must be None"):
        attn.append(k, k, cache, slots=np.arange(3, 9))


def test_append_then_run_is_the_whole(backend):
    """A prompt in chunks, then decode, through append: every step is right."""
    attn = make(backend, head_dim_vo=16)
    case = testing.make_case(attn.spec, [50], [50], seed=4)
    kv = caches(attn, 16, 4, fill=np.nan)
    ids = RNG(5).permutation(16)[:13]
    begin = 0
    for step in (20, 1, 1, 17, 1, 10):
        end = begin + step
        pages = -(-end // 4)
        plan = attn.plan(formats.paged([0, step], [0, pages], ids[:pages], [end], 4))
        attn.append(case.k[0][begin:end], case.v[0][begin:end], kv)
        q = case.q[0][begin:end]
        out, lse = attn.run(q, kv, return_lse=True)
        testing.check(plan, q, kv, out, lse)
        begin = end
    assert begin == 50


def test_tree_drafts_go_where_their_keys_are(backend):
    """Siblings stand at one position; each draft's row still goes to its own slot."""
    attn = make(backend, variant=v.causal())
    base = formats.paged([0, 4], [0, 3], [5, 0, 2], [11], 4)
    attn.plan(formats.tree(base, parents=[-1, 0, 0, 1]))
    kv, (k, values) = caches(attn, 6, 4), rows(4, attn)
    attn.append(k, values, kv)
    slots = [3, 8, 9, 10]  # keys 7..10 of pages 5, 0, 2
    np.testing.assert_array_equal(tokens(kv[0], "NHD")[slots], k)
    np.testing.assert_array_equal(tokens(kv[1], "NHD")[slots], values)


def test_rows_without_a_key_need_slots(backend):
    attn = make(backend)
    attn.plan(formats.paged([0, 3], [0, 1], [0], [1], 4))  # queries at -2, -1, 0; one key
    kv, (k, values) = caches(attn, 2, 4), rows(3, attn)
    with pytest.raises(at.ArgumentError, match="none for row 0"):
        attn.append(k, values, kv)
    assert (kv[0] == 7.0).all()


def test_append_of_nothing(backend):
    attn = make(backend)
    attn.plan(formats.paged([0], [0], [], [], 4))
    kv, (k, values) = caches(attn, 2, 4), rows(0, attn)
    attn.append(k, values, kv)
    assert (kv[0] == 7.0).all()


def test_a_pool_that_ends_inside_a_page(backend):
    """Slots of a last, partial page are as good as any."""
    attn = make(backend)
    kv = tuple(np.full((18, 2, dim), 7.0, np.float32) for dim in (16, 8))
    k, values = rows(1, attn)
    attn.plan(formats.paged([0, 1], [0, 5], [0, 1, 2, 3, 4], [18], 4))
    attn.append(k, values, kv)
    assert (kv[0][17] == k[0]).all() and (kv[1][17] == values[0]).all() and (kv[0][:17] == 7.0).all()


def test_page_size_must_be_the_plans(backend):
    attn = make(backend)
    attn.plan(formats.paged([0, 1], [0, 2], [0, 1], [7], 4))
    kv, (k, values) = caches(attn, 8, 2), rows(1, attn)
    with pytest.raises(at.PlanError, match="pages of 4 tokens"):
        attn.append(k, values, kv)
    assert (kv[0] == 7.0).all()
    attn.append(k, values, kv, slots=[6])
    assert (tokens(kv[0], "NHD")[6] == k[0]).all()
