# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the demo's tests: the real model's file, loaded once, and a small random model."""

import numpy as np
import pytest

from attnrt.examples.generate.gguf_file import GGUFFile, default_path
from attnrt.examples.generate.model import Model
from attnrt.examples.generate.weights import LayerWeights, ModelConfig, Weights, load_weights


@pytest.fixture(scope="session")
def smollm_file():
    pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    try:
        return GGUFFile(default_path())
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm(smollm_file):
    return Model(load_weights(smollm_file))


@pytest.fixture(scope="session")
def tiny():
    """A random model of two layers whose greedy text does not settle into one token."""
    return Model(random_weights(head_dim=8, hidden=48))


@pytest.fixture(scope="session")
def tiny_64():
    """The same with heads of 64, as GPUs have kernels for."""
    return Model(random_weights(head_dim=64, hidden=96))


def random_weights(head_dim, hidden):
    """Weights of a two-layer model."""
    cfg = ModelConfig(
        num_layers=2, hidden=hidden, ffn=64, num_qo_heads=6, num_kv_heads=2, head_dim=head_dim, vocab=61, context=512,
        rope_theta=1e4, rms_eps=1e-5,
    )  # fmt: skip
    rng = np.random.default_rng(7)

    def matrix(*shape):
        return (rng.standard_normal(shape) * (1.5 / np.sqrt(shape[0]))).astype(np.float32)

    def layer():
        width = (cfg.num_qo_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
        return LayerWeights(
            attn_norm=np.ones(cfg.hidden, np.float32),
            qkv=matrix(cfg.hidden, width) * 2,
            out=matrix(cfg.num_qo_heads * cfg.head_dim, cfg.hidden) * 3,
            ffn_norm=np.ones(cfg.hidden, np.float32),
            gate_up=matrix(cfg.hidden, 2 * cfg.ffn),
            down=matrix(cfg.ffn, cfg.hidden),
        )

    layers = tuple(layer() for _ in range(cfg.num_layers))
    embedding, head = matrix(cfg.vocab, cfg.hidden), matrix(cfg.vocab, cfg.hidden)
    norm = np.ones(cfg.hidden, np.float32)
    return Weights(config=cfg, embedding=embedding, head=head, layers=layers, final_norm=norm)
