# SPDX-License-Identifier: Apache-2.0
"""Paged caches: a list of pages per request, as CSR arrays or as a dense table."""

from __future__ import annotations

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
    zeros,
)
from attnrt.formats.base import BlockSparse, Features, Requests
from attnrt.formats.check import trusted
from attnrt.formats.requests import Queries, first_key_positions, key_positions, read_kv_lens, read_queries

__all__ = ["block_table", "kv_lens_of", "last_page_lens", "paged", "tokens_index"]

try:
    from attnrt import _formats_native as native
except ImportError:  # a checkout that was not built: the same by NumPy calls
    native = None

#: By [indices bound][kv_lens bound]; made once, because making one costs as much as two NumPy calls.
_FEATURES = [[Features(bound_indices=bool(i), bound_kv_lens=bool(l)) for l in (0, 1)] for i in (0, 1)]
_TOKENS = Features(block_pos=True)


def paged(
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_lens: Any,
    page_size: int,
    *,
    qo_pos: Any = None,
    kv_pos: Any = None,
    max_kv_lens: Any = None,
) -> BlockSparse:
    """Pages of each request as a CSR list.

    Parameters
    ----------
    qo_indptr : int32 [requests + 1]
        Rows of q of each request.
    kv_indptr : int32 [requests + 1]
        Pages of each request: ``kv_indices[kv_indptr[r] : kv_indptr[r + 1]]``.
    kv_indices : int32 [kv_indptr[-1]]
        Page ids in order of the keys, -1 a hole (its keys count in positions and are never seen). A device array is bound: it
        is read in place by every run, and may be longer than kv_indptr[-1].
    kv_lens : int32 [requests]
        Keys of each request, this step's tokens included; at most its pages * page_size. Pages past it are not read. A
        device array is bound: every run reads the true lengths.
    page_size : int
        Tokens per page, any number from 1.
    qo_pos : int32 [num_qo], optional
        Signed position of every query; None: bottom-right, kv_len - qo_len + i.
    kv_pos : int32 [requests], or a list of one int32 [kv_len] per request, optional
        Position of each request's first key (the others follow by one), or of each key; None: 0.
    max_kv_lens : int32 [requests], optional
        Host upper bounds; needed when kv_lens is bound, and only then.

    Returns
    -------
    BlockSparse
        One block row per request, C = page_size (1 with one position per key).

    Raises
    ------
    ArgumentError, DtypeError
        Naming the array and what was found.
    """
    size = page_size_of(page_size)
    if native is not None and qo_pos is None and kv_pos is None and max_kv_lens is None:
        read = native.paged(qo_indptr, kv_indptr, kv_indices, kv_lens, size)
        if read is not None:
            return _from_native(size, len(kv_lens), *read)
    indptr = host_ints("kv_indptr", kv_indptr)
    pages, most = lens_of("kv_indptr", indptr)
    lens, longest, bound = read_kv_lens(
        kv_lens, max_kv_lens, len(pages), f"requests, as kv_indptr has {len(indptr)} entries"
    )
    _check_room(lens, pages, most, size, "kv_lens" if bound is None else "max_kv_lens")
    requests, queries = read_queries(qo_indptr, lens, bound, qo_pos, longest)
    indices, top = block_ids("kv_indices", kv_indices, indptr.item(-1), "kv_indptr[-1]")
    return _paged_index(requests, queries, indptr=indptr, indices=indices, size=size, top=top, kv_pos=kv_pos)


def block_table(
    qo_indptr: Any,
    table: Any,
    kv_lens: Any,
    page_size: int,
    *,
    qo_pos: Any = None,
    kv_pos: Any = None,
    max_kv_lens: Any = None,
) -> BlockSparse:
    """Pages of each request as a row of a dense table.

    Parameters
    ----------
    table : int32 [requests, max_pages]
        Page ids; entries past a request's ceil(kv_len / page_size) pages may hold anything. A contiguous device array is
        bound: read in place by every run.

    The other parameters, the errors and the result are those of ``paged``.
    """
    size = page_size_of(page_size)
    if native is not None and qo_pos is None and kv_pos is None and max_kv_lens is None:
        read = native.table(qo_indptr, table, kv_lens, size)
        if read is not None:
            return _from_native(size, len(kv_lens), *read)
    on_device = is_device(table)
    if on_device:
        (rows, width), indices = flat_bound("table", table, ndim=2)
    else:
        grid = checks.host_ints(table, "table", ndim=2)  # not copied: the pages in use are picked out below
        rows, width = grid.shape
    lens, longest, bound = read_kv_lens(kv_lens, max_kv_lens, rows, f"requests, as table has {rows} rows")
    if longest > width * size:
        name = "kv_lens" if bound is None else "max_kv_lens"
        raise ArgumentError(
            name,
            f"must not exceed the table's {width} pages of {size} tokens",
            f"{longest} in request {int(np.argmax(lens))}",
        )
    requests, queries = read_queries(qo_indptr, lens, bound, qo_pos, longest)
    if on_device:
        indptr, top = frozen(iota(rows + 1) * np.int32(width)), -1
    else:
        pages = -(-lens // size)
        indptr = indptr_of(pages)
        indices = frozen(grid[iota(width) < pages[:, None]])
        top = largest("table", indices, holes=True)
    return _paged_index(requests, queries, indptr=indptr, indices=indices, size=size, top=top, kv_pos=kv_pos)


def kv_lens_of(kv_indptr: Any, last_page_len: Any, page_size: int) -> np.ndarray:
    """kv_lens from page counts and the tokens on each last page, the form some engines keep.

    A request of n > 0 pages has (n - 1) * page_size + last_page_len keys, where 1 <= last_page_len <= page_size; one of no
    pages has none, and its last_page_len is not read.
    """
    size = page_size_of(page_size)
    pages, _ = lens_of("kv_indptr", host_ints("kv_indptr", kv_indptr))
    last = host_ints("last_page_len", last_page_len, length=len(pages), of="requests")
    bad = (pages > 0) & ((last < 1) | (last > size))
    if bad.any():
        r = int(np.argmax(bad))
        raise ArgumentError(
            "last_page_len", f"must be from 1 to {size} (page_size)", f"{last[r]} in request {r}"
        )
    lens = np.where(pages > 0, (pages.astype(np.int64) - 1) * size + last, 0)
    return host_ints("kv_lens", lens)


def last_page_lens(kv_lens: Any, page_size: int) -> np.ndarray:
    """Tokens on each request's last page, (kv_len - 1) % page_size + 1; 0 for a request without keys."""
    size = page_size_of(page_size)
    lens = host_ints("kv_lens", kv_lens)
    largest("kv_lens", lens)
    return np.where(lens > 0, (lens - 1) % size + 1, 0).astype(np.int32)


def tokens_index(
    requests: Requests, queries: Queries, lens: np.ndarray, slots: np.ndarray, positions: np.ndarray
) -> BlockSparse:
    """One list of single slots (C = 1), each with its own position, per request; ``lens`` keys each."""
    count = len(lens)
    found = BlockSparse(
        block_size=(max(queries.longest, 1), 1),
        num_qo=queries.count,
        requests=requests,
        qo_indptr=queries.indptr,
        request=queries.request,
        qo_pos=queries.pos,
        indptr=indptr_of(lens),
        indices=frozen(slots),
        kv_pos=None,
        block_pos=frozen(positions),
        kv_begin=zeros(count),
        kv_end=lens,
        kv_offset=zeros(count),
        max_block=int(slots.max(initial=-1)),
        features=_TOKENS,
    )
    return trusted(found)


def _from_native(size: int, n: int, raw: bytes, num_qo: int, longest: int, top: int) -> BlockSparse:
    """The index whose arrays lie one after the other in ``raw`` (formats/native/index.cpp); bytes never change."""
    ints = np.frombuffer(raw, np.int32)
    at = 3 * n + 2  # past both indptrs and kv_lens
    kv_lens, request = ints[at - n : at], at + n
    none = zeros(n)
    found = BlockSparse(
        block_size=(longest or 1, size),
        num_qo=num_qo,
        requests=Requests(qo_lens=ints[at:request], kv_lens=kv_lens),
        qo_indptr=ints[: n + 1],
        request=ints[request : request + num_qo],
        qo_pos=ints[request + num_qo : request + 2 * num_qo],
        indptr=ints[n + 1 : at - n],
        indices=ints[request + 2 * num_qo :],
        kv_pos=none,
        kv_begin=none,
        kv_end=kv_lens,
        kv_offset=none,
        max_block=top,
        features=_FEATURES[0][0],
    )
    return trusted(found)


def _paged_index(
    requests: Requests,
    queries: Queries,
    *,
    indptr: np.ndarray,
    indices: Any,
    size: int,
    top: int,
    kv_pos: Any,
) -> BlockSparse:
    lens = requests.kv_lens
    count = len(lens)
    none = zeros(count)
    on_device, bound = type(indices) is not np.ndarray, requests.bound_kv_lens is not None
    if kv_pos is not None:
        per_key = key_positions(kv_pos, lens)
        if per_key is not None:
            if on_device or bound:
                raise ArgumentError(
                    "kv_pos",
                    "must be first positions [requests] in an index with bound arrays",
                    "one per key",
                )
            return tokens_index(requests, queries, lens, page_slots(indptr, indices, lens, size), per_key)
    found = BlockSparse(
        block_size=(queries.longest or 1, size),
        num_qo=queries.count,
        requests=requests,
        qo_indptr=queries.indptr,
        request=queries.request,
        qo_pos=queries.pos,
        indptr=indptr,
        indices=indices,
        kv_pos=none if kv_pos is None else first_key_positions(kv_pos, count),
        kv_begin=none,
        kv_end=lens,
        kv_offset=none,
        max_block=top,
        features=_FEATURES[on_device][bound],
    )
    return trusted(found)


def page_slots(indptr: np.ndarray, indices: np.ndarray, lens: np.ndarray, size: int) -> np.ndarray:
    """int32 [sum(lens)]: the slot of each key of each list, -1 in a hole."""
    starts = np.cumsum(lens, dtype=np.int64) - lens
    j = np.arange(int(lens.sum(dtype=np.int64))) - np.repeat(starts, lens)
    page = indices[np.repeat(indptr[:-1], lens) + j // size].astype(np.int64)
    slots = np.where(page < 0, -1, page * size + j % size)
    return host_ints("kv_indices", slots)


def _check_room(lens: np.ndarray, pages: np.ndarray, most: int, size: int, name: str) -> None:
    """Every kv_len fits its pages."""
    if len(lens) == 0:
        return
    room = pages * np.int32(size) if most * size <= INT_MAX else pages.astype(np.int64) * size
    if (room < lens).any():
        r = int(np.argmax(room < lens))
        raise ArgumentError(
            name,
            f"must not exceed the {pages[r]} pages of {size} tokens of its request",
            f"{lens[r]} in request {r}",
        )
