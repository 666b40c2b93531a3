# SPDX-License-Identifier: Apache-2.0
"""Store new K and V rows into the cache, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnrt.backends.reference.views import cache_array, store

if TYPE_CHECKING:
    from attnrt.backends.base import AppendCall, PagedView

__all__ = ["append_rows"]


def append_rows(call: AppendCall) -> None:
    """Row i of k and v to ``slots[i]``; negative slots are skipped, and so are those past the pool."""
    slots = call.slots.numpy().astype(np.int64)
    live = (slots >= 0) & (slots < call.k_cache.num_pages * call.k_cache.page_size)
    rows = np.flatnonzero(live)
    k = call.k.numpy()[rows]
    if call.rope is not None and call.positions is not None and len(rows):
        ctx = {"kv_pos": call.positions.numpy()[rows][:, None], "kv_head": np.arange(k.shape[1])[None]}
        k = call.rope.key(ctx, k.astype(np.float64))
    _put(call.k_cache, k, slots[rows], call.k_scale)
    if call.v is not None and call.v_cache is not None:
        _put(call.v_cache, call.v.numpy()[rows], slots[rows], call.v_scale)


def _put(cache: PagedView, values: np.ndarray, slots: np.ndarray, scale: np.ndarray | None) -> None:
    """Values of the cache's own type whose scale is 1 keep their bits: rounding would saturate an infinity."""
    heads, dim = values.shape[1:]
    target = cache_array(cache, heads, dim)
    factor = np.broadcast_to(np.asarray(1.0 if scale is None else scale, np.float64).reshape(-1), (heads,))
    block = np.empty(values.shape, target.dtype)
    store(block, values.astype(np.float64) / factor[None, :, None], str(cache.dtype))
    if values.dtype == target.dtype:
        block[:, factor == 1] = values[:, factor == 1]
    size = cache.page_size
    for i, slot in enumerate(slots.tolist()):  # in order: of two rows for one slot the later stays
        target[slot // size, slot % size] = block[i]
