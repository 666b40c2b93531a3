# SPDX-License-Identifier: Apache-2.0
"""What attnrt/native/tensor.cpp offers; attnrt.tensor is the way in."""

from collections.abc import Callable
from typing import Any

import numpy as np

from attnrt.tensor import TensorView

REVISION: int

class View:
    def __new__(cls, x: Any, dtype: object = None, *, stream: object = None) -> TensorView: ...

def view(x: Any, /) -> TensorView: ...
def views(*arrays: Any) -> tuple[TensorView, ...]: ...
def signature(*arrays: Any) -> tuple[bytes, tuple[int, ...]] | None: ...
def moved(view: TensorView, ptr: int, owner: object, /) -> TensorView: ...
def make(
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: Any,
    device: Any,
    owner: object,
    framework: str,
    readonly: bool,
    immutable: bool,
    /,
) -> TensorView: ...
def read_capsule(capsule: object, /) -> tuple[Any, ...]: ...
def export_capsule(
    view: TensorView, code: int, bits: int, kind: int, index: int, versioned: bool, /
) -> object: ...
def allocate(nbytes: int, alignment: int, /) -> tuple[int, object]: ...
def current_stream(x: Any, kind: int, index: int, /) -> int | None: ...
def stage(
    target: np.ndarray, base: int, arrays: tuple[np.ndarray | None, ...], places: tuple[int, ...], /
) -> None: ...
def widest(x: np.ndarray, low: int, high: int, /) -> int: ...
def scan(x: np.ndarray, /) -> tuple[int, int, bool]: ...
def setup(
    view_type: type,
    ndarray: type,
    dtypes: dict[tuple[int, int], Any],
    numpy_dtypes: dict[np.dtype, Any],
    cpu: Any,
    device_of: Callable[..., Any],
    slow: Callable[..., Any],
    coerce: Callable[..., Any],
    /,
) -> None: ...

class Repeats:
    def __init__(
        self, acquire: Callable[..., bool], release: Callable[[], None], shared_kv: bool, apart: bool, /
    ) -> None: ...
    def begin(self, plan: Any, /) -> None: ...
    def follow(self, plan: Any, /) -> None: ...
    def add(
        self,
        arrays: tuple[Any, ...],
        function: int,
        record: int,
        extents: tuple[tuple[int, int] | None, ...],
        scale: float,
        device: int,
        current: Callable[[], int],
        owner: Any,
        stream: int,
        /,
    ) -> None: ...
    def run(
        self,
        q: Any,
        kv: Any,
        plan: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
        sm_scale: float | None,
        stream: Any,
        /,
    ) -> Any: ...
