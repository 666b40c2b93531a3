# SPDX-License-Identifier: Apache-2.0
"""make_plan: from an index and a machine's traits to a plan. Pure host work, no device array is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.base import BlockSparse, Composite
from attnrt.scheduler.align import align
from attnrt.scheduler.align_native import align_native
from attnrt.scheduler.assign import find
from attnrt.scheduler.base import Plan, Traits
from attnrt.scheduler.plan_native import MODES, Facts, can_plan, plan_native
from attnrt.scheduler.plan_python import plan_python
from attnrt.scheduler.price import sharing_pays
from attnrt.scheduler.problem import Problem, classes_of
from attnrt.scheduler.recut import recut
from attnrt.scheduler.values import twin

if TYPE_CHECKING:
    from attnrt.formats.base import Index
    from attnrt.spec import AttentionSpec

__all__ = ["TREES", "facts_of", "make_plan", "plan_of"]

TREES = ("sequential", "pairwise")
DETERMINISM = ("batch", "token", "run")

_NO_LIMITS: tuple[Any, ...] = (None,)
_facts: dict[int, Facts] = {}
_OpenPlan = twin(Plan)


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
        A composite's cuts may lie anywhere; they are moved to leaf boundaries. Where reading shared keys once does not pay and
        the composite knows its flat form, that is planned.
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
    if not isinstance(traits, Traits):
        raise ArgumentError(
            "traits", "must be Traits", type(traits).__name__, "Traits.of('h200'), or a backend's own."
        )
    if not isinstance(index, (BlockSparse, Composite)):
        raise ArgumentError("index", "must come from attnrt.formats", type(index).__name__)
    if not index.checked:
        index.check()
    for part in index.parts:
        if part.heads not in (1, spec.num_kv_heads):
            raise ArgumentError("index", f"must have lists for 1 or {spec.num_kv_heads} KV heads", part.heads)
    if deterministic != "batch":
        _check_level(deterministic, traits)
    num_rows = index.num_qo if pad_to is None else _rows(index, pad_to)
    slots = traits.max_partial_slots
    if max_partial_slots is not None:
        slots = min(slots, _count("max_partial_slots", max_partial_slots))
    facts = facts_of(spec)
    parts: tuple[BlockSparse, ...] = index.parts
    limits = _NO_LIMITS
    if isinstance(index, Composite) and len(parts := index.parts_for(facts.places)) > 1:
        flat = index.flat
        if flat is not None:
            parts = recut(index, traits, facts.group)
        aligned = align_native(parts, facts, traits, num_rows) if can_plan(traits) else None
        if aligned is None:
            aligned = align(
                parts, classes_of(index.requests, traits, facts.group), traits, facts.num_kv_heads
            )
        parts, limits = aligned.parts, aligned.limits
        if flat is not None and not sharing_pays(flat, parts, facts, traits):
            parts, limits = (flat,), _NO_LIMITS
    if scheduler.__class__ is str and scheduler in MODES and can_plan(traits):
        work, merge, num_slots = plan_native(parts, limits, facts, traits, scheduler, tree, num_rows, slots)
    else:
        problem = Problem(
            parts=parts,
            limits=limits,
            composed=facts.composed,
            traits=traits,
            scheduler=find(scheduler),
            tree=tree,
            num_kv_heads=facts.num_kv_heads,
            group=facts.group,
            num_rows=num_rows,
            max_slots=slots,
        )
        work, merge, num_slots = plan_python(problem)
    plan = _OpenPlan()
    plan.spec, plan.index, plan.parts, plan.traits = spec, index, parts, traits
    plan.work, plan.merge, plan.num_slots, plan.num_rows = work, merge, num_slots, num_rows
    plan.tree, plan.deterministic = tree, deterministic
    plan.__class__ = Plan
    return plan


def facts_of(spec: AttentionSpec) -> Facts:
    """What planning needs of a spec."""
    return _facts.get(id(spec)) or _new_facts(spec)


def plan_of(
    spec: AttentionSpec,
    index: BlockSparse,
    traits: Traits,
    deterministic: str,
    later: tuple[Any, int, int, int],
    num_slots: int,
) -> Plan:
    """The plan that make_plan would have made, of what its planner wrote (``Plan.later``)."""
    plan = _OpenPlan()
    plan.spec, plan.index, plan.parts, plan.traits = spec, index, (index,), traits
    plan.later, plan.num_slots, plan.num_rows = later, num_slots, index.num_qo
    plan.tree, plan.deterministic = "sequential", deterministic
    plan.__class__ = Plan
    return plan


def _new_facts(spec: AttentionSpec) -> Facts:
    """What planning needs of a spec, kept by identity: specs are frozen, and hashing one costs more than planning."""
    ask = getattr(spec.composed, "reach", None)
    if ask is not None:
        reach = ask()
    else:
        reach = None if hasattr(spec.composed, "visible_range") else (None, None)
    if len(_facts) > 256:
        _facts.clear()
    facts = Facts(
        spec=spec,
        composed=spec.composed,
        num_kv_heads=spec.num_kv_heads,
        group=spec.group,
        reach=reach,
        places=getattr(spec.composed, "reads_key_positions", True),
    )
    _facts[id(spec)] = facts  # holds the spec, so its id is not used again
    return facts


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
