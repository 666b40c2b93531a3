# SPDX-License-Identifier: Apache-2.0
"""Levelling of workers that took items section by section: what longest-first leaves uneven, swaps inside a section even out.

Longest first ends with the short items of the last section alone, so workers differ by up to one of them: a twentieth of a short
batch's time, where each item costs two or three tiles beside its own. Swaps keep each worker's sections in order, and each
section's keys with those that read them at the same time.

``native/level.h`` is the same in C++, with differences and sums in the same order.
"""

from __future__ import annotations

__all__ = ["level"]

#: So many swaps for each worker at most.
SWAPS = 4


def level(taken: list[list[int]], loads: list[float], sections: list[int], costs: list[float]) -> None:
    """Swap items of one section between the most loaded worker and the least loaded one that has a fitting item, until none has.

    Parameters
    ----------
    taken : list of list of int, changed
        Each worker's items, by section.
    loads : list of float, changed
        The workers' costs.
    sections, costs : list
        Of all items.
    """
    workers = range(len(taken))
    for _ in range(SWAPS * len(taken)):
        by_load = sorted(workers, key=loads.__getitem__)
        full = by_load[-1]
        for spare in by_load:
            gap = loads[full] - loads[spare]
            found = _swap(taken[full], taken[spare], gap, sections, costs)
            if found is not None:
                break
        else:
            return
        i, j = found
        given, got = taken[full][i], taken[spare][j]
        more = costs[given] - costs[got]
        taken[full][i], taken[spare][j] = got, given
        loads[full] -= more
        loads[spare] += more


def _swap(
    full: list[int], spare: list[int], gap: float, sections: list[int], costs: list[float]
) -> tuple[int, int] | None:
    """Places of the two items whose costs differ most nearly by half of the gap, but not by all of it; the first of equals."""
    best, found = gap, None
    for i, given in enumerate(full):
        for j, got in enumerate(spare):
            more = costs[given] - costs[got]
            if sections[given] == sections[got] and 0.0 < more < gap and abs(2.0 * more - gap) < best:
                best, found = abs(2.0 * more - gap), (i, j)
    return found
