# SPDX-License-Identifier: Apache-2.0
"""streaming against its definition: sinks and each query's window."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


@given(data=st.data(), sinks=st.integers(0, 9), recent=st.integers(1, 20))
def test_sinks_and_windows(kit, data, sinks, recent):
    b = data.draw(kit.batches())
    index = f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size)
    plain = kit.by_hand(b)
    logical = kit.seen(f.streaming(index, sinks, recent))
    cache = kit.seen(f.streaming(index, sinks, recent, "cache"))
    for (row, _), (slots, positions, at, r) in plain.items():
        keep = [j for j in positions if j <= at and (j < sinks or j > at - recent)]
        assert logical[row, 0] == ([slots[j] for j in keep], keep, at, r)
        # In the cache the keys stand side by side, the query on the last of them.
        where = list(range(len(keep)))
        assert cache[row, 0] == ([slots[j] for j in keep], where, len(keep) - 1 if keep else at, r)
    tile = data.draw(st.integers(2, 5))
    tiled = f.streaming(index, sinks, recent, tile=tile)
    assert kit.seen(tiled) == logical
    assert tiled.num_rows == sum(-(-q // tile) for q in b.qo_lens)


@given(data=st.data())
def test_decode_and_chunk_see_the_same(kit, data):
    """A query's lists and offsets do not depend on how many came with it."""
    b = data.draw(kit.batches())
    index = f.streaming(f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size), 3, 5, "cache")
    for row in range(b.num_qo):
        r = int(np.searchsorted(b.qo_indptr, row, side="right")) - 1
        kv_len = b.kv_lens[r] - (int(b.qo_indptr[r + 1]) - 1 - row)
        if kv_len < 1:
            continue
        pages = b.indices[b.kv_indptr[r] : b.kv_indptr[r + 1]]
        alone = f.streaming(f.paged([0, 1], [0, len(pages)], pages, [kv_len], b.size), 3, 5, "cache")
        one, many = f.keys_of(alone, 0), f.keys_of(index, row)
        for name in ("slots", "positions", "offsets"):
            assert getattr(one, name).tolist() == getattr(many, name).tolist()


def test_other_layouts(kit):
    ragged = kit.seen(f.streaming(f.ragged([0, 2], [0, 12]), 2, 3))
    assert ragged[1, 0] == ([0, 1, 9, 10, 11], [0, 1, 9, 10, 11], 11, 0)
    assert ragged[0, 0] == ([0, 1, 8, 9, 10], [0, 1, 8, 9, 10], 10, 0)
    index = f.paged([0, 1], [0, 6], [3, f.HOLE, f.HOLE, f.HOLE, 5, 1], [24], 4)  # pages between are freed
    assert kit.seen(f.streaming(index, 4, 6, "cache"))[0, 0][0] == [12, 13, 14, 15, 22, 23, 4, 5, 6, 7]
    each = f.paged([0, 1], [0, 2], [1, 0], [8], 4, kv_pos=[np.arange(8) * 10])
    assert kit.seen(f.streaming(each, 1, 2))[0, 0] == ([4, 2, 3], [0, 60, 70], 7, 0)


def test_errors(kit):
    index = f.paged([0, 1], [0, 1], [0], [4], 4)
    for args, label in (
        ((-1, 4), "sinks"),
        ((1, 0), "recent"),
        ((1.5, 1), "sinks"),
        ((1, 1, "other"), "positions"),
        ((1, 1, "cache", 2), "tile"),
        ((1, 1, "logical", 0), "tile"),
    ):
        with pytest.raises(AttnrtError, match=label):
            f.streaming(index, *args[:3], tile=args[3] if len(args) > 3 else 1)
    with pytest.raises(AttnrtError, match="index"):
        f.streaming(f.tree(index, [-1]), 1, 1)
    with pytest.raises(AttnrtError, match="kv_lens"):
        f.streaming(f.paged([0, 1], [0, 1], [0], kit.OnDevice((1,)), 4, max_kv_lens=[4]), 1, 1)
    with pytest.raises(AttnrtError, match="indices"):
        f.streaming(f.paged([0, 1], [0, 1], kit.OnDevice((1,)), [4], 4), 1, 1)
