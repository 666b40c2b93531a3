# SPDX-License-Identifier: Apache-2.0
"""What a plan, or limits, have for which attention kernels.

Items that are not the Hopper kernel's and fit a tile of the decode kernel get that, those of more rows (the crew ``WIDE``) the
tile kernel. Both take anything that the spec allows and give the same bits, so this decides time alone. What the Hopper kernel
takes, a request's own length decides (tables.py), because its bits are others.

A captured graph outlives the plan that it was captured under, so with limits the choice is made from them and the spec: where
they promise decode steps there is no crew ``WIDE``, and the decode kernel takes items of more rows pass by pass; where they
promise drafts alone, the wide kernel takes all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnrt.backends.cuda.tables import (
    APPEND_ROWS,
    DECODE_ROWS,
    HOPPER,
    WIDE,
    WIDE_ROWS,
    decode_blocks,
    takes_wide,
)
from attnrt.latest import Latest
from attnrt.scheduler.base import WORK_FIELDS
from attnrt.scheduler.machines import APPEND_RULER

if TYPE_CHECKING:
    from attnrt.layout import Limits
    from attnrt.scheduler.base import Plan, Traits
    from attnrt.spec import AttentionSpec

__all__ = [
    "decode_queries",
    "has_items",
    "items_of",
    "limits_decode",
    "limits_fold",
    "limits_short",
    "limits_team",
    "limits_wide",
    "merge_counters",
    "plan_decodes",
    "plan_folds",
    "reads_positions",
    "within",
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
    """Whether the items of no team are the decode kernel's; the tile kernel has them where that does not take the spec."""
    return _queries_of(plan.spec) > 0


def limits_decode(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits promise so few queries per request that all are decode rows, and no rows that share keys."""
    most = decode_queries(spec)
    if limits.max_parts > 1:
        return False
    if limits.max_qo_len is not None and limits.max_qo_len <= most:
        return most > 0
    return 0 < limits.max_qo_tokens <= limits.max_requests * most


def limits_wide(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits promise requests of more queries than a tile of the decode kernel has and of no more than one of the wide
    kernel: then there is no launch of the decode kernel, which would find nothing to do."""
    if limits.max_parts > 1 or limits.min_qo_len is None or limits.max_qo_len is None or not takes_wide(spec):
        return False
    return (
        8 * decode_blocks(spec) < limits.min_qo_len * spec.group
        and limits.max_qo_len * spec.group <= WIDE_ROWS
    )


def within(spec: AttentionSpec, traits: Traits, limits: Limits) -> Traits:
    """The traits of an attention with limits: without the crew ``WIDE`` where nobody launches its kernel, with all rows for it
    where nobody launches the other."""
    if limits_decode(spec, limits):
        return replace(traits, teams=tuple(team for team in traits.teams if team.name != WIDE))
    if traits.classes[0].q_tile < WIDE_ROWS or not limits_wide(spec, limits):
        return traits  # the first: no device of the wide kernel
    return replace(
        traits, teams=tuple(replace(team, rows=0) if team.name == WIDE else team for team in traits.teams)
    )


def limits_team(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits let a request be longer than a decode step."""
    longest = (
        limits.max_qo_tokens if limits.max_qo_len is None else min(limits.max_qo_tokens, limits.max_qo_len)
    )
    return longest * spec.group > DECODE_ROWS


def limits_short(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits let a request be as short as a decode step."""
    return limits.min_qo_len is None or limits.min_qo_len * spec.group <= DECODE_ROWS


def limits_fold(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits let a request of the Hopper kernel have several leaves: one of few queries, since prompts are one leaf."""
    if limits.max_kv_len is not None and APPEND_RULER.leaf_of(limits.max_kv_len - 1) == 0:
        return False
    return limits.min_qo_len is None or limits.min_qo_len * spec.group <= APPEND_ROWS


def merge_counters(plan: Plan) -> int:
    """Counters that the decode kernel needs to know which of a row's states is the last one: one for each merge row and KV
    head of its range (all of them, or one where every head has a list of its own)."""
    heads = 1 if any(part.heads > 1 for part in plan.parts) else plan.spec.num_kv_heads
    return len(plan.merge) * heads


_folds: Latest[bool] = Latest()  # plan_folds


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


def reads_positions(plan: Plan) -> bool:
    """Whether some kernel of a plan asks where a key stands. Where none does, lists are packed without their blocks' positions:
    keys of blocks anywhere are then fetched like those of lists that run on."""
    composed = plan.spec.composed
    hooks = (composed.logits, composed.key_map, composed.value)
    asks = composed.has_mask or composed.reads_index_mask or any(hook is not None for hook in hooks)
    return asks or any(index.features.masked for index in (plan.index, *plan.parts))
