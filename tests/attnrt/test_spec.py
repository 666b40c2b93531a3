# SPDX-License-Identifier: Apache-2.0
"""What an AttentionSpec refuses, and what it fills in."""

from __future__ import annotations

import math

import numpy as np
import pytest

import attnrt as at

PLAIN = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("label", "changes"),
    [
        ("num_qo_heads", {"num_qo_heads": 10, "num_kv_heads": 4}),
        ("num_kv_heads", {"num_kv_heads": 0}),
        ("head_dim", {"head_dim": 64.0}),
        ("head_dim", {"head_dim": True}),
        ("kv_layout", {"kv_layout": "NDH"}),
        ("head_dim_vo", {"shared_kv": True, "head_dim_vo": 128, "sm_scale": 1.0}),
        ("sm_scale", {"shared_kv": True, "head_dim_vo": 32}),
        ("sm_scale", {"sm_scale": math.inf}),
        ("sm_scale", {"sm_scale": "a"}),
        ("variant", {"variant": at.variants.rope(128)}),
    ],
)
def test_refuses(label, changes):
    with pytest.raises(at.ArgumentError) as caught:
        at.AttentionSpec(**{**PLAIN, **changes})
    assert caught.value.label == label


def test_fills_in():
    spec = at.AttentionSpec(**PLAIN, q_dtype=np.float16)
    assert (spec.head_dim_vo, spec.kv_dtype, spec.out_dtype) == (64, "float16", "float16")
    assert spec.sm_scale == 1 / 8 and spec.group == 4
    assert hash(spec) == hash(at.AttentionSpec(**PLAIN, q_dtype="float16"))
    narrow = at.AttentionSpec(**PLAIN, q_dtype="float8_e4m3fn")
    assert (narrow.kv_dtype, narrow.out_dtype) == ("float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize(
    ("label", "changes"),
    [
        ("shared_kv", {"shared_kv": "yes", "sm_scale": 1.0}),
        ("shared_kv", {"shared_kv": 1, "sm_scale": 1.0}),
        ("two_level", {"two_level": None}),
        ("q_dtype", {"q_dtype": "int32"}),
        ("q_dtype", {"q_dtype": np.uint16}),
        ("q_dtype", {"q_dtype": bool}),
        ("kv_dtype", {"kv_dtype": "int8"}),
        ("out_dtype", {"out_dtype": "int32"}),
    ],
)
def test_refuses_types(label, changes):
    with pytest.raises(at.DtypeError, match=f"^{label} must be") as caught:
        at.AttentionSpec(**{**PLAIN, **changes})
    assert caught.value.label == label


def test_takes_every_float():
    for q in ("float64", "float32", "float16", "bfloat16"):
        for kv in (q, "float8_e4m3fn", "float8_e5m2"):
            spec = at.AttentionSpec(**PLAIN, q_dtype=q, kv_dtype=kv, out_dtype="float32")
            assert (spec.q_dtype, spec.kv_dtype, spec.out_dtype) == (q, kv, "float32")
    assert at.AttentionSpec(**PLAIN, shared_kv=np.bool_(True), sm_scale=1.0).shared_kv is True
