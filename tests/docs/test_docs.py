# SPDX-License-Identifier: Apache-2.0
"""Every Python block in README.md and docs/*.md runs, each file's blocks in one namespace and in order.

A fence ```` ```python ```` runs; ```` ```python no-run ```` (a GPU, a network, a process of its own) is compiled only. A
block that should fail shows it with ``try`` in the text itself.
"""

import re
from pathlib import Path

import pytest

from attnrt import formats, variants
from attnrt.backends.status import registry as backends
from attnrt.scheduler.assign import SCHEDULERS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(
    r"^(?P<indent> *)```python(?P<flags>[^\n]*)\n(?P<code>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL
)


def blocks(text):
    """(first line, flags, code) of each Python block."""
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        code = "".join(
            line[indent:] if line.strip() else line for line in match["code"].splitlines(keepends=True)
        )
        yield text.count("\n", 0, match.start("code")) + 1, match["flags"].split(), code


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for registry in (formats.registry, variants.registry, SCHEDULERS, backends):
        monkeypatch.setattr(
            registry, "_entries", dict(registry._entries)
        )  # what a text registers is gone behind it
    namespace = {"__name__": "__docs__"}
    for line, flags, code in blocks(path.read_text(encoding="utf-8")):
        # Empty lines in front give tracebacks the line numbers of the document.
        compiled = compile("\n" * (line - 1) + code, str(path), "exec")
        if "no-run" not in flags:
            exec(compiled, namespace)


def test_the_reader_of_blocks():
    text = "# A\n```python\nx = 1\n```\ntext\n```bash\nls\n```\n- item\n  ```python no-run\n  y = 2\n\n  z = 3\n  ```\n"
    assert list(blocks(text)) == [(3, [], "x = 1\n"), (11, ["no-run"], "y = 2\n\nz = 3\n")]
