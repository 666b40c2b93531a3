# SPDX-License-Identifier: Apache-2.0
"""Makespans from lengths alone: what a scheduler is worth on a batch, before any index or machine exists."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.scheduler.assign import LPT, RoundRobin

__all__ = ["WORKLOADS", "Workload", "balanced", "makespan", "ratio_of", "round_robin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A distribution of lengths and the ratio published for it (median, minimum, maximum over seeds)."""

    name: str
    draw: Callable[[np.random.Generator, int], np.ndarray]
    batch: int
    median: float
    low: float
    high: float


def _uniform(low: int, high: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, count: rng.integers(low, high + 1, count)


def _lognormal(mean: float, sigma: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, count: np.maximum(1, rng.lognormal(mean, sigma, count).astype(np.int64))


#: The table of the essay "FlashInfer: Every KV Cache Layout Is Just a Block-Sparse Matrix" (section Scheduling).
WORKLOADS = (
    # 264 = 2 * 132 whole rounds would be needed for equal lengths to divide evenly; with batch 256 both schedulers leave the
    # last 8 workers one request short, and nothing can be gained where runs are as long as a worker's share.
    Workload(name="uniform kv=2048", draw=_uniform(2048, 2048), batch=256, median=1.0, low=1.0, high=1.0),
    Workload(name="U(512, 2048)", draw=_uniform(512, 2048), batch=256, median=1.48, low=1.35, high=1.58),
    Workload(name="U(4096, 16384)", draw=_uniform(4096, 16384), batch=256, median=1.52, low=1.38, high=1.62),
    Workload(
        name="lognormal(6.9, 1.0)", draw=_lognormal(6.9, 1.0), batch=256, median=3.31, low=2.10, high=9.44
    ),
    Workload(
        name="U(4096, 16384) batch 32", draw=_uniform(4096, 16384), batch=32, median=5.43, low=4.33, high=6.38
    ),
)


def makespan(costs: np.ndarray, order: np.ndarray, worker_indptr: np.ndarray) -> float:
    """Cost of the busiest worker."""
    worker = np.repeat(np.arange(len(worker_indptr) - 1), np.diff(worker_indptr))
    return float(np.bincount(worker, weights=costs[order], minlength=len(worker_indptr) - 1).max(initial=0.0))


def round_robin(lengths: np.ndarray, num_workers: int) -> float:
    """Makespan with request i whole on worker i mod num_workers."""
    costs = np.asarray(lengths, np.float64)
    return makespan(costs, *RoundRobin().assign(costs, num_workers))


def balanced(lengths: np.ndarray, num_workers: int, tiles: np.ndarray | None = None) -> float:
    """Makespan of Algorithm 1: runs of at most ``ceil(sum(tiles * lengths) / num_workers)`` keys, longest first.

    Parameters
    ----------
    lengths : int [requests]
        Keys of each request.
    num_workers : int
    tiles : int [requests], optional
        Query tiles of each request, ``ceil(qo_len / tile)``; None: 1, decode.
    """
    lengths = np.asarray(lengths, np.int64)
    if num_workers < 1:
        raise ArgumentError("num_workers", "must be at least 1", num_workers)
    if tiles is not None:
        lengths = np.repeat(lengths, tiles)
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return 0.0
    longest = math.ceil(int(lengths.sum()) / num_workers)
    whole, rest = lengths // longest, lengths % longest
    costs = np.concatenate([np.full(int(whole.sum()), longest), rest[rest > 0]]).astype(np.float64)
    return makespan(costs, *LPT().assign(costs, num_workers))


def ratio_of(work: Workload, seeds: int = 100, num_workers: int = 132) -> tuple[float, float, float]:
    """Median, minimum and maximum over seeds of round_robin / balanced."""
    ratios = []
    for seed in range(seeds):
        lengths = work.draw(np.random.default_rng(seed), work.batch)
        ratios.append(round_robin(lengths, num_workers) / balanced(lengths, num_workers))
    return float(np.median(ratios)), float(min(ratios)), float(max(ratios))
