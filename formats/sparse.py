# SPDX-License-Identifier: Apache-2.0
"""Pruned lists: block-sparse matrices, chosen tokens, chosen pages per KV head. Every key keeps its position in the whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from attnrt import checks
from attnrt.errors import ArgumentError
from attnrt.formats.arrays import (
    INT_MAX,
    block_ids,
    flat_bound,
    frozen,
    host_ints,
    indptr_of,
    iota,
    is_device,
    largest,
    lens_of,
    page_size_of,
    positions_of,
    zeros,
)
from attnrt.formats.base import BlockSparse, Features
from attnrt.formats.check import trusted
from attnrt.formats.requests import read_kv_lens, read_queries

__all__ = ["bsr", "pages_per_head", "token_sparse"]


def bsr(
    indptr: Any,
    indices: Any = None,
    block_size: Any = None,
    num_cols: int | None = None,
    *,
    num_rows: int | None = None,
    qo_pos: Any = None,
    kv_pos: Any = None,
) -> BlockSparse:
    """One sequence of queries against one of keys, block-sparse: block row i sees the block columns listed for it.

    Parameters
    ----------
    indptr : int32 [block rows + 1], or a ``scipy.sparse.bsr_array``
        The matrix alone is enough: its values are read as visible (not zero) or hidden (zero).
    indices : int32 [nnz]
        Block column of each block, each at most once in a row, in any order (rows are sorted).
    block_size : (R, C) or int
        Queries and keys per block.
    num_cols : int
        Keys (rows of k and v); the last block column may be cut off by it (blocks are then split to a size that fits).
    num_rows : int, optional
        Queries; None: block rows * R. The last block row may be cut off by it.
    qo_pos : int32 [num_rows], optional
        Position of every query; None: bottom-right, num_cols - num_rows + i.
    kv_pos : int32 [1], optional
        Position of key 0; None: 0.

    Returns
    -------
    BlockSparse
        Block rows of R queries, one request; slot of a key = its column. Offsets count the keys listed for the row.
    """
    values = None
    if hasattr(indptr, "blocksize") and hasattr(indptr, "indptr"):
        matrix = indptr
        if indices is not None or block_size is not None or num_cols is not None or num_rows is not None:
            raise ArgumentError("indices", "must be left out when a sparse matrix is given")
        indptr, indices, block_size = matrix.indptr, matrix.indices, matrix.blocksize
        num_rows, num_cols = matrix.shape
        values = np.asarray(matrix.data) != 0
    if block_size is None or num_cols is None:
        raise ArgumentError("num_cols" if num_cols is None else "block_size", "must be given")
    R, C = _block_size(block_size)
    starts = host_ints("indptr", indptr)
    counts, _ = lens_of("indptr", starts)
    rows, cols = len(counts), checks.integer(num_cols, "num_cols", low=0, high=INT_MAX)
    queries = rows * R if num_rows is None else checks.integer(num_rows, "num_rows", low=0, high=INT_MAX)
    if -(-queries // R) != rows:
        raise ArgumentError("num_rows", f"must fill {rows} block rows of {R} queries", queries)
    columns = host_ints("indices", indices, length=starts.item(-1), of="indptr[-1]")
    if largest("indices", columns) >= -(-cols // C):
        raise ArgumentError("indices", f"must be below {-(-cols // C)} block columns", int(columns.max()))
    columns, values = _sorted_rows(columns, values, np.repeat(np.arange(rows), counts))
    first = 0 if kv_pos is None else host_ints("kv_pos", kv_pos, length=1, of="position of key 0").item(0)
    requests, read = read_queries([0, queries], host_ints("num_cols", [cols]), None, qo_pos, cols)
    mask, mask_offset = _element_mask(values, starts, queries, R)
    if cols % C:
        # The last block column is cut off: blocks of a size that divides num_cols, so that no list names keys past it.
        C, starts, columns = _split_blocks(C, cols, counts, columns)
    found = BlockSparse(
        block_size=(R, C),
        num_qo=queries,
        requests=requests,
        qo_indptr=frozen(np.minimum(np.arange(rows + 1) * R, queries).astype(np.int32)),
        request=read.request,
        qo_pos=read.pos,
        indptr=starts,
        indices=columns,
        kv_pos=None,
        block_pos=positions_of("kv_pos", columns.astype(np.int64) * C + first),
        kv_begin=zeros(rows),
        kv_end=frozen((starts[1:] - starts[:-1]) * np.int32(C)),
        kv_offset=zeros(rows),
        mask=mask,
        mask_offset=mask_offset,
        mask_begin=None if mask is None else zeros(rows),
        max_block=int(columns.max(initial=-1)),
        features=Features(block_pos=True, masked=mask is not None),
    )
    return trusted(found)


def token_sparse(
    qo_indptr: Any,
    kv_indptr: Any,
    slots: Any,
    positions: Any = None,
    *,
    kv_lens: Any = None,
    qo_pos: Any = None,
    kv_pos: Any = None,
) -> BlockSparse:
    """A list of single tokens per request, chosen anywhere in the pool.

    Parameters
    ----------
    qo_indptr, kv_indptr : int32 [requests + 1]
        Rows of q, and entries of slots, of each request.
    slots : int32 [kv_indptr[-1]]
        Slot of each token, page * page_size + token. A device array is bound.
    positions : int32 [kv_indptr[-1]], optional
        Position of each token in the whole sequence, in any order; None: 0, 1, 2, ... in each list.
    kv_lens : int32 [requests], optional
        Length of the whole sequence, for the default positions of the queries; at least the tokens listed. None: one past the
        largest position listed (where tokens share positions, as many as are listed, with queries at the same positions).
    qo_pos : int32 [num_qo], optional
    kv_pos : int32 [requests], optional
        In place of positions: the first token's; the others follow by one.

    Returns
    -------
    BlockSparse
        One block row per request, C = 1; offsets follow the order of the lists.
    """
    indptr = host_ints("kv_indptr", kv_indptr)
    counts, _ = lens_of("kv_indptr", indptr)
    total, n = indptr.item(-1), len(counts)
    if positions is not None and kv_pos is not None:
        raise ArgumentError("kv_pos", "must be left out when positions is given")
    first = zeros(n) if kv_pos is None else host_ints("kv_pos", kv_pos, length=n, of="requests")
    if positions is None:
        where, needed = None, np.where(counts > 0, first + counts, 0)
    else:
        where = host_ints("positions", positions, length=total, of="kv_indptr[-1]")
        needed = np.zeros(n, np.int64)
        filled = counts > 0
        if total:
            needed[filled] = np.maximum.reduceat(where.astype(np.int64), indptr[:-1][filled]) + 1
    if kv_lens is None:
        lens = host_ints("positions", np.maximum(needed, 0))
        longest = max(largest("positions", lens), 0)
    else:
        lens, longest, _ = read_kv_lens(kv_lens, None, n)
    requests, queries = read_queries(qo_indptr, lens, None, qo_pos, longest)
    if (counts > lens).any():  # a request is as long as its list, or the last keys would not be read
        if kv_lens is not None:
            r = int(np.argmax(counts > lens))
            rule = f"must be at least the {counts[r]} tokens listed"
            raise ArgumentError("kv_lens", rule, f"{lens[r]} in request {r}")
        requests = replace(requests, kv_lens=frozen(np.maximum(counts, lens)))
    ids, top = block_ids("slots", slots, total, "kv_indptr[-1]")
    found = BlockSparse(
        block_size=(queries.longest or 1, 1),
        num_qo=queries.count,
        requests=requests,
        qo_indptr=queries.indptr,
        request=queries.request,
        qo_pos=queries.pos,
        indptr=indptr,
        indices=ids,
        kv_pos=first if where is None else None,
        block_pos=where,
        kv_begin=zeros(n),
        kv_end=counts,
        kv_offset=zeros(n),
        max_block=top,
        features=Features(block_pos=where is not None, bound_indices=is_device(slots)),
    )
    return trusted(found)


def pages_per_head(
    qo_indptr: Any,
    pages: Any,
    counts: Any,
    kv_lens: Any,
    page_size: int,
    *,
    qo_pos: Any = None,
    kv_pos: Any = None,
) -> BlockSparse:
    """Each KV head reads its own pages: head-wise top-k, eviction or compression.

    Parameters
    ----------
    pages : int32 [requests, num_kv_heads, max_pages]
        Page ids in order of the keys; entries past a head's count may hold anything. A contiguous device array is bound.
    counts : int32 [requests, num_kv_heads]
        Pages that each head lists.
    kv_lens : int32 [requests] or [requests, num_kv_heads]
        Keys of the whole sequence (of the head's sequence). A head that lists all ceil(kv_len / page_size) pages sees the
        kv_len keys; one that lists fewer ends on the sequence's last page, which holds (kv_len - 1) % page_size + 1 keys.
    qo_pos : int32 [num_qo], optional
    kv_pos : int32 [requests, num_kv_heads, max_pages], optional
        Position of the first key of each page. None: page i of a full list begins at i * page_size; the pages of a shorter
        list are taken as the sequence's last ones.

    Returns
    -------
    BlockSparse
        One block row per request, ``heads`` = num_kv_heads; offsets count the keys of each head's list.
    """
    size = page_size_of(page_size)
    on_device = is_device(pages)
    (n, heads, width), grid = _page_grid(pages, on_device)
    listed = host_ints("counts", counts, ndim=2)
    if listed.shape != (n, heads):
        raise ArgumentError(
            "counts", f"must have shape {[n, heads]} (requests, KV heads)", f"shape {list(listed.shape)}"
        )
    if largest("counts", listed) > width:
        raise ArgumentError("counts", f"must not exceed the {width} pages of a row", int(listed.max()))
    lens = _head_lens(kv_lens, n, heads)
    all_pages = -(-lens // size)
    # A full list holds kv_len keys; a pruned one ends on the last page.
    live = np.where(listed >= all_pages, lens, (listed - 1) * size + (lens - 1) % size + 1)
    live[listed == 0] = 0
    first_page = np.maximum(all_pages - listed, 0)
    requests, queries = read_queries(
        qo_indptr, frozen(lens.max(axis=1).astype(np.int32)), None, qo_pos, int(lens.max(initial=0))
    )
    slot = np.arange(width)
    if kv_pos is None:
        where = ((first_page[:, :, None] + slot) * size).astype(np.int32)
    else:
        where = host_ints("kv_pos", kv_pos, ndim=3)
        if where.shape != (n, heads, width):
            raise ArgumentError(
                "kv_pos", f"must have shape {[n, heads, width]}, like pages", f"shape {list(where.shape)}"
            )
    if on_device:
        indptr, ids, top = frozen(iota(n * heads + 1) * np.int32(width)), grid, -1
        where = where.reshape(-1)
    else:
        keep = slot < listed[:, :, None]
        indptr, ids, where = indptr_of(listed.reshape(-1)), frozen(grid[keep]), where[keep]
        top = largest("pages", ids, holes=True)
    found = BlockSparse(
        block_size=(queries.longest or 1, size),
        heads=heads,
        num_qo=queries.count,
        requests=requests,
        qo_indptr=queries.indptr,
        request=queries.request,
        qo_pos=queries.pos,
        indptr=indptr,
        indices=ids,
        kv_pos=None,
        block_pos=frozen(where),
        kv_begin=zeros(n * heads),
        kv_end=frozen(live.reshape(-1).astype(np.int32)),
        kv_offset=zeros(n),
        max_block=top,
        features=Features(per_head=True, block_pos=True, bound_indices=on_device),
    )
    return trusted(found)


def _block_size(value: Any) -> tuple[int, int]:
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2:
        raise ArgumentError("block_size", "must be an integer or a pair (R, C)", repr(value))
    return page_size_of(pair[0], "block_size"), page_size_of(pair[1], "block_size")


def _split_blocks(
    C: int, cols: int, counts: np.ndarray, columns: np.ndarray
) -> tuple[int, np.ndarray, np.ndarray]:
    """The same keys in blocks of gcd(C, cols): their size, indptr and indices."""
    size = math.gcd(C, cols)
    pieces = C // size
    split = (columns[:, None].astype(np.int64) * pieces + np.arange(pieces)).reshape(-1)
    row = np.repeat(np.arange(len(counts)), counts * pieces)
    inside = split < cols // size
    return (
        size,
        indptr_of(np.bincount(row[inside], minlength=len(counts))),
        frozen(split[inside].astype(np.int32)),
    )


def _sorted_rows(
    columns: np.ndarray, values: np.ndarray | None, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Blocks in order of their columns within each row; one listed twice raises."""
    order = np.lexsort((columns, row))
    columns = frozen(columns[order])
    twice = (columns[1:] == columns[:-1]) & (row[1:] == row[:-1])
    if twice.any():
        at = int(np.argmax(twice))
        raise ArgumentError(
            "indices",
            "must list a block at most once in a row",
            f"column {columns[at]} twice in row {row[at]}",
        )
    return columns, None if values is None else values[order]


def _element_mask(
    values: np.ndarray | None, starts: np.ndarray, queries: int, R: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Mask bits of a matrix whose blocks hold zeros; each query's bits are those of its row's blocks, from a byte boundary."""
    if values is None or values.all():
        return None, None
    rows = []
    for query in range(queries):
        blocks = values[starts[query // R] : starts[query // R + 1], query % R]
        rows.append(np.packbits(blocks.reshape(-1), bitorder="little"))
    sizes = np.array([len(bits) for bits in rows], np.int64)
    return frozen(np.concatenate(rows)), frozen((np.cumsum(sizes) - sizes) * 8)


def _page_grid(pages: Any, on_device: bool) -> tuple[tuple[int, ...], Any]:
    """Shape [requests, KV heads, max_pages] and the array: frozen on the host, flat on a device."""
    if on_device:
        shape, grid = flat_bound("pages", pages, ndim=3)
    else:
        grid = host_ints("pages", pages, ndim=3)
        shape = grid.shape
    if shape[1] < 1:
        raise ArgumentError("pages", "must have at least one KV head", f"shape {list(shape)}")
    return shape, grid


def _head_lens(kv_lens: Any, n: int, heads: int) -> np.ndarray:
    """int64 [requests, heads] from kv_lens of either shape."""
    if is_device(kv_lens):
        raise ArgumentError("kv_lens", "must be host lengths for lists per head", "a device array")
    array = np.asarray(kv_lens)
    if array.ndim == 2:
        lens = host_ints("kv_lens", kv_lens, ndim=2)
        if lens.shape != (n, heads):
            raise ArgumentError(
                "kv_lens", f"must have shape {[n]} or {[n, heads]}", f"shape {list(lens.shape)}"
            )
    else:
        lens = np.broadcast_to(host_ints("kv_lens", kv_lens, length=n, of="requests")[:, None], (n, heads))
    largest("kv_lens", np.ascontiguousarray(lens))
    return lens.astype(np.int64)
