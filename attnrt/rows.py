# SPDX-License-Identifier: Apache-2.0
"""Arguments of append(), gather() and copy_pages(): rows, the caches they lie in, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.operands import Pool, as_view, check_last, read_pool
from attnrt.tensor import TensorView, view

if TYPE_CHECKING:
    from attnrt.backends.base import PagedView
    from attnrt.runtime import Runtime

__all__ = [
    "as_view_of",
    "check_writable",
    "kernel_method",
    "read_cache",
    "read_positions",
    "read_rows",
    "read_slots",
    "rotation",
]


def as_view_of(kv: Any) -> TensorView:
    """A view of the first array of kv, for its framework."""
    return view(kv[0] if isinstance(kv, (tuple, list)) else kv)


def check_writable(found: TensorView, label: str) -> TensorView:
    if found.readonly or found.immutable:
        raise ArgumentError(label, "must be writable", f"a read-only {found.framework} array")
    return found


def read_cache(runtime: Runtime, x: Any, label: str, dim: int, *, writable: bool) -> tuple[Pool, PagedView]:
    """A cache that is read or written; a pool of slots has pages of one."""
    seen = as_view(x, label, runtime.rules.kv_dtype, runtime.device)
    if writable:
        check_writable(seen, label)
    pool = read_pool(runtime.spec, seen, label, dim)
    return pool, pool.view(seen.ptr, 1, seen)


def read_rows(runtime: Runtime, x: Any, label: str, dim: int) -> TensorView:
    """[rows, num_kv_heads, dim] in q's or out's dtype (what a projection gives) or the cache's own."""
    spec, rules = runtime.spec, runtime.rules
    if x is None:
        raise ArgumentError(label, f"must be [rows, {spec.num_kv_heads}, {dim}]", "None")
    found = view(x)
    taken = (rules.kv_dtype, rules.out_dtype)
    dtype = found.dtype if any(found.dtype is one for one in taken) else rules.q_dtype
    found = as_view(x, label, dtype, runtime.device)
    if len(found.shape) != 3 or found.shape[1:] != (spec.num_kv_heads, dim):
        raise ArgumentError(label, f"must be [rows, {spec.num_kv_heads}, {dim}]", list(found.shape))
    check_last(found, label)
    return found


def read_slots(runtime: Runtime, slots: Any, rows: int, pool: int, handle: int) -> TensorView:
    """The caller's slots: host integers are checked against the pool, a device array is read in place."""
    array = _on_host(runtime, slots)
    if array is None:
        return _on_device(runtime, slots, "slots", "int64", rows)
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError("slots", "must be integers", str(array.dtype))
    array = np.ascontiguousarray(array.astype(np.int64))
    if array.shape != (rows,):
        raise ArgumentError("slots", f"must be [{rows}]", list(array.shape))
    if array.max(initial=-1) >= pool:
        raise ArgumentError("slots", f"must be below the pool's {pool} slots", int(array.max()))
    return runtime.on_device(array, handle)


def read_positions(runtime: Runtime, positions: Any, rows: int, handle: int) -> TensorView:
    """The caller's positions as int32 [rows]: the host's integers are sent, a device array is read in place."""
    array = _on_host(runtime, positions)
    if array is None:
        return _on_device(runtime, positions, "positions", "int32", rows)
    if array.shape != (rows,) or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError("positions", f"must be integers [{rows}]", f"{array.dtype} {list(array.shape)}")
    return runtime.on_device(np.ascontiguousarray(array, np.int32), handle, 1)


def _on_host(runtime: Runtime, x: Any) -> np.ndarray | None:
    """The array where the host can read it; None: it is the device's."""
    if isinstance(x, (list, tuple, np.ndarray)):
        return np.asarray(x)
    return np.asarray(view(x).numpy()) if runtime.host else None


def _on_device(runtime: Runtime, x: Any, label: str, dtype: str, rows: int) -> TensorView:
    """One integer a row on the device, as it is."""
    found = as_view(x, label, view(x).dtype, runtime.device)
    if found.shape != (rows,) or str(found.dtype) != dtype:
        raise ArgumentError(
            label, f"must be {dtype} [{rows}] on the device", f"{found.dtype} {list(found.shape)}"
        )
    return found


def rotation(runtime: Runtime, rope: Any) -> Any:
    """The rotation's key map with its parameters bound: ``.key(ctx, rows)`` in NumPy; kernels read its table."""
    if rope is None:
        return None
    from attnrt.variants import compose

    composed = compose(rope)
    if composed.key_map is None:
        raise ArgumentError(
            "rope", "must be a variant with a key hook, attnrt.variants.rope(...)", repr(composed)
        )
    spec = runtime.spec
    place = getattr(runtime.any_kernel(), "place", None)  # arrays that the rotation reads, on the device
    bound = composed.bind({}, num_qo_heads=spec.num_qo_heads, num_kv_heads=spec.num_kv_heads, place=place)
    return composed.numpy(bound)


def kernel_method(runtime: Runtime, name: str, cannot: str, rule: str) -> Any:
    """What a kernel may do beside attention; an error where its backend has no such thing."""
    method = getattr(runtime.any_kernel(), name, None)
    if method is None:
        why: dict[str, tuple[str, ...]] = {runtime.backend.name: (cannot,)}
        raise UnsupportedError(name, rule, reasons=why)
    return method
