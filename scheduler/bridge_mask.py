# SPDX-License-Identifier: Apache-2.0
"""Masks of bridge parts: host bits are packed anew, a bound mask is kept where it alone speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrt.errors import UnsupportedError
from attnrt.formats.base import BlockSparse

__all__ = ["HINT", "Gap", "Segment", "bridge_mask"]

HINT = "Cut the parts at leaf boundaries of the class, or pass host arrays."


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
    """One row of a bridge: its rows of q, and per KV head (or once) the segments that it joins, in offset order."""

    qo_rows: np.ndarray
    segments: tuple[tuple[Segment, ...], ...]


def bridge_mask(
    parts: tuple[BlockSparse, ...], gaps: list[Gap]
) -> tuple[Any, np.ndarray | None, np.ndarray | None]:
    """Mask of a bridge: host bits are packed anew, a bound mask is kept where it alone speaks."""
    masked = {s.part for gap in gaps for segs in gap.segments for s in segs if parts[s.part].mask is not None}
    if not masked:
        return None, None, None
    if all(isinstance(parts[p].mask, np.ndarray) for p in masked):
        return _host_mask(parts, gaps)
    part = parts[min(masked)]
    if len(masked) > 1 or part.mask_offset is None or part.mask_begin is None:
        raise _bound()
    offsets, begins = [], []
    for gap in gaps:
        offset, begin = np.full(len(gap.qo_rows), -1, np.int64), 0
        for segments in gap.segments:
            for i, s in enumerate(segments):
                if parts[s.part] is not part:
                    continue
                begin = int(part.mask_begin[s.row])
                if i + 1 != len(segments) or (begin < s.lo and i):
                    raise _bound()  # keys of other parts would read its bits
                offset = part.mask_offset[_places(part, s, gap.qo_rows)]
        offsets.append(offset)
        begins.append(begin)
    return part.mask, np.concatenate(offsets), np.asarray(begins, np.int32)


def _bound() -> UnsupportedError:
    rule = "must be a host array where a composite's cut lies inside a leaf"
    return UnsupportedError("index.mask", rule, None, HINT)


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
            if part.mask is None or part.mask_offset is None or part.mask_begin is None:
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
