# SPDX-License-Identifier: Apache-2.0
"""Backend "nvcc": the same texts compiled by nvcc into a shared library with a small C surface, called through cffi.

It needs no NVRTC and no cuda-python: nvcc to compile, afterwards only the cached library and the driver. The library holds device
code and one C function that says where; the driver shim loads it like NVRTC's.
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
from attnrt.backends.cuda.machine_code import check_code
from attnrt.backends.cuda.modules import DriverModule
from attnrt.backends.cuda.render import waits
from attnrt.config import config
from attnrt.errors import CompileError

__all__ = ["NvccBackend", "find_nvcc", "load"]

_SURFACE = "const unsigned char* attnrt_image(unsigned long long* size);"


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


def image_of(path: Path) -> bytes:
    """The device code that a library holds: its C function, called through cffi in ABI mode."""
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(_SURFACE)
    size = ffi.new("unsigned long long *")
    library: Any = ffi.dlopen(str(path))  # held until its bytes are copied
    at = library.attnrt_image(size)
    return bytes(ffi.buffer(at, size[0]))


def _device_flags(arch: str) -> list[str]:
    compute = arch.replace("sm_", "compute_")
    return ["-std=c++17", "-O3", "-fmad=false", "-cubin", f"-gencode=arch={compute},code={arch}"]


#: Plain C around finished device code. A text that is C++ for the host too would go through the host's compiler with all of
#: CUDA's headers, which takes longer than the merge kernel itself.
_HOST_FLAGS = ["-shared", "-Xcompiler=-fPIC", "-cudart=none"]
_HOST_TEXT = """
__asm__(".section .rodata\\n.balign 64\\nattnrt_code:\\n.incbin \\"kernel.cubin\\"\\nattnrt_code_end:\\n.byte 0\\n.previous\\n");
extern const unsigned char attnrt_code[], attnrt_code_end[];

const unsigned char* attnrt_image(unsigned long long* size) {
  *size = attnrt_code_end - attnrt_code;
  return attnrt_code;
}
"""


def compile_library(source: str, arch: str, path: Path, label: str) -> None:
    """Compile a text to a shared library at ``path``; raises CompileError with nvcc's output."""
    nvcc, tried = find_nvcc()
    if nvcc is None:
        raise CompileError(
            label, "needs nvcc to be compiled", f"tried {', '.join(tried)}", 'Use backend="nvrtc"'
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.cu").write_text(source)
        (folder / "library.c").write_text(_HOST_TEXT)
        for command in (
            [*_device_flags(arch), "kernel.cu", "-o", "kernel.cubin"],
            [*_HOST_FLAGS, "library.c", "-o", str(path.absolute())],
        ):
            done = subprocess.run(
                [os.path.abspath(nvcc), *command], capture_output=True, text=True, check=False, cwd=folder
            )
            if done.returncode:
                break
        else:
            check_code((folder / "kernel.cubin").read_bytes(), label, done.stdout + done.stderr)
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

    def load(
        self, source: str, names: tuple[str, ...], device: int, label: str, roles: tuple[str, ...] = ()
    ) -> DriverModule:
        arch = arch_of(device)
        key = key_of("nvcc", _version(), repr(_device_flags(arch)), repr(_HOST_FLAGS), _HOST_TEXT, source)
        path = fetch(key, ".so", label, lambda target: compile_library(source, arch, target, label))
        return DriverModule(device, image_of(path), names, waits(source, names))


def load() -> NvccBackend:
    """The backend; also tells the base layer how to reach GPUs."""
    driver.register()
    return NvccBackend()
