# SPDX-License-Identifier: Apache-2.0
"""What to ask: the prompts of the demo, and readers for the user's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tokenizer import Tokenizer

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: a conversation for the chat template, or raw text to go on from. `title` is what the screen shows."""

    title: str
    messages: Messages | None = None
    raw: str | None = None
    max_tokens: int | None = None

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Return the prompt's ids."""
        return tokenizer.encode(self.raw) if self.raw is not None else tokenizer.chat(self.messages or [])


def question(text: str, system: str | None = None) -> Prompt:
    """Return a conversation of one user message, after a system message if there is one."""
    first = [{"role": "system", "content": system}] if system else []
    return Prompt(title=_title(text), messages=[*first, {"role": "user", "content": text}])


def completion(text: str) -> Prompt:
    """Return raw text that the model goes on from, without the chat template."""
    return Prompt(title=_title(text), raw=text)


def read_prompts(path: str | Path, system: str | None = None) -> list[Prompt]:
    """Read prompts from a file: one user message per line, or JSON lines if its name ends in .jsonl.

    A JSON line is a string (a user message) or an object with "messages" (a conversation) or "prompt" (raw text), and
    perhaps "max_tokens". ValueError names the line that is neither.
    """
    prompts = []
    as_json = Path(path).suffix == ".jsonl"
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(
                _from_json(json.loads(line), system) if as_json else question(line.strip(), system)
            )
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def _from_json(value: Any, system: str | None) -> Prompt:
    if isinstance(value, str):
        return question(value, system)
    if not isinstance(value, dict) or ("messages" in value) == ("prompt" in value):
        raise ValueError('expected a string, or an object with either "messages" or "prompt"')
    limit = value.get("max_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ValueError(f'"max_tokens" must be an integer of at least 1, not {limit!r}')
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise ValueError(f'"prompt" must be a string, not {value["prompt"]!r}')
        return Prompt(title=_title(value["prompt"]), raw=value["prompt"], max_tokens=limit)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
        raise ValueError('"messages" must be a list of objects with the strings "role" and "content"')
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    return Prompt(title=_title(messages[-1]["content"]), messages=messages, max_tokens=limit)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(k), str) for k in ("role", "content"))


def _title(text: str) -> str:
    return " ".join(text.split())


_GUIDE = (
    "You help the visitors of a small harbour museum. Facts you may use: the lighthouse on the north pier was built in 1861"
    " and is 31 metres tall. Its lamp burned whale oil first, then gas from 1889, and has been electric since 1934. The museum"
    " opens at ten in the morning and closes at five, every day but Monday. A ticket costs six euros, and three for children."
    " The steam tug Clara lies at the quay and sails on Sundays in summer. Dogs are welcome on the pier but not on the tug."
    " The café serves fish soup at noon. Answer in one or two short sentences."
)
_VISITORS = (
    "How tall is the lighthouse?",
    "When does the museum open?",
    "What does a ticket cost for a child?",
    "May I take my dog on the steam tug?",
)


def demo_prompts() -> Sequence[Prompt]:
    """Return ten prompts of 5 to 230 tokens; four share a long system message."""
    return [
        question("Write a short poem about rain on a tin roof."),
        *(question(text, _GUIDE) for text in _VISITORS[:2]),
        completion("The capital of France is"),
        question("Explain in simple words why the sky is blue."),
        question("Write a Python function that checks whether a number is prime."),
        *(question(text, _GUIDE) for text in _VISITORS[2:]),
        question("Give me three ideas for a dinner with potatoes."),
        completion("One, two, three, four, one, two, three, four, one, two, three,"),
    ]
