# SPDX-License-Identifier: Apache-2.0
"""What explains a time: registers, shared memory, and counters of ncu for one run of ours and of FlashAttention-3.

    python benchmarks/counters.py [--only TEXT] [--provider TEXT] [--out FOLDER]

Each (shape, provider) runs in a process of its own under ncu, once before it is counted; results are not checked here
(decode.py and prefill.py do that). Times under ncu are of one launch with cold caches, for comparison among these rows alone.
Writes counters.md.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from harness import chosen
from shapes import Shape

#: Columns, and the metrics of ncu that they show.
METRICS = {
    "registers": "launch__registers_per_thread",
    "shared memory, KB a CTA": "launch__shared_mem_per_block",
    "warps an SM": "sm__warps_active.avg.per_cycle_active",
    "µs": "gpu__time_duration.sum",
    "clock, GHz": "sm__cycles_elapsed.avg.per_second",
    "tensor cores busy, %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue slots used, %": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "instructions, million": "smsp__inst_executed.sum",
    "waits for instructions, per issue": "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio",
    "DRAM read, MB": "dram__bytes_read.sum",
    "L2 hits, %": "lts__t_sector_hit_rate.pct",
}
#: What makes a unit of ncu's bytes, us or GHz.
_SCALE = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
_SCALE |= {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
_SCALE |= {"hz": 1e-9, "Hz": 1e-9, "Mhz": 1e-3, "MHz": 1e-3, "Ghz": 1.0, "GHz": 1.0}


def shapes() -> list[Shape]:
    """Compute-bound and memory-bound ones."""
    import decode
    import prefill

    wanted = (
        "causal 16/16 S512",
        "causal 16/16 S2048",
        "causal 16/16 S16384",
        "full 16/16 S2048",
        "8x2048 page1",
    )
    found = [s for s in [*prefill.dense(), *prefill.paged()] if s.name in wanted]
    return found + [
        s for s in decode.shapes() if s.name in ("bs64 kv4096", "bs1 kv32768", "bs16 const 1024 32/8")
    ]


def run_one(name: str, provider: str) -> None:
    """One run of a shape between the profiler's marks."""
    import torch
    from cases import Case
    from ours import Ours
    from peers_dense import FlashAttention3

    shape = next(s for s in shapes() if s.name == name)
    known = {p.name: p for p in (Ours(), FlashAttention3())}
    ready = known[provider].prepare(Case(shape, "cuda"))
    ready.run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    ready.run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def counted(name: str, provider: str) -> Iterator[dict[str, str]]:
    """A row for each kernel of one run that takes a tenth of the longest one's time."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += [
        "--metrics",
        ",".join(METRICS.values()),
        sys.executable,
        __file__,
        "--one",
        name,
        "--provider",
        provider,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout[max(0, done.stdout.find('"ID"')) :]
    lines = list(csv.DictReader(text.splitlines()))
    if done.returncode or len(lines) < 2:
        print(f"{name}, {provider}: {(done.stderr or done.stdout).strip()[-300:]}", file=sys.stderr)
        return
    units, kernels = lines[0], lines[1:]
    rows = []
    for line in kernels:
        row = {
            "case": name,
            "provider": provider,
            "kernel": line["Kernel Name"].split("(")[0].split("<")[0][:40],
        }
        for column, metric in METRICS.items():
            row[column] = shown(column, float(line[metric].replace(",", "")), units[metric])
        rows.append(row)
    longest = max(float(row["µs"]) for row in rows)
    yield from (row for row in rows if float(row["µs"]) >= longest / 10)


def shown(column: str, value: float, unit: str) -> str:
    """A number in the column's unit; ncu chooses its own."""
    value *= _SCALE.get(unit.split("/", maxsplit=1)[0], 1.0)
    if "MB" in column or "million" in column:
        value /= 1e6
    elif "KB" in column:
        value /= 1e3
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    options.add_argument("--only", default="")
    options.add_argument("--provider", default="")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options.add_argument("--one", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.one:
        run_one(args.one, args.provider)
        return 0
    names = ("case", "provider", "kernel", *METRICS)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for shape in shapes():
        for provider in ("attnrt", "fa3"):
            if chosen(shape.name, args.only) and chosen(provider, args.provider):
                for row in counted(shape.name, provider):
                    lines.append("| " + " | ".join(row[name] for name in names) + " |")
                    print(lines[-1], flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "counters.md").write_text("# Counters of ncu\n\n" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
