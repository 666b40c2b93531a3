# SPDX-License-Identifier: Apache-2.0
"""append, gather and page copies on a GPU: kernels per (row dtype, cache dtype, dims, rotation), compiled when first asked."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.backends.cuda import driver, pack, structs
from attnrt.backends.cuda.modules import launch
from attnrt.backends.cuda.render import THREADS, flatten, variant_text
from attnrt.backends.cuda.tables import ENUMERATORS
from attnrt.dtypes import as_dtype
from attnrt.errors import CaptureError, UnsupportedError
from attnrt.variants import compose, full

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnrt.backends.base import AppendCall, PagedView
    from attnrt.backends.cuda.modules import Module
    from attnrt.spec import AttentionSpec
    from attnrt.tensor import TensorView
    from attnrt.variants import Composed

__all__ = ["APPEND", "COPY", "ENTRIES", "GATHER", "Appender", "render_append"]

APPEND, COPY, GATHER = "attnrt_append", "attnrt_copy_pages", "attnrt_gather"
#: Entry points of a text.
ENTRIES = (APPEND, COPY, GATHER)
MAX_SCALED_HEADS = 128

# AppendParams without its two pools (structs.PAGED_KV) in the middle, and CopyParams after its pool.
_ROWS = struct.Struct("<QqqQqq")
_PLACES = struct.Struct(f"<QQii{2 * MAX_SCALED_HEADS}f")
_COPY = struct.Struct("<QQqiiii")
_AT_V = struct.calcsize("<Qqq")  # the new V in _ROWS
_APPEND_BYTES = _ROWS.size + 2 * structs.PAGED_KV.itemsize + _PLACES.size
_COPY_BYTES = structs.PAGED_KV.itemsize + _COPY.size


def render_append(spec: AttentionSpec, row_dtype: str, rope: Composed) -> str:
    """CUDA C++ of the append, gather and copy kernels."""
    return f"""{flatten("gather.cuh")}
{variant_text(rope)}
namespace attnrt {{
struct Config {{
  static constexpr Dtype row_type = Dtype::{ENUMERATORS[row_dtype]};
  static constexpr Dtype kv_type = Dtype::{ENUMERATORS[spec.kv_dtype]};
  static constexpr int head_dim = {spec.head_dim};
  static constexpr int head_dim_vo = {spec.head_dim_vo};
}};
struct Launch {{
  AppendParams run;
  ParamRef params[{max(1, len(rope.params))}];
}};
static_assert(sizeof(AppendParams) == {_APPEND_BYTES});
static_assert(sizeof(CopyParams) == {_COPY_BYTES});
}}  // namespace attnrt

extern "C" __global__ void __launch_bounds__({THREADS}) {APPEND}(const __grid_constant__ attnrt::Launch launch) {{
  attnrt::wait_for_predecessors();
  attnrt::append_rows<attnrt::Config, attnrt::Variant>(launch.run, launch.params);
}}

extern "C" __global__ void __launch_bounds__({THREADS}) {GATHER}(const __grid_constant__ attnrt::Launch launch) {{
  attnrt::wait_for_predecessors();
  attnrt::gather_rows<attnrt::Config, attnrt::Variant>(launch.run, launch.params);
}}

extern "C" __global__ void __launch_bounds__({THREADS}) {COPY}(const __grid_constant__ attnrt::CopyParams run) {{
  attnrt::wait_for_predecessors();
  attnrt::copy_pages<attnrt::Config::kv_type>(run);
}}
"""


class Appender:
    """The append kernels of one (spec, device); compiled by whichever backend owns it.

    Parameters
    ----------
    spec : AttentionSpec
    device : int
    load : callable (source) -> Module
        Compiles a text (or finds it in the cache) and loads it.
    """

    def __init__(self, spec: AttentionSpec, device: int, load: Callable[[str], Module]) -> None:
        self.spec, self.device, self.load = spec, device, load
        self._modules: dict[tuple[str, str], Module] = {}

    def prepare(self, row_dtype: str, rope: Composed, stream: int) -> Module:
        """The kernels, compiled if they are not there yet; not under a capture."""
        key = (row_dtype, rope.key)
        found = self._modules.get(key)
        if found is None:
            if driver.capturing(self.device, stream):
                raise CaptureError(
                    "append", "would compile inside a capture", None, "Run it once before the capture"
                )
            found = self._modules[key] = self.load(render_append(self.spec, row_dtype, rope))
        return found

    def run(self, call: AppendCall) -> AppendAgain:
        """Enqueue one append; returns what enqueues another that differs in addresses alone."""
        module, arguments = self._packed(call)
        rows, heads = call.k.shape[:2]
        grid = max(1, min(-(-rows * heads // 4), 1 << 14))
        aligned = _aligned(call, as_dtype(self.spec.kv_dtype).itemsize)
        again = AppendAgain(module.entry(APPEND), grid, arguments, aligned, call.slots_given)
        again(call)
        return again

    def gather(self, call: AppendCall) -> None:
        """Enqueue one gather."""
        module, arguments = self._packed(call)
        grid = max(1, min(-(-call.k.shape[0] // 4), 1 << 14))
        launch(module.entry(GATHER), grid, arguments, call.stream)

    def _packed(self, call: AppendCall) -> tuple[Module, bytes]:
        """The kernels for a call, and its packed arguments."""
        rope = compose(full()) if call.rope is None else call.rope.variant
        module = self.prepare(str(call.k.dtype), rope, call.stream)
        rows, heads = call.k.shape[:2]
        itemsize = as_dtype(self.spec.kv_dtype).itemsize
        v = (0, 0, 0) if call.v is None else (call.v.ptr, *call.v.strides[:2])
        v_cache = call.k_cache if call.v_cache is None else call.v_cache
        scales = (*_scales(call.k_scale, heads, "k_scale"), *_scales(call.v_scale, heads, "v_scale"))
        positions = 0 if call.positions is None else call.positions.ptr
        table = b"" if call.rope is None else call.rope.bound.table.tobytes()
        arguments = (
            _ROWS.pack(call.k.ptr, *call.k.strides[:2], *v)
            + pack.paged_bytes(call.k_cache, itemsize)
            + pack.paged_bytes(v_cache, itemsize)
            + _PLACES.pack(call.slots.ptr, positions, rows, heads, *scales)
            + (table or bytes(64))
        )
        return module, arguments

    def copy_pages(
        self, pools: tuple[PagedView, ...], pages: tuple[TensorView, TensorView], stream: int
    ) -> None:
        """Enqueue the copy of pages ``pages[0][i]`` over pages ``pages[1][i]`` of each pool."""
        spec = self.spec
        module = self.prepare(spec.q_dtype, compose(full()), stream)
        itemsize = as_dtype(spec.kv_dtype).itemsize
        count = pages[0].shape[0]
        for pool, dim in zip(pools, (spec.head_dim, spec.head_dim_vo), strict=False):
            rest = (pages[0].ptr, pages[1].ptr, pool.num_pages, count, spec.num_kv_heads, dim, 0)
            grid = max(1, min(-(-count * pool.page_size * spec.num_kv_heads // 4), 1 << 14))
            launch(module.entry(COPY), grid, pack.paged_bytes(pool, itemsize) + _COPY.pack(*rest), stream)


class AppendAgain:
    """An append's packed arguments, in the record of attnrt_cuda_run: what a run has as q, k, v, out and lse are here the new K,
    both caches, the new V, and the slots if they are the caller's own.

    Attributes
    ----------
    native : (int, int)
        Addresses of the C function and of its record (native/repeats.h).
    """

    __slots__ = ("_args", "_record", "native")

    def __init__(
        self, entry: Any, grid: int, arguments: bytes, aligned: tuple[bool, bool], slots_given: bool
    ) -> None:
        ffi, _ = driver.shim()
        unread = len(arguments)  # where the numbers go that an append does not have
        self._args = ffi.new("char[]", arguments + bytes(16))
        record = self._record = ffi.new("attnrt_run_t *")
        record.args, record.forbid_capture = self._args, not slots_given  # the plan's slots are not a graph's
        record.aligned_k, record.aligned_v = aligned
        k_cache, vectors = _ROWS.size, int(structs.PAGED_KV.fields["vectors"][1])  # type: ignore[index]
        v_cache = k_cache + structs.PAGED_KV.itemsize
        record.at_q, record.at_out, record.at_k, record.at_v = 0, _AT_V, k_cache, v_cache
        record.at_vectors_k, record.at_vectors_v = k_cache + vectors, v_cache + vectors
        record.at_lse = v_cache + structs.PAGED_KV.itemsize if slots_given else unread
        record.at_scale = unread + 8
        record.launches[0] = entry[0]
        record.launches[0].grid = record.eager_grid[0] = grid
        record.num_launches = 1
        self.native = driver.run_address(), int(ffi.cast("uintptr_t", record))

    def __call__(self, call: AppendCall) -> None:
        """Enqueue a call of the same form."""
        _, lib = driver.shim()
        v_cache = call.k_cache if call.v_cache is None else call.v_cache
        addresses = (call.k.ptr, call.k_cache.ptr, v_cache.ptr, 0 if call.v is None else call.v.ptr)
        slots = call.slots.ptr if call.slots_given else 0
        code = lib.attnrt_cuda_run(self._record, *addresses, slots, 0.0, call.stream)
        if code:
            self.failed(code)

    def failed(self, code: int) -> None:
        """Raise what a code of the shim means."""
        if code == driver.CAPTURING:
            hint = "append(slots=) of a device array is captured"
            raise CaptureError("append", "must have slots= inside a capture", None, hint)
        driver.check(code, "cuLaunchKernelEx")


def _aligned(call: AppendCall, itemsize: int) -> tuple[bool, bool]:
    v_cache = call.k_cache if call.v_cache is None else call.v_cache
    return pack.aligned(call.k_cache, itemsize), pack.aligned(v_cache, itemsize)


def _scales(scale: Any, heads: int, label: str) -> list[float]:
    """One factor per KV head, by value: up to 128 heads of a device; 0: none was given."""
    flat = [0.0] if scale is None else np.asarray(scale, np.float32).reshape(-1).tolist()
    if len(flat) > MAX_SCALED_HEADS:
        raise UnsupportedError(label, f"must have at most {MAX_SCALED_HEADS} heads on a GPU", heads)
    return flat * MAX_SCALED_HEADS if len(flat) == 1 else flat + [1.0] * (MAX_SCALED_HEADS - len(flat))
