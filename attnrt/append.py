# SPDX-License-Identifier: Apache-2.0
"""append(): this step's K and V into the cache, at the slots the loaded plan has at the queries' positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.arguments import param_of
from attnrt.backends.base import AppendCall
from attnrt.errors import ArgumentError, PlanError, UnsupportedError
from attnrt.operands import split_kv
from attnrt.rows import as_view_of, kernel_method, read_cache, read_rows, read_slots, rotation
from attnrt.variants.bind import check_names

if TYPE_CHECKING:
    from attnrt.runtime import Runtime
    from attnrt.scheduler.base import Plan
    from attnrt.tensor import TensorView

__all__ = ["append", "copy_pages", "slots_of"]

#: Names of the run arguments that scale an fp8 cache.
SCALES = ("k_scale", "v_scale")


def append(
    runtime: Runtime, k: Any, v: Any, kv: Any, slots: Any, rope: Any, stream: Any, params: dict[str, Any]
) -> None:
    """See Attention.append; the caller holds the lock."""
    spec = runtime.spec
    k_cache, v_cache = split_kv(spec, kv)
    rows = read_rows(runtime, k, "k", spec.head_dim)
    values = None
    if v_cache is not None:
        values = read_rows(runtime, v, "v", spec.head_dim_vo)
        if values.shape[0] != rows.shape[0] or values.dtype is not rows.dtype:
            raise ArgumentError(
                "v",
                f"must have k's {rows.shape[0]} rows and dtype {rows.dtype}",
                f"{values.dtype} {list(values.shape)}",
            )
    elif v is not None:
        raise ArgumentError(
            "v", "must be None with shared_kv", type(v).__name__, "V is the start of K's rows"
        )
    plan = runtime.tenant.loaded.plan if runtime.tenant.loaded is not None else None
    pool, k_view = read_cache(runtime, k_cache, "k_cache", spec.head_dim, writable=True)
    if slots is None and plan is not None and pool.page_size:
        sizes = {part.block_size[1] for part in plan.index.parts} - {1, pool.page_size}
        if sizes:
            raise PlanError(
                "kv", f"must have pages of {max(sizes)} tokens, as the loaded plan", pool.page_size
            )
    v_view = None
    if v_cache is not None:
        v_pool, v_view = read_cache(runtime, v_cache, "v_cache", spec.head_dim_vo, writable=True)
        if v_pool.slots != pool.slots:
            raise ArgumentError("v_cache", f"must have k_cache's {pool.slots} slots", v_pool.slots)
    handle = 0 if runtime.host and stream is None else runtime.ops.stream(stream, rows)
    where, positions = _where(runtime, plan, rows.shape[0], slots, pool.slots, rope, handle)
    scales = _scales(runtime, params)
    kernel = runtime.any_kernel()
    call = AppendCall(
        k=rows,
        v=values,
        k_cache=k_view,
        v_cache=v_view,
        slots=where,
        positions=positions,
        rope=rotation(runtime, rope),
        k_scale=scales[0],
        v_scale=scales[1],
        stream=handle,
        slots_given=slots is not None,
    )
    if not rows.shape[0]:
        return
    again = kernel.append(call)
    if again is None or rope is not None or params or isinstance(slots, (list, tuple, np.ndarray)):
        return
    if rows.framework != "jax" and not runtime.host:
        arrays, current = (k, k_cache, v_cache, v, slots), runtime.ops.current_stream(rows)
        function, record = again.native
        runtime.appends.add(
            arrays, function, record, (None,) * 5, 1.0, runtime.device.index, current, again, handle
        )


def copy_pages(runtime: Runtime, kv: Any, source: Any, target: Any, stream: Any) -> None:
    """See Attention.copy_pages; the caller holds the lock."""
    spec = runtime.spec
    k_cache, v_cache = split_kv(spec, kv)
    pool, k_view = read_cache(runtime, k_cache, "k_cache", spec.head_dim, writable=True)
    views = [k_view]
    if v_cache is not None:
        v_pool, v_view = read_cache(runtime, v_cache, "v_cache", spec.head_dim_vo, writable=True)
        if (v_pool.num_pages, v_pool.page_size) != (pool.num_pages, pool.page_size):
            raise ArgumentError("v_cache", f"must have k_cache's {pool.num_pages} pages", v_pool.num_pages)
        views.append(v_view)
    begin, end = (_page_ids(x, name, pool.num_pages) for x, name in ((source, "source"), (target, "target")))
    if begin.shape != end.shape:
        raise ArgumentError("target", f"must have source's {len(begin)} pages", len(end))
    if len(np.unique(end)) != len(end) or np.isin(end, begin).any():
        raise ArgumentError("target", "must name each page once and none of source's", end.tolist())
    copier = kernel_method(runtime, "copy_pages", "cannot copy pages", "needs a backend that copies")
    handle = 0 if runtime.host and stream is None else runtime.ops.stream(stream, as_view_of(kv))
    if not len(begin):
        return
    pages = tuple(runtime.on_device(ids, handle, place) for place, ids in enumerate((begin, end)))
    copier(tuple(views), pages, handle)


def _page_ids(ids: Any, label: str, num_pages: int) -> np.ndarray:
    """Host page ids as int64 [n], checked against the pool."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(
            label, "must be integers [pages] on the host", f"{array.dtype} {list(array.shape)}"
        )
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < num_pages):
        raise ArgumentError(label, f"must be pages of the pool's {num_pages}", array.tolist())
    return np.ascontiguousarray(array, np.int64)


def _where(
    runtime: Runtime, plan: Plan | None, rows: int, slots: Any, pool: int, rope: Any, handle: int
) -> tuple[TensorView, TensorView | None]:
    """Slot (int64) and, for a rotation, position (int32) of every row, where the kernel reads them."""
    if slots is not None and rope is None:
        return read_slots(runtime, slots, rows, pool, handle), None
    if plan is None:
        raise PlanError(
            "plan", "must be loaded before append without slots, or with rope", None, "attn.plan(index)"
        )
    own, positions = runtime.append_slots(plan)
    if rows != plan.index.num_qo:
        raise ArgumentError("k", f"must have the loaded plan's {plan.index.num_qo} rows", rows)
    if slots is not None:
        return read_slots(runtime, slots, rows, pool, handle), runtime.on_device(positions, handle, 1)
    if own is None:
        raise UnsupportedError(
            "append",
            "needs slots= where the index is bound or has a list per KV head",
            None,
            "Give slots=[rows]",
        )
    if own.max(initial=-1) >= pool:
        raise ArgumentError("kv", f"must hold slot {int(own.max())} of the loaded plan", f"{pool} slots")
    if (own < 0).any():
        raise ArgumentError(
            "plan",
            "must have a key at every query's position",
            f"none for row {int(np.argmin(own))}",
            "Give slots=",
        )
    return runtime.on_device(own, handle), None if rope is None else runtime.on_device(positions, handle, 1)


def _scales(runtime: Runtime, params: dict[str, Any]) -> tuple[Any, Any]:
    """k_scale and v_scale as NumPy arrays, from the arguments or the variant's defaults; None: 1."""
    spec = runtime.spec
    check_names(spec.composed.params, params)
    if not any(p.name in SCALES for p in spec.composed.params):
        return None, None
    values = {name: param_of(runtime.device, name, value) for name, value in params.items()}
    table = spec.composed.bind(values, num_qo_heads=spec.num_qo_heads, num_kv_heads=spec.num_kv_heads)
    return table.host.get("k_scale"), table.host.get("v_scale")


def slots_of(plan: Plan) -> tuple[np.ndarray | None, np.ndarray]:
    """int64 [num_qo] slot of the key at each row's own position (-1: none), and int32 [num_qo] positions.

    A query's own key is looked for first where it lies when queries are the last keys of their request; only where the position
    there is another one is the whole list searched. None: the slots are not the host's to know.
    """
    index = plan.index
    slots = np.full(index.num_qo, -1, np.int64)
    positions = np.zeros(index.num_qo, np.int32)
    known = True
    for part in index.parts:
        count = int(part.qo_indptr[-1])
        rows = np.arange(count) if part.qo_index is None else part.qo_index[:count].astype(np.int64)
        positions[rows] = part.qo_pos[:count]
        if part.heads > 1 or part.features.bound_indices or part.features.bound_kv_lens:
            known = False
        elif known and count:
            found = _part_slots(part, rows)
            slots[rows] = np.where(found >= 0, found, slots[rows])
    return (slots if known else None), positions


def _part_slots(part: Any, rows: np.ndarray) -> np.ndarray:
    """Slot of each query's own key in one part, -1 if it is not there."""
    count = len(rows)
    block_row = np.repeat(np.arange(part.num_rows), np.diff(part.qo_indptr))
    request, position = part.request[:count], part.qo_pos[:count].astype(np.int64)
    # the i-th of a request's queries is the last but qo_len - i of its keys
    first = np.full(len(part.requests), np.iinfo(np.int64).max)
    np.minimum.at(first, request, rows)
    offset = (
        part.requests.kv_lens[request].astype(np.int64)
        - part.requests.qo_lens[request]
        + rows
        - first[request]
    )
    j = offset - part.kv_offset[block_row]
    slots = _slots_at(part, block_row, j, position)
    if part.block_pos is None:
        missing = slots < 0
        again = position[missing] - part.kv_pos[block_row[missing]]
        slots[missing] = _slots_at(part, block_row[missing], again, position[missing])
        return slots
    for i in np.flatnonzero(slots < 0):  # positions without order: look through the list
        row = block_row[i]
        every = np.arange(part.kv_begin[row], part.kv_end[row])
        found = _slots_at(part, np.full(len(every), row), every, np.full(len(every), position[i]))
        slots[i] = found[found >= 0][0] if (found >= 0).any() else -1
    return slots


def _slots_at(part: Any, row: np.ndarray, j: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Slot of list place j of each row if it is live, no hole, and at ``position``; else -1."""
    live = (j >= part.kv_begin[row]) & (j < part.kv_end[row])
    j = np.where(live, j, 0)
    size = part.block_size[1]
    entry = np.where(live, part.indptr[row] + j // size, 0)
    if part.block_pos is None:
        at = part.kv_pos[row] + j
    else:
        at = (part.block_pos[entry] if len(part.block_pos) else np.zeros_like(j)) + j % size
    if part.indices is None:
        slots = part.kv_base[row] + j
    else:
        block = part.indices[entry].astype(np.int64) if len(part.indices) else np.full(len(j), -1)
        slots = np.where(block >= 0, block * size + j % size, -1)
    return np.where(live & (at == position), slots, -1)
