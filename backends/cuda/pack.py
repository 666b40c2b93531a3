# SPDX-License-Identifier: Apache-2.0
"""The structs of kernels/params.cuh as NumPy dtypes, and how a loaded plan and a call fill them.

The rendered source asserts every size, so a change on one side alone does not compile; a test compares the offsets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.backends.cuda import boxes, driver
from attnrt.backends.cuda.fastdiv import fast_div
from attnrt.backends.cuda.tables import HOPPER, WIDE
from attnrt.errors import LimitError, UnsupportedError
from attnrt.latest import Latest
from attnrt.scheduler.base import WORK_FIELDS

if TYPE_CHECKING:
    from attnrt.backends.base import Call, Loaded, PagedView, PartViews
    from attnrt.formats.base import BlockSparse
    from attnrt.scheduler.base import NumericClass, Plan
    from attnrt.tensor import TensorView

__all__ = [
    "AT_PARTS",
    "FIRST_AT",
    "FIRST_ITEM_BYTES",
    "HEADER",
    "LAUNCH_RUN",
    "MAX_PARTS",
    "PAGED_KV",
    "aligned",
    "fill_header",
    "fill_run",
    "has_items",
    "items_of",
    "layout_asserts",
    "pack_parts",
    "pack_rulers",
    "paged",
    "paged_bytes",
    "parts_of",
    "plan_folds",
    "plan_place",
    "reads_positions",
    "run_offsets",
]

MAX_PARTS = 16
#: Slots are 31-bit numbers in kernels (their offsets in elements are 64-bit).
MAX_SLOTS = (1 << 31) - 1
MAX_CLASSES = 4
MAX_STEPS = 4

FAST_DIV = np.dtype([("divisor", "<u4"), ("mul", "<u4"), ("shift", "<u4")])
PAGED_KV = np.dtype(
    [
        ("ptr", "<u8"),
        ("stride_page", "<i8"),
        ("stride_token", "<i8"),
        ("stride_head", "<i8"),
        ("num_slots", "<i8"),
        ("page", FAST_DIV),
        ("vectors", "<i4"),
    ]
)
PART_POINTERS = (
    "qo_index",
    "request",
    "qo_pos",
    "indptr",
    "indices",
    "kv_base",
    "kv_pos",
    "block_pos",
    "kv_begin",
    "kv_end",
    "kv_offset",
    "mask",
    "mask_offset",
    "mask_begin",
)
PART = np.dtype(
    [(name, "<u8") for name in PART_POINTERS]
    + [("block", FAST_DIV), ("heads", "<i4"), ("queries", "<i4"), ("most", "<i4")]
)
RULER = np.dtype([("count", "<i4", (MAX_STEPS,)), ("size", "<i4", (MAX_STEPS,)), ("tail", "<i4")])
HEADER_POINTERS = (
    "work",
    "worker_indptr",
    "merge_rows",
    "merge_slots",
    "merge_leaves",
    "qo_lens",
    "kv_lens",
    "bound_kv_lens",
    "partial_acc",
    "partial_ml",
    "counters",
)
HEADER = np.dtype(
    [(name, "<u8") for name in HEADER_POINTERS]
    + [(name, "<i4") for name in ("num_workers", "num_merges", "num_parts", "pairwise", "team_workers")]
    + [(name, "<i4") for name in ("box_log2", "page_box_log2", "solid")]
    + [("num_items", "<i4"), ("wide_workers", "<i4"), ("firsts", "<i4"), ("wide_items", "<i4")]
    + [("folds", "<i4"), ("wide_firsts", "<i4"), ("team_firsts", "<i4"), ("pad", "<i4")]
    + [("rulers", RULER, (MAX_CLASSES,)), ("parts", PART, (MAX_PARTS,))]
)
#: Where each worker's FirstItem lies, from the header's start, and its size.
FIRST_AT, FIRST_ITEM_BYTES, FIRST_PASS_BYTES = 2560, 128, 256
LAUNCH_RUN = np.dtype(
    [
        ("plan", "<u8"),
        ("before", "<u4"),
        ("behind", "<u4"),
        ("q", "<u8"),
        ("q_stride_row", "<i8"),
        ("q_stride_head", "<i8"),
        ("k", PAGED_KV),
        ("v", PAGED_KV),
        ("out", "<u8"),
        ("out_stride_row", "<i8"),
        ("out_stride_head", "<i8"),
        ("lse", "<u8"),
        ("lse_stride_row", "<i8"),
        ("lse_stride_head", "<i8"),
        ("sm_scale", "<f4"),
        ("num_qo_heads", "<i4"),
        ("first", "<i4"),
        ("lines", "<i4"),
    ]
)


def layout_asserts() -> str:
    """C++ that refuses to compile when the structs and the dtypes above differ."""
    sizes = {
        "PagedKv": PAGED_KV,
        "PartDesc": PART,
        "RulerDesc": RULER,
        "PlanHeader": HEADER,
        "RunParams": LAUNCH_RUN,
    }
    lines = [f"static_assert(sizeof({name}) == {dtype.itemsize});" for name, dtype in sizes.items()]
    return "\n".join(lines)


# The dtypes above say what lies where; packing goes through struct, which is an order of magnitude faster than records.
_PAGED = struct.Struct("<QqqqqIIIi")
_PART = struct.Struct(f"<{len(PART_POINTERS)}QIIIiii")
_COUNTS = struct.Struct(f"<{len(HEADER_POINTERS)}Q16i")
_RULER = struct.Struct(f"<{2 * MAX_STEPS + 1}i")
_RUN = struct.Struct("<QIIQqqQqqqqIIIiQqqqqIIIiQqqQqqfiii")
assert (_PAGED.size, _PART.size, _RULER.size, _RUN.size) == tuple(
    dtype.itemsize for dtype in (PAGED_KV, PART, RULER, LAUNCH_RUN)
)
_AT_RULERS, AT_PARTS, _AT_FIRSTS = (int(HEADER.fields[name][1]) for name in ("rulers", "parts", "firsts"))  # type: ignore[index]


_part_views = attrgetter(*PART_POINTERS)
_folds: Latest[bool] = Latest()  # plan_folds


def pack_rulers(classes: tuple[NumericClass, ...]) -> bytes:
    """The header's rulers; the same for every plan of one machine, so that who packs headers keeps them."""
    return b"".join(_ruler(klass) for klass in classes)


def _ruler(klass: NumericClass) -> bytes:
    steps = list(klass.ruler.steps)
    assert len(steps) <= MAX_STEPS, "RulerDesc has room for four runs of leaves"
    steps += [(0, 0)] * (MAX_STEPS - len(steps))
    return _RULER.pack(*(count for count, _ in steps), *(size for _, size in steps), klass.ruler.tail)


#: Arrays of a part that first items follow from, as the shim reads them.
_FIRST_ARRAYS = {
    name: "int64_t[]" if name == "kv_base" else "int32_t[]"
    for name in (
        *("request", "qo_pos", "qo_index", "indptr", "indices"),
        *("kv_pos", "kv_offset", "kv_begin", "kv_end", "kv_base"),
    )
}


def reads_positions(plan: Plan) -> bool:
    """Whether some kernel of a plan asks where a key stands. Where none does, lists are packed without their blocks' positions:
    keys of blocks anywhere are then fetched like those of lists that run on."""
    composed = plan.spec.composed
    hooks = (composed.logits, composed.key_map, composed.value)
    asks = composed.has_mask or composed.reads_index_mask or any(hook is not None for hook in hooks)
    return asks or any(index.features.masked for index in (plan.index, *plan.parts))


def _first_parts(parts: tuple[BlockSparse, ...], positions: bool) -> tuple[Any, list[Any]]:
    """attnrt_first_part_t of host parts, and what it points to."""
    ffi, _ = driver.shim()
    packed, held = ffi.new("attnrt_first_part_t[]", max(1, len(parts))), []
    for to, part in zip(packed, parts, strict=False):
        for name, kind in _FIRST_ARRAYS.items():
            array = getattr(part, name)
            if array is not None and not (name == "indices" and part.features.bound_indices):
                held.append(ffi.from_buffer(kind, array))
                setattr(to, name, held[-1])
        to.block, to.heads = part.block_size[1], part.heads
        to.listed, to.positions = part.kv_base is None, positions and part.block_pos is not None
    return packed, held


def _lines(plan: Plan) -> int:
    """Workers that have a place for their first item: those of no team, then those of the wide kernel."""
    first, end = plan.traits.workers_of(WIDE)
    return plan.traits.num_workers + end - first


def has_first(plan: Plan, nbytes: int) -> bool:
    """Whether the workers' first items fit behind a header with so many bytes."""
    return nbytes >= FIRST_AT + FIRST_ITEM_BYTES * _lines(plan)


def first_writer(loaded: Loaded) -> tuple[int, ...]:
    """What attnrt/native/step.cpp needs to write them: address of the function (0: no room), where it writes, where the header
    has their count and the rulers, keys of a tile, whether kernels read blocks' positions."""
    header: TensorView = loaded.header  # type: ignore[assignment]
    address = driver.first_items_address() if has_first(loaded.plan, header.shape[0]) else 0
    plan = loaded.plan
    return address, FIRST_AT, _AT_FIRSTS, _AT_RULERS, plan.traits.classes[0].kv_tile, reads_positions(plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstArrays:
    """What the shim reads of a plan, and the memory from the header on where it writes; ``held`` keeps it alive."""

    lib: Any
    memory: Any
    items: Any
    worker_indptr: Any
    merge_rows: Any
    rulers: Any
    parts: Any
    first: Any
    held: list[Any]

    @classmethod
    def of(cls, plan: Plan, target: np.ndarray) -> FirstArrays | None:
        """None: there is no room behind the header."""
        if len(target) <= FIRST_AT:
            return None
        ffi, lib = driver.shim()
        memory = ffi.from_buffer("char[]", target, require_writable=True)
        rulers, first = (ffi.cast("int32_t *", memory + at) for at in (_AT_RULERS, FIRST_AT))
        parts, held = _first_parts(plan.parts, reads_positions(plan))
        return cls(
            lib=lib,
            memory=memory,
            items=ffi.from_buffer("int32_t[]", plan.work.items),
            worker_indptr=ffi.from_buffer("int32_t[]", plan.work.worker_indptr),
            merge_rows=ffi.from_buffer("int32_t[]", plan.merge.rows),
            rulers=rulers,
            parts=parts,
            first=first,
            held=held,
        )


def fill_first(plan: Plan, target: np.ndarray, arrays: FirstArrays | None) -> tuple[int, int]:
    """Write the first items of workers of no team and of the wide kernel's behind a header whose rulers are there; how many of
    each (0: there is no room)."""
    if arrays is None or not has_first(plan, len(target)):
        return 0, 0
    own, kv_tile = plan.traits.num_workers, plan.traits.classes[0].kv_tile
    counts = []
    for (begin, end), line in (((0, own), 0), (plan.traits.workers_of(WIDE), own)):
        workers = arrays.items, arrays.worker_indptr + begin, end - begin
        merges = arrays.merge_rows, len(plan.merge)
        to = arrays.first + line * (FIRST_ITEM_BYTES // 4)
        counts.append(
            arrays.lib.attnrt_cuda_first_items(*workers, *merges, arrays.rulers, kv_tile, arrays.parts, to)
        )
    return int(counts[0]), int(counts[1])


def fill_first_passes(plan: Plan, target: np.ndarray, arrays: FirstArrays | None, solid: bool) -> int:
    """Write the FirstPass of each of the Hopper kernel's workers behind a header whose rulers and parts are there; how many (0:
    there is no room, other workers' first items lie in their place, or a bound length may be shorter than the plan's)."""
    first, end = plan.traits.workers_of(HOPPER)
    nbytes = FIRST_PASS_BYTES * (end - first)
    room = nbytes <= min(len(target) - FIRST_AT, FIRST_ITEM_BYTES * plan.traits.num_workers)
    if arrays is None or not room or has_items(plan, None) or plan.index.requests.bound_kv_lens is not None:
        return 0
    ffi, _ = driver.shim()
    team = ffi.new(
        "attnrt_first_team_t *",
        {
            "items": arrays.items,
            "worker_indptr": arrays.worker_indptr + first,
            "rulers": arrays.rulers,
            "described": arrays.memory + AT_PARTS,
            "parts": arrays.parts,
            "workers": end - first,
            "kv_tile": plan.traits.classes[-1].kv_tile,
            "solid": solid,
        },
    )
    return int(arrays.lib.attnrt_cuda_first_passes(team, arrays.first))


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
    buffer[_AT_RULERS : _AT_RULERS + len(rulers)] = rulers
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


def items_of(plan: Plan, crew: str | None) -> tuple[int, int]:
    """Range of the items of a team (None: of no team)."""
    first, end = plan.traits.workers_of(crew)
    indptr = plan.work.worker_indptr
    return int(indptr[first]), int(indptr[end])


def plan_folds(plan: Plan) -> bool:
    """Whether an item of the Hopper kernel folds several leaves into one state. (Header, kernels and grids of a load all ask.)"""
    known = _folds.get(plan)
    if known is not None:
        return known
    theirs = plan.work.items[slice(*items_of(plan, HOPPER))]
    begin, end, fold = (WORK_FIELDS.index(name) for name in ("leaf_begin", "leaf_end", "fold"))
    return _folds.put(bool(((theirs[:, end] - theirs[:, begin] > 1) & (theirs[:, fold] == 1)).any()), plan)


def has_items(plan: Plan, crew: str | None) -> bool:
    """Whether a team (None: the workers of no team) has work."""
    begin, end = items_of(plan, crew)
    return begin < end


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
        _lines(call.loaded.plan),
    )


def run_offsets() -> dict[str, int]:
    """Where the numbers that a run changes lie in RunParams: attnrt_run_t's at_* fields (native/driver.h)."""
    fields = LAUNCH_RUN.fields
    assert fields is not None
    at = {name: int(fields[name][1]) for name in ("q", "k", "v", "out", "lse")}
    vectors = int(PAGED_KV.fields["vectors"][1])  # type: ignore[index]
    return at | {
        "scale": int(fields["sm_scale"][1]),
        "first": int(fields["first"][1]),
        "vectors_k": at["k"] + vectors,
        "vectors_v": at["v"] + vectors,
    }
