# SPDX-License-Identifier: Apache-2.0
"""torch.compile sees one opaque operator, and its results are run()'s."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import attnrt as at

torch = pytest.importorskip("torch")
operator = pytest.importorskip("attnrt.integrations.torch").operator

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(device, **changes):
    base = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32, "variant": at.variants.causal()}
    q_dtype = "float32" if device == "cpu" else "float16"
    attn = at.Attention(at.AttentionSpec(**{**base, "q_dtype": q_dtype, **changes}), device=device)
    dtype = getattr(torch, q_dtype)
    plan(attn, [5, 20])
    return (
        attn,
        torch.randn(2, 4, 32, device=device, dtype=dtype),
        [torch.randn(8, 16, 2, 32, device=device, dtype=dtype) for _ in "kv"],
    )


def plan(attn, kv_lens):
    pages = [-(-n // 16) for n in kv_lens]
    indptr = np.r_[0, np.cumsum(pages)].astype(np.int32)
    attn.plan(at.formats.paged([0, 1, 2], indptr, np.arange(indptr[-1]), kv_lens, 16))


@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_without_breaks(device):
    attn, q, kv = make(device)
    attend = operator(attn)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=keep)
    def step(q, k, v):
        out, lse = attend(q * 2, (k, v), return_lse=True)
        return out + 1, lse

    out, lse = step(q, *kv)
    want, want_lse = attn.run(q * 2, tuple(kv), return_lse=True)
    torch.testing.assert_close(out, want + 1, rtol=0, atol=0)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=0)
    calls = [
        node for node in graphs[0].graph.nodes if node.op == "call_function" and "attnrt" in str(node.target)
    ]
    assert len(graphs) == 1 and len(calls) == 1
    plan(attn, [17, 3])  # another plan, the same graph
    torch.testing.assert_close(step(q, *kv)[0], attn.run(q * 2, tuple(kv)) + 1, rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_registration(device):
    attn, q, (k, v) = make(device)
    number = id(attn)
    operator(attn)
    torch.library.opcheck(
        torch.ops.attnrt.run.default, (q, k, v, number, True), test_utils=("test_schema", "test_faketensor")
    )


def test_shared_kv_and_the_end_of_an_attention():
    attn, q, (k, _) = make("cpu", num_kv_heads=2, head_dim_vo=16, shared_kv=True, sm_scale=0.1)
    attend = operator(attn)
    torch.testing.assert_close(attend(q, k), attn.run(q, k), rtol=0, atol=0)
    with pytest.raises(at.ArgumentError, match="one tensor with shared_kv"):
        attend(q, (k, k))
    del attn
    gc.collect()
    with pytest.raises(at.PlanError, match="must live as long"):
        attend(q, k)
