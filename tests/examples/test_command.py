# SPDX-License-Identifier: Apache-2.0
"""`attnrt generate` with the real model: transformers' ids through the whole engine, and the command's own manners."""

import ast
import json
import sys
from pathlib import Path

import pytest

from attnrt.examples import generate
from attnrt.examples.generate import main
from attnrt.examples.generate.prompts import read_prompts

RECORDED = json.loads((Path(__file__).parent / "smollm_greedy.json").read_text())


def run_json(capsys, *argv):
    status = main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def recorded_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    key = {str: "prompt", list: "messages"}
    rows = [{key[type(c["prompt"])]: c["prompt"]} for c in RECORDED["cases"]]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.usefixtures("smollm_file")
@pytest.mark.parametrize(
    "options", [("--compare",), ("--draft", "--page-size", "5", "--chunk", "200")], ids=["compare", "draft"]
)
def test_batched_generation_equals_transformers(capsys, recorded_prompts, options):
    limit = str(RECORDED["made"]["max_tokens"])
    status, found = run_json(capsys, "--prompts", recorded_prompts, "--max-tokens", limit, *options)
    assert status == 0
    assert [r["ids"] for r in found["requests"]] == [c["generated_ids"] for c in RECORDED["cases"]]
    assert found["speed"]["mixed_steps"] > 0
    assert found["attention"]["runs"] == 30 * found["speed"]["steps"]
    if "--compare" in options:
        assert found["compare"]["equal"] and found["compare"]["max_logit_difference"] < 1e-3
    else:
        assert found["draft"]["accepted"] > 0


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--draft", "--streaming", "4,60"], "exclude each other"),
        (["--temperature", "-1"], "--temperature"),
        (["--model", "no_such_file.gguf"], "no_such_file.gguf"),
        (["--model", __file__], "not a GGUF file"),
        (["--prompts", "no_such_file.txt"], "no_such_file.txt"),
        (["--arrays", "cupy"], "--backend nvrtc or nvcc"),
        (["--arrays", "torch", "--backend", "no_such_backend"], "no_such_backend"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, argv, words):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--page-size", "0"],
        ["--streaming", "4"],
        ["--streaming", "-1,5"],
        ["--dtype", "int8"],
        ["--arrays", "jax"],
    ],
)
def test_bad_options_are_refused_by_the_parser(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    capsys.readouterr()


def test_prompt_files(tmp_path):
    plain = tmp_path / "a.txt"
    plain.write_text("One?\n\n  Two  \n")
    assert [p.messages[-1]["content"] for p in read_prompts(plain, "Be kind.")] == ["One?", "Two"]
    assert read_prompts(plain, "Be kind.")[0].messages[0] == {"role": "system", "content": "Be kind."}
    lines = tmp_path / "b.jsonl"
    lines.write_text(
        '"Hi"\n{"prompt": "1, 2,", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    hi, raw, chat = read_prompts(lines)
    assert (hi.messages[0]["content"], raw.raw, raw.max_tokens, chat.title) == ("Hi", "1, 2,", 3, "x")


@pytest.mark.parametrize(
    "line",
    ['{"text": "x"}', '{"prompt": 3}', '{"messages": []}', '{"messages": [{"role": "user"}]}', "7", "{",
     '{"prompt": "x", "max_tokens": 0}', '{"prompt": "x", "messages": []}'],
)  # fmt: skip
def test_a_bad_line_of_a_prompt_file_is_named(tmp_path, line):
    path = tmp_path / "b.jsonl"
    path.write_text(f'"Hi"\n{line}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(path)


def imports(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] not in sys.stdlib_module_names}


def test_the_demo_uses_the_public_surface_and_one_file_knows_frameworks():
    folder = Path(generate.__file__).parent
    files = {path.name: imports(path) for path in folder.glob("*.py")}
    assert files.pop("arrays.py") == {"attnrt", "attnrt.memory", "numpy", "ml_dtypes", "torch", "cupy"}
    used = {name.split(".")[0] for found in files.values() for name in found}
    assert used == {"attnrt", "numpy", "gguf", "tokenizers", "rich", "ml_dtypes"}
    assert {name for found in files.values() for name in found if name.startswith("attnrt")} == {"attnrt"}
