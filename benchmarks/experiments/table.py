# SPDX-License-Identifier: Apache-2.0
"""Print the JSON lines of the CUDA experiments as short tables.

usage: python table.py experiments.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict


def main(path: str) -> None:
    """Group the lines of `path` by experiment and print one row per record."""
    rows = defaultdict(list)
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            rows[record.pop("exp")].append(record)
    for exp, records in rows.items():
        print(f"== {exp}")
        if exp == "E1":
            print_bits(records)
            continue
        for record in records:
            print("  ".join(f"{key}={value}" for key, value in record.items()))


def print_bits(records: list[dict]) -> None:
    """E1 in short: how many forms agree in every trial, and each form that does not."""
    same = 0
    for record in records:
        counts = [value for key, value in record.items() if key.startswith("differ_")]
        if counts and not any(counts):
            same += 1
        else:
            print("  ".join(f"{key}={value}" for key, value in record.items()))
    print(f"{same} forms with the same bits as mma.sync in every trial")


if __name__ == "__main__":
    main(sys.argv[1])
