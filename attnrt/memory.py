# SPDX-License-Identifier: Apache-2.0
"""What the workspace and the runtime ask of a kind of device: memory, one asynchronous copy, events, streams.

The host is the trivial case: a load is written straight to its place, streams do not exist and nothing is ever in flight.
A backend of another kind of device registers its own ``DeviceOps`` (``register_ops``) when it is first used; the
runtime never imports a driver.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from attnrt.device import Device
from attnrt.errors import ArgumentError, UnsupportedError

__all__ = ["ALIGN", "DeviceOps", "HostOps", "aligned_bytes", "load_provider", "ops_of", "register_ops"]

#: Alignment of every slot of a workspace, in bytes: what any vector load, TMA descriptor or cache line wants.
ALIGN = 256


class DeviceOps(Protocol):
    """Memory and order on one device. ``stream`` is a native handle; events are opaque.

    Attributes
    ----------
    direct : bool
        The host writes device memory itself, so that a load needs neither staging nor copy.
    """

    direct: bool

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """(address, owner) of new memory aligned to ALIGN; it lives as long as owner and as work that uses it."""
        ...

    def staging(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of host memory that ``copy`` reads asynchronously (pinned)."""
        ...

    def host(self, address: int, nbytes: int, owner: Any) -> np.ndarray:
        """uint8 [nbytes] over device memory; only where ``direct``."""
        ...

    def copy(self, address: int, source: np.ndarray, nbytes: int, stream: int) -> None:
        """Enqueue the copy of the first ``nbytes`` of source to address."""
        ...

    def send(self, address: int, source: np.ndarray, nbytes: int, stream: int) -> Any:
        """``copy`` and, behind it, ``record``."""
        ...

    def record(self, stream: int) -> Any:
        """An event after all work enqueued on stream so far."""
        ...

    def wait_host(self, event: Any) -> None:
        """Block the host until the event is done."""
        ...

    def wait_stream(self, stream: int, event: Any) -> None:
        """Make later work of stream wait for the event."""
        ...

    def order(self, stream: int) -> None:
        """Make later work of a consumer's ``stream`` (1 legacy default, 2 per thread, else a handle) wait for all work
        that attnrt has enqueued on the device; called when memory of ours is exported through DLPack."""
        ...

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""
        ...

    def synchronize(self, stream: int) -> None:
        """Block the host until all work of a stream is done."""
        ...

    def current_stream(self, view: Any) -> Callable[[], int]:
        """What gives ``stream(None, view)`` for every later array of the view's framework."""
        ...

    def stream(self, stream: Any, view: Any = None) -> int:
        """Native handle of the caller's stream; of None: the current stream of the framework of ``view``, or, without a
        view, of the one GPU framework the process has loaded (ArgumentError if there are two)."""
        ...


def aligned_bytes(nbytes: int) -> tuple[int, np.ndarray]:
    """(address, owner) of new host memory aligned to ALIGN."""
    block = np.empty(nbytes + ALIGN, np.uint8)
    return -(-block.ctypes.data // ALIGN) * ALIGN, block


class HostOps:
    """The CPU's memory: direct, without streams."""

    direct = True

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        return aligned_bytes(nbytes)

    def staging(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def host(self, address: int, nbytes: int, owner: Any) -> np.ndarray:
        return bytes_at(address, nbytes, owner)

    def copy(self, address: int, source: np.ndarray, nbytes: int, stream: int) -> None:
        bytes_at(address, nbytes, None)[:] = source[:nbytes]

    def send(self, address: int, source: np.ndarray, nbytes: int, stream: int) -> Any:
        self.copy(address, source, nbytes, stream)
        return self.record(stream)

    def record(self, stream: int) -> Any:
        return None

    def wait_host(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: int, event: Any) -> None:
        pass

    def order(self, stream: int) -> None:
        pass

    def capturing(self, stream: int) -> bool:
        return False

    def synchronize(self, stream: int) -> None:
        pass

    def current_stream(self, view: Any) -> Callable[[], int]:
        return int

    def stream(self, stream: Any, view: Any = None) -> int:
        if stream is not None:
            raise ArgumentError("stream", "must be None on the CPU", type(stream).__name__)
        return 0


class _Span:
    """Host memory by address, for NumPy's array interface; keeps its owner alive."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def bytes_at(address: int, nbytes: int, owner: Any) -> np.ndarray:
    """uint8 [nbytes], writable, over host memory at ``address``; holds ``owner``."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    interface = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(_Span(interface, owner))


_factories: dict[str, Callable[[int], DeviceOps]] = {}
_ops: dict[Device, DeviceOps] = {}


def register_ops(kind: str, factory: Callable[[int], DeviceOps]) -> None:
    """Tell how to reach devices of a kind: ``factory(index)`` gives the ops of one. The last one counts."""
    _factories[kind] = factory
    for device in [d for d in _ops if d.kind == kind]:
        del _ops[device]


#: Modules whose ``register()`` tells the base layer about a kind of device; loaded by name when the kind is first met.
_PROVIDERS = {"cuda": "attnrt.backends.cuda.driver"}


def load_provider(kind: str) -> str | None:
    """Load what makes a kind of device known; None, or why it cannot be loaded."""
    name = _PROVIDERS.get(kind)
    if name is None:
        return f"nobody provides {kind}"
    try:
        importlib.import_module(name).register()
    except ImportError as error:
        return str(error)
    return None


def ops_of(device: Device) -> DeviceOps:
    """The ops of a device.

    Raises
    ------
    UnsupportedError
        No backend has registered its kind.
    """
    found = _ops.get(device)
    if found is None:
        reason = None if device.kind in _factories else load_provider(device.kind)
        factory = _factories.get(device.kind)
        if factory is None:
            raise UnsupportedError(
                "device", "must be one that a backend can reach", str(device), reason or ""
            )
        found = _ops[device] = factory(device.index)
    return found


register_ops("cpu", lambda index: HostOps())
