# SPDX-License-Identifier: Apache-2.0
"""Move a composite's cuts to leaf boundaries, so that flat and composite have the same leaves and the same bits.

A cut between parts may lie anywhere, a leaf is one softmax. Where a cut lies inside a leaf, that leaf leaves both parts and
goes whole to a *bridge* part, one list per group of queries that read the same lists (scheduler/bridge.py). What remains of
each part is kept as ``limits``: per query and list, the offsets that are still its own. Block lists are never copied for
that, so parts whose indices lie on a device stay as they are as long as no cut of theirs needs a bridge.

Classes have different rulers, so queries that share a block row but not a class have different limits; they are put next
to each other inside the row, and the planner cuts tiles where class or limits change. A class with one leaf keeps nothing
outside its bridges: its rows read everything from lists of their own, as in a flat index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attnrt.formats.base import BlockSparse
from attnrt.scheduler.base import Ruler, Traits

__all__ = ["Aligned", "Gap", "Segment", "align"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Keys ``[lo, hi)`` (offsets) of one list: part, block row and head of the list."""

    part: int
    row: int
    head: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap:
    """Leaves that straddle cuts, for queries that read the same lists: what one row of a bridge part must hold.

    ``qo_rows`` and ``queries`` int64 [n]: rows of q, and where to find their request and position (in the part of the first
    segment). ``segments``: per KV head (or once), in offset order, without gap.
    """

    qo_rows: np.ndarray
    queries: np.ndarray
    segments: tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Aligned:
    """Parts with bridges, and per part limits int64 [queries, heads] x 2 or None (scheduler/problem.py)."""

    parts: tuple[BlockSparse, ...]
    limits: tuple[tuple[np.ndarray, np.ndarray] | None, ...]


def align(
    parts: tuple[BlockSparse, ...], req_class: np.ndarray, traits: Traits, num_kv_heads: int
) -> Aligned:
    """Parts of a composite, re-cut at leaf boundaries.

    Parameters
    ----------
    parts : tuple of BlockSparse
    req_class : int32 [num_requests]
    traits : Traits
    num_kv_heads : int

    Raises
    ------
    UnsupportedError
        A cut inside a leaf between lists (or masks) that lie on a device.
    """
    from attnrt.scheduler.bridge import bridge_parts

    units = num_kv_heads if any(part.heads > 1 for part in parts) else 1
    ranges = [_ranges(part) for part in parts]
    gaps: list[list[Gap]] = []
    for rows, queries in _groups(parts, req_class):
        lead = [int(q[0]) if len(q) else -1 for q in queries]
        request = next(int(parts[p].request[q]) for p, q in enumerate(lead) if q >= 0)
        ruler = traits.classes[int(req_class[request])].ruler
        found = [
            _align_group(parts, ranges, queries, unit if units > 1 else 0, ruler) for unit in range(units)
        ]
        for nth in range(max(len(per_unit) for per_unit in found)):
            segments = tuple(per_unit[nth] if nth < len(per_unit) else () for per_unit in found)
            first = next(s[0] for s in segments if s)
            while len(gaps) <= nth:
                gaps.append([])
            gaps[nth].append(Gap(qo_rows=rows, queries=queries[first.part], segments=segments))
    if not gaps and not any(_mixed(part, req_class) for part in parts):
        return Aligned(parts=parts, limits=(None,) * len(parts))
    kept = [_narrow(part, *ranges[p], req_class) for p, part in enumerate(parts)]
    bridges = [bridge for level in gaps for bridge in bridge_parts(parts, level, units)]
    kept += [(bridge, None) for bridge in bridges]
    kept = [entry for entry in kept if len(entry[0].request)] or kept[:1]
    return Aligned(parts=tuple(part for part, _ in kept), limits=tuple(limits for _, limits in kept))


def _mixed(part: BlockSparse, req_class: np.ndarray) -> bool:
    """Whether queries of two classes share a block row."""
    row = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
    change = np.diff(req_class[part.request]) != 0
    return bool((change & (np.diff(row) == 0)).any())


def _ranges(part: BlockSparse) -> tuple[np.ndarray, np.ndarray]:
    """Live offsets of every query's lists, int64 [queries, heads], to be narrowed in place."""
    row = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
    shape = (part.num_rows, part.heads)
    offset = part.kv_offset.astype(np.int64)[:, None]
    return (offset + part.kv_begin.reshape(shape))[row], (offset + part.kv_end.reshape(shape))[row]


def _groups(
    parts: tuple[BlockSparse, ...], req_class: np.ndarray
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Rows of q that read the same lists in one class, each with its places in the parts (empty: not in that part)."""
    num_qo = parts[0].num_qo
    where = np.full((num_qo, len(parts)), -1, np.int64)
    signature = np.full((num_qo, len(parts) + 1), -1, np.int64)
    for p, part in enumerate(parts):
        rows = np.arange(len(part.request)) if part.qo_index is None else part.qo_index
        where[rows, p] = np.arange(len(part.request))
        signature[rows, p] = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
        signature[rows, -1] = req_class[part.request]
    listed = np.flatnonzero((where >= 0).any(axis=1))
    if not len(listed):
        return []
    order = listed[np.lexsort(signature[listed].T)]
    change = np.flatnonzero((np.diff(signature[order], axis=0) != 0).any(axis=1)) + 1
    groups = [np.sort(group) for group in np.split(order, change)]
    groups.sort(key=lambda group: int(group[0]))
    return [(g, [where[g, p] if where[g[0], p] >= 0 else g[:0] for p in range(len(parts))]) for g in groups]


def _align_group(
    parts: tuple[BlockSparse, ...],
    ranges: list[tuple[np.ndarray, np.ndarray]],
    queries: list[np.ndarray],
    unit: int,
    ruler: Ruler,
) -> list[tuple[Segment, ...]]:
    """Narrow the group's ranges to whole leaves; the segments of each stretch of straddled leaves."""
    segments = []
    for p, part_queries in enumerate(queries):
        if len(part_queries):
            q, head = int(part_queries[0]), unit if parts[p].heads > 1 else 0
            lo, hi = int(ranges[p][0][q, head]), int(ranges[p][1][q, head])
            if lo < hi:
                row = int(np.searchsorted(parts[p].qo_indptr, q, side="right")) - 1
                segments.append(Segment(part=p, row=row, head=head, lo=lo, hi=hi))
    segments.sort(key=lambda s: s.lo)
    gaps: list[tuple[int, int]] = []
    for segment in segments[1:]:
        leaf = ruler.leaf_of(segment.lo)
        begin, end = ruler.start(leaf), ruler.start(leaf + 1)
        if begin == segment.lo:
            continue
        if gaps and begin <= gaps[-1][1]:
            gaps[-1] = (gaps[-1][0], end)
        else:
            gaps.append((begin, end))
    stretches = []
    for begin, end in gaps:
        stretch = []
        for s in segments:
            lo, hi = max(s.lo, begin), min(s.hi, end)
            if lo < hi:
                stretch.append(replace(s, lo=lo, hi=hi))
                _remove(ranges[s.part], queries[s.part], s.head, begin, end)
        stretches.append(tuple(stretch))
    return stretches


def _remove(
    ranges: tuple[np.ndarray, np.ndarray], queries: np.ndarray, head: int, begin: int, end: int
) -> None:
    """Take ``[begin, end)``, which reaches over an end of the range, out of the range."""
    lo, hi = int(ranges[0][queries[0], head]), int(ranges[1][queries[0], head])
    if begin <= lo:
        ranges[0][queries, head] = min(end, hi)
    else:
        ranges[1][queries, head] = begin


def _narrow(
    part: BlockSparse, lo: np.ndarray, hi: np.ndarray, req_class: np.ndarray
) -> tuple[BlockSparse, tuple[np.ndarray, np.ndarray] | None]:
    """The part without queries that have no keys left in it, neighbours alike, live ranges narrowed to what is left."""
    row = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
    keep = np.flatnonzero((lo < hi).any(axis=1))
    keys = (*hi[keep].T, *lo[keep].T, req_class[part.request[keep]], row[keep])
    keep = keep[np.lexsort(keys)]
    lo, hi, row = lo[keep], hi[keep], row[keep]
    counts = np.bincount(row, minlength=part.num_rows)
    begin, end = part.kv_begin.reshape(-1, part.heads).copy(), part.kv_end.reshape(-1, part.heads).copy()
    offset = part.kv_offset.astype(np.int64)[:, None]
    far = np.iinfo(np.int64).max
    low, high = np.full(begin.shape, far), np.full(begin.shape, -far)
    np.minimum.at(low, row, np.where(lo < hi, lo, far))
    np.maximum.at(high, row, np.where(lo < hi, hi, -far))
    live = low < high
    begin = np.where(live, low - offset, begin).astype(np.int32)
    end = np.where(live, high - offset, begin).astype(np.int32)
    rows_of = np.arange(len(part.request), dtype=np.int32) if part.qo_index is None else part.qo_index
    narrowed = replace(
        part,
        qo_indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        qo_index=np.ascontiguousarray(rows_of[keep], np.int32),
        request=np.ascontiguousarray(part.request[keep]),
        qo_pos=np.ascontiguousarray(part.qo_pos[keep]),
        mask_offset=None if part.mask_offset is None else np.ascontiguousarray(part.mask_offset[keep]),
        kv_begin=begin.reshape(-1),
        kv_end=end.reshape(-1),
        features=replace(part.features, qo_index=True),
    )
    same = (lo == low[row]).all() and (hi == high[row]).all()
    return narrowed, None if same else (np.ascontiguousarray(lo), np.ascontiguousarray(hi))
