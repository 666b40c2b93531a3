# SPDX-License-Identifier: Apache-2.0
"""NumPy evaluation of expressions: the reference for what the printed text must do.

Every operation is elementwise over broadcast arrays. ``dtype`` float64 computes floats in double precision
(the oracle), float32 in single. Integer rules are those of expr.py: wrap, divisor 0 gives 0, shifts modulo
the width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.variants.bind import BoundParams
from attnrt.variants.compose import Composed
from attnrt.variants.expr import BOOL, FLOAT, Node, topological
from attnrt.variants.variant import PairMap

__all__ = ["EVALUATE", "NumpyVariant", "evaluate"]

Array = np.ndarray
I32 = np.iinfo(np.int32)


def _floordiv(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.floor(a / b)
    zero = b == 0
    quotient = np.floor_divide(a, np.where(zero, b.dtype.type(1), b))
    return np.where(zero, a.dtype.type(0), quotient)


def _mod(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a - np.floor(a / b) * b
    zero = b == 0
    return np.where(zero, a.dtype.type(0), np.remainder(a, np.where(zero, b.dtype.type(1), b)))


def _saturate(value: Array) -> Array:
    return np.clip(value, I32.min, I32.max).astype(np.int32)


def _shift(function: Callable[..., Any]) -> Callable[..., Array]:
    """The count is taken modulo the width."""
    return lambda a, n: np.asarray(function(a, n & a.dtype.type(a.dtype.itemsize * 8 - 1)))


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _turns(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """sin or cos of pi * x with x reduced exactly first."""
    return lambda x: f((x - 2 * np.round(x / 2)) * x.dtype.type(np.pi))


EVALUATE: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "cos": np.cos,
    "cospi": _turns(np.cos),
    "div": np.divide,
    "eq": np.equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "floor": np.floor,
    "floordiv": _floordiv,
    "le": np.less_equal,
    "log": np.log,
    "log2": np.log2,
    "logistic": _logistic,
    "lt": np.less,
    "max": lambda a, b: np.asarray(np.where(a > b, a, b)),
    "min": lambda a, b: np.asarray(np.where(a < b, a, b)),
    "mod": _mod,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sat_add": lambda a, b: _saturate(np.add(a, b, dtype=np.int64)),
    "sat_sub": lambda a, b: _saturate(np.subtract(a, b, dtype=np.int64)),
    "shl": _shift(np.left_shift),
    "shr": _shift(np.right_shift),
    "sin": np.sin,
    "sinpi": _turns(np.sin),
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "tanh": np.tanh,
    "where": np.where,
    "xor": np.bitwise_xor,
}


def _cast(value: Array, source: str, target: str, float_dtype: np.dtype) -> Array:
    if target == FLOAT:
        return value.astype(float_dtype)
    if target == BOOL:
        return value.astype(bool)
    if source == FLOAT:  # truncate, saturate, NaN to 0
        wide = np.nan_to_num(np.trunc(value.astype(np.float64)), nan=0.0, posinf=I32.max, neginf=I32.min)
        return np.clip(wide, I32.min, I32.max).astype(target)
    return value.astype(target)


class _Run:
    """One evaluation: where leaves come from, and the values so far."""

    def __init__(
        self, fields: Mapping[str, Any], params: Callable[[Node, list[Array]], Array], dtype: np.dtype
    ) -> None:
        self.fields, self.params, self.dtype = fields, params, dtype

    def leaf(self, node: Node) -> Array:
        if node.attr not in self.fields:
            raise ArgumentError(f"ctx.{node.attr}", "is needed by the variant but was not given")
        return self.typed(self.fields[node.attr], node.dtype)

    def typed(self, value: Any, dtype: str) -> Array:
        return np.asarray(value).astype(self.dtype if dtype == FLOAT else dtype)

    def node(self, node: Node, args: list[Array]) -> Array:
        if node.op == "const":
            return self.typed(node.attr, node.dtype)
        if node.op in ("ctx", "input"):
            return self.leaf(node)
        if node.op in ("param", "index"):
            return self.typed(self.params(node, args), node.dtype)
        if node.op == "cast":
            return _cast(args[0], node.args[0].dtype, node.dtype, self.dtype)
        if node.op in ("text", "pair", "first", "second"):
            raise UnsupportedError(
                "a variant in C++ text", "has no NumPy form", hint="use the cpu or cuda backend"
            )
        return np.asarray(EVALUATE[node.op](*args))


def evaluate(
    root: Node,
    fields: Mapping[str, Any],
    params: Callable[[Node, list[Array]], Array],
    dtype: Any = np.float64,
) -> Array:
    """Value of an expression.

    Parameters
    ----------
    root : Node
    fields : mapping
        Context fields and hook operands by name, broadcast against each other.
    params : callable
        (node, index arrays) -> value of a parameter.
    dtype : float64 or float32
        Precision of floats.
    """
    run = _Run(fields, params, np.dtype(dtype))
    values: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for node in topological((root,)):
            values[id(node)] = run.node(node, [values[id(a)] for a in node.args])
    return values[id(root)]


class NumpyVariant:
    """A compiled variant with its parameter values, callable on arrays.

    ``ctx`` below is a mapping from context field to integer array; all are broadcast together. Only fields
    that the variant reads need to be there.
    """

    def __init__(self, variant: Composed, bound: BoundParams, dtype: Any = np.float64) -> None:
        if variant.texts:
            raise UnsupportedError(
                "a variant in C++ text",
                "has no NumPy form",
                [t.label for t in variant.texts],
                "use another backend",
            )
        for name, value in bound.host.items():
            if value is None:
                raise ArgumentError(name, "must be in host memory for NumPy evaluation")
        self.variant, self.bound, self.dtype = variant, bound, np.dtype(dtype)

    def _run(self, root: Node, ctx: Mapping[str, Any], **operands: Any) -> Array:
        fields = {**ctx, **operands}

        def param(node: Node, indices: list[Array]) -> Array:
            value = self.bound.host[node.attr]
            assert value is not None
            if node.op == "index":  # out of range reads the nearest element, as the kernels do
                clipped = tuple(np.clip(i, 0, n - 1) for i, n in zip(indices, value.shape, strict=True))
                return value[clipped]
            if value.size == 1:
                return value.reshape(())
            heads = self.variant.param(node.attr).heads
            return value[np.asarray(fields["qo_head" if heads == "qo" else "kv_head"])]

        return evaluate(root, fields, param, self.dtype)

    def logits(self, ctx: Mapping[str, Any], score: Any) -> Array:
        """Final logits (softmax-free: weights) from q.k * sm_scale."""
        if self.variant.logits is None:
            return np.asarray(score, dtype=self.dtype)
        return self._run(self.variant.logits, ctx, score=score)

    def mask(self, ctx: Mapping[str, Any]) -> Array:
        """Whether keys are seen; the index's own mask bits are not in it."""
        seen: Array = np.asarray(True)
        low, high, rest = self.variant.low, self.variant.high, self.variant.mask
        if low is not None:
            seen = seen & (np.asarray(ctx["kv_pos"]) >= self._run(low, ctx))
        if high is not None:
            seen = seen & (np.asarray(ctx["kv_pos"]) <= self._run(high, ctx))
        if rest is not None:
            seen = seen & self._run(rest, ctx)
        return seen

    def query(self, ctx: Mapping[str, Any], x: Any) -> Array:
        """Rows of q, [..., head_dim], mapped; ctx broadcasts against the leading axes."""
        return self._pairs(self.variant.query, ctx, x)

    def key(self, ctx: Mapping[str, Any], x: Any) -> Array:
        """Rows of k, [..., head_dim], mapped."""
        return self._pairs(self.variant.key_map, ctx, x)

    def value(self, ctx: Mapping[str, Any], x: Any) -> Array:
        """Rows of v, [..., head_dim_vo], mapped."""
        return self._pairs(self.variant.value, ctx, x)

    def output(self, ctx: Mapping[str, Any], o: Any) -> Array:
        """Rows of the normalised output, [..., head_dim_vo], mapped."""
        o = np.asarray(o, dtype=self.dtype)
        if self.variant.output is None:
            return o
        new = self._run(self.variant.output, _with_axis(ctx), o=o, d=np.arange(o.shape[-1]))
        return np.broadcast_to(new, o.shape)

    def sink(self, ctx: Mapping[str, Any]) -> Array | None:
        """Logit of the learned sink per row, natural units, or None."""
        return None if self.variant.sink is None else self._run(self.variant.sink, ctx)

    def _pairs(self, pair: PairMap | None, ctx: Mapping[str, Any], x: Any) -> Array:
        x = np.asarray(x, dtype=self.dtype)
        if pair is None:
            return x
        dim = x.shape[-1] if pair.dim is None else pair.dim
        if dim > x.shape[-1]:
            raise ArgumentError("dim of a pair hook", f"must be at most the head dim {x.shape[-1]}", dim)
        ctx = _with_axis(ctx)
        shape = np.broadcast_shapes(x.shape[:-1], *(np.shape(c)[:-1] for c in ctx.values()))
        new = np.broadcast_to(x, (*shape, x.shape[-1])).copy()
        if pair.pairing == "single":
            first, second = slice(0, dim), slice(0, dim)
        elif pair.pairing == "half":
            first, second = slice(0, dim // 2), slice(dim // 2, dim)
        else:
            first, second = slice(0, dim, 2), slice(1, dim, 2)
        operands = {"x0": x[..., first], "x1": x[..., second]}
        operands["d"] = np.arange(operands["x0"].shape[-1])
        new[..., first] = self._run(pair.y0, ctx, **operands)
        if pair.y1 is not None:
            new[..., second] = self._run(pair.y1, ctx, **operands)
        return new


def _with_axis(ctx: Mapping[str, Any]) -> dict[str, Array]:
    return {name: np.asarray(value)[..., None] for name, value in ctx.items()}
