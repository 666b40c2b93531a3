# SPDX-License-Identifier: Apache-2.0
"""The fold against float64 sums over all keys, and its exact rules on empty states."""

import itertools

import numpy as np
import pytest

from attnrt.fold import LN2, LOG2E, State, empty_state, finish, fold, fold_states


def leaf(logits, v, dtype=np.float32):
    """Raw state of one set of keys: logits [rows, keys] (natural), v [keys, dim]."""
    s = logits.astype(dtype) * dtype(LOG2E)
    m = s.max(-1, initial=-np.inf)
    p = np.exp2(s - np.where(np.isneginf(m), 0, m)[:, None])
    return State(m=m, l=p.sum(-1), acc=p @ v.astype(dtype))


def same_bits(a, b):
    return all(
        np.array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))
        for x, y in zip((a.m, a.l, a.acc), (b.m, b.l, b.acc), strict=True)
    )


@pytest.mark.parametrize("cuts", [[0, 40], [0, 1, 40], [0, 7, 7, 20, 33, 40]])
def test_against_all_keys_at_once(cuts, rng):
    logits = rng.normal(0, 4, (6, 40))
    logits[2, :25] = -np.inf
    logits[4] = -np.inf
    v = rng.normal(size=(40, 5))
    states = [leaf(logits[:, a:b], v[a:b]) for a, b in itertools.pairwise(cuts)]
    out, lse = finish(fold_states(states))
    with np.errstate(all="ignore"):
        top = np.where(np.isneginf(logits.max(-1)), 0, logits.max(-1))
        p = np.exp(logits - top[:, None])
        want, want_lse = p @ v / p.sum(-1)[:, None], top + np.log(p.sum(-1))
    want[4] = 0
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, want, rtol=0, atol=3e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=6e-6)
    assert np.isneginf(lse[4]) and not np.signbit(out[4]).any()


def test_an_empty_state_is_skipped_whatever_it_holds(rng):
    a = leaf(rng.normal(size=(3, 9)), rng.normal(size=(9, 4)))
    a.acc[0, 0] = -0.0
    for junk in (0.0, np.nan, np.inf, 1e30):
        b = empty_state((3,), 4)
        b.l[...] = junk
        b.acc[...] = junk
        assert same_bits(fold(a, b), a)
        assert same_bits(fold(b, a), a)
        out, lse = finish(fold(b, b))
        assert np.array_equal(out, np.zeros((3, 4))) and np.isneginf(lse).all()


def test_two_rounded_products_and_one_rounded_sum(rng):
    a = leaf(rng.normal(size=(50, 9)), rng.normal(size=(9, 4)))
    b = leaf(rng.normal(size=(50, 9)), rng.normal(size=(9, 4)))
    got = fold(a, b)
    m = np.maximum(a.m, b.m)
    sa, sb = np.exp2(a.m - m), np.exp2(b.m - m)
    for have, x, y in ((got.l, a.l * sa, b.l * sb), (got.acc, a.acc * sa[:, None], b.acc * sb[:, None])):
        exact = x.astype(np.float64) + y.astype(np.float64)
        assert np.array_equal(have, exact.astype(np.float32))


def test_order_matters_so_it_is_fixed(rng):
    states = [leaf(rng.normal(size=(64, 9)), rng.normal(size=(9, 4))) for _ in range(4)]
    left = fold(fold(fold(states[0], states[1]), states[2]), states[3])
    assert same_bits(fold_states(states), left)
    assert not same_bits(fold(fold(states[0], states[1]), fold(states[2], states[3])), left)


def test_lse_is_natural_c06():
    state = State(m=np.array([0.0]), l=np.array([10.0]), acc=np.array([[8.0]]))
    out, lse = finish(state)
    assert out[0, 0] == pytest.approx(0.8, abs=1e-15) and lse[0] == pytest.approx(np.log(10), abs=1e-15)
    assert pytest.approx(1, abs=1e-16) == LN2 * LOG2E


def test_float64_states_stay_float64(rng):
    a = leaf(rng.normal(size=(3, 9)), rng.normal(size=(9, 4)), np.float64)
    b = leaf(rng.normal(size=(3, 9)), rng.normal(size=(9, 4)), np.float64)
    assert {x.dtype for x in (*finish(fold(a, b)), fold(a, b).acc)} == {np.dtype(np.float64)}
