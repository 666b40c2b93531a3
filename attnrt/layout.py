# SPDX-License-Identifier: Apache-2.0
"""Where everything of a plan lies in memory: the limits a user promises, and one layout used to count and to bind.

Each spec of a workspace owns a *cell*: plan area | header | index area. The index area is filled upwards from its start and the
plan area downwards from the header, so that a load is one contiguous span, however much room the limits leave on
both sides (fixed slots of limit size would make every copy as long as the limits). The start of a cell's header never
moves; a backend that captures graphs keeps the addresses and counts of the current plan in the header and reads them there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.errors import ArgumentError, DtypeError, LimitError
from attnrt.formats.base import alignment_of
from attnrt.memory import ALIGN
from attnrt.scheduler.base import MERGE_FIELDS, WORK_FIELDS

if TYPE_CHECKING:
    from attnrt.formats.base import BlockSparse, Index
    from attnrt.scheduler.base import Plan, Traits
    from attnrt.spec import AttentionSpec

__all__ = ["PART_FIELDS", "PLAN_FIELDS", "CellLayout", "Limits", "align", "offsets"]

#: Arrays of a part in the order of the index area, with their NumPy dtypes.
PART_FIELDS: dict[str, np.dtype] = {
    "qo_indptr": np.dtype(np.int32),
    "qo_index": np.dtype(np.int32),
    "request": np.dtype(np.int32),
    "qo_pos": np.dtype(np.int32),
    "indptr": np.dtype(np.int32),
    "kv_base": np.dtype(np.int64),
    "kv_pos": np.dtype(np.int32),
    "kv_begin": np.dtype(np.int32),
    "kv_end": np.dtype(np.int32),
    "kv_offset": np.dtype(np.int32),
    "mask_offset": np.dtype(np.int64),
    "mask_begin": np.dtype(np.int32),
    "block_pos": np.dtype(np.int32),
    "indices": np.dtype(np.int32),
    "mask": np.dtype(np.uint8),
}

_fields_of = operator.attrgetter(*PART_FIELDS)
_INDICES, _MASK = list(PART_FIELDS).index("indices"), list(PART_FIELDS).index("mask")

#: Arrays of the plan area, with the numbers of a row of each.
PLAN_FIELDS: dict[str, int] = {
    "worker_indptr": 1,
    "merge_rows": len(MERGE_FIELDS),
    "merge_slots": 1,
    "merge_leaves": 1,
    "work": len(WORK_FIELDS),
    "counters": 1,
}

#: Partial slots beyond what parts need, per worker, when the limits name no number: room for cutting long rows.
SLOTS_PER_WORKER = 16
MIN_SLOTS = 512


def align(nbytes: int) -> int:
    """``nbytes`` rounded up to ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offset of each slot when sizes (bytes) are laid one after the other at multiples of ALIGN, and the total."""
    at, found = 0, []
    for size in sizes:
        found.append(at)
        at += -(-size // ALIGN) * ALIGN
    return found, at


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user promises never to pass, so that every address can be fixed and graphs captured.

    Parameters
    ----------
    max_requests : int
        Requests of an index.
    max_qo_tokens : int
        Rows of q, padding included.
    max_index_entries : int
        KV blocks listed by a plan, over all parts; bound (device) indices do not count. A flat index's own number; a composite
        lists the leaves that lie across its cuts once more, in single tokens where a cut is not on a page's edge.
    max_parts : int
        Parts of a composite index. (The bridges that a plan adds at its cuts have room of their own.)
    max_mask_bytes : int
        Bytes of packed mask bits, over all parts; a bound mask does not count.
    max_partial_slots : int, optional
        Rows of partial states. None: what the parts need at max_qo_tokens, and room for cutting long rows.
    num_pages : int, optional
        Pages of the smallest pool that a captured run reads; a plan that names a later page is refused.
    max_workers : int, optional
        Persistent workers (CTAs, threads); leaves the rest of the machine to others.
    max_qo_len : int, optional
        Queries of one request. A graph of decode steps (1) then has no launch for longer requests.
    max_kv_len : int, optional
        Keys of one request (of a device array of lengths: their bounds). A graph of requests that are one leaf then has no
        launch for longer ones.
    min_qo_len : int, optional
        Queries of one request that has any, at least. A graph of long prompts, or of drafts (with ``max_qo_len``, and no part
        but one), then has no launch for decode steps.
    kv_alignment : int, optional
        Tokens, a power of two. KV blocks are multiples of it and lists begin in their requests at multiples of it; keys of a
        ragged list lie side by side anyway. From 16 on, a graph over a cache whose tokens have one stride has no launch that
        fetches keys one by one.
    max_padding : int, optional
        Rows that ``pad_to`` adds to a plan. 0: a graph of prompts that are one leaf each then is one launch, since nobody has to
        write rows that are no request's.
    """

    max_requests: int
    max_qo_tokens: int
    max_index_entries: int
    max_parts: int = 1
    max_mask_bytes: int = 0
    max_partial_slots: int | None = None
    num_pages: int | None = None
    max_workers: int | None = None
    max_qo_len: int | None = None
    max_kv_len: int | None = None
    min_qo_len: int | None = None
    kv_alignment: int | None = None
    max_padding: int | None = None

    def __post_init__(self) -> None:
        least = {"max_parts": 1, "max_workers": 1, "kv_alignment": 1}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            low = least.get(item.name, 0)
            if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < low:
                raise ArgumentError(
                    f"limits.{item.name}", f"must be an integer of at least {low}", repr(value)
                )
            object.__setattr__(self, item.name, int(value))
        if self.kv_alignment is not None and self.kv_alignment & (self.kv_alignment - 1):
            raise ArgumentError("limits.kv_alignment", "must be a power of two", self.kv_alignment)
        least_qo, most_qo = self.min_qo_len, self.max_qo_len
        if least_qo is not None and most_qo is not None and least_qo > most_qo:
            raise ArgumentError("limits.min_qo_len", f"must be at most max_qo_len, {most_qo}", least_qo)

    def narrow(self, traits: Traits) -> Traits:
        """The traits with no more workers than a plan may use; teams keep their share of the machine."""
        most, own = self.max_workers, traits.num_workers
        if most is None or most >= own:
            return traits
        teams = [replace(t, num_workers=max(1, t.num_workers * most // own)) for t in traits.teams]
        return replace(traits, num_workers=most, teams=tuple(teams))

    def slots(self, traits: Traits) -> int:
        """Partial slots that are there."""
        if self.max_partial_slots is not None:
            return self.max_partial_slots
        parts = self.max_parts * self.max_qo_tokens if self.max_parts > 1 else 0
        room = max(MIN_SLOTS, SLOTS_PER_WORKER * self.narrow(traits).all_workers)
        return parts + min(room, traits.max_partial_slots)

    def check(self, plan: Plan, traits: Traits) -> None:
        """Raise LimitError for the first limit that the plan passes."""
        index = plan.index
        entries, masks = listed(plan.parts)
        parts = index.parts_for(plan.spec.composed.reads_key_positions)
        needs = (
            ("max_requests", len(index.requests), self.max_requests),
            ("max_qo_tokens", plan.num_rows, self.max_qo_tokens),
            ("max_parts", max(len(parts), index_parts(len(plan.parts))), self.max_parts),
            ("max_index_entries", entries, self.max_index_entries),
            ("max_mask_bytes", masks, self.max_mask_bytes),
            ("max_partial_slots", plan.num_slots, self.slots(traits)),
            ("num_pages", pages_named(index), self.num_pages),
            ("max_qo_len", _most(index.requests.qo_lens, self.max_qo_len), self.max_qo_len),
            ("max_kv_len", _most(index.requests.kv_lens, self.max_kv_len), self.max_kv_len),
            ("max_workers", plan.traits.num_workers, self.max_workers),
            ("max_padding", plan.num_rows - index.num_qo, self.max_padding),
        )
        for name, needed, given in needs:
            if given is not None and needed > given:
                raise LimitError(
                    name, needed, given, "Nothing was written; plan less or make the limits larger"
                )
        if self.min_qo_len is not None:
            lens = index.requests.qo_lens
            shortest = int(lens[lens > 0].min(initial=self.min_qo_len))
            if shortest < self.min_qo_len:
                hint = "Nothing was written; plan longer requests or make the limit smaller"
                raise LimitError("min_qo_len", shortest, self.min_qo_len, hint)
        if self.kv_alignment is not None:
            found = alignment_of(plan.parts)
            if found % self.kv_alignment:
                hint = "Nothing was written; plan larger blocks or make the limit smaller"
                raise LimitError("kv_alignment", found & -found, self.kv_alignment, hint)


def _most(lens: np.ndarray, limit: int | None) -> int:
    """The largest of some lengths; 0 of none, and where nobody asks."""
    return 0 if limit is None else int(lens.max(initial=0))


def plan_parts(parts: int) -> int:
    """Most parts of a plan of an index of so many: each cut can add a bridge in pages and one in tokens."""
    return 3 * parts - 2


def index_parts(parts: int) -> int:
    """Fewest parts of an index whose plan has so many."""
    return -(-(parts + 2) // 3)


def listed(parts: Sequence[BlockSparse]) -> tuple[int, int]:
    """(listed blocks, mask bytes) that parts bring from the host."""
    entries = masks = 0
    for part in parts:
        host = 0 if part.indices is None or part.features.bound_indices else len(part.indices)
        entries += max(host, 0 if part.block_pos is None else len(part.block_pos))
        masks += 0 if part.mask is None or part.features.bound_mask else part.mask.nbytes
    return entries, masks


def pages_named(index: Index) -> int:
    """One past the largest page an index names, in its page size; bound and affine indices name none."""
    page = index.page_size
    slots = [(p.max_block + 1) * p.block_size[1] for p in index.parts if p.kv_base is None]
    return -(-max(slots, default=0) // page)


def is_bound(part: BlockSparse, name: str) -> bool:
    """Whether the field is a device array that runs read in place."""
    return (name == "indices" and part.features.bound_indices) or (
        name == "mask" and part.features.bound_mask
    )


def limit_part_sizes(limits: Limits, heads: int, first: bool) -> list[int]:
    """Bytes of each of PART_FIELDS at the limits. The totals over parts are counted at the first; each later part adds the
    one ALIGN that dividing a total among slots can cost."""
    queries = limits.max_qo_tokens
    rows = queries + limits.max_requests
    counts = dict.fromkeys(PART_FIELDS, rows)
    counts |= {"qo_indptr": rows + 1, "qo_index": queries, "request": queries, "qo_pos": queries}
    counts |= {"indptr": rows * heads + 1, "kv_begin": rows * heads, "kv_end": rows * heads}
    counts |= {"mask_offset": queries}
    entries = limits.max_index_entries if first else ALIGN // 4
    counts |= {"indices": entries, "block_pos": entries, "mask": limits.max_mask_bytes if first else ALIGN}
    return [counts[name] * dtype.itemsize for name, dtype in PART_FIELDS.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLayout:
    """Capacities of one spec's cell and of its partial states, in bytes, each a multiple of ALIGN."""

    plan: int
    header: int
    index: int
    slots: int
    acc: int
    ml: int

    @property
    def cell(self) -> int:
        """Bytes of the cell."""
        return self.plan + self.header + self.index

    @property
    def base(self) -> int:
        """Offset of the index area in the cell."""
        return self.plan + self.header

    @property
    def scratch(self) -> int:
        """Bytes of partial states."""
        return self.acc + self.ml


def index_arrays(index: Index, parts: Sequence[BlockSparse]) -> list[np.ndarray | None]:
    """The arrays of the index area: qo_lens, kv_lens, then PART_FIELDS of each part; None where absent or bound.

    Raises
    ------
    ArgumentError, DtypeError
        A builder's array has another dtype, or is not contiguous.
    """
    requests = index.requests
    found: list[np.ndarray | None] = [requests.qo_lens, requests.kv_lens]
    for part in parts:
        arrays = list(_fields_of(part))
        if part.features.bound_indices:
            arrays[_INDICES] = None
        if part.features.bound_mask:
            arrays[_MASK] = None
        for array, name in zip(arrays, PART_FIELDS, strict=True):
            if array is not None and (array.dtype != PART_FIELDS[name] or not array.flags.c_contiguous):
                if array.dtype != PART_FIELDS[name]:
                    raise DtypeError(f"index.{name}", f"must be {PART_FIELDS[name]}", array.dtype)
                raise ArgumentError(f"index.{name}", "must be contiguous", array.strides)
        found += arrays
    return found


def byte_sizes(arrays: Sequence[np.ndarray | None]) -> list[int]:
    """Bytes of each array, 0 for None."""
    return [0 if array is None else array.nbytes for array in arrays]


def plan_sizes(workers: int, merges: int, entries: int, items: int, counters: int) -> list[int]:
    """Bytes of every slot of the plan area, in the order of PLAN_FIELDS."""
    counts = (workers + 1, merges, entries, entries, items, counters)
    return [4 * width * count for width, count in zip(PLAN_FIELDS.values(), counts, strict=True)]


_PAD, _ROW, _ITEM = ALIGN - 1, 4 * len(MERGE_FIELDS), 4 * len(WORK_FIELDS)


def plan_offsets(plan: Plan, counters: int = 0) -> tuple[tuple[int, ...], int]:
    """``offsets(plan_sizes(...))`` of a plan and what the kernels count in, written out: it is on the way of every load."""
    work, merge = plan.work, plan.merge
    entries = 4 * len(merge.slots) + _PAD & ~_PAD
    rows = 4 * len(work.worker_indptr) + _PAD & ~_PAD
    slots = rows + (_ROW * len(merge.rows) + _PAD & ~_PAD)
    leaves, items = slots + entries, slots + 2 * entries
    counts = items + (_ITEM * len(work.items) + _PAD & ~_PAD)
    return (0, rows, slots, leaves, items, counts), counts + (4 * counters + _PAD & ~_PAD)


def scratch_sizes(spec: AttentionSpec, slots: int, itemsize: int) -> tuple[int, int]:
    """Bytes of (acc, ml) for so many partial slots."""
    heads = slots * spec.num_qo_heads * itemsize
    return align(heads * spec.head_dim_vo), align(heads * 2)


def layout_at_limits(
    spec: AttentionSpec, traits: Traits, limits: Limits, header: int, itemsize: int
) -> CellLayout:
    """The layout that holds every plan within ``limits``.

    Items: a row of q is in at most one item per part and KV head; each cut makes one more item and takes at least one slot.
    """
    heads = spec.num_kv_heads if traits.split_heads else 1
    slots = limits.slots(traits)
    rows = limits.max_qo_tokens * heads
    entries = slots * heads
    index = [4 * limits.max_requests] * 2
    parts = plan_parts(limits.max_parts)
    for number in range(parts):
        index += limit_part_sizes(limits, spec.num_kv_heads, number == 0)
    counters = limits.max_qo_tokens * spec.num_kv_heads if header else 0
    workers = limits.narrow(traits).all_workers
    plan = plan_sizes(workers, rows, entries, rows * parts + entries, counters)
    acc, ml = scratch_sizes(spec, slots, itemsize)
    return CellLayout(
        plan=offsets(plan)[1], header=align(header), index=offsets(index)[1], slots=slots, acc=acc, ml=ml
    )


def report_of(layout: CellLayout) -> dict[str, Any]:
    """The layout in bytes, for people."""
    return {name: getattr(layout, name) for name in ("plan", "header", "index", "slots", "acc", "ml")}
