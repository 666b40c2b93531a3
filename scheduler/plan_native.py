# SPDX-License-Identifier: Apache-2.0
"""The C++ planner's door: a problem in, the same work list and merge list out as plan_python gives, byte for byte.

Written for few Python operations, since at small batches they are most of the time: traits and structs are converted once
and kept (by identity, for frozen values), pointers come from ``from_buffer``, and all results are views into one buffer.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnrt.errors import LimitError, PlanError
from attnrt.scheduler.base import MERGE_FIELDS, WORK_FIELDS, MergeList, Team, Traits, WorkList
from attnrt.scheduler.mask_range import mask_range
from attnrt.scheduler.problem import FAR, scattered, visible_range
from attnrt.scheduler.values import twin

if TYPE_CHECKING:
    from attnrt.formats.base import BlockSparse

_ABI = 10  # of native/planner_abi.h

try:
    from attnrt.scheduler._planner_native import ffi, lib
except ImportError:  # a checkout that has not been built: the readable planner serves
    ffi = lib = None
if lib is not None and getattr(lib, "ATTNRT_PLANNER_ABI", 1) != _ABI:
    warnings.warn(
        "attnrt.scheduler._planner_native is out of date and not used; in a checkout run: python setup.py build_ext --inplace",
        RuntimeWarning,
        stacklevel=2,
    )
    ffi = lib = None

if lib is not None:
    _INTS, _LONGS, _NULL, _buffer = (
        ffi.typeof("int32_t[]"),
        ffi.typeof("int64_t[]"),
        ffi.NULL,
        ffi.from_buffer,
    )

__all__ = [
    "MODES",
    "OUTSIDE",
    "Facts",
    "can_plan",
    "failure",
    "fixed_numbers",
    "lists_of",
    "plan_native",
    "point_at_queries",
    "point_at_requests",
    "structs",
]


class Facts(NamedTuple):
    """What planning needs of a spec. ``reach``: a query at p sees keys p - left .. p + right (None: no end); None instead of
    the pair: ``composed.visible_range`` is asked for every query. ``places``: somebody asks where keys stand."""

    spec: Any
    composed: Any
    num_kv_heads: int
    group: int
    reach: tuple[int | None, int | None] | None
    places: bool = True


#: Schedulers that the C++ planner knows.
MODES = {"lpt": 0, "round_robin": 1, "one_cta_per_request": 2}

_NW, _NM = len(WORK_FIELDS), len(MERGE_FIELDS)
OUTSIDE = 2
_MOST_CLASSES = _MOST_SPANS = 8
_MOST_TEAMS = 2
_MOST_SIZES = 4
_INT32_MAX = (1 << 31) - 1
_INT32, _empty, _ndarray = np.dtype(np.int32), np.empty, np.ndarray
_NO_MERGES = MergeList(
    rows=np.zeros((0, _NM), np.int32), slots=np.zeros(0, np.int32), leaves=np.zeros(0, np.int32)
)
for _array in (_NO_MERGES.rows, _NO_MERGES.slots, _NO_MERGES.leaves):
    _array.setflags(write=False)
_local = threading.local()
_OpenWork, _OpenMerge = twin(WorkList), twin(MergeList)
_traits: dict[int, tuple[Traits, Any]] = {}


def can_plan(traits: Traits) -> bool:
    """Whether the module is built and the traits fit its tables."""
    return lib is not None and (id(traits) in _traits or _fits(traits))


def _fits(traits: Traits) -> bool:
    steps = [len(klass.ruler.steps) for klass in traits.classes]
    sizes = max((len(team.sizes) for team in traits.teams), default=0)
    return (
        len(steps) <= _MOST_CLASSES
        and max(steps) < _MOST_SPANS
        and len(traits.teams) <= _MOST_TEAMS
        and sizes <= _MOST_SIZES
    )


def _traits_struct(traits: Traits) -> Any:
    kept = _traits.get(id(traits))
    if kept is not None:
        return kept[1]
    struct = ffi.new("attnrt_traits *")
    crews: tuple[Traits | Team, ...] = (traits, *traits.teams)
    for crew, out in zip(crews, struct.crews, strict=False):
        out.alpha, out.beta, out.beta_rows, out.fixed = crew.alpha, crew.beta, crew.beta_rows, crew.fixed
        out.num_workers = crew.num_workers
    own, sharing = struct.crews[0], traits.sharing
    own.unit = 1.0
    if sharing is not None:
        own.share, own.alone = sharing.workers, sharing.alone
        own.warp, own.scattered = sharing.warp, sharing.scattered
        own.busy, own.again, own.merge, own.fold = sharing.busy, sharing.again, sharing.merge, sharing.fold
    for team, out in zip(traits.teams, struct.crews[1 : len(crews)], strict=True):
        out.section, out.first_class, out.rows = team.section, team.first_class, team.rows
        out.unit, out.overlap = team.unit, team.overlap
        out.again, out.tile, out.num_sizes = team.again, team.tile, len(team.sizes)
        for i, (rows, cost) in enumerate(team.sizes):
            out.size_rows[i], out.size_cost[i] = rows, cost
        out.stored, out.folded = team.stored, team.folded
    struct.num_crews = len(crews)
    struct.num_classes, struct.split_heads = len(traits.classes), traits.split_heads
    for klass, out in zip(traits.classes, struct.classes, strict=False):
        out.max_rows = -1 if klass.max_rows is None else klass.max_rows
        out.q_tile = klass.q_tile
        start = leaf = 0
        spans = [(c, s) for c, s in klass.ruler.steps if c > 0]
        for i, (count, size) in enumerate([*spans, (0, klass.ruler.tail)]):
            out.span_start[i], out.span_leaf[i], out.span_size[i] = start, leaf, size
            start, leaf = start + count * size, leaf + count
        out.num_spans = len(spans) + 1
    if len(_traits) > 256:
        _traits.clear()
    _traits[id(traits)] = (traits, struct)  # the reference keeps the id from being used again
    return struct


class Structs:
    """A thread's call record. What seldom changes between two plans is written only when it does."""

    def __init__(self) -> None:
        self.problem = ffi.new("attnrt_problem *")
        self.counts = ffi.new("attnrt_counts *")
        self.aligned = ffi.new("attnrt_aligned *")
        self.parts = ffi.new("attnrt_part[]", 8)
        self.first = self.parts[0]
        self.problem.part = self.parts
        self.facts: Any = None  # what the problem was last written for, by identity
        self.traits: Any = None
        self.rules: Any = None
        #: Parts whose structs alignment has written already; taken by the next plan.
        self.ready: Any = None

    def reserve(self, parts: int) -> None:
        """Room for so many parts, and the problem pointing at it."""
        if parts > len(self.parts):
            self.parts = ffi.new("attnrt_part[]", 2 * parts)
            self.first = self.parts[0]
        self.problem.part = self.parts

    def know(self, facts: Facts, traits: Traits) -> None:
        """Write what the planner asks of a spec and a machine."""
        p, reach = self.problem, facts.reach
        p.traits = _traits_struct(traits)
        p.num_kv_heads, p.group = facts.num_kv_heads, facts.group
        left, right = reach if reach is not None else (None, None)
        p.left, p.right = FAR if left is None else min(left, FAR), FAR if right is None else min(right, FAR)
        self.facts, self.traits = facts, traits  # kept alive, so that identity means equality


def structs() -> Structs:
    """This thread's."""
    try:
        return _local.structs
    except AttributeError:
        made = _local.structs = Structs()
        return made


def plan_native(
    parts: tuple[BlockSparse, ...],
    limits: tuple[Any, ...],
    facts: Facts,
    traits: Traits,
    scheduler: str,
    tree: str,
    num_rows: int,
    max_slots: int,
) -> tuple[WorkList, MergeList, int]:
    """As ``plan_python`` of a Problem of these values, for the schedulers in MODES.

    Raises
    ------
    LimitError
    PlanError
        The index points outside its own arrays.
    """
    s = structs()
    p = s.problem
    if facts is not s.facts or traits is not s.traits:
        s.know(facts, traits)
    rules = (scheduler, tree, max_slots)
    if rules != s.rules:
        p.mode, p.pairwise, p.max_slots = MODES[scheduler], tree == "pairwise", min(max_slots, _INT32_MAX)
        s.rules = rules
    ready, s.ready = s.ready, None
    masked = len(parts) == 1 and parts[0].mask is not None  # nobody has looked for what it leaves
    if ready is None or ready is not parts or facts.reach is None or masked:
        alive = _point_at(s, parts, limits, facts, num_rows)
    sharing = traits.sharing
    p.scattered = sharing is not None and scattered(parts, sharing.run)
    counts = s.counts
    status = lib.attnrt_plan(p, counts)
    if status:
        raise failure(status, counts.slots, max_slots)
    alive = None  # noqa: F841  (until here)
    return _take(counts, traits.all_workers)


def fixed_numbers(
    facts: Facts, traits: Traits, scheduler: str, max_slots: int
) -> tuple[tuple[int, ...], Any] | None:
    """What the planner's problem has from step to step (addresses of attnrt_plan and attnrt_take, of the traits; KV heads, group,
    mode, reach, slots) and what must stay alive for it; None: these steps need Python."""
    if (
        facts.reach is None
        or scheduler.__class__ is not str
        or scheduler not in MODES
        or not can_plan(traits)
    ):
        return None
    struct = _traits_struct(traits)
    calls = [int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in ("attnrt_plan", "attnrt_take")]
    left, right = (FAR if n is None else min(n, FAR) for n in facts.reach)
    numbers = (
        *(*calls, int(ffi.cast("uintptr_t", struct)), facts.num_kv_heads, facts.group),
        *(MODES[scheduler], left, right, min(max_slots, _INT32_MAX)),
    )
    return numbers, (traits, struct)


def failure(status: int, slots: int = 0, max_slots: int = 0) -> Exception:
    """What a status of the C++ calls means."""
    if status == OUTSIDE:
        rule = "must have qo_indptr, request and qo_index within its own queries, requests and rows"
        return PlanError("index", rule, None, "index.check() names the array.")
    hint = "These states do not come from cuts: more parts need more slots."
    return LimitError("max_partial_slots", slots, max_slots, hint)


def point_at_requests(p: Any, requests: Any, num_rows: int) -> Any:
    """Lengths of the requests into a problem; returns what must stay alive until the call is over."""
    qo_lens = requests.qo_lens
    p.num_requests, p.num_rows = len(qo_lens), num_rows
    p.bound_kv_lens = requests.bound_kv_lens is not None
    p.qo_lens = alive_qo = _buffer(_INTS, qo_lens)
    p.kv_lens = alive_kv = _buffer(_INTS, requests.kv_lens)
    return alive_qo, alive_kv


def _point_at(s: Structs, parts: Any, limits: Any, facts: Facts, num_rows: int) -> Any:
    ask = facts.composed if facts.reach is None else None
    alive = point_at_requests(s.problem, parts[0].requests, num_rows)
    s.problem.num_parts = len(parts)
    s.reserve(len(parts))
    if len(parts) == 1:
        masked = None if parts[0].mask is None else mask_range(parts[0])
        if masked is not None:
            ask = facts.composed
        return alive, _fill(s.first, parts[0], limits[0], ask, masked)
    return alive, [_fill(s.parts[i], part, limits[i], ask) for i, part in enumerate(parts)]


def point_at_queries(out: Any, part: Any) -> Any:
    """Point a struct at what the planner and alignment both read of a part; returns what must stay alive."""
    indptr, qo_index, kv_pos = part.qo_indptr, part.qo_index, part.kv_pos
    request = part.request
    out.num_rows, out.heads, out.num_queries = len(indptr) - 1, part.heads, len(request)
    out.qo_indptr = a = _buffer(_INTS, indptr)
    out.qo_index = b = _NULL if qo_index is None else _buffer(_INTS, qo_index)
    out.request = c = _buffer(_INTS, request)
    out.qo_pos = d = _buffer(_INTS, part.qo_pos)
    out.kv_pos = e = _NULL if kv_pos is None else _buffer(_INTS, kv_pos)
    out.kv_begin = f = _buffer(_INTS, part.kv_begin)
    out.kv_end = g = _buffer(_INTS, part.kv_end)
    out.kv_offset = h = _buffer(_INTS, part.kv_offset)
    # The planner looks at the lower ends alone to see whether there are any.
    out.limit_lo = out.visible_lo = _NULL
    return a, b, c, d, e, f, g, h


def _fill(out: Any, part: Any, limits: Any, composed: Any, masked: Any = None) -> Any:
    """Point a struct at a part's arrays; returns what must stay alive until the call is over. ``masked``: mask_range."""
    alive = point_at_queries(out, part)
    if limits is not None:
        out.limit_lo, out.limit_hi = ends = _buffer(_LONGS, limits[0]), _buffer(_LONGS, limits[1])
        alive = (alive, ends)
    if composed is not None:
        pos = part.qo_pos.astype(np.int64)
        low = pos - part.requests.kv_lens[part.request] if part.requests.bound_kv_lens is not None else pos
        lo, hi = visible_range(composed, low, pos)
        if masked is not None:
            shift = np.repeat(part.kv_pos.astype(np.int64) - part.kv_offset, np.diff(part.qo_indptr))
            lo, hi = np.maximum(lo, masked[0] + shift), np.minimum(hi, masked[1] + shift)
        out.visible_lo, out.visible_hi = ends = _buffer(_LONGS, lo), _buffer(_LONGS, hi)
        alive = (alive, ends)
    return alive


def _take(counts: Any, num_workers: int) -> tuple[WorkList, MergeList, int]:
    items, merges, entries = counts.items, counts.merges, counts.entries
    buffer = _empty(items * _NW + num_workers + 1 + merges * _NM + 2 * entries, _INT32)
    lib.attnrt_take(_buffer(_INTS, buffer))
    return *lists_of(buffer, items, merges, entries, num_workers), counts.slots


def lists_of(
    buffer: Any, items: int, merges: int, entries: int, num_workers: int
) -> tuple[WorkList, MergeList]:
    """Both lists over what attnrt_take wrote; ``buffer`` is an int32 array or bytes of one."""
    if buffer.__class__ is not _ndarray:
        buffer = np.frombuffer(buffer, _INT32)
    a = items * _NW
    b = a + num_workers + 1
    c = b + merges * _NM
    d = c + entries
    work = _OpenWork()
    work.items, work.worker_indptr = _ndarray((items, _NW), _INT32, buffer), buffer[a:b]
    work.__class__ = WorkList
    if not merges:
        return work, _NO_MERGES
    merge = _OpenMerge()
    merge.rows, merge.slots = _ndarray((merges, _NM), _INT32, buffer, 4 * b), buffer[c:d]
    merge.leaves = buffer[d:]
    merge.__class__ = MergeList
    return work, merge
