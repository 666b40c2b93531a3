# SPDX-License-Identifier: Apache-2.0
"""Planted faults: each is one substitution in a copy of the sources, and a named test must turn red.

    python tests/mutants.py [--only NAME ...] [--jobs N]

A mutant that no test sees is a hole in the suite, and the script fails. Faults in headers of the CPU backend need no build: the
copy compiles every variant on first use, from its own headers. Faults in CUDA kernels are seen by tests over the emulated
kernels, which need no GPU either.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planted_faults import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("attnrt", "formats", "scheduler", "variants", "backends", "examples", "tests", "docs", "benchmarks")


def substitute(root: Path, file: str, old: str, new: str) -> None:
    """Plant one substitution."""
    path = root / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old!r}"
    path.write_text(text.replace(old, new))


def copy_sources(target: Path) -> None:
    """The sources and built libraries, links kept."""
    for name in COPIED:
        shutil.copytree(
            ROOT / name,
            target / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"),
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, target / name)


def rebuild(root: Path, mutant: Mutant) -> None:
    """Plant the fault in a header of the CPU backend and build its library anew, which takes a minute or two."""
    substitute(root, mutant.file, mutant.old, mutant.new)
    for library in (root / "backends" / "cpu").glob("*.so"):
        library.unlink()
    shutil.copy(ROOT / "setup.py", root / "setup.py")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=root,
        check=True,
        capture_output=True,
    )


def run(mutant: Mutant) -> str | None:
    """The test that went red; None: the mutant lives."""
    import shlex

    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        copy_sources(root)
        if mutant.kind == "native":
            rebuild(root, mutant)
        else:
            substitute(root, mutant.file, mutant.old, mutant.new)
        arguments = [
            a if a.startswith("-") or not a.endswith(".py") else f"tests/{a}"
            for a in shlex.split(mutant.test)
        ]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
            "ATTNRT_CACHE_DIR": str(root / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            *arguments,
        ]
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=600
        )
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" - ")[0].split(" ", 1)[1].removeprefix("tests/")
    if done.returncode < 0:
        return f"{mutant.test} (the process died of signal {-done.returncode})"
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return None


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 if a mutant lives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=None, help="names of mutants")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.only or m.name in options.only]
    print("| fault | file | test that went red |\n|---|---|---|")
    alive = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, red in zip(chosen, pool.map(run, chosen), strict=True):
            alive += red is None
            print(
                f"| {mutant.name} | `{mutant.file}` | {'**none**' if red is None else f'`{red}`'} |",
                flush=True,
            )
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
