# SPDX-License-Identifier: Apache-2.0
"""tree: ancestors, depths and masks against plain walks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


def forest(b):
    return [[int(b.rng.integers(-1, i)) for i in range(q)] for q in b.qo_lens]


def expected(b, parents, plain):
    found, row = {}, 0
    for r in range(b.n):
        context = b.kv_lens[r] - b.qo_lens[r]
        depth = {-1: -1}
        for i, p in enumerate(parents[r]):
            depth[i] = depth[p] + 1
        for i in range(b.qo_lens[r]):
            path, node = [], i
            while node >= 0:
                path.insert(0, node)
                node = parents[r][node]
            slots = plain[row, 0][0]
            found[row, 0] = (
                slots[:context] + [slots[context + k] for k in path],
                list(range(context)) + [context + depth[k] for k in path],
                context + depth[i],
                r,
            )
            row += 1
    return found


def draft_batch(data, kit):
    b = data.draw(kit.batches(max_qo=9))
    b.kv_lens = [k + q for k, q in zip(b.kv_lens, b.qo_lens, strict=True)]
    b.counts = [-(-k // b.size) for k in b.kv_lens]
    b.kv_indptr = kit.indptr(b.counts)
    b.indices = b.rng.permutation(sum(b.counts) + 2)[: sum(b.counts)]
    return b, f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size)


def same_contexts_twice(b, kit):
    """A batch whose requests come twice, over the same context, each with drafts of its own."""
    own = b.rng.permutation(len(b.indices)) + 1000
    lists = np.concatenate([b.indices, b.indices])
    for r in range(b.n):
        first = (b.kv_lens[r] - b.qo_lens[r]) // b.size
        at = slice(len(b.indices) + b.kv_indptr[r] + first, len(b.indices) + b.kv_indptr[r + 1])
        lists[at] = own[b.kv_indptr[r] + first : b.kv_indptr[r + 1]]
    return f.paged(kit.indptr(b.qo_lens * 2), kit.indptr(b.counts * 2), lists, b.kv_lens * 2, b.size)


@given(data=st.data())
def test_nodes_see_their_ancestors(kit, data):
    b, index = draft_batch(data, kit)
    parents = forest(b)
    drafts = f.tree(index, [p for own in parents for p in own])
    assert kit.seen(drafts) == expected(b, parents, kit.by_hand(b))
    assert len(drafts.parts) == 2 and drafts.features == f.Features(num_parts=2, masked=True, block_pos=True)


@given(data=st.data())
def test_tree_over_ragged_and_over_shared(kit, data):
    b, index = draft_batch(data, kit)
    parents = forest(b)
    flat = [p for own in parents for p in own]
    ragged = kit.seen(f.tree(f.ragged(b.qo_indptr, kit.indptr(b.kv_lens)), flat))
    paged = kit.seen(f.tree(index, flat))
    assert {k: v[1:] for k, v in ragged.items()} == {k: v[1:] for k, v in paged.items()}
    twice = same_contexts_twice(b, kit)
    assert kit.seen(f.tree(f.share(twice, 1), flat * 2)) == kit.seen(f.tree(twice, flat * 2))


@given(data=st.data())
def test_custom_mask(kit, data):
    b = data.draw(kit.batches())
    index = f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size)
    masks = [b.rng.random((q, k)) < 0.5 for q, k in zip(b.qo_lens, b.kv_lens, strict=True)]
    plain = kit.by_hand(b)
    found = kit.seen(f.tree(index, mask=masks))
    for (row, _), (slots, positions, at, r) in found.items():
        bits = masks[r][row - b.qo_indptr[r]]
        assert slots == [s for s, bit in zip(plain[row, 0][0], bits, strict=True) if bit]
        assert positions == np.flatnonzero(bits).tolist() and (at, r) == plain[row, 0][2:]
    flat = np.concatenate([*(m.reshape(-1) for m in masks), np.zeros(0, bool)])
    for form in (
        flat,
        flat.astype(np.uint8),
        [m.astype(int) for m in masks],
        [np.asfortranarray(m) for m in masks],
    ):
        assert kit.seen(f.tree(index, mask=form)) == found
    begin = [int(b.rng.integers(0, k + 1)) for k in b.kv_lens]
    partly = f.tree(index, mask=[m[:, k:] for m, k in zip(masks, begin, strict=True)], mask_begin=begin)
    opened = [m | (np.arange(m.shape[1]) < k) for m, k in zip(masks, begin, strict=True)]
    assert kit.seen(partly) == kit.seen(f.tree(index, mask=opened))


@given(data=st.data())
def test_mask_among_drafts_in_place_of_ancestors(kit, data):
    b, index = draft_batch(data, kit)
    parents = forest(b)
    flat = [p for own in parents for p in own]
    ancestors = []
    for own in parents:
        bits = np.zeros((len(own), len(own)), bool)
        for i, p in enumerate(own):
            bits[i] = bits[p] if p >= 0 else False
            bits[i, i] = True
        ancestors.append(bits)
    assert kit.seen(f.tree(index, flat, ancestors)) == kit.seen(f.tree(index, flat))
    at = b.rng.integers(0, 99, b.num_qo)
    moved = kit.seen(f.tree(index, flat, qo_pos=at, kv_pos=at + 1))
    plain = kit.seen(f.tree(index, flat))
    for (row, _), (slots, positions, where, r) in moved.items():
        context = b.kv_lens[r] - b.qo_lens[r]
        assert slots == plain[row, 0][0] and where == at[row] and positions[:context] == list(range(context))
        assert positions[-1] == at[row] + 1


def in_line(index):
    """The index that is planned for variants without positions, checked like any other."""
    found = f.composite(index.parts_for(False))
    found.check(full=True)
    return found


@given(data=st.data())
def test_drafts_in_line_are_the_same_keys(kit, data):
    """Slots, offsets and bits; alone, over a shared prefix, concatenated and taken."""
    b, index = draft_batch(data, kit)
    flat = [p for own in forest(b) for p in own]
    drafts = f.tree(index, flat)
    both = f.concat(drafts, f.paged(b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens, b.size), drafts)
    order = b.rng.permutation(3 * b.n)[: int(b.rng.integers(0, 3 * b.n + 1))]
    shared = f.tree(f.share(same_contexts_twice(b, kit), 1), flat * 2)
    for found in (drafts, shared, both, f.take(both, order)):
        line = in_line(found)
        assert len(line.parts) == max(1, len(found.parts) - 1)
        for row in range(found.num_qo):
            a, b_ = f.keys_of(found, row), f.keys_of(line, row)
            assert a.slots.tolist() == b_.slots.tolist() and a.offsets.tolist() == b_.offsets.tolist()
            assert a.qo_pos == b_.qo_pos and a.request == b_.request


def test_a_chain_is_causal(kit):
    index = f.paged([0, 5], [0, 3], [2, 0, 1], [11], 4)
    chain = kit.seen(f.tree(index, [-1, 0, 1, 2, 3]))
    for row, (slots, positions, at, _) in ((k[0], v) for k, v in kit.seen(index).items()):
        assert chain[row, 0] == (slots[: at + 1], positions[: at + 1], at, 0)


def test_c34_siblings_far_apart_do_not_see_each_other(kit):
    """Prefix 100, 40 drafts, branching 2."""
    index = f.paged([0, 40], [0, 9], np.arange(9), [140], 16)
    dense = f.tree(index, [-1, *[(i - 1) // 2 for i in range(1, 40)]]).to_dense(144)
    ancestors = np.zeros((40, 40), bool)
    for i in range(40):
        node = i
        while node >= 0:
            ancestors[i, node] = True
            node = (node - 1) // 2 if node else -1
    assert dense.visible[0, :, :100].all() and not dense.visible[0, :, 140:].any()
    assert (dense.visible[0, :, 100:140] == ancestors).all()
    # Causal on top hides nothing more: an ancestor is never deeper.
    assert (dense.positions[0] <= dense.qo_pos[:, None])[dense.visible[0]].all()


@pytest.mark.parametrize("shape", [(10, 15), (20, 10), (9, 20), (10,), (200,)])
def test_c32_a_mask_of_wrong_shape(shape):
    index = f.paged([0, 10], [0, 2], [0, 1], [20], 10)
    f.tree(index, mask=[np.ones((10, 20), bool)])
    with pytest.raises(AttnrtError, match=r"mask\[0\] must have shape \[10, 20\]"):
        f.tree(index, mask=[np.ones(shape, bool)])


def test_c32_other_masks():
    index = f.paged([0, 2, 5], [0, 1, 2], [0, 1], [5, 5], 5)
    with pytest.raises(AttnrtError, match=r"shape \[25\].*\[19\]"):
        f.tree(index, mask=np.ones(19, bool))
    with pytest.raises(AttnrtError, match=r"shape \[25\].*\[2, 3, 5\]"):
        f.tree(index, mask=np.ones((2, 3, 5), bool))
    with pytest.raises(AttnrtError, match="0 and 1"):
        f.tree(index, mask=np.full(25, 2, np.uint8))
    with pytest.raises(AttnrtError, match="bool"):
        f.tree(index, mask=np.ones(25, np.float32))
    with pytest.raises(AttnrtError, match="2 arrays"):
        f.tree(index, mask=[np.ones((2, 5), bool)])


def test_bound_mask(kit):
    index = f.paged([0, 2, 5], [0, 1, 2], [0, 1], [5, 9], 9)
    assert f.mask_offsets([2, 3], [5, 9]).tolist() == [0, 8, 16, 32, 48, 64]
    bits = kit.OnDevice((8,), "|u1")
    masked = f.tree(index, mask=bits)
    assert masked.mask is bits and masked.features == f.Features(masked=True, bound_mask=True)
    masked.check(full=True)
    drafts = f.tree(index, [-1, 0, -1, 0, 0], kit.OnDevice((5,), "|u1"))
    assert drafts.features == f.Features(num_parts=2, masked=True, bound_mask=True, block_pos=True)
    drafts.check(full=True)
    for bad in (kit.OnDevice((7,), "|u1"), kit.OnDevice((8,), "|b1"), kit.OnDevice((2, 4), "|u1")):
        with pytest.raises(AttnrtError, match="mask"):
            f.tree(index, mask=bad)


def test_errors(kit):
    index = f.paged([0, 2, 5], [0, 1, 2], [0, 1], [5, 9], 9)
    for parents in (
        [-1, 0, -1, 0],
        [-1, 1, -1, 0, 0],
        [-1, 2, -1, 0, 0],
        [-2, 0, -1, 0, 0],
        [0, 0, -1, 0, 0],
    ):
        with pytest.raises(AttnrtError, match="parents"):
            f.tree(index, parents)
    with pytest.raises(AttnrtError, match="parents"):
        f.tree(index)
    with pytest.raises(AttnrtError, match="mask_begin"):
        f.tree(index, mask=np.zeros(0, bool), mask_begin=[6, 9])
    with pytest.raises(AttnrtError, match="kv_lens"):
        f.tree(f.paged([0, 2], [0, 1], [0], [1], 4), [-1, 0])
    with pytest.raises(AttnrtError, match="no mask yet"):
        f.tree(f.tree(index, [-1, 0, -1, 0, 0]), [-1, 0, -1, 0, 0])
    with pytest.raises(AttnrtError, match="indices"):
        f.tree(f.paged([0, 2], [0, 1], kit.OnDevice((1,)), [4], 4), [-1, 0])
    shared = f.share(f.paged([0, 1, 2], [0, 2, 4], [5, 0, 5, 1], [8, 8], 4), 4)
    with pytest.raises(AttnrtError, match="mask_begin"):
        f.tree(shared, mask=[np.ones((1, 8), bool)] * 2)
    kit.seen(f.tree(shared, mask=[np.zeros((1, 4), bool)] * 2, mask_begin=[4, 4]))


@pytest.mark.parametrize("index", ["a", None, [0, 1]])
def test_what_is_no_index(index):
    with pytest.raises(AttnrtError, match=r"index must come from attnrt\.formats") as caught:
        f.tree(index, [-1])
    assert caught.value.label == "index"
