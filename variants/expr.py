# SPDX-License-Identifier: Apache-2.0
"""Expression nodes: what a hook returns when it is called with symbols instead of numbers.

A node is frozen and interned: two nodes with the same operation and operands are one object, so common
subexpressions are found by construction and a tree compares by identity. NumPy evaluation (evaluate.py) and
C++ text (print_cpp.py) walk the same nodes; each operation has one rule there and a test holds the three
lists equal.

Types are ``int32``, ``int64``, ``float32`` and ``bool``. Integer arithmetic wraps, as NumPy's does. A Python
number takes the type of what it meets (``score * 2`` stays float32, ``ctx.qo_pos - 2`` stays int32); an int32
that meets a float32 becomes float32; ``/`` always gives float32; ``//`` and ``%`` round towards minus
infinity as in Python, and give 0 for an integer divisor 0.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any, NoReturn

import numpy as np

from attnrt.variants.untraceable import Untraceable, untraceable

__all__ = [
    "BOOL",
    "CTX_FIELDS",
    "FLOAT",
    "INT",
    "KEY_FIELDS",
    "LONG",
    "Node",
    "as_node",
    "cast",
    "const",
    "make",
]

FLOAT, INT, LONG, BOOL = "float32", "int32", "int64", "bool"

#: Fields of ``ctx`` and their types. request, qo_row: indices. qo_pos, kv_pos: signed logical positions.
#: qo_head, kv_head: global head numbers. qo_len, kv_len: of the request. kv_slot: element of the pool.
CTX_FIELDS = {
    "request": INT,
    "qo_pos": INT,
    "kv_pos": INT,
    "qo_head": INT,
    "kv_head": INT,
    "qo_row": INT,
    "kv_slot": LONG,
    "qo_len": INT,
    "kv_len": INT,
}
#: The fields that change along the keys of one query row; all others are constant in a row.
KEY_FIELDS = frozenset({"kv_pos", "kv_slot"})

# How often a value changes: one value per launch, per query row, per (row, key) pair.
LAUNCH, ROW, KEY = 0, 1, 2

_table: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Node(Untraceable):
    """One operation on other nodes.

    Attributes
    ----------
    op : str
        Name of the operation ("add", "exp", "const", "ctx", "param", "index", "input", ...).
    dtype : str
        "int32", "int64", "float32" or "bool".
    args : tuple of Node
        Operands.
    attr : object
        The constant's value, the field's, parameter's or input's name; None for arithmetic.
    level : int
        0: the same in the whole launch; 1: one value per query row; 2: one value per (row, key).
    """

    __slots__ = ("__weakref__", "args", "attr", "dtype", "level", "op")
    op: str
    dtype: str
    args: tuple[Node, ...]
    attr: Any
    level: int

    def __init__(self) -> None:
        raise TypeError("nodes are made by attnrt.variants.expr.make")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("expression nodes are frozen")

    def __reduce__(self) -> tuple:
        return (make, (self.op, self.dtype, self.args, self.attr))

    def __repr__(self) -> str:
        inner = ", ".join(map(repr, self.args))
        return f"{self.op}[{self.attr!r}]({inner})" if self.attr is not None else f"{self.op}({inner})"

    __hash__ = object.__hash__

    # arithmetic
    def __add__(self, other: Any) -> Node:
        return arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Node:
        return arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Node:
        return arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Node:
        return arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Node:
        return arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Node:
        return arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Node:
        return true_divide(self, other)

    def __rtruediv__(self, other: Any) -> Node:
        return true_divide(other, self)

    def __floordiv__(self, other: Any) -> Node:
        return arithmetic("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Node:
        return arithmetic("floordiv", other, self)

    def __mod__(self, other: Any) -> Node:
        return arithmetic("mod", self, other)

    def __rmod__(self, other: Any) -> Node:
        return arithmetic("mod", other, self)

    def __pow__(self, other: Any) -> Node:
        return power(self, other)

    def __rpow__(self, other: Any) -> Node:
        return power(other, self)

    def __neg__(self) -> Node:
        return arithmetic("sub", 0, self) if self.dtype != FLOAT else make("neg", FLOAT, (self,))

    def __pos__(self) -> Node:
        return self

    def __abs__(self) -> Node:
        return make("abs", _number(self).dtype, (_number(self),))

    # comparisons
    def __lt__(self, other: Any) -> Node:
        return compare("lt", self, other)

    def __le__(self, other: Any) -> Node:
        return compare("le", self, other)

    def __gt__(self, other: Any) -> Node:
        return compare("lt", other, self)

    def __ge__(self, other: Any) -> Node:
        return compare("le", other, self)

    def __eq__(self, other: Any) -> Node:  # type: ignore[override]
        return compare("eq", self, other)

    def __ne__(self, other: Any) -> Node:  # type: ignore[override]
        return compare("ne", self, other)

    # logic and bits
    def __and__(self, other: Any) -> Node:
        return bitwise("and", self, other)

    def __rand__(self, other: Any) -> Node:
        return bitwise("and", other, self)

    def __or__(self, other: Any) -> Node:
        return bitwise("or", self, other)

    def __ror__(self, other: Any) -> Node:
        return bitwise("or", other, self)

    def __xor__(self, other: Any) -> Node:
        return bitwise("xor", self, other)

    def __rxor__(self, other: Any) -> Node:
        return bitwise("xor", other, self)

    def __invert__(self) -> Node:
        if self.dtype == FLOAT:
            raise untraceable("~ on a float32", "compare first: ~(a < b)")
        return make("not", self.dtype, (self,))

    def __lshift__(self, other: Any) -> Node:
        return bitwise("shl", self, other)

    def __rshift__(self, other: Any) -> Node:
        return bitwise("shr", self, other)

    def __getitem__(self, index: Any) -> Node:
        if self.op != "param":
            raise untraceable("an index into a computed value", "only a parameter can be indexed")
        items = index if isinstance(index, tuple) else (index,)
        nodes = tuple(as_node(i) for i in items)
        if not 1 <= len(nodes) <= MAX_RANK:
            raise untraceable(f"an index with {len(nodes)} terms", f"use 1 to {MAX_RANK}")
        for node in nodes:
            if node.dtype not in (INT, LONG):
                raise untraceable(f"an index of type {node.dtype}", "use at.variants.to_int")
        return make("index", self.dtype, nodes, self.attr)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Node:
        from attnrt.variants import functions

        rule = functions.UFUNCS.get(ufunc.__name__)
        if rule is None or method != "__call__" or kwargs:
            hint = "known: " + ", ".join(sorted(functions.UFUNCS))
            raise untraceable(f"numpy.{ufunc.__name__}", hint)
        return rule(*inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Node:
        from attnrt.variants import functions

        if func is np.where and len(args) == 3 and not kwargs:
            return functions.where(*args)
        if func is np.clip and len(args) == 3 and not kwargs:
            return functions.clip(*args)
        raise untraceable(f"numpy.{func.__name__}", "use at.variants.* functions; where and clip are known")


MAX_RANK = 4


def make(op: str, dtype: str, args: tuple[Node, ...] = (), attr: Any = None) -> Node:
    """Return the one node with this operation and these operands."""
    key = (op, dtype, tuple(id(a) for a in args), repr(attr))
    with _lock:
        found = _table.get(key)
        if found is not None:
            return found
        node = object.__new__(Node)
        level = max((a.level for a in args), default=LAUNCH)
        if op == "ctx":
            level = KEY if attr in KEY_FIELDS else ROW
        elif op == "param":
            level = ROW  # an array [heads] follows the head of the row
        elif op in ("input", "text", "pair"):
            level = KEY
        for name, value in (("op", op), ("dtype", dtype), ("args", args), ("attr", attr), ("level", level)):
            object.__setattr__(node, name, value)
        _table[key] = node
        return node


def const(value: bool | int | float, dtype: str | None = None) -> Node:
    """A constant. Floats are rounded to float32 here, so that NumPy and C++ see one number."""
    if dtype is None:
        if isinstance(value, bool):
            dtype = BOOL
        elif isinstance(value, int):
            dtype = INT if -(2**31) <= value < 2**31 else LONG
        else:
            dtype = FLOAT
    if dtype == FLOAT:
        with np.errstate(over="ignore"):
            return make("const", FLOAT, attr=float(np.float32(value)))
    if dtype == LONG and not -(2**63) <= value < 2**63:
        raise untraceable(f"the integer {value}", "integers must fit in 64 bits")
    return make("const", dtype, attr=bool(value) if dtype == BOOL else int(value))


def as_node(value: Any) -> Node:
    """A node from a node or a plain number."""
    if isinstance(value, Node):
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return const(value)
    raise untraceable(
        f"a value of type {type(value).__name__}",
        "numbers and traced values only; make an array a parameter of the hook",
    )


def cast(value: Any, dtype: str) -> Node:
    """Convert to a type. float32 to integer truncates towards zero, saturates, and takes NaN to 0."""
    node = as_node(value)
    if node.dtype == dtype:
        return node
    if node.op == "const" and dtype == FLOAT:
        return const(float(node.attr), FLOAT)
    if node.op == "const" and dtype == LONG and node.dtype == INT:
        return const(node.attr, LONG)
    if dtype == BOOL:
        return compare("ne", node, const(0, node.dtype) if node.dtype != FLOAT else const(0.0))
    return make("cast", dtype, (node,))


def _number(node: Node) -> Node:
    return cast(node, INT) if node.dtype == BOOL else node


def unify(a: Any, b: Any) -> tuple[Node, Node]:
    """Both operands in their common type; Python numbers follow the other operand."""
    x, y = as_node(a), as_node(b)
    if x.dtype == y.dtype:
        return x, y
    for dtype in (FLOAT, LONG, INT):
        if dtype in (x.dtype, y.dtype):
            return cast(x, dtype), cast(y, dtype)
    raise AssertionError((x.dtype, y.dtype))


def arithmetic(op: str, a: Any, b: Any) -> Node:
    """add, sub, mul, floordiv, mod, min, max on the common type; booleans count as int32."""
    x, y = unify(a, b)
    x, y = _number(x), _number(y)
    return make(op, x.dtype, (x, y))


def true_divide(a: Any, b: Any) -> Node:
    return make("div", FLOAT, (cast(a, FLOAT), cast(b, FLOAT)))


def power(a: Any, b: Any) -> Node:
    """Small whole exponents are multiplied out (exact, and for integers the only form)."""
    exponent = as_node(b)
    if exponent.op == "const" and exponent.attr in (1, 2, 3, 4):
        base = _number(as_node(a))
        square = base * base
        return {1: base, 2: square, 3: square * base, 4: square * square}[int(exponent.attr)]
    if exponent.op == "const" and exponent.attr == 0.5:
        return make("sqrt", FLOAT, (cast(a, FLOAT),))
    return make("pow", FLOAT, (cast(a, FLOAT), cast(b, FLOAT)))


def compare(op: str, a: Any, b: Any) -> Node:
    if a is None or b is None:
        raise untraceable("a comparison with None", "give the parameter a number")
    x, y = unify(a, b)
    return make(op, BOOL, (x, y))


def bitwise(op: str, a: Any, b: Any) -> Node:
    """and, or, xor on booleans or integers; shl, shr on integers (the count is taken modulo the width)."""
    x, y = unify(a, b)
    if x.dtype == FLOAT:
        raise untraceable(f"{op} on a float32", "compare first: (a < b) & (c < d)")
    if op in ("shl", "shr"):
        x, y = _number(x), _number(y)
    return make(op, x.dtype, (x, y))


def leaves(root: Node, op: str) -> list[Node]:
    """All nodes of one kind below ``root``, in evaluation order."""
    return [n for n in topological((root,)) if n.op == op]


def topological(roots: tuple[Node, ...]) -> list[Node]:
    """Nodes below ``roots``, operands first, each once; the order depends on structure alone."""
    order: list[Node] = []
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.append((node, True))
        stack.extend((a, False) for a in reversed(node.args))
    return order


def substitute(root: Node, replace: dict[Node, Node]) -> Node:
    """``root`` with some nodes replaced by others of the same type."""
    new: dict[int, Node] = {}
    for node in topological((root,)):
        target = replace.get(node)
        if target is None:
            args = tuple(new[id(a)] for a in node.args)
            target = (
                node
                if all(x is y for x, y in zip(args, node.args, strict=True))
                else make(node.op, node.dtype, args, node.attr)
            )
        new[id(node)] = target
    return new[id(root)]


def is_finite_constant(node: Node) -> bool:
    return node.op == "const" and math.isfinite(node.attr)
