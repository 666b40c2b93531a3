# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel a plan's items get that are not the Hopper kernel's: the decode kernel or the tile kernel. Both take
anything that the spec allows and give the same bits, so this decides time alone. What the Hopper kernel takes, a request's own
length decides (tables.py), because its bits are others.

A captured graph outlives the plan that it was captured under, so with limits the choice is made from them and the spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnrt.backends.cuda.tables import DECODE_ROWS, decode_blocks
from attnrt.scheduler.base import WORK_FIELDS
from attnrt.tensor import native

if TYPE_CHECKING:
    from attnrt.layout import Limits
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec

_Q_BEGIN, _Q_END = (WORK_FIELDS.index(name) for name in ("q_begin", "q_end"))

__all__ = [
    "decode_queries",
    "limits_decode",
    "limits_team",
    "merge_counters",
    "plan_decodes",
    "plan_folds",
]


def decode_queries(spec: AttentionSpec) -> int:
    """Queries of a request that fill one tile of the decode kernel; 0: it does not take the spec."""
    return 8 * decode_blocks(spec) // spec.group


_last: tuple[Any, int] = (None, 0)


def _queries_of(spec: AttentionSpec) -> int:
    """``decode_queries``, kept for the spec that was asked for last: every load asks."""
    global _last
    known = _last
    if known[0] is not spec:
        _last = known = (spec, decode_queries(spec))
    return known[1]


def plan_decodes(plan: Plan) -> bool:
    """Whether no item of a plan has more rows than a tile of the decode kernel (it would read the item's keys again)."""
    most, mine = _queries_of(plan.spec), plan.work.items
    if plan.traits.team is not None:
        mine = mine[: plan.work.worker_indptr[plan.traits.num_workers]]
    return most > 0 and native.widest(mine, _Q_BEGIN, _Q_END) <= most


def plan_folds(plan: Plan) -> bool:
    """Whether an item of the team folds several leaves into one state."""
    theirs = plan.work.items[plan.work.worker_indptr[plan.traits.num_workers] :]
    begin, end, fold = (WORK_FIELDS.index(name) for name in ("leaf_begin", "leaf_end", "fold"))
    return bool(((theirs[:, end] - theirs[:, begin] > 1) & (theirs[:, fold] == 1)).any())


def limits_decode(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits promise so few queries per request that all are decode rows."""
    most = decode_queries(spec)
    if limits.max_qo_len is not None and limits.max_qo_len <= most:
        return most > 0
    return 0 < limits.max_qo_tokens <= limits.max_requests * most


def limits_team(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits let a request be longer than a decode step."""
    longest = (
        limits.max_qo_tokens if limits.max_qo_len is None else min(limits.max_qo_tokens, limits.max_qo_len)
    )
    return longest * spec.group > DECODE_ROWS


def merge_counters(plan: Plan) -> int:
    """Counters that the decode kernel needs to know which of a row's states is the last one: one for each merge row and KV
    head of its range (all of them, or one where every head has a list of its own)."""
    heads = 1 if any(part.heads > 1 for part in plan.parts) else plan.spec.num_kv_heads
    return len(plan.merge) * heads
