# SPDX-License-Identifier: Apache-2.0
"""Names, values, keys: what composing and binding must refuse, and what must not change compiled code."""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError, DtypeError
from attnrt.variants.trace import CTX
from attnrt.variants.variant import PairMap, input_node

EMPTY = np.zeros(4, np.float32)


def bind(variants, heads=(8, 2), **values):
    return av.compose(variants).bind(values, num_qo_heads=heads[0], num_kv_heads=heads[1])


def test_unknown_and_doubled_names():
    with pytest.raises(ArgumentError, match=r"logits_soft_cap is not a parameter.*none"):
        bind(av.causal(), logits_soft_cap=5.0)
    with pytest.raises(ArgumentError, match=r"softcp is not a parameter.*softcap"):
        bind(av.softcap(3.0), softcp=5.0)
    with pytest.raises(ArgumentError, match=r"softcap must belong to one variant.*rename"):
        av.compose((av.softcap(1.0), av.softcap(2.0)))
    with pytest.raises(ArgumentError, match="does not exist"):
        av.softcap(1.0)(cap=3.0)
    with pytest.raises(ArgumentError, match="run\\(\\) takes itself"):

        @av.logits
        def f(score, ctx, sm_scale=1.0):
            return score * sm_scale

        av.compose(f)


def test_rename_lets_one_variant_be_used_twice(kit):
    both = kit.both((av.softcap(50.0), av.softcap(2.0).rename(softcap="inner")))
    score = np.linspace(-90, 90, 50).astype(np.float32)
    c = kit.contexts(50, np.random.default_rng(0))
    s = score.astype(np.float64)
    want = 2 * np.tanh(50 * np.tanh(s / 50) / 2)
    np.testing.assert_allclose(both.native.logits(c, score), want, rtol=1e-6)
    window = av.sliding_window(3).rename(window_left="l", window_right="r")
    assert av.compose(window).visible_range(10, 10, {"l": 4}) == (6, 10)
    with pytest.raises(ArgumentError, match="does not exist"):
        window.rename(window_left="x")


@pytest.mark.parametrize("bad", ["causal", av.causal, 3, (av.causal(), None), [av.causal(), "x"]])
def test_what_is_not_a_variant(bad):
    with pytest.raises(ArgumentError, match="variant must be"):
        av.compose(bad)
    with pytest.raises(ArgumentError, match=r"decorate"):
        av.compose((av.causal(), lambda score, ctx: score))


def test_values_never_change_the_key():
    @av.logits
    def scaled(score, ctx, gain=1.0, table=EMPTY):
        return score * gain + table[ctx.request]

    one = av.compose((av.causal(), scaled))
    two = av.compose((av.causal(), scaled(gain=7.5, table=np.ones(9, np.float32))))
    assert one.key == two.key and one.digest == two.digest and one.cpp_source() == two.cpp_source()
    assert one != two and hash(one) != hash(two)
    assert "7.5" not in two.cpp_source()


def test_structure_changes_the_key():
    def make(body):
        return av.compose(av.logits(body)).key

    keys = [
        make(lambda score, ctx, gain=1.0: score * gain),
        make(lambda score, ctx, gain=1: score * gain),
        make(lambda score, ctx, other=1.0: score * other),
        make(lambda score, ctx, gain=None: score * gain[ctx.request]),
        make(lambda score, ctx, gain=1.0: score + gain),
        make(lambda score, ctx, gain=1.0: score * gain * 2),
        av.compose((av.causal(), av.full())).key,
        av.compose((av.custom_mask(),)).key,
        av.compose(()).key,
    ]
    assert len(set(keys)) == len(keys)
    assert make(lambda score, ctx, gain=1.0: score * gain) == keys[0]  # the function's name is not in it
    assert av.compose(None).key == av.compose(()).key == av.compose(av.full()).key


def test_order_is_part_of_the_key():
    @av.logits
    def double(score, ctx):
        return score * 2

    assert av.compose((double, av.softcap(1.0))).key != av.compose((av.softcap(1.0), double)).key


def test_variants_are_values():
    for v in (av.causal(), av.softcap(3.0), av.alibi(), av.rope(8), av.sliding_window(4)):
        again = pickle.loads(pickle.dumps(v))
        assert again == v and hash(again) == hash(v) and av.compose(again) == av.compose(v)
        assert copy.deepcopy(v) == v
        with pytest.raises(AttributeError):
            v.name = "x"
    assert av.softcap(3.0) != av.softcap(4.0)
    assert len({av.causal(), av.causal(), av.full()}) == 2


BAD_VALUES = [
    ("softcap", float("nan"), ArgumentError),
    ("softcap", 0.0, ArgumentError),
    ("softcap", np.ones(5, np.float32), ArgumentError),
    ("softcap", np.ones((8, 1), np.float32), ArgumentError),
    ("softcap", np.full(8, np.nan, np.float32), ArgumentError),
    ("softcap", "1", DtypeError),
    ("softcap", True, DtypeError),
    ("softcap", 1j, DtypeError),
    ("softcap", np.full(8, 1e39), ArgumentError),
    ("softcap", 1e39, ArgumentError),
    ("softcap", np.full(8, 2**24 + 1), DtypeError),  # integers are not rounded
    ("softcap", np.ones(8, bool), DtypeError),
    ("window_left", 2.5, ArgumentError),
    ("window_left", -2, ArgumentError),
    ("window_left", 2**31, ArgumentError),
    ("window_left", np.full(8, 2**40), DtypeError),
    ("window_left", float("nan"), ArgumentError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_VALUES)
def test_bad_values(name, value, error):
    with pytest.raises(error, match=name):
        bind((av.sliding_window(3), av.softcap(1.0)), **{name: value})


def test_values_that_convert_exactly():
    bound = bind(
        (av.sliding_window(3), av.softcap(1.0)),
        softcap=np.full(8, 0.5),
        window_left=np.arange(8, dtype=np.int64),
        window_right=np.int64(4),
    )
    assert bound.host["softcap"].dtype == np.float32
    assert bound.host["window_left"].tolist() == list(range(8))
    assert bound.host["window_right"] == 4


@pytest.mark.parametrize("value", [[0.1] * 8, np.full(8, 0.1), np.full(8, 0.1, np.longdouble), [0.1], 0.1])
def test_floats_are_rounded_to_float32(value):
    bound = bind(av.softcap(1.0), softcap=value)
    assert bound.host["softcap"].dtype == np.float32 and (bound.host["softcap"] == np.float32(0.1)).all()
    with pytest.raises(ArgumentError, match=r"softcap must fit in float32; got 1e\+39"):
        bind(av.softcap(1.0), softcap=np.asarray(value) * 0 + 1e39)
    with pytest.raises(DtypeError, match="window_left"):
        bind(av.sliding_window(1), window_left=np.full(8, 0.1))


def test_half_precision_arrays_convert():
    import ml_dtypes

    values = np.arange(1, 9).astype(ml_dtypes.bfloat16)
    for array in (values, values.astype(np.float16)):
        bound = bind(av.softcap(1.0), softcap=array)
        assert bound.host["softcap"].dtype == np.float32 and bound.host["softcap"].tolist() == list(
            range(1, 9)
        )
    with pytest.raises(DtypeError, match="window_left"):
        bind(av.sliding_window(1), window_left=values)


def test_a_logit_of_minus_infinity(kit):
    @av.logits
    def hide(score, ctx):
        return av.where(ctx.kv_pos < 3, score, -np.inf)

    both = kit.both((hide, av.softcap(5.0)))
    c = np.zeros(2, kit.ctx_dtype)
    c["kv_pos"] = 2, 3
    assert both.native.logits(c, np.zeros(2)).tolist() == [0, -5]  # in order: a cap after it makes it finite
    last = kit.both((av.softcap(5.0), hide))
    assert last.native.logits(c, np.zeros(2)).tolist() == [0, -np.inf]
    assert last.numpy.logits(kit.fields(c), np.zeros(2)).tolist() == [0, -np.inf]


def test_arrays_with_strides_and_out_of_range_indices(kit):
    @av.logits
    def bias(score, ctx, table):
        return score + table[ctx.qo_head, ctx.qo_pos - ctx.kv_pos]

    store = np.full((16, 40), np.nan, np.float32)
    table = store[::2, 5:35:3]
    table[...] = np.random.default_rng(0).standard_normal(table.shape)
    both = kit.both(bias, table=table)
    c = kit.contexts(3000, np.random.default_rng(1))
    distance = np.clip(c["qo_pos"].astype(int) - c["kv_pos"], 0, table.shape[1] - 1)
    want = table[c["qo_head"], distance]
    assert (both.native.logits(c, np.zeros(3000)) == want).all()
    assert (both.numpy.logits(kit.fields(c), np.zeros(3000)) == want).all()
    for bad in (table[0], table[None], np.zeros((8, 0), np.float32)):
        with pytest.raises(ArgumentError, match="table"):
            kit.both(bias, table=bad)


def test_device_arrays_by_address():
    class Device:
        ptr, shape, strides, dtype = 0x7F00_0000_1000, (8,), (3,), "float32"
        device = SimpleNamespace(kind="cuda", index=0)

    compiled = av.compose(av.softcap(1.0))

    def bind(value, place=lambda name, array: None):
        return compiled.bind({"softcap": value}, num_qo_heads=8, num_kv_heads=8, place=place)

    bound = bind(Device())
    assert bound.table["ptr"][0] == Device.ptr and bound.table["strides"][0, 0] == 3
    assert (
        bound.table["sizes"][0, 0] == 8 and bound.host["softcap"] is None and bound.keep[0].ptr == Device.ptr
    )
    Device.dtype = "float64"
    with pytest.raises(DtypeError, match="softcap"):
        bind(Device())
    Device.dtype = "float32"
    with pytest.raises(ArgumentError, match="softcap must be in host memory"):
        bind(Device(), place=None)
    with pytest.raises(ArgumentError, match="softcap must be in host memory"):
        compiled.numpy(bind(Device()))


def test_host_arrays_of_other_frameworks():
    torch = pytest.importorskip("torch")
    values = torch.arange(1, 17, dtype=torch.float32)[::2]
    bound = bind(av.softcap(1.0), softcap=values)
    assert bound.table["ptr"][0] == values.data_ptr() and bound.table["strides"][0, 0] == 2
    assert bound.host["softcap"].tolist() == values.tolist()
    with pytest.raises(ArgumentError, match="above 0"):
        bind(av.softcap(1.0), softcap=-values)
    with pytest.raises(DtypeError, match="softcap"):
        bind(av.softcap(1.0), softcap=values.to(torch.int32).to(torch.bool))


def test_place_moves_arrays_and_not_numbers():
    placed = []

    def place(name, array):
        placed.append((name, array.flags.c_contiguous))

        class There:
            ptr, shape, strides, dtype = 4096, array.shape, (1,), "float32"

        return There()

    compiled = av.compose((av.softcap(3.0), av.alibi()))
    bound = compiled.bind({}, num_qo_heads=4, num_kv_heads=4, place=place)
    assert placed == [("alibi_slopes", True)]
    assert bound.table["ptr"].tolist() == [0, 4096]
    assert bound.table["imm"][0] == int(np.float32(3.0).view(np.uint32))


def test_pair_hooks_of_different_shape_do_not_compose():
    with pytest.raises(ArgumentError, match=r"query hooks of rope and rope.*\(8, half\)"):
        av.compose((av.rope(8), av.rope(8, interleaved=True).rename(rope_phase="b")))
    doubled = av.compose((av.rope(8), av.rope(8).rename(rope_phase="b")))
    bound = doubled.bind({}, num_qo_heads=1, num_kv_heads=1)
    single = av.compose(av.rope(8))
    x, at = np.ones((1, 8)), {"qo_pos": np.array([3])}
    twice = single.numpy(single.bind({}, num_qo_heads=1, num_kv_heads=1)).query({"qo_pos": np.array([6])}, x)
    np.testing.assert_allclose(doubled.numpy(bound).query(at, x), twice, atol=1e-7)


def test_pair_dim_past_the_head_is_refused():
    compiled = av.compose(av.rope(16))
    form = compiled.numpy(compiled.bind({}, num_qo_heads=1, num_kv_heads=1))
    with pytest.raises(ArgumentError, match="head dim 8"):
        form.query({"qo_pos": np.array([0])}, np.zeros((1, 8)))


def test_who_asks_where_keys_stand():
    @av.logits
    def by_row(score, ctx):
        return score + ctx.qo_pos * 0.5

    @av.logits
    def by_slot(score, ctx):
        return score * (1.0 + 0.25 * (ctx.kv_pos - ctx.qo_pos))

    silent = [
        (),
        av.softcap(3.0),
        av.sigmoid(),
        av.custom_mask(),
        av.sink_logits(0.5),
        av.fp8_scales(),
        by_row,
    ]
    asking = [av.causal(), av.sliding_window(9), av.alibi(), av.rope(64), by_slot]
    asking += [av.cpp("plus", logits="return s + 1.0f;")]
    assert [av.compose(x).reads_key_positions for x in silent] == [False] * len(silent)
    assert [av.compose(x).reads_key_positions for x in asking] == [True] * len(asking)
    assert av.compose((av.custom_mask(), av.causal())).reads_key_positions


def test_defaults_that_are_closures_are_told_apart():
    """Two closures of one function share its name; the arrays that they give are other ones."""

    def bias(gain):
        default = av.Param(name="bias", default=lambda heads: np.full(heads, gain, np.float32))
        return av.cpp("plus", logits="s + bias", params={"bias": default})

    one, two = bias(1.0), bias(2.0)
    assert one != two and av.compose(one) != av.compose(two) and av.compose(one) == av.compose((one,))
    assert av.compose(one).key == av.compose(two).key
    for variant, gain in ((one, 1.0), (two, 2.0)):
        assert bind(variant).host["bias"].tolist() == [gain] * 8
    partial = functools.partial(np.full, fill_value=3.0, dtype=np.float32)
    assert bind(av.cpp("plus", logits="s + bias", params={"bias": av.Param(name="bias", default=partial)}))


FIELDS = [
    ("query", "kv_pos"),
    ("query", "kv_slot"),
    ("key", "qo_pos"),
    ("key", "qo_row"),
    ("value", "qo_row"),
]


@pytest.mark.parametrize(("hook", "field"), FIELDS)
def test_a_map_does_not_read_the_other_side(hook, field):
    """A row of k is mapped once for all queries of a tile: it has no position of one of them."""
    text = av.cpp("own", **{hook: f"y0 = x0 + (float)ctx . {field};"})
    node = PairMap(dim=None, pairing="single", y0=input_node("x0") + av.to_float(getattr(CTX, field)))
    for variant in (text, av.Variant(name="own", **{hook: node})):
        with pytest.raises(ArgumentError, match=f"own: {hook} hook must not read .*ctx.{field}"):
            av.compose((av.causal(), variant))
