# SPDX-License-Identifier: Apache-2.0
"""A wheel and an sdist hold what they need: built once, installed into an empty environment, used without the checkout."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

SMOKE = """
import numpy as np, attnrt as at, sys
from pathlib import Path
assert "site-packages" in at.__file__, at.__file__
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((40, 4, 32), dtype=np.float32) for _ in range(3))
for variant in (at.variants.causal(), (at.variants.softcap(3.0), at.variants.alibi())):  # prebuilt, and compiled here
    spec = at.AttentionSpec(num_qo_heads=4, num_kv_heads=4, head_dim=32, q_dtype="float32", variant=variant)
    index = at.formats.ragged([0, 40], [0, 40])
    a = at.attention(q, (k, v), index, spec, backend="cpu")
    b = at.attention(q, (k, v), index, spec, backend="reference")
    assert np.abs(a - b).max() < 1e-5
from attnrt.backends.cuda.render import render
assert "attnrt_attend" in render(spec)
for name in ("formats", "scheduler", "variants", "backends", "examples"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name + " is importable at the top level")
print("fine")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist): the sdist from a copy of what git tracks, the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"
    copy.mkdir()
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    archive = subprocess.run(
        ["tar", "c", "--null", "-T", "-"], cwd=ROOT, input=files, capture_output=True, check=True
    )
    subprocess.run(["tar", "x"], cwd=copy, input=archive.stdout, check=True)
    code = (
        "import sys; sys.argv = ['setup.py', '-q', 'sdist', '-d', sys.argv[1]]; exec(open('setup.py').read())"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=copy, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(sdist)],
        check=True,
        cwd=folder,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel, sdist


def test_the_sdist_has_all_sources(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    copy = built[1].parent / "copy"  # what git tracked when it was built
    tracked = [
        path.relative_to(copy).as_posix()
        for path in copy.rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    needed = [
        name
        for name in tracked
        if Path(name).suffix in (".py", ".h", ".cuh", ".cpp")
        and name.split("/")[0] not in ("tests", "benchmarks", "scripts", "build")
    ]
    missing = [name for name in needed if name not in names and f"attnrt/{name}" not in names]
    assert not missing


def test_the_wheel_is_abi3_and_has_the_kernel_sources(built):
    assert "-cp311-abi3-" in built[0].name
    names = zipfile.ZipFile(built[0]).namelist()
    assert any(name.endswith("kernels/attend.cuh") for name in names)
    assert any(name.endswith("include/attnrt_variant.h") for name in names)
    assert all(name.startswith("attnrt") for name in names)


def test_an_installed_wheel_works_alone(built, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", str(built[0])], check=True)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "ATTNRT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [python, "-c", SMOKE], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr
    doctor = subprocess.run(
        [python, "-m", "attnrt.cli", "doctor"], cwd=tmp_path, env=env, capture_output=True, check=False
    )
    assert doctor.returncode == 0
