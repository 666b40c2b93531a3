# SPDX-License-Identifier: Apache-2.0
"""Attention variants: what changes between the scaled dot product and the output, one definition each.

A variant is composed with others as a tuple, in order. From one traced expression come NumPy evaluation, C++
for the CPU and CUDA text. See docs/add_a_variant.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnrt.registry import Registry
from attnrt.variants.bind import BoundParams
from attnrt.variants.compose import Composed, compose
from attnrt.variants.cpp_text import cpp, user_line
from attnrt.variants.evaluate import NumpyVariant
from attnrt.variants.flash_sigmoid import sigmoid
from attnrt.variants.functions import (
    absolute,
    ceil,
    clip,
    cos,
    cospi,
    exp,
    exp2,
    floor,
    log,
    log2,
    logistic,
    maximum,
    minimum,
    rsqrt,
    sin,
    sinpi,
    sqrt,
    tanh,
    to_float,
    to_int,
    to_int64,
    where,
)
from attnrt.variants.linear_bias import alibi, alibi_slopes
from attnrt.variants.masks import causal, custom_mask, full, sliding_window
from attnrt.variants.print_cpp import include_dir
from attnrt.variants.rotary import rope, rope_frequencies, rope_phases
from attnrt.variants.scales import fp8_scales, sink_logits
from attnrt.variants.soft_cap import softcap
from attnrt.variants.trace import logits, mask, output
from attnrt.variants.untraceable import TraceError
from attnrt.variants.variant import Param, Variant

__all__ = [
    "BoundParams",
    "Composed",
    "NumpyVariant",
    "Param",
    "TraceError",
    "Variant",
    "absolute",
    "alibi",
    "alibi_slopes",
    "causal",
    "ceil",
    "clip",
    "compose",
    "cos",
    "cospi",
    "cpp",
    "custom_mask",
    "exp",
    "exp2",
    "floor",
    "fp8_scales",
    "full",
    "include_dir",
    "log",
    "log2",
    "logistic",
    "logits",
    "mask",
    "maximum",
    "minimum",
    "names",
    "output",
    "register",
    "registry",
    "rope",
    "rope_frequencies",
    "rope_phases",
    "rsqrt",
    "sigmoid",
    "sin",
    "sink_logits",
    "sinpi",
    "sliding_window",
    "softcap",
    "sqrt",
    "tanh",
    "to_float",
    "to_int",
    "to_int64",
    "user_line",
    "where",
]

#: Variants and functions that make one, by name: ours, registered ones, and those of entry points.
registry: Registry[Variant | Callable[..., Variant]] = Registry("variant", "attnrt.variants")

for _maker in (
    *(full, causal, sliding_window, custom_mask, softcap, alibi),
    *(sigmoid, rope, sink_logits, fp8_scales),
):
    registry.register(_maker.__name__, _maker)


def register(name: str) -> Callable[[Any], Any]:
    """Decorator that names a variant, or a function that makes one; it is then ``attnrt.variants.name``."""
    return lambda entry: registry.register(name, entry)


def names() -> tuple[str, ...]:
    """Names of all variants, those of installed packages included."""
    return registry.names()


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and name in registry:
        return registry.get(name)
    raise AttributeError(f"module 'attnrt.variants' has no attribute {name!r}{registry.meant(name)}")
