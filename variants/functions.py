# SPDX-License-Identifier: Apache-2.0
"""Functions that a hook may call on traced values: ``at.variants.where``, ``exp``, ``tanh``, ``minimum``, ...

They are exact names for what ``if`` and ``math`` cannot do while tracing. On plain numbers they also return
nodes (constants), so a hook may mix both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnrt.variants.expr import (
    BOOL,
    FLOAT,
    INT,
    LONG,
    Node,
    arithmetic,
    as_node,
    bitwise,
    cast,
    compare,
    make,
    power,
    true_divide,
    unify,
)
from attnrt.variants.untraceable import untraceable

__all__ = [
    "absolute",
    "ceil",
    "clip",
    "cos",
    "cospi",
    "exp",
    "exp2",
    "floor",
    "log",
    "log2",
    "logistic",
    "maximum",
    "minimum",
    "rsqrt",
    "sat_add",
    "sat_sub",
    "sin",
    "sinpi",
    "sqrt",
    "tanh",
    "to_float",
    "to_int",
    "to_int64",
    "where",
]


def _unary(op: str, doc: str) -> Callable[[Any], Node]:
    def call(x: Any) -> Node:
        return make(op, FLOAT, (cast(x, FLOAT),))

    call.__name__ = call.__qualname__ = op
    call.__doc__ = doc
    return call


exp = _unary("exp", "e to the power x, float32.")
exp2 = _unary("exp2", "2 to the power x, float32.")
log = _unary("log", "Natural logarithm, float32; log(0) = -inf, NaN below 0.")
log2 = _unary("log2", "Logarithm to base 2, float32.")
tanh = _unary("tanh", "Hyperbolic tangent, float32.")
sqrt = _unary("sqrt", "Square root, float32; NaN below 0.")
rsqrt = _unary("rsqrt", "1 / sqrt(x), float32.")
logistic = _unary("logistic", "1 / (1 + exp(-x)), float32 (the variant of that family is ``sigmoid``).")
sin = _unary("sin", "Sine of x radians, float32.")
cos = _unary("cos", "Cosine of x radians, float32.")
sinpi = _unary("sinpi", "Sine of pi * x, float32, for |x| up to 2**22; no large-angle reduction needed.")
cospi = _unary("cospi", "Cosine of pi * x, float32, for |x| up to 2**22.")


def floor(x: Any) -> Node:
    """Largest whole number not above x; an integer stays as it is."""
    node = as_node(x)
    return node if node.dtype != FLOAT else make("floor", FLOAT, (node,))


def ceil(x: Any) -> Node:
    """Smallest whole number not below x; an integer stays as it is."""
    node = as_node(x)
    return node if node.dtype != FLOAT else make("ceil", FLOAT, (node,))


def absolute(x: Any) -> Node:
    """|x|; ``abs(x)`` does the same."""
    return abs(as_node(x))


def minimum(a: Any, b: Any) -> Node:
    """``a < b ? a : b`` (if one is NaN: b)."""
    return arithmetic("min", a, b)


def maximum(a: Any, b: Any) -> Node:
    """``a > b ? a : b`` (if one is NaN: b)."""
    return arithmetic("max", a, b)


def clip(x: Any, low: Any, high: Any) -> Node:
    """x held inside [low, high]."""
    return minimum(maximum(x, low), high)


def where(condition: Any, a: Any, b: Any) -> Node:
    """a where the condition holds, else b. Both sides are evaluated; the side not taken may be anything."""
    test = as_node(condition)
    if test.dtype != BOOL:
        raise untraceable(f"where() on a {test.dtype}", "the condition must be a comparison")
    x, y = unify(a, b)
    return make("where", x.dtype, (test, x, y))


def to_int(x: Any) -> Node:
    """int32: a float is truncated towards zero and saturated, NaN gives 0; an int64 keeps its low 32 bits."""
    return cast(x, INT)


def to_int64(x: Any) -> Node:
    """int64 from an integer or a boolean."""
    node = as_node(x)
    if node.dtype == FLOAT:
        raise untraceable("to_int64() of a float32", "use to_int first")
    return cast(node, LONG)


def to_float(x: Any) -> Node:
    """float32 of an integer or a boolean."""
    return cast(x, FLOAT)


def _saturating(op: str, a: Any, b: Any) -> Node:
    x, y = unify(a, b)
    if x.dtype != INT:
        raise untraceable(f"{op} on {x.dtype}", "saturating arithmetic is for int32")
    return make(op, INT, (x, y))


def sat_add(a: Any, b: Any) -> Node:
    """int32 a + b held at the ends of int32 in place of wrapping."""
    return _saturating("sat_add", a, b)


def sat_sub(a: Any, b: Any) -> Node:
    """int32 a - b held at the ends of int32 in place of wrapping."""
    return _saturating("sat_sub", a, b)


UFUNCS: dict[str, Callable[..., Node]] = {
    "absolute": absolute,
    "add": lambda a, b: arithmetic("add", a, b),
    "bitwise_and": lambda a, b: bitwise("and", a, b),
    "bitwise_or": lambda a, b: bitwise("or", a, b),
    "bitwise_xor": lambda a, b: bitwise("xor", a, b),
    "ceil": ceil,
    "cos": cos,
    "divide": true_divide,
    "equal": lambda a, b: compare("eq", a, b),
    "exp": exp,
    "exp2": exp2,
    "floor": floor,
    "floor_divide": lambda a, b: arithmetic("floordiv", a, b),
    "greater": lambda a, b: compare("lt", b, a),
    "greater_equal": lambda a, b: compare("le", b, a),
    "invert": lambda a: ~as_node(a),
    "left_shift": lambda a, b: bitwise("shl", a, b),
    "less": lambda a, b: compare("lt", a, b),
    "less_equal": lambda a, b: compare("le", a, b),
    "log": log,
    "log2": log2,
    "logical_and": lambda a, b: bitwise("and", cast(a, BOOL), cast(b, BOOL)),
    "logical_not": lambda a: ~cast(a, BOOL),
    "logical_or": lambda a, b: bitwise("or", cast(a, BOOL), cast(b, BOOL)),
    "maximum": maximum,
    "minimum": minimum,
    "multiply": lambda a, b: arithmetic("mul", a, b),
    "negative": lambda a: -as_node(a),
    "not_equal": lambda a, b: compare("ne", a, b),
    "power": power,
    "remainder": lambda a, b: arithmetic("mod", a, b),
    "right_shift": lambda a, b: bitwise("shr", a, b),
    "sin": sin,
    "sqrt": sqrt,
    "subtract": lambda a, b: arithmetic("sub", a, b),
    "tanh": tanh,
}
