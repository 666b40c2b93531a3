# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the backends that can run here, each as a parameter."""

from __future__ import annotations

import pytest

import attnrt as at

#: Files whose GPU tests compile most kernels, up to a minute and a half each.
LONGEST = (
    *("test_cuda_hopper_gpu.py", "test_one_request.py", "test_frameworks.py", "test_torch.py"),
    *("test_cuda_gpu.py", "test_cuda_decode_gpu.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests that compile many kernels come first, so that no worker begins one when the others are done."""

    def rank(item: pytest.Item) -> int:
        long = item.get_closest_marker("gpu") is not None and item.path.name in LONGEST
        return LONGEST.index(item.path.name) if long else len(LONGEST)

    items.sort(key=rank)


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
