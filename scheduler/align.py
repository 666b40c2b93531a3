# SPDX-License-Identifier: Apache-2.0
"""Move a composite's cuts to leaf boundaries, so that flat and composite have the same leaves and the same bits.

A cut between parts may lie anywhere, a leaf is one softmax. Where a cut lies inside a leaf, that leaf leaves both parts and
goes whole to a *bridge* part, one list per group of queries that read the same lists (scheduler/bridge.py). What remains of
each part is kept as ``limits``: per query and list, the offsets that are still its own. Block lists are never copied for
that, so parts whose indices lie on a device stay as they are as long as no cut of theirs needs a bridge.

Classes have different rulers, so queries that share a block row but not a class have different limits; they are put next
to each other inside the row, and the planner cuts tiles where class or limits change. A class with one leaf keeps nothing
outside its bridges: its rows read everything from lists of their own, as in a flat index.

Everything is done for all groups of alike rows at once, in tables of groups x parts: planning is on the host's critical path,
and a loop over requests costs a hundred times more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attnrt.errors import UnsupportedError
from attnrt.formats.base import BlockSparse
from attnrt.scheduler.base import Ruler, Traits

__all__ = ["Aligned", "Gaps", "Lists", "align", "leaf_ends"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lists:
    """Groups of rows of q that read the same lists in one class; tables over groups x units (KV heads, or one) and parts.

    Attributes
    ----------
    units : int
    qo_rows : int64 [listed rows of q]
        By group; those of group g are ``begin[g] : begin[g + 1]``.
    begin : int64 [groups + 1]
    place : int64 [num_qo, parts]
        Place of each row of q in each part, -1: not in it.
    row : int64 [groups, parts]
        Block row in each part, -1: none.
    part : int64 [groups * units, parts]
        Parts in order of offset; the tables below are in that order.
    lo, hi : int64 [groups * units, parts]
        Live offsets, ``lo = hi = 0`` behind the last.
    """

    units: int
    qo_rows: np.ndarray
    begin: np.ndarray
    place: np.ndarray
    row: np.ndarray
    part: np.ndarray
    lo: np.ndarray
    hi: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gaps:
    """A stretch of straddled leaves of each list: offsets ``[lo, hi)``, int64 [groups * units]; ``lo = hi``: none."""

    lo: np.ndarray
    hi: np.ndarray


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

    lists = _lists(parts, req_class, num_kv_heads if any(part.heads > 1 for part in parts) else 1)
    gaps = _gaps(lists, parts, req_class, traits)
    if not gaps and not any(_mixed(part, req_class) for part in parts):
        return Aligned(parts=parts, limits=(None,) * len(parts))
    left = _left_over(parts, lists, gaps)
    kept = [_narrow(part, *left[p], req_class) for p, part in enumerate(parts)]
    kept += [(bridge, None) for gap in gaps for bridge in bridge_parts(parts, lists, gap)]
    kept = [entry for entry in kept if len(entry[0].request)] or kept[:1]
    return Aligned(parts=tuple(part for part, _ in kept), limits=tuple(limits for _, limits in kept))


def _mixed(part: BlockSparse, req_class: np.ndarray) -> bool:
    """Whether queries of two classes share a block row."""
    row = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
    change = np.diff(req_class[part.request]) != 0
    return bool((change & (np.diff(row) == 0)).any())


def _lists(parts: tuple[BlockSparse, ...], req_class: np.ndarray, units: int) -> Lists:
    count, num_qo = len(parts), parts[0].num_qo
    place = np.full((num_qo, count), -1, np.int64)
    signature = np.full((num_qo, count + 1), -1, np.int64)
    for p, part in enumerate(parts):
        rows = slice(0, len(part.request)) if part.qo_index is None else part.qo_index
        place[rows, p] = np.arange(len(part.request))
        signature[rows, p] = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
        signature[rows, -1] = req_class[part.request]
    order = np.flatnonzero((place >= 0).any(axis=1))
    order = order[np.lexsort(signature[order].T)]
    starts = np.ones(len(order), bool)
    starts[1:] = (signature[order[1:]] != signature[order[:-1]]).any(axis=1)
    rank = np.argsort(np.argsort(order[starts]))  # groups in order of their first row
    group = rank[np.cumsum(starts) - 1]
    order = order[np.argsort(group, kind="stable")]
    begin = np.concatenate(([0], np.cumsum(np.bincount(group, minlength=len(rank)))))
    row = signature[order[begin[:-1]], :-1]
    shape = (len(rank), units, count)
    lo3, hi3 = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for p, part in enumerate(parts):
        here = np.flatnonzero(row[:, p] >= 0)
        rows = row[here, p]
        offset = part.kv_offset[rows].astype(np.int64)[:, None]
        lo3[here, :, p] = offset + part.kv_begin.reshape(-1, part.heads)[rows]
        hi3[here, :, p] = offset + part.kv_end.reshape(-1, part.heads)[rows]
    lo, hi = lo3.reshape(-1, count), hi3.reshape(-1, count)
    by_offset = np.argsort(np.where(lo < hi, lo, np.iinfo(np.int64).max), axis=1, kind="stable")
    empty = lo >= hi
    lo[empty] = hi[empty] = 0
    lo, hi = np.take_along_axis(lo, by_offset, axis=1), np.take_along_axis(hi, by_offset, axis=1)
    return Lists(units=units, qo_rows=order, begin=begin, place=place, row=row, part=by_offset, lo=lo, hi=hi)


def leaf_ends(ruler: Ruler, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First key of the leaf that holds each offset, and of the leaf behind it."""
    sizes = np.asarray([size for count, size in ruler.steps if count] + [ruler.tail], np.int64)
    starts = np.concatenate(([0], np.cumsum([count * size for count, size in ruler.steps if count]))).astype(
        np.int64
    )
    span = np.searchsorted(starts, offset, side="right") - 1
    begin = starts[span] + (offset - starts[span]) // sizes[span] * sizes[span]
    return begin, begin + sizes[span]


def _gaps(lists: Lists, parts: tuple[BlockSparse, ...], req_class: np.ndarray, traits: Traits) -> list[Gaps]:
    """Stretches of leaves that straddle cuts, the n-th of every list together."""
    first = lists.qo_rows[lists.begin[:-1]]
    klass = np.zeros(len(first), np.int64)
    for p, part in enumerate(parts):
        here = lists.place[first, p] >= 0
        klass[here] = req_class[part.request[lists.place[first[here], p]]]
    klass = np.repeat(klass, lists.units)
    count, width = lists.lo.shape
    lo, hi = np.zeros((count, width), np.int64), np.zeros((count, width), np.int64)
    found = np.zeros(count, np.int64)
    for c in range(1, width):
        cut = lists.lo[:, c]
        for k in np.unique(klass):
            at = np.flatnonzero((klass == k) & (lists.lo[:, c] < lists.hi[:, c]))
            begin, end = leaf_ends(traits.classes[int(k)].ruler, cut[at])
            inside = begin < cut[at]
            at, begin, end = at[inside], begin[inside], end[inside]
            last = found[at] - 1
            joins = (last >= 0) & (begin <= hi[at, last])
            hi[at[joins], last[joins]] = end[joins]
            at, begin, end = at[~joins], begin[~joins], end[~joins]
            lo[at, found[at]], hi[at, found[at]] = begin, end
            found[at] += 1
    if lists.units > 1:
        _same_for_heads(lists, parts, lo, hi, found)
    return [Gaps(lo=lo[:, n], hi=hi[:, n]) for n in range(int(found.max(initial=0)))]


def _same_for_heads(
    lists: Lists, parts: tuple[BlockSparse, ...], lo: np.ndarray, hi: np.ndarray, found: np.ndarray
) -> None:
    """A list that all heads share is cut for all alike, also for heads that have no keys behind the cut."""
    shared = np.asarray([part.heads == 1 for part in parts])
    groups = np.flatnonzero((lists.row[:, shared] >= 0).any(axis=1))
    tables = [table.reshape(-1, lists.units, *table.shape[1:]) for table in (lo, hi, found)]
    most = tables[2][groups].argmax(axis=1)
    none = (tables[2][groups] == 0)[..., None]
    for table in tables[:2]:
        table[groups] = np.where(none, table[groups, most][:, None], table[groups])
    tables[2][groups] = np.where(none[..., 0], tables[2][groups, most][:, None], tables[2][groups])


def _left_over(
    parts: tuple[BlockSparse, ...], lists: Lists, gaps: list[Gaps]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Offsets that stay with each query's lists, int64 [queries, heads] x 2 for each part."""
    lo, hi = lists.lo.copy(), lists.hi.copy()
    for gap in gaps:
        begin, end = gap.lo[:, None], gap.hi[:, None]
        over = np.maximum(lo, begin) < np.minimum(hi, end)
        front = over & (begin <= lo)
        hi[over & ~front] = np.broadcast_to(begin, hi.shape)[over & ~front]
        lo[front] = np.minimum(end, hi)[front]
    shape = (len(lists.row), lists.units, len(parts))
    by_part = [np.zeros_like(lo), np.zeros_like(hi)]
    for out, table in zip(by_part, (lo, hi), strict=True):
        np.put_along_axis(out, lists.part, table, axis=1)
    group = np.repeat(np.arange(len(lists.row)), np.diff(lists.begin))
    found = []
    for p, part in enumerate(parts):
        ends = []
        for table in by_part:
            mine = table.reshape(shape)[:, :, p]
            if part.heads < lists.units:
                if (mine != mine[:, :1]).any():
                    rule = "must be cut alike for all heads where it shares keys with lists per head"
                    raise UnsupportedError(
                        "composite", rule, f"part {p}", "Cut its parts at leaf boundaries."
                    )
                mine = mine[:, :1]
            at = lists.place[lists.qo_rows, p]
            out = np.zeros((len(part.request), part.heads), np.int64)
            out[at[at >= 0]] = mine[group[at >= 0]]
            ends.append(out)
        found.append((ends[0], ends[1]))
    return found


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
