# SPDX-License-Identifier: Apache-2.0
"""A picture of a plan: one bar per worker, one block per item, coloured by request. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attnrt.errors import UnsupportedError
from attnrt.scheduler.base import DIRECT, Plan
from attnrt.scheduler.report import stats

__all__ = ["picture"]


def picture(plan: Plan, path: str | Path) -> None:
    """Draw the workers' load to a file whose ending names the format (.png, .svg, .pdf).

    Items that leave partial states are hatched; the line is the mean load.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("picture", "needs matplotlib", None, "pip install 'attnrt[plot]'.") from None
    workers = plan.traits.all_workers
    figure = Figure(figsize=(10, min(12, 1.5 + 0.12 * workers)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = [tuple(c) for c in np.random.default_rng(7).uniform(0.35, 0.9, (64, 3)).tolist()]
    items = plan.work
    for worker in range(workers):
        mine = slice(int(items.worker_indptr[worker]), int(items.worker_indptr[worker + 1]))
        costs = items["cost"][mine].astype(np.float64)
        starts = np.concatenate(([0.0], np.cumsum(costs)))[:-1]
        requests = [
            int(plan.parts[part].request[q])
            for part, q in zip(items["part"][mine], items["q_begin"][mine], strict=True)
        ]
        partial = items["slot"][mine] != DIRECT
        for hatch, chosen in (("", ~partial), ("////", partial)):
            at = np.flatnonzero(chosen)
            bars = [(starts[i], costs[i]) for i in at]
            face = [colors[requests[i] % len(colors)] for i in at]
            if bars:
                axes.broken_barh(
                    bars, (worker - 0.45, 0.9), facecolors=face, hatch=hatch, edgecolor="white", linewidth=0.3
                )
    numbers = stats(plan)
    axes.axvline(numbers["mean"], color="black", linewidth=1, linestyle="--")
    axes.set(
        xlabel="cost",
        ylabel="worker",
        xlim=(0, max(1.0, numbers["makespan"] * 1.02)),
        ylim=(workers - 0.5, -0.5),
    )
    axes.set_title(
        f"{plan.traits.name}: {numbers['items']} items, longest/mean {numbers['max_over_mean']:.3f}, "
        f"{numbers['partial_slots']} partial states"
    )
    figure.savefig(path)
