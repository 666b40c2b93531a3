# SPDX-License-Identifier: Apache-2.0
"""radix against a walk from each request's node to the root."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError


@given(
    nodes=st.integers(0, 8), n=st.integers(0, 6), size=st.sampled_from([1, 3]), seed=st.integers(0, 2**32 - 1)
)
def test_radix_is_the_path(kit, nodes, n, size, seed):
    rng = np.random.default_rng(seed)
    names = rng.permutation(nodes)  # parents need not come first
    parent = np.full(nodes, -1)
    for i in range(1, nodes):
        parent[names[i]] = rng.choice([-1, *names[:i]])
    lens = rng.integers(0, 6, nodes)
    starts = kit.indptr(lens)
    slots = rng.permutation(int(lens.sum()) + 3)[: int(lens.sum())]
    last = rng.integers(-1, nodes, n) if nodes else np.full(n, -1)
    qo = rng.integers(0, 3, n)
    index = f.radix(kit.indptr(qo), parent, starts, slots, last, page_size=size)
    found, row = kit.seen(index), 0
    for r in range(n):
        path, node = [], last[r]
        while node >= 0:
            path.insert(0, node)
            node = parent[node]
        entries = [int(s) for node in path for s in slots[starts[node] : starts[node + 1]]]
        keys = [s * size + t for s in entries for t in range(size)]
        for i in range(qo[r]):
            assert found[row, 0] == (keys, list(range(len(keys))), len(keys) - qo[r] + i, r)
            row += 1
    shared = f.share(index, 1)
    assert kit.seen(shared) == found


def test_errors():
    good = {
        "qo_indptr": [0, 1],
        "node_parent": [-1, 0],
        "node_indptr": [0, 2, 3],
        "node_slots": [5, 6, 7],
        "request_node": [1],
    }
    assert f.radix(**good).indices.tolist() == [5, 6, 7]
    for change, label in (
        ({"node_parent": [1, 0]}, "node_parent"),
        ({"node_parent": [-1, 2]}, "node_parent"),
        ({"node_parent": [-2, 0]}, "node_parent"),
        ({"node_indptr": [0, 2]}, "node_indptr"),
        ({"node_slots": [5, 6]}, "node_slots"),
        ({"request_node": [2]}, "request_node"),
        ({"request_node": [1, 0]}, "qo_indptr"),
    ):
        with pytest.raises(AttnrtError, match=label):
            f.radix(**{**good, **change})
