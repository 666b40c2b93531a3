# SPDX-License-Identifier: Apache-2.0
"""Results that share memory with what a run reads are refused before anything is written; what only interleaves is taken."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.device import CPU
from attnrt.operands import Rules, read_form
from attnrt.overlap import Extent, check_apart, check_own
from attnrt.repeat import Quick, run_again
from attnrt.tensor import TensorView, signature

ROWS, HEADS, DIM = 5, 4, 16


@pytest.fixture
def planned(backend):
    spec = at.AttentionSpec(
        num_qo_heads=HEADS, num_kv_heads=2, head_dim=DIM, q_dtype="float32", variant=at.variants.causal()
    )
    batch = testing.lay_out(testing.make_case(spec, [2, 3], [20, 7], seed=1), page_size=4)
    attn = at.Attention(spec, backend=backend)
    attn.plan(batch.index)
    return attn, batch


def rows_of(flat, start=0):
    return flat[start : start + ROWS * HEADS * DIM].reshape(ROWS, HEADS, DIM)


def lse_of(flat):
    return flat[: ROWS * HEADS].reshape(ROWS, HEADS)


@pytest.mark.parametrize("label", ["out", "lse"])
@pytest.mark.parametrize("other", ["k", "v", "q"])
def test_results_in_what_is_read(planned, label, other):
    attn, batch = planned
    q, k, v = np.zeros(2 * batch.q.size, np.float32), *(x.copy() for x in batch.kv)
    q_rows = rows_of(q, 7)
    q_rows[...] = batch.q
    flat = {"q": q, "k": k.reshape(-1), "v": v.reshape(-1)}[other]
    result = rows_of(flat) if label == "out" else lse_of(flat[8:])
    before = [x.copy() for x in (q, k, v)]
    for _ in range(2):  # a refused call is not remembered as a good one
        with pytest.raises(at.ArgumentError, match=f"^{label} must not overlap {other}") as caught:
            attn.run(q_rows, (k, v), **{label: result})
        assert caught.value.label == label
    assert all(a.tobytes() == b.tobytes() for a, b in zip((q, k, v), before, strict=True)), (
        "a refused run wrote"
    )
    want = attn.run(batch.q, batch.kv)
    assert attn.run(q_rows, (k, v), out=np.empty_like(batch.q)).tobytes() == want.tobytes()


def test_results_in_each_other_and_in_themselves(planned):
    attn, batch = planned
    flat = np.full(ROWS * HEADS * DIM, 7.0, np.float32)
    with pytest.raises(at.ArgumentError, match="lse must not overlap out"):
        attn.run(batch.q, batch.kv, out=rows_of(flat), lse=lse_of(flat[20:]))
    folded = np.lib.stride_tricks.as_strided(flat, (ROWS, HEADS, DIM), (4 * DIM, 4 * DIM, 4))
    with pytest.raises(at.ArgumentError, match="out must not overlap itself"):
        attn.run(batch.q, batch.kv, out=folded)
    assert (flat == 7.0).all()


def test_the_same_form_at_other_addresses_is_looked_at_again(planned):
    attn, batch = planned
    k = batch.kv[0].copy()
    attn.run(batch.q, (k, batch.kv[1]), out=np.empty_like(batch.q))
    with pytest.raises(at.ArgumentError, match="out must not overlap k"):
        attn.run(batch.q, (k, batch.kv[1]), out=rows_of(k.reshape(-1)))


def test_q_itself_and_what_interleaves_are_taken(planned):
    attn, batch = planned
    want, want_lse = attn.run(batch.q, batch.kv, return_lse=True)
    fused = np.zeros((ROWS, 2, HEADS, DIM), np.float32)
    fused[:, 0] = batch.q
    attn.run(fused[:, 0], batch.kv, out=fused[:, 1])
    assert fused[:, 0].tobytes() == batch.q.tobytes() and fused[:, 1].tobytes() == want.tobytes()
    q, lse = batch.q.copy(), np.empty((ROWS, HEADS), np.float32)
    assert attn.run(q, batch.kv, out=q, lse=lse) is q
    assert q.tobytes() == want.tobytes() and lse.tobytes() == want_lse.tobytes()


def test_against_a_loop_over_bytes():
    """Random strided pairs in one buffer: refused exactly where they have a byte in common."""
    rng = np.random.default_rng(5)
    memory, found = np.zeros(400, np.float32), set()
    for _ in range(400):
        pair, bytes_of = [], []
        for _ in range(2):
            shape = tuple(rng.integers(1, 4, 2))
            steps = tuple(int(s) for s in rng.integers(-6, 7, 2))
            start = int(rng.integers(30, 60))
            pair.append(np.lib.stride_tricks.as_strided(memory[start:], shape, [4 * s for s in steps]))
            bytes_of.append({start + i * steps[0] + j * steps[1] for i, j in np.ndindex(*shape)})
        other, mine = (TensorView(x) for x in pair)
        common = bool(bytes_of[0] & bytes_of[1])
        found.add(common)
        extents = (None, Extent.of(other), None, Extent.of(mine), None)
        try:
            check_apart(extents, (0, other.ptr, 0, mine.ptr, 0))
            assert not common
        except at.ArgumentError:
            assert common
        if len(bytes_of[1]) < mine.shape[0] * mine.shape[1]:
            with pytest.raises(at.ArgumentError, match="out must not overlap itself"):
                check_own(mine, "out")
    assert found == {True, False}


def test_the_short_way_looks_at_new_addresses_too():
    """The form has run; its next run brings an out that lies in k, and is not launched."""
    spec = at.AttentionSpec(num_qo_heads=HEADS, num_kv_heads=2, head_dim=DIM, q_dtype="float32")
    q, out = np.zeros((2, ROWS, HEADS, DIM), np.float32)
    k, v = np.zeros((2, 40, 2, DIM), np.float32)
    rules, launched = Rules.of(spec, CPU), []
    quick = Quick(
        form=read_form(rules, q, k, v, out, None),
        repeat=lambda addresses, scale, stream: launched.append(addresses),
        current=lambda: 0,
        unit=4,
        epoch=1,
    )
    runtime = SimpleNamespace(
        shared_kv=False,
        sm_scale=1.0,
        epoch=1,
        quick={signature(q, k, v, out, None)[0]: quick},
        tenant=SimpleNamespace(loaded=None, ordered={0}, run_stream=0),
    )
    for _ in range(2):
        with pytest.raises(at.ArgumentError, match="out must not overlap k"):
            run_again(runtime, q, (k, v), None, (rows_of(k.reshape(-1)), None, False), None, None)
    assert not launched
    assert run_again(runtime, q, (k, v), None, (out, None, False), None, None) is out
    assert len(launched) == 1
