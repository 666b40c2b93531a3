# SPDX-License-Identifier: Apache-2.0
"""tokens() against the oracle's keys, one list at a time and many at once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


def unmasked(draw, kit):
    b = draw(kit.batches())
    index = f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size)
    kind = draw(st.sampled_from(["paged", "ragged", "streaming", "share", "heads", "each"]))
    if kind == "ragged":
        index = f.ragged(b.qo_indptr, kit.indptr(b.kv_lens))
    elif kind == "streaming":
        index = f.streaming(index, 3, 5)
    elif kind == "share":
        index = f.share(f.concat(index, index), 1)
    elif kind == "heads":
        pages = b.rng.permutation(b.n * 6).reshape(b.n, 2, 3)
        index = f.pages_per_head(b.qo_indptr, pages, b.rng.integers(0, 4, (b.n, 2)), b.kv_lens, b.size)
    elif kind == "each":
        index = f.paged(
            b.qo_indptr,
            b.kv_indptr,
            b.indices,
            b.kv_lens,
            b.size,
            kv_pos=[b.rng.integers(-9, 9, k) for k in b.kv_lens],
        )
    return index


@given(data=st.data())
def test_tokens_are_the_lists(kit, data):
    index = unmasked(data.draw, kit)
    for part in index.parts:
        rows, heads, begins, ends, want = [], [], [], [], []
        for _, row, head, begin, end in kit.lists_of(f.composite([part])):
            if part.qo_indptr[row] == part.qo_indptr[row + 1]:
                continue
            q = int(part.qo_indptr[row])
            k = f.keys_of(part, q if part.qo_index is None else int(part.qo_index[q]), head)
            low = data.draw(st.integers(begin, end))
            high = data.draw(st.integers(low, end))
            inside = (k.offsets >= low) & (k.offsets < high)
            slots, positions = f.tokens(part, row, head, low, high)
            assert slots.dtype == np.int64 and positions.dtype == np.int32
            assert (
                slots.tolist() == k.slots[inside].tolist()
                and positions.tolist() == k.positions[inside].tolist()
            )
            want += list(zip(slots.tolist(), positions.tolist(), strict=True))
            rows, heads, begins, ends = [*rows, row], [*heads, head], [*begins, low], [*ends, high]
        if rows:
            slots, positions = f.tokens(part, rows, heads, begins, ends)
            assert list(zip(slots.tolist(), positions.tolist(), strict=True)) == want


def test_holes_and_ranges(kit):
    index = f.paged([0, 1], [0, 3], [4, f.HOLE, 2], [10], 4)
    assert f.tokens(index, 0, 0, 2, 9)[0].tolist() == [18, 19, -1, -1, -1, -1, 8]
    for begin, end in ((-1, 3), (5, 4), (0, 13)):
        with pytest.raises(AttnrtError, match="o_begin"):
            f.tokens(index, 0, 0, begin, end)
    assert len(f.tokens(index, [], [], [], [])[0]) == 0
    with pytest.raises(AttnrtError, match="indices"):
        f.tokens(f.paged([0, 1], [0, 1], kit.OnDevice((1,)), [4], 4), 0, 0, 0, 1)
