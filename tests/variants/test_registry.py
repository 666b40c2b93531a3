# SPDX-License-Identifier: Apache-2.0
"""Names of variants: ours, registered ones, and what is refused."""

from __future__ import annotations

import pytest

import attnrt.variants as av
from attnrt.errors import ArgumentError


def test_builtins_are_registered():
    ours = "alibi causal custom_mask fp8_scales full rope sigmoid sink_logits sliding_window softcap"
    assert set(ours.split()) <= set(av.names())
    for name in ours.split():
        assert av.registry.get(name) is getattr(av, name)


def test_a_registered_variant_is_an_attribute():
    @av.register("test_only_gain")
    def gain(by):
        return av.logits(lambda score, ctx, by=by: score * by)

    assert av.test_only_gain is gain and "test_only_gain" in av.names()
    assert av.compose(av.test_only_gain(2.0)).params[0].default == 2.0
    with pytest.raises(ArgumentError, match="taken"):
        av.register("causal")(gain)
    with pytest.raises(AttributeError, match="no_such_variant"):
        _ = av.no_such_variant
