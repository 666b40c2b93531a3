# SPDX-License-Identifier: Apache-2.0
"""verify_plan: proof by counting that a plan computes every row once and merges what it computes in the right order.

It reads the user's index, not the planner's aligned parts, and knows nothing of how the planner chose: for each row and KV
head the keys that are live and visible must be the union of the items' keys, each exactly once, each stored where the user's
index stores it. Cost grows with rows x keys; meant for tests and for looking at someone else's scheduler.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from attnrt.errors import PlanError
from attnrt.formats.base import HOLE, BlockSparse
from attnrt.scheduler.base import DIRECT, Plan
from attnrt.scheduler.problem import visible_range

__all__ = ["verify_plan"]


@dataclass(slots=True)
class _Seen:
    """What the items bring for one (row, head): keys by offset, states (first leaf, end leaf, slot), DIRECT writes."""

    keys: list[tuple[int, int, int]] = field(default_factory=list)  # (lo, hi, item)
    states: list[tuple[int, int, int]] = field(default_factory=list)
    direct: int = 0


def verify_plan(plan: Plan) -> None:
    """Raise unless ``plan`` is right.

    Raises
    ------
    PlanError
        Naming the first thing found wrong: a key covered twice or not at all, or read from another slot or position than the
        index's; a cut off a leaf boundary; partial slots that overlap or lie outside; a row never written or written twice;
        merge entries out of leaf order, incomplete, or of states that nobody writes; bad worker ranges.
    """
    _check_workers(plan)
    seen = _read_items(plan)
    _check_slots(plan)
    _check_rows(plan, seen)
    _check_keys(plan, seen)


def _fail(rule: str, got: object) -> None:
    raise PlanError("plan", rule, got)


def _check_workers(plan: Plan) -> None:
    indptr = plan.work.worker_indptr.astype(np.int64)
    good = len(indptr) == plan.traits.all_workers + 1 and indptr[0] == 0 and indptr[-1] == len(plan.work)
    if not good or (np.diff(indptr) < 0).any():
        _fail("must give every item to one worker", indptr.tolist()[:8])
    rows = (plan.work["q_end"] - plan.work["q_begin"]) * plan.spec.group
    crews = [plan.traits.crew_of(*of) for of in zip(plan.work["klass"].tolist(), rows.tolist(), strict=True)]
    for i, team in enumerate((None, *plan.traits.teams)):
        first, end = plan.traits.workers_of(None if team is None else team.name)
        if any(crew != i for crew in crews[indptr[first] : indptr[end]]):
            _fail("must give every item to the crew of its class and rows", crews[:8])


def _queries(plan: Plan, item: dict[str, int]) -> np.ndarray:
    part = plan.parts[item["part"]]
    rows = np.arange(item["q_begin"], item["q_end"])
    return rows if part.qo_index is None else part.qo_index[item["q_begin"] : item["q_end"]]


def _items(plan: Plan) -> list[dict[str, int]]:
    from attnrt.scheduler.base import WORK_FIELDS

    return [dict(zip(WORK_FIELDS, row, strict=True)) for row in plan.work.items.tolist()]


def _read_items(plan: Plan) -> dict[tuple[int, int], _Seen]:
    seen = {(row, head): _Seen() for row in range(plan.num_rows) for head in range(plan.spec.num_kv_heads)}
    for i, item in enumerate(_items(plan)):
        part = plan.parts[item["part"]]
        if (
            not part.qo_indptr[item["row"]]
            <= item["q_begin"]
            < item["q_end"]
            <= part.qo_indptr[item["row"] + 1]
        ):
            _fail("items must hold queries of their block row", item)
        if part.heads > 1 and item["head_end"] != item["head_begin"] + 1:
            _fail("items of a per-head part must hold one head", item)
        _check_leaves(plan, item)
        fold_all = item["slot"] == DIRECT or item["fold"]
        queries = _queries(plan, item)
        for q, row in enumerate(queries.tolist()):
            for head in range(item["head_begin"], item["head_end"]):
                here = seen[row, head]
                here.keys.append((item["kv_begin"], item["kv_end"], i))
                if item["slot"] == DIRECT:
                    here.direct += 1
                elif fold_all:
                    here.states.append((item["leaf_begin"], item["leaf_end"], item["slot"] + q))
                else:
                    for k, leaf in enumerate(range(item["leaf_begin"], item["leaf_end"])):
                        here.states.append((leaf, leaf + 1, item["slot"] + k * len(queries) + q))
    return seen


def _check_leaves(plan: Plan, item: dict[str, int]) -> None:
    if item["kv_begin"] == item["kv_end"]:
        if item["leaf_begin"] != item["leaf_end"] or item["slot"] != DIRECT:
            _fail("an empty item must be DIRECT and hold no leaf", item)
        return
    ruler = plan.traits.classes[item["klass"]].ruler
    leaves = (ruler.leaf_of(item["kv_begin"]), ruler.leaf_of(item["kv_end"] - 1) + 1)
    if leaves != (item["leaf_begin"], item["leaf_end"]):
        _fail(f"an item's leaves must be those of its keys, {leaves}", item)
    part, qo_lens = plan.parts[item["part"]], plan.index.requests.qo_lens
    for head in range(item["head_begin"], item["head_end"]) if part.heads > 1 else (0,):
        entry, offset = item["row"] * part.heads + head, int(part.kv_offset[item["row"]])
        live = (offset + int(part.kv_begin[entry]), offset + int(part.kv_end[entry]))
        if not live[0] <= item["kv_begin"] < item["kv_end"] <= live[1]:
            _fail(f"an item's keys must lie in its list's live range, {live}", item)
    for request in np.unique(part.request[item["q_begin"] : item["q_end"]]):
        if plan.traits.class_of(int(qo_lens[request]) * plan.spec.group) != item["klass"]:
            _fail("rows must meet only inside their numeric class", item)


def _check_slots(plan: Plan) -> None:
    """Items of other heads of the same queries and leaves may share slots; (slot, head) must be written once."""
    used = np.zeros((plan.num_slots, plan.spec.num_kv_heads), np.int64)
    for item in _items(plan):
        if item["slot"] == DIRECT:
            continue
        states = 1 if item["fold"] else item["leaf_end"] - item["leaf_begin"]
        end = item["slot"] + states * (item["q_end"] - item["q_begin"])
        if item["slot"] < 0 or end > plan.num_slots:
            _fail(f"partial slots must lie in [0, {plan.num_slots})", item)
        used[item["slot"] : end, item["head_begin"] : item["head_end"]] += 1
    if (used > 1).any():
        _fail("partial slots must be disjoint", np.argwhere(used > 1)[0].tolist())


def _check_rows(plan: Plan, seen: dict[tuple[int, int], _Seen]) -> None:
    merged: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, head_begin, head_end, slot_begin, slot_end in plan.merge.rows.tolist():
        entry = list(
            zip(
                plan.merge.leaves[slot_begin:slot_end].tolist(),
                plan.merge.slots[slot_begin:slot_end].tolist(),
                strict=True,
            )
        )
        for head in range(head_begin, head_end):
            if (row, head) in merged:
                _fail("rows must be merged once", (row, head))
            merged[row, head] = entry
    for (row, head), here in seen.items():
        writes = here.direct + ((row, head) in merged)
        if writes != 1:
            _fail("every row must be written exactly once", f"row {row}, KV head {head}: {writes} times")
        if here.direct and here.states:
            _fail("a row that an item finishes must have no states", (row, head))
        states = sorted(here.states)
        if merged.get((row, head), []) != [(begin, slot) for begin, _, slot in states]:
            _fail("merge entries must list a row's states by rising leaf", (row, head))
        for i, (begin, end, _) in enumerate(states):
            if i and begin < states[i - 1][1]:
                _fail("states must not share a leaf", (row, head))
            if end - begin > 1 and (i or plan.tree == "pairwise"):
                _fail("only the first state of a sequential fold may hold several leaves", (row, head))
        if here.direct and plan.tree == "pairwise":
            for lo, hi, item in here.keys:
                if hi > lo and plan.work["leaf_end"][item] - plan.work["leaf_begin"][item] > 1:
                    _fail("a pairwise tree must not be folded in an item", (row, head))


def _place(part: BlockSparse, row: int, head: int, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Slot and position of the keys at offsets [lo, hi) of a list; None if indices are not on the host."""
    j = np.arange(lo, hi, dtype=np.int64) - int(part.kv_offset[row])
    C = part.block_size[1]
    entry = row * part.heads + (head if part.heads > 1 else 0)
    begin = int(part.indptr[entry])
    if part.indices is None:
        assert part.kv_base is not None
        slots = int(part.kv_base[row]) + j
    elif isinstance(part.indices, np.ndarray):
        block = part.indices[begin + j // C].astype(np.int64)
        slots = np.where(block == HOLE, -1, block * C + j % C)
    else:
        return None
    if part.block_pos is not None:
        return slots, _positions(part, entry, j)
    assert part.kv_pos is not None
    return slots, int(part.kv_pos[row]) + j


def _positions(part: BlockSparse, entry: int, j: np.ndarray) -> np.ndarray:
    """Positions of keys ``j`` of list ``entry``, whose blocks have their own."""
    assert part.block_pos is not None
    C = part.block_size[1]
    return part.block_pos[int(part.indptr[entry]) + j // C].astype(np.int64) + j % C


def _want(plan: Plan, part: BlockSparse, row: int, q: int, head: int) -> tuple[int, int]:
    """The shortest range of offsets with all keys of one list that are live and that the variant and a host mask let one query
    see."""
    entry = row * part.heads + (head if part.heads > 1 else 0)
    offset = int(part.kv_offset[row])
    lo, hi = offset + int(part.kv_begin[entry]), offset + int(part.kv_end[entry])
    at = np.asarray([int(part.qo_pos[q])])
    first, end = (int(x[0]) for x in visible_range(plan.spec.composed, at, at))
    if part.kv_pos is not None:
        shift = offset - int(part.kv_pos[row])
        lo, hi = max(lo, first + shift), min(hi, end + shift)
    place = np.arange(lo, hi, dtype=np.int64)
    if part.kv_pos is None:
        positions = _positions(part, entry, place - offset)
        place = place[(positions >= first) & (positions < end)]
    if isinstance(part.mask, np.ndarray) and part.mask_offset is not None and part.mask_begin is not None:
        start, begin = int(part.mask_offset[q]), int(part.mask_begin[row])
        if start >= 0:
            bit = start + np.maximum(place - begin, 0)
            inside = bit < 8 * len(part.mask)
            shown = np.zeros(len(place), bool)
            shown[inside] = (part.mask[bit[inside] >> 3] >> (bit[inside] & 7).astype(np.uint8)) & 1
            place = place[shown | (place < begin)]
    return (int(place[0]), int(place[-1]) + 1) if len(place) else (lo, lo)


def _check_keys(plan: Plan, seen: dict[tuple[int, int], _Seen]) -> None:
    for part in plan.index.parts:
        qo_row = np.arange(plan.index.num_qo) if part.qo_index is None else part.qo_index
        for row in range(part.num_rows):
            for q in range(part.qo_indptr[row], part.qo_indptr[row + 1]):
                for head in range(plan.spec.num_kv_heads):
                    want = _want(plan, part, row, q, head)
                    _check_list(plan, part, want, row, head, int(qo_row[q]), seen)
    for (row, head), here in seen.items():
        spans = sorted(key[:2] for key in here.keys if key[0] < key[1])
        for a, b in itertools.pairwise(spans):
            if b[0] < a[1]:
                _fail("keys must be covered once", f"row {row}, KV head {head}: offset {b[0]} twice")


def _check_list(
    plan: Plan, part: BlockSparse, want: tuple[int, int], row: int, head: int, qo_row: int, seen: dict
) -> None:
    lo, hi = want
    covered = lo
    for first, last, i in sorted(seen[qo_row, head].keys):
        begin, end = max(first, lo), min(last, hi)
        if begin >= end:
            continue
        if begin > covered:
            break
        covered = max(covered, end)
        mine = plan.parts[int(plan.work["part"][i])]
        its_own = _place(part, row, head, begin, end)
        got = _place(mine, int(plan.work["row"][i]), head, begin, end)
        if its_own is not None and got is not None:
            asks = getattr(plan.spec.composed, "reads_key_positions", True)
            for a, b, what in ((its_own[0], got[0], "slots"), (its_own[1], got[1], "positions")):
                if (asks or what == "slots") and not np.array_equal(a, b):
                    _fail(
                        f"items must read the index's own {what}",
                        f"row {qo_row}, KV head {head}, offset {begin}",
                    )
    if covered < hi:
        _fail("keys must be covered", f"row {qo_row}, KV head {head}: offset {covered} never")
