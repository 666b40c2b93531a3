# SPDX-License-Identifier: Apache-2.0
"""Which workers take which tiles, for the readable planner: the machine's own and the teams', how many of a team's have items
where other kernels run beside it, and when workers begin (docs/performance/wide.md, E22).

``native/crews.h`` is the same in C++.
"""

from __future__ import annotations

import itertools
import math

from attnrt.scheduler.base import Team
from attnrt.scheduler.costs import Crew, one_head, whole_cost
from attnrt.scheduler.problem import Problem
from attnrt.scheduler.tiles import Tile

__all__ = ["form_crews"]

#: Of the multiprocessors that a team leaves, so many are not free when it begins (E22).
TAKEN = 1

#: Workers have uneven shares where so many times the multiprocessors that a team leaves are all there are. With fewer, their
#: workers come and go several times meanwhile, which evens out by itself.
WAVES = 4

#: Of what all multiprocessors read, half of them and more read so much, and of the rest their part.
MEMORY = 0.6


def form_crews(problem: Problem, tiles: list[Tile]) -> list[Crew]:
    """The machine's own workers with the tiles they take, and each team with its."""
    traits, crews = problem.traits, []
    of = [traits.crew_of(tile.klass, tile.queries * problem.group) for tile in tiles]
    for i, section in enumerate((0, *(team.section for team in traits.teams))):
        own = [tile for tile, number in zip(tiles, of, strict=True) if number == i]
        crew = traits.teams[i - 1] if i else traits
        sections = _sections(problem, own, section)
        crews.append(Crew(traits=crew, tiles=own, sections=sections, workers=crew.num_workers))
    _overlap(problem, crews)
    return crews


def _overlap(problem: Problem, crews: list[Crew]) -> None:
    """How many workers of the last team have items, so that the others' kernels run beside it: the fewest with the least time.

    Meanwhile the others read as the multiprocessors that it leaves them can, then at the rate of all.
    """
    last = crews[-1].traits
    if len(crews) < 2 or last.overlap <= 0.0:
        return
    mine, ends = 0.0, _ends(problem, crews[-1])
    for i, crew in enumerate(crews[:-1]):
        unit = crew.traits.unit if i else 1.0
        mine = mine + whole_cost(problem, crew) * unit / crew.traits.num_workers
    if mine <= 0.0 or not ends:
        return
    best = math.inf
    for workers, alone in enumerate(ends, 1):
        done = alone * _reading(last, last.num_workers - workers - TAKEN)
        end = alone if mine <= done else alone + (mine - done)
        if end < best:
            best, crews[-1].workers = end, workers
    _stagger(problem, crews, ends[crews[-1].workers - 1])


def _ends(problem: Problem, team: Crew) -> list[float]:
    """When a team ends at best, by its workers: some worker has as many items as all have in the mean, rounded up."""
    costs: list[float] = []
    for tile in team.tiles:
        costs.extend([one_head(problem, team, tile) * team.traits.unit] * tile.heads)
    costs.sort()
    sums = [0.0, *itertools.accumulate(costs)]
    if not sums[-1] > 0.0:
        return []
    count, longest = len(costs), costs[-1]
    return [max(sums[-1] / k, sums[-(-count // k)], longest) for k in range(1, team.traits.num_workers + 1)]


def _reading(team: Team, multiprocessors: int) -> float:
    """Part of what the whole machine reads that so many multiprocessors read beside a team."""
    part = max(0, multiprocessors) / team.num_workers
    return min(part / team.overlap, MEMORY + (1.0 - MEMORY) * part)


def _stagger(problem: Problem, crews: list[Crew], alone: float) -> None:
    """The machine's own workers begin on the multiprocessors that the last team leaves, in order, and on others as these come
    free: where many are left, when the team has ended. An even share of the work would be too much for those that begin then."""
    own, last, sharing = crews[0], crews[-1], crews[0].sharing
    if (
        sharing is None
        or any(crew.tiles for crew in crews[1:-1])
        or not hasattr(problem.scheduler, "assign_late")
    ):
        return
    count = own.workers // sharing.workers
    early = count - last.workers - TAKEN
    if early * WAVES < count or own.workers % sharing.workers or last.traits.num_workers != count:
        return
    own.early, own.begin = early, alone
    own.ahead = alone * _reading(last.traits, early) * count / early


def _sections(problem: Problem, tiles: list[Tile], size: int) -> dict[tuple[int, int, int], int]:
    """Section of each (part, block row, KV head) of the tiles: lists one after the other, cut where they have filled one. Rows of
    one request choose among the same keys and count as one list of all that it has."""
    lists: list[tuple[int, int, list[Tile]]] = []  # part, request, tiles
    for tile in tiles if size else ():
        request = int(problem.parts[tile.part].request[tile.q_begin])
        if (
            not lists
            or lists[-1][0] != tile.part
            or (lists[-1][2][0].row != tile.row and lists[-1][1] != request)
        ):
            lists.append((tile.part, request, []))
        lists[-1][2].append(tile)
    sections, before = {}, 0
    for part, request, own in lists:
        keys = max(tile.kv_end for tile in own) - min(tile.kv_begin for tile in own)
        if own[-1].row != own[0].row:
            keys = max(keys, int(problem.parts[part].requests.kv_lens[request]))
        for head in range(problem.num_kv_heads):
            for tile in own:
                sections[part, tile.row, head] = before // size
            before += keys
    return sections
