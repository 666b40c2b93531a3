# SPDX-License-Identifier: Apache-2.0
"""From lengths to a plan: which worker computes which leaves of which rows, and how their states merge."""

from attnrt.scheduler.base import (
    DIRECT,
    MERGE_FIELDS,
    WORK_FIELDS,
    MergeList,
    NumericClass,
    Plan,
    Ruler,
    Traits,
    WorkList,
)
from attnrt.scheduler.machines import traits_of
from attnrt.scheduler.plan import make_plan

__all__ = [
    "DIRECT",
    "MERGE_FIELDS",
    "WORK_FIELDS",
    "MergeList",
    "NumericClass",
    "Plan",
    "Ruler",
    "Traits",
    "WorkList",
    "make_plan",
    "traits_of",
]
