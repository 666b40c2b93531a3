# SPDX-License-Identifier: Apache-2.0
"""share: the same keys in the same order, stored prefixes listed once, at every depth."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


@st.composite
def families(draw, pages=(1, 2, 4)):
    """Requests whose page lists come from a random tree, so that they share at several depths; arguments of paged."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    size = draw(st.sampled_from(pages))
    n = draw(st.integers(1, 9))
    lists, fresh = [], iter(rng.permutation(1000).tolist())
    for _ in range(n):
        parent = lists[rng.integers(len(lists))] if lists and rng.random() < 0.8 else []
        keep = rng.integers(0, len(parent) + 1)
        lists.append([*parent[:keep], *[next(fresh) for _ in range(rng.integers(0, 6))]])
    kv = [max(len(x) * size - int(rng.integers(0, size)), 0) if x else 0 for x in lists]
    qo = rng.integers(0, 3, n)
    indptr = np.concatenate(([0], np.cumsum([len(x) for x in lists])))
    return (
        np.concatenate(([0], np.cumsum(qo))),
        indptr,
        np.array([p for x in lists for p in x], int),
        kv,
        size,
    )


@given(family=families(), least=st.integers(1, 9))
def test_shared_is_flat(kit, family, least):
    index = f.paged(*family)
    shared = f.share(index, least)
    assert kit.seen(shared) == kit.seen(index)
    for part in shared.parts[:-1]:
        assert (part.kv_end >= least).all() and (part.kv_begin == 0).all()
        assert all(
            len(set(part.request[a:b].tolist())) >= 2
            for a, b in zip(part.qo_indptr, part.qo_indptr[1:], strict=False)
        )


@given(family=families())
def test_each_page_of_two_askers_is_listed_once(kit, family):
    qo_indptr, indptr, indices, kv, size = family
    shared = f.share(f.paged(*family), 1)
    asking = [r for r in range(len(kv)) if qo_indptr[r + 1] > qo_indptr[r]]
    prefixes = {}
    for r in asking:
        pages = indices[indptr[r] : indptr[r + 1]][: kv[r] // size].tolist()
        for depth in range(1, len(pages) + 1):
            prefixes.setdefault(tuple(pages[:depth]), []).append(r)
    # Every full block with two askers behind one prefix lies in a shared part, once.
    expected = sorted(path[-1] for path, who in prefixes.items() if len(who) > 1)
    assert sorted(int(p) for part in shared.parts[:-1] for p in part.indices) == expected


@given(family=families(), parts=st.integers(1, 3))
def test_max_parts(kit, family, parts):
    index = f.paged(*family)
    shared = f.share(index, 1, max_parts=parts)
    assert len(shared.parts) <= parts and kit.seen(shared) == kit.seen(index)


@given(family=families())
def test_positions_take_part(kit, family):
    rng = np.random.default_rng()
    kv = family[3]
    index = f.paged(*family, kv_pos=rng.integers(0, 2, len(kv)))
    assert kit.seen(f.share(index, 1)) == kit.seen(index)
    index = f.paged(*family, kv_pos=[rng.integers(0, 9) * (rng.random() < 0.2) + np.arange(k) for k in kv])
    assert kit.seen(f.share(index, 1)) == kit.seen(index)


def test_three_levels_make_three_parts():
    lists = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [1, 2, 7]]
    index = f.paged(range(5), [0, 4, 8, 11, 14], [p for pages in lists for p in pages], [8, 8, 6, 6], 2)
    shared = f.share(index, 2)
    assert [part.indices.tolist() for part in shared.parts[:-1]] == [[1, 2], [3]]
    assert [part.qo_index.tolist() for part in shared.parts[:-1]] == [[0, 1, 2, 3], [0, 1]]
    assert shared.features.num_parts == 3 and shared.features.qo_index
    assert shared.parts[-1].kv_begin.tolist() == [6, 6, 4, 4]


def test_masked_keys_stay_their_own(kit):
    index = f.paged([0, 2, 4], [0, 3, 6], [1, 2, 3, 1, 2, 3], [6, 6], 2)
    masked = f.tree(index, mask=[np.tri(2, 3, 1, dtype=bool)] * 2, mask_begin=[3, 3])
    shared = f.share(masked, 1)
    assert [part.kv_end.tolist() for part in shared.parts] == [[2], [6, 6]]
    assert kit.seen(shared) == kit.seen(masked)


def test_nothing_to_share_is_the_index_itself():
    index = f.paged([0, 1, 2], [0, 1, 2], [1, 2], [4, 4], 4)
    assert f.share(index) is index
    index = f.paged([0, 1, 2], [0, 1, 2], [1, 1], [4, 4], 4)
    assert f.share(index, 5) is index and f.share(index, 4) is not index
    index = f.paged([0], [0], [], [], 4)
    assert f.share(index) is index


def test_errors(kit):
    index = f.paged([0, 1], [0, 1], [0], [4], 4)
    for bad in (0, 1.5, True, None):
        with pytest.raises(AttnrtError, match="min_tokens"):
            f.share(index, bad)
    with pytest.raises(AttnrtError, match="index"):
        f.share(f.tree(index, [-1]))
    with pytest.raises(AttnrtError, match="index"):
        f.share(f.ragged([0, 1], [0, 1]))
    with pytest.raises(AttnrtError, match="indices"):
        f.share(f.paged([0, 1], [0, 1], kit.OnDevice((1,)), [4], 4))


def test_time_of_many_long_prefixes():
    """The aim is 2 ms on an idle core; ten times that still tells a quadratic search."""
    common = np.arange(2000)
    lists = [
        np.concatenate([common[: 1000 + 500 * (r % 3)], 5000 + 3000 * r + np.arange(548)]) for r in range(64)
    ]
    lens = [len(x) for x in lists]
    index = f.paged(
        np.arange(65),
        np.concatenate(([0], np.cumsum(lens))),
        np.concatenate(lists),
        [16 * k for k in lens],
        16,
    )
    best = min(_timed(lambda: f.share(index)) for _ in range(5))
    assert len(f.share(index).parts) == 4
    assert best < 0.02


def _timed(call):
    start = time.process_time()
    call()
    return time.process_time() - start
