# SPDX-License-Identifier: Apache-2.0
"""The structs of kernels/params.cuh as NumPy dtypes, and how a loaded plan and a call fill them.

The rendered source asserts every size, so a change on one side alone does not compile; a test compares the offsets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.errors import LimitError

if TYPE_CHECKING:
    from attnrt.backends.base import Call, Loaded, PagedView, PartViews
    from attnrt.scheduler.base import NumericClass

__all__ = [
    "HEADER",
    "LAUNCH_RUN",
    "MAX_PARTS",
    "PAGED_KV",
    "fill_header",
    "fill_run",
    "layout_asserts",
    "paged",
]

MAX_PARTS = 16
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
PART = np.dtype([(name, "<u8") for name in PART_POINTERS] + [("block", FAST_DIV), ("heads", "<i4")])
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
)
HEADER = np.dtype(
    [(name, "<u8") for name in HEADER_POINTERS]
    + [(name, "<i4") for name in ("num_workers", "num_merges", "num_parts", "pairwise")]
    + [("rulers", RULER, (MAX_CLASSES,)), ("parts", PART, (MAX_PARTS,))]
)
LAUNCH_RUN = np.dtype(
    [
        ("plan", "<u8"),
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


def fast_div(divisor: int) -> tuple[int, int, int]:
    """(divisor, mul, shift) for 31-bit dividends: n // divisor == (n * mul) >> (32 + shift), or n >> shift if mul is 0.

    With l = ceil(log2 d), mul = ceil(2^(31 + l) / d) is below 2^32 and its error is too small to matter below 2^31
    (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994, theorem 4.2).
    """
    log = (divisor - 1).bit_length()
    if divisor == 1 << log:
        return divisor, 0, log
    return divisor, -(-(1 << (31 + log)) // divisor), log - 1


def _pointer(view: Any) -> int:
    return 0 if view is None else view.ptr


def _ruler(klass: NumericClass) -> tuple[list[int], list[int], int]:
    steps = list(klass.ruler.steps)
    assert len(steps) <= MAX_STEPS, "RulerDesc has room for four runs of leaves"
    steps += [(0, 0)] * (MAX_STEPS - len(steps))
    return [count for count, _ in steps], [size for _, size in steps], klass.ruler.tail


def _part(part: PartViews) -> tuple[Any, ...]:
    pointers = tuple(_pointer(getattr(part, name)) for name in PART_POINTERS)
    return (*pointers, fast_div(part.block_size), part.heads)


def fill_header(loaded: Loaded, target: np.ndarray) -> None:
    """Write the PlanHeader of a loaded plan.

    Parameters
    ----------
    loaded : Loaded
    target : uint8 [HEADER.itemsize], writable

    Raises
    ------
    LimitError
        More index parts than a header holds.
    """
    if len(loaded.parts) > MAX_PARTS:
        raise LimitError(
            "parts of an index on CUDA", len(loaded.parts), MAX_PARTS, "Merge levels of the cascade"
        )
    plan, header = loaded.plan, np.zeros((), HEADER)
    for name in HEADER_POINTERS:
        header[name] = _pointer(getattr(loaded, name))
    header["num_workers"] = len(plan.work.worker_indptr) - 1
    header["num_merges"] = len(plan.merge)
    header["num_parts"] = len(loaded.parts)
    header["pairwise"] = plan.tree == "pairwise"
    for i, klass in enumerate(plan.traits.classes):
        header["rulers"][i] = _ruler(klass)
    for i, part in enumerate(loaded.parts):
        header["parts"][i] = _part(part)
    target[: HEADER.itemsize] = header.reshape(1).view(np.uint8)


def paged(view: PagedView, itemsize: int) -> tuple[Any, ...]:
    """PagedKv of a cache of elements of ``itemsize`` bytes."""
    strides = (view.stride_page, view.stride_token, view.stride_head)
    vectors = view.ptr % 16 == 0 and all(stride * itemsize % 16 == 0 for stride in strides)
    num_slots = view.num_pages * view.page_size
    return (view.ptr, *strides, num_slots, fast_div(view.page_size), int(vectors))


def fill_run(call: Call, itemsize: int) -> np.ndarray:
    """RunParams of a call, as an array of one record; ``itemsize`` is that of the cache's elements."""
    run = np.zeros(1, LAUNCH_RUN)
    lse = (0, 0, 0) if call.lse is None else (call.lse.ptr, *call.lse.strides)
    run[0] = (
        call.loaded.header.ptr,  # type: ignore[union-attr]
        call.q.ptr,
        *call.q.strides[:2],
        paged(call.k, itemsize),
        paged(call.v, itemsize),
        call.out.ptr,
        *call.out.strides[:2],
        *lse,
        call.sm_scale,
        call.q.shape[1],
    )
    return run
