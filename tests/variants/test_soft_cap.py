# SPDX-License-Identifier: Apache-2.0
"""Soft-capped logits against cap * tanh(s / cap)."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0, 1e-3, 1e6])
def test_formula(cap, kit):
    both = kit.both((av.causal(), av.softcap(cap)))
    rng = np.random.default_rng(1)
    c = kit.contexts(3000, rng)
    score = (rng.standard_normal(3000) * cap * 10 ** rng.uniform(-4, 2, 3000)).astype(np.float32)
    cap32 = float(np.float32(cap))
    want = np.array([cap32 * math.tanh(s / cap32) for s in score.astype(np.float64)])
    np.testing.assert_allclose(both.numpy.logits(kit.fields(c), score), want, rtol=1e-12)
    np.testing.assert_allclose(both.native.logits(c, score), want, rtol=1e-6)


def test_the_order_of_the_tuple_is_the_order_on_the_logits(kit):
    @av.logits
    def double(score, ctx):
        return score * 2

    c = kit.contexts(500, np.random.default_rng(2))
    score = np.random.default_rng(3).standard_normal(500).astype(np.float32) * 9
    s = score.astype(np.float64)
    for variants, want in (
        ((av.softcap(5.0), double), 10 * np.tanh(s / 5)),
        ((double, av.softcap(5.0)), 5 * np.tanh(2 * s / 5)),
    ):
        both = kit.both(variants)
        np.testing.assert_allclose(both.numpy.logits(kit.fields(c), score), want, rtol=1e-12)
        np.testing.assert_allclose(both.native.logits(c, score), want, rtol=1e-6)


def test_value_at_run_time_and_per_head(kit):
    caps = np.linspace(1, 8, 8).astype(np.float32)
    c = kit.contexts(1000, np.random.default_rng(4))
    score = np.random.default_rng(5).standard_normal(1000).astype(np.float32) * 20
    for value in (3.0, caps):
        both = kit.both(av.softcap(50.0), softcap=value)
        cap = np.broadcast_to(np.asarray(value, dtype=np.float64), (8,))[c["qo_head"]]
        np.testing.assert_allclose(both.native.logits(c, score), cap * np.tanh(score / cap), rtol=1e-6)
    assert av.compose(av.softcap(1.0)).key == av.compose(av.softcap(50.0)).key


@pytest.mark.parametrize("cap", [0, -1.0, float("nan"), float("inf"), "30", None, True])
def test_bad_caps(cap):
    with pytest.raises(Exception) as caught:
        av.softcap(cap)
    assert isinstance(caught.value, (ArgumentError, TypeError)) and "softcap" in str(caught.value)


def test_masked_keys_are_not_capped_keys(kit):
    both = kit.both((av.softcap(30.0), av.causal()))
    c = np.zeros(1, kit.ctx_dtype)
    c["kv_pos"] = 5
    assert not both.native.mask(c)[0][
        0
    ]  # the kernel selects -inf after logits: the cap cannot make it finite
