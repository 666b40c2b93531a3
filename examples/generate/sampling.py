# SPDX-License-Identifier: Apache-2.0
"""Choosing a token from logits so that the choice depends on (seed, sample, position) and the logits alone.

No generator state is carried along: a token that is verified in a draft tree, decoded alone or recomputed by
`--compare` is drawn with the same random number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """temperature 0 is greedy; `seed` and `stream` (the request and sample) select the random numbers."""

    temperature: float = 0.0
    seed: int = 0
    stream: tuple[int, int] = (0, 0)

    def choose(self, logits: np.ndarray, position: int) -> int:
        """Return the id for sequence position `position` from logits [vocab]; equal logits go to the smallest id."""
        if self.temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max())
        heap = np.cumsum(weights)
        draw = np.random.default_rng((self.seed, *self.stream, position)).random()
        return int(min(np.searchsorted(heap, draw * heap[-1], side="right"), len(heap) - 1))
