# SPDX-License-Identifier: Apache-2.0
"""How much Algorithm 1 balances: longest worker of round-robin against that of longest-first with cut runs.

    python benchmarks/simulate.py [--json] [--check] [--seeds 200]

One unit of work is one key: no heads, cuts anywhere ("token granularity"), 132 workers, batch 256 unless said. Round-robin puts
request i whole on worker i mod 132. The ratio of the two longest workers is taken per seed; printed are median, minimum and
maximum. The expected column holds the figures of the essay that docs/scheduling.md cites, re-derived there.
"""

from __future__ import annotations

import argparse
import json
import sys

from attnrt.scheduler.simulate import WORKLOADS, ratio_of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object per workload")
    parser.add_argument("--check", action="store_true", help="exit 1 if a median leaves its range")
    parser.add_argument("--seeds", type=int, default=100)
    args = parser.parse_args(argv)
    outside = 0
    for work in WORKLOADS:
        median, low, high = ratio_of(work, args.seeds)
        good = work.low - 0.005 <= median <= work.high + 0.005
        outside += not good
        if args.json:
            print(
                json.dumps({"workload": work.name, "median": median, "min": low, "max": high, "inside": good})
            )
        else:
            print(
                f"{work.name:28s} {median:5.2f}x  ({low:.2f}-{high:.2f})  expected {work.median:.2f}x "
                f"({work.low:.2f}-{work.high:.2f})  {'inside' if good else 'OUTSIDE'}"
            )
    return int(args.check and outside > 0)


if __name__ == "__main__":
    sys.exit(main())
