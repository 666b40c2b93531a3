# SPDX-License-Identifier: Apache-2.0
"""Variants compiled on first use: one C++ file of the variant and its hooks, into a cache that processes share.

An entry's key is the hash of everything that can change its machine code: compiler version, options, rendered source and
the text of every header. How entries are built, kept and mended is backends/cache.py's affair.
"""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from attnrt.backends.cache import fetch, key_of, path_of
from attnrt.backends.cpu.families import FLAGS, Code, load_library
from attnrt.config import config
from attnrt.errors import CompileError

if TYPE_CHECKING:
    from attnrt.variants import Composed

__all__ = ["cache_entry", "compiled_kernel", "render", "why_not_compile"]

#: -ffp-contract=off: see simd.h. -O2 with the vectoriser of -O3: half the compile time, the same loops.
OPTIONS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
COMPILERS = ("c++", "g++", "clang++")

_loaded: dict[str, Code] = {}  # by key
_guard = threading.Lock()


def _include_dirs() -> tuple[Path, ...]:
    from attnrt.variants import include_dir

    return Path(__file__).resolve().parent / "include", Path(include_dir()).resolve()


@functools.cache
def _headers_hash() -> str:
    """Hash of every header's name and text, in the order of their names."""
    digest = hashlib.sha256()
    for root in _include_dirs():
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


@functools.cache
def find_compiler(wanted: str | None) -> str | None:
    """Path of the C++ compiler, or None."""
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    return None


@functools.cache
def _compiler_version(path: str) -> str:
    """What the compiler says of itself, without the name it was called by: a link to it is the same compiler."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    machine = subprocess.run([path, "-dumpmachine"], capture_output=True, text=True, check=False)
    first = done.stdout.split("\n", 1)[0]
    return f"{first.partition(' ')[2]} {machine.stdout.strip()}"


def render(variant: Composed) -> str:
    """The C++ file of one variant."""
    exports = "\n".join(
        f'extern "C" __attribute__((visibility("default"))) int attnrt_{name}(const attnrt_call *call, int w, int n) {{\n'
        f"  return attnrt_cpu::variant::{name}_worker<attnrt::Variant>(call, w, n);\n}}"
        for name in ("attend", "merge")
    )
    bare = (
        "" if getattr(variant, "texts", ()) else "#define ATTNRT_BUILTIN_MATH\n"
    )  # a user's text may call <cmath>
    return (
        f'{bare}#include "attnrt_cpu/standard.h"\n{variant.cpp_source()}\n'
        f'#define ATTNRT_FAMILY variant\n#include "attnrt_cpu/kernels.h"\n{exports}\n'
    )


def _options(family: str) -> list[str]:
    return [*OPTIONS, *FLAGS[family]]


def _key(variant: Composed, family: str) -> str | None:
    """Key of the variant's library; None without a compiler."""
    compiler = find_compiler(config().cxx)
    if compiler is None:
        return None
    return key_of(_compiler_version(compiler), " ".join(_options(family)), _headers_hash(), render(variant))


def cache_entry(variant: Composed, family: str) -> Path | None:
    """Where the variant's library lies or will lie; None without a compiler."""
    key = _key(variant, family)
    return None if key is None else path_of(key, ".so")


def why_not_compile(variant: Composed, family: str) -> list[str]:
    """Reasons why the variant's code cannot be had."""
    key = _key(variant, family)
    if key is None:
        tried = config().cxx or ", ".join(COMPILERS)
        return [
            f"the variant {variant!r} must be compiled, and no C++ compiler was found (tried {tried}; ATTNRT_CXX names one)"
        ]
    if config().forbid_compile and key not in _loaded and not path_of(key, ".so").exists():
        return [f"the variant {variant!r} must be compiled, and ATTNRT_FORBID_COMPILE is set"]
    return []


def compiled_kernel(variant: Composed, family: str) -> Code:
    """The variant's code, from the cache or compiled now.

    Raises
    ------
    CompileError
        No compiler, compiling is forbidden, or the text does not compile; ``log`` is the compiler's.
    """
    key = _key(variant, family)
    label = f"variant {variant!r}"
    if key is None:
        raise CompileError(
            label, "must be compiled by a C++ compiler", "none", why_not_compile(variant, family)[0]
        )
    found = _loaded.get(key)
    if found is None:
        source = render(variant)
        path = fetch(key, ".so", label, lambda target: _compile(target, source, family, label))
        with _guard:  # threads that come at once get one object
            found = _loaded.setdefault(key, _load(path, label))
    return found


def _load(path: Path, label: str) -> Code:
    code = load_library(str(path))
    if not isinstance(code, Code):
        raise CompileError(label, "must load after compilation", code)
    return code


def _compile(target: Path, source: str, family: str, label: str) -> None:
    """Compile ``source`` into the library ``target``, and see that it loads."""
    compiler = find_compiler(config().cxx)
    assert compiler is not None
    file = target.with_name(target.name + ".variant.cpp")
    command = [
        compiler,
        *_options(family),
        *(f"-I{d}" for d in _include_dirs()),
        str(file),
        "-o",
        str(target),
    ]
    try:
        file.write_text(source)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        except OSError as error:
            raise CompileError(label, "must be compiled", f"{compiler}: {error.strerror}") from error
    finally:
        file.unlink(missing_ok=True)
    if done.returncode:
        raise _failed(label, compiler, done.returncode, done.stderr)
    _load(target, label)


def _failed(label: str, compiler: str, status: int, log: str) -> CompileError:
    first = next((line for line in log.splitlines() if "error" in line), log[:200]).strip()
    place = re.search(r":(\d+):\d+:.*error", first)
    line = int(place.group(1)) if place else None
    got, hint = (
        (first, "error.log has all that the compiler said") if first else (f"exit status {status}", "")
    )
    return CompileError(label, f"must compile with {compiler}", got, hint, log=log, line=line)
