# SPDX-License-Identifier: Apache-2.0
"""How wide a program's kernel is launched, from its text and from what the device holds."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from attnrt import AttentionSpec, variants
from attnrt.backends.cuda.programs import Programs
from attnrt.backends.cuda.render import DECODE, DECODE_THREADS


@pytest.mark.parametrize("room", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 2), (32, 2)])
@pytest.mark.parametrize("cap", [False, True])
def test_no_more_threads_than_the_text_was_compiled_for(room, head_dim, heads, cap):
    """The launch bound in the text is the most that a launch may have, whatever room shared memory leaves."""
    texts = []

    def load(source, names):
        texts.append(source)
        launch = SimpleNamespace(threads=0)
        return SimpleNamespace(groups=room, entry=lambda name: launch)

    causal = variants.causal()
    spec = AttentionSpec(
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        q_dtype="float16",
        variant=(causal, variants.softcap(30.0)) if cap else causal,
    )
    threads = Programs(spec, load, hopper=True).entry(DECODE).threads
    bound = int(re.search(r"__launch_bounds__\((\d+), 1\)\s+" + DECODE, texts[0]).group(1))
    assert threads <= bound and threads == min(room * DECODE_THREADS, bound)
