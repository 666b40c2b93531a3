# SPDX-License-Identifier: Apache-2.0
"""Join variants, in order, into the one value that planners, evaluators and printers use.

The logits hooks are substituted into each other, so that one expression from ``score`` to the final logit is
left; masks are split into conjuncts, and those that compare ``kv_pos`` with a value of the row become the two
ends of an interval. Every reader (NumPy, C++, CUDA, the planner) gets the same interval, so none can disagree
at an end.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.variants.bind import BoundParams, Place, bind_params, host_value, read_value
from attnrt.variants.expr import KEY_FIELDS, Node, make, substitute, topological
from attnrt.variants.intervals import join_masks
from attnrt.variants.variant import (
    Bound,
    CppText,
    PairMap,
    Param,
    Variant,
    expression_text,
    input_node,
    same_callables,
)

__all__ = ["Composed", "compose", "rename_params"]

HOOKS = ("query", "key", "value")

#: Fields of ctx that a hook has no value of: q is mapped before a key is at hand, a row of k or v once for all queries of a tile.
_UNKNOWN = {
    "query": KEY_FIELDS,
    "key": frozenset({"qo_pos", "qo_row"}),
    "value": frozenset({"qo_pos", "qo_row"}),
}
#: Fields that are one for all queries of a tile only where these belong to one request.
_OF_REQUEST = frozenset({"request", "qo_len", "kv_len"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Composed:
    """Several variants as one. Equal ``key`` means equal machine code; equality also looks at the defaults.

    Attributes
    ----------
    names : tuple of str
        Names of the variants, in order.
    params : tuple of Param
        The parameter table; a parameter's slot is its place here.
    logits : Node or None
        Final logit (or softmax-free weight) from the input ``score`` = q.k * sm_scale.
    low, high : Node or None
        Row values: only keys low <= kv_pos <= high are seen. None: no limit on that side.
    mask : Node or None
        What the interval does not say, a bool; a key is seen if it is inside the interval and this holds.
    query, key_map, value : PairMap or None
        Maps on rows of q, k and v.
    output : Node or None
        From the inputs o (normalised output, after sinks) and d.
    sink : Node or None
        Logit of a key without value, one per query head; enters once, at finish, and is part of lse.
    bounds : tuple of (left, right)
        What ``visible_range`` answers from.
    use_softmax : bool
        False: weights are the logits themselves, masked weights are 0, partial states add, there is no lse.
    reads_index_mask : bool
        The mask bits of the index are ANDed.
    texts : tuple of CppText
        C++ text hooks; a variant with any has no NumPy form.
    key : str
        Everything that may change machine code: expressions, flags, names, ranks and dtypes of parameters.
    defaults : str
        Text of what equality looks at besides ``key``: the parameters' defaults and rules, and the bounds.
    """

    names: tuple[str, ...]
    params: tuple[Param, ...]
    logits: Node | None
    low: Node | None
    high: Node | None
    mask: Node | None
    query: PairMap | None
    key_map: PairMap | None
    value: PairMap | None
    output: Node | None
    sink: Node | None
    bounds: tuple[tuple[Bound, Bound], ...]
    use_softmax: bool
    reads_index_mask: bool
    texts: tuple[CppText, ...]
    key: str
    defaults: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Composed):
            return False
        if self is other:
            return True
        same = self.key == other.key and self.defaults == other.defaults
        return same and same_callables(self.params, other.params)

    def __hash__(self) -> int:
        return hash((self.key, self.defaults))

    def __repr__(self) -> str:
        return f"Composed({', '.join(self.names)}; {self.digest})"

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of ``key``."""
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]

    @property
    def has_mask(self) -> bool:
        return self.low is not None or self.high is not None or self.mask is not None

    @property
    def reads_key_positions(self) -> bool:
        """Whether a result may depend on where a key stands, its mask bits aside. C++ text is not looked into."""
        pairs = [pair for pair in (self.query, self.key_map, self.value) if pair is not None]
        roots = (self.logits, *(y for pair in pairs for y in (pair.y0, pair.y1)))
        nodes = topological(tuple(root for root in roots if root is not None))
        asks = any(node.op == "ctx" and node.attr == "kv_pos" for node in nodes)
        return self.has_mask or bool(self.texts) or asks

    @property
    def keys_differ_by_request(self) -> bool:
        """Whether a row of k or v may be another one for another request that reads it."""
        return any(asked(pair, self.texts) & _OF_REQUEST for pair in (self.key_map, self.value))

    @property
    def mask_is_interval(self) -> bool:
        """The interval says everything (also true without any mask)."""
        return self.mask is None

    @property
    def range_params(self) -> tuple[str, ...]:
        """Parameters that decide what the planner skips."""
        return tuple(sorted({s for pair in self.bounds for s in pair if isinstance(s, str)}))

    def param(self, name: str) -> Param:
        """The declaration of one parameter."""
        for param in self.params:
            if param.name == name:
                return param
        raise KeyError(name)

    def visible_range(
        self, qo_pos_min: Any, qo_pos_max: Any, values: Mapping[str, Any] | None = None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Key positions that queries at positions qo_pos_min..qo_pos_max can see, at most.

        Parameters
        ----------
        qo_pos_min, qo_pos_max : int or integer array
            Lowest and highest logical position of a group of queries.
        values : mapping, optional
            Parameter values (host numbers or arrays, the widest head counts); defaults fill what is missing.

        Returns
        -------
        low, high : int64 arrays or None
            Inclusive; None: no limit on that side.
        """
        left, right = self.reach(values)
        low = None if left is None else np.asarray(qo_pos_min, dtype=np.int64) - left
        high = None if right is None else np.asarray(qo_pos_max, dtype=np.int64) + right
        return low, high

    def reach(self, values: Mapping[str, Any] | None = None) -> tuple[int | None, int | None]:
        """How far behind and ahead of a query a key can be seen; None: any distance."""
        sides: list[int | None] = []
        for side in (0, 1):
            known = [self._distance(pair[side], values or {}) for pair in self.bounds]
            finite = [d for d in known if d is not None]
            sides.append(min(finite) if finite else None)
        return sides[0], sides[1]

    def _distance(self, bound: Bound, values: Mapping[str, Any]) -> int | None:
        if not isinstance(bound, str):
            return bound
        param = self.param(bound)
        value = values.get(bound)
        value = read_value(param.default if value is None else value)
        if value is None or hasattr(value, "ptr"):
            return None  # not known on the host: nothing may be skipped
        array = host_value(param, value)
        return None if (array < 0).any() else int(array.max())

    def with_index_mask(self) -> Composed:
        """The same with ``custom_mask()`` at its end: for an index that owns mask bits."""
        key = self.key.replace("|reads_index_mask=False", "|reads_index_mask=True")
        return dataclasses.replace(self, reads_index_mask=True, key=key)

    def widened_by(
        self, values: Mapping[str, Any], planned: Mapping[str, Any] | None = None
    ) -> tuple[str, ...]:
        """Names of given values that let a query see keys that a plan made with ``planned`` skipped."""
        if not values or not any(name in values for name in self.range_params):
            return ()
        merged = {**(planned or {}), **values}
        wider = False
        for new, old in zip(self.reach(merged), self.reach(planned), strict=True):
            wider |= old is not None and (new is None or new > old)
        return tuple(n for n in self.range_params if n in values) if wider else ()

    def bind(
        self, values: Mapping[str, Any], *, num_qo_heads: int, num_kv_heads: int, place: Place | None = None
    ) -> BoundParams:
        """Check parameter values and pack them for a launch; see ``bind.bind_params``."""
        return bind_params(
            self.params, values, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, place=place
        )

    def numpy(self, bound: BoundParams, dtype: Any = np.float64) -> Any:
        """NumPy form of the hooks with bound values; see ``evaluate.NumpyVariant``."""
        from attnrt.variants.evaluate import NumpyVariant

        return NumpyVariant(self, bound, dtype)

    def cpp_source(self, name: str = "Variant") -> str:
        """C++17 / CUDA text of ``struct name`` in namespace attnrt; the header describes its members."""
        from attnrt.variants.print_cpp import print_variant

        return print_variant(self, name)


def compose(variants: Variant | tuple[Variant, ...] | list[Variant] | Composed | None) -> Composed:
    """Join variants in order. None or an empty tuple is full attention; a composed value stays as it is.

    Raises
    ------
    ArgumentError
        Doubled parameter names, two softmax-free variants, a logits hook after a softmax-free one, sinks
        without softmax, two sinks, pair maps whose dim or pairing differ.
    """
    if isinstance(variants, Composed):
        return variants
    if variants is None:
        return _compose(())
    if isinstance(variants, Variant):
        return _compose((variants,))
    items = variants if isinstance(variants, (tuple, list)) else (variants,)
    for item in items:
        if not isinstance(item, Variant):
            hint = "at.variants.causal(), or a tuple of variants"
            if callable(item):
                hint = "Call a function that makes one (causal()); decorate a hook of yours (@at.variants.logits)"
            raise ArgumentError("variant", "must be a variant or a tuple of them", repr(item)[:80], hint)
    return _compose(tuple(items))


@functools.lru_cache(maxsize=256)
def _compose(variants: tuple[Variant, ...]) -> Composed:
    _check_combination(variants)
    params = _join_params(variants)
    low, high, mask = join_masks(variants)
    fields: dict[str, Any] = {
        "logits": _chain(
            [v for v in variants if v.scales] + [v for v in variants if not v.scales], "logits", "score"
        ),
        "low": low,
        "high": high,
        "mask": mask,
        "query": _join_pairs(variants, "query"),
        "key_map": _join_pairs(variants, "key"),
        "value": _join_pairs(variants, "value"),
        "output": _chain(
            [v for v in variants if v.scales] + [v for v in variants if not v.scales], "output", "o"
        ),
        "sink": next((v.sink for v in variants if v.sink is not None), None),
        "use_softmax": all(v.use_softmax for v in variants),
        "reads_index_mask": any(v.reads_index_mask for v in variants),
        "texts": tuple(t for v in variants for t in v.texts),
    }
    bounds = tuple(dict.fromkeys(v.bounds for v in variants if v.bounds != (None, None)))
    key = _key(fields, params)
    defaults = "|".join([repr(bounds), *(f"{p.default_text}:{p.rule}:{p.shape}" for p in params)])
    names = tuple(v.name for v in variants)
    return Composed(names=names, params=params, bounds=bounds, key=key, defaults=defaults, **fields)


def _key(fields: dict[str, Any], params: tuple[Param, ...]) -> str:
    parts = []
    for name, value in fields.items():
        if isinstance(value, Node):
            parts.append(f"{name}={expression_text((value,))}")
        elif isinstance(value, PairMap):
            roots = (value.y0,) if value.y1 is None else (value.y0, value.y1)
            parts.append(f"{name}={value.dim}:{value.pairing}:{expression_text(roots)}")
        elif value is not None and value != ():
            parts.append(f"{name}={value!r}")
    return "|".join([*parts, "params=" + ";".join(p.signature for p in params)])


def asked(pair: PairMap | None, texts: tuple[CppText, ...]) -> frozenset[str]:
    """Fields of ctx that a map on rows of q, k or v reads."""
    if pair is None:
        return frozenset()
    nodes = topological((pair.y0,) if pair.y1 is None else (pair.y0, pair.y1))
    bodies = {text.label: text.body for text in texts}
    found = {node.attr for node in nodes if node.op == "ctx"}
    for node in nodes:
        if node.op == "pair":  # of a C++ text
            found.update(re.findall(r"\bctx\s*\.\s*(\w+)", bodies[node.attr]))
    return frozenset(found)


def _check_fields(variants: tuple[Variant, ...]) -> None:
    for variant in variants:
        for hook, unknown in _UNKNOWN.items():
            bad = asked(getattr(variant, hook), variant.texts) & unknown
            if bad:
                raise ArgumentError(
                    f"{variant.name}: {hook} hook",
                    "must not read fields of the other side",
                    ", ".join(f"ctx.{name}" for name in sorted(bad)),
                    "A row of q is mapped once for all keys, a row of k or v once for all queries",
                )


def _check_combination(variants: tuple[Variant, ...]) -> None:
    _check_fields(variants)
    labels = [t.label for v in variants for t in v.texts]
    for label in labels:
        if labels.count(label) > 1:
            raise ArgumentError(
                f"C++ text {label}", "must be in a composition once", hint="give the other a name"
            )
    free = [v for v in variants if not v.use_softmax]
    if len(free) > 1:
        raise ArgumentError("variant", "can hold one softmax-free variant", [v.name for v in free])
    if not free:
        sinks = [v.name for v in variants if v.sink is not None]
        if len(sinks) > 1:
            raise ArgumentError("variant", "can hold one learned sink", sinks)
        return
    for variant in variants:
        if variant.sink is not None:
            hint = "a sink is one more term of the softmax's sum"
            raise ArgumentError(
                "variant", f"cannot hold {variant.name} with {free[0].name}", "no softmax", hint
            )
    after = variants[variants.index(free[0]) + 1 :]
    late = [v.name for v in after if v.logits is not None and not v.scales]
    if late:
        raise ArgumentError(
            "variant",
            f"cannot hold a logits hook after {free[0].name}, which turns logits into weights",
            late,
            f"put {late[0]} before {free[0].name}",
        )


def _join_params(variants: tuple[Variant, ...]) -> tuple[Param, ...]:
    owner: dict[str, str] = {}
    for variant in variants:
        for param in variant.params:
            if param.name in owner:
                raise ArgumentError(
                    f"parameter {param.name}",
                    "must belong to one variant",
                    f"{owner[param.name]} and {variant.name}",
                    f"rename one: variant.rename({param.name}='...')",
                )
            if param.name in RESERVED:
                raise ArgumentError(
                    f"parameter {param.name} of {variant.name}", "has a name that run() takes itself"
                )
            owner[param.name] = variant.name
    return tuple(p for v in variants for p in v.params)


#: Arguments of run() and append() that a parameter cannot shadow.
RESERVED = frozenset(
    {"q", "k", "v", "kv", "plan", "out", "lse", "return_lse", "sm_scale", "stream", "slots", "rope", "self"}
)


def _chain(variants: list[Variant], hook: str, name: str) -> Node | None:
    """Hooks substituted into each other in order; None if there is none."""
    start = input_node(name)
    current = start
    for variant in variants:
        step = getattr(variant, hook)
        if step is not None:
            current = substitute(step, {start: current})
    return None if current is start else current


def _join_pairs(variants: tuple[Variant, ...], hook: str) -> PairMap | None:
    maps = [(v.name, getattr(v, hook)) for v in variants if getattr(v, hook) is not None]
    if not maps:
        return None
    first_name, first = maps[0]
    for name, pair in maps[1:]:
        if (pair.dim, pair.pairing) != (first.dim, first.pairing):
            raise ArgumentError(
                f"{hook} hooks of {first_name} and {name}",
                "must have one dim and pairing to be composed",
                f"({first.dim}, {first.pairing}) and ({pair.dim}, {pair.pairing})",
            )
        replace = {input_node("x0"): first.y0}
        if first.y1 is not None:
            replace[input_node("x1")] = first.y1
        y1 = None if pair.y1 is None else substitute(pair.y1, replace)
        first = PairMap(dim=first.dim, pairing=first.pairing, y0=substitute(pair.y0, replace), y1=y1)
    return first


def rename_params(variant: Variant, names: Mapping[str, str]) -> Variant:
    """``variant`` with parameters renamed in its table, expressions and bounds."""

    def renamed(node: Node | None) -> Node | None:
        if node is None:
            return None
        done: dict[int, Node] = {}
        for item in topological((node,)):
            attr = names.get(item.attr, item.attr) if item.op in ("param", "index") else item.attr
            done[id(item)] = make(item.op, item.dtype, tuple(done[id(a)] for a in item.args), attr)
        return done[id(node)]

    changes: dict[str, Any] = {h: renamed(getattr(variant, h)) for h in ("logits", "mask", "output", "sink")}
    for hook in HOOKS:
        pair = getattr(variant, hook)
        if pair is not None:
            changes[hook] = dataclasses.replace(pair, y0=renamed(pair.y0), y1=renamed(pair.y1))
    changes["params"] = tuple(dataclasses.replace(p, name=names.get(p.name, p.name)) for p in variant.params)
    changes["bounds"] = tuple(names.get(b, b) if isinstance(b, str) else b for b in variant.bounds)
    return dataclasses.replace(variant, **changes)
