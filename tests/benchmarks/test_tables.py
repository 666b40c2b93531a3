# SPDX-License-Identifier: Apache-2.0
"""Every table from its command line to its files: CPU backend, small shapes, a clock that lies, no peer installed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import compile_time
import decode
import harness
import mixed
import peers
import prefill
import prefix
import pytest
import report
import sparse
import specs
from shapes import Shape

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 4, "head_dim": 64, "group": "small"}


class Lying:
    rounds = 2

    def __init__(self, repeats: int = 1) -> None:
        self.repeats = repeats

    def prepare(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def turn(self, run: Any) -> tuple[float, float]:
        run()
        return 1e5, 1.5

    def kernels(self, run: Any) -> list[str]:
        run()
        return ["attnrt_decode"]

    def captured(self, run: Any) -> tuple[Any, Any]:
        return run, run()


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise ImportError(f"{name} is not installed")

    monkeypatch.setattr(specs, "BACKEND", "cpu")
    monkeypatch.setattr(specs, "DEVICE", "cpu")
    monkeypatch.setattr(peers, "installed", missing)
    monkeypatch.setattr(harness, "Clock", Lying)
    monkeypatch.setattr(harness, "Run", functools.partial(harness.Run, device="cpu"))
    monkeypatch.setattr(harness, "setting", lambda: {"commit": "abc", "device": "none", "date": "2026-11-29"})
    monkeypatch.setattr(harness, "empty_graphs", lambda clock: {"one node": 3.0, "two nodes": 5.0})


MADE = {
    "decode": (decode, "shapes", [Shape(name="a", kv=(40, 70), **SMALL)], 2),
    "prefix": (prefix, "shapes", [Shape(name="a", kv=(200,) * 3, prefix=160, **SMALL)], 2),
    "sparse": (sparse, "shapes", [Shape(name="a", kv=(64,), variant="full", per_head=2, **SMALL)], 2),
    "mixed": (mixed, "shapes", [Shape(name="a", qo=(30, 1), kv=(40, 50), **SMALL)], 2),
    "prefill": (prefill, "dense", [Shape(name="a", qo=(30,), kv=(40,), page=16, **SMALL)], 1),
}


@pytest.mark.parametrize("name", MADE)
def test_a_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, list_of, shapes, ways = MADE[name]
    monkeypatch.setattr(module, list_of, lambda: shapes)
    more = []
    if name == "prefill":
        monkeypatch.setattr(module, "paged", lambda: [])
        monkeypatch.setattr(module, "narrow", lambda: [])
        monkeypatch.setattr(module, "variants", lambda: [])
        monkeypatch.setattr("peers_dense.installed", peers.installed)
        more = ["--no-flex", "--random", "0"]
    elif name == "decode":
        more = ["--random", "0"]
    assert module.main(["--out", str(tmp_path), *more]) == 0
    about, rows = report.load(tmp_path / f"{name}.jsonl")
    assert len(rows) == ways and all(row.provider.startswith("attnrt") for row in rows)
    assert about["commit"] == "abc" and about["empty graph, µs"]["one node"] == 3.0 and "faults" not in about
    text = (tmp_path / f"{name}.md").read_text()
    assert "| a | 100000.0 |" in text and "Targets: " in text


def test_compile_only_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed, "shapes", lambda: MADE["mixed"][2])
    with pytest.raises(SystemExit) as stopped:
        mixed.main(["--compile-only", "--out", str(tmp_path)])
    assert stopped.value.code == 0 and not list(tmp_path.iterdir())


def test_compile_times_are_held_to_a_second() -> None:
    rows = [
        {"provider": "attnrt", "version": "1", "ms": 900.0, "error": 1e-3},
        {"provider": "attnrt (prefill)", "version": "1", "ms": 1100.0, "error": 1e-3},
    ]
    text = compile_time.markdown(rows, {"title": "T", "commit": "abc"})
    assert "attnrt <= 1000 ms, met" in text and "attnrt (prefill) <= 1000 ms, missed" in text
