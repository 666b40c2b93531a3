# SPDX-License-Identifier: Apache-2.0
"""A radix tree of cached prefixes: a request's keys are the nodes on its path from the root."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.formats.arrays import frozen, host_ints, indptr_of, largest, lens_of, page_size_of
from attnrt.formats.base import BlockSparse
from attnrt.formats.paged import paged

__all__ = ["radix"]


def radix(
    qo_indptr: Any,
    node_parent: Any,
    node_indptr: Any,
    node_slots: Any,
    request_node: Any,
    *,
    page_size: int = 1,
    kv_lens: Any = None,
    qo_pos: Any = None,
    kv_pos: Any = None,
) -> BlockSparse:
    """The flat index of requests whose caches are paths in a tree. ``share`` of it reads every common node once.

    Parameters
    ----------
    qo_indptr : int32 [requests + 1]
        Rows of q of each request.
    node_parent : int32 [nodes]
        Parent of each node, -1 for a root; in any order.
    node_indptr : int32 [nodes + 1]
        Slots of each node: ``node_slots[node_indptr[n] : node_indptr[n + 1]]``.
    node_slots : int32 [node_indptr[-1]]
        Token slots in order of the keys; pages when ``page_size`` > 1.
    request_node : int32 [requests]
        Last node of each request's path, -1 for a request without keys.
    page_size : int
        Tokens per entry of node_slots.
    kv_lens : int32 [requests], optional
        Keys of each request; None: all that its path holds.
    qo_pos, kv_pos
        As in ``paged``.
    """
    size = page_size_of(page_size)
    parent = host_ints("node_parent", node_parent)
    nodes = len(parent)
    starts = host_ints("node_indptr", node_indptr, length=nodes + 1, of="nodes + 1")
    node_lens, _ = lens_of("node_indptr", starts)
    slots = host_ints("node_slots", node_slots, length=starts.item(-1), of="node_indptr[-1]")
    last = host_ints("request_node", request_node)
    for name, ids in (("node_parent", parent), ("request_node", last)):
        if largest(name, ids, holes=True) >= nodes:
            raise ArgumentError(name, f"must be below {nodes} nodes", int(ids.max()))
    path = _paths(parent, last)
    # Lengths per (request, level), root first; -1 pads short paths and has no slots.
    lens = np.where(path < 0, 0, node_lens[path] if nodes else 0)
    indptr = indptr_of(lens.sum(axis=1, dtype=np.int64))
    flat_lens = lens.reshape(-1)
    offset = np.cumsum(flat_lens, dtype=np.int64) - flat_lens
    begin = starts[np.maximum(path, 0)].reshape(-1) if path.size else np.zeros(0, np.int64)
    entry = np.arange(indptr.item(-1)) + np.repeat(begin - offset, flat_lens)
    room = indptr[1:] - indptr[:-1]
    return paged(
        qo_indptr,
        indptr,
        frozen(slots[entry]),
        room.astype(np.int64) * size if kv_lens is None else kv_lens,
        size,
        qo_pos=qo_pos,
        kv_pos=kv_pos,
    )


def _paths(parent: np.ndarray, last: np.ndarray) -> np.ndarray:
    """[requests, depth] nodes of each path, root first, padded with -1 in front."""
    levels: list[np.ndarray] = []
    node = last
    while (node >= 0).any():
        if len(levels) > len(parent):
            raise ArgumentError(
                "node_parent", "must lead to a root", f"a cycle through node {int(node[node >= 0][0])}"
            )
        levels.append(node)
        node = np.where(node < 0, -1, parent[node])
    return np.stack(levels[::-1], axis=1) if levels else np.full((len(last), 0), -1)
