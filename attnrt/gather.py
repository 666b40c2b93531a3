# SPDX-License-Identifier: Apache-2.0
"""gather(): rows of the cache side by side, the way back of append()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnrt.backends.base import AppendCall
from attnrt.errors import ArgumentError
from attnrt.operands import split_kv
from attnrt.rows import (
    as_view_of,
    check_writable,
    kernel_method,
    read_cache,
    read_positions,
    read_rows,
    read_slots,
    rotation,
)

if TYPE_CHECKING:
    from attnrt.runtime import Runtime

__all__ = ["gather"]


def gather(
    runtime: Runtime, kv: Any, slots: Any, k: Any, v: Any, rope: Any, positions: Any, stream: Any
) -> None:
    """See Attention.gather; the caller holds the lock."""
    spec = runtime.spec
    k_cache, v_cache = split_kv(spec, kv)
    pool, k_view = read_cache(runtime, k_cache, "k_cache", spec.head_dim, writable=False)
    rows = check_writable(read_rows(runtime, k, "k", spec.head_dim), "k")
    values = v_view = None
    if v_cache is not None and v is not None:
        v_pool, v_view = read_cache(runtime, v_cache, "v_cache", spec.head_dim_vo, writable=False)
        if v_pool.slots != pool.slots:
            raise ArgumentError("v_cache", f"must have k_cache's {pool.slots} slots", v_pool.slots)
        values = check_writable(read_rows(runtime, v, "v", spec.head_dim_vo), "v")
        if values.ptr == rows.ptr and rows.shape[0]:
            raise ArgumentError("v", "must not be k's memory", "the same address")
        if values.shape[0] != rows.shape[0] or values.dtype is not rows.dtype:
            raise ArgumentError(
                "v", f"must have k's {rows.shape[0]} rows and dtype", f"{values.dtype} {list(values.shape)}"
            )
    elif v is not None:
        raise ArgumentError("v", "must be left out where the cache has no V", type(v).__name__)
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
        positions=None if rope is None else read_positions(runtime, positions, rows.shape[0], handle),
        rope=rotation(runtime, rope),
        k_scale=None,
        v_scale=None,
        stream=handle,
        slots_given=True,
    )
    gatherer = kernel_method(runtime, "gather", "cannot gather", "needs a backend that gathers")
    if rows.shape[0]:
        gatherer(call)
