# SPDX-License-Identifier: Apache-2.0
"""Softmax-free weights against 1 / (1 + exp(-(scale * s + bias)))."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError


def test_formula(kit):
    both = kit.both(
        (av.causal(), av.sigmoid(1.5, -3.0)), sigmoid_bias=np.linspace(-5, 2, 8).astype(np.float32)
    )
    rng = np.random.default_rng(0)
    c, score = kit.contexts(3000, rng), (rng.standard_normal(3000) * 20).astype(np.float32)
    bias = np.linspace(-5, 2, 8).astype(np.float32).astype(np.float64)[c["qo_head"]]
    want = 1 / (1 + np.exp(-(1.5 * score.astype(np.float64) + bias)))
    np.testing.assert_allclose(both.numpy.logits(kit.fields(c), score), want, rtol=1e-12)
    np.testing.assert_allclose(both.native.logits(c, score), want, rtol=1e-5, atol=1e-37)  # below: subnormal
    assert not both.variant.use_softmax and not both.native.flags()["use_softmax"]


def test_ends_are_clean(kit):
    both = kit.both(av.sigmoid())
    c = np.zeros(4, kit.ctx_dtype)
    got = both.native.logits(c, np.array([-np.inf, np.inf, -1e30, 1e30], np.float32))
    assert got.tolist() == [0, 1, 0, 1]


def test_illegal_companions():
    @av.logits
    def bias(score, ctx):
        return score + 1

    with pytest.raises(ArgumentError, match="softmax"):
        av.compose((av.sigmoid(), av.sink_logits(1.0)))
    with pytest.raises(ArgumentError, match="one softmax-free"):
        av.compose((av.sigmoid(), av.cpp("other", logits="s", use_softmax=False)))
    with pytest.raises(ArgumentError, match=r"after sigmoid.*put bias before"):
        av.compose((av.sigmoid(), bias))
    av.compose((bias, av.softcap(3.0), av.sigmoid(), av.causal(), av.fp8_scales()))  # all legal
