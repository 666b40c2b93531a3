# SPDX-License-Identifier: Apache-2.0
"""What is remembered of the latest of many: not the object itself, and never another thread's."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path

import pytest

from attnrt.latest import Latest

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
from fake_driver import build, run_script


class Owner:
    pass


def test_one_value_by_identity_and_key():
    latest, a, b = Latest(), Owner(), Owner()
    assert latest.get(a) is None
    assert latest.put("x", a, 1) == "x"
    assert latest.get(a, 1) == "x" and latest.get(a, 2) is None and latest.get(b, 1) is None
    latest.put("y", b)
    assert latest.get(a, 1) is None and latest.get(b) == "y"
    del b
    gc.collect()
    assert latest.get(Owner()) is None


def test_threads_get_their_own():
    latest, wrong = Latest(), []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(number: int) -> None:
        owner = Owner()
        for _ in range(3000):
            found = latest.get(owner)
            if (latest.put(number, owner) if found is None else found) != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_dropped_attention_gives_its_memory_back(tmp_path):
    """At once: a collector that finds it later would free it in the middle of something, and freeing waits for the GPU."""
    pytest.importorskip("attnrt.backends.cuda._driver")
    run_script(
        build(tmp_path),
        """
import gc
gc.disable()
s = spec()
q, kv, out, lse = arrays(s, 8)
new = at.empty((2, 2, 64), s.kv_dtype, "cuda:0")
for limits in (at.Limits(8, 32, 256, num_pages=64), None):
    trace()
    attn = at.Attention(s, backend=cuda, limits=limits)
    for index in (paged(), paged((1, 1)), paged((1, 1), (41, 71))):
        attn.plan(index, pad_to=8)
        for _ in range(2):
            attn.run(q, kv, out=out, lse=lse, stream=3)
        attn.append(new, new, kv, slots=[5, 6], stream=3)
    taken = kinds()
    del attn
    given = kinds()
    assert given.count("free") == taken.count("alloc") > 0, (taken, given)
    assert given.count("host_free") == taken.count("host_alloc") > 0, (taken, given)
""",
    )
