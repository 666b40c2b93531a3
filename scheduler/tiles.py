# SPDX-License-Identifier: Apache-2.0
"""Query tiles of a problem in readable form: which queries share a work item, and which keys they may see."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnrt.scheduler.mask_range import mask_range
from attnrt.scheduler.problem import Problem, visible_range

if TYPE_CHECKING:
    from attnrt.scheduler.base import Team

__all__ = ["FEW", "Tile", "find_tiles", "mark_rows", "rows_of", "units_of"]

#: Items a worker from which on the size of a team's tiles is not weighed.
FEW = 3


@dataclass(slots=True, kw_only=True)
class Tile:
    """Queries of one block row and class that share a work item, and the keys they may see (offsets in the request)."""

    part: int
    row: int
    q_begin: int
    q_end: int
    head_begin: int
    head_end: int
    klass: int
    kv_begin: int = 0
    kv_end: int = 0
    leaf_begin: int = 0
    leaf_end: int = 0
    first: bool = True  # no key of its rows comes before
    whole: bool = True  # it holds all keys of its rows

    @property
    def queries(self) -> int:
        return self.q_end - self.q_begin

    @property
    def keys(self) -> int:
        return self.kv_end - self.kv_begin

    @property
    def heads(self) -> int:
        return self.head_end - self.head_begin


def find_tiles(problem: Problem) -> list[Tile]:
    """Tiles in order of part, block row, query and head, with the live keys that each may see."""
    rows = [klass.q_tile for klass in problem.traits.classes]
    tiles = _cut(problem, rows)
    for team in problem.traits.teams:
        if not team.sizes or not 0 < _items(tiles, team) < FEW * team.num_workers:
            continue
        least, own = _longest(problem, tiles, team), rows[team.first_class :]
        for size, _ in team.sizes[-2::-1]:
            other = [*rows[: team.first_class], *(min(n, size) for n in own)]
            found = _cut(problem, other)
            longest = _longest(problem, found, team)
            if longest < least:
                least, rows, tiles = longest, other, found
    return tiles


def _items(tiles: list[Tile], team: Team) -> int:
    """Tiles of a team's classes, one for each KV head."""
    return sum(tile.heads for tile in tiles if tile.klass >= team.first_class)


def _longest(problem: Problem, tiles: list[Tile], team: Team) -> int:
    """When the last of a team's workers ends, by whole numbers: longest first, runs of keys cut to leaves."""
    costs: list[int] = []
    for tile in tiles:
        if tile.klass < team.first_class:
            continue
        rows, leaf = tile.queries * problem.group, problem.traits.classes[tile.klass].ruler.tail
        each = next((cost for size, cost in team.sizes if rows <= size), team.sizes[-1][1])
        for begin in range(0, max(1, tile.keys), leaf):
            costs += [each * (int(team.fixed) + min(leaf, tile.keys - begin))] * tile.heads
    ends = [0] * team.num_workers
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def _cut(problem: Problem, rows: list[int]) -> list[Tile]:
    """Tiles of at most so many query-head rows, by class."""
    tiles: list[Tile] = []
    req_class = problem.req_class
    for p, part in enumerate(problem.parts):
        for row in range(part.num_rows):
            begin, end = int(part.qo_indptr[row]), int(part.qo_indptr[row + 1])
            for q_begin, q_end, klass in _groups(problem, req_class, p, begin, end):
                step = max(1, rows[klass] // problem.group)
                for q in range(q_begin, q_end, step):
                    for head in range(part.heads):
                        heads = (0, problem.num_kv_heads) if part.heads == 1 else (head, head + 1)
                        tiles.append(
                            Tile(
                                part=p,
                                row=row,
                                q_begin=q,
                                q_end=min(q + step, q_end),
                                head_begin=heads[0],
                                head_end=heads[1],
                                klass=klass,
                            )
                        )
    _find_keys(problem, tiles)
    return tiles


def _groups(
    problem: Problem, req_class: np.ndarray, p: int, begin: int, end: int
) -> list[tuple[int, int, int]]:
    """Runs of neighbouring queries with one class and one limit: only these may meet in a tile."""
    part, limits = problem.parts[p], problem.limits[p]
    keys = []
    for q in range(begin, end):
        cut = (*limits[0][q].tolist(), *limits[1][q].tolist()) if limits else ()
        keys.append((int(req_class[part.request[q]]), *cut))
    groups: list[tuple[int, int, int]] = []
    for i, key in enumerate(keys):
        if i and key == keys[i - 1]:
            groups[-1] = (groups[-1][0], begin + i + 1, key[0])
        else:
            groups.append((begin + i, begin + i + 1, key[0]))
    return groups


def _find_keys(problem: Problem, tiles: list[Tile]) -> None:
    """Fill in each tile's live, visible keys. Keys whose positions are not affine (block_pos) are never cut off."""
    pos_min, pos_max = np.zeros(len(tiles), np.int64), np.zeros(len(tiles), np.int64)
    for i, tile in enumerate(tiles):
        part = problem.parts[tile.part]
        positions = part.qo_pos[tile.q_begin : tile.q_end].astype(np.int64)
        pos_max[i] = positions.max()
        if (
            part.requests.bound_kv_lens is not None
        ):  # true lengths may be shorter, which moves queries to the left
            positions = positions - part.requests.kv_lens[part.request[tile.q_begin : tile.q_end]]
        pos_min[i] = positions.min()
    lows, highs = visible_range(problem.composed, pos_min, pos_max)
    masked = _seen_of_mask(problem) if len(problem.parts) == 1 else None
    for i, tile in enumerate(tiles):
        part, limits = problem.parts[tile.part], problem.limits[tile.part]
        head = tile.head_begin if part.heads > 1 else 0
        entry = tile.row * part.heads + head
        offset = int(part.kv_offset[tile.row])
        lo, hi = offset + int(part.kv_begin[entry]), offset + int(part.kv_end[entry])
        if limits is not None:
            lo, hi = max(lo, int(limits[0][tile.q_begin, head])), min(hi, int(limits[1][tile.q_begin, head]))
        if part.kv_pos is not None:
            shift = offset - int(part.kv_pos[tile.row])
            lo, hi = max(lo, int(lows[i]) + shift), min(hi, int(highs[i]) + shift)
        if masked is not None:
            own = slice(tile.q_begin, tile.q_end)
            lo, hi = max(lo, int(masked[0][own].min())), min(hi, int(masked[1][own].max()))
        if lo < hi:
            ruler = problem.traits.classes[tile.klass].ruler
            tile.kv_begin, tile.kv_end = lo, hi
            tile.leaf_begin, tile.leaf_end = ruler.leaf_of(lo), ruler.leaf_of(hi - 1) + 1


def _seen_of_mask(problem: Problem) -> tuple[np.ndarray, np.ndarray] | None:
    """Offsets that a mask and the variant together leave to each query: no query may see what one of them takes away."""
    part = problem.parts[0]
    masked = mask_range(part)
    if masked is None or part.kv_pos is None:
        return None
    positions = part.qo_pos.astype(np.int64)
    low, high = visible_range(problem.composed, positions, positions)
    shift = np.repeat(part.kv_offset - part.kv_pos.astype(np.int64), np.diff(part.qo_indptr))
    return np.maximum(low + shift, masked[0]), np.minimum(high + shift, masked[1])


def rows_of(problem: Problem, tile: Tile) -> np.ndarray:
    """Rows of q of the tile's queries."""
    qo_index = problem.parts[tile.part].qo_index
    rows = np.arange(tile.q_begin, tile.q_end)
    return rows if qo_index is None else qo_index[tile.q_begin : tile.q_end]


def units_of(problem: Problem, tile: Tile) -> slice:
    """Head ranges of the tile among ``problem.units``."""
    return slice(0, 1) if problem.units == 1 else slice(tile.head_begin, tile.head_end)


def mark_rows(problem: Problem, tiles: list[Tile]) -> None:
    """Find whether a tile holds the first leaf, or all leaves, of each of its rows."""
    shape = (problem.num_rows, problem.units)
    count, first = np.zeros(shape, np.int64), np.full(shape, 1 << 31, np.int64)
    full = [tile for tile in tiles if tile.keys]
    for tile in full:
        at = (rows_of(problem, tile), units_of(problem, tile))
        count[at] += 1
        first[at] = np.minimum(first[at], tile.leaf_begin)
    for tile in full:
        at = (rows_of(problem, tile), units_of(problem, tile))
        tile.first = bool((first[at] == tile.leaf_begin).all())
        tile.whole = bool((count[at] == 1).all())
