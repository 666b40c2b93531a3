# SPDX-License-Identifier: Apache-2.0
"""The weights of a Llama-architecture model, arranged for row-major matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .gguf_file import GGUFFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a Llama-architecture model; sizes in elements, `context` in tokens."""

    num_layers: int
    hidden: int
    ffn: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer, float32; matrices are [in, out] and contiguous, so that `x @ w` streams through memory once.

    attn_norm, ffn_norm [hidden]; qkv [hidden, (num_qo_heads + 2 * num_kv_heads) * head_dim], Q then K then V, each
    head's dimensions in halves (i pairs with i + head_dim / 2 under the rotation); out [num_qo_heads * head_dim, hidden];
    gate_up [hidden, 2 * ffn], gate then up; down [ffn, hidden].
    """

    attn_norm: np.ndarray
    qkv: np.ndarray
    out: np.ndarray
    ffn_norm: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model, float32: embedding [vocab, hidden], head [vocab, hidden] (the same array if tied), final_norm [hidden]."""

    config: ModelConfig
    embedding: np.ndarray
    head: np.ndarray
    layers: tuple[LayerWeights, ...]
    final_norm: np.ndarray


def read_config(file: GGUFFile) -> ModelConfig:
    """Read the sizes from the header of a GGUF file of architecture "llama"; ValueError for any other."""
    fields = file.fields
    if fields.get("general.architecture") != "llama":
        raise ValueError(f"architecture {fields.get('general.architecture')!r}: only 'llama' is known here")
    if "rope_freqs.weight" in file.tensors or "llama.rope.scaling.type" in fields:
        raise ValueError("the model scales its rotations, which is not known here")
    heads, hidden = file.field("llama.attention.head_count"), file.field("llama.embedding_length")
    return ModelConfig(
        num_layers=file.field("llama.block_count"),
        hidden=hidden,
        ffn=file.field("llama.feed_forward_length"),
        num_qo_heads=heads,
        num_kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.attention.key_length", hidden // heads),
        vocab=len(file.field("tokenizer.ggml.tokens")),
        context=file.field("llama.context_length"),
        rope_theta=fields.get("llama.rope.freq_base", 10000.0),
        rms_eps=file.field("llama.attention.layer_norm_rms_epsilon"),
    )


def placed(weights: Weights, put: Callable[[np.ndarray], Any]) -> Weights:
    """Return the model with every array replaced by what `put` makes of it; tied arrays stay one."""
    embedding = put(weights.embedding)
    return Weights(
        config=weights.config,
        embedding=embedding,
        head=embedding if weights.head is weights.embedding else put(weights.head),
        layers=tuple(
            LayerWeights(**{f.name: put(getattr(layer, f.name)) for f in fields(LayerWeights)})
            for layer in weights.layers
        ),
        final_norm=put(weights.final_norm),
    )


def load_weights(file: GGUFFile) -> Weights:
    """Decode all tensors of `file` to float32 (half a gigabyte for 135M parameters, about two seconds)."""
    config = read_config(file)
    embedding = file.array("token_embd.weight")
    return Weights(
        config=config,
        embedding=embedding,
        head=file.array("output.weight") if "output.weight" in file.tensors else embedding,
        layers=tuple(_load_layer(file, config, i) for i in range(config.num_layers)),
        final_norm=file.array("output_norm.weight"),
    )


def _load_layer(file: GGUFFile, config: ModelConfig, layer: int) -> LayerWeights:
    def get(name: str) -> np.ndarray:
        return file.array(f"blk.{layer}.{name}.weight")

    q = halves_from_pairs(get("attn_q"), config.num_qo_heads)
    k = halves_from_pairs(get("attn_k"), config.num_kv_heads)
    return LayerWeights(
        attn_norm=get("attn_norm"),
        qkv=_fuse(q, k, get("attn_v")),
        out=_fuse(get("attn_output")),
        ffn_norm=get("ffn_norm"),
        gate_up=_fuse(get("ffn_gate"), get("ffn_up")),
        down=_fuse(get("ffn_down")),
    )


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of Wq or Wk [heads * head_dim, in] from GGUF's neighbouring pairs to halves.

    GGUF stores the rows so that the rotation turns (2i, 2i + 1) together; the model was trained with (i, i + d/2).
    The same reordering of Q and K leaves every q.k as it is; it is undone so that the arithmetic is the original's.
    """
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def _fuse(*parts: np.ndarray) -> np.ndarray:
    """Stack [out, in] matrices along `out` and transpose to a contiguous [in, out]."""
    out = np.empty((parts[0].shape[1], sum(p.shape[0] for p in parts)), np.float32)
    at = 0
    for part in parts:
        out[:, at : at + part.shape[0]] = part.T
        at += part.shape[0]
    return out
