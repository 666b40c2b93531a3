# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., "RoFormer", 2021), fused on q and k by logical position.

The angle is position * frequency, and only its remainder modulo a full turn matters. In float32 the product
alone is wrong by 0.06 rad at position 2**20. Here a frequency is stored as turns per position in 64-bit fixed
point, ``phase = round(frequency / (2 pi) * 2**64)``: the wrapping integer product ``position * phase`` is the
exact angle modulo one turn, and its high 32 bits become a float32 in half turns for sinpi and cospi. The
error of the angle is 2e-7 rad at any 32-bit position: that of rounding the reduced angle to float32, plus
|position| times the 2**-53 of the double in which the frequency was computed (1e-10 rad at 2**20).

theta and the scaling rule only make the phases, which are a parameter: they do not enter compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.variants.bind import check_default
from attnrt.variants.expr import FLOAT, LONG, Node, make
from attnrt.variants.functions import cospi, sinpi, to_float, to_int, to_int64
from attnrt.variants.trace import CTX
from attnrt.variants.variant import PairMap, Param, Variant, input_node

__all__ = ["rope", "rope_frequencies", "rope_phases", "turns_by_position"]

#: The largest float; integers past it are refused before Python raises OverflowError.
LARGEST = 2.0**1023 * (2 - 2.0**-52)

# What each scaling rule needs, and what it may have (with the default).
RULES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "default": ((), {}),
    "linear": (("factor",), {}),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        {},
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None, "truncate": True},
    ),
}


def _rule(scaling: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Name and checked numbers of a scaling dict in the form of Hugging Face's ``rope_scaling``."""
    if scaling is None:
        return "default", {}
    if not isinstance(scaling, Mapping):
        raise ArgumentError("rope: scaling", "must be None or a dict", type(scaling).__name__)
    numbers = dict(scaling)
    name = numbers.pop("rope_type", numbers.pop("type", None))
    numbers.pop("type", None)
    numbers.pop("rope_theta", None)
    if name not in RULES:
        raise ArgumentError("rope: scaling['rope_type']", f"must be one of {', '.join(RULES)}", repr(name))
    needed, optional = RULES[name]
    unknown = sorted(set(numbers) - set(needed) - set(optional))
    missing = sorted(set(needed) - set(numbers))
    if unknown or missing:
        got = f"missing {missing}, unknown {unknown}"
        raise ArgumentError(f"rope: scaling {name!r}", f"takes {', '.join((*needed, *optional))}", got)
    for key, value in numbers.items():
        if key in ("truncate", "attention_factor") and (value is None or isinstance(value, bool)):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST:
            raise ArgumentError(f"rope: scaling[{key!r}]", "must be a number above 0", repr(value))
    return name, {**optional, **numbers}


def rope_frequencies(
    dim: int, theta: float = 10000.0, scaling: Mapping[str, Any] | None = None
) -> np.ndarray:
    """Radians per position of each pair, float64 [dim / 2]: theta ** (-2 d / dim), scaled.

    Parameters
    ----------
    dim : int
        Rotated numbers per head, even.
    theta : float
        Base, above 0.
    scaling : dict, optional
        As in a model's ``rope_scaling``: rope_type "linear" (factor), "llama3" (factor, low_freq_factor,
        high_freq_factor, original_max_position_embeddings) or "yarn" (factor,
        original_max_position_embeddings, and optionally beta_fast, beta_slow, attention_factor, truncate).
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__") or dim < 2 or dim % 2:
        raise ArgumentError("rope: dim", "must be an even number of at least 2", repr(dim))
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta <= LARGEST:
        raise ArgumentError("rope: theta", "must be a finite number above 0", repr(theta))
    name, numbers = _rule(scaling)
    base = float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if name == "linear":
        return base / numbers["factor"]
    if name == "llama3":
        return _llama3(base, numbers)
    if name == "yarn":
        return _yarn(base, dim, float(theta), numbers)
    return base


def _llama3(base: np.ndarray, n: dict[str, Any]) -> np.ndarray:
    """Long waves are stretched by factor, short ones kept, those between blended (Llama 3.1's rule)."""
    low, high = n["low_freq_factor"], n["high_freq_factor"]
    if low >= high:
        raise ArgumentError("rope: scaling['low_freq_factor']", "must be below high_freq_factor", (low, high))
    # Turns of each pair over the context that the model was first trained on.
    turns = n["original_max_position_embeddings"] * base / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (keep + (1 - keep) / n["factor"])


def _yarn(base: np.ndarray, dim: int, theta: float, n: dict[str, Any]) -> np.ndarray:
    """YaRN (Peng et al., 2023): a ramp over pairs, beta_fast to beta_slow turns in the trained context."""

    def pair_with(turns: float) -> float:
        return (
            dim
            * math.log(n["original_max_position_embeddings"] / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    first, last = pair_with(n["beta_fast"]), pair_with(n["beta_slow"])
    if n["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return base * ((1 - ramp) + ramp / n["factor"])


def rope_phases(frequencies: Any) -> np.ndarray:
    """Turns per position in 64-bit fixed point, int64 of the same shape, from radians per position."""
    turns = np.asarray(frequencies, dtype=np.float64) / (2 * math.pi)
    if not np.isfinite(turns).all():
        raise ArgumentError("rope frequencies", "must be finite")
    whole = [round(math.ldexp(float(t), 64)) % 2**64 for t in turns.ravel()]
    return np.array(whole, dtype=np.uint64).astype(np.int64).reshape(turns.shape)


def _rotated(position: Node, scale: Node | None) -> tuple[Node, Node]:
    """Pair (x0, x1) turned by position * frequency of the pair."""
    phase = make("param", LONG, attr="rope_phase")[input_node("d")]
    half_turns = to_float(to_int((to_int64(position) * phase) >> 32)) * 2.0**-31
    c, s = cospi(half_turns), sinpi(half_turns)
    if scale is not None:
        c, s = c * scale, s * scale
    x0, x1 = input_node("x0"), input_node("x1")
    return x0 * c - x1 * s, x1 * c + x0 * s


def turns_by_position(composed: Any) -> bool:
    """Whether a composed variant's hooks on q and k, or that on q alone, are ``rope``, unscaled, "half" pairing, of one width.

    A kernel may then compute the angles in another way than key by key.
    """
    query, key = composed.query, composed.key_map
    if query is None or query.pairing != "half" or (query.y0, query.y1) != _rotated(CTX.qo_pos, None):
        return False
    if key is None:
        return True
    return key.pairing == "half" and key.dim == query.dim and (key.y0, key.y1) == _rotated(CTX.kv_pos, None)


def rope(
    dim: int,
    theta: float = 10000.0,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    keys: bool = True,
) -> Variant:
    """Rotate the first ``dim`` numbers of q by qo_pos and of k by kv_pos, before q.k. Other numbers pass.

    Parameters
    ----------
    dim : int
        Rotated numbers per head, even; less than head_dim is partial rotation.
    theta : float
        Base of the frequencies.
    interleaved : bool
        False: number d is paired with d + dim/2 (Llama, Qwen). True: 2d with 2d + 1 (GPT-J).
    scaling : dict, optional
        See ``rope_frequencies``. For any other rule give the ``run`` argument ``rope_phase``, int64 [dim/2]:
        ``at.variants.rope_phases(frequencies)``.
    keys : bool
        False: q alone is rotated, because K already is (``Attention.append`` and ``Attention.gather`` take a rotation, too).
    """
    if not isinstance(keys, bool):
        raise ArgumentError("rope: keys", "must be True or False", repr(keys))
    if not isinstance(interleaved, bool):
        raise ArgumentError("rope: interleaved", "must be True or False", repr(interleaved))
    phases = rope_phases(rope_frequencies(dim, theta, scaling))
    params = [check_default(Param(name="rope_phase", dtype=LONG, rank=1, default=phases, shape=(dim // 2,)))]
    name, numbers = _rule(scaling)
    scale = None
    if name == "yarn":
        factor = numbers["attention_factor"]
        if factor is None:
            factor = 0.1 * math.log(numbers["factor"]) + 1.0 if numbers["factor"] > 1 else 1.0
        params.append(check_default(Param(name="rope_attention_factor", default=factor, rule="positive")))
        scale = make("param", FLOAT, attr="rope_attention_factor")
    pairing = "interleaved" if interleaved else "half"
    maps = {}
    for hook, position in (("query", CTX.qo_pos), ("key", CTX.kv_pos)):
        y0, y1 = _rotated(position, scale)
        maps[hook] = PairMap(dim=int(dim), pairing=pairing, y0=y0, y1=y1)
    return Variant(
        name="rope" if keys else "rope_queries",
        params=tuple(params),
        query=maps["query"],
        key=maps["key"] if keys else None,
    )
