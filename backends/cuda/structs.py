# SPDX-License-Identifier: Apache-2.0
"""What lies where: the structs of kernels/params.cuh as NumPy dtypes, and places in them that others write or read by themselves.

The rendered source asserts every size, so a change on one side alone does not compile; a test compares the offsets.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "AT_FIRSTS",
    "AT_PARTS",
    "AT_RULERS",
    "FAST_DIV",
    "FIRST_AT",
    "FIRST_ITEM_BYTES",
    "FIRST_PASS_BYTES",
    "HEADER",
    "HEADER_POINTERS",
    "LAUNCH_RUN",
    "MAX_PARTS",
    "MAX_STEPS",
    "PAGED_KV",
    "PART",
    "PART_POINTERS",
    "RULER",
    "layout_asserts",
    "run_offsets",
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

#: Places in a header.
AT_RULERS, AT_PARTS, AT_FIRSTS = (int(HEADER.fields[name][1]) for name in ("rulers", "parts", "firsts"))  # type: ignore[index]


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
