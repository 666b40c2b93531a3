# SPDX-License-Identifier: Apache-2.0
"""The CUDA backends on a GPU: against the float64 oracle, and bit for bit against themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing

sys.path.insert(0, str(Path(__file__).parent))
from gpu_arrays import spec_128 as spec

v = at.variants
pytestmark = pytest.mark.gpu

BACKENDS = ("nvrtc", "nvcc")


@pytest.fixture(scope="module", params=BACKENDS)
def cuda(request):
    reasons = at.backends.status(spec(), device="cuda")[request.param]
    assert not reasons, reasons
    return request.param


def right(backend, s, qo, kv, *, seed=0, **layout):
    """Run a random batch and compare it with dense float64 attention."""
    case = testing.make_case(s, qo, kv, seed=seed)
    batch = testing.lay_out(case, **layout)
    result = testing.run_batch(case, batch, backend, device="cuda")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
    testing.compare(s, answer, result.out, result.lse)


LENGTHS = ([1, 30, 70, 0, 3, 1, 5, 1], [1400, 77, 70, 9, 0, 1, 2, 600])

VARIANTS = {
    "full": v.full(),
    "causal": v.causal(),
    "window": (v.causal(), v.sliding_window(37)),
    "softcap": (v.causal(), v.softcap(5.0)),
    "alibi": (v.causal(), v.alibi()),
    "sigmoid": (v.causal(), v.sigmoid()),
    "rope": (v.rope(64), v.causal()),
    "rope interleaved": (v.rope(128, interleaved=True), v.causal()),
    "sinks": (v.causal(), v.sink_logits(0.5)),
    "all": (v.rope(64), v.causal(), v.sliding_window(300), v.softcap(20.0), v.sink_logits(-1.0)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(cuda, name):
    right(cuda, spec(variant=VARIANTS[name]), *LENGTHS)


@pytest.mark.parametrize(
    "dims", [(64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (192, 128), (256, 256), (512, 512), (40, 24)]
)
def test_head_dims(cuda, dims):
    right(cuda, spec(head_dim=dims[0], head_dim_vo=dims[1]), *LENGTHS)


@pytest.mark.parametrize("heads", [(3, 1), (5, 1), (9, 3), (28, 4), (16, 1), (71, 1), (4, 4)])
def test_groups(cuda, heads):
    right(cuda, spec(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=64), *LENGTHS)


@pytest.mark.parametrize(
    "dtypes",
    [("float16", None, None), ("bfloat16", "float8_e4m3fn", None), ("float16", "float8_e5m2", "float32")],
)
@pytest.mark.parametrize("head_dim", [128, 72])
def test_dtypes(cuda, dtypes, head_dim):
    q, kv, out = dtypes
    right(cuda, spec(q_dtype=q, kv_dtype=kv, out_dtype=out, head_dim=head_dim), *LENGTHS)


def test_latent(cuda):
    s = spec(num_qo_heads=16, num_kv_heads=1, head_dim=576, head_dim_vo=512, shared_kv=True, sm_scale=0.08)
    right(cuda, s, *LENGTHS)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 544])
def test_pages(cuda, layout, page_size):
    right(cuda, spec(kv_layout=layout), *LENGTHS, page_size=page_size)


def make(name):
    s = spec(head_dim=64, head_dim_vo=48, num_qo_heads=6, variant=VARIANTS[name])
    return testing.make_case(s, [1, 30, 70, 0, 3, 1, 5], [1400, 77, 70, 9, 0, 1, 2])


@pytest.fixture(params=["causal", "sigmoid", "all"])
def case(request):
    return make(request.param)


@pytest.mark.parametrize(
    "oracle",
    ["poison", "placement", "layout_invariance", "capacity", "workers", "batch_invariance", "sentinel"],
)
def test_bitwise(cuda, case, oracle):
    if oracle == "workers":
        testing.workers(case, cuda, (132, 131, 66, 7))
    else:
        getattr(testing, oracle)(case, cuda)


def test_page_size_changes_nothing(cuda, case):
    testing.page_size_invariance(case, cuda)


def test_history_changes_nothing(cuda):
    testing.history(make("causal"), testing.make_case(make("causal").spec, [2, 9], [3000, 9], seed=7), cuda)


def test_compilers_agree():
    """NVRTC and nvcc of one version compile one text: reported, not promised."""
    case = make("causal")
    batch = testing.lay_out(case)
    a, b = (testing.run_batch(case, batch, name, device="cuda") for name in BACKENDS)
    assert np.abs(a.out.astype(np.float64) - b.out.astype(np.float64)).max() < 2e-2
