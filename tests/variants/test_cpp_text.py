# SPDX-License-Identifier: Apache-2.0
"""Variants in C++ text: every hook, parameters by name, and the line of a compiler's message."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError, UnsupportedError


@pytest.fixture
def call(native, kit):
    def run(variants, **values):
        compiled = av.compose(variants)
        return native(compiled, compiled.bind(values, num_qo_heads=8, num_kv_heads=2))

    return run


def test_every_hook(call, kit):
    own = av.cpp(
        "own",
        logits="for (int i = 0; i < 3; ++i) s = max_of(s, table(ctx.qo_head, i)); return s * gain;",
        mask="ctx.kv_pos % 2 == 0 || ctx.kv_slot < 0",
        query="y0 = x1 * gain; y1 = -x0;",
        value="y0 = x0 + d;\ny1 = x1 + step;",
        output="o * d",
        params={"gain": 2.0, "table": ("float32", 2), "step": 3},
        dim=6,
        pairing="half",
        bounds=(None, 0),
    )
    rng = np.random.default_rng(0)
    table = rng.standard_normal((8, 3)).astype(np.float32)
    native = call(own, table=table, gain=3.0)
    c = kit.contexts(400, rng)
    score = rng.standard_normal(400).astype(np.float32)
    want = np.maximum(score, table[c["qo_head"]].max(1)) * 3
    np.testing.assert_allclose(native.logits(c, score), want, rtol=1e-6)
    assert (native.mask(c)[0] == ((c["kv_pos"] % 2 == 0) & (c["kv_pos"] <= c["qo_pos"]))).all()
    x = rng.standard_normal((400, 8)).astype(np.float32)
    first, second, rest = x[:, :3], x[:, 3:6], x[:, 6:]
    np.testing.assert_allclose(native.rows("query", c, x), np.hstack([second * 3, -first, rest]), rtol=1e-6)
    want = np.hstack([first + np.arange(3), second + 3, rest])
    np.testing.assert_allclose(native.rows("value", c, x), want, rtol=1e-6)
    np.testing.assert_allclose(native.rows("output", c, x), x * np.arange(8), rtol=1e-6)
    assert (native.rows("key", c, x) == x).all()
    assert native.flags()["has_query"] and not native.flags()["has_key"]


def test_text_and_traced_hooks_chain_in_order(call, kit):
    add = av.cpp("add", logits="s + by", params={"by": 1.5})

    @av.logits
    def double(score, ctx):
        return score * 2

    c = kit.contexts(50, np.random.default_rng(1))
    score = np.linspace(-3, 3, 50).astype(np.float32)
    np.testing.assert_allclose(call((add, double)).logits(c, score), (score + 1.5) * 2, rtol=1e-6)
    np.testing.assert_allclose(call((double, add)).logits(c, score), score * 2 + 1.5, rtol=1e-6)
    np.testing.assert_allclose(
        call((av.softcap(2.0), add, double), by=0.5).logits(c, score),
        2 * (2 * np.tanh(score / 2) + 0.5),
        rtol=1e-5,
    )


def test_single_pairing_over_the_whole_head(call, kit):
    native = call(av.cpp("half", key="y0 = x0 * 0.5f;"))
    x = np.ones((3, 10), np.float32)
    assert (native.rows("key", np.zeros(3, kit.ctx_dtype), x) == 0.5).all()


def test_softmax_free_text(call):
    relu = av.cpp("relu", logits="max_of(s, 0.0f)", use_softmax=False)
    assert not call((av.causal(), relu)).flags()["use_softmax"]


def test_text_is_in_the_key_and_values_are_not():
    one, two = av.cpp("f", logits="s * g", params={"g": 1.0}), av.cpp("f", logits="s * g", params={"g": 2.0})
    assert av.compose(one).key == av.compose(two).key and one != two
    assert av.compose(av.cpp("f", logits="g * s", params={"g": 1.0})).key != av.compose(one).key


def test_no_numpy_form():
    compiled = av.compose(av.cpp("f", logits="s"))
    with pytest.raises(UnsupportedError, match=r"no NumPy form.*f\.logits"):
        compiled.numpy(compiled.bind({}, num_qo_heads=1, num_kv_heads=1))


def test_compiler_messages_name_the_users_line(tmp_path):
    text = "const float a = s;\nreturn a *\n  undeclared;"
    source = av.compose(av.cpp("mine", logits=text)).cpp_source() + "float f() { return "
    source += "attnrt::Variant::logits((const attnrt::ParamRef*)nullptr, attnrt::Ctx{}, 1.0f); }\n"
    path = tmp_path / "v.cpp"
    path.write_text(source)
    command = ["g++", "-std=c++17", "-I", av.include_dir(), "-c", str(path), "-o", str(tmp_path / "v.o")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert av.user_line(result.stderr) == ("mine.logits", 3)
    assert av.user_line('mine.logits(3): error: identifier "undeclared" is undefined') == ("mine.logits", 3)
    assert av.user_line("kernel.cu(3): error: no") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a b", "logits": "s"}, "name must be an identifier"),
        ({"name": "f"}, "must have a hook"),
        ({"name": "f", "logits": " "}, "logits must be a text"),
        ({"name": "f", "mask": "true", "use_softmax": False}, "needs a logits text"),
        ({"name": "f", "logits": "s", "params": {"s": 1.0}}, "parameter s.*taken"),
        ({"name": "f", "logits": "s", "params": {"float": 1.0}}, "parameter float.*taken"),
        ({"name": "f", "logits": "s", "params": {"a-b": 1.0}}, "identifier"),
        ({"name": "f", "logits": "s", "params": {"a": "float16"}}, "float32, int32 or int64"),
        ({"name": "f", "logits": "s", "params": {"a": float("nan")}}, "a must be finite"),
        ({"name": "f", "logits": "s", "bounds": ("a", 0), "params": {"a": 1.0}}, "bounds"),
        ({"name": "f", "key": "y0 = x0;", "pairing": "both"}, "pairing"),
        ({"name": "f", "key": "y0 = x0;", "pairing": "half"}, "dim"),
        ({"name": "f", "key": "y0 = x0;", "pairing": "half", "dim": 7}, "dim"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        av.cpp(**arguments)


def test_two_texts_of_one_name():
    with pytest.raises(ArgumentError, match=r"f.*once"):
        av.compose((av.cpp("f", logits="s"), av.cpp("f", logits="s + 1")))
