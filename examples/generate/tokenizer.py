# SPDX-License-Identifier: Apache-2.0
"""The byte-level BPE tokenizer and chat template of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .gguf_file import GGUFFile
from .template import render

_CONTROL = 3  # GGUF token type of <|im_start|> and its like


class Tokenizer:
    """Text to ids and back.

    Attributes
    ----------
    eos : int
        The id that ends an answer.
    """

    def __init__(self, file: GGUFFile) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind = (file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ValueError(
                f"tokenizer {kind}: only byte-level BPE split like SmolLM's, ('gpt2', 'smollm'), is known here"
            )
        tokens = file.field("tokenizer.ggml.tokens")
        merges = [tuple(m.split(" ", 1)) for m in file.field("tokenizer.ggml.merges")]
        self._bpe = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        # "smollm" splits every digit off before GPT-2's pattern.
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._bpe.decoder = decoders.ByteLevel()
        kinds = file.field("tokenizer.ggml.token_type")
        self._bpe.add_special_tokens(
            [
                AddedToken(t, special=True, normalized=False)
                for t, k in zip(tokens, kinds, strict=True)
                if k == _CONTROL
            ]
        )
        self._template = file.field("tokenizer.chat_template")
        self.eos: int = file.field("tokenizer.ggml.eos_token_id")

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; the names of control tokens in it become those tokens."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without control tokens; half a character at the end reads as U+FFFD."""
        return self._bpe.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation [{"role", "content"}, ...] with the answer opened, by the file's template."""
        text = render(self._template, {"messages": messages, "add_generation_prompt": True})
        return self.encode(text)


class TextStream:
    """Turns a growing list of ids into pieces of text, holding back bytes that are not yet a whole character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self.text = ""

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Add `ids` and return the new text."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        if not last:
            text = text.rstrip("�")
        new = text[len(self.text) :]
        self.text += new
        return new
