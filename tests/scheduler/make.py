# SPDX-License-Identifier: Apache-2.0
"""Small indexes and specs for the scheduler's tests, built by hand so that they do not lean on the builders."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from attnrt.formats.base import BlockSparse, Composite, Features, Requests
from attnrt.scheduler.base import NumericClass, Ruler, Traits


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


def traits(workers=3, leaf=32, q_tile=16, **more):
    """Three classes with small leaves, so that small batches are cut."""
    rulers = (Ruler(steps=((2, leaf), (2, 2 * leaf)), tail=4 * leaf), Ruler(tail=4 * leaf), Ruler())
    classes = (
        NumericClass(name="decode", max_rows=8, kv_tile=8, q_tile=q_tile, ruler=rulers[0]),
        NumericClass(name="append", max_rows=32, kv_tile=8, q_tile=2 * q_tile, ruler=rulers[1]),
        NumericClass(name="prefill", max_rows=None, kv_tile=8, q_tile=2 * q_tile, ruler=rulers[2]),
    )
    numbers = {"alpha": 1.0, "beta": 1.0, "beta_rows": 1 / 128, "fixed": 4.0, **more}
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


def cut_levels(flat, groups, ends, rng=None):
    """A composite of ``flat`` (one block row per request): requests of a group share their first ``end`` keys.

    ``groups`` is a list of levels, each a list of lists of neighbouring requests; ``ends[level][group]`` the offset at which
    the level's part ends. The rest stays in the last part.
    """
    parts, begun = [], np.zeros(len(flat.requests), np.int64)
    C = flat.block_size[1]
    levels = [*zip(groups, ends, strict=True), ([[r] for r in range(len(begun))], [None] * len(begun))]
    for level, level_ends in levels:
        rows = {k: [] for k in ("queries", "indices", "begin", "end", "offset")}
        for members, end in zip(level, level_ends, strict=True):
            queries = [q for r in members for q in range(flat.qo_indptr[r], flat.qo_indptr[r + 1])]
            lead = members[0]
            stop = int(flat.kv_end[lead]) if end is None else end
            start = int(begun[lead])
            first = start // C
            listed = flat.indices[flat.indptr[lead] + first : flat.indptr[lead] + -(-stop // C)]
            if start >= stop:
                first, listed = 0, listed[:0]
            rows["queries"].append(queries)
            rows["indices"].append(listed)
            rows["begin"].append(start - first * C if len(listed) else 0)
            rows["end"].append(stop - first * C if len(listed) else 0)
            rows["offset"].append(first * C if len(listed) else start)
            for r in members:
                begun[r] = max(begun[r], stop)
        order = np.asarray([q for queries in rows["queries"] for q in queries], np.int64)
        parts.append(
            BlockSparse(
                block_size=(max(1, max((len(q) for q in rows["queries"]), default=1)), C),
                num_qo=flat.num_qo,
                requests=flat.requests,
                qo_indptr=_indptr([len(q) for q in rows["queries"]]),
                qo_index=order.astype(np.int32),
                request=flat.request[order],
                qo_pos=flat.qo_pos[order],
                indptr=_indptr([len(x) for x in rows["indices"]]),
                indices=np.concatenate([*rows["indices"], np.zeros(0, np.int32)]).astype(np.int32),
                kv_pos=np.asarray(rows["offset"], np.int32),
                kv_begin=np.asarray(rows["begin"], np.int32),
                kv_end=np.asarray(rows["end"], np.int32),
                kv_offset=np.asarray(rows["offset"], np.int32),
                max_block=flat.max_block,
            )
        )
    return Composite(parts=tuple(parts), features=Features(num_parts=len(parts)))
