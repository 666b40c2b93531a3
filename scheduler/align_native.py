# SPDX-License-Identifier: Apache-2.0
"""The C++ form of alignment: the same parts and limits as scheduler/align.py, byte for byte.

It answers None to what it leaves to the readable form: parts that cannot be aligned (which raises there) and arrays of other
types than formats/base.py says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt.formats.base import BlockSparse, Features
from attnrt.scheduler import plan_native
from attnrt.scheduler.align import Aligned
from attnrt.scheduler.base import Traits
from attnrt.scheduler.plan_native import Facts, failure, point_at_queries, point_at_requests, structs
from attnrt.scheduler.values import setters

__all__ = ["align_native"]

_AS_THEY_ARE, _READABLE = 3, 4
_INT32, _INT64, _UINT8 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.uint8)
_empty, _ndarray, _new = np.empty, np.ndarray, object.__new__
_SETTERS = setters(BlockSparse)

ffi, lib = plan_native.ffi, plan_native.lib
if lib is not None:
    _INTS, _LONGS, _BYTES = (ffi.typeof(f"{name}[]") for name in ("int32_t", "int64_t", "uint8_t"))
    _NULL, _buffer = ffi.NULL, ffi.from_buffer
    _FIELDS = ffi.sizeof("attnrt_aligned_part") // 4
    #: Columns of what C++ says of each part, by name.
    _AT = {name: field.offset // 4 for name, field in ffi.typeof("attnrt_aligned_part").fields}

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
    mask_offset, mask_begin = part.mask_offset, part.mask_begin
    on_host = isinstance(indices, np.ndarray)
    if (on_host and indices.dtype != _INT32) or (base is not None and base.dtype != _INT64):
        return None
    alive = [point_at_queries(out, part)]

    def hold(kind: Any, array: Any) -> Any:
        if array is None:
            return _NULL
        alive.append(_buffer(kind, array))
        return alive[-1]

    out.block = part.block_size[1]
    out.bound = indices is not None and not on_host
    out.indices = hold(_INTS, indices if on_host else None)
    out.entries = len(indices) if on_host else 0 if block_pos is None else len(block_pos)
    out.indptr = hold(_INTS, part.indptr)
    out.kv_base, out.block_pos = hold(_LONGS, base), hold(_INTS, block_pos)
    if mask is None:
        out.has_mask, out.mask_offset = 0, hold(_LONGS, mask_offset)
        return alive
    if mask_offset is not None and mask_offset.dtype != _INT64:
        return None
    on_host = isinstance(mask, np.ndarray)
    if on_host and mask.dtype != _UINT8:
        return None
    out.has_mask = 1 if on_host else 2
    out.mask, out.mask_bytes = hold(_BYTES, mask if on_host else None), len(mask) if on_host else 0
    out.mask_offset, out.mask_begin = hold(_LONGS, mask_offset), hold(_INTS, mask_begin)
    return alive


if lib is not None:
    _SOURCE, _ROWS, _HEADS, _QUERIES = (_AT[n] for n in ("source", "rows", "heads", "queries"))


def _limits(row: list[int], buffer: np.ndarray) -> Any:
    lo, hi = row[_AT["limit_lo"]], row[_AT["limit_hi"]]
    if lo < 0:
        return None
    shape = row[_QUERIES], row[_HEADS]
    return _ndarray(shape, _INT64, buffer, 4 * lo), _ndarray(shape, _INT64, buffer, 4 * hi)


def _make(*values: Any) -> BlockSparse:
    part = _new(BlockSparse)
    for put, value in zip(_SETTERS, values, strict=True):
        put(part, value)
    return part


def _narrowed(source: BlockSparse, row: list[int], buffer: np.ndarray) -> BlockSparse:
    """What is left of a part."""
    (_, rows, heads, queries, _, _, _, _, _, _, qo_indptr, qo_index, request, qo_pos, begin, end) = row[:16]
    lists, offset = rows * heads, row[_AT["mask_offset"]]
    features = source.features
    if not features.qo_index:
        features = _features.get(features) or _remember(features)
    return _make(
        source.block_size,
        heads,
        source.num_qo,
        source.requests,
        buffer[qo_indptr : qo_indptr + rows + 1],
        buffer[qo_index : qo_index + queries],
        buffer[request : request + queries],
        buffer[qo_pos : qo_pos + queries],
        source.indptr,
        source.indices,
        source.kv_base,
        source.kv_pos,
        source.block_pos,
        buffer[begin : begin + lists],
        buffer[end : end + lists],
        source.kv_offset,
        source.mask,
        None if offset < 0 else _ndarray((queries,), _INT64, buffer, 4 * offset),
        source.mask_begin,
        source.max_block,
        features,
    )


def _remember(features: Features) -> Features:
    from dataclasses import replace

    made = _features[features] = replace(features, qo_index=True)
    return made


def _bridge(parts: tuple[BlockSparse, ...], row: list[int], buffer: np.ndarray) -> BlockSparse:
    (_, rows, heads, queries, most, block, entries, max_block, mask_bytes, bound_mask) = row[:10]
    (qo_indptr, qo_index, request, qo_pos, begin, end) = row[10:16]
    (indptr, indices, kv_pos, block_pos, kv_offset, mask_at, mask_offset, mask_begin) = row[16:24]
    lists, first = rows * heads, parts[0]
    mask = None
    if mask_at >= 0:
        mask = _ndarray((mask_bytes,), _UINT8, buffer, 4 * mask_at)
    elif bound_mask >= 0:
        mask = parts[bound_mask].mask
    key = (heads > 1, mask_offset >= 0, kv_pos < 0, bound_mask >= 0, first.requests.bound_kv_lens is not None)
    features = _features.get(key)
    if features is None:
        per_head, masked, positions, bound, bound_lens = key
        features = _features[key] = Features(
            per_head=per_head,
            masked=masked,
            block_pos=positions,
            qo_index=True,
            bound_mask=bound,
            bound_kv_lens=bound_lens,
        )
    return _make(
        (most, block),
        heads,
        first.num_qo,
        first.requests,
        buffer[qo_indptr : qo_indptr + rows + 1],
        buffer[qo_index : qo_index + queries],
        buffer[request : request + queries],
        buffer[qo_pos : qo_pos + queries],
        buffer[indptr : indptr + lists + 1],
        buffer[indices : indices + entries],
        None,
        None if kv_pos < 0 else buffer[kv_pos : kv_pos + rows],
        None if block_pos < 0 else buffer[block_pos : block_pos + entries],
        buffer[begin : begin + lists],
        buffer[end : end + lists],
        buffer[kv_offset : kv_offset + rows],
        mask,
        None if mask_offset < 0 else _ndarray((queries,), _INT64, buffer, 4 * mask_offset),
        None if mask_begin < 0 else buffer[mask_begin : mask_begin + rows],
        max_block,
        features,
    )
