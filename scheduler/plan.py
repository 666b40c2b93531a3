# SPDX-License-Identifier: Apache-2.0
"""make_plan: from an index and a machine's traits to a plan. Pure host work, no device array is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.scheduler.align import align
from attnrt.scheduler.assign import find
from attnrt.scheduler.base import Plan, Traits
from attnrt.scheduler.plan_python import plan_python
from attnrt.scheduler.problem import Problem

if TYPE_CHECKING:
    from attnrt.formats.base import Index
    from attnrt.spec import AttentionSpec

__all__ = ["TREES", "make_plan"]

TREES = ("sequential", "pairwise")
DETERMINISM = ("batch", "token", "run")


def make_plan(
    spec: AttentionSpec,
    index: Index,
    traits: Traits,
    scheduler: Any = "lpt",
    pad_to: int | None = None,
    deterministic: str = "batch",
    tree: str = "sequential",
    max_partial_slots: int | None = None,
) -> Plan:
    """Schedule one index on one machine.

    Parameters
    ----------
    spec : AttentionSpec
    index : BlockSparse or Composite
        A composite's cuts may lie anywhere; they are moved to leaf boundaries.
    traits : Traits
        The backend's own, or ``Traits.of("h200")`` for a machine that is not here.
    scheduler : str or object
        "lpt", "round_robin", "one_cta_per_request", the name of an entry point in the group ``attnrt.schedulers``, or an object
        with ``assign`` (scheduler/assign.py). Changes time, never a bit.
    pad_to : int, optional
        Rows of q that a run will bring, at least the index's; rows past the index's are empty sets.
    deterministic : {"batch", "token", "run"}
        "token" needs traits with one numeric class.
    tree : {"sequential", "pairwise"}
    max_partial_slots : int, optional
        At most this many partial states per row slot; lower of this and the traits' own. When they run out rows stay whole.

    Returns
    -------
    Plan
        The same lengths give the same plan, byte for byte.

    Raises
    ------
    ArgumentError, PlanError, LimitError, UnsupportedError
    """
    if tree not in TREES:
        raise ArgumentError("tree", f"must be one of {TREES}", repr(tree))
    _check_level(deterministic, traits)
    num_rows = _rows(index, pad_to)
    slots = traits.max_partial_slots
    if max_partial_slots is not None:
        slots = min(slots, _count("max_partial_slots", max_partial_slots))
    requests = index.requests
    rows = requests.qo_lens.astype(np.int64) * spec.group
    req_class = np.full(len(rows), len(traits.classes) - 1, np.int32)
    for i in range(len(traits.classes) - 2, -1, -1):
        req_class[rows <= traits.classes[i].max_rows] = i
    parts, limits = index.parts, (None,)
    if len(parts) > 1:
        aligned = align(parts, req_class, traits, spec.num_kv_heads)
        parts, limits = aligned.parts, aligned.limits
    problem = Problem(
        parts=parts,
        limits=limits,
        req_class=req_class,
        composed=spec.composed,
        traits=traits,
        scheduler=find(scheduler),
        tree=tree,
        num_kv_heads=spec.num_kv_heads,
        group=spec.group,
        num_rows=num_rows,
        max_slots=slots,
    )
    work, merge, num_slots = plan_python(problem)
    return Plan(
        spec=spec,
        index=index,
        parts=problem.parts,
        traits=traits,
        work=work,
        merge=merge,
        num_slots=num_slots,
        num_rows=num_rows,
        tree=tree,
        deterministic=deterministic,
    )


def _check_level(deterministic: str, traits: Traits) -> None:
    if deterministic not in DETERMINISM:
        raise ArgumentError("deterministic", f"must be one of {DETERMINISM}", repr(deterministic))
    if deterministic == "token" and len(traits.classes) != 1:
        raise UnsupportedError(
            "deterministic='token'",
            "needs traits with one numeric class",
            f"{len(traits.classes)} classes of {traits.name}",
            "Ask the backend for its traits at this level, or take Traits.of('h200-token').",
        )


def _rows(index: Index, pad_to: int | None) -> int:
    if pad_to is None:
        return index.num_qo
    rows = _count("pad_to", pad_to)
    if rows < index.num_qo:
        raise ArgumentError("pad_to", f"must be at least the index's rows of q, {index.num_qo}", rows)
    return rows


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 0:
        raise ArgumentError(name, "must be an integer of at least 0", repr(value))
    return int(value)
