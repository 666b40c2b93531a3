# SPDX-License-Identifier: Apache-2.0
"""Trace readers and the plan command, on tiny files written here."""

from __future__ import annotations

import json

import pytest

from attnrt.errors import ArgumentError
from attnrt.scheduler import command
from attnrt.scheduler.traces import read_trace


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lengths.txt").write_text("# lengths\n100, 200 300\n\n5000 # long\n")
    (tmp_path / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04.03,3180,8\n"
    )
    rows = [
        {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 3, "input_length": 12, "output_length": 0, "hash_ids": [0]},
    ]
    (tmp_path / "mooncake.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return tmp_path


def test_three_formats(files):
    lengths = read_trace(files / "lengths.txt")
    assert lengths.kind == "lengths" and lengths.input_lens.tolist() == [100, 200, 300, 5000]
    azure = read_trace(files / "azure.csv")
    assert azure.kind == "azure"
    assert (azure.input_lens.tolist(), azure.output_lens.tolist()) == ([4808, 3180], [10, 8])
    mooncake = read_trace(str(files / "mooncake.jsonl"))
    assert mooncake.kind == "mooncake" and mooncake.hash_ids == ((0, 1), (0,))
    assert (mooncake.input_lens.tolist(), mooncake.output_lens.tolist()) == ([6758, 12], [500, 0])


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("", "path"),
        ("# nothing\n", "path"),
        ("12\nlong\n", "line 2"),
        ("-5", "line 1"),
        ("99999999999", "line 1"),
        ('{"input_length": 5}\n', "line 1"),
        ('{"input_length": 5, "output_length": 1}\n[1]\n', "line 2"),
        ('{"input_length": true, "output_length": 1}\n', "line 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,5\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,5,x\n", "line 2"),
    ],
)
def test_bad_files_name_the_line(tmp_path, text, label):
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_trace(path)
    assert caught.value.label == label


def test_command_prints_every_scheduler(files, capsys):
    for name in ("lengths.txt", "azure.csv", "mooncake.jsonl"):
        for more in ([], ["--prefill"]):
            assert command.main([str(files / name), *more]) == 0
            text = capsys.readouterr().out
            for scheduler in ("lpt", "round_robin", "one_cta_per_request"):
                assert scheduler in text


def test_command_json_trace_picture(files, capsys):
    pytest.importorskip("matplotlib")
    argv = [str(files / "lengths.txt"), "--json", "--workers", "8", "--batch", "3"]
    argv += ["--trace", str(files / "out.json"), "--picture", str(files / "out.svg")]
    assert command.main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    by_name = {row["scheduler"]: row for row in report["schedulers"]}
    assert report["batches"] == 2 and report["workers"] == 8
    assert by_name["round_robin"]["speedup"] == 1.0 and by_name["lpt"]["speedup"] > 1.5
    events = json.loads((files / "out.json").read_text())["traceEvents"]
    assert {e["tid"] for e in events} == set(range(8)) and any(e["ph"] == "X" for e in events)
    assert (files / "out.svg").read_text().startswith("<?xml")


def test_command_tells_what_is_wrong(files, capsys):
    assert command.main([str(files / "none.txt")]) == 2
    assert "path" in capsys.readouterr().err
    assert command.main([str(files / "lengths.txt"), "--machine", "abacus"]) == 2
    assert command.main([str(files / "lengths.txt"), "--batch", "0"]) == 2
    assert command.main([str(files / "lengths.txt"), "--qo-heads", "3"]) == 2
