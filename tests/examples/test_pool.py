# SPDX-License-Identifier: Apache-2.0
"""Pages: holders, writers, copies and moves."""

import numpy as np
import pytest

from attnrt.examples.generate.pool import PagePool, PoolExhausted
from attnrt.examples.generate.sampling import Sampler
from attnrt.examples.generate.sequence import DROPPED, Request, Sequence


@pytest.fixture
def pool(tiny):
    pool = PagePool(tiny.config, 6, 4)
    rng = np.random.default_rng(3)
    for k, v in pool.layers:
        k[...], v[...] = rng.standard_normal(k.shape), rng.standard_normal(v.shape)
    return pool


def sequence(pool, prompt_len=9):
    return Sequence(Request(id=0, prompt=tuple(range(prompt_len)), max_tokens=4), 0, Sampler(), pool, 6)


def test_a_page_lives_as_long_as_its_last_holder(pool):
    page = pool.alloc("a")
    pool.retain(page)
    pool.release(page)
    assert (pool.in_use, pool.refs(page), pool.is_writer(page, "a")) == (1, 1, True)
    pool.release(page)
    assert (pool.in_use, pool.refs(page), pool.peak) == (0, 0, 1)


def test_exhaustion_asks_for_pages_back_once_more(pool):
    pages = [pool.alloc("a") for _ in range(6)]
    with pytest.raises(PoolExhausted):
        pool.alloc("b")
    pool.reclaim = lambda: bool(pages) and pool.release(pages.pop()) is None
    assert pool.is_writer(pool.alloc("b"), "b")


def test_only_the_writer_fills_a_shared_page_in_place(pool):
    owner, reader = sequence(pool), sequence(pool)
    owner.reserve(6)
    owner.computed = reader.computed = 6
    reader.pages = [pool.retain(p) for p in owner.pages]
    before = [tuple(c[owner.pages[1], :2].copy() for c in layer) for layer in pool.layers]
    shared = list(owner.pages)
    owner.reserve(7)
    reader.reserve(9)
    assert owner.pages == shared and reader.pages[0] == shared[0] and reader.pages[1] not in shared
    assert [pool.refs(p) for p in shared] == [2, 1] and len(reader.pages) == 3
    for (k, v), (k_before, v_before) in zip(pool.layers, before, strict=True):
        np.testing.assert_array_equal(k[reader.pages[1], :2], k_before)
        np.testing.assert_array_equal(v[reader.pages[1], :2], v_before)


def test_move_reads_all_before_it_writes(pool):
    k = pool.layers[1][0]
    flat = k.reshape(-1, *k.shape[2:])
    before = flat.copy()
    pool.move(np.array([5, 7, 9]), np.array([4, 5, 6]))
    np.testing.assert_array_equal(flat[[4, 5, 6]], before[[5, 7, 9]])
    np.testing.assert_array_equal(flat[7:], before[7:])


def test_truncate_and_release_give_everything_back(pool):
    seq = sequence(pool)
    seq.reserve(17)
    seq.computed = 8
    seq.truncate()
    assert (len(seq.pages), seq.budget, pool.in_use) == (2, 4, 2)
    seq.release()
    assert pool.in_use == 0


@pytest.mark.parametrize(
    "computed, kept", [(9, [0, 1, 2]), (12, [0, 1, 2]), (13, [0, 2, 3]), (20, [0, 3, 4])]
)
def test_streaming_drops_pages_that_no_later_query_sees(pool, computed, kept):
    # sinks 3, recent 6: the next query, at `computed`, sees keys 0-2 and computed - 5 .. computed
    seq = sequence(pool)
    seq.reserve(computed)
    seq.computed = computed
    seq.drop_old(3, 6)
    assert [i for i, p in enumerate(seq.pages) if p != DROPPED] == kept
    assert pool.in_use == len(kept)
