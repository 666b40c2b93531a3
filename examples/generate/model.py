# SPDX-License-Identifier: Apache-2.0
"""A Llama forward pass in float32, over anybody's arrays, that leaves attention to a callback.

The model knows rows of tokens and their positions, and nothing about requests, pages or plans: whoever calls it
decides where K and V go and which keys a row sees. So the paged engine and the plain dense reference run the very
same code around two different `attend` functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import HostArrays
from .weights import LayerWeights, Weights, placed

# (layer, q [rows, num_qo_heads, head_dim], k, v [rows, num_kv_heads, head_dim]) -> [rows, num_qo_heads, head_dim]
Attend = Callable[[int, Any, Any, Any], Any]


class Model:
    """The forward pass over `weights` (host arrays); holds the rotation table and no other state.

    Parameters
    ----------
    arrays : HostArrays, optional
        What it computes with; None: NumPy.
    """

    def __init__(self, weights: Weights, arrays: HostArrays | None = None) -> None:
        self.arrays = arrays or HostArrays()
        self._host = weights
        self.weights = placed(weights, self.arrays.put)
        self.config = weights.config
        table = _rope_table(self.config.context, self.config.head_dim, self.config.rope_theta)
        self._cos, self._sin = (self.arrays.put(x) for x in table)

    def on_host(self) -> Model:
        """Return the same model in NumPy."""
        return self if self.arrays.xp is np else Model(self._host)

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, attend: Attend, logit_rows: np.ndarray
    ) -> np.ndarray:
        """Run all layers over rows of tokens.

        Parameters
        ----------
        tokens, positions : int arrays [rows]
            Token ids, and the position of each in its own sequence (below the model's context).
        attend : Attend
            Called once per layer, in order, with the rotated q and k and with v, all arrays of the model's own kind.
        logit_rows : int array [n]
            The rows whose next token is wanted.

        Returns
        -------
        float32 [n, vocab], on the host
        """
        arrays, eps = self.arrays, self.config.rms_eps
        at = arrays.put(positions)
        cos, sin = self._cos[at][:, None, :], self._sin[at][:, None, :]
        x = self.weights.embedding[arrays.put(tokens)]
        for i, layer in enumerate(self.weights.layers):
            x = self._attention(i, layer, x, (cos, sin), attend)
            gate_up = arrays.product(_rms_norm(arrays.xp, x, layer.ffn_norm, eps), layer.gate_up)
            x += arrays.product(_swiglu(arrays.xp, gate_up), layer.down)
        x = _rms_norm(arrays.xp, x[arrays.put(logit_rows)], self.weights.final_norm, eps)
        return arrays.get(arrays.product(x, self.weights.head.T))

    def _attention(
        self,
        i: int,
        layer: LayerWeights,
        x: Any,
        rotation: tuple[Any, Any],
        attend: Attend,
    ) -> Any:
        cfg, arrays = self.config, self.arrays
        qkv = arrays.product(_rms_norm(arrays.xp, x, layer.attn_norm, cfg.rms_eps), layer.qkv)
        heads = qkv.reshape(len(x), cfg.num_qo_heads + 2 * cfg.num_kv_heads, cfg.head_dim)
        turned = cfg.num_qo_heads + cfg.num_kv_heads
        _rotate(heads[:, :turned], *rotation)
        out = attend(i, heads[:, : cfg.num_qo_heads], heads[:, cfg.num_qo_heads : turned], heads[:, turned:])
        x += arrays.product(out.reshape(len(x), -1), layer.out)
        return x


def _rms_norm(xp: Any, x: Any, weight: Any, eps: float) -> Any:
    return x * (1.0 / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)) * weight


def _swiglu(xp: Any, gate_up: Any) -> Any:
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    with np.errstate(over="ignore"):  # exp(-gate) may overflow to inf, and gate / inf is the right zero
        return gate / (1.0 + xp.exp(-gate)) * up


def _rope_table(context: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [context, head_dim / 2]; the angles are rounded to float32 as the original model's are."""
    inverse = 1.0 / np.power(
        np.float32(theta), np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    )
    angles = np.outer(np.arange(context, dtype=np.float32), inverse.astype(np.float32))
    return np.cos(angles), np.sin(angles)


def _rotate(x: Any, cos: Any, sin: Any) -> None:
    """Turn each pair (i, i + head_dim / 2) of `x` [rows, heads, head_dim] in place by its row's angles."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    turned = a * cos - b * sin
    b *= cos
    b += a * sin
    a[...] = turned
