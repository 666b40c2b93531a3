# SPDX-License-Identifier: Apache-2.0
"""``attnrt bench``: one batch, from a saved case or from numbers given, checked and timed on each backend of this machine.

A time is printed only after the result was compared with dense float64 attention (``attnrt.testing``); the tables against
other libraries are made by benchmarks/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError, AttnrtError, UnsupportedError

__all__ = ["main", "measure"]


def measure(case: Any, backend: str, *, page_size: int = 16, repeats: int = 20) -> dict[str, Any]:
    """Check one backend on a case, then time plan and run.

    Returns
    -------
    dict
        backend, plan_us and run_us (medians of host wall time, device work included), kv_gb_per_s, worst (largest error as a
        share of its bound).
    """
    from attnrt import testing
    from attnrt.api import Attention
    from attnrt.dtypes import as_dtype

    spec = case.spec
    batch = testing.lay_out(case, page_size=page_size)
    attn = Attention(spec, backend=backend)
    if attn.device.kind != "cpu":
        raise ArgumentError(
            "backend", "must run on the CPU here", backend, "GPU tables: benchmarks/decode.py"
        )
    result = testing.run_batch(case, batch, backend, attn=attn)
    answer = testing.oracle_answer(spec, batch.index, batch.q, batch.kv, **batch.params)
    worst = testing.compare(spec, answer, result.out, result.lse)
    plans, runs = [], []
    out = np.empty_like(result.out)
    for _ in range(repeats):
        start = time.perf_counter()
        attn.plan(batch.index)
        planned = time.perf_counter()
        attn.run(batch.q, batch.kv, out=out, **batch.params)
        plans.append(planned - start)
        runs.append(time.perf_counter() - planned)
    width = spec.head_dim + (0 if spec.shared_kv else spec.head_dim_vo)
    nbytes = int(case.kv_lens.sum()) * spec.num_kv_heads * width * as_dtype(spec.kv_dtype).itemsize
    run = statistics.median(runs)
    return {
        "backend": backend,
        "plan_us": round(statistics.median(plans) * 1e6, 1),
        "run_us": round(run * 1e6, 1),
        "kv_gb_per_s": round(nbytes / run / 1e9, 2),
        "worst": round(max(worst.values()), 3),
    }


def _check(args: argparse.Namespace) -> None:
    """Numbers that argparse takes and a batch cannot have."""
    least = {"batch": 1, "qo_len": 0, "kv_len": 0, "page_size": 1, "repeats": 1}
    for name, low in least.items():
        if getattr(args, name) < low:
            raise ArgumentError(f"--{name.replace('_', '-')}", f"must be at least {low}", getattr(args, name))


def _case(args: argparse.Namespace) -> Any:
    from attnrt import testing, variants
    from attnrt.spec import AttentionSpec

    if args.case:
        try:
            return testing.load_case(args.case, variants.causal())
        except (ValueError, KeyError) as error:
            raise ArgumentError(
                "--case", "must be a file that attnrt.testing.save_case wrote", args.case
            ) from error
    spec = AttentionSpec(
        num_qo_heads=args.qo_heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        q_dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        variant=variants.causal(),
    )
    return testing.make_case(spec, [args.qo_len] * args.batch, [args.kv_len] * args.batch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnrt bench",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--case", metavar="FILE", help="a case written by attnrt.testing.save_case")
    parser.add_argument(
        "--backend", action="append", help="backends to time (default: every one of the CPU but reference)"
    )
    parser.add_argument("--batch", type=int, default=4, help="requests")
    parser.add_argument("--qo-len", type=int, default=1, help="queries of each request")
    parser.add_argument("--kv-len", type=int, default=512, help="keys of each request")
    parser.add_argument("--qo-heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads")
    parser.add_argument("--head-dim", type=int, default=128, help="numbers per head")
    parser.add_argument("--dtype", default="float32", help="dtype of q and out")
    parser.add_argument("--kv-dtype", default=None, help="dtype of the cache (default: q's)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per KV page")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0, 1 if a result is wrong, or 2 with the error on stderr."""
    from attnrt.backends import status

    args = _parser().parse_args(argv)
    try:
        _check(args)
        case = _case(args)
        reasons = status(case.spec, device="cpu")
        able = [name for name, why in reasons.items() if not why and name != "reference"]
        if not (args.backend or able):
            raise UnsupportedError(
                "the batch",
                "must suit a backend of the CPU",
                reasons={name: why for name, why in reasons.items() if why},
            )
        rows = [
            measure(case, name, page_size=args.page_size, repeats=args.repeats)
            for name in args.backend or able
        ]
    except AssertionError as error:
        print(f"attnrt bench: {error}", file=sys.stderr)
        return 1
    except (AttnrtError, OSError) as error:
        print(f"attnrt bench: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(rows))
    else:
        spec = case.spec
        print(
            f"{len(case.q)} requests, {int(case.qo_lens.sum())} queries over {int(case.kv_lens.sum())} keys, "
            f"heads {spec.num_qo_heads}/{spec.num_kv_heads}, head_dim {spec.head_dim}, {spec.q_dtype}, KV {spec.kv_dtype}"
        )
        print(f"{'backend':<12}{'plan us':>10}{'run us':>12}{'KV GB/s':>10}{'error/bound':>13}")
        for row in rows:
            print("{backend:<12}{plan_us:>10}{run_us:>12}{kv_gb_per_s:>10}{worst:>13}".format(**row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
