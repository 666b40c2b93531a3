# SPDX-License-Identifier: Apache-2.0
"""Settings from the environment, read once and only here.

=====================  ===============================================================================================
ATTNRT_CACHE_DIR       Where compiled kernels are kept; default ~/.cache/attnrt
ATTNRT_FORBID_COMPILE  1: any compilation is an error
ATTNRT_NUM_THREADS     Threads of the CPU backend; default: the CPUs this process may use
ATTNRT_LOG             debug, info, warning or error: logged to stderr; not set: as the application has it
ATTNRT_CXX             C++ compiler for the CPU backend's variants; default: the first of c++, g++, clang++
ATTNRT_BACKEND         The backend that backend="auto" takes
=====================  ===============================================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import os
import stat
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from attnrt.errors import ArgumentError

__all__ = ["Config", "config", "usable_cache_dir"]

_LEVELS = ("debug", "info", "warning", "error")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings; see the module's text for each.

    Attributes
    ----------
    cache_dir : Path
        Wanted place; ask `usable_cache_dir` for one that can be written.
    forbid_compile : bool
    num_threads : int
        At least 1.
    log : str or None
        None: not set.
    cxx : str or None
    backend : str or None
    cuda_homes : tuple of str
        Toolkit folders that CUDA_HOME and CUDA_PATH name.
    """

    cache_dir: Path
    forbid_compile: bool
    num_threads: int
    log: str | None
    cxx: str | None
    backend: str | None
    cuda_homes: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Config:
        """Read the six names from a mapping; unset and empty mean the default.

        Raises
        ------
        ArgumentError
            A value cannot be understood; it names the variable.
        """
        forbid = env.get("ATTNRT_FORBID_COMPILE", "").strip().lower()
        if forbid not in _TRUE + _FALSE:
            raise ArgumentError("ATTNRT_FORBID_COMPILE", "must be 0 or 1", repr(forbid))
        log = env.get("ATTNRT_LOG", "").strip().lower() or None
        if log is not None and log not in _LEVELS:
            raise ArgumentError("ATTNRT_LOG", f"must be one of {', '.join(_LEVELS)}", repr(log))
        return cls(
            cache_dir=Path(env.get("ATTNRT_CACHE_DIR") or _default_cache_dir()).expanduser(),
            forbid_compile=forbid in _TRUE,
            num_threads=_threads(env.get("ATTNRT_NUM_THREADS", "").strip()),
            log=log,
            cxx=env.get("ATTNRT_CXX") or None,
            backend=env.get("ATTNRT_BACKEND") or None,
            cuda_homes=tuple(home for name in ("CUDA_HOME", "CUDA_PATH") if (home := env.get(name))),
        )


def _default_cache_dir() -> str:
    try:
        return str(Path.home() / ".cache" / "attnrt")
    except RuntimeError:  # no HOME and no entry in the user database, as in some containers
        return str(Path(tempfile.gettempdir()) / _temp_name())


def _threads(text: str) -> int:
    if not text:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 4096:
        raise ArgumentError("ATTNRT_NUM_THREADS", "must be an integer from 1 to 4096", repr(text))
    return int(text)


@functools.cache
def config() -> Config:
    """The process's settings, read from the environment at the first call."""
    return Config.from_env(os.environ)


def _temp_name() -> str:
    return f"attnrt-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


@functools.cache
def usable_cache_dir(wanted: Path | None = None) -> Path:
    """A directory for compiled code that can be written: the wanted one, else one in the temporary directory.

    Parameters
    ----------
    wanted : Path, optional
        None: ``config().cache_dir``.

    Notes
    -----
    Code is loaded from it, so the fallback must be ours alone: a directory there that another user owns or
    may write is passed over for a fresh one. One warning says where the cache went.
    """
    wanted = config().cache_dir if wanted is None else wanted
    reason = _why_not_writable(wanted)
    if reason is None:
        return wanted
    fallback = Path(tempfile.gettempdir()) / _temp_name()
    if _why_not_writable(fallback) is not None or not _is_private(fallback):
        fallback = Path(tempfile.mkdtemp(prefix="attnrt-"))
    warnings.warn(
        f"The cache directory {wanted} cannot be used ({reason}); using {fallback}. Set ATTNRT_CACHE_DIR.",
        RuntimeWarning,
        stacklevel=2,
    )
    return fallback


def _why_not_writable(directory: Path) -> str | None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"x")
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def _is_private(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
