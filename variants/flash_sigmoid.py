# SPDX-License-Identifier: Apache-2.0
"""Sigmoid attention (Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid ...", 2024)."""

from __future__ import annotations

from typing import Any

from attnrt.variants.bind import check_default
from attnrt.variants.expr import FLOAT, make
from attnrt.variants.functions import logistic
from attnrt.variants.variant import Param, Variant, input_node

__all__ = ["sigmoid"]


def sigmoid(scale: Any = 1.0, bias: Any = 0.0) -> Variant:
    """Each key's weight is sigmoid(scale * s + bias); there is no softmax, so weights need not sum to 1.

    A masked key has weight 0, partial states merge by adding, and there is no lse: asking for one is an
    error. A logits hook after this one, a learned sink or a second softmax-free variant is an error.

    Parameters
    ----------
    scale, bias : float
        Defaults of the ``run`` arguments ``sigmoid_scale`` and ``sigmoid_bias`` (a number or one per query
        head). The paper's bias is -log(number of keys).
    """
    params = tuple(
        check_default(Param(name=f"sigmoid_{n}", default=v)) for n, v in (("scale", scale), ("bias", bias))
    )
    factor, shift = (make("param", FLOAT, attr=p.name) for p in params)
    weight = logistic(input_node("score") * factor + shift)
    return Variant(name="sigmoid", params=params, logits=weight, use_softmax=False)
