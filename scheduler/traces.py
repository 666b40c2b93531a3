# SPDX-License-Identifier: Apache-2.0
"""Readers of recorded request lengths: a list, an Azure inference trace (CSV), a Mooncake trace (JSON lines).

Azure files have the columns TIMESTAMP, ContextTokens, GeneratedTokens; Mooncake files have one object a line with
input_length, output_length and hash_ids (equal ids name equal 512-token prefix blocks). A list has one length a line, or
several separated by blanks or commas; ``#`` begins a comment.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnrt.errors import ArgumentError

__all__ = ["Trace", "read_trace"]

_AZURE = ("ContextTokens", "GeneratedTokens")
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in order of arrival.

    Attributes
    ----------
    kind : {"lengths", "azure", "mooncake"}
    input_lens : int64 [requests]
        Tokens of each prompt (of a list: the length itself).
    output_lens : int64 [requests]
        Tokens generated (of a list: 0).
    hash_ids : tuple of tuple of int
        Prefix blocks of each request; empty where the format has none.
    """

    kind: str
    input_lens: np.ndarray
    output_lens: np.ndarray
    hash_ids: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.input_lens)


def read_trace(path: str | Path) -> Trace:
    """Read a trace; the format is found from the contents.

    Raises
    ------
    ArgumentError
        No such file, no request in it, or a line that is none of the three formats; the line is named.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("path", "must be a readable text file", f"{path}: {error}") from None
    lines = text.splitlines()
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("{"):
        trace = _mooncake(lines)
    elif all(name in first for name in _AZURE):
        trace = _azure(lines)
    else:
        trace = _lengths(lines)
    if not len(trace):
        raise ArgumentError("path", "must hold at least one request", str(path))
    return trace


def _length(value: object, line: int) -> int:
    try:
        number = int(value) if isinstance(value, int) else int(str(value).strip())
    except ValueError:
        number = -1
    if isinstance(value, bool) or not 0 <= number <= _INT32_MAX:
        raise ArgumentError(f"line {line}", f"must hold lengths in [0, {_INT32_MAX}]", repr(value))
    return number


def _mooncake(lines: list[str]) -> Trace:
    inputs, outputs, hashes = [], [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            pair = entry["input_length"], entry["output_length"]
            ids = tuple(int(i) for i in entry.get("hash_ids", ()))
        except (ValueError, TypeError, KeyError, AttributeError):
            rule = "must be a JSON object with input_length and output_length"
            raise ArgumentError(f"line {number}", rule, line[:80]) from None
        inputs.append(_length(pair[0], number))
        outputs.append(_length(pair[1], number))
        hashes.append(ids)
    return Trace(
        kind="mooncake", input_lens=_array(inputs), output_lens=_array(outputs), hash_ids=tuple(hashes)
    )


def _azure(lines: list[str]) -> Trace:
    inputs, outputs = [], []
    reader = csv.DictReader(line for line in lines if line.strip())
    for row in reader:
        number = reader.line_num
        if row[_AZURE[0]] is None or row[_AZURE[1]] is None:
            raise ArgumentError(
                f"line {number}", "must have all columns of the header", ",".join(map(str, row.values()))
            )
        inputs.append(_length(row[_AZURE[0]], number))
        outputs.append(_length(row[_AZURE[1]], number))
    return Trace(kind="azure", input_lens=_array(inputs), output_lens=_array(outputs))


def _lengths(lines: list[str]) -> Trace:
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        found += [_length(word, number) for word in words]
    return Trace(kind="lengths", input_lens=_array(found), output_lens=_array([0] * len(found)))


def _array(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int64)
