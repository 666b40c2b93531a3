# SPDX-License-Identifier: Apache-2.0
"""append and copy_pages on a GPU: the bytes that the CPU backend stores."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt.dtypes import as_dtype

sys.path.insert(0, str(Path(__file__).parent))
from gpu_arrays import to_gpu, to_host

v = at.variants
pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

DTYPES = [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
]


@pytest.fixture(scope="module", params=("nvrtc", "nvcc"))
def cuda(request):
    return request.param


def both(cuda, **changes):
    """The same attention on the GPU and on the CPU."""
    base = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "head_dim_vo": 48, "variant": v.causal()}
    s = at.AttentionSpec(**{**base, **changes})
    return at.Attention(s, backend=cuda, device="cuda"), at.Attention(s, backend="cpu", device="cpu")


def numbers(s, rng, rows, dtype, scale):
    kind = as_dtype(dtype).numpy
    k, values = (
        (rng.standard_normal((rows, s.num_kv_heads, dim)) * scale).astype(np.float32)
        for dim in (s.head_dim, s.head_dim_vo)
    )
    k[0, 0, :8] = [np.inf, -np.inf, 0.0, -0.0, 500.0, -470.0, 1e-3, 2**-10]
    return [x.astype(kind) for x in (k, values)]


def caches(s, pages=9, size=16):
    inner = (s.num_kv_heads, size) if s.kv_layout == "HND" else (size, s.num_kv_heads)
    kind = as_dtype(s.kv_dtype).numpy
    return [np.full((pages, *inner, dim), 7.0, kind) for dim in (s.head_dim, s.head_dim_vo)]


def equal(gpu, cpu):
    for name, a, b in zip("kv", gpu, cpu, strict=False):
        bits = f"u{b.dtype.itemsize}"
        np.testing.assert_array_equal(to_host(a).view(bits), b.view(bits), err_msg=name)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows_in", ["q", "cache"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_stores_what_the_cpu_stores(cuda, dtypes, rows_in, kv_layout):
    q_dtype, kv_dtype = dtypes
    fp8 = kv_dtype.startswith("float8")
    variant = (v.causal(), v.fp8_scales()) if fp8 else v.causal()
    gpu, cpu = both(cuda, q_dtype=q_dtype, kv_dtype=kv_dtype, kv_layout=kv_layout, variant=variant)
    rng = np.random.default_rng()
    k, values = numbers(gpu.spec, rng, 7, q_dtype if rows_in == "q" else kv_dtype, 100.0 if fp8 else 1.0)
    scales = {"k_scale": np.array([0.5, 3.0], np.float32), "v_scale": 0.25} if fp8 and rows_in == "q" else {}
    index = at.formats.paged([0, 1, 4, 7], [0, 1, 3, 5], [4, 0, 8, 2, 3], [3, 20, 30], 16)
    slots = np.array([5, -1, 143, 0, 77, 16, 31])
    for where in ({}, {"slots": slots}, {"slots": torch.from_numpy(slots).cuda()}):
        host = caches(gpu.spec)
        device = [to_gpu(x) for x in host]
        gpu.plan(index)
        cpu.plan(index)
        gpu.append(to_gpu(k), to_gpu(values), tuple(device), **where, **scales)
        cpu.append(k, values, tuple(host), **({"slots": slots} if where else {}), **scales)
        equal(device, host)


@pytest.mark.parametrize("rope", [v.rope(64), v.rope(32, interleaved=True)], ids=["half", "interleaved"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_rotation(cuda, rope, kv_dtype):
    """Angles of the GPU and the CPU differ in the last bits of float32: at most one step of the stored type."""
    gpu, cpu = both(cuda, q_dtype="bfloat16", kv_dtype=kv_dtype)
    rng = np.random.default_rng()
    k, values = numbers(gpu.spec, rng, 7, "bfloat16", 1.0)
    k[0, 0, :8] = 1.0
    index = at.formats.paged([0, 1, 4, 7], [0, 1, 3, 5], [4, 0, 8, 2, 3], [3, 20, 30], 16)
    host = caches(gpu.spec)
    device = [to_gpu(x) for x in host]
    for attn in (gpu, cpu):
        attn.plan(index)
    gpu.append(to_gpu(k), to_gpu(values), tuple(device), rope=rope)
    cpu.append(k, values, tuple(host), rope=rope)
    equal(device[1:], host[1:])
    a, b = to_host(device[0]).astype(np.float64), host[0].astype(np.float64)
    step = 2.0 ** (-7 if kv_dtype == "bfloat16" else -3)
    assert (np.abs(a - b) <= np.abs(b) * step + 2**-9).all()
    assert (a != b).mean() < 0.01


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_copy_pages(cuda, kv_dtype, kv_layout):
    gpu, cpu = both(cuda, q_dtype="bfloat16", kv_dtype=kv_dtype, kv_layout=kv_layout)
    rng = np.random.default_rng()
    host = [rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype) for x in caches(gpu.spec)]
    device = [to_gpu(x) for x in host]
    for attn, kv in ((gpu, device), (cpu, host)):
        attn.copy_pages(tuple(kv), [4, 4, 0], [7, 2, 8])
    equal(device, host)


def test_latent_rows(cuda):
    gpu, cpu = both(
        cuda, q_dtype="bfloat16", num_kv_heads=1, head_dim=72, head_dim_vo=64, shared_kv=True, sm_scale=0.1
    )
    rng = np.random.default_rng()
    k, _ = numbers(gpu.spec, rng, 3, "bfloat16", 1.0)
    host = caches(gpu.spec)[0]
    device = to_gpu(host)
    gpu.append(to_gpu(k), None, device, slots=[5, -1, 143])
    cpu.append(k, None, host, slots=[5, -1, 143])
    equal([device], [host])


GATHERED = [(64, 48), (72, 20)]  # rows of 16-byte pieces, and others


@pytest.mark.parametrize("dims", GATHERED)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows_in", ["q", "cache"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_gathers_what_the_cpu_gathers(cuda, dtypes, rows_in, kv_layout, dims):
    q_dtype, kv_dtype = dtypes
    gpu, cpu = both(
        cuda, q_dtype=q_dtype, kv_dtype=kv_dtype, kv_layout=kv_layout, head_dim=dims[0], head_dim_vo=dims[1]
    )
    rng, s = np.random.default_rng(), gpu.spec
    host = [(rng.standard_normal(x.shape) * 40).astype(np.float32).astype(x.dtype) for x in caches(s)]
    slots = np.concatenate([[5, -1, 143, 0, 77, 16, 31], rng.integers(0, 144, 3000)])
    kind = as_dtype(q_dtype if rows_in == "q" else kv_dtype).numpy
    want = [np.full((len(slots), s.num_kv_heads, dim), 7.0, kind) for dim in dims]
    cpu.gather(tuple(host), slots, *want)
    device = tuple(to_gpu(x) for x in host)
    for where in (slots, torch.from_numpy(slots).cuda()):
        got = [to_gpu(np.full_like(x, 7.0)) for x in want]
        gpu.gather(device, where, *got)
        equal(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.gather(device, where, *got)
    where.copy_(torch.from_numpy(slots[::-1].copy()))
    graph.replay()
    cpu.gather(tuple(host), slots[::-1].copy(), *want)
    equal(got, want)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "rope", [v.rope(64), v.rope(40), v.rope(32, interleaved=True)], ids=["half", "half of 40", "interleaved"]
)
def test_rotates_keys_alone(cuda, rope, kv_dtype):
    """Eight pairs a lane, and one by one; V stays where it lies."""
    gpu, cpu = both(cuda, q_dtype="bfloat16", kv_dtype=kv_dtype, num_kv_heads=11, num_qo_heads=11)
    rng, s = np.random.default_rng(), gpu.spec
    host = [rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype) for x in caches(s)]
    slots = np.concatenate([[5, -1, 143, 0], rng.integers(0, 144, 1500)])
    positions = np.concatenate([[0, 3, 70000, 12], rng.integers(0, 5000, 1500)])
    want = np.full((len(slots), s.num_kv_heads, s.head_dim), 7.0, as_dtype("bfloat16").numpy)
    got = to_gpu(want)
    cpu.gather(tuple(host), slots, want, rope=rope, positions=positions)
    gpu.gather(tuple(to_gpu(x) for x in host), slots, got, rope=rope, positions=positions)
    a, b = to_host(got).astype(np.float64), want.astype(np.float64)
    assert (np.abs(a - b) <= np.abs(b) * 2.0**-7 + 2**-9).all() and (a != b).mean() < 0.02
    assert (a[1] == 0).all()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_prompts_over_gathered_rows(cuda, kv_dtype):
    """Single tokens, brought side by side: the bits of the cache's own numbers, where these are q's."""
    s = at.AttentionSpec(
        num_qo_heads=8,
        num_kv_heads=2,
        head_dim=128,
        q_dtype="bfloat16",
        kv_dtype=kv_dtype,
        variant=v.causal(),
    )
    rng, lens, qo = np.random.default_rng(), [700, 300, 129], [700, 200, 1]
    total = sum(lens)
    ids = rng.permutation(total + 50)[:total]
    index = at.formats.paged(np.cumsum([0, *qo]), np.cumsum([0, *lens]), ids, lens, 1)
    kv = [torch.randn(total + 50, 1, 2, 128, device="cuda").to(getattr(torch, kv_dtype)) for _ in "kv"]
    q = torch.randn(sum(qo), 8, 128, device="cuda", dtype=torch.bfloat16)
    direct, wide = at.Attention(s, backend=cuda), at.Attention(replace(s, kv_dtype="bfloat16"), backend=cuda)
    direct.plan(index)
    want = direct.run(q, tuple(kv))
    found = at.formats.gathered(index)
    rows = [torch.full((total, 2, 128), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    direct.gather(tuple(kv), torch.from_numpy(found.slots.copy()).cuda(), *rows)
    wide.plan(found.index)
    got = wide.run(q, tuple(rows))
    if kv_dtype == "bfloat16":
        assert torch.equal(want, got)
    else:
        torch.testing.assert_close(want.float(), got.float(), rtol=2e-2, atol=2e-2)
