# SPDX-License-Identifier: Apache-2.0
"""Finding requests that begin with the same blocks, at any depth, and reading those blocks once.

Rows that share a prefix are neighbours once the lists are sorted, in any order that compares block by block. Sorting the
lists' raw bytes is such an order (a block is a fixed number of bytes) and runs at the speed of memcmp. The lengths of the
common prefixes of neighbours then span a tree of intervals; one walk from its root decides which nodes are long enough to
become a block row of their own. A hash table of prefixes would need every prefix of every list.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from attnrt import checks
from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.access import need_host_indices, ranges
from attnrt.formats.arrays import frozen, indptr_of
from attnrt.formats.base import BlockSparse, Composite, Index
from attnrt.formats.check import need_checked, trusted
from attnrt.formats.composite import composite

__all__ = ["share"]


@dataclass(frozen=True, slots=True)
class _Segment:
    """Blocks [begin, end) that ``rows`` (of the index) have in common."""

    begin: int
    end: int
    rows: np.ndarray


def share(index: BlockSparse, min_tokens: int = 64, *, max_parts: int | None = None) -> Index:
    """The same index with common prefixes read once.

    Parameters
    ----------
    index : BlockSparse
        Flat, one list for all heads, host indices. Rows share a block if all their blocks up to it, and the keys' positions,
        are the same and the block is full in each of them. Not shared: keys that a mask speaks of.
    min_tokens : int
        Shortest stretch of keys worth a block row of its own.
    max_parts : int, optional
        Most parts of the result; deeper levels stay with their requests. None: as many as there are levels.

    Returns
    -------
    Composite or BlockSparse
        Part k holds the k-th stretch that a request shares, the last part what is its own; ``index`` itself if nothing is
        shared. Same result, to the bit.
    """
    if not isinstance(index, BlockSparse):
        raise ArgumentError("index", "must be flat (share first, then tree)", type(index).__name__)
    need_checked(index)
    if index.heads != 1 or index.indices is None:
        raise UnsupportedError(
            "index",
            "must be a list of blocks for all heads",
            "one list per head" if index.heads > 1 else "affine",
        )
    need_host_indices(index, "share()")
    min_tokens = checks.integer(min_tokens, "min_tokens", low=1)
    if max_parts is not None:
        max_parts = checks.integer(max_parts, "max_parts", low=1)
    C = index.block_size[1]
    order, depths = _neighbours(index)
    if len(order) < 2 or max(depths, default=0) * C < min_tokens:
        return index
    levels, shared = _segments(order, depths, -(-min_tokens // C), max_parts or len(order) + 1)
    if not levels:
        return index
    begin = np.zeros(index.num_rows, np.int64)
    begin[order] = shared
    own = replace(index, kv_begin=frozen(np.maximum(index.kv_begin, begin * C).astype(np.int32)))
    found = composite([*(_level_part(index, segments) for segments in levels), own])
    assert isinstance(found, Composite)
    return trusted(replace(found, flat=index))


def _neighbours(index: BlockSparse) -> tuple[np.ndarray, list[int]]:
    """Rows in an order that puts equal beginnings together, and the full blocks each has in common with the one before."""
    C = index.block_size[1]
    full = index.kv_end // C
    if index.mask_begin is not None:  # masked keys are each row's own
        full = np.minimum(full, np.maximum(index.mask_begin - index.kv_offset, 0) // C)
    candidate = (
        (full > 0)
        & (index.qo_indptr[1:] > index.qo_indptr[:-1])
        & (index.kv_begin == 0)
        & (index.kv_offset == 0)
    )
    ids = index.indices
    if index.block_pos is not None:  # a block is its id and its position
        ids = np.stack([ids[: len(index.block_pos)], index.block_pos], axis=1)
    begins, counts = index.indptr.tolist(), full.tolist()
    first = [0] * index.num_rows if index.kv_pos is None else index.kv_pos.tolist()
    rows = np.flatnonzero(candidate).tolist()
    lists = {r: ids[begins[r] : begins[r] + counts[r]] for r in rows}
    keys = {r: (first[r], lists[r].tobytes()) for r in rows}
    rows.sort(key=keys.__getitem__)
    depths = [0]
    width = ids.itemsize * (1 if ids.ndim == 1 else 2)
    for a, b in itertools.pairwise(rows):
        if first[a] != first[b] or keys[a][1][:width] != keys[b][1][:width]:
            depths.append(0)
            continue
        most = min(counts[a], counts[b])
        differ = lists[a][:most] != lists[b][:most]
        if differ.ndim == 2:
            differ = differ.any(axis=1)
        at = int(differ.argmax())
        depths.append(at if differ[at] else most)
    return np.array(rows, np.int64), depths


def _segments(
    order: np.ndarray, depths: list[int], min_blocks: int, max_parts: int
) -> tuple[list[list[_Segment]], np.ndarray]:
    """Segments of each level, and the blocks of each row (in ``order``) that some segment holds.

    ``depths[i]`` is the common prefix of rows i - 1 and i. An interval of rows whose common prefix is longer than that of the
    rows around it is a node; a node becomes a segment if it adds at least ``min_blocks`` to what its rows share already.
    """
    nodes: list[
        tuple[int, int, int]
    ] = []  # (common blocks, first row, one past the last), children before parents
    stack = [(0, 0)]
    for i in range(1, len(order) + 1):
        depth, low = (depths[i] if i < len(order) else 0), i - 1
        while stack[-1][0] > depth:
            longest, low = stack.pop()
            nodes.append((longest, low, i))
        if depth > stack[-1][0]:
            stack.append((depth, low))
    levels: list[list[_Segment]] = []
    shared = np.zeros(len(order), np.int64)
    level = np.zeros(len(order), np.int64)
    for depth, low, high in reversed(nodes):
        begin, k = int(shared[low]), int(level[low])
        if depth - begin < min_blocks or k + 1 >= max_parts:
            continue
        if k == len(levels):
            levels.append([])
        levels[k].append(_Segment(begin, depth, order[low:high]))
        shared[low:high] = depth
        level[low:high] += 1
    return levels, shared


def _level_part(index: BlockSparse, segments: list[_Segment]) -> BlockSparse:
    """The part whose block rows are ``segments``; a row's queries are those of its sharers."""
    C = index.block_size[1]
    lens = (index.qo_indptr[1:] - index.qo_indptr[:-1]).astype(np.int64)
    # Sharers in order of their number of queries, so that those of one numeric class are neighbours.
    sharers = [s.rows[np.lexsort((s.rows, lens[s.rows]))] for s in segments]
    rows = np.concatenate(sharers)
    queries = ranges(index.qo_indptr[rows], lens[rows])
    counts = np.array([int(lens[one].sum()) for one in sharers], np.int64)
    leader = np.array([one[0] for one in sharers], np.int64)
    begin, end = (np.array([getattr(s, name) for s in segments], np.int64) for name in ("begin", "end"))
    entries = ranges(index.indptr[leader] + begin, end - begin)
    indices = index.indices[entries]
    rows_of_q = queries if index.qo_index is None else index.qo_index[queries]
    return replace(
        index,
        block_size=(int(counts.max()), C),
        qo_indptr=indptr_of(counts),
        qo_index=frozen(rows_of_q.astype(np.int32)),
        request=frozen(index.request[queries]),
        qo_pos=frozen(index.qo_pos[queries]),
        indptr=indptr_of(end - begin),
        indices=frozen(indices),
        kv_pos=None if index.kv_pos is None else frozen((index.kv_pos[leader] + begin * C).astype(np.int32)),
        block_pos=None if index.block_pos is None else frozen(index.block_pos[entries]),
        kv_begin=frozen(np.zeros(len(segments), np.int32)),
        kv_end=frozen(((end - begin) * C).astype(np.int32)),
        kv_offset=frozen((begin * C).astype(np.int32)),
        mask=None,
        mask_offset=None,
        mask_begin=None,
        max_block=int(indices.max(initial=-1)),
        features=replace(index.features, qo_index=True, masked=False),
    )
