# SPDX-License-Identifier: Apache-2.0
"""What the tests of the builders share: a plain reading of an index, random batches, a fake device array."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

import attnrt.formats as f

# Machines that run tests are shared and slow by turns: no example has a deadline.
settings.register_profile("attnrt", deadline=None, max_examples=60)
settings.load_profile("attnrt")


class OnDevice:
    """An array that says it lies on a GPU; nobody may read its values."""

    def __init__(self, shape, typestr="<i4", strides=None):
        self.shape = tuple(shape)
        self._interface = {
            "shape": self.shape,
            "typestr": typestr,
            "strides": strides,
            "data": (0x7F0000000000, False),
            "version": 3,
            "stream": None,
        }

    @property
    def __cuda_array_interface__(self):
        return self._interface

    def reshape(self, count):
        assert count == -1 and self._interface["strides"] is None
        return OnDevice((int(np.prod(self.shape)),), self._interface["typestr"])


def seen(index):
    """{(row, head): (slots, positions, qo_pos, request)} of every query, checked in full on the way."""
    index.check()
    index.check(full=True)
    heads = max(part.heads for part in index.parts)
    found = {}
    for row in range(index.num_qo):
        for head in range(heads):
            k = f.keys_of(index, row, head)
            assert list(k.offsets) == sorted(set(k.offsets.tolist()))
            found[row, head] = (k.slots.tolist(), k.positions.tolist(), k.qo_pos, k.request)
    return found


def indptr(lens):
    return np.concatenate(([0], np.cumsum(np.asarray(lens, np.int64)))).astype(np.int32)


def lists_of(index, heads=1):
    """The same from ``tokens()``: [(row, head, slots, positions)] of every live list, holes as -1."""
    for part in index.parts:
        for row in range(part.num_rows):
            for head in range(part.heads):
                cell = row * part.heads + head
                begin, end = (int(part.kv_offset[row]) + int(x[cell]) for x in (part.kv_begin, part.kv_end))
                yield part, row, head, begin, end


@st.composite
def batches(draw, max_requests=5, max_qo=4, max_kv=40, pages=(1, 2, 3, 4, 5, 16, 48)):
    """Random paged batch: lengths from 0, qo may exceed kv; pages in random order from a pool with gaps."""
    size = draw(st.sampled_from(pages))
    n = draw(st.integers(0, max_requests))
    qo = draw(st.lists(st.integers(0, max_qo), min_size=n, max_size=n))
    kv = draw(st.lists(st.integers(0, max_kv), min_size=n, max_size=n))
    spare = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    counts = [-(-k // size) + s for k, s in zip(kv, spare, strict=True)]
    seed = draw(st.integers(0, 2**32 - 1))
    pool = np.random.default_rng(seed).permutation(2 * sum(counts) + 3)
    return SimpleNamespace(
        size=size,
        n=n,
        qo_lens=qo,
        kv_lens=kv,
        counts=counts,
        qo_indptr=indptr(qo),
        kv_indptr=indptr(counts),
        indices=pool[: sum(counts)].astype(np.int32),
        num_qo=sum(qo),
        rng=np.random.default_rng(seed),
    )


def by_hand(b):
    """What a paged batch means, by loops over its definition."""
    found, row = {}, 0
    for r in range(b.n):
        pages = b.indices[b.kv_indptr[r] : b.kv_indptr[r + 1]]
        keys = [(int(pages[j // b.size]) * b.size + j % b.size, j) for j in range(b.kv_lens[r])]
        for i in range(b.qo_lens[r]):
            slots, positions = [s for s, _ in keys], [p for _, p in keys]
            found[row, 0] = (slots, positions, b.kv_lens[r] - b.qo_lens[r] + i, r)
            row += 1
    return found


@pytest.fixture(scope="session")
def kit():
    return SimpleNamespace(
        seen=seen, indptr=indptr, by_hand=by_hand, lists_of=lists_of, OnDevice=OnDevice, batches=batches
    )
