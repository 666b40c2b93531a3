# SPDX-License-Identifier: Apache-2.0
"""Expressions as C++ text: each node becomes one named constant, operands first.

So the text has no nesting and shared subexpressions are computed once. Values that are constant along the keys of a row are
named apart, to be computed once for the row: the compiler could not do that itself, because a store to the logits may alias a
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from attnrt.variants.compose import Composed
from attnrt.variants.expr import BOOL, FLOAT, INT, LONG, ROW, Node, topological
from attnrt.variants.variant import CppText, Param

__all__ = [
    "CPP_TYPE",
    "PRINT",
    "ROW_ARGS",
    "Printer",
    "function",
    "per_key_nodes",
    "row_names_of",
    "row_values",
]

CPP_TYPE = {FLOAT: "float", INT: "int", LONG: "long long", BOOL: "bool", "pair": "Pair"}


Rule = Callable[[str, list[str]], str]


def _call(name: str) -> Rule:
    return lambda dtype, a: f"{name}({', '.join(a)})"


def _sign(sign: str) -> Rule:
    return lambda dtype, a: f"{a[0]} {sign} {a[1]}"


def _by_type(float_rule: Rule, int_rule: Rule) -> Rule:
    return lambda dtype, a: (float_rule if dtype == FLOAT else int_rule)(dtype, a)


#: Text of each operation from the result's type and the operands' names.
PRINT: dict[str, Rule] = {
    "abs": _by_type(_call("f_abs"), _call("iabs")),
    "add": _by_type(_sign("+"), _call("iadd")),
    "and": _sign("&"),
    "ceil": _call("f_ceil"),
    "cos": _call("f_cos"),
    "cospi": _call("f_cospi"),
    "div": _sign("/"),
    "eq": _sign("=="),
    "exp": _call("f_exp"),
    "exp2": _call("f_exp2"),
    "floor": _call("f_floor"),
    "floordiv": _by_type(_call("f_floordiv"), _call("ifloordiv")),
    "le": _sign("<="),
    "log": _call("f_log"),
    "log2": _call("f_log2"),
    "logistic": lambda dtype, a: f"f_logistic({a[0]}, p)",
    "lt": _sign("<"),
    "max": _call("max_of"),
    "min": _call("min_of"),
    "mod": _by_type(_call("f_mod"), _call("imod")),
    "mul": _by_type(_sign("*"), _call("imul")),
    "ne": _sign("!="),
    "neg": lambda dtype, a: f"-{a[0]}",
    "not": lambda dtype, a: f"!{a[0]}" if dtype == BOOL else f"~{a[0]}",
    "or": _sign("|"),
    "pow": _call("f_pow"),
    "rsqrt": _call("f_rsqrt"),
    "sat_add": _call("sat_add"),
    "sat_sub": _call("sat_sub"),
    "shl": _call("ishl"),
    "shr": _call("ishr"),
    "sin": _call("f_sin"),
    "sinpi": _call("f_sinpi"),
    "sqrt": _call("f_sqrt"),
    "sub": _by_type(_sign("-"), _call("isub")),
    "tanh": lambda dtype, a: f"f_tanh({a[0]}, p)",
    "where": lambda dtype, a: f"select({a[0]}, {a[1]}, {a[2]})",
    "xor": _sign("^"),
}


def _literal(value: bool | int | float, dtype: str) -> str:
    if dtype == BOOL:
        return "true" if value else "false"
    if dtype == INT:
        return "INT_LOWEST" if value == -(2**31) else f"({value})" if value < 0 else str(value)
    if dtype == LONG:
        return "(-9223372036854775807LL - 1)" if value == -(2**63) else f"({value}LL)"
    if math.isnan(value):
        return "bits_to_float(0x7fc00000u)"
    if math.isinf(value):
        return f"bits_to_float(0x{'ff' if value < 0 else '7f'}800000u)"
    text = f"{value:.9g}"
    text = text if any(c in text for c in ".e") else text + ".0"
    return f"({text}f)" if value < 0 or text.startswith("-") else f"{text}f"


def is_leaf(node: Node) -> bool:
    return node.op in ("const", "ctx", "input")


class Printer:
    """Prints functions of one variant; holds the slots of its parameters."""

    def __init__(self, params: tuple[Param, ...], texts: tuple[CppText, ...]) -> None:
        self.params = {p.name: p for p in params}
        self.texts = {t.label: t for t in texts}

    def slot(self, name: str) -> str:
        return f"p[slot_{name}]"

    def expression(self, node: Node, args: list[str]) -> str:
        if node.op == "const":
            return _literal(node.attr, node.dtype)
        if node.op == "ctx":
            return f"c.{node.attr}"
        if node.op == "input":
            return "s" if node.attr == "score" else str(node.attr)
        if node.op == "param":
            head = "qo_head" if self.params[node.attr].heads == "qo" else "kv_head"
            return f"scalar<{CPP_TYPE[node.dtype]}>({self.slot(node.attr)}, c.{head})"
        if node.op == "index":
            return f"element<{CPP_TYPE[node.dtype]}>({', '.join([self.slot(node.attr), *args])})"
        if node.op == "cast":
            if node.dtype == FLOAT and node.args[0].dtype == INT:
                if len(args) == 2:  # a fused difference
                    return f"distance({args[0]}, {args[1]}, p)"
                return f"to_float({args[0]})"
            if node.dtype == FLOAT or node.args[0].dtype != FLOAT:
                return f"static_cast<{CPP_TYPE[node.dtype]}>({args[0]})"
            return f"float_to_int({args[0]})"
        if node.op in ("text", "pair"):
            return f"{self.texts[node.attr].function}({', '.join(['p', 'c', *args])})"
        if node.op in ("first", "second"):
            return f"{args[0]}.{node.op}"
        return PRINT[node.op](node.dtype, args)

    def sum(self, node: Node, fused: dict[int, int], names: dict[int, str]) -> str | None:
        """Text of a sum or difference whose product is rounded with it, once (on a device)."""
        if id(node) not in fused or node.op == "cast":
            return None
        product = next(a for a in node.args if id(a) == fused[id(node)])
        other = node.args[1] if product is node.args[0] else node.args[0]
        x, y = (names[id(a)] for a in product.args)
        z = names[id(other)]
        if node.op == "sub":
            x, z = (f"-{x}", z) if other is node.args[0] else (x, f"-{z}")
        return f"mul_add({x}, {y}, {z})"

    def body(self, roots: Iterable[Node], given: dict[int, str]) -> tuple[list[str], list[str]]:
        """Statements that compute ``roots``, and the names of their values; ``given`` names what is known."""
        names = dict(given)
        lines: list[str] = []
        roots = tuple(roots)
        needed = _needed(roots, given)
        fused = _fused(needed, given, {id(r) for r in roots})
        for node in needed:
            if id(node) in fused.values():
                continue
            text = self.sum(node, fused, names)
            if text is None:
                operands = node.args[0].args if id(node) in fused else node.args
                text = self.expression(node, [names[id(a)] for a in operands])
            if is_leaf(node):
                names[id(node)] = text
                continue
            names[id(node)] = f"t{len(lines)}"
            lines.append(f"    const {CPP_TYPE[node.dtype]} t{len(lines)} = {text};")
        return lines, [names[id(r)] for r in roots]


def _needed(roots: tuple[Node, ...], given: dict[int, str]) -> list[Node]:
    """Nodes below ``roots`` in order, not descending below given ones."""
    order: list[Node] = []
    seen: set[int] = set(given)
    stack = [(r, False) for r in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
    return order


def _fused(nodes: list[Node], given: dict[int, str], roots: set[int]) -> dict[int, int]:
    """Operands that are printed with what uses them, being of no other use, both by id: a product in a sum of floats, and the
    difference between a key's position and a number of its row in a conversion to float."""
    uses: dict[int, int] = {}
    for node in nodes:
        for arg in node.args:
            uses[id(arg)] = uses.get(id(arg), 0) + 1
    found = {}
    for node in nodes:
        if node.dtype != FLOAT or node.op not in ("add", "sub", "cast"):
            continue
        for arg in node.args:
            own = uses[id(arg)] == 1 and id(arg) not in roots and id(arg) not in given
            if own and (_is_distance(arg) if node.op == "cast" else arg.op == "mul" and arg.dtype == FLOAT):
                found[id(node)] = id(arg)
                break
    return found


def _is_distance(node: Node) -> bool:
    if node.op != "sub" or node.dtype != INT:
        return False
    pos, other = node.args
    return pos.op == "ctx" and pos.attr == "kv_pos" and other.level <= ROW


def row_values(roots: list[Node]) -> list[Node]:
    """Largest subexpressions that are constant along a row, in order, each once."""
    found: dict[int, Node] = {}
    for node in topological(tuple(roots)):
        if node.level > ROW:
            for arg in node.args:
                if arg.level <= ROW and not is_leaf(arg):
                    found.setdefault(id(arg), arg)
    for root in roots:
        if root.level <= ROW and not is_leaf(root):
            found.setdefault(id(root), root)
    return list(found.values())


def per_key_nodes(variant: Composed) -> list[Node]:
    return [n for n in (variant.logits, variant.mask) if n is not None]


def row_names_of(values: list[Node]) -> dict[int, str]:
    return {id(n): f"r.v{i}" for i, n in enumerate(values)}


def function(returns: str, name: str, args: str, lines: list[str]) -> list[str]:
    args = f", {args}" if args else ""
    head = f"  template <class P> ATTNRT_HD static {returns} {name}([[maybe_unused]] const P& p{args}) {{"
    return [head, *lines, "  }"]


ROW_ARGS = "[[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c"
