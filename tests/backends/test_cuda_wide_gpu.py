# SPDX-License-Identifier: Apache-2.0
"""On a GPU the wide kernel gives every row the bits of the decode kernel: of drafts, and of requests that share keys."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.backends.cuda import tables
from attnrt.backends.cuda.select import has_items
from attnrt.scheduler.base import Traits

sys.path.insert(0, str(Path(__file__).parent))
from gpu_arrays import spec_128 as spec

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs sm_90", allow_module_level=True)
pytestmark = pytest.mark.gpu

v = at.variants


def one_crew(traits: Traits) -> Traits:
    """Items of any rows for one kernel (but the Hopper kernel's, whose bits are others)."""
    return replace(traits, teams=tuple(team for team in traits.teams if team.name != tables.WIDE))


@pytest.fixture
def decode_only(monkeypatch):
    """Switches the wide kernel off for attentions that come after the call."""
    own = tables.traits_for
    return lambda: monkeypatch.setattr(tables, "traits_for", lambda *of: one_crew(own(*of)))


VARIANTS = {
    "window": (v.causal(), v.sliding_window(37)),
    "alibi": (v.causal(), v.alibi()),
    "sigmoid": (v.causal(), v.sigmoid()),
    "all": (v.causal(), v.sliding_window(300), v.softcap(20.0), v.sink_logits(-1.0)),
}
DRAFTS = ([5, 1, 13, 0, 16, 8], [3300, 77, 30, 9, 1400, 0])


@pytest.mark.parametrize(
    "change", [{}, {"head_dim": 64, "q_dtype": "float16"}, *({"variant": x} for x in VARIANTS.values())]
)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_drafts(change, page_size, decode_only):
    s = spec(**change)
    case = testing.make_case(s, *DRAFTS)
    batch = testing.lay_out(case, page_size=page_size)
    mine = testing.run_batch(case, batch, "nvrtc", device="cuda")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
    testing.compare(s, answer, mine.out, mine.lse)
    decode_only()
    testing.same(mine, testing.run_batch(case, batch, "nvrtc", device="cuda"), "wide and decode kernel")


@pytest.mark.parametrize(
    "oracle", ["poison", "placement", "layout_invariance", "batch_invariance", "sentinel"]
)
def test_bitwise(oracle):
    s = spec(variant=(v.causal(), v.softcap(20.0)), num_qo_heads=6)
    getattr(testing, oracle)(testing.make_case(s, [3, 9, 0, 5, 1], [900, 40, 9, 0, 2]), "nvrtc")


def shared(rows, prefix, suffix, s, page=16):
    """Requests of one query that begin with the same pages."""
    common, own = prefix // page, -(-(prefix % page + suffix) // page)
    pages = [[*range(common), *range(common + i * own, common + (i + 1) * own)] for i in range(rows)]
    indptr = np.arange(rows + 1, dtype=np.int32) * (common + own)
    lens = np.full(rows, prefix + suffix, np.int32)
    ids = np.concatenate(pages).astype(np.int32)
    return at.formats.paged(np.arange(rows + 1, dtype=np.int32), indptr, ids, lens, page), common + rows * own


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("rows", "prefix", "heads"),
    [(20, 1000, (4, 4)), (64, 5000, (8, 8)), (64, 20011, (8, 2)), (70, 2048, (4, 1)), (200, 9000, (2, 2))],
)
def test_shared_prefix(rows, prefix, heads, captured):
    """The bits of the flat batch, which the decode kernel runs; captured under one plan and replayed under another."""
    s = spec(num_qo_heads=heads[0], num_kv_heads=heads[1])
    flat, pages = shared(rows, prefix, 128, s)
    q = torch.randn(rows, heads[0], 128, device="cuda", dtype=torch.bfloat16)
    kv = tuple(torch.randn(pages, 16, heads[1], 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    attn = at.Attention(s, backend="nvrtc", device="cuda")
    assert not has_items(attn.plan(flat), tables.WIDE)
    expected = attn.run(q, kv, return_lse=True)
    index = replace(at.formats.share(flat), flat=None)  # shared, whether or not it pays
    if captured:
        limits = at.Limits(
            rows, rows, len(flat.indices) + 4096 * rows, max_parts=len(index.parts), num_pages=pages
        )
        attn = at.Attention(s, backend="nvrtc", device="cuda", limits=limits)
        out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
        attn.plan(flat)
        attn.run(q, kv, out=out, lse=lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attn.run(q, kv, out=out, lse=lse)
        out.fill_(7)
        plan = attn.plan(index)
        graph.replay()
        torch.cuda.synchronize()
        result = out, lse
    else:
        plan = attn.plan(index)
        result = attn.run(q, kv, return_lse=True)
    assert has_items(plan, tables.WIDE)
    for mine, other in zip(result, expected, strict=True):
        assert torch.equal(mine, other)
