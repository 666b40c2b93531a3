# SPDX-License-Identifier: Apache-2.0
"""Ratios, targets and files, on times that are made up."""

from __future__ import annotations

import json
import math

import pytest
import report
import targets


def row(case: str, provider: str, us: float, **more: object) -> report.Row:
    fields = {"version": "1", "nbytes": 4_000_000, "flops": 8_000_000, "error": 1e-3, "eager_us": us + 5}
    fields |= {"ghz": 1.75, "eager_ghz": 1.5}
    return report.Row(case=case, provider=provider, us=us, **{**fields, **more})


@pytest.fixture
def rows() -> list[report.Row]:
    return [
        row("a", "attnrt", 10.0, kernels=["attnrt_decode"]),
        row("a", "attnrt (run)", 9.0),
        row("a", "fast", 15.0),
        row("a", "slow", 20.0, note="no graph"),
        row("b", "attnrt", 8.0, error=4e-3),
        row("b", "fast", 4.0, error=2e-3),
        row("c", "attnrt", 1.0, fallback=True, kernels=["attnrt_attend"]),
        row("c", "fast", 2.0),
        row("d", "attnrt", 3.0),
    ]


def test_ratios(rows: list[report.Row]) -> None:
    found = report.Found(rows)
    assert found.ratio("a") == 1.5 and found.ratio("a", "slow") == 2.0 and found.ratio("b") == 0.5
    assert math.isnan(found.ratio("c")), "a fallback counts for nothing"
    assert math.isnan(found.ratio("d")), "no peer"
    assert found.ratios("abcd") == [1.5, 0.5] and found.worst("abcd") == (0.5, "b")
    assert report.geomean([1.5, 0.5]) == pytest.approx(math.sqrt(0.75)) and math.isnan(report.geomean([]))
    assert found.tb_s("a") == pytest.approx(0.4) and found.tflops("a") == pytest.approx(0.8)


def test_best_peer_is_never_a_way_to_call_us(rows: list[report.Row]) -> None:
    best = report.Found(rows).best_peer("a")
    assert best is not None and best.provider == "fast"


@pytest.mark.parametrize(
    ("target", "value", "verdict"),
    [
        (targets.time("a", 10), 10.0, "met"),
        (targets.time("a", 9.9), 10.0, "missed"),
        (targets.time("c", 9), math.nan, "not measured"),
        (targets.rate("a", 0.4), 0.4, "met"),
        (targets.tflops("a", 0.9), 0.8, "missed"),
        (targets.ratio("b", 0.5), 0.5, "met"),
        (targets.ratio("b", 0.5, "nobody"), math.nan, "not measured"),
        (targets.ratio_mean("g", ["a", "b", "c"], 0.8), math.sqrt(0.75), "met"),
        (targets.ratio_worst("g", ["a", "b", "c"], 0.6), 0.5, "missed"),
        (targets.against("a", "b", 0.95), 0.8, "missed"),
        (targets.ratio("a", 1.7, "", "attnrt (run)"), 15 / 9, "missed"),
        (targets.against("a", "a", 0.9, "us", ("attnrt", "attnrt (run)")), 0.9, "met"),
        (targets.mode_cost(["a", "b"])[1], 10 / 9, "missed"),
        (targets.accuracy(["a", "b", "c"], "fast"), 2.0, "missed"),
    ],
)
def test_targets(rows: list[report.Row], target: report.Target, value: float, verdict: str) -> None:
    found, said = target.verdict(report.Found(rows))
    assert said == verdict and found == pytest.approx(value, nan_ok=True)


def test_summary_counts_and_names_the_worst(rows: list[report.Row]) -> None:
    text = report.summary(
        rows, [targets.time("a", 10), targets.time("b", 1), targets.time("z", 1)], {"g": "abc"}
    )
    assert "Targets: 1 met, 1 missed, 1 not measured." in text
    assert "| g | 2 | 0.866 | 0.500 | b |" in text
    assert "| attnrt | 4 | 4.00e-03 |" in text


def test_table_marks_fallbacks_and_eager_rows(rows: list[report.Row]) -> None:
    lines = report.table(rows).splitlines()
    widths = {line.count("|") for line in lines if line.startswith("|") and "\\*" not in line}
    assert len(widths) == 1, "every line has every column"
    a, c = (next(line for line in lines if line.startswith(f"| {case} |")) for case in "ac")
    assert "| 15.0 | 1.75 |" in a, "our eager time and clock"
    assert "20.0 (eager)" in a and "| 1.50 |" in a and "attnrt_decode" in a
    assert "1.0*" in c and "| 2.00* |" in c and lines[-1].endswith("counts for nothing")


def test_saved_rows_come_back(rows: list[report.Row], tmp_path) -> None:
    pytest.importorskip("matplotlib")
    about = {"title": "T", "commit": "abc", "device": "none", "date": "2026-11-29"}
    text = report.save(tmp_path, "x", rows, about, targets=[targets.time("a", 10)], groups={"g": ["a"]})
    assert (tmp_path / "x.md").read_text() == text and text.startswith("# T\n\n- commit: abc\n")
    assert "<svg" in (tmp_path / "x.svg").read_text() and "x.svg" in text
    setting, back = report.load(tmp_path / "x.jsonl")
    assert setting == about and back == rows
    assert json.loads((tmp_path / "x.jsonl").read_text().splitlines()[1])["tb_s"] == 0.4


def test_nothing_measured_is_a_table_too(tmp_path) -> None:
    text = report.save(tmp_path, "x", [], {"title": "T"}, targets=[targets.time("a", 1)], groups={"g": ["a"]})
    assert "1 not measured" in text and not (tmp_path / "x.svg").exists()
