# SPDX-License-Identifier: Apache-2.0
"""append on a GPU: a small kernel per (row dtype, cache dtype, dims, rotation), compiled when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.backends.cuda import pack
from attnrt.backends.cuda.render import THREADS, flatten, variant_text
from attnrt.backends.cuda.tables import ENUMERATORS
from attnrt.dtypes import as_dtype
from attnrt.errors import UnsupportedError
from attnrt.variants import compose, full

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnrt.backends.base import AppendCall
    from attnrt.backends.cuda.kernel import Module
    from attnrt.spec import AttentionSpec
    from attnrt.variants import Composed

__all__ = ["APPEND", "Appender", "render_append"]

APPEND = "attnrt_append"
MAX_SCALED_HEADS = 128

_APPEND_RUN = np.dtype(
    [
        ("k", "<u8"),
        ("k_stride_row", "<i8"),
        ("k_stride_head", "<i8"),
        ("v", "<u8"),
        ("v_stride_row", "<i8"),
        ("v_stride_head", "<i8"),
        ("k_cache", pack.PAGED_KV),
        ("v_cache", pack.PAGED_KV),
        ("slots", "<u8"),
        ("positions", "<u8"),
        ("rows", "<i4"),
        ("heads", "<i4"),
        ("k_scale", "<f4", (MAX_SCALED_HEADS,)),
        ("v_scale", "<f4", (MAX_SCALED_HEADS,)),
    ]
)


def render_append(spec: AttentionSpec, row_dtype: str, rope: Composed) -> str:
    """CUDA C++ of the append kernel."""
    return f"""{flatten("append.cuh")}
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
static_assert(sizeof(AppendParams) == {_APPEND_RUN.itemsize});
}}  // namespace attnrt

extern "C" __global__ void __launch_bounds__({THREADS}) {APPEND}(const __grid_constant__ attnrt::Launch launch) {{
  attnrt::append_rows<attnrt::Config, attnrt::Variant>(launch.run, launch.params);
}}
"""


class Appender:
    """The append kernels of one (spec, device); compiled by whichever backend owns it.

    Parameters
    ----------
    spec : AttentionSpec
    load : callable (source) -> Module
        Compiles a text (or finds it in the cache) and loads it.
    """

    def __init__(self, spec: AttentionSpec, load: Callable[[str], Module]) -> None:
        self.spec, self.load = spec, load
        self._modules: dict[tuple[str, str], Module] = {}

    def prepare(self, row_dtype: str, rope: Composed) -> Module:
        """The kernel, compiled if it is not there yet."""
        key = (row_dtype, rope.key)
        found = self._modules.get(key)
        if found is None:
            found = self._modules[key] = self.load(render_append(self.spec, row_dtype, rope))
        return found

    def run(self, call: AppendCall) -> None:
        """Enqueue one append."""
        rope = compose(full()) if call.rope is None else call.rope.variant
        module = self.prepare(str(call.k.dtype), rope)
        rows, heads = call.k.shape[:2]
        grid = max(1, min(-(-rows * heads // 4), 1 << 14))
        record = np.zeros(1, _APPEND_RUN)
        itemsize = as_dtype(self.spec.kv_dtype).itemsize
        v = (0, 0, 0) if call.v is None else (call.v.ptr, *call.v.strides[:2])
        v_cache = call.k_cache if call.v_cache is None else call.v_cache
        record[0] = (
            call.k.ptr,
            *call.k.strides[:2],
            *v,
            pack.paged(call.k_cache, itemsize),
            pack.paged(v_cache, itemsize),
            call.slots.ptr,
            0 if call.positions is None else call.positions.ptr,
            rows,
            heads,
            _scales(call.k_scale, heads, "k_scale"),
            _scales(call.v_scale, heads, "v_scale"),
        )
        table = b"" if call.rope is None else call.rope.bound.table.tobytes()
        module.launch(APPEND, grid, record.tobytes() + (table or bytes(64)), call.stream)


def _scales(scale: Any, heads: int, label: str) -> np.ndarray:
    """One factor per KV head, by value: up to 128 heads of a device."""
    out = np.ones(MAX_SCALED_HEADS, np.float32)
    if scale is not None:
        if np.size(scale) > MAX_SCALED_HEADS:
            raise UnsupportedError(label, f"must have at most {MAX_SCALED_HEADS} heads on a GPU", heads)
        flat = np.asarray(scale, np.float32).reshape(-1)
        if flat.size == 1:
            out[:] = flat[0]
        else:
            out[: flat.size] = flat
    return out
