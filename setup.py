# SPDX-License-Identifier: Apache-2.0
"""Builds the compiled parts. In a checkout: ``python setup.py build_ext --inplace`` puts all of them where
Python finds them (through the links attnrt/backends and so on), which is all that a PYTHONPATH=. run needs.

All are C++17 under the stable ABI of Python 3.11: one wheel serves every later Python.
"""

from __future__ import annotations

import os

from setuptools import Extension, setup

ABI3 = [("Py_LIMITED_API", "0x030B0000")]

# Builders of cffi modules, "path/of/builder.py:ffibuilder". One that is not written yet is left out.
CFFI_BUILDERS = [
    "scheduler/native/build_planner.py:ffibuilder",
    "backends/cpu/native/build_cpu.py:ffibuilder",
    "backends/cuda/native/build_driver.py:ffibuilder",
]

setup(
    ext_modules=[
        Extension(
            "attnrt._tensor_native",
            sources=["attnrt/native/tensor.cpp"],
            depends=["attnrt/native/dlpack.h"],
            define_macros=ABI3,
            py_limited_api=True,
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
        )
    ],
    cffi_modules=[b for b in CFFI_BUILDERS if os.path.exists(b.partition(":")[0])],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
