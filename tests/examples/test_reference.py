# SPDX-License-Identifier: Apache-2.0
"""The NumPy model against transformers in float32 on the same file (recorded by record_smollm.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from attnrt.examples.generate.dense import DenseCache, greedy
from attnrt.examples.generate.tokenizer import TextStream, Tokenizer

RECORDED = json.loads((Path(__file__).parent / "smollm_greedy.json").read_text())
CASES = RECORDED["cases"]
NAMES = [str(c["prompt"])[:24] for c in CASES]


@pytest.fixture(scope="module")
def tokenizer(smollm_file):
    return Tokenizer(smollm_file)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_prompt_ids_equal(tokenizer, case):
    prompt = case["prompt"]
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
    assert ids == case["prompt_ids"]
    assert tokenizer.decode(case["generated_ids"]) == case["text"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_greedy_ids_and_logits_equal(smollm, case):
    prompt, generated = case["prompt_ids"], case["generated_ids"]
    cache = DenseCache(smollm, len(prompt) + len(generated))
    logits = cache.extend(prompt + generated[:-1], logits_from=len(prompt) - 1)
    # Each argmax being the recorded token is greedy decoding, by induction over the tokens.
    assert logits.argmax(axis=1).tolist() == generated
    np.testing.assert_allclose(logits.max(axis=1), case["best_logits"], atol=5e-4)


def test_token_by_token_is_the_same(smollm):
    case = CASES[0]
    assert greedy(smollm, case["prompt_ids"], len(case["generated_ids"])) == case["generated_ids"]


def test_stream_holds_half_characters_back(tokenizer):
    ids = tokenizer.encode("sea \N{WATER WAVE}\N{WATER WAVE} é.")
    stream = TextStream(tokenizer)
    pieces = [stream.push([i]) for i in ids]
    pieces.append(stream.push([], last=True))
    assert "".join(pieces) == "sea \N{WATER WAVE}\N{WATER WAVE} é."
    assert not any("�" in p for p in pieces)
