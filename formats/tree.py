# SPDX-License-Identifier: Apache-2.0
"""Draft trees and custom masks: which keys of its own request a query may see, bit by bit.

A tree's nodes are the last qo_len keys of their request. Siblings stand at the same position, so a node's key does not have
the position that its place in the cache would give it: the drafts become a part of single tokens with positions of their
own, and the pages before them stay a part of pages. Visibility among drafts is a bit per pair of nodes. Variants that read no
positions of keys are planned over the pages as they are (``Composite.in_line``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, DtypeError, UnsupportedError
from attnrt.formats.access import need_host_indices, tokens
from attnrt.formats.arrays import (
    INT_MAX,
    bound_array,
    frozen,
    host_ints,
    indptr_of,
    iota,
    is_device,
    positions_of,
    zeros,
)
from attnrt.formats.base import BlockSparse, Composite, Index
from attnrt.formats.check import need_checked, trusted
from attnrt.formats.composite import composite

__all__ = ["mask_offsets", "tree"]


def tree(
    index: Index,
    parents: Any = None,
    mask: Any = None,
    *,
    mask_begin: Any = None,
    qo_pos: Any = None,
    kv_pos: Any = None,
) -> Index:
    """Queries that see their ancestors only, or what a mask says.

    Parameters
    ----------
    index : Index
        Of any builder whose last part has one block row per request (``tree(share(index), ...)`` keeps shared prefixes).
    parents : int32 [num_qo], optional
        A request's queries are the nodes of a draft tree (a forest), and its last qo_len keys are their K and V. Parent of
        each node, counted within the request, before the node itself; -1: a root, whose parent is the last key of the
        context. A node sees the whole context, its ancestors and itself; its position is that of the context's end plus its
        depth (0 for a root), for its query and its key alike.
    mask : list of one bool [qo_len, width] per request, or bool [sum(qo_len * width)], or uint8 device array, optional
        What queries see. Without ``parents``, width = kv_len - mask_begin and positions stay those of the index; with
        ``parents``, width = qo_len: bits among the drafts, in place of ancestry. Integers must be 0 or 1. A device array is
        bound and holds packed bits: bit i of a byte is key i (little-endian), a query's row begins at a byte boundary and has
        ceil(width / 8) bytes (``mask_offsets``).
    mask_begin : int32 [requests], optional
        First key, by offset in the request, that the mask speaks of; keys before it are visible. None: 0.
    qo_pos : int32 [num_qo], optional
        Position of every query in place of the one by depth (or of the index's).
    kv_pos : int32 [num_qo], optional
        With parents: position of every draft key in place of the one by depth.

    Returns
    -------
    Index
        With parents, a Composite: the index's parts, the last one cut off before the drafts, then the drafts with C = 1;
        ``in_line``: the index's parts, the last one with a mask over the drafts.
    """
    if not isinstance(index, (BlockSparse, Composite)):
        raise ArgumentError("index", "must come from attnrt.formats", type(index).__name__)
    need_checked(index)
    own = index.parts[-1]
    if own.heads != 1 or own.num_rows != len(own.requests) or own.qo_index is not None:
        raise UnsupportedError("index", "must have one block row per request in its last part, for all heads")
    if any(part.mask is not None for part in index.parts):
        raise UnsupportedError("index", "must have no mask yet")
    if parents is None and mask is None:
        raise ArgumentError("parents", "or mask must be given")
    if parents is None:
        if kv_pos is not None:
            raise ArgumentError(
                "kv_pos", "must be given to the index's own builder when there are no parents"
            )
        return trusted(_masked(index, mask, mask_begin, qo_pos))
    if mask_begin is not None:
        raise ArgumentError("mask_begin", "must be left out with parents: the mask speaks of the drafts")
    return trusted(_drafts(index, parents, mask, qo_pos=qo_pos, kv_pos=kv_pos))


def mask_offsets(qo_lens: Any, widths: Any) -> np.ndarray:
    """int64 [num_qo + 1]: first bit of each query's row in a packed mask, and the end; ``widths`` keys per row, by request."""
    qo_lens, widths = np.asarray(qo_lens, np.int64), np.asarray(widths, np.int64)
    offsets = np.zeros(int(qo_lens.sum()) + 1, np.int64)
    np.cumsum(np.repeat(-(-widths // 8) * 8, qo_lens), out=offsets[1:])
    return frozen(offsets)


def _masked(index: Index, mask: Any, mask_begin: Any, qo_pos: Any) -> Index:
    """The index with a mask over the keys from mask_begin on."""
    own, requests = index.parts[-1], index.requests
    count = len(requests)
    begin = (
        zeros(count)
        if mask_begin is None
        else host_ints("mask_begin", mask_begin, length=count, of="requests")
    )
    if ((begin < 0) | (begin > requests.kv_lens)).any():
        raise ArgumentError("mask_begin", "must be from 0 to kv_len", begin.tolist())
    live = own.kv_offset + own.kv_end
    if ((begin < own.kv_offset + own.kv_begin) & (own.kv_begin < own.kv_end) & (len(index.parts) > 1)).any():
        hint = "Give mask_begin past the shared prefix, or mask the flat index."
        raise UnsupportedError(
            "mask_begin", "must not lie in a part that requests share", begin.tolist(), hint
        )
    bits = _read_mask(mask, requests.qo_lens, np.maximum(live - begin, 0))
    offsets = mask_offsets(requests.qo_lens, np.maximum(live - begin, 0))[:-1]
    features = replace(own.features, masked=True, bound_mask=not isinstance(bits, np.ndarray))
    own = replace(own, mask=bits, mask_offset=frozen(offsets), mask_begin=begin, features=features)
    parts = [*index.parts[:-1], own]
    if qo_pos is not None:
        parts = _moved(parts, host_ints("qo_pos", qo_pos, length=index.num_qo, of="queries"))
    return composite(parts)


def _drafts(index: Index, parents: Any, mask: Any, *, qo_pos: Any, kv_pos: Any) -> Index:
    """The index with its last qo_len keys turned into tree nodes."""
    own, requests = index.parts[-1], index.requests
    need_host_indices(own, "the drafts of tree()")
    if requests.bound_kv_lens is not None:
        raise UnsupportedError("kv_lens", "must be host lengths for a tree by parents", "bound lengths")
    num_qo, count = index.num_qo, len(requests)
    qo_lens = requests.qo_lens.astype(np.int64)
    end = (own.kv_offset + own.kv_end).astype(np.int64)
    context = end - qo_lens
    short = (qo_lens > 0) & (context < own.kv_offset + own.kv_begin)
    if short.any():
        r = int(np.argmax(short))
        raise ArgumentError(
            "kv_lens",
            "must hold a key of the request's own for each of its draft nodes",
            f"{end[r]} keys, {qo_lens[r]} queries in request {r}",
        )
    parent = host_ints("parents", parents, length=num_qo, of="queries")
    depth, ancestors = _ancestry(parent, own.qo_indptr, own.request)
    slots, place = tokens(own, iota(count), 0, context, end)
    if len(slots) and slots.max() > INT_MAX:
        raise UnsupportedError(
            "indices", "must name slots below 2**31 to be listed one by one", int(slots.max())
        )
    # All drafts of a request stand at the context's end plus their depth.
    first = place[own.qo_indptr[:-1][own.request]] if num_qo else place
    at = positions_of("index", first + depth)
    query_at = at if qo_pos is None else host_ints("qo_pos", qo_pos, length=num_qo, of="queries")
    key_at = at if kv_pos is None else host_ints("kv_pos", kv_pos, length=num_qo, of="queries")
    if mask is None:
        bits = frozen(np.packbits(ancestors, axis=1, bitorder="little").reshape(-1))
        offsets = np.arange(num_qo, dtype=np.int64) * (-(-ancestors.shape[1] // 8) * 8)
    else:
        bits = _read_mask(mask, qo_lens, qo_lens)
        offsets = mask_offsets(qo_lens, qo_lens)[:-1]
    drafts = replace(
        own,
        block_size=(own.block_size[0], 1),
        indptr=indptr_of(qo_lens),
        indices=frozen(slots.astype(np.int32)),
        kv_base=None,
        kv_pos=None,
        block_pos=key_at,
        kv_begin=zeros(count),
        kv_end=requests.qo_lens,
        kv_offset=frozen(context.astype(np.int32)),
        mask=bits,
        mask_offset=frozen(offsets),
        mask_begin=frozen(context.astype(np.int32)),
        max_block=int(slots.max(initial=-1)),
        features=replace(
            own.features,
            affine=False,
            block_pos=True,
            masked=True,
            bound_mask=not isinstance(bits, np.ndarray),
        ),
    )
    before = replace(own, kv_end=frozen(np.maximum(context - own.kv_offset, own.kv_begin).astype(np.int32)))
    found = composite(_moved([*index.parts[:-1], before, drafts], query_at))
    assert isinstance(found, Composite)
    masked = replace(own.features, masked=True, bound_mask=drafts.features.bound_mask)
    whole = replace(
        own, mask=bits, mask_offset=drafts.mask_offset, mask_begin=drafts.mask_begin, features=masked
    )
    return replace(found, in_line=tuple(_moved([*index.parts[:-1], whole], query_at)))


def _moved(parts: list[BlockSparse], qo_pos: np.ndarray) -> list[BlockSparse]:
    """The parts with new positions of their queries, by row of q."""
    return [
        replace(part, qo_pos=qo_pos if part.qo_index is None else frozen(qo_pos[part.qo_index]))
        for part in parts
    ]


def _ancestry(
    parent: np.ndarray, qo_indptr: np.ndarray, request: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Depth of each node (0: a root), and bool [nodes, most nodes of a request]: ancestors and the node itself."""
    first = qo_indptr[:-1].astype(np.int64)[request]
    own = np.arange(len(parent)) - first
    bad = (parent < -1) | (parent >= own)
    if bad.any():
        i = int(np.argmax(bad))
        rule = "must be -1 or an earlier node of the same request"
        raise ArgumentError("parents", rule, f"{parent[i]} for node {own[i]} of request {request[i]}")
    ancestors = np.zeros((len(parent), int(np.diff(qo_indptr).max(initial=0))), bool)
    depth = np.full(len(parent), -1, np.int64)
    node, at = np.arange(len(parent)), own
    while len(node):  # climb one edge at a time, all nodes together: as many steps as the tree is deep
        ancestors[node, at] = True
        depth[node] += 1
        above = parent[first[node] + at]
        node, at = node[above >= 0], above[above >= 0]
    return depth, ancestors


def _read_mask(mask: Any, qo_lens: np.ndarray, widths: np.ndarray) -> Any:
    """Packed bits of a user's mask, rows of ``widths`` keys per request; a device array stays as it is."""
    needed = int(mask_offsets(qo_lens, widths)[-1]) // 8
    if is_device(mask):
        return bound_array("mask", mask, dtype="uint8", at_least=needed)
    shapes = list(zip(qo_lens.tolist(), widths.tolist(), strict=True))
    if isinstance(mask, (list, tuple)):
        if len(mask) != len(shapes):
            raise ArgumentError("mask", f"must have {len(shapes)} arrays (one per request)", len(mask))
        grids = [
            _flags(f"mask[{r}]", one, shape) for r, (one, shape) in enumerate(zip(mask, shapes, strict=True))
        ]
    else:
        total = sum(q * w for q, w in shapes)
        flat = _flags("mask", mask, (total,))
        ends = np.cumsum([q * w for q, w in shapes], dtype=np.int64)
        grids = [flat[e - q * w : e].reshape(q, w) for e, (q, w) in zip(ends.tolist(), shapes, strict=True)]
    packed = [np.packbits(grid, axis=1, bitorder="little").reshape(-1) for grid in grids]
    return frozen(np.concatenate([*packed, np.zeros(0, np.uint8)]))


def _flags(name: str, x: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(x)
    if array.shape != shape:
        what = "[qo_len, keys]" if len(shape) == 2 else "the sum of qo_len * keys over requests"
        raise ArgumentError(name, f"must have shape {list(shape)} ({what})", f"shape {list(array.shape)}")
    if array.dtype == bool:
        return array
    if array.dtype.kind not in "iu":
        raise DtypeError(name, "must be bool", array.dtype.name)
    if array.size and (array.min() < 0 or array.max() > 1):
        raise ArgumentError(name, "must hold 0 and 1 only", int(array[(array < 0) | (array > 1)].flat[0]))
    return array.astype(bool)
