# SPDX-License-Identifier: Apache-2.0
"""Decode steps loaded by one call (attnrt/step.py), on a GPU: the bits of the long way, eager and by one captured graph."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt as at

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

PAGES, SIZE, REQUESTS = 700, 16, 16


def batch(rng, longest):
    """A decode step of many requests over random pages."""
    lens = rng.integers(0, longest, REQUESTS).astype(np.int32)
    counts = -(-lens // SIZE)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids = rng.permutation(PAGES)[: indptr[-1]].astype(np.int32)
    return at.formats.paged(np.arange(REQUESTS + 1, dtype=np.int32), indptr, ids, lens, SIZE)


@pytest.mark.parametrize("how", ["eager", "limits", "graph"])
def test_the_bits_of_the_long_way(how):
    spec = at.AttentionSpec(
        num_qo_heads=8, num_kv_heads=2, head_dim=128, q_dtype="bfloat16", variant=at.variants.causal()
    )
    limits = None if how == "eager" else at.Limits(REQUESTS, REQUESTS, 4000, num_pages=PAGES, max_qo_len=1)
    attn, other = (at.Attention(spec, backend="nvrtc", device="cuda", limits=limits) for _ in "ab")
    if attn._runtime.stepper is None:
        pytest.skip("attnrt._step_native is not built")
    other._runtime.stepper = None
    q = torch.randn(REQUESTS, 8, 128, device="cuda", dtype=torch.bfloat16)
    kv = tuple(torch.randn(PAGES, SIZE, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    out, want = torch.empty_like(q), torch.empty_like(q)
    rng = np.random.default_rng()

    def run():
        attn.run(q, kv, out=out)

    replay, quick = run, 0
    for step in range(40):
        index = batch(rng, 600 if step % 3 else 60)
        attn.plan(index)
        other.plan(index)
        quick += not attn._runtime.stepper._stale
        if how == "graph" and step == 2:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            replay = graph.replay
            attn.plan(index)  # the capture was on another stream
        out.fill_(float("nan"))
        replay()
        other.run(q, kv, out=want)
        assert torch.equal(out, want), step
    assert quick > 25
