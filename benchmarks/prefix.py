# SPDX-License-Identifier: Apache-2.0
"""Decode of requests that share a prefix, on one GPU: our shared form, our flat form, FlashInfer's cascade and its flat decode.

    python benchmarks/prefix.py [--out benchmarks/results] [--only TEXT] [--provider TEXT] [--seconds S]

Every request has the prefix's pages, then 128 keys of its own (and what is left of a prefix that fills no page). Each provider
reads the same pages. Writes prefix.jsonl, .md and .svg; TB/s counts the prefix once.
"""

from __future__ import annotations

import sys

from harness import Provider, begin, chosen, finish, parser
from report import Target
from shapes import Shape
from targets import against, groups_of, time

SUFFIX = 128
TIMES = {
    "bs64 prefix32768 32/32": 195,
    "bs64 prefix32768 32/8": 80,
    "bs16 prefix8192 32/32": 70,
    "bs16 prefix8192 32/8": 32,
}


def shapes() -> list[Shape]:
    """Those with targets first, then odd prefixes, then the rest of the grid."""
    grid = [(64, 32768), (16, 8192)]
    grid += [(bs, n) for n in (1000, 5000, 20011, 33001) for bs in (16, 64)]
    grid += [(64, 8192), (16, 32768), (16, 1024), (64, 1024)]
    found = []
    for bs, prefix in grid:
        for kv_heads in (32, 8):
            found.append(
                Shape(
                    name=f"bs{bs} prefix{prefix} 32/{kv_heads}",
                    kv=(prefix + SUFFIX,) * bs,
                    kv_heads=kv_heads,
                    prefix=prefix,
                    group=f"32/{kv_heads}",
                )
            )
    return found


def targets(groups: dict[str, list[str]]) -> list[Target]:
    """Times, and never slower than our flat form by more than 3 %."""
    found = [time(case, most) for case, most in TIMES.items()]
    return found + [
        against(case, case, 0.97, "us", ("attnrt", "attnrt (flat)")) for case in groups.get("all", [])
    ]


def providers() -> list[Provider]:
    from ours import Ours, OursFlat
    from peers import FlashInferCascade, FlashInferDecode

    return [Ours(), OursFlat(), FlashInferCascade(), FlashInferDecode(True), FlashInferDecode(False)]


def main(argv: list[str] | None = None) -> int:
    args = parser(__doc__, 30).parse_args(argv)
    listed = [shape for shape in shapes() if chosen(shape.name, args.only)]
    run = begin(args, listed)
    run.add(listed, [p for p in providers() if chosen(p.name, args.provider)])
    groups = groups_of(listed)
    title = "Shared prefix, decode, own suffix of 128, bfloat16, head_dim 128, pages of 16"
    return finish(run, args, "prefix", title, targets=targets(groups), groups=groups)


if __name__ == "__main__":
    sys.exit(main())
