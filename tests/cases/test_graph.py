# SPDX-License-Identifier: Apache-2.0
"""Hard cases of graph capture: blocks that no plan wrote, capture without limits, allocation inside a capture."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, memory, testing

v = at.variants

#: (rows of q, lengths of the keys): more and fewer requests, a split row, nothing at all.
STEPS = (
    ([1] * 16, [300] * 16), ([1, 1], [40, 3]), ([1], [5000]), ([], []), ([3, 0, 1], [9, 2, 70]), ([2], [1]),
)  # fmt: skip
LIMITS = at.Limits(16, 16, 6000)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_c14_entries_that_no_plan_wrote(host, kit, byte):
    """One buffer full of garbage, bigger plans before smaller ones, cutting on and off: as in fresh memory."""
    spec = kit.spec(host, num_qo_heads=16, num_kv_heads=2, head_dim=8)
    for slots in (None, 0):
        limits = at.Limits(16, 16, 6000, max_partial_slots=slots)
        block = np.full(at.Workspace.nbytes([spec], limits, "cpu", backend=host), byte, np.uint8)
        ws = at.Workspace([spec], limits, "cpu", buffer=block, backend=host)
        attn = kit.attention(host, spec, workspace=ws)
        for n, (rows, keys) in enumerate(STEPS):
            few = 3 if host == "reference" else 16
            qo, kv = rows[:few], [min(x, 200 * few) for x in keys[:few]]
            batch = testing.lay_out(testing.make_case(spec, qo, kv, seed=n), builder="ragged")
            q = np.concatenate([batch.q, np.full((16 - len(batch.q), 16, 8), np.nan, np.float32)])
            got = kit.run(host, spec, batch.index, q, batch.kv, attn=attn, pad_to=16)
            want = kit.right(host, spec, batch.index, batch.q, batch.kv)
            own = len(batch.q)
            testing.same(want, testing.Result(out=got.out[:own], lse=got.lse[:own]), "garbage")
            assert not got.out[own:].any() and np.isneginf(got.lse[own:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [None, 0])
def test_c14_one_graph_serves_every_later_plan(gpu_backend, kit, slots):
    """A graph captured for 16 padded rows replays every step as an eager run would, in a buffer full of 0x7f."""
    torch = pytest.importorskip("torch")
    spec = kit.spec(gpu_backend, num_qo_heads=16, num_kv_heads=2, head_dim=64)
    limits = at.Limits(16, 16, 6000, max_partial_slots=slots)
    size = at.Workspace.nbytes([spec], limits, "cuda", backend=gpu_backend)
    buffer = torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")
    attn = kit.attention(
        gpu_backend, spec, workspace=at.Workspace([spec], limits, "cuda", buffer=buffer, backend=gpu_backend)
    )
    q = torch.zeros(16, 16, 64, dtype=torch.float16, device="cuda")
    k, values = (torch.zeros(6000, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    out, lse = torch.zeros_like(q), torch.zeros(16, 16, device="cuda")
    batches = [
        testing.lay_out(testing.make_case(spec, qo, kv, seed=n), page_size=1)
        for n, (qo, kv) in enumerate(STEPS)
    ]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        attn.plan(batches[0].index, pad_to=16)
        attn.run(q, (k, values), out=out, lse=lse)
    side.synchronize()
    with torch.cuda.graph(graph, stream=side):
        attn.run(q, (k, values), out=out, lse=lse)
    for batch in [*batches, *batches[::-1]]:
        rows = len(batch.q)
        q.fill_(float("nan"))
        q[:rows] = torch.from_numpy(batch.q)
        for cache, host_cache in zip((k, values), batch.kv, strict=True):
            flat = host_cache.reshape(-1, 2, 64)
            cache.fill_(float("nan"))
            cache[: len(flat)] = torch.from_numpy(flat)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            attn.plan(batch.index, pad_to=16)
            graph.replay()
        torch.cuda.synchronize()
        got = testing.Result(out=out[:rows].cpu().numpy(), lse=lse[:rows].cpu().numpy())
        testing.same(kit.right(gpu_backend, spec, batch.index, batch.q, batch.kv), got, "replay")
        assert not out[rows:].any() and (lse[rows:] == -float("inf")).all()


def test_c15_capture_without_limits(late, workspace_tests, kit):
    """No limits, no out or no lse inside a capture: CaptureError, nothing enqueued."""
    spec = kit.spec("reference")
    index, q, k = formats.ragged([0, 1], [0, 9]), kit.draw(1, 1, 4, 16), kit.draw(2, 9, 2, 16)
    out = np.zeros((1, 4, 16), np.float32)
    free, fixed = (
        at.Attention(spec, backend=workspace_tests.LateBackend(late), limits=limits)
        for limits in (None, LIMITS)
    )
    for attn in (free, fixed):
        attn.plan(index)
    late.captured = True
    queued = len(late.queue)
    for attn, arguments, name in (
        (free, {"out": out}, "limits"),
        (fixed, {}, "out"),
        (fixed, {"out": out, "return_lse": True}, "lse"),
    ):
        with pytest.raises(at.CaptureError, match=name):
            attn.run(q, (k, k), **arguments)
    assert len(late.queue) == queued
    fixed.run(q, (k, k), out=out)
    assert len(late.queue) > queued


@pytest.mark.gpu
def test_c15_on_a_gpu(gpu_backend, kit):
    torch = pytest.importorskip("torch")
    spec = kit.spec(gpu_backend)
    attn = kit.attention(gpu_backend, spec)
    attn.plan(formats.ragged([0, 1], [0, 9]))
    q, k = (torch.randn(n, h, 16, device="cuda", dtype=torch.float16) for n, h in ((1, 4), (9, 2)))
    out = torch.zeros_like(q)
    want = attn.run(q, (k, k))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.add_(1)
        with pytest.raises(at.CaptureError, match="limits"):
            attn.run(q, (k, k), out=out)
    assert attn.run(q, (k, k)).equal(want), "the next call works"


CAPTURED = {
    "causal": (v.causal(),),
    "window": (v.causal(), v.sliding_window(5)),
    "softcap": (v.causal(), v.softcap(5.0)),
    "alibi": (v.causal(), v.alibi()),
    "sigmoid": (v.causal(), v.sigmoid()),
    "rope": (v.rope(16), v.causal()),
    "sinks": (v.causal(), v.sink_logits(0.5)),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_c106_a_captured_run_allocates_nothing(late, workspace_tests, kit, name):
    """Device memory, staging, copies and waits inside a captured run: none."""
    spec = kit.spec("reference", *CAPTURED[name])
    attn = at.Attention(spec, backend=workspace_tests.LateBackend(late), limits=LIMITS)
    attn.plan(formats.ragged([0, 1], [0, 9]))
    q, k = kit.draw(1, 1, 4, 16), kit.draw(2, 9, 2, 16)
    out = np.zeros((1, 4, 16), np.float32)
    attn.run(q, (k, k), out=out)
    late.captured = True
    done, copies = late.done, len(late.copies)

    def forbidden(*_):
        raise AssertionError("inside a capture")

    for call in ("allocate", "staging", "copy", "wait_host", "synchronize"):
        setattr(late, call, forbidden)
    attn.run(q, (k, k), out=out)
    assert (late.done, len(late.copies)) == (done, copies)
    assert isinstance(late, memory.HostOps)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_c106_every_variant_under_capture(gpu_backend, kit, name):
    torch = pytest.importorskip("torch")
    spec = kit.spec(gpu_backend, *CAPTURED[name], head_dim=64)
    attn = kit.attention(gpu_backend, spec, limits=LIMITS)
    index = formats.ragged([0, 1, 4], [0, 700, 740])
    q, k = (torch.randn(n, h, 64, device="cuda", dtype=torch.float16) for n, h in ((4, 4), (740, 2)))
    out = torch.zeros_like(q)
    attn.plan(index)
    attn.run(q, (k, k), out=out)
    torch.cuda.synchronize()
    want = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        attn.run(q, (k, k), out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert out.equal(want)


@pytest.mark.gpu
def test_c106_what_happens_beside_a_capture(gpu_backend, kit):
    """A workspace that is collected in the middle of a capture, and one that another thread makes, leave the graph whole."""
    torch = pytest.importorskip("torch")
    spec = kit.spec(gpu_backend, num_qo_heads=4, num_kv_heads=2, head_dim=64)
    index = formats.ragged([0, 1, 4], [0, 700, 740])
    q, k = (torch.randn(n, h, 64, device="cuda", dtype=torch.float16) for n, h in ((4, 4), (740, 2)))
    out, other = torch.zeros_like(q), torch.zeros_like(q)
    attn, old = (kit.attention(gpu_backend, spec, limits=LIMITS) for _ in "ab")
    for one in (attn, old):
        one.plan(index)
        one.run(q, (k, k), out=out)
    del one
    torch.cuda.synchronize()
    want = out.clone()

    def elsewhere() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            new = kit.attention(gpu_backend, spec, limits=LIMITS)
            for _ in range(5):
                new.plan(index)
                new.run(q, (k, k), out=other)

    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        attn.run(q, (k, k), out=out)
        del old
        gc.collect()
        pool.submit(elsewhere).result()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert out.equal(want) and other.equal(want)
