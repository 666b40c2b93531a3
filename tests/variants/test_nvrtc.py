# SPDX-License-Identifier: Apache-2.0
"""The same text through NVRTC: every hook of every builtin, for sm_80 and sm_90a, with no GPU."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.variants.expr import topological
from attnrt.variants.functions import sat_add, sat_sub
from attnrt.variants.printer import PRINT

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
pytestmark = pytest.mark.compile

KERNEL = """
using V = attnrt::Variant;
struct Args {
  attnrt::ParamRef refs[V::num_params + 1];
  __device__ const attnrt::ParamRef& operator[](int i) const { return refs[i]; }
};
extern "C" __global__ void probe(const __grid_constant__ Args p, const attnrt::Ctx* contexts, float* x,
                                 bool* seen) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const attnrt::Ctx c = contexts[i];
  const V::Row r = V::row(p, c);
  int low, high;
  V::visible(r, low, high);
  seen[i] = V::mask(p, r, c) && low <= high;
  float a = V::logits(p, r, c, x[8 * i]);
  V::query(p, c, 1, x[8 * i + 1], x[8 * i + 2]);
  V::key(p, c, 1, x[8 * i + 3], x[8 * i + 4]);
  V::value(p, c, 1, x[8 * i + 5], x[8 * i + 6]);
  x[8 * i + 7] = V::output(p, c, 3, a) + V::sink(p, c);
}
"""


def ptx(source: str, arch: str) -> str:
    """Compile or fail with the compiler's log."""
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"variant.cu", 0, [], [])
    assert int(status) == 0
    options = [b"-std=c++17", f"-arch={arch}".encode(), f"-I{av.include_dir()}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(status) == 0, log.decode() + source
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode()


def every_operation(score, ctx, *, table, gain=1.0, count=3, wide: np.int64 = 1):
    """Uses each operation of expr.py once, in all types that have it."""
    i, j, slot = ctx.qo_pos, ctx.kv_pos, ctx.kv_slot + wide
    ints = (
        (i + j - count) * (i // j) + i % j + (i & j) + (i | j) + (i ^ j) + (~i << 3) + (j >> count) + abs(i)
    )
    longs = (slot * 3 - i) // (slot + 1) + slot % 7 + (slot >> 3) + (slot << 2) + abs(slot)
    ints = ints + av.minimum(i, j) + av.maximum(i, count) + sat_add(i, j) + sat_sub(i, j) + av.to_int(longs)
    x = score / gain - score * 2 + score % 3 + score // gain + abs(score) + -score + score**2.5
    for f in (av.exp, av.exp2, av.log, av.log2, av.tanh, av.logistic, av.sqrt, av.rsqrt, av.floor, av.ceil):
        x = x + f(score)
    for f in (av.sin, av.cos, av.sinpi, av.cospi):
        x = x + f(score)
    tests = ((i < j) & (i <= j)) | ~(i == j) ^ (score != 1.0)
    x = av.where(tests, av.minimum(x, score), av.maximum(x, table[i, av.to_int(score), slot]))
    return x + ints + longs + av.to_float(tests)


def test_that_every_operation_is_there():
    used = {n.op for n in topological((av.logits(every_operation).logits,))}
    assert set(PRINT) <= used


BUILTINS = {
    "every_operation": av.logits(every_operation),
    "full": av.full(),
    "alibi": av.alibi(),
    "sigmoid": (av.causal(), av.sigmoid()),
    "rope": (av.causal(), av.rope(16)),
    "rope_pairs": av.rope(16, interleaved=True),
    "scales_sinks": (av.custom_mask(), av.fp8_scales(), av.sink_logits()),
    "cpp": av.cpp(
        "own",
        logits="for (int i = 0; i < 3; ++i) s = max_of(s, table(ctx.qo_head, i)); return s;",
        mask="ctx.kv_pos % 2 == 0 || ctx.kv_slot > 7",
        key="y0 = x1 * gain; y1 = f_tanh(x0);",
        output="o + d",
        params={"gain": 2.0, "table": ("float32", 2)},
        dim=8,
        pairing="half",
    ),
    "causal_window_cap": (av.causal(), av.sliding_window(64), av.softcap(30.0)),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", BUILTINS)
def test_compiles(name, arch):
    text = ptx(av.compose(BUILTINS[name]).cpp_source() + KERNEL, arch)
    assert ".entry probe" in text
