# SPDX-License-Identifier: Apache-2.0
"""Batches in a pool of random pages, as torch tensors on the GPU; results as host arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import attnrt as at
from attnrt import testing
from attnrt.dtypes import as_dtype

v = at.variants
SIZE = 16


def spec(**changes: Any) -> at.AttentionSpec:
    base = {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "q_dtype": "bfloat16",
        "variant": v.causal(),
    }
    return at.AttentionSpec(**{**base, **changes})


def spec_128(**changes: Any) -> at.AttentionSpec:
    """The same with head_dim 128."""
    return spec(**{"head_dim": 128, **changes})


def to_gpu(x: np.ndarray) -> Any:
    """A torch tensor of the same bits."""
    import torch

    kind = getattr(torch, as_dtype(x.dtype).name)
    bits = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize]
    return torch.from_numpy(np.ascontiguousarray(x).view(bits)).cuda().view(kind)


def to_host(x: Any) -> np.ndarray:
    """The bits of a torch tensor as a NumPy array."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(bits).cpu().numpy().view(as_dtype(str(x.dtype).removeprefix("torch.")).numpy)


@dataclass
class World:
    """A pool of pages full of numbers, and q for up to ``rows`` rows, on host and GPU; requests choose pages of it."""

    spec: Any
    rows: int = 48
    pages: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        s, rng = self.spec, np.random.default_rng(self.seed)
        self.rng = rng

        def draw(*shape: int, dtype: str) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32).astype(as_dtype(dtype).numpy)

        self.q = draw(self.rows, s.num_qo_heads, s.head_dim, dtype=s.q_dtype)
        self.kv = tuple(
            draw(self.pages, SIZE, s.num_kv_heads, dim, dtype=s.kv_dtype)
            for dim in (s.head_dim, s.head_dim_vo)
        )
        self.gpu_q, self.gpu_kv = to_gpu(self.q), tuple(to_gpu(x) for x in self.kv)

    def lists(self, kv_lens: Any) -> list[np.ndarray]:
        """Pages of each request; every other begins with the same pages as the one before."""
        found: list[np.ndarray] = []
        for i, n in enumerate(kv_lens):
            ids = self.rng.permutation(self.pages)[: -(-n // SIZE)].astype(np.int32)
            if i % 2 and found:
                shared = min(len(ids), len(found[-1])) // 2
                ids[:shared] = found[-1][:shared]
            found.append(ids)
        return found

    def index(self, qo_lens: Any, kv_lens: Any) -> Any:
        lists = self.lists(kv_lens)
        indptr = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int32)
        qo_indptr = np.concatenate([[0], np.cumsum(qo_lens)]).astype(np.int32)
        ids = np.concatenate([np.empty(0, np.int32), *lists])
        return at.formats.paged(qo_indptr, indptr, ids, np.asarray(kv_lens, np.int32), SIZE)

    def results(self, rows: int) -> tuple[Any, Any]:
        """out and lse full of NaN."""
        import torch

        s = self.spec
        kind = getattr(torch, s.out_dtype)
        out = torch.full((rows, s.num_qo_heads, s.head_dim_vo), float("nan"), device="cuda", dtype=kind)
        return out, torch.full((rows, s.num_qo_heads), float("nan"), device="cuda")

    def fresh(self, backend: str, index: Any, **attention: Any) -> testing.Result:
        """What an attention of its own gives, eagerly, checked against float64."""
        import torch

        attn = at.Attention(self.spec, backend=backend, device="cuda", **attention)
        plan = attn.plan(index, stream=torch.cuda.current_stream())  # CuPy may be loaded by another test
        out, lse = self.results(plan.num_rows)
        if plan.num_rows == 0:
            return testing.Result(out=to_host(out), lse=to_host(lse))
        attn.run(self.gpu_q[: plan.num_rows], self.gpu_kv, out=out, lse=lse)
        found = testing.Result(out=to_host(out), lse=to_host(lse))
        testing.check(plan, self.q[: plan.num_rows], self.kv, found.out, found.lse)
        return found


def head(result: testing.Result, rows: int) -> testing.Result:
    return testing.Result(out=result.out[:rows], lse=result.lse[:rows])
