# SPDX-License-Identifier: Apache-2.0
"""Arrays of torch, CuPy, JAX and of nobody, in and out without copies, on the caller's stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing

sys.path.insert(0, str(Path(__file__).parent))
from gpu_arrays import World, spec, to_host

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def world():
    return World(spec(q_dtype="float16"))


@pytest.fixture(scope="module")
def answer(world):
    index = world.index([1, 9, 0, 2], [700, 60, 5, 300])
    return index, world.fresh("nvrtc", index)


def test_torch(world, answer):
    index, want = answer
    q = world.gpu_q[: index.num_qo]
    attn = at.Attention(world.spec)  # auto: the GPU is there
    assert (attn.backend, str(attn.device)) == ("nvrtc", "cuda:0")
    attn.plan(index, stream=torch.cuda.current_stream())  # CuPy may be loaded by another test
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side):
        with torch.cuda.stream(stream):
            before = torch.cuda.memory_allocated()
            out, lse = attn.run(q, world.gpu_kv, return_lse=True)
            grown = torch.cuda.memory_allocated() - before
        torch.cuda.synchronize()
        assert out.dtype == torch.float16 and out.device == q.device and lse.dtype == torch.float32
        assert grown <= out.numel() * 2 + lse.numel() * 4 + 2048, "run() copied an argument"
        testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), "torch")
    strided = torch.zeros(len(q), 9, 70, device="cuda", dtype=torch.float16)[:, :8, :64]
    attn.run(q, world.gpu_kv, out=strided)
    assert np.array_equal(to_host(strided.contiguous()).view(np.uint16), want.out.view(np.uint16))
    with pytest.raises(at.ArgumentError, match="detach"):
        attn.run(q.clone().requires_grad_(), world.gpu_kv)
    one = at.attention(q, world.gpu_kv, index)
    assert np.array_equal(to_host(one).view(np.uint16), want.out.view(np.uint16))


def test_cupy(world, answer):
    cupy = pytest.importorskip("cupy")
    index, want = answer
    q, *kv = (cupy.from_dlpack(x) for x in (world.gpu_q[: index.num_qo], *world.gpu_kv))
    attn = at.Attention(world.spec, device="cuda")
    for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
        attn.plan(index, stream=stream)
        with stream:
            out, lse = attn.run(q, tuple(kv), return_lse=True)
        stream.synchronize()
        assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
        testing.same(want, testing.Result(out=out.get(), lse=lse.get()), "CuPy")
    given = cupy.empty_like(out)
    assert attn.run(q, tuple(kv), out=given) is given
    assert np.array_equal(given.get().view(np.uint16), want.out.view(np.uint16))


def test_torch_and_cupy_together(world, answer):
    """With two GPU frameworks loaded, load must be told its stream; run asks q's framework."""
    pytest.importorskip("cupy")
    index, want = answer
    attn = at.Attention(world.spec, device="cuda")
    with pytest.raises(at.ArgumentError, match="torch and cupy are both loaded"):
        attn.plan(index)
    attn.plan(index, stream=torch.cuda.current_stream())
    q = world.gpu_q[: index.num_qo]
    out, lse = attn.run(q, world.gpu_kv, return_lse=True)
    testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), "two frameworks")
    out, lse = at.attention(q, world.gpu_kv, index, return_lse=True)  # which has its stream from q
    testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), "one call")


JAX = """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, numpy as np, sys
import attnrt as at
sys.path.insert(0, {folder!r})
index_args, q, k, v, want, want_lse = np.load({file!r}, allow_pickle=True)["all"]
spec = at.AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64, q_dtype="float16", variant=at.variants.causal())
attn = at.Attention(spec, device="cuda")
attn.plan(at.formats.paged(*index_args))
q, k, v = (jax.device_put(x, jax.devices("gpu")[0]) for x in (q, k, v))
out, lse = attn.run(q, (k, v), return_lse=True)
assert isinstance(out, jax.Array) and out.devices() == q.devices(), type(out)
assert np.array_equal(np.asarray(out).view(np.uint16), want.view(np.uint16))
assert np.array_equal(np.asarray(lse), want_lse)
again = attn.run(q + 0, (k + 0, v + 0))
assert np.array_equal(np.asarray(again).view(np.uint16), want.view(np.uint16))
for bad in (lambda: attn.run(q, (k, v), out=out), lambda: attn.append(q[:, :2], q[:, :2], (k, v), slots=[0] * len(q))):
    try:
        bad()
    except at.ArgumentError as error:
        assert "writable" in str(error), error
    else:
        raise AssertionError("a JAX array was written")
print("fine")
"""


def test_jax(world, tmp_path):
    """In a process of its own: JAX takes memory and streams of its own."""
    pytest.importorskip("jax")
    lists = world.lists([700, 60, 5, 300])
    indptr = np.concatenate([[0], np.cumsum([len(x) for x in lists])]).astype(np.int32)
    qo_indptr = np.array([0, 1, 10, 10, 12], np.int32)
    arguments = (qo_indptr, indptr, np.concatenate(lists), np.array([700, 60, 5, 300], np.int32), 16)
    want = world.fresh("nvrtc", at.formats.paged(*arguments))
    everything = np.empty(6, object)
    everything[:] = [arguments, world.q[:12], *world.kv, want.out, want.lse]
    np.savez(tmp_path / "case.npz", all=everything)
    code = JAX.format(folder=str(Path(__file__).parent), file=str(tmp_path / "case.npz"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and "fine" in done.stdout, done.stdout + done.stderr[-3000:]


BARE = """
import sys
import numpy as np
import attnrt as at
from attnrt.backends.cuda import driver
spec = at.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=64, q_dtype="float16", variant=at.variants.causal())
attn = at.Attention(spec, device="cuda")
ops = attn.workspace.ops
def up(x):
    view = at.empty(x.shape, x.dtype, "cuda:0")
    ops.copy(view.ptr, x.reshape(-1).view(np.uint8), x.nbytes, 0)
    return view
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal(s).astype(np.float16) for s in ((2, 2, 64), (2, 16, 1, 64), (2, 16, 1, 64)))
attn.plan(at.formats.paged([0, 1, 2], [0, 1, 2], [1, 0], [9, 16], 16))
out = attn.run(up(q), (up(k), up(v)))
assert type(out) is at.TensorView and str(out.device) == "cuda:0" and out.__dlpack_device__() == (2, 0)
got = ops.fetch(out.ptr, out.nbytes).view(np.float16).reshape(2, 2, 64)
cpu = at.Attention(spec, device="cpu")
cpu.plan(at.formats.paged([0, 1, 2], [0, 1, 2], [1, 0], [9, 16], 16))
want = cpu.run(q, (k, v))
assert np.abs(got.astype(float) - want.astype(float)).max() < 2e-3
assert not {"torch", "cupy", "jax"} & set(sys.modules), "a framework was imported"
"""


def test_without_any_framework():
    done = subprocess.run(
        [sys.executable, "-c", BARE], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_memory_of_ours_in_torch():
    x = at.empty((3, 5), "bfloat16", "cuda:0")
    t = torch.from_dlpack(x)
    assert t.data_ptr() == x.ptr and t.dtype == torch.bfloat16 and t.shape == (3, 5)
    t.fill_(2.0)
    del x
    assert float(t.sum()) == 30.0
