# SPDX-License-Identifier: Apache-2.0
"""Store new K and V rows into the cache, and bring rows of it side by side, in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnrt.backends.reference.views import cache_array, store

if TYPE_CHECKING:
    from attnrt.backends.base import AppendCall, PagedView
    from attnrt.tensor import TensorView

__all__ = ["append_rows", "gather_rows"]


def append_rows(call: AppendCall) -> None:
    """Row i of k and v to ``slots[i]``; negative slots are skipped, and so are those past the pool."""
    slots = call.slots.numpy().astype(np.int64)
    live = (slots >= 0) & (slots < call.k_cache.num_pages * call.k_cache.page_size)
    rows = np.flatnonzero(live)
    _put(call.k_cache, _rotated(call, call.k.numpy()[rows], rows), slots[rows], call.k_scale)
    if call.v is not None and call.v_cache is not None:
        _put(call.v_cache, call.v.numpy()[rows], slots[rows], call.v_scale)


def gather_rows(call: AppendCall) -> None:
    """Row i of k and v from ``slots[i]`` of the cache; zeros where that is no slot."""
    slots = call.slots.numpy().astype(np.int64)
    live = np.flatnonzero((slots >= 0) & (slots < call.k_cache.num_pages * call.k_cache.page_size))
    _get(call.k_cache, call.k, slots, live, call)
    if call.v is not None and call.v_cache is not None:
        _get(call.v_cache, call.v, slots, live, None)


def _rotated(call: AppendCall, k: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """K of such rows at their positions, [rows, heads, dim] in float64; as it is where nobody rotates."""
    if call.rope is None or call.positions is None or not len(rows):
        return k
    ctx = {"kv_pos": call.positions.numpy()[rows][:, None], "kv_head": np.arange(k.shape[1])[None]}
    rotated: np.ndarray = call.rope.key(ctx, k.astype(np.float64))
    return rotated


def _get(
    cache: PagedView, out: TensorView, slots: np.ndarray, live: np.ndarray, rotated: AppendCall | None
) -> None:
    """Rows of one cache; those of its own type that nobody rotates keep their bits."""
    target, size = out.numpy(), cache.page_size
    values = cache_array(cache, *target.shape[1:])[slots[live] // size, slots[live] % size]
    target[...] = np.zeros((), target.dtype)
    if rotated is not None:
        values = _rotated(rotated, values, live)
    if values.dtype != target.dtype:
        rows = np.empty(values.shape, target.dtype)
        store(rows, values.astype(np.float64), str(out.dtype))
        values = rows
    target[live] = values


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
