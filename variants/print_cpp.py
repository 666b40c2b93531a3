# SPDX-License-Identifier: Apache-2.0
"""Print a compiled variant as one C++17 struct that g++, nvcc and NVRTC all take.

Each node becomes one named constant, operands first, so that the text has no nesting and shared
subexpressions are computed once. Values that are constant along the keys of a row are moved into ``Row``: the
compiler could not do that itself, because a store to the logits may alias a parameter. The header explains
the struct to kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable

from attnrt.variants.compose import Composed
from attnrt.variants.expr import BOOL, FLOAT, INT, KEY_FIELDS, LONG, ROW, Node, topological
from attnrt.variants.variant import CppText, PairMap, Param

__all__ = ["PRINT", "include_dir", "needs_keys", "print_variant"]

CPP_TYPE = {FLOAT: "float", INT: "int", LONG: "long long", BOOL: "bool", "pair": "Pair"}
PAIRINGS = {"half": "PAIR_HALF", "interleaved": "PAIR_INTERLEAVED", "single": "PAIR_SINGLE"}
SIGNATURES = {
    "logits": ("float", "float s"),
    "mask": ("bool", ""),
    "output": ("float", "int d, float o"),
    "query": ("Pair", "int d, float x0, float x1"),
    "key": ("Pair", "int d, float x0, float x1"),
    "value": ("Pair", "int d, float x0, float x1"),
}

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


def include_dir() -> str:
    """Folder of ``attnrt_variant.h``, for the compiler's include path."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


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


def _is_leaf(node: Node) -> bool:
    return node.op in ("const", "ctx", "input")


class _Printer:
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
            if _is_leaf(node):
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


def _row_values(roots: list[Node]) -> list[Node]:
    """Largest subexpressions that are constant along a row, in order, each once."""
    found: dict[int, Node] = {}
    for node in topological(tuple(roots)):
        if node.level > ROW:
            for arg in node.args:
                if arg.level <= ROW and not _is_leaf(arg):
                    found.setdefault(id(arg), arg)
    for root in roots:
        if root.level <= ROW and not _is_leaf(root):
            found.setdefault(id(root), root)
    return list(found.values())


def _per_key(variant: Composed) -> list[Node]:
    return [n for n in (variant.logits, variant.mask) if n is not None]


def _row_names(values: list[Node]) -> dict[int, str]:
    return {id(n): f"r.v{i}" for i, n in enumerate(values)}


def print_variant(variant: Composed, name: str = "Variant") -> str:
    """C++ text of ``struct name``; the same for equal keys."""
    printer = _Printer(variant.params, variant.texts)
    per_key = _per_key(variant)
    row_values = _row_values(per_key)
    row_names = _row_names(row_values)
    parts = [
        f"struct {name} {{",
        *_flags(variant),
        *_text_functions(variant),
        *_row(printer, row_values, variant.low, variant.high),
        *_units(printer, variant, per_key, row_names),
        *_logits(printer, variant.logits, row_names),
        *_reduced(printer, variant, row_names),
        *_capped(printer, variant, row_names),
        *_linear_bias(printer, variant, row_names),
        *_power(printer, variant, per_key, row_names),
        *_mask(printer, variant, row_names),
    ]
    for hook, pair in (("query", variant.query), ("key", variant.key_map), ("value", variant.value)):
        parts += _pair(printer, hook, pair)
    parts += _single(printer, "output", variant.output, "int d, float o", "o")
    parts += _single(printer, "sink", variant.sink, "", "0.0f")
    body = "\n".join([*parts, "};"])
    return f'#include "attnrt_variant.h"\nnamespace attnrt {{\n{body}\n}}  // namespace attnrt\n'


def _flags(variant: Composed) -> list[str]:
    flags = {
        "use_softmax": variant.use_softmax,
        "has_logits": variant.logits is not None,
        "has_mask": variant.has_mask,
        "has_query": variant.query is not None,
        "has_key": variant.key_map is not None,
        "has_value": variant.value is not None,
        "has_output": variant.output is not None,
        "has_sink": variant.sink is not None,
        "mask_is_interval": variant.mask_is_interval,
        "reads_index_mask": variant.reads_index_mask,
    }
    lines = [f"  static constexpr bool {k} = {'true' if v else 'false'};" for k, v in flags.items()]
    lines.append(f"  static constexpr int num_params = {len(variant.params)};")
    lines += [f"  static constexpr int slot_{p.name} = {i};" for i, p in enumerate(variant.params)]
    return lines


def _function(returns: str, name: str, args: str, lines: list[str]) -> list[str]:
    args = f", {args}" if args else ""
    head = f"  template <class P> ATTNRT_HD static {returns} {name}([[maybe_unused]] const P& p{args}) {{"
    return [head, *lines, "  }"]


def _row(printer: _Printer, values: list[Node], low: Node | None, high: Node | None) -> list[str]:
    fields = [f"{CPP_TYPE[n.dtype]} v{i};" for i, n in enumerate(values)]
    fields += [f"int {n};" for n, end in (("low", low), ("high", high)) if end is not None]
    roots = [*values, *(end for end in (low, high) if end is not None)]
    lines, names = printer.body(roots, {})
    lines.append(f"    return Row{{{', '.join(names)}}};")
    return [
        f"  struct Row {{ {' '.join(fields)} }};",
        *_function("Row", "row", "[[maybe_unused]] const Ctx& c", lines),
    ]


def _users(roots: list[Node]) -> dict[int, list[Node]]:
    users: dict[int, list[Node]] = {}
    for node in topological(tuple(roots)):
        for arg in node.args:
            users.setdefault(id(arg), []).append(node)
    return users


def _units(printer: _Printer, variant: Composed, roots: list[Node], row_names: dict[int, str]) -> list[str]:
    """How a kernel may leave out the multiplication of each score by sm_scale, or by a factor of its row: see the header."""
    users = _users(roots)
    scores = [n for n in topological(tuple(roots)) if n.op == "input" and n.attr == "score"]
    of_score = [user for score in scores for user in users.get(id(score), [])]

    def own_factor(product: Node) -> str | None:
        """The row's value in a product that is of no other use."""
        found = [a for a in product.args if _own(a, users, row_names)]
        return row_names[id(found[0])] if product.op == "mul" and product.dtype == FLOAT and found else None

    scales = keeps = None
    if len(of_score) == 1:
        scales = own_factor(of_score[0])
        bias = _bias(variant)
        keeps = None if bias is None else own_factor(bias)
    factor = _positive_factor(variant)
    statement = f"{scales} = {scales} * by;" if scales else f"{keeps} = {keeps} / by;" if keeps else ""
    return [
        f"  static constexpr bool scales_score = {'true' if scales else 'false'};",
        f"  static constexpr bool keeps_units = {'true' if keeps else 'false'};",
        f"  static constexpr bool row_units = {'false' if factor is None else 'true'};",
        "  ATTNRT_HD static void scale([[maybe_unused]] Row& r, [[maybe_unused]] float by) {",
        *([f"    {statement}"] if statement else []),
        "  }",
        "  ATTNRT_HD static float unit([[maybe_unused]] const Row& r) {",
        f"    return {'1.0f' if factor is None else row_names.get(id(factor)) or printer.expression(factor, [])};",
        "  }",
    ]


def _bias(variant: Composed) -> Node | None:
    """The product that is added to the score or taken off it, if that is all that happens to scores."""
    root = variant.logits
    if root is None or root.dtype != FLOAT or root.op not in ("add", "sub") or not variant.use_softmax:
        return None
    args = root.args if root.op == "sub" else sorted(root.args, key=lambda a: a.op == "mul")
    is_score = args[0].op == "input" and args[0].attr == "score"
    return args[1] if is_score and args[1].op == "mul" else None


def _linear(variant: Composed) -> tuple[Node, bool, Node | None] | None:
    """(slope, whether it counts as its negative, origin) of a bias that is slope * (kv_pos - origin); origin None: 0."""
    bias, minus = _bias(variant), variant.logits is not None and variant.logits.op == "sub"
    if bias is None:
        return None
    for slope, factor in (bias.args, bias.args[::-1]):
        other, negated = factor, minus
        while other.op in ("neg", "cast") or _is_negated(other):
            negated ^= other.op != "cast"
            other = other.args[-1]
        if slope.level > ROW or other.dtype != INT:
            continue
        if _is_kv_pos(other):
            return slope, negated, None
        for pos, origin in (other.args, other.args[::-1]) if other.op == "sub" else ():
            if _is_kv_pos(pos) and origin.level <= ROW:
                return slope, negated ^ (pos is other.args[1]), origin
    return None


def _is_negated(node: Node) -> bool:
    """What -x is for an integer."""
    return node.op == "sub" and node.dtype == INT and node.args[0].op == "const" and node.args[0].attr == 0


def _is_kv_pos(node: Node) -> bool:
    return node.op == "ctx" and node.attr == "kv_pos"


def needs_keys(variant: Composed) -> bool:
    """Whether the final logit asks for each key's position or slot, but for a bias that is linear in the position."""
    return _reads_keys(variant) and not _is_linear(variant)


def _reads_keys(variant: Composed) -> bool:
    texts = {t.label for t in variant.texts if "ctx" in t.body}  # without that word a text can read neither
    nodes = () if variant.logits is None else topological((variant.logits,))
    return any(n.attr in texts if n.op == "text" else n.op == "ctx" and n.attr in KEY_FIELDS for n in nodes)


def _is_linear(variant: Composed) -> bool:
    """Whether the slope of _linear can be told apart, as a value of the row that is of no other use."""
    found, roots = _linear(variant), _per_key(variant)
    return found is not None and _own(found[0], _users(roots), _row_names(_row_values(roots)))


def _linear_bias(printer: _Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
    found, slope, origin = _linear(variant), "0.0f", "0"
    is_linear = _is_linear(variant)
    if found is not None and is_linear:
        slope = f"{'-' if found[1] else ''}{row_names[id(found[0])]}"
        if found[2] is not None:
            origin = row_names.get(id(found[2])) or printer.expression(found[2], [])
    return [
        f"  static constexpr bool linear_bias = {'true' if is_linear else 'false'};",
        f"  static constexpr bool logits_need_keys = {'true' if needs_keys(variant) else 'false'};",
        f"  ATTNRT_HD static float slope([[maybe_unused]] const Row& r) {{ return {slope}; }}",
        "  ATTNRT_HD static int origin([[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {",
        f"    return {origin};",
        "  }",
    ]


LOG2_E = "1.44269504f"


def _power(printer: _Printer, variant: Composed, roots: list[Node], row_names: dict[int, str]) -> list[str]:
    """A softmax-free weight that is a logistic function: what it is of, as the power of 2 in 1 / (1 + 2^power)."""
    root = variant.logits
    lines: list[str] = []
    turned: list[str] = []
    power = "0.0f"
    is_logistic = root is not None and root.op == "logistic" and not variant.use_softmax
    if root is not None and is_logistic:
        lines, names = printer.body(root.args, row_names)
        is_logistic = not _has_quick(lines)
        turned = _turned(root.args[0], _users(roots), row_names)
        power = names[0] if turned else f"{names[0]} * -{LOG2_E}"
    return [
        f"  static constexpr bool is_logistic = {'true' if is_logistic else 'false'};",
        "  ATTNRT_HD static void turn([[maybe_unused]] Row& r) {",
        *(f"    {name} = {name} * -{LOG2_E};" for name in turned if is_logistic),
        "  }",
        *_function(
            "float",
            "power",
            ROW_ARGS + ", [[maybe_unused]] float s",
            [*lines, f"    return {power};"] if is_logistic else ["    return 0.0f;"],
        ),
    ]


def _turned(node: Node, users: dict[int, list[Node]], row_names: dict[int, str]) -> list[str]:
    """The row's values that make a multiple of ``node`` when they are multiplied: a factor, or a factor and what is added."""
    product, others = node, []
    if node.op == "add":
        product, shift = node.args if node.args[0].op == "mul" else node.args[::-1]
        others = [shift]
    if product.op != "mul" or product.dtype != FLOAT:
        return []
    others += next(([a] for a in product.args if _own(a, users, row_names)), [product])
    return [row_names[id(n)] for n in others] if all(_own(n, users, row_names) for n in others) else []


def _own(node: Node, users: dict[int, list[Node]], row_names: dict[int, str]) -> bool:
    """Whether a node is a value of the row that is of no other use."""
    return id(node) in row_names and len(users.get(id(node), [])) == 1


def _has_quick(lines: list[str]) -> bool:
    return any(call in line for call in (" f_tanh(", " distance(") for line in lines)


def _positive_factor(variant: Composed) -> Node | None:
    """A number above 0 that the final logit is a multiple of: a parameter or a constant."""
    root = variant.logits
    if root is None or root.op != "mul" or root.dtype != FLOAT or not variant.use_softmax:
        return None
    return next((a for a in root.args if _is_leaf_of_row(a) and _is_positive(variant, a)), None)


def _is_leaf_of_row(node: Node) -> bool:
    return node.op in ("param", "const")


def _is_positive(variant: Composed, node: Node) -> bool:
    """Whether a node is surely above 0 (before it is rounded)."""
    if node.op in ("mul", "div"):
        return all(_is_positive(variant, a) for a in node.args)
    if node.op == "const":
        return node.dtype == FLOAT and 0 < node.attr < math.inf
    return node.op == "param" and variant.param(node.attr).rule == "positive"


def _capped(printer: _Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
    """Where reduced() is tanh of a positive multiple of the score: that factor."""
    reduced, factor = _reduced_root(variant), None
    if reduced is not None and reduced.op == "tanh" and reduced.args[0].op in ("mul", "div"):
        inner = reduced.args[0]
        for score, other in (inner.args, inner.args[::-1])[: 2 if inner.op == "mul" else 1]:
            if score.op == "input" and score.attr == "score" and _is_positive(variant, other):
                text = row_names.get(id(other)) or printer.expression(other, [])
                factor = text if inner.op == "mul" else f"1.0f / {text}"
    return [
        f"  static constexpr bool is_capped = {'false' if factor is None else 'true'};",
        f"  ATTNRT_HD static float factor([[maybe_unused]] const Row& r) {{ return {factor or '1.0f'}; }}",
    ]


def _reduced_root(variant: Composed) -> Node | None:
    factor = _positive_factor(variant)
    if factor is None or variant.logits is None:
        return None
    return variant.logits.args[1] if variant.logits.args[0] is factor else variant.logits.args[0]


def _reduced(printer: _Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
    other = _reduced_root(variant)
    if other is None:
        return []
    lines, names = printer.body([other], row_names)
    return _function(
        "float", "reduced", ROW_ARGS + ", [[maybe_unused]] float s", [*lines, f"    return {names[0]};"]
    )


ROW_ARGS = "[[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c"


def _logits(printer: _Printer, root: Node | None, row_names: dict[int, str]) -> list[str]:
    lines, names = ([], ["s"]) if root is None else printer.body([root], row_names)
    lines.append(f"    return {names[0]};")
    short = ["    return logits(p, row(p, c), c, s);"]
    return [
        f"  static constexpr bool quick_logits = {'true' if _has_quick(lines) else 'false'};",
        *_function("float", "logits", ROW_ARGS + ", [[maybe_unused]] float s", lines),
        *_function("float", "logits", "const Ctx& c, float s", short),
    ]


def _mask(printer: _Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
    lines, names = printer.body([] if variant.mask is None else [variant.mask], row_names)
    tests = []
    if variant.low is not None:
        tests.append("(c.kv_pos >= r.low)")
    if variant.high is not None:
        tests.append("(c.kv_pos <= r.high)")
    lines.append(f"    return {' & '.join([*tests, *names]) or 'true'};")
    low = "r.low" if variant.low is not None else "INT_LOWEST"
    high = "r.high" if variant.high is not None else "INT_HIGHEST"
    return [
        *_function("bool", "mask", ROW_ARGS, lines),
        *_function("bool", "mask", "const Ctx& c", ["    return mask(p, row(p, c), c);"]),
        "  ATTNRT_HD static void visible([[maybe_unused]] const Row& r, int& low, int& high) {",
        f"    low = {low};",
        f"    high = {high};",
        "  }",
    ]


def _pair(printer: _Printer, hook: str, pair: PairMap | None) -> list[str]:
    pairing, dim = "PAIR_NONE", 0
    lines: list[str] = []
    if pair is not None:
        pairing, dim = PAIRINGS[pair.pairing], pair.dim or 0
        roots = [pair.y0] if pair.y1 is None else [pair.y0, pair.y1]
        lines, names = printer.body(roots, {})
        # Both results are read before either is written: y1 may use x0.
        lines += [f"    const float y{i} = {n};" for i, n in enumerate(names)]
        lines += [f"    x{i} = y{i};" for i in range(len(names))]
    args = "[[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, "
    return [
        f"  static constexpr int {hook}_pairing = {pairing};",
        f"  static constexpr int {hook}_dim = {dim};",
        *_function("void", hook, args + "[[maybe_unused]] float& x1", lines),
    ]


def _single(printer: _Printer, name: str, root: Node | None, args: str, identity: str) -> list[str]:
    lines, names = ([], [identity]) if root is None else printer.body([root], {})
    lines.append(f"    return {names[0]};")
    more = "".join(f", [[maybe_unused]] {a}" for a in args.split(", ") if a)
    return _function("float", name, "[[maybe_unused]] const Ctx& c" + more, lines)


def _text_functions(variant: Composed) -> list[str]:
    """The user's C++ text, each hook as one static function with its parameters as names in scope."""
    params = {p.name: p for p in variant.params}
    lines = []
    for text in variant.texts:
        returns, args = SIGNATURES[text.hook]
        locals_ = [_text_param(params[n]) for n in text.params]
        body = text.body if "return" in text.body or returns == "Pair" else f"return ({text.body});"
        if returns == "Pair":
            body = f'float y0 = x0, y1 = x1;\n#line 1 "{text.label}"\n{text.body}\n;return Pair{{y0, y1}};'
        else:
            body = f'#line 1 "{text.label}"\n{body}'
        more = "".join(f", [[maybe_unused]] {a}" for a in args.split(", ") if a)
        lines += _function(returns, text.function, "[[maybe_unused]] const Ctx& ctx" + more, [*locals_, body])
    if lines:
        lines.append('#line 1 "variant"')
    return lines


def _text_param(param: Param) -> str:
    kind = CPP_TYPE[param.dtype]
    if param.rank:
        return f"    [[maybe_unused]] const View<{kind}, {param.rank}> {param.name}{{p[slot_{param.name}]}};"
    head = "qo_head" if param.heads == "qo" else "kv_head"
    return (
        f"    [[maybe_unused]] const {kind} {param.name} = scalar<{kind}>(p[slot_{param.name}], ctx.{head});"
    )
