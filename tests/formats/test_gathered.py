# SPDX-License-Identifier: Apache-2.0
"""gathered: the same keys side by side, at the same offsets and positions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import ArgumentError, UnsupportedError


@given(data=st.data())
def test_the_same_keys(kit, data):
    b = data.draw(kit.batches())
    index = f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size)
    if data.draw(st.booleans()):
        index = f.tree(
            index, mask=[b.rng.random((q, k)) < 0.5 for q, k in zip(b.qo_lens, b.kv_lens, strict=True)]
        )
    found = f.gathered(index)
    before, now = kit.seen(index), kit.seen(found.index)
    assert len(found.slots) == len(found.positions) == sum(b.kv_lens) and found.index.indices is None
    for key, (slots, positions, at, request) in now.items():
        assert (found.slots[slots].tolist(), positions, at, request) == before[key]
        assert found.positions[slots].tolist() == positions


def test_a_live_range_that_begins_later(kit):
    index = f.paged([0, 2], [0, 2], [3, 1], [30], 16)
    from dataclasses import replace

    index = replace(index, kv_begin=np.array([9], np.int32), kv_offset=np.array([-9], np.int32))
    found = f.gathered(index)
    assert found.slots.tolist() == [*range(57, 64), *range(16, 30)] and found.index.kv_base.tolist() == [-9]


def test_ragged_stays_what_it_is(kit):
    index = f.ragged([0, 1, 3], [0, 5, 9])
    found = f.gathered(index)
    assert found.slots.tolist() == list(range(9)) and kit.seen(found.index) == kit.seen(index)


def test_errors():
    flat = f.paged([0, 3], [0, 2], [1, 0], [30], 16)
    for index, error, match in (
        (f.tree(flat, [-1, 0, 0]), ArgumentError, "must be flat"),
        (f.paged([0, 3], [0, 2], [1, f.HOLE], [30], 16), UnsupportedError, "no holes"),
        (f.tree(flat, [-1, 0, 0]).parts[1], UnsupportedError, "positions that run on"),
        (
            f.pages_per_head([0, 1], np.zeros((1, 2, 1), np.int32), np.ones((1, 2), np.int32), [9], 16),
            UnsupportedError,
            "one list",
        ),
    ):
        with pytest.raises(error, match=match):
            f.gathered(index)
