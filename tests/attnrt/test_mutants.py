# SPDX-License-Identifier: Apache-2.0
"""Planted faults: each changes one line of behaviour of the reference or the runtime, and an oracle must turn red.

They hold the oracles themselves: a check that no fault can fail says nothing.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.backends.reference import ReferenceBackend, attend, merge, views
from attnrt.backends.reference import append as appending
from attnrt.fold import State, fold
from attnrt.operands import Form, Pool
from attnrt.runtime import Runtime

v = at.variants


def spec_of(*variants, **changes):
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "q_dtype": "float32"}
    return at.AttentionSpec(**(fields | changes), variant=variants)


def right(spec, qo=(1, 5), kv=(700, 40), **layout):
    """A run against the oracle."""
    case = testing.make_case(spec, qo, kv, seed=1)
    batch = testing.lay_out(case, **layout)
    attn = at.Attention(spec, backend="reference")
    plan = attn.plan(batch.index, pad_to=len(batch.q) + 1)
    q = np.concatenate([batch.q, batch.q[:1]])
    out = np.full((len(q), 4, spec.head_dim_vo), 7.0, batch.q.dtype)
    lse = np.full((len(q), 4), 7.0, np.float32)
    attn.run(q, batch.kv, out=out, lse=lse)
    testing.check(plan, q, batch.kv, out, lse)


def case_of(*variants, qo=(1, 5, 2), kv=(1700, 40, 300)):
    """Results in float64: an order of additions that float32 would round away shows."""
    return testing.make_case(spec_of(*(variants or (v.causal(),)), out_dtype="float64"), qo, kv, seed=2)


@v.mask
def late(ctx):
    """Keys from 515 on: the first leaves of a row are empty, and no planner can know."""
    return ctx.kv_pos >= 515


def window_off_by_one(patch):
    real = at.variants.NumpyVariant.mask
    patch(at.variants.NumpyVariant, "mask", lambda self, ctx: real(self, ctx | {"kv_pos": ctx["kv_pos"] - 1}))
    # the oracle asks the same hooks: it must not see the fault
    return lambda: testing.compare(*_window_answer(spec_of(v.sliding_window(3))))


def _window_answer(spec):
    """The answer by hand: window_left 3 sees four keys."""
    case = testing.make_case(spec, [1], [20], seed=3)
    batch = testing.lay_out(case)
    attn = at.Attention(spec, backend="reference")
    attn.plan(batch.index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True)
    short = testing.Case(spec=spec, q=case.q, k=(case.k[0][-4:],), v=(case.v[0][-4:],))
    full = replace(spec, variant=v.compose(()))
    laid = testing.lay_out(short)
    return spec, testing.oracle_answer(full, laid.index, laid.q, laid.kv), out, lse


def fold_in_another_order(patch):
    patch(merge, "_fold_tree", lambda states, leaves, tree: _left(states[::-1]))
    return lambda: testing.workers(case_of(qo=(1,), kv=(6000,)), "reference", counts=(1, 40))


def _left(states):
    total = None
    for state in states:
        total = state if total is None else fold(total, state)
    return total


def dropped_last_keys(patch):
    real = attend._keys

    def short(here, part, row, head, begin, end, kv_len):
        keys = real(here, part, row, head, begin, end, kv_len)
        keys.listed[-1:] &= len(keys.offsets) % 16 == 0
        return keys

    patch(attend, "_keys", short)
    return lambda: right(spec_of(v.causal()))


def masked_by_multiplying(patch):
    def multiply(total, weights, visible, value):
        return total + np.add.reduce(weights[:, :, None] * value[None], axis=1)

    patch(attend, "_add", multiply)

    def check():
        case = case_of(qo=(8,), kv=(8,))
        case.k[0][5:], case.v[0][5:] = np.inf, np.nan  # live, but past the first rows
        out = testing.run_batch(case, testing.lay_out(case), "reference").out
        assert np.isfinite(out[:5]).all()

    return check


def states_rounded_on_the_way(patch):
    """A state that is written is rounded, one that stays in registers is not: the cut shows."""
    patch(ReferenceBackend, "partial_itemsize", 4)
    return lambda: testing.workers(case_of(qo=(1,), kv=(6000,)), "reference", counts=(1, 40))


def empty_state_by_weight(patch):
    def careless(a, b):
        m = np.maximum(a.m, b.m)
        with np.errstate(invalid="ignore"):
            wa, wb = np.exp2(a.m - m), np.exp2(b.m - m)
        return State(m=m, l=a.l * wa + b.l * wb, acc=a.acc * wa[..., None] + b.acc * wb[..., None])

    patch(attend, "fold", careless)
    patch(merge, "fold", careless)
    return lambda: right(spec_of(late), qo=(1, 5), kv=(700, 40))


def lse_in_base_two(patch):
    patch(attend, "LN2", 1.0)
    return lambda: right(spec_of(v.causal()))


def strides_of_k_for_v(patch):
    real = Pool.view

    def view(self, ptr, page_size, owner):
        found = real(self, ptr, page_size, owner)
        return replace(found, stride_token=found.stride_head * 2)

    patch(Pool, "view", view)
    return lambda: testing.layout_invariance(case_of(), "reference")


def fp8_without_saturation(patch):
    patch(views, "_FP8_MAX", {})

    def check():
        spec = spec_of(v.causal(), kv_dtype="float8_e4m3fn")
        attn = at.Attention(spec, backend="reference")
        cache = tuple(
            np.zeros((4, 2, 16), "V1").view(testing.poison_of("float8_e4m3fn", 0).dtype) for _ in range(2)
        )
        rows = np.full((1, 2, 16), 1e6, np.float32)
        attn.append(rows, rows, cache, slots=[0])
        assert (cache[0][0].astype(np.float32) == 448.0).all()

    return check


def slots_not_skipped(patch):
    real = appending._put
    patch(
        appending,
        "_put",
        lambda cache, values, slots, scale: real(cache, values, slots * 0 + 1, scale),
    )

    def check():
        attn = at.Attention(spec_of(v.causal()), backend="reference")
        cache = tuple(np.zeros((4, 2, 16), np.float32) for _ in range(2))
        rows = np.ones((2, 2, 16), np.float32)
        attn.append(rows, rows, cache, slots=[3, -1])
        assert (cache[0][3] == 1).all() and not cache[0][:3].any()

    return check


def padded_rows_not_written(patch):
    real = merge._fold_tree

    def only_states(states, leaves, tree):
        if not states:
            raise StopIteration
        return real(states, leaves, tree)

    patch(merge, "_fold_tree", only_states)
    real_rows = merge.merge_rows

    def some(call):
        with contextlib.suppress(StopIteration):
            real_rows(call)

    patch(merge, "merge_rows", some)
    return lambda: right(spec_of(v.causal()))


def sink_in_every_leaf(patch):
    real = attend._leaf

    def leaf(here, *rest):
        state = real(here, *rest)
        return state if here.hooks.sink(rest[4]) is None else replace(state, l=state.l + 0.25)

    patch(attend, "_leaf", leaf)
    return lambda: right(spec_of(v.causal(), v.sink_logits(0.5)))


def forms_never_compared_again(patch):
    patch(Form, "check", lambda self, needs: None)

    def check():
        spec = spec_of(v.causal())
        attn = at.Attention(spec, backend="reference")
        batch = testing.lay_out(testing.make_case(spec, [1, 1], [5, 5]))
        attn.plan(batch.index)
        with pytest.raises(at.PlanError):
            attn.run(batch.q[:1], batch.kv)

    return check


def arguments_that_stay(patch):
    real = Runtime._bind

    def bind(self, params, *rest):
        self._defaults = real(self, params, *rest)
        return self._defaults

    patch(Runtime, "_bind", bind)

    def check():
        spec = spec_of(v.causal(), v.softcap(50.0))
        attn = at.Attention(spec, backend="reference")
        batch = testing.lay_out(testing.make_case(spec, [1], [30], scale=3.0))
        plan = attn.plan(batch.index)
        attn.run(batch.q, batch.kv, softcap=0.5)
        testing.check(plan, batch.q, batch.kv, attn.run(batch.q, batch.kv))

    return check


MUTANTS = [
    *(
        window_off_by_one,
        fold_in_another_order,
        dropped_last_keys,
        masked_by_multiplying,
        states_rounded_on_the_way,
    ),
    *(empty_state_by_weight, lse_in_base_two, strides_of_k_for_v, fp8_without_saturation, slots_not_skipped),
    *(padded_rows_not_written, sink_in_every_leaf, forms_never_compared_again, arguments_that_stay),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_planted_fault_turns_red(monkeypatch, mutant):
    check = mutant(lambda *args: None)
    check()  # green without the fault
    check = mutant(monkeypatch.setattr)
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, IndexError)):
        check()
