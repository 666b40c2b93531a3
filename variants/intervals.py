# SPDX-License-Identifier: Apache-2.0
"""Masks as intervals of key positions, where they are that.

The masks of a composition are taken apart at their ANDs. A part that compares ``kv_pos``, or its difference
to a value of the row, with a value of the row is one end of an interval; what is left over stays a predicate.
"""

from __future__ import annotations

import functools

from attnrt.variants.expr import BOOL, INT, ROW, Node, as_node, make
from attnrt.variants.functions import maximum, minimum, sat_add, sat_sub, where
from attnrt.variants.trace import CTX
from attnrt.variants.variant import Bound, Variant

__all__ = ["join_masks"]

INT_MIN = -(2**31)


def _conjuncts(node: Node) -> list[Node]:
    if node.op == "and" and node.dtype == BOOL:
        return [c for a in node.args for c in _conjuncts(a)]
    return [node]


def join_masks(variants: tuple[Variant, ...]) -> tuple[Node | None, Node | None, Node | None]:
    """Low end, high end and the rest of all masks and bounds; each None if it says nothing."""
    lows: list[Node] = []
    highs: list[Node] = []
    rest: list[Node] = []
    for variant in variants:
        if variant.mask is not None:
            for part in _conjuncts(variant.mask):
                if not _as_interval(part, lows, highs):
                    rest.append(part)
        for side, ends in zip(variant.bounds, (lows, highs), strict=True):
            if side is not None:
                ends.append(_bound_node(side, ends is lows))
    low = functools.reduce(maximum, dict.fromkeys(lows)) if lows else None
    high = functools.reduce(minimum, dict.fromkeys(highs)) if highs else None
    return low, high, functools.reduce(lambda a, b: a & b, dict.fromkeys(rest)) if rest else None


def _bound_node(side: Bound, is_left: bool) -> Node:
    distance = make("param", INT, attr=side) if isinstance(side, str) else as_node(side)
    end = sat_sub(CTX.qo_pos, distance) if is_left else sat_add(CTX.qo_pos, distance)
    if not isinstance(side, str):
        return CTX.qo_pos if side == 0 else end
    return where(distance < 0, INT_MIN if is_left else -INT_MIN - 1, end)


def _as_interval(part: Node, lows: list[Node], highs: list[Node]) -> bool:
    """Add ``part`` to the interval's ends if it compares kv_pos, or its difference, to the row."""
    if part.op == "const" and part.attr is True:
        return True
    if part.op not in ("le", "lt", "eq") or part.args[0].dtype != INT:
        return False
    a, b = part.args
    strict = 1 if part.op == "lt" else 0
    centre = _centre(a) if part.op != "eq" and b.level <= ROW else None
    if centre is not None:
        reach = sat_sub(b, strict) if strict else b
        lows.append(sat_sub(centre, reach))
        highs.append(sat_add(centre, reach))
        return True
    solved = _solve(b, a, -strict)  # b >= a + strict
    if solved is None:
        flipped = _solve(a, b, strict)  # a <= b - strict
        solved = None if flipped is None else (not flipped[0], flipped[1])
    if solved is None:
        return False
    is_low, end = solved
    if part.op == "eq":
        lows.append(end)
        highs.append(end)
    else:
        (lows if is_low else highs).append(end)
    return True


def _centre(node: Node) -> Node | None:
    """x of an expression ``abs(kv_pos - x)`` or ``abs(x - kv_pos)`` whose x is a value of the row."""
    if node.op != "abs" or node.args[0].op != "sub":
        return None
    left, right = node.args[0].args
    other = right if left is CTX.kv_pos else left if right is CTX.kv_pos else None
    return other if other is not None and other.level <= ROW else None


def _solve(term: Node, other: Node, slack: int) -> tuple[bool, Node] | None:
    """Solve ``term >= other - slack`` for kv_pos: (is a lower end, the end).

    Called with the sides swapped for <=, where "lower" is then read the other way round. Differences are
    solved in saturating arithmetic: positions near the ends of int32 must not wrap round into view.
    """
    kv = CTX.kv_pos
    if other.level > ROW:
        return None
    limit = sat_sub(other, slack) if slack else other
    if term is kv:
        return True, limit
    if term.op == "sub" and term.args[0] is kv and term.args[1].level <= ROW:
        return True, sat_add(limit, term.args[1])
    if term.op == "sub" and term.args[1] is kv and term.args[0].level <= ROW:
        return False, sat_sub(term.args[0], limit)
    return None
