# SPDX-License-Identifier: Apache-2.0
"""check(): each promise of formats/base.py, broken once, raises and names its array."""

from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
import attnrt.formats as f
from attnrt.errors import AttnrtError


def i32(*values):
    return np.array(values, np.int32)


@pytest.fixture
def plain():
    return f.paged([0, 2, 3], [0, 2, 4], [3, 1, 0, 2], [7, 5], 4)


@pytest.fixture
def masked(plain):
    return f.tree(plain, mask=[np.ones((2, 7), bool), np.ones((1, 5), bool)])


CHEAP = [
    ("qo_indptr", i32(0, 2)),
    ("qo_indptr", i32(1, 2, 3)),
    ("qo_indptr", i32(0, 4, 3)),
    ("qo_indptr", np.array([0, 2, 3])),
    ("qo_indptr", [0, 2, 3]),
    ("request", i32(0, 0)),
    ("request", i32(0, 0, 2)),
    ("request", i32(0, 0, -1)),
    ("qo_pos", i32(0, 0, 0, 0)),
    ("qo_pos", np.zeros(3)),
    ("indptr", i32(0, 2)),
    ("indptr", i32(0, 3, 2)),
    ("indptr", i32(0, 2, 5)),
    ("indices", np.zeros(4, np.int64)),
    ("indices", np.zeros((2, 2), np.int32)),
    ("indices", i32(3, 1)),
    ("indices", None),
    ("kv_pos", None),
    ("kv_pos", i32(0)),
    ("block_pos", i32(0, 4, 0, 4)),
    ("kv_base", np.zeros(2, np.int64)),
    ("kv_begin", i32(-1, 0)),
    ("kv_begin", i32(8, 0)),
    ("kv_end", i32(9, 5)),
    ("kv_end", i32(7)),
    ("kv_offset", i32(0)),
    ("mask", np.zeros(2, np.uint8)),
    ("block_size", (1, 4)),
    ("block_size", (2, 0)),
    ("heads", 2),
    ("num_qo", 2),
    ("features", f.Features(masked=True)),
    ("indices", [3, 1, 0, 2]),
    ("indices", i32(3, 1, 0, -2)),
    ("max_block", 2),
    ("kv_offset", i32(-1, 0)),
    ("kv_offset", i32(1, 0)),
    ("kv_begin", i32(0, 2)),
    ("requests", f.Requests(qo_lens=i32(2, 1), kv_lens=i32(6, 5))),
    ("requests", f.Requests(qo_lens=i32(2, 1), kv_lens=i32(7))),
]


@pytest.mark.parametrize("name, value", CHEAP)
def test_cheap(plain, name, value):
    plain.check()
    with pytest.raises(AttnrtError) as error:
        replace(plain, **{name: value}).check()
    assert error.value.label and error.value.rule


def test_full(plain):
    plain.check(full=True)
    broken = replace(plain, indices=i32(3, 3, 0, 2))
    broken.check()
    with pytest.raises(AttnrtError, match="indices must not list a slot twice"):
        broken.check(full=True)


def test_offsets_begin_at_0_and_end_at_the_requests_length(plain):
    with pytest.raises(AttnrtError, match=r"kv_offset must not let keys leave a gap; .* row 2 of q"):
        replace(plain, kv_offset=i32(0, 1), kv_end=i32(7, 4)).check()
    longer = f.Requests(qo_lens=i32(2, 1), kv_lens=i32(9, 5))
    replace(plain, requests=longer).check()  # a list may leave keys of its request out
    with pytest.raises(AttnrtError, match="kv_lens must be at least the 7 keys that row 0 of q lists; got 6"):
        replace(plain, requests=replace(longer, kv_lens=i32(6, 5))).check()


@pytest.mark.parametrize("rows", [i32(0, 1, 1), i32(0, 1, 3), i32(0, 1, -1)])
def test_rows_of_q(plain, rows):
    flags = f.Features(qo_index=True)
    replace(plain, qo_index=i32(2, 0, 1), features=flags).check(full=True)
    with pytest.raises(AttnrtError, match="qo_index"):
        replace(plain, qo_index=rows, features=flags).check()


def test_mask_that_is_too_short(masked):
    masked.check(full=True)
    with pytest.raises(AttnrtError, match=r"mask.*query 2"):
        replace(masked, mask=masked.mask[:-1]).check()
    with pytest.raises(AttnrtError, match="together"):
        replace(masked, mask_begin=None).check()


def test_composites(plain):
    first = replace(plain, kv_end=i32(4, 4))
    rest = replace(plain, kv_begin=i32(4, 4))
    f.composite([first, rest]).check(full=True)
    for parts, label in (
        ([first, plain], "overlap"),
        ([first, replace(rest, kv_begin=i32(5, 4))], "gap"),
        ([first, replace(rest, kv_end=i32(6, 5), kv_offset=i32(1, 0))], "gap"),
        ([first, replace(rest, request=i32(0, 0, 0))], "request must be the same"),
        ([first, rest, replace(rest, kv_begin=i32(7, 5))], None),  # a part may have no keys
    ):
        index = f.composite(parts)
        if label is None:
            index.check(full=True)
            continue
        with pytest.raises(AttnrtError, match=label):
            index.check()
    # The second part lists the first page of request 0 again.
    index = f.composite([first, replace(rest, indices=i32(3, 3, 0, 2))])
    index.check()
    with pytest.raises(AttnrtError, match="slot twice"):
        index.check(full=True)
    whole = f.composite([first, rest])
    with pytest.raises(AttnrtError, match="num_parts"):
        replace(whole, features=f.Features()).check()
    with pytest.raises(AttnrtError, match="nested"):
        replace(whole, parts=(first, whole)).check()
    with pytest.raises(AttnrtError, match="requests"):
        replace(whole, parts=(first, replace(rest, requests=replace(rest.requests)))).check()
    with pytest.raises(AttnrtError, match="num_qo"):
        replace(whole, parts=(first, replace(rest, num_qo=9))).check()
    with pytest.raises(AttnrtError, match=r"flat\.kv_begin"):
        replace(whole, flat=replace(plain, kv_end=i32(9, 5))).check()
    with pytest.raises(AttnrtError, match=r"in_line\[0\]\.indices"):
        replace(whole, in_line=(replace(plain, indices=i32(3, 1, 0, -2)),)).check()
    with pytest.raises(AttnrtError, match=r"flat: kv_offset .* gap"):
        replace(whole, flat=rest).check()
    whole.check()
    assert whole.checked and not first.checked, "a part alone is another index"


def test_heads_are_looked_at_one_by_one():
    index = f.pages_per_head([0, 1], [[[3, 1], [2, 0]]], [[2, 2]], [7], 4)
    index.check(full=True)
    with pytest.raises(AttnrtError, match="twice"):
        replace(index, indices=i32(3, 1, 2, 2)).check(full=True)
    replace(index, indices=i32(3, 1, 3, 1)).check(full=True)  # two heads may list the same page


def test_a_host_array_may_be_bound(plain):
    """Its contents may change under a plan, so nobody looks at the ids; a device array says that it is bound."""
    replace(plain, indices=i32(3, 1, 0, -2), features=f.Features(bound_indices=True), max_block=-1).check()
    with pytest.raises(AttnrtError, match="indices must have at least 4"):
        replace(plain, indices=i32(3, 1, 0), features=f.Features(bound_indices=True)).check()


def test_the_largest_block_is_found(plain):
    by_hand = replace(plain, max_block=-1)
    by_hand.check()
    assert by_hand.max_block == 3
    index = f.ragged([0, 1, 2], [0, 5, 8])
    by_hand = replace(index, max_block=-1)
    by_hand.check()
    assert by_hand.max_block == index.max_block == 7
    with pytest.raises(AttnrtError, match="max_block must be at least 7"):
        replace(index, max_block=6).check()
    with pytest.raises(AttnrtError, match="kv_base"):
        replace(index, kv_base=np.array([-1, 5])).check()


def test_affine():
    index = f.ragged([0, 1], [0, 5])
    with pytest.raises(AttnrtError, match="C = 1"):
        replace(index, block_size=(1, 2)).check()
    with pytest.raises(AttnrtError, match="kv_base"):
        replace(index, kv_base=None).check()


# ------------------------------------------------------------------------------------------- who is checked when


@pytest.fixture
def attn():
    spec = at.AttentionSpec(
        num_qo_heads=2, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=at.variants.causal()
    )
    return at.Attention(spec, device="cpu")


@pytest.mark.parametrize(
    "change, label",
    [
        ({"kv_end": i32(10**6, 5)}, "kv_begin and kv_end"),
        ({"indices": [3, 1, 0, 2]}, "indices must be a NumPy array"),
        ({"indices": i32(3, 1, 0, -2)}, "indices"),
        ({"request": i32(0, 0, 7)}, "request"),
        ({"features": f.Features(affine=True)}, "features"),
        ({"requests": f.Requests(qo_lens=i32(2, 1), kv_lens=i32(3, 5))}, "kv_lens must be at least the 7"),
    ],
)
def test_plan_refuses_what_was_made_wrong_by_hand(attn, plain, change, label):
    broken = replace(plain, **change)
    for plan in (
        lambda: attn.plan(broken),
        lambda: attn.plan(broken, load=False),
        lambda: at.make_plan(attn.spec, broken, at.Traits.of("h200")),
        lambda: f.share(broken),
        lambda: f.concat(plain, broken),
        lambda: f.take(broken, [0]),
        lambda: f.tree(broken, [-1, 0, -1]),
        lambda: f.streaming(broken, 1, 1),
        lambda: f.gathered(broken),
        lambda: f.cascade(broken),
    ):
        with pytest.raises(AttnrtError, match=label):
            plan()


def test_an_index_is_checked_once(attn, plain, monkeypatch):
    looks = []
    monkeypatch.setattr("attnrt.formats.check._check_shapes", lambda part, at: looks.append(part))
    by_hand = replace(plain)
    for _ in range(2):
        attn.plan(by_hand)
        at.make_plan(attn.spec, by_hand, at.Traits.of("cpu"))
    assert looks == [by_hand]
    attn.plan(replace(by_hand, kv_end=i32(6, 5)))
    assert len(looks) == 2, "a changed copy is another index"
    looks.clear()
    monkeypatch.setattr(f.registry, "_entries", dict(f.registry._entries))
    attn.plan(f.register("by_hand")(lambda: replace(plain))())
    assert len(looks) == 1, "a registered builder's index was checked when it was made"


def test_indexes_of_builders_are_trusted(plain, masked):
    pages = f.paged([0, 1, 2], [0, 2, 4], [3, 1, 3, 2], [7, 8], 4)
    shared, own = f.share(pages, 1), f.paged([0, 2, 3], [0, 1, 2], [4, 5], [2, 3], 4)
    for index in (
        *(plain, masked, pages, shared, f.ragged([0, 1], [0, 5]), f.tree(shared, [-1, -1])),
        *(f.concat(plain, shared), f.take(plain, [1]), f.streaming(plain, 1, 2), f.gathered(plain).index),
        *(f.block_table([0, 1], [[1, 2]], [7], 4), f.radix([0, 1], [-1], [0, 2], [1, 2], [0])),
        *(f.token_sparse([0, 1], [0, 2], [1, 2]), f.bsr([0, 2, 3], [0, 2, 1], (2, 2), num_cols=6)),
        *(f.pages_per_head([0, 1], [[[3, 1], [2, 0]]], [[2, 2]], [7], 4), f.shared_prefix(plain, own)),
        f.paged([0, 1], [0, 1], [3], [3], 4, kv_pos=[[1, 1, 2]]),
    ):
        assert index.checked
        index.check(full=True)


def test_a_pool_too_small_for_a_hand_built_index(attn, plain):
    by_hand = replace(plain, max_block=-1)
    attn.plan(by_hand)
    q, k = np.zeros((3, 2, 8), np.float32), np.zeros((3, 4, 1, 8), np.float32)
    with pytest.raises(at.ArgumentError, match="kv must hold the 16 slots"):
        attn.run(q, (k, k))
