# SPDX-License-Identifier: Apache-2.0
"""Attention to the first keys and the latest ones (attention sinks; Xiao et al., StreamingLLM, 2023).

Each query is a block row of its own, because each has its own window: what a query sees, at which offsets and positions, then
does not depend on whether it came alone, in a chunk or in a prefill. The list is of single tokens: window and sinks begin and
end anywhere in a page, and offsets must count live keys, or the page size would show in the sum's order. (Two parts of pages,
sinks and window, would be cut at the sinks' end inside the first leaf and be listed anew by the planner for every row.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt import checks
from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.access import need_host_indices, tokens
from attnrt.formats.arrays import INT_MAX, frozen, indptr_of, zeros
from attnrt.formats.base import BlockSparse, Features
from attnrt.formats.check import need_checked, trusted

__all__ = ["streaming"]


def streaming(
    index: BlockSparse, sinks: int, recent: int, positions: str = "logical", *, tile: int = 1
) -> BlockSparse:
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
    tile : int
        Queries of a request that share a list, with a mask for the edges of their windows: faster for long chunks, and a
        query's bits then depend on its place in the chunk. Logical positions only.

    Returns
    -------
    BlockSparse
        One block row per ``tile`` queries, C = 1.
    """
    sinks = checks.integer(sinks, "sinks", low=0, high=INT_MAX)
    recent = checks.integer(recent, "recent", low=1, high=INT_MAX)
    tile = checks.integer(tile, "tile", low=1, high=INT_MAX)
    checks.one_of(positions, "positions", ("logical", "cache"))
    if tile > 1 and positions == "cache":
        raise ArgumentError("tile", "must be 1 with positions in the cache: each query has its own", tile)
    _check(index)
    end = index.kv_end[index.request] - index.qo_indptr[1:][index.request] + np.arange(index.num_qo) + 1
    end = end.astype(np.int64)  # one past each query's own key
    starts, row = _tiles(index, tile)
    request = index.request[starts[:-1]].astype(np.int64)
    # A tile's list: the sinks, then the window of its first query prolonged to the key of its last one.
    stop = np.maximum(end[starts[1:] - 1], 0)
    low = np.maximum(end[starts[:-1]] - recent, sinks)
    lens = np.stack([np.minimum(stop, sinks), np.maximum(stop - low, 0)], axis=1)
    begins = np.stack([np.zeros_like(low), low], axis=1)
    slots, where = tokens(index, np.repeat(request, 2), 0, begins.reshape(-1), (begins + lens).reshape(-1))
    qo_pos = index.qo_pos
    if positions == "cache":
        gap = np.where(lens[:, 1] > 0, low - sinks, 0)
        where = where - np.repeat(np.stack([np.zeros_like(gap), gap], axis=1).reshape(-1), lens.reshape(-1))
        qo_pos = frozen((qo_pos - gap).astype(np.int32))
    top = int(slots.max(initial=-1))
    if top > INT_MAX:
        raise UnsupportedError("indices", "must name slots below 2**31 to be listed one by one", top)
    mask = _edges(end, row, low, lens, (sinks, recent)) if tile > 1 else {}
    total = lens.sum(axis=1)
    count = len(request)
    found = BlockSparse(
        block_size=(min(tile, int(index.requests.qo_lens.max(initial=1))), 1),
        num_qo=index.num_qo,
        requests=index.requests,
        qo_indptr=frozen(starts.astype(np.int32)),
        request=index.request,
        qo_pos=qo_pos,
        indptr=indptr_of(total),
        indices=frozen(slots.astype(np.int32)),
        kv_pos=None,
        block_pos=frozen(where.astype(np.int32)),
        kv_begin=zeros(count),
        kv_end=frozen(total.astype(np.int32)),
        kv_offset=zeros(count),
        max_block=top,
        features=Features(block_pos=True, masked=tile > 1),
        **mask,
    )
    return trusted(found)


def _check(index: Any) -> None:
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
    need_checked(index)
    if index.requests.bound_kv_lens is not None:
        raise UnsupportedError("kv_lens", "must be host lengths for streaming()", "bound lengths")
    need_host_indices(index, "streaming()")


def _tiles(index: BlockSparse, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """First query of each tile (and the end), and the tile of each query; tiles don't cross requests."""
    within = np.arange(index.num_qo) - index.qo_indptr[:-1][index.request]
    first = within % tile == 0
    return np.append(np.flatnonzero(first), index.num_qo), np.cumsum(first) - 1


def _edges(
    end: np.ndarray, row: np.ndarray, low: np.ndarray, lens: np.ndarray, window: tuple[int, int]
) -> dict[str, Any]:
    """Mask of each query over its tile's list: sinks up to its own key, then its window."""
    sinks, recent = window
    width = int(lens.sum(axis=1).max(initial=0))
    at = np.arange(width)
    shared = lens[:, :1][row]
    key = np.where(at < shared, at, low[row][:, None] + at - shared)
    seen = (key < end[:, None]) & ((at < shared) | (key >= np.maximum(end - recent, sinks)[:, None]))
    return {
        "mask": frozen(np.packbits(seen, axis=1, bitorder="little").reshape(-1)),
        "mask_offset": frozen(np.arange(len(row), dtype=np.int64) * (-(-width // 8) * 8)),
        "mask_begin": zeros(len(low)),
    }
