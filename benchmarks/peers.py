# SPDX-License-Identifier: Apache-2.0
"""The libraries that decode is compared with, each as a plug-in that says so when it is not installed or cannot take a case."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from harness import Absent, Ready

if TYPE_CHECKING:
    from decode import Case

__all__ = ["PEERS"]

_workspace: Any = None


def workspace() -> torch.Tensor:
    """FlashInfer's scratch; its wrappers may share it, since only one runs at a time."""
    global _workspace
    if _workspace is None:
        _workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    return _workspace


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError as error:
        raise ImportError(f"{distribution} is not installed") from error


class FlashInferDecode:
    """BatchDecodeWithPagedKVCacheWrapper, on tensor cores or on CUDA cores."""

    def __init__(self, tensor_cores: bool) -> None:
        self.tensor_cores = tensor_cores
        self.name = "flashinfer-tc" if tensor_cores else "flashinfer-cuda"

    def version(self) -> str:
        return _installed("flashinfer-python")

    def prepare(self, case: Case) -> Ready:
        import flashinfer

        group = case.heads // case.kv_heads
        if not self.tensor_cores and group not in (1, 2, 4, 8):
            raise Absent(f"CUDA cores take groups of 1, 2, 4 and 8, not {group}")
        if not self.tensor_cores and group > 2 and case.nbytes > 2e8:
            raise Absent("left out: its tensor-core form is faster on groups of queries")
        last = (case.lens - 1) % case.page + 1
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_tensor_cores=self.tensor_cores
        )
        wrapper.plan(
            torch.from_numpy(case.indptr),
            torch.from_numpy(case.pages).cuda(),
            torch.from_numpy(last.astype(np.int32)),
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.page,
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
        )
        out = torch.empty_like(case.q)
        return Ready(run=lambda: wrapper.run(case.q, (case.k, case.v), out=out), out=out, keep=wrapper)


class FlashInferBatch:
    """BatchAttention, the persistent kernel."""

    name = "flashinfer-batch"

    def version(self) -> str:
        return _installed("flashinfer-python")

    def prepare(self, case: Case) -> Ready:
        import flashinfer

        if case.k.dtype != case.q.dtype:
            raise Absent("16-bit caches only here")
        wrapper = flashinfer.BatchAttention("NHD")
        on = {"dtype": torch.int32, "device": "cuda"}
        wrapper.plan(
            torch.arange(len(case.lens) + 1, **on),
            torch.from_numpy(case.indptr).cuda(),
            torch.from_numpy(case.pages).cuda(),
            torch.from_numpy(case.lens).cuda(),
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.head_dim,
            case.page,
            causal=True,
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
        )
        out = torch.empty_like(case.q)
        lse = torch.empty(case.q.shape[:2], dtype=torch.float32, device="cuda")
        return Ready(
            run=lambda: wrapper.run(case.q, (case.k, case.v), out=out, lse=lse), out=out, keep=wrapper
        )


class FlashAttention3:
    """flash_attn_with_kvcache over a page table."""

    name = "fa3"

    def version(self) -> str:
        return _installed("fa3-fwd")

    def prepare(self, case: Case) -> Ready:
        from fa3_fwd_interface import flash_attn_with_kvcache

        if case.k.dtype != case.q.dtype:
            raise Absent("fp8 only with fp8 queries")
        counts = np.diff(case.indptr)
        table = np.zeros((len(counts), counts.max()), np.int32)
        for i, count in enumerate(counts):
            table[i, :count] = case.pages[case.indptr[i] : case.indptr[i] + count]
        pages, lens = torch.from_numpy(table).cuda(), torch.from_numpy(case.lens).cuda()
        out = torch.empty_like(case.q)

        def run() -> None:
            found = flash_attn_with_kvcache(
                case.q[:, None], case.k, case.v, cache_seqlens=lens, page_table=pages, causal=True
            )
            out.copy_((found[0] if isinstance(found, tuple) else found)[:, 0])

        return Ready(run=run, out=out, keep=(pages, lens))


PEERS = (FlashInferDecode(True), FlashInferDecode(False), FlashInferBatch(), FlashAttention3())
