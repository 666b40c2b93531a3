# SPDX-License-Identifier: Apache-2.0
"""Division by a constant as a multiplication: FastDiv of kernels/params.cuh."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["fast_div"]


@lru_cache(maxsize=1024)
def fast_div(divisor: int) -> tuple[int, int, int]:
    """(divisor, mul, shift) for 31-bit dividends: n // divisor == (n * mul) >> (32 + shift), or n >> shift if mul is 0.

    With l = ceil(log2 d), mul = ceil(2^(31 + l) / d) is below 2^32 and its error is too small to matter below 2^31
    (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994, theorem 4.2).
    """
    log = (divisor - 1).bit_length()
    if divisor == 1 << log:
        return divisor, 0, log
    return divisor, -(-(1 << (31 + log)) // divisor), log - 1
