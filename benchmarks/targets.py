# SPDX-License-Identifier: Apache-2.0
"""The kinds of targets: a time, a rate, a ratio to the best peer, a ratio between two cases or two modes of ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from report import OURS, Found, Target, geomean
from shapes import Shape

__all__ = [
    "accuracy",
    "against",
    "groups_of",
    "mode_cost",
    "rate",
    "ratio",
    "ratio_mean",
    "ratio_worst",
    "tflops",
    "time",
]


def time(case: str, most: float, provider: str = OURS) -> Target:
    """At most so many µs."""
    who = "" if provider == OURS else f", {provider}"
    return Target(name=f"{case}{who}: µs", value=lambda found: found.us(case, provider), most=most)


def rate(case: str, least: float) -> Target:
    """At least so many TB/s of K and V."""
    return Target(name=f"{case}: TB/s", value=lambda found: found.tb_s(case), least=least)


def tflops(case: str, least: float, provider: str = OURS) -> Target:
    """At least so many TFLOP/s."""
    return Target(
        name=f"{_named(case, provider)}: TFLOP/s",
        value=lambda found: found.tflops(case, provider),
        least=least,
    )


def ratio(case: str, least: float, peers: str = "", provider: str = OURS) -> Target:
    """Best peer's time / ours."""
    who = f"best {peers}" if peers else "best peer"
    return Target(
        name=f"{_named(case, provider)}: {who} / ours",
        value=lambda found: found.ratio(case, peers, provider),
        least=least,
    )


def _named(case: str, provider: str) -> str:
    """A case, and which way to call us, if not the usual one."""
    return case if provider == OURS else f"{case}, {provider.removeprefix(OURS).strip(' ()')}"


def ratio_mean(name: str, cases: Sequence[str], least: float, peers: str = "") -> Target:
    """Geometric mean of best peer / ours over the cases that have it."""
    return Target(
        name=f"{name}: best peer / ours, geometric mean",
        value=lambda found: geomean(found.ratios(cases, peers)),
        least=least,
    )


def ratio_worst(name: str, cases: Sequence[str], least: float, peers: str = "") -> Target:
    """Worst best peer / ours of the cases."""
    return Target(
        name=f"{name}: best peer / ours, worst",
        value=lambda found: found.worst(cases, peers)[0],
        least=least,
    )


def against(
    case: str, other: str, least: float, of: str = "tb_s", providers: tuple[str, str] = (OURS, OURS)
) -> Target:
    """Our rate in one case / our rate in another (or of one way to call us / another's, with ``providers``).

    Parameters
    ----------
    of : {"tb_s", "tflops", "us"}
        "us" compares speeds: the other's time / the case's.
    """

    def value(found: Found) -> float:
        mine, base = found.row(case, providers[0]), found.row(other, providers[1])
        if mine is None or base is None:
            return float("nan")
        return base.us / mine.us if of == "us" else getattr(mine, of) / getattr(base, of)

    what = {"tb_s": "bytes per second", "tflops": "FLOP per second", "us": "speed"}[of]
    right = other if other != case else providers[1]
    left = case if other == case else _named(case, providers[0])
    return Target(name=f"{left} against {right}: {what}", value=value, least=least)


def mode_cost(cases: Sequence[str], mean: float = 1.02, worst: float = 1.06) -> list[Target]:
    """Time of the default mode / time of mode "run": geometric mean and worst."""

    def costs(found: Found) -> list[float]:
        pairs = [found.us(case) / found.us(case, f"{OURS} (run)") for case in cases]
        return [value for value in pairs if not math.isnan(value)]

    return [
        Target(name="default / run mode: time, geometric mean", value=lambda f: geomean(costs(f)), most=mean),
        Target(
            name="default / run mode: time, worst",
            value=lambda f: max(costs(f), default=float("nan")),
            most=worst,
        ),
    ]


def accuracy(cases: Sequence[str], peer: str, most: float = 1.1) -> Target:
    """Our error / the peer's, both against float64 on the same inputs: the worst of the cases."""

    def value(found: Found) -> float:
        pairs = [(found.row(case), found.row(case, peer)) for case in cases]
        return max((a.error / b.error for a, b in pairs if a and b), default=float("nan"))

    return Target(name=f"error against float64, ours / {peer}'s, worst", value=value, most=most)


def groups_of(shapes: Iterable[Shape]) -> dict[str, list[str]]:
    """Names of the cases by group, and of all."""
    found: dict[str, list[str]] = {}
    for shape in shapes:
        if shape.group:
            found.setdefault(shape.group, []).append(shape.name)
    found["all"] = [name for names in found.values() for name in names]
    return found
