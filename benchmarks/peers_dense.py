# SPDX-License-Identifier: Apache-2.0
"""Libraries that prefill over contiguous K and V is compared with: FlashAttention-3, torch SDPA, FlexAttention, FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cases import Case, slopes
from harness import Absent, Ready
from peers import FlashInfer, installed, workspace
from shapes import CAP, THETA, WINDOW, Shape

__all__ = ["FlashAttention3", "FlashInferBlocks", "FlashInferRagged", "Flex", "Sdpa"]


def square(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as [requests, tokens, heads, dim]; Absent unless they are contiguous and of one length."""
    if case.page or len(set(case.shape.kv)) > 1 or len(set(case.shape.qo_lens)) > 1:
        raise Absent("contiguous requests of one length only")
    if case.k.dtype != case.q.dtype:
        raise Absent("one type for all")
    count = len(case.lens)
    q, k, v = (x.view(count, -1, *x.shape[1:]) for x in (case.q, case.k, case.v))
    return q, k, v


def first(found: Any) -> Any:
    """The result of a call that may return more."""
    return found[0] if isinstance(found, tuple) else found


class FlashAttention3:
    """flash_attn_func, or flash_attn_varlen_func where lengths differ."""

    name = "fa3"

    def version(self) -> str:
        return installed("fa3-fwd")

    def prepare(self, case: Case) -> Ready:
        if case.shape.variant not in ("causal", "full", "softcap"):
            raise Absent("causal, full and soft-cap (the wheel is built without windows)")
        if case.page:
            raise Absent("the wheel takes no page table")
        from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func

        more: dict[str, Any] = {"softcap": CAP} if case.shape.variant == "softcap" else {}
        more["causal"] = case.shape.variant != "full"
        if len(set(case.shape.kv)) > 1:
            starts = [torch.from_numpy(x).to(case.device) for x in (case.qo_indptr, case.indptr)]
            longest = (int(case.qo_lens.max()), int(case.lens.max()))
            return Ready(
                run=lambda: first(flash_attn_varlen_func(case.q, case.k, case.v, *starts, *longest, **more))
            )
        q, k, v = square(case)
        return Ready(run=lambda: first(flash_attn_func(q, k, v, **more)), view=lambda x: x.flatten(0, 1))


class Sdpa:
    """torch.nn.functional.scaled_dot_product_attention with one backend alone."""

    def __init__(self, backend: str) -> None:
        self.backend, self.name = backend, f"sdpa-{backend}"

    def version(self) -> str:
        return torch.__version__

    def prepare(self, case: Case) -> Ready:
        if case.shape.variant not in ("causal", "full") or case.q.element_size() == 1:
            raise Absent("causal and full only, of 16-bit numbers")
        q, k, v = square(case)
        if case.shape.variant == "causal" and q.shape[1] != k.shape[1]:
            raise Absent("its causal mask is top-left")
        if self.backend == "flash" and (
            q.shape[1] not in (2048, 16384) or case.shape.dim_vo != case.head_dim
        ):
            raise Absent("left out: slower than the others throughout, and one head_dim only")
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        chosen = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[self.backend]
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        causal, grouped = case.shape.variant == "causal", case.heads != case.kv_heads

        def run() -> Any:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(qt, kt, vt, is_causal=causal, enable_gqa=grouped)

        return Ready(run=run, view=lambda x: x.transpose(1, 2).flatten(0, 1))


class Flex:
    """torch.nn.attention.flex_attention under torch.compile, its block mask made beforehand.

    Only where it stays fused and compiling (about five seconds a case) is worth it: as many KV heads as query heads, D 128.
    """

    name = "flex"
    _compiled: Callable[..., Any] | None = None

    def version(self) -> str:
        return torch.__version__

    @staticmethod
    def takes(shape: Shape) -> bool:
        """Whether it stays fused there, and the case is one of the few that are worth its compiling."""
        if shape.heads != shape.kv_heads or shape.page or shape.head_dim != 128 or shape.dim_vo != 128:
            return False
        if shape.variant == "blocks":
            return shape.block == 128 and shape.kept == 0.2
        known = ("causal", "full", "softcap", "window", "alibi", "traced", "custom")
        return shape.kv[0] == 2048 and shape.variant in known

    def prepare(self, case: Case) -> Ready:
        shape = case.shape
        if not self.takes(shape):
            raise Absent("falls to an unfused path, or is not worth its compiling")
        q, k, v = square(case)
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        score, mask = self._mods(case)
        if Flex._compiled is None:
            torch._dynamo.config.cache_size_limit = 64
            Flex._compiled = torch.compile(flex_attention, dynamic=False)
        size = {"BLOCK_SIZE": shape.block} if shape.block else {}
        block_mask = (
            None
            if mask is None
            else create_block_mask(mask, None, None, q.shape[1], k.shape[1], device="cuda", **size)
        )
        qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
        call = Flex._compiled
        return Ready(
            run=lambda: call(qt, kt, vt, score_mod=score, block_mask=block_mask),
            view=lambda x: x.transpose(1, 2).flatten(0, 1),
            keep=block_mask,
        )

    def _mods(self, case: Case) -> tuple[Any, Any]:
        """(score_mod, mask_mod) of the case's variant."""

        def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
            return i >= j

        slope = torch.tensor(slopes(case.heads), device="cuda")
        variant = case.shape.variant
        if variant == "blocks":
            kept, side = torch.from_numpy(case.blocks).cuda(), case.shape.block
            return None, lambda b, h, i, j: kept[i // side, j // side]
        if variant == "custom":
            seen = torch.from_numpy(np.stack(case.masks)).cuda()
            return None, lambda b, h, i, j: seen[b, i, j]
        return {
            "causal": (None, causal),
            "full": (None, None),
            "softcap": (lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), causal),
            "window": (None, lambda b, h, i, j: (i >= j) & (i - j < WINDOW)),
            "alibi": (lambda s, b, h, i, j: s + slope[h] * (j - i), causal),
            "traced": (lambda s, b, h, i, j: s + 0.01 * s * s, causal),
        }[variant]


class FlashInferRagged(FlashInfer):
    """BatchPrefillWithRaggedKVCacheWrapper; fa2 only for what fa3 does not take, and at two lengths."""

    def __init__(self, backend: str) -> None:
        self.backend, self.name = backend, f"flashinfer-{backend}"

    def prepare(self, case: Case) -> Ready:
        shape = case.shape
        if case.page or case.k.dtype != case.q.dtype:
            raise Absent("contiguous, one type")
        if case.q.element_size() == 1:
            raise Absent("8-bit queries: FlashAttention-3 stands for them")
        on_fa2 = {
            "alibi": {"pos_encoding_mode": "ALIBI"},
            "rope": {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": THETA},
            "custom": {},
        }
        on_fa3: dict[str, dict[str, Any]] = {
            "causal": {},
            "full": {},
            "softcap": {"logits_soft_cap": CAP},
            "window": {"window_left": WINDOW - 1},
        }
        options = on_fa2 if self.backend == "fa2" else on_fa3
        if shape.variant not in options:
            raise Absent("its other form has it, or neither")
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend=self.backend)
        more, where = dict(options[shape.variant]), "cpu"
        if shape.variant == "custom":
            where = "cuda"  # bits are packed on the device, by lengths that lie there
            more["custom_mask"] = torch.from_numpy(np.concatenate([m.ravel() for m in case.masks])).cuda()
        wrapper.plan(
            torch.from_numpy(case.qo_indptr).to(where),
            torch.from_numpy(case.indptr).to(where),
            case.heads,
            case.kv_heads,
            case.head_dim,
            head_dim_vo=shape.dim_vo,
            causal=shape.variant not in ("full", "custom"),
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
            **more,
        )
        out = case.new_out()
        return Ready(run=lambda: wrapper.run(case.q, case.k, case.v, out=out), out=out, keep=wrapper)


class FlashInferBlocks(FlashInfer):
    """BlockSparseAttentionWrapper."""

    def __init__(self, backend: str) -> None:
        self.backend, self.name = backend, f"flashinfer-{backend}"

    def prepare(self, case: Case) -> Ready:
        if case.shape.variant != "blocks":
            raise Absent("block-sparse only")
        import flashinfer

        starts = np.concatenate([[0], np.cumsum(case.blocks.sum(1))]).astype(np.int32)
        columns = np.nonzero(case.blocks)[1].astype(np.int32)
        wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(), backend=self.backend)
        wrapper.plan(
            torch.from_numpy(starts).cuda(),
            torch.from_numpy(columns).cuda(),
            len(case.q),
            len(case.k),
            case.shape.block,
            case.shape.block,
            case.heads,
            case.kv_heads,
            case.head_dim,
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
            o_data_type=case.q.dtype,
        )
        return Ready(run=lambda: wrapper.run(case.q, case.k, case.v), keep=wrapper)
