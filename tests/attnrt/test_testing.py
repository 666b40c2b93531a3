# SPDX-License-Identifier: Apache-2.0
"""The oracle against formulas written out here, and the check against planted errors."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt as at
from attnrt import testing

v = at.variants
H, K, D, DV = 4, 2, 16, 24


def spec_of(*variants, **changes):
    fields = {"num_qo_heads": H, "num_kv_heads": K, "head_dim": D, "head_dim_vo": DV, "q_dtype": "float32"}
    return at.AttentionSpec(**(fields | changes), variant=variants)


def formula(case, request, logits=lambda s, p, j, h: s, visible=lambda p, j: True, extra=None, scale=None):
    """out, lse of one request, one number at a time; query i stands at kv_len - qo_len + i, key j at j."""
    q, keys, values = (np.asarray(x[request], np.float64) for x in (case.q, case.k, case.v))
    out, lse = np.zeros((len(q), H, DV)), np.full((len(q), H), -np.inf)
    for i in range(len(q)):
        p = len(keys) - len(q) + i
        seen = [j for j in range(len(keys)) if visible(p, j)]
        for h in range(H):
            if not seen:
                continue
            dots = [
                float(q[i, h] @ keys[j, h // (H // K)]) * (D**-0.5 if scale is None else scale) for j in seen
            ]
            final = np.array([logits(s, p, j, h) for s, j in zip(dots, seen, strict=True)])
            terms = np.exp(final)
            total = terms.sum() + (0.0 if extra is None else np.exp(extra[h]))
            rows = np.array([values[j, h // (H // K)] for j in seen])
            out[i, h], lse[i, h] = terms @ rows / total, np.log(total)
    return out, lse


SLOPES = np.array([0.25, 0.0625, 0.015625, 0.00390625], np.float32)
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
CASES = {
    "full": ((v.full(),), {}, {}),
    "causal": ((v.causal(),), {"visible": lambda p, j: j <= p}, {}),
    "window": ((v.sliding_window(3),), {"visible": lambda p, j: p - 3 <= j <= p}, {}),
    "softcap": (
        (v.causal(), v.softcap(0.75)),
        {"visible": lambda p, j: j <= p, "logits": lambda s, p, j, h: 0.75 * np.tanh(s / 0.75)},
        {},
    ),
    "alibi": (
        (v.alibi(),),
        {"logits": lambda s, p, j, h: s + float(SLOPES[h]) * (j - p)},
        {"alibi_slopes": SLOPES},
    ),
    "sinks": (
        (v.causal(), v.sink_logits()),
        {"visible": lambda p, j: j <= p, "extra": SINKS},
        {"sinks": SINKS},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_oracle_is_the_formula(name):
    variants, how, params = CASES[name]
    spec = spec_of(*variants)
    case = testing.make_case(spec, [3, 1, 5, 2], [9, 4, 3, 0], seed=3, **params)
    batch = testing.lay_out(case, page_size=3)
    out, lse = testing.oracle(spec, batch.index, batch.q, batch.kv, **batch.params)
    want = [formula(case, r, **how) for r in range(4)]
    np.testing.assert_allclose(out, np.concatenate([w[0] for w in want]), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(lse, np.concatenate([w[1] for w in want]), rtol=1e-6, atol=1e-9)


def test_oracle_rotates():
    spec = spec_of(v.rope(8, theta=100.0))
    case = testing.make_case(spec, [2], [5], seed=4)
    batch = testing.lay_out(case)

    def turned(x, position):
        y = np.asarray(x, np.float64).copy()
        for d in range(4):
            angle = position * 100.0 ** (-2 * d / 8)
            y[..., d] = x[..., d] * np.cos(angle) - x[..., d + 4] * np.sin(angle)
            y[..., d + 4] = x[..., d + 4] * np.cos(angle) + x[..., d] * np.sin(angle)
        return y

    q = np.stack([turned(case.q[0][i], 3 + i) for i in range(2)])
    k = np.stack([turned(case.k[0][j], j) for j in range(5)])
    plain = testing.Case(spec=spec_of(v.full()), q=(q,), k=(k,), v=case.v)
    want, _ = formula(plain, 0)
    out, _ = testing.oracle(spec, batch.index, batch.q, batch.kv)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-7)


def test_oracle_of_sigmoid_adds_weights():
    spec = spec_of(v.sigmoid(), sm_scale=0.5)
    case = testing.make_case(spec, [2], [4], seed=5, sigmoid_scale=1.5, sigmoid_bias=-0.25)
    batch = testing.lay_out(case)
    out, _ = testing.oracle(spec, batch.index, batch.q, batch.kv, **batch.params)
    want = np.zeros((2, H, DV))
    for i in range(2):
        for h in range(H):
            s = case.k[0][:, h // 2].astype(float) @ case.q[0][i, h].astype(float) * 0.5
            want[i, h] = 1 / (1 + np.exp(-(1.5 * s - 0.25))) @ case.v[0][:, h // 2].astype(float)
    np.testing.assert_allclose(out, want, rtol=1e-6)


@pytest.fixture(scope="module")
def right():
    """A planned case with float32 results that are right to float32 rounding."""
    spec = spec_of(v.causal())
    case = testing.make_case(spec, [4, 1], [30, 300], seed=6)
    batch = testing.lay_out(case)
    plan = at.make_plan(spec, batch.index, at.Traits.of("cpu"))
    out, lse = testing.oracle(spec, batch.index, batch.q, batch.kv)
    return plan, batch, out.astype(np.float32), lse.astype(np.float32)


def test_check_passes_right_results(right):
    plan, batch, out, lse = right
    assert testing.check(plan, batch.q, batch.kv, out, lse)["max_error"] < 1e-6


MUTANTS = {
    "one number off by 1e-3": lambda out, lse: out.__setitem__((2, 1, 3), out[2, 1, 3] + 1e-3),
    "NaN": lambda out, lse: out.__setitem__((0, 0, 0), np.nan),
    "two heads swapped": lambda out, lse: out.__setitem__((slice(None), [0, 1]), out[:, [1, 0]]),
    "a row left empty": lambda out, lse: out.__setitem__(4, 0),
    "lse in base 2": lambda out, lse: lse.__imul__(1.4426950408889634),
    "lse one ulp of bfloat16 off": lambda out, lse: lse.__setitem__((1, 1), lse[1, 1] * (1 + 2**-8)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_check_sees(right, name):
    plan, batch, out, lse = right
    out, lse = out.copy(), lse.copy()
    MUTANTS[name](out, lse)
    with pytest.raises(AssertionError, match=r"row \d|shape"):
        testing.check(plan, batch.q, batch.kv, out, lse)


def test_check_names_the_worst_row_and_head(right):
    plan, batch, out, lse = right
    out = out.copy()
    out[3, 2, 5] += 0.5
    out[1, 1, 1] += 0.25
    with pytest.raises(AssertionError, match="row 3, head 2, dim 5"):
        testing.check(plan, batch.q, batch.kv, out, lse)


def test_check_sees_a_dropped_tile_in_bfloat16():
    spec = spec_of(v.causal(), q_dtype="bfloat16")
    case = testing.make_case(spec, [1], [640], seed=7)
    batch = testing.lay_out(case)
    short = testing.lay_out(testing.Case(spec=spec, q=case.q, k=(case.k[0][:-64],), v=(case.v[0][:-64],)))
    plan = at.make_plan(spec, batch.index, at.Traits.of("cpu"))
    wrong, _ = testing.oracle(spec, short.index, short.q, short.kv)
    with pytest.raises(AssertionError, match="out is wrong"):
        testing.check(plan, batch.q, batch.kv, wrong.astype(batch.q.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cases_go_through_files(tmp_path, dtype):
    spec = spec_of(v.causal(), v.softcap(5.0), q_dtype=dtype, kv_dtype="float8_e4m3fn")
    case = testing.make_case(spec, [2, 0], [3, 4], seed=8, softcap=4.0)
    testing.save_case(str(tmp_path / "case.npz"), case)
    back = testing.load_case(str(tmp_path / "case.npz"), (v.causal(), v.softcap(5.0)))
    assert back.spec == spec and back.params == {"softcap": 4.0}
    for name in ("q", "k", "v"):
        for a, b in zip(getattr(case, name), getattr(back, name), strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("form", ["plain", "interleaved", "strided", "transposed", "pool"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_layouts_hold_the_same_keys(form, kv_layout):
    spec = spec_of(v.causal(), kv_layout=kv_layout)
    case = testing.make_case(spec, [1, 2], [11, 5], seed=9)
    batch = testing.lay_out(case, page_size=4, form=form)
    k, values = batch.index.gather(batch.kv, 2, 1, kv_layout=kv_layout) if form != "x" else (None, None)
    assert k.tobytes() == case.k[1][:, 1].tobytes() and values.tobytes() == case.v[1][:, 1].tobytes()
    assert np.isnan(batch.kv[0]).any(), "nothing is poisoned"


@pytest.mark.parametrize(("qo", "kv"), [([1, 2], [3]), ([], [3]), (np.ones(2, int), [3, 4, 5])])
def test_a_case_has_as_many_lengths_of_both(qo, kv):
    with pytest.raises(
        at.ArgumentError, match=f"kv_lens must have qo_lens's {len(qo)} entries; got {len(kv)}"
    ):
        testing.make_case(spec_of(), qo, kv)
