# SPDX-License-Identifier: Apache-2.0
"""Putting batches together and taking them apart: ``concat`` and ``take``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.access import need_host_indices, ranges
from attnrt.formats.arrays import frozen, host_ints, indptr_of
from attnrt.formats.base import BlockSparse, Composite, Index, Requests
from attnrt.formats.check import need_checked, trusted
from attnrt.formats.composite import composite, features_of

__all__ = ["concat", "take"]


def concat(*indexes: Index) -> Index:
    """Batches laid after each other: requests and rows of q of the second follow those of the first.

    A mixed batch (plain decode, draft trees, shared prefixes, pruned lists) is the concatenation of one index per kind. Parts
    with the same block size and the same kind of lists are joined, so that the number of parts stays small.
    """
    if not indexes:
        raise ArgumentError("indexes", "must not be empty")
    for index in indexes:
        if not isinstance(index, (BlockSparse, Composite)):
            raise ArgumentError("indexes", "must come from attnrt.formats", type(index).__name__)
        need_checked(index)
    if len(indexes) == 1:
        return indexes[0]
    for index in indexes:
        if index.requests.bound_kv_lens is not None:
            raise UnsupportedError("kv_lens", "must be host lengths to be concatenated", "bound lengths")
    requests = Requests(
        qo_lens=frozen(np.concatenate([index.requests.qo_lens for index in indexes])),
        kv_lens=frozen(np.concatenate([index.requests.kv_lens for index in indexes])),
    )
    return _made(indexes, lambda positions: _side_by_side(indexes, positions, requests))


def _made(indexes: Sequence[Index], parts: Callable[[bool], list[BlockSparse]]) -> Index:
    """The index of such parts of the indexes, and in line of such of theirs in line where one of them has any."""
    found = composite(parts(True))
    in_line = any(isinstance(index, Composite) and index.in_line for index in indexes)
    if in_line and isinstance(found, Composite):
        found = replace(found, in_line=tuple(parts(False)))
    return trusted(found)


def _side_by_side(indexes: Sequence[Index], positions: bool, requests: Requests) -> list[BlockSparse]:
    """Parts of a concatenation, of the indexes' parts or of those in line."""
    num_qo = sum(index.num_qo for index in indexes)
    groups: list[list[BlockSparse]] = []
    query, request = 0, 0
    for index in indexes:
        free = list(range(len(groups)))  # parts of one index see the same queries and stay apart
        for part in index.parts_for(positions):
            moved = replace(
                part,
                num_qo=num_qo,
                requests=requests,
                qo_index=frozen((_rows_of_q(part) + query).astype(np.int32)),
                request=frozen((part.request + request).astype(np.int32)),
            )
            at = next((g for g in free if _joinable(groups[g][0], moved)), None)
            if at is None:
                groups.append([moved])
            else:
                free.remove(at)
                groups[at].append(moved)
        query, request = query + index.num_qo, request + len(index.requests)
    return [_join(group, num_qo) for group in groups]


def _rows_of_q(part: BlockSparse) -> np.ndarray:
    return np.arange(len(part.request), dtype=np.int64) if part.qo_index is None else part.qo_index


def _joinable(a: BlockSparse, b: BlockSparse) -> bool:
    return (
        a.block_size[1] == b.block_size[1]
        and a.heads == b.heads
        and (a.indices is None) == (b.indices is None)
        and (a.block_pos is None) == (b.block_pos is None)
        and all(x is None or isinstance(x, np.ndarray) for x in (a.indices, a.mask, b.indices, b.mask))
    )


def _join(group: list[BlockSparse], num_qo: int) -> BlockSparse:
    """Parts of one kind over different queries as one part."""

    def cat(name: str, dtype: Any = np.int32) -> np.ndarray:
        return frozen(np.concatenate([getattr(part, name) for part in group]).astype(dtype, copy=False))

    first = group[0]
    if len(group) == 1:
        joined = first
    else:
        affine, by_row = first.indices is None, first.block_pos is None
        joined = replace(
            first,
            block_size=(max(part.block_size[0] for part in group), first.block_size[1]),
            qo_indptr=indptr_of(np.concatenate([np.diff(part.qo_indptr) for part in group])),
            qo_index=cat("qo_index"),
            request=cat("request"),
            qo_pos=cat("qo_pos"),
            indptr=indptr_of(np.concatenate([np.diff(part.indptr) for part in group])),
            indices=None
            if affine
            else frozen(np.concatenate([_listed(part, part.indices) for part in group])),
            kv_base=cat("kv_base", np.int64) if affine else None,
            kv_pos=cat("kv_pos") if by_row else None,
            block_pos=None
            if by_row
            else frozen(np.concatenate([_listed(part, part.block_pos) for part in group])),
            kv_begin=cat("kv_begin"),
            kv_end=cat("kv_end"),
            kv_offset=cat("kv_offset"),
            max_block=max(part.max_block for part in group),
            **_join_masks(group),
        )
    rows = _rows_of_q(joined)
    in_order = len(rows) == num_qo and bool((rows == np.arange(num_qo)).all())
    features = replace(
        features_of((joined, *group)), num_parts=1, qo_index=not in_order, masked=joined.mask is not None
    )
    return replace(joined, qo_index=None if in_order else joined.qo_index, features=features)


def _listed(part: BlockSparse, array: Any) -> np.ndarray:
    """The entries that the lists name (an array may be longer)."""
    return array[: int(part.indptr[-1])]


def _join_masks(group: list[BlockSparse]) -> dict[str, Any]:
    """Masks one after the other; queries without one have mask_offset -1."""
    if all(part.mask is None for part in group):
        return {"mask": None, "mask_offset": None, "mask_begin": None}
    masks: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    begins: list[np.ndarray] = []
    bits = 0
    for part in group:
        if part.mask is None or part.mask_offset is None or part.mask_begin is None:
            offsets.append(np.full(len(part.request), -1, np.int64))
            begins.append(np.zeros(part.num_rows, np.int32))
        else:
            offsets.append(np.where(part.mask_offset < 0, -1, part.mask_offset + bits))
            begins.append(part.mask_begin)
            masks.append(part.mask)
            bits += 8 * len(part.mask)
    return {
        "mask": frozen(np.concatenate(masks)),
        "mask_offset": frozen(np.concatenate(offsets)),
        "mask_begin": frozen(np.concatenate(begins)),
    }


def take(index: Index, requests: Any) -> Index:
    """The index of some of the requests, in the order given; rows of q are numbered anew, request after request.

    Parameters
    ----------
    requests : int32 [n]
        Each at most once.
    """
    need_checked(index)
    chosen = host_ints("requests", requests)
    total = len(index.requests)
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= total or len(np.unique(chosen)) < len(chosen)):
        raise ArgumentError("requests", f"must be different numbers from 0 to {total - 1}", chosen.tolist())
    if index.requests.bound_kv_lens is not None:
        raise UnsupportedError("kv_lens", "must be host lengths to take requests", "bound lengths")
    new_requests = Requests(
        qo_lens=frozen(index.requests.qo_lens[chosen]), kv_lens=frozen(index.requests.kv_lens[chosen])
    )
    renumber = np.full(total, -1, np.int64)
    renumber[chosen] = np.arange(len(chosen))
    old_start = np.cumsum(index.requests.qo_lens) - index.requests.qo_lens
    rows = ranges(old_start[chosen], new_requests.qo_lens)  # old row of q of each new one
    new_row = np.full(index.num_qo, -1, np.int64)
    new_row[rows] = np.arange(len(rows))

    def taken(positions: bool) -> list[BlockSparse]:
        parts = index.parts_for(positions)
        return [_taken(part, new_requests, renumber, new_row, len(rows)) for part in parts]

    return _made([index], taken)


def _taken(
    part: BlockSparse, requests: Requests, renumber: np.ndarray, new_row: np.ndarray, num_qo: int
) -> BlockSparse:
    """One part of ``take``: its rows in order, without the queries (and lists) that nobody asks for."""
    row_of = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
    kept = np.flatnonzero(renumber[part.request] >= 0)
    # Block rows follow the new order of their first query, so that a flat index stays one.
    target = new_row[_rows_of_q(part)[kept]]
    first = np.full(part.num_rows, num_qo, np.int64)
    np.minimum.at(first, row_of[kept], target)
    kept = kept[np.lexsort((target, row_of[kept], first[row_of[kept]]))]
    rows, sizes = _runs(row_of[kept])
    cells = (rows[:, None] * part.heads + np.arange(part.heads)).reshape(-1)
    lens = part.indptr[cells + 1] - part.indptr[cells]
    need_host_indices(part, "take()")
    entries = ranges(part.indptr[cells], lens)
    target = new_row[_rows_of_q(part)[kept]].astype(np.int32)
    in_order = len(target) == num_qo and bool((target == np.arange(num_qo)).all())
    return replace(
        part,
        num_qo=num_qo,
        requests=requests,
        qo_indptr=indptr_of(sizes),
        qo_index=None if in_order else frozen(target),
        request=frozen(renumber[part.request[kept]].astype(np.int32)),
        qo_pos=frozen(part.qo_pos[kept]),
        indptr=indptr_of(lens),
        indices=None if part.indices is None else frozen(part.indices[entries]),
        kv_base=None if part.kv_base is None else frozen(part.kv_base[rows]),
        kv_pos=None if part.kv_pos is None else frozen(part.kv_pos[rows]),
        block_pos=None if part.block_pos is None else frozen(part.block_pos[entries]),
        kv_begin=frozen(part.kv_begin[cells]),
        kv_end=frozen(part.kv_end[cells]),
        kv_offset=frozen(part.kv_offset[rows]),
        mask_offset=None if part.mask_offset is None else frozen(part.mask_offset[kept]),
        mask_begin=None if part.mask_begin is None else frozen(part.mask_begin[rows]),
        features=replace(part.features, qo_index=not in_order),
    )


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and length of each run of equal neighbours."""
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]][: len(values)])
    return values[starts], np.diff(np.r_[starts, len(values)])
