# SPDX-License-Identifier: Apache-2.0
"""Indexes made of levels: keys that groups of requests share, then each request's own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.arrays import frozen, host_ints, positions_of
from attnrt.formats.base import BlockSparse, Composite, Features, Index, Requests
from attnrt.formats.check import need_checked, trusted

__all__ = ["cascade", "composite", "features_of", "shared_prefix"]


def features_of(parts: tuple[BlockSparse, ...]) -> Features:
    """Features of a composite: its number of parts, and all that any part has."""
    flags = {
        f.name: any(getattr(part.features, f.name) for part in parts)
        for f in fields(Features)
        if f.name != "num_parts"
    }
    return Features(num_parts=len(parts), **flags)


def composite(parts: Any) -> Index:
    """Parts over the same queries as one index; a single part is itself.

    Parameters
    ----------
    parts : sequence of BlockSparse
        With one ``requests`` object, the same ``num_qo``, and offsets that follow on from each other (formats/base.py).
    """
    parts = tuple(parts)
    if not parts:
        raise ArgumentError("parts", "must not be empty")
    for part in parts:
        if not isinstance(part, BlockSparse):
            raise ArgumentError(
                "parts", "must be BlockSparse; a Composite is not nested", type(part).__name__
            )
        if part.num_qo != parts[0].num_qo or part.requests is not parts[0].requests:
            raise ArgumentError("parts", "must speak of the same queries and share one Requests object")
    return parts[0] if len(parts) == 1 else Composite(parts=parts, features=features_of(parts))


def cascade(*levels: BlockSparse, qo_pos: Any = None, kv_pos: Any = None) -> Index:
    """Levels of keys, coarse to fine: level 0 is shared by groups of requests, the last level is each request's own.

    Parameters
    ----------
    *levels : BlockSparse
        Flat indexes over the same rows of q. A level's block rows hold whole block rows of the next level: ``qo_indptr`` of
        each is contained in the next one's. The last has one row per request. A query's keys are those of its rows, level
        after level; pages may differ in size between levels as long as slot numbers mean the same memory.
    qo_pos : int32 [num_qo], optional
        Position of every query; None: bottom-right in the sum of its levels' keys.
    kv_pos : int32 [requests], optional
        Position of each request's first key (all requests of a group alike); None: 0. Positions that a level was built with
        count from the keys before it.

    Returns
    -------
    Composite
        One part per level (the level itself if there is one). Same result as the flat index, to the bit.
    """
    if not levels:
        raise ArgumentError("levels", "must not be empty")
    for i, level in enumerate(levels):
        _check_level(level, f"level {i}", levels[0])
    own = levels[-1]
    if own.num_rows != len(own.requests):
        raise ArgumentError("the last level", "must have one block row per request", f"{own.num_rows} rows")
    first = (
        np.zeros(len(own.requests), np.int64)
        if kv_pos is None
        else host_ints("kv_pos", kv_pos, length=len(own.requests), of="requests")
    )
    before: list[np.ndarray] = []  # keys of coarser levels, per row of each level
    keys = np.zeros(1, np.int64)
    rows_of_coarser = np.array([0, own.num_qo])
    for i, level in enumerate(levels):
        if not np.isin(rows_of_coarser, level.qo_indptr).all():
            raise ArgumentError(
                f"level {i}", f"must not put queries of different rows of level {i - 1} into one row"
            )
        parent = np.searchsorted(rows_of_coarser[:-1], level.qo_indptr[:-1], side="right") - 1
        before.append(keys[parent] if len(keys) else np.zeros(level.num_rows, np.int64))
        keys = before[-1] + (level.kv_end - level.kv_begin)
        rows_of_coarser = level.qo_indptr
    requests = Requests(
        qo_lens=own.requests.qo_lens, kv_lens=host_ints("kv_lens", before[-1] + own.requests.kv_lens)
    )
    if qo_pos is None:
        ends = np.repeat(first.astype(np.int64) + requests.kv_lens - own.qo_indptr[1:], requests.qo_lens)
        pos = positions_of("kv_pos", ends + np.arange(own.num_qo))
    else:
        pos = host_ints("qo_pos", qo_pos, length=own.num_qo, of="queries")
    parts = []
    for level, offset in zip(levels, before, strict=True):
        start = np.zeros(level.num_rows, np.int64)
        filled = level.qo_indptr[1:] > level.qo_indptr[:-1]
        start[filled] = first[own.request[level.qo_indptr[:-1][filled]]]
        shared = {"requests": requests, "request": own.request, "qo_pos": pos}
        parts.append(_continued(level, shared, offset=offset, shift=start + offset))
    return trusted(composite(parts))


def shared_prefix(prefix: BlockSparse, own: BlockSparse, *, qo_pos: Any = None, kv_pos: Any = None) -> Index:
    """A cascade of two levels: ``prefix`` has a row per group of requests, ``own`` one per request."""
    return cascade(prefix, own, qo_pos=qo_pos, kv_pos=kv_pos)


def _check_level(level: Any, name: str, first: BlockSparse) -> None:
    if not isinstance(level, BlockSparse):
        raise ArgumentError(name, "must be a flat index (BlockSparse)", type(level).__name__)
    need_checked(level)
    if level.heads != 1 or level.qo_index is not None or level.requests.bound_kv_lens is not None:
        raise UnsupportedError(name, "must have one list for all heads, rows of q in order and host kv_lens")
    if level.num_qo != first.num_qo:
        raise ArgumentError(name, f"must have {first.num_qo} queries, as level 0 has", level.num_qo)


def _continued(
    level: BlockSparse, own: dict[str, Any], *, offset: np.ndarray, shift: np.ndarray
) -> BlockSparse:
    """The level as a part of the requests ``own``: its keys follow ``offset`` others, its positions are moved by ``shift``."""
    entries = level.indptr[1:] - level.indptr[:-1]
    block_pos = (
        None
        if level.block_pos is None
        else positions_of("kv_pos", level.block_pos + np.repeat(shift, entries))
    )
    return replace(
        level,
        **own,
        kv_offset=frozen((level.kv_offset + offset).astype(np.int32)),
        kv_pos=None if level.kv_pos is None else positions_of("kv_pos", level.kv_pos + shift),
        block_pos=block_pos,
        mask_begin=None if level.mask_begin is None else frozen((level.mask_begin + offset).astype(np.int32)),
    )
