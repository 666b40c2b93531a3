# SPDX-License-Identifier: Apache-2.0
"""Traits of known machines, rulers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrt.errors import ArgumentError
from attnrt.scheduler.base import Ruler, Traits
from attnrt.scheduler.machines import MACHINES


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), max_size=4),
    st.integers(1, 50),
    st.integers(0, 2000),
)
def test_leaf_of_and_start_agree(steps, tail, offset):
    ruler = Ruler(steps=tuple(steps), tail=tail)
    leaf = ruler.leaf_of(offset)
    assert ruler.start(leaf) <= offset < ruler.start(leaf + 1)
    starts, at = [0], 0
    for count, size in [*steps, (2001, tail)]:
        for _ in range(count):
            at += size
            starts.append(at)
    assert starts[leaf] == ruler.start(leaf) and starts[leaf + 1] == ruler.start(leaf + 1)


def test_h200_classes():
    traits = Traits.of("h200")
    assert traits.num_workers == 132
    names = [traits.classes[traits.class_of(rows)].name for rows in (1, 64, 65, 2048, 2049, 10**9)]
    assert names == ["decode", "decode", "append", "append", "prefill", "prefill"]
    decode, append, prefill = traits.classes
    assert [decode.ruler.start(leaf) for leaf in (0, 1, 4, 5, 10, 18, 42, 43)] == [
        0,
        256,
        1024,
        1536,
        4096,
        8192,
        32768,
        34816,
    ]
    assert append.ruler.start(3) == 12288 and prefill.ruler.leaf_of(10**9) == 0
    assert all(klass.q_tile % 16 == 0 and klass.kv_tile % 16 == 0 for klass in traits.classes)


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_leaves_are_whole_tiles(name):
    for klass in Traits.of(name).classes:
        for leaf in range(40):
            assert klass.ruler.start(leaf) % klass.kv_tile == 0 or klass.ruler.steps == ()


def test_token_has_one_class():
    traits = Traits.of("h200-token", 66)
    assert len(traits.classes) == 1 and traits.num_workers == 66
    assert traits.class_of(1) == traits.class_of(10**6) == 0
    assert traits.classes[0].ruler == Traits.of("h200").classes[0].ruler


def test_bad_names_and_numbers():
    with pytest.raises(ArgumentError) as caught:
        Traits.of("abacus")
    assert "h200" in str(caught.value)
    for workers in (0, -1, True, 1.5, "3"):
        with pytest.raises(ArgumentError) as caught:
            Traits.of("h200", workers)
        assert caught.value.label == "num_workers"
