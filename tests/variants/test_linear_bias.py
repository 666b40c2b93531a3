# SPDX-License-Identifier: Apache-2.0
"""ALiBi: slopes for any head count, and the bias against its formula."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError


def paper(n: int) -> list[float]:
    """The recipe of the paper's text, recursively."""
    if n & (n - 1) == 0:
        start = 2 ** (-8 / n)
        return [start ** (i + 1) for i in range(n)]
    lower = 2 ** (n.bit_length() - 1)
    return paper(lower) + paper(2 * lower)[0::2][: n - lower]


def test_slopes_of_the_fault():
    np.testing.assert_allclose(av.alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    np.testing.assert_allclose(av.alibi_slopes(12)[8:], [0.7071, 0.3536, 0.1768, 0.0884], atol=5e-5)
    assert av.alibi_slopes(8)[0] == 0.5


@pytest.mark.parametrize("n", [*range(1, 41), 64, 71, 96, 112, 128])
def test_slopes_for_any_head_count(n):
    slopes = av.alibi_slopes(n)
    assert slopes.dtype == np.float32 and slopes.shape == (n,)
    np.testing.assert_allclose(slopes, paper(n), rtol=1e-6)


@pytest.mark.parametrize("bad", [0, -1, 2.5, None, True])
def test_bad_head_counts(bad):
    with pytest.raises(ArgumentError, match="num_heads"):
        av.alibi_slopes(bad)


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (12, 1)])
def test_bias_follows_the_query_head(heads, kit):
    both = kit.both((av.causal(), av.alibi()), heads=heads)
    rng = np.random.default_rng(sum(heads))
    c = kit.contexts(2000, rng, heads)
    c["qo_pos"][:50] = rng.integers(2**19, 2**20, 50)
    score = rng.standard_normal(len(c)).astype(np.float32)
    slopes = np.array(paper(heads[0]), dtype=np.float32).astype(np.float64)
    want = score + slopes[c["qo_head"]] * (c["kv_pos"].astype(np.float64) - c["qo_pos"])
    np.testing.assert_allclose(both.numpy.logits(kit.fields(c), score), want, rtol=1e-12)
    np.testing.assert_allclose(both.native.logits(c, score), want, rtol=2e-7, atol=1e-5)


def test_own_slopes(kit):
    c = kit.contexts(500, np.random.default_rng(0))
    own = np.linspace(-1, 1, 8).astype(np.float32)
    for both in (kit.both(av.alibi(own)), kit.both(av.alibi(), alibi_slopes=own)):
        want = own.astype(np.float64)[c["qo_head"]] * (c["kv_pos"].astype(int) - c["qo_pos"])
        np.testing.assert_allclose(both.native.logits(c, np.zeros(500)), want, rtol=1e-6)
    with pytest.raises(ArgumentError, match=r"alibi_slopes.*\[8\].*got \[7\]"):
        kit.both(av.alibi(own[:7]))
