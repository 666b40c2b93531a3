# SPDX-License-Identifier: Apache-2.0
"""Offsets past 2**31 and 2**32 elements (pages, mask bits) and many requests. Untouched memory costs nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.dtypes import as_dtype

v = at.variants


@pytest.mark.parametrize("power", [31, 32])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pools_past_32_bits(backend, power, kv_layout):
    """Only pages just past 2**power elements live; a 32-bit product reads page 0 or faults."""
    size, heads, dim = 16, 2, 64
    spec = at.AttentionSpec(
        num_qo_heads=2,
        num_kv_heads=heads,
        head_dim=dim,
        q_dtype="float32",
        kv_dtype="float8_e4m3fn",
        variant=v.causal(),
        kv_layout=kv_layout,
    )
    first = (1 << power) // (size * heads * dim)
    inner = (heads, size) if kv_layout == "HND" else (size, heads)
    kind = as_dtype("float8_e4m3fn").numpy
    caches = [np.zeros((first + 3, *inner, dim), np.uint8).view(kind) for _ in range(2)]
    rng = np.random.default_rng(0)
    for cache in caches:
        cache[first:] = rng.standard_normal(cache[first:].shape).astype(kind)
    q = rng.standard_normal((2, 2, dim)).astype(np.float32)
    far = formats.paged([0, 2], [0, 3], [first + 1, first, first + 2], [40], size)
    near = formats.paged([0, 2], [0, 3], [1, 0, 2], [40], size)
    attn = at.Attention(spec, backend=backend)
    results = []
    for index, kv in ((far, caches), (near, [cache[first:].copy() for cache in caches])):
        plan = attn.plan(index)
        out, lse = attn.run(q, tuple(kv), return_lse=True)
        results.append(testing.Result(out=out, lse=lse))
    testing.check(plan, q, tuple(kv), out, lse)
    testing.same(*results, "a pool past 32-bit offsets")
    rows = rng.standard_normal((1, heads, dim)).astype(np.float32)
    attn.append(rows, rows, tuple(caches), slots=[(first + 2) * size + 15])
    last = [c[first + 2, :, 15] if kv_layout == "HND" else c[first + 2, 15] for c in caches]
    assert all((one == rows[0].astype(kind)).all() for one in last)


def test_mask_bits_past_32_bits(backend):
    """A mask whose last request's bits begin past 2**32."""
    spec = at.AttentionSpec(
        num_qo_heads=1, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=v.custom_mask()
    )
    case = testing.make_case(spec, [1, 1], [3, 40])
    batch = testing.lay_out(case)
    rng = np.random.default_rng(1)
    mask = rng.random(40) < 0.5
    small = formats.tree(batch.index, mask=[np.ones((1, 3), bool), mask[None]])
    start = (1 << 32) + 1024
    bits = np.zeros(start // 8 + 16, np.uint8)
    bits[0] = 7
    bits[start // 8 : start // 8 + 5] = np.packbits(mask, bitorder="little")
    offsets = np.array([0, start], np.int64)
    large = replace(small, mask=bits, mask_offset=offsets, features=replace(small.features, bound_mask=True))
    attn = at.Attention(spec, backend=backend)
    results = []
    for index in (small, large):
        attn.plan(index)
        out, lse = attn.run(batch.q, batch.kv, return_lse=True)
        results.append(testing.Result(out=out, lse=lse))
    testing.same(*results, "mask bits past 2**32")


def test_many_requests(backend):
    """More requests than any 16-bit grid; more items than any fixed work list."""
    count = 400 if backend == "reference" else 66_000
    spec = at.AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=v.causal())
    rng = np.random.default_rng(2)
    k, values = (rng.standard_normal((count, 1, 8)).astype(np.float32) for _ in range(2))
    q = rng.standard_normal((count, 1, 8)).astype(np.float32)
    every = np.arange(count + 1, dtype=np.int32)
    attn = at.Attention(spec, backend=backend)
    attn.plan(formats.ragged(every, every))
    out, lse = attn.run(q, (k, values), return_lse=True)
    np.testing.assert_array_equal(out, values)  # one key each: its V itself
    np.testing.assert_allclose(lse[:, 0], (q * k).sum((1, 2)) * 8**-0.5, rtol=1e-5, atol=1e-6)


def test_many_rows_in_one_request(backend):
    """A prompt longer than any tile, and a cache longer than any shared memory."""
    spec = at.AttentionSpec(
        num_qo_heads=1, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=v.sliding_window(3)
    )
    count = 500 if backend == "reference" else 20_000
    rng = np.random.default_rng(3)
    q, k, values = (rng.standard_normal((count, 1, 8)).astype(np.float32) for _ in range(3))
    attn = at.Attention(spec, backend=backend)
    attn.plan(formats.ragged([0, count], [0, count]))
    out = attn.run(q, (k, values))
    at_row = np.arange(3, count)
    seen = at_row[:, None] + np.arange(-3, 1)
    s = np.einsum("rd,rjd->rj", q[at_row, 0].astype(float), k[seen, 0].astype(float)) * 8**-0.5
    p = np.exp(s - s.max(1, keepdims=True))
    want = np.einsum("rj,rjd->rd", p / p.sum(1, keepdims=True), values[seen, 0])
    np.testing.assert_allclose(out[3:, 0], want, rtol=1e-4, atol=1e-6)
