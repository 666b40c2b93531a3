# SPDX-License-Identifier: Apache-2.0
"""docs/cases.md names every hard case, its tests and their backends, and agrees with what is here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent

#: The list of hard cases, by part of the runtime that it names first.
IDS = (
    *(1, 2, 3, 4, 6, 9, 10, 12, 14, 15, 17, 19, 21, 23, 24, 26, 27, 29, 31, 32, 34, 36, 38, 40, 42, 43, 44, 46, 47),
    *(50, 52, 53, 56, 58, 60, 61, 63, 65, 68, 69, 71, 73, 74, 77, 78, 80, 82, 84, 86, 87, 89, 90, 92, 93, 95, 96, 98),
    *(100, 102, 104, 106, 109),
)  # fmt: skip
ROW = re.compile(r"^\| C(\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
NAME = re.compile(r"^test_c(\d+)_")


def backends_of(function: ast.FunctionDef) -> set[str]:
    """Which backends a test reaches, by its fixtures and markers."""
    arguments = {a.arg for a in function.args.args}
    marks = {m for d in function.decorator_list for m in re.findall(r"mark\.(\w+)", ast.unparse(d))}
    if "backend" in arguments:
        return {"reference", "cpu", "nvrtc", "nvcc"}
    if "host" in arguments:
        return {"reference", "cpu"}
    if "gpu_backend" in arguments or "gpu" in marks:
        return {"nvrtc", "nvcc"}
    return {"nvrtc"} if "compile" in marks else {"host code"}


def by_id() -> dict[int, dict[str, set[str]]]:
    """{id: {"file::test": backends}} of the modules here."""
    found: dict[int, dict[str, set[str]]] = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            match = NAME.match(getattr(node, "name", ""))
            if match:
                place = f"{path.stem[5:]}: {node.name[5:]}"
                found.setdefault(int(match[1]), {})[place] = backends_of(node)
    return found


def table_rows() -> str:
    """The rows of docs/cases.md as they should be, but for the first column's words."""
    titles = dict(re.findall(r"^\| C(\d+) \| ([^|]+) \|", (ROOT / "docs" / "cases.md").read_text(), re.M))
    order = ("reference", "cpu", "nvrtc", "nvcc", "host code")
    lines = []
    for number, here in sorted(by_id().items()):
        names = "<br>".join(f"`{name}`" for name in here)
        reached = set().union(*here.values())
        where = ", ".join(name for name in order if name in reached)
        lines.append(f"| C{number:02} | {titles.get(f'{number:02}', '').strip()} | {names} | {where} |")
    return "\n".join(lines)


def test_every_case_has_a_test():
    assert len(IDS) == 62
    assert sorted(by_id()) == sorted(IDS)


def test_the_table_is_true():
    text = (ROOT / "docs" / "cases.md").read_text()
    assert [int(row[0]) for row in ROW.findall(text)] == sorted(IDS)
    assert table_rows() in text, (
        "docs/cases.md differs from the tests: python tests/cases/test_table.py prints its rows"
    )


def test_both_host_backends_are_here(request):
    """A backend that was not built would leave its parameters out in silence."""
    import attnrt as at

    assert {name for name, why in at.backends.status(device="cpu").items() if not why} >= {"reference", "cpu"}


if __name__ == "__main__":
    print(table_rows())
