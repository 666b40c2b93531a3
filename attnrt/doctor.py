# SPDX-License-Identifier: Apache-2.0
"""``attnrt doctor``: what can run here, and for what cannot, the reason and the mend in one line each."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from attnrt.config import config, usable_cache_dir
from attnrt.errors import AttnrtError

__all__ = ["Finding", "examine", "main"]

FRAMEWORKS = ("torch", "cupy-cuda13x", "cupy-cuda12x", "jax")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: ``state`` is "ok", "missing" (optional) or "broken" (should work and does not)."""

    name: str
    state: str
    text: str


def examine() -> list[Finding]:
    """Look at the installation, the cache, every backend, and the frameworks."""
    import attnrt

    machine = f"attnrt {attnrt.__version__}, Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}"
    found = [Finding(name="machine", state="ok", text=machine), _cache()]
    found += [*_backends(), _compiler(), *_cuda(), _run(), *_frameworks()]
    return found


def _cache() -> Finding:
    wanted, used = config().cache_dir, usable_cache_dir()
    if used == wanted:
        return Finding(name="cache", state="ok", text=f"compiled kernels are kept in {used}")
    text = f"{wanted} cannot be written, {used} is used instead; set ATTNRT_CACHE_DIR"
    return Finding(name="cache", state="broken", text=text)


def _backends() -> list[Finding]:
    from attnrt import backends
    from attnrt.spec import AttentionSpec

    found = []
    for kind, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        spec = AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=64, q_dtype=dtype)
        for name, why in backends.status(spec, device=kind).items():
            if why and why[0].startswith("runs on"):
                continue  # it lives on the other kind of device and is reported there
            state = "missing" if why else "ok"
            found.append(
                Finding(name=f"backend {name}", state=state, text="; ".join(why) or f"runs on {kind}")
            )
    return found


def _compiler() -> Finding:
    """The C++ compiler: variants that are not built with the package need one when they are first used."""
    from attnrt.backends.cpu.jit import COMPILERS, find_compiler

    found = find_compiler(config().cxx)
    if found is not None:
        return Finding(name="C++ compiler", state="ok", text=f"{found} compiles variants for the backend cpu")
    tried = config().cxx or ", ".join(COMPILERS)
    text = f"none found (tried {tried}); variants beyond causal, window and soft-cap need one: install g++ or set ATTNRT_CXX"
    return Finding(name="C++ compiler", state="missing", text=text)


def _cuda() -> list[Finding]:
    """Driver, GPUs, compilers: what the CUDA backends need, each with its mend."""
    from attnrt.backends.cuda import doctor

    return [Finding(name=name, state="ok" if ok else "missing", text=line) for name, ok, line in doctor()]


def _run() -> Finding:
    """One small attention from end to end."""
    import attnrt

    try:
        q = np.random.default_rng(0).standard_normal((3, 2, 16)).astype(np.float32)
        index = attnrt.formats.ragged([0, 3], [0, 3])
        out = attnrt.attention(q, (q, q), index, backend="auto")
    except (AttnrtError, ImportError, OSError) as error:
        return Finding(
            name="self test", state="broken", text=f"{type(error).__name__}: {error}".splitlines()[0]
        )
    ok = bool(np.isfinite(np.asarray(out)).all()) and np.array_equal(np.asarray(out)[0], q[0])
    text = "a causal attention gives what it must" if ok else "a causal attention gives wrong numbers"
    return Finding(name="self test", state="ok" if ok else "broken", text=text)


def _frameworks() -> list[Finding]:
    found = []
    for name in FRAMEWORKS:
        try:
            text = f"{importlib.metadata.version(name)} (its arrays are read in place)"
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(Finding(name=name, state="ok", text=text))
    return found or [Finding(name="frameworks", state="missing", text="none installed; none is needed")]


def main(argv: list[str] | None = None) -> int:
    """Print the findings; 1 if something is broken."""
    parser = argparse.ArgumentParser(prog="attnrt doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    try:
        found = examine()
    except AttnrtError as error:  # a setting in the environment that cannot be understood
        found = [Finding(name="settings", state="broken", text=str(error).splitlines()[0])]
    if args.json:
        rows: list[dict[str, Any]] = [asdict(item) for item in found]
        print(json.dumps(rows))
    else:
        for item in found:
            print(f"{item.state:<8} {item.name:<18} {item.text}")
    return int(any(item.state == "broken" for item in found))


if __name__ == "__main__":
    sys.exit(main())
