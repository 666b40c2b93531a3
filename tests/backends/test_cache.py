# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled code: built once by one of many, mended when damaged, never half there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attnrt.backends import cache
from attnrt.config import Config
from attnrt.errors import CompileError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "usable_cache_dir", lambda: tmp_path)
    return tmp_path


def writer(text, log):
    def build(path):
        log.append(path)
        path.write_text(text)

    return build


def files(folder):
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_built_once(folder):
    log = []
    for _ in range(3):
        path = cache.fetch(cache.key_of("a"), ".so", "a", writer("code", log))
    assert path.read_text() == "code" and len(log) == 1
    assert files(folder) == sorted([path.name, path.name + ".sha256"])
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc")


@pytest.mark.parametrize("damage", ["torn", "other", "no hash", "wrong hash", "empty"])
def test_damage_is_mended(folder, damage):
    log, key = [], cache.key_of("a")
    path = cache.fetch(key, ".so", "a", writer("code", log))
    digest = path.with_name(path.name + ".sha256")
    {
        "torn": lambda: path.write_text("co"),
        "other": lambda: path.write_text("edoc"),
        "no hash": digest.unlink,
        "wrong hash": lambda: digest.write_text("0" * 64),
        "empty": lambda: path.write_text(""),
    }[damage]()
    assert cache.fetch(key, ".so", "a", writer("code", log)).read_text() == "code" and len(log) == 2


def test_a_failed_build_leaves_nothing(folder):
    key = cache.key_of("a")

    def fails(path):
        path.write_text("half")
        raise CompileError("a", "did not compile")

    with pytest.raises(CompileError):
        cache.fetch(key, ".so", "a", fails)
    with pytest.raises(CompileError, match="came out empty"):
        cache.fetch(key, ".so", "a", lambda path: None)
    assert files(folder) == []
    assert cache.fetch(key, ".so", "a", writer("code", [])).read_text() == "code"


def test_threads_build_one_key_once(folder):
    log, found = [], []

    def build(path):
        log.append(path)
        time.sleep(0.1)
        path.write_text("code")

    threads = [
        threading.Thread(target=lambda: found.append(cache.fetch(cache.key_of("t"), ".so", "t", build)))
        for _ in range(6)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(log) == 1 and len(found) == 6


PROCESS = """
import sys, time
from pathlib import Path
from attnrt.backends import cache
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
cache.usable_cache_dir = lambda: folder
def build(path):
    with open(folder / "builds", "a") as log:
        log.write("x")
    path.write_text("half")
    time.sleep(seconds)
    path.write_text("code")
print(cache.fetch(cache.key_of("p"), ".so", "p", build).read_text())
"""


def start(folder, seconds):
    command = [sys.executable, "-c", PROCESS, str(folder), str(seconds)]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )


def test_processes_build_one_key_once(folder):
    running = [start(folder, 0.5) for _ in range(3)]
    assert [p.communicate(timeout=60)[0].strip() for p in running] == ["code"] * 3
    assert (folder / "builds").read_text() == "x"


def test_a_killed_builder_blocks_nobody(folder):
    first = start(folder, 60)
    for _ in range(600):
        if (folder / "builds").exists() and list(folder.rglob("*.tmp")):
            break
        time.sleep(0.05)
    second = start(folder, 0.0)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert second.communicate(timeout=60)[0].strip() == "code"
    assert not list(folder.rglob("*.tmp*")), "the dead builder's half is still there"


def test_forbidden(folder, monkeypatch):
    monkeypatch.setattr(cache, "config", lambda: Config.from_env({"ATTNRT_FORBID_COMPILE": "1"}))
    with pytest.raises(CompileError, match="ATTNRT_FORBID_COMPILE"):
        cache.fetch(cache.key_of("f"), ".so", "f", writer("code", []))
    assert files(folder) == []
