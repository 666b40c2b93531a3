# SPDX-License-Identifier: Apache-2.0
"""Decode on one GPU: paged caches of many shapes, ours and the peers' in one run.

    python benchmarks/decode.py [--only TEXT] [--provider TEXT] [--mode both] [--random 60] [--seconds S] [--out FOLDER]

Every request has one query; pages lie in random order. Writes decode.jsonl, .md and .svg. ``attnrt`` is the default,
batch-invariant mode, ``attnrt (run)`` the mode whose bits may depend on the whole call.
"""

from __future__ import annotations

import sys

import numpy as np
from harness import Provider, begin, chosen, finish, parser
from report import Target
from shapes import Shape
from targets import against, groups_of, mode_cost, rate, ratio, ratio_mean, ratio_worst, time

PAGE1 = ("bs64 kv4096 page1", "bs16 const 1024 32/8 page1")


def mid_lengths() -> dict[str, tuple[int, ...]]:
    """Sixteen lengths around 1024: equal, uniform, and Zipf-like (a few long ones)."""
    random = np.random.default_rng(3)
    zipf = 1.0 / np.arange(1, 17)
    return {
        "const": (1024,) * 16,
        "uniform": tuple(random.integers(512, 1537, 16).tolist()),
        "zipf": tuple(np.maximum(1, (zipf / zipf.sum() * 16384)).astype(int).tolist()),
    }


def shapes() -> list[Shape]:
    """The cases of the table: large, mid-size, small, skewed, odd groups, fp8."""
    found = [
        Shape(name="bs64 kv4096", kv=(4096,) * 64, group="large"),
        Shape(name="bs128 kv8192", kv=(8192,) * 128, group="large"),
        Shape(name="bs128 kv8192 64/8", kv=(8192,) * 128, heads=64, group="large"),
        Shape(name="bs64 kv4096 page1", kv=(4096,) * 64, page=1, group="layout"),
        Shape(name="bs64 kv4096 sequential", kv=(4096,) * 64, sequential=True, group="layout"),
    ]
    for kind, lens in mid_lengths().items():
        for heads, kv_heads in ((32, 8), (32, 4), (32, 32)):
            for page in (16, 1):
                name = f"bs16 {kind} 1024 {heads}/{kv_heads}" + (" page1" if page == 1 else "")
                found.append(
                    Shape(name=name, kv=lens, heads=heads, kv_heads=kv_heads, page=page, group="mid")
                )
    random = np.random.default_rng(0)
    found += [
        Shape(name="bs16 kv4096", kv=(4096,) * 16, group="mid"),
        Shape(name="bs32 kv2048 64/8", kv=(2048,) * 32, heads=64, group="mid"),
        Shape(name="bs8 kv8192 8/1", kv=(8192,) * 8, heads=8, kv_heads=1, group="mid"),
        Shape(name="bs4 kv2048", kv=(2048,) * 4, group="small"),
        Shape(name="bs1 kv1024", kv=(1024,), group="small"),
        Shape(name="bs1 kv4096", kv=(4096,), group="small"),
        Shape(name="bs1 kv32768", kv=(32768,), group="small"),
        Shape(name="bs1 kv131072", kv=(131072,), group="small"),
        Shape(name="U(4k,16k) bs8", kv=tuple(random.integers(4096, 16384, 8).tolist()), group="skewed"),
        Shape(name="U(4k,16k) bs64", kv=tuple(random.integers(4096, 16384, 64).tolist()), group="skewed"),
        Shape(name="bs16 kv8192 28/4", kv=(8192,) * 16, heads=28, kv_heads=4, group="groups"),
        Shape(name="bs16 kv8192 32/4", kv=(8192,) * 16, heads=32, kv_heads=4, group="groups"),
        Shape(name="bs16 kv4096 24/8", kv=(4096,) * 16, heads=24, group="groups"),
        Shape(name="bs32 kv4096 9/3", kv=(4096,) * 32, heads=9, kv_heads=3, group="groups"),
        Shape(name="bs48 kv4096 8/2", kv=(4096,) * 48, heads=8, kv_heads=2, group="groups"),
        Shape(name="bs64 kv4096 64/4", kv=(4096,) * 64, heads=64, kv_heads=4, group="groups"),
        Shape(name="bs64 kv4096 fp8", kv=(4096,) * 64, kv_dtype="float8_e4m3fn", group="fp8"),
        Shape(name="bs128 kv8192 fp8", kv=(8192,) * 128, kv_dtype="float8_e4m3fn", group="fp8"),
        Shape(name="bs16 kv1024 fp8", kv=(1024,) * 16, kv_dtype="float8_e4m3fn", group="fp8"),
    ]
    return found


def random_shapes(count: int, seed: int = 7) -> list[Shape]:
    """Shapes that nothing is tuned to."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        kv_heads, group = int(random.choice([1, 2, 4, 8])), int(random.choice([1, 2, 3, 4, 5, 6, 7, 8]))
        rows = int(2 ** random.uniform(0, 7))
        mean = int(min(2 ** random.uniform(8, 15), 2e9 / rows / kv_heads / 512))
        lens = np.maximum(1, random.uniform(0.3, 1.7, rows) * mean).astype(int)
        page = int(random.choice([1, 16, 16, 64]))
        name = f"random {i}: bs{rows} mean {int(lens.mean())} {kv_heads * group}/{kv_heads} page{page}"
        found.append(
            Shape(
                name=name,
                kv=tuple(lens.tolist()),
                heads=kv_heads * group,
                kv_heads=kv_heads,
                page=page,
                group="random",
            )
        )
    return found


def targets(groups: dict[str, list[str]]) -> list[Target]:
    """What this table is held to."""
    mid = groups.get("mid", [])
    listed = [name for group, names in groups.items() if group not in ("all", "random") for name in names]
    found = [rate("bs64 kv4096", 4.05), rate("bs128 kv8192", 4.25), rate("bs128 kv8192 64/8", 4.25)]
    found += [ratio(case, 0.98) for case in ("bs64 kv4096", "bs128 kv8192", "bs128 kv8192 64/8")]
    found += [ratio_mean("mid-size", mid, 1.4), ratio_worst("mid-size", mid, 1.08)]
    found += [time("bs1 kv1024", 8), time("bs1 kv32768", 40), ratio("bs1 kv131072", 1.1)]
    found += [ratio("U(4k,16k) bs8", 1.1), ratio("U(4k,16k) bs64", 1.05)]
    found += [
        against("bs16 kv8192 28/4", "bs16 kv8192 32/4", 0.95),
        against("bs16 kv4096 24/8", "bs16 kv4096", 0.95),
        against("bs32 kv4096 9/3", "bs48 kv4096 8/2", 0.95),
    ]
    for case in ("bs64 kv4096 fp8", "bs128 kv8192 fp8"):
        found += [ratio(case, 1.45, "flashinfer"), rate(case, 3.5)]
    found += [time("bs16 kv1024 fp8", 16)]
    pages = [name for name in listed if name.endswith(" page1")]
    found += [against(name, name.removesuffix(" page1"), 0.95) for name in pages]
    found += [against("bs64 kv4096", "bs64 kv4096 sequential", 0.99)]
    return found + mode_cost(listed)


def providers(mode: str) -> list[Provider]:
    """Ours in the modes asked for, then the peers."""
    from ours import Ours
    from peers import FlashAttention3Cache, FlashInferBatch, FlashInferDecode, FlashInferXqa

    modes = ("batch", "run") if mode == "both" else (mode,)
    flashinfer = (FlashInferDecode(True), FlashInferDecode(False), FlashInferXqa(), FlashInferBatch())
    peers = (*flashinfer, FlashAttention3Cache())
    return [*(Ours(m) for m in modes), *peers]


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__, 75)
    options.add_argument("--quick", action="store_true", help="most cases with pages of one token left out")
    options.add_argument("--random", type=int, default=60, help="so many random shapes after the others")
    options.add_argument("--mode", choices=("batch", "run", "both"), default="both")
    args = options.parse_args(argv)
    listed, swept = shapes(), random_shapes(args.random)
    if args.quick:
        listed = [shape for shape in listed if shape.page != 1 or shape.name in PAGE1]
    listed, swept = ([s for s in some if chosen(s.name, args.only)] for some in (listed, swept))
    run = begin(args, [*listed, *swept])
    asked = [p for p in providers(args.mode) if chosen(p.name, args.provider)]
    run.add(listed, asked)
    run.add(swept, [p for p in asked if p.name not in ("attnrt (run)", "fa3")])
    groups = groups_of([*listed, *swept])
    title = "Decode, paged, bfloat16 queries, head_dim 128, pages of 16 unless said"
    return finish(run, args, "decode", title, targets=targets(groups), groups=groups)


if __name__ == "__main__":
    sys.exit(main())
