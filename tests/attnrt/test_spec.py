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
