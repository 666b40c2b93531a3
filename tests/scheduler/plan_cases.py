# SPDX-License-Identifier: Apache-2.0
"""Small indexes and specs for the scheduler's tests, built by hand so that they do not lean on the builders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from attnrt.formats.base import BlockSparse, Composite, Features, Requests
from attnrt.scheduler.base import NumericClass, Ruler, Sharing, Team, Traits
from attnrt.scheduler.plan import make_plan


class Window:
    """A visible range ``[q - left, q + right]``; None: unbounded on that side."""

    def __init__(self, left=None, right=None):
        self.left, self.right = left, right

    def visible_range(self, pos_min, pos_max, params=None):
        lo = None if self.left is None else pos_min - self.left
        hi = None if self.right is None else pos_max + self.right
        return lo, hi


def spec(qo_heads=4, kv_heads=2, left=None, right=None, head_dim=64):
    """What the planner reads of an AttentionSpec."""
    return SimpleNamespace(
        num_qo_heads=qo_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_vo=head_dim,
        group=qo_heads // kv_heads,
        composed=Window(left, right),
    )


def traits(workers=3, leaf=32, q_tile=16, team=None, wide=None, sizes=(), ends=(0.0, 0.0), **more):
    """Three classes with small leaves, so that small batches are cut; ``team``: (first class, section) of a second crew;
    ``wide``: the rows past which a tile goes to a crew before that, ``ends``: its prices of leaves' ends."""
    rulers = (Ruler(steps=((2, leaf), (2, 2 * leaf)), tail=4 * leaf), Ruler(tail=4 * leaf), Ruler())
    classes = (
        NumericClass(name="decode", max_rows=8, kv_tile=8, q_tile=q_tile, ruler=rulers[0]),
        NumericClass(name="append", max_rows=32, kv_tile=8, q_tile=2 * q_tile, ruler=rulers[1]),
        NumericClass(name="prefill", max_rows=None, kv_tile=8, q_tile=2 * q_tile, ruler=rulers[2]),
    )
    numbers = {"alpha": 1.0, "beta": 1.0, "beta_rows": 1 / 128, "fixed": 4.0, **more}
    teams = []
    if wide is not None:
        own = {"num_workers": 1 + workers // 3, "beta": 1.25, "fixed": 5.0, "again": 30.0}
        own |= {"stored": ends[0], "folded": ends[1]}
        teams.append(Team(name="wide", first_class=0, rows=wide, **own))
    if team is not None:
        first, section, *overlap = team
        own = {
            "num_workers": 1 + workers // 2,
            "beta": 1.5,
            "fixed": 7.0,
            "section": section,
            "tile": 8 if section else 0,
            "sizes": sizes,
        }
        own |= {"unit": 0.75, "overlap": overlap[0]} if overlap else {}
        teams.append(Team(name="team", first_class=first, **own))
    numbers["teams"] = tuple(teams)
    return Traits(name="test", num_workers=workers, classes=classes, **numbers)


def _requests(qo_lens, kv_lens):
    return Requests(qo_lens=np.asarray(qo_lens, np.int32), kv_lens=np.asarray(kv_lens, np.int32))


def _indptr(lens):
    return np.concatenate(([0], np.cumsum(lens))).astype(np.int32)


def paged(qo_lens, kv_lens, page_size=4, heads=1, rng=None, **more):
    """One block row per request over shuffled pages; heads > 1: every list is as long as kv_lens, of its own pages."""
    rng = rng or np.random.default_rng(0)
    requests = _requests(qo_lens, kv_lens)
    qo_lens, kv_lens = requests.qo_lens, requests.kv_lens
    pages = np.repeat(-(-kv_lens // page_size), heads)
    indptr = _indptr(pages)
    request = np.repeat(np.arange(len(qo_lens), dtype=np.int32), qo_lens)
    qo_indptr = _indptr(qo_lens)
    within = np.arange(len(request), dtype=np.int32) - qo_indptr[request]
    values = dict(
        block_size=(int(max(1, qo_lens.max(initial=1))), page_size),
        heads=heads,
        num_qo=len(request),
        requests=requests,
        qo_indptr=qo_indptr,
        request=request,
        qo_pos=(kv_lens[request] - qo_lens[request] + within).astype(np.int32),
        indptr=indptr,
        indices=rng.permutation(int(indptr[-1]) + 3)[: int(indptr[-1])].astype(np.int32),
        kv_pos=np.zeros(len(qo_lens), np.int32),
        kv_begin=np.zeros(len(qo_lens) * heads, np.int32),
        kv_end=np.repeat(kv_lens, heads).astype(np.int32),
        kv_offset=np.zeros(len(qo_lens), np.int32),
        max_block=int(indptr[-1]) + 2,
        features=Features(per_head=heads > 1),
    )
    return BlockSparse(**{**values, **more})


def cut_levels(flat, groups, ends):
    """A composite of ``flat`` (one block row per request): requests of a group share their first ``end`` keys.

    ``groups`` is a list of levels, each a list of lists of neighbouring requests; ``ends[level][group]`` the offset at which
    the level's part ends. The rest stays in the last part. Lists per head are cut alike.
    """
    begun = np.zeros(len(flat.requests), np.int64)
    C, H = flat.block_size[1], flat.heads
    levels = [*zip(groups, ends, strict=True), ([[r] for r in range(len(begun))], [None] * len(begun))]
    parts = []
    for level, level_ends in levels:
        queries, lists, begin, end, offset = [], [], [], [], []
        for members, cut in zip(level, level_ends, strict=True):
            lead, start = members[0], int(begun[members[0]])
            stop = max(start, int(flat.kv_end[lead * H]) if cut is None else cut)
            first = start // C if stop > start else 0
            queries.append([q for r in members for q in range(flat.qo_indptr[r], flat.qo_indptr[r + 1])])
            offset.append(first * C if stop > start else start)
            for h in range(H):
                at = flat.indptr[lead * H + h]
                lists.append(
                    flat.indices[at + first : at + -(-stop // C)] if stop > start else flat.indices[:0]
                )
                begin.append(start - offset[-1])
                end.append(stop - offset[-1])
            begun[members] = stop
        order = np.asarray([q for row in queries for q in row], np.int64)
        parts.append(
            BlockSparse(
                block_size=(max(1, max((len(q) for q in queries), default=1)), C),
                heads=H,
                num_qo=flat.num_qo,
                requests=flat.requests,
                qo_indptr=_indptr([len(q) for q in queries]),
                qo_index=order.astype(np.int32),
                request=flat.request[order],
                qo_pos=flat.qo_pos[order],
                indptr=_indptr([len(x) for x in lists]),
                indices=np.concatenate([*lists, np.zeros(0, np.int32)]).astype(np.int32),
                kv_pos=np.asarray(offset, np.int32),
                kv_begin=np.asarray(begin, np.int32),
                kv_end=np.asarray(end, np.int32),
                kv_offset=np.asarray(offset, np.int32),
                max_block=flat.max_block,
                features=Features(per_head=H > 1, qo_index=True),
            )
        )
    return Composite(parts=tuple(parts), features=Features(num_parts=len(parts)))


#: Workers that share nothing, that have hardly more alone, and such as a GPU's.
SHARINGS = (
    None,
    Sharing(workers=2, alone=1.5, warp=1.5, scattered=1.0, run=4, busy=1.0),
    Sharing(workers=3, alone=2.7, warp=1.3, scattered=1.1, run=16, busy=0.3, again=3.7, merge=1.0, fold=0.3),
    Sharing(
        workers=4, alone=3.5, warp=2.0, scattered=1.25, run=16, busy=0.5, again=48.0, merge=9.7, fold=2.9
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A drawn batch, flat and (if it shares) as a composite, with a spec and all that the planner may not let matter."""

    spec: object
    flat: BlockSparse
    composite: Composite | None
    workers: int
    scheduler: str
    max_slots: int | None
    pad: int
    team: tuple | None
    wide: int | None
    sizes: tuple
    ends: tuple[float, float]
    sharing: Sharing | None

    @property
    def index(self):
        return self.flat if self.composite is None else self.composite

    def plan(self, index=None, **more):
        values = dict(
            scheduler=self.scheduler, max_partial_slots=self.max_slots, pad_to=self.flat.num_qo + self.pad
        )
        return make_plan(
            self.spec,
            self.index if index is None else index,
            traits(
                self.workers,
                team=self.team,
                wide=self.wide,
                sizes=self.sizes,
                ends=self.ends,
                sharing=self.sharing,
            ),
            **{**values, **more},
        )


@st.composite
def cases(draw, heads=(1, 2), share=(False, True)):
    """Batches with requests of length 0, qo > kv, every class, odd pages, windows, sharing at up to two levels."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kv_heads = 2
    per_head = draw(st.sampled_from(heads)) > 1
    shares = draw(st.sampled_from(share))
    count = draw(st.integers(2 if shares else 0, 8))
    qo_lens = rng.choice([0, 1, 1, 1, 3, 6, 20], count)
    base = draw(st.integers(1, 300)) if shares else 0
    kv_lens = base + rng.integers(0, 400, count)
    page_size = draw(st.sampled_from([1, 3, 4, 16, 48]))
    flat = paged(qo_lens, kv_lens, page_size, heads=kv_heads if per_head else 1, rng=rng)
    composite = None
    if shares:
        flat, composite = _shared(draw, flat, base, count)
    right = draw(st.sampled_from([None, 0]))
    left = draw(st.sampled_from([None, 0, 50]))
    return Case(
        spec=spec(kv_heads * draw(st.sampled_from([1, 2, 3])), kv_heads, left=left, right=right),
        flat=flat,
        composite=composite,
        workers=draw(st.sampled_from([1, 2, 7, 132])),
        scheduler=draw(st.sampled_from(["lpt", "round_robin", "one_cta_per_request"])),
        max_slots=None if composite is not None else draw(st.sampled_from([None, 0, 3])),
        pad=draw(st.integers(0, 2)),
        team=draw(st.sampled_from([None, (1, 0), (1, 300), (2, 64), (2, 1), (1, 0, 0.5), (1, 64, 0.25)])),
        wide=draw(st.sampled_from([None, 0, 2, 5])),
        sizes=draw(st.sampled_from([(), (), ((8, 60), (16, 90), (32, 120)), ((12, 100), (32, 101))])),
        ends=draw(st.sampled_from([(0.0, 0.0), (40.0, 20.0), (0.0, 7.3), (30.1, 0.0)])),
        sharing=draw(st.sampled_from(SHARINGS)),
    )


def _shared(draw, flat, base, count):
    C, H = flat.block_size[1], flat.heads
    indices = flat.indices.copy()
    groups, ends = [], []
    end, members = 0, count
    for _ in range(draw(st.integers(1, 2))):
        end = draw(st.integers(end, base))
        if draw(st.booleans()):
            end = end // 32 * 32
        members = draw(st.integers(1, members))
        for r in range(1, members):
            for h in range(H):
                n = -(-end // C)
                at = flat.indptr[r * H + h]
                indices[at : at + n] = indices[flat.indptr[h] : flat.indptr[h] + n]
        groups.append([list(range(members)), *([r] for r in range(members, count))])
        ends.append([end] + [0] * (count - members))
        if groups[1:] and ends[-1][0] < ends[-2][0]:
            ends[-1][0] = ends[-2][0]
    flat = replace(flat, indices=indices)
    return flat, cut_levels(flat, groups, ends)
