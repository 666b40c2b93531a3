# SPDX-License-Identifier: Apache-2.0
"""copy_pages(): pages go where they are told, whatever the memory order, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt as at
from attnrt.dtypes import as_dtype

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


def make(backend, **changes):
    base = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_vo": 8, "q_dtype": "float32"}
    return at.Attention(at.AttentionSpec(**{**base, **changes}), backend=backend)


def cache(spec, dim, rng, pages=9, size=3, form="plain"):
    inner = (spec.num_kv_heads, size) if spec.kv_layout == "HND" else (size, spec.num_kv_heads)
    kind = as_dtype(spec.kv_dtype).numpy
    both = rng.standard_normal((pages, 2, *inner, dim)).astype(kind)
    return both[:, 1] if form == "interleaved" else both[:, 1].copy()


@pytest.mark.parametrize("form", ["plain", "interleaved"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies(backend, dtype, kv_layout, form):
    attn, rng = make(backend, kv_dtype=dtype, kv_layout=kv_layout), np.random.default_rng()
    kv = tuple(cache(attn.spec, dim, rng, form=form) for dim in (16, 8))
    want = [x.copy() for x in kv]
    source, target = [4, 4, 0], np.array([7, 2, 8])
    attn.copy_pages(kv, source, target)
    for got, old in zip(kv, want, strict=True):
        old[target] = old[source]
        bits = f"u{old.dtype.itemsize}"
        np.testing.assert_array_equal(np.ascontiguousarray(got).view(bits), old.view(bits))
    attn.copy_pages(kv, [], [])


def test_shared_kv(backend):
    attn, rng = make(backend, shared_kv=True, sm_scale=0.1), np.random.default_rng()
    kv = cache(attn.spec, 16, rng)
    want = kv.copy()
    attn.copy_pages(kv, [1], [5])
    want[5] = want[1]
    np.testing.assert_array_equal(kv, want)


BAD = {
    "target twice": ("must name each page once", [1, 2], [3, 3]),
    "chain": ("none of source", [1, 2], [2, 3]),
    "past the pool": ("pages of the pool's 9", [1], [9]),
    "negative": ("pages of the pool's 9", [-1], [3]),
    "lengths": ("must have source's 2 pages", [1, 2], [3]),
    "floats": ("must be integers", [1.0], [2]),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(backend, name):
    attn, rng = make(backend), np.random.default_rng()
    kv = tuple(cache(attn.spec, dim, rng) for dim in (16, 8))
    before = [x.copy() for x in kv]
    match, source, target = BAD[name]
    with pytest.raises(at.ArgumentError, match=match):
        attn.copy_pages(kv, source, target)
    for got, old in zip(kv, before, strict=True):
        np.testing.assert_array_equal(got, old)
