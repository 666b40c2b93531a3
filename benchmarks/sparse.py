# SPDX-License-Identifier: Apache-2.0
"""Page-sparse decode on one GPU: one request, 32 heads, each head reads its own pages of 16 tokens.

    python benchmarks/sparse.py [--out benchmarks/results] [--only TEXT] [--provider TEXT] [--seconds S]

``attnrt`` has pages that hold head after head (a head's page is 4 KB in one piece), as FlashInfer is given them; ``attnrt (NHD)``
has the heads of a token beside each other. FlashInfer takes the heads as 32 requests of one head. Writes sparse.jsonl, .md, .svg.
"""

from __future__ import annotations

import sys

from harness import Provider, begin, chosen, finish, parser
from report import Target
from shapes import Shape
from targets import against, groups_of, time

BUDGETS, LENGTHS = (64, 128, 256, 512), (4096, 32768)


def shapes() -> list[Shape]:
    """Budgets of pages for each head; 4096 keys have 256 pages."""
    return [
        Shape(
            name=f"seq {length} budget {budget}",
            kv=(length,),
            kv_heads=32,
            variant="full",
            per_head=budget,
            group="page-sparse",
        )
        for budget in BUDGETS
        for length in (*LENGTHS, 8192)
        if budget * 16 <= length
    ]


def targets() -> list[Target]:
    found = [time("seq 4096 budget 64", 9), time("seq 32768 budget 64", 9), time("seq 32768 budget 512", 38)]
    return found + [
        against(f"seq 32768 budget {budget}", f"seq 4096 budget {budget}", 0.95, "us")
        for budget in BUDGETS
        if budget * 16 <= 4096
    ]


def providers() -> list[Provider]:
    from ours import OursHND, OursPagesNHD
    from peers import FlashInferPerHead

    return [OursHND(), OursPagesNHD(), FlashInferPerHead(False), FlashInferPerHead(True)]


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__, 20).parse_args(argv)
    listed = [shape for shape in shapes() if chosen(shape.name, args.only)]
    run = begin(args, listed, "HND")
    run.add(listed, [p for p in providers() if chosen(p.name, args.provider)])
    title = "Page-sparse decode, one request, 32/32 heads, each its own pages of 16, bfloat16, head_dim 128"
    return finish(run, args, "sparse", title, targets=targets(), groups=groups_of(listed))


if __name__ == "__main__":
    sys.exit(main())
