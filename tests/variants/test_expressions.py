# SPDX-License-Identifier: Apache-2.0
"""Random expressions: NumPy evaluation against Python's own arithmetic, and C++ against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import attnrt.variants as av
from attnrt.variants import evaluate, expr, printer
from attnrt.variants.trace import CTX
from attnrt.variants.variant import Variant, input_node

INTS = ("qo_pos", "kv_pos", "qo_head", "request", "qo_len")
INT_OPS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b if b else 0,
    "%": lambda a, b: a % b if b else 0,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": lambda a, b: a << (b & 31),
    ">>": lambda a, b: a >> (b & 31),
    "min": min,
    "max": max,
}
COMPARE = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
NODE_OPS = {
    **{k: v for k, v in INT_OPS.items() if k not in ("//", "%", "<<", ">>", "min", "max")},
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "min": av.minimum,
    "max": av.maximum,
}

int_leaf = st.one_of(
    st.sampled_from(INTS).map(lambda f: ("field", f)),
    st.integers(-9, 70).map(lambda v: ("const", v)),
    st.sampled_from([2**31 - 1, -(2**31), 0, -1]).map(lambda v: ("const", v)),
)
int_tree = st.recursive(
    int_leaf,
    lambda kids: st.one_of(
        st.tuples(st.sampled_from(sorted(INT_OPS)), kids, kids),
        st.tuples(st.just("pick"), st.sampled_from(sorted(COMPARE)), kids, kids, kids, kids),
    ),
    max_leaves=8,
)
test_leaf = st.tuples(st.sampled_from(sorted(COMPARE)), int_tree, int_tree)
# Comparisons of the kind that becomes an interval.
near = st.sampled_from(
    [
        ("const", 3),
        ("field", "qo_pos"),
        ("-", ("field", "qo_pos"), ("const", 7)),
        ("-", ("field", "qo_pos"), ("field", "kv_pos")),
        ("-", ("field", "kv_pos"), ("field", "qo_pos")),
        ("field", "kv_pos"),
    ]
)
interval_leaf = st.tuples(st.sampled_from(["<", "<=", ">", ">=", "=="]), near, near)
bool_tree = st.recursive(
    st.one_of(interval_leaf, interval_leaf, test_leaf),
    lambda kids: st.one_of(
        st.tuples(st.just("and"), kids, kids),
        st.tuples(st.just("and"), kids, kids),
        st.tuples(st.just("or"), kids, kids),
        st.tuples(st.just("not"), kids),
    ),
    max_leaves=5,
)


def wrap(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def plain(tree, row) -> int | bool:
    """Python's answer for one context."""
    op, *kids = tree
    if op == "field":
        return int(row[kids[0]])
    if op == "const":
        return kids[0]
    if op == "pick":
        left, right, a, b = (plain(k, row) for k in kids[1:])
        return a if COMPARE[kids[0]](left, right) else b
    values = [plain(k, row) for k in kids]
    if op in COMPARE:
        return COMPARE[op](*values)
    if op in ("and", "or"):
        return values[0] and values[1] if op == "and" else values[0] or values[1]
    if op == "not":
        return not values[0]
    return wrap(INT_OPS[op](*values))


def traced(tree) -> expr.Node:
    op, *kids = tree
    if op == "field":
        return getattr(CTX, kids[0])
    if op == "const":
        return expr.const(kids[0])
    if op == "pick":
        left, right, a, b = (traced(k) for k in kids[1:])
        return av.where(COMPARE[kids[0]](left, right), a, b)
    nodes = [traced(k) for k in kids]
    if op in COMPARE:
        return COMPARE[op](*nodes)
    if op in ("and", "or"):
        return nodes[0] & nodes[1] if op == "and" else nodes[0] | nodes[1]
    return ~nodes[0] if op == "not" else NODE_OPS[op](*nodes)


def many(build, composed: list[av.Composed], bound, fixtures):
    """All variants in one library, each behind its own functions."""
    text = "".join(
        c.cpp_source(f"V{i}") + fixtures.wrapper(f"V{i}", f"_{i}", full=False) for i, c in enumerate(composed)
    )
    library = build(text, "-O0", "-w")
    return [fixtures.native(library, bound, f"_{i}") for i in range(len(composed))]


relaxed = settings(
    max_examples=4,
    phases=(Phase.explicit, Phase.generate),  # each example is a compilation: shrinking would take minutes
    deadline=None,
    derandomize=False,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


@relaxed
@given(trees=st.lists(int_tree, min_size=15, max_size=15), seed=st.integers(0, 2**32 - 1))
def test_integers_are_exact(trees, seed, build, kit):
    c = kit.contexts(40, np.random.default_rng(seed))
    c["qo_pos"][:4] = [2**31 - 1, -(2**31), -1, 0]
    want = np.array([[plain(t, row) for row in c] for t in trees])
    variants = []
    for tree in trees:
        # Low and high halves as exact float32 logits.
        node = traced(tree)
        score = av.to_float((node & 0xFFFF) * 1) + av.to_float(node >> 16) * 65536.0 * 0.0
        variants.append(av.compose(Variant(name="low", logits=score + input_node("score"))))
        variants.append(
            av.compose(Variant(name="high", logits=av.to_float(node >> 16) + input_node("score")))
        )
    bound = variants[0].bind({}, num_qo_heads=8, num_kv_heads=2)
    natives = many(build, variants, bound, kit)
    zero = np.zeros(len(c), np.float32)
    for i, (low, high) in enumerate(zip(variants[::2], variants[1::2], strict=True)):
        by_numpy = [v.numpy(bound).logits(kit.fields(c), zero) for v in (low, high)]
        by_cpp = [n.logits(c, zero).astype(np.float64) for n in natives[2 * i : 2 * i + 2]]
        for half in (by_numpy, by_cpp):
            got = np.broadcast_to(half[1] * 65536 + half[0], len(c))
            assert (got == want[i]).all(), (trees[i], got, want[i])


def leaves_int32(tree, row) -> bool:
    """Whether a difference from kv_pos passes the ends of int32: exact where a comparison becomes an interval, else it wraps."""
    op, *kids = tree
    if op in ("field", "const"):
        return False
    kids = [kid for kid in kids if isinstance(kid, tuple)]
    if op == "-" and ("field", "kv_pos") in kids:
        exact = plain(kids[0], row) - plain(kids[1], row)
        if wrap(exact) != exact:
            return True
    return any(leaves_int32(kid, row) for kid in kids)


@relaxed
@given(trees=st.lists(bool_tree, min_size=25, max_size=25), seed=st.integers(0, 2**32 - 1))
def test_masks_are_exact(trees, seed, build, kit):
    c = kit.contexts(60, np.random.default_rng(seed), span=12)
    variants = [av.compose(Variant(name="m", mask=traced(t))) for t in trees]
    bound = variants[0].bind({}, num_qo_heads=8, num_kv_heads=2)
    for tree, variant, native in zip(trees, variants, many(build, variants, bound, kit), strict=True):
        here = np.array([not leaves_int32(tree, row) for row in c])
        want = np.array([plain(tree, row) for row in c])[here]
        got, low, high = (x[here] for x in native.mask(c))
        assert (got == want).all(), tree
        numpy = np.broadcast_to(variant.numpy(bound).mask(kit.fields(c)), here.shape)[here]
        assert (numpy == want).all(), tree
        inside = (c["kv_pos"][here] >= low) & (c["kv_pos"][here] <= high)
        assert (inside | ~want).all(), tree
        if variant.mask_is_interval:
            assert (inside == want).all(), tree


float_tree = st.recursive(
    st.one_of(
        st.just(("score",)),
        st.sampled_from(["qo_pos", "kv_pos", "qo_head"]).map(lambda f: ("field", f)),
        st.floats(-4, 4, width=32).map(lambda v: ("const", v)),
    ),
    lambda kids: st.one_of(
        st.tuples(st.sampled_from(["+", "-", "*", "min", "max"]), kids, kids),
        st.tuples(st.sampled_from(["tanh", "logistic", "abs", "neg", "gauss", "share", "root"]), kids),
        st.tuples(st.just("pick"), kids, kids),
    ),
    max_leaves=10,
)
FLOAT_OPS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "min": av.minimum,
    "max": av.maximum,
    "tanh": np.tanh,
    "logistic": av.logistic,
    "abs": abs,
    "neg": lambda a: -a,
    "gauss": lambda a: np.exp(-(a * a)),
    "share": lambda a: a / (1 + abs(a)),
    "root": lambda a: (a * a + 1) ** 0.5,
    "pick": lambda a, b: np.where((CTX.kv_pos % 3) == 1, a, b),
}


def traced_float(tree) -> expr.Node:
    op, *kids = tree
    if op == "score":
        return input_node("score")
    if op == "field":
        return av.to_float(getattr(CTX, kids[0]))
    if op == "const":
        return expr.const(float(kids[0]))
    return expr.as_node(FLOAT_OPS[op](*(traced_float(k) for k in kids)))


@relaxed
@given(trees=st.lists(float_tree, min_size=20, max_size=20), seed=st.integers(0, 2**32 - 1))
def test_floats_are_close(trees, seed, build, kit):
    """The distance to double precision is bounded by the largest intermediate value, step by step."""
    rng = np.random.default_rng(seed)
    c, score = kit.contexts(60, rng, span=16), rng.standard_normal(60).astype(np.float32)
    variants = [av.compose(Variant(name="f", logits=traced_float(t))) for t in trees]
    bound = variants[0].bind({}, num_qo_heads=8, num_kv_heads=2)
    for tree, variant, native in zip(trees, variants, many(build, variants, bound, kit), strict=True):
        if variant.logits is None:  # the score itself
            continue
        steps = expr.topological((variant.logits,))
        sizes = [
            np.abs(evaluate.evaluate(s, {**kit.fields(c), "score": score}, None)).max(initial=1)
            for s in steps
            if s.dtype == expr.FLOAT
        ]
        want = np.broadcast_to(variant.numpy(bound).logits(kit.fields(c), score), len(c))
        limit = 4 * len(steps) * 2.0**-24 * max(sizes) * np.prod(sorted(sizes)[-2:])
        assert np.abs(native.logits(c, score) - want).max() <= limit, tree
        single = np.broadcast_to(variant.numpy(bound, np.float32).logits(kit.fields(c), score), len(c))
        assert single.dtype == np.float32 and np.abs(single - want).max() <= limit, tree


UNARY = {
    "exp": (np.exp, 2, (-103, 88.7)),
    "exp2": (np.exp2, 2, (-149, 127.9)),
    "log": (np.log, 3, (1e-40, 1e38)),
    "log2": (np.log2, 3, (1e-40, 1e38)),
    "tanh": (np.tanh, 4, (-20, 20)),
    "logistic": (lambda x: 1 / (1 + np.exp(-x)), 4, (-80, 80)),
    "sqrt": (np.sqrt, 1, (0, 1e30)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2, (1e-30, 1e30)),
    "sinpi": (lambda x: np.sin((x - 2 * np.round(x / 2)) * np.pi), 2, (-1000, 1000)),
    "cospi": (lambda x: np.cos((x - 2 * np.round(x / 2)) * np.pi), 2, (-1000, 1000)),
    "sin": (np.sin, 2, (-100, 100)),
    "cos": (np.cos, 2, (-100, 100)),
    "floor": (np.floor, 0, (-1e6, 1e6)),
    "ceil": (np.ceil, 0, (-1e6, 1e6)),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_to_the_last_places(name, kit):
    exact, ulps, (low, high) = UNARY[name]
    function = getattr(av, name)
    both = kit.both(Variant(name="f", logits=function(input_node("score"))))
    rng = np.random.default_rng(7)
    x = rng.uniform(low, high, 40000)
    small = np.exp(rng.uniform(math.log(1e-38), math.log(max(high, 1)), 20000)) * rng.choice([-1, 1], 20000)
    x = np.concatenate([x, small[(small >= low) & (small <= high)]]).astype(np.float32)
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64))
    got = both.native.logits(np.zeros(len(x), kit.ctx_dtype), x).astype(np.float64)
    # Where a sine passes zero away from 0 the argument pi * f is rounded once: absolute, one place of 1.
    spacing = np.spacing(
        np.maximum(np.abs(want), 0.25 if name in ("sinpi", "cospi") else 2.0**-126).astype(np.float32)
    )
    error = np.abs(got - want) / spacing
    assert error.max() <= max(ulps, 0.5), (name, x[error.argmax()], error.max())
    np.testing.assert_allclose(both.numpy.logits({}, x), want, rtol=1e-12, atol=1e-13)


def test_special_values(kit):
    inf, nan = np.inf, np.nan
    table = {
        "exp": ([-inf, inf, nan, 200, -200, 0], [0, inf, nan, inf, 0, 1]),
        "exp2": ([-inf, inf, nan, 200, -200, 0], [0, inf, nan, inf, 0, 1]),
        "log": ([0, -1, inf, nan, 1], [-inf, nan, inf, nan, 0]),
        "log2": ([0, -1, inf, nan, 8], [-inf, nan, inf, nan, 3]),
        "tanh": ([-inf, inf, nan, 0], [-1, 1, nan, 0]),
        "logistic": ([-inf, inf, nan, 0], [0, 1, nan, 0.5]),
        "sqrt": ([-1, 0, inf], [nan, 0, inf]),
    }
    for name, (x, want) in table.items():
        both = kit.both(Variant(name="f", logits=getattr(av, name)(input_node("score"))))
        got = both.native.logits(np.zeros(len(x), kit.ctx_dtype), np.array(x, np.float32))
        np.testing.assert_array_equal(got, np.array(want, np.float32), err_msg=name)
        single = both.variant.numpy(both.bound, np.float32).logits({}, np.array(x))
        np.testing.assert_array_equal(single, want, err_msg=name)


def test_casts_saturate(kit):
    x = np.array(
        [2.9, -2.9, 1e20, -1e20, np.inf, -np.inf, np.nan, 2147483520.0, 2.0**31, -(2.0**31)], np.float32
    )
    node = av.to_int(input_node("score"))
    want = [2, -2, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, 2147483520, 2**31 - 1, -(2**31)]
    for shift, part in ((16, lambda v: v >> 16), (0, lambda v: v & 0xFFFF)):
        both = kit.both(Variant(name="f", logits=av.to_float((node >> shift) if shift else node & 0xFFFF)))
        expected = [part(v) for v in want]
        assert both.native.logits(np.zeros(len(x), kit.ctx_dtype), x).tolist() == expected
        assert both.numpy.logits({}, x).tolist() == expected


def test_every_operation_has_both_rules():
    assert set(evaluate.EVALUATE) == set(printer.PRINT)


def test_equal_expressions_are_one_node():
    a, b = CTX.qo_pos - CTX.kv_pos, CTX.qo_pos - CTX.kv_pos
    assert a is b and (a * 2.0) is (b * 2.0)
    assert expr.const(0.0) is not expr.const(-0.0)
    assert expr.const(1) is not expr.const(1.0) and expr.const(1) is not expr.const(True)
    text = av.compose(
        Variant(name="f", logits=np.tanh(input_node("score")) * np.tanh(input_node("score")))
    ).cpp_source()
    assert text.count("f_tanh(") == 1


def test_dtypes():
    assert (CTX.qo_pos + 1).dtype == "int32" and (CTX.qo_pos + 1.0).dtype == "float32"
    assert (CTX.qo_pos / 2).dtype == "float32" and (CTX.qo_pos // 2).dtype == "int32"
    assert (CTX.kv_slot + CTX.qo_pos).dtype == "int64" and (CTX.kv_slot * 0.5).dtype == "float32"
    assert ((CTX.qo_pos < 1) + 1).dtype == "int32" and (-(CTX.qo_pos < 1)).dtype == "int32"
    assert (CTX.qo_pos**2).dtype == "int32" and (CTX.qo_pos**2.5).dtype == "float32"
    assert (2**31 + CTX.qo_pos).dtype == "int64"
    assert (np.float32(2) * input_node("score")).dtype == "float32"
    assert (np.int64(2) * CTX.qo_pos).dtype == "int32"
