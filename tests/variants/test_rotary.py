# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding against the formula in Python integers and double precision."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError

POSITIONS = [0, 1, 5, 1000, 131071, 2**20, 2**20 - 1, -7, -131071]


def rotate(x: np.ndarray, position: int, frequencies: np.ndarray, interleaved: bool) -> np.ndarray:
    """One row, pair by pair; the angle is reduced in exact rational arithmetic."""
    y = x.astype(np.float64).copy()
    dim = 2 * len(frequencies)
    for d, f in enumerate(frequencies):
        turns = Fraction(float(f)) * position / Fraction(2 * math.pi)
        angle = float(turns - math.floor(turns)) * 2 * math.pi
        i, j = (2 * d, 2 * d + 1) if interleaved else (d, d + dim // 2)
        a, b = float(x[i]), float(x[j])
        y[i] = a * math.cos(angle) - b * math.sin(angle)
        y[j] = b * math.cos(angle) + a * math.sin(angle)
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "dim", "theta"), [(64, 64, 1e4), (80, 32, 1e7), (8, 2, 10.0), (128, 128, 5e5)]
)
def test_formula(head_dim, dim, theta, interleaved, kit):
    both = kit.both(av.rope(dim, theta, interleaved))
    frequencies = np.array([theta ** (-2 * d / dim) for d in range(dim // 2)])
    rng = np.random.default_rng(dim)
    x = rng.standard_normal((len(POSITIONS), head_dim)).astype(np.float32)
    c = np.zeros(len(POSITIONS), kit.ctx_dtype)
    c["qo_pos"], c["kv_pos"] = POSITIONS, POSITIONS[::-1]
    for hook, positions in (("query", POSITIONS), ("key", POSITIONS[::-1])):
        want = np.array([rotate(r, p, frequencies, interleaved) for r, p in zip(x, positions, strict=True)])
        np.testing.assert_allclose(getattr(both.numpy, hook)(kit.fields(c), x), want, rtol=0, atol=3e-8)
        np.testing.assert_allclose(both.native.rows(hook, c, x), want, rtol=0, atol=2e-6)
    assert (both.native.rows("value", c, x) == x).all()


def test_keys_that_are_rotated_already_pass(kit):
    whole, queries = kit.both(av.rope(32)), kit.both(av.rope(32, keys=False))
    rng = np.random.default_rng()
    x = rng.standard_normal((len(POSITIONS), 64)).astype(np.float32)
    c = np.zeros(len(POSITIONS), kit.ctx_dtype)
    c["qo_pos"], c["kv_pos"] = POSITIONS, POSITIONS[::-1]
    assert (queries.native.rows("query", c, x) == whole.native.rows("query", c, x)).all()
    assert (queries.native.rows("key", c, x) == x).all() and (whole.native.rows("key", c, x) != x).any()


def test_pairings_differ_and_scores_depend_on_distance_alone(kit):
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 64))
    one, two = kit.both(av.rope(64, 1e7)), kit.both(av.rope(64, 1e7, interleaved=True))
    at = {"qo_pos": np.array([5]), "kv_pos": np.array([5])}
    assert abs(one.numpy.query(at, q) - two.numpy.query(at, q)).max() > 0.5
    for both in (one, two):
        scores = []
        for start in (0, 999, 2**20 - 40):
            at = {"qo_pos": np.array([start + 37]), "kv_pos": np.array([start])}
            scores.append(float((both.numpy.query(at, q) * both.numpy.key(at, k)).sum()))
        np.testing.assert_allclose(scores, scores[0], rtol=0, atol=1e-6)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3(dim: int, theta: float) -> list[float]:
    """As Llama 3.1's model card states it: by wavelength, with three cases."""
    out = []
    for d in range(dim // 2):
        f = theta ** (-2 * d / dim)
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            out.append(f)
        elif wavelength > 8192 / 1:
            out.append(f / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append((1 - smooth) * f / 8 + smooth * f)
    return out


def test_scaling_rules():
    np.testing.assert_allclose(av.rope_frequencies(128, 5e5, LLAMA3), llama3(128, 5e5), rtol=1e-12)
    base = av.rope_frequencies(64)
    np.testing.assert_allclose(av.rope_frequencies(64, 1e4, {"type": "linear", "factor": 4.0}), base / 4)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    got = av.rope_frequencies(128, 1e6, yarn)
    full = av.rope_frequencies(128, 1e6)
    np.testing.assert_allclose(got[:10], full[:10])  # fast pairs are kept
    np.testing.assert_allclose(got[-10:], full[-10:] / 4)  # slow pairs are stretched
    assert (np.diff(got / full) <= 1e-12).all()


def test_theta_and_scaling_are_values_not_code():
    keys = {av.compose(av.rope(128, t, scaling=s)).key for t in (1e4, 5e5) for s in (None, LLAMA3)}
    assert len(keys) == 1
    assert av.compose(av.rope(128, interleaved=True)).key not in keys
    assert av.compose(av.rope(64)).key not in keys
    assert av.rope(128, 1e4) != av.rope(128, 5e5)


def test_own_frequencies_at_run_time(kit):
    own = np.array([0.3, 0.02])
    both = kit.both(av.rope(4), rope_phase=av.rope_phases(own))
    c = np.zeros(1, kit.ctx_dtype)
    c["qo_pos"] = 12345
    x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    want = rotate(x[0], 12345, own, False)
    np.testing.assert_allclose(both.native.rows("query", c, x)[0], want, atol=2e-6)


def test_yarn_attention_factor(kit):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    both = kit.both(av.rope(8, 1e6, scaling=yarn))
    x = np.ones((1, 8))
    got = both.numpy.query({"qo_pos": np.array([0])}, x)
    np.testing.assert_allclose(got, 0.1 * math.log(4) + 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((7,), "dim.*even"),
        ((0,), "dim.*even"),
        ((8, 0.0), "theta"),
        ((8, float("nan")), "theta"),
        ((8, 1e4, 1), "interleaved"),
        ((8, 1e4, False, {"rope_type": "warp"}), "rope_type.*linear"),
        ((8, 1e4, False, {"rope_type": "linear"}), "missing.*factor"),
        ((8, 1e4, False, {"rope_type": "linear", "factor": 2.0, "betafast": 1}), "unknown.*betafast"),
        ((8, 1e4, False, {"rope_type": "linear", "factor": -2.0}), "factor.*above 0"),
        ((8, 1e4, False, "linear"), "None or a dict"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(ArgumentError, match=message):
        av.rope(*args)


def test_bad_phases_at_run_time(kit):
    with pytest.raises(ArgumentError, match=r"rope_phase must have shape \[4\]"):
        kit.both(av.rope(8), rope_phase=np.zeros(3, np.int64))
    with pytest.raises(ArgumentError, match="rank 1"):
        kit.both(av.rope(8), rope_phase=3)
