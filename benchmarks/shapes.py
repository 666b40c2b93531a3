# SPDX-License-Identifier: Apache-2.0
"""Shapes of batches by name: lengths, heads, variant, layout. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["CAP", "THETA", "WINDOW", "Shape", "visible_pairs"]

#: Numbers of the variants that every provider is given.
CAP, WINDOW, THETA = 30.0, 1024, 10000.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths, heads and variant of a batch; the arrays come with Case.

    Attributes
    ----------
    kv, qo : tuple of int
        Keys and queries of each request; no ``qo``: one query each.
    page : int
        Tokens per page; 0: contiguous K and V.
    variant : str
        causal, full, softcap, window, alibi, rope, sigmoid, traced, twin (the last two: one logits hook, traced from Python and
        in C++ text), custom and tree (masks), blocks (block-sparse).
    prefix : int
        First tokens, in whole pages, that all requests share.
    block, kept : int, float
        Of block-sparse shapes: queries and keys of a block, share of the blocks.
    per_head : int
        0, or the pages that each head reads of its own (page-sparse decode).
    sequential : bool
        Pages lie in the order of the keys instead of at random.
    group : str
        For the summary.
    """

    name: str
    kv: tuple[int, ...]
    qo: tuple[int, ...] = ()
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_vo: int = 0
    page: int = 16
    kv_dtype: str = "bfloat16"
    q_dtype: str = "bfloat16"
    variant: str = "causal"
    prefix: int = 0
    block: int = 0
    kept: float = 1.0
    per_head: int = 0
    sequential: bool = False
    group: str = ""

    @property
    def qo_lens(self) -> tuple[int, ...]:
        return self.qo or (1,) * len(self.kv)

    @property
    def dim_vo(self) -> int:
        return self.head_dim_vo or self.head_dim

    @property
    def shared(self) -> int:
        """Tokens in whole pages that all requests share."""
        return self.prefix // self.page * self.page if self.prefix else 0


def visible_pairs(shape: Shape) -> int:
    """(query, key) pairs of one head that the variant lets through, block-sparse and masks aside."""
    total = 0
    for qo, kv in zip(shape.qo_lens, shape.kv, strict=True):
        first = kv - qo  # position of the first query
        seen = np.arange(first + 1, kv + 1) if shape.variant != "full" else np.full(qo, kv)
        if shape.variant == "window":
            seen = np.minimum(seen, WINDOW)
        total += int(seen.sum())
    return total
