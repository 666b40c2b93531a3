# SPDX-License-Identifier: Apache-2.0
"""Soft-capped logits, as in Gemma 2: cap * tanh(s / cap). Masked keys never reach it: the mask comes last."""

from __future__ import annotations

from attnrt.errors import ArgumentError
from attnrt.variants.bind import check_default
from attnrt.variants.expr import FLOAT, make
from attnrt.variants.functions import tanh
from attnrt.variants.variant import Param, Variant, input_node

__all__ = ["softcap"]


def softcap(cap: float) -> Variant:
    """s becomes cap * tanh(s / cap).

    Parameters
    ----------
    cap : float
        Above 0, finite. Default of the ``run`` argument ``softcap`` (float32; a number or one per query
        head).
    """
    if cap is None:
        raise ArgumentError("softcap", "must be a number above 0", cap)
    score, limit = input_node("score"), make("param", FLOAT, attr="softcap")
    param = check_default(Param(name="softcap", default=cap, rule="positive"))
    return Variant(name="softcap", params=(param,), logits=limit * tanh(score * (1.0 / limit)))
