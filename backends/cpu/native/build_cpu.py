# SPDX-License-Identifier: Apache-2.0
"""cffi builder of attnrt.backends.cpu._native: prebuilt kernels, thread pool, loader of compiled variants."""

from __future__ import annotations

import hashlib
import os

from cffi import FFI

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", "..", ".."))


def _declarations() -> str:
    with open(os.path.join(HERE, "..", "include", "attnrt_cpu", "abi.h"), encoding="utf-8") as file:
        text = file.read()
    begin, end = "// [cffi begin]", "// [cffi end]"
    return text[text.index(begin) + len(begin) : text.index(end)]


def _headers() -> str:
    """Hash of the kernel headers; families.py compares it with the ones it finds."""
    folder = os.path.join(HERE, "..", "include", "attnrt_cpu")
    digest = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def _relative(*parts: str) -> str:
    """A path that setuptools accepts: relative to the project's root, from which it builds."""
    return os.path.relpath(os.path.join(HERE, *parts), ROOT)


ffibuilder = FFI()
ffibuilder.cdef(_declarations())
ffibuilder.set_source(
    "attnrt.backends.cpu._native",
    f'#include "attnrt_cpu/abi.h"\nextern "C" const char *attnrt_headers(void) {{ return "{_headers()}"; }}\n',
    sources=[
        _relative(name) for name in ("host.cpp", "family_avx512.cpp", "family_avx2.cpp", "family_plain.cpp")
    ],
    include_dirs=[_relative("..", "include"), _relative("."), os.path.join("variants", "include")],
    # -ffp-contract=off: products and sums round apart unless a kernel says fma; see include/attnrt_cpu/simd.h.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi"],
    source_extension=".cpp",
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
