# SPDX-License-Identifier: Apache-2.0
"""Time of make_plan for a decode batch: H32/8, page 16, kv ~ U(1024, 2048), traits of an H200, one core.

    python benchmarks/plan.py [--json] [--check] [--cpu-time]

``--cpu-time`` counts this thread's processor time instead of the wall's, for a machine that others use. Prints the median, 10th
and 90th percentile in microseconds over fresh batches, each planned once, beside the time the index builder takes to check and
copy the same batch's arrays. Targets: <= 20 at 1 request, <= 50 at 256, <= 150 at 1024; builder: aim <= 100 at 1024.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np

from attnrt.formats.paged import paged
from attnrt.scheduler import Traits, make_plan
from attnrt.spec import AttentionSpec
from attnrt.variants import causal

TARGETS = {1: 20.0, 64: None, 256: 50.0, 1024: 150.0}
PAGE = 16


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
        "plan_p10_us": round(float(low), 1),
        "plan_p90_us": round(float(high), 1),
        "builder_us": round(float(np.median(build[repeats // 10 :])), 1),
        "items": len(made.work),
        "max_over_mean": round(made.stats()["max_over_mean"], 3),
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
    for count, target in TARGETS.items():
        row = measure(count, args.repeats, time.thread_time_ns if args.cpu_time else time.perf_counter_ns)
        late += target is not None and row["plan_us"] > target
        if args.json:
            print(json.dumps(row))
            continue
        goal = f"target {target:g}" if target else "no target"
        print(
            f"{count:5d} requests: plan {row['plan_us']:6.1f} us (p10 {row['plan_p10_us']}, p90 {row['plan_p90_us']}; {goal}), "
            f"builder {row['builder_us']:6.1f} us, {row['items']} items, max/mean {row['max_over_mean']}"
        )
    return int(args.check and late > 0)


if __name__ == "__main__":
    sys.exit(main())
