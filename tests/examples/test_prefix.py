# SPDX-License-Identifier: Apache-2.0
"""The prefix tree against a plain search, and its accounting."""

import numpy as np
import pytest

from attnrt.examples.generate.pool import PagePool
from attnrt.examples.generate.prefix import PrefixTree


def make(tiny, page_size, num_pages=2000):
    pool = PagePool(tiny.config, num_pages, page_size)
    return pool, PrefixTree(pool)


def put(pool, tree, tokens, filled=0):
    """Store the full pages of `tokens` as a sequence that has left would."""
    pages = [pool.alloc("w") for _ in range(len(tokens) // pool.page_size)]
    new = tree.store(tokens, pages, filled)
    for page in pages:
        pool.release(page)
    return new


def shared_length(a, b):
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_finds_the_longest_stored_prefix(tiny, page_size):
    rng = np.random.default_rng(page_size)
    pool, tree = make(tiny, page_size)
    stored = []
    for _ in range(40):
        cut = rng.integers(0, 30)
        head = stored[rng.integers(len(stored))][:cut] if stored else []
        prompt = [*head, *rng.integers(0, 3, rng.integers(1, 30)).tolist()]
        whole = [s[: len(s) // page_size * page_size] for s in stored]
        common = max((shared_length(s, prompt) for s in whole), default=0)
        match = tree.match(prompt, step=1)
        assert len(match.nodes) * page_size + match.partial_tokens == min(common, len(prompt) - 1)
        assert [t for n in match.nodes for t in n.tokens] == prompt[: len(match.nodes) * page_size]
        put(pool, tree, prompt)
        stored.append(prompt)
    distinct = {tuple(s[: (i + 1) * page_size]) for s in stored for i in range(len(s) // page_size)}
    assert tree.num_pages() == len(distinct) == pool.in_use == tree.num_evictable()


def test_a_page_is_copied_only_once_it_is_filled(tiny):
    pool, tree = make(tiny, 4)
    (_, first), (_, second) = put(pool, tree, [1, 2, 3, 4, 5, 6, 7, 8], filled=None)
    assert tree.match([1, 2, 3, 4, 5, 6, 9], step=5).partial is None
    assert tree.match([1, 2, 3, 4, 5, 6, 9], step=5).nodes == (
        first,
    )  # whole pages may be read in the step that fills them
    second.filled = 5
    assert tree.match([1, 2, 3, 4, 5, 6, 9], step=5).partial is None
    assert tree.match([1, 2, 3, 4, 5, 6, 9], step=6).partial_tokens == 2


def test_eviction_takes_unheld_leaves_oldest_first(tiny):
    pool, tree = make(tiny, 2)
    put(pool, tree, [1, 1, 2, 2])
    tree.match([9], 1)
    put(pool, tree, [1, 1, 3, 3])
    held = tree.match([1, 1, 2, 2, 0], step=1).nodes[1]
    pool.retain(held.page)
    assert tree.num_evictable() == 1  # [3, 3]; the root page has a child that is held
    assert tree.evict_one() and not tree.evict_one()
    pool.release(held.page)
    assert tree.num_evictable() == 2
    assert tree.evict_one() and tree.evict_one() and pool.in_use == 0


def test_many_tiny_pages_do_not_recurse(tiny):
    pool, tree = make(tiny, 1, num_pages=5000)
    put(pool, tree, [0] * 5000)
    assert tree.num_evictable() == 5000
