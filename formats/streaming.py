# SPDX-License-Identifier: Apache-2.0
"""Attention to the first keys and the latest ones (attention sinks; Xiao et al., StreamingLLM, 2023).

Each query is a block row of its own, because each has its own window: what a query sees, and at which positions, then does
not depend on whether it came alone, in a chunk or in a prefill.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnrt import checks
from attnrt.errors import UnsupportedError
from attnrt.formats.access import need_host_indices, ranges
from attnrt.formats.arrays import frozen, indptr_of, iota, zeros
from attnrt.formats.base import BlockSparse, Index
from attnrt.formats.composite import composite

__all__ = ["streaming"]


def streaming(index: BlockSparse, sinks: int, recent: int, positions: str = "logical") -> Index:
    """The first ``sinks`` keys and, for each query, the ``recent`` keys up to its own (itself included).

    Parameters
    ----------
    index : BlockSparse
        Flat, one row per request, one list for all heads, host kv_lens; query i of a request stands at key
        kv_len - qo_len + i. Pages between sinks and window are not listed and may have been freed: give any id, or -1.
    sinks : int
        >= 0.
    recent : int
        >= 1.
    positions : {"logical", "cache"}
        "logical": keys and queries keep the positions of the whole sequence. "cache": as if the keys between were not there:
        those after the gap, and the query, move down by its length, so that distances stay below sinks + recent.

    Returns
    -------
    Composite
        Two parts, sinks and windows; one block row per query.
    """
    sinks = checks.integer(sinks, "sinks", low=0)
    recent = checks.integer(recent, "recent", low=1)
    checks.one_of(positions, "positions", ("logical", "cache"))
    if (
        not isinstance(index, BlockSparse)
        or index.heads != 1
        or index.num_rows != len(index.requests)
        or index.mask is not None
        or index.qo_index is not None
    ):
        raise UnsupportedError(
            "index", "must be flat, without mask, with one block row per request for all heads"
        )
    if index.requests.bound_kv_lens is not None:
        raise UnsupportedError("kv_lens", "must be host lengths for streaming()", "bound lengths")
    need_host_indices(index, "streaming()")
    row = index.request.astype(np.int64)  # block row of each query = its request
    end = (
        index.kv_end[row] - index.qo_indptr[1:][row] + np.arange(index.num_qo) + 1
    )  # one past the query's own key
    first_end = np.clip(end, 0, sinks)
    begin = np.maximum(end - recent, sinks)
    end = np.maximum(end, begin)
    gap = np.where(end > begin, begin - sinks, 0)
    qo_pos = index.qo_pos if positions == "logical" else frozen((index.qo_pos - gap).astype(np.int32))
    head = replace(_window(index, row, np.zeros_like(begin), first_end, 0), qo_pos=qo_pos)
    tail = replace(_window(index, row, begin, end, 0 if positions == "logical" else gap), qo_pos=qo_pos)
    return composite([head, replace(tail, kv_offset=frozen((first_end - tail.kv_begin).astype(np.int32)))])


def _window(
    index: BlockSparse, row: np.ndarray, begin: np.ndarray, end: np.ndarray, moved: Any
) -> BlockSparse:
    """One block row per query with the keys [begin, end) of its request; positions lowered by ``moved``."""
    C = index.block_size[1]
    count = index.num_qo
    first = begin // C
    blocks = np.where(end > begin, -(-end // C) - first, 0)
    base = first * C - moved
    kv_base: Any = index.kv_base
    kv_pos: Any = index.kv_pos
    lists: dict[str, Any]
    where: dict[str, Any]
    if index.indices is None:
        lists = {"indptr": zeros(count + 1), "indices": None, "kv_base": frozen(kv_base[row] + first)}
        top = index.max_block
        where = {"kv_pos": frozen((kv_pos[row] + base).astype(np.int32))}
    else:
        entries = ranges(index.indptr[row] + first, blocks)
        indices = index.indices[entries]
        lists = {"indptr": indptr_of(blocks), "indices": frozen(indices)}
        top = int(indices.max(initial=-1))
        if index.block_pos is None:
            where = {"kv_pos": frozen((kv_pos[row] + base).astype(np.int32))}
        else:
            lowered = index.block_pos[entries] - np.repeat(np.broadcast_to(moved, count), blocks)
            where = {"block_pos": frozen(lowered.astype(np.int32))}
    return replace(
        index,
        block_size=(1, C),
        qo_indptr=iota(count + 1),
        kv_begin=frozen(np.where(end > begin, begin - first * C, 0).astype(np.int32)),
        kv_end=frozen(np.where(end > begin, end - first * C, 0).astype(np.int32)),
        kv_offset=zeros(count),
        max_block=top,
        **lists,
        **where,
    )
