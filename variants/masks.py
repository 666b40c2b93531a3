# SPDX-License-Identifier: Apache-2.0
"""Which keys a query sees: causal, full, sliding window, and the mask bits that an index owns.

All read logical positions and nothing else (contract 4), so a window or a causal limit is right for chunks,
split requests and pruned indexes without knowing about them.
"""

from __future__ import annotations

import numbers

from attnrt.errors import ArgumentError
from attnrt.variants.bind import check_default
from attnrt.variants.expr import INT
from attnrt.variants.trace import CTX
from attnrt.variants.variant import Param, Variant

__all__ = ["causal", "custom_mask", "full", "sliding_window"]


def full() -> Variant:
    """Every query sees every key of its request."""
    return Variant(name="full")


def causal() -> Variant:
    """A query sees the keys at or before its own position: kv_pos <= qo_pos."""
    return Variant(name="causal", mask=CTX.kv_pos <= CTX.qo_pos, bounds=(None, 0))


def sliding_window(left: int, right: int = 0) -> Variant:
    """A query sees qo_pos - left <= kv_pos <= qo_pos + right: ``left + 1`` keys with itself when right is 0.

    Parameters
    ----------
    left, right : int
        Distances in positions, >= 0; -1: unbounded on that side. Defaults of the ``run`` arguments
        ``window_left`` and ``window_right`` (int32; a number or one per query head). A run may narrow the
        window of its plan; to widen it, plan with the wider one.

    Raises
    ------
    ArgumentError
        A distance below -1.
    """
    params: list[Param] = []
    for name, value in (("left", left), ("right", right)):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < -1:
            raise ArgumentError(
                f"sliding_window: {name}", "must be an integer >= 0, or -1 for unbounded", value
            )
        params.append(check_default(Param(name=f"window_{name}", dtype=INT, default=value, rule="window")))
    return Variant(name="sliding_window", params=tuple(params), bounds=("window_left", "window_right"))


def custom_mask() -> Variant:
    """A query sees a key only if the mask bit that the index holds for the pair is set.

    The bits are ANDed with every other mask of the composition: ``(causal(), custom_mask())`` sees what both
    allow.
    """
    return Variant(name="custom_mask", reads_index_mask=True)
