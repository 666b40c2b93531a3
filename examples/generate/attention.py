# SPDX-License-Identifier: Apache-2.0
"""The engine's only touch with attnrt: one index and one plan per step, one append and one run per layer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import attnrt as at

from .arrays import HostArrays
from .batch import StepBatch
from .pool import PagePool
from .weights import ModelConfig


class StepAttention:
    """Attention of one model over one pool.

    Parameters
    ----------
    backend, scheduler : str
        As for `at.Attention`.
    kv_dtype : str
        Dtype of the pool. On the CPU q is float32, on a GPU it has this dtype too; the output is float32.
    arrays : HostArrays, optional
        The model's arrays; they say where attention runs. None: NumPy on the CPU.
    tree : bool
        Whether rows may be draft trees. In a step with guesses the index carries a mask of ancestors, for every slice.
    streaming : (sinks, recent), optional
        See `at.formats.streaming`.
    share_tokens : int, optional
        If given, prefixes of at least so many tokens that slices have in common become parts of their own, read once
        for all of them (`at.formats.share`); the result is the same to the bit.

    Attributes
    ----------
    plan_seconds, run_seconds : float
        Time of the last step for index and plan, and for append and run of all layers. On a GPU with a framework of the
        model's own this is the host's time: the work goes on while the next layer is enqueued.
    q_dtype : str
        What q, k and v are rounded to before attention sees them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: str = "auto",
        scheduler: str = "lpt",
        kv_dtype: str = "float32",
        arrays: HostArrays | None = None,
        tree: bool = False,
        streaming: tuple[int, int] | None = None,
        share_tokens: int | None = None,
    ) -> None:
        self.arrays = arrays or HostArrays()
        self.q_dtype = "float32" if self.arrays.device == "cpu" else kv_dtype

        def attention(variant: Any) -> at.Attention:
            spec = at.AttentionSpec(
                num_qo_heads=config.num_qo_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                q_dtype=self.q_dtype,
                kv_dtype=kv_dtype,
                out_dtype="float32",
                variant=variant,
            )
            return at.Attention(spec, backend=backend, scheduler=scheduler, device=self.arrays.device)

        self._causal = self._planned = attention(at.variants.causal())
        self._tree = attention(at.variants.custom_mask()) if tree else None
        self._streaming, self._share_tokens = streaming, share_tokens
        self.plan_seconds = self.run_seconds = 0.0
        self.num_runs = 0
        self._prepared: set[Any] = set()
        self._slots: Any = None
        self._stream: int | None = None

    @property
    def backend(self) -> str:
        """Name of the backend that runs."""
        return self._causal.backend

    def plan(self, batch: StepBatch, page_size: int) -> None:
        """Build the step's index and plan it, for all layers. What its kind of index needs is compiled the first time."""
        begin = time.perf_counter()
        index = self._index(batch, page_size)
        compiling = time.perf_counter()
        self._planned = self._tree if self._tree and batch.guesses else self._causal
        if index.features not in self._prepared:  # at most a few times in a run, and no part of planning
            self._planned.prepare(index)
            self._prepared.add(index.features)
        begin += time.perf_counter() - compiling
        self._stream = self.arrays.stream
        self._planned.plan(index, stream=self._stream)
        self._slots = self.arrays.send("slots", self.arrays.put(batch.slots), "int64")
        self.plan_seconds, self.run_seconds = time.perf_counter() - begin, 0.0

    def _index(self, batch: StepBatch, page_size: int) -> Any:
        formats = at.formats
        index = formats.paged(
            batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_lens, page_size=page_size
        )
        if self._share_tokens is not None and not self._streaming:
            index = formats.share(index, min_tokens=self._share_tokens)
        if self._tree and batch.guesses:
            index = formats.tree(index, parents=batch.parents)
        if self._streaming:
            index = formats.streaming(index, *self._streaming)
        return index

    def copy_page(self, layers: list[tuple[Any, Any]], source: int, target: int) -> None:
        """Copy a page of K and V in every layer, in the order of the other work on the pool."""
        pages = [np.array([page]) for page in (source, target)]
        for array in pages:
            array.flags.writeable = False  # so that attnrt sends it to a GPU once, not for every layer
        for layer in layers:
            self._causal.copy_pages(layer, *pages, stream=self.arrays.stream)

    def attend(self, pool: PagePool, layer: int, q: Any, kv: tuple[Any, Any]) -> Any:
        """Store this step's K and V of `layer` and return its attention [rows, num_qo_heads, head_dim]."""
        begin = time.perf_counter()
        arrays, cache = self.arrays, pool.layers[layer]
        k, v = (arrays.send(role, x, self.q_dtype) for role, x in zip("kv", kv, strict=True))
        self._planned.append(k, v, cache, slots=self._slots, stream=self._stream)
        rows = arrays.send("q", q, self.q_dtype)
        out = self._planned.run(rows, cache, out=arrays.result(tuple(q.shape)), stream=self._stream)
        out = arrays.receive(out)
        self.run_seconds += time.perf_counter() - begin
        self.num_runs += 1
        return out
