# SPDX-License-Identifier: Apache-2.0
"""Variants compiled on first use: one compilation per key whoever asks, and no fault of the cache that outlives a run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt.backends import cache
from attnrt.backends.cpu import jit
from attnrt.backends.cpu.families import families

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

PROGRAM = """
import sys
import numpy as np
import attnrt as at
from attnrt import formats
variant = {"alibi": at.variants.alibi(), "sinks": at.variants.sink_logits(0.5), "causal": at.variants.causal()}[sys.argv[1]]
spec = at.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=variant)
attn = at.Attention(spec, backend="cpu", device="cpu")
attn.plan(formats.ragged([0, 1], [0, 5]))
x = np.arange(40, dtype=np.float32).reshape(5, 1, 8) / 40
print(float(attn.run(np.ones((1, 2, 8), np.float32), (x, x)).sum()))
"""


@pytest.fixture
def counted(tmp_path):
    """An environment with an empty cache and a compiler that writes a line to a log for each compilation."""
    log = tmp_path / "compiled"
    script = tmp_path / "counting-c++"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *variant.cpp*) echo $$ >> {log}; [ -e {tmp_path}/slow ] && sleep 60;; esac\n'
        f'exec {COMPILER} "$@"\n'
    )
    script.chmod(0o755)
    env = os.environ | {
        "ATTNRT_CACHE_DIR": str(tmp_path / "cache"),
        "ATTNRT_CXX": str(script),
        "PYTHONPATH": str(ROOT),
    }
    env.pop("ATTNRT_FORBID_COMPILE", None)

    def compilations() -> int:
        return len(log.read_text().split()) if log.exists() else 0

    return env, compilations, tmp_path


def start(env, variant="alibi"):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, variant],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def entries(tmp_path):
    return list((tmp_path / "cache").rglob("*.so"))


def test_eight_processes_compile_once(counted):
    env, compilations, tmp_path = counted
    processes = [start(env) for _ in range(8)]
    assert len({answer(p) for p in processes}) == 1
    assert compilations() == 1
    assert len(entries(tmp_path)) == 1
    assert not list((tmp_path / "cache").rglob("*.tmp*"))


def test_entries_that_are_torn_edited_or_empty_are_built_again(counted):
    env, compilations, tmp_path = counted
    first = answer(start(env))
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    edited = bytearray(whole)
    edited[len(whole) // 2] ^= 1
    for count, bad in enumerate((whole[: len(whole) // 2], bytes(edited), b""), start=2):
        entry.unlink()
        entry.write_bytes(bad)
        assert answer(start(env)) == first
        assert compilations() == count
    os.utime(entry, (1, 1))  # times say nothing
    assert answer(start(env)) == first
    assert compilations() == 4


def test_a_killed_builder_leaves_no_trace(counted):
    env, compilations, tmp_path = counted
    (tmp_path / "slow").touch()
    victim = start(env)
    deadline = time.monotonic() + 60
    while compilations() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    (tmp_path / "slow").unlink()
    for pid in (tmp_path / "compiled").read_text().split():  # the victim's own compiler, still asleep
        os.kill(int(pid), signal.SIGKILL)
    assert not entries(tmp_path)
    answer(start(env))
    assert len(entries(tmp_path)) == 1
    assert not list((tmp_path / "cache").rglob("*.tmp*"))


def test_a_cache_that_cannot_be_written(counted):
    env, _, tmp_path = counted
    (tmp_path / "cache").write_text("a file where the directory should be")
    process = start(env | {"TMPDIR": str(tmp_path)})
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out
    assert err.count("cannot be used") == 1


def test_without_a_compiler(counted):
    env, compilations, _ = counted
    env = env | {"ATTNRT_CXX": "no-such-compiler"}
    answer(start(env, "causal"))
    process = start(env)
    _, err = process.communicate(timeout=120)
    assert process.returncode and "no-such-compiler" in err and "UnsupportedError" in err
    assert compilations() == 0


def test_forbidden(counted):
    """Nothing is compiled; what lies in the cache runs."""
    env, compilations, _ = counted
    forbid = env | {"ATTNRT_FORBID_COMPILE": "1"}
    answer(start(forbid, "causal"))
    process = start(forbid)
    _, err = process.communicate(timeout=120)
    assert process.returncode and "ATTNRT_FORBID_COMPILE" in err
    assert compilations() == 0
    want = answer(start(env))
    assert answer(start(forbid)) == want
    assert compilations() == 1


def test_eight_threads_one_library():
    """Threads that ask at once get the same code; different variants do not wait for each other's result."""
    v = at.variants
    variants = [v.compose((v.causal(), v.alibi())), v.compose((v.full(), v.alibi()))]
    found = [None] * 16
    barrier = threading.Barrier(16)

    def ask(i):
        barrier.wait()
        found[i] = jit.compiled_kernel(variants[i % 2], families()[0])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(x) for x in found[::2]}) == 1 and len({id(x) for x in found[1::2]}) == 1
    assert found[0].attend != found[1].attend


def test_key(monkeypatch):
    """Variant, family, options, headers and compiler are in the key; parameter values and the compiler's name are not."""
    v = at.variants
    family = families()[0]
    plain = jit.cache_entry(v.compose(v.softcap(2.0)), family)
    assert plain == jit.cache_entry(v.compose(v.softcap(3.0)), family)
    others = {
        jit.cache_entry(v.compose((v.softcap(2.0), v.causal())), family),
        jit.cache_entry(v.compose(v.softcap(2.0)), families()[-1] if len(families()) > 1 else "avx2"),
    }
    for name, value in (
        ("OPTIONS", (*jit.OPTIONS, "-DX")),
        ("_headers_hash", lambda: "edited"),
        ("_compiler_version", lambda path: "other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(jit, name, value)
            others.add(jit.cache_entry(v.compose(v.softcap(2.0)), family))
    assert len(others) == 5 and plain not in others


def test_version_ignores_the_path(tmp_path):
    link = tmp_path / "renamed"
    link.symlink_to(COMPILER)
    assert jit._compiler_version(str(link)) == jit._compiler_version(COMPILER)


def test_header_hash_sees_one_byte(tmp_path, monkeypatch):
    copy = tmp_path / "include"
    shutil.copytree(ROOT / "backends" / "cpu" / "include", copy)
    monkeypatch.setattr(jit, "_include_dirs", lambda: (copy,))
    hashes = []
    header = copy / "attnrt_cpu" / "state.h"
    for text in (header.read_bytes(), header.read_bytes() + b" "):
        header.write_bytes(text)
        os.utime(header, (1, 1))
        hashes.append(jit._headers_hash.__wrapped__())
    assert hashes[0] != hashes[1]


def test_text_that_does_not_compile(tmp_path, monkeypatch):
    """The error carries the compiler's log; nothing is left in the cache."""

    class Broken:
        def cpp_source(self):
            return "this is not C++"

        def __repr__(self):
            return "broken"

    monkeypatch.setattr(cache, "usable_cache_dir", lambda: tmp_path)
    with pytest.raises(at.errors.CompileError, match="broken") as caught:
        jit.compiled_kernel(Broken(), families()[0])
    assert "this is not" in caught.value.log or "does not name a type" in caught.value.log
    assert "error.log" in str(caught.value)
    silent = jit._failed("variant", "/bin/false", 1, "")
    assert str(silent) == "variant must compile with /bin/false; got exit status 1"
    assert not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("*.tmp*"))


def test_forked_child_computes():
    """Threads do not survive a fork; a child makes its own."""
    code = """
import os, sys, warnings
import numpy as np
import attnrt as at
from attnrt import formats
from attnrt.backends.cpu import CpuBackend
warnings.simplefilter("ignore")
spec = at.AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64, q_dtype="float32", variant=at.variants.causal())
attn = at.Attention(spec, backend=CpuBackend(num_threads=4), device="cpu")
attn.plan(formats.ragged([0, 3, 6], [0, 300, 700]))
rng = np.random.default_rng(0)
q, k = rng.standard_normal((6, 4, 64), np.float32), rng.standard_normal((700, 2, 64), np.float32)
want = attn.run(q, (k, k)).tobytes()
child = os.fork()
if child == 0:
    os._exit(0 if attn.run(q, (k, k)).tobytes() == want else 3)
for _ in range(300):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    import time; time.sleep(0.1)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
sys.exit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=100
    )


def test_two_threads_at_once():
    """Calls release the interpreter; a second caller does not disturb the first."""
    v = at.variants
    spec = at.AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=64, q_dtype="float32", variant=v.causal()
    )
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((6, 4, 64), np.float32), rng.standard_normal((1500, 2, 64), np.float32)
    results = {}

    def work(name):
        attn = at.Attention(spec, backend="cpu", device="cpu")
        attn.plan(at.formats.ragged([0, 3, 6], [0, 600, 1500]))
        results[name] = {attn.run(q, (k, k)).tobytes() for _ in range(30)}

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set.union(*results.values())) == 1


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("name", ["full", "causal", "window", "softcap"])
def test_compiled_and_prebuilt_code_give_the_same_bits(monkeypatch, family, name):
    """Decode rows and packed rows of each prebuilt variant, through the code that its own text compiles to."""
    from attnrt.backends.cpu import CpuBackend, prebuilt

    v = at.variants
    variant = {
        "full": v.full(),
        "causal": v.causal(),
        "window": (v.causal(), v.sliding_window(90)),
        "softcap": (v.causal(), v.softcap(2.0)),
    }[name]
    spec = at.AttentionSpec(
        num_qo_heads=6, num_kv_heads=2, head_dim=24, head_dim_vo=40, q_dtype="float32", variant=variant
    )
    rng = np.random.default_rng()
    q, k, x = (rng.standard_normal(s, np.float32) for s in ((31, 6, 24), (1200, 2, 24), (1200, 2, 40)))
    compiled = []
    original = jit.compiled_kernel
    monkeypatch.setattr(jit, "compiled_kernel", lambda *a: compiled.append(a) or original(*a))

    def run():
        attn = at.Attention(spec, backend=CpuBackend(family=family), device="cpu")
        attn.plan(at.formats.ragged([0, 1, 31], [0, 700, 1200]))
        return attn.run(q, (k, x)).tobytes()

    want = run()
    assert not compiled
    monkeypatch.setattr(prebuilt, "prebuilt_index", lambda _: None)
    same = run() == want  # the arrays are too long for a message
    assert same
    assert compiled
