# SPDX-License-Identifier: Apache-2.0
"""fp8 scales and learned sinks."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError


def test_scales_reach_logits_and_output(kit):
    k_scale, q_scale = np.array([0.25, 4.0], np.float32), np.linspace(0.5, 2, 8).astype(np.float32)
    both = kit.both(av.fp8_scales(v_scale=0.5), k_scale=k_scale, q_scale=q_scale, out_scale=8.0)
    rng = np.random.default_rng(0)
    c, score = kit.contexts(900, rng), rng.standard_normal(900).astype(np.float32)
    want = score.astype(np.float64) * q_scale[c["qo_head"]] * k_scale[c["kv_head"]]
    np.testing.assert_allclose(both.numpy.logits(kit.fields(c), score), want, rtol=1e-7)
    np.testing.assert_allclose(both.native.logits(c, score), want, rtol=1e-6)
    o = rng.standard_normal((900, 5)).astype(np.float32)
    np.testing.assert_allclose(both.native.rows("output", c, o), o * 0.5 / 8, rtol=1e-6)
    np.testing.assert_allclose(both.numpy.output(kit.fields(c), o), o / 16.0, rtol=1e-7)


def test_scales_come_before_every_other_variant(kit):
    c = kit.contexts(100, np.random.default_rng(1))
    score = np.linspace(-50, 50, 100).astype(np.float32)
    first = kit.both((av.fp8_scales(k_scale=0.25), av.softcap(5.0)))
    last = kit.both((av.softcap(5.0), av.fp8_scales(k_scale=0.25)))
    want = 5 * np.tanh(score.astype(np.float64) * 0.25 / 5)
    for both in (first, last):
        np.testing.assert_allclose(both.native.logits(c, score), want, rtol=1e-6)
        np.testing.assert_allclose(both.numpy.logits(kit.fields(c), score), want, rtol=1e-9)


def test_none_is_one(kit):
    both = kit.both(av.fp8_scales(None, None, None, None))
    c = kit.contexts(10, np.random.default_rng(2))
    score = np.arange(10, dtype=np.float32)
    assert (both.native.logits(c, score) == score).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan"), np.ones(3, np.float32)])
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale", "out_scale"])
def test_bad_scales(name, bad, kit):
    with pytest.raises(ArgumentError, match=name):
        kit.both(av.fp8_scales(), **{name: bad})


def test_sinks_per_query_head(kit):
    sinks = np.linspace(-2, 2, 8).astype(np.float32)
    both = kit.both((av.causal(), av.softcap(9.0), av.sink_logits()), sinks=sinks)
    c = kit.contexts(64, np.random.default_rng(3))
    assert (both.native.sink(c) == sinks[c["qo_head"]]).all()
    assert (both.numpy.sink(kit.fields(c)) == sinks[c["qo_head"]]).all()
    assert both.native.flags()["has_sink"]


def test_sinks_must_be_given_once():
    with pytest.raises(ArgumentError, match="sinks must be given"):
        av.compose(av.sink_logits()).bind({}, num_qo_heads=2, num_kv_heads=1)
    with pytest.raises(ArgumentError, match="one learned sink"):
        av.compose((av.sink_logits(1.0), av.sink_logits(1.0).rename(sinks="more")))
