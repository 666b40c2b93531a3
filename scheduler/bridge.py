# SPDX-License-Identifier: Apache-2.0
"""Bridge parts: leaves that straddle a cut between parts, listed anew from the lists on both sides.

A bridge lists blocks where both sides have the same block size and meet at a block's edge, else single slots (C = 1). Keys
keep slots, positions, heads and masks; only their list is new. No K or V moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.errors import UnsupportedError
from attnrt.formats.base import HOLE, BlockSparse, Features

if TYPE_CHECKING:
    from attnrt.scheduler.align import Gap, Segment

__all__ = ["bridge_parts"]

_HINT = "Cut the parts at leaf boundaries of the class, or pass host arrays."
_INT32_MAX = (1 << 31) - 1


@dataclass(slots=True, kw_only=True)
class _List:
    """One list: block ids and positions of their first keys (int64), offset of list entry 0, live offsets."""

    ids: np.ndarray
    pos: np.ndarray
    offset: int
    lo: int
    hi: int


def bridge_parts(parts: tuple[BlockSparse, ...], gaps: list[Gap], units: int) -> list[BlockSparse]:
    """Bridges for gaps of different queries, one part for each block size among them.

    Raises
    ------
    UnsupportedError
        Indices or masks that must be listed anew lie on a device, or a slot does not fit int32.
    """
    by_size: dict[int, list[Gap]] = {}
    for gap in gaps:
        by_size.setdefault(_block_size(parts, gap), []).append(gap)
    return [_bridge(parts, some, size, units) for size, some in sorted(by_size.items(), reverse=True)]


def _block_size(parts: tuple[BlockSparse, ...], gap: Gap) -> int:
    sizes = {parts[s.part].block_size[1] for segments in gap.segments for s in segments}
    if len(sizes) > 1:
        return 1
    (size,) = sizes
    phases = set()
    for segments in gap.segments:
        for i, s in enumerate(segments):
            offset = int(parts[s.part].kv_offset[s.row])
            phases.add(offset % size)
            if parts[s.part].indices is None or (i and (s.lo - offset) % size):
                return 1
    return size if len(phases) == 1 else 1


def _bridge(parts: tuple[BlockSparse, ...], gaps: list[Gap], size: int, units: int) -> BlockSparse:
    lists = [[_joined(parts, segments, size) for segments in gap.segments] for gap in gaps]
    offsets = [min(one.offset for one in row if one is not None) for row in lists]
    ids, pos, begin, end, lengths = [], [], [], [], []
    affine = True
    for row, offset in zip(lists, offsets, strict=True):
        base = None
        for one in row:
            if one is None:
                lengths.append(0)
                begin.append(0)
                end.append(0)
                continue
            pad = (one.offset - offset) // size
            first = np.arange(-pad, 0) * size + int(one.pos[0])
            ids += [np.full(pad, HOLE, np.int64), one.ids]
            pos += [first, one.pos]
            lengths.append(pad + len(one.ids))
            begin.append(one.lo - offset)
            end.append(one.hi - offset)
            base = int(first[0] if pad else one.pos[0]) if base is None else base
            here = np.concatenate((first, one.pos))
            affine = affine and bool((here == base + np.arange(len(here)) * size).all())
    indices, positions = np.concatenate(ids), np.concatenate(pos)
    most = int(indices.max(initial=HOLE))
    if most > _INT32_MAX:
        raise UnsupportedError(
            "slots of a composite", "must fit int32 where a cut lies inside a leaf", most, _HINT
        )
    indptr = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    queries = [gap.queries for gap in gaps]
    sources = [parts[next(s for s in gap.segments if s)[0].part] for gap in gaps]
    mask, mask_offset, mask_begin = _mask(parts, gaps)
    return BlockSparse(
        block_size=(max(len(q) for q in queries), size),
        heads=units,
        num_qo=parts[0].num_qo,
        requests=parts[0].requests,
        qo_indptr=np.concatenate(([0], np.cumsum([len(q) for q in queries]))).astype(np.int32),
        qo_index=np.concatenate([gap.qo_rows for gap in gaps]).astype(np.int32),
        request=np.concatenate([s.request[q] for s, q in zip(sources, queries, strict=True)]),
        qo_pos=np.concatenate([s.qo_pos[q] for s, q in zip(sources, queries, strict=True)]),
        indptr=indptr,
        indices=indices.astype(np.int32),
        kv_pos=_first(positions, indptr[:-1:units], indptr[units::units]) if affine else None,
        block_pos=None if affine else positions.astype(np.int32),
        kv_begin=np.asarray(begin, np.int32),
        kv_end=np.asarray(end, np.int32),
        kv_offset=np.asarray(offsets, np.int32),
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


def _first(positions: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Position of each row's first listed key (rows of a gap always list some)."""
    assert (begin < end).all()
    return positions[begin].astype(np.int32)


def _joined(parts: tuple[BlockSparse, ...], segments: tuple[Segment, ...], size: int) -> _List | None:
    if not segments:
        return None
    pieces = [_listed(parts[s.part], s, size) for s in segments]
    return _List(
        ids=np.concatenate([p.ids for p in pieces]),
        pos=np.concatenate([p.pos for p in pieces]),
        offset=pieces[0].offset,
        lo=segments[0].lo,
        hi=segments[-1].hi,
    )


def _listed(part: BlockSparse, s: Segment, size: int) -> _List:
    """Blocks (size = the part's own) or single slots (size = 1) that hold the keys of a segment."""
    own = part.block_size[1]
    offset = int(part.kv_offset[s.row])
    entry = int(part.indptr[s.row * part.heads + s.head])
    lo, hi = s.lo - offset, s.hi - offset
    if part.indices is not None and not isinstance(part.indices, np.ndarray):
        raise UnsupportedError(
            "index.indices",
            "must be a host array where a composite's cut lies inside a leaf",
            f"offset {s.lo}",
            _HINT,
        )
    j = (
        np.arange(lo, hi, dtype=np.int64)
        if size == 1
        else np.arange(lo // size * size, hi, size, dtype=np.int64)
    )
    block = entry + j // own
    pos = (
        int(part.kv_pos[s.row]) + j
        if part.block_pos is None
        else part.block_pos[block].astype(np.int64) + j % own
    )
    if part.indices is None:
        ids = int(part.kv_base[s.row]) + j
    elif size == own:
        ids = part.indices[block].astype(np.int64)
    else:
        found = part.indices[block].astype(np.int64)
        ids = np.where(found == HOLE, HOLE, found * own + j % own)
    return _List(ids=ids, pos=pos, offset=offset + int(j[0]), lo=s.lo, hi=s.hi)


def _mask(
    parts: tuple[BlockSparse, ...], gaps: list[Gap]
) -> tuple[Any, np.ndarray | None, np.ndarray | None]:
    """Mask of a bridge: host bits are packed anew, a bound mask is kept where it alone speaks."""
    masked = {s.part for gap in gaps for segs in gap.segments for s in segs if parts[s.part].mask is not None}
    if not masked:
        return None, None, None
    if all(isinstance(parts[p].mask, np.ndarray) for p in masked):
        return _host_mask(parts, gaps)
    (p,) = masked if len(masked) == 1 else (None,)
    offsets, begins = [], []
    for gap in gaps:
        offset, begin = np.full(len(gap.queries), -1, np.int64), 0
        for segments in gap.segments:
            for i, s in enumerate(segments):
                if s.part != p:
                    continue
                begin = int(parts[p].mask_begin[s.row])
                if i + 1 != len(segments) or (begin < s.lo and i):
                    p = None
                    break
                places = _places(parts[p], s, gap.qo_rows)
                offset = parts[p].mask_offset[places]
        offsets.append(offset)
        begins.append(begin)
    if p is None:
        raise UnsupportedError(
            "index.mask", "must be a host array where a composite's cut lies inside a leaf", None, _HINT
        )
    return parts[p].mask, np.concatenate(offsets), np.asarray(begins, np.int32)


def _places(part: BlockSparse, s: Segment, qo_rows: np.ndarray) -> np.ndarray:
    """Places in a part of rows of q that share its block row with the segment's query."""
    begin, end = int(part.qo_indptr[s.row]), int(part.qo_indptr[s.row + 1])
    rows = np.arange(begin, end) if part.qo_index is None else part.qo_index[begin:end]
    order = np.argsort(rows)
    return begin + order[np.searchsorted(rows[order], qo_rows)]


def _host_mask(parts: tuple[BlockSparse, ...], gaps: list[Gap]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bits: list[np.ndarray] = []
    offsets: list[int] = []
    begins: list[int] = []
    total = 0
    for gap in gaps:
        lo = min(segs[0].lo for segs in gap.segments if segs)
        hi = max(segs[-1].hi for segs in gap.segments if segs)
        rows = np.ones((len(gap.qo_rows), hi - lo), bool)
        for s in {s for segs in gap.segments for s in segs}:
            part = parts[s.part]
            if part.mask is None:
                continue
            start = int(part.mask_begin[s.row])
            keys = np.arange(max(s.lo, start), s.hi, dtype=np.int64)
            for i, q in enumerate(_places(part, s, gap.qo_rows)):
                if part.mask_offset[q] >= 0 and len(keys):
                    bit = int(part.mask_offset[q]) + keys - start
                    rows[i, keys - lo] = (part.mask[bit >> 3] >> (bit & 7).astype(np.uint8)) & 1
        bits.append(rows.reshape(-1))
        offsets += range(total, total + rows.size, hi - lo)
        begins.append(lo)
        total += rows.size
    packed = np.packbits(np.concatenate(bits), bitorder="little")
    return packed, np.asarray(offsets, np.int64), np.asarray(begins, np.int32)
