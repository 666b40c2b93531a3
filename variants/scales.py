# SPDX-License-Identifier: Apache-2.0
"""Scales of quantised tensors and learned sinks: numbers per head that come with the data."""

from __future__ import annotations

from typing import Any

from attnrt.variants.bind import check_default
from attnrt.variants.expr import FLOAT, make
from attnrt.variants.variant import Param, Variant, input_node

__all__ = ["fp8_scales", "sink_logits"]


def fp8_scales(q_scale: Any = 1.0, k_scale: Any = 1.0, v_scale: Any = 1.0, out_scale: Any = 1.0) -> Variant:
    """What stored numbers stand for: value = stored * scale, for q, k, v and the output.

    s is multiplied by q_scale * k_scale before every other variant, wherever this one stands in the tuple
    (they complete q.k); lse includes them. The output is multiplied by v_scale and divided by out_scale after
    the merge, before any output hook and the cast.

    Parameters
    ----------
    q_scale, out_scale : float or float32 [1] or [num_qo_heads]
    k_scale, v_scale : float or float32 [1] or [num_kv_heads]
        Above 0. Defaults of the ``run`` arguments of the same names; arrays may be on the device.
    """
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "out_scale": out_scale}
    params = tuple(
        check_default(
            Param(
                name=n, default=1.0 if v is None else v, heads="kv" if n[0] in "kv" else "qo", rule="positive"
            )
        )
        for n, v in given.items()
    )
    q, k, v, out = (make("param", FLOAT, attr=p.name) for p in params)
    score, o = input_node("score"), input_node("o")
    return Variant(
        name="fp8_scales", params=params, logits=score * (q * k), output=o * (v / out), scales=True
    )


def sink_logits(sinks: Any = None) -> Variant:
    """A learned logit per query head that takes weight in the softmax and has no value.

    It is in final-logit units: neither sm_scale nor any variant is applied to it. It enters once, after the
    last merge, and is part of lse; ranks that merge their results later run without it.

    Parameters
    ----------
    sinks : float or float32 [num_qo_heads], optional
        Default of the ``run`` argument ``sinks``; None: it must be given there.
    """
    param = check_default(Param(name="sinks", default=sinks))
    return Variant(name="sink_logits", params=(param,), sink=make("param", FLOAT, attr="sinks"))
