# SPDX-License-Identifier: Apache-2.0
"""Hard cases of array exchange: offsets, empty and turned arrays, streams, lifetimes of capsules, types, devices."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import formats
from attnrt.device import as_device
from attnrt.tensor import TensorView, make_view

torch = pytest.importorskip("torch")
v = at.variants


def test_c82_byte_offset(host, kit):
    """A slice that begins one item into its buffer, through NumPy, torch and a capsule: never the base."""
    base = np.arange(9, dtype=np.float32)
    tensor = torch.arange(9, dtype=torch.float32)
    for x in (base[1:9], tensor[1:9]):
        assert TensorView(x).numpy().tolist() == list(range(1, 9))
    assert TensorView(tensor[8:]).numpy().tolist() == [8]
    out = torch.from_dlpack(TensorView(base[8:]))
    assert out.tolist() == [8] and out.storage_offset() == 0
    spec = kit.spec(host)
    index = formats.ragged([0, 2], [0, 7])
    q, k = kit.draw(1, 3, 4, 16), kit.draw(2, 9, 2, 16)
    want = kit.right(host, spec, index, q[1:].copy(), (k[2:].copy(), k[1:8].copy()))
    attn = kit.attention(host, spec)
    attn.plan(index)
    tq, tk = torch.from_numpy(q), torch.from_numpy(k)
    for out in (attn.run(q[1:], (k[2:], k[1:8])), attn.run(tq[1:], (tk[2:], tk[1:8])).numpy()):
        assert out.tobytes() == want.out.tobytes()


@pytest.mark.parametrize("shape", [(1, 8, 0, 128), (0, 0, 0), (0,), (3, 0)])
def test_c84_arrays_of_no_elements(shape):
    for x in (
        np.zeros(shape, np.float16),
        torch.zeros(shape, dtype=torch.bfloat16),
        at.empty(shape, "float32", "cpu"),
    ):
        view = TensorView(x)
        assert view.shape == shape and view.size == 0 and torch.from_dlpack(view).shape == shape
    view = make_view(0, shape, "float32", "cpu")
    assert view.numpy().shape == shape


def test_c86_negative_strides(host, kit):
    """Rows and heads in reverse run as their copies do; a reversed last axis is refused by name; nothing aborts."""
    turned = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::-1]
    assert TensorView(turned).strides == (4, -1)
    assert (TensorView(turned).numpy() == turned).all()
    spec = kit.spec(host)
    index = formats.ragged([0, 3], [0, 9])
    q, k = kit.draw(1, 3, 4, 16), kit.draw(2, 9, 2, 16)
    attn = kit.attention(host, spec)
    attn.plan(index)
    for x, cache in ((q[::-1], k), (q[:, ::-1], k), (q, k[::-1]), (q, k[:, ::-1])):
        want = attn.run(x.copy(), (cache.copy(), k))
        assert attn.run(x, (cache, k)).tobytes() == want.tobytes()
        out = np.zeros_like(q)
        attn.run(x, (cache, k), out=out[::-1])
        assert out[::-1].tobytes() == want.tobytes()
    with pytest.raises(at.ArgumentError, match="q must have a last stride of 1"):
        attn.run(q[..., ::-1], (k, k))
    with pytest.raises(at.ArgumentError, match="no negative stride"):  # PyTorch would abort the process
        torch.from_dlpack(TensorView(turned))


def test_c87_stream_of_a_cpu_array():
    view = TensorView(np.zeros(3, np.float32))
    view.__dlpack__(stream=None)
    for stream in (0, 1, 2, -1, 7):
        with pytest.raises((at.ArgumentError, BufferError)):
            view.__dlpack__(stream=stream)


@pytest.mark.gpu
def test_c87_a_producer_that_is_late(gpu_backend, kit):
    """Written on a side stream behind a sleep, read at once through a capsule on another: the written values."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for i in range(100):
        x = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            x += i + 1
            view = TensorView(x)
            with torch.cuda.stream(other):
                y = torch.from_dlpack(view)
                got = y.clone()
            other.wait_stream(side)
        other.synchronize()
        with torch.cuda.stream(other):
            assert torch.from_dlpack(TensorView(x)).eq(i + 1).all(), i
        del got
    for stream in (None, 1, 2, -1, other.cuda_stream):
        TensorView(x).__dlpack__(stream=stream)
    with pytest.raises((at.ArgumentError, BufferError)):
        TensorView(x).__dlpack__(stream=0)


def test_c89_capsules_that_nobody_takes():
    """10,000 exports without an import: every owner is freed. Taken once: the second import fails."""

    class Owner:
        pass

    data = np.arange(6, dtype=np.float32)
    alive = []
    for _ in range(10_000):
        owner = Owner()
        owner.data = data
        view = make_view(data.ctypes.data, data.shape, "float32", "cpu", owner=owner)
        alive.append(weakref.ref(owner))
        view.__dlpack__()
        del owner, view
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    capsule = TensorView(data).__dlpack__()
    taken = torch.utils.dlpack.from_dlpack(capsule)
    with pytest.raises(RuntimeError):
        torch.utils.dlpack.from_dlpack(capsule)
    assert taken.tolist() == data.tolist()


def test_c90_types(host, kit):
    """bfloat16, bool, fp8 and their bits in unsigned arrays; what is unknown is refused by name."""
    assert TensorView(torch.arange(3, dtype=torch.bfloat16)).dtype.name == "bfloat16"
    assert TensorView(np.arange(3).astype(ml_dtypes.bfloat16)).numpy().tolist() == [0, 1, 2]
    flags = TensorView(np.array([True, False]))
    assert flags.dtype.name == "bool" and torch.from_dlpack(flags).tolist() == [True, False]
    for x in (np.zeros(3, np.complex64), np.zeros(3, "M8[s]"), np.zeros(3, [("a", "f4")]), np.array(["x"])):
        with pytest.raises(at.DtypeError):
            TensorView(x)
    spec = kit.spec(host, q_dtype="bfloat16", kv_dtype="float8_e4m3fn")
    index = formats.ragged([0, 2], [0, 7])
    q, k = kit.cast(kit.draw(1, 2, 4, 16), "bfloat16"), kit.cast(kit.draw(2, 7, 2, 16), "float8_e4m3fn")
    want = kit.right(host, spec, index, q, (k, k))
    attn = kit.attention(host, spec)
    attn.plan(index)
    bits = k.view(np.uint8)
    as_torch = torch.from_numpy(bits).view(torch.float8_e4m3fn)
    for kv in ((bits, k), (as_torch, torch.from_numpy(bits))):
        assert attn.run(q, kv).tobytes() == want.out.tobytes()
    with pytest.raises(at.DtypeError, match="k must be float8_e4m3fn"):
        attn.run(q, (bits.view(np.int8), bits))


class OnDevice:
    """An array that says it lies on a GPU."""

    def __init__(self, like, device=0):
        self.shape = like.shape
        self.__cuda_array_interface__ = {
            "shape": like.shape, "typestr": like.dtype.str, "strides": None, "data": (0x7F0000000000, False), "version": 3,
        }  # fmt: skip


@pytest.mark.parametrize("label", ["q", "k", "v", "out", "lse"])
def test_c21_mixed_devices_are_refused(host, kit, label):
    """One array elsewhere: an error that names it and both devices, before anything is written."""
    spec = kit.spec(host)
    attn = kit.attention(host, spec)
    attn.plan(formats.ragged([0, 2], [0, 7]))
    q, k = kit.draw(1, 2, 4, 16), kit.draw(2, 7, 2, 16)
    arrays = {"q": q, "k": k, "v": k, "out": np.full_like(q, 7), "lse": np.full((2, 4), 7, np.float32)}
    views = dict(arrays)
    views[label] = make_view(0x7F0000000000, arrays[label].shape, "float32", "cuda:1", owner=None)
    with pytest.raises(at.ArgumentError, match=f"{label} must be on cpu.*cuda:1"):
        attn.run(views["q"], (views["k"], views["v"]), out=views["out"], lse=views["lse"])
    assert (arrays["out"] == 7).all() and (arrays["lse"] == 7).all()
    assert as_device("cuda:1") != as_device("cuda:0")


@pytest.mark.gpu
def test_c21_a_second_device(gpu_backend, kit):
    """Everything on cuda:1 while cuda:0 is current: append 8 tokens, decode over 2048, and the current device stays."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    spec = kit.spec(gpu_backend, num_qo_heads=32, num_kv_heads=2, head_dim=128)
    torch.cuda.set_device(0)
    attn = at.Attention(spec, backend=gpu_backend, device="cuda:1")
    k, values = (torch.randn(128, 16, 2, 128, dtype=torch.float16, device="cuda:1") for _ in range(2))
    q = torch.randn(8, 32, 128, dtype=torch.float16, device="cuda:1")
    index = formats.paged([0, 8], [0, 128], np.arange(128), [2048], 16)
    attn.plan(index)
    rows = torch.randn(8, 2, 128, dtype=torch.float16, device="cuda:1")
    attn.append(rows, rows, (k, values))
    out = attn.run(q, (k, values))
    torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0 and out.device.index == 1
    assert k[127, 8:].equal(rows)
    want = kit.right(gpu_backend, spec, index, q.cpu().numpy(), (k.cpu().numpy(), values.cpu().numpy()))
    assert out.cpu().numpy().tobytes() == want.out.tobytes()
    with pytest.raises(at.ArgumentError, match="q must be on cuda:1"):
        attn.run(q.to("cuda:0"), (k, values))
