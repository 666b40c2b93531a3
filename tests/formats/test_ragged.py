# SPDX-License-Identifier: Apache-2.0
"""ragged against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import ArgumentError, AttnrtError


@given(data=st.data())
def test_ragged_is_its_definition(kit, data):
    b = data.draw(kit.batches())
    index = f.ragged(b.qo_indptr, kit.indptr(b.kv_lens))
    start, row, expected = 0, 0, {}
    for r in range(b.n):
        for i in range(b.qo_lens[r]):
            keys = list(range(b.kv_lens[r]))
            expected[row, 0] = ([start + j for j in keys], keys, b.kv_lens[r] - b.qo_lens[r] + i, r)
            row += 1
        start += b.kv_lens[r]
    assert kit.seen(index) == expected
    assert index.features == f.Features(affine=True)
    assert index.max_block == sum(b.kv_lens) - 1


@given(data=st.data())
def test_stretches_longer_than_live(kit, data):
    b = data.draw(kit.batches())
    room = [k + s for k, s in zip(b.kv_lens, b.rng.integers(0, 5, b.n), strict=True)]
    index = f.ragged(b.qo_indptr, kit.indptr(room), kv_lens=b.kv_lens)
    for slots, positions, _, r in kit.seen(index).values():
        assert slots == [sum(room[:r]) + j for j in range(b.kv_lens[r])] and positions == list(
            range(b.kv_lens[r])
        )


@given(data=st.data())
def test_positions(kit, data):
    b = data.draw(kit.batches())
    each = [b.rng.integers(-50, 50, k) for k in b.kv_lens]
    plain = kit.seen(f.ragged(b.qo_indptr, kit.indptr(b.kv_lens)))
    found = kit.seen(f.ragged(b.qo_indptr, kit.indptr(b.kv_lens), kv_pos=each))
    for key, (slots, positions, at, r) in found.items():
        assert slots == plain[key][0] and at == plain[key][2] and positions == each[r].tolist()
    index = f.ragged([0, 1], [0, 3], kv_pos=[-5], qo_pos=[9])
    assert kit.seen(index)[0, 0] == ([0, 1, 2], [-5, -4, -3], 9, 0)


def test_bound_lengths(kit):
    lens = kit.OnDevice((2,))
    index = f.ragged([0, 1, 2], [0, 8, 16], kv_lens=lens, max_kv_lens=[8, 4])
    assert index.requests.bound_kv_lens is lens and index.kv_end.tolist() == [8, 4]
    assert index.features == f.Features(affine=True, bound_kv_lens=True)
    index.check(full=True)


def test_errors():
    with pytest.raises(AttnrtError, match="kv_indptr"):
        f.ragged([0, 1], [0, 3, 2])
    with pytest.raises(ArgumentError, match="qo_indptr"):
        f.ragged([0, 1], [0, 3, 4])
    with pytest.raises(ArgumentError, match=r"kv_lens.*3 keys"):
        f.ragged([0, 1], [0, 3], kv_lens=[4])
    with pytest.raises(ArgumentError, match="max_kv_lens"):
        f.ragged([0, 1], [0, 3], max_kv_lens=[3])


def test_c52_live_rows_only():
    index = f.ragged([0, 1, 2], [0, 30, 37])
    dense = index.to_dense(64)
    assert (
        dense.visible.shape == (1, 2, 64) and not dense.visible[:, :, 37:].any() and dense.visible.sum() == 37
    )


def test_gather_reads_every_layout():
    rng = np.random.default_rng()
    pool = rng.standard_normal((6 * 4, 3, 8)), rng.standard_normal((6 * 4, 3, 5))
    index = f.paged([0, 1, 3], [0, 2, 3], [5, 1, 0], [7, 2], 4)
    for row, slots in ((0, [20, 21, 22, 23, 4, 5, 6]), (2, [0, 1])):
        for cache, layout in (
            (pool, "NHD"),
            ([x.reshape(6, 4, 3, -1) for x in pool], "NHD"),
            ([x.reshape(6, 4, 3, -1).transpose(0, 2, 1, 3) for x in pool], "HND"),
        ):
            k, v = index.gather(cache, row, 2, kv_layout=layout)
            assert np.array_equal(k, pool[0][slots, 2]) and np.array_equal(v, pool[1][slots, 2])
    with pytest.raises(ArgumentError, match="row"):
        index.gather(pool, 3)


def test_lengths_that_disagree_name_both_arrays():
    with pytest.raises(
        ArgumentError, match=r"kv_lens must have 1 entries \(.*kv_indptr has 2 entries\); got 2"
    ):
        f.ragged([0, 1, 2], [0, 3], kv_lens=[2, 1])
