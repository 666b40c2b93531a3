# SPDX-License-Identifier: Apache-2.0
"""Decoding with PyTorch: one captured graph of append and attention, replayed for every step and every batch.

    python -m attnrt.examples.torch_decode [--steps 40]

Requests of different lengths share a pool of pages. Each step plans on the host (which is all that changes) and replays.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import attnrt as at

PAGE, REQUESTS, POOL = 16, 8, 512


class Pages:
    """Which pages hold which request's keys."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)
        self.free = list(range(POOL))
        self.pages = [[self.free.pop() for _ in range(-(-n // PAGE))] for n in lengths]

    def grow(self) -> np.ndarray:
        """One more token for each request; the slots where they go."""
        for pages, n in zip(self.pages, self.lengths, strict=True):
            if n % PAGE == 0:
                pages.append(self.free.pop())
        self.lengths += 1
        last = self.lengths - 1
        return np.array([p[n // PAGE] * PAGE + n % PAGE for p, n in zip(self.pages, last, strict=True)])

    def index(self) -> at.formats.BlockSparse:
        """Where this step's queries find their keys."""
        indptr = np.cumsum([0, *map(len, self.pages)])
        return at.formats.paged(
            np.arange(REQUESTS + 1), indptr, np.concatenate(self.pages), self.lengths, PAGE
        )


def decode(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the last step, by the replayed graph and eagerly."""
    spec = at.AttentionSpec(
        num_qo_heads=32, num_kv_heads=8, head_dim=128, q_dtype="bfloat16", variant=at.variants.causal()
    )
    limits = at.Limits(
        max_requests=REQUESTS, max_qo_tokens=REQUESTS, max_index_entries=POOL, num_pages=POOL, max_qo_len=1
    )
    attn = at.Attention(spec, device="cuda", limits=limits)
    made: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    kv = tuple(torch.randn(POOL, PAGE, 8, 128, **made) for _ in "kv")
    q, out = torch.empty(REQUESTS, 32, 128, **made), torch.empty(REQUESTS, 32, 128, **made)
    k, v = (torch.empty(REQUESTS, 8, 128, **made) for _ in "kv")
    slots = torch.empty(REQUESTS, dtype=torch.int64, device="cuda")
    pages, graph = Pages([5, 100, 31, 64, 16, 700, 1, 333]), torch.cuda.CUDAGraph()
    for step in range(steps):
        for x in (q, k, v):  # what a model would write
            x.normal_()
        slots.copy_(torch.from_numpy(pages.grow()))
        attn.plan(pages.index())
        if step < 2:  # the first step compiles, the second is captured
            if step == 1:
                with torch.cuda.graph(graph):
                    attn.append(k, v, kv, slots=slots)
                    attn.run(q, kv, out=out)
            attn.append(k, v, kv, slots=slots)
            attn.run(q, kv, out=out)
        else:
            graph.replay()
    return out, attn.run(q, kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    replayed, eager = decode(parser.parse_args().steps)
    print("the graph's bits are those of an eager run:", torch.equal(replayed, eager))


if __name__ == "__main__":
    main()
