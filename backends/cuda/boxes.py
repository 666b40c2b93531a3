# SPDX-License-Identifier: Apache-2.0
"""K and V as tensor maps: whether and how the Hopper kernel may fetch them in boxes (kernels/hopper_layout.cuh KvMaps).

A box is a run of 2^n tokens of one head. It must not cross the end of a listed block, nor that of a cache page unless tokens
have one stride through the whole pool. So lists bring one power of two and arrays another; where boxes would be too small, or
arrays do not lie on 16-byte lines, keys come one by one. Either way the bits are the same: a box is a matter of time.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.backends.cuda import driver
from attnrt.backends.cuda.fastdiv import fast_div
from attnrt.backends.cuda.tables import hopper_config
from attnrt.dtypes import as_dtype
from attnrt.formats.base import alignment_of
from attnrt.tensor import native

if TYPE_CHECKING:
    from attnrt.backends.base import PagedView
    from attnrt.scheduler.base import Plan

__all__ = [
    "LARGEST",
    "MAPS_BYTES",
    "NO_BOXES",
    "SMALLEST",
    "box_of",
    "encode",
    "encoded",
    "geometry",
    "is_solid",
    "of_plan",
    "promised",
    "tail",
]

#: log2 of the tokens of a box: a tile has 64 or 128 keys, and more than eight boxes a tile would take longer than copies by key.
SMALLEST, LARGEST = 4, 7
#: ``box_log2`` of maps that are none: no plan asks for boxes so large.
NO_BOXES = 31
#: Bytes of KvMaps: two tensor maps, two divisions, box_log2.
MAPS_BYTES = 320

_LINEAR = (1 << 31, 0, 31)  # FastDiv of a pool that is one page
_TAIL = struct.Struct("<6Ii36x")
#: CUtensorMapDataType.
_TYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0, "float8_e5m2": 0}


def _log2_of_divisor(number: int) -> int:
    """log2 of the largest power of two that divides a number (0: all of them), at most LARGEST."""
    return min(LARGEST, (number & -number).bit_length() - 1) if number else LARGEST


def of_plan(plan: Plan) -> tuple[int, int]:
    """(box_log2, page_box_log2) of PlanHeader: the largest boxes in which every list of a plan may be read, negative: none.

    The second is for caches in whose pages a box must lie.
    """
    anywhere = in_pages = alignment_of(plan.parts)
    for part in plan.parts:
        if part.kv_base is not None:
            in_pages |= int(np.bitwise_or.reduce(part.kv_base, initial=0))
    sizes = (_log2_of_divisor(found) for found in (anywhere, in_pages))
    return tuple(size if size >= SMALLEST else -1 for size in sizes)  # type: ignore[return-value]


def _has_holes(ids: np.ndarray) -> bool:
    """One pass in C. (What a builder saw is not kept with an index: who replaces its list would keep the old answer.)"""
    return ids.size > 0 and bool(native.scan(ids)[0] < 0)


def is_solid(plan: Plan) -> bool:
    """Whether no list of a plan has a hole; lists on a device may."""
    for part in plan.parts:
        if part.kv_base is None and (not isinstance(part.indices, np.ndarray) or _has_holes(part.indices)):
            return False
    return True


def is_linear(view: PagedView) -> bool:
    """Whether tokens have one stride through the whole pool."""
    return view.num_pages <= 1 or view.stride_page == view.stride_token * view.page_size


def _strides(view: PagedView, heads: int) -> tuple[int, int, int]:
    """Strides of token, head and page in elements; those of axes of length 1, which may be anything, are the token's."""
    token = view.stride_token
    return token, view.stride_head if heads > 1 else token, token if is_linear(view) else view.stride_page


def box_of(plan: Plan, call: Any, spec: Any) -> int:
    """box_log2 of the maps of a call's arrays under a plan; NO_BOXES where keys must come one by one."""
    config = hopper_config(spec)
    assert config is not None
    sizes = [config.kv_tile.bit_length() - 1]
    anywhere, in_pages = of_plan(plan)
    if not on_lines(call, spec):
        return NO_BOXES
    for view in (call.k, call.v):
        own = anywhere if is_linear(view) else min(in_pages, _log2_of_divisor(view.page_size))
        sizes.append(own)
    return min(sizes) if min(sizes) >= SMALLEST else NO_BOXES


def promised(limits: Any, box: int, call: Any) -> int:
    """log2 of the tokens of which limits say that they lie side by side in every plan, where the maps of these arrays, of
    ``box`` under the plan at hand, serve all of them; 0: keys may come one by one."""
    if limits is None or limits.kv_alignment is None or box == NO_BOXES:
        return 0
    size = _log2_of_divisor(limits.kv_alignment)
    return size if size >= SMALLEST and is_linear(call.k) and is_linear(call.v) else 0


def on_lines(call: Any, spec: Any) -> bool:
    """Whether K and V of a call have tensor maps: addresses and strides are multiples of 16 bytes."""
    itemsize = as_dtype(spec.kv_dtype).itemsize
    for view in (call.k, call.v):
        if view.num_pages * view.page_size == 0 or view.ptr % 16:
            return False
        if any(
            n * itemsize % 16 or not 0 < n * itemsize < 1 << 40 for n in _strides(view, spec.num_kv_heads)
        ):
            return False
    return True


def encoded(box: int, wide: bool, call: Any, spec: Any) -> int:
    """box_log2 of the maps that a run brings: what the Hopper kernel wants, or, where the wide kernel reads them, too, the
    smallest. That one looks for keys side by side by itself, so it wants maps even where a plan's lists allow no boxes."""
    if not wide or box == SMALLEST:
        return box
    small = any(not is_linear(view) and view.page_size < 1 << SMALLEST for view in (call.k, call.v))
    return SMALLEST if on_lines(call, spec) and not small else NO_BOXES


def geometry(call: Any, box: int, spec: Any) -> list[tuple[int, list[int], list[int], list[int]]]:
    """(address, dims, strides in bytes of axes 1 to 3, box) of the maps of K and V: head_dim, token, head, page."""
    found, itemsize = [], as_dtype(spec.kv_dtype).itemsize
    for view, dim in ((call.k, spec.head_dim), (call.v, spec.head_dim_vo)):
        slots = view.num_pages * view.page_size
        tokens, pages = (slots, 1) if is_linear(view) else (view.page_size, view.num_pages)
        strides = [itemsize * n for n in _strides(view, spec.num_kv_heads)]
        found.append(
            (view.ptr, [dim, tokens, spec.num_kv_heads, pages], strides, [128 // itemsize, 1 << box, 1, 1])
        )
    return found


def tail(call: Any, box: int) -> bytes:
    """KvMaps behind its maps: how slots become coordinates, and box_log2."""
    linear = [box == NO_BOXES or is_linear(view) for view in (call.k, call.v)]
    pages = [
        _LINEAR if flat else fast_div(view.page_size)
        for flat, view in zip(linear, (call.k, call.v), strict=True)
    ]
    return _TAIL.pack(*pages[0], *pages[1], box)


def encode(device: int, target: Any, call: Any, box: int, spec: Any) -> None:
    """Write KvMaps for a call's arrays.

    Parameters
    ----------
    device : int
    target : char * of MAPS_BYTES, on a multiple of 64 bytes
    call : Call
    box : int
        ``box_of`` it; NO_BOXES writes maps that no plan uses.
    spec : AttentionSpec
    """
    ffi, lib = driver.shim()
    ffi.memmove(target + 256, tail(call, box), _TAIL.size)
    for i, (address, dims, strides, extents) in enumerate(
        geometry(call, box, spec) if box != NO_BOXES else ()
    ):
        arrays = (ffi.new("uint64_t[]", dims), ffi.new("uint64_t[]", strides), ffi.new("uint32_t[]", extents))
        code = lib.attnrt_cuda_tensor_map(device, target + 128 * i, _TYPES[spec.kv_dtype], address, *arrays)
        driver.check(code, "cuTensorMapEncodeTiled")
