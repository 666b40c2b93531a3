# SPDX-License-Identifier: Apache-2.0
"""What a captured graph costs over eager runs, on one GPU: it launches every kernel that a later plan within Limits may need.

    python benchmarks/graphs.py [--only TEXT] [--rounds N] [--warm]

For each batch the time of an eager run without limits (the kernels that its plan needs, in the forms it needs), of an eager run
with limits (the same kernels in the forms that limits ask for) and of the graph, with its nodes. Rounds alternate, because a GPU
that gets hot slows down. --warm compiles and runs once.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import specs
import torch
from cases import Case
from clock import Clock, captured, kernels_of
from ours import flat_index, limits_of
from shapes import Shape

import attnrt as at


def shapes() -> list[tuple[Shape, dict[str, Any]]]:
    """Batches, and what their limits promise less or more than the batch's own lengths."""
    decode = {"kv": (1024,) * 16}
    prefill: dict[str, Any] = {"heads": 16, "kv_heads": 16, "page": 0}
    chunks = {"qo": (512,) * 8 + (1,) * 32, "kv": (4096,) * 8 + (1024,) * 32}
    return [
        (Shape(name="decode 16x1024", **decode), {}),
        (
            Shape(name="decode 16x1024, any lengths", **decode),
            {
                "max_qo_len": None,
                "max_kv_len": None,
                "kv_alignment": None,
                "max_padding": None,
                "max_qo_tokens": 64,
            },
        ),
        *(
            (Shape(name=f"prefill {n}x{s}", kv=(s,) * n, qo=(s,) * n, **prefill), {})
            for n, s in ((32, 512), (4, 4096), (1, 16384))
        ),
        (
            Shape(name="prefill 32x512, any lengths", kv=(512,) * 32, qo=(512,) * 32, **prefill),
            {"max_kv_len": None, "min_qo_len": None, "kv_alignment": None, "max_padding": None},
        ),
        (Shape(name="8x512 chunk@4096 + 32 decode@1024", **chunks), {}),  # type: ignore[arg-type]
    ]


def ready(case: Case, index: Any, limits: at.Limits | None) -> Callable[[], Any]:
    """A run of the batch."""
    attn = at.Attention(
        specs.spec_of(case.shape, "NHD"), backend=specs.BACKEND, device=specs.DEVICE, limits=limits
    )
    attn.plan(index)
    out = case.new_out()
    return lambda: attn.run(case.q, (case.k, case.v), out=out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true")
    options = parser.parse_args()
    clock = Clock(9)
    print(f"{'µs, median of 9, least of the rounds':36s} {'eager':>9s} {'limits':>9s} {'graph':>9s}  nodes")
    for shape, change in shapes():
        if options.only not in shape.name:
            continue
        case = Case(shape, "cuda")
        index = flat_index(case)
        limits = dataclasses.replace(limits_of(index, specs.spec_of(shape, "NHD"), case), **change)
        eager, limited = ready(case, index, None), ready(case, index, limits)
        graph, _ = captured(limited)
        if options.warm:
            graph()
            torch.cuda.synchronize()
            continue
        times = [[clock.median(run) for run in (eager, limited, graph)] for _ in range(options.rounds)]
        least = " ".join(f"{min(column):9.2f}" for column in zip(*times, strict=True))
        nodes = [name.removeprefix("attnrt_") for name in kernels_of(graph)]
        print(f"{shape.name:36s} {least}  {', '.join(nodes)}", flush=True)


if __name__ == "__main__":
    main()
