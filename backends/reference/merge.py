# SPDX-License-Identifier: Apache-2.0
"""The merge list of a plan in NumPy float64: both reduction trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnrt.backends.reference.attend import Context, finish_rows
from attnrt.fold import State, empty_state, fold

if TYPE_CHECKING:
    from attnrt.backends.base import Call

__all__ = ["merge_rows"]


def merge_rows(call: Call) -> None:
    """Fold and finish every row that no single item finished."""
    here = Context(call)
    loaded = call.loaded
    slots, leaves = loaded.merge_slots.numpy(), loaded.merge_leaves.numpy()
    owners = _owners(here)
    for row, head_begin, head_end, begin, end in loaded.merge_rows.numpy().tolist():
        for head in range(head_begin, head_end):
            heads = here.heads(head)
            states = [
                State(m=here.ml[slot, heads, 0], l=here.ml[slot, heads, 1], acc=here.acc[slot, heads])
                for slot in slots[begin:end]
            ]
            total = _fold_tree(states, leaves[begin:end].tolist(), here.plan.tree)
            if total is None:
                total = empty_state((here.spec.group,), here.spec.head_dim_vo, np.float64)
            finish_rows(here, total, _context(here, owners, row, head), np.array([row]), heads)


def _owners(here: Context) -> dict[int, tuple[int, int]]:
    """(part, query) of each row of q; a row past the index's queries has none."""
    found: dict[int, tuple[int, int]] = {}
    for number, part in enumerate(here.parts):
        for query in range(int(part.qo_indptr[-1])):
            row = query if part.qo_index is None else int(part.qo_index[query])
            found[row] = (number, query)
    return found


def _context(here: Context, owners: dict[int, tuple[int, int]], row: int, head: int) -> dict[str, np.ndarray]:
    if row in owners:
        number, query = owners[row]
        return here.row_context(here.parts[number], np.array([query]), head)
    heads = here.heads(head)
    zero = np.zeros(here.spec.group, np.int32)
    ctx = dict.fromkeys(("request", "qo_pos", "qo_len", "kv_len"), zero)
    return ctx | {"qo_row": zero + row, "kv_head": zero + head, "qo_head": np.arange(heads.start, heads.stop)}


def _fold_tree(states: list[State], leaves: list[int], tree: str) -> State | None:
    """The states as one. Sequential: a left fold. Pairwise: the span of leaves [0, last] is split at the largest power of two
    below its length, so that leaves that follow later move no inner node; a side without states is skipped."""
    if not states:
        return None
    if tree == "sequential":
        total = states[0]
        for state in states[1:]:
            total = fold(total, state)
        return total
    by_leaf = dict(zip(leaves, states, strict=True))

    def node(begin: int, end: int) -> State | None:
        if not any(begin <= leaf < end for leaf in by_leaf):
            return None
        if end - begin == 1:
            return by_leaf[begin]
        middle = begin + (1 << (end - begin - 1).bit_length() - 1)
        left, right = node(begin, middle), node(middle, end)
        if left is None or right is None:
            return right if left is None else left
        return fold(left, right)

    return node(0, max(leaves) + 1)
