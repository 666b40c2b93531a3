# SPDX-License-Identifier: Apache-2.0
"""Matrix products on a few threads of our own.

NumPy's BLAS has threads too, and they wait by spinning: beside the attention backend's threads, or on a machine that
does something else as well, a product then takes ten times as long. So BLAS is told to use one thread, and a product is
cut into column ranges that run on a pool whose threads sleep while they wait (NumPy drops the GIL inside a product).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_SPLIT_FROM = 400_000  # weights of fewer elements are not worth the hand-over to another thread (some 30 µs)


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return x @ w for float32 x [rows, in] and w [in, out]."""
    threads = num_threads()
    if threads == 1 or w.size < _SPLIT_FROM:
        return x @ w
    out = np.empty((x.shape[0], w.shape[1]), np.float32)
    cuts = [w.shape[1] * i // threads // 16 * 16 for i in range(threads)] + [w.shape[1]]
    ranges = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    rest = [_pool().submit(np.matmul, x, w[:, r], out[:, r]) for r in ranges[1:]]
    np.matmul(x, w[:, ranges[0]], out[:, ranges[0]])
    for part in rest:
        part.result()
    return out


@functools.cache
def num_threads() -> int:
    """Threads that products use: the processors that this process may run on, 1 if BLAS cannot be held to one thread."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors if _hold_blas_to_one_thread() else 1


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads() - 1, thread_name_prefix="product")


def _hold_blas_to_one_thread() -> bool:
    """Set the thread count of the OpenBLAS inside NumPy's wheel; False where NumPy has another BLAS."""
    for path in (Path(np.__file__).parent.parent / "numpy.libs").glob("libscipy_openblas*"):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(1)
                return True
    return False
