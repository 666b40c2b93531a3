# SPDX-License-Identifier: Apache-2.0
"""cffi builder of attnrt.scheduler._planner_native (see setup.py)."""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent if "__file__" in globals() else Path("scheduler/native").resolve()
DECLARATIONS = re.sub(r"//[^\n]*", "", (HERE / "planner_abi.h").read_text())

ffibuilder = FFI()
ffibuilder.cdef(DECLARATIONS)
ffibuilder.set_source(
    "attnrt.scheduler._planner_native",
    '#include <stdint.h>\nextern "C" {\n#include "planner_abi.h"\n}\n',
    sources=["scheduler/native/planner.cpp", "scheduler/native/align.cpp"],
    depends=[str(path.relative_to(HERE.parents[1])) for path in sorted(HERE.glob("*.h"))],
    include_dirs=["scheduler/native"],
    source_extension=".cpp",
    # No fused multiply-adds: costs must add up to the bit as in the Python form.
    extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
)
