# SPDX-License-Identifier: Apache-2.0
"""TensorView: anybody's array, read once into a frozen record; and new arrays for the caller or for us.

One type does both ways. `TensorView(x)` reads an array and keeps it alive; `empty` makes one that owns memory
of ours. Either speaks DLPack and the array interface outwards, so a result of ours can be handed to any
framework.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from attnrt.device import CPU, Device, as_device, from_dlpack_device
from attnrt.dtypes import DTYPES, Dtype, as_dtype
from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.memory import ops_of
from attnrt.reading import coerce, compact_strides, native, read_slow

__all__ = [
    "TensorView",
    "current_stream",
    "empty",
    "kv_interleaved",
    "make_view",
    "moved",
    "signature",
    "view",
    "views",
]

_ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


class TensorView(native.View):
    """An array of any framework, read once: address, shape, strides, dtype, device. Frozen; keeps the memory
    alive.

    Parameters
    ----------
    x : array
        NumPy (ml_dtypes too), PyTorch, CuPy, JAX, another view, or anything with ``__dlpack__`` or an array
        interface.
    dtype : dtype, optional
        What the elements must be. An unsigned array of the same width holds their bits (uint8: fp8, uint16:
        bfloat16 or float16).
    stream : int, optional
        The stream that will read the array, handed to ``__dlpack__`` of CUDA arrays that are read that way;
        None: the caller works on the array's own stream.

    Attributes
    ----------
    ptr : int
        Address of element (0, ..., 0), DLPack's byte_offset folded in; 0 only for arrays without elements.
    shape : tuple of int
    strides : tuple of int
        In elements, signed. Where a stride cannot matter (size 1, no elements) it is that of a compact array.
    dtype : Dtype
    device : Device
    readonly : bool
        The producer forbids writing.
    immutable : bool
        The framework's arrays never change (JAX): also readonly.
    framework : str
        Root module of the array's type ("numpy", "torch", "cupy", "jax"); "attnrt" for our own memory.
    owner : object
        What holds the memory.

    Raises
    ------
    DtypeError
        Not an array, an unknown dtype or byte order, vector lanes, a tracer, or not the dtype asked for.
    ArgumentError
        Requires grad, is masked, sparse, sharded, negated, misaligned or deleted, or lies on an unknown
        device.
    """

    __slots__ = ()

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype
    device: Device
    readonly: bool
    immutable: bool
    framework: str
    owner: Any

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, gaps not counted."""
        return self.size * self.dtype.itemsize

    @property
    def is_compact(self) -> bool:
        """Whether the elements lie one after the other in row-major order."""
        return self.strides == compact_strides(self.shape)

    def __repr__(self) -> str:
        note = " readonly" if self.readonly else ""
        return f"TensorView({self.framework} {self.dtype}{list(self.shape)} strides {self.strides} on {self.device}{note})"

    def numpy(self) -> np.ndarray:
        """A NumPy array over the same memory (dtypes of ml_dtypes where NumPy has none); CPU only, never a
        copy.

        Raises
        ------
        ArgumentError
            The memory is not the CPU's.
        """
        if self.device is not CPU and self.device.kind != "cpu":
            raise ArgumentError("array", "must be in CPU memory", self.device, "Copy it to the host first")
        owner = self.owner
        if type(owner) is np.ndarray and owner.shape == self.shape and self._is_whole(owner):
            return owner if owner.dtype is self.dtype.numpy else owner.view(self.dtype.numpy)
        if 0 in self.shape:  # NumPy does not take a null address
            out = np.empty(self.shape, self.dtype.numpy)
            out.flags.writeable = not self.readonly
            return out
        return np.asarray(_Interface(self)).view(self.dtype.numpy)

    def _is_whole(self, array: np.ndarray) -> bool:
        """Whether the view is all of ``array``, which has its shape."""
        size = self.dtype.itemsize
        return (
            array.itemsize == size
            and array.strides == tuple(s * size for s in self.strides)
            and array.__array_interface__["data"] == (self.ptr, self.readonly)
        )

    def take(self, axis: int, index: int) -> TensorView:
        """The sub-view at ``index`` along ``axis``, which goes away; no data moves."""
        shape, strides = self.shape, self.strides
        axis = axis + self.ndim if axis < 0 else axis
        if not 0 <= axis < self.ndim or not 0 <= index < shape[axis]:
            raise ArgumentError("index", f"must be inside axis {axis} of shape {shape}", index)
        place = self.ptr + index * strides[axis] * self.dtype.itemsize if self.ptr else 0
        shape, strides = shape[:axis] + shape[axis + 1 :], strides[:axis] + strides[axis + 1 :]
        kind = (self.framework, self.readonly, self.immutable)
        # The owner is wrapped: it is not this view's own array.
        return native.make(place, shape, strides, self.dtype, self.device, (self.owner,), *kind)

    def unstack(self) -> tuple[TensorView, ...]:
        """The sub-views along axis 0, of which there must be at least one."""
        first = self.take(0, 0)
        step = self.strides[0] * self.dtype.itemsize if self.ptr else 0
        rest = (moved(first, first.ptr + i * step, first.owner) for i in range(1, self.shape[0]))
        return (first, *rest)

    # The names of the protocols' methods and arguments are fixed by the array API standard.

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device.dlpack

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule over this memory; see the array API standard for the arguments.

        ``stream`` on CUDA: None or 1 the legacy default stream, 2 the per-thread one, -1 no ordering, else a
        handle; work that attnrt has enqueued is made to come before what the consumer enqueues there. On the
        CPU only None.
        """
        _order_consumer(self.device, stream)
        if dl_device is not None and from_dlpack_device(dl_device, "dl_device") != self.device:
            raise ArgumentError(
                "dl_device", f"must be the array's own, {self.device.dlpack}", tuple(dl_device)
            )
        source = self
        if copy:
            if self.device.kind != "cpu":
                raise UnsupportedError(
                    "copy", "must not be asked of device memory", copy, "Export, then copy there"
                )
            source = empty(self.shape, self.dtype)
            source.numpy()[...] = self.numpy()
        versioned = max_version is not None and max_version[0] >= 1
        if source.readonly and not versioned:
            raise ArgumentError(
                "max_version",
                "must be at least (1, 0) to export a read-only array",
                max_version,
                "Or pass copy=True",
            )
        # Some consumers abort the process on a negative stride (PyTorch does): no error of theirs could be caught.
        if any(step < 0 for step in source.strides):
            raise ArgumentError(
                "array",
                "must have no negative stride to be exported",
                source.strides,
                "Or pass copy=True, or copy it before",
            )
        return native.export_capsule(
            source, source.dtype.code, source.dtype.bits, *self.device.dlpack, versioned
        )

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self.device.kind != "cpu" or not self.dtype.is_native:
            raise AttributeError(
                "__array_interface__"
            )  # the protocol's way of saying that it cannot be described
        return _interface(self, self.dtype.numpy.str)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.device.kind != "cuda" or not self.dtype.is_native:
            raise AttributeError("__cuda_array_interface__")
        return _interface(self, self.dtype.numpy.str) | {"stream": None}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ArgumentError("copy", "must not be False where the dtype changes", dtype)
            return array.astype(dtype)
        return array.copy() if copy else array


class _Interface:
    """What NumPy builds an array from; it becomes the array's base and so keeps the view alive."""

    __slots__ = ("__array_interface__", "view")

    def __init__(self, view: TensorView) -> None:
        self.view = view
        self.__array_interface__ = _interface(view, f"<u{view.dtype.itemsize}")


def _interface(view: TensorView, typestr: str) -> dict[str, Any]:
    return {
        "version": 3,
        "shape": view.shape,
        "typestr": typestr,
        "strides": tuple(s * view.dtype.itemsize for s in view.strides),
        "data": (view.ptr, view.readonly),
    }


def _order_consumer(device: Device, stream: object) -> None:
    if device.kind == "cpu":
        if stream is not None:
            raise ArgumentError("stream", "must be None for CPU memory", stream)
        return
    handle = 1 if stream is None else stream
    if not isinstance(handle, int) or isinstance(handle, bool) or handle == 0 or handle < -1:
        raise ArgumentError(
            "stream",
            "must be None, 1 (legacy default), 2 (per thread), -1 (no ordering) or a handle",
            stream,
            "0 is ambiguous in DLPack",
        )
    if handle != -1:
        ops_of(device).order(handle)


# ------------------------------------------------------------------------------------------------- reading

view = native.view
"""``view(x)``: `TensorView(x)`, a little faster."""

views = native.views
"""``views(*arrays)``: a tuple of views, one crossing into C for all."""

signature = native.signature
"""``signature(*arrays)``: (key, addresses) or None.

``key`` (bytes) is equal for two calls exactly if the arrays agree in dtype, device, shape, strides, framework
and readonly; ``addresses`` is a tuple of int. None among the arrays is allowed (address 0). The whole answer
is None where one of the arrays is not plainly readable: then use `TensorView`, which reads it or says why
not.
"""


moved = native.moved
"""``moved(view, ptr, owner)``: the same view at another address."""


def make_view(
    ptr: int,
    shape: tuple[int, ...],
    dtype: object,
    device: object = None,
    *,
    strides: tuple[int, ...] | None = None,
    owner: object = None,
    readonly: bool = False,
    like: TensorView | None = None,
) -> TensorView:
    """A view of memory that is known by its address.

    Parameters
    ----------
    ptr : int
        Address of the first element.
    shape, strides : tuple of int
        Strides in elements; None: compact.
    owner : object
        Kept alive as long as the view.
    like : TensorView, optional
        Where framework, readonly and immutable come from; None: "attnrt", ``readonly``, False.
    """
    return native.make(
        *(ptr, tuple(shape), compact_strides(shape) if strides is None else tuple(strides)),
        *(as_dtype(dtype), as_device(device), owner),
        *((like.framework, like.readonly, like.immutable) if like else ("attnrt", readonly, False)),
    )


def current_stream(x: Any) -> int | None:
    """The handle of the stream on which the framework of a CUDA array ``x`` works now; None where nobody can
    say.

    PyTorch is asked through its DLPack exchange table (no import), CuPy through its current stream. 0 is the
    legacy default stream. JAX has streams of its own that it does not show.
    """
    source = view(x)
    if source.device.kind == "cpu":
        return None
    owner = x if type(x) is not TensorView else x.owner
    found = native.current_stream(owner, *source.device.dlpack)
    if found is not None:
        return found
    if source.framework == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    if source.framework == "torch":
        return int(sys.modules["torch"].cuda.current_stream(source.device.index).cuda_stream)
    return None


def kv_interleaved(x: Any, axis: int = 1, dtype: object = None) -> tuple[TensorView, TensorView]:
    """The (k, v) pair of one array that holds both along ``axis``; no data moves.

    Parameters
    ----------
    x : array
        [num_pages, 2, ...] for axis 1, [2, num_pages, ...] for axis 0.

    Raises
    ------
    ArgumentError
        The axis is not of size 2.
    """
    both = TensorView(x, dtype)
    if not -both.ndim <= axis < both.ndim or both.shape[axis] != 2:
        raise ArgumentError("kv", f"must have size 2 along axis {axis}", both.shape, "K at 0, V at 1")
    return both.take(axis, 0), both.take(axis, 1)


# ------------------------------------------------------------------------------------------------- new arrays


def empty(shape: int | tuple[int, ...], dtype: object = "float32", device: object = None) -> TensorView:
    """New memory of ours, not initialised, as a view that owns it.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype
    device : device, optional
        None: the CPU. CUDA memory comes from the CUDA backend that is loaded.

    Returns
    -------
    TensorView
        Row-major and compact; 64-byte aligned on the CPU, 256-byte on CUDA.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
    if any(n < 0 for n in shape):
        raise ArgumentError("shape", "must have sizes of at least 0", shape)
    kind, place = as_dtype(dtype), as_device(device)
    nbytes = math.prod(shape) * kind.itemsize
    if place.kind == "cpu":
        ptr, owner = native.allocate(nbytes, _ALIGNMENT)
    else:
        ptr, owner = ops_of(place).allocate(nbytes)
    return native.make(ptr, shape, compact_strides(shape), kind, place, owner, "attnrt", False, False)


def _setup() -> None:
    native.setup(
        TensorView,
        np.ndarray,
        {(d.code, d.bits): d for d in DTYPES.values()},
        {d.numpy: d for d in DTYPES.values()},
        CPU,
        from_dlpack_device,
        read_slow,
        coerce,
    )


_setup()
