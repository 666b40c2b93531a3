# SPDX-License-Identifier: Apache-2.0
"""Backend "nvcc": the same texts compiled by nvcc into a shared library with a small C surface, called through cffi.

It needs no NVRTC and no cuda-python: nvcc to compile, afterwards only the cached library and the driver.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnrt.backends.cache import fetch, key_of
from attnrt.backends.cuda import driver
from attnrt.backends.cuda.common import CudaBackend, arch_of
from attnrt.backends.cuda.kernel import launch_record
from attnrt.backends.cuda.render import DECODE, DECODE_TOP, SMEM_BYTES, waits
from attnrt.backends.cuda.tables import DECODE_GROUPS
from attnrt.config import config
from attnrt.errors import CompileError

__all__ = ["NvccBackend", "find_nvcc", "load"]

_SURFACE = """
int attnrt_kernel(int kernel, int device, unsigned long long* handle, int* smem, int* groups);
const char* attnrt_error(int code);
"""


@lru_cache(maxsize=1)
def find_nvcc() -> tuple[str | None, tuple[str, ...]]:
    """(path of nvcc or None, places tried): PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda."""
    places = [shutil.which("nvcc")]
    places += [os.path.join(home, "bin", "nvcc") for home in config().cuda_homes]
    places.append("/usr/local/cuda/bin/nvcc")
    tried = tuple(place for place in places if place)
    return next((place for place in tried if os.access(place, os.X_OK)), None), tried


def header_of(nvcc: str) -> Path | None:
    """The cuda_runtime.h that a compiler finds beside itself, or None."""
    home = Path(nvcc).resolve().parents[1]
    places = (home / "include", *home.glob("targets/*/include"))
    return next((place / "cuda_runtime.h" for place in places if (place / "cuda_runtime.h").exists()), None)


@lru_cache(maxsize=1)
def _version() -> str:
    nvcc, _ = find_nvcc()
    assert nvcc is not None
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout


def host_text(names: tuple[str, ...]) -> str:
    """The C surface of a library with these kernels: kernel i is names[i]."""
    # The decode kernel's text asks for each group of a CTA (kernel.groups_of).
    cases = "\n".join(
        f"    case {i}: function = reinterpret_cast<const void*>(&{name}); smem = {SMEM_BYTES.get(name, 0)}; "
        f"group = {int(name == DECODE)}; break;"
        for i, name in enumerate(names)
    )
    return f"""
// The driver's handle of a kernel on a device, and its dynamic shared memory; the caller's current device is put back.
extern "C" int attnrt_kernel(int kernel, int device, unsigned long long* handle, int* smem_bytes, int* groups) {{
  const void* function = nullptr;
  int smem = 0, before = 0, group = 0;
  switch (kernel) {{
{cases}
    default: return cudaErrorInvalidValue;
  }}
  cudaError_t code = cudaGetDevice(&before);
  if (code == cudaSuccess && before != device) code = cudaSetDevice(device);
  *groups = 1;
  if (code == cudaSuccess && group) {{
    int most = 0;
    code = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int fit = (most - {DECODE_TOP}) / smem;
    *groups = fit < 1 ? 1 : fit > {DECODE_GROUPS} ? {DECODE_GROUPS} : fit;
    smem = smem * *groups + {DECODE_TOP};
  }}
  if (code == cudaSuccess && smem > 48 << 10) {{
    code = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  }}
  cudaFunction_t found = nullptr;
  if (code == cudaSuccess) code = cudaGetFuncBySymbol(&found, function);
  *handle = reinterpret_cast<unsigned long long>(found);
  *smem_bytes = smem;
  if (before != device) cudaSetDevice(before);
  return code;
}}

extern "C" const char* attnrt_error(int code) {{ return cudaGetErrorString(static_cast<cudaError_t>(code)); }}
"""


class SharedModule:
    """A shared library of kernels, opened by cffi in ABI mode: it gives handles, the driver shim launches them."""

    def __init__(self, device: int, path: Path, names: tuple[str, ...], dependent: bool) -> None:
        from cffi import FFI

        self.ffi = FFI()
        self.ffi.cdef(_SURFACE)
        self.lib: Any = self.ffi.dlopen(str(path))
        self._entries = {}
        for i, name in enumerate(names):
            handle, smem, groups = (self.ffi.new(kind) for kind in ("unsigned long long *", "int *", "int *"))
            code = self.lib.attnrt_kernel(i, device, handle, smem, groups)
            if code:
                text = self.ffi.string(self.lib.attnrt_error(code)).decode()
                raise driver.CudaError(f"kernel {name}", "must load", f"error {code}: {text}")
            self.groups = groups[0]
            self._entries[name] = launch_record(device, name, handle[0], smem[0], dependent)

    def entry(self, name: str) -> Any:
        return self._entries[name]


def _flags(arch: str) -> list[str]:
    compute = arch.replace("sm_", "compute_")
    return [
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-shared",
        "-Xcompiler=-fPIC",
        f"-gencode=arch={compute},code={arch}",
    ]


def compile_library(source: str, arch: str, path: Path, label: str) -> None:
    """Compile a text to a shared library at ``path``; raises CompileError with nvcc's output."""
    nvcc, tried = find_nvcc()
    if nvcc is None:
        raise CompileError(
            label, "needs nvcc to be compiled", f"tried {', '.join(tried)}", 'Use backend="nvrtc"'
        )
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.cu"
        text.write_text(source)
        done = subprocess.run(
            [nvcc, *_flags(arch), str(text), "-o", str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        log = done.stdout + done.stderr
        line = re.search(r"^(?!.*kernel\.cu)[\w.<>]+\((\d+)\): error", log, re.M)
        first = re.search(r"^.*error.*$", log, re.M)
        raise CompileError(
            label,
            "did not compile with nvcc",
            first.group(0).strip() if first else done.returncode,
            log=log,
            line=int(line.group(1)) if line else None,
        )


class NvccBackend(CudaBackend):
    """Kernels by nvcc."""

    name = "nvcc"

    def why_not_compiler(self) -> tuple[str, ...]:
        nvcc, tried = find_nvcc()
        return () if nvcc is not None else (f"nvcc is not found (tried {', '.join(tried)})",)

    def load(self, source: str, names: tuple[str, ...], device: int, label: str) -> SharedModule:
        arch, text = arch_of(device), source + host_text(names)
        key = key_of("nvcc", _version(), repr(_flags(arch)), text)
        path = fetch(key, ".so", label, lambda target: compile_library(text, arch, target, label))
        return SharedModule(device, path, names, waits(source, names))


def load() -> NvccBackend:
    """The backend; also tells the base layer how to reach GPUs."""
    driver.register()
    return NvccBackend()
