# SPDX-License-Identifier: Apache-2.0
"""What the hard cases share: every backend as a parameter, runs from plain float arrays, comparison with dense float64.

The CUDA backends carry the marker gpu; their arrays travel through attnrt.testing, so a case is written once.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.dtypes import as_dtype
from attnrt.testing.device import execute

v = at.variants
CUDA = ("nvrtc", "nvcc")
HOST = [name for name, why in at.backends.status(device="cpu").items() if not why]


@pytest.fixture(params=[*HOST, *(pytest.param(name, marks=pytest.mark.gpu) for name in CUDA)])
def backend(request):
    """Every backend: reference and cpu here, nvrtc and nvcc on a GPU."""
    return request.param


@pytest.fixture(params=HOST)
def host(request):
    """The backends of the CPU, for cases that only host arrays can have."""
    return request.param


def cuda(backend):
    return backend in CUDA


def spec_for(backend, *variants, **changes):
    """A small spec in the widest type that the backend takes; causal unless told otherwise."""
    base = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    base["q_dtype"] = "float16" if cuda(backend) else "float32"
    return at.AttentionSpec(**(base | changes), variant=variants or v.causal())


def attention(backend, spec, **arguments):
    return at.Attention(spec, backend=backend, device="cuda" if cuda(backend) else "cpu", **arguments)


def cast(x, dtype):
    """Floats in a spec's dtype; arrays that have it stay as they are, strides and all."""
    kind = as_dtype(dtype).numpy
    return x if x.dtype == kind else np.asarray(x).astype(kind)


def run(backend, spec, index, q, kv, *, attn=None, pad_to=None, fill=math.nan, **arguments):
    """Plan and run into out and lse that hold ``fill``."""
    if attn is None:
        attn = attention(backend, spec)
    plan = attn.plan(index, pad_to=pad_to)
    return again(attn, spec, plan.num_rows, q, kv, fill=fill, **arguments)


def again(attn, spec, rows, q, kv, *, fill=math.nan, **arguments):
    """Run the loaded plan into out and lse that hold ``fill``."""
    q = cast(q, spec.q_dtype)
    kv = cast(kv, spec.kv_dtype) if spec.shared_kv else tuple(cast(x, spec.kv_dtype) for x in kv)
    shape = (rows, spec.num_qo_heads, spec.head_dim_vo)
    out = np.full(shape, fill, np.float32).astype(as_dtype(spec.out_dtype).numpy)
    lse = np.full(shape[:2], fill, np.float32) if spec.composed.use_softmax else None
    execute(attn, q, kv, out=out, lse=lse, **arguments)
    return testing.Result(out=out, lse=lse)


def right(backend, spec, index, q, kv, *, attn=None, pad_to=None, **arguments):
    """Run, compare with dense float64 attention, and return the result."""
    result = run(backend, spec, index, q, kv, attn=attn, pad_to=pad_to, **arguments)
    kv = cast(kv, spec.kv_dtype) if spec.shared_kv else tuple(cast(x, spec.kv_dtype) for x in kv)
    answer = testing.oracle_answer(
        spec, index, cast(q, spec.q_dtype), kv, num_rows=len(result.out), **arguments
    )
    testing.compare(spec, answer, result.out, result.lse)
    return result


def close(got, want, backend):
    """Equal up to the type of the backend's results."""
    wide = 2e-3 if cuda(backend) else 2e-6
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=wide, atol=wide)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def device_arrays(backend, *arrays):
    """The arrays where merges of this backend run: as they are, or as views of device copies with the same strides."""
    if not cuda(backend):
        return arrays, lambda x: x
    from attnrt.device import as_device
    from attnrt.testing.device import _Mirror

    mirror = _Mirror(as_device("cuda:0"))
    views = tuple(mirror.view(x) for x in arrays)
    return views, mirror.bring_back


@pytest.fixture(scope="session")
def kit():
    return SimpleNamespace(
        spec=spec_for, attention=attention, run=run, again=again, right=right, close=close, draw=draw,
        cuda=cuda, cast=cast, device_arrays=device_arrays,
    )  # fmt: skip


def sibling(path):
    """A test module elsewhere in tests/, for what a case shares with it."""
    import importlib.util
    from pathlib import Path

    file = Path(__file__).parents[1] / path
    found = importlib.util.spec_from_file_location(f"cases_{file.stem}", file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def workspace_tests():
    """tests/attnrt/test_loading.py: a device that runs late, played by host memory."""
    return sibling("attnrt/test_loading.py")


@pytest.fixture
def late(workspace_tests):
    """Operations of the CPU replaced by ones that happen only when somebody waits for them."""
    from attnrt import memory

    ops = workspace_tests.LateOps()
    memory.register_ops("cpu", lambda index: ops)
    yield ops
    memory.register_ops("cpu", lambda index: memory.HostOps())


@pytest.fixture(params=CUDA)
def gpu_backend(request):
    """nvrtc and nvcc, for cases that need streams, graphs or device memory; the test carries the marker gpu."""
    return request.param
