# SPDX-License-Identifier: Apache-2.0
"""Threads: an attention is one thread's, a second one inside it raises; two attentions do not meet."""

from __future__ import annotations

import threading

import pytest

import attnrt as at
from attnrt import testing

v = at.variants


def make(backend):
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, q_dtype="float32", variant=v.causal()
    )
    case = testing.make_case(spec, [2, 3], [20, 7], seed=1)
    batch = testing.lay_out(case, page_size=4)
    return at.Attention(spec, backend=backend), case, batch


def test_one_thread_at_a_time(backend):
    """A second thread inside an attention raises and leaves the first alone."""
    attn, _, batch = make(backend)
    plan = attn.plan(batch.index)
    inside, leave, errors = threading.Event(), threading.Event(), []
    kernel = attn._runtime.kernel

    class Slow:
        def attend(self, call):
            inside.set()
            assert leave.wait(20)
            kernel.attend(call)

        merge, append = kernel.merge, kernel.append

    attn._runtime.kernel = Slow()
    results = []
    first = threading.Thread(target=lambda: results.append(attn.run(batch.q, batch.kv)))
    first.start()
    assert inside.wait(20)
    for call in (
        lambda: attn.run(batch.q, batch.kv),
        lambda: attn.load(plan),
        lambda: attn.plan(batch.index),
    ):
        try:
            call()
        except at.PlanError as error:
            errors.append(str(error))
    leave.set()
    first.join()
    assert len(errors) == 3 and all("one thread at a time" in e for e in errors)
    testing.check(plan, batch.q, batch.kv, results[0])


def test_after_an_error_in_the_kernel_the_next_call_works(backend):
    attn, _, batch = make(backend)
    attn.plan(batch.index)
    want, kernel = attn.run(batch.q, batch.kv), attn._runtime.kernel

    class Broken:
        def attend(self, call):
            raise MemoryError

    attn._runtime.kernel = Broken()
    with pytest.raises(MemoryError):
        attn.run(batch.q, batch.kv)
    attn._runtime.kernel = kernel
    assert attn.run(batch.q, batch.kv).tobytes() == want.tobytes()


def test_two_attentions_in_two_threads(backend):
    """Each thread its own attention: no crosstalk."""
    jobs = []
    for seed in range(2):
        attn, _, _ = make(backend)
        case = testing.make_case(attn.spec, [1, 4], [300, 12], seed=seed)
        batch = testing.lay_out(case)
        attn.plan(batch.index)
        jobs.append((attn, batch, attn.run(batch.q, batch.kv).tobytes()))
    bad = []

    def work(attn, batch, want):
        for _ in range(20):
            attn.plan(batch.index)
            if attn.run(batch.q, batch.kv).tobytes() != want:
                bad.append(1)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not bad
