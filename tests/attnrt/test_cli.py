# SPDX-License-Identifier: Apache-2.0
"""The command line: dispatch, exit codes, JSON everywhere, and that a wrong result is not timed."""

from __future__ import annotations

import json

import numpy as np
import pytest

import attnrt as at
from attnrt import bench, cli, doctor, testing


def test_help_and_version(capsys):
    assert cli.main([]) == 0 and cli.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS) and at.__version__ in out


def test_an_unknown_command_fails(capsys):
    assert cli.main(["benhc"]) == 2
    assert "benhc" in capsys.readouterr().err


def test_doctor_says_why_of_every_backend(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["self test"]["state"] == "ok"
    for name in ("backend reference", "backend cpu", "backend nvrtc", "backend nvcc"):
        assert found[name]["state"] in ("ok", "missing") and found[name]["text"]


def test_doctor_finds_wrong_numbers(monkeypatch):
    monkeypatch.setattr(at, "attention", lambda q, *_, **__: np.zeros_like(q))
    assert doctor._run().state == "broken"


def test_bench_checks_and_times(capsys):
    args = [
        "--batch",
        "2",
        "--kv-len",
        "70",
        "--qo-heads",
        "4",
        "--kv-heads",
        "2",
        "--head-dim",
        "32",
        "--repeats",
        "2",
    ]
    assert cli.main(["bench", "--json", "--backend", "reference", *args]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["backend"] == "reference" and row["run_us"] > 0 and row["worst"] <= 1


def test_bench_takes_a_saved_case(tmp_path, capsys):
    spec = at.AttentionSpec(
        num_qo_heads=2, num_kv_heads=1, head_dim=16, q_dtype="float32", variant=at.variants.causal()
    )
    path = str(tmp_path / "case.npz")
    testing.save_case(path, testing.make_case(spec, [3], [9]))
    assert cli.main(["bench", "--case", path, "--backend", "reference", "--repeats", "1"]) == 0
    assert "reference" in capsys.readouterr().out


def test_bench_refuses_a_wrong_result(monkeypatch, capsys):
    right = testing.run_batch

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        result.out[0] += 1
        return result

    monkeypatch.setattr(testing, "run_batch", wrong)
    args = ["--batch", "1", "--kv-len", "20", "--head-dim", "16", "--repeats", "1", "--backend", "reference"]
    assert bench.main(args) == 1
    assert "out is wrong at row 0" in capsys.readouterr().err


def test_bench_names_what_is_wrong(capsys):
    assert bench.main(["--head-dim", "0"]) == 2
    assert "head_dim" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--page-size", "0"],
        ["--repeats", "0"],
        ["--batch", "-1"],
        ["--kv-len", "-5"],
        ["--case", "README.md"],
        ["--dtype", "int8"],
    ],
)
def test_bench_refuses_what_no_batch_has(wrong, capsys):
    assert bench.main(wrong) == 2
    assert "attnrt bench: " in capsys.readouterr().err


def test_doctor_reports_a_bad_setting(monkeypatch, capsys):
    def refuse():
        raise at.ArgumentError("ATTNRT_LOG", "must be one of ...", "loud")

    monkeypatch.setattr(doctor, "examine", refuse)
    assert doctor.main([]) == 1
    assert "broken" in capsys.readouterr().out


def test_plan_names_a_place_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("100\n200\n")
    assert cli.main(["plan", str(tmp_path / "lengths.txt"), "--trace", "/nonexistent/a.json"]) == 2
    assert "/nonexistent" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"attnrt {command}" in capsys.readouterr().out
