# SPDX-License-Identifier: Apache-2.0
"""Whose arrays the model computes with, and where K and V lie: the demo's only file that knows an array library.

    numpy, CPU     NumPy for all
    torch          PyTorch tensors, on the GPU or on the CPU
    cupy           CuPy arrays on the GPU
    numpy, GPU     no framework at all: the model runs in NumPy on the host, K and V lie in device memory of attnrt's own, and
                   the rows of q, k, v and the output cross over by plain copies

All four answer to the methods of `HostArrays`. A library is imported when it is chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16)
import numpy as np

import attnrt as at
from attnrt.memory import ops_of

from .product import product


class Cache(Protocol):
    """K or V of every layer."""

    @property
    def layers(self) -> Sequence[Any]:
        """An array [num_pages, page_size, num_kv_heads, head_dim] of each layer, as `at.Attention` takes it."""

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy token slots (page * page_size + offset) `source` to `target` in every layer; ranges may overlap."""


class HostArrays:
    """NumPy on the CPU.

    Attributes
    ----------
    name : str
        The library.
    xp : module
        Has `sqrt`, `exp` and `mean` over the library's arrays.
    device : str
        Where attention runs and K and V lie.
    """

    name = "numpy"
    xp: Any = np
    device = "cpu"

    @property
    def stream(self) -> int | None:
        """Handle of the stream that attention has to follow; None on the CPU."""
        return None

    def put(self, x: np.ndarray) -> Any:
        """Return a host array as one that the model computes with."""
        return x

    def get(self, x: Any) -> np.ndarray:
        """Return an array of the model's on the host."""
        return x

    def product(self, x: Any, w: Any) -> Any:
        """Return x @ w for float32 x [rows, in] and w [in, out]."""
        return product(x, w)

    def send(self, role: str, x: Any, dtype: str) -> Any:
        """Return an array of the model's as `dtype` where attention reads it, until the next one of the same role."""
        return x.astype(np.dtype(dtype), copy=False)

    def result(self, shape: tuple[int, ...]) -> Any:
        """Return where attention is to write its float32 output; None: it makes an array itself."""
        return None

    def receive(self, out: Any) -> Any:
        """Return attention's output as an array of the model's."""
        return out

    def cache(self, shape: tuple[int, ...], dtype: str) -> Cache:
        """Return room for [num_layers, num_pages, page_size, num_kv_heads, head_dim]."""
        # zeros, not empty: the pages are then only touched, and only cost memory, when they are written.
        return _IndexedCache(np.zeros(shape, np.dtype(dtype)), self.put)


class TorchArrays(HostArrays):
    """PyTorch on `device`, in float32 all through (PyTorch's matrix products round to less only if they are told to)."""

    name = "torch"

    def __init__(self, device: str) -> None:
        import torch

        if device == "cuda":
            if not torch.cuda.is_available():
                raise ValueError("--arrays torch: this PyTorch sees no GPU")
            device = f"cuda:{torch.cuda.current_device()}"
        self.xp, self.device = torch, device

    @property
    def stream(self) -> int | None:
        return None if self.device == "cpu" else self.xp.cuda.current_stream().cuda_stream

    def put(self, x: np.ndarray) -> Any:
        return self.xp.tensor(x, device=self.device)

    def get(self, x: Any) -> np.ndarray:
        return x.cpu().numpy()

    def product(self, x: Any, w: Any) -> Any:
        return x @ w

    def send(self, role: str, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.xp, dtype))

    def cache(self, shape: tuple[int, ...], dtype: str) -> Cache:
        whole = self.xp.zeros(shape, dtype=getattr(self.xp, dtype), device=self.device)
        return _IndexedCache(whole, self.put)


class CupyArrays(HostArrays):
    """CuPy on the current device."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self.xp, self.device = cupy, f"cuda:{cupy.cuda.Device().id}"

    @property
    def stream(self) -> int | None:
        return int(self.xp.cuda.get_current_stream().ptr)

    def put(self, x: np.ndarray) -> Any:
        return self.xp.asarray(x)

    def get(self, x: Any) -> np.ndarray:
        return self.xp.asnumpy(x)

    def product(self, x: Any, w: Any) -> Any:
        return x @ w

    def cache(self, shape: tuple[int, ...], dtype: str) -> Cache:
        return _IndexedCache(self.xp.zeros(shape, np.dtype(dtype)), self.put)


class StagedArrays(HostArrays):
    """NumPy for the model, memory of attnrt's own on `device` for attention; everything goes over the default stream."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._ops: Any = ops_of(at.device.as_device(device))
        self._buffers: dict[tuple[str, tuple[int, ...], str], Any] = {}

    @property
    def stream(self) -> int | None:
        return None if self._ops.direct else 0

    def send(self, role: str, x: Any, dtype: str) -> Any:
        rows = np.ascontiguousarray(x, np.dtype(dtype))
        buffer = self._buffer(role, rows.shape, dtype)
        write(self._ops, buffer.ptr, rows)
        return buffer

    def result(self, shape: tuple[int, ...]) -> Any:
        return self._buffer("out", shape, "float32")

    def receive(self, out: Any) -> Any:
        return read(self._ops, out.ptr, out.nbytes).view(np.float32).reshape(out.shape)

    def cache(self, shape: tuple[int, ...], dtype: str) -> Cache:
        return _StagedCache(shape, dtype, self.device, self._ops)

    def _buffer(self, role: str, shape: tuple[int, ...], dtype: str) -> Any:
        key = (role, shape, dtype)
        if (
            key not in self._buffers
        ):  # as many as there are numbers of rows in a step: the chunk's and the batch's at most
            self._buffers[key] = at.empty(shape, dtype, self.device)
        return self._buffers[key]


class _IndexedCache:
    """One array of a library that takes arrays of integers as an index."""

    def __init__(self, whole: Any, put: Callable[[np.ndarray], Any]) -> None:
        self.layers = [whole[i] for i in range(whole.shape[0])]
        self._flat, self._put = whole.reshape(whole.shape[0], -1, *whole.shape[3:]), put

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        # Indexing reads all of source into new memory before anything is written.
        self._flat[:, self._put(target)] = self._flat[:, self._put(source)]


class _StagedCache:
    """Device memory without a library: tokens move through the host, run by run of neighbouring slots."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str, ops: Any) -> None:
        self.layers = at.empty(shape, dtype, device).unstack()
        self._ops, self._slot = ops, shape[3] * shape[4] * np.dtype(dtype).itemsize

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
        runs = [
            (int(s[0]), int(t[0]), len(s))
            for s, t in zip(np.split(source, cuts), np.split(target, cuts), strict=True)
        ]
        for layer in self.layers:
            held = [read(self._ops, layer.ptr + s * self._slot, n * self._slot).copy() for s, _, n in runs]
            for (_, t, _), data in zip(runs, held, strict=True):
                write(self._ops, layer.ptr + t * self._slot, data)


def read(ops: Any, address: int, nbytes: int) -> np.ndarray:
    """Return device memory as uint8 [nbytes] on the host, after all work of the default stream."""
    return ops.host(address, nbytes, None) if ops.direct else ops.fetch(address, nbytes)


def write(ops: Any, address: int, source: np.ndarray) -> None:
    """Copy a contiguous host array to device memory, in the order of the default stream; `source` may change afterwards."""
    # The driver has read pageable memory when the call returns, though the copy itself may still be under way.
    ops.copy(address, source.reshape(-1).view(np.uint8), source.nbytes, 0)


def make_arrays(name: str, device: str) -> HostArrays:
    """Return the arrays called `name` for attention on `device`.

    Parameters
    ----------
    name : str
        "numpy", "torch", "cupy", or "auto": NumPy on the CPU; on a GPU PyTorch, else CuPy, else neither.
    device : str
        "cpu" or "cuda".

    Raises
    ------
    ValueError
        The library is missing, or does not go with the device.
    """
    if name == "auto":
        name = "numpy" if device == "cpu" else next(filter(_sees_gpu, ("torch", "cupy")), "numpy")
    if name == "numpy":
        return HostArrays() if device == "cpu" else StagedArrays(device)
    if name == "cupy" and device == "cpu":
        raise ValueError("--arrays cupy needs a backend that runs on a GPU (--backend nvrtc or nvcc)")
    try:
        return TorchArrays(device) if name == "torch" else CupyArrays()
    except ImportError as error:
        raise ValueError(f"--arrays {name}: {error}") from error


def _sees_gpu(name: str) -> bool:
    """Whether a library is there and can reach a GPU."""
    if importlib.util.find_spec(name) is None:
        return False
    try:
        cuda = importlib.import_module(name).cuda
        return cuda.is_available()
    except Exception:  # a broken installation is no choice, whatever it raises
        return False
