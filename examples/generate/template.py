# SPDX-License-Identifier: Apache-2.0
"""Render the chat template that a model file carries, without a template library.

Chat templates are Jinja. This evaluates the part of Jinja that plain ones use: text, `{{ expression }}`,
`{% for x in y %}` with `loop.first` and `loop.last`, `{% if %}` / `{% elif %}` / `{% else %}`, and expressions of
names, constants, `+`, `[...]`, comparisons, `and`, `or`, `not`. Anything else raises TemplateError and is not guessed
at. Expressions are parsed by Python's own parser and walked node by node, so nothing in a file is ever executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_TAG = re.compile(r"\{%-?.*?-?%\}|\{\{-?.*?-?\}\}|\{#.*?#\}", re.DOTALL)
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class TemplateError(ValueError):
    """The template uses something that this renderer does not know."""


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Return the text of template `source` with `variables`; TemplateError for syntax outside the subset."""
    pieces = _split(source)
    body, end = _parse(pieces, 0, ())
    if end != len(pieces):
        raise TemplateError(f"unexpected tag {pieces[end][1]!r}")
    return _render(body, dict(variables))


def _split(source: str) -> list[tuple[str, str]]:
    """Cut the source into ("text" | "tag" | "value", content), with Jinja's `-` trimming applied."""
    out: list[tuple[str, str]] = []
    at, trim = 0, False
    for match in _TAG.finditer(source):
        raw = match.group()
        text = source[at : match.start()]
        text = text.lstrip() if trim else text
        text = text.rstrip() if raw[2] == "-" else text
        out.append(("text", text))
        trim, at = raw[-3] == "-", match.end()
        if not raw.startswith("{#"):
            out.append(("tag" if raw[1] == "%" else "value", raw[2:-2].strip("-").strip()))
    out.append(("text", source[at:].lstrip() if trim else source[at:]))
    return out


def _parse(pieces: Sequence[tuple[str, str]], at: int, stop: tuple[str, ...]) -> tuple[list[tuple], int]:
    """Build the tree of pieces from `at` up to a tag that begins with a word of `stop`; return it and that place."""
    body: list[tuple] = []
    while at < len(pieces):
        kind, text = pieces[at]
        word = text.split(None, 1)[0] if kind == "tag" and text else ""
        if kind == "text":
            body.append(("text", text))
        elif kind == "value":
            body.append(("value", _expression(text)))
        elif word in stop:
            return body, at
        elif word == "for":
            name, _, source = text[3:].strip().partition(" in ")
            inner, at = _parse(pieces, at + 1, ("endfor",))
            body.append(("for", name.strip(), _expression(source), inner))
        elif word == "if":
            node, at = _parse_if(pieces, at)
            body.append(node)
        else:
            raise TemplateError(f"unknown tag {text!r}")
        at += 1
    if stop:
        raise TemplateError(f"missing {stop[-1]}")
    return body, at


def _parse_if(pieces: Sequence[tuple[str, str]], at: int) -> tuple[tuple, int]:
    branches: list[tuple] = []
    while True:
        word, _, condition = pieces[at][1].partition(" ")
        test = ast.Constant(True) if word == "else" else _expression(condition)
        inner, at = _parse(pieces, at + 1, ("elif", "else", "endif"))
        branches.append((test, inner))
        if pieces[at][1] == "endif":
            return ("if", branches), at


def _expression(text: str) -> ast.expr:
    try:
        # Jinja allows a line break inside a string; the file has them.
        return ast.parse(text.strip().replace("\n", "\\n"), mode="eval").body
    except SyntaxError as error:
        raise TemplateError(f"unreadable expression {text!r}") from error


def _render(body: Sequence[tuple], scope: dict[str, Any]) -> str:
    out = []
    for node in body:
        if node[0] == "text":
            out.append(node[1])
        elif node[0] == "value":
            out.append(str(_evaluate(node[1], scope)))
        elif node[0] == "for":
            items = list(_evaluate(node[2], scope))
            for i, item in enumerate(items):
                loop = {"first": i == 0, "last": i == len(items) - 1, "index": i + 1, "index0": i}
                out.append(_render(node[3], {**scope, node[1]: item, "loop": loop}))
        else:
            out.append(next((_render(b, scope) for test, b in node[1] if _evaluate(test, scope)), ""))
    return "".join(out)


def _evaluate(node: ast.expr, scope: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return scope.get(name)
        case ast.Subscript(value=value, slice=key):
            return _evaluate(value, scope)[_evaluate(key, scope)]
        case ast.Attribute(value=value, attr=key):
            return _evaluate(value, scope)[key]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _evaluate(left, scope) + _evaluate(right, scope)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, scope)
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_evaluate(v, scope) for v in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(_evaluate(v, scope) for v in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_evaluate(left, scope), _evaluate(right, scope))
    raise TemplateError(f"unknown in a template: {ast.unparse(node)}")
