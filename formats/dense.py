# SPDX-License-Identifier: Apache-2.0
"""The oracle's view of an index: which slots a query sees, in order, by plain loops.

Nothing here shares code with the builders or the planner; it is slow and obvious on purpose. It knows the index alone (live
ranges, holes, masks); what a variant hides by position comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.base import HOLE, BlockSparse, Index

__all__ = ["Dense", "Keys", "gather", "keys_of", "to_dense"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keys:
    """The keys that one query sees under one KV head, in order of their offsets.

    Attributes
    ----------
    slots : int64 [n]
        Slot of each key in the pool, page * page_size + token.
    positions, offsets : int64 [n]
        Signed logical position; offset in the request.
    qo_pos, request : int
        The query's own position and request; 0 and -1 if the query is in no block row.
    """

    slots: np.ndarray
    positions: np.ndarray
    offsets: np.ndarray
    qo_pos: int
    request: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    """An index as dense matrices over the pool's slots.

    Attributes
    ----------
    visible : bool [heads, num_qo, num_slots]
    positions, offsets : int64 [heads, num_qo, num_slots]
        Of each visible key, 0 elsewhere.
    qo_pos, request : int64 [num_qo]
    """

    visible: np.ndarray
    positions: np.ndarray
    offsets: np.ndarray
    qo_pos: np.ndarray
    request: np.ndarray


def keys_of(index: Index, row: int, head: int = 0) -> Keys:
    """Keys that row ``row`` of q sees under KV head ``head``; raises if an array of the index is bound to a device."""
    if not 0 <= row < index.num_qo:
        raise ArgumentError("row", f"must be from 0 to {index.num_qo - 1}", row)
    found: list[tuple[int, int, int]] = []  # offset, slot, position
    qo_pos, request = 0, -1
    for part in index.parts:
        _need_host(part)
        if part.heads > 1 and not 0 <= head < part.heads:
            raise ArgumentError("head", f"must be from 0 to {part.heads - 1}", head)
        for r in range(part.num_rows):
            for q in range(int(part.qo_indptr[r]), int(part.qo_indptr[r + 1])):
                if (q if part.qo_index is None else int(part.qo_index[q])) == row:
                    qo_pos, request = int(part.qo_pos[q]), int(part.request[q])
                    found += _list_keys(part, r, q, head if part.heads > 1 else 0)
    found.sort()
    offsets, slots, positions = (np.array([key[i] for key in found], np.int64) for i in range(3))
    return Keys(slots=slots, positions=positions, offsets=offsets, qo_pos=qo_pos, request=request)


def _need_host(part: BlockSparse) -> None:
    for name, array in (
        ("indices", part.indices),
        ("mask", part.mask),
        ("kv_lens", part.requests.bound_kv_lens),
    ):
        if array is not None and not isinstance(array, np.ndarray):
            raise UnsupportedError(name, "must be a host array to be looked at", "a device array")
    if part.requests.bound_kv_lens is not None:
        raise UnsupportedError("kv_lens", "must be host lengths to be looked at", "bound lengths")


def _list_keys(part: BlockSparse, row: int, q: int, head: int) -> list[tuple[int, int, int]]:
    """(offset, slot, position) of each key that query q of block row ``row`` sees in this part."""
    C = part.block_size[1]
    cell = row * part.heads + head
    kv_base: Any = part.kv_base
    kv_pos: Any = part.kv_pos
    mask_offset: Any = part.mask_offset
    mask_begin: Any = part.mask_begin
    keys = []
    for j in range(int(part.kv_begin[cell]), int(part.kv_end[cell])):
        entry = int(part.indptr[cell]) + j // C
        if part.indices is None:
            slot = int(kv_base[row]) + j
        elif int(part.indices[entry]) == HOLE:
            continue
        else:
            slot = int(part.indices[entry]) * C + j % C
        offset = int(part.kv_offset[row]) + j
        position = int(kv_pos[row]) + j if part.block_pos is None else int(part.block_pos[entry]) + j % C
        if part.mask is not None and int(mask_offset[q]) >= 0 and offset >= int(mask_begin[row]):
            bit = int(mask_offset[q]) + offset - int(mask_begin[row])
            if not (int(part.mask[bit // 8]) >> (bit % 8)) & 1:
                continue
        keys.append((offset, slot, position))
    return keys


def to_dense(index: Index, num_slots: int | None = None) -> Dense:
    """The index as matrices [heads, num_qo, num_slots].

    ``num_slots`` None: up to the largest slot listed. A slot that a query lists twice shows once: ``index.check(full=True)``
    finds those, ``keys_of`` keeps both.
    """
    heads = max((part.heads for part in index.parts), default=1)
    keys = {(h, row): keys_of(index, row, h) for h in range(heads) for row in range(index.num_qo)}
    if num_slots is None:
        num_slots = 1 + max((int(k.slots.max(initial=-1)) for k in keys.values()), default=-1)
    shape = (heads, index.num_qo, num_slots)
    visible = np.zeros(shape, bool)
    positions, offsets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    qo_pos, request = np.zeros(index.num_qo, np.int64), np.full(index.num_qo, -1, np.int64)
    for (h, row), k in keys.items():
        visible[h, row, k.slots] = True
        positions[h, row, k.slots] = k.positions
        offsets[h, row, k.slots] = k.offsets
        qo_pos[row], request[row] = k.qo_pos, k.request
    return Dense(visible=visible, positions=positions, offsets=offsets, qo_pos=qo_pos, request=request)


def gather(
    index: Index, kv: Any, row: int, head: int = 0, kv_layout: str = "NHD"
) -> tuple[np.ndarray, np.ndarray]:
    """K and V rows that row ``row`` of q sees under KV head ``head``, in order.

    Parameters
    ----------
    kv : (k, v)
        Host arrays [num_pages, page_size, num_kv_heads, head_dim] (NHD), [num_pages, num_kv_heads, page_size, head_dim] (HND)
        or [num_slots, num_kv_heads, head_dim].

    Returns
    -------
    k, v : [n, head_dim], [n, head_dim_vo]
    """
    slots = keys_of(index, row, head).slots
    both = []
    for name, x in zip(("k", "v"), kv, strict=True):
        cache = np.asarray(x)
        if cache.ndim not in (3, 4):
            raise ArgumentError(name, "must have 3 or 4 axes", f"shape {list(cache.shape)}")
        if cache.ndim == 4 and kv_layout == "HND":
            cache = cache.transpose(0, 2, 1, 3)
        if cache.ndim == 4:
            size = cache.shape[1]
            both.append(
                np.stack([cache[s // size, s % size, head] for s in slots.tolist()])
                if len(slots)
                else cache[:0, 0, head]
            )
        else:
            both.append(cache[slots, head])
    return both[0], both[1]
