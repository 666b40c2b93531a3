# SPDX-License-Identifier: Apache-2.0
"""Decode on one GPU: paged caches of many shapes, ours and the peers' in one run.

    python benchmarks/decode.py [--out benchmarks/results] [--only TEXT] [--ours] [--random N]

Writes decode.jsonl and decode.md. Every request has one query; pages lie in random order.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Absent, Clock, Ready, Row, empty_graphs, measure, save, setting, table
from peers import PEERS

import attnrt as at

SAMPLES = 64
PAGE1 = ("bs64 kv4096 page1", "bs16 const 1024 32/8 page1")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths and heads of a batch; the arrays come with Case."""

    name: str
    lens: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    kv_dtype: str = "bfloat16"


class Case:
    """A shape with its arrays."""

    def __init__(self, shape: Shape) -> None:
        self.name, self.page = shape.name, shape.page
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.kv_dtype = shape.kv_dtype
        self.lens = np.array(shape.lens, np.int32)
        counts = -(-self.lens // self.page)
        self.indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.pages = np.random.default_rng(0).permutation(int(self.indptr[-1])).astype(np.int32)
        pool = (int(self.indptr[-1]), self.page, self.kv_heads, self.head_dim)
        on = {"device": "cuda", "dtype": torch.bfloat16}
        torch.manual_seed(0)
        self.q = torch.randn(len(self.lens), self.heads, self.head_dim, **on)
        self.k, self.v = torch.randn(pool, **on), torch.randn(pool, **on)
        if self.kv_dtype != "bfloat16":
            kind = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}[self.kv_dtype]
            self.k, self.v = self.k.to(kind), self.v.to(kind)

    @property
    def nbytes(self) -> int:
        """K and V of every key, read once."""
        return 2 * int(self.lens.sum(dtype=np.int64)) * self.kv_heads * self.head_dim * self.k.element_size()

    @property
    def flops(self) -> int:
        return 4 * int(self.lens.sum(dtype=np.int64)) * self.heads * self.head_dim

    @cached_property
    def samples(self) -> list[tuple[int, int, torch.Tensor]]:
        """(row, head, float64 answer) of random pairs."""
        random = np.random.default_rng(1)
        found = []
        for row, head in zip(
            random.integers(0, len(self.lens), SAMPLES), random.integers(0, self.heads, SAMPLES), strict=True
        ):
            kv_head = head // (self.heads // self.kv_heads)
            ids = torch.from_numpy(self.pages[self.indptr[row] : self.indptr[row + 1]]).long().cuda()
            k, v = (
                x[:, :, kv_head][ids].reshape(-1, self.head_dim)[: self.lens[row]].double()
                for x in (self.k, self.v)
            )
            weights = torch.softmax(k @ self.q[row, head].double() / self.head_dim**0.5, 0)
            found.append((int(row), int(head), weights @ v))
        return found


def error_of(case: Case, out: torch.Tensor) -> float:
    """Relative error over the samples; inf where something was not written."""
    ours = torch.stack([out[row, head].double() for row, head, _ in case.samples])
    right = torch.stack([answer for _, _, answer in case.samples])
    error = float((ours - right).norm() / right.norm())
    return error if np.isfinite(error) else float("inf")


class Ours:
    """attnrt with limits, as an engine that captures graphs runs it."""

    name = "attnrt"

    def version(self) -> str:
        return at.__version__

    def prepare(self, case: Case) -> Ready:
        spec = at.AttentionSpec(
            num_qo_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            q_dtype="bfloat16",
            kv_dtype=case.kv_dtype,
            variant=at.variants.causal(),
        )
        rows = len(case.lens)
        limits = at.Limits(rows, rows, int(case.indptr[-1]))
        attn = at.Attention(spec, backend="nvrtc", device="cuda", limits=limits)
        index = at.formats.paged(
            np.arange(rows + 1, dtype=np.int32), case.indptr, case.pages, case.lens, page_size=case.page
        )
        attn.plan(index)
        out = torch.empty_like(case.q)
        return Ready(run=lambda: attn.run(case.q, (case.k, case.v), out=out), out=out, keep=attn)


def shapes() -> list[Shape]:
    """The cases of the tables: large, mid-size, small, skewed, odd groups, fp8."""
    found = [
        Shape(name="bs64 kv4096", lens=(4096,) * 64),
        Shape(name="bs64 kv4096 page1", lens=(4096,) * 64, page=1),
        Shape(name="bs128 kv8192", lens=(8192,) * 128),
        Shape(name="bs128 kv8192 64/8", lens=(8192,) * 128, heads=64),
    ]
    for kind, lens in mid_lengths().items():
        for heads, kv_heads in ((32, 8), (32, 4), (32, 32)):
            for page in (1, 16):
                name = f"bs16 {kind} 1024 {heads}/{kv_heads}" + (" page1" if page == 1 else "")
                found.append(Shape(name=name, lens=lens, heads=heads, kv_heads=kv_heads, page=page))
    random = np.random.default_rng(0)
    found += [
        Shape(name="bs16 kv4096", lens=(4096,) * 16),
        Shape(name="bs32 kv2048 64/8", lens=(2048,) * 32, heads=64),
        Shape(name="bs8 kv8192 8/1", lens=(8192,) * 8, heads=8, kv_heads=1),
        Shape(name="bs4 kv2048", lens=(2048,) * 4),
        Shape(name="bs1 kv1024", lens=(1024,)),
        Shape(name="bs1 kv4096", lens=(4096,)),
        Shape(name="bs1 kv32768", lens=(32768,)),
        Shape(name="bs1 kv131072", lens=(131072,)),
        Shape(name="U(4k,16k) bs8", lens=tuple(random.integers(4096, 16384, 8).tolist())),
        Shape(name="U(4k,16k) bs64", lens=tuple(random.integers(4096, 16384, 64).tolist())),
        Shape(name="bs16 kv8192 28/4", lens=(8192,) * 16, heads=28, kv_heads=4),
        Shape(name="bs16 kv4096 24/8", lens=(4096,) * 16, heads=24, kv_heads=8),
        Shape(name="bs32 kv4096 9/3", lens=(4096,) * 32, heads=9, kv_heads=3),
        Shape(name="bs64 kv4096 64/4", lens=(4096,) * 64, heads=64, kv_heads=4),
        Shape(name="bs64 kv4096 fp8", lens=(4096,) * 64, kv_dtype="float8_e4m3fn"),
        Shape(name="bs128 kv8192 fp8", lens=(8192,) * 128, kv_dtype="float8_e4m3fn"),
        Shape(name="bs16 kv1024 fp8", lens=(1024,) * 16, kv_dtype="float8_e4m3fn"),
    ]
    return found


def mid_lengths() -> dict[str, tuple[int, ...]]:
    """Sixteen lengths around 1024: equal, uniform, and Zipf-like (a few long ones)."""
    random = np.random.default_rng(3)
    zipf = 1.0 / np.arange(1, 17)
    return {
        "const": (1024,) * 16,
        "uniform": tuple(random.integers(512, 1537, 16).tolist()),
        "zipf": tuple(np.maximum(1, (zipf / zipf.sum() * 16384)).astype(int).tolist()),
    }


def random_shapes(count: int, seed: int = 7) -> list[Shape]:
    """Shapes that nothing is tuned to."""
    random = np.random.default_rng(seed)
    found = []
    for i in range(count):
        kv_heads, group = int(random.choice([1, 2, 4, 8])), int(random.choice([1, 2, 3, 4, 5, 6, 7, 8]))
        rows = int(2 ** random.uniform(0, 7))
        mean = int(min(2 ** random.uniform(8, 15), 4e9 / rows / kv_heads / 512))
        lens = np.maximum(1, random.uniform(0.3, 1.7, rows) * mean).astype(int)
        page = int(random.choice([1, 16, 16, 64]))
        name = f"random {i}: bs{rows} mean {int(lens.mean())} {kv_heads * group}/{kv_heads} page{page}"
        found.append(
            Shape(name=name, lens=tuple(lens.tolist()), heads=kv_heads * group, kv_heads=kv_heads, page=page)
        )
    return found


def run(wanted: list[Shape], providers: tuple[Any, ...], clock: Clock) -> list[Row]:
    """All rows; what a peer cannot take or gets wrong is printed and left out, a fault of ours fails the run at its end."""
    rows: list[Row] = []
    faults: list[Exception] = []
    gone: set[str] = set()
    for shape in wanted:
        case = Case(shape)
        for provider in providers:
            if provider.name in gone:
                continue
            try:
                row = measure(
                    case, provider, clock, error_of, ("attnrt_",) if provider.name == "attnrt" else ()
                )
            except ImportError as error:
                print(f"{provider.name}: skipped, {error}", flush=True)
                gone.add(provider.name)
                continue
            except Absent:
                continue
            except Exception as error:
                if provider.name == "attnrt":
                    faults.append(error)
                print(
                    f"{provider.name} on {case.name}: {type(error).__name__} {str(error)[:200]}", flush=True
                )
                continue
            rows.append(row)
            print(
                f"{row.case:32s} {row.provider:18s} {row.us:9.2f} µs {row.tb_s:6.2f} TB/s {row.error:.1e} {row.kernels}",
                flush=True,
            )
        del case
        torch.cuda.empty_cache()
    if faults:
        raise faults[0]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--provider", default="", help="providers whose name contains this")
    parser.add_argument("--quick", action="store_true", help="most cases with pages of one token left out")
    parser.add_argument("--random", type=int, default=0, help="so many random shapes instead")
    parser.add_argument("--repeats", type=int, default=21)
    args = parser.parse_args()
    clock = Clock(args.repeats)
    wanted = random_shapes(args.random) if args.random else shapes()
    wanted = [shape for shape in wanted if args.only in shape.name]
    if args.quick:
        wanted = [shape for shape in wanted if shape.page != 1 or shape.name in PAGE1]
    providers = tuple(p for p in (Ours(), *PEERS) if args.provider in p.name)
    about: dict[str, Any] = {
        "empty graph, µs": {name: round(us, 2) for name, us in empty_graphs(clock).items()}
    }
    rows = run(wanted, providers, clock)
    about |= setting()
    about["versions"] = {row.provider: row.version for row in rows}
    name = "decode_random" if args.random else "decode"
    save(args.out, name, rows, about)
    print(table(rows, about))


if __name__ == "__main__":
    main()
