# SPDX-License-Identifier: Apache-2.0
"""On a GPU the decode kernel gives every row the bits of the tile kernel, so neither plan nor limits can change a result."""

from __future__ import annotations

from dataclasses import replace

import pytest

import attnrt as at
from attnrt import testing
from attnrt.backends.cuda import kernel, tables

v = at.variants
pytestmark = pytest.mark.gpu

DECODE = ([1, 1, 2, 0, 1, 1, 2, 1], [1400, 77, 70, 9, 0, 1, 2, 3000])
MIXED = ([1, 30, 70, 0, 3, 1, 5, 1], [1400, 77, 70, 9, 0, 1, 2, 600])


def one_crew(traits):
    """Items of any rows for one kernel (but the Hopper kernel's, whose bits are others)."""
    return replace(traits, teams=tuple(team for team in traits.teams if team.name != tables.WIDE))


def both(monkeypatch, lengths, *, variant=None, page_size=16, **changes):
    base = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128, "q_dtype": "bfloat16"}
    spec = at.AttentionSpec(**{**base, "variant": variant or v.causal(), **changes})
    case = testing.make_case(spec, *lengths)
    batch = testing.lay_out(case, page_size=page_size)
    answer = testing.oracle_answer(spec, batch.index, batch.q, batch.kv, **batch.params)
    results = [testing.run_batch(case, batch, "nvrtc", device="cuda")]  # each item by its rows
    own = tables.traits_for
    monkeypatch.setattr(tables, "traits_for", lambda *of: one_crew(own(*of)))
    for decode in (True, False):
        monkeypatch.setattr(kernel, "plan_decodes", lambda plan, decode=decode: decode)
        results.append(testing.run_batch(case, batch, "nvrtc", device="cuda"))
        testing.compare(spec, answer, results[-1].out, results[-1].lse)
    testing.same(results[0], results[1], "two kernels and decode")
    testing.same(results[1], results[2], "decode and tile kernel")


@pytest.mark.parametrize(
    "variant",
    [
        v.full(),
        (v.causal(), v.sliding_window(37)),
        (v.causal(), v.softcap(5.0)),
        (v.causal(), v.alibi()),
        (v.causal(), v.sigmoid()),
        (v.causal(), v.sliding_window(300), v.softcap(20.0), v.sink_logits(-1.0)),
    ],
    ids=["full", "window", "softcap", "alibi", "sigmoid", "all"],
)
def test_variants(monkeypatch, variant):
    both(monkeypatch, DECODE, variant=variant)


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "passes"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 544])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_layouts(monkeypatch, lengths, page_size, kv_layout):
    both(monkeypatch, lengths, page_size=page_size, kv_layout=kv_layout)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float16", None, None),
        ("bfloat16", "float8_e4m3fn", None),
        ("float16", "float8_e5m2", "float32"),
        ("float8_e4m3fn", None, "bfloat16"),
        ("float8_e5m2", "float8_e4m3fn", "float32"),
    ],
    ids=["fp16", "e4m3", "e5m2", "q e4m3", "q e5m2"],
)
def test_types(monkeypatch, dtypes, head_dim):
    q, kv, out = dtypes
    both(monkeypatch, DECODE, q_dtype=q, kv_dtype=kv, out_dtype=out, head_dim=head_dim)


@pytest.mark.parametrize("heads", [(3, 1), (9, 3), (28, 4), (13, 1), (16, 1), (4, 4)])
def test_groups(monkeypatch, heads):
    both(monkeypatch, MIXED, num_qo_heads=heads[0], num_kv_heads=heads[1])
