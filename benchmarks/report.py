# SPDX-License-Identifier: Apache-2.0
"""What becomes of times: rows, ratios, targets met or missed, and the files they are kept in. Needs neither torch nor a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "OURS",
    "Found",
    "Row",
    "Target",
    "geomean",
    "save",
    "summary",
    "table",
]

#: Providers whose name begins with this are ways to call attnrt; the others are peers.
OURS = "attnrt"


@dataclass(slots=True, kw_only=True)
class Row:
    """One time.

    Attributes
    ----------
    us, eager_us : float
        Between events around a graph's replay (around the call itself if ``note`` says that it cannot be captured), and around
        the call.
    ghz, eager_ghz : float
        Clock of the multiprocessors meanwhile.
    nbytes, flops : int
        What any implementation must move and do.
    error : float
        ||out - ref|| / ||ref|| over the sampled rows, against float64.
    kernels : list of str
        What ran.
    fallback : bool
        Another kernel ran than the row is about: the time is shown, and counts for nothing.
    """

    case: str
    provider: str
    version: str
    us: float
    nbytes: int
    flops: int = 0
    eager_us: float = float("nan")
    ghz: float = float("nan")
    eager_ghz: float = float("nan")
    error: float = float("nan")
    kernels: list[str] = field(default_factory=list)
    note: str = ""
    fallback: bool = False

    @property
    def tb_s(self) -> float:
        return self.nbytes / self.us / 1e6

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; nan of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else float("nan")


class Found:
    """The rows of a run, by case and provider. What was not measured is nan."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self._by = {(row.case, row.provider): row for row in rows}

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows))

    def row(self, case: str, provider: str = OURS) -> Row | None:
        """A row that counts."""
        found = self._by.get((case, provider))
        return None if found is None or found.fallback else found

    def us(self, case: str, provider: str = OURS) -> float:
        row = self.row(case, provider)
        return float("nan") if row is None else row.us

    def tb_s(self, case: str) -> float:
        row = self.row(case)
        return float("nan") if row is None else row.tb_s

    def tflops(self, case: str, provider: str = OURS) -> float:
        row = self.row(case, provider)
        return float("nan") if row is None else row.tflops

    def best_peer(self, case: str, peers: str = "") -> Row | None:
        """Fastest row of a peer whose name contains ``peers``."""
        rows = [r for r in self.rows if r.case == case and not r.provider.startswith(OURS)]
        return min((r for r in rows if peers in r.provider), key=lambda r: r.us, default=None)

    def ratio(self, case: str, peers: str = "", provider: str = OURS) -> float:
        """Best peer's time / ours."""
        best = self.best_peer(case, peers)
        return float("nan") if best is None else best.us / self.us(case, provider)

    def ratios(self, cases: Iterable[str], peers: str = "") -> list[float]:
        """Those of the cases that have one."""
        found = [self.ratio(case, peers) for case in cases]
        return [value for value in found if not math.isnan(value)]

    def worst(self, cases: Iterable[str], peers: str = "") -> tuple[float, str]:
        """The smallest ratio and its case; (nan, "") of none."""
        pairs = [(self.ratio(case, peers), case) for case in cases]
        return min((p for p in pairs if not math.isnan(p[0])), default=(float("nan"), ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure that was set beforehand.

    Attributes
    ----------
    name : str
        What is measured, with its unit.
    value : callable (Found) -> float
        nan: not measured.
    least, most : float, optional
        One of the two.
    """

    name: str
    value: Callable[[Found], float]
    least: float | None = None
    most: float | None = None

    @property
    def wanted(self) -> str:
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def verdict(self, found: Found) -> tuple[float, str]:
        """The value, and "met", "missed" or "not measured"."""
        value = self.value(found)
        if math.isnan(value):
            return value, "not measured"
        met = value >= self.least if self.least is not None else value <= (self.most or 0.0)
        return value, "met" if met else "missed"


def _cell(value: float, digits: int = 1) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def table(rows: Sequence[Row], rate: str = "tb_s") -> str:
    """Markdown: a line per case with our graph and eager times, clock and rate, each peer's graph time, the ratio, and the
    kernels.

    Parameters
    ----------
    rate : {"tb_s", "tflops"}
    """
    found = Found(rows)
    ours = sorted({r.provider for r in rows if r.provider.startswith(OURS)}, key=lambda p: (p != OURS, p))
    peers = sorted({r.provider for r in rows if not r.provider.startswith(OURS)})
    unit = {"tb_s": "TB/s", "tflops": "TFLOP/s"}[rate]
    heads = ["case"]
    for name in ours:
        heads += [f"{name} µs", "eager µs", "GHz", unit] if name == OURS else [f"{name} µs"]
    heads += [f"{peer} µs" for peer in peers]
    heads += ["best peer, eager µs", "its GHz", "best peer / ours", "kernels of ours"]
    text = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    by = {(r.case, r.provider): r for r in rows}
    for case in found.cases:
        cells = [case]
        for name in ours:
            row = by.get((case, name))
            mark = "*" if row is not None and row.fallback else ""
            cells.append(f"{row.us:.1f}{mark}" if row else "")
            if name == OURS:
                cells += (
                    [
                        _cell(row.eager_us),
                        _cell(row.ghz, 2),
                        _cell(getattr(row, rate), 2 if rate == "tb_s" else 0),
                    ]
                    if row
                    else [""] * 3
                )
        cells += [
            f"{by[case, peer].us:.1f}{' (eager)' if by[case, peer].note else ''}"
            if (case, peer) in by
            else ""
            for peer in peers
        ]
        best, mine = found.best_peer(case), by.get((case, OURS))
        cells += [_cell(best.eager_us), _cell(best.ghz, 2)] if best else ["", ""]
        ratio = f"{best.us / mine.us:.2f}{'*' if mine.fallback else ''}" if best and mine else ""
        cells.append(ratio)
        cells.append(", ".join(mine.kernels) if mine else "")
        text.append("| " + " | ".join(cells) + " |")
    if any(row.fallback for row in rows):
        text.append("\n\\* another kernel ran than the row is about; counts for nothing")
    return "\n".join(text) + "\n"


def summary(rows: Sequence[Row], targets: Sequence[Target], groups: dict[str, Sequence[str]]) -> str:
    """Markdown: geometric mean and worst ratio of each group of cases, accuracy, then each target with met or missed."""
    found = Found(rows)
    text = [
        "| group | cases with a peer | best peer / ours, geometric mean | worst | worst case |",
        "|---" * 5 + "|",
    ]
    for name, cases in groups.items():
        ratios = found.ratios(cases)
        if ratios:
            worst, case = found.worst(cases)
            text.append(f"| {name} | {len(ratios)} | {geomean(ratios):.3f} | {worst:.3f} | {case} |")
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.provider, []).append(row.error)
    text += ["", "| provider | rows | worst error against float64 | median |", "|---" * 4 + "|"]
    for name, values in errors.items():
        text.append(
            f"| {name} | {len(values)} | {max(values):.2e} | {sorted(values)[len(values) // 2]:.2e} |"
        )
    if targets:
        verdicts = [(target, *target.verdict(found)) for target in targets]
        met = sum(v == "met" for _, _, v in verdicts)
        missed = sum(v == "missed" for _, _, v in verdicts)
        text += ["", f"Targets: {met} met, {missed} missed, {len(targets) - met - missed} not measured.", ""]
        fallen = sum(row.fallback for row in rows)
        if fallen:
            text += [f"{fallen} rows of a fallback count as not measured, that is, as not met.", ""]
        text += ["| target | wanted | found | verdict |", "|---" * 4 + "|"]
        for target, value, verdict in verdicts:
            text.append(f"| {target.name} | {target.wanted} | {_cell(value, 3)} | {verdict} |")
    return "\n".join(text) + "\n"


def plot(path: Path, rows: Sequence[Row], title: str) -> bool:
    """Best peer's time / ours of every case as a bar chart; False where matplotlib is not installed or nothing can be drawn."""
    found = Found(rows)
    pairs = [(case, found.ratio(case)) for case in found.cases]
    pairs = [(case, value) for case, value in pairs if not math.isnan(value)]
    if not pairs:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "attnrt"
    from matplotlib import pyplot

    names, values = [p[0] for p in pairs][::-1], [p[1] for p in pairs][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.22 * len(pairs)))
    axes.barh(names, values, color=["#2a7f4f" if v >= 1 else "#b5482f" for v in values])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("best peer's time / ours (above 1: ours is faster)")
    axes.set_title(title)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.01)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def save(
    folder: Path,
    name: str,
    rows: Sequence[Row],
    about: dict[str, Any],
    *,
    rate: str = "tb_s",
    targets: Sequence[Target] = (),
    groups: dict[str, Sequence[str]] | None = None,
) -> str:
    """Write ``name``.jsonl (the setting, then one row a line), ``name``.md and ``name``.svg; the Markdown text."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(about)]
    for row in rows:
        more = {"tb_s": round(row.tb_s, 3), "tflops": round(row.tflops, 1)}
        lines.append(json.dumps({**asdict(row), **more}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    text = f"# {about.get('title', name)}\n\n"
    text += "".join(f"- {key}: {value}\n" for key, value in about.items() if key != "title")
    drawn = plot(folder / f"{name}.svg", rows, about.get("title", name))
    text += "\n" + table(rows, rate) + "\n" + summary(rows, targets, groups or {})
    if drawn:
        text += f"\n![best peer's time / ours]({name}.svg)\n"
    (folder / f"{name}.md").write_text(text)
    return text


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What ``save`` wrote to ``path`` (.jsonl)."""
    first, *rest = path.read_text().splitlines()
    names = {item for item in Row.__slots__}
    return json.loads(first), [Row(**{k: v for k, v in json.loads(x).items() if k in names}) for x in rest]
