# SPDX-License-Identifier: Apache-2.0
"""Hard cases of engines: pages freed and reused while a request still points to them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import attnrt as at
from attnrt import formats, testing

v = at.variants


def test_c102_a_deduplicated_prefix(backend, kit):
    """Two requests with equal two-page prefixes: one copy is dropped, tables remapped, the freed pages refilled with NaN."""
    spec = kit.spec(backend)
    size, lens = 4, [11, 10]
    tables = np.array([[3, 5, 1], [6, 2, 7]])
    k, values = kit.draw(1, 8, size, 2, 16), kit.draw(2, 8, size, 2, 16)
    for cache in (k, values):
        cache[tables[1, :2]] = cache[tables[0, :2]]
    q = kit.draw(3, 3, 4, 16)
    before = kit.right(backend, spec, formats.block_table([0, 1, 3], tables, lens, size), q, (k, values))
    freed = tables[1, :2].copy()
    tables[1, :2] = tables[0, :2]
    for cache in (k, values):
        cache[freed] = np.nan
    index = formats.block_table([0, 1, 3], tables, lens, size)
    assert not set(freed.tolist()) & set(index.indices.tolist())
    testing.same(before, kit.run(backend, spec, index, q, (k, values)), "a remapped prefix")
    testing.same(before, kit.run(backend, spec, formats.share(index, 1), q, (k, values)), "a shared prefix")


def test_c102_pages_live_as_long_as_their_last_holder():
    """The example engine's pool: a page that two sequences hold is free only when both let go."""
    from attnrt.examples.generate.pool import PagePool

    config = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=8)
    pool = PagePool(config, 4, 2)
    page = pool.retain(pool.alloc("a"))
    pool.release(page)
    others = [pool.alloc("b") for _ in range(3)]
    assert page not in others and pool.num_free == 0
    pool.release(page)
    assert pool.alloc("c") == page


def test_c102_append_after_the_remap(host, kit):
    """64 raw tokens, 63 logical ones: the next key goes to the request's own page, never into the shared prefix."""
    spec = kit.spec(host)
    size = 16
    k = np.full((9, size, 2, 16), np.nan, np.float32)
    shared = [0, 1, 2]
    k[shared] = kit.draw(1, 3, size, 2, 16)
    k[[3, 4], :15] = kit.draw(2, 2, 15, 2, 16)
    kept = k[:3].copy()
    attn = kit.attention(host, spec)
    table = np.array([[*shared, 3], [*shared, 4]])
    index = formats.block_table([0, 1, 2], table, [64, 64], size)
    attn.plan(index)
    rows = kit.draw(3, 2, 2, 16)
    attn.append(rows, rows, (k, k.copy()))
    assert (k[:3] == kept).all() and (k[3, 15] == rows[0]).all() and (k[4, 15] == rows[1]).all()
    kit.right(host, spec, index, kit.draw(4, 2, 4, 16), (k, k), attn=attn)
