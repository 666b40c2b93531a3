# SPDX-License-Identifier: Apache-2.0
"""The CUDA backends on a machine without a GPU: fake_driver.cpp instead of libcuda, loaded before anything asks for it.

``script(text)`` runs a program in a process of its own (a driver is loaded once per process) and returns what it printed. The
program finds ``cuda``: a backend whose kernels are never compiled; ``driver``: the fake's own functions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PRELUDE = """
import ctypes, sys
import numpy as np
driver = ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)
driver.fake_trace.restype = ctypes.c_char_p
import attnrt as at
from attnrt.backends.cuda.common import CudaBackend
from attnrt.backends.cuda.modules import DriverModule
from attnrt.backends.cuda.render import waits
from attnrt.backends.cuda import driver as shim
shim.register()

class Fake(CudaBackend):
    name = "fake"
    def why_not_compiler(self):
        return ()
    def load(self, source, names, device, label, roles=()):
        return DriverModule(device, b"image", names, waits(source, names))

cuda = Fake()
driver.fake_parameter.restype = ctypes.c_void_p

def parameter(layout, *names):
    "Fields of the last launch's parameter, by a NumPy record."
    record = np.frombuffer(ctypes.string_at(driver.fake_parameter(), layout.itemsize), layout)[0]
    return [int(record[n]["ptr"]) if layout[n].names else record[n] for n in names]

def trace():
    "What was enqueued since the last time."
    text = driver.fake_trace().decode()
    driver.fake_clear()
    return text.split("\\n")[:-1]

def kinds():
    return [line.split()[0] for line in trace()]

def spec(**changes):
    base = dict(num_qo_heads=8, num_kv_heads=2, head_dim=64, q_dtype="bfloat16", variant=at.variants.causal())
    return at.AttentionSpec(**{{**base, **changes}})

def paged(qo=(2, 2), kv=(40, 70), size=16):
    pages = [-(-n // size) for n in kv]
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    qo_indptr = np.concatenate([[0], np.cumsum(qo)]).astype(np.int32)
    return at.formats.paged(qo_indptr, indptr, np.arange(indptr[-1], dtype=np.int32), np.array(kv, np.int32), page_size=size)

def arrays(s, rows, pages=64, size=16, device="cuda:0"):
    "q, (k, v), out, lse in the fake's memory."
    q = at.empty((rows, s.num_qo_heads, s.head_dim), s.q_dtype, device)
    kv = tuple(at.empty((pages, size, s.num_kv_heads, s.head_dim), s.kv_dtype, device) for _ in "kv")
    out = at.empty((rows, s.num_qo_heads, s.head_dim_vo), s.out_dtype, device)
    return q, kv, out, at.empty((rows, s.num_qo_heads), "float32", device)
"""


def build(folder: Path) -> Path:
    """Compile the fake."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = folder / "libcuda.so.1"
    subprocess.run(
        [
            *(compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"),
            *(str(HERE / "fake_driver.cpp"), "-o", str(library)),
        ],
        check=True,
    )
    return library


def run_script(library: Path, text: str, **environment: str) -> str:
    """Standard output of a program over the fake driver; its errors fail the test."""
    code = PRELUDE.format(library=str(library)) + text
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
