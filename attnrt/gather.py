# SPDX-License-Identifier: Apache-2.0
"""gather(): rows of the cache side by side, the way back of append()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.append import as_view_of, read_rows, read_slots, rotation
from attnrt.backends.base import AppendCall, PagedView
from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.operands import Pool, as_view, read_pool, split_kv
from attnrt.tensor import TensorView, view

if TYPE_CHECKING:
    from attnrt.runtime import Runtime

__all__ = ["gather"]


def gather(
    runtime: Runtime, kv: Any, slots: Any, k: Any, v: Any, rope: Any, positions: Any, stream: Any
) -> None:
    """See Attention.gather; the caller holds the lock."""
    spec = runtime.spec
    k_cache, v_cache = split_kv(spec, kv)
    pool, k_view = _cache(runtime, k_cache, "k_cache", spec.head_dim)
    rows = _writable(read_rows(runtime, k, "k", spec.head_dim), "k")
    values = v_view = None
    if v_cache is not None and v is not None:
        v_pool, v_view = _cache(runtime, v_cache, "v_cache", spec.head_dim_vo)
        if v_pool.slots != pool.slots:
            raise ArgumentError("v_cache", f"must have k_cache's {pool.slots} slots", v_pool.slots)
        values = _writable(read_rows(runtime, v, "v", spec.head_dim_vo), "v")
        if values.shape[0] != rows.shape[0] or values.dtype is not rows.dtype:
            raise ArgumentError(
                "v", f"must have k's {rows.shape[0]} rows and dtype", f"{values.dtype} {list(values.shape)}"
            )
    elif (v is None) != (v_cache is None):
        raise ArgumentError("v", "must be given where the cache has V, and only there", type(v).__name__)
    if (rope is None) != (positions is None):
        raise ArgumentError("positions", "must be given with rope, and only then", type(positions).__name__)
    handle = 0 if runtime.host and stream is None else runtime.ops.stream(stream, as_view_of(kv))
    where = read_slots(runtime, slots, rows.shape[0], pool.slots, handle)
    call = AppendCall(
        k=rows,
        v=values,
        k_cache=k_view,
        v_cache=v_view,
        slots=where,
        positions=None if rope is None else _positions(runtime, positions, rows.shape[0], handle),
        rope=rotation(runtime, rope),
        k_scale=None,
        v_scale=None,
        stream=handle,
        slots_given=True,
    )
    kernel = runtime.any_kernel()
    gatherer = getattr(kernel, "gather", None)
    if gatherer is None:
        why: dict[str, tuple[str, ...]] = {runtime.backend.name: ("cannot gather",)}
        raise UnsupportedError("gather", "needs a backend that gathers", reasons=why)
    if rows.shape[0]:
        gatherer(call)


def _cache(runtime: Runtime, x: Any, label: str, dim: int) -> tuple[Pool, PagedView]:
    """A cache that is read; a pool of slots has pages of one."""
    seen = as_view(x, label, runtime.rules.kv_dtype, runtime.device)
    pool = read_pool(runtime.spec, seen, label, dim)
    return pool, pool.view(seen.ptr, 1, seen)


def _writable(found: TensorView, label: str) -> TensorView:
    if found.readonly or found.immutable:
        raise ArgumentError(label, "must be writable", f"a read-only {found.framework} array")
    return found


def _positions(runtime: Runtime, positions: Any, rows: int, handle: int) -> TensorView:
    """int32 [rows], the host's or the device's."""
    if runtime.host or isinstance(positions, (list, tuple, np.ndarray)):
        array = np.asarray(
            positions if isinstance(positions, (list, tuple, np.ndarray)) else view(positions).numpy()
        )
        if array.shape != (rows,) or (array.size and array.dtype.kind not in "iu"):
            raise ArgumentError(
                "positions", f"must be integers [{rows}]", f"{array.dtype} {list(array.shape)}"
            )
        return runtime.on_device(np.ascontiguousarray(array, np.int32), handle, 1)
    found = as_view(positions, "positions", view(positions).dtype, runtime.device)
    if found.shape != (rows,) or str(found.dtype) != "int32":
        raise ArgumentError("positions", f"must be int32 [{rows}]", f"{found.dtype} {list(found.shape)}")
    return found
