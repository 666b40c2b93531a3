# SPDX-License-Identifier: Apache-2.0
"""Scores that run a course over a request's keys, for kernels whose running maximum seldom moves under random ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from attnrt.testing import Case

#: What is added to the score of a key, in natural units, by its place in the request (0 to 1).
COURSES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rising": lambda x: 300.0 * x - 150.0,
    "slowly": lambda x: 8.0 * x,  # the maximum falls behind by less than a factor of 2^8 for several tiles
    "negative": lambda x: 300.0 * x - 330.0,
    "negative, then one": lambda x: np.where(x > 0.9, 20.0, -160.0),
}


def along(case: Case, name: str) -> Case:
    """The case with one dimension of q and K replaced, so that scores run the course; for every third row of queries it runs
    the other way round (from its negative)."""
    d = case.spec.head_dim
    q, k = [x.copy() for x in case.q], [x.copy() for x in case.k]
    for rows, keys in zip(q, k, strict=True):
        rows[..., 0] = np.sqrt(d)
        if not name.startswith("negative"):
            rows[::3, :, 0] = -np.sqrt(d)
        keys[..., 0] = COURSES[name](np.arange(len(keys)) / max(1, len(keys)))[:, None]
    return replace(case, q=tuple(q), k=tuple(k))
