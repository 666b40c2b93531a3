# SPDX-License-Identifier: Apache-2.0
"""Prefill and append on one GPU: dense, paged, variants, masks, block-sparse, fp8 caches; ours and the peers' in one run.

    python benchmarks/prefill.py [--only TEXT] [--provider TEXT] [--random 40] [--no-flex] [--seconds S] [--out FOLDER]

About 16384 queries a case. TFLOP/s count the pairs that are seen (a causal triangle for masks that thin one out). Writes
prefill.jsonl, .md and .svg.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
from harness import Provider, begin, chosen, finish, parser
from report import Target
from shapes import Shape
from targets import accuracy, against, groups_of, ratio, ratio_mean, tflops

TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: Name of the provider that brings K and V side by side first.
GATHERED = "attnrt (gathered)"
#: And of the one whose 8-bit products are summed as tensor cores do it.
ONE_LEVEL = "attnrt (one level)"
VARIANTS = ("softcap", "window", "alibi", "rope", "sigmoid", "traced", "twin")
#: Name, requests, queries and keys of each.
PAGED = (
    ("32x1024", 32, 1024, 1024),
    ("8x2048", 8, 2048, 2048),
    ("1x16384", 1, 16384, 16384),
    ("8x512 over 8192", 8, 512, 8192),
)


def square(name: str, length: int, heads: tuple[int, int] = (16, 16), dim: int = 128, **more: Any) -> Shape:
    """As many requests of one length as make TOKENS, contiguous."""
    lens = (length,) * max(1, TOKENS // length)
    return Shape(
        name=name, kv=lens, qo=lens, heads=heads[0], kv_heads=heads[1], head_dim=dim, **{"page": 0, **more}
    )


def dense() -> list[Shape]:
    """Contiguous K and V: head_dim 128 at every length, then other dims."""
    found = []
    for heads, variant in (((16, 16), "causal"), ((16, 16), "full"), ((32, 8), "causal")):
        for length in LENGTHS:
            group = f"{variant} {heads[0]}/{heads[1]}"
            found.append(square(f"{group} S{length}", length, heads, variant=variant, group=group))
    for length in (2048, 16384):
        found.append(square(f"causal D64 32/32 S{length}", length, (32, 32), 64, group="dims"))
        found.append(square(f"causal D256 8/8 S{length}", length, (8, 8), 256, group="dims"))
        found.append(
            square(f"causal D192/128 16/16 S{length}", length, (16, 16), 192, head_dim_vo=128, group="dims")
        )
    return found


def paged() -> list[Shape]:
    """The same lengths over pages of 64, 16 and 1 and contiguous; an fp8 cache beside a 16-bit one."""
    found = []
    for name, count, qo, kv in PAGED:
        for page in (0, 64, 16, 1):
            where = f"page{page}" if page else "contiguous"
            group = "paged" if page else "paged: contiguous"
            found.append(
                Shape(name=f"{name} {where}", kv=(kv,) * count, qo=(qo,) * count, page=page, group=group)
            )
    for name, count, qo, kv in PAGED[1:]:
        found.append(
            Shape(
                name=f"{name} page16 fp8",
                kv=(kv,) * count,
                qo=(qo,) * count,
                kv_dtype="float8_e4m3fn",
                group="fp8 cache",
            )
        )
    return found


def narrow() -> list[Shape]:
    """q, K and V in e4m3, and products of them."""
    more = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "group": "fp8 products"}
    found = [square(f"fp8 causal 16/16 S{length}", length, **more) for length in (2048, 8192, 16384)]
    found += [square("fp8 full 16/16 S8192", 8192, variant="full", **more)]
    found += [square("fp8 causal 32/8 S8192", 8192, (32, 8), **more)]
    paged = Shape(name="fp8 8x2048 page16", kv=(2048,) * 8, qo=(2048,) * 8, **more)
    return [*found, paged, replace(paged, name="fp8 8x512 over 8192 page16", kv=(8192,) * 8, qo=(512,) * 8)]


def variants() -> list[Shape]:
    """Variants, masks, draft trees and block-sparse matrices."""
    found = []
    for length in (2048, 8192, 16384):
        for variant in VARIANTS:
            if length != 8192 or variant not in ("traced", "twin"):
                found.append(square(f"{variant} S{length}", length, variant=variant, group=variant))
    found.append(square("custom S2048", 2048, variant="custom", group="masks"))
    for variant in ("custom", "causal"):
        found.append(
            Shape(
                name=f"{variant} 1x8192",
                kv=(8192,),
                qo=(8192,),
                page=0,
                heads=16,
                kv_heads=16,
                variant=variant,
                group="masks",
            )
        )
    for variant in ("tree", "causal"):
        found.append(
            Shape(
                name=f"{variant} 16x64 over 4096",
                kv=(4096,) * 16,
                qo=(64,) * 16,
                variant=variant,
                group="masks",
            )
        )
    for block, kept in ((128, 0.2), (64, 0.2), (128, 0.4)):
        found.append(
            square(
                f"blocks {block} {kept:.0%} S16384",
                16384,
                (32, 32),
                variant="blocks",
                block=block,
                kept=kept,
                group="blocks",
            )
        )
    return found


def random_shapes(count: int, seed: int = 11) -> list[Shape]:
    """Shapes that nothing is tuned to: lengths unequal or equal, whole or chunks, contiguous or paged."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        kv_heads, group = int(random.choice([2, 4, 8, 16])), int(random.choice([1, 2, 4, 8]))
        kv_heads = min(kv_heads, 64 // group)
        requests, work = int(2 ** random.uniform(0, 5)), 10 ** random.uniform(10.7, 12.2)
        mean = max(64, min(32768, int((work / (256 * kv_heads * group * requests)) ** 0.5)))
        equal = bool(random.integers(2))
        kv = np.full(requests, mean) if equal else random.uniform(0.3, 1.7, requests) * mean
        kv = np.maximum(16, kv).astype(int)
        chunk = bool(random.integers(3) == 0)
        qo = np.maximum(1, kv // 4) if chunk else kv
        dim = int(random.choice([64, 128, 128, 128]))
        causal = chunk or dim == 64 or bool(random.integers(4))
        page = int(random.choice([0, 0, 1, 16, 16, 64])) if dim == 128 and causal else 0
        name = (
            f"random {i}: {requests}x{int(qo.mean())} over {int(kv.mean())} {kv_heads * group}/{kv_heads} D{dim}"
            f"{'' if causal else ' full'}{f' page{page}' if page else ''}{' equal' if equal else ''}"
        )
        found.append(
            Shape(
                name=name,
                kv=tuple(kv.tolist()),
                qo=tuple(qo.tolist()),
                heads=kv_heads * group,
                kv_heads=kv_heads,
                head_dim=dim,
                page=page,
                variant="causal" if causal else "full",
                group="random",
            )
        )
    return found


def targets(groups: dict[str, list[str]]) -> list[Target]:
    """What this table is held to."""
    found: list[Target] = []
    for group in ("causal 16/16", "causal 32/8", "full 16/16"):
        found += [ratio_mean(group, groups.get(group, []), 1.03)]
        found += [ratio(case, 1.0) for case in groups.get(group, [])]
    found += [ratio("causal D64 32/32 S2048", 1.0, "fa3")]
    found += [
        ratio(f"causal {d} S{s}", 0.95, "fa3") for d in ("D256 8/8", "D192/128 16/16") for s in (2048, 16384)
    ]
    for name, *_ in PAGED:
        own = f"{name} contiguous"
        found += [against(f"{name} page{page}", own, 0.97, "tflops") for page in (16, 64)]
        found += [against(f"{name} page1", own, 0.90, "tflops")]
        append = "over" in name
        found += [ratio(f"{name} page{page}", 1.15 if append else 1.25, "flashinfer") for page in (16, 64)]
        found += [ratio(f"{name} page1", 1.15 if append else 1.1, "flashinfer")]
    for length in (2048, 8192, 16384):
        own = f"causal 16/16 S{length}"
        found += [ratio(f"{variant} S{length}", 1.1, "flashinfer") for variant in ("softcap", "window")]
        found += [ratio(f"rope S{length}", 2.0, "flashinfer")]
        for variant, least in (("alibi", 0.90), ("sigmoid", 0.95), ("rope", 0.80)):
            found += [against(f"{variant} S{length}", own, least, "tflops")]
    found += [against(f"traced S{s}", f"twin S{s}", 0.98, "us") for s in (2048, 16384)]
    found += [against("custom S2048", "causal 16/16 S2048", 0.75, "tflops")]
    found += [against("custom 1x8192", "causal 1x8192", 0.75, "tflops")]
    found += [against("tree 16x64 over 4096", "causal 16x64 over 4096", 0.75, "us")]
    found += [tflops("blocks 128 20% S16384", 520), tflops("blocks 64 20% S16384", 360)]
    found += [against("blocks 128 20% S16384", "blocks 128 40% S16384", 0.95, "tflops")]
    found += [against(f"{name} page16 fp8", f"{name} page16", 0.90, "us") for name, *_ in PAGED[1:]]
    found += [tflops("fp8 causal 16/16 S16384", 850, who) for who in ("attnrt", ONE_LEVEL)]
    return [*found, *_gathered(), accuracy(groups.get("all", []), "fa3")]


def _gathered() -> list[Target]:
    """The same targets for K and V that are brought side by side first."""
    found, ways = [], (GATHERED, "attnrt")
    for name, *_ in PAGED:
        least = 1.15 if "over" in name else 1.1
        found += [against(f"{name} page1", f"{name} contiguous", 0.90, "tflops", ways)]
        found += [ratio(f"{name} page1", least, "flashinfer", ways[0])]
    found += [against(f"{name} page16 fp8", f"{name} page16", 0.90, "us", ways) for name, *_ in PAGED[1:]]
    for length in (2048, 8192, 16384):
        found += [against(f"rope S{length}", f"causal 16/16 S{length}", 0.80, "tflops", ways)]
        found += [ratio(f"rope S{length}", 2.0, "flashinfer", ways[0])]
    return found


def providers() -> list[Provider]:
    from ours import Ours, OursGathered, OursOneLevel
    from peers import FlashInferPaged
    from peers_dense import FlashAttention3, FlashInferBlocks, FlashInferRagged, Sdpa

    paged_forms = (FlashInferPaged("fa3"), FlashInferPaged("fa2"))
    ragged_forms = (FlashInferRagged("fa3"), FlashInferRagged("fa2"))
    blocks = (FlashInferBlocks("fa3"), FlashInferBlocks("fa2"))
    return [
        Ours(),
        OursGathered(),
        OursOneLevel(),
        FlashAttention3(),
        Sdpa("cudnn"),
        Sdpa("flash"),
        *ragged_forms,
        *paged_forms,
        *blocks,
    ]


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, 110)
    options.add_argument("--random", type=int, default=40, help="so many random shapes after the others")
    options.add_argument(
        "--no-flex", action="store_true", help="leave out FlexAttention, which compiles each case"
    )
    args = options.parse_args(argv)
    listed, swept = [*dense(), *paged(), *narrow(), *variants()], random_shapes(args.random)
    listed, swept = ([s for s in some if chosen(s.name, args.only)] for some in (listed, swept))
    run = begin(args, [*listed, *swept])
    from peers_dense import Flex

    asked = [p for p in providers() if chosen(p.name, args.provider)]
    flexed = [s for s in listed if Flex.takes(s) and not args.no_flex and chosen("flex", args.provider)]
    run.add([shape for shape in listed if shape not in flexed], asked)
    run.add(flexed, [*asked, Flex()])
    run.add(swept, [p for p in asked if p.name not in ("sdpa-flash",)])
    groups = groups_of([*listed, *swept])
    title = "Prefill and append, bfloat16, head_dim 128 and 16384 queries unless said"
    return finish(run, args, "prefill", title, rate="tflops", targets=targets(groups), groups=groups)


if __name__ == "__main__":
    sys.exit(main())
