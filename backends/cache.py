# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, keyed by content, safe between threads and processes.

A key is the hash of all that decides the machine code: compiler version, final flags, the whole source text. An entry appears by
one atomic rename of a file that was written, hashed and closed before, so nobody ever sees half of one; its hash lies beside it,
so damage is found and mended by building again. One builder per key: a lock file serialises processes (flock: gone with the
process, so a kill leaves nothing behind), a lock in memory serialises threads. Where the disk takes nothing any more, a file in
the temporary directory serves the process, with one warning.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attnrt.config import config, usable_cache_dir
from attnrt.errors import CompileError
from attnrt.log import logger

__all__ = ["fetch", "key_of", "path_of"]

#: Less room than this (bytes) on a disk explains a compiler that failed while it wrote.
NEEDED = 16 << 20

_locks: dict[str, threading.Lock] = {}
#: Entries that the cache could not take: their folder (gone with the process) and file.
_elsewhere: dict[str, tuple[tempfile.TemporaryDirectory, Path]] = {}
_guard = threading.Lock()


def key_of(*parts: str | bytes) -> str:
    """sha256, hex, over the parts with their lengths (so that moving a boundary changes the key)."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def path_of(key: str, suffix: str) -> Path:
    """Where the entry of ``key`` lies or will lie."""
    return usable_cache_dir() / key[:2] / (key + suffix)


def fetch(key: str, suffix: str, label: str, build: Callable[[Path], None]) -> Path:
    """The file of ``key``, built if it is not there.

    Parameters
    ----------
    key : str
        From ``key_of``.
    suffix : str
        File name ending, ".cubin" or ".so".
    label : str
        What is being built, for errors.
    build : callable
        Writes the file at the path that it is given; raises CompileError.

    Raises
    ------
    CompileError
        From build, or because ATTNRT_FORBID_COMPILE is set and the entry is not there.
    """
    path = path_of(key, suffix)
    folder = path.parent
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key in _elsewhere:
            return _elsewhere[key][1]
        if _sound(path):
            logger().debug("%s: found at %s", label, path)
            return path
        if config().forbid_compile:
            raise CompileError(
                label,
                "is not in the cache, and ATTNRT_FORBID_COMPILE forbids compiling it",
                str(path),
                "Warm the cache first (attnrt.warmup), with the same version, device and ATTNRT_CACHE_DIR",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / (key + ".lock"), "w") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if not _sound(path):  # another process may have built it while we waited
                    for left in folder.glob(
                        path.name + ".*.tmp*"
                    ):  # by builders that were killed: we hold the lock
                        left.unlink(missing_ok=True)
                    begun = time.perf_counter()
                    _publish(path, build)
                    logger().info("%s: compiled in %.2f s to %s", label, time.perf_counter() - begun, path)
        except (OSError, CompileError) as error:
            reason = _why_no_room(folder, error)
            if reason is None:
                raise
            return _build_elsewhere(key, suffix, label, build, reason)
    return path


def _why_no_room(folder: Path, error: Exception) -> str | None:
    """Why a folder takes nothing any more, as after ``error``; None: the error is about something else."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    with suppress(OSError):  # a compiler says it in its own words, or dies by a signal
        if shutil.disk_usage(folder).free < NEEDED:
            return "no room on the device"
    return None


def _build_elsewhere(key: str, suffix: str, label: str, build: Callable[[Path], None], reason: str) -> Path:
    """Build into a folder of this process, because the cache could not take the entry for ``reason``; warns."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="attnrt-")
        warnings.warn(
            f"{label} cannot be kept in {usable_cache_dir()} ({reason}); it is compiled again by each process.",
            RuntimeWarning,
            stacklevel=2,
        )
        path = Path(folder.name) / (key + suffix)
        build(path)
    except OSError as error:
        found = f"{usable_cache_dir()}: {reason}; {error}"
        raise CompileError(
            label, "must be written somewhere", found, "Free some space, or set TMPDIR"
        ) from error
    _elsewhere[key] = (folder, path)
    return path


def _hash_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _sound(path: Path) -> bool:
    """Whether the entry is there and is what was written."""
    try:
        return _hash_path(path).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return False


def _publish(path: Path, build: Callable[[Path], None]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        build(temporary)
        data = temporary.read_bytes()
        if not data:
            raise CompileError(path.name, "came out empty", None, "Is the disk full?")
        digest = temporary.with_name(temporary.name + ".sha256")
        digest.write_text(hashlib.sha256(data).hexdigest())
        # The hash first: an entry whose hash is older or newer than itself is unsound and is built again.
        os.replace(digest, _hash_path(path))
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
