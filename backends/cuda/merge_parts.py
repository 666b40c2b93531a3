# SPDX-License-Identifier: Apache-2.0
"""merge_state and merge_states on a GPU: one small kernel per dtype, compiled when it is first asked for.

The launch allocates nothing and waits for nothing, so it can be captured once its kernel is there (call it once before).
"""

from __future__ import annotations

import itertools
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attnrt.backends.cuda import driver
from attnrt.backends.cuda.modules import launch
from attnrt.backends.cuda.render import THREADS, flatten
from attnrt.backends.cuda.tables import ENUMERATORS
from attnrt.backends.status import AUTO, get
from attnrt.errors import DtypeError, UnsupportedError
from attnrt.memory import ops_of

if TYPE_CHECKING:
    from attnrt.backends.cuda.modules import Module
    from attnrt.merge import MergeCall
    from attnrt.tensor import TensorView

__all__ = ["MERGE_PARTS", "merge", "render_merge_parts"]

MERGE_PARTS = "attnrt_merge_parts"

#: MergeSegment: v, lse; strides of v (part, row, head, dim) and lse (part, row, head); parts.
_SEGMENT = "2Q8q"
#: MergePartsParams: two segments; out, out_lse; strides of out and out_lse; segments, rows, heads, dim.
_PARAMS = struct.Struct(f"<{_SEGMENT}{_SEGMENT}2Q5q4i")
_NO_SEGMENT = (0,) * 10


def render_merge_parts(dtype: str) -> str:
    """CUDA C++ of the kernel for v of a dtype."""
    return f"""{flatten("merge_parts.cuh")}
static_assert(sizeof(attnrt::MergePartsParams) == {_PARAMS.size});
extern "C" __global__ void __launch_bounds__({THREADS})
    {MERGE_PARTS}(const __grid_constant__ attnrt::MergePartsParams params) {{
  attnrt::merge_parts<attnrt::Dtype::{ENUMERATORS[dtype]}>(params);
}}
"""


@lru_cache(maxsize=64)
def _module(dtype: str, device: int) -> Module:
    reasons: dict[str, tuple[str, ...]] = {}
    for name in AUTO["cuda"]:
        backend: Any = get(name)
        reasons[name] = backend.why_not_compiler()
        if not reasons[name]:
            return backend.load(render_merge_parts(dtype), (MERGE_PARTS,), device, "the merge of parts")
    raise UnsupportedError("merge_states", "needs a CUDA compiler", reasons=reasons)


def _segments(v: tuple[TensorView, ...], lse: tuple[TensorView, ...] | None) -> list[tuple[int, ...]]:
    """One segment if the parts lie at one distance, as the slices of a stacked array do; else one for each."""
    distances = {b.ptr - a.ptr for a, b in itertools.pairwise(v)}
    lse_distances = {b.ptr - a.ptr for a, b in itertools.pairwise(lse)} if lse else set()
    regular = len(distances) <= 1 and len(lse_distances) <= 1 and len({x.strides for x in v}) == 1
    regular = regular and len({x.strides for x in lse or ()}) <= 1
    step, lse_step = max(distances, default=0), max(lse_distances, default=0)
    if regular and step % v[0].dtype.itemsize == 0 and lse_step % 4 == 0:
        heads = [(0, len(v), step // v[0].dtype.itemsize, lse_step // 4)]
    else:
        heads = [(i, 1, 0, 0) for i in range(len(v))]
    return [  # the fields of _SEGMENT
        (
            *(v[i].ptr, lse[i].ptr if lse else 0, v_step, *v[i].strides),
            *((l_step, *lse[i].strides) if lse else (0, 0, 0)),
            count,
        )
        for i, count, v_step, l_step in heads
    ]


def merge(call: MergeCall) -> None:
    """Enqueue one merge."""
    out = call.out
    if out.dtype.name not in ENUMERATORS:
        raise DtypeError("v", "must be float32, float16 or bfloat16 on a GPU", out.dtype)
    ops: Any = ops_of(out.device)
    stream = ops.stream(call.stream, call.v[0])
    module = _module(out.dtype.name, out.device.index)
    rows, heads, _ = out.shape
    if rows * heads == 0:
        return
    segments = _segments(call.v, call.lse)
    assert len(segments) <= 2, "parts that lie anyhow come two at a time"
    last = segments[1] if len(segments) == 2 else _NO_SEGMENT
    lse = (0, 0, 0) if call.out_lse is None else (call.out_lse.ptr, *call.out_lse.strides)
    arguments = _PARAMS.pack(
        *(*segments[0], *last, out.ptr, lse[0], *out.strides, *lse[1:], len(segments), *out.shape)
    )
    most = driver.device_attribute(out.device.index, driver.MULTIPROCESSORS) * 16
    grid = min(-(-rows * heads * 32 // THREADS), most)
    launch(module.entry(MERGE_PARTS), grid, arguments, stream)
    if call.v[0].framework == "jax":  # its own streams are unknown to us: what it reads next must be there
        ops.synchronize(stream)
