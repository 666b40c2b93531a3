# SPDX-License-Identifier: Apache-2.0
"""Variants in C++ text, for what an expression cannot say (loops, own math). One text for CPU and CUDA."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from attnrt.errors import ArgumentError
from attnrt.variants.bind import check_default
from attnrt.variants.expr import BOOL, FLOAT, Node, make
from attnrt.variants.variant import Bound, CppText, PairMap, Param, Variant, check_bounds, input_node

__all__ = ["cpp", "user_line"]

PAIR_HOOKS = ("query", "key", "value")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_INPUTS = {"logits": ("score",), "mask": (), "output": ("d", "o")}


def cpp(
    name: str,
    *,
    logits: str | None = None,
    mask: str | None = None,
    query: str | None = None,
    key: str | None = None,
    value: str | None = None,
    output: str | None = None,
    params: Mapping[str, Any] | None = None,
    dim: int | None = None,
    pairing: str = "single",
    bounds: tuple[Bound, Bound] = (None, None),
    use_softmax: bool = True,
) -> Variant:
    """Variant from C++17 function bodies (a body without ``return`` is read as one expression).

    In scope: ``ctx`` (request, qo_pos, kv_pos, qo_head, kv_head, qo_row, qo_len, kv_len, kv_slot), the
    parameters by name (a number as a constant, an array as ``table(i, j)``), and everything of
    attnrt_variant.h in namespace attnrt (``f_exp``, ``f_tanh``, ``max_of``, ...). The text is compiled by
    g++, nvcc and NVRTC: no includes, no static data.

    Parameters
    ----------
    name : str
        Identifier; names the text in compiler messages.
    logits : str
        From ``s`` (float) to the new logit. With use_softmax=False: to the key's weight.
    mask : str
        Whether the key is seen. Must not depend on ``s``.
    query, key, value : str
        Statements that set ``y0`` and ``y1`` from ``d``, ``x0``, ``x1`` (both start as x0 and x1); see
        ``pairing``.
    output : str
        From ``d`` and ``o`` (normalised output) to the new output; ctx has no key here.
    params : mapping
        Name to a default number, to a dtype name ("float32", "int32", "int64": a number that run() must be
        given), to (dtype, rank) for an array with that many indices, or to a ``Param``.
    dim, pairing : int, str
        Of the query, key and value hooks: over the first ``dim`` numbers of a row (None: all, single only),
        pair d is (d, d + dim/2) for "half", (2d, 2d + 1) for "interleaved", and the number d alone for
        "single".
    bounds, use_softmax
        As in ``mask`` and ``Variant``.
    """
    if not isinstance(name, str) or not _IDENTIFIER.match(name):
        raise ArgumentError("cpp: name", "must be an identifier", repr(name))
    bodies = {"logits": logits, "mask": mask, "query": query, "key": key, "value": value, "output": output}
    table = tuple(_param(n, v) for n, v in (params or {}).items())
    names = tuple(p.name for p in table)
    texts: list[CppText] = []
    hooks: dict[str, Any] = {}
    for hook, body in bodies.items():
        if body is None:
            continue
        if not isinstance(body, str) or not body.strip():
            raise ArgumentError(f"cpp {name}: {hook}", "must be a text", repr(body))
        text = CppText(label=f"{name}.{hook}", hook=hook, body=body, params=names)
        texts.append(text)
        hooks[hook] = _pair(text, dim, pairing) if hook in PAIR_HOOKS else _call(text)
    if not texts:
        raise ArgumentError(f"cpp {name}", "must have a hook", hint="logits=, mask=, query=, ...")
    if not use_softmax and logits is None:
        raise ArgumentError(f"cpp {name}: use_softmax=False", "needs a logits text that gives the weight")
    check_bounds(f"cpp {name}", bounds, table)
    return Variant(
        name=name, params=table, bounds=bounds, use_softmax=use_softmax, texts=tuple(texts), **hooks
    )


# Names that mean something else inside a hook's body.
TAKEN = frozenset(
    [
        "s",
        "d",
        "o",
        "p",
        "ctx",
        "x0",
        "x1",
        "y0",
        "y1",
        "auto",
        "bool",
        "break",
        "case",
        "catch",
        "char",
        "class",
        "const",
        "constexpr",
        "continue",
        "default",
        "delete",
        "do",
        "double",
        "else",
        "enum",
        "explicit",
        "extern",
        "false",
        "float",
        "for",
        "friend",
        "goto",
        "if",
        "inline",
        "int",
        "long",
        "namespace",
        "new",
        "operator",
        "private",
        "protected",
        "public",
        "register",
        "return",
        "short",
        "signed",
        "sizeof",
        "static",
        "struct",
        "switch",
        "template",
        "this",
        "throw",
        "true",
        "try",
        "typedef",
        "typename",
        "union",
        "unsigned",
        "using",
        "virtual",
        "void",
        "volatile",
        "while",
    ]
)


def user_line(log: str) -> tuple[str, int] | None:
    """Label ("name.hook") and line of the first message in a compiler's log about a variant's text."""
    found = re.search(r"^([A-Za-z]\w*\.(?:logits|mask|query|key|value|output))[:(](\d+)", log, re.MULTILINE)
    return (found[1], int(found[2])) if found else None


def _param(name: str, given: Any) -> Param:
    if name in TAKEN:
        raise ArgumentError(f"parameter {name}", "must not have a name that is taken in C++ or by the hook")
    if isinstance(given, Param):
        return check_default(dataclasses.replace(given, name=name))
    if isinstance(given, str):
        return Param(name=name, dtype=given)
    if isinstance(given, tuple) and len(given) == 2:
        return Param(name=name, dtype=given[0], rank=given[1])
    dtype = "int32" if isinstance(given, int) and not isinstance(given, bool) else FLOAT
    return check_default(Param(name=name, dtype=dtype, default=given))


def _call(text: CppText) -> Node:
    args = tuple(input_node(n) for n in _INPUTS[text.hook])
    return make("text", BOOL if text.hook == "mask" else FLOAT, args, text.label)


def _pair(text: CppText, dim: int | None, pairing: str) -> PairMap:
    """The pair is one call; its two results are read from it."""
    both = make("pair", "pair", tuple(input_node(n) for n in ("d", "x0", "x1")), text.label)
    y0, y1 = (make(op, FLOAT, (both,)) for op in ("first", "second"))
    return PairMap(dim=dim, pairing=pairing, y0=y0, y1=None if pairing == "single" else y1)
