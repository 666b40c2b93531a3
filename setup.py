# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled parts. In a checkout: ``python setup.py build_ext --inplace`` puts all of them where
Python finds them (through the links attnrt/backends and so on), which is all that a PYTHONPATH=. run needs.

All are C++17 under the stable ABI of Python 3.11: one wheel serves every later Python.
"""

from __future__ import annotations

import glob

from setuptools import Extension, setup

ABI3 = [("Py_LIMITED_API", "0x030B0000")]


def extension(name: str, source: str, *depends: str) -> Extension:
    """One C++ module under the stable ABI."""
    return Extension(
        name,
        sources=[source],
        depends=list(depends),
        define_macros=ABI3,
        py_limited_api=True,
        language="c++",
        extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
    )


# Every build_*.py in a folder named native, under one of the root folders, defines `ffibuilder`: a cffi module with
# its full name (attnrt.scheduler._planner_native) and with sources relative to this file.
CFFI_MODULES = [
    f"{path}:ffibuilder"
    for folder in ("formats", "scheduler", "variants", "backends")
    for pattern in ("native", "*/native")
    for path in sorted(glob.glob(f"{folder}/{pattern}/build_*.py"))
]

setup(
    ext_modules=[
        extension("attnrt._tensor_native", "attnrt/native/tensor.cpp", *glob.glob("attnrt/native/*.h")),
        extension(
            "attnrt._step_native",
            "attnrt/native/step.cpp",
            "scheduler/native/planner_abi.h",
            "backends/cuda/native/first.h",
        ),
        extension("attnrt._formats_native", "formats/native/index.cpp"),
    ],
    cffi_modules=CFFI_MODULES,
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
