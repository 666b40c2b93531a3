# SPDX-License-Identifier: Apache-2.0
"""The bitwise oracles: things that may change nothing, each as one function over a case and a backend.

Someone who writes a backend or an index builder runs them on their own cases; each raises AssertionError with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrt.api import Attention
from attnrt.dtypes import as_dtype
from attnrt.layout import Limits
from attnrt.testing.cases import Batch, Case, lay_out, poison_of, take
from attnrt.testing.device import execute

__all__ = [
    "Result",
    "batch_invariance",
    "capacity",
    "history",
    "layout_invariance",
    "page_size_invariance",
    "placement",
    "poison",
    "rows_of",
    "run_batch",
    "same",
    "sentinel",
    "workers",
]

#: What results are filled with before a run; no right answer is this.
SENTINEL = 12345.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """out and lse (None: softmax-free) of one run."""

    out: np.ndarray
    lse: np.ndarray | None


def run_batch(
    case: Case,
    batch: Batch,
    backend: Any,
    *,
    attn: Attention | None = None,
    pad_to: int | None = None,
    **attention: Any,
) -> Result:
    """Plan and run a batch into arrays that hold NaN; ``attention`` are arguments of Attention."""
    spec = case.spec
    if attn is None:
        attn = Attention(spec, backend=backend, **attention)
    plan = attn.plan(batch.index, pad_to=pad_to)
    q = _padded(batch.q, plan.num_rows)
    out = np.full((plan.num_rows, spec.num_qo_heads, spec.head_dim_vo), np.nan).astype(
        as_dtype(spec.out_dtype).numpy
    )
    lse = np.full(out.shape[:2], np.nan, np.float32) if spec.composed.use_softmax else None
    execute(attn, q, batch.kv, out=out, lse=lse, **batch.params)
    return Result(out=out, lse=lse)


def _padded(q: np.ndarray, rows: int) -> np.ndarray:
    if rows == len(q):
        return q
    padded = np.full((rows, *q.shape[1:]), poison_of(q.dtype.name, float("nan")), q.dtype)
    padded[: len(q)] = q
    return padded


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def same(a: Result, b: Result, what: str) -> None:
    """Both results agree in every bit."""
    for name in ("out", "lse"):
        x, y = getattr(a, name), getattr(b, name)
        if x is None:
            continue
        assert x.shape == y.shape, f"{what}: {name} has shapes {x.shape} and {y.shape}"
        differ = _bits(x) != _bits(y)
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            raise AssertionError(
                f"{what} changed {int(differ.sum())} numbers of {name}; at {at}: {x[at]!r} and {y[at]!r}"
            )


def rows_of(result: Result, case: Case, request: int) -> Result:
    """The rows of one request."""
    begin = int(case.qo_lens[:request].sum())
    span = slice(begin, begin + int(case.qo_lens[request]))
    return Result(out=result.out[span], lse=None if result.lse is None else result.lse[span])


def poison(case: Case, backend: Any, **layout: Any) -> None:
    """NaN, the largest number or 0 in all memory outside the live set: same bits."""
    results = [
        run_batch(case, lay_out(case, **layout, fill=fill), backend) for fill in (0.0, float("nan"), 1e30)
    ]
    same(results[0], results[1], "NaN in dead memory")
    same(results[0], results[2], "1e30 in dead memory")


def placement(case: Case, backend: Any, **layout: Any) -> None:
    """Other physical pages: same bits."""
    first, second = (run_batch(case, lay_out(case, **layout, seed=seed), backend) for seed in (1, 2))
    same(first, second, "moving pages")


def layout_invariance(case: Case, backend: Any, **layout: Any) -> None:
    """Strided, transposed, interleaved caches and pools of slots; strided q, out and lse: same bits."""
    plain = run_batch(case, lay_out(case, **layout), backend)
    for form in ("strided", "transposed", "interleaved", "pool"):
        same(plain, run_batch(case, lay_out(case, **layout, form=form), backend), f"a {form} cache")
    batch = lay_out(case, **layout)
    spec = case.spec
    attn = Attention(spec, backend=backend)
    attn.plan(batch.index)
    wide = np.zeros((len(batch.q), spec.num_qo_heads + 1, spec.head_dim + 3), batch.q.dtype)
    q = wide[:, : spec.num_qo_heads, : spec.head_dim]
    q[...] = batch.q
    out = np.zeros((2 * len(q), spec.num_qo_heads, spec.head_dim_vo + 1), as_dtype(spec.out_dtype).numpy)[
        ::2, :, :-1
    ]
    lse = np.zeros((spec.num_qo_heads, len(q)), np.float32).T if spec.composed.use_softmax else None
    execute(attn, q, batch.kv, out=out, lse=lse, **batch.params)
    same(plain, Result(out=out, lse=lse), "strided q, out and lse")


def capacity(case: Case, backend: Any, **layout: Any) -> None:
    """A larger pool, limits, partial slots, padding: same bits."""
    plain = run_batch(case, lay_out(case, **layout), backend)
    same(plain, run_batch(case, lay_out(case, **layout, spare=40), backend), "a larger pool")
    batch = lay_out(case, **layout)
    count, rows = len(case.q), int(case.qo_lens.sum())
    entries = sum(0 if p.indices is None else len(p.indices) for p in batch.index.parts)
    parts = len(batch.index.parts)
    for slots in (None, 0, 100_000):
        if slots == 0 and parts > 1:
            continue
        limits = Limits(count + 5, rows + 9, entries + 7, max_parts=parts, max_partial_slots=slots)
        same(plain, run_batch(case, batch, backend, limits=limits), f"limits with max_partial_slots={slots}")
    padded = run_batch(case, batch, backend, pad_to=rows + 3)
    same(
        plain, Result(out=padded.out[:rows], lse=None if padded.lse is None else padded.lse[:rows]), "padding"
    )
    assert not padded.out[rows:].astype(np.float64).any(), "padded rows are not 0"
    if padded.lse is not None:
        assert (padded.lse[rows:] == -np.inf).all(), "lse of padded rows is not -inf"


def workers(case: Case, backend: Any, counts: tuple[int, ...] = (1, 2, 7, 132), **layout: Any) -> None:
    """Fewer workers, other schedulers: same bits."""
    batch = lay_out(case, **layout)
    plain = run_batch(case, batch, backend)
    parts = batch.index.parts
    for count in counts:
        limits = Limits(
            len(case.q), int(case.qo_lens.sum()), 1 << 20, max_parts=len(parts), max_workers=count
        )
        same(plain, run_batch(case, batch, backend, limits=limits), f"max_workers={count}")
    for name in ("round_robin", "one_cta_per_request"):
        same(plain, run_batch(case, batch, backend, scheduler=name), f"scheduler {name}")


def batch_invariance(case: Case, backend: Any, **layout: Any) -> None:
    """Each request alone, and the batch in reverse: same bits."""
    together = run_batch(case, lay_out(case, **layout), backend)
    turned = take(case, range(len(case.q))[::-1])
    reverse = run_batch(turned, lay_out(turned, **layout, seed=5), backend)
    for request in range(len(case.q)):
        mine = rows_of(together, case, request)
        one = take(case, [request])
        same(mine, run_batch(one, lay_out(one, **layout, seed=9), backend), f"request {request} alone")
        same(
            mine,
            rows_of(reverse, turned, len(case.q) - 1 - request),
            f"request {request} in the reversed batch",
        )


def page_size_invariance(case: Case, backend: Any, sizes: tuple[int, ...] = (1, 16, 48, 7)) -> None:
    """Other page sizes, a dense table, and contiguous K and V: same bits."""
    plain = run_batch(case, lay_out(case, builder="ragged"), backend)
    for size in sizes:
        for builder in ("paged", "block_table"):
            batch = lay_out(case, builder=builder, page_size=size)
            same(plain, run_batch(case, batch, backend), f"{builder} with pages of {size} instead of ragged")


def history(case: Case, other: Case, backend: Any, **layout: Any) -> None:
    """Plan A, run, plan B, run: B as in a fresh attention; then A again."""
    first, second = lay_out(case, **layout), lay_out(other, **layout, seed=3)
    fresh = [run_batch(c, b, backend) for c, b in ((case, first), (other, second))]
    attn = Attention(case.spec, backend=backend)
    for c, b, want in ((case, first, fresh[0]), (other, second, fresh[1]), (case, first, fresh[0])):
        same(want, run_batch(c, b, backend, attn=attn), "an earlier plan")


def sentinel(case: Case, backend: Any, **layout: Any) -> None:
    """No live row stays unwritten, no row outside of out and lse is touched."""
    batch, spec = lay_out(case, **layout), case.spec
    attn = Attention(spec, backend=backend)
    rows = attn.plan(batch.index).num_rows
    kind = as_dtype(spec.out_dtype).numpy
    mark = poison_of(spec.out_dtype, SENTINEL)
    block = np.full((rows + 4, spec.num_qo_heads, spec.head_dim_vo), mark, kind)
    lses = np.full((rows + 4, spec.num_qo_heads), SENTINEL, np.float32)
    lse = lses[2:-2] if spec.composed.use_softmax else None
    execute(attn, batch.q, batch.kv, out=block[2:-2], lse=lse, **batch.params)
    for edge in (block[:2], block[-2:]):
        assert (_bits(edge) == _bits(mark)).all(), "rows outside of out were touched"
    assert (lses[:2] == SENTINEL).all() and (lses[-2:] == SENTINEL).all(), "rows outside of lse were touched"
    live = _bits(block[2:-2]) == _bits(mark)
    assert not live.all(-1).any(), f"a row was not written: {np.argwhere(live.all(-1))[0]}"
    if lse is not None:
        assert not (lse == SENTINEL).any(), f"an lse was not written: {np.argwhere(lse == SENTINEL)[0]}"
