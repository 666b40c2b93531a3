# SPDX-License-Identifier: Apache-2.0
"""Traced functions: what works, and what the error says when it cannot."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError


def test_logits_with_parameters(kit):
    @av.logits
    def relative(score, ctx, *, bias, gain=1.0):
        distance = ctx.qo_pos - ctx.kv_pos
        return gain * score + bias[ctx.qo_head, av.clip(distance, 0, 15)]

    assert [(p.name, p.dtype, p.rank) for p in relative.params] == [
        ("bias", "float32", 2),
        ("gain", "float32", 0),
    ]
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((8, 16)).astype(np.float32)
    both = kit.both((av.causal(), relative), bias=bias, gain=0.5)
    c, score = kit.contexts(2000, rng), rng.standard_normal(2000).astype(np.float32)
    want = 0.5 * score + bias[c["qo_head"], np.clip(c["qo_pos"] - c["kv_pos"], 0, 15)]
    np.testing.assert_allclose(both.native.logits(c, score), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(both.numpy.logits(kit.fields(c), score), want, rtol=1e-6, atol=1e-6)


def test_mask_with_bounds(kit):
    @av.mask(bounds=("reach", 0))
    def every_other(ctx, reach=9, step: int = 2):
        return (ctx.qo_pos - ctx.kv_pos) % step == 0

    both = kit.both(every_other)
    c = kit.contexts(3000, np.random.default_rng(1))
    distance = c["qo_pos"].astype(int) - c["kv_pos"]
    want = (distance % 2 == 0) & (distance >= 0) & (distance <= 9)  # the bounds are part of the mask
    got, low, high = both.native.mask(c)
    assert (got == want).all() and (both.numpy.mask(kit.fields(c)) == want).all()
    assert ((c["kv_pos"] >= low) & (c["kv_pos"] <= high) | ~want).all()
    assert not both.variant.mask_is_interval
    assert both.variant.visible_range(30, 40) == (21, 40)
    assert both.variant.visible_range(30, 40, {"reach": -1}) == (None, 40)


@pytest.mark.parametrize("reach", [-1, 0, 3, 2**31 - 1])
@pytest.mark.parametrize("strict", [False, True])
def test_distance_masks_are_intervals(reach, strict, kit):
    @av.mask
    def near(ctx, reach: int):
        distance = abs(ctx.kv_pos - ctx.qo_pos)
        return distance < reach if strict else distance <= reach

    both = kit.both(near, reach=reach)
    c = kit.contexts(2000, np.random.default_rng(1), span=12)
    distance = np.abs(c["qo_pos"].astype(int) - c["kv_pos"])
    want = distance < reach if strict else distance <= reach
    assert both.variant.mask_is_interval
    assert (both.native.mask(c)[0] == want).all() and (both.numpy.mask(kit.fields(c)) == want).all()


def test_block_local_mask_is_not_an_interval_but_a_document_mask_by_start_is():
    @av.mask
    def local(ctx):
        return ctx.qo_pos // 16 == ctx.kv_pos // 16

    @av.mask
    def since(ctx, start: int):
        return (ctx.kv_pos >= start[ctx.request]) & (ctx.kv_pos <= ctx.qo_pos)

    assert not av.compose(local).mask_is_interval
    assert av.compose(since).mask_is_interval


def test_output_hook(kit):
    @av.output
    def gate(ctx, d, o, *, gates):
        return o * gates[ctx.qo_row, ctx.qo_head] + d

    gates = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
    both = kit.both(gate, gates=gates)
    c = kit.contexts(50, np.random.default_rng(1))
    o = np.random.default_rng(2).standard_normal((50, 6)).astype(np.float32)
    want = o * gates[c["qo_row"], c["qo_head"]][:, None] + np.arange(6)
    np.testing.assert_allclose(both.native.rows("output", c, o), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(both.numpy.output(kit.fields(c), o), want, rtol=1e-6, atol=1e-6)


def test_closures_are_constants_and_defaults_are_not():
    def make(k):
        @av.logits
        def f(score, ctx):
            return score * k

        return av.compose(f)

    assert make(2.0).key != make(3.0).key and "2.0f" in make(2.0).cpp_source()


def test_numpy_functions_are_understood(kit):
    @av.logits
    def f(score, ctx):
        return np.where(np.abs(score) < 1, np.tanh(score), np.sqrt(np.abs(score))) + np.clip(score, -1, 1)

    both = kit.both(f)
    x = np.linspace(-9, 9, 101).astype(np.float32)
    want = np.where(np.abs(x) < 1, np.tanh(x), np.sqrt(np.abs(x))) + np.clip(x, -1, 1)
    np.testing.assert_allclose(both.native.logits(np.zeros(101, kit.ctx_dtype), x), want, rtol=1e-6)


TABLE = np.arange(4.0)
# Each: a function with exactly one bad line (marked), and what the message must say.
BAD: list[tuple[Callable, str, str]] = []


def bad(says: str, wrap: Callable = av.logits):
    def add(fn):
        BAD.append((wrap, fn, says))
        return fn

    return add


@bad("where")
def data_dependent_if(score, ctx):
    if score > 0:  # here
        return score
    return -score


@bad("where")
def data_dependent_while(score, ctx):
    n = ctx.qo_pos
    while n > 0:  # here
        n = n - 1
    return score + n


@bad("& | ~", av.mask)
def python_and(ctx):
    a = ctx.kv_pos <= ctx.qo_pos
    return a and ctx.kv_pos > 3  # here


@bad("chained comparison", av.mask)
def chained(ctx):
    return 0 <= ctx.kv_pos <= ctx.qo_pos  # here


@bad("maximum")
def python_max(score, ctx):
    return max(score, 0.0)  # here


@bad("at.variants")
def math_exp(score, ctx):
    x = score * 2
    return math.exp(x)  # here


@bad("known: .*tanh")
def numpy_without_a_rule(score, ctx):
    return np.arctan(score)  # here


@bad("at.variants")
def numpy_call(score, ctx):
    return np.sort(score)  # here


@bad("parameter")
def captured_array(score, ctx):
    return score + TABLE[ctx.qo_head]  # here


@bad("range")
def range_loop(score, ctx):
    for _ in range(ctx.qo_len):  # here
        score = score + 1
    return score


@bad("to_int")
def int_call(score, ctx):
    return score + int(score)  # here


@bad("fields here: .*kv_pos")
def unknown_field(score, ctx):
    return score + ctx.head  # here


@bad("fields here", av.output)
def key_in_output(ctx, d, o):
    return o * ctx.kv_pos  # here


@bad("read only")
def assignment(score, ctx):
    ctx.qo_pos = 3  # here
    return score


@bad("parameter can be indexed")
def index_of_a_value(score, ctx):
    return score[0]  # here


@bad("to_int")
def float_index(score, ctx, table=None):
    return table[score]  # here


@bad("plain number")
def method(score, ctx):
    return score.sum()  # here


@bad("compare first")
def bitwise_on_floats(score, ctx):
    return score & 3  # here


@bad("type str")
def text_operand(score, ctx):
    return score + "1"  # here


@bad("type list.*parameter")
def array_operand(score, ctx):
    return np.float32(1) * score + [1, 2]  # here


@bad("comparison")
def where_on_numbers(score, ctx):
    return av.where(ctx.qo_pos, score, 0.0)  # here


@bad(r"round.*floor\(x \+ 0\.5\)")
def rounds(score, ctx):
    return score + round(score)  # here


@bad("trunc.*to_int")
def truncates(score, ctx):
    return score + math.trunc(score)  # here


@bad("divmod.*%")
def divides(score, ctx):
    return score * divmod(ctx.kv_pos, 3)[1]  # here


@pytest.mark.parametrize(("wrap", "fn", "says"), BAD, ids=[b[1].__name__ for b in BAD])
def test_untraceable_code_names_its_line(wrap, fn, says):
    lines, first = inspect.getsourcelines(fn)
    line = first + next(i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(av.TraceError) as caught:
        wrap(fn)
    error = caught.value
    assert isinstance(error, ArgumentError) and isinstance(error, ValueError)
    assert (error.filename, error.line) == (__file__, line), str(error)
    assert f"{__file__}:{line}" in str(error)
    assert re.search(says, str(error), re.DOTALL), str(error)


def test_wrong_results():
    with pytest.raises(av.TraceError, match="must return a value"):
        av.logits(lambda score, ctx: None)
    with pytest.raises(av.TraceError, match="must return float32"):
        av.logits(lambda score, ctx: score > 0)
    with pytest.raises(av.TraceError, match="must return bool"):
        av.mask(lambda ctx: ctx.kv_pos)
    assert av.compose(av.mask(lambda ctx: True)).mask_is_interval


def test_wrong_signatures():
    with pytest.raises(ArgumentError, match="must name its parameters"):
        av.logits(lambda score, ctx, **params: score)
    with pytest.raises(ArgumentError, match="must take"):
        av.logits(lambda score: score)
    with pytest.raises(ArgumentError, match=r"must take \(score, ctx, \.\.\.\) in this order"):
        av.logits(lambda ctx, score: score)
    with pytest.raises(ArgumentError, match=r"must take \(ctx, \.\.\.\) in this order"):
        av.mask(lambda score, ctx: ctx.kv_pos > 0)
    with pytest.raises(ArgumentError, match="one number of indices"):
        av.logits(lambda score, ctx, t=None: score + t[ctx.qo_head] + t[ctx.qo_head, ctx.kv_head])
    with pytest.raises(ArgumentError, match="one number of indices"):
        av.logits(lambda score, ctx, t=None: score + t[ctx.qo_head] + t)
    with pytest.raises(ArgumentError, match="annotation"):

        @av.logits
        def f(score, ctx, n: complex):
            return score


@pytest.mark.parametrize(
    "bounds", [(3,), "ab", (-1, 0), (1.5, None), ("missing", 0), ("gain", 0), (True, 0), None]
)
def test_bad_bounds(bounds):
    with pytest.raises(ArgumentError, match="bounds"):

        @av.mask(bounds=bounds)
        def f(ctx, gain=1.0):
            return ctx.kv_pos * gain > 3


def test_bad_defaults_fail_where_they_are_written():
    with pytest.raises(ArgumentError, match="gain must be finite"):
        av.logits(lambda score, ctx, gain=float("inf"): score * gain)
    with pytest.raises(ArgumentError, match="rank 1"):
        av.logits(lambda score, ctx, t=2.0: score + t[ctx.qo_head])
