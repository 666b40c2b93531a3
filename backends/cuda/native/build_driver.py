# SPDX-License-Identifier: Apache-2.0
"""cffi builder of attnrt.backends.cuda._driver: the driver entry points of driver.h and what packs plans (first.h), abi3, no
CUDA toolkit needed."""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

# setuptools wants paths relative to the project's root, in which builds run.
HERE = Path("backends/cuda/native")


def declarations(header: Path) -> str:
    """The header as cffi reads it: without comments, includes and C++ guards."""
    text = re.sub(r"//[^\n]*", "", header.read_text())
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.S)
    return re.sub(r"^\s*#.*$", "", text, flags=re.M)


ffibuilder = FFI()
for header in ("driver.h", "first.h"):
    ffibuilder.cdef(declarations(HERE / header))
ffibuilder.set_source(
    "attnrt.backends.cuda._driver",
    '#include "driver.h"\n#include "first.h"',
    sources=[str(HERE / "driver.cpp"), str(HERE / "first.cpp")],
    include_dirs=[str(HERE)],
    source_extension=".cpp",
    extra_compile_args=["-std=c++17", "-O2", "-fvisibility=hidden"],
    libraries=["dl"],
    py_limited_api=True,
)
