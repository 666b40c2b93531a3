# SPDX-License-Identifier: Apache-2.0
"""The value that one attention variant is: hooks as expressions, parameters with defaults, and flags.

A variant says *what* changes in attention, once. Composition (compose.py) joins several in order; evaluation
and printing then work on the result. Values are frozen and hashable: equal text and equal defaults make equal
variants.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.variants.expr import FLOAT, INT, LONG, Node, make, topological

__all__ = [
    "Bound",
    "CppText",
    "PairMap",
    "Param",
    "Variant",
    "check_bounds",
    "expression_text",
    "input_node",
    "same_callables",
]

#: One side of a key range: None is unbounded, a number, or the name of an int32 parameter whose -1 means
#: unbounded.
Bound = int | str | None
RULES = ("", "positive", "window")
PAIRINGS = ("half", "interleaved", "single")


def input_node(name: str) -> Node:
    """A hook's operand: score, x0, x1, o (float32) or d (int32, index of the element or pair)."""
    return make("input", INT if name == "d" else FLOAT, attr=name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Param:
    """A run-time parameter: its name, rank and dtype are compiled in, its value never is.

    Attributes
    ----------
    name : str
        Name of the argument of ``run``.
    dtype : str
        "float32", "int32" or "int64".
    rank : int
        0: a number, an array [1] or one number per head; r >= 1: an array indexed by r expressions.
    default : number, numpy.ndarray, callable or None
        Value if ``run`` gives none. A callable gets the number of heads and returns an array. None: must be
        given.
    heads : str
        "qo" or "kv": which heads an array of rank 0 ("one number per head") follows.
    rule : str
        "" (finite), "positive" (> 0) or "window" (>= -1, where -1 means unbounded).
    shape : tuple of int or None
        Required shape of an array of rank >= 1, if fixed.
    """

    name: str
    dtype: str = FLOAT
    rank: int = 0
    default: Any = None
    heads: str = "qo"
    rule: str = ""
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ArgumentError("parameter name", "must be an identifier", repr(self.name))
        if self.dtype not in (FLOAT, INT, LONG):
            raise ArgumentError(f"parameter {self.name}", "must be float32, int32 or int64", self.dtype)
        assert self.rule in RULES and self.heads in ("qo", "kv") and 0 <= self.rank <= 4

    @property
    def signature(self) -> str:
        """What of this parameter is compiled in."""
        return f"{self.name}:{self.dtype}:{self.rank}:{self.heads}"

    @property
    def default_text(self) -> str:
        """Identity of the default, for comparing variants; an array counts by the hash of its bytes. Of a callable this is its
        name alone, which closures share: whoever compares asks ``same_callables``, too."""
        if isinstance(self.default, np.ndarray):
            digest = hashlib.sha256(self.default.tobytes()).hexdigest()
            return f"{self.default.dtype}{self.default.shape}{digest}"
        if callable(self.default):
            name = getattr(self.default, "__qualname__", type(self.default).__qualname__)
            return f"{self.default.__module__}.{name}"
        return repr(self.default)


def same_callables(a: tuple[Param, ...], b: tuple[Param, ...]) -> bool:
    """Whether the defaults that are callables are the same ones: two closures of one name may give other arrays."""
    return [p.default for p in a if callable(p.default)] == [p.default for p in b if callable(p.default)]


def check_bounds(label: str, bounds: object, params: tuple[Param, ...]) -> None:
    """Refuse bounds that are not two of None, a number >= 0, or the name of an int32 number parameter."""
    if not isinstance(bounds, tuple) or len(bounds) != 2:
        raise ArgumentError(f"{label}: bounds", "must be a pair (left, right)", bounds)
    names = {p.name for p in params if p.dtype == INT and p.rank == 0}
    for side in bounds:
        number = isinstance(side, int) and not isinstance(side, bool) and 0 <= side < 2**31
        if not (side is None or number or (isinstance(side, str) and side in names)):
            rule = "must hold None, numbers >= 0 or names of int32 number parameters"
            raise ArgumentError(f"{label}: bounds", rule, repr(side))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairMap:
    """A map over the first ``dim`` numbers of a row of q, k or v.

    ``pairing`` "half": pair d is (d, d + dim/2); "interleaved": (2d, 2d + 1); "single": element d alone, y1
    unused. ``y0``, ``y1`` are expressions in the inputs x0, x1, d and ctx. ``dim`` None: the whole head
    (single only).
    """

    dim: int | None
    pairing: str
    y0: Node
    y1: Node | None = None

    def __post_init__(self) -> None:
        if self.pairing not in PAIRINGS:
            raise ArgumentError("pairing", f"must be one of {', '.join(PAIRINGS)}", repr(self.pairing))
        if self.dim is None and self.pairing == "single":
            return
        if not isinstance(self.dim, int) or self.dim <= 0 or (self.pairing != "single" and self.dim % 2):
            raise ArgumentError("dim", "must be a positive number, even where dims are paired", self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class CppText:
    """C++ text of one hook. ``label`` names it in compiler messages; ``params`` are those it may read."""

    label: str
    hook: str
    body: str
    params: tuple[str, ...]

    @property
    def function(self) -> str:
        return "text_" + self.label.replace(".", "_")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """One attention variant. Make one with a builtin, a decorator (trace.py) or ``cpp`` (cpp_text.py).

    Calling it with parameter names returns a copy with other defaults: ``my_bias(gain=2.0)``.
    """

    name: str
    params: tuple[Param, ...] = ()
    logits: Node | None = None
    mask: Node | None = None
    query: PairMap | None = None
    key: PairMap | None = None
    value: PairMap | None = None
    output: Node | None = None
    sink: Node | None = None
    bounds: tuple[Bound, Bound] = (None, None)
    use_softmax: bool = True
    scales: bool = False  # its logits factor belongs to q.k itself: applied before every other variant
    reads_index_mask: bool = False
    texts: tuple[CppText, ...] = ()

    def __call__(self, **defaults: Any) -> Variant:
        """A copy whose parameters have other defaults."""
        known = {p.name: p for p in self.params}
        for name in defaults:
            if name not in known:
                raise ArgumentError(
                    f"{self.name}: parameter {name}",
                    "does not exist",
                    hint=f"known: {', '.join(known) or 'none'}",
                )
        from attnrt.variants.bind import check_default

        params = tuple(
            check_default(dataclasses.replace(p, default=defaults[p.name])) if p.name in defaults else p
            for p in self.params
        )
        return dataclasses.replace(self, params=params)

    def rename(self, **names: str) -> Variant:
        """A copy with other parameter names (``v.rename(gain="gain_b")``), to use one variant twice."""
        known = {p.name for p in self.params}
        for name in names:
            if name not in known:
                raise ArgumentError(
                    f"{self.name}: parameter {name}", "does not exist", hint=f"known: {known}"
                )
        if self.texts:
            raise ArgumentError(f"{self.name}", "is C++ text, whose parameters cannot be renamed")
        from attnrt.variants.compose import rename_params

        return rename_params(self, names)

    @property
    def identity(self) -> str:
        """Text that two variants share exactly when they mean the same, defaults included."""
        roots = self.roots()
        pairs = [f"{h}:{m.dim}:{m.pairing}" for h in ("query", "key", "value") if (m := getattr(self, h))]
        parts = [
            self.name,
            expression_text(tuple(n for _, n in roots)),
            ",".join(label for label, _ in roots),
            ";".join(pairs),
            repr((self.bounds, self.use_softmax, self.scales, self.reads_index_mask, self.texts)),
            ";".join(f"{p.signature}={p.default_text}:{p.rule}:{p.shape}" for p in self.params),
        ]
        return "|".join(parts)

    def roots(self) -> list[tuple[str, Node]]:
        """Labelled expressions of all hooks."""
        found = [(h, getattr(self, h)) for h in ("logits", "mask", "output", "sink")]
        for h in ("query", "key", "value"):
            if pair := getattr(self, h):
                found += [(h + "0", pair.y0), (h + "1", pair.y1)]
        return [(label, node) for label, node in found if node is not None]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Variant):
            return False
        same = self is other or self.identity == other.identity
        return same and same_callables(self.params, other.params)

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        inner = ", ".join(f"{p.name}={_brief(p.default)}" for p in self.params)
        return f"{self.name}({inner})"


def _brief(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array{list(value.shape)}"
    return getattr(value, "__name__", None) or repr(value)


def expression_text(roots: tuple[Node, ...]) -> str:
    """The expressions as one line of numbered operations: stable across processes, so fit for a cache key."""
    order = topological(roots)
    number = {id(n): i for i, n in enumerate(order)}
    lines = []
    for node in order:
        args = ",".join(str(number[id(a)]) for a in node.args)
        attr = "" if node.attr is None else repr(node.attr)
        lines.append(f"{node.op}.{node.dtype}({args}){attr}")
    return ";".join(lines) + "->" + ",".join(str(number[id(r)]) for r in roots)
