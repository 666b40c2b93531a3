# SPDX-License-Identifier: Apache-2.0
"""The paged KV pool: pages, who holds them, and who may write them.

A page id names the same page in every layer. A page has any number of holders (a reference count) and at most one
writer, the sequence that allocated it. KV only grows: a writer fills slots behind those that the other holders read,
so it needs no copy; anyone else who wants to write a shared page copies it first (copy-on-write).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import HostArrays
from .weights import ModelConfig


class PoolExhausted(RuntimeError):
    """A page was asked for and none is free. The engine's admission keeps this from happening."""


class PagePool:
    """`num_pages` pages of `page_size` tokens for each layer of a model.

    Parameters
    ----------
    arrays : HostArrays, optional
        Where K and V lie; None: NumPy.
    copy_page : callable, optional
        Called with (layers, source page, target page) to copy a page in every layer; None: as `move` does.
    reclaim : callable, optional
        Called with no arguments when no page is free; returns whether it freed any.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        dtype: np.dtype | type = np.float32,
        arrays: HostArrays | None = None,
        copy_page: Callable[[list[tuple[Any, Any]], int, int], None] | None = None,
        reclaim: Callable[[], bool] | None = None,
    ) -> None:
        shape = (config.num_layers, num_pages, page_size, config.num_kv_heads, config.head_dim)
        kind = np.dtype(dtype)
        self._caches = [(arrays or HostArrays()).cache(shape, kind.name) for _ in ("k", "v")]
        self.num_pages, self.page_size = num_pages, page_size
        self.layers = list(zip(*(cache.layers for cache in self._caches), strict=True))
        self.page_bytes = 2 * math.prod(shape) // num_pages * kind.itemsize
        self.reclaim, self.copy_page = reclaim, copy_page
        self._refs = [0] * num_pages
        self._writer: list[object | None] = [None] * num_pages
        self._free = list(range(num_pages))[::-1]
        self.peak = 0
        self.copies = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - len(self._free)

    def refs(self, page: int) -> int:
        """Return how many hold `page`."""
        return self._refs[page]

    def alloc(self, writer: object) -> int:
        """Return a free page held once and writable by `writer`; PoolExhausted if there is none."""
        if not self._free and not (self.reclaim and self.reclaim()):
            raise PoolExhausted(f"all {self.num_pages} pages are held")
        page = self._free.pop()
        self._refs[page], self._writer[page] = 1, writer
        self.peak = max(self.peak, self.in_use)
        return page

    def retain(self, page: int) -> int:
        """Add a holder and return the page."""
        assert self._refs[page] > 0, "retain of a free page"
        self._refs[page] += 1
        return page

    def release(self, page: int) -> None:
        """Take a holder away; the last one frees the page."""
        assert self._refs[page] > 0, "release of a free page"
        self._refs[page] -= 1
        if not self._refs[page]:
            self._writer[page] = None
            self._free.append(page)

    def is_writer(self, page: int, who: object) -> bool:
        """Whether `who` may write `page` as it is."""
        return self._writer[page] is who

    def copy_for(self, page: int, writer: object, num_tokens: int) -> int:
        """Return a new page of `writer`'s with the first `num_tokens` tokens of `page`; the old hold stays."""
        new = self.alloc(writer)
        if self.copy_page:
            self.copy_page(self.layers, page, new)  # the tokens behind the first `num_tokens` are nobody's
        else:
            offsets = np.arange(num_tokens)
            self.move(page * self.page_size + offsets, new * self.page_size + offsets)
        self.copies += 1
        return new

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy token slots (page * page_size + offset) `source` to `target` in every layer; ranges may overlap."""
        if len(source):
            for cache in self._caches:
                cache.move(source, target)
