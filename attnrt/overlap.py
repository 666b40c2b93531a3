# SPDX-License-Identifier: Apache-2.0
"""Results that lie where a run still reads: out and lse against K, V, q and each other.

Where a form's arrays lie is known from their addresses alone, so each set of addresses is looked at once. The rule is about
elements: arrays that only interleave (slices of one fused buffer) are taken, and only they pay for more than comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.tensor import TensorView

__all__ = ["Extent", "check_apart", "check_own"]

LABELS = ("q", "k", "v", "out", "lse")

#: Steps of the exact search for a common byte; past it interleaved arrays count as overlapping.
MAX_WORK = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Where an array lies, from its address: bytes [low, high), its shape, byte strides and item size."""

    low: int
    high: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str

    @staticmethod
    def of(view: TensorView) -> Extent:
        size = view.dtype.itemsize
        strides = tuple(s * size for s in view.strides)
        if 0 in view.shape:
            return Extent(0, 0, view.shape, strides, size, view.dtype.name)
        steps = [(n - 1) * s for n, s in zip(view.shape, strides, strict=True)]
        low = sum(s for s in steps if s < 0)
        return Extent(low, sum(s for s in steps if s > 0) + size, view.shape, strides, size, view.dtype.name)

    def same(self, other: Extent) -> bool:
        """The same array, if the addresses are the same; strides of single entries say nothing."""
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and all(n == 1 or a == b for n, a, b in zip(self.shape, self.strides, other.strides, strict=True))
        )


def check_apart(extents: Sequence[Extent | None], addresses: Sequence[int]) -> None:
    """Raise ArgumentError if out or lse shares memory with another array; out may be q itself.

    Parameters
    ----------
    extents : of q, k, v, out, lse
        None for what is not given.
    addresses : int of each
    """
    for result in (3, 4):
        mine = extents[result]
        if mine is None:
            continue
        low, high = addresses[result] + mine.low, addresses[result] + mine.high
        for i in range(result):
            other = extents[i]
            if other is None or low >= addresses[i] + other.high or addresses[i] + other.low >= high:
                continue
            if i == 0 and addresses[0] == addresses[result] and mine.same(other):
                continue  # a row of q is read whole before its out is written
            if mine.low == mine.high or other.low == other.high:
                continue
            if _share(mine, addresses[result], other, addresses[i]):
                hint = f"Give {LABELS[result]} memory of its own, or leave it out"
                raise ArgumentError(
                    LABELS[result],
                    f"must not overlap {LABELS[i]}",
                    f"bytes {low:#x} to {high:#x}",
                    hint + "; out may be q itself" if i == 0 and result == 3 else hint,
                )


def check_own(view: TensorView, label: str) -> None:
    """Raise ArgumentError where two elements of a result lie on each other: each axis must step past all shorter ones."""
    if 0 in view.shape:
        return
    reach = 1
    for stride, count in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < reach:
            raise ArgumentError(label, "must not overlap itself", f"strides {list(view.strides)}")
        reach += stride * (count - 1)


class _Bytes:
    """The memory of an extent for NumPy, which compares addresses and reads nothing."""

    def __init__(self, extent: Extent, address: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "data": (address, True),
            "shape": extent.shape,
            "strides": extent.strides,
            "typestr": f"|V{extent.itemsize}",
            "version": 3,
        }


def _share(a: Extent, a_address: int, b: Extent, b_address: int) -> bool:
    """Whether two arrays have a byte in common."""
    first, second = np.asarray(_Bytes(a, a_address)), np.asarray(_Bytes(b, b_address))
    try:
        return bool(np.shares_memory(first, second, max_work=MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
