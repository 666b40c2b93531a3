# SPDX-License-Identifier: Apache-2.0
"""Compile FlashInfer's modules before a run, so that the tables wait for no compiler.

    python benchmarks/warm.py --pack modules.tar.xz     # needs nvcc and flashinfer, no GPU
    python benchmarks/warm.py --unpack modules.tar.xz   # on the machine with the GPU

FlashInfer loads ``flashinfer/data/aot/NAME/NAME.so`` of its own package without looking at sources, times or ninja (its "ahead of
time" folder); packing collects the libraries under those names, unpacking puts them there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

#: What is compiled, the most used first.
GROUPS = ("decode", "small", "fa2", "fa3", "batch", "fp8", "xqa", "positions", "variants", "dims")


def specs(groups: tuple[str, ...] = GROUPS) -> list[tuple[Callable[[], Any], str]]:
    """What the tables need: functions that make FlashInfer's JitSpec, and which of its attention kernels are called.

    FlashInfer compiles each module for paged and ragged K and V and four kinds of masks, most of which no table calls. Only those
    named (p0: paged, no mask; r1: ragged, causal; p2: paged, custom mask) are compiled; the others' symbols stay unresolved,
    which a lazily bound library does not mind until one is called.
    """
    import torch
    from flashinfer import jit
    from flashinfer.jit import cascade, page, quantization
    from flashinfer.jit import xqa as decoder

    bf16, fp8, i32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32

    def prefill(
        backend: str,
        kv: Any = bf16,
        dims: tuple[int, int] = (128, 128),
        position: int = 0,
        window: bool = False,
        cap: bool = False,
    ) -> Callable[[], Any]:
        args = (backend, bf16, kv, bf16, i32, *dims, position, window, cap, False)
        return lambda: jit.gen_batch_prefill_module(*args)

    def decode(kv: Any) -> Callable[[], Any]:
        return lambda: jit.gen_batch_decode_module(bf16, kv, bf16, i32, 128, 128, 0, False, False)

    def batch() -> Any:
        return jit.gen_batch_attention_module(bf16, bf16, bf16, i32, 128, 128, 0, False, False)

    def xqa(kv: Any, group: int) -> Callable[[], Any]:
        return lambda: decoder.gen_xqa_module(bf16, kv, 16, 128, group, False, bf16)

    made: dict[str, list[tuple[Callable[[], Any], str]]] = {
        "decode": [(decode(bf16), "")],
        "small": [
            (cascade.gen_cascade_module, ""),
            (page.gen_page_module, ""),
            (quantization.gen_quantization_module, ""),
        ],
        "fa2": [(prefill("fa2"), "p0 p1 p2 r2")],
        "fa3": [(prefill("fa3"), "p0 p1 r0 r1")],
        "batch": [(batch, "p1")],
        "fp8": [(prefill("fa2", fp8), "p0 p1"), (decode(fp8), "")],
        "xqa": [(xqa(kv, group), "") for kv, group in ((bf16, 4), (bf16, 8), (bf16, 16), (fp8, 4), (fp8, 8))],
        "variants": [
            (prefill("fa3", cap=True), "r1"),
            (prefill("fa3", window=True), "r1"),
        ],
        "positions": [(prefill("fa2", position=2), "r1"), (prefill("fa2", position=1), "r1")],
        "dims": [
            (prefill("fa3", dims=(64, 64)), "r1"),
            (prefill("fa3", dims=(192, 128)), "r1"),
            (prefill("fa3", dims=(256, 256)), "r1"),
        ],
    }
    return [entry for group in groups for entry in made[group]]


def called(source: Path, kernels: str) -> bool:
    """Whether a source file of a module is needed."""
    found = re.search(r"(paged|ragged)_(?:sm90_)?kernel_mask_(\d)", source.name)
    return found is None or f"{found[1][0]}{found[2]}" in kernels.split()


def compile_one(command: list[str]) -> bool:
    """Run a compiler whose last two arguments are -o and the object, unless the object is there."""
    target = Path(command[-1])
    if target.exists():
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    start = time.perf_counter()
    done = subprocess.run([*command[:-1], str(part)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{target.name}: {done.stderr[-500:]}", file=sys.stderr, flush=True)
        return False
    part.rename(target)
    print(f"{time.perf_counter() - start:6.1f} s {target.name} of {target.parent.name}", flush=True)
    return True


def build(groups: tuple[str, ...], jobs: int) -> list[Path]:
    """Compile the groups' modules, ``jobs`` files at a time, the first groups first; the libraries that are complete."""
    modules = []
    for make, kernels in specs(groups):
        spec = make()
        commands = [
            shlex.split(entry["command"])
            for entry in spec.get_compile_commands()
            if called(Path(entry["file"]), kernels)
        ]
        modules.append((Path(spec.jit_library_path), commands, spec.extra_ldflags or []))
    # Kernels take longest, so all of them begin before what goes around them.
    every = sorted((c for _, commands, _ in modules for c in commands), key=lambda c: "_kernel" not in c[-1])
    with ThreadPoolExecutor(jobs) as pool:
        done = {command[-1]: pool.submit(compile_one, command) for command in every}
        found = []
        for library, commands, flags in modules:
            objects = [command[-1] for command in commands]
            if all([done[name].result() for name in objects]):  # a list: wait for all of them
                link(library, objects, flags)
                found.append(library)
    print(f"{len(found)} of {len(modules)} modules", flush=True)
    return found


def link(library: Path, objects: list[str], flags: list[str]) -> None:
    """The library of some objects; libcuda and libcudart are found when it is loaded."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    command = ["c++", "-shared", *objects, f"-L{home}/lib64", "-lcudart", *flags, "-o", str(library)]
    subprocess.run([x for x in command if x != "-lcuda"], check=True)


def pack(libraries: list[Path], archive: Path) -> None:
    """A compressed tar with NAME/NAME.so of every library."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "w:xz", preset=6) as out:
        for library in libraries:
            slim = Path(folder) / library.name
            subprocess.run(["strip", "-o", str(slim), str(library)], check=True)
            out.add(slim, f"{library.stem}/{library.name}")


def unpack(archive: Path, package: Path | None = None) -> list[str]:
    """Put the libraries where FlashInfer looks first; their names."""
    if package is None:
        from importlib.util import find_spec

        where = find_spec("flashinfer")
        if where is None or where.origin is None:
            raise SystemExit("flashinfer is not installed")
        package = Path(where.origin).parent
    target = package / "data" / "aot"
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as source:
        source.extractall(target, filter="data")
        return [Path(name).name for name in source.getnames()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pack", type=Path, metavar="FILE", help="compile, then collect the libraries")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="put collected libraries into place")
    parser.add_argument("--groups", default=",".join(GROUPS), help="comma-separated, of " + ", ".join(GROUPS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files compiled at a time")
    args = parser.parse_args()
    if args.unpack:
        print(f"{len(unpack(args.unpack))} modules in place")
        return
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    libraries = build(tuple(args.groups.split(",")), args.jobs)
    if args.pack:
        pack(libraries, args.pack)


if __name__ == "__main__":
    main()
