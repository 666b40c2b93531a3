# SPDX-License-Identifier: Apache-2.0
"""What a planner is asked, as one value: the readable planner and the C++ one read the same, and must answer the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attnrt.formats.base import BlockSparse, Requests
from attnrt.scheduler.base import Traits

__all__ = ["FAR", "Problem", "classes_of", "scattered", "visible_range"]

#: Past every position: the end of an unbounded range. Sums of two still fit in 64 bits.
FAR = 1 << 40


class Problem(NamedTuple):
    """Lengths, structure and rules; no device array is looked at. A tuple, because making one is on the hot path.

    Attributes
    ----------
    parts : tuple of BlockSparse
        Cuts between parts lie on leaf boundaries (scheduler/align.py).
    limits : tuple of (int64 [queries, heads], the same) or None
        Per part: offsets ``[lo, hi)`` in the request to which each query's keys in this part are cut; None: uncut.
    composed : variants.Composed
        Asked for visible key ranges.
    traits, scheduler, tree
    num_kv_heads, group : int
    num_rows : int
        Rows of q, padding included.
    max_slots : int
    """

    parts: tuple[BlockSparse, ...]
    limits: tuple[Any, ...]
    composed: Any
    traits: Traits
    scheduler: Any
    tree: str
    num_kv_heads: int
    group: int
    num_rows: int
    max_slots: int

    @property
    def req_class(self) -> np.ndarray:
        """Numeric class of each request, int32 [num_requests]."""
        return classes_of(self.parts[0].requests, self.traits, self.group)

    @property
    def units(self) -> int:
        """Head ranges that rows are kept apart by: 1, or num_kv_heads if any part has a list per head."""
        return self.num_kv_heads if any(part.heads > 1 for part in self.parts) else 1


def classes_of(requests: Requests, traits: Traits, group: int) -> np.ndarray:
    """Numeric class of each request, by its own ``qo_len * group`` alone; int32 [num_requests]."""
    rows = requests.qo_lens.astype(np.int64) * group
    chosen = np.full(len(rows), len(traits.classes) - 1, np.int32)
    for i in range(len(traits.classes) - 2, -1, -1):
        most = traits.classes[i].max_rows
        chosen[slice(None) if most is None else rows <= most] = i
    return chosen


def scattered(parts: tuple[BlockSparse, ...], run: int) -> bool:
    """Whether some part lists blocks that are no multiples of ``run`` tokens."""
    return any(part.block_size[1] % run and part.kv_base is None for part in parts)


def visible_range(composed: Any, pos_min: np.ndarray, pos_max: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions ``[lo, hi)`` that queries at positions ``pos_min .. pos_max`` may see, clipped to +-FAR; int64 [n] both.

    ``composed.visible_range`` answers with inclusive ends, None where there is no limit; a value without it sees all.
    """
    low, high = np.full(len(pos_min), -FAR, np.int64), np.full(len(pos_min), FAR, np.int64)
    ask = getattr(composed, "visible_range", None)
    if ask is None:
        return low, high
    first, last = ask(pos_min, pos_max)
    if first is not None:
        low = np.clip(np.broadcast_to(np.asarray(first, np.int64), low.shape), -FAR, FAR)
    if last is not None:
        high = np.clip(np.broadcast_to(np.asarray(last, np.int64), high.shape), -FAR, FAR - 1) + 1
    return low, high
