# SPDX-License-Identifier: Apache-2.0
"""Print a compiled variant as one C++17 struct that g++, nvcc and NVRTC all take; the header explains it to kernels."""

from __future__ import annotations

import os

from attnrt.variants.compose import Composed
from attnrt.variants.expr import Node
from attnrt.variants.printer import (
    CPP_TYPE,
    ROW_ARGS,
    Printer,
    function,
    per_key_nodes,
    row_names_of,
    row_values,
)
from attnrt.variants.score_shapes import capped, has_quick, linear_bias, power, reduced, units
from attnrt.variants.variant import PairMap, Param

__all__ = ["include_dir", "print_variant"]

PAIRINGS = {"half": "PAIR_HALF", "interleaved": "PAIR_INTERLEAVED", "single": "PAIR_SINGLE"}


SIGNATURES = {
    "logits": ("float", "float s"),
    "mask": ("bool", ""),
    "output": ("float", "int d, float o"),
    "query": ("Pair", "int d, float x0, float x1"),
    "key": ("Pair", "int d, float x0, float x1"),
    "value": ("Pair", "int d, float x0, float x1"),
}


def include_dir() -> str:
    """Folder of ``attnrt_variant.h``, for the compiler's include path."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")


def print_variant(variant: Composed, name: str = "Variant") -> str:
    """C++ text of ``struct name``; the same for equal keys."""
    printer = Printer(variant.params, variant.texts)
    per_key = per_key_nodes(variant)
    of_row = row_values(per_key)
    row_names = row_names_of(of_row)
    parts = [
        f"struct {name} {{",
        *_flags(variant),
        *_text_functions(variant),
        *_row(printer, of_row, variant.low, variant.high),
        *units(printer, variant, per_key, row_names),
        *_logits(printer, variant.logits, row_names),
        *reduced(printer, variant, row_names),
        *capped(printer, variant, row_names),
        *linear_bias(printer, variant, row_names),
        *power(printer, variant, per_key, row_names),
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


def _row(printer: Printer, values: list[Node], low: Node | None, high: Node | None) -> list[str]:
    fields = [f"{CPP_TYPE[n.dtype]} v{i};" for i, n in enumerate(values)]
    fields += [f"int {n};" for n, end in (("low", low), ("high", high)) if end is not None]
    roots = [*values, *(end for end in (low, high) if end is not None)]
    lines, names = printer.body(roots, {})
    lines.append(f"    return Row{{{', '.join(names)}}};")
    return [
        f"  struct Row {{ {' '.join(fields)} }};",
        *function("Row", "row", "[[maybe_unused]] const Ctx& c", lines),
    ]


def _logits(printer: Printer, root: Node | None, row_names: dict[int, str]) -> list[str]:
    lines, names = ([], ["s"]) if root is None else printer.body([root], row_names)
    lines.append(f"    return {names[0]};")
    short = ["    return logits(p, row(p, c), c, s);"]
    return [
        f"  static constexpr bool quick_logits = {'true' if has_quick(lines) else 'false'};",
        *function("float", "logits", ROW_ARGS + ", [[maybe_unused]] float s", lines),
        *function("float", "logits", "const Ctx& c, float s", short),
    ]


def _mask(printer: Printer, variant: Composed, row_names: dict[int, str]) -> list[str]:
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
        *function("bool", "mask", ROW_ARGS, lines),
        *function("bool", "mask", "const Ctx& c", ["    return mask(p, row(p, c), c);"]),
        "  ATTNRT_HD static void visible([[maybe_unused]] const Row& r, int& low, int& high) {",
        f"    low = {low};",
        f"    high = {high};",
        "  }",
    ]


def _pair(printer: Printer, hook: str, pair: PairMap | None) -> list[str]:
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
        *function("void", hook, args + "[[maybe_unused]] float& x1", lines),
    ]


def _single(printer: Printer, name: str, root: Node | None, args: str, identity: str) -> list[str]:
    lines, names = ([], [identity]) if root is None else printer.body([root], {})
    lines.append(f"    return {names[0]};")
    more = "".join(f", [[maybe_unused]] {a}" for a in args.split(", ") if a)
    return function("float", name, "[[maybe_unused]] const Ctx& c" + more, lines)


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
        lines += function(returns, text.function, "[[maybe_unused]] const Ctx& ctx" + more, [*locals_, body])
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
