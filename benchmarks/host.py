# SPDX-License-Identifier: Apache-2.0
"""Host cost on a GPU: run(), plan() and load(), append(), and compiling a variant that nobody has seen.

    python benchmarks/host.py [--backend nvrtc] [--json FILE]

Times are wall-clock µs per call on the thread that calls, the least of several rounds (the host is shared: the least is what the
code costs); the stream is drained between rounds, so that the queue never fills. Compile times are one reading each, in ms.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnrt as at

SIZE = 16


def per_call(call: Callable[[], Any], calls: int = 200, rounds: int = 30) -> float:
    """Least µs per call over the rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / calls * 1e6


def index_of(kv_lens: list[int]) -> Any:
    pages = [-(-n // SIZE) for n in kv_lens]
    indptr = np.cumsum([0, *pages]).astype(np.int32)
    ids = np.random.default_rng(0).permutation(int(indptr[-1])).astype(np.int32)
    return at.formats.paged(
        np.arange(len(kv_lens) + 1, dtype=np.int32), indptr, ids, np.array(kv_lens, np.int32), SIZE
    )


def calls_of(backend: str) -> dict[str, float]:
    """µs of the calls of a decode step."""
    spec = at.AttentionSpec(
        num_qo_heads=32, num_kv_heads=8, head_dim=128, q_dtype="bfloat16", variant=at.variants.causal()
    )
    requests = 64
    q = torch.randn(requests, 32, 128, device="cuda", dtype=torch.bfloat16)
    kv = tuple(torch.randn(requests * 16, SIZE, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    out, lse = torch.empty_like(q), torch.empty(requests, 32, device="cuda")
    k = torch.randn(requests, 8, 128, device="cuda", dtype=torch.bfloat16)
    limits = at.Limits(requests, requests, requests * 64, num_pages=requests * 16, max_qo_len=1)
    found: dict[str, float] = {}
    short, cut = index_of([200] * requests), index_of([16 * 300])
    for label, given in (("", None), (" (limits)", limits)):
        attn = at.Attention(spec, backend=backend, device="cuda", limits=given)
        attn.plan(short)
        found["run, one launch" + label] = per_call(lambda a=attn: a.run(q, kv, out=out))
        found["run with lse, one launch" + label] = per_call(lambda a=attn: a.run(q, kv, out=out, lse=lse))
        found["run, new out" + label] = per_call(lambda a=attn: a.run(q, kv))
        plan = attn.plan(short, load=False)
        found["plan" + label] = per_call(lambda a=attn: a.plan(short, load=False), 50)
        found["load" + label] = per_call(lambda a=attn, p=plan: a.load(p), 50)
        found["plan + load" + label] = per_call(lambda a=attn: a.plan(short), 50)
        indexes = cycle([index_of([200 + i] * requests) for i in range(2)])
        found["plan + load + first run" + label] = per_call(
            lambda a=attn, x=indexes: (a.plan(next(x)), a.run(q, kv, out=out)), 50
        )
        found["append" + label] = per_call(lambda a=attn: a.append(k, k, kv))
        merged = attn.plan(cut)
        assert len(merged.merge)
        found["run, two launches" + label] = per_call(lambda a=attn: a.run(q[:1], kv, out=out[:1]))
        one = (q[:1], out[:1])
        found["run, two launches, same arrays" + label] = per_call(
            lambda a=attn, x=one: a.run(x[0], kv, out=x[1])
        )
    return found


def launch_alone(backend: str) -> float:
    """µs of the shim's launch of a kernel that has nothing to do."""
    from attnrt.backends.cuda import driver

    spec = at.AttentionSpec(
        num_qo_heads=32, num_kv_heads=8, head_dim=128, q_dtype="bfloat16", variant=at.variants.causal()
    )
    attn = at.Attention(spec, backend=backend, device="cuda")
    attn.plan(index_of([200] * 64))
    q = torch.randn(64, 32, 128, device="cuda", dtype=torch.bfloat16)
    kv = tuple(torch.randn(1024, SIZE, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    attn.run(q, kv, out=torch.empty_like(q))
    quick = next(iter(attn._runtime.quick.values()))
    ffi, lib = driver.shim()
    record = quick.repeat._record
    stream = torch.cuda.current_stream().cuda_stream
    return per_call(lambda: lib.attnrt_cuda_launch(ffi.addressof(record.launches[0]), record.args, stream))


def compiling(backend: str) -> dict[str, float]:
    """ms until a variant runs that nobody has seen, then the same from the cache on disk."""
    from attnrt.backends import cache

    status = sys.modules["attnrt.backends.status"]
    found = {}
    q = torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16)
    kv = tuple(torch.randn(64, SIZE, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    index = index_of([200] * 4)
    with tempfile.TemporaryDirectory() as folder:
        saved, cache.usable_cache_dir = cache.usable_cache_dir, lambda: Path(folder)
        try:
            at.Attention(
                _spec(at.variants.full()), backend=backend, device="cuda"
            )  # loads the compiler itself
            for name in ("logits hook", "logits hook, again from disk"):
                variant = (at.variants.causal(), at.variants.softcap(31.7), at.variants.sliding_window(777))
                status._loaded.cache_clear()
                start = time.perf_counter()
                attn = at.Attention(_spec(variant), backend=backend, device="cuda")
                attn.plan(index)
                attn.run(q, kv)
                torch.cuda.synchronize()
                found[name] = (time.perf_counter() - start) * 1e3
        finally:
            cache.usable_cache_dir = saved
    return found


def _spec(variant: Any) -> at.AttentionSpec:
    return at.AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=128, q_dtype="bfloat16", variant=variant)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="nvrtc")
    parser.add_argument("--json")
    options = parser.parse_args()
    calls = {"launch alone": launch_alone(options.backend), **calls_of(options.backend)}
    for name, value in calls.items():
        print(f"{name:45s} {value:8.2f} µs", flush=True)
    ms = compiling(options.backend)
    for name, value in ms.items():
        print(f"{name:45s} {value:8.1f} ms")
    if options.json:
        Path(options.json).write_text(json.dumps({"us": calls, "ms": ms}, indent=1))


if __name__ == "__main__":
    main()
