# SPDX-License-Identifier: Apache-2.0
"""Attention over CuPy arrays, on CuPy's current stream, nothing copied.

python -m attnrt.examples.cupy_decode
"""

from __future__ import annotations

import cupy

import attnrt as at


def main() -> None:
    spec = at.AttentionSpec(
        num_qo_heads=8, num_kv_heads=2, head_dim=64, q_dtype="float16", variant=at.variants.causal()
    )
    attn = at.Attention(spec, device="cuda")
    index = at.formats.paged([0, 1, 4], [0, 3, 4], [7, 2, 5, 0], [40, 16], page_size=16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        q = cupy.random.standard_normal((4, 8, 64), dtype=cupy.float32).astype(cupy.float16)
        kv = tuple(
            cupy.random.standard_normal((8, 16, 2, 64), dtype=cupy.float32).astype(cupy.float16) for _ in "kv"
        )
        attn.plan(index, stream=stream)
        out, lse = attn.run(q, kv, return_lse=True)
        again = cupy.empty_like(out)
        attn.run(q, kv, out=again)
        same = bool((out == again).all())
    print(
        f"{out.dtype} {out.shape}, lse {lse.shape}, cupy: {isinstance(out, cupy.ndarray)}; the same twice: {same}"
    )


if __name__ == "__main__":
    main()
