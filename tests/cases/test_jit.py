# SPDX-License-Identifier: Apache-2.0
"""Hard cases of compilation: races, stale and unstable keys, places that cannot be written, machines without a compiler."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt.backends import cache
from attnrt.backends.cpu import jit
from attnrt.backends.cpu.families import families
from attnrt.backends.cuda import nvcc, render

v = at.variants
ROOT = Path(__file__).resolve().parents[2]

#: A process that asks the cache for entries, with a builder that logs and takes its time.
FETCH = """
import sys, threading, time
from pathlib import Path
from attnrt.backends.cache import fetch, key_of
log = Path(sys.argv[1])
def build(path):
    with open(log, "a") as f: f.write(path.name[:8] + "\\n")
    path.write_bytes(b"half"); time.sleep(float(sys.argv[2])); path.write_bytes(b"whole" * 1000)
def ask(name):
    found = fetch(key_of(name), ".bin", name, build).read_bytes()
    assert found == b"whole" * 1000, found[:9]
threads = [threading.Thread(target=ask, args=(n,)) for n in sys.argv[3:]]
[t.start() for t in threads]; [t.join() for t in threads]
"""

#: A process that compiles CPU variants: "name threads".
VARIANT = """
import sys, threading
import numpy as np
import attnrt as at
from attnrt import formats
v = at.variants
made = {"alibi": v.alibi(), "sinks": v.sink_logits(0.5), "window": (v.sliding_window(3), v.alibi()),
        "cap": (v.softcap(3.0), v.alibi()), "causal": v.causal()}
x = np.arange(40, dtype=np.float32).reshape(5, 1, 8) / 40
def ask(name):
    spec = at.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, q_dtype="float32", variant=made[name])
    attn = at.Attention(spec, backend="cpu", device="cpu")
    attn.plan(formats.ragged([0, 1], [0, 5]))
    sys.stdout.write(f"{name} {float(attn.run(np.ones((1, 2, 8), np.float32), (x, x)).sum())}\\n")
threads = [threading.Thread(target=ask, args=(n,)) for n in sys.argv[1:]]
[t.start() for t in threads]; [t.join() for t in threads]
"""


def environment(tmp_path, **changes):
    env = os.environ | {"ATTNRT_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)} | changes
    env.pop("ATTNRT_FORBID_COMPILE", None)
    return {name: value for name, value in env.items() if value is not None}


def start(code, env, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out, err


def counting_compiler(tmp_path):
    """(path, function): a compiler that logs each compilation of a variant, and how many there were."""
    log, script = tmp_path / "compiled", tmp_path / "counting-c++"
    real = shutil.which("c++") or shutil.which("g++")
    script.write_text(f'#!/bin/sh\ncase "$*" in *variant.cpp*) echo x >> {log};; esac\nexec {real} "$@"\n')
    script.chmod(0o755)
    return str(script), lambda: len(log.read_text().split()) if log.exists() else 0


def test_c43_one_build_per_key(tmp_path):
    """8 processes of 8 threads each, the same entries at once; one was killed in the middle of a build before."""
    log, env = tmp_path / "log", environment(tmp_path)
    victim = start(FETCH, env, log, 60, "a")
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim.kill()
    victim.communicate()
    log.unlink()
    for process in [start(FETCH, env, log, 0.05, *"abcdabcd") for _ in range(8)]:
        finish(process)
    built = log.read_text().split()
    assert len(built) == len(set(built)) == 4
    left = [p for p in (tmp_path / "cache").rglob("*.tmp")]
    assert len(left) <= 1, "more than the killed builder's file is left"


def test_c43_different_kernels_at_once(tmp_path):
    """The CPU backend: processes that compile different variants at once, each variant once."""
    compiler, compilations = counting_compiler(tmp_path)
    env = environment(tmp_path, ATTNRT_CXX=compiler)
    answers = [finish(p)[0] for p in [start(VARIANT, env, "alibi", "cap") for _ in range(3)]]
    assert len({tuple(sorted(a.splitlines())) for a in answers}) == 1
    assert compilations() == 2


def test_c44_the_key_is_the_content(tmp_path, monkeypatch):
    """A byte of a header with an older time, flags, compiler, architecture, a macro: another key. Times: never."""
    family = families()[0]
    variant = v.compose(v.softcap(2.0))
    plain = jit.cache_entry(variant, family)
    include = tmp_path / "include"
    shutil.copytree(ROOT / "backends" / "cpu" / "include", include)
    header = next(include.rglob("state.h"))
    hashes = []
    monkeypatch.setattr(jit, "_include_dirs", lambda: (include,))
    for text in (header.read_bytes(), header.read_bytes(), header.read_bytes() + b"\n"):
        header.write_bytes(text)
        os.utime(header, (1, 1))
        hashes.append(jit._headers_hash.__wrapped__())
    assert hashes[0] == hashes[1] != hashes[2]
    keys = {plain}
    for name, value in (
        ("_headers_hash", lambda: "edited"), ("OPTIONS", (*jit.OPTIONS, "-DMACRO")), ("_compiler_version", lambda path: "15.0"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(jit, name, value)
            keys.add(jit.cache_entry(variant, family))
    assert len(keys) == 4
    parts = ("nvrtc", "(13, 0)", "flags", "text")
    assert cache.key_of(*parts) != cache.key_of("nvrtc", "(13, 0)", "flagst", "ext")
    for i in range(4):
        assert cache.key_of(*parts) != cache.key_of(*parts[:i], parts[i] + "x", *parts[i + 1 :])


def test_c44_a_byte_of_a_kernel_header_reaches_the_cuda_key(tmp_path, monkeypatch):
    """The CUDA source is one flattened text: every header of ours is in what is hashed."""
    text = render.render(spec_of("float16"))
    for folder in ("kernels", "."):
        for path in (ROOT / "backends" / "cuda" / folder).glob("*.cuh"):
            if path.name not in ("append.cuh", "gather.cuh", "merge_parts.cuh"):  # texts of their own
                body = path.read_text().replace("#pragma once\n", "")
                last = [x for x in body.splitlines() if x.strip() and not x.startswith("#include")][-2]
                assert last in text, f"{path.name} is not in the hashed text"


def spec_of(q_dtype, kv_dtype=None, head_dim=64):
    return at.AttentionSpec(
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        variant=v.causal(),
    )


def test_c92_home_or_cache_that_cannot_be_written(tmp_path):
    """HOME read-only, the cache directory a file: one warning, a temporary place, the answer."""
    (tmp_path / "file").write_text("not a directory")
    other = tmp_path / "tmp"
    other.mkdir()
    env = environment(tmp_path, ATTNRT_CACHE_DIR=str(tmp_path / "file"), TMPDIR=str(other))
    out, err = finish(start(VARIANT, env, "alibi"))
    assert out.startswith("alibi ") and err.count("cannot be used") == 1
    nowhere = environment(tmp_path, ATTNRT_CACHE_DIR=None, HOME="/proc/self", TMPDIR=str(other))
    out, err = finish(start(VARIANT, nowhere, "causal"))  # prebuilt: nothing is written, nobody is warned
    assert out and not err


def test_c92_the_disk_is_full(tmp_path, monkeypatch):
    """No room for an entry (it had room for a byte before): one warning, the code serves this process."""
    monkeypatch.setattr(cache, "usable_cache_dir", lambda: tmp_path)
    made = []

    def build(path):
        if tmp_path in path.parents:
            path.write_bytes(b"ha")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(path)
        path.write_bytes(b"whole")

    key = cache.key_of("disk full", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="No space left on device") as caught:
        for _ in range(3):
            assert cache.fetch(key, ".bin", "a kernel", build).read_bytes() == b"whole"
    assert len(caught) == len(made) == 1
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size]
    with pytest.raises(at.CompileError, match="did not compile"), warnings.catch_warnings():
        warnings.simplefilter("error")  # another error is no lack of room

        def broken(path):
            raise at.CompileError("a kernel", "did not compile", None)

        cache.fetch(cache.key_of("broken", str(tmp_path)), ".bin", "a kernel", broken)


def test_c92_the_disk_is_full_for_a_cpu_variant(tmp_path, monkeypatch):
    real = jit._compile

    def compile_with_room(target, source, family, label):
        if tmp_path in target.parents:
            target.write_bytes(b"half")
            raise at.CompileError(label, "must compile", "ld: final link failed: No space left on device")
        real(target, source, family, label)

    monkeypatch.setattr(jit, "_compile", compile_with_room)
    monkeypatch.setattr(cache, "usable_cache_dir", lambda: tmp_path)
    variant = v.compose((v.full(), v.alibi(), v.softcap(7.0)))
    with pytest.raises(at.CompileError):  # there was room: the compiler's own fault
        jit.compiled_kernel(variant, families()[0])
    monkeypatch.setattr(cache, "NEEDED", 1 << 62)
    with pytest.warns(RuntimeWarning, match="no room on the device"):
        code = jit.compiled_kernel(variant, families()[0])
    assert code.attend and not list(tmp_path.rglob("*.so"))
    assert jit.compiled_kernel(variant, families()[0]) is code


def test_c93_no_nvcc(tmp_path, monkeypatch):
    """PATH without nvcc: import, status and a CPU run work; only the nvcc backend says what it lacks and where it looked."""
    bare = tmp_path / "bin"
    bare.mkdir()
    env = environment(tmp_path, PATH=str(bare), CUDA_HOME=None, CUDA_PATH=None)
    out, err = finish(start(VARIANT, env, "causal"))
    assert out.startswith("causal") and not err
    code = "import attnrt as at, json; print(json.dumps({k: list(x) for k, x in at.backends.status(device='cuda').items()}))"
    out, _ = finish(start(code, env))
    assert "nvcc is not found" in out or "nvcc" in out
    monkeypatch.setattr(nvcc, "find_nvcc", lambda: (None, ("/a/bin/nvcc", "/b/bin/nvcc")))
    with pytest.raises(at.CompileError, match=r'needs nvcc.*tried /a/bin/nvcc, /b/bin/nvcc.*backend="nvrtc"'):
        nvcc.compile_library("", "sm_90a", tmp_path / "x.so", "a kernel")


def test_c95_stable_keys(tmp_path):
    """The compiler through a link, a cache copied with new times: nothing is compiled again."""
    compiler, compilations = counting_compiler(tmp_path)
    want = finish(start(VARIANT, environment(tmp_path, ATTNRT_CXX=compiler), "sinks"))[0]
    link = tmp_path / "other name"
    link.symlink_to(compiler)
    copy = tmp_path / "copied cache"
    shutil.copytree(tmp_path / "cache", copy)
    for path in copy.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    env = environment(tmp_path, ATTNRT_CXX=str(link), ATTNRT_CACHE_DIR=str(copy))
    assert finish(start(VARIANT, env, "sinks"))[0] == want
    assert compilations() == 1


@pytest.mark.parametrize(
    "dtypes",
    [("float16", None), ("bfloat16", None), ("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2")],
)
def test_c96_kernels_need_no_toolkit_headers(dtypes):
    """Whatever the types, the text that NVRTC gets asks for no header of a toolkit (two standard ones are for the CPU alone)."""
    text = render.render(spec_of(*dtypes))
    assert set(re.findall(r"^\s*#\s*include\s*(.*)$", text, re.M)) <= {"<cmath>", "<cstring>"}
    assert not re.findall(r"\b__half\b|\b__nv_bfloat16\b|\b__nv_fp8", text)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("float16", None), ("bfloat16", None), ("bfloat16", "float8_e4m3fn")])
def test_c96_they_compile_with_nvrtc_alone(dtypes):
    pytest.importorskip("cuda.core")
    from attnrt.backends.cuda.nvrtc import compile_source

    code, _ = compile_source(render.render(spec_of(*dtypes)), "sm_90a", "a kernel")
    assert code[:4] == b"\x7fELF"


@pytest.mark.compile
def test_c96_an_error_carries_the_log():
    pytest.importorskip("cuda.core")
    from attnrt.backends.cuda.nvrtc import compile_source

    with pytest.raises(at.CompileError, match="no_such_thing") as caught:
        compile_source('extern "C" __global__ void f() { no_such_thing(); }', "sm_90a", "a kernel")
    assert "no_such_thing" in caught.value.log


@pytest.mark.slow
def test_c98_modules_loaded_at_once(tmp_path):
    """4 modules in 4 threads of a fresh process, again and again, from a warm cache: every look-up succeeds."""
    env, names = environment(tmp_path), ("alibi", "sinks", "window", "cap")
    want = sorted(finish(start(VARIANT, env, *names))[0].splitlines())
    for _ in range(2):
        processes = [start(VARIANT, env, *names, *names) for _ in range(2)]
        assert all(sorted(finish(p)[0].splitlines()) == sorted(want * 2) for p in processes)


def test_c98_threads_get_one_module():
    variants = [v.compose((v.causal(), v.alibi())), v.compose((v.full(), v.alibi()))]
    found, barrier = [None] * 8, threading.Barrier(8)

    def ask(i):
        barrier.wait()
        found[i] = jit.compiled_kernel(variants[i % 2], families()[0])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(x) for x in found}) == 2 and found[0] is found[2]


@pytest.mark.gpu
def test_c98_modules_loaded_at_once_on_a_gpu(gpu_backend, kit):
    """4 specs, 4 threads, 20 rounds of fresh backends over one cache."""
    results, wrong = {}, []

    def ask(round_, i):
        try:
            spec = kit.spec(gpu_backend, head_dim=16 * (i + 1))
            attn = kit.attention(gpu_backend, spec)
            q, k = kit.draw(i, 1, 4, 16 * (i + 1)), kit.draw(9, 7, 2, 16 * (i + 1))
            out = kit.run(gpu_backend, spec, at.formats.ragged([0, 1], [0, 7]), q, (k, k), attn=attn).out
            results.setdefault(i, set()).add(np.ascontiguousarray(out).tobytes())
        except Exception as error:
            wrong.append(repr(error))

    for round_ in range(20):
        threads = [threading.Thread(target=ask, args=(round_, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[0]
    assert all(len(x) == 1 for x in results.values())
