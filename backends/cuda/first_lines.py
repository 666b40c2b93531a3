# SPDX-License-Identifier: Apache-2.0
"""The lines behind a plan's header with which its workers begin: a FirstItem or a FirstPass each, at an address that the worker's
number gives, so that a kernel's first copy waits for one load instead of a walk over the plan (native/first.cpp writes them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.backends.cuda import driver
from attnrt.backends.cuda.select import has_items, reads_positions
from attnrt.backends.cuda.structs import (
    AT_FIRSTS,
    AT_PARTS,
    AT_RULERS,
    FIRST_AT,
    FIRST_ITEM_BYTES,
    FIRST_PASS_BYTES,
)
from attnrt.backends.cuda.tables import HOPPER, WIDE

if TYPE_CHECKING:
    from attnrt.backends.base import Loaded
    from attnrt.formats.base import BlockSparse
    from attnrt.scheduler.base import Plan
    from attnrt.tensor import TensorView

__all__ = ["FirstArrays", "fill_first", "fill_first_passes", "first_writer", "lines_of"]

#: Arrays of a part that first items follow from, as the shim reads them.
_FIRST_ARRAYS = {
    name: "int64_t[]" if name == "kv_base" else "int32_t[]"
    for name in (
        *("request", "qo_pos", "qo_index", "indptr", "indices"),
        *("kv_pos", "kv_offset", "kv_begin", "kv_end", "kv_base"),
    )
}


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


def lines_of(plan: Plan) -> int:
    """Workers that have a place for their first item: those of no team, then those of the wide kernel."""
    first, end = plan.traits.workers_of(WIDE)
    return plan.traits.num_workers + end - first


def _has_first(plan: Plan, nbytes: int) -> bool:
    """Whether the workers' first items fit behind a header with so many bytes."""
    return nbytes >= FIRST_AT + FIRST_ITEM_BYTES * lines_of(plan)


def first_writer(loaded: Loaded) -> tuple[int, ...]:
    """What attnrt/native/step.cpp needs to write them: address of the function (0: no room), where it writes, where the header
    has their count and the rulers, keys of a tile, whether kernels read blocks' positions."""
    header: TensorView = loaded.header  # type: ignore[assignment]
    address = driver.first_items_address() if _has_first(loaded.plan, header.shape[0]) else 0
    plan = loaded.plan
    return address, FIRST_AT, AT_FIRSTS, AT_RULERS, plan.traits.classes[0].kv_tile, reads_positions(plan)


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
        rulers, first = (ffi.cast("int32_t *", memory + at) for at in (AT_RULERS, FIRST_AT))
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
    if arrays is None or not _has_first(plan, len(target)):
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
