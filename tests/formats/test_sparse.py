# SPDX-License-Identifier: Apache-2.0
"""bsr, token_sparse, pages_per_head against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


@given(
    R=st.integers(1, 4),
    C=st.integers(1, 5),
    M=st.integers(0, 13),
    N=st.integers(0, 17),
    seed=st.integers(0, 2**32 - 1),
)
def test_bsr_is_its_matrix(kit, R, C, M, N, seed):
    rng = np.random.default_rng(seed)
    grid = rng.random((-(-M // R), -(-N // C))) < 0.5
    lists = [rng.permutation(np.flatnonzero(row)) for row in grid]
    indices = np.concatenate([*lists, np.zeros(0, int)])
    index = f.bsr(kit.indptr([len(x) for x in lists]), indices, (R, C), N, num_rows=M)
    found = kit.seen(index)
    for i in range(M):
        columns = [j for j in range(N) if grid[i // R, j // C]]
        assert found[i, 0] == (columns, columns, N - M + i, 0)
    assert len(found) == M


def test_bsr_takes_a_sparse_matrix(kit):
    sparse = pytest.importorskip("scipy.sparse")
    rng = np.random.default_rng()
    full = np.kron(rng.random((4, 6)) < 0.5, np.ones((3, 2))) * rng.integers(1, 9, (12, 12))
    index = f.bsr(sparse.bsr_array(full, blocksize=(3, 2)))
    assert not index.features.masked and index.block_size == (3, 2)
    assert (index.to_dense(12).visible[0] == (full != 0)).all()
    check_zeros(kit, sparse.bsr_array, rng, full)


def test_bsr_reads_zeros_inside_blocks_as_hidden(kit):
    class Matrix:  # what is read of a scipy.sparse.bsr_array
        def __init__(self, full, blocksize):
            R, C = blocksize
            blocks = full.reshape(full.shape[0] // R, R, full.shape[1] // C, C).transpose(0, 2, 1, 3)
            stored = [np.flatnonzero(row.any(axis=(1, 2))) for row in blocks]
            self.shape, self.blocksize = full.shape, blocksize
            self.indptr, self.indices = kit.indptr([len(s) for s in stored]), np.concatenate(stored)
            self.data = np.concatenate([row[s] for row, s in zip(blocks, stored, strict=True)])

    rng = np.random.default_rng()
    check_zeros(kit, Matrix, rng, rng.random((12, 12)))


def check_zeros(kit, make, rng, full):
    full = full * (rng.random(full.shape) < 0.7)
    index = f.bsr(make(full, blocksize=(3, 2)))
    assert index.features.masked
    kit.seen(index)
    assert (index.to_dense(12).visible[0] == (full != 0)).all()


def test_bsr_positions_and_errors(kit):
    index = f.bsr([0, 2], [2, 0], (2, 3), 9, qo_pos=[5, 7], kv_pos=[100])
    assert kit.seen(index)[1, 0] == ([0, 1, 2, 6, 7, 8], [100, 101, 102, 106, 107, 108], 7, 0)
    for args, label in (
        (([0, 1], [3], (2, 3), 9), "indices"),
        (([0, 2], [1, 1], (2, 3), 9), "indices"),
        (([0, 1], [-1], (2, 3), 9), "indices"),
        (([0, 1], [0], (2, 0), 9), "block_size"),
        (([0, 1], [0], (2, 3, 4), 9), "block_size"),
        (([0, 1], [0], (2, 3), -1), "num_cols"),
        (([0, 1], [0], (2, 3)), "num_cols"),
        (([0, 2, 1], [0], (2, 3), 9), "indptr"),
    ):
        with pytest.raises(AttnrtError, match=label):
            f.bsr(*args)
    with pytest.raises(AttnrtError, match="num_rows"):
        f.bsr([0, 1], [0], (2, 3), 9, num_rows=3)


@given(data=st.data())
def test_token_sparse_is_its_definition(kit, data):
    b = data.draw(kit.batches())
    counts = [int(b.rng.integers(0, k + 1)) for k in b.kv_lens]
    chosen = [b.rng.permutation(k)[:c] for k, c in zip(b.kv_lens, counts, strict=True)]
    pool = b.rng.permutation(sum(counts) + 5)[: sum(counts)].astype(np.int32)
    starts = kit.indptr(counts)
    where = np.concatenate([*chosen, np.zeros(0, int)]).astype(np.int32)
    found = kit.seen(f.token_sparse(b.qo_indptr, starts, pool, where, kv_lens=b.kv_lens))
    plain = kit.by_hand(b)
    for key, (slots, positions, at, r) in found.items():
        assert slots == pool[starts[r] : starts[r + 1]].tolist() and positions == chosen[r].tolist()
        assert (at, r) == plain[key][2:]
    tops = [max(x.tolist(), default=-1) + 1 for x in chosen]
    for key, (_, _, at, r) in kit.seen(f.token_sparse(b.qo_indptr, starts, pool, where)).items():
        assert at == plain[key][2] - b.kv_lens[r] + tops[r]
    first = b.rng.integers(0, 50, b.n)
    for _, positions, _, r in kit.seen(f.token_sparse(b.qo_indptr, starts, pool, kv_pos=first)).values():
        assert positions == [first[r] + j for j in range(counts[r])]


def test_token_sparse_reads_tokens_that_share_positions(kit):
    """A request is as long as its list: four image tokens at position 1 do not push the last ones out."""
    index = f.token_sparse([0, 1], [0, 6], range(6), [0, 1, 1, 1, 1, 2])
    assert index.requests.kv_lens.tolist() == [6] and index.qo_pos.tolist() == [2]
    assert kit.seen(index)[0, 0][:2] == ([0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 1, 2])
    with pytest.raises(
        AttnrtError, match=r"kv_lens must be at least the 6 tokens listed; got 3 in request 0"
    ):
        f.token_sparse([0, 1], [0, 6], range(6), [0, 1, 1, 1, 1, 2], kv_lens=[3])


def test_token_sparse_bound_and_errors(kit):
    slots = kit.OnDevice((12,))
    index = f.token_sparse([0, 1, 2], [0, 4, 10], slots, kv_lens=[100, 6])
    assert (
        index.indices is slots
        and index.features == f.Features(bound_indices=True)
        and index.qo_pos.tolist() == [99, 5]
    )
    index.check(full=True)
    good = {"qo_indptr": [0, 1], "kv_indptr": [0, 2], "slots": [4, 1], "positions": [0, 5]}
    for change, label in (
        ({"slots": [4]}, "slots"),
        ({"slots": [4, -2]}, "slots"),
        ({"positions": [0]}, "positions"),
        ({"kv_pos": [0]}, "kv_pos"),
        ({"kv_lens": [1, 2]}, "kv_lens"),
        ({"qo_indptr": [0, 1, 2]}, "qo_indptr"),
        ({"slots": kit.OnDevice((1,))}, "slots"),
    ):
        with pytest.raises(AttnrtError, match=label):
            f.token_sparse(**{**good, **change})


@given(data=st.data(), heads=st.integers(1, 3))
def test_pages_per_head_is_its_definition(kit, data, heads):
    b = data.draw(kit.batches())
    width = max((-(-k // b.size) for k in b.kv_lens), default=0) + 1
    pages = b.rng.integers(-(2**31), 2**31 - 1, (b.n, heads, width))
    counts = np.zeros((b.n, heads), int)
    where = b.rng.integers(-(2**31), 2**31 - 1, (b.n, heads, width))
    want = {}
    for r in range(b.n):
        total = -(-b.kv_lens[r] // b.size)
        for h in range(heads):
            counts[r, h] = b.rng.integers(0, total + 1)
            chosen = np.sort(b.rng.permutation(max(total - 1, 0))[: max(counts[r, h] - 1, 0)]).tolist()
            chosen += [total - 1] if counts[r, h] else []  # ends on the last page
            pages[r, h, : len(chosen)] = ids = b.rng.permutation(99)[: len(chosen)]
            where[r, h, : len(chosen)] = np.array(chosen, int) * b.size
            want[r, h] = [
                (int(page) * b.size + t, i * b.size + t)
                for page, i in zip(ids, chosen, strict=True)
                for t in range(b.size)
                if i * b.size + t < b.kv_lens[r]
            ]
    index = f.pages_per_head(b.qo_indptr, pages.astype(np.int32), counts, b.kv_lens, b.size, kv_pos=where)
    found = kit.seen(index)
    plain = kit.by_hand(b)
    assert index.heads == heads and len(found) == heads * b.num_qo
    for (row, h), (slots, positions, at, r) in found.items():
        assert list(zip(slots, positions, strict=True)) == want[r, h] and (at, r) == plain[row, 0][2:]
    index = f.pages_per_head(b.qo_indptr, pages.astype(np.int32), counts, b.kv_lens, b.size)
    for (_, h), (slots, positions, _, r) in kit.seen(index).items():
        assert slots == [s for s, _ in want[r, h]]
        assert positions == list(range(b.kv_lens[r] - len(slots), b.kv_lens[r]))


def test_pages_per_head_with_lengths_per_head(kit):
    index = f.pages_per_head([0, 1], [[[3, 1, 9], [0, 9, 9]]], [[2, 1]], [[7, 2]], 4)
    found = kit.seen(index)
    assert found[0, 0] == ([12, 13, 14, 15, 4, 5, 6], list(range(7)), 6, 0)
    assert found[0, 1] == ([0, 1], [0, 1], 6, 0)


def test_pages_per_head_bound_and_errors(kit):
    index = f.pages_per_head([0, 1, 2], kit.OnDevice((2, 3, 4)), [[4, 4, 2], [1, 0, 1]], [64, 16], 16)
    assert (
        index.indptr.tolist() == [4 * i for i in range(7)]
        and index.features.bound_indices
        and index.features.per_head
    )
    index.check(full=True)
    good = {"qo_indptr": [0, 1], "pages": [[[3, 1]]], "counts": [[2]], "kv_lens": [7], "page_size": 4}
    for change, label in (
        ({"pages": [[3, 1]]}, "pages"),
        ({"pages": [[[3, -2]]]}, "pages"),
        ({"counts": [[3]]}, "counts"),
        ({"counts": [[-1]]}, "counts"),
        ({"counts": [2]}, "counts"),
        ({"kv_lens": [[7, 7]]}, "kv_lens"),
        ({"kv_lens": [-7]}, "kv_lens"),
        ({"kv_pos": [[[0]]]}, "kv_pos"),
        ({"kv_lens": kit.OnDevice((1,))}, "kv_lens"),
    ):
        with pytest.raises(AttnrtError, match=label):
            f.pages_per_head(**{**good, **change})
