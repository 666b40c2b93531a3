# SPDX-License-Identifier: Apache-2.0
"""The CPU backend beside torch SDPA, in one run: paged decode against the memory's speed, causal prefill against torch's.

    python benchmarks/cpu.py [--quick] [--json]

Every figure is the median of interleaved rounds, so that a noisy neighbour hits both sides; every result is checked
against the other side first. Decode is judged by bytes of K and V per second over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import numpy as np

import attnrt as at
from attnrt.config import config

DTYPES = {"float32": np.float32, "bfloat16": None}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the report; ``ratio`` is what the target speaks of."""

    name: str
    ours_ms: float
    torch_ms: float
    figure: str
    torch_figure: str
    ratio: float
    target: float
    error: float


def _median(times: list[float]) -> float:
    return float(np.median(times))


def interleave(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: _median(t) for name, t in times.items()}


def cast(x: np.ndarray, dtype: str) -> Any:
    """A torch tensor of the dtype (torch makes bfloat16 for both sides)."""
    import torch

    return torch.from_numpy(x).to(getattr(torch, dtype))


def decode(dtype: str, rounds: int, rng: np.random.Generator, layout: str = "NHD") -> Result:
    """32 query heads over 8 KV heads, dim 128, 16 requests of 1024 keys in pages of 16."""
    import torch
    from attnrt.backends.cpu._native import ffi, lib

    batch, kv_len, page, heads, kv_heads, dim = 16, 1024, 16, 32, 8, 128
    pages = batch * kv_len // page
    q = cast(rng.standard_normal((batch, heads, dim), np.float32), dtype)
    shape = (pages, page, kv_heads, dim) if layout == "NHD" else (pages, kv_heads, page, dim)
    k, v = (cast(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))
    ids = rng.permutation(pages).astype(np.int32)
    indptr = np.arange(0, pages + 1, kv_len // page, dtype=np.int32)
    spec = at.AttentionSpec(
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        q_dtype=dtype,
        variant=at.variants.causal(),
        kv_layout=layout,
    )
    attn = at.Attention(spec, backend="cpu", device="cpu")
    attn.plan(
        at.formats.paged(
            np.arange(batch + 1, dtype=np.int32),
            indptr,
            ids,
            np.full(batch, kv_len, np.int32),
            page_size=page,
        )
    )
    out = torch.empty_like(q)
    # torch has no paged form: it gets dense K and V, gathered outside the timing.
    axes = (0, 3, 1, 2, 4) if layout == "NHD" else (0, 2, 1, 3, 4)
    split = (batch, kv_len // page, *shape[1:])
    dense = [x[torch.from_numpy(ids).long()].reshape(split).permute(axes) for x in (k, v)]
    dense_k, dense_v = (x.reshape(batch, kv_heads, kv_len, dim).contiguous() for x in dense)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None], dense_k, dense_v, enable_gqa=True
    )
    attn.run(q, (k, v), out=out)
    error = float((out.float() - wanted[:, :, 0].float()).abs().max())
    nbytes = 2 * k.numel() * k.element_size()
    memory = np.ones(64 << 20, np.float32)
    address = ffi.cast("void *", memory.ctypes.data)
    times = interleave(
        {
            "read": lambda: lib.attnrt_read(address, memory.nbytes, config().num_threads),
            "ours": lambda: attn.run(q, (k, v), out=out),
            "torch": lambda: torch.nn.functional.scaled_dot_product_attention(
                q[:, :, None], dense_k, dense_v, enable_gqa=True
            ),
        },
        rounds,
    )
    bandwidth = memory.nbytes / times["read"]
    rate, other = nbytes / times["ours"], nbytes / times["torch"]
    return Result(
        name=f"decode {dtype} {layout}",
        ours_ms=1e3 * times["ours"],
        torch_ms=1e3 * times["torch"],
        figure=f"{rate / 1e9:.1f} GB/s of {bandwidth / 1e9:.1f}",
        torch_figure=f"{other / 1e9:.1f} GB/s ({other / bandwidth:.0%})",
        ratio=rate / bandwidth,
        target=0.6 if dtype == "float32" else 0.4,
        error=error,
    )


def prefill(length: int, rounds: int, rng: np.random.Generator, heads: int = 8, dim: int = 128) -> Result:
    """Causal self-attention of one request, float32."""
    import torch

    q, k, v = (torch.from_numpy(rng.standard_normal((length, heads, dim), np.float32)) for _ in range(3))
    spec = at.AttentionSpec(
        num_qo_heads=heads, num_kv_heads=heads, head_dim=dim, q_dtype="float32", variant=at.variants.causal()
    )
    attn = at.Attention(spec, backend="cpu", device="cpu")
    indptr = np.array([0, length], np.int32)
    attn.plan(at.formats.ragged(indptr, indptr))
    out = torch.empty_like(q)
    tq, tk, tv = (x.permute(1, 0, 2)[None].contiguous() for x in (q, k, v))

    def sdpa() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, is_causal=True)

    attn.run(q, (k, v), out=out)
    error = float((out - sdpa()[0].permute(1, 0, 2)).abs().max())
    times = interleave({"ours": lambda: attn.run(q, (k, v), out=out), "torch": sdpa}, rounds)
    flop = 4 * heads * dim * length * (length + 1) / 2
    return Result(
        name=f"prefill float32 S {length}",
        ours_ms=1e3 * times["ours"],
        torch_ms=1e3 * times["torch"],
        figure=f"{flop / times['ours'] / 1e9:.1f} GFLOP/s",
        torch_figure=f"{flop / times['torch'] / 1e9:.1f} GFLOP/s",
        ratio=times["torch"] / times["ours"],
        target=0.9,
        error=error,
    )


def main() -> None:
    """Run all and print a table (or JSON)."""
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(config().num_threads)
    rng = np.random.default_rng(args.seed)
    rounds = 5 if args.quick else 25
    results = [
        *(
            decode(dtype, rounds, rng, layout)
            for dtype in ("float32", "bfloat16")
            for layout in ("NHD", "HND")
        ),
        prefill(1024, rounds, rng),
        prefill(4096, max(rounds // 5, 3), rng),
    ]
    from attnrt.backends.cpu.families import families

    machine = f"{_cpu_name()}, {config().num_threads} threads, {families()[0]}, torch {torch.__version__}, {date.today()}"
    if args.json:
        print(json.dumps({"machine": machine, "results": [asdict(r) for r in results]}))
    else:
        print(machine)
        for r in results:
            mark = "ok" if r.ratio >= r.target else "MISSED"
            print(
                f"{r.name:24} {r.ours_ms:8.2f} ms {r.figure:24} torch {r.torch_ms:8.2f} ms {r.torch_figure:24}"
                f" ratio {r.ratio:.2f} (target {r.target}: {mark}) max error {r.error:.1e}"
            )
    for r in results:
        if not r.error <= TOLERANCE["bfloat16" if "bfloat16" in r.name else "float32"]:
            raise SystemExit(f"{r.name}: wrong by {r.error}")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
