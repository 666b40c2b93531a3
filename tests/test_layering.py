# SPDX-License-Identifier: Apache-2.0
"""Left never imports right (docs/design.md section 1), and nothing of ours is importable at the top level.

Counted are the imports that run when a module is loaded; an import inside a function is how a value offers a convenience of a
later layer (``plan.explain()``) without depending on it, and types are no dependency.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("formats", "scheduler", "variants", "backends", "examples")

#: Layers from left to right; a name covers its submodules.
LAYERS = (
    *(
        {"errors", "latest"},
        {"config"},
        {"log"},
        {"dtypes"},
        {"device"},
        {"reading", "tensor", "memory", "results"},
        {"checks"},
        {"registry"},
    ),
    *({"fold", "spec", "merge"}, {"formats"}, {"scheduler", "variants"}, {"backends"}),
    *(
        {"layout", "operands", "arguments", "overlap"},
        {"dispatch", "rows"},
        {"loading", "workspace", "append", "gather", "repeat", "step"},
        {"machine", "runtime"},
        {"api"},
    ),
    *({"testing", "integrations"}, {"bench", "doctor", "examples"}, {"cli"}),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def sources():
    """(module path relative to the package, file) of every Python source."""
    for path in sorted((ROOT / "attnrt").glob("*.py")):
        if path.stem != "__init__":
            yield path.stem, path
    for folder in ("attnrt/testing", "attnrt/integrations", *FOLDERS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "native" not in path.parts:
                yield Path(folder).name, path


def loaded_imports(tree: ast.Module):
    """Names of attnrt modules that loading the tree imports."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            pending += [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "attnrt":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("attnrt."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("attnrt."))


def test_every_module_has_a_layer():
    missing = {name for name, _ in sources()} - set(RANK)
    assert not missing, f"give these a layer: {sorted(missing)}"


@pytest.mark.parametrize(("name", "path"), list(sources()), ids=lambda x: str(x).replace(str(ROOT) + "/", ""))
def test_left_never_imports_right(name, path):
    for target in loaded_imports(ast.parse(path.read_text())):
        if target in RANK and target != name:
            assert RANK[target] <= RANK[name], f"{path.relative_to(ROOT)} ({name}) imports {target}"


def test_the_package_never_imports_a_framework_when_loaded():
    code = (
        "import sys, attnrt as at\n"
        "at.Attention, at.AttentionSpec, at.formats.paged, at.variants.causal, at.backends.status()\n"
        "print(sorted({'torch', 'jax', 'cupy', 'scipy', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_folder_is_a_top_level_package(tmp_path):
    """With only the package on the path, as after an install, its folders are found inside it and nowhere else."""
    (tmp_path / "attnrt").symlink_to(ROOT / "attnrt")
    found = {folder: importlib.machinery.PathFinder.find_spec(folder, [str(tmp_path)]) for folder in FOLDERS}
    assert found == dict.fromkeys(FOLDERS)
    assert importlib.machinery.PathFinder.find_spec("attnrt", [str(tmp_path)]) is not None


def test_links_lead_to_the_root_folders():
    for folder in FOLDERS:
        link = ROOT / "attnrt" / folder
        assert link.is_symlink() and link.resolve() == ROOT / folder
        assert importlib.util.find_spec(f"attnrt.{folder}") is not None
