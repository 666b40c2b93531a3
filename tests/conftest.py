# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the backends that can run here, each as a parameter."""

from __future__ import annotations

import pytest

import attnrt as at


def runnable(kind: str) -> list[str]:
    """Names of the backends without a reason against a plain layer on a kind of device."""
    return [name for name, why in at.backends.status(device=kind).items() if not why]


@pytest.fixture(scope="session", params=runnable("cpu"))
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend of the CPU that can run here, "reference" among them."""
    return request.param


@pytest.fixture(autouse=True)
def one_gpu_framework(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy that another GPU test loaded into this process does not count, except in tests named after it: with two frameworks
    loaded, load() must be told its stream."""
    if request.node.get_closest_marker("gpu") and "cupy" not in request.node.name:
        from attnrt.backends.cuda import driver

        uses = driver._uses_gpu
        monkeypatch.setattr(driver, "_uses_gpu", lambda name: name != "cupy" and uses(name))
