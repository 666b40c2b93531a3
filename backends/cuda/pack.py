# SPDX-License-Identifier: Apache-2.0
"""How a loaded plan and a call fill the structs of kernels/params.cuh (structs.py)."""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from attnrt.backends.cuda import boxes
from attnrt.backends.cuda.fastdiv import fast_div
from attnrt.backends.cuda.first_lines import FirstArrays, fill_first, fill_first_passes, lines_of
from attnrt.backends.cuda.select import has_items, items_of, plan_folds, reads_positions
from attnrt.backends.cuda.structs import (
    AT_PARTS,
    AT_RULERS,
    HEADER,
    HEADER_POINTERS,
    LAUNCH_RUN,
    MAX_PARTS,
    MAX_STEPS,
    PAGED_KV,
    PART,
    PART_POINTERS,
    RULER,
)
from attnrt.backends.cuda.tables import HOPPER, WIDE
from attnrt.errors import LimitError, UnsupportedError

if TYPE_CHECKING:
    from attnrt.backends.base import Call, Loaded, PagedView, PartViews
    from attnrt.scheduler.base import NumericClass
    from attnrt.tensor import TensorView

__all__ = [
    "aligned",
    "fill_header",
    "fill_run",
    "pack_parts",
    "pack_rulers",
    "paged",
    "paged_bytes",
    "parts_of",
    "plan_place",
]

#: Slots are 31-bit numbers in kernels (their offsets in elements are 64-bit).
MAX_SLOTS = (1 << 31) - 1

# structs.py says what lies where; packing goes through struct, which is an order of magnitude faster than records.
_PAGED = struct.Struct("<QqqqqIIIi")
_PART = struct.Struct(f"<{len(PART_POINTERS)}QIIIiii")
_COUNTS = struct.Struct(f"<{len(HEADER_POINTERS)}Q16i")
_RULER = struct.Struct(f"<{2 * MAX_STEPS + 1}i")
_RUN = struct.Struct("<QIIQqqQqqqqIIIiQqqqqIIIiQqqQqqfiii")
assert (_PAGED.size, _PART.size, _RULER.size, _RUN.size) == tuple(
    dtype.itemsize for dtype in (PAGED_KV, PART, RULER, LAUNCH_RUN)
)


_part_views = attrgetter(*PART_POINTERS)


def pack_rulers(classes: tuple[NumericClass, ...]) -> bytes:
    """The header's rulers; the same for every plan of one machine, so that who packs headers keeps them."""
    return b"".join(_ruler(klass) for klass in classes)


def _ruler(klass: NumericClass) -> bytes:
    steps = list(klass.ruler.steps)
    assert len(steps) <= MAX_STEPS, "RulerDesc has room for four runs of leaves"
    steps += [(0, 0)] * (MAX_STEPS - len(steps))
    return _RULER.pack(*(count for count, _ in steps), *(size for _, size in steps), klass.ruler.tail)


_AT_BLOCK_POS = PART_POINTERS.index("block_pos")


def _part(part: PartViews, positions: bool, most: int) -> tuple[int, ...]:
    pointers = [0 if view is None else view.ptr for view in _part_views(part)]
    if not positions:
        pointers[_AT_BLOCK_POS] = 0
    return (*pointers, *fast_div(part.block_size), part.heads, part.request.shape[0], most)


def pack_parts(parts: tuple[PartViews, ...], positions: bool, most: tuple[int, ...] = ()) -> bytes:
    """The header's parts; the same for every plan of one loaded index. ``positions``: ``reads_positions`` of the plan;
    ``most``: queries of each part's longest block row, where they are known.

    Raises
    ------
    LimitError
        More index parts than a header holds.
    """
    if len(parts) > MAX_PARTS:
        raise LimitError("parts of an index on CUDA", len(parts), MAX_PARTS, "Merge levels of the cascade")
    known = most or (0,) * len(parts)
    return b"".join([_PART.pack(*_part(part, positions, n)) for part, n in zip(parts, known, strict=True)])


def parts_of(loaded: Loaded) -> bytes:
    """``pack_parts`` of a loaded plan."""
    most = tuple(part.block_size[0] for part in loaded.plan.parts)
    return pack_parts(loaded.parts, reads_positions(loaded.plan), most)


def fill_header(
    loaded: Loaded, target: np.ndarray, rulers: bytes | None = None, parts: bytes | None = None
) -> None:
    """Write the PlanHeader of a loaded plan; places of parts that it does not have stay as they are, unread.

    Parameters
    ----------
    loaded : Loaded
    target : uint8 [HEADER.itemsize or more], writable
        Where there is room for them, the workers' first items follow (``fill_first``).
    rulers, parts : bytes, optional
        ``pack_rulers(loaded.plan.traits.classes)``, ``parts_of(loaded)``.

    Raises
    ------
    LimitError
        More index parts than a header holds.
    """
    if parts is None:
        parts = parts_of(loaded)
    plan = loaded.plan
    traits = plan.traits
    wide, team = traits.workers_of(WIDE), traits.workers_of(HOPPER)
    first, end = items_of(plan, WIDE)
    works = has_items(plan, HOPPER)
    if rulers is None:
        rulers = pack_rulers(plan.traits.classes)
    buffer = target.data
    buffer[AT_RULERS : AT_RULERS + len(rulers)] = rulers
    buffer[AT_PARTS : AT_PARTS + len(parts)] = parts
    solid = works and boxes.is_solid(plan)
    arrays = FirstArrays.of(plan, target)
    firsts, wide_firsts = fill_first(plan, target, arrays)
    counts = (
        traits.num_workers,
        len(plan.merge),
        len(loaded.parts),
        plan.tree == "pairwise",
        team[1] - team[0],
        *((*boxes.of_plan(plan), solid) if works else (-1, -1, 0)),
        len(plan.work),
        wide[1] - wide[0],
        firsts,
        end - first,
        works and plan_folds(plan),
        wide_firsts,
        fill_first_passes(plan, target, arrays, solid) if works else 0,
        0,
    )
    _COUNTS.pack_into(buffer, 0, *loaded.addresses, loaded.counters[0], *counts)


def aligned(view: PagedView, itemsize: int) -> bool:
    """Whether all strides are multiples of 16 bytes."""
    return not ((view.stride_page | view.stride_token | view.stride_head) * itemsize & 15)


def paged(view: PagedView, itemsize: int) -> tuple[int, ...]:
    """PagedKv of a cache of elements of ``itemsize`` bytes, as the numbers of a struct."""
    vectors = view.ptr % 16 == 0 and aligned(view, itemsize)
    strides = (view.stride_page, view.stride_token, view.stride_head)
    if view.num_pages * view.page_size > MAX_SLOTS:
        raise UnsupportedError(
            "kv", f"must have at most {MAX_SLOTS} slots on a GPU", view.num_pages * view.page_size
        )
    return (view.ptr, *strides, view.num_pages * view.page_size, *fast_div(view.page_size), vectors)


def paged_bytes(view: PagedView, itemsize: int) -> bytes:
    """PagedKv as bytes."""
    return _PAGED.pack(*paged(view, itemsize))


def plan_place(loaded: Loaded) -> tuple[int, int, int]:
    """Address of a plan's header, bytes that belong to it before that and behind PlanHeader."""
    header: TensorView = loaded.header  # type: ignore[assignment]
    before, behind = loaded.room
    most = (1 << 32) - 1
    return header.ptr, min(before, most), min(behind + header.shape[0] - HEADER.itemsize, most)


def fill_run(call: Call, itemsize: int) -> bytes:
    """RunParams of a call; ``itemsize`` is that of the cache's elements."""
    lse = (0, 0, 0) if call.lse is None else (call.lse.ptr, *call.lse.strides)
    return _RUN.pack(
        *plan_place(call.loaded),
        call.q.ptr,
        *call.q.strides[:2],
        *paged(call.k, itemsize),
        *paged(call.v, itemsize),
        call.out.ptr,
        *call.out.strides[:2],
        *lse,
        call.sm_scale,
        call.q.shape[1],
        1,
        lines_of(call.loaded.plan),
    )
