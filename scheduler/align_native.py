# SPDX-License-Identifier: Apache-2.0
"""The C++ form of alignment: the same parts and limits as scheduler/align.py, byte for byte.

It answers None to what it leaves to the readable form: parts that cannot be aligned (which raises there) and arrays of other
types than formats/base.py says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnrt.formats.base import BlockSparse, Features
from attnrt.scheduler import plan_native
from attnrt.scheduler.align import Aligned
from attnrt.scheduler.base import Traits
from attnrt.scheduler.plan_native import Facts, failure, point_at_queries, point_at_requests, structs
from attnrt.scheduler.values import twin

__all__ = ["align_native"]

_AS_THEY_ARE, _READABLE = 3, 4
_INT32, _INT64, _UINT8 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint8)
_empty, _ndarray = np.empty, np.ndarray
_OpenPart = twin(BlockSparse)

ffi, lib = plan_native.ffi, plan_native.lib
if lib is not None:
    _INTS, _LONGS, _BYTES = (ffi.typeof(f"{name}[]") for name in ("int32_t", "int64_t", "uint8_t"))
    _NULL, _buffer = ffi.NULL, ffi.from_buffer
    _FIELDS = ffi.sizeof("attnrt_aligned_part") // 4  # int32s, in the order in which they are unpacked below

#: Features that bridges and narrowed parts have had, made once.
_features: dict[Any, Features] = {}


def align_native(
    parts: tuple[BlockSparse, ...], facts: Facts, traits: Traits, num_rows: int
) -> Aligned | None:
    """Parts of a composite, re-cut at leaf boundaries; None: ask the readable form.

    Raises
    ------
    PlanError
        The index points outside its own arrays.
    """
    s = structs()
    s.ready = None
    if facts is not s.facts or traits is not s.traits:
        s.know(facts, traits)
    p = s.problem
    p.num_parts = len(parts)
    s.reserve(len(parts))
    alive = [point_at_requests(p, parts[0].requests, num_rows)]
    for i, part in enumerate(parts):
        held = _fill(s.parts[i], part)
        if held is None:
            return None
        alive.append(held)
    status = lib.attnrt_align(p, s.aligned)
    if status == _AS_THEY_ARE:
        s.ready = parts
        return Aligned(parts=parts, limits=(None,) * len(parts))
    if status == _READABLE:
        return None
    if status:
        raise failure(status)
    buffer = _empty(s.aligned.length, _INT32)
    if lib.attnrt_align_take(p, _buffer(_INTS, buffer)):
        return None
    del alive
    count = s.aligned.parts
    rows = buffer[: count * _FIELDS].tolist()
    made, limits = [], []
    for i in range(count):
        row = rows[i * _FIELDS : (i + 1) * _FIELDS]
        if row[0] >= 0:
            made.append(_narrowed(parts[row[0]], row, buffer))
            limits.append(_limits(row, buffer))
        else:
            made.append(_bridge(parts, row, buffer))
            limits.append(None)
    s.ready = tuple(made)
    return Aligned(parts=s.ready, limits=tuple(limits))


def _fill(out: Any, part: BlockSparse) -> Any:
    """Point a struct at all that alignment reads of a part; None if it cannot be read so."""
    indices, base, block_pos, mask = part.indices, part.kv_base, part.block_pos, part.mask
    mask_offset, alive = part.mask_offset, point_at_queries(out, part)
    out.block = part.block_size[1]
    out.indptr = a = _buffer(_INTS, part.indptr)
    out.block_pos = b = _NULL if block_pos is None else _buffer(_INTS, block_pos)
    out.bound, out.indices, out.kv_base, c = 0, _NULL, _NULL, None
    if indices is None:
        if base is None or base.dtype != _INT64:
            return None
        out.entries = 0 if block_pos is None else len(block_pos)
        out.kv_base = c = _buffer(_LONGS, base)
    elif isinstance(indices, np.ndarray):
        if indices.dtype != _INT32:
            return None
        out.entries = len(indices)
        out.indices = c = _buffer(_INTS, indices)
    else:
        out.bound = 1
    if mask_offset is None:
        out.mask_offset = d = _NULL
    elif mask_offset.dtype != _INT64:
        return None
    else:
        out.mask_offset = d = _buffer(_LONGS, mask_offset)
    out.has_mask = 0
    if mask is not None:
        d = d, _point_at_mask(out, mask, part.mask_begin)
        if not out.has_mask:
            return None
    return alive, a, b, c, d


def _point_at_mask(out: Any, mask: Any, mask_begin: Any) -> Any:
    out.mask_begin = a = _NULL if mask_begin is None else _buffer(_INTS, mask_begin)
    out.mask, out.mask_bytes = _NULL, 0
    if not isinstance(mask, np.ndarray):
        out.has_mask = 2
        return a
    b = None
    if mask.dtype == _UINT8:
        out.mask = b = _buffer(_BYTES, mask)
        out.has_mask, out.mask_bytes = 1, len(mask)
    return a, b


def _limits(row: list[int], buffer: np.ndarray) -> Any:
    _, _, heads, queries = row[:4]
    lo, hi = row[-2:]
    if lo < 0:
        return None
    shape = queries, heads
    return _ndarray(shape, _INT64, buffer, 4 * lo), _ndarray(shape, _INT64, buffer, 4 * hi)


def _narrowed(source: BlockSparse, row: list[int], buffer: np.ndarray) -> Any:
    """What is left of a part."""
    _, rows, heads, queries, _, _, _, _, _, _, qo_indptr, qo_index, request, qo_pos, begin, end = row[:16]
    mask_offset = row[22]
    part = _OpenPart()
    part.block_size, part.heads, part.num_qo, part.requests = (
        source.block_size,
        heads,
        source.num_qo,
        source.requests,
    )
    part.qo_indptr = buffer[qo_indptr : qo_indptr + rows + 1]
    part.qo_index = buffer[qo_index : qo_index + queries]
    part.request = buffer[request : request + queries]
    part.qo_pos = buffer[qo_pos : qo_pos + queries]
    part.indptr, part.indices, part.kv_base = source.indptr, source.indices, source.kv_base
    part.kv_pos, part.block_pos, part.kv_offset = source.kv_pos, source.block_pos, source.kv_offset
    part.kv_begin = buffer[begin : begin + rows * heads]
    part.kv_end = buffer[end : end + rows * heads]
    part.mask, part.mask_begin, part.max_block = source.mask, source.mask_begin, source.max_block
    part.mask_offset = None if mask_offset < 0 else _ndarray((queries,), _INT64, buffer, 4 * mask_offset)
    features = source.features
    part.features = features if features.qo_index else _features.get(features) or _remember(features)
    part.checked = False
    part.__class__ = BlockSparse
    return part


def _remember(features: Features) -> Features:
    made = _features[features] = replace(features, qo_index=True)
    return made


def _bridge(parts: tuple[BlockSparse, ...], row: list[int], buffer: np.ndarray) -> Any:
    _, rows, heads, queries, most, block, entries, max_block, mask_bytes, bound_mask = row[:10]
    qo_indptr, qo_index, request, qo_pos, begin, end = row[10:16]
    indptr, indices, kv_pos, block_pos, kv_offset, mask, mask_offset, mask_begin = row[16:24]
    lists, first = rows * heads, parts[0]
    part = _OpenPart()
    part.block_size, part.heads, part.num_qo, part.requests = (
        (most, block),
        heads,
        first.num_qo,
        first.requests,
    )
    part.qo_indptr = buffer[qo_indptr : qo_indptr + rows + 1]
    part.qo_index = buffer[qo_index : qo_index + queries]
    part.request = buffer[request : request + queries]
    part.qo_pos = buffer[qo_pos : qo_pos + queries]
    part.indptr = buffer[indptr : indptr + lists + 1]
    part.indices = buffer[indices : indices + entries]
    part.kv_base = None
    part.kv_pos = None if kv_pos < 0 else buffer[kv_pos : kv_pos + rows]
    part.block_pos = None if block_pos < 0 else buffer[block_pos : block_pos + entries]
    part.kv_begin = buffer[begin : begin + lists]
    part.kv_end = buffer[end : end + lists]
    part.kv_offset = buffer[kv_offset : kv_offset + rows]
    part.mask = part.mask_offset = part.mask_begin = None
    if mask_offset >= 0:
        on_host = bound_mask < 0
        part.mask = _ndarray((mask_bytes,), _UINT8, buffer, 4 * mask) if on_host else parts[bound_mask].mask
        part.mask_offset = _ndarray((queries,), _INT64, buffer, 4 * mask_offset)
        part.mask_begin = buffer[mask_begin : mask_begin + rows]
    part.max_block = max_block
    key = (heads > 1, mask_offset >= 0, kv_pos < 0, bound_mask >= 0, first.requests.bound_kv_lens is not None)
    part.features = _features.get(key) or _remember_bridge(*key)
    part.checked = False
    part.__class__ = BlockSparse
    return part


def _remember_bridge(
    per_head: bool, masked: bool, block_pos: bool, bound_mask: bool, bound_kv_lens: bool
) -> Features:
    key = (per_head, masked, block_pos, bound_mask, bound_kv_lens)
    made = _features[key] = Features(
        per_head=per_head,
        masked=masked,
        block_pos=block_pos,
        qo_index=True,
        bound_mask=bound_mask,
        bound_kv_lens=bound_kv_lens,
    )
    return made
