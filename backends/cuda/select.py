# SPDX-License-Identifier: Apache-2.0
"""Which attention kernel a plan gets: the decode kernel or the tile kernel. Both take anything that the spec allows and give the
same bits, so this decides time alone.

A captured graph outlives the plan that it was captured under, so with limits the choice is made from them and the spec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnrt.backends.cuda.tables import decode_blocks

if TYPE_CHECKING:
    from attnrt.layout import Limits
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec

__all__ = ["decode_queries", "limits_decode", "plan_decodes"]


def decode_queries(spec: AttentionSpec) -> int:
    """Queries of a request that fill one tile of the decode kernel; 0: it does not take the spec."""
    return 8 * decode_blocks(spec) // spec.group


def plan_decodes(plan: Plan) -> bool:
    """Whether no item of a plan has more rows than a tile of the decode kernel (it would read the item's keys again)."""
    most = decode_queries(plan.spec)
    work = plan.work
    return most > 0 and (not len(work) or int((work["q_end"] - work["q_begin"]).max()) <= most)


def limits_decode(spec: AttentionSpec, limits: Limits) -> bool:
    """Whether limits promise so few queries per request that all are decode rows."""
    return 0 < limits.max_qo_tokens <= limits.max_requests * decode_queries(spec)
