# SPDX-License-Identifier: Apache-2.0
"""concat and take: a mixed batch means what its pieces mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


@st.composite
def kinds(draw, batches):
    """A random index of a random kind."""
    b = draw(batches())
    rng = b.rng
    paged = f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size)
    kind = draw(
        st.sampled_from(["paged", "ragged", "tree", "masked", "share", "streaming", "tokens", "heads"])
    )
    if kind == "ragged":
        return f.ragged(b.qo_indptr, np.concatenate(([0], np.cumsum(b.kv_lens))).astype(int))
    if kind == "tree" and all(q <= k for q, k in zip(b.qo_lens, b.kv_lens, strict=True)):
        return f.tree(paged, [int(rng.integers(-1, i)) for q in b.qo_lens for i in range(q)])
    if kind == "masked":
        return f.tree(
            paged, mask=[rng.random((q, k)) < 0.5 for q, k in zip(b.qo_lens, b.kv_lens, strict=True)]
        )
    if kind == "share":
        return f.share(f.concat(paged, paged), 1)
    if kind == "streaming":
        return f.streaming(
            paged, int(rng.integers(0, 5)), int(rng.integers(1, 9)), str(rng.choice(["logical", "cache"]))
        )
    if kind == "tokens":
        lens = [int(rng.integers(0, k + 1)) for k in b.kv_lens]
        indptr = np.concatenate(([0], np.cumsum(lens))).astype(int)
        return f.token_sparse(
            b.qo_indptr, indptr, rng.permutation(indptr[-1]), rng.integers(0, 50, indptr[-1])
        )
    if kind == "heads":
        pages = rng.permutation(b.n * 2 * 3).reshape(b.n, 2, 3)
        return f.pages_per_head(b.qo_indptr, pages, rng.integers(0, 4, (b.n, 2)), b.kv_lens, b.size)
    return paged


def merged(kit, indexes):
    """What a concatenation must mean, head by head."""
    found, rows, requests = {}, 0, 0
    heads = max(part.heads for index in indexes for part in index.parts)
    for index in indexes:
        one = kit.seen(index)
        for (row, head), (slots, positions, at, r) in one.items():
            copies = range(heads) if max(part.heads for part in index.parts) == 1 else [head]
            for h in copies:
                found[row + rows, h] = (slots, positions, at, r + requests)
        rows, requests = rows + index.num_qo, requests + len(index.requests)
    return found


@given(data=st.data(), count=st.integers(1, 4))
def test_concat_means_its_pieces(kit, data, count):
    indexes = [data.draw(kinds(kit.batches)) for _ in range(count)]
    index = f.concat(*indexes)
    assert kit.seen(index) == merged(kit, indexes)
    assert index.requests.kv_lens.tolist() == [k for one in indexes for k in one.requests.kv_lens.tolist()]


def test_pieces_of_one_kind_are_joined(kit):
    a = f.paged([0, 1], [0, 2], [3, 1], [6], 4)
    b = f.paged([0, 2, 3], [0, 1, 2], [0, 2], [4, 1], 4)
    flat = f.concat(a, b)
    assert isinstance(flat, f.BlockSparse) and flat.features == f.Features() and flat.qo_index is None
    assert flat.indices.tolist() == [3, 1, 0, 2]
    mixed = f.concat(a, f.tree(b, [-1, 0, -1]), a)
    assert len(mixed.parts) == 2 and mixed.features.masked
    assert [part.block_size[1] for part in mixed.parts] == [4, 1]


@given(data=st.data())
def test_take_means_the_same_requests(kit, data):
    index = data.draw(kinds(kit.batches))
    n = len(index.requests)
    chosen = data.draw(st.permutations(range(n)))[: data.draw(st.integers(0, n))]
    before, after = kit.seen(index), kit.seen(f.take(index, chosen))
    ends = np.cumsum(index.requests.qo_lens)
    heads = max(part.heads for part in index.parts)
    expected, row = {}, 0
    for new, r in enumerate(chosen):
        for old in range(ends[r] - index.requests.qo_lens[r], ends[r]):
            for h in range(heads):
                expected[row, h] = (*before[old, h][:3], new)
            row += 1
    assert after == expected


def test_errors(kit):
    index = f.paged([0, 1, 2], [0, 1, 2], [1, 0], [2, 2], 2)
    for bad in ([0, 0], [2], [-1]):
        with pytest.raises(AttnrtError, match="requests"):
            f.take(index, bad)
    with pytest.raises(AttnrtError, match="indexes"):
        f.concat()
    bound = f.paged([0, 1], [0, 1], [0], kit.OnDevice((1,)), 2, max_kv_lens=[2])
    with pytest.raises(AttnrtError, match="kv_lens"):
        f.concat(index, bound)
    pages = f.paged([0, 1], [0, 1], kit.OnDevice((1,)), [2], 2)
    mixed = f.concat(index, pages)
    mixed.check(full=True)
    assert (
        len(mixed.parts) == 2 and mixed.features.bound_indices and not mixed.parts[0].features.bound_indices
    )
    with pytest.raises(AttnrtError, match="indices"):
        f.take(pages, [0])


def test_c102_a_remapped_prefix_does_not_list_the_freed_pages(kit):
    """Request 1 stored the prefix of request 0 again (63 tokens, page 8); its pages are mapped to request 0's and freed."""
    tables = [[0, 1, 2, 3, 4, 5, 6, 14], [7, 8, 9, 10, 11, 12, 13, 15]]
    before = f.paged([0, 1, 2], [0, 8, 16], [p for pages in tables for p in pages], [63, 63], 8)
    kept = kit.seen(before)
    tables[1][:7] = tables[0][:7]
    after = f.share(f.paged([0, 1, 2], [0, 8, 16], [p for pages in tables for p in pages], [63, 63], 8), 8)
    freed = {page * 8 + t for page in range(7, 14) for t in range(8)}
    assert all(not freed & set(slots) for slots, *_ in kit.seen(after).values())
    assert [len(slots) for slots, *_ in kit.seen(after).values()] == [63, 63]
    assert kit.seen(before) == kept  # an index already planned has its own copy


@pytest.mark.parametrize("bad", ["x", None, [0, 1]])
def test_what_is_no_index(bad):
    index = f.ragged([0, 1], [0, 2])
    for indexes in ((index, bad), (bad, index), (bad,)):
        with pytest.raises(AttnrtError, match=r"indexes must come from attnrt\.formats") as caught:
            f.concat(*indexes)
        assert caught.value.label == "indexes"
