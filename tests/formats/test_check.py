# SPDX-License-Identifier: Apache-2.0
"""check(): each promise of formats/base.py, broken once, raises and names its array."""

from dataclasses import replace

import numpy as np
import pytest

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
    ("features", f.Features(bound_indices=True)),
]


@pytest.mark.parametrize("name, value", CHEAP)
def test_cheap(plain, name, value):
    plain.check()
    with pytest.raises(AttnrtError) as error:
        replace(plain, **{name: value}).check()
    assert error.value.label and error.value.rule


@pytest.mark.parametrize(
    "change, label",
    [
        ({"indices": i32(3, 1, 0, -2)}, "indices"),
        ({"indices": i32(3, 3, 0, 2)}, "indices must not list a slot twice"),
        ({"max_block": 2}, "max_block"),
        ({"qo_index": i32(0, 1, 1), "features": f.Features(qo_index=True)}, "qo_index"),
        ({"qo_index": i32(0, 1, 3), "features": f.Features(qo_index=True)}, "qo_index"),
        ({"kv_offset": i32(1, 0)}, "kv_offset"),
        ({"kv_begin": i32(0, 2)}, "kv_offset"),
    ],
)
def test_full(plain, change, label):
    plain.check(full=True)
    broken = replace(plain, **change)
    broken.check()
    with pytest.raises(AttnrtError, match=label):
        broken.check(full=True)


def test_mask_that_is_too_short(masked):
    masked.check(full=True)
    broken = replace(masked, mask=masked.mask[:-1])
    broken.check()
    with pytest.raises(AttnrtError, match=r"mask.*query 2"):
        broken.check(full=True)
    with pytest.raises(AttnrtError, match="together"):
        replace(masked, mask_begin=None).check()


def test_composites(plain):
    first = replace(plain, kv_end=i32(4, 4))
    rest = replace(plain, kv_begin=i32(4, 4))
    f.composite([first, rest]).check(full=True)
    for parts, label in (
        ([first, plain], "overlap"),
        ([first, replace(rest, kv_begin=i32(5, 4))], "gap"),
        ([first, replace(rest, kv_offset=i32(1, 0))], "gap"),
        # The second part lists the first page of request 0 again.
        ([first, replace(rest, indices=i32(3, 3, 0, 2))], "slot twice"),
    ):
        index = f.composite(parts)
        index.check()
        with pytest.raises(AttnrtError, match=label):
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


def test_heads_are_looked_at_one_by_one():
    index = f.pages_per_head([0, 1], [[[3, 1], [2, 0]]], [[2, 2]], [7], 4)
    index.check(full=True)
    with pytest.raises(AttnrtError, match="twice"):
        replace(index, indices=i32(3, 1, 2, 2)).check(full=True)
    replace(index, indices=i32(3, 1, 3, 1)).check(full=True)  # two heads may list the same page


def test_affine():
    index = f.ragged([0, 1], [0, 5])
    with pytest.raises(AttnrtError, match="C = 1"):
        replace(index, block_size=(1, 2)).check()
    with pytest.raises(AttnrtError, match="kv_base"):
        replace(index, kv_base=None).check()
