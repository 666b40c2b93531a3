# SPDX-License-Identifier: Apache-2.0
"""Causal, full and window masks against formulas written out here, in NumPy and in C++."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError


def dense(compiled, qo: int, kv: int, **values: object) -> np.ndarray:
    """[qo, kv] visibility with bottom-right positions."""
    bound = compiled.bind(values, num_qo_heads=1, num_kv_heads=1)
    qo_pos, kv_pos = np.arange(kv - qo, kv)[:, None], np.arange(kv)[None]
    seen = compiled.numpy(bound).mask({"qo_pos": qo_pos, "kv_pos": kv_pos, "qo_head": 0, "kv_head": 0})
    return np.broadcast_to(seen, (qo, kv))


def test_window_rows_of_the_fault():
    assert dense(av.compose(av.sliding_window(3)), 16, 16).sum(1).tolist() == [1, 2, 3] + [4] * 13
    seen = dense(av.compose(av.sliding_window(2)), 3, 7)
    assert [np.flatnonzero(r).tolist() for r in seen] == [[2, 3, 4], [3, 4, 5], [4, 5, 6]]


@pytest.mark.parametrize("left", range(-1, 18))
def test_decode_is_the_last_row_of_prefill(left):
    compiled = av.compose((av.causal(), av.sliding_window(left)))
    rows = dense(compiled, 16, 16)
    assert (dense(compiled, 1, 16)[0] == rows[-1]).all()
    assert (rows <= dense(av.compose(av.causal()), 16, 16)).all()
    want = 16 if left < 0 else min(left + 1, 16)
    assert rows[-1].sum() == want


def test_causal_is_bottom_right():
    assert dense(av.compose(av.causal()), 2, 6).astype(int).tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    assert dense(av.compose(av.causal()), 5, 2).astype(int).tolist() == [[0, 0]] * 3 + [[1, 0], [1, 1]]


@pytest.mark.parametrize("bad", [-2, -100, 1.5, "3", True, None])
def test_bad_windows(bad):
    with pytest.raises(ArgumentError, match="left"):
        av.sliding_window(bad)
    with pytest.raises(ArgumentError, match="right"):
        av.sliding_window(3, bad)


COMPOSITIONS = {
    "full": ((av.full(),), lambda q, k, h: np.full(np.broadcast(q, k).shape, True)),
    "causal": ((av.causal(),), lambda q, k, h: k <= q),
    "window": ((av.sliding_window(5, 3),), lambda q, k, h: (k >= q - 5) & (k <= q + 3)),
    "left": ((av.sliding_window(5, -1),), lambda q, k, h: k >= q - 5),
    "right": ((av.sliding_window(-1, 2),), lambda q, k, h: k <= q + 2),
    "both": ((av.sliding_window(4, 9), av.causal()), lambda q, k, h: (k <= q) & (k >= q - 4)),
    "twice": ((av.causal(), av.causal()), lambda q, k, h: k <= q),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_masks_agree(name, kit):
    variants, formula = COMPOSITIONS[name]
    both = kit.both(variants)
    c = kit.contexts(4000, np.random.default_rng(len(name)))
    want = formula(c["qo_pos"].astype(int), c["kv_pos"].astype(int), c["qo_head"])
    got, low, high = both.native.mask(c)
    assert (np.broadcast_to(both.numpy.mask(kit.fields(c)), want.shape) == want).all()
    assert (got == want).all()
    assert both.variant.mask_is_interval
    assert (((c["kv_pos"] >= low) & (c["kv_pos"] <= high)) == want).all()
    flags = both.native.flags()
    assert flags["mask_is_interval"] and flags["has_mask"] == (name != "full")


def test_positions_at_the_ends_do_not_wrap(kit):
    both = kit.both(av.sliding_window(2**31 - 1, 2**31 - 1))
    c = np.zeros(2, kit.ctx_dtype)
    c["qo_pos"], c["kv_pos"] = (-5, 2**31 - 2), (7, -4)
    assert both.native.mask(c)[0].tolist() == [True, False] == both.numpy.mask(kit.fields(c)).tolist()


def test_window_per_head(kit):
    left = np.array([0, 1, 2, 3, 5, 8, 13, -1], dtype=np.int32)
    both = kit.both(av.sliding_window(3), window_left=left)
    c = kit.contexts(2000, np.random.default_rng(3))
    reach = np.where(left < 0, 10**6, left)[c["qo_head"]]
    distance = c["qo_pos"].astype(int) - c["kv_pos"]
    want = (distance >= 0) & (distance <= reach)
    assert (both.native.mask(c)[0] == want).all()
    assert (both.numpy.mask(kit.fields(c)) == want).all()
    assert both.variant.reach({"window_left": left}) == (None, 0)
    assert both.variant.reach({"window_left": left[:7]}) == (13, 0)


def test_visible_range_covers_the_mask():
    rng = np.random.default_rng(5)
    for variants in (av.causal(), av.sliding_window(4), (av.causal(), av.sliding_window(2, 7)), av.full()):
        compiled = av.compose(variants)
        qo = np.sort(rng.integers(0, 40, (50, 2)), axis=1)
        low, high = compiled.visible_range(qo[:, 0], qo[:, 1])
        bound = compiled.bind({}, num_qo_heads=1, num_kv_heads=1)
        keys = np.arange(-60, 100)
        for i, (first, last) in enumerate(qo):
            pos = np.arange(first, last + 1)[:, None]
            ctx = {"qo_pos": pos, "kv_pos": keys[None], "qo_head": 0}
            seen = np.broadcast_to(compiled.numpy(bound).mask(ctx), (len(pos), len(keys))).any(0)
            inside = np.full(len(keys), True)
            if low is not None:
                inside &= keys >= low[i]
            if high is not None:
                inside &= keys <= high[i]
            assert (seen == inside).all()


def test_a_run_may_narrow_but_not_widen_what_was_planned():
    compiled = av.compose((av.causal(), av.sliding_window(8)))
    assert compiled.widened_by({}) == ()
    assert compiled.widened_by({"window_left": 4}) == ()
    assert compiled.widened_by({"window_left": 9}) == ("window_left",)
    assert compiled.widened_by({"window_left": -1}) == ("window_left",)
    assert compiled.widened_by({"window_left": 9}, planned={"window_left": 16}) == ()
    assert compiled.widened_by({"window_right": 5}) == ()  # causal still ends the range
    assert compiled.range_params == ("window_left", "window_right")
    with pytest.raises(ArgumentError, match="window_left"):
        compiled.widened_by({"window_left": -5})


def test_window_value_is_not_in_the_key():
    one, two = av.compose(av.sliding_window(8)), av.compose(av.sliding_window(4096, 3))
    assert one.key == two.key and one.cpp_source() == two.cpp_source()
    assert one != two and one == av.compose((av.sliding_window(8),)) == av.compose(one)
    assert one != av.compose(av.causal())


def test_custom_mask_is_anded_by_the_kernel():
    compiled = av.compose((av.causal(), av.custom_mask()))
    assert compiled.reads_index_mask and compiled.mask_is_interval
    assert "reads_index_mask = true" in compiled.cpp_source()
    assert compiled != av.compose(av.causal())
    with_bits = av.compose(av.causal()).with_index_mask()
    assert with_bits.key == compiled.key and with_bits == compiled and with_bits.reads_index_mask
