# SPDX-License-Identifier: Apache-2.0
"""Graphs, streams and threads on a GPU: a captured run serves every later plan; order is kept by events."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing

sys.path.insert(0, str(Path(__file__).parent))
from gpu_arrays import World, head, spec, to_host

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

ROWS = 48
#: (qo_lens, kv_lens, share): other batch sizes, decode and prefill, cut rows, nothing at all, shared prefixes.
PLANS = {
    "decode": ([1] * 8, [100 + 37 * i for i in range(8)], False),
    "one long": ([1], [6000], False),
    "cut": ([1, 1], [5000, 3000], False),
    "prefill": ([30, 10], [200, 10], False),
    "mixed": ([1, 20, 0, 3], [900, 20, 5, 700], False),
    "nothing": ([0], [0], False),
    "empty sets": ([2, 1], [0, 0], False),
    "shared": ([1] * 6, [800, 900, 700, 1000, 640, 660], True),
    "full": ([3] * 16, [300] * 16, False),
}


@pytest.fixture(scope="module", params=("nvrtc", "nvcc"))
def cuda(request):
    reasons = at.backends.status(spec(), device="cuda")[request.param]
    assert not reasons, reasons
    return request.param


@pytest.fixture(scope="module")
def world():
    return World(spec(), rows=ROWS)


def limits(world):
    return at.Limits(16, ROWS, 8192, max_parts=3, num_pages=world.pages)


def make_index(world, name):
    qo, kv, shared = PLANS[name]
    index = world.index(qo, kv)
    if not shared:
        return index
    index = at.formats.share(index, min_tokens=64, max_parts=3)
    assert len(index.parts) > 1
    return replace(index, flat=None)  # shared, whether or not it pays


def check_replay(world, backend, attn, graph, out, lse, name):
    index = make_index(world, name)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    attn.plan(index, pad_to=ROWS)
    graph()
    torch.cuda.synchronize()
    got = testing.Result(out=to_host(out), lse=to_host(lse))
    rows = int(index.num_qo)
    testing.same(world.fresh(backend, index), head(got, rows), f"plan {name!r} in the graph")
    assert not got.out[rows:].astype(np.float32).any() and (got.lse[rows:] == -np.inf).all()


@pytest.mark.parametrize("first", ["decode", "nothing", "shared"])
def test_one_torch_graph_serves_every_later_plan(cuda, world, first):
    attn = at.Attention(world.spec, backend=cuda, limits=limits(world), device="cuda")
    out, lse = world.results(ROWS)
    attn.plan(make_index(world, first), pad_to=ROWS)
    attn.run(world.gpu_q, world.gpu_kv, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(world.gpu_q, world.gpu_kv, out=out, lse=lse)
        attn.run(world.gpu_q, world.gpu_kv, out=out, lse=lse)
    for name in PLANS:
        check_replay(world, cuda, attn, graph.replay, out, lse, name)


def test_cuda_core_graph(cuda, world):
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    attn = at.Attention(world.spec, backend=cuda, limits=limits(world), device="cuda")
    out, lse = world.results(ROWS)
    attn.plan(make_index(world, "decode"), pad_to=ROWS)
    torch.cuda.synchronize()
    builder = stream.create_graph_builder()
    builder.begin_building()
    attn.run(world.gpu_q, world.gpu_kv, out=out, lse=lse, stream=getattr(builder, "stream", builder))
    graph = builder.end_building().complete()

    def replay():
        torch.cuda.synchronize()
        graph.launch(stream)
        stream.sync()

    for name in ("cut", "shared", "decode"):
        check_replay(world, cuda, attn, replay, out, lse, name)


def test_captured_append(cuda, world):
    """Slots on the device: the graph stores other rows at other places, and eager attention reads them."""
    attn = at.Attention(world.spec, backend=cuda, limits=limits(world), device="cuda")
    s = world.spec
    rows = [torch.randn(4, s.num_kv_heads, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    slots = torch.tensor([3, 40, -1, 17], device="cuda")
    cache = [torch.zeros(8, 16, s.num_kv_heads, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    attn.append(*rows, tuple(cache), slots=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.append(*rows, tuple(cache), slots=slots)
    slots.copy_(torch.tensor([127, -1, 5, 1 << 40]))
    for x in (*rows, *cache):
        x.normal_()
    before = [c.clone() for c in cache]
    graph.replay()
    for c, old, new in zip(cache, before, rows, strict=True):
        flat = old.view(-1, s.num_kv_heads, 64)
        flat[127], flat[5] = new[0], new[2]
        assert torch.equal(c.view_as(flat), flat)


def test_refusals_inside_a_capture_leave_the_graph_whole(cuda, world):
    attn = at.Attention(world.spec, backend=cuda, limits=limits(world), device="cuda")
    free = at.Attention(world.spec, backend=cuda, device="cuda")
    out, lse = world.results(ROWS)
    for one in (attn, free):
        one.plan(make_index(world, "decode"), pad_to=ROWS)
        one.run(world.gpu_q, world.gpu_kv, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(at.CaptureError, match="limits"):
            free.run(world.gpu_q, world.gpu_kv, out=out, lse=lse)
        with pytest.raises(at.CaptureError, match="out"):
            attn.run(world.gpu_q, world.gpu_kv)
        with pytest.raises(at.CaptureError, match="lse"):
            attn.run(world.gpu_q, world.gpu_kv, out=out, return_lse=True)
        attn.run(world.gpu_q, world.gpu_kv, out=out, lse=lse)
    check_replay(world, cuda, attn, graph.replay, out, lse, "mixed")


def test_the_host_runs_ahead(cuda, world):
    """plan, load and run behind a blocked stream return at once, and each run sees its own plan."""
    attn = at.Attention(world.spec, backend=cuda, limits=limits(world), device="cuda")
    indexes = [make_index(world, name) for name in ("decode", "cut", "shared")]
    want = [world.fresh(cuda, index) for index in indexes]
    results = [world.results(index.num_qo) for index in indexes]
    for index, (out, lse) in zip(indexes, results, strict=True):  # forms, staging and code are there
        attn.plan(index)
        attn.run(world.gpu_q[: index.num_qo], world.gpu_kv, out=out, lse=lse)
    for out, lse in results:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # about half a second
    start = time.perf_counter()
    for index, (out, lse) in zip(indexes, results, strict=True):
        attn.plan(index)
        attn.run(world.gpu_q[: index.num_qo], world.gpu_kv, out=out, lse=lse)
    assert time.perf_counter() - start < 0.2, "something waited for the stream"
    assert not torch.cuda.current_stream().query(), "the stream was not blocked: the test shows nothing"
    torch.cuda.synchronize()
    for index, expected, (out, lse) in zip(indexes, want, results, strict=True):
        testing.same(
            expected,
            testing.Result(out=to_host(out), lse=to_host(lse)),
            f"a blocked stream, {index.num_qo} rows",
        )


def test_streams(cuda, world):
    """Load on one stream, run on another: the run waits; the next load waits for that run."""
    attn = at.Attention(world.spec, backend=cuda, device="cuda")
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    names = ("cut", "decode", "shared")
    indexes = [make_index(world, name) for name in names]
    want = [world.fresh(cuda, index) for index in indexes]
    results = [world.results(index.num_qo) for index in indexes]
    torch.cuda.synchronize()
    for index, (out, lse) in zip(indexes, results, strict=True):
        with torch.cuda.stream(a):
            torch.cuda._sleep(20_000_000)
            attn.plan(index, stream=a)
        with torch.cuda.stream(b):
            torch.cuda._sleep(20_000_000)
            attn.run(world.gpu_q[: index.num_qo], world.gpu_kv, out=out, lse=lse)
    torch.cuda.synchronize()
    for name, expected, (out, lse) in zip(names, want, results, strict=True):
        testing.same(expected, testing.Result(out=to_host(out), lse=to_host(lse)), f"streams, plan {name}")


def test_threads(cuda, world):
    """Attentions in threads of their own, each on its own stream."""
    index = make_index(world, "mixed")
    want = world.fresh(cuda, index)
    errors = []

    def work():
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                attn = at.Attention(world.spec, backend=cuda, device="cuda")
                for _ in range(20):
                    attn.plan(index, stream=stream)
                    out, lse = attn.run(world.gpu_q[: index.num_qo], world.gpu_kv, return_lse=True)
                stream.synchronize()
                testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), "a thread")
        except BaseException as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


def test_a_workspace_in_the_callers_buffer(cuda, world):
    size = at.Workspace.nbytes([world.spec], limits(world), "cuda", backend=cuda)
    buffer = torch.zeros(size, dtype=torch.uint8, device="cuda")
    ws = at.Workspace([world.spec], limits(world), "cuda", buffer=buffer, backend=cuda)
    attn = at.Attention(world.spec, backend=cuda, workspace=ws)
    index = make_index(world, "cut")
    attn.plan(index)
    out, lse = attn.run(world.gpu_q[: index.num_qo], world.gpu_kv, return_lse=True)
    testing.same(
        world.fresh(cuda, index), testing.Result(out=to_host(out), lse=to_host(lse)), "the caller's buffer"
    )
    assert int(buffer.count_nonzero()) > 0
    with pytest.raises(at.LimitError, match="buffer"):
        at.Workspace([world.spec], limits(world), "cuda", buffer=buffer[:-1024], backend=cuda)


def test_arrays_on_the_host_are_refused(cuda, world):
    attn = at.Attention(world.spec, backend=cuda, device="cuda")
    index = make_index(world, "decode")
    attn.plan(index)
    q = world.gpu_q[: index.num_qo]
    for bad in (
        (q.cpu(), world.gpu_kv),
        (q, tuple(x.cpu() for x in world.gpu_kv)),
        (world.q[: index.num_qo], world.gpu_kv),
    ):
        with pytest.raises(at.ArgumentError, match="must be on cuda:0"):
            attn.run(*bad)
    out, lse = attn.run(q, world.gpu_kv, return_lse=True)
    testing.same(
        world.fresh(cuda, index), testing.Result(out=to_host(out), lse=to_host(lse)), "a refused run"
    )


def test_two_devices_at_once(cuda, world):
    """Eager runs and graphs on both devices, one thread each, give the bits of one device; the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    index = make_index(world, "mixed")
    rows = index.num_qo
    want = world.fresh(cuda, index)
    attns = [at.Attention(world.spec, backend=cuda, limits=limits(world), device=f"cuda:{i}") for i in (0, 1)]
    arrays = [
        [x.to(f"cuda:{i}") for x in (world.gpu_q[:rows], *world.gpu_kv, *world.results(rows))] for i in (0, 1)
    ]
    for i in (0, 1):
        torch.cuda.synchronize(i)
    found: dict[tuple[int, str], testing.Result] = {}
    errors = []

    def work(i):
        try:
            attn, (q, k, v, out, lse) = attns[i], arrays[i]
            with torch.cuda.device(1 - i):  # another device than the arrays' is current
                for _ in range(10):
                    attn.plan(index)
                    attn.run(q, (k, v), out=out, lse=lse)
                torch.cuda.synchronize(i)
                found[i, "eager"] = testing.Result(out=to_host(out), lse=to_host(lse))
                assert torch.cuda.current_device() == 1 - i
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    for i in (0, 1):
        attn, (q, k, v, out, lse) = attns[i], arrays[i]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(i), torch.cuda.graph(graph, stream=torch.cuda.Stream(i)):
            attn.run(q, (k, v), out=out, lse=lse)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(i)
        found[i, "graph"] = testing.Result(out=to_host(out), lse=to_host(lse))
    assert torch.cuda.current_device() == 0
    for (i, how), result in found.items():
        testing.same(want, result, f"cuda:{i}, {how}")
