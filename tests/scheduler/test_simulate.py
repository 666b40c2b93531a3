# SPDX-License-Identifier: Apache-2.0
"""The published balance of Algorithm 1 against round-robin, re-derived."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrt.errors import ArgumentError
from attnrt.scheduler.simulate import WORKLOADS, balanced, ratio_of, round_robin


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.name)
def test_median_is_inside_the_published_range(work):
    median, _, _ = ratio_of(work, seeds=41)
    assert work.low <= median <= work.high


@given(st.lists(st.integers(0, 5000), max_size=60), st.integers(1, 20))
def test_balanced_is_algorithm_1(lengths, workers):
    """The paper's text, followed by hand."""
    longest = math.ceil(sum(lengths) / workers)
    runs = []
    for length in lengths:
        while length > 0:
            runs.append(min(length, longest))
            length -= runs[-1]  # noqa: PLW2901
    heap = [0] * workers
    for run in sorted(runs, reverse=True):
        heapq.heapreplace(heap, heap[0] + run)
    assert balanced(np.asarray(lengths, np.int64), workers) == max(heap)


def test_round_robin_deals_by_index():
    assert round_robin(np.asarray([5, 1, 1, 7]), 3) == 12
    assert round_robin(np.asarray([], np.int64), 3) == 0


def test_prefill_counts_every_query_tile():
    assert balanced(np.asarray([100, 50]), 4, tiles=np.asarray([3, 2])) == 100


def test_no_workers():
    with pytest.raises(ArgumentError):
        balanced(np.asarray([1]), 0)
