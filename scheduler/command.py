# SPDX-License-Identifier: Apache-2.0
"""``attnrt plan FILE``: the makespan of every scheduler on recorded lengths, against round-robin.

Requests are taken in order of arrival, ``--batch`` at a time. A decode batch has one query per request over its prompt and
half of what it will generate; ``--prefill`` has the prompt's queries over the prompt. Indexes are affine (ragged): a
makespan depends on lengths only.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, AttnrtError
from attnrt.formats.base import BlockSparse, Features, Requests
from attnrt.formats.check import trusted
from attnrt.scheduler.assign import BUILTIN
from attnrt.scheduler.base import Traits
from attnrt.scheduler.plan import make_plan
from attnrt.scheduler.traces import Trace, read_trace

__all__ = ["compare", "main"]

_COLUMNS = ("makespan", "max_over_mean", "items", "merge_rows", "partial_bytes")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0, or 2 with the error on stderr."""
    args = _parser().parse_args(argv)
    try:
        report = _run(args)
    except (AttnrtError, OSError) as error:
        print(f"attnrt plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnrt plan", description=__doc__.splitlines()[0])
    parser.add_argument("file", help="lengths (one a line), an Azure trace CSV, or a Mooncake JSONL")
    parser.add_argument("--machine", default="h200", help="traits to plan for (h200, h100, a100, cpu)")
    parser.add_argument("--workers", type=int, help="workers instead of the machine's own number")
    parser.add_argument("--batch", type=int, default=256, help="requests per batch")
    parser.add_argument("--batches", type=int, default=8, help="batches at most, spread over the trace")
    parser.add_argument("--qo-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--prefill", action="store_true", help="plan prompts instead of decode steps")
    parser.add_argument("--scheduler", action="append", help="schedulers to compare (default: all built in)")
    parser.add_argument(
        "--trace", metavar="PATH", help="write the first batch's lpt schedule as Chrome trace-event JSON"
    )
    parser.add_argument("--picture", metavar="PATH", help="draw the first batch's workers (needs matplotlib)")
    parser.add_argument("--json", action="store_true")
    return parser


def _run(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("batch", "batches", "qo_heads", "kv_heads"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"--{name.replace('_', '-')}", "must be at least 1", getattr(args, name))
    if args.qo_heads % args.kv_heads:
        raise ArgumentError(
            "--qo-heads", "must be a multiple of --kv-heads", f"{args.qo_heads} and {args.kv_heads}"
        )
    trace = read_trace(args.file)
    traits = Traits.of(args.machine, args.workers)
    spec = _spec(args.qo_heads, args.kv_heads)
    batches = _batches(trace, args.batch, args.batches, args.prefill)
    schedulers = args.scheduler or list(BUILTIN)
    rows = compare(spec, batches, traits, schedulers)
    if args.trace or args.picture:
        plan = make_plan(spec, batches[0], traits, scheduler=schedulers[0])
        if args.trace:
            plan.trace(args.trace)
        if args.picture:
            from attnrt.scheduler.picture import picture

            picture(plan, args.picture)
    what = {"file": str(args.file), "kind": trace.kind, "requests": len(trace), "machine": traits.name}
    return {
        **what,
        "workers": traits.num_workers,
        "batches": len(batches),
        "batch": args.batch,
        "schedulers": rows,
    }


def _spec(qo_heads: int, kv_heads: int) -> Any:
    """All that the planner reads of an AttentionSpec; a causal variant, so that a prompt's later keys are cut off."""
    causal = SimpleNamespace(reach=lambda: (None, 0), visible_range=lambda pos_min, pos_max: (None, pos_max))
    return SimpleNamespace(
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        group=qo_heads // kv_heads,
        head_dim=128,
        head_dim_vo=128,
        composed=causal,
    )


def _batches(trace: Trace, size: int, most: int, prefill: bool) -> list[BlockSparse]:
    starts = np.arange(0, len(trace), size)
    if len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).astype(np.int64)]
    found = []
    for start in starts.tolist():
        prompt = trace.input_lens[start : start + size]
        kv_lens = prompt if prefill else prompt + trace.output_lens[start : start + size] // 2
        found.append(_index(prompt if prefill else np.minimum(kv_lens, 1), kv_lens))
    return found


def _index(qo_lens: np.ndarray, kv_lens: np.ndarray) -> BlockSparse:
    """An affine index of these lengths, one block row per request."""
    count = len(kv_lens)
    qo_indptr = np.concatenate(([0], np.cumsum(qo_lens)))
    if qo_indptr[-1] > np.iinfo(np.int32).max:
        raise ArgumentError("--batch", "must keep a batch's queries below 2^31", int(qo_indptr[-1]))
    request = np.repeat(np.arange(count, dtype=np.int32), qo_lens)
    within = np.arange(len(request)) - qo_indptr[request]
    zeros = np.zeros(count, np.int32)
    found = BlockSparse(
        block_size=(int(max(1, qo_lens.max(initial=1))), 1),
        num_qo=len(request),
        requests=Requests(qo_lens=qo_lens.astype(np.int32), kv_lens=kv_lens.astype(np.int32)),
        qo_indptr=qo_indptr.astype(np.int32),
        request=request,
        qo_pos=(kv_lens[request] - qo_lens[request] + within).astype(np.int32),
        indptr=np.zeros(count + 1, np.int32),
        indices=None,
        kv_base=np.concatenate(([0], np.cumsum(kv_lens)))[:-1].astype(np.int64),
        kv_pos=zeros,
        kv_begin=zeros,
        kv_end=kv_lens.astype(np.int32),
        kv_offset=zeros,
        max_block=int(kv_lens.sum()) - 1,
        features=Features(affine=True),
    )
    return trusted(found)


def compare(spec: Any, batches: list[Any], traits: Traits, schedulers: list[str]) -> list[dict[str, Any]]:
    """Sums over batches for each scheduler, and ``speedup``: round-robin's makespan over its own."""
    base = sum(
        make_plan(spec, index, traits, scheduler="round_robin").stats()["makespan"] for index in batches
    )
    rows = []
    for name in schedulers:
        numbers = [make_plan(spec, index, traits, scheduler=name).stats() for index in batches]
        total = {key: sum(n[key] for n in numbers) for key in _COLUMNS}
        mean = sum(n["mean"] for n in numbers)
        total["max_over_mean"] = total["makespan"] / mean if mean else 1.0
        speedup = base / total["makespan"] if total["makespan"] else 1.0
        rows.append({"scheduler": name, "speedup": speedup, **total})
    return rows


def _print(report: dict[str, Any]) -> None:
    print(
        f"{report['file']} ({report['kind']}, {report['requests']} requests): {report['batches']} batches of up to "
        f"{report['batch']} on {report['machine']}, {report['workers']} workers"
    )
    heads = ("scheduler", "makespan", "vs round_robin", "max/mean", "items", "merges", "partial MB")
    print("{:22s}{:>14s}{:>16s}{:>10s}{:>9s}{:>9s}{:>12s}".format(*heads))
    for row in report["schedulers"]:
        print(
            f"{row['scheduler']:22s}{row['makespan']:14.0f}{row['speedup']:15.2f}x{row['max_over_mean']:10.3f}"
            f"{row['items']:9d}{row['merge_rows']:9d}{row['partial_bytes'] / 1e6:12.2f}"
        )


if __name__ == "__main__":
    sys.exit(main())
