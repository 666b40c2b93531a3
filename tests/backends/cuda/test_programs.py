# SPDX-License-Identifier: Apache-2.0
"""How wide a program's kernel is launched, from its text and from what the device holds; several programs at once."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import pytest

from attnrt import AttentionSpec, variants
from attnrt.backends.cuda.programs import Programs
from attnrt.backends.cuda.render import ATTEND, DECODE, DECODE_THREADS, MERGE
from attnrt.errors import CompileError


@pytest.mark.parametrize("room", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(8, 2), (32, 2)])
@pytest.mark.parametrize("cap", [False, True])
def test_no_more_threads_than_the_text_was_compiled_for(room, head_dim, heads, cap):
    """The launch bound in the text is the most that a launch may have, whatever room shared memory leaves."""
    texts = []

    def load(source, names, roles):
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


SPEC = AttentionSpec(
    num_qo_heads=8, num_kv_heads=2, head_dim=64, q_dtype="float16", variant=variants.causal()
)


def loaded():
    launch = SimpleNamespace(threads=0)
    return SimpleNamespace(groups=1, entry=lambda name: launch)


def test_several_programs_are_compiled_at_once_and_each_once():
    """Every compilation waits for the others to have begun; callers at the same time share them."""
    together, names = threading.Barrier(3, timeout=20), []

    def load(source, found, roles):
        names.extend(found)
        together.wait()
        return loaded()

    programs = Programs(SPEC, load, hopper=False)
    callers = [
        threading.Thread(target=programs.prepare, args=((ATTEND, DECODE, MERGE),), daemon=True)
        for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert sorted(names) == sorted((ATTEND, DECODE, MERGE))


def test_an_error_among_several_is_raised_and_the_next_call_works():
    broken = [True]

    def load(source, names, roles):
        if names == (DECODE,) and broken:
            raise CompileError("x", "did not compile", None, log="", line=None)
        return loaded()

    programs = Programs(SPEC, load, hopper=False)
    with pytest.raises(CompileError):
        programs.prepare((ATTEND, DECODE, MERGE))
    broken.clear()
    programs.prepare((ATTEND, DECODE, MERGE))
    assert programs.entry(DECODE).threads
