# SPDX-License-Identifier: Apache-2.0
"""What the CUDA backends need and whether it is here, one line each, with the mend."""

from __future__ import annotations

from attnrt.backends.cuda import driver

__all__ = ["examine"]


def examine() -> list[tuple[str, bool, str]]:
    """(name, ok, line) of the driver, each GPU, NVRTC and nvcc.

    A line says what was found, or what is missing and how to get it; nothing is compiled and no memory is taken.
    """
    found = [_driver()]
    if found[0][1]:
        found += [_device(index) for index in range(driver.device_count())]
    return [*found, _nvrtc(), _nvcc()]


def _driver() -> tuple[str, bool, str]:
    why = driver.why_not()
    if why is None:
        ffi, lib = driver.shim()
        version = ffi.new("int *")
        driver.check(lib.attnrt_cuda_driver_version(version), "cuDriverGetVersion")
        return "cuda driver", True, f"supports CUDA {version[0] // 1000}.{version[0] % 1000 // 10}"
    if "shim" in why:
        mend = "build it: python setup.py build_ext --inplace"
    elif "sees no GPU" in why:
        mend = "is the GPU visible (CUDA_VISIBLE_DEVICES, container options)?"
    else:
        mend = "install the NVIDIA driver; in a container mount it (nvidia-container-toolkit)"
    return "cuda driver", False, f"{why}; {mend}".replace("\n", " ")


def _device(index: int) -> tuple[str, bool, str]:
    ffi, lib = driver.shim()
    name = ffi.new("char[]", 128)
    driver.check(lib.attnrt_cuda_device_name(index, name, 128), "cuDeviceGetName")
    major, minor, count = (
        driver.device_attribute(index, attribute)
        for attribute in (driver.MAJOR, driver.MINOR, driver.MULTIPROCESSORS)
    )
    text = f"{ffi.string(name).decode()}, compute capability {major}.{minor}, {count} multiprocessors"
    return f"cuda:{index}", major >= 8, text if major >= 8 else f"{text}; the kernels need 8.0"


def _nvrtc() -> tuple[str, bool, str]:
    from attnrt.backends.cuda import nvrtc

    why = nvrtc.why_not_nvrtc()
    if why is None:
        major, minor = nvrtc._version()
        return "nvrtc", True, f"compiles kernels at run time, CUDA {major}.{minor}"
    return "nvrtc", False, why.replace("\n", " ")


def _nvcc() -> tuple[str, bool, str]:
    from attnrt.backends.cuda import nvcc

    path, tried = nvcc.find_nvcc()
    if path is None:
        return "nvcc", False, f"not found (tried {', '.join(tried)}); needed only where NVRTC is not"
    header = nvcc.header_of(path)
    if header is None:
        return (
            "nvcc",
            False,
            f"{path} has no cuda_runtime.h beside it; install the toolkit's headers, or set CUDA_HOME",
        )
    return "nvcc", True, path
