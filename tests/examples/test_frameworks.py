# SPDX-License-Identifier: Apache-2.0
"""The examples of the frameworks, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def run(name: str, *arguments: str) -> str:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", f"attnrt.examples.{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.gpu
def test_torch():
    pytest.importorskip("torch")
    assert "an eager run: True" in run("torch_decode", "--steps", "40")


@pytest.mark.gpu
def test_cupy():
    pytest.importorskip("cupy")
    assert "float16 (4, 8, 64), lse (4, 8), cupy: True; the same twice: True" in run("cupy_decode")


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_jax(platform, monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    got = run("jax_decode")
    assert f"on {platform}, lse (4, 8), jax: True; changed: [True, False, False, False]" in got
