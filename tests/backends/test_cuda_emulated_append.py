# SPDX-License-Identifier: Apache-2.0
"""append and copy_pages by the emulated CUDA kernels (emulated_cuda.py), no GPU needed: the bytes that the C++ backend stores."""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt.backends.cuda import append, driver, render
from attnrt.dtypes import as_dtype

sys.path.insert(0, str(Path(__file__).parent))

emulated_cuda = pytest.importorskip("emulated_cuda")
ASSEMBLY, HERE, EmulatedCuda = (getattr(emulated_cuda, name) for name in ("ASSEMBLY", "HERE", "EmulatedCuda"))
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

v = at.variants
ARGUMENTS = {
    append.APPEND: "attnrt::Launch",
    append.COPY: "attnrt::CopyParams",
    append.GATHER: "attnrt::Launch",
}


class Module:
    """The append kernels of a text, compiled by g++."""

    def __init__(self, source: str) -> None:
        source = source.replace((render._ROOT / "ptx.cuh").read_text().replace("#pragma once\n", ""), "")
        for found, instead in ASSEMBLY.items():
            source = source.replace(found, instead)
        entries = "\n".join(
            f'extern "C" int emulate_{name}(unsigned grid, const void* args, int early) {{\n'
            f"  return emu::launch([](const void* a) {{ {name}(*static_cast<const {kind}*>(a)); }}, grid, args, early);\n}}"
            for name, kind in ARGUMENTS.items()
        )
        head = (HERE / "emulated_cuda.h").read_text().replace("#pragma once", "")
        more = "static inline float __fdiv_rn(float a, float b) { return a / b; }\n"
        text = f"{head}\n{'' if '__fdiv_rn' in head else more}{source}\n{entries}\n"
        self.lib = emulated_cuda.build(text)

    def entry(self, name: str):
        return getattr(self.lib, f"emulate_{name}")


def launch(entry, grid, arguments, stream):
    buffer = (ctypes.c_char * (len(arguments) + 16)).from_buffer_copy(arguments + bytes(16))
    assert entry(grid, ctypes.byref(buffer), 0)


class Again:
    """What append.AppendAgain is where there is a driver; a host's append does not come again by it."""

    def __init__(self, entry, grid, arguments, aligned, slots_given):
        self.launched = entry, grid, arguments

    def __call__(self, call):
        launch(*self.launched, call.stream)


class WithAppend(EmulatedCuda):
    def compile(self, spec, features, device):
        found = super().compile(spec, features, device)
        appender = append.Appender(spec, 0, Module)
        found.append, found.copy_pages, found.gather = appender.run, appender.copy_pages, appender.gather
        return found


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(append, "launch", launch)
    monkeypatch.setattr(append, "AppendAgain", Again)
    monkeypatch.setattr(driver, "capturing", lambda device, stream: False)


def both(**changes):
    """The same attention over emulated CUDA and over C++."""
    base = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "head_dim_vo": 48, "variant": v.causal()}
    s = at.AttentionSpec(**{**base, **changes})
    return at.Attention(s, backend=WithAppend(), device="cpu"), at.Attention(s, backend="cpu", device="cpu")


def numbers(s, rng, rows, dtype, scale):
    kind = as_dtype(dtype).numpy
    k, values = (
        (rng.standard_normal((rows, s.num_kv_heads, dim)) * scale).astype(np.float32)
        for dim in (s.head_dim, s.head_dim_vo)
    )
    k[0, 0, :8] = [np.inf, -np.inf, 0.0, -0.0, 500.0, -470.0, 1e-3, 2**-10]
    with np.errstate(over="ignore"):
        return [x.astype(kind) for x in (k, values)]


def caches(s, pages=9, size=16):
    inner = (s.num_kv_heads, size) if s.kv_layout == "HND" else (size, s.num_kv_heads)
    kind = as_dtype(s.kv_dtype).numpy
    return [np.full((pages, *inner, dim), 7.0, kind) for dim in (s.head_dim, s.head_dim_vo)]


def equal(got, want):
    for name, a, b in zip("kv", got, want, strict=False):
        bits = f"u{b.dtype.itemsize}"
        np.testing.assert_array_equal(a.view(bits), b.view(bits), err_msg=name)


#: Of rows and of the cache. Rows come in float32 where the result of a run does, in 8 bits where q does.
DTYPES = [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float32", "float8_e4m3fn"),
    ("float8_e5m2", "float8_e4m3fn"),
]


def types(row_dtype, kv_dtype):
    """Fields of a spec that takes such rows."""
    q_dtype = kv_dtype if row_dtype == "float32" else row_dtype
    out_dtype = "bfloat16" if row_dtype.startswith("float8") else row_dtype
    return {"q_dtype": q_dtype, "kv_dtype": kv_dtype, "out_dtype": out_dtype}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows_in", ["q", "cache", "results"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_stores_what_the_cpu_stores(dtypes, rows_in, kv_layout):
    q_dtype, kv_dtype = dtypes
    fp8 = kv_dtype.startswith("float8")
    variant = (v.causal(), v.fp8_scales()) if fp8 else v.causal()
    cuda, cpu = both(**types(*dtypes), kv_layout=kv_layout, variant=variant)
    kind = {"q": q_dtype, "cache": kv_dtype, "results": cuda.spec.out_dtype}[rows_in]
    k, values = numbers(cuda.spec, np.random.default_rng(), 7, kind, 100.0 if fp8 else 1.0)
    scales = (
        {"k_scale": np.array([0.5, 3.0], np.float32), "v_scale": 0.25} if fp8 and kind != kv_dtype else {}
    )
    index = at.formats.paged([0, 1, 4, 7], [0, 1, 3, 5], [4, 0, 8, 2, 3], [3, 20, 30], 16)
    for where in ({}, {"slots": np.array([5, -1, 143, 0, 77, 16, 31])}):
        results = []
        for attn in (cuda, cpu):
            attn.plan(index)
            results.append(caches(attn.spec))
            attn.append(k, values, tuple(results[-1]), **where, **scales)
        equal(*results)


@pytest.mark.parametrize("rope", [v.rope(64), v.rope(32, interleaved=True)], ids=["half", "interleaved"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_rotation(rope, kv_dtype):
    """Angles in float32 and float64 differ in the last bits: at most one step of the stored type, rarely."""
    cuda, cpu = both(q_dtype="bfloat16", kv_dtype=kv_dtype)
    k, values = numbers(cuda.spec, np.random.default_rng(), 7, "bfloat16", 1.0)
    k[0, 0, :8] = 1.0
    index = at.formats.paged([0, 1, 4, 7], [0, 1, 3, 5], [4, 0, 8, 2, 3], [3, 20, 30], 16)
    results = []
    for attn in (cuda, cpu):
        attn.plan(index)
        results.append(caches(attn.spec))
        attn.append(k, values, tuple(results[-1]), rope=rope)
    equal(results[0][1:], results[1][1:])
    a, b = (x[0].astype(np.float64) for x in results)
    step = 2.0 ** (-7 if kv_dtype == "bfloat16" else -3)
    assert (np.abs(a - b) <= np.abs(b) * step + 2**-9).all() and (a != b).mean() < 0.01
    assert (a != 7.0).any()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_copy_pages(kv_dtype, kv_layout):
    attn, _ = both(q_dtype="bfloat16", kv_dtype=kv_dtype, kv_layout=kv_layout)
    rng = np.random.default_rng()
    kv = [rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype) for x in caches(attn.spec)]
    want = [x.copy() for x in kv]
    for x in want:
        x[[7, 2, 8]] = x[[4, 4, 0]]
    attn.copy_pages(tuple(kv), [4, 4, 0], [7, 2, 8])
    equal(kv, want)


def test_latent_rows():
    cuda, cpu = both(
        q_dtype="bfloat16", num_kv_heads=1, head_dim=72, head_dim_vo=64, shared_kv=True, sm_scale=0.1
    )
    k, _ = numbers(cuda.spec, np.random.default_rng(), 3, "bfloat16", 1.0)
    results = []
    for attn in (cuda, cpu):
        results.append(caches(attn.spec)[:1])
        attn.append(k, None, results[-1][0], slots=[5, -1, 143])
    equal(*results)


GATHERED = [(64, 48), (72, 20)]  # rows of 16-byte pieces, and others


@pytest.mark.parametrize("dims", GATHERED)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows_in", ["q", "cache"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_gathers_what_the_cpu_gathers(dtypes, rows_in, kv_layout, dims):
    """Rows of both caches, in memory that another array surrounds."""
    q_dtype, kv_dtype = dtypes
    cuda, cpu = both(**types(*dtypes), kv_layout=kv_layout, head_dim=dims[0], head_dim_vo=dims[1])
    rng, s = np.random.default_rng(), cuda.spec
    kv = [(rng.standard_normal(x.shape) * 40).astype(np.float32).astype(x.dtype) for x in caches(s)]
    slots = np.concatenate([[5, -1, 143, 0, 77, 16, 31], rng.integers(0, 144, 30)])
    kind = as_dtype(q_dtype if rows_in == "q" else kv_dtype).numpy
    results = []
    for attn in (cuda, cpu):
        around = [np.full((len(slots) + 2, s.num_kv_heads + 1, dim), 7.0, kind) for dim in dims]
        attn.gather(tuple(kv), slots, *(x[1:-1, :-1] for x in around))
        assert all((x[[0, -1]] == 7).all() and (x[:, -1] == 7).all() for x in around)
        results.append([np.ascontiguousarray(x[1:-1, :-1]) for x in around])
    equal(*results)


#: Eight pairs a lane, and one by one: in a head's middle, or off 16-byte lines.
ROTATIONS = {
    "half": v.rope(64),
    "half of a part": v.rope(32),
    "interleaved": v.rope(64, interleaved=True),
    "interleaved, a part": v.rope(32, interleaved=True),
    "half of 40": v.rope(40),
}


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotation_of_gathered_rows(name, kv_dtype, lines):
    """As in test_rotation; more pairs than four a lane."""
    cuda, cpu = both(q_dtype="bfloat16", kv_dtype=kv_dtype, num_kv_heads=37, num_qo_heads=37)
    rng, s, rope = np.random.default_rng(), cuda.spec, ROTATIONS[name]
    kv = [rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype) for x in caches(s)]
    slots, positions = np.array([5, -1, 143, 0]), np.array([0, 3, 70000, 12])
    results = []
    for attn in (cuda, cpu):
        wide = np.full((4, s.num_kv_heads, 72 if lines else 65), 7.0, as_dtype("bfloat16").numpy)
        k, values = wide[..., -64:], np.full((4, s.num_kv_heads, 48), 7.0, wide.dtype)
        attn.gather(tuple(kv), slots, k, values, rope=rope, positions=positions)
        assert (wide[..., :-64] == 7).all()
        results.append([k, values])
    equal(results[0][1:], results[1][1:])
    a, b = (x[0].astype(np.float64) for x in results)
    assert (np.abs(a - b) <= np.abs(b) * 2.0**-7 + 2**-9).all() and (a != b).mean() < 0.02
    assert (a[1] == 0).all() and (a[[0, 2, 3]] != 0).any()
