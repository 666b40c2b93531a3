# SPDX-License-Identifier: Apache-2.0
"""Batches that mix prefill, chunks and decode, on one GPU: one plan and one launch of ours beside FlashInfer's ways.

    python benchmarks/mixed.py [--out benchmarks/results] [--only TEXT] [--provider TEXT] [--seconds S]

Peers: BatchAttention, the fa2 and fa3 prefill wrappers over the whole batch, and two calls (fa3 prefill, then decode). Writes
mixed.jsonl, .md and .svg.
"""

from __future__ import annotations

import sys

from harness import Provider, begin, chosen, finish, parser
from report import Target
from shapes import Shape
from targets import groups_of, mode_cost, ratio, time

TIMES = {
    "2x2048 prefill + 128 decode@2048": 340,
    "1024 chunk@16k + 64 decode@4096": 620,
    "speculative 64x8@4096": 272,
}


def shapes() -> list[Shape]:
    """The three of the targets and two more."""
    cases = {
        "2x2048 prefill + 128 decode@2048": ([2048] * 2 + [1] * 128, [2048] * 130),
        "1024 chunk@16k + 64 decode@4096": ([1024] + [1] * 64, [16384] + [4096] * 64),
        "speculative 64x8@4096": ([8] * 64, [4096] * 64),
        "8x512 chunk@4096 + 32 decode@1024": ([512] * 8 + [1] * 32, [4096] * 8 + [1024] * 32),
        "speculative 16x4@1024": ([4] * 16, [1024] * 16),
    }
    return [Shape(name=name, qo=tuple(qo), kv=tuple(kv), group="mixed") for name, (qo, kv) in cases.items()]


def targets(groups: dict[str, list[str]]) -> list[Target]:
    found = [time(case, most) for case, most in TIMES.items()]
    return [*found, *(ratio(case, 1.0) for case in TIMES), *mode_cost(groups.get("all", []))]


def providers() -> list[Provider]:
    from ours import Ours
    from peers import FlashAttention3Cache, FlashInferBatch, FlashInferPaged, FlashInferTwo

    peers = (FlashInferBatch(), FlashInferPaged("fa2"), FlashInferPaged("fa3"), FlashInferTwo())
    return [Ours(), Ours("run"), *peers, FlashAttention3Cache()]


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__, 25).parse_args(argv)
    listed = [shape for shape in shapes() if chosen(shape.name, args.only)]
    run = begin(args, listed)
    run.add(listed, [p for p in providers() if chosen(p.name, args.provider)])
    groups = groups_of(listed)
    title = "Mixed batches, causal, bfloat16, 32/8 heads, head_dim 128, pages of 16"
    return finish(run, args, "mixed", title, rate="tflops", targets=targets(groups), groups=groups)


if __name__ == "__main__":
    sys.exit(main())
