# SPDX-License-Identifier: Apache-2.0
import pytest

from attnrt.device import CPU, Device, as_device, stream_handle
from attnrt.errors import ArgumentError


class _Jax:
    platform = "gpu"
    local_hardware_id = 2


class _Core:
    device_id = 3


@pytest.mark.parametrize(
    ("given", "want"),
    [
        *((None, "cpu"), ("cpu", "cpu"), ("cpu:0", "cpu"), ("CUDA:1", "cuda:1"), ("cuda", "cuda:0")),
        *(((1, 0), "cpu"), ((2, 5), "cuda:5"), ((3, 0), "cpu"), ((13, 1), "cuda:1")),
        *((_Jax(), "cuda:2"), (_Core(), "cuda:3"), (Device(kind="cuda", index=4), "cuda:4")),
    ],
)
def test_every_way_of_naming_a_device(given, want):
    device = as_device(given)
    assert str(device) == want
    assert as_device(str(device)) == device
    assert as_device(device.dlpack) == device


def test_torch_device():
    torch = pytest.importorskip("torch")
    assert as_device(torch.device("cpu")) is CPU
    assert as_device(torch.device("cuda", 1)) == Device(kind="cuda", index=1)
    assert as_device(torch.device("cuda")) == Device(kind="cuda", index=0)


@pytest.mark.parametrize(
    "bad", ["tpu", "cuda:x", "cuda:-1", "cuda:", "", (4, 0), (2, -1), (2,), (10, 0), 7, object()]
)
def test_unknown_devices_raise(bad):
    with pytest.raises(ArgumentError, match="where must be"):
        as_device(bad, "where")


def test_stream_handles():
    class Protocol:
        def __cuda_stream__(self):
            return (0, 77)

    class Cupy:
        ptr = 88

    class Torch:
        cuda_stream = 99

    assert [stream_handle(s) for s in (5, Protocol(), Cupy(), Torch())] == [5, 77, 88, 99]
    for bad in (None, "7", True, object()):
        with pytest.raises(ArgumentError, match="__cuda_stream__"):
            stream_handle(bad)
