# SPDX-License-Identifier: Apache-2.0
"""Batches to measure: the arrays of a shape on a device, and float64 answers at random (row, head) pairs.

The reference gathers each sampled query's own keys and applies the variant in float64; it shares nothing with the library.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from shapes import CAP, THETA, WINDOW, Shape, visible_pairs

__all__ = ["SAMPLES", "Case", "error_of"]

SAMPLES = 64
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class Case:
    """A shape with its arrays.

    Attributes
    ----------
    q : [rows, heads, head_dim]
    k, v : [pages, page, kv_heads, dim], or [tokens, kv_heads, dim] without pages
    qo_lens, lens : int32 [requests]
    qo_indptr, indptr, pages : int32
        Queries of each request; pages of each request in the order of its keys.
    """

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        self.shape, self.name, self.device = shape, shape.name, device
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.page = shape.page
        self.lens = np.array(shape.kv, np.int32)
        self.qo_lens = np.array(shape.qo_lens, np.int32)
        self.qo_indptr = np.concatenate([[0], np.cumsum(self.qo_lens)]).astype(np.int32)
        self.indptr, self.pages, self.pool = self._pages(shape)
        tokens = (self.pool, shape.page) if shape.page else (self.pool,)
        torch.manual_seed(0)
        on: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.q = torch.randn(int(self.qo_indptr[-1]), shape.heads, shape.head_dim, **on)
        self.k = torch.randn(*tokens, shape.kv_heads, shape.head_dim, **on)
        self.v = torch.randn(*tokens, shape.kv_heads, shape.dim_vo, **on)
        if shape.q_dtype != "bfloat16":
            self.q = self.q.to(DTYPES[shape.q_dtype])
        if shape.kv_dtype != "bfloat16":
            self.k, self.v = (x.to(DTYPES[shape.kv_dtype]) for x in (self.k, self.v))

    def new_out(self) -> torch.Tensor:
        """Memory for a result, in bfloat16 as of every provider."""
        rows = (len(self.q), self.heads, self.shape.dim_vo)
        return torch.empty(rows, device=self.device, dtype=torch.bfloat16)

    def _pages(self, shape: Shape) -> tuple[np.ndarray, np.ndarray, int]:
        """Pages of every request, placed at random, and how many the pool has (tokens, without pages)."""
        if not shape.page:
            indptr = np.concatenate([[0], np.cumsum(self.lens)]).astype(np.int32)
            return indptr, np.empty(0, np.int32), int(indptr[-1])
        counts = -(-self.lens // shape.page)
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        shared = shape.shared // shape.page
        pool = shared + int((counts - shared).sum())
        place = np.arange(pool) if shape.sequential else np.random.default_rng(0).permutation(pool)
        place = place.astype(np.int32)
        own = np.split(place[shared:], np.cumsum(counts - shared)[:-1])
        return indptr, np.concatenate([x for part in own for x in (place[:shared], part)]), pool

    @property
    def on(self) -> dict[str, Any]:
        """Arguments for int32 tensors beside the data."""
        return {"dtype": torch.int32, "device": self.device}

    @property
    def nbytes(self) -> int:
        """Every key and value that is read, once."""
        shape = self.shape
        per_token = shape.kv_heads * (shape.head_dim + shape.dim_vo) * self.k.element_size()
        if shape.per_head:
            keys = len(self.lens) * shape.per_head * shape.page
        elif shape.variant == "window":
            keys = int(np.minimum(self.lens, self.qo_lens + WINDOW - 1).sum())
        else:
            keys = int(self.lens.sum(dtype=np.int64)) - shape.shared * (len(self.lens) - 1)
        return keys * per_token

    @property
    def flops(self) -> int:
        """Of the pairs that are seen: two products. A mask counts as the causal triangle that it thins out."""
        shape = self.shape
        if shape.variant == "blocks":
            pairs = int(self.blocks.sum()) * shape.block**2
        elif shape.per_head:
            pairs = len(self.lens) * shape.per_head * shape.page
        else:
            pairs = visible_pairs(shape)
        return 2 * pairs * shape.heads * (shape.head_dim + shape.dim_vo)

    # ------------------------------------------------------------------------------------------- masks and sparsity

    @cached_property
    def blocks(self) -> np.ndarray:
        """bool [block rows, block columns] of a block-sparse shape; every row has at least one block."""
        side = self.shape.kv[0] // self.shape.block
        count = max(1, round(side * self.shape.kept))
        random = np.random.default_rng(2)
        found = np.zeros((side, side), bool)
        np.put_along_axis(found, random.random((side, side)).argsort(1)[:, :count], True, 1)
        return found

    @cached_property
    def parents(self) -> list[np.ndarray]:
        """Draft trees: parent of each node, counted within the request; node 0 is the root."""
        random = np.random.default_rng(3)
        return [
            np.array([-1, *(int(random.integers(max(0, i - 6), i)) for i in range(1, n))], np.int32)
            for n in self.qo_lens
        ]

    @cached_property
    def masks(self) -> list[np.ndarray]:
        """bool [qo_len, kv_len] of each request: a causal triangle with a tenth of the pairs taken out, or a draft tree."""
        found = []
        for r, (qo, kv) in enumerate(zip(self.qo_lens.tolist(), self.lens.tolist(), strict=True)):
            if self.shape.variant == "tree":
                mask = np.ones((qo, kv), bool)
                mask[:, kv - qo :] = ancestors(self.parents[r])
            else:
                mask = np.tri(qo, kv, kv - qo, dtype=bool)
                random = np.random.default_rng(r)
                holes = random.random((64, kv)) < 0.1  # each query has one of 64 patterns
                mask &= ~holes[random.integers(0, 64, qo)]
                mask[np.arange(qo), np.arange(kv - qo, kv)] = True  # a query always sees itself
            found.append(mask)
        return found

    @cached_property
    def head_pages(self) -> np.ndarray:
        """int32 [requests, kv_heads, per_head]: ordinals of the pages that each head reads, in rising order."""
        random = np.random.default_rng(4)
        count, shape = int(self.lens[0]) // self.page, (len(self.lens), self.kv_heads)
        chosen = random.random((*shape, count)).argsort(-1)[..., : self.shape.per_head]
        return np.sort(chosen, -1).astype(np.int32)

    # ------------------------------------------------------------------------------------------- the reference

    def tokens(self, request: int) -> torch.Tensor:
        """Slot of every key of a request, int64."""
        length, first = int(self.lens[request]), int(self.indptr[request])
        if not self.page:
            return torch.arange(first, first + length, device=self.device)
        ids = torch.from_numpy(self.pages[first : int(self.indptr[request + 1])].astype(np.int64))
        inside = torch.arange(self.page)
        return (ids[:, None] * self.page + inside).reshape(-1)[:length].to(self.device)

    def _seen(self, request: int, i: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(slots, positions) of the keys that query i of a request sees in a KV head."""
        shape, position = self.shape, int(self.lens[request] - self.qo_lens[request]) + i
        slots, where = self.tokens(request), torch.arange(int(self.lens[request]), device=self.device)
        if shape.per_head:
            pages = torch.from_numpy(self.head_pages[request, head].astype(np.int64)).to(self.device)
            chosen = (pages[:, None] * self.page + torch.arange(self.page, device=self.device)).reshape(-1)
            return slots[chosen], where[chosen]
        if shape.variant in ("custom", "tree"):
            keep = torch.from_numpy(self.masks[request][i]).to(self.device)
        elif shape.variant == "blocks":
            row = torch.from_numpy(self.blocks[i // shape.block]).to(self.device)
            keep = row.repeat_interleave(shape.block)
        elif shape.variant == "full":
            return slots, where
        else:
            first = position - WINDOW + 1 if shape.variant == "window" else 0
            return slots[max(first, 0) : position + 1], where[max(first, 0) : position + 1]
        return slots[keep], where[keep]

    def answer(self, row: int, head: int) -> torch.Tensor:
        """float64 [dim_vo]: the result of one query head."""
        shape, request = self.shape, int(np.searchsorted(self.qo_indptr, row, "right")) - 1
        i, kv_head = row - int(self.qo_indptr[request]), head // (self.heads // self.kv_heads)
        position = int(self.lens[request] - self.qo_lens[request]) + i
        slots, where = self._seen(request, i, kv_head)
        k, v = (x.reshape(-1, *x.shape[-2:])[slots, kv_head].double() for x in (self.k, self.v))
        q = self.q[row, head].double()
        if shape.variant == "rope":
            q, k = rotated(q[None], torch.tensor([position], device=self.device))[0], rotated(k, where)
        s = k @ q / math.sqrt(shape.head_dim)
        if shape.variant == "softcap":
            s = CAP * torch.tanh(s / CAP)
        elif shape.variant == "alibi":
            s = s + slopes(self.heads)[head] * (where - position)
        elif shape.variant in ("traced", "twin"):
            s = s + 0.01 * s * s
        elif shape.variant == "sigmoid":
            return torch.sigmoid(s - math.log(max(shape.kv))) @ v
        return torch.softmax(s, 0) @ v

    @cached_property
    def samples(self) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """(rows, heads, answers) of random pairs."""
        random = np.random.default_rng(1)
        rows, heads = random.integers(0, len(self.q), SAMPLES), random.integers(0, self.heads, SAMPLES)
        found = [self.answer(int(row), int(head)) for row, head in zip(rows, heads, strict=True)]
        return rows, heads, torch.stack(found)


def ancestors(parents: np.ndarray) -> np.ndarray:
    """bool [n, n]: whether column is an ancestor of row, or row itself."""
    found = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            found[i] |= found[parent]
    return found


def slopes(heads: int) -> list[float]:
    """ALiBi's slopes for a power of two of heads."""
    return [2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)]


def rotated(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of float64 rows [n, dim] at positions [n], number d paired with d + dim / 2."""
    half = x.shape[-1] // 2
    turn = THETA ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = position[:, None].double() * turn
    a, b = x[:, :half], x[:, half:]
    c, s = angle.cos(), angle.sin()
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def error_of(case: Case, out: torch.Tensor) -> float:
    """Relative error over the samples; inf where something was not written or the shape is wrong."""
    rows, heads, right = case.samples
    if tuple(out.shape) != (len(case.q), case.heads, case.shape.dim_vo):
        return float("inf")
    picked = [torch.from_numpy(x).to(out.device) for x in (rows, heads)]
    error = float((out[picked[0], picked[1]].double() - right).norm() / right.norm())
    return error if math.isfinite(error) else float("inf")
