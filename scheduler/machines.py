# SPDX-License-Identifier: Apache-2.0
"""Traits of known machines, so that any machine's plan can be made anywhere.

A ruler depends on the class alone, that is on the request's own ``qo_len * group``, never on its kv_len: a row whose request
grows keeps every leaf it had. Costs are in units of one key of one KV head read by a decode item; they are dyadic numbers, so
that sums are exact and a plan does not depend on their order.
"""

from __future__ import annotations

from dataclasses import replace

from attnrt.errors import ArgumentError
from attnrt.scheduler.base import NumericClass, Ruler, Traits

__all__ = ["APPEND_RULER", "DECODE_RULER", "MACHINES", "ONE_LEAF", "token_traits", "traits_of"]

#: Decode: short leaves first, so that few short requests still fill a machine, long ones after, so that states stay few.
DECODE_RULER = Ruler(steps=((4, 256), (14, 512), (24, 1024)), tail=2048)

#: A chunk of a prompt against a long cache: its tiles are compute-bound, so leaves are long.
APPEND_RULER = Ruler(tail=4096)

#: Prefill: rows have one leaf, no partial state ever.
ONE_LEAF = Ruler()

_HOPPER = (
    NumericClass(name="decode", max_rows=64, kv_tile=64, q_tile=64, ruler=DECODE_RULER),
    NumericClass(name="append", max_rows=2048, kv_tile=128, q_tile=128, ruler=APPEND_RULER),
    NumericClass(name="prefill", max_rows=None, kv_tile=128, q_tile=128, ruler=ONE_LEAF),
)

_AMPERE = (
    NumericClass(name="decode", max_rows=64, kv_tile=64, q_tile=64, ruler=DECODE_RULER),
    NumericClass(name="append", max_rows=2048, kv_tile=64, q_tile=128, ruler=APPEND_RULER),
    NumericClass(name="prefill", max_rows=None, kv_tile=64, q_tile=128, ruler=ONE_LEAF),
)

# Up to 16 query-head rows packing a tile's keys costs more than it saves; past that many rows pay for the packing, and 288 of
# them with a tile of 64 keys still fit a second-level cache of 512 KiB (float32, head_dim 128).
_CPU = (
    NumericClass(name="decode", max_rows=16, kv_tile=64, q_tile=64, ruler=DECODE_RULER),
    NumericClass(name="append", max_rows=2048, kv_tile=64, q_tile=288, ruler=APPEND_RULER),
    NumericClass(name="prefill", max_rows=None, kv_tile=64, q_tile=288, ruler=ONE_LEAF),
)

# One (query row, key) pair against one key: 4 * 128 flop at a streaming multiprocessor's share of the dense bf16 rate
# against 512 bytes at its share of the memory rate is about 1/128 on Hopper and 1/64 on Ampere; a CPU core does a pair in
# about an eighth of the time in which it reads a key.
MACHINES: dict[str, Traits] = {
    "h200": Traits(
        name="h200", num_workers=132, classes=_HOPPER, alpha=1.0, beta=1.0, beta_rows=1 / 128, fixed=64.0
    ),
    "h100": Traits(
        name="h100", num_workers=132, classes=_HOPPER, alpha=1.0, beta=1.0, beta_rows=1 / 128, fixed=64.0
    ),
    "a100": Traits(
        name="a100", num_workers=108, classes=_AMPERE, alpha=1.0, beta=1.0, beta_rows=1 / 64, fixed=64.0
    ),
    "cpu": Traits(name="cpu", num_workers=2, classes=_CPU, alpha=1.0, beta=1.0, beta_rows=1 / 8, fixed=16.0),
}


def traits_of(name: str, num_workers: int | None = None) -> Traits:
    """Traits of a known machine.

    Parameters
    ----------
    name : str
        A key of ``MACHINES``; with ``"-token"`` behind it, one class for all rows ("token" determinism).
    num_workers : int, optional
        Workers instead of the machine's own number.

    Raises
    ------
    ArgumentError
        Unknown name, or ``num_workers`` below 1.
    """
    base = name.removesuffix("-token") if isinstance(name, str) else name
    if base not in MACHINES:
        raise ArgumentError("name", f"must be one of {', '.join(sorted(MACHINES))}", repr(name))
    traits = MACHINES[base]
    if num_workers is not None:
        if isinstance(num_workers, bool) or not hasattr(num_workers, "__index__") or int(num_workers) < 1:
            raise ArgumentError("num_workers", "must be an integer of at least 1", repr(num_workers))
        traits = replace(traits, num_workers=int(num_workers))
    return traits if base == name else token_traits(traits)


def token_traits(traits: Traits) -> Traits:
    """The same machine with one numeric class for all rows: a position's bits do not depend on its request's qo_len."""
    first = traits.classes[0]
    q_tile = max(klass.q_tile for klass in traits.classes)
    klass = replace(first, name="token", max_rows=None, q_tile=q_tile)
    return replace(traits, name=traits.name + "-token", classes=(klass,))
