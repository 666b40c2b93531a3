# SPDX-License-Identifier: Apache-2.0
"""Shapes of logits that the printer tells kernels of: a bias linear in the position, a logistic weight, a cap."""

from __future__ import annotations

import re

import pytest

import attnrt.variants as av
from attnrt.variants.score_shapes import needs_keys


def of(hook, **params):
    """A traced logits hook; its parameters are numbers."""

    def traced(score, ctx, **given):
        return hook(score, ctx, **given)

    names = ", ".join(f"{n}={v!r}" for n, v in params.items())
    call = ", ".join(f"{n}={n}" for n in params)
    scope = {"traced": traced}
    exec(f"def logits(score, ctx, *, {names}):\n    return traced(score, ctx, {call})", scope)
    return av.logits(scope["logits"])


def flag(text, name):
    return re.search(rf"bool {name} = (true|false)", text)[1] == "true"


def returned(text, name):
    return re.search(rf" {name}\([^)]*\) {{\s*return ([^;]*);", text)[1]


LINEAR = {
    "alibi": (av.alibi(), "r.v0", "c.qo_pos"),
    "taken off": (of(lambda s, c, a: s - a * (c.qo_pos - c.kv_pos), a=0.5), "r.v0", "c.qo_pos"),
    "the other way round": (of(lambda s, c, a: s - a * (c.kv_pos - c.qo_pos), a=0.5), "-r.v0", "c.qo_pos"),
    "negated": (of(lambda s, c, a: -(c.qo_pos - c.kv_pos) * a + s, a=0.5), "r.v0", "c.qo_pos"),
    "from the start": (of(lambda s, c, a: s + c.kv_pos * a, a=0.5), "r.v0", "0"),
    "of another place": (of(lambda s, c, a: s + a * (c.kv_pos - c.kv_len // 2), a=0.5), "r.v1", "r.v0"),
    "of a table": (
        av.logits(
            lambda score, ctx, *, slopes: score + slopes[ctx.qo_head, ctx.request] * (ctx.kv_pos - ctx.qo_pos)
        ),
        "r.v0",
        "c.qo_pos",
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_biases(name):
    variant, slope, origin = LINEAR[name]
    composed = av.compose((av.causal(), variant))
    text = composed.cpp_source()
    assert flag(text, "linear_bias") and flag(text, "keeps_units") and not flag(text, "logits_need_keys")
    assert (returned(text, "slope"), returned(text, "origin")) == (slope, origin)
    assert not needs_keys(composed)


NOT_LINEAR = {
    "a bend": of(lambda s, c, a: s - a * abs(c.qo_pos - c.kv_pos), a=0.5),
    "a power": of(lambda s, c, a: s + a * (c.kv_pos - c.qo_pos) * (c.kv_pos - c.qo_pos), a=0.5),
    "a scaled score": of(lambda s, c, a: 2 * s + a * (c.kv_pos - c.qo_pos), a=0.5),
    "a slope of the key": of(lambda s, c, a: s + a * c.kv_pos * (c.kv_pos - c.qo_pos), a=0.5),
    "a slope of another use": of(lambda s, c, a: s + a * (c.kv_pos - av.to_int(a)), a=0.5),
    "more around it": of(lambda s, c, a: av.minimum(s + a * (c.kv_pos - c.qo_pos), 9.0), a=0.5),
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_no_linear_bias(name):
    composed = av.compose((av.causal(), NOT_LINEAR[name]))
    assert not flag(composed.cpp_source(), "linear_bias") and needs_keys(composed)


def test_who_asks_where_keys_are():
    for variant in (
        av.softcap(5.0),
        av.sigmoid(),
        av.cpp("own", logits="s * s"),
        of(lambda s, c, a: s * a, a=2.0),
    ):
        assert not needs_keys(av.compose((av.causal(), variant)))
    for variant in (
        av.cpp("own", logits="s + ctx.kv_pos"),
        of(lambda s, c, a: s + (c.kv_slot % 2) * a, a=2.0),
    ):
        assert needs_keys(av.compose((av.causal(), variant)))


def test_logistic_weights():
    text = av.compose(av.sigmoid()).cpp_source()
    assert flag(text, "is_logistic")
    assert re.search(r"turn\(.*\{\s*r.v1 = r.v1 \* -1.44269504f;\s*r.v0 = r.v0 \* -1.44269504f;", text)
    assert not flag(av.compose(av.softcap(3.0)).cpp_source(), "is_logistic")
    shapes = {
        "bent": av.logits(
            lambda score, ctx: av.logistic(score * score - 1.0)
        ),  # no factor of its own to turn
        "of a weight": av.logits(lambda score, ctx: 0.5 * av.logistic(score)),
    }
    for name, hook in shapes.items():
        variant = av.Variant(name=name, logits=hook.logits, use_softmax=False)
        text = av.compose(variant).cpp_source()
        assert flag(text, "is_logistic") == (name == "bent")
        assert ("* -1.44269504f;" in text) == (name == "bent")


CAPS = {
    "softcap": (av.softcap(5.0), "r.v0"),
    "constants": (av.logits(lambda score, ctx: 30.0 * av.tanh(score / 30.0)), "1.0f / 30.0f"),
    "a product": (av.logits(lambda score, ctx: av.tanh(score * 0.125) * 8.0), "0.125f"),
}


@pytest.mark.parametrize("name", CAPS)
def test_caps(name):
    variant, factor = CAPS[name]
    text = av.compose(variant).cpp_source()
    assert flag(text, "is_capped") and flag(text, "row_units") and returned(text, "factor") == factor


NO_CAPS = {
    "a cap that may be negative": of(lambda s, c, a: a * av.tanh(s / a), a=30.0),
    "a negative factor": av.logits(lambda score, ctx: 30.0 * av.tanh(score * -0.1)),
    "more than the score": av.logits(lambda score, ctx: 30.0 * av.tanh((score + 1.0) * 0.1)),
    "a cap of a scaled score": (av.fp8_scales(), av.softcap(30.0)),
}


@pytest.mark.parametrize("name", NO_CAPS)
def test_what_is_no_cap(name):
    variant = NO_CAPS[name]
    text = av.compose(variant if isinstance(variant, tuple) else (variant,)).cpp_source()
    assert not flag(text, "is_capped")
