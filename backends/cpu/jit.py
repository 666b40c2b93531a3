# SPDX-License-Identifier: Apache-2.0
"""Variants compiled on first use: one C++ file of the variant and its hooks, into a cache that processes share.

An entry's name is the hash of everything that can change its machine code: compiler version, options, rendered source and
the text of every header. An entry is written beside its place, loaded once, and published by one rename. Its last 32 bytes
are the hash of the others, so that a torn or edited file is seen before it is loaded. A lock per entry (in the process and
in the file system) lets one builder work while others wait; the system frees it when a builder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attnrt.backends.cache import elsewhere, why_no_room
from attnrt.backends.cpu.families import FLAGS, Code, load_library
from attnrt.config import config, usable_cache_dir
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
_HASH_BYTES = 32

_loaded: dict[str, Code] = {}
_locks: dict[str, threading.Lock] = {}
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


def cache_entry(variant: Composed, family: str) -> Path | None:
    """Where the variant's library lies or will lie; None without a compiler."""
    compiler = find_compiler(config().cxx)
    if compiler is None:
        return None
    parts = (_compiler_version(compiler), " ".join(_options(family)), _headers_hash(), render(variant))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return usable_cache_dir() / "cpu" / f"{key}.so"


def why_not_compile(variant: Composed, family: str) -> list[str]:
    """Reasons why the variant's code cannot be had."""
    entry = cache_entry(variant, family)
    if entry is None:
        tried = config().cxx or ", ".join(COMPILERS)
        return [
            f"the variant {variant!r} must be compiled, and no C++ compiler was found (tried {tried}; ATTNRT_CXX names one)"
        ]
    if config().forbid_compile and str(entry) not in _loaded and not entry.exists():
        return [f"the variant {variant!r} must be compiled, and ATTNRT_FORBID_COMPILE is set"]
    return []


def compiled_kernel(variant: Composed, family: str) -> Code:
    """The variant's code, from the cache or compiled now.

    Raises
    ------
    CompileError
        No compiler, compiling is forbidden, or the text does not compile; ``log`` is the compiler's.
    """
    entry = cache_entry(variant, family)
    label = f"variant {variant!r}"
    if entry is None:
        raise CompileError(
            label, "must be compiled by a C++ compiler", "none", why_not_compile(variant, family)[0]
        )
    key = str(entry)
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        found = _loaded.get(key)
        if found is None:
            found = _load_entry(entry)
        if found is None:
            if config().forbid_compile:
                raise CompileError(
                    label,
                    "must not be compiled with ATTNRT_FORBID_COMPILE set",
                    None,
                    "Compile it before: attnrt.warmup",
                )
            found = _build_or_elsewhere(entry, render(variant), family, label)
        _loaded[key] = found
        return found


def _load_entry(entry: Path) -> Code | None:
    """The code of an entry that is whole; None if there is none."""
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    if len(data) <= _HASH_BYTES or hashlib.sha256(data[:-_HASH_BYTES]).digest() != data[-_HASH_BYTES:]:
        return None
    found = load_library(str(entry))
    return found if isinstance(found, Code) else None


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; without it (a file system without locks) two may build the same entry, to no harm."""
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_or_elsewhere(entry: Path, source: str, family: str, label: str) -> Code:
    """Build the entry, or, where its disk takes nothing any more, code for this process alone."""
    try:
        return _build(entry, source, family, label)
    except (OSError, CompileError) as error:
        reason = why_no_room(entry.parent, error)
        if reason is None:
            raise
    with elsewhere(entry.parent, label, reason) as folder:  # loaded code outlives its file
        try:
            code = load_library(str(_compile(Path(folder), source, family, label)))
        except OSError as error:
            hint = "Free some space, or set TMPDIR"
            raise CompileError(label, "must be written somewhere", str(error), hint) from error
    if not isinstance(code, Code):
        raise CompileError(label, "must load after compilation", code)
    return code


def _build(entry: Path, source: str, family: str, label: str) -> Code:
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _file_lock(entry.with_suffix(".lock")):
        found = _load_entry(entry)  # another process may have been first
        if found is not None:
            return found
        for left in entry.parent.glob(f"{entry.stem}.*.tmp"):  # of builders that died
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{entry.stem}.", suffix=".tmp", dir=entry.parent))
        try:
            built = _compile(work, source, family, label)
            code = load_library(str(built))
            if not isinstance(code, Code):
                raise CompileError(label, "must load after compilation", code)
            os.replace(built, entry)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return code


def _compile(work: Path, source: str, family: str, label: str) -> Path:
    """Compile ``source`` in a folder of its own; the library with its hash behind it."""
    compiler = find_compiler(config().cxx)
    assert compiler is not None
    file, built = work / "variant.cpp", work / "variant.so"
    file.write_text(source)
    command = [compiler, *_options(family), *(f"-I{d}" for d in _include_dirs()), str(file), "-o", str(built)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
    except OSError as error:
        raise CompileError(label, "must be compiled", f"{compiler}: {error.strerror}") from error
    if done.returncode:
        raise _failed(label, compiler, done.stderr)
    data = built.read_bytes()
    built.write_bytes(data + hashlib.sha256(data).digest())
    return built


def _failed(label: str, compiler: str, log: str) -> CompileError:
    first = next((line for line in log.splitlines() if "error" in line), log[:200])
    place = re.search(r":(\d+):\d+:.*error", first)
    line = int(place.group(1)) if place else None
    return CompileError(
        label, f"must compile with {compiler}", first.strip(), "The log has the rest", log=log, line=line
    )
