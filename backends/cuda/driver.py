# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver in Python terms: errors raised, memory owned, events and streams as integers.

All calls go through the shim ``_driver`` (native/driver.cpp), which finds libcuda when it is first used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from attnrt.device import stream_handle
from attnrt.errors import ArgumentError, AttnrtError, UnsupportedError

__all__ = ["CudaOps", "Library", "check", "device_attribute", "shim", "why_not"]

# CUdevice_attribute
MULTIPROCESSORS, MAJOR, MINOR, SHARED_OPTIN = 16, 75, 76, 97
# CUfunction_attribute
NUM_REGS, LOCAL_BYTES = 4, 3
# What attnrt_cuda_run answers under a capture that it must refuse (native/driver.h).
CAPTURING = -2


class CudaError(AttnrtError, RuntimeError):
    """The driver refused a call; ``got`` is its own text."""


@lru_cache(maxsize=1)
def shim() -> tuple[Any, Any]:
    """(ffi, lib) of the compiled shim."""
    from attnrt.backends.cuda import _driver  # type: ignore[attr-defined]

    return _driver.ffi, _driver.lib


@lru_cache(maxsize=1)
def run_address() -> int:
    """Address of attnrt_cuda_run."""
    ffi, lib = shim()
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, "attnrt_cuda_run")))


@lru_cache(maxsize=1)
def first_items_address() -> int:
    """Address of attnrt_cuda_first_items."""
    ffi, lib = shim()
    return int(ffi.cast("uintptr_t", ffi.addressof(lib, "attnrt_cuda_first_items")))


@lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why the driver cannot be used here, in one line; None: it can."""
    try:
        ffi, lib = shim()
    except ImportError as error:
        return f"the driver shim is not built ({error})"
    if lib.attnrt_cuda_open() != 0:
        return ffi.string(lib.attnrt_cuda_why()).decode()
    count = ffi.new("int *")
    if lib.attnrt_cuda_device_count(count) != 0 or count[0] == 0:
        return "the driver sees no GPU"
    return None


def check(code: int, call: str) -> None:
    """Raise what the driver says of a code that is not success."""
    if code:
        ffi, lib = shim()
        raise CudaError(
            call, "must succeed", f"error {code}: {ffi.string(lib.attnrt_cuda_error(code)).decode()}"
        )


@lru_cache(maxsize=256)
def device_attribute(device: int, attribute: int) -> int:
    """A CUdevice_attribute of a device."""
    ffi, lib = shim()
    value = ffi.new("int *")
    check(lib.attnrt_cuda_device_attribute(device, attribute, value), "cuDeviceGetAttribute")
    return value[0]


def device_count() -> int:
    """GPUs that the driver sees; 0 without a driver."""
    if why_not() is not None:
        return 0
    ffi, lib = shim()
    count = ffi.new("int *")
    check(lib.attnrt_cuda_device_count(count), "cuDeviceGetCount")
    return count[0]


def current_device() -> int:
    """The device of the calling thread's current context; 0 if it has none."""
    ffi, lib = shim()
    device = ffi.new("int *")
    check(lib.attnrt_cuda_current_device(device), "cuCtxGetDevice")
    return device[0]


def capturing(device: int, stream: int) -> bool:
    """Whether a stream is being captured into a graph."""
    ffi, lib = shim()
    out = ffi.new("int *")
    check(lib.attnrt_cuda_stream_capturing(device, stream, out), "cuStreamIsCapturing")
    return out[0] != 0


class _Memory:
    """Owner of a device allocation; freed with the last view of it."""

    __slots__ = ("address", "device")

    def __init__(self, device: int, address: int) -> None:
        self.device, self.address = device, address

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():  # the driver may be gone already; the process's end frees all
            return
        shim()[1].attnrt_cuda_free(self.device, self.address)


class _Event:
    """An event; taken from those that nobody holds any more, and given back there (what waits for it has been told already)."""

    __slots__ = ("device", "handle")
    _free: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, device: int) -> None:
        self.device = device
        free = self._free.setdefault(device, [])
        try:
            self.handle = free.pop()
        except IndexError:
            ffi, lib = shim()
            out = ffi.new("uint64_t *")
            check(lib.attnrt_cuda_event_create(device, out), "cuEventCreate")
            self.handle = out[0]

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)
        if handle is not None:
            self._free[self.device].append(handle)


class CudaOps:
    """Memory and order on one GPU (attnrt/memory.py DeviceOps)."""

    direct = False

    def __init__(self, index: int) -> None:
        reason = why_not()
        if reason is not None:
            raise UnsupportedError("device", "must have a working CUDA driver", f"cuda:{index}", reason)
        if not 0 <= index < device_count():
            raise ArgumentError(
                "device", f"must be below the {device_count()} GPUs of this machine", f"cuda:{index}"
            )
        self.index = index
        self.ffi, self.lib = shim()
        check(self.lib.attnrt_cuda_retain(index), "cuDevicePrimaryCtxRetain")

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """(address, owner); the driver aligns to 256 bytes and more."""
        out = self.ffi.new("uint64_t *")
        check(self.lib.attnrt_cuda_alloc(self.index, max(nbytes, 1), out), f"cuMemAlloc of {nbytes} bytes")
        return out[0], _Memory(self.index, out[0])

    def staging(self, nbytes: int) -> np.ndarray:
        """Pinned host memory; kept for the life of the process's workspaces (the ring reuses it)."""
        out = self.ffi.new("void **")
        check(
            self.lib.attnrt_cuda_host_alloc(self.index, max(nbytes, 1), out),
            f"cuMemHostAlloc of {nbytes} bytes",
        )
        lib, device, pointer = self.lib, self.index, out[0]

        def free(_: Any) -> None:
            if sys is not None and not sys.is_finalizing():
                lib.attnrt_cuda_host_free(device, pointer)

        owner = self.ffi.gc(self.ffi.cast("char *", pointer), free)
        return np.frombuffer(self.ffi.buffer(owner, max(nbytes, 1)), np.uint8)[:nbytes]

    def host(self, address: int, nbytes: int, owner: Any) -> np.ndarray:
        raise AssertionError("device memory is not written by the host")

    def copy(self, address: int, source: np.ndarray, nbytes: int, stream: int) -> None:
        if source.dtype == np.uint8:
            pointer = self.ffi.from_buffer(source)  # a tenth of the time of source.ctypes
        else:
            pointer = self.ffi.cast("void *", source.ctypes.data)
        check(
            self.lib.attnrt_cuda_memcpy_htod_async(self.index, address, pointer, nbytes, stream),
            "cuMemcpyHtoDAsync",
        )

    def send(self, address: int, source: np.ndarray, nbytes: int, stream: int) -> Any:
        """``copy`` and ``record`` in one call; ``source`` is uint8."""
        event = _Event(self.index)
        pointer = self.ffi.from_buffer(source)
        code = self.lib.attnrt_cuda_send(self.index, address, pointer, nbytes, stream, event.handle)
        if code:
            check(code, "cuMemcpyHtoDAsync")
        return event

    def fetch(self, address: int, nbytes: int) -> np.ndarray:
        """Bytes of device memory, after all work of the legacy stream; waits."""
        out = np.empty(nbytes, np.uint8)
        pointer = self.ffi.cast("void *", out.ctypes.data)
        check(self.lib.attnrt_cuda_memcpy_dtoh(self.index, pointer, address, nbytes), "cuMemcpyDtoH")
        return out

    def record(self, stream: int) -> Any:
        event = _Event(self.index)
        check(self.lib.attnrt_cuda_event_record(self.index, event.handle, stream), "cuEventRecord")
        return event

    def step_calls(self) -> tuple[int, int, int]:
        """Addresses of attnrt_cuda_send and attnrt_cuda_event_sync and the device, for who calls them without Python."""
        found = [
            self.ffi.addressof(self.lib, name) for name in ("attnrt_cuda_send", "attnrt_cuda_event_sync")
        ]
        send, wait = (int(self.ffi.cast("uintptr_t", address)) for address in found)
        return send, wait, self.index

    def event(self) -> Any:
        """An event that nothing has been recorded in."""
        return _Event(self.index)

    def wait_host(self, event: Any) -> None:
        check(self.lib.attnrt_cuda_event_sync(self.index, event.handle), "cuEventSynchronize")

    def wait_stream(self, stream: int, event: Any) -> None:
        check(self.lib.attnrt_cuda_stream_wait(self.index, stream, event.handle), "cuStreamWaitEvent")

    def order(self, stream: int) -> None:
        """Nothing to do: our work goes to the callers' own streams, and buffers of ours that are filled outside one are filled
        on the legacy stream, which orders itself."""

    def capturing(self, stream: int) -> bool:
        return capturing(self.index, stream)

    def synchronize(self, stream: int) -> None:
        """Wait for all work of a stream."""
        check(self.lib.attnrt_cuda_stream_sync(self.index, stream), "cuStreamSynchronize")

    def stream(self, stream: Any, view: Any = None) -> int:
        """Native handle; of None: the current stream of the view's framework, or of the one GPU framework loaded."""
        if stream is not None:
            return stream_handle(stream)
        framework = None if view is None else view.framework
        if framework in _CURRENT_STREAM:
            return _CURRENT_STREAM[framework](self.index)()
        if framework is not None and framework not in (None, "attnrt"):
            return 0
        modules = sys.modules
        torch = "torch" in modules and _uses_gpu("torch")
        if "cupy" in modules and _uses_gpu("cupy"):
            if torch:
                raise ArgumentError("stream", "must be given: torch and cupy are both loaded", None)
            return _cupy_stream(self.index)()
        return modules["torch"]._C._cuda_getCurrentRawStream(self.index) if torch else 0

    def current_stream(self, view: Any) -> Callable[[], int]:
        """What gives ``stream(None, view)`` again and again."""
        maker = _CURRENT_STREAM.get(view.framework)
        return partial(self.stream, None, view) if maker is None else maker(self.index)


def _torch_stream(index: int) -> Callable[[], int]:
    # The raw getter: torch.cuda.current_stream() builds an object for 4 to 15 µs.
    return partial(sys.modules["torch"]._C._cuda_getCurrentRawStream, index)


def _cupy_stream(index: int) -> Callable[[], int]:
    current = sys.modules["cupy"].cuda.get_current_stream
    return lambda: current().ptr


_CURRENT_STREAM = {"torch": _torch_stream, "cupy": _cupy_stream}


@lru_cache(maxsize=4)
def _uses_gpu(name: str) -> bool:
    """Whether a loaded framework can have work on a GPU."""
    return name != "torch" or bool(sys.modules["torch"].cuda.is_available())


class Library:
    """A loaded code image and its kernels.

    Parameters
    ----------
    device : int
    image : bytes
        A cubin or fatbin.
    """

    def __init__(self, device: int, image: bytes) -> None:
        self.device = device
        self.ffi, self.lib = shim()
        out = self.ffi.new("uint64_t *")
        self._image = self.ffi.from_buffer(image)
        check(self.lib.attnrt_cuda_library_load(device, self._image, out), "cuLibraryLoadData")
        self.handle = out[0]

    def kernel(self, name: str, smem: int = 0) -> int:
        """Handle of a kernel, opted in to ``smem`` bytes of dynamic shared memory."""
        out = self.ffi.new("uint64_t *")
        check(
            self.lib.attnrt_cuda_kernel_get(self.device, self.handle, name.encode(), out),
            f"cuLibraryGetKernel {name}",
        )
        if smem > 48 << 10:
            check(
                self.lib.attnrt_cuda_kernel_set_smem(self.device, out[0], smem),
                f"{smem} bytes of shared memory",
            )
        return out[0]

    def number(self, name: str) -> int:
        """Value of a constant int that the image exports."""
        address, size, value = self.ffi.new("uint64_t *"), self.ffi.new("size_t *"), self.ffi.new("int *")
        check(
            self.lib.attnrt_cuda_library_global(self.device, self.handle, name.encode(), address, size), name
        )
        check(self.lib.attnrt_cuda_memcpy_dtoh(self.device, value, address[0], 4), f"reading {name}")
        return value[0]

    def attribute(self, kernel: int, attribute: int) -> int:
        """A CUfunction_attribute of a kernel."""
        out = self.ffi.new("int *")
        check(
            self.lib.attnrt_cuda_kernel_attribute(self.device, kernel, attribute, out), "cuKernelGetAttribute"
        )
        return out[0]


def register() -> None:
    """Tell the base layer how to reach GPUs."""
    from attnrt.memory import register_ops
    from attnrt.merge import register_merge

    def merge(call: Any) -> None:
        from attnrt.backends.cuda import merge_parts  # it renders and compiles: not needed to reach a GPU

        merge_parts.merge(call)

    register_ops("cuda", CudaOps)
    register_merge("cuda", merge)
