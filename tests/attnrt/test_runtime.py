# SPDX-License-Identifier: Apache-2.0
"""The run's checks: what differs from the plan or the spec raises a typed error that names it, and nothing is written."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import testing

v = at.variants


def make(backend, **changes):
    fields = {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "q_dtype": "float32",
        "variant": v.causal(),
    }
    spec = at.AttentionSpec(**(fields | changes))
    case = testing.make_case(spec, [2, 3], [20, 7], seed=1)
    batch = testing.lay_out(case, page_size=4)
    attn = at.Attention(spec, backend=backend)
    return attn, case, batch


@pytest.fixture
def planned(backend):
    attn, _, batch = make(backend)
    attn.plan(batch.index)
    return attn, batch


def refused(attn, batch, error, match, **changes):
    """Run with changed arguments: the error names them, results keep their bits, and the next run is right."""
    out, lse = np.full((5, 4, 16), 7.0, np.float32), np.full((5, 4), 7.0, np.float32)
    arguments = {"q": batch.q, "kv": batch.kv, "out": out, "lse": lse} | changes
    with pytest.raises(error, match=match) as caught:
        attn.run(arguments.pop("q"), arguments.pop("kv"), **arguments)
    assert isinstance(caught.value, at.AttnrtError) and caught.value.label and caught.value.rule
    assert (out == 7.0).all() and (lse == 7.0).all(), "a refused run wrote"
    plan = attn._runtime.tenant.loaded.plan
    good, good_lse = attn.run(batch.q, batch.kv, return_lse=True)
    testing.check(plan, batch.q, batch.kv, good, good_lse)


K, V = "kv", "kv"
BAD = {
    "q of 4 rows": (at.PlanError, "q must have the 5 rows", lambda b: {"q": b.q[:4]}),
    "q of 6 rows": (at.PlanError, "q must have the 5 rows", lambda b: {"q": np.concatenate([b.q, b.q[:1]])}),
    "heads of q": (at.ArgumentError, r"q must be \[rows, 4, 16\]", lambda b: {"q": b.q[:, :2]}),
    "dim of q": (at.ArgumentError, r"q must be", lambda b: {"q": b.q[..., :8]}),
    "axes of q": (at.ArgumentError, r"q must be", lambda b: {"q": b.q[0]}),
    "dtype of q": (at.DtypeError, "q must be float32.*q_dtype", lambda b: {"q": b.q.astype(np.float16)}),
    "float64 q": (at.DtypeError, "q must be float32", lambda b: {"q": b.q.astype(np.float64)}),
    "no array": (at.DtypeError, "q must be an array", lambda b: {"q": b.q.tolist()}),
    "last stride of q": (
        at.ArgumentError,
        "q must have a last stride of 1",
        lambda b: {"q": np.repeat(b.q, 2, 2)[..., ::2]},
    ),
    "dtype of k": (
        at.DtypeError,
        "k must be float32.*kv_dtype",
        lambda b: {"kv": (b.kv[0].astype(ml_dtypes.bfloat16), b.kv[1])},
    ),
    "dtype of v": (
        at.DtypeError,
        "v must be float32.*kv_dtype",
        lambda b: {"kv": (b.kv[0], np.zeros(b.kv[1].shape, np.int32))},
    ),
    "heads of v": (at.ArgumentError, "v must be", lambda b: {"kv": (b.kv[0], b.kv[1][:, :, :1])}),
    "layout": (at.ArgumentError, "k must be", lambda b: {"kv": tuple(x.swapaxes(1, 2) for x in b.kv)}),
    "page size": (
        at.PlanError,
        "kv must have pages of 4 tokens",
        lambda b: {"kv": tuple(x.reshape(-1, 2, 2, 16) for x in b.kv)},
    ),
    "pool too small": (
        at.ArgumentError,
        "kv must hold the",
        lambda b: {"kv": tuple(x[: int(b.index.max_block)] for x in b.kv)},
    ),
    "v smaller than k": (at.ArgumentError, "v must have k's", lambda b: {"kv": (b.kv[0], b.kv[1][:-1])}),
    "a single array": (at.ArgumentError, "kv must be a pair", lambda b: {"kv": b.kv[0]}),
    "three arrays": (at.ArgumentError, "kv must be a pair", lambda b: {"kv": (*b.kv, b.kv[0])}),
    "rows of out": (
        at.ArgumentError,
        "out must have q's 5 rows",
        lambda b: {"out": np.zeros((6, 4, 16), np.float32)},
    ),
    "dtype of out": (
        at.DtypeError,
        "out must be float32.*out_dtype",
        lambda b: {"out": np.zeros((5, 4, 16), np.float16)},
    ),
    "shape of out": (at.ArgumentError, "out must be", lambda b: {"out": np.zeros((5, 4, 17), np.float32)}),
    "dtype of lse": (at.DtypeError, "lse must be float32; got float64$", lambda b: {"lse": np.zeros((5, 4))}),
    "bits of lse": (at.DtypeError, "lse must be float32", lambda b: {"lse": np.zeros((5, 4), np.uint32)}),
    "shape of lse": (at.ArgumentError, "lse must be", lambda b: {"lse": np.zeros((4, 5), np.float32)}),
    "NaN sm_scale": (at.ArgumentError, "sm_scale must be finite", lambda b: {"sm_scale": float("nan")}),
    "text sm_scale": (at.DtypeError, "sm_scale must be a number", lambda b: {"sm_scale": "1"}),
    "unknown argument": (at.ArgumentError, "logits_soft_cap", lambda b: {"logits_soft_cap": 5.0}),
    "window of another variant": (at.ArgumentError, "window_left", lambda b: {"window_left": 5}),
    "stream on the CPU": (at.ArgumentError, "stream must be None", lambda b: {"stream": 3}),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(planned, name):
    attn, batch = planned
    error, match, change = BAD[name]
    refused(attn, batch, error, match, **change(batch))


def test_refuses_read_only_and_doubled_results(planned):
    attn, batch = planned
    fixed = np.zeros((5, 4, 16), np.float32)
    fixed.flags.writeable = False
    refused(attn, batch, at.ArgumentError, "out must be writable", out=fixed)
    doubled = np.lib.stride_tricks.as_strided(np.zeros((1, 4, 16), np.float32), (5, 4, 16), (0, 64, 4))
    refused(attn, batch, at.ArgumentError, "out must not name one element twice", out=doubled)


def test_run_needs_the_loaded_plan(backend):
    attn, _, batch = make(backend)
    with pytest.raises(at.PlanError, match="must be loaded"):
        attn.run(batch.q, batch.kv)
    first = attn.plan(batch.index)
    second = attn.plan(batch.index, load=False)
    with pytest.raises(at.PlanError, match="must be the loaded one"):
        attn.run(batch.q, batch.kv, plan=second)
    want = attn.run(batch.q, batch.kv, plan=first)
    attn.load(second)
    with pytest.raises(at.PlanError, match="must be the loaded one"):
        attn.run(batch.q, batch.kv, plan=first)
    assert attn.run(batch.q, batch.kv, plan=second).tobytes() == want.tobytes()


def test_plan_of_another_attention(backend):
    attn, _, batch = make(backend)
    attn.plan(batch.index)
    want = attn.run(batch.q, batch.kv)
    other = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=32, q_dtype="float32", variant=v.causal()
    )
    for plan in (
        at.make_plan(other, batch.index, at.Traits.of("cpu")),
        at.make_plan(attn.spec, batch.index, at.Traits.of("h200")),
        at.make_plan(attn.spec, batch.index, at.Traits.of("cpu"), deterministic="run"),
    ):
        with pytest.raises(at.PlanError, match="plan must be made"):
            attn.load(plan)
    assert attn.run(batch.q, batch.kv).tobytes() == want.tobytes(), "a refused plan was loaded"


def test_plan_of_another_window_is_refused(backend):
    """Two windows are one machine code, but what the planner skips is not the same."""
    narrow, _, batch = make(backend, variant=(v.causal(), v.sliding_window(2)))
    wide, _, _ = make(backend, variant=(v.causal(), v.sliding_window(9)))
    with pytest.raises(at.PlanError, match="plan must be made for this"):
        wide.load(narrow.plan(batch.index))


@pytest.mark.parametrize("value", [1, 2, 5])
def test_a_run_may_narrow_its_window(backend, value):
    attn, _, batch = make(backend, variant=(v.causal(), v.sliding_window(5)))
    plan = attn.plan(batch.index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True, window_left=value)
    testing.check(plan, batch.q, batch.kv, out, lse, window_left=value)
    narrow, _, _ = make(backend, variant=(v.causal(), v.sliding_window(value)))
    narrow.plan(batch.index)
    np.testing.assert_array_equal(out, narrow.run(batch.q, batch.kv))


def test_a_run_may_not_widen_its_window(backend):
    attn, _, batch = make(backend, variant=(v.causal(), v.sliding_window(2)))
    attn.plan(batch.index)
    for value in (3, -1):
        with pytest.raises(at.PlanError, match=rf"more than the plan does \(window_left 2\); got {value}"):
            attn.run(batch.q, batch.kv, window_left=value)


@pytest.mark.parametrize("cap", [0.5, 5.0, 30.0])
def test_variant_arguments_are_honoured(backend, cap):
    attn, _, batch = make(backend, variant=(v.causal(), v.softcap(50.0)))
    plan = attn.plan(batch.index)
    out, lse = attn.run(batch.q * 8, batch.kv, return_lse=True, softcap=cap)
    testing.check(plan, batch.q * 8, batch.kv, out, lse, softcap=cap)
    again = attn.run(batch.q * 8, batch.kv)
    testing.check(plan, batch.q * 8, batch.kv, again)  # an argument does not stay for the next run


def test_missing_argument(backend):
    attn, _, batch = make(backend, variant=(v.causal(), v.sink_logits()))
    attn.plan(batch.index)
    with pytest.raises(at.ArgumentError, match="sinks must be given"):
        attn.run(batch.q, batch.kv)
    with pytest.raises(at.ArgumentError, match="sinks"):
        attn.run(batch.q, batch.kv, sinks=np.zeros(3, np.float32))
    attn.run(batch.q, batch.kv, sinks=np.zeros(4, np.float32))


def test_softmax_free_has_no_lse(backend):
    attn, _, batch = make(backend, variant=(v.causal(), v.sigmoid()))
    plan = attn.plan(batch.index)
    out = np.full((5, 4, 16), 7.0, np.float32)
    for arguments in ({"return_lse": True}, {"lse": np.zeros((5, 4), np.float32)}):
        with pytest.raises(at.ArgumentError, match="softmax-free"):
            attn.run(batch.q, batch.kv, out=out, **arguments)
    assert (out == 7.0).all()
    testing.check(plan, batch.q, batch.kv, attn.run(batch.q, batch.kv))


def test_sm_scale(backend):
    attn, _, batch = make(backend, sm_scale=0.7)
    plan = attn.plan(batch.index)
    for scale in (None, 0.1, np.float32(2.0), 0, -1.0):
        out, lse = attn.run(batch.q, batch.kv, sm_scale=scale, return_lse=True)
        testing.check(plan, batch.q, batch.kv, out, lse, sm_scale=scale)


def test_lse_alone_and_results_given(planned):
    attn, batch = planned
    out, lse = np.empty((5, 4, 16), np.float32), np.empty((5, 4), np.float32)
    assert attn.run(batch.q, batch.kv, out=out) is out
    both = attn.run(batch.q, batch.kv, out=out, lse=lse, return_lse=True)
    assert both[0] is out and both[1] is lse
    fresh = attn.run(batch.q, batch.kv, return_lse=True)
    assert fresh[0].tobytes() == out.tobytes() and fresh[1].tobytes() == lse.tobytes()


def test_bits_repeat(planned):
    attn, batch = planned
    first = attn.run(batch.q, batch.kv)
    assert all(attn.run(batch.q, batch.kv).tobytes() == first.tobytes() for _ in range(5))


def test_new_arrays_of_old_form_are_read_anew(planned):
    """The remembered form knows shapes, never addresses: other arrays of one form give their own result."""
    attn, batch = planned
    plan = attn._runtime.tenant.loaded.plan
    for seed in range(4):
        rng = np.random.default_rng(seed)
        q = rng.standard_normal(batch.q.shape).astype(np.float32)
        kv = tuple(rng.standard_normal(x.shape).astype(np.float32) for x in batch.kv)
        out, lse = attn.run(q, kv, return_lse=True)
        testing.check(plan, q, kv, out, lse)


def test_form_is_compared_with_each_new_plan(backend):
    """A form that fitted the last plan is refused when it does not fit this one."""
    attn, case, batch = make(backend)
    attn.plan(batch.index)
    attn.run(batch.q, batch.kv)
    small = tuple(x[: int(batch.index.max_block) + 1] for x in batch.kv)
    attn.run(batch.q, small)
    moved = testing.lay_out(case, page_size=4, spare=50, seed=4)
    assert moved.index.max_block > batch.index.max_block
    attn.plan(moved.index)
    with pytest.raises(at.ArgumentError, match="kv must hold"):
        attn.run(batch.q, small)
    attn.plan(batch.index, pad_to=6)
    with pytest.raises(at.PlanError, match="q must have the 6 rows"):
        attn.run(batch.q, small)


@pytest.mark.parametrize(
    ("qo", "kv"), [([], []), ([0, 0], [4096, 0]), ([0, 1, 0, 1], [0, 3, 0, 5]), ([3], [0]), ([130], [2])]
)
def test_empty_and_short(backend, qo, kv):
    spec = at.AttentionSpec(
        num_qo_heads=9, num_kv_heads=3, head_dim=16, q_dtype="float32", variant=v.causal()
    )
    case = testing.make_case(spec, qo, kv, seed=3)
    batch = testing.lay_out(case)
    attn = at.Attention(spec, backend=backend)
    plan = attn.plan(batch.index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True)
    assert out.shape == (sum(qo), 9, 16) and out.dtype == np.float32
    assert testing.check(plan, batch.q, batch.kv, out, lse)["out"] <= 1


def test_causal_with_more_queries_than_keys(backend):
    """Rows without a key are (0, -inf), the next one is v0 itself."""
    spec = at.AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=v.causal())
    case = testing.make_case(spec, [5], [2], seed=4)
    batch = testing.lay_out(case)
    attn = at.Attention(spec, backend=backend)
    attn.plan(batch.index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True)
    assert not out[:3].any() and not np.signbit(out[:3]).any() and (lse[:3] == -np.inf).all()
    np.testing.assert_array_equal(out[3], case.v[0][0])
    assert np.isfinite(lse[3:]).all()


def test_lse_is_natural(backend):
    """Ten equal keys with logits 0: lse is ln 10."""
    spec = at.AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=v.full())
    q, kv = (
        np.zeros((1, 1, 8), np.float32),
        (np.zeros((10, 1, 8), np.float32), np.ones((10, 1, 8), np.float32)),
    )
    attn = at.Attention(spec, backend=backend)
    attn.plan(at.formats.ragged([0, 1], [0, 10]))
    out, lse = attn.run(q, kv, return_lse=True)
    assert abs(float(lse[0, 0]) - 2.302585093) < 1e-6 and abs(out - 1).max() < 1e-6


@pytest.mark.parametrize("name", ["q", "out"])
def test_unsigned_arrays_hold_bits(backend, name):
    attn, _, batch = make(backend, q_dtype="bfloat16")
    attn.plan(batch.index)
    want = attn.run(batch.q, batch.kv)
    q = batch.q.view(np.uint16) if name == "q" else batch.q
    out = np.zeros(want.shape, np.uint16) if name == "out" else None
    got = attn.run(q, tuple(x.view(np.uint16) for x in batch.kv), out=out)
    assert got.tobytes() == want.tobytes()


def test_nobodys_memory_is_kept(backend):
    """What is remembered of a run owns none of its arrays."""
    import gc
    import weakref

    class Watched(np.ndarray):
        pass

    attn, _, batch = make(backend)
    attn.plan(batch.index)
    arrays = [x.copy().view(Watched) for x in (batch.q, *batch.kv)]
    gone = [weakref.ref(x) for x in arrays]
    attn.run(arrays[0], (arrays[1], arrays[2]))
    arrays.clear()
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_one_address_in_other_shapes(backend):
    """Calls are remembered by address and form: two shapes of one memory are two calls."""
    attn, _, batch = make(backend)
    plan = attn.plan(batch.index)
    memory = np.zeros((10, 4, 16), np.float32)
    for q in (memory[:5], memory[::2], memory[:5]):
        q[...] = batch.q
        out, lse = attn.run(q, batch.kv, return_lse=True)
        testing.check(plan, q, batch.kv, out, lse)


@pytest.mark.parametrize("plan", ["x", 3, [0, 1], at.make_plan])
def test_what_is_no_plan(planned, plan):
    attn, batch = planned
    want = attn.run(batch.q, batch.kv)
    for call in (lambda: attn.load(plan), lambda: attn.run(batch.q, batch.kv, plan=plan)):
        with pytest.raises(at.DtypeError, match=r"^plan must be a Plan; got .*attn\.plan\(index\)") as caught:
            call()
        assert caught.value.label == "plan"
    with pytest.raises(at.DtypeError, match="plan must be a Plan; got NoneType"):
        attn.load(None)
    assert attn.run(batch.q, batch.kv).tobytes() == want.tobytes()
