# SPDX-License-Identifier: Apache-2.0
"""The plain dense reference: one sequence, contiguous K and V, softmax over a full score matrix.

It shares no code with the runtime, on purpose: `--compare` is worth something only if the two sides can disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .model import Model

# (query positions [rows, 1], key positions [1, keys]) -> bool [rows, keys]
Visible = Callable[[np.ndarray, np.ndarray], np.ndarray]
_ROWS_AT_ONCE = 512


def causal(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Each query sees the keys up to its own position."""
    return key <= query


def sinks_and_recent(sinks: int, recent: int) -> Visible:
    """Return the mask of a streaming cache: the first `sinks` keys, and the last `recent` up to the query's own."""

    def visible(query: np.ndarray, key: np.ndarray) -> np.ndarray:
        return (key <= query) & ((key < sinks) | (key > query - recent))

    return visible


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, first_position: int, visible: Visible = causal
) -> np.ndarray:
    """Softmax attention of rows at positions first_position, +1, ... over all keys 0 .. len(k) - 1.

    q [rows, num_qo_heads, head_dim]; k, v [keys, num_kv_heads, head_dim]; returns [rows, num_qo_heads, head_dim].
    Query head h reads KV head h // (num_qo_heads / num_kv_heads).
    """
    rows, qo_heads, dim = q.shape
    keys, kv_heads = k.shape[:2]
    group = qo_heads // kv_heads
    grouped = q.reshape(rows, kv_heads, group, dim).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] * np.float32(dim**-0.5)
    positions = first_position + np.arange(rows)
    mask = visible(positions[:, None], np.arange(keys)[None, :])
    scores = np.where(mask, scores, np.float32(-np.inf))
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(rows, qo_heads, dim)


class DenseCache:
    """K and V of one sequence for every layer, contiguous.

    dtype: what K and V are rounded to when they are stored. q_dtype: what q, k and v are rounded to before that. `model` is
    one in NumPy.
    """

    def __init__(
        self,
        model: Model,
        capacity: int,
        *,
        dtype: np.dtype | type = np.float32,
        q_dtype: np.dtype | type = np.float32,
    ) -> None:
        cfg = model.config
        shape = (cfg.num_layers, capacity, cfg.num_kv_heads, cfg.head_dim)
        self._model, self._q_dtype = model, q_dtype
        self._k, self._v = np.zeros(shape, dtype), np.zeros(shape, dtype)
        self.length = 0

    def extend(
        self, tokens: Sequence[int], *, logits_from: int | None = None, visible: Visible = causal
    ) -> np.ndarray:
        """Feed `tokens` after what the cache holds; return logits [n, vocab] of rows logits_from .. (None: the last)."""
        begin, end = self.length, self.length + len(tokens)

        def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            q, k, v = (x.astype(self._q_dtype, copy=False).astype(np.float32, copy=False) for x in (q, k, v))
            self._k[layer, begin:end], self._v[layer, begin:end] = k, v
            keys = self._k[layer, :end].astype(np.float32, copy=False)
            values = self._v[layer, :end].astype(np.float32, copy=False)
            blocks = [
                attention(q[r : r + _ROWS_AT_ONCE], keys, values, first_position=begin + r, visible=visible)
                for r in range(0, len(q), _ROWS_AT_ONCE)
            ]
            return np.concatenate(blocks)

        rows = np.arange(len(tokens) - 1 if logits_from is None else logits_from, len(tokens))
        self.length = end
        return self._model.forward(np.asarray(tokens), np.arange(begin, end), attend, rows)


def greedy(
    model: Model, prompt: Sequence[int], max_tokens: int, stop: frozenset[int] = frozenset()
) -> list[int]:
    """Return up to `max_tokens` greedy ids after `prompt`, the stop token included, one dense step per token."""
    cache = DenseCache(model, len(prompt) + max_tokens)
    fed: Sequence[int] = prompt
    out: list[int] = []
    while len(out) < max_tokens and not (out and out[-1] in stop):
        out.append(int(cache.extend(fed)[-1].argmax()))
        fed = out[-1:]
    return out
