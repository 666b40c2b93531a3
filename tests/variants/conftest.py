# SPDX-License-Identifier: Apache-2.0
"""Compile a variant's text with the machine's C++ compiler and call its hooks on arrays."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

import attnrt.variants as av

FIELDS = ("request", "qo_pos", "kv_pos", "qo_head", "kv_head", "qo_row", "qo_len", "kv_len")
CTX = np.dtype([(f, "<i4") for f in FIELDS] + [("kv_slot", "<i8")])

WRAPPER = """
namespace NAMESPACE {
using V = attnrt::STRUCT;
using P = const attnrt::ParamRef*;
extern "C" {
void logits(P p, const attnrt::Ctx* c, long n, const float* s, float* out) {
  for (long i = 0; i < n; ++i) out[i] = V::logits(p, V::row(p, c[i]), c[i], s[i]);
}
void mask(P p, const attnrt::Ctx* c, long n, bool* out, int* low, int* high) {
  for (long i = 0; i < n; ++i) {
    out[i] = V::mask(p, c[i]);
    V::visible(V::row(p, c[i]), low[i], high[i]);
  }
}
#undef PAIRS
#define PAIRS(hook, suffix) \\
  void hook##suffix(P p, const attnrt::Ctx* c, long n, float* x, int head_dim) { \\
    const int dim = V::hook##_dim ? V::hook##_dim : head_dim, kind = V::hook##_pairing; \\
    for (long i = 0; i < n; ++i) \\
      for (int d = 0; d < attnrt::pair_count(kind, dim); ++d) \\
        V::hook(p, c[i], d, x[i * head_dim + attnrt::pair_first(kind, d)], \\
                x[i * head_dim + attnrt::pair_second(kind, dim, d)]); \\
  }
PAIRS(query) PAIRS(key) PAIRS(value)
void output(P p, const attnrt::Ctx* c, long n, float* x, int dim) {
  for (long i = 0; i < n; ++i)
    for (int d = 0; d < dim; ++d) x[i * dim + d] = V::output(p, c[i], d, x[i * dim + d]);
}
void sink(P p, const attnrt::Ctx* c, long n, float* out) {
  for (long i = 0; i < n; ++i) out[i] = V::sink(p, c[i]);
}
void flags(int* out) {
  const bool f[] = {V::use_softmax, V::has_logits, V::has_mask, V::has_query, V::has_key, V::has_value,
                    V::has_output, V::has_sink, V::mask_is_interval, V::reads_index_mask};
  for (int i = 0; i < 10; ++i) out[i] = f[i];
}
}
}
"""
FUNCTIONS = ("logits", "mask", "query", "key", "value", "output", "sink", "flags")


def wrapper(struct: str = "Variant", suffix: str = "", full: bool = True) -> str:
    """C functions over one printed struct (logits and mask, or all); ``suffix`` keeps several apart."""
    head, rest = WRAPPER.split("#undef PAIRS")
    text = head + ("#undef PAIRS" + rest if full else "}\n}\n")
    text = text.replace("STRUCT", struct).replace("NAMESPACE", f"test{suffix}")
    for name in FUNCTIONS:
        text = text.replace(f"void {name}(", f"void {name}{suffix}(").replace(
            f"PAIRS({name})", f"PAIRS({name}, {suffix})"
        )
    return text


FLAGS = ["use_softmax", "has_logits", "has_mask", "has_query", "has_key", "has_value"]
FLAGS += ["has_output", "has_sink", "mask_is_interval", "reads_index_mask"]


def contexts(n: int, rng: np.random.Generator, heads: tuple[int, int] = (8, 2), span: int = 64) -> np.ndarray:
    """Random contexts: positions of both signs around 0, heads consistent with grouped queries."""
    c = np.zeros(n, dtype=CTX)
    for field in ("qo_pos", "kv_pos"):
        c[field] = rng.integers(-span // 4, span, n)
    c["qo_head"] = rng.integers(0, heads[0], n)
    c["kv_head"] = c["qo_head"] // (heads[0] // heads[1])
    for field in ("request", "qo_row", "qo_len", "kv_len"):
        c[field] = rng.integers(0, 100, n)
    c["kv_slot"] = rng.integers(0, 2**40, n)
    return c


def fields(c: np.ndarray) -> dict[str, np.ndarray]:
    return {name: c[name] for name in CTX.names}


class Native:
    """The hooks of one compiled variant as NumPy functions."""

    def __init__(self, library: ctypes.CDLL, bound: av.BoundParams, suffix: str = "") -> None:
        self.library, self.bound, self.suffix = library, bound, suffix
        self.table = np.ascontiguousarray(bound.table)

    def _call(self, name: str, c: np.ndarray, *args: object) -> None:
        assert c.dtype == CTX and c.flags.c_contiguous
        converted = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int(a) for a in args
        ]
        getattr(self.library, name + self.suffix)(
            ctypes.c_void_p(self.table.ctypes.data),
            ctypes.c_void_p(c.ctypes.data),
            ctypes.c_long(len(c)),
            *converted,
        )

    def logits(self, c: np.ndarray, score: np.ndarray) -> np.ndarray:
        out = np.full(len(c), 12345, dtype=np.float32)
        self._call("logits", c, np.ascontiguousarray(score, dtype=np.float32), out)
        return out

    def mask(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        out, low, high = np.zeros(len(c), dtype=bool), np.zeros(len(c), np.int32), np.zeros(len(c), np.int32)
        self._call("mask", c, out, low, high)
        return out, low, high

    def rows(self, hook: str, c: np.ndarray, x: np.ndarray) -> np.ndarray:
        x = np.array(x, dtype=np.float32, order="C")
        self._call(hook, c, x, x.shape[1])
        return x

    def sink(self, c: np.ndarray) -> np.ndarray:
        out = np.zeros(len(c), np.float32)
        self._call("sink", c, out)
        return out

    def flags(self) -> dict[str, bool]:
        out = np.zeros(10, np.int32)
        self.library.flags(ctypes.c_void_p(out.ctypes.data))
        return dict(zip(FLAGS, map(bool, out), strict=True))


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory):
    """Compile C++ text to a loaded library, each text once."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("variants")
    done: dict[str, ctypes.CDLL] = {}

    def compile_text(text: str, *extra: str) -> ctypes.CDLL:
        name = hashlib.sha256((text + "\0".join(extra)).encode()).hexdigest()[:16]
        if name not in done:
            source, target = folder / f"{name}.cpp", folder / f"{name}.so"
            source.write_text(text)
            command = [
                compiler,
                "-std=c++17",
                "-O1",
                "-shared",
                "-fPIC",
                "-Wall",
                "-Wextra",
                "-Werror",
                *extra,
            ]
            result = subprocess.run(
                [*command, "-I", av.include_dir(), str(source), "-o", str(target)],
                check=False,
                capture_output=True,
                text=True,
            )
            assert result.returncode == 0, f"{result.stderr}\n{text}"
            done[name] = ctypes.CDLL(str(target))
        return done[name]

    return compile_text


@pytest.fixture(scope="session")
def native(build):
    """Function (compiled variant, bound parameters) -> Native."""
    return lambda variant, bound: Native(build(variant.cpp_source() + wrapper()), bound)


@pytest.fixture
def kit(native) -> SimpleNamespace:
    """What most tests need: random contexts, compose and bind in one step, NumPy and native forms."""

    def both(variants: object, heads: tuple[int, int] = (8, 2), **values: object) -> SimpleNamespace:
        compiled = av.compose(variants)
        bound = compiled.bind(values, num_qo_heads=heads[0], num_kv_heads=heads[1])
        return SimpleNamespace(
            variant=compiled, bound=bound, numpy=compiled.numpy(bound), native=native(compiled, bound)
        )

    return SimpleNamespace(
        both=both, contexts=contexts, fields=fields, ctx_dtype=CTX, wrapper=wrapper, native=Native
    )
