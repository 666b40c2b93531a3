# SPDX-License-Identifier: Apache-2.0
"""Whether an index keeps what formats/base.py promises: cheap looks at every array, and a full one at each query's keys.

The builders check what users give them, and their indexes are taken as they are (``trusted``). This is for indexes made by hand,
which plan() checks once, and for builders under test; ``full`` costs time and memory in proportion to queries and keys.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from attnrt.errors import ArgumentError, DtypeError
from attnrt.formats.access import tokens
from attnrt.formats.arrays import INT_MAX, bound_array, is_device
from attnrt.formats.base import HOLE, BlockSparse, Composite, Index

__all__ = ["check", "need_checked", "trusted"]

I = TypeVar("I", BlockSparse, Composite, Index)


def trusted(index: I) -> I:
    """The index itself, whose arrays a builder of ours made of what it had checked."""
    object.__setattr__(index, "checked", True)
    return index


def need_checked(index: Index) -> None:
    """Check an index, cheaply, unless that was done before or a builder of ours made it."""
    if not index.checked:
        check(index)


def check(index: Index, full: bool = False) -> None:
    """Raise ArgumentError or DtypeError naming the first array that breaks a promise.

    Parameters
    ----------
    index : Index
    full : bool
        Also look for slots that a query lists twice. Lists on a device are taken on trust.
    """
    if isinstance(index, Composite):
        _check_composite(index)
    else:
        _check_part(index, "")
        _check_spans((index,), "")
    if full:
        _check_keys(index)
    trusted(index)


def _check_part(part: BlockSparse, at: str) -> None:
    """All that concerns one part; a max_block that was left out is filled in."""
    _check_shapes(part, at)
    _check_lengths(part, at)
    _check_queries(part, at)
    _check_ids(part, at)
    _check_mask(part, at)


def _check_composite(index: Composite) -> None:
    """The parts, and what may be planned in their place."""
    if not index.parts:
        raise ArgumentError("parts", "must not be empty")
    first = index.parts[0]
    flat = () if index.flat is None else (index.flat,)
    forms = {"parts": index.parts, "in_line": index.in_line or (), "flat": flat}
    for name, parts in forms.items():
        for i, part in enumerate(parts):
            at = name if name == "flat" else f"{name}[{i}]"
            if not isinstance(part, BlockSparse):
                raise ArgumentError(at, "must be BlockSparse; a Composite is not nested", type(part).__name__)
            if part.num_qo != first.num_qo:
                raise ArgumentError(f"{at}.num_qo", f"must be {first.num_qo}, as in part 0", part.num_qo)
            if part.requests is not first.requests:
                raise ArgumentError(f"{at}.requests", "must be the same object in all parts")
            _check_part(part, f"{at}.")
        if parts:
            _check_spans(parts, f"{name}: ")
    if index.features.num_parts != len(index.parts):
        raise ArgumentError("features.num_parts", f"must be {len(index.parts)}", index.features.num_parts)


def _check_shapes(part: BlockSparse, at: str) -> None:
    """dtype, rank and length of every array."""
    R, C = part.block_size
    if R < 1 or C < 1 or part.heads < 1 or part.num_qo < 0:
        raise ArgumentError(
            f"{at}block_size, heads, num_qo", "must be positive", (part.block_size, part.heads, part.num_qo)
        )
    requests, rows, queries = part.requests, part.num_rows, len(part.request)
    cells = rows * part.heads
    _array(f"{at}requests.qo_lens", requests.qo_lens, np.int32, None)
    _array(f"{at}requests.kv_lens", requests.kv_lens, np.int32, len(requests))
    if requests.bound_kv_lens is not None:
        bound_array(f"{at}requests.bound_kv_lens", requests.bound_kv_lens, exactly=len(requests))
    for name, length in (
        ("qo_indptr", None),
        ("request", queries),
        ("qo_pos", queries),
        ("indptr", cells + 1),
        ("kv_begin", cells),
        ("kv_end", cells),
        ("kv_offset", rows),
    ):
        _array(at + name, getattr(part, name), np.int32, length)
    for name, dtype, length in (
        ("qo_index", np.int32, queries),
        ("kv_base", np.int64, rows),
        ("kv_pos", np.int32, rows),
        ("mask_offset", np.int64, queries),
        ("mask_begin", np.int32, rows),
    ):
        if getattr(part, name) is not None:
            _array(at + name, getattr(part, name), dtype, length)
    for name, kind in (("indices", np.int32), ("block_pos", np.int32), ("mask", np.uint8)):
        array = getattr(part, name)
        if array is not None and not is_device(array):
            _array(at + name, array, kind, None)
    for names, rule in (
        (("kv_pos", "block_pos"), "exactly one must be given"),
        (("indices", "kv_base"), "exactly one must be given"),
    ):
        if sum(getattr(part, name) is not None for name in names) != 1:
            raise ArgumentError(f"{at}{' and '.join(names)}", rule)
    if part.indices is None and C != 1:
        raise ArgumentError(f"{at}block_size", "must have C = 1 when affine", part.block_size)
    if len({getattr(part, name) is None for name in ("mask", "mask_offset", "mask_begin")}) != 1:
        raise ArgumentError(f"{at}mask, mask_offset and mask_begin", "must be given together")


def _array(name: str, array: Any, dtype: Any, length: int | None) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentError(name, "must be a NumPy array", type(array).__name__)
    if array.dtype != dtype:
        raise DtypeError(name, f"must be {np.dtype(dtype).name}", array.dtype.name)
    if array.ndim != 1:
        raise ArgumentError(name, "must have 1 axis", f"shape {list(array.shape)}")
    if not array.flags.c_contiguous:
        raise ArgumentError(name, "must be contiguous", f"strides {list(array.strides)}")
    if length is not None and len(array) != length:
        raise ArgumentError(name, f"must have {length} entries", len(array))


def _check_lengths(part: BlockSparse, at: str) -> None:
    """indptrs, live ranges, requests, features."""
    C = part.block_size[1]
    for name in ("qo_indptr", "indptr"):
        indptr = getattr(part, name)
        if len(indptr) == 0 or indptr[0] != 0 or (np.diff(indptr.astype(np.int64)) < 0).any():
            raise ArgumentError(at + name, "must start at 0 and never fall", indptr[:8].tolist())
    if part.qo_indptr[-1] != len(part.request):
        raise ArgumentError(
            f"{at}qo_indptr", f"must end at the {len(part.request)} queries", int(part.qo_indptr[-1])
        )
    if np.diff(part.qo_indptr).max(initial=0) > part.block_size[0]:
        raise ArgumentError(
            f"{at}block_size", "must have R of at least the queries of a row", part.block_size
        )
    if part.qo_index is None and len(part.request) > part.num_qo:
        raise ArgumentError(f"{at}num_qo", f"must be at least {len(part.request)}", part.num_qo)
    for name, entries in (("indices", part.indices), ("block_pos", part.block_pos)):
        if isinstance(entries, np.ndarray) and part.indptr[-1] > len(entries):
            raise ArgumentError(at + name, f"must have at least {part.indptr[-1]} entries", len(entries))
    begin, end = part.kv_begin.astype(np.int64), part.kv_end.astype(np.int64)
    listed = (
        np.full(len(end), INT_MAX, np.int64)
        if part.indices is None
        else np.diff(part.indptr).astype(np.int64) * C
    )
    bad = (begin < 0) | (begin > end) | (end > listed)
    if bad.any():
        i = int(np.argmax(bad))
        raise ArgumentError(
            f"{at}kv_begin and kv_end",
            "must satisfy 0 <= kv_begin <= kv_end <= listed blocks * C",
            f"{begin[i]}, {end[i]} and {listed[i]} in list {i}",
        )
    if len(part.request) and (part.request.min() < 0 or part.request.max() >= len(part.requests)):
        raise ArgumentError(
            f"{at}request", f"must be below {len(part.requests)} requests", int(part.request.max())
        )
    if (part.requests.qo_lens < 0).any() or (part.requests.kv_lens < 0).any():
        raise ArgumentError(f"{at}requests", "must not have negative lengths")
    found = {
        "per_head": part.heads > 1,
        "affine": part.indices is None,
        "masked": part.mask is not None,
        "block_pos": part.block_pos is not None,
        "qo_index": part.qo_index is not None,
        "bound_indices": part.indices is not None and is_device(part.indices),
        "bound_mask": part.mask is not None and is_device(part.mask),
        "bound_kv_lens": part.requests.bound_kv_lens is not None,
    }
    for name, value in found.items():
        # An index with one KV head may still say that its lists are per head, and an array on the host that it is bound.
        more = name.startswith("bound_") or (name == "per_head" and part.heads == 1)
        if getattr(part.features, name) != value and not (more and not value):
            raise ArgumentError(f"{at}features.{name}", f"must be {value}", getattr(part.features, name))


def _check_queries(part: BlockSparse, at: str) -> None:
    """Rows of q."""
    rows = part.qo_index
    if rows is None or not len(rows):
        return
    if rows.min() < 0 or rows.max() >= part.num_qo:
        raise ArgumentError(f"{at}qo_index", f"must be below {part.num_qo}", int(rows.max()))
    if np.bincount(rows).max() > 1:
        raise ArgumentError(f"{at}qo_index", "must list a row of q at most once")


def _check_ids(part: BlockSparse, at: str) -> None:
    """Block ids, or the slots of an affine index, and the largest of them."""
    if part.kv_base is not None:
        live = part.kv_end > part.kv_begin
        base = np.repeat(part.kv_base, part.heads)[live]
        low = int((base + part.kv_begin[live]).min(initial=0))
        if low < 0:
            raise ArgumentError(f"{at}kv_base", "must name slots of at least 0", low)
        top = int((base + part.kv_end[live]).max(initial=0)) - 1
    elif not part.features.bound_indices:
        ids = part.indices[: part.indptr[-1]]
        if ids.min(initial=0) < HOLE:
            raise ArgumentError(
                f"{at}indices", "must hold block ids of at least 0, or -1 for a hole", int(ids.min())
            )
        top = int(ids.max(initial=-1))
    else:
        bound_array(f"{at}indices", part.indices, at_least=int(part.indptr[-1]))
        return  # kernels guard every id
    if part.max_block == -1:
        object.__setattr__(part, "max_block", top)
    if top > part.max_block:
        raise ArgumentError(f"{at}max_block", f"must be at least {top}, or left out", part.max_block)


def _check_spans(parts: tuple[BlockSparse, ...], at: str) -> None:
    """Offsets of each query's keys follow on from each other over all parts, from 0 and no further than its request's length."""
    num_qo, heads = parts[0].num_qo, max(part.heads for part in parts)
    begins, ends = np.zeros((2, len(parts), num_qo, heads), np.int64)
    request = np.full(num_qo, -1)
    for i, part in enumerate(parts):
        if part.heads not in (1, heads):
            raise ArgumentError(f"{at}heads", f"must be 1 or {heads} in all parts", part.heads)
        row = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
        rows_of_q = np.arange(len(row)) if part.qo_index is None else part.qo_index
        live = (part.kv_end > part.kv_begin).reshape(-1, part.heads)
        for target, source in ((begins, part.kv_begin), (ends, part.kv_end)):
            offsets = part.kv_offset[:, None].astype(np.int64) + source.reshape(-1, part.heads)
            target[i, rows_of_q] = np.where(live, offsets, 0)[row]
        if ((request[rows_of_q] >= 0) & (request[rows_of_q] != part.request)).any():
            raise ArgumentError(f"{at}request", "must be the same for a query in all parts")
        request[rows_of_q] = part.request
    # Spans that lie side by side from 0: sorted, each begins where the one before ends (one without keys: at 0).
    begins.sort(axis=0)
    ends.sort(axis=0)
    before = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    apart = np.argwhere(begins != before)
    if len(apart):
        i, q, head = apart[0]
        what = "overlap" if begins[i, q, head] < before[i, q, head] else "leave a gap"
        spans = list(zip(begins[:, q, head].tolist(), ends[:, q, head].tolist(), strict=True))
        raise ArgumentError(f"{at}kv_offset", f"must not let keys {what}", f"offsets {spans} in row {q} of q")
    last = ends[-1].max(axis=1)
    lens = (
        np.where(request < 0, 0, parts[0].requests.kv_lens[request]) if len(parts[0].requests) else 0 * last
    )
    if (last > lens).any():
        q = int(np.argmax(last > lens))
        rule = f"must be at least the {last[q]} keys that row {q} of q lists"
        raise ArgumentError(f"{at}requests.kv_lens", rule, int(lens[q]))


def _check_mask(part: BlockSparse, at: str) -> None:
    """Bits enough for each query."""
    if part.mask is None or part.mask_offset is None or part.mask_begin is None:
        return
    if part.features.bound_mask:
        bound_array(f"{at}mask", part.mask, dtype="uint8")
    row_of = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
    ends = part.kv_end.reshape(-1, part.heads).max(axis=1, initial=0) + part.kv_offset
    bits = np.maximum(ends.astype(np.int64) - part.mask_begin, 0)[row_of]
    over = (part.mask_offset >= 0) & (part.mask_offset + bits > 8 * _length(part.mask)) & (bits > 0)
    if over.any():
        q = int(np.argmax(over))
        raise ArgumentError(
            f"{at}mask",
            f"must hold {part.mask_offset[q] + bits[q]} bits for query {q}",
            8 * _length(part.mask),
        )


def _length(array: Any) -> int:
    return int(array.shape[0])


def _check_keys(index: Index) -> None:
    """No slot is listed twice.

    Queries that share their block rows in all parts share the answer, so it is worked out once for each combination.
    """
    rows = np.full((index.num_qo, len(index.parts)), -1, np.int64)
    for i, part in enumerate(index.parts):
        row_of = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
        rows[np.arange(len(row_of)) if part.qo_index is None else part.qo_index, i] = row_of
    for combination in np.unique(rows, axis=0):
        for head in range(max(part.heads for part in index.parts)):
            _check_one(index, combination.tolist(), head)


def _check_one(index: Index, rows: list[int], head: int) -> None:
    slots = []
    for part, row in zip(index.parts, rows, strict=True):
        if row >= 0 and (part.indices is None or isinstance(part.indices, np.ndarray)):
            cell = row * part.heads + (head if part.heads > 1 else 0)
            begin, end = (int(part.kv_offset[row]) + int(x[cell]) for x in (part.kv_begin, part.kv_end))
            slots.append(tokens(part, row, head, begin, end)[0])
    listed = np.concatenate([np.zeros(0, np.int64), *slots])
    listed = np.sort(listed[listed >= 0])
    if (listed[1:] == listed[:-1]).any():
        twice = int(listed[1:][listed[1:] == listed[:-1]][0])
        raise ArgumentError(
            "indices", "must not list a slot twice for a query", f"slot {twice} in block rows {rows}"
        )
