# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: every step runs whatever rows are due, of whatever sequences are there.

A step is: admit waiting requests while pages last; take one row (or a draft tree) of every sequence that decodes and up
to `chunk` rows of prompts, oldest first; plan their attention once; run the model; hand out tokens; let go of the
sequences that are done. Admission sets the worst case of a request's pages aside, so a running sequence never fails
for want of a page and nothing is ever preempted.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import StepAttention
from .batch import Slice, StepBatch, build
from .draft import propose, verify
from .model import Model
from .pool import PagePool
from .prefix import PrefixTree
from .sampling import Sampler
from .sequence import DROPPED, Request, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How to serve.

    page_size: tokens per page. num_pages: pages of the pool (per layer). chunk: most prompt rows per step. max_batch: most
    sequences at once. draft: guesses per sequence and step, 0 for none. streaming: (sinks, recent) or None. prefix: keep
    prompts' pages for later ones. stop: ids that end a sequence. keep_logits: remember the logits of every chosen token.
    """

    page_size: int = 16
    num_pages: int = 256
    chunk: int = 64
    max_batch: int = 8
    draft: int = 0
    draft_depth: int = 6
    streaming: tuple[int, int] | None = None
    prefix: bool = True
    kv_dtype: np.dtype | type = np.float32
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    keep_logits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step: sequences and rows in it, tokens it yielded, guesses tried and accepted, seconds, and pages.

    held: distinct pages that running sequences hold; unshared: what they would hold without sharing; dense: pages that
    buffers of the full length (prompt + max_tokens) for each of them would take.
    """

    running: int
    decode_rows: int
    prefill_rows: int
    tokens: int
    guessed: int
    accepted: int
    plan_seconds: float
    run_seconds: float
    seconds: float
    held: int
    unshared: int
    dense: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """New ids of one sequence in this step; `sequence.finish` says whether they are the last."""

    sequence: Sequence
    ids: tuple[int, ...]


class Engine:
    """Serves requests with `model`, its attention run by `attention`; both compute with the same arrays."""

    def __init__(self, model: Model, attention: StepAttention, options: EngineOptions) -> None:
        self.model, self.attention, self.options = model, attention, options
        self.pool = PagePool(
            model.config,
            options.num_pages,
            options.page_size,
            dtype=options.kv_dtype,
            arrays=attention.arrays,
            copy_page=attention.copy_page,
        )
        self.tree = PrefixTree(self.pool)
        self.pool.reclaim = self.tree.evict_one
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.steps: list[StepStats] = []
        self._fork_budget: dict[int, int] = {}

    def submit(self, request: Request) -> None:
        """Queue a request; it joins when there is room. ValueError if it could never run."""
        longest = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1 or request.samples < 1:
            raise ValueError(f"request {request.id}: it needs a prompt, max_tokens >= 1 and samples >= 1")
        if longest > self.model.config.context:
            raise ValueError(
                f"request {request.id}: {len(request.prompt)} prompt tokens and {request.max_tokens} new ones exceed the"
                f" model's context of {self.model.config.context}"
            )
        if request.samples > self.options.max_batch:
            raise ValueError(
                f"request {request.id}: {request.samples} samples exceed max_batch {self.options.max_batch}"
            )
        first, clones = self._worst_case(request)
        if first + clones > self.pool.num_pages:
            raise ValueError(
                f"request {request.id} may need {first + clones} pages; the pool has {self.pool.num_pages}"
            )
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def step(self) -> list[Progress]:
        """Run one step and return what every sequence gained."""
        begin = time.perf_counter()
        self._admit()
        slices = self._schedule()
        for part in slices:
            part.sequence.reserve(part.start + part.rows)
        batch = build(slices)
        self.attention.plan(batch, self.options.page_size)
        logits = self._forward(batch)
        pages = self._count_pages()
        progress: list[Progress] = []
        guessed = accepted = 0
        for i, part in enumerate(slices):
            rows = logits[batch.logit_indptr[i] : batch.logit_indptr[i + 1]]
            gained = self._accept(part, rows)
            progress += gained
            if part.tree:
                guessed += part.rows - 1
                accepted += len(gained[0].ids) - 1
        self._retire()
        decode = sum(p.rows for p in slices if p.start >= len(p.sequence.request.prompt))
        self.steps.append(
            StepStats(
                running=len(slices),
                decode_rows=decode,
                prefill_rows=len(batch.tokens) - decode,
                tokens=sum(len(p.ids) for p in progress),
                guessed=guessed,
                accepted=accepted,
                plan_seconds=self.attention.plan_seconds,
                run_seconds=self.attention.run_seconds,
                seconds=time.perf_counter() - begin,
                held=pages[0],
                unshared=pages[1],
                dense=pages[2],
            )
        )
        return progress

    # -- joining ---------------------------------------------------------------------------------------------------------

    def _worst_case(self, request: Request) -> tuple[int, int]:
        """Pages that the first sample may allocate without any hit, and all other samples together after the fork."""
        opts, size = self.options, self.options.page_size
        pages = -(-(len(request.prompt) + request.max_tokens + opts.draft) // size)
        own = pages - len(request.prompt) // size
        if opts.streaming:
            sinks, recent = opts.streaming
            live = -(-sinks // size) + -(-(recent + opts.chunk) // size) + 2
            pages = own = min(pages, live)
        return pages, (request.samples - 1) * own

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0]
            if len(self.running) + self._forks_due() + request.samples > self.options.max_batch:
                return
            if not self._try_admit(request):
                return
            self.waiting.popleft()

    def _forks_due(self) -> int:
        return sum(s.request.samples - 1 for s in self.running if s.request.id in self._fork_budget)

    def _try_admit(self, request: Request) -> bool:
        sampler = self._sampler(request, 0)
        caching = self.options.prefix and not self.options.streaming
        pages, clones = self._worst_case(request)
        seq = Sequence(request, 0, sampler, self.pool, pages)
        match = self.tree.match(request.prompt, len(self.steps)) if caching else None
        if match:
            seq.pages = [self.pool.retain(node.page) for node in match.nodes]
            seq.budget -= len(seq.pages)
            if match.partial:
                self.pool.retain(match.partial.page)
        promised = sum(s.budget for s in self.running) + sum(self._fork_budget.values())
        room = self.pool.num_free + self.tree.num_evictable() - promised
        fits = seq.budget + clones <= room
        if match and match.partial:
            if fits:
                seq.pages.append(self.pool.copy_for(match.partial.page, seq, match.partial_tokens))
                seq.budget -= 1
            self.pool.release(match.partial.page)
        if not fits:
            seq.release()
            return False
        if match:
            seq.hits = len(match.nodes) * self.options.page_size + match.partial_tokens
            seq.computed = seq.hits
            seq.waits = tuple(n for n in match.nodes if n.filled is None)
            self._announce(seq)
        if request.samples > 1:
            self._fork_budget[request.id] = clones
        self.running.append(seq)
        return True

    def _announce(self, seq: Sequence) -> None:
        """Put the prompt's full pages into the tree before they are filled."""
        full = len(seq.request.prompt) // self.options.page_size * self.options.page_size
        seq.reserve(full)
        seq.unfilled.extend(self.tree.store(seq.request.prompt, seq.pages, None))

    def _sampler(self, request: Request, sample: int) -> Sampler:
        return Sampler(
            temperature=self.options.temperature, seed=self.options.seed, stream=(request.id, sample)
        )

    # -- one step ----------------------------------------------------------------------------------------------------------

    def _schedule(self) -> list[Slice]:
        slices = [self._decode_slice(seq) for seq in self.running if seq.decoding]
        left = self.options.chunk
        for seq in self.running:
            if seq.decoding or not left or any(n.filled is None for n in seq.waits):
                continue
            rows = min(left, len(seq.tokens) - seq.computed)
            slices.append(Slice(sequence=seq, start=seq.computed, rows=rows))
            left -= rows
            while seq.unfilled and seq.unfilled[0][0] <= seq.computed + rows:
                seq.unfilled.popleft()[1].filled = len(self.steps)
        return slices

    def _decode_slice(self, seq: Sequence) -> Slice:
        start = len(seq.tokens) - 1
        tree = None
        if self.options.draft:
            room = min(self.options.draft_depth, seq.request.max_tokens - len(seq.generated) - 1)
            tree = propose(seq.tokens, self.options.draft, room)
        return Slice(sequence=seq, start=start, rows=len(tree.tokens) if tree else 1, tree=tree)

    def _forward(self, batch: StepBatch) -> np.ndarray:
        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            return self.attention.attend(self.pool, layer, q, (k, v))

        return self.model.forward(batch.tokens, batch.positions, attend, batch.logit_rows)

    def _accept(self, part: Slice, logits: np.ndarray) -> list[Progress]:
        seq = part.sequence
        if part.tree:
            at = len(seq.tokens)
            path, ids = verify(part.tree, lambda row, depth: seq.sampler.choose(logits[row], at + depth))
            self._compact(part, path)
            return [self._gain(seq, ids, logits[path])]
        seq.computed = part.start + part.rows
        if not len(logits):
            return []
        fresh = [seq]
        if not seq.decoding and seq.request.id in self._fork_budget:
            fresh += self._fork(seq)
        return [self._gain(s, [s.sampler.choose(logits[0], len(s.tokens))], logits) for s in fresh]

    def _compact(self, part: Slice, path: list[int]) -> None:
        """Move the accepted rows' K and V together, and let go of the pages of the rest."""
        seq = part.sequence
        source = seq.slots(part.start, part.start + part.rows)[path]
        target = seq.slots(part.start, part.start + len(path))
        moved = source != target
        if moved.any():
            self.pool.move(source[moved], target[moved])
        seq.computed = part.start + len(path)
        seq.truncate()

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """Make the other samples of a request whose prompt is done; they hold the same pages."""
        clones, budget = [], self._fork_budget.pop(seq.request.id)
        for sample in range(1, seq.request.samples):
            share = budget // (seq.request.samples - 1)
            clone = Sequence(seq.request, sample, self._sampler(seq.request, sample), self.pool, share)
            clone.pages = [p if p == DROPPED else self.pool.retain(p) for p in seq.pages]
            clone.computed = clone.hits = seq.computed
            clones.append(clone)
        self.running += clones
        return clones

    def _gain(self, seq: Sequence, ids: list[int], logits: np.ndarray) -> Progress:
        opts = self.options
        ids = ids[: seq.request.max_tokens - len(seq.generated)]
        for i, token in enumerate(ids):
            if token in opts.stop:
                ids, seq.finish = ids[: i + 1], "stop"
                break
        seq.tokens += ids
        if opts.keep_logits:
            seq.logits += list(logits[: len(ids)].copy())
        if not seq.finish and len(seq.generated) == seq.request.max_tokens:
            seq.finish = "length"
        return Progress(sequence=seq, ids=tuple(ids))

    # -- leaving -----------------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        if self.options.streaming:
            for seq in self.running:
                seq.drop_old(*self.options.streaming)
        for seq in [s for s in self.running if s.finish]:
            if self.options.prefix and not self.options.streaming:
                # The answer's pages too: a follow-up that quotes it begins with them.
                self.tree.store(seq.tokens[: seq.computed], seq.pages, len(self.steps))
            seq.release()
            self.running.remove(seq)
            self.finished.append(seq)

    def _count_pages(self) -> tuple[int, int, int]:
        lists = [[p for p in s.pages if p != DROPPED] for s in self.running]
        dense = sum(len(s.request.prompt) + s.request.max_tokens for s in self.running)
        return len(set().union(*lists)), sum(map(len, lists)), -(-dense // self.options.page_size)
