# SPDX-License-Identifier: Apache-2.0
"""Where memory lies: a frozen (kind, index), read from anybody's way of saying it; and the handles of streams."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from attnrt.errors import ArgumentError

__all__ = [
    "CPU",
    "Device",
    "as_device",
    "from_dlpack_device",
    "stream_handle",
]

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device; ``str()`` gives "cpu" or "cuda:1".

    Attributes
    ----------
    kind : str
        "cpu" or "cuda".
    index : int
        Number of the device, 0 for the CPU.
    """

    kind: str
    index: int = 0

    @property
    def dlpack(self) -> tuple[int, int]:
        """DLPack's (device type, index)."""
        return (_DLPACK_CPU if self.kind == "cpu" else _DLPACK_CUDA), self.index

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device(kind="cpu")

_interned: dict[tuple[str, int], Device] = {("cpu", 0): CPU}


def _intern(kind: str, index: int) -> Device:
    key = (kind, index)
    found = _interned.get(key)
    if found is None:
        found = _interned.setdefault(key, Device(kind=kind, index=index))
    return found


def as_device(device: object, label: str = "device") -> Device:
    """Understand "cpu", "cuda", "cuda:1", a framework's device, a DLPack pair, or None (the CPU).

    A bare "cuda" is device 0: the base layer never asks a driver which device is current.

    Raises
    ------
    ArgumentError
        The text is no device, or a kind that attnrt does not know.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        return CPU
    if isinstance(device, tuple):
        return from_dlpack_device(device, label)
    return _from_text(_text_of(device), label, device)


def _text_of(device: object) -> str:
    """The name that a device object stands for, from attributes first: their ``str`` differs by framework."""
    if isinstance(device, str):
        return device
    kind = getattr(device, "type", None)  # torch.device
    if isinstance(kind, str):
        index = getattr(device, "index", None)
        return kind if index is None else f"{kind}:{index}"
    platform = getattr(device, "platform", None)  # jax.Device
    if isinstance(platform, str):
        return f"{platform}:{getattr(device, 'local_hardware_id', None) or 0}"
    if type(device).__module__.partition(".")[0] == "cupy":  # cupy.cuda.Device
        return f"cuda:{getattr(device, 'id', 0)}"
    number = getattr(device, "device_id", None)  # cuda.core.Device
    return f"cuda:{number}" if isinstance(number, int) else str(device)


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Device | None:
    kind, colon, number = text.strip().lower().partition(":")
    kind = "cuda" if kind == "gpu" else kind  # JAX says gpu
    if kind not in ("cpu", "cuda") or (colon and not (number.isascii() and number.isdigit())):
        return None
    return _intern(kind, int(number) if colon and kind == "cuda" else 0)


def _from_text(text: str, label: str, got: object) -> Device:
    found = _parse(text)
    if found is None:
        raise ArgumentError(label, 'must be "cpu", "cuda", "cuda:N" or a framework\'s device', repr(got))
    return found


def from_dlpack_device(pair: tuple[Any, ...], label: str = "device") -> Device:
    """The device of a DLPack (type, index) pair; pinned host memory is the CPU's, managed memory CUDA's."""
    kind, index = (int(pair[0]), int(pair[1])) if len(pair) == 2 else (-1, -1)
    if kind in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
        return CPU
    if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED) and index >= 0:
        return _intern("cuda", index)
    raise ArgumentError(
        label,
        "must be in CPU or CUDA memory",
        f"DLPack device {tuple(pair)}",
        "Copy the array to one of them",
    )


def stream_handle(stream: object, label: str = "stream") -> int:
    """The integer handle of a stream: an int, or an object with ``__cuda_stream__``, ``cuda_stream`` or
    ``ptr``.

    Raises
    ------
    ArgumentError
        It is none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        return int(pair[1])
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise ArgumentError(
        label, "must be an integer handle or an object with __cuda_stream__ or .ptr", type(stream).__name__
    )
