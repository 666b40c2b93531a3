# SPDX-License-Identifier: Apache-2.0
"""A variant that maps q, K and V number by number, by position: what no shipped variant does."""

from __future__ import annotations

from attnrt.variants import Variant, to_float
from attnrt.variants.trace import CTX
from attnrt.variants.variant import PairMap, input_node


def own_maps() -> Variant:
    """q by half, a constant on K, on V a thousandth of the key's position."""
    x = input_node("x0")
    maps = {"query": x * 0.5, "key": x + 0.125, "value": x + to_float(CTX.kv_pos) * 0.001}
    return Variant(name="own", **{k: PairMap(dim=None, pairing="single", y0=y) for k, y in maps.items()})
