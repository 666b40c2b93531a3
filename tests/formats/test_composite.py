# SPDX-License-Identifier: Apache-2.0
"""cascade and shared_prefix against the flat index of the same keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


@st.composite
def stacks(draw):
    """Random nested levels: per level (qo_indptr, page lists, kv_lens), the pages' size, and keys of each query."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([1, 3, 4]))
    n = draw(st.integers(0, 6))
    own = np.concatenate(([0], np.cumsum(rng.integers(0, 4, n)))).astype(int)
    bounds = [own]
    for _ in range(draw(st.integers(0, 3))):
        inner = [b for b in np.unique(bounds[0])[1:-1] if rng.random() < 0.6]
        bounds.insert(0, np.array([0, *inner, own[-1]]) if n else np.array([0]))
    fresh = iter(rng.permutation(2000).tolist())
    levels, keys = [], {row: [] for row in range(own[-1])}
    for qo in bounds:
        kv = rng.integers(0, 4 * size, len(qo) - 1)
        pages = [[next(fresh) for _ in range(-(-k // size))] for k in kv]
        levels.append(
            (
                qo,
                np.concatenate(([0], np.cumsum([len(p) for p in pages]))).astype(int),
                [p for one in pages for p in one],
                kv,
                size,
            )
        )
        for r, (listed, k) in enumerate(zip(pages, kv, strict=True)):
            for row in range(qo[r], qo[r + 1]):
                keys[row] += [listed[j // size] * size + j % size for j in range(k)]
    return levels, keys, own


@given(stack=stacks())
def test_cascade_is_flat(kit, stack):
    levels, keys, own = stack
    index = f.cascade(*(f.paged(*level) for level in levels))
    found = kit.seen(index)
    assert len(found) == len(keys)
    for r in range(len(own) - 1):
        for row in range(own[r], own[r + 1]):
            n = len(keys[row])
            assert found[row, 0] == (keys[row], list(range(n)), n - (own[r + 1] - row), r)
            assert index.requests.kv_lens[r] == n
    assert len(index.parts) == len(levels)


@given(stack=stacks())
def test_positions(kit, stack):
    levels, keys, own = stack
    rng = np.random.default_rng()
    qo_pos = rng.integers(-9, 9, own[-1])
    # All requests of one index begin at the same position: they may share the first level.
    index = f.cascade(*(f.paged(*level) for level in levels), qo_pos=qo_pos, kv_pos=[7] * (len(own) - 1))
    for (row, _), (slots, positions, at, _) in kit.seen(index).items():
        assert slots == keys[row] and positions == [7 + j for j in range(len(slots))] and at == qo_pos[row]
    index = f.cascade(*(f.paged(*level) for level in levels), kv_pos=[7] * (len(own) - 1))
    for (row, _), (slots, _, at, r) in kit.seen(index).items():
        assert at == 7 + len(slots) - (own[r + 1] - row)


def test_c73_three_levels_of_one_pool(kit):
    """16 / 8 / 3 tokens, page 4, batch 4 in 2 groups."""
    level0 = f.paged([0, 4], [0, 4], [9, 3, 5, 1], [16], 4)
    level1 = f.paged([0, 2, 4], [0, 2, 4], [0, 2, 4, 6], [8, 8], 4)
    level2 = f.paged([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [7, 8, 10, 11], [3, 3, 3, 3], 4)
    index = f.cascade(level0, level1, level2)
    lists = [
        [9, 3, 5, 1, *group, own] for group, own in (([0, 2], 7), ([0, 2], 8), ([4, 6], 10), ([4, 6], 11))
    ]
    flat = f.paged(range(5), [0, 7, 14, 21, 28], [p for pages in lists for p in pages], [27] * 4, 4)
    assert kit.seen(index) == kit.seen(flat)
    assert kit.seen(f.share(flat, 4)) == kit.seen(flat)
    assert index.features.num_parts == 3 and index.page_size == 4


def test_shared_prefix_is_two_levels_and_pages_may_differ(kit):
    prefix = f.paged([0, 3], [0, 1], [2], [5], 8)
    own = f.paged([0, 1, 3], [0, 1, 3], [0, 12, 1], [2, 3], 2)
    index = f.shared_prefix(prefix, own)
    found = kit.seen(index)
    assert found[0, 0] == ([16, 17, 18, 19, 20, 0, 1], list(range(7)), 6, 0)
    assert found[2, 0] == ([16, 17, 18, 19, 20, 24, 25, 2], list(range(8)), 7, 1)
    assert index.page_size == 8 and index.requests.kv_lens.tolist() == [7, 8]


def test_one_level_is_itself(kit):
    own = f.paged([0, 1, 3], [0, 1, 3], [0, 9, 1], [2, 3], 2)
    assert kit.seen(f.cascade(own)) == kit.seen(own) and isinstance(f.cascade(own), f.BlockSparse)


def test_errors(kit):
    own = f.paged([0, 1, 3], [0, 1, 3], [0, 9, 1], [2, 3], 2)
    with pytest.raises(AttnrtError, match="levels"):
        f.cascade()
    with pytest.raises(AttnrtError, match=r"level 1.*3 queries"):
        f.cascade(own, f.paged([0, 1], [0, 1], [0], [2], 2))
    with pytest.raises(AttnrtError, match="level 1"):
        f.cascade(f.paged([0, 2, 3], [0, 1, 2], [0, 1], [2, 2], 2), own)
    with pytest.raises(AttnrtError, match="level 0"):
        f.cascade(f.share(f.paged([0, 1, 2], [0, 1, 2], [1, 1], [4, 4], 4), 4), own)
    with pytest.raises(AttnrtError, match="level 1"):
        f.cascade(own, f.paged([0, 1, 3], [0, 1, 3], [0, 9, 1], kit.OnDevice((2,)), 2, max_kv_lens=[2, 3]))
    with pytest.raises(AttnrtError, match="Requests"):
        f.composite([own, f.paged([0, 1, 3], [0, 1, 3], [0, 9, 1], [2, 3], 2)])
    with pytest.raises(AttnrtError, match="parts"):
        f.composite([])
