# SPDX-License-Identifier: Apache-2.0
"""paged, block_table and their helpers against loops over the definition; bad input by case id."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import ArgumentError, AttnrtError, DtypeError


def build(b, **kw):
    return f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size, **kw)


@given(data=st.data())
def test_paged_is_its_definition(kit, data):
    b = data.draw(kit.batches())
    index = build(b)
    assert index.num_qo == b.num_qo
    assert kit.seen(index) == kit.by_hand(b)
    assert index.max_block == max(b.indices.tolist(), default=-1)
    assert index.features == f.Features()


@given(data=st.data())
def test_block_table_equals_paged_whatever_pads_it(kit, data):
    b = data.draw(kit.batches())
    table = b.rng.integers(-(2**31), 2**31 - 1, (b.n, max(b.counts, default=0) + 1))
    for r in range(b.n):
        live = -(-b.kv_lens[r] // b.size)
        table[r, :live] = b.indices[b.kv_indptr[r] : b.kv_indptr[r] + live]
    index = f.block_table(b.qo_indptr, table.astype(np.int32), b.kv_lens, b.size)
    assert kit.seen(index) == kit.by_hand(b)
    live = [b.indices[b.kv_indptr[r] + j] for r in range(b.n) for j in range(-(-b.kv_lens[r] // b.size))]
    assert index.max_block == max(live, default=-1)


@given(data=st.data())
def test_page_size_one_names_the_same_slots(kit, data):
    b = data.draw(kit.batches())
    slots = [s for r in range(b.n) for s in _slots(b, r)]
    index = f.paged(b.qo_indptr, kit.indptr(b.kv_lens), np.array(slots, np.int32), b.kv_lens, 1)
    assert kit.seen(index) == kit.by_hand(b)


def _slots(b, r):
    pages = b.indices[b.kv_indptr[r] : b.kv_indptr[r + 1]]
    return [int(pages[j // b.size]) * b.size + j % b.size for j in range(b.kv_lens[r])]


@given(data=st.data())
def test_positions_of_the_user(kit, data):
    b = data.draw(kit.batches())
    qo_pos = b.rng.integers(-50, 50, b.num_qo)
    first = b.rng.integers(-50, 50, b.n)
    each = [b.rng.integers(-50, 50, k) for k in b.kv_lens]
    expected = kit.by_hand(b)
    for kv_pos in (first, each):
        found = kit.seen(build(b, qo_pos=qo_pos, kv_pos=kv_pos))
        for (row, _), (slots, positions, at, request) in found.items():
            want = expected[row, 0]
            assert slots == want[0] and request == want[3] and at == qo_pos[row]
            if kv_pos is first:
                assert positions == [first[request] + p for p in want[1]]
            else:
                assert positions == each[request].tolist()


def test_holes_count_and_are_not_seen(kit):
    index = f.paged([0, 1], [0, 3], [4, f.HOLE, 2], [10], 4)
    slots, positions, at, _ = kit.seen(index)[0, 0]
    assert slots == [16, 17, 18, 19, 8, 9] and positions == [0, 1, 2, 3, 8, 9] and at == 9


@pytest.mark.parametrize("size", [1, 3, 24, 48, 256, 512, 544, 1000])
def test_c58_any_page_size(kit, size):
    kv = 2 * size + (size + 1) // 2
    index = f.paged([0, 2], [0, 3], [5, 0, 7], [kv], size)
    slots, _, at, _ = kit.seen(index)[1, 0]
    assert slots == [5 * size + t for t in range(size)] + list(range(size)) + [
        7 * size + t for t in range(kv - 2 * size)
    ]
    assert at == kv - 1


def test_c47_bottom_right(kit):
    index = f.paged([0, 2], [0, 2], [0, 1], [6], 3)
    visible = [[p <= at for p in positions] for _, positions, at, _ in kit.seen(index).values()]
    assert np.array(visible).astype(int).tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]


def test_c50_nothing_is_legal(kit):
    assert kit.seen(f.paged([0], [0], [], [], 16)) == {}
    index = f.paged([0, 0, 0], [0, 256, 512], np.arange(512), [4096, 4096], 16)
    assert kit.seen(index) == {} and index.num_rows == 2
    index = f.paged([0, 0, 1, 1, 2], [0, 0, 1, 1, 3], [3, 1, 2], [0, 3, 0, 5], 4)
    found = kit.seen(index)
    assert found[0, 0] == ([12, 13, 14], [0, 1, 2], 2, 1) and found[1, 0][2:] == (4, 3)
    index = f.block_table([0], np.zeros((0, 7), np.int32), [], 16)
    assert kit.seen(index) == {}


def test_c53_last_page_lengths():
    assert f.last_page_lens([100, 96, 0, 1], 16).tolist() == [4, 16, 0, 1]
    assert f.kv_lens_of([0, 7, 13, 13], [4, 16, 0], 16).tolist() == [100, 96, 0]
    for bad in (0, 17, -1):
        with pytest.raises(ArgumentError, match="last_page_len"):
            f.kv_lens_of([0, 7], [bad], 16)
    with pytest.raises(ArgumentError, match=r"kv_lens.*7 pages of 16"):
        f.paged([0, 1], [0, 7], np.arange(7), [113], 16)
    with pytest.raises(ArgumentError, match="kv_lens"):
        f.paged([0, 1], [0, 7], np.arange(7), [-1], 16)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16, np.uint64])
def test_c10_other_integers_are_converted(kit, dtype):
    plain = f.paged([0, 1, 2], [0, 1, 2], [1, 0], [2, 2], 2)
    for name in range(4):
        args = [[0, 1, 2], [0, 1, 2], [1, 0], [2, 2]]
        args[name] = np.array(args[name], dtype)
        assert kit.seen(f.paged(*args, 2)) == kit.seen(plain)
    for array in (plain.indices, plain.indptr, plain.qo_indptr, plain.kv_end):
        assert array.dtype == np.int32 and not array.flags.writeable


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr", "kv_indices", "kv_lens"])
def test_c10_what_is_no_int32_raises(name):
    good = {"qo_indptr": [0, 1, 2], "kv_indptr": [0, 1, 2], "kv_indices": [1, 0], "kv_lens": [2, 2]}
    for bad in (np.array(good[name], np.float32), np.array(good[name], bool), [0.5] * len(good[name])):
        with pytest.raises(DtypeError, match=name):
            f.paged(**{**good, name: bad}, page_size=2)
    with pytest.raises(AttnrtError, match=name):
        f.paged(**{**good, name: np.array([*good[name][:-1], 2**31])}, page_size=2)
    for bad in (np.array([good[name]]), good[name][:-1], 3, None, "abc"):
        with pytest.raises(AttnrtError):
            f.paged(**{**good, name: bad}, page_size=2)


@pytest.mark.parametrize(
    "change, label",
    [
        ({"qo_indptr": [0, 2, 1]}, "qo_indptr"),
        ({"qo_indptr": [1, 1, 2]}, "qo_indptr"),
        ({"qo_indptr": []}, "qo_indptr"),
        ({"kv_indptr": []}, "kv_indptr"),
        ({"kv_indptr": [0, 2, 1], "kv_indices": [1]}, "kv_indptr"),
        ({"kv_indptr": [0, 2**31 - 1, -(2**31)]}, "kv_indptr"),
        ({"kv_indices": [1, -2]}, "kv_indices"),
        ({"kv_indices": [1, 0, 3]}, "kv_indices"),
        ({"kv_indices": [1]}, "kv_indices"),
        ({"kv_lens": [2, 3]}, "kv_lens"),
        ({"kv_lens": [2]}, "kv_lens"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 2.0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"qo_pos": [1]}, "qo_pos"),
        ({"kv_pos": [1]}, "kv_pos"),
        ({"kv_pos": [[0, 1], [0]]}, r"kv_pos\[1\]"),
        ({"kv_pos": [[0, 1]]}, "kv_pos"),
        ({"max_kv_lens": [2, 2]}, "max_kv_lens"),
    ],
)
def test_errors_name_the_array(change, label):
    good = {
        "qo_indptr": [0, 1, 2],
        "kv_indptr": [0, 1, 2],
        "kv_indices": [1, 0],
        "kv_lens": [2, 2],
        "page_size": 2,
    }
    f.paged(**good)
    with pytest.raises(AttnrtError, match=label) as error:
        f.paged(**{**good, **change})
    assert error.value.label and error.value.rule


def test_the_index_owns_its_arrays(kit):
    arrays = [np.array(x, np.int32) for x in ([0, 1, 2], [0, 1, 2], [1, 0], [2, 2])]
    index = f.paged(*arrays, 2)
    before = kit.seen(index)
    for array in arrays:
        array[:] = 99
    assert kit.seen(index) == before
    with pytest.raises(ValueError):
        index.indices[0] = 7


def test_strided_and_foreign_arrays(kit):
    wide = np.arange(40, dtype=np.int32).reshape(4, 10)
    plain = f.block_table([0, 1, 2], np.ascontiguousarray(wide[::2, ::3]), [7, 8], 2)
    assert kit.seen(f.block_table([0, 1, 2], wide[::2, ::3], [7, 8], 2)) == kit.seen(plain)
    torch = pytest.importorskip("torch")
    table = torch.tensor(wide[::2, ::3].copy())
    index = f.block_table(torch.tensor([0, 1, 2]), table, torch.tensor([7, 8], dtype=torch.int32), 2)
    assert kit.seen(index) == kit.seen(plain)
    table[:] = 0
    assert kit.seen(index) == kit.seen(plain)


def test_table_too_narrow():
    with pytest.raises(ArgumentError, match=r"kv_lens.*2 pages of 4"):
        f.block_table([0, 1], [[1, 2]], [9], 4)
    with pytest.raises(ArgumentError, match="table"):
        f.block_table([0, 1], [1, 2], [8], 4)
    with pytest.raises(ArgumentError, match="table"):
        f.block_table([0, 1], [[1, -2]], [8], 4)


def test_bound_arrays_stay_where_they_are(kit):
    ids, lens = kit.OnDevice((9,)), kit.OnDevice((2,))
    index = f.paged([0, 1, 3], [0, 4, 9], ids, lens, 16, max_kv_lens=[64, 80])
    assert index.indices is ids and index.requests.bound_kv_lens is lens and index.max_block == -1
    assert index.features == f.Features(bound_indices=True, bound_kv_lens=True)
    assert index.kv_end.tolist() == [64, 80] and index.qo_pos.tolist() == [63, 78, 79]
    index.check(full=True)
    with pytest.raises(AttnrtError, match="indices"):
        index.to_dense()
    index = f.block_table([0, 1, 2], kit.OnDevice((2, 5)), [80, 3], 16)
    assert (
        index.indptr.tolist() == [0, 5, 10] and index.indices.shape == (10,) and index.features.bound_indices
    )
    index.check(full=True)


def test_bound_arrays_are_checked(kit):
    good = ([0, 1, 3], [0, 4, 9])
    for bad in (
        kit.OnDevice((8,)),
        kit.OnDevice((9,), "<i8"),
        kit.OnDevice((9,), "<f4"),
        kit.OnDevice((3, 3)),
        kit.OnDevice((9,), strides=(8,)),
    ):
        with pytest.raises(AttnrtError, match="kv_indices"):
            f.paged(*good, bad, [64, 80], 16)
    for bad in (kit.OnDevice((3,)), kit.OnDevice((2,), "<i8")):
        with pytest.raises(AttnrtError, match="kv_lens"):
            f.paged(*good, np.arange(9), bad, 16, max_kv_lens=[64, 80])
    with pytest.raises(ArgumentError, match="max_kv_lens"):
        f.paged(*good, np.arange(9), kit.OnDevice((2,)), 16)
    with pytest.raises(ArgumentError, match="max_kv_lens"):
        f.paged(*good, np.arange(9), kit.OnDevice((2,)), 16, max_kv_lens=[65, 80])
    with pytest.raises(ArgumentError, match=r"qo_indptr.*host"):
        f.paged(kit.OnDevice((3,)), good[1], np.arange(9), [64, 80], 16)
    with pytest.raises(ArgumentError, match="table"):
        f.block_table([0, 1, 2], kit.OnDevice((2, 5), strides=(40, 4)), [80, 3], 16)


def test_c19_slots_past_32_bits_of_elements(kit):
    index = f.paged([0, 1], [0, 1], [2**27 - 1], [16], 16)
    assert kit.seen(index)[0, 0][0][-1] == 2**31 - 1
    index = f.paged([0, 1], [0, 1], [2**31 - 1], [16], 16)
    assert kit.seen(index)[0, 0][0][0] == (2**31 - 1) * 16


def test_lengths_that_disagree_name_both_arrays(kit):
    for lens in ([2, 1], np.array([2, 1], np.int32)):
        with pytest.raises(
            ArgumentError, match=r"kv_lens must have 1 entries \(.*kv_indptr has 2 entries\); got 2"
        ):
            f.paged([0, 1, 2], [0, 3], [0, 1, 2], lens, 4)
        with pytest.raises(ArgumentError, match=r"kv_lens must have 3 entries \(.*table has 3 rows\); got 2"):
            f.block_table([0, 1, 2], np.zeros((3, 1), np.int32), lens, 4)
    with pytest.raises(
        ArgumentError, match=r"kv_lens must have 1 entries \(.*kv_indptr has 2 entries\); got 2"
    ):
        f.paged([0, 1, 2], [0, 3], [0, 1, 2], kit.OnDevice((2,)), 4, max_kv_lens=[2, 1])
