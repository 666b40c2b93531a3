# SPDX-License-Identifier: Apache-2.0
"""merge_state and merge_states on a GPU: one small kernel per dtype, compiled when it is first asked for.

The launch allocates nothing and waits for nothing, so it can be captured once its kernel is there (call it once before).
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from attnrt.backends.cuda import driver
from attnrt.backends.cuda.render import THREADS, flatten
from attnrt.backends.cuda.tables import ENUMERATORS
from attnrt.backends.status import AUTO, get
from attnrt.errors import DtypeError, UnsupportedError
from attnrt.memory import ops_of

if TYPE_CHECKING:
    from attnrt.backends.cuda.kernel import Module
    from attnrt.merge import MergeCall
    from attnrt.tensor import TensorView

__all__ = ["MERGE_PARTS", "merge", "render_merge_parts"]

MERGE_PARTS = "attnrt_merge_parts"

_SEGMENT = np.dtype(
    [("v", "<u8"), ("lse", "<u8"), ("v_strides", "<i8", (4,)), ("lse_strides", "<i8", (3,)), ("parts", "<i8")]
)
_PARAMS = np.dtype(
    [
        ("segments", _SEGMENT, (2,)),
        ("out", "<u8"),
        ("out_lse", "<u8"),
        ("out_strides", "<i8", (3,)),
        ("out_lse_strides", "<i8", (2,)),
        ("sizes", "<i4", (4,)),
    ]
)


def render_merge_parts(dtype: str) -> str:
    """CUDA C++ of the kernel for v of a dtype."""
    return f"""{flatten("merge_parts.cuh")}
static_assert(sizeof(attnrt::MergePartsParams) == {_PARAMS.itemsize});
extern "C" __global__ void __launch_bounds__({THREADS})
    {MERGE_PARTS}(const __grid_constant__ attnrt::MergePartsParams params) {{
  attnrt::merge_parts<attnrt::Dtype::{ENUMERATORS[dtype]}>(params);
}}
"""


@lru_cache(maxsize=64)
def _module(dtype: str, device: int) -> Module:
    reasons: dict[str, tuple[str, ...]] = {}
    for name in AUTO["cuda"]:
        backend = get(name)
        reasons[name] = backend.why_not_compiler()
        if not reasons[name]:
            return backend.load(render_merge_parts(dtype), (MERGE_PARTS,), device, "the merge of parts")
    raise UnsupportedError("merge_states", "needs a CUDA compiler", reasons=reasons)


def _segments(v: tuple[TensorView, ...], lse: tuple[TensorView, ...] | None) -> list[tuple[object, ...]]:
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
            *(v[i].ptr, lse[i].ptr if lse else 0, (v_step, *v[i].strides)),
            *((l_step, *lse[i].strides) if lse else (0, 0, 0), count),
        )
        for i, count, v_step, l_step in heads
    ]


def merge(call: MergeCall) -> None:
    """Enqueue one merge."""
    out = call.out
    if out.dtype.name not in ENUMERATORS:
        raise DtypeError("v", "must be float32, float16 or bfloat16 on a GPU", out.dtype)
    ops = ops_of(out.device)
    stream = ops.stream(call.stream, call.v[0])
    module = _module(out.dtype.name, out.device.index)
    rows, heads, dim = out.shape
    if rows * heads == 0:
        return
    record = np.zeros(1, _PARAMS)[0]
    segments = [np.array(segment, _SEGMENT) for segment in _segments(call.v, call.lse)]
    assert len(segments) <= 2, "parts that lie anyhow come two at a time"
    for i, segment in enumerate(segments):
        record["segments"][i] = segment
    record["out"], record["out_strides"] = out.ptr, out.strides
    if call.out_lse is not None:
        record["out_lse"], record["out_lse_strides"] = call.out_lse.ptr, call.out_lse.strides
    record["sizes"] = (len(segments), rows, heads, dim)
    most = driver.device_attribute(out.device.index, driver.MULTIPROCESSORS) * 16
    grid = min(-(-rows * heads * 32 // THREADS), most)
    module.launch(MERGE_PARTS, grid, record.tobytes(), stream)
    if call.v[0].framework == "jax":  # its own streams are unknown to us: what it reads next must be there
        ops.synchronize(stream)
