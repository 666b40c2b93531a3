# SPDX-License-Identifier: Apache-2.0
"""Shapes of a final logit that kernels have a cheaper way for, and what is printed of them: the header says how each is used.

A scaled score, a bias that is linear in the key's position, a logistic weight, a capped score. A kernel without such a way calls
``logits`` and gets the same number, but for the rounding.
"""

from __future__ import annotations

import math

from attnrt.variants.compose import Composed
from attnrt.variants.expr import FLOAT, INT, KEY_FIELDS, ROW, Node, topological
from attnrt.variants.printer import ROW_ARGS, Printer, function, per_key_nodes, row_names_of, row_values

__all__ = ["capped", "has_quick", "linear_bias", "needs_keys", "power", "reduced", "units"]

LOG2_E = "1.44269504f"


def _users(roots: list[Node]) -> dict[int, list[Node]]:
    users: dict[int, list[Node]] = {}
    for node in topological(tuple(roots)):
        for arg in node.args:
            users.setdefault(id(arg), []).append(node)
    return users


def units(printer: Printer, variant: Composed, roots: list[Node], row_names: dict[int, str]) -> list[str]:
    """How a kernel may leave out the multiplication of each score by sm_scale, or by a factor of its row: see the header."""
    users = _users(roots)
    scores = [n for n in topological(tuple(roots)) if _is_score(n)]
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
    factor, reduced_to = _positive_factor(variant), _reduced_root(variant)
    is_scaled = reduced_to is not None and _is_score(reduced_to)
    statement = f"{scales} = {scales} * by;" if scales else f"{keeps} = {keeps} / by;" if keeps else ""
    return [
        f"  static constexpr bool scales_score = {'true' if scales else 'false'};",
        f"  static constexpr bool keeps_units = {'true' if keeps else 'false'};",
        f"  static constexpr bool row_units = {'false' if factor is None else 'true'};",
        f"  static constexpr bool is_scaled = {'true' if is_scaled else 'false'};",
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
    return args[1] if _is_score(args[0]) and args[1].op == "mul" else None


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
    found, roots = _linear(variant), per_key_nodes(variant)
    return found is not None and _own(found[0], _users(roots), row_names_of(row_values(roots)))


def linear_bias(printer: Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
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


def power(printer: Printer, variant: Composed, roots: list[Node], row_names: dict[int, str]) -> list[str]:
    """A softmax-free weight that is a logistic function: what it is of, as the power of 2 in 1 / (1 + 2^power)."""
    root = variant.logits
    lines: list[str] = []
    turned: list[str] = []
    power = "0.0f"
    is_logistic = root is not None and root.op == "logistic" and not variant.use_softmax
    if root is not None and is_logistic:
        lines, names = printer.body(root.args, row_names)
        is_logistic = not has_quick(lines)
        turned = _turned(root.args[0], _users(roots), row_names)
        power = names[0] if turned else f"{names[0]} * -{LOG2_E}"
    return [
        f"  static constexpr bool is_logistic = {'true' if is_logistic else 'false'};",
        "  ATTNRT_HD static void turn([[maybe_unused]] Row& r) {",
        *(f"    {name} = {name} * -{LOG2_E};" for name in turned if is_logistic),
        "  }",
        *function(
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


def has_quick(lines: list[str]) -> bool:
    return any(call in line for call in (" f_tanh(", " distance(") for line in lines)


def _positive_factor(variant: Composed) -> Node | None:
    """A number above 0 that the final logit is a multiple of: a parameter or a constant, or any value of the row that the score
    itself is multiplied by."""
    root = variant.logits
    if root is None or root.op != "mul" or root.dtype != FLOAT or not variant.use_softmax:
        return None
    scaled = any(_is_score(a) for a in root.args)
    fit = (a for a in root.args if _is_leaf_of_row(a) or (scaled and a.level <= ROW and not _is_score(a)))
    return next((a for a in fit if _is_positive(variant, a)), None)


def _is_score(node: Node) -> bool:
    return node.op == "input" and node.attr == "score"


def _is_leaf_of_row(node: Node) -> bool:
    return node.op in ("param", "const")


def _is_positive(variant: Composed, node: Node) -> bool:
    """Whether a node is surely above 0 (before it is rounded)."""
    if node.op in ("mul", "div"):
        return all(_is_positive(variant, a) for a in node.args)
    if node.op == "const":
        return node.dtype == FLOAT and 0 < node.attr < math.inf
    return node.op == "param" and variant.param(node.attr).rule == "positive"


def capped(printer: Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
    """Where reduced() is tanh of a positive multiple of the score: that factor."""
    reduced, factor = _reduced_root(variant), None
    if reduced is not None and reduced.op == "tanh" and reduced.args[0].op in ("mul", "div"):
        inner = reduced.args[0]
        for score, other in (inner.args, inner.args[::-1])[: 2 if inner.op == "mul" else 1]:
            if _is_score(score) and _is_positive(variant, other):
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


def reduced(printer: Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
    other = _reduced_root(variant)
    if other is None:
        return []
    lines, names = printer.body([other], row_names)
    return function(
        "float", "reduced", ROW_ARGS + ", [[maybe_unused]] float s", [*lines, f"    return {names[0]};"]
    )
