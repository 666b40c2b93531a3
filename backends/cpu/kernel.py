# SPDX-License-Identifier: Apache-2.0
"""From a Call of named views to the C records of abi.h, and the calls into machine code.

cffi releases the interpreter's lock around each call. What stays the same between two loads is packed once per load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from attnrt.backends.cpu._native import ffi, lib

from attnrt.backends.cpu.families import Code, family_number, loops
from attnrt.backends.cpu.traits import TOKEN_MAJOR

if TYPE_CHECKING:
    from attnrt.backends.base import AppendCall, Call, Loaded, PagedView, PartViews
    from attnrt.scheduler.base import NumericClass
    from attnrt.spec import AttentionSpec
    from attnrt.tensor import TensorView

__all__ = ["DTYPE_CODES", "CpuKernel", "copy_pages"]

#: Names of element types in abi.h.
DTYPE_CODES = {
    "float32": lib.ATTNRT_F32,
    "float16": lib.ATTNRT_F16,
    "bfloat16": lib.ATTNRT_BF16,
    "float8_e4m3fn": lib.ATTNRT_E4M3,
    "float8_e5m2": lib.ATTNRT_E5M2,
}

#: Plans whose records are kept, so that attentions that take turns do not pack again.
_REMEMBER = 4

_POINTERS = {
    "qo_index": "int32_t *",
    "request": "int32_t *",
    "qo_pos": "int32_t *",
    "indptr": "int32_t *",
    "indices": "int32_t *",
    "kv_base": "int64_t *",
    "kv_pos": "int32_t *",
    "block_pos": "int32_t *",
    "kv_begin": "int32_t *",
    "kv_end": "int32_t *",
    "kv_offset": "int32_t *",
    "mask": "uint8_t *",
    "mask_offset": "int64_t *",
    "mask_begin": "int32_t *",
}


class _Packed:
    """The part of a call that a load fixes, with all that its pointers need kept alive."""

    __slots__ = ("classes", "keep", "loaded", "num_merges", "num_workers", "parts", "plan")

    def __init__(self, loaded: Loaded, wants_rows: bool) -> None:
        self.loaded = loaded
        self.keep: list[Any] = []
        self.parts = ffi.new("attnrt_part[]", len(loaded.parts))
        for record, part in zip(self.parts, loaded.parts, strict=True):
            _pack_part(record, part)
        classes = loaded.plan.traits.classes
        self.classes = ffi.new("attnrt_class[]", len(classes))
        for record, klass in zip(self.classes, classes, strict=True):
            self.keep.append(_pack_class(record, klass))
        self.num_workers = loaded.worker_indptr.shape[0] - 1
        self.num_merges = loaded.merge_rows.shape[0]
        plan = self.plan = ffi.new("attnrt_plan *")
        plan.parts, plan.classes = self.parts, self.classes
        plan.num_workers, plan.num_merges = self.num_workers, self.num_merges
        plan.pairwise = loaded.plan.tree == "pairwise"
        for name, view in (
            ("qo_lens", loaded.qo_lens),
            ("kv_lens", loaded.kv_lens),
            ("bound_kv_lens", loaded.bound_kv_lens),
            ("items", loaded.work),
            ("worker_indptr", loaded.worker_indptr),
            ("merges", loaded.merge_rows),
            ("merge_slots", loaded.merge_slots),
            ("merge_leaves", loaded.merge_leaves),
        ):
            setattr(plan, name, _pointer("int32_t *", view))
        plan.partial_acc = _pointer("float *", loaded.partial_acc)
        plan.partial_ml = _pointer("float *", loaded.partial_ml)
        if wants_rows:
            for name, array in zip(("row_request", "row_pos"), _rows_of(loaded), strict=True):
                self.keep.append(array)
                setattr(plan, name, ffi.cast("int32_t *", array.ctypes.data))


def _pointer(ctype: str, view: TensorView | None) -> Any:
    return ffi.NULL if view is None else ffi.cast(ctype, view.ptr)


def _pack_part(record: Any, part: PartViews) -> None:
    record.block_size, record.heads = part.block_size, part.heads
    for name, ctype in _POINTERS.items():
        setattr(record, name, _pointer(ctype, getattr(part, name)))
    record.mask_bytes = 0 if part.mask is None else part.mask.shape[0]


def _pack_class(record: Any, klass: NumericClass) -> Any:
    steps = ffi.new("int32_t[]", [n for step in klass.ruler.steps for n in step])
    record.kv_tile, record.token_major = klass.kv_tile, klass.name in TOKEN_MAJOR
    record.num_steps, record.steps, record.tail = len(klass.ruler.steps), steps, klass.ruler.tail
    return steps


def _rows_of(loaded: Loaded) -> tuple[np.ndarray, np.ndarray]:
    """Request (-1: none) and position of each row of q, for hooks that run when a row is finished."""
    plan = loaded.plan
    request = np.full(plan.num_rows, -1, np.int32)
    position = np.zeros(plan.num_rows, np.int32)
    for part in plan.parts:
        rows = slice(0, len(part.request)) if part.qo_index is None else part.qo_index
        request[rows], position[rows] = part.request, part.qo_pos
    return request, position


def _pack_pool(record: Any, view: PagedView) -> None:
    record.ptr = ffi.cast("void *", view.ptr)
    record.num_pages, record.page_size = view.num_pages, view.page_size
    record.stride_page, record.stride_token = view.stride_page, view.stride_token
    record.stride_head = view.stride_head


class CpuKernel:
    """Machine code of one spec's variant, ready to run.

    Parameters
    ----------
    spec : AttentionSpec
    code : Code
    family : str
    num_threads : callable
        Gives the number of threads of the next run.
    """

    def __init__(self, spec: AttentionSpec, code: Code, family: str, num_threads: Callable[[], int]) -> None:
        self.spec, self.code, self.family = spec, code, family
        self._num_threads = num_threads
        self._packed: list[_Packed] = []
        composed = spec.composed
        self._wants_rows = composed.sink is not None or composed.output is not None
        fixed = self._fixed = ffi.new("attnrt_call *")
        fixed.num_qo_heads, fixed.num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
        fixed.head_dim, fixed.head_dim_vo = spec.head_dim, spec.head_dim_vo
        fixed.q_dtype, fixed.kv_dtype = DTYPE_CODES[spec.q_dtype], DTYPE_CODES[spec.kv_dtype]
        fixed.out_dtype, fixed.shared_kv = DTYPE_CODES[spec.out_dtype], spec.shared_kv
        fixed.loops = loops(family)

    def attend(self, call: Call) -> None:
        """Run every work item: partial states, or finished rows of out and lse."""
        packed = self._pack(call.loaded)
        self._run(self.code.attend, packed, call, packed.num_workers)

    def merge(self, call: Call) -> None:
        """Fold and finish every row of the merge list."""
        packed = self._pack(call.loaded)
        if packed.num_merges:
            self._run(self.code.merge, packed, call, min(packed.num_merges, 4 * self._num_threads()))

    def append(self, call: AppendCall) -> None:
        """Store new K and V rows into the cache."""
        slots = ffi.cast("int64_t *", call.slots.ptr)
        rotated = None
        if call.rope is not None:
            rotated = _rotate(call)
        _store(self.family, call.k, call.k_cache, slots, call.k_scale, rotated)
        if call.v is not None:
            assert call.v_cache is not None
            _store(self.family, call.v, call.v_cache, slots, call.v_scale, None)

    def gather(self, call: AppendCall) -> None:
        """Bring rows of the cache side by side: NumPy's indexing, which memory bounds as much as C++."""
        from attnrt.backends.reference.append import gather_rows

        gather_rows(call)

    def copy_pages(
        self, pools: tuple[PagedView, ...], pages: tuple[TensorView, TensorView], stream: int
    ) -> None:
        """Copy pages of K and V to other pages of the same pools."""
        source, target = (view.numpy() for view in pages)
        for pool, dim in zip(pools, (self.spec.head_dim, self.spec.head_dim_vo), strict=False):
            copy_pages(pool, source, target, self.spec.num_kv_heads, dim)

    def _pack(self, loaded: Loaded) -> _Packed:
        for packed in self._packed:
            if packed.loaded is loaded:
                return packed
        packed = _Packed(loaded, self._wants_rows)
        self._packed = [packed, *self._packed[: _REMEMBER - 1]]
        return packed

    def _run(self, function: Any, packed: _Packed, call: Call, num_workers: int) -> None:
        record = ffi.new("attnrt_call *", self._fixed[0])
        record.plan = packed.plan[0]
        q, out, lse = call.q, call.out, call.lse
        record.q = ffi.cast("void *", q.ptr)
        record.q_stride_row, record.q_stride_head, _ = q.strides
        _pack_pool(record.k, call.k)
        _pack_pool(record.v, call.v)
        record.out = ffi.cast("void *", out.ptr)
        record.out_stride_row, record.out_stride_head, _ = out.strides
        if lse is not None:
            record.lse = ffi.cast("float *", lse.ptr)
            record.lse_stride_row, record.lse_stride_head = lse.strides
        record.sm_scale = call.sm_scale
        record.params = ffi.cast("void *", call.params.table.ctypes.data)
        if lib.attnrt_run(function, record, num_workers, self._num_threads()):
            raise MemoryError("scratch memory of an attention work item")


def _rotate(call: AppendCall) -> np.ndarray:
    """K's rows after the rotation, float32: the variant's own key map in NumPy, at the positions given."""
    assert call.positions is not None
    k = call.k.numpy()
    heads = np.arange(k.shape[1])[None]
    ctx = {"kv_pos": call.positions.numpy()[:, None], "kv_head": heads}
    return np.ascontiguousarray(call.rope.key(ctx, k.astype(np.float64)), dtype=np.float32)


def _store(
    family: str, rows: TensorView, cache: PagedView, slots: Any, scale: Any, values: np.ndarray | None
) -> None:
    """``values`` (float32, contiguous) stand in for the numbers of ``rows`` if given."""
    record = ffi.new("attnrt_store *")
    if values is None:
        record.src, record.src_dtype = ffi.cast("void *", rows.ptr), DTYPE_CODES[str(rows.dtype)]
        record.src_stride_row, record.src_stride_head, _ = rows.strides
    else:
        record.src, record.src_dtype = ffi.cast("void *", values.ctypes.data), lib.ATTNRT_F32
        record.src_stride_row, record.src_stride_head = values.shape[1] * values.shape[2], values.shape[2]
    record.dst_dtype = DTYPE_CODES[str(cache.dtype)]
    _pack_pool(record.dst, cache)
    record.slots = slots
    if scale is not None:
        scale = np.ascontiguousarray(scale, dtype=np.float32).reshape(-1)
        record.scale = ffi.cast("float *", scale.ctypes.data)
        record.scale_stride_head = int(scale.size > 1)
    record.num_rows, record.num_heads, record.head_dim = rows.shape
    if lib.attnrt_store_rows(family_number(family), record):
        raise MemoryError("scratch memory of append")


def copy_pages(
    cache: PagedView, source: np.ndarray, target: np.ndarray, num_heads: int, head_dim: int
) -> None:
    """Copy pages ``source[i]`` over pages ``target[i]`` of a pool, in order (copy-on-write of shared pages).

    Parameters
    ----------
    cache : PagedView
    source, target : integer arrays [n]
        Page ids; the caller has checked their range.
    num_heads, head_dim : int
    """
    begin, end = (np.ascontiguousarray(pages, dtype=np.int64) for pages in (source, target))
    record = ffi.new("attnrt_page_copy *")
    _pack_pool(record.pool, cache)
    record.element_size = {lib.ATTNRT_F32: 4, lib.ATTNRT_F16: 2, lib.ATTNRT_BF16: 2}.get(
        DTYPE_CODES[str(cache.dtype)], 1
    )
    record.num_heads, record.head_dim, record.num_pages = num_heads, head_dim, len(begin)
    setattr(record, "from", ffi.cast("int64_t *", begin.ctypes.data))
    record.to = ffi.cast("int64_t *", end.ctypes.data)
    lib.attnrt_copy_pages(record)
