# SPDX-License-Identifier: Apache-2.0
"""Backend "nvrtc": the kernels compiled at run time by NVRTC (cuda.core), cached on disk by content."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from attnrt.backends.cache import fetch, key_of
from attnrt.backends.cuda import driver
from attnrt.backends.cuda.common import CudaBackend, arch_of
from attnrt.backends.cuda.joined import FRAME, NotJoined, framed, join
from attnrt.backends.cuda.machine_code import check_code
from attnrt.backends.cuda.modules import DriverModule
from attnrt.backends.cuda.render import waits
from attnrt.errors import CompileError

__all__ = [
    "MOST_SPILLED",
    "NvrtcBackend",
    "Resources",
    "compile_kernel",
    "compile_source",
    "load",
    "resources",
    "spilled",
    "warnings_of",
]

# ptxas says C7508 and more when it ignores setmaxnreg or serialises wgmma, with exit status 0; C7519 costs nothing.
_WARNINGS = re.compile(r"C75(?!19)\d\d[^\n]*")
_SPILL = re.compile(r"(\d+) bytes spill stores")
#: Bytes of spilled registers that are warned of. Shipped kernels are held to bounds of their own, the largest of which is the
#: loader's that lives in 32 registers beside three warpgroups of consumers.
MOST_SPILLED = 512


@lru_cache(maxsize=1)
def _version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"nvrtcVersion: {status}")
    return major, minor


@lru_cache(maxsize=1)
def why_not_nvrtc() -> str | None:
    """Why NVRTC cannot be used here; None: it can."""
    try:
        # Here, once: threads that compile at the same time would find it half imported.
        import cuda.core  # noqa: F401

        _version()
    except Exception as error:  # loaders raise many kinds
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return f"NVRTC cannot be loaded ({why}); pip install '.[cuda]' in the checkout of attnrt"
    return None


def _flags(arch: str) -> dict[str, object]:
    # No contraction but where we write fmaf: a hook's expression has the same bits in every kernel that it is compiled into.
    return {"arch": arch, "std": "c++17", "fma": False, "ptxas_options": ["-v"]}


def compile_source(source: str, arch: str, label: str) -> tuple[bytes, str]:
    """(cubin, log) of a text.

    Parameters
    ----------
    source : str
    arch : str
        "sm_90a", "sm_80", ...
    label : str
        For errors.

    Raises
    ------
    CompileError
        With the compiler's log and, if the user's own text is at fault, its line.
    """
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    program = Program(source, code_type="c++", options=ProgramOptions(**_flags(arch)))  # type: ignore[arg-type]
    try:
        code = program.compile("cubin", logs=log)
    except Exception as error:
        raise _refused(str(error), label) from None
    finally:
        program.close()
    return bytes(code.code), log.getvalue()


def compile_roles(texts: tuple[str, ...], name: str, arch: str, label: str) -> tuple[bytes, str]:
    """(cubin, log) of kernel ``name`` from a text for each of its roles (render.render_roles), which are compiled at once.

    The first text's PTX stays in the cache, since many variants share it.

    Raises
    ------
    CompileError
        As compile_source does.
    NotJoined
        The programs do not make one kernel, or the assembler refuses it.
    """
    options = _ptx_options(arch)

    def first(text: str) -> bytes:
        key = key_of("nvrtc", repr(_version()), repr(options), text)
        return fetch(
            key, ".ptx", label, lambda path: _write(path, _ptx_of(text, options, label))
        ).read_bytes()

    with ThreadPoolExecutor(len(texts), "attnrt-role") as pool:
        made = [pool.submit(first, texts[0])]
        made += [pool.submit(_ptx_of, text, options, label) for text in texts[1:]]
        # A role that computes holds more of the user's own text than the first one: its errors are told first.
        programs = [each.result().decode() for each in reversed(made)][::-1]
    try:
        return compile_source(framed(join(programs, name)), arch, label)
    except CompileError as error:  # asm in a hook, or a compiler that prints PTX in another way
        raise NotJoined(str(error)) from error


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _ptx_options(arch: str) -> list[bytes]:
    from cuda.core import ProgramOptions

    flags = {**_flags(arch), "arch": arch.replace("sm_", "compute_")}  # no machine code
    del flags["ptxas_options"]
    return ProgramOptions(**flags).as_bytes("nvrtc")  # type: ignore[arg-type]


def _ptx_of(source: str, options: list[bytes], label: str) -> bytes:
    """PTX of a text. Not by cuda.core, which asks the driver whether it could load PTX: it never will."""
    from cuda.bindings import nvrtc

    _, program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"default_program", 0, [], []))
    try:
        failed = int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) != 0
        size, get = (
            (nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            if failed
            else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        found = bytes(_done(size(program))[1])
        _done(get(program, found))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    found = found.rstrip(b"\0")
    if failed:
        raise _refused(found.decode(), label)
    return found


def _done(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]) != 0:
        raise RuntimeError(f"NVRTC: {result[0]}")
    return result


def _refused(log: str, label: str) -> CompileError:
    return CompileError(label, "did not compile with NVRTC", _first_error(log), log=log, line=_user_line(log))


def compile_kernel(
    source: str, names: tuple[str, ...], roles: tuple[str, ...], arch: str, label: str
) -> tuple[bytes, str]:
    """(cubin, log) of a text, by its roles if it has them."""
    if roles:
        with suppress(NotJoined):  # whatever the reason is, it costs time alone
            return compile_roles(roles, names[0], arch, label)
    return compile_source(source, arch, label)


def _first_error(text: str) -> str:
    found = re.search(r"^.*error:.*$", text, re.M)
    return found.group(0).strip() if found else text.strip().splitlines()[0]


def _user_line(text: str) -> int | None:
    """Line of the user's own C++ text: printed variants mark it by #line with the hook's label as the file."""
    found = re.search(r"^(?!default_program)[\w.<>]+\((\d+)\): error", text, re.M)
    return int(found.group(1)) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What ptxas gave a kernel: registers per thread, bytes of spill stores and of stack per thread."""

    registers: int
    spilled: int
    stack: int


def resources(log: str) -> dict[str, Resources]:
    """Resources of each kernel that a ptxas log names (but the frame of those that were joined)."""
    found = {}
    for text in log.split("Compiling entry function '")[1:]:
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", text)
        used = re.search(r"Used (\d+) registers", text)
        if frame and used and not text.startswith(FRAME):
            stack, spills = (int(n) for n in frame.groups())
            found[text.split("'", 1)[0]] = Resources(
                registers=int(used.group(1)), spilled=spills, stack=stack
            )
    return found


def spilled(log: str) -> int:
    """Bytes of spill stores that a ptxas log admits to, the worst kernel's."""
    return max((int(n) for n in _SPILL.findall(log)), default=0)


def warnings_of(log: str) -> list[str]:
    """ptxas warnings of the kind that costs speed silently."""
    return _WARNINGS.findall(log)


class NvrtcBackend(CudaBackend):
    """Kernels by NVRTC."""

    name = "nvrtc"

    def why_not_compiler(self) -> tuple[str, ...]:
        reason = why_not_nvrtc()
        return () if reason is None else (reason,)

    def load(
        self, source: str, names: tuple[str, ...], device: int, label: str, roles: tuple[str, ...] = ()
    ) -> DriverModule:
        arch = arch_of(device)
        key = key_of("nvrtc", repr(_version()), repr(_flags(arch)), source, *roles)

        def write(path: Path) -> None:
            code, log = compile_kernel(source, names, roles, arch, label)
            check_code(code, label, log)
            self.report(label, log)
            path.write_bytes(code)

        image = fetch(key, ".cubin", label, write).read_bytes()
        return DriverModule(device, image, names, waits(source, names))

    def report(self, label: str, log: str) -> None:
        """Warn of what ptxas did silently to a user's kernel; shipped ones are held to it by the compile tests."""
        import warnings

        for line in warnings_of(log):
            warnings.warn(f"{label}: {line}", RuntimeWarning, stacklevel=2)
        if spilled(log) > MOST_SPILLED:
            warnings.warn(f"{label}: {spilled(log)} bytes of registers spilled", RuntimeWarning, stacklevel=2)


def load() -> NvrtcBackend:
    """The backend; also tells the base layer how to reach GPUs."""
    driver.register()
    return NvrtcBackend()
