# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk, keyed by content, safe between threads and processes.

A key is the hash of all that decides the machine code: compiler version, final flags, the whole source text. An entry appears by
one atomic rename of a file that was written, hashed and closed before, so nobody ever sees half of one; its hash lies beside it,
so damage is found and mended by building again. One builder per key: a lock file serialises processes (flock: gone with the
process, so a kill leaves nothing behind), a lock in memory serialises threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from attnrt.config import config, usable_cache_dir
from attnrt.errors import CompileError

__all__ = ["fetch", "key_of"]

_locks: dict[str, threading.Lock] = {}
_guard = threading.Lock()


def key_of(*parts: str | bytes) -> str:
    """sha256, hex, over the parts with their lengths (so that moving a boundary changes the key)."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


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
    folder = usable_cache_dir() / key[:2]
    path = folder / (key + suffix)
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if _sound(path):
            return path
        if config().forbid_compile:
            raise CompileError(
                label,
                "is not in the cache, and ATTNRT_FORBID_COMPILE forbids compiling it",
                str(path),
                "Warm the cache first (attnrt.warmup), with the same version, device and ATTNRT_CACHE_DIR",
            )
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / (key + ".lock"), "w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _sound(path):  # another process may have built it while we waited
                _publish(path, build)
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
