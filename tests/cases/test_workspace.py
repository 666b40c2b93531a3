# SPDX-License-Identifier: Apache-2.0
"""Hard cases of memory: staging that is reused too early, buffers too small, scratch of two streams, sizes by kv."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing

v = at.variants


def test_c12_staging_of_plan_n_outlives_its_copy(late, workspace_tests, kit):
    """64 requests x 400 keys, then 64 x 1, on a device that has not begun: A's result is A's."""
    spec = kit.spec("reference", num_qo_heads=2, num_kv_heads=1, head_dim=8)
    attn = at.Attention(spec, backend=workspace_tests.LateBackend(late))
    steps = [
        testing.lay_out(testing.make_case(spec, [1] * 64, [n] * 64, seed=n), builder="ragged")
        for n in (40, 1)
    ]
    outs = [np.full((64, 2, 8), np.nan, np.float32) for _ in steps]
    plans = []
    for step, out in zip(steps, outs, strict=True):
        plans.append(attn.plan(step.index))
        attn.run(step.q, step.kv, out=out)
    assert late.done < len(late.queue)
    late.wait_host(len(late.queue))
    for plan, step, out in zip(plans, steps, outs, strict=True):
        testing.check(plan, step.q, step.kv, out)


@pytest.mark.gpu
def test_c12_on_a_blocked_stream(gpu_backend, kit):
    torch = pytest.importorskip("torch")
    spec = kit.spec(gpu_backend, head_dim=64)
    attn, alone = kit.attention(gpu_backend, spec), kit.attention(gpu_backend, spec)
    k = torch.randn(64 * 4096, 2, 64, device="cuda", dtype=torch.float16)
    q = torch.randn(64, 4, 64, device="cuda", dtype=torch.float16)
    every = np.arange(65)
    long, short = (formats.ragged(every, every * n) for n in (4096, 1))
    alone.plan(long)
    want = alone.run(q, (k, k))
    torch.cuda.synchronize()
    for _ in range(5):
        torch.cuda._sleep(200_000_000)
        attn.plan(long)
        a = attn.run(q, (k, k))
        for _ in range(4):
            attn.plan(short)
            b = attn.run(q, (k, k))
        torch.cuda.synchronize()
        assert a.equal(want) and b.equal(k[:64].repeat_interleave(2, 1))


def test_c17_a_plan_past_the_limits_writes_nothing(host, kit):
    """Buffers for 2 requests and 8 pages: 9 pages, or 3 requests, raise with both numbers; words around it stay."""
    spec = kit.spec(host)
    limits = at.Limits(2, 4, 8)
    total = at.Workspace.nbytes([spec], limits, "cpu", backend=host)
    block = np.full(total + 8192, 0x7F, np.uint8)
    ws = at.Workspace([spec], limits, "cpu", buffer=block[4096:-4096], backend=host)
    attn = kit.attention(host, spec, workspace=ws)
    q, kv = kit.draw(1, 2, 4, 16), (kit.draw(2, 9, 16, 2, 16),) * 2
    good = formats.paged([0, 1, 2], [0, 4, 8], np.arange(8), [64, 64], 16)
    want = kit.right(host, spec, good, q, kv, attn=attn)
    inside = block.tobytes()
    for bad, name, needed, given in (
        (formats.paged([0, 1, 2], [0, 4, 9], np.arange(9), [64, 80], 16), "max_index_entries", 9, 8),
        (formats.paged([0, 1, 2, 3], [0, 1, 2, 3], np.arange(3), [16] * 3, 16), "max_requests", 3, 2),
        (formats.paged([0, 1, 5], [0, 1, 2], np.arange(2), [16] * 2, 16), "max_qo_tokens", 5, 4),
        (formats.tree(good, mask=[np.ones((1, 64), bool)] * 2), "max_mask_bytes", 16, 0),
    ):
        with pytest.raises(at.LimitError, match=name) as caught:
            attn.plan(bad)
        assert (caught.value.limit, caught.value.needed, caught.value.given) == (name, needed, given)
        assert block.tobytes() == inside, "a refused plan wrote"
    testing.same(want, kit.again(attn, spec, 2, q, kv), "a refused plan")
    assert (block[:4096] == 0x7F).all() and (block[-4096:] == 0x7F).all()


def test_c63_two_threads_of_one_shape(host, kit):
    """Each thread its own attention: same bits, 40 times over; one attention in two threads raises."""
    spec = kit.spec(host)
    index = formats.ragged([0, 1, 4], [0, 600, 640])
    q, kv = [kit.draw(s, 4, 4, 16) for s in (1, 2)], (kit.draw(3, 640, 2, 16),) * 2
    want = [kit.right(host, spec, index, x, kv) for x in q]
    wrong: list[str] = []

    def work(mine):
        attn = kit.attention(host, spec)
        for _ in range(3 if host == "reference" else 40):
            try:
                testing.same(
                    want[mine], kit.run(host, spec, index, q[mine], kv, attn=attn), "a thread beside"
                )
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
    attn = kit.attention(host, spec)
    attn.plan(index)
    attn._runtime.lock.acquire()  # as inside another thread's run
    try:
        for call in (lambda: attn.run(q[0], kv), lambda: attn.plan(index)):
            with pytest.raises(at.PlanError, match="one thread"):
                call()
    finally:
        attn._runtime.lock.release()


@pytest.mark.gpu
def test_c63_two_streams_of_one_shape(gpu_backend, kit):
    torch = pytest.importorskip("torch")
    spec = kit.spec(gpu_backend, head_dim=64)
    index = formats.ragged([0, 1, 4], [0, 5000, 5040])
    k = torch.randn(5040, 2, 64, device="cuda", dtype=torch.float16)
    qs = [torch.randn(4, 4, 64, device="cuda", dtype=torch.float16) for _ in range(2)]
    attns = [kit.attention(gpu_backend, spec) for _ in qs]
    streams = [torch.cuda.Stream() for _ in qs]
    want = []
    for attn, q in zip(attns, qs, strict=True):
        attn.plan(index)
        want.append(attn.run(q, (k, k)))
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(100):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                attns[i].plan(index)
                got[i].append(attns[i].run(qs[i], (k, k)))
    torch.cuda.synchronize()
    assert all(x.equal(want[i]) for i in (0, 1) for x in got[i])


def test_c104_scratch_follows_kv(host, kit):
    """16 queries over 200 cached keys: room counted for the queries alone is refused; room for 216 keys runs."""
    spec = kit.spec(host)
    index = formats.paged([0, 16], [0, 216], np.random.default_rng(0).permutation(216), [216], 1)
    q, kv = kit.draw(1, 16, 4, 16), (kit.draw(2, 216, 1, 2, 16),) * 2
    with pytest.raises(at.LimitError, match="max_index_entries") as caught:
        kit.attention(host, spec, limits=at.Limits(1, 16, 16)).plan(index)
    assert (caught.value.needed, caught.value.given) == (216, 16)
    exact = at.Limits(1, 16, 216, max_partial_slots=0)
    total = at.Workspace.nbytes([spec], exact, "cpu", backend=host)
    block = np.full(total + 8192, 0x7F, np.uint8)
    ws = at.Workspace([spec], exact, "cpu", buffer=block[4096:-4096], backend=host)
    kit.right(host, spec, index, q, kv, attn=kit.attention(host, spec, workspace=ws))
    assert (block[:4096] == 0x7F).all() and (block[-4096:] == 0x7F).all()
    with pytest.raises(at.LimitError, match="buffer"):
        at.Workspace([spec], exact, "cpu", buffer=block[: total - 1], backend=host)
