# SPDX-License-Identifier: Apache-2.0
"""A Llama forward pass in NumPy float32 that leaves attention to a callback.

The model knows rows of tokens and their positions, and nothing about requests, pages or plans: whoever calls it
decides where K and V go and which keys a row sees. So the paged engine and the plain dense reference run the very
same code around two different `attend` functions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .product import product
from .weights import LayerWeights, Weights

# (layer, q [rows, num_qo_heads, head_dim], k, v [rows, num_kv_heads, head_dim]) -> [rows, num_qo_heads, head_dim]
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Model:
    """The forward pass over `weights`; holds the rotation table and no other state."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.config = weights.config
        self._cos, self._sin = _rope_table(self.config.context, self.config.head_dim, self.config.rope_theta)

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, attend: Attend, logit_rows: np.ndarray
    ) -> np.ndarray:
        """Run all layers over rows of tokens.

        Parameters
        ----------
        tokens, positions : int arrays [rows]
            Token ids, and the position of each in its own sequence (below the model's context).
        attend : Attend
            Called once per layer, in order, with the rotated q and k and with v.
        logit_rows : int array [n]
            The rows whose next token is wanted.

        Returns
        -------
        float32 [n, vocab]
        """
        cos, sin = self._cos[positions][:, None, :], self._sin[positions][:, None, :]
        x = self.weights.embedding[tokens]
        for i, layer in enumerate(self.weights.layers):
            x = self._attention(i, layer, x, (cos, sin), attend)
            gate_up = product(_rms_norm(x, layer.ffn_norm, self.config.rms_eps), layer.gate_up)
            x += product(_swiglu(gate_up), layer.down)
        x = _rms_norm(x[logit_rows], self.weights.final_norm, self.config.rms_eps)
        return product(x, self.weights.head.T)

    def _attention(
        self,
        i: int,
        layer: LayerWeights,
        x: np.ndarray,
        rotation: tuple[np.ndarray, np.ndarray],
        attend: Attend,
    ) -> np.ndarray:
        cfg = self.config
        qkv = product(_rms_norm(x, layer.attn_norm, cfg.rms_eps), layer.qkv)
        heads = qkv.reshape(len(x), cfg.num_qo_heads + 2 * cfg.num_kv_heads, cfg.head_dim)
        turned = cfg.num_qo_heads + cfg.num_kv_heads
        _rotate(heads[:, :turned], *rotation)
        out = attend(i, heads[:, : cfg.num_qo_heads], heads[:, cfg.num_qo_heads : turned], heads[:, turned:])
        x += product(out.reshape(len(x), -1), layer.out)
        return x


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x * (1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))) * weight


def _swiglu(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):  # exp(-gate) may overflow to inf, and gate / inf is the right zero
        return gate / (1.0 + np.exp(-gate)) * up


def _rope_table(context: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [context, head_dim / 2]; the angles are rounded to float32 as the original model's are."""
    inverse = 1.0 / np.power(
        np.float32(theta), np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    )
    angles = np.outer(np.arange(context, dtype=np.float32), inverse.astype(np.float32))
    return np.cos(angles), np.sin(angles)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Turn each pair (i, i + head_dim / 2) of `x` [rows, heads, head_dim] in place by its row's angles."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    turned = a * cos - b * sin
    b *= cos
    b += a * sin
    a[...] = turned
