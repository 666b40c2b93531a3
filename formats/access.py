# SPDX-License-Identifier: Apache-2.0
"""Fast look-ups in the lists of a part: slots and positions of ranges of keys, and ranges laid end to end."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.base import BlockSparse

__all__ = ["need_host_indices", "ranges", "tokens"]


def ranges(begins: Any, lens: Any) -> np.ndarray:
    """int64 [sum(lens)]: ``begins[i], begins[i] + 1, ...`` (lens[i] of them), for i = 0, 1, ..."""
    lens = np.asarray(lens, np.int64)
    starts = np.cumsum(lens) - lens
    return np.arange(int(lens.sum()), dtype=np.int64) + np.repeat(np.asarray(begins, np.int64) - starts, lens)


def need_host_indices(part: BlockSparse, what: str) -> None:
    """Raise if the part's list of blocks lies on a device."""
    if part.indices is not None and not isinstance(part.indices, np.ndarray):
        raise UnsupportedError("indices", f"must be a host array for {what}", "a bound device array")


def tokens(part: BlockSparse, row: Any, head: Any, o_begin: Any, o_end: Any) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions of the keys of a part by their offsets in the request.

    Parameters
    ----------
    part : BlockSparse
        With host indices.
    row, head : int or int array [n]
        Block row of the part and KV head (any, if the part has one list for all heads).
    o_begin, o_end : int or int array [n]
        Offsets in the request, end exclusive, within the row's listed keys.

    Returns
    -------
    slots : int64 [sum(o_end - o_begin)]
        One range after the other; -1 where a hole lies.
    positions : int32, same shape

    Raises
    ------
    ArgumentError
        A range outside the list. UnsupportedError: bound indices.
    """
    need_host_indices(part, "tokens()")
    row, head, o_begin, o_end = np.broadcast_arrays(
        *(np.atleast_1d(np.asarray(x, np.int64)) for x in (row, head, o_begin, o_end))
    )
    C = part.block_size[1]
    cell = row * part.heads + (head if part.heads > 1 else 0)
    begin, lens = o_begin - part.kv_offset[row], o_end - o_begin
    if len(row):
        listed = (
            part.kv_end[cell]
            if part.indices is None
            else (part.indptr[cell + 1] - part.indptr[cell]).astype(np.int64) * C
        )
        if (
            (lens < 0).any()
            or ((begin < 0) & (lens > 0)).any()
            or (begin + lens > np.maximum(listed, begin)).any()
        ):
            raise ArgumentError("o_begin, o_end", "must lie within the listed keys of the row")
    j = ranges(begin, lens)
    rows = np.repeat(row, lens)
    kv_base: Any = part.kv_base
    kv_pos: Any = part.kv_pos
    if part.indices is None:
        return kv_base[rows] + j, (kv_pos[rows] + j).astype(np.int32)
    block, within = (j, 0) if C == 1 else np.divmod(j, C)
    entry = np.repeat(part.indptr[cell].astype(np.int64), lens) + block
    page = part.indices[entry].astype(np.int64)
    slots = page * C + within
    if page.size and page.min() < 0:
        slots[page < 0] = -1
    positions = kv_pos[rows] + j if part.block_pos is None else part.block_pos[entry] + within
    return slots, positions.astype(np.int32)
