# SPDX-License-Identifier: Apache-2.0
"""What is served (Request) and one running sample of it (Sequence) with the pages that it holds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .pool import PagePool
from .prefix import Node
from .sampling import Sampler

DROPPED = -1  # stands in a page list for a page that a streaming cache has let go


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt (token ids), how many tokens may follow it, and how many samples of it are wanted."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int = 1


class Sequence:
    """One sample of a request while it runs.

    Attributes
    ----------
    tokens : list[int]
        Prompt and generated ids. All but the last have a place in the KV cache once `computed` reaches them.
    computed : int
        Tokens whose K and V are stored.
    pages : list[int]
        Page of tokens [i * page_size, (i + 1) * page_size), or DROPPED.
    budget : int
        Pages that it may still allocate; the engine has set them aside.
    waits : tuple[Node, ...]
        Pages of its prefix that another sequence has yet to fill.
    unfilled : deque[tuple[int, Node]]
        Its own pages in the prefix tree that it has yet to fill: (number of tokens when full, node).
    finish : str or None
        "stop" or "length" once it is done.
    """

    __slots__ = (
        "budget",
        "computed",
        "finish",
        "hits",
        "logits",
        "pages",
        "pool",
        "request",
        "sample",
        "sampler",
        "tokens",
        "unfilled",
        "waits",
    )

    def __init__(self, request: Request, sample: int, sampler: Sampler, pool: PagePool, budget: int) -> None:
        self.request, self.sample, self.sampler = request, sample, sampler
        self.pool, self.budget = pool, budget
        self.tokens = list(request.prompt)
        self.computed = 0
        self.pages: list[int] = []
        self.hits = 0
        self.waits: tuple[Node, ...] = ()
        self.unfilled: deque[tuple[int, Node]] = deque()
        self.logits: list[np.ndarray] = []
        self.finish: str | None = None

    @property
    def generated(self) -> list[int]:
        """The ids after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def decoding(self) -> bool:
        """Whether only the newest generated token lacks K and V."""
        return len(self.tokens) > len(self.request.prompt)

    def reserve(self, end: int) -> None:
        """Make token slots [computed, end) exist and be this sequence's to write; shared pages there are copied."""
        size = self.pool.page_size
        first = self.computed // size
        for i in range(first, -(-end // size)):
            if i == len(self.pages):
                self.pages.append(self._alloc())
            elif not self.pool.is_writer(self.pages[i], self):
                shared = self.pages[i]
                self.pages[i] = self.pool.copy_for(shared, self, self.computed - i * size)
                self.budget -= 1
                self.pool.release(shared)

    def _alloc(self) -> int:
        self.budget -= 1
        return self.pool.alloc(self)

    def truncate(self) -> None:
        """Let go of the pages behind the computed tokens."""
        while len(self.pages) > -(-self.computed // self.pool.page_size):
            self.pool.release(self.pages.pop())
            self.budget += 1

    def drop_old(self, sinks: int, recent: int) -> None:
        """Let go of the pages that no later query of a streaming cache sees (the next one is at `computed`)."""
        size = self.pool.page_size
        for i in range(-(-sinks // size), max(self.computed - recent + 1, 0) // size):
            if self.pages[i] != DROPPED:
                self.budget += self.pool.is_writer(self.pages[i], self)
                self.pool.release(self.pages[i])
                self.pages[i] = DROPPED

    def release(self) -> None:
        """Let go of everything."""
        for page in self.pages:
            if page != DROPPED:
                self.pool.release(page)
        self.pages = []

    def slots(self, begin: int, end: int) -> np.ndarray:
        """Return int64 slots (page * page_size + offset) of token places [begin, end)."""
        size = self.pool.page_size
        at = np.arange(begin, end)
        return np.asarray(self.pages, np.int64)[at // size] * size + at % size
