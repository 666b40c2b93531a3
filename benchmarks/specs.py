# SPDX-License-Identifier: Apache-2.0
"""The static part of a shape as attnrt takes it, and its kernels compiled ahead. Needs no torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shapes import CAP, THETA, WINDOW, Shape

import attnrt as at

__all__ = ["BACKEND", "DEVICE", "spec_of", "warm"]

BACKEND, DEVICE = "nvrtc", "cuda"


@at.variants.logits
def _bent(score: Any, ctx: Any) -> Any:
    """A hook that no library ships."""
    return score + 0.01 * score * score


def rotation(shape: Shape, keys: bool = True) -> Any:
    """Of a shape with rotated q and k; of q alone without ``keys``."""
    return at.variants.rope(shape.head_dim, THETA, keys=keys)


def variant_of(shape: Shape, rotates_keys: bool = True) -> Any:
    """The shape's variant as attnrt writes it; without ``rotates_keys`` over K that has been rotated."""
    causal = at.variants.causal()
    found: dict[str, Any] = {
        "causal": causal,
        "full": at.variants.full(),
        "softcap": (causal, at.variants.softcap(CAP)),
        "window": (causal, at.variants.sliding_window(WINDOW - 1)),
        "alibi": (causal, at.variants.alibi()),
        "rope": (causal, rotation(shape, rotates_keys)),
        "sigmoid": (causal, at.variants.sigmoid(bias=-math.log(max(shape.kv)))),
        "traced": (causal, _bent),
        "twin": (causal, at.variants.cpp("twin", logits="s + 0.01f * s * s")),
        "custom": at.variants.custom_mask(),
        "tree": at.variants.custom_mask(),
        "blocks": at.variants.full(),
    }
    return found[shape.variant]


def spec_of(shape: Shape, kv_layout: str = "NHD") -> at.AttentionSpec:
    """The static part of a shape."""
    return at.AttentionSpec(
        num_qo_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        head_dim_vo=shape.dim_vo,
        q_dtype=shape.q_dtype,
        kv_dtype=shape.kv_dtype,
        out_dtype="bfloat16",
        variant=variant_of(shape),
        kv_layout=kv_layout,
    )


def compile_for(shape: Shape, kv_layout: str) -> str:
    """Compile the kernels of a shape into the cache on disk; what went wrong, or nothing."""
    try:
        lens = {
            "max_qo_len": max(shape.qo_lens),
            "max_kv_len": max(shape.kv),
            "min_qo_len": min(shape.qo_lens),
        }
        limits = at.Limits(len(shape.kv), sum(shape.qo_lens), 1, **lens)
        at.warmup([spec_of(shape, kv_layout)], limits, backend=BACKEND, device=DEVICE)
    except at.AttnrtError as error:
        return f"{shape.name}: {type(error).__name__} {error}"
    return ""


def warm(
    shapes: Sequence[Shape],
    kv_layout: str = "NHD",
    processes: int = 14,
    meanwhile: Callable[[], Any] = lambda: None,
) -> None:
    """Compile what the shapes need, so that no case waits for the compiler, in processes: NVRTC takes one text at a time.

    What fails is printed and will fail again in its case. ``meanwhile`` is called once all processes run.
    """
    # One shape for each set of texts: numbers of heads and defaults of parameters are data, the longest request picks kernels.
    firsts = {}
    for s in shapes:
        group = s.heads // s.kv_heads
        rows = max(s.qo_lens) * group
        kinds = (max(s.qo_lens) == 1, rows > 64)
        firsts.setdefault((group, s.head_dim, s.dim_vo, s.q_dtype, s.kv_dtype, s.variant, kinds), s)
    work = [asdict(shape) for shape in firsts.values()]
    command = [sys.executable, str(Path(__file__).resolve()), BACKEND, DEVICE, kv_layout]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    shares = [work[i::processes] for i in range(min(processes, len(work)))]
    running = []
    for share in shares:  # this file alone, so that no process loads torch
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=where
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(share))
        process.stdin.close()
        process.stdin = None
        running.append(process)
    meanwhile()
    for process in running:
        print(process.communicate()[0], end="", flush=True)


def main() -> None:
    """Compile the shapes that come as JSON on standard input."""
    global BACKEND, DEVICE
    BACKEND, DEVICE, kv_layout = sys.argv[1:4]
    for fields in json.load(sys.stdin):
        lists = {name: tuple(fields[name]) for name in ("kv", "qo")}
        fault = compile_for(Shape(**{**fields, **lists}), kv_layout)
        if fault:
            print(f"not compiled: {fault[:300]}")


if __name__ == "__main__":
    main()
