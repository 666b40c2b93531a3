# SPDX-License-Identifier: Apache-2.0
"""Instruction families of the built library: which this machine runs, their prebuilt kernels and inner loops."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnrt.backends.cpu._native import ffi, lib

__all__ = ["FLAGS", "Code", "families", "family_number", "load_library", "loops", "prebuilt_kernel"]

#: Compiler options that give a variant compiled on first use the vectors of its family. Never -march=native: a cache may be
#: shared by machines that differ.
FLAGS: dict[str, tuple[str, ...]] = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "plain": (),
}


def _check_headers() -> None:
    """A library of other headers has other records: calls into it would read the wrong fields."""
    digest = hashlib.sha256()
    for path in sorted(
        (Path(__file__).resolve().parent / "include" / "attnrt_cpu").iterdir(), key=lambda p: p.name
    ):
        digest.update(path.read_bytes())
    if ffi.string(lib.attnrt_headers()).decode() != digest.hexdigest():
        raise ImportError(
            "attnrt.backends.cpu._native is out of date; in a checkout run: python setup.py build_ext --inplace"
        )


_check_headers()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Code:
    """Addresses of a variant's two functions."""

    attend: Any
    merge: Any


@functools.cache
def families() -> tuple[str, ...]:
    """Families that this machine runs, best first."""
    names: list[str] = []
    while (name := lib.attnrt_family_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return tuple(names)


def family_number(family: str) -> int:
    """The library's number of a family."""
    return families().index(family)


def loops(family: str) -> Any:
    """Address of the family's inner loops."""
    return lib.attnrt_loops(family_number(family))


def prebuilt_kernel(family: str, index: int) -> Code:
    """A prebuilt variant's code; ``index`` from ``prebuilt_index``."""
    kernel = lib.attnrt_prebuilt(family_number(family), index)
    return Code(attend=kernel.attend, merge=kernel.merge)


def load_library(path: str) -> Code | str:
    """Load a compiled variant; the loader's message if it cannot be loaded. A loaded library stays for good."""
    kernel = ffi.new("attnrt_kernel *")
    error = lib.attnrt_load(path.encode(), kernel)
    if error != ffi.NULL:
        return ffi.string(error).decode(errors="replace")
    return Code(attend=kernel.attend, merge=kernel.merge)
