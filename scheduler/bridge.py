# SPDX-License-Identifier: Apache-2.0
"""Bridge parts: leaves that straddle a cut between parts, listed anew from the lists on both sides.

A bridge lists blocks where both sides have the same block size and meet at a block's edge, else single slots (C = 1). Keys
keep slots, positions, heads and masks; only their list is new. No K or V moves. All bridges of a part are written at once:
a *piece* is what one list of one part gives to a gap, and the entries of all pieces are computed as one array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnrt.errors import UnsupportedError
from attnrt.formats.base import HOLE, BlockSparse, Features
from attnrt.scheduler.align import Gaps, Lists
from attnrt.scheduler.bridge_mask import HINT, Gap, Segment, bridge_mask

__all__ = ["bridge_parts"]

_INT32_MAX = (1 << 31) - 1


@dataclass(slots=True, kw_only=True)
class _Pieces:
    """Parallel arrays, int64 [pieces], by list and offset: keys ``[lo, hi)`` (offsets) of a list of a part."""

    of: np.ndarray  # list, group * units + unit
    part: np.ndarray
    row: np.ndarray
    head: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    offset: np.ndarray  # kv_offset of the list
    entry: np.ndarray  # first entry of the list in the part's indices
    own: np.ndarray  # block size of the part

    def where(self, chosen: np.ndarray) -> _Pieces:
        return _Pieces(**{name: getattr(self, name)[chosen] for name in self.__slots__})


def bridge_parts(parts: tuple[BlockSparse, ...], lists: Lists, gaps: Gaps) -> list[BlockSparse]:
    """Bridges for one gap of every list that has one, a part for each block size among them.

    Raises
    ------
    UnsupportedError
        Indices or masks that must be listed anew lie on a device, or a slot does not fit int32.
    """
    pieces = _pieces(parts, lists, gaps)
    for p in np.unique(pieces.part).tolist():
        if parts[p].indices is not None and not isinstance(parts[p].indices, np.ndarray):
            rule = "must be a host array where a composite's cut lies inside a leaf"
            raise UnsupportedError("index.indices", rule, f"part {p}", HINT)
    size = _block_sizes(parts, pieces, lists)
    found = []
    for chosen in sorted(set(size[size > 0].tolist()), reverse=True):
        groups = np.flatnonzero(size == chosen)
        mine = (
            pieces
            if len(set(size[size > 0].tolist())) == 1
            else pieces.where(size[pieces.of // lists.units] == chosen)
        )
        found.append(_bridge(parts, lists, groups, mine, chosen))
    return found


def _pieces(parts: tuple[BlockSparse, ...], lists: Lists, gaps: Gaps) -> _Pieces:
    lo, hi = np.maximum(lists.lo, gaps.lo[:, None]), np.minimum(lists.hi, gaps.hi[:, None])
    of, nth = np.nonzero(lo < hi)
    part = lists.part[of, nth]
    row = lists.row[of // lists.units, part]
    head, offset, entry, own = (np.zeros(len(of), np.int64) for _ in range(4))
    for p, source in enumerate(parts):
        at = np.flatnonzero(part == p)
        head[at] = of[at] % lists.units if source.heads > 1 else 0
        offset[at] = source.kv_offset[row[at]]
        entry[at] = source.indptr[row[at] * source.heads + head[at]]
        own[at] = source.block_size[1]
    return _Pieces(
        of=of,
        part=part,
        row=row,
        head=head,
        lo=lo[of, nth],
        hi=hi[of, nth],
        offset=offset,
        entry=entry,
        own=own,
    )


def _firsts(pieces: _Pieces) -> np.ndarray:
    """Whether a piece is its list's first."""
    first = np.ones(len(pieces.of), bool)
    first[1:] = pieces.of[1:] != pieces.of[:-1]
    return first


def _block_sizes(parts: tuple[BlockSparse, ...], pieces: _Pieces, lists: Lists) -> np.ndarray:
    """Block size of each group's bridge, 0 for groups without."""
    group = pieces.of // lists.units
    lead = np.full(len(lists.row), -1, np.int64)
    lead[group[::-1]] = np.arange(len(group))[::-1]
    size = np.where(lead >= 0, 1, 0)
    if not len(group):
        return size
    lead = lead[group]
    affine = np.asarray([part.indices is None for part in parts])[pieces.part]
    phase = pieces.offset % pieces.own
    good = ~affine & (pieces.own == pieces.own[lead]) & (phase == phase[lead])
    good &= _firsts(pieces) | ((pieces.lo - pieces.offset) % pieces.own == 0)
    all_good = np.ones(len(size), bool)
    all_good[group[~good]] = False
    size[group] = np.where(all_good[group], pieces.own, 1)
    return size


def _bridge(
    parts: tuple[BlockSparse, ...], lists: Lists, groups: np.ndarray, pieces: _Pieces, size: int
) -> BlockSparse:
    units = lists.units
    begin = (pieces.lo - pieces.offset) // size  # first block of the piece, in its list
    count = -(-(pieces.hi - pieces.offset) // size) - begin
    first = np.flatnonzero(_firsts(pieces))
    last = np.append(first[1:], len(pieces.of)) - 1
    renumber = np.zeros(len(lists.row), np.int64)
    renumber[groups] = np.arange(len(groups))
    of = renumber[pieces.of // units] * units + pieces.of % units  # lists of this bridge
    lead = of[first]  # lists that hold anything
    list_offset = pieces.offset[first] + begin[first] * size
    offset = np.full(len(groups), np.iinfo(np.int64).max)
    np.minimum.at(offset, lead // units, list_offset)
    pad = np.zeros(len(groups) * units, np.int64)
    pad[lead] = (list_offset - offset[lead // units]) // size
    kv_begin, kv_end = np.zeros((2, len(pad)), np.int64)
    kv_begin[lead] = pieces.lo[first] - offset[lead // units]
    kv_end[lead] = pieces.hi[last] - offset[lead // units]
    lengths = pad + np.bincount(of, weights=count, minlength=len(pad)).astype(np.int64)
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    ids, pos, index_in_list = _entries(parts, pieces, of, begin, count, pad, indptr, size)
    most = int(ids.max(initial=HOLE))
    if most > _INT32_MAX:
        raise UnsupportedError(
            "slots of a composite", "must fit int32 where a cut lies inside a leaf", most, HINT
        )
    start = np.zeros(len(groups), np.int64)
    start[lead[::-1] // units] = pos[indptr[lead[::-1]]]
    row_of = np.repeat(np.arange(len(pad)) // units, lengths)
    affine = bool((pos == start[row_of] + index_in_list * size).all())
    mask, mask_offset, mask_begin = None, None, None
    if any(part.mask is not None for part in parts):
        mask, mask_offset, mask_begin = bridge_mask(parts, _gap_list(lists, groups, pieces))
    qo_rows, request, qo_pos, counts = _queries(parts, lists, groups)
    return BlockSparse(
        block_size=(int(counts.max()), size),
        heads=units,
        num_qo=parts[0].num_qo,
        requests=parts[0].requests,
        qo_indptr=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        qo_index=qo_rows.astype(np.int32),
        request=request,
        qo_pos=qo_pos,
        indptr=indptr.astype(np.int32),
        indices=ids.astype(np.int32),
        kv_pos=start.astype(np.int32) if affine else None,
        block_pos=None if affine else pos.astype(np.int32),
        kv_begin=kv_begin.astype(np.int32),
        kv_end=kv_end.astype(np.int32),
        kv_offset=offset.astype(np.int32),
        mask=mask,
        mask_offset=mask_offset,
        mask_begin=mask_begin,
        max_block=most,
        features=Features(
            per_head=units > 1,
            masked=mask is not None,
            block_pos=not affine,
            qo_index=True,
            bound_mask=mask is not None and not isinstance(mask, np.ndarray),
            bound_kv_lens=parts[0].requests.bound_kv_lens is not None,
        ),
    )


def _entries(
    parts: tuple[BlockSparse, ...],
    pieces: _Pieces,
    of: np.ndarray,
    begin: np.ndarray,
    count: np.ndarray,
    pad: np.ndarray,
    indptr: np.ndarray,
    size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Block ids, positions of their first keys, and place in the list of every entry of all lists."""
    total = int(indptr[-1])
    index_in_list = np.arange(total) - np.repeat(indptr[:-1], np.diff(indptr))
    ids, pos = np.full(total, HOLE, np.int64), np.zeros(total, np.int64)
    before = np.cumsum(count) - count  # entries of pieces before this one
    first = np.flatnonzero(_firsts(pieces))
    in_list = before - np.repeat(before[first], np.diff(np.append(first, len(of))))
    to = indptr[of] + pad[of] + in_list
    step = np.arange(int(count.sum())) - np.repeat(before, count)
    for p in np.unique(pieces.part).tolist():
        part, mine = parts[p], pieces.part == p
        entries = np.repeat(mine, count)
        n, t = count[mine], step[entries]
        j = (np.repeat(begin[mine], n) + t) * size  # first key of the entry, in its list
        own = part.block_size[1]
        block = np.repeat(pieces.entry[mine], n) + j // own
        at = np.repeat(to[mine], n) + t
        row = np.repeat(pieces.row[mine], n)
        if part.indices is None:
            ids[at] = part.kv_base[row] + j
        else:
            found = part.indices[block].astype(np.int64)
            ids[at] = found if size == own else np.where(found == HOLE, HOLE, found * own + j % own)
        if part.block_pos is None:
            pos[at] = part.kv_pos[row] + j
        else:
            pos[at] = part.block_pos[block].astype(np.int64) + j % own
    padded = np.flatnonzero(index_in_list < np.repeat(pad, np.diff(indptr)))
    if len(padded):
        lead = np.repeat(indptr[:-1] + pad, np.diff(indptr))[padded]
        pos[padded] = pos[lead] - (lead - padded) * size
    return ids, pos, index_in_list


def _queries(
    parts: tuple[BlockSparse, ...], lists: Lists, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows of q, requests and positions of the groups' queries, and how many each group has."""
    counts = np.diff(lists.begin)[groups]
    at = np.repeat(lists.begin[groups] - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    qo_rows = lists.qo_rows[at]
    request, qo_pos = np.zeros(len(qo_rows), np.int32), np.zeros(len(qo_rows), np.int32)
    for p, part in enumerate(parts):
        place = lists.place[qo_rows, p]
        here = place >= 0
        request[here], qo_pos[here] = part.request[place[here]], part.qo_pos[place[here]]
    return qo_rows, request, qo_pos, counts


def _gap_list(lists: Lists, groups: np.ndarray, pieces: _Pieces) -> list[Gap]:
    """The pieces as values, one by one, for masks."""
    of_list: dict[int, list[Segment]] = {}
    for i, key in enumerate(pieces.of.tolist()):
        part, row, head, lo, hi = (
            int(getattr(pieces, name)[i]) for name in ("part", "row", "head", "lo", "hi")
        )
        of_list.setdefault(key, []).append(Segment(part=part, row=row, head=head, lo=lo, hi=hi))
    return [
        Gap(
            qo_rows=lists.qo_rows[lists.begin[g] : lists.begin[g + 1]],
            segments=tuple(tuple(of_list.get(g * lists.units + u, ())) for u in range(lists.units)),
        )
        for g in groups.tolist()
    ]
