# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on the CPU (emulated_cuda.h): a backend with the text of the real one but for ptx.cuh and a few conversions.

Slow (a millisecond a tile) and no witness of speed or of a compiler, but of the kernels' logic: indexing, pipelines, barriers,
folds.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attnrt.backends.cuda import pack, render, select, structs, tables
from attnrt.backends.cuda.common import why_not_spec

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-mno-red-zone"]

#: Inline assembly of types.cuh, as C++.
ASSEMBLY = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));': "r = emu_from_half(x);",
    'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));': "r = emu_to_bf16(x);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));': "r = emu_to_half(x);",
    'asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(magnitude), "r"(scale));': "r = emu_mul_half2(magnitude, scale);",
}


def emulated_text(spec: Any) -> str:
    """The rendered text of a spec for g++."""
    text = render.render(spec)
    own = (render._ROOT / "ptx.cuh").read_text().replace("#pragma once\n", "")
    assert own in text
    text = text.replace(own, "")
    for found, instead in ASSEMBLY.items():
        text = text.replace(found, instead)
    text = text.replace("__shared__ __align__(128) char ring[Rows::kRingBytes];", "char* ring = emu::shared;")
    for name, size in (("ring", 1024), ("smem", 128)):
        text = text.replace(
            f"extern __shared__ __align__({size}) char {name}[];", f"char* {name} = emu::shared;"
        )
    entries = "\n".join(
        f'extern "C" int emulate_{name}(unsigned grid, const void* args, int early) {{\n'
        f"  return emu::launch([](const void* a) {{ {name}(*static_cast<const attnrt::Launch*>(a)); }}, grid, args, early, "
        f"{threads_of(spec, name)});\n}}"
        for name in render.entry_names(spec)
    )
    return f"{(HERE / 'emulated_cuda.h').read_text().replace('#pragma once', '')}\n{text}\n{entries}\n"


def threads_of(spec: Any, name: str) -> int:
    """Threads of a CTA; the decode kernel has its groups."""
    return render.threads_of(spec, name) * (tables.decode_groups(spec) if name == render.DECODE else 1)


def build(text: str, flags: list[str] = FLAGS) -> ctypes.CDLL:
    """The library of a text, built once by g++ with these flags."""
    folder = Path(tempfile.gettempdir()) / "attnrt-emulated"
    folder.mkdir(exist_ok=True)
    key = hashlib.sha256("\0".join([*flags, text]).encode()).hexdigest()[:24]
    path = folder / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, target = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
            source.write_text(text)
            done = subprocess.run(
                ["g++", *flags, str(source), "-o", str(target)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr[:4000]
            target.rename(path)
    return ctypes.CDLL(str(path))


class EmulatedKernel:
    """attend and merge; ``decode`` forces one kernel for all, ``early`` lets asynchronous copies land at once."""

    def __init__(self, spec: Any, backend: EmulatedCuda) -> None:
        self.spec, self.backend, self.lib = spec, backend, build(emulated_text(spec))
        self.itemsize = np.dtype(f"u{tables.as_dtype(spec.kv_dtype).itemsize}").itemsize

    def pack_header(self, loaded: Any, target: np.ndarray) -> None:
        pack.fill_header(loaded, target)

    def _launch(self, name: str, grid: int, call: Any) -> None:
        args = pack.fill_run(call, self.itemsize) + (call.params.table.tobytes() or bytes(64))
        buffer = (ctypes.c_char * (len(args) + 16)).from_buffer_copy(args + bytes(16))
        done = getattr(self.lib, f"emulate_{name}")(grid, ctypes.byref(buffer), int(self.backend.early))
        assert done, f"{name}: the threads of a CTA wait for each other in vain"

    def _decodes(self, plan: Any) -> bool:
        return select.plan_decodes(plan) if self.backend.decode is None else self.backend.decode

    def counters(self, plan: Any, limits: Any) -> int:
        return select.merge_counters(plan) if self._merges(plan) else 0

    def _merges(self, plan: Any) -> bool:
        """Whether attend merges: where the decode kernel runs alone."""
        teams = (tables.WIDE, tables.HOPPER)
        return self._decodes(plan) and not any(select.has_items(plan, team) for team in teams)

    def attend(self, call: Any) -> None:
        plan = call.loaded.plan
        if select.has_items(plan, None) or self._merges(plan):
            name, workers = render.DECODE if self._decodes(plan) else render.ATTEND, plan.traits.num_workers
            groups = tables.decode_groups(self.spec) if name == render.DECODE else 1
            self._launch(name, -(-workers // groups), call)
        if select.has_items(plan, tables.WIDE):
            self.launch_many(call)
        address, count = call.loaded.counters
        assert not any(ctypes.string_at(address, 4 * count)), "a counter is left"

    def launch_many(self, call: Any) -> None:
        """Items of many rows."""
        first, end = call.loaded.plan.traits.workers_of(tables.WIDE)
        self._launch(render.ATTEND, end - first, call)

    def merge(self, call: Any) -> None:
        if not self._merges(call.loaded.plan):
            self._launch(render.MERGE, 2, call)
        elif not call.loaded.work.shape[0]:  # then attend was not called
            self.attend(call)


class EmulatedCuda:
    """The backend; traits are those of a GPU with few multiprocessors."""

    name = "emulated"
    header_nbytes = structs.FIRST_AT
    header_nbytes_per_worker = structs.FIRST_ITEM_BYTES
    header_teams = (tables.WIDE,)

    def __init__(self, decode: bool | None = None, early: bool = False, multiprocessors: int = 2) -> None:
        self.decode, self.early, self.multiprocessors = decode, early, multiprocessors
        self._kernels: dict[Any, EmulatedKernel] = {}

    def why_not(self, spec: Any, features: Any, device: Any) -> tuple[str, ...]:
        return () if spec is None else why_not_spec(spec)

    def traits(self, spec: Any, features: Any, device: Any, deterministic: str = "batch") -> Any:
        traits = tables.traits_for(spec, self.multiprocessors, deterministic)
        traits = replace(traits, launch=0.0)  # what is shared stays shared, however small
        return traits if self.decode is None else replace(traits, teams=())

    def compile(self, spec: Any, features: Any, device: Any) -> EmulatedKernel:
        if spec not in self._kernels:
            self._kernels[spec] = EmulatedKernel(spec, self)
        return self._kernels[spec]
