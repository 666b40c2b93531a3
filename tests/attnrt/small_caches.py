# SPDX-License-Identifier: Apache-2.0
"""A small attention whose K and V have other widths, and what tests of rows in caches read of them."""

from __future__ import annotations

import numpy as np
from small_batches import spec_of

import attnrt as at


def make(backend, **changes):
    return at.Attention(spec_of(**({"head_dim_vo": 8} | changes)), backend=backend)


def tokens(cache, kv_layout):
    """[slots, heads, dim] copy."""
    cache = cache.transpose(0, 2, 1, 3) if kv_layout == "HND" else cache
    return np.ascontiguousarray(cache).reshape(-1, *cache.shape[2:])
