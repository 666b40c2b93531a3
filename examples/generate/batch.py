# SPDX-License-Identifier: Apache-2.0
"""The rows of one step: which tokens of which sequences run, and where their keys lie."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np

from .draft import DraftTree
from .sequence import DROPPED, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows of one sequence: its tokens [start, start + rows), or a draft tree whose row 0 is its last token."""

    sequence: Sequence
    start: int
    rows: int
    tree: DraftTree | None = None

    @property
    def is_decode(self) -> bool:
        """Whether these rows follow a generated token."""
        return self.sequence.decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step as arrays, in the order of its slices.

    tokens, positions int64 [rows]; slots int64 [rows], where each row's K and V go; qo_indptr int32 [slices + 1];
    kv_indptr int32 [slices + 1] into kv_indices int32 (page ids); kv_lens int32 [slices], this step's rows included;
    parents int32 [rows], the row of its slice that each row follows, -1 for the first; logit_rows int64: the rows
    whose next token is wanted, slice by slice; guesses: whether any slice is a draft tree with guesses in it.
    """

    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    kv_lens: np.ndarray
    parents: np.ndarray
    logit_rows: np.ndarray
    logit_indptr: tuple[int, ...]
    guesses: bool


def build(slices: List[Slice]) -> StepBatch:
    """Lay the slices' rows out one after the other; their pages must be reserved."""
    tokens: list[int] = []
    positions, slots, parents, pages, logit_rows = [], [], [], [], []
    kv_lens, logit_indptr, first = [], [0], 0
    for part in slices:
        seq, end = part.sequence, part.start + part.rows
        if part.tree:
            tokens += part.tree.tokens
            positions.append(part.start + np.asarray(part.tree.depth))
            parents.append(np.asarray(part.tree.parents))
            wanted = np.arange(part.rows)
        else:
            tokens += seq.tokens[part.start : end]
            positions.append(np.arange(part.start, end))
            parents.append(np.arange(-1, part.rows - 1))
            wanted = np.arange(part.rows - 1, part.rows) if end == len(seq.tokens) else np.arange(0)
        logit_rows.append(first + wanted)
        logit_indptr.append(logit_indptr[-1] + len(wanted))
        slots.append(seq.slots(part.start, end))
        listed = np.asarray(seq.pages[: -(-end // seq.pool.page_size)])
        # A dropped page is never read; the list needs some page in its place to keep the positions of the rest.
        pages.append(np.where(listed == DROPPED, listed[-1], listed))
        kv_lens.append(end)
        first += part.rows
    return StepBatch(
        tokens=np.asarray(tokens),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        qo_indptr=_indptr([p.rows for p in slices]),
        kv_indptr=_indptr([len(p) for p in pages]),
        kv_indices=np.concatenate(pages).astype(np.int32),
        kv_lens=np.asarray(kv_lens, np.int32),
        parents=np.concatenate(parents).astype(np.int32),
        logit_rows=np.concatenate(logit_rows),
        logit_indptr=tuple(logit_indptr),
        guesses=any(p.tree and p.rows > 1 for p in slices),
    )


def _indptr(lengths: List[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
