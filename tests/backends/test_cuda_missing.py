# SPDX-License-Identifier: Apache-2.0
"""Machines that lack something: typed errors that say what, and a doctor that says how to mend it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import attnrt as at
from attnrt.backends.cuda import doctor, driver, nvcc, nvrtc

SPEC = at.AttentionSpec(
    num_qo_heads=4, num_kv_heads=2, head_dim=64, q_dtype="bfloat16", variant=at.variants.causal()
)


@pytest.fixture
def no_driver(monkeypatch):
    why = "the NVIDIA driver's library cannot be opened: libcuda.so.1: no such file"
    monkeypatch.setattr(driver, "why_not", lambda: why)
    return why


@pytest.mark.parametrize("backend", ["auto", "nvrtc", "nvcc"])
def test_without_a_driver(no_driver, backend):
    with pytest.raises(at.UnsupportedError, match="libcuda") as caught:
        at.Attention(SPEC, backend=backend, device="cuda")
    reasons = caught.value.reasons
    assert all(
        no_driver in reasons[name][0] for name in (("nvrtc", "nvcc") if backend == "auto" else (backend,))
    )
    with pytest.raises(at.AttnrtError):
        at.empty((3,), "float32", "cuda")
    q = np.ones((1, 4, 64), np.float32)  # the CPU goes on
    kv = np.ones((1, 2, 64), np.float32)
    index = at.formats.ragged([0, 1], [0, 1])
    np.testing.assert_array_equal(at.attention(q, (kv, kv), index), q)


def test_plans_need_no_driver(no_driver):
    index = at.formats.ragged([0, 1], [0, 5000])
    traits = nvrtc.NvrtcBackend().traits(SPEC, index.features, at.TensorView(np.ones(1)).device)
    assert traits.num_workers == 528 and len(at.make_plan(SPEC, index, traits).work.items)


def test_the_doctor_mends_a_missing_driver(no_driver):
    found = {name: (ok, line) for name, ok, line in doctor()}
    ok, line = found["cuda driver"]
    assert not ok and "install the NVIDIA driver" in line and no_driver in line
    assert {"nvrtc", "nvcc"} <= set(found) and all("\n" not in line for _, line in found.values())


def test_the_doctor_names_a_missing_compiler(no_driver, monkeypatch, tmp_path):
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: (None, ("/a/nvcc", "/b/nvcc")))
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(nvrtc, "why_not_nvrtc", nvrtc.why_not_nvrtc.__wrapped__)
    found = {name: (ok, line) for name, ok, line in doctor()}
    assert found["nvcc"] == (False, "not found (tried /a/nvcc, /b/nvcc); needed only where NVRTC is not")
    assert not found["nvrtc"][0] and "pip install '.[cuda]'" in found["nvrtc"][1]
    (tmp_path / "bin").mkdir()
    lone = tmp_path / "bin" / "nvcc"
    lone.touch()
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: (str(lone), ()))
    ok, line = {name: (ok, line) for name, ok, line in doctor()}["nvcc"]
    assert not ok and "cuda_runtime.h" in line
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert {name: (ok, line) for name, ok, line in doctor()}["nvcc"] == (True, str(lone))
