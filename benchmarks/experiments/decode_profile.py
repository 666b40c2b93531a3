# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode run goes: cold and warm code and data apart, and stamps inside the kernels.

    python benchmarks/experiments/decode_profile.py [--only TEXT] [--marks] [--once CASE]

Per case, in µs: ``cold`` (benchmarks/harness.py: L2 flushed, code included), ``code`` (flushed, then a small batch through the
same kernels: data cold, code warm), ``chain`` (a graph of runs over disjoint pools, per run), ``hot`` (one pool all the time).
``--marks`` compiles the kernels with ATTNRT_MARK and prints when CTAs pass each mark, in clocks after the CTA's first, median and
largest, and the spread of the CTAs' starts by the global timer. ``--once`` runs one case for ncu.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import Case
from clock import Clock
from clock import captured as captured_with
from shapes import Shape

import attnrt as at
from attnrt.backends.cuda import driver, programs, render

CTAS, MARKS = 1024, 32
DEFINE = f"""
__device__ unsigned long long attnrt_marks[{2 * CTAS * MARKS}];
__device__ __forceinline__ void attnrt_mark(int at) {{
  if (threadIdx.x % 128 == 0 && at < {MARKS} && blockIdx.x < {CTAS}) {{
    unsigned long long t, g;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(g) :: "memory");
    attnrt_marks[(blockIdx.x * {MARKS} + at) * 2] = t;
    attnrt_marks[(blockIdx.x * {MARKS} + at) * 2 + 1] = g;
  }}
}}
#define ATTNRT_MARK(n) attnrt_mark(n)
"""

SHAPES = [
    Shape(name="bs1 kv1024", kv=(1024,)),
    Shape(name="bs16 kv1024", kv=(1024,) * 16),
    Shape(name="bs8 kv8192 8/1", kv=(8192,) * 8, heads=8, kv_heads=1),
    Shape(name="bs1 kv32768", kv=(32768,)),
    Shape(name="bs1 kv42273 3/1", kv=(42273,), heads=3, kv_heads=1),
    Shape(name="bs4 kv1355 8/2 page1", kv=(1355, 900, 1800, 1400), heads=8, kv_heads=2, page=1),
    Shape(name="bs16 kv1024 32/4 page1", kv=(1024,) * 16, kv_heads=4, page=1),
    Shape(name="bs16 kv4096", kv=(4096,) * 16),
    Shape(name="bs64 kv4096", kv=(4096,) * 64),
    Shape(name="bs64 kv4096 fp8", kv=(4096,) * 64, kv_dtype="float8_e4m3fn"),
]


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    return captured_with(run)[0]


class Bound:
    """One case planned, with pools to rotate over."""

    def __init__(self, case: Case) -> None:
        self.case = case
        spec = at.AttentionSpec(
            num_qo_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            q_dtype="bfloat16",
            kv_dtype=case.shape.kv_dtype,
            variant=at.variants.causal(),
        )
        self.attn, self.tiny = (
            self.plan(spec, lens) for lens in (case.lens, np.array([1100, 300, 64], np.int32))
        )
        self.out = torch.empty_like(case.q)
        count = max(2, min(24, int(4e8 / case.nbytes)))
        self.pools = [(case.k, case.v)] + [(case.k.clone(), case.v.clone()) for _ in range(count - 1)]
        q = torch.zeros(3, *case.q.shape[1:], dtype=case.q.dtype, device="cuda")
        kv = torch.zeros(1600 // case.page, *case.k.shape[1:], device="cuda").to(case.k.dtype)
        self.warm = lambda: self.tiny.run(q, (kv, kv), out=q)
        self.pages = None

    def plan(self, spec: Any, lens: np.ndarray) -> Any:
        counts = -(-lens // self.case.page)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        same = len(lens) == len(self.case.lens)
        pages = self.case.pages if same else np.arange(indptr[-1], dtype=np.int32)
        attn = at.Attention(
            spec, backend="nvrtc", device="cuda", limits=at.Limits(len(lens), len(lens), int(indptr[-1]))
        )
        attn.plan(
            at.formats.paged(
                np.arange(len(lens) + 1, dtype=np.int32), indptr, pages, lens, page_size=self.case.page
            )
        )
        return attn

    def run(self, pool: int = 0) -> None:
        self.attn.run(self.case.q, self.pools[pool], out=self.out)

    def repeat(self) -> None:
        for _ in range(8):
            self.run()

    def rotate(self) -> None:
        for pool in range(len(self.pools)):
            self.run(pool)


def marks(library: Any, read: bool) -> np.ndarray | None:
    """Clears the marks, or brings them here."""
    ffi, lib = driver.shim()
    address, size = ffi.new("uint64_t *"), ffi.new("size_t *")
    driver.check(lib.attnrt_cuda_library_global(0, library.handle, b"attnrt_marks", address, size), "marks")
    host = np.zeros(size[0] // 8, np.uint64)
    if not read:
        driver.check(lib.attnrt_cuda_memset_async(0, address[0], 0, size[0], 0), "memset")
        return None
    driver.check(
        lib.attnrt_cuda_memcpy_dtoh(0, ffi.from_buffer(host, require_writable=True), address[0], size[0]),
        "copy",
    )
    return host.reshape(CTAS, MARKS, 2).astype(np.int64)


def show(found: np.ndarray) -> None:
    clocks, times = found[..., 0], found[..., 1]
    ran = clocks[:, 0] > 0
    if not ran.any():
        return
    begin = times[:, 0][ran].min()
    print(
        f"  {int(ran.sum())} CTAs, started over {times[:, 0][ran].max() - begin} ns; end of all {times[ran].max() - begin} ns"
    )
    for n in range(MARKS):
        got = ran & (clocks[:, n] > 0)
        if not got.any():
            continue
        d = np.sort(clocks[got, n] - clocks[got, 0])
        t = np.sort(times[got, n] - begin)
        median, last = d[len(d) // 2], t[len(t) // 2]
        print(f"    {n:2d}: {len(d):4d} CTAs  clk {median:7d} to {d[-1]:7d}   ns {last} to {t[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--marks", action="store_true")
    parser.add_argument("--once", default="")
    args = parser.parse_args()
    libraries: list[Any] = []
    if args.marks:
        plain, load = render.render, driver.Library.__init__
        programs.render = lambda spec, *names: DEFINE + plain(spec, *names)

        def keep(self: Any, device: int, image: bytes) -> None:
            load(self, device, image)
            libraries.append(self)

        driver.Library.__init__ = keep
    if args.once:
        bound = Bound(Case(next(s for s in SHAPES if s.name == args.once)))
        for _ in range(3):
            bound.run()
        torch.cuda.synchronize()
        return
    clock = Clock(15)
    for shape in SHAPES:
        if args.only not in shape.name:
            continue
        bound = Bound(Case(shape))
        replay = captured(bound.run)
        if args.marks:
            for _ in range(3):
                replay()
            clock.flush()
            torch.cuda.synchronize()
            with_marks = [x for x in libraries if _has(x)]
            for library in with_marks:
                marks(library, False)
            torch.cuda.synchronize()
            clock.flush()
            replay()
            torch.cuda.synchronize()
            print(f"{shape.name}: cold")
            for library in with_marks:
                found = marks(library, True)
                if found is not None and found.any():
                    show(found)
            continue
        cold = clock.median(replay)
        warm = captured(bound.warm)
        flush = clock.flush
        clock.flush = lambda flush=flush, warm=warm: (flush(), warm())  # type: ignore[method-assign]
        code = clock.median(replay)
        clock.flush = flush  # type: ignore[method-assign]
        rotate = captured(bound.rotate)
        chain = clock.median(rotate) / len(bound.pools)
        hot = clock.median(captured(bound.repeat)) / 8
        print(
            f"{shape.name:20s} cold {cold:7.2f}  code warm {code:7.2f}  chain of {len(bound.pools)} {chain:7.2f}  hot {hot:7.2f}",
            flush=True,
        )
        del bound, replay, warm, rotate
        torch.cuda.empty_cache()


def _has(library: Any) -> bool:
    ffi, lib = driver.shim()
    address, size = ffi.new("uint64_t *"), ffi.new("size_t *")
    return lib.attnrt_cuda_library_global(0, library.handle, b"attnrt_marks", address, size) == 0


if __name__ == "__main__":
    main()
