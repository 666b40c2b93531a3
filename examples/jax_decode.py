# SPDX-License-Identifier: Apache-2.0
"""Attention over JAX arrays, JAX's functional way: results are returned, nothing of the caller's is written.

    python -m attnrt.examples.jax_decode

Runs where JAX's arrays are, on a GPU or on the CPU. JAX itself updates the cache (``.at[].set``): its arrays never change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import attnrt as at


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    spec = at.AttentionSpec(
        num_qo_heads=8, num_kv_heads=2, head_dim=64, q_dtype="float16", variant=at.variants.causal()
    )
    q = jax.random.normal(keys[0], (4, 8, 64), jnp.float16)
    k, v = (jax.random.normal(key, (8, 16, 2, 64), jnp.float16) for key in keys[1:3])
    device = "cuda" if next(iter(q.devices())).platform in ("gpu", "cuda") else "cpu"
    attn = at.Attention(spec, device=device)
    attn.plan(at.formats.paged([0, 1, 4], [0, 3, 4], [7, 2, 5, 0], [40, 16], page_size=16))
    out, lse = attn.run(q, (k, v), return_lse=True)
    k = k.at[5, 7].set(
        jax.random.normal(keys[3], (2, 64), jnp.float16)
    )  # the last key of request 0: page 5, token 7
    changed = attn.run(q, (k, v))
    rows = jnp.any(changed != out, axis=(1, 2))
    print(
        f"{out.dtype} {out.shape} on {device}, lse {lse.shape}, jax: {isinstance(out, jax.Array)}; changed: {rows.tolist()}"
    )


if __name__ == "__main__":
    main()
