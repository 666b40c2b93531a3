# SPDX-License-Identifier: Apache-2.0
"""Importing attnrt is cheap, needs nothing, and offers the public names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import attnrt

ROOT = Path(attnrt.__file__).parents[1]


def fresh(code, **env):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_takes_less_than_150_ms():
    code = "import time; t = time.perf_counter(); import attnrt; print(time.perf_counter() - t)"
    assert min(fresh(code) for _ in range(3)) < 0.15


@pytest.mark.parametrize(
    "first", ["attnrt.TensorView", "attnrt.formats", "attnrt.Attention", "import attnrt.backends.cpu"]
)
def test_a_checkout_that_was_not_built_says_so(first):
    code = (
        "import sys, json, attnrt\n"
        "sys.modules['attnrt._tensor_native'] = None  # as if it were not there\n"
        f"try: {first}\n"
        "except ImportError as error: print(json.dumps([str(error), str(error.__cause__)]))"
    )
    text, cause = fresh(code)
    assert f"not built in {ROOT}" in text and "pip install -e ." in text and "_tensor_native" in cause


def test_reading_numpy_arrays_imports_no_framework():
    found = fresh(
        "import sys, json, attnrt, numpy\n"
        "v, lse = attnrt.merge_states(numpy.zeros((2, 3, 1, 8), 'f'), numpy.zeros((2, 3, 1), 'f'))\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(json.dumps(sorted(roots & {'torch', 'jax', 'jaxlib', 'cupy', 'cuda', 'scipy', 'matplotlib'})))"
    )
    assert found == []


def test_no_home_and_no_tools(tmp_path):
    assert fresh("import attnrt; attnrt.empty(3); print(1)", HOME=str(tmp_path / "none"), PATH="") == 1


def test_every_name_is_there():
    for name in attnrt.__all__:
        assert getattr(attnrt, name) is not None
    assert set(attnrt.__all__) <= set(dir(attnrt))
    assert not hasattr(attnrt, "no_such_name")
    assert not {"annotations", "importlib", "Any"} & set(dir(attnrt))


def test_unknown_builders_and_variants_say_what_was_meant():
    with pytest.raises(AttributeError, match="Did you mean 'paged'"):
        attnrt.formats.page  # noqa: B018
    with pytest.raises(AttributeError, match="Known: alibi, causal"):
        attnrt.variants.xx  # noqa: B018


def test_root_folders_are_not_packages_of_their_own():
    for name in ("formats", "scheduler", "variants", "backends"):
        module = getattr(attnrt, name)
        assert module.__name__ == f"attnrt.{name}"
        assert name not in sys.modules
