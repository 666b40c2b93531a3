# SPDX-License-Identifier: Apache-2.0
"""ALiBi (Press, Smith, Lewis, "Train Short, Test Long", 2022): a bias that falls linearly with distance."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.variants.bind import check_default
from attnrt.variants.expr import FLOAT, make
from attnrt.variants.trace import CTX
from attnrt.variants.variant import Param, Variant, input_node

__all__ = ["alibi", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The paper's slopes, float32 [num_heads], of all query heads of a model.

    For a power of two n: 2**(-8/n), its square, its cube, ... For other counts: the slopes of the next lower
    power of two, then every second one of the next higher.
    """
    if isinstance(num_heads, bool) or not hasattr(num_heads, "__index__") or num_heads < 1:
        raise ArgumentError("num_heads", "must be an integer of at least 1", repr(num_heads))
    lower = 1 << (int(num_heads).bit_length() - 1)
    slopes = 2.0 ** (-8.0 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-4.0 / lower * np.arange(1, 2 * (num_heads - lower), 2))
    return np.concatenate([slopes, between]).astype(np.float32)


def alibi(slopes: Any = None) -> Variant:
    """s becomes s + slope * (kv_pos - qo_pos): 0 for the query's own key, lower the older a key is.

    Parameters
    ----------
    slopes : float or float32 [num_qo_heads], optional
        Default of the ``run`` argument ``alibi_slopes``. None: ``alibi_slopes(num_qo_heads)``. A
        tensor-parallel rank holds some heads of a model: give it their slopes,
        ``at.variants.alibi_slopes(total)[first:last]``.
    """
    default = alibi_slopes if slopes is None else slopes
    param = check_default(Param(name="alibi_slopes", default=default))
    slope = make("param", FLOAT, attr="alibi_slopes")
    score = input_node("score")
    return Variant(name="alibi", params=(param,), logits=score + slope * (CTX.kv_pos - CTX.qo_pos))
