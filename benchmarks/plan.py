# SPDX-License-Identifier: Apache-2.0
"""Time of make_plan for decode batches: H32/8, page 16, kv ~ U(1024, 2048), traits of an H200, one core.

    python benchmarks/plan.py [--json] [--check] [--cpu-time]

``--cpu-time`` counts this thread's processor time instead of the wall's, for a machine that others use. Prints the minimum,
median, 10th and 90th percentile in microseconds over fresh batches, each planned once, beside the time the index builder takes to
check and copy the same batch's arrays. Targets: <= 20 at 1 request, <= 50 at 256, <= 150 at 1024; builder: aim <= 100 at 1024.

Then the same of composites, whose cuts lie inside leaves, and of a flat batch with as many queries: requests that share their
first 992 keys, draft trees of 8 nodes per request, both, and a cascade of three levels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from attnrt.formats import share, tree
from attnrt.formats.base import Index
from attnrt.formats.paged import paged
from attnrt.scheduler import Traits, make_plan
from attnrt.spec import AttentionSpec
from attnrt.variants import causal

TARGETS = {1: 20.0, 64: None, 256: 50.0, 1024: 150.0}
PAGE = 16

#: Name: requests, queries of each, keys that all share, keys that groups of eight share, target.
COMPOSITES = {
    "share": [(16, 1, 992, 0, None), (64, 1, 992, 0, 100.0), (256, 1, 992, 0, 300.0)],
    "tree": [(64, 8, 0, 0, 100.0), (256, 8, 0, 0, 300.0)],
    "tree(share)": [(64, 8, 992, 0, None)],
    "cascade of 3": [(64, 1, 800, 192, 100.0)],
}


def batch(rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """qo_indptr, kv_indptr, kv_indices, kv_lens of a decode batch over a shuffled pool."""
    kv_lens = rng.integers(1024, 2049, count, dtype=np.int32)
    pages = -(-kv_lens // PAGE)
    kv_indptr = np.concatenate(([0], np.cumsum(pages))).astype(np.int32)
    kv_indices = rng.permutation(int(kv_indptr[-1])).astype(np.int32)
    return np.arange(count + 1, dtype=np.int32), kv_indptr, kv_indices, kv_lens


def measure(count: int, repeats: int, clock: Callable[[], int]) -> dict[str, float]:
    """Microseconds of planning and building at one batch size."""
    rng = np.random.default_rng(count)
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, variant=causal())
    traits = Traits.of("h200")
    batches = [batch(rng, count) for _ in range(min(repeats, 64))]
    build, plan = [], []
    for i in range(repeats):
        arrays = batches[i % len(batches)]
        start = clock()
        index = paged(*arrays, page_size=PAGE)
        middle = clock()
        made = make_plan(spec, index, traits)
        end = clock()
        build.append((middle - start) / 1e3)
        plan.append((end - middle) / 1e3)
    low, median, high = np.percentile(plan[repeats // 10 :], (10, 50, 90))
    return {
        "requests": count,
        "plan_us": round(float(median), 1),
        "plan_min_us": round(min(plan), 1),
        "plan_p10_us": round(float(low), 1),
        "plan_p90_us": round(float(high), 1),
        "builder_us": round(float(np.median(build[repeats // 10 :])), 1),
        "items": len(made.work),
        "max_over_mean": round(made.stats()["max_over_mean"], 3),
    }


def composite(rng: np.random.Generator, row: tuple, drafts: bool) -> Index:
    """One index of COMPOSITES."""
    count, queries, common, grouped, _ = row
    qo_indptr, kv_indptr, kv_indices, kv_lens = batch(rng, count)
    first, second = common // PAGE, (common + grouped) // PAGE
    for r in range(count):
        at, lead = kv_indptr[r], kv_indptr[r // 8 * 8]
        kv_indices[at : at + first] = kv_indices[:first]
        if grouped:
            kv_indices[at + first : at + second] = kv_indices[lead + first : lead + second]
    index: Index = paged(qo_indptr * queries, kv_indptr, kv_indices, kv_lens, page_size=PAGE)
    if common:
        index = share(index)
    if not drafts:
        return index
    parents = [-1 if i == 0 else int(rng.integers(-1, i)) for _ in range(count) for i in range(queries)]
    return tree(index, np.asarray(parents, np.int32))


def measure_composite(name: str, row: tuple, repeats: int, clock: Callable[[], int]) -> dict[str, object]:
    """Microseconds of planning one row of COMPOSITES, over eight indexes in turn."""
    rng = np.random.default_rng(row[0])
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128, variant=causal())
    traits = Traits.of("h200")
    indexes = [composite(rng, row, "tree" in name) for _ in range(8)]
    taken = []
    for i in range(repeats):
        start = clock()
        made = make_plan(spec, indexes[i % 8], traits)
        taken.append((clock() - start) / 1e3)
    low, median, high = np.percentile(taken[repeats // 10 :], (10, 50, 90))
    return {
        "index": name,
        "requests": row[0],
        "queries": row[0] * row[1],
        "parts": f"{len(indexes[0].parts)} -> {len(made.parts)}",
        "plan_us": round(float(median), 1),
        "plan_min_us": round(min(taken), 1),
        "plan_p10_us": round(float(low), 1),
        "plan_p90_us": round(float(high), 1),
        "items": len(made.work),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per batch size")
    parser.add_argument("--check", action="store_true", help="exit 1 if a median is over its target")
    parser.add_argument(
        "--cpu-time", action="store_true", help="this thread's processor time instead of wall time"
    )
    parser.add_argument("--repeats", type=int, default=1000)
    args = parser.parse_args(argv)
    late = 0
    clock = time.thread_time_ns if args.cpu_time else time.perf_counter_ns
    for count, target in TARGETS.items():
        row = measure(count, args.repeats, clock)
        late += target is not None and row["plan_us"] > target
        if args.json:
            print(json.dumps(row))
            continue
        goal = f"target {target:g}" if target else "no target"
        print(
            f"{count:5d} requests: plan {row['plan_us']:6.1f} us (min {row['plan_min_us']}, p10 {row['plan_p10_us']}, "
            f"p90 {row['plan_p90_us']}; {goal}), "
            f"builder {row['builder_us']:6.1f} us, {row['items']} items, max/mean {row['max_over_mean']}"
        )
    for name, rows in COMPOSITES.items():
        for shape in rows:
            found = measure_composite(name, shape, args.repeats, clock)
            target = shape[-1]
            late += target is not None and found["plan_us"] > target
            if args.json:
                print(json.dumps(found))
                continue
            goal = f"target {target:g}" if target else "no target"
            print(
                f"{name:>12s}, {found['requests']:4d} requests, {found['queries']:4d} queries, parts {found['parts']}: "
                f"plan {found['plan_us']:6.1f} us (min {found['plan_min_us']}, p10 {found['plan_p10_us']}, "
                f"p90 {found['plan_p90_us']}; {goal}), {found['items']} items"
            )
    return int(args.check and late > 0)


if __name__ == "__main__":
    sys.exit(main())
