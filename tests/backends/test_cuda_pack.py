# SPDX-License-Identifier: Apache-2.0
"""What the host packs is what the kernels read: sizes and offsets of structs, from the headers by a C++ compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import attnrt as at
from attnrt.backends.cuda import first_lines, pack, select, structs, tables
from attnrt.backends.cuda.render import flatten

STRUCTS = {
    "FastDiv": structs.FAST_DIV,
    "PagedKv": structs.PAGED_KV,
    "PartDesc": structs.PART,
    "RulerDesc": structs.RULER,
    "PlanHeader": structs.HEADER,
    "RunParams": structs.LAUNCH_RUN,
}
CUDA = (
    "#define __device__\n#define __host__\n#define __forceinline__ inline\n#include <algorithm>\n"
    "using std::max; using std::min;\n"
    + (
        "inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }\n"
    )
)


def run_cpp(tmp_path: Path, text: str) -> str:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (tmp_path / "a.cpp").write_text(text)
    subprocess.run(
        [compiler, "-std=c++17", "-O1", str(tmp_path / "a.cpp"), "-o", str(tmp_path / "a")], check=True
    )
    return subprocess.run([str(tmp_path / "a")], capture_output=True, text=True, check=True).stdout


def fields(dtype: np.dtype) -> list[tuple[str, int]]:
    return [(name, int(dtype.fields[name][1])) for name in dtype.names if name != "pad"]


def test_offsets(tmp_path):
    lines = [
        f'printf("{name} {field} %zu\\n", offsetof(attnrt::{name}, {field}));'
        for name, dtype in STRUCTS.items()
        for field, _ in fields(dtype)
    ]
    lines += [f'printf("{name} size %zu\\n", sizeof(attnrt::{name}));' for name in STRUCTS]
    text = f"{CUDA}#include <cstddef>\n#include <cstdio>\n{flatten('params.cuh')}\nint main() {{ {' '.join(lines)} }}\n"
    got = {tuple(line.split()[:2]): int(line.split()[2]) for line in run_cpp(tmp_path, text).splitlines()}
    want = {(name, field): at for name, dtype in STRUCTS.items() for field, at in fields(dtype)}
    want |= {(name, "size"): dtype.itemsize for name, dtype in STRUCTS.items()}
    assert got == want


def test_what_struct_packs_is_what_the_dtypes_say():
    view = SimpleNamespace(
        ptr=1 << 40,
        dtype="bfloat16",
        num_pages=7,
        page_size=48,
        stride_page=-512,
        stride_token=24,
        stride_head=8,
    )
    got = np.frombuffer(pack.paged_bytes(view, 2), structs.PAGED_KV)[0]
    want = {
        "ptr": 1 << 40,
        "stride_page": -512,
        "stride_token": 24,
        "stride_head": 8,
        "num_slots": 336,
        "vectors": 1,
    }
    assert {name: int(got[name]) for name in want} == want
    assert tuple(int(x) for x in got["page"]) == pack.fast_div(48)
    assert pack.aligned(view, 2) and not pack.aligned(
        SimpleNamespace(stride_page=0, stride_token=12, stride_head=8), 2
    )
    loaded = SimpleNamespace(
        header=SimpleNamespace(ptr=11, shape=(structs.HEADER.itemsize,)),
        room=(12, 1 << 40),
        plan=SimpleNamespace(traits=SimpleNamespace(num_workers=7, workers_of=lambda _: (7, 12))),
    )
    row = SimpleNamespace(ptr=22, strides=(33, 44, 1), shape=(5, 6, 7))
    lse = SimpleNamespace(ptr=55, strides=(66, 77))
    call = SimpleNamespace(loaded=loaded, q=row, k=view, v=view, out=row, lse=lse, sm_scale=0.5)
    run = np.frombuffer(pack.fill_run(call, 2), structs.LAUNCH_RUN)[0]
    want = {
        **{"before": 12, "behind": (1 << 32) - 1},
        **{"plan": 11, "q": 22, "q_stride_row": 33, "q_stride_head": 44, "out": 22, "out_stride_row": 33},
        **{"lse": 55, "lse_stride_row": 66, "lse_stride_head": 77, "sm_scale": 0.5, "num_qo_heads": 6},
        **{"first": 1, "lines": 12},
    }
    assert {name: run[name].item() for name in want} == want
    assert run["v"]["num_slots"] == 336 and run["k"]["ptr"] == 1 << 40
    at = structs.run_offsets()
    assert at["scale"] == structs.LAUNCH_RUN.fields["sm_scale"][1] and at["vectors_k"] == at["k"] + 52


@pytest.mark.parametrize(
    "divisor", [1, 2, 3, 5, 7, 16, 48, 100, 544, 641, 65535, 65537, (1 << 30) + 7, (1 << 31) - 1]
)
def test_division(divisor):
    """FastDiv against Python for numbers around multiples and at the ends of 31 bits."""
    rng = np.random.default_rng()
    numbers = rng.integers(0, 1 << 31, 2000)
    edges = numbers // divisor * divisor
    numbers = np.unique(
        np.concatenate([numbers, edges, np.maximum(edges - 1, 0), [0, (1 << 31) - 1]])
    ).astype(np.int64)
    d, mul, shift = pack.fast_div(divisor)
    quotient = (numbers * mul >> 32) >> shift if mul else numbers >> shift
    np.testing.assert_array_equal(quotient, numbers // d)
    assert mul < 1 << 32 and d == divisor


@at.variants.logits
def _biased(score, ctx, *, bias):
    return score + bias[ctx.kv_pos]


HOOKS = {
    "nothing": (),
    "output": (at.variants.sink_logits(-1.0),),
    "mask": (at.variants.sliding_window(5000),),
    "logits": (_biased,),
    "key": (at.variants.rope(32),),
}


@pytest.mark.parametrize("hooks", HOOKS)
def test_positions_that_no_kernel_reads_are_not_packed(hooks):
    """Lists of blocks anywhere count as lists that run on, and first lines bring their block ids."""
    asked = hooks not in ("nothing", "output")
    pages = np.arange(2 * 8, dtype=np.int32).reshape(1, 2, 8)
    kv_pos = (8 * np.arange(16, dtype=np.int32)).reshape(1, 2, 8) * 16
    index = at.formats.pages_per_head([0, 1], pages, np.full((1, 2), 8, np.int32), [4096], 16, kv_pos=kv_pos)
    spec = at.AttentionSpec(
        num_qo_heads=2,
        num_kv_heads=2,
        head_dim=128,
        q_dtype="bfloat16",
        variant=HOOKS[hooks],
    )
    plan = at.make_plan(spec, index, tables.traits_for(spec, 132, "batch", True))
    assert select.reads_positions(plan) == asked and plan.index.block_pos is not None
    packed, _held = first_lines._first_parts(plan.parts, select.reads_positions(plan))
    assert packed[0].positions == asked and packed[0].indices[0] == 0
    view = SimpleNamespace(ptr=4096)
    part = SimpleNamespace(**dict.fromkeys(structs.PART_POINTERS, view), block_size=16, heads=2)
    part.request = SimpleNamespace(ptr=4096, shape=(1,))
    record = np.frombuffer(pack.pack_parts((part,), asked), structs.PART)[0]
    assert (record["block_pos"] == 4096) == asked and record["indices"] == 4096
