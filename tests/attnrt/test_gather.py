# SPDX-License-Identifier: Apache-2.0
"""gather(): rows of the cache side by side, in the type that is asked for; attention over them has the same bits."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.dtypes import as_dtype

sys.path.insert(0, str(Path(__file__).parent))
from small_caches import make, tokens

v = at.variants


def numbers(attn, pages, size, rng):
    """A cache of random numbers."""
    spec = attn.spec
    kind = as_dtype(spec.kv_dtype).numpy
    inner = (spec.num_kv_heads, size) if spec.kv_layout == "HND" else (size, spec.num_kv_heads)
    return tuple(
        rng.standard_normal((pages, *inner, dim)).astype(np.float32).astype(kind)
        for dim in (spec.head_dim, spec.head_dim_vo)
    )


def outs(attn, rows, dtype=None):
    spec = attn.spec
    kind = as_dtype(dtype or spec.q_dtype).numpy
    return tuple(
        np.full((rows, spec.num_kv_heads, dim), np.nan, np.float32).astype(kind)
        for dim in (spec.head_dim, spec.head_dim_vo)
    )


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float16", "float8_e5m2"),
    ],
)
def test_rows(backend, dtypes, kv_layout):
    attn = make(backend, q_dtype=dtypes[0], kv_dtype=dtypes[1], kv_layout=kv_layout)
    rng = np.random.default_rng()
    kv, slots = numbers(attn, 7, 5, rng), np.array([34, 0, -1, 17, 17, 5])
    for dtype in dict.fromkeys(dtypes):
        for form in (slots, slots.tolist(), slots.astype(np.int32)):
            got = outs(attn, len(slots), dtype)
            attn.gather(kv, form, *got)
            for cache, found in zip(kv, got, strict=True):
                want = tokens(cache, kv_layout)[slots].astype(found.dtype)
                want[2] = 0
                np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_that_of_append(backend, interleaved):
    """Rows that append rotates on their way in equal those that gather rotates on their way out."""
    attn, rng = make(backend), np.random.default_rng()
    kv, rope = numbers(attn, 4, 8, rng), v.rope(16, interleaved=interleaved)
    slots, positions = np.array([3, 30, 11]), np.array([0, 1000, 7])
    k, values = outs(attn, 3)
    attn.gather(kv, slots, k, values, rope=rope, positions=positions)
    attn.plan(formats.paged([0, 1, 2, 3], [0, 126, 127, 128], np.zeros(128, int), [1001, 1, 8], 8))
    np.testing.assert_array_equal(values, tokens(kv[1], "NHD")[slots])
    angles = positions[:, None] * 10000.0 ** (-np.arange(8) / 8)
    x = tokens(kv[0], "NHD")[slots].astype(np.float64)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :8], x[..., 8:])
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned = [a * cos - b * sin, a * sin + b * cos]
    want = np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)
    np.testing.assert_allclose(k, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_attention_over_gathered_rows_has_the_same_bits(backend, kv_dtype):
    spec = at.AttentionSpec(
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=32,
        q_dtype="bfloat16",
        kv_dtype=kv_dtype,
        variant=(v.causal(), v.alibi()),
    )
    case = testing.make_case(spec, [1, 70, 3], [300, 70, 9])
    batch = testing.lay_out(case, page_size=1)
    direct = testing.run_batch(case, batch, backend)
    found = formats.gathered(batch.index)
    attn = at.Attention(spec, backend=backend)
    k, values = outs(attn, len(found.slots))
    attn.gather(batch.kv, found.slots, k, values)
    wide = replace(case, spec=replace(spec, kv_dtype="bfloat16", kv_layout="NHD"))
    side = testing.Batch(index=found.index, q=batch.q, kv=(k, values), params=dict(batch.params))
    got = testing.run_batch(wide, side, backend)
    if kv_dtype == "bfloat16":
        testing.same(direct, got, "gathered")
    else:  # leaves and tiles of another type of cache may be others
        for a, b in ((direct.out, got.out), (direct.lse, got.lse)):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=2e-2, atol=2e-2)


def test_keys_alone(backend):
    """V stays where it lies."""
    attn, rng = make(backend), np.random.default_rng()
    kv, (k, _) = numbers(attn, 4, 8, rng), outs(attn, 3)
    before = kv[1].copy()
    attn.gather(kv, [9, -1, 31], k)
    want = tokens(kv[0], "NHD")[[9, 0, 31]]
    want[1] = 0
    np.testing.assert_array_equal(k, want)
    np.testing.assert_array_equal(kv[1], before)


def test_refuses(backend):
    attn, rng = make(backend), np.random.default_rng()
    kv, (k, values) = numbers(attn, 4, 8, rng), outs(attn, 3)
    fixed = k.copy()
    fixed.flags.writeable = False
    cases = [
        (at.ArgumentError, "slots must be below the pool's 32", (kv, [0, 1, 32], k, values), {}),
        (at.ArgumentError, r"slots must be \[3\]", (kv, [0, 1], k, values), {}),
        (at.ArgumentError, "k must be writable", (kv, [0, 1, 2], fixed, values), {}),
        (at.ArgumentError, "v must have k's 3 rows", (kv, [0, 1, 2], k, values[:2]), {}),
        (at.ArgumentError, "k must be", (kv, [0, 1, 2], None, values), {}),
        (at.ArgumentError, "v must not be k's memory", (kv, [0, 1, 2], k, k[..., :8]), {}),
        (
            at.ArgumentError,
            "positions must be given with rope",
            (kv, [0, 1, 2], k, values),
            {"rope": v.rope(16)},
        ),
        (
            at.ArgumentError,
            "positions must be given with rope",
            (kv, [0, 1, 2], k, values),
            {"positions": [0, 1, 2]},
        ),
        (
            at.ArgumentError,
            r"positions must be integers \[3\]",
            (kv, [0, 1, 2], k, values),
            {"rope": v.rope(16), "positions": [0, 1]},
        ),
        (at.DtypeError, "k must be float32", (kv, [0, 1, 2], k.astype(np.float16), values), {}),
    ]
    for error, match, arguments, more in cases:
        with pytest.raises(error, match=match):
            attn.gather(*arguments, **more)
    assert np.isnan(k).all() and np.isnan(values).all(), "a refused gather wrote"


def test_shared_kv(backend):
    attn = make(backend, num_kv_heads=1, head_dim=16, head_dim_vo=8, shared_kv=True, sm_scale=0.25)
    cache = np.random.default_rng().standard_normal((4, 8, 1, 16)).astype(np.float32)
    k = np.empty((2, 1, 16), np.float32)
    attn.gather(cache, [9, 31], k)
    np.testing.assert_array_equal(k, cache.reshape(-1, 1, 16)[[9, 31]])
    with pytest.raises(at.ArgumentError, match="v must be left out"):
        attn.gather(cache, [9, 31], k, k)
