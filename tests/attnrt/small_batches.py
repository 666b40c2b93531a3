# SPDX-License-Identifier: Apache-2.0
"""A small spec, its batches, and limits that hold them."""

from __future__ import annotations

import attnrt as at
from attnrt import testing

v = at.variants


def spec_of(**changes):
    base = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "q_dtype": "float32", "variant": v.causal()}
    return at.AttentionSpec(**(base | changes))


def batch_of(spec, qo, kv, seed=0, **layout):
    case = testing.make_case(spec, qo, kv, seed=seed)
    return testing.lay_out(case, **({"page_size": 4} | layout))


LIMITS = at.Limits(4, 12, 80, max_parts=2, max_mask_bytes=64, max_partial_slots=40, num_pages=200)
