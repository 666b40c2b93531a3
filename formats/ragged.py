# SPDX-License-Identifier: Apache-2.0
"""Contiguous K and V, request after request: the affine layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.formats.arrays import frozen, host_ints, is_device, lens_of, zeros
from attnrt.formats.base import BlockSparse, Features
from attnrt.formats.check import trusted
from attnrt.formats.requests import first_key_positions, key_positions, read_kv_lens, read_queries

__all__ = ["ragged"]

_PLAIN = Features(affine=True)
_BOUND = Features(affine=True, bound_kv_lens=True)


def ragged(
    qo_indptr: Any,
    kv_indptr: Any,
    *,
    kv_lens: Any = None,
    max_kv_lens: Any = None,
    qo_pos: Any = None,
    kv_pos: Any = None,
) -> BlockSparse:
    """K and V of all requests in one array [total_kv_tokens, ...], request after request.

    Parameters
    ----------
    qo_indptr : int32 [requests + 1]
        Rows of q of each request: ``qo_indptr[r] : qo_indptr[r + 1]``.
    kv_indptr : int32 [requests + 1]
        Rows of k and v of each request, this step's tokens included.
    kv_lens : int32 [requests], optional
        Live keys of each request where its stretch of k and v is longer than them; None: all. A device array is bound:
        ``max_kv_lens`` then gives host upper bounds.
    qo_pos : int32 [num_qo], optional
        Signed position of every query; None: bottom-right, kv_len - qo_len + i.
    kv_pos : int32 [requests], or a list of one int32 [kv_len] per request, optional
        Position of each request's first key (the others follow by one), or of each key; None: 0.

    Returns
    -------
    BlockSparse
        One block row per request, ``indices`` None, ``kv_base[r] = kv_indptr[r]``, C = 1.

    Raises
    ------
    ArgumentError, DtypeError
        Naming the array and what was found.
    """
    starts = host_ints("kv_indptr", kv_indptr)
    room, longest = lens_of("kv_indptr", starts)
    count = len(room)
    if kv_lens is None:
        lens, bound = room, None
        if max_kv_lens is not None:
            raise ArgumentError("max_kv_lens", "must be left out when kv_lens is", "max_kv_lens")
    else:
        lens, longest, bound = read_kv_lens(
            kv_lens, max_kv_lens, count, f"requests, as kv_indptr has {len(starts)} entries"
        )
        if (lens > room).any():
            r = int(np.argmax(lens > room))
            name = "max_kv_lens" if is_device(kv_lens) else "kv_lens"
            raise ArgumentError(
                name, f"must not exceed kv_indptr's stretch of {room[r]} keys", f"{lens[r]} in request {r}"
            )
    requests, queries = read_queries(qo_indptr, lens, bound, qo_pos, longest)
    none = zeros(count)
    per_key = key_positions(kv_pos, lens)
    features = _PLAIN if bound is None else _BOUND
    if per_key is not None:
        # Positions belong to listed blocks: an affine row has none, so the keys become a list of single slots.
        from attnrt.formats.paged import tokens_index

        if bound is not None:
            raise ArgumentError(
                "kv_pos", "must be first positions [requests] when kv_lens is bound", "one per key"
            )
        within = np.arange(len(per_key)) - np.repeat(np.cumsum(lens) - lens, lens)
        slots = np.repeat(starts[:-1], lens) + within
        return tokens_index(requests, queries, lens, slots.astype(np.int32), per_key)
    found = BlockSparse(
        block_size=(max(queries.longest, 1), 1),
        num_qo=queries.count,
        requests=requests,
        qo_indptr=queries.indptr,
        request=queries.request,
        qo_pos=queries.pos,
        indptr=zeros(count + 1),
        indices=None,
        kv_base=frozen(starts[:-1].astype(np.int64)),
        kv_pos=none if kv_pos is None else first_key_positions(kv_pos, count),
        kv_begin=none,
        kv_end=lens,
        kv_offset=none,
        max_block=int((starts[:-1].astype(np.int64) + lens)[lens > 0].max(initial=0)) - 1,
        features=features,
    )
    return trusted(found)
