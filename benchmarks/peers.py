# SPDX-License-Identifier: Apache-2.0
"""Libraries that paged attention is compared with, each as a plug-in that says so when it is not installed or cannot take a case.

Plans are made, and layouts a library wants are built, in ``prepare``: only what a step of an engine launches is timed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from cases import Case
from harness import Absent, Ready

__all__ = [
    "FlashAttention3Cache",
    "FlashInferBatch",
    "FlashInferCascade",
    "FlashInferDecode",
    "FlashInferPaged",
    "FlashInferPerHead",
    "FlashInferTwo",
    "FlashInferXqa",
    "installed",
    "workspace",
]

#: Most bytes of a dense copy of a paged cache.
DENSE_LIMIT = 24e9

_workspace: Any = None


def workspace() -> torch.Tensor:
    """FlashInfer's scratch; its wrappers may share it, since only one runs at a time."""
    global _workspace
    if _workspace is None:
        _workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    return _workspace


def installed(distribution: str) -> str:
    """Version of an installed distribution; ImportError without it."""
    try:
        return version(distribution)
    except PackageNotFoundError as error:
        raise ImportError(f"{distribution} is not installed") from error


def last_lens(lens: np.ndarray, page: int) -> torch.Tensor:
    """Keys on the last page of each request."""
    return torch.from_numpy(((lens - 1) % page + 1).astype(np.int32))


def plain(case: Case) -> None:
    """Refuse what the paged wrappers here are not set up for."""
    if case.shape.variant != "causal" or case.shape.per_head:
        raise Absent("causal over pages only")


class FlashInfer:
    """What all of FlashInfer's wrappers have in common."""

    name = "flashinfer"

    def version(self) -> str:
        return installed("flashinfer-python")


class FlashInferDecode(FlashInfer):
    """BatchDecodeWithPagedKVCacheWrapper, on tensor cores or on CUDA cores."""

    def __init__(self, tensor_cores: bool) -> None:
        self.tensor_cores = tensor_cores
        self.name = "flashinfer-tc" if tensor_cores else "flashinfer-cuda"

    def prepare(self, case: Case) -> Ready:
        plain(case)
        group = case.heads // case.kv_heads
        if case.qo_lens.max() > 1:
            raise Absent("one query per request")
        if not self.tensor_cores and group not in (1, 2, 4, 8):
            raise Absent(f"CUDA cores take groups of 1, 2, 4 and 8, not {group}")
        if not self.tensor_cores and group > 2 and case.nbytes > 2e8:
            raise Absent("left out: its tensor-core form is faster on groups of queries")
        import flashinfer

        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_tensor_cores=self.tensor_cores
        )
        wrapper.plan(
            torch.from_numpy(case.indptr),
            torch.from_numpy(case.pages).cuda(),
            last_lens(case.lens, case.page),
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.page,
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
        )
        out = torch.empty_like(case.q)
        return Ready(run=lambda: wrapper.run(case.q, (case.k, case.v), out=out), out=out, keep=wrapper)


class FlashInferPaged(FlashInfer):
    """BatchPrefillWithPagedKVCacheWrapper over everything in one call; masks through its fa2 form."""

    def __init__(self, backend: str) -> None:
        self.backend, self.name = backend, f"flashinfer-{backend}"

    def prepare(self, case: Case) -> Ready:
        masked = case.shape.variant in ("custom", "tree")
        if not case.page or case.shape.per_head or not (masked or case.shape.variant == "causal"):
            raise Absent("causal or masked over pages only")
        if case.q.element_size() == 1:
            raise Absent("8-bit queries are not timed over pages")
        if self.backend == "fa3" and (masked or case.k.dtype != case.q.dtype):
            raise Absent("its fa3 form has no masks and no mixed types")
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend=self.backend)
        mask = np.concatenate([m.ravel() for m in case.masks]) if masked else None
        where = "cuda" if masked else "cpu"  # bits are packed on the device, by lengths that lie there
        wrapper.plan(
            torch.from_numpy(case.qo_indptr).to(where),
            torch.from_numpy(case.indptr).to(where),
            torch.from_numpy(case.pages).cuda(),
            last_lens(case.lens, case.page).to(where),
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.page,
            custom_mask=None if mask is None else torch.from_numpy(mask).cuda(),
            causal=not masked,
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
        )
        out = torch.empty_like(case.q)
        return Ready(run=lambda: wrapper.run(case.q, (case.k, case.v), out=out), out=out, keep=wrapper)


class FlashInferBatch(FlashInfer):
    """BatchAttention, the persistent kernel."""

    name = "flashinfer-batch"

    def prepare(self, case: Case) -> Ready:
        plain(case)
        if not case.page or case.k.dtype != case.q.dtype:
            raise Absent("16-bit pages only")
        import flashinfer

        wrapper = flashinfer.BatchAttention("NHD")
        wrapper.plan(
            torch.from_numpy(case.qo_indptr).cuda(),
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


class FlashInferXqa(FlashInfer):
    """flashinfer.xqa: its decode kernel from TensorRT-LLM, compiled for each group, page size and type."""

    name = "flashinfer-xqa"

    def prepare(self, case: Case) -> Ready:
        plain(case)
        if case.qo_lens.max() > 1:
            raise Absent("one query per request")
        if case.page not in (16, 32, 64, 128):
            raise Absent("pages of 16 to 128 only")
        module = import_module("flashinfer.xqa")  # the package's own name of that is the function
        group = case.heads // case.kv_heads
        try:
            form = (case.q.dtype, case.k.dtype, case.page, case.head_dim, group, False, case.q.dtype, 1)
            module.get_xqa_module(*form)
        except Exception as error:
            raise Absent(f"not compiled for groups of {group} ({type(error).__name__})") from error
        count, most = len(case.lens), int(np.diff(case.indptr).max())
        table = np.zeros((count, most), np.int32)
        for r, (a, b) in enumerate(zip(case.indptr, case.indptr[1:], strict=False)):
            table[r, : b - a] = case.pages[a:b]
        pages = torch.from_numpy(table).cuda()
        lens = torch.from_numpy(case.lens.astype(np.uint32)[:, None]).cuda()
        semaphores = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda").view(torch.uint32)
        scratch = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        q = case.q.view(count, 1, case.heads, case.head_dim)
        out = torch.empty_like(q)
        fixed = (out, scratch, semaphores, case.kv_heads, case.page)

        def run() -> None:
            module.xqa(q, case.k, case.v, pages, lens, *fixed, q_scale=1.0, kv_scale=1.0)

        return Ready(run=run, out=out, view=lambda x: x.view(case.q.shape))


class FlashInferTwo(FlashInfer):
    """Two calls, as engines that keep the kinds apart make them: fa3 prefill, then tensor-core decode."""

    name = "flashinfer-two"

    def prepare(self, case: Case) -> Ready:
        plain(case)
        few = int((case.qo_lens > 1).sum())
        if not 0 < few < len(case.lens) or (case.qo_lens[:few] == 1).any():
            raise Absent("for prefills followed by single queries")
        import flashinfer

        cut, rows = int(case.indptr[few]), int(case.qo_indptr[few])
        heads = (case.heads, case.kv_heads, case.head_dim, case.page)
        types = {"q_data_type": case.q.dtype, "kv_data_type": case.k.dtype}
        pages = torch.from_numpy(case.pages).cuda()
        prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="fa3")
        prefill.plan(
            torch.from_numpy(case.qo_indptr[: few + 1]),
            torch.from_numpy(case.indptr[: few + 1]),
            pages[:cut],
            last_lens(case.lens[:few], case.page),
            *heads,
            causal=True,
            **types,
        )
        own = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(own, "NHD", use_tensor_cores=True)
        decode.plan(
            torch.from_numpy(case.indptr[few:] - np.int32(cut)),
            pages[cut:],
            last_lens(case.lens[few:], case.page),
            *heads,
            **types,
        )
        out, kv = torch.empty_like(case.q), (case.k, case.v)

        def run() -> None:
            prefill.run(case.q[:rows], kv, out=out[:rows])
            decode.run(case.q[rows:], kv, out=out[rows:])

        return Ready(run=run, out=out, keep=(prefill, decode))


class FlashInferCascade(FlashInfer):
    """MultiLevelCascadeAttentionWrapper with two levels."""

    name = "flashinfer-cascade"

    def prepare(self, case: Case) -> Ready:
        shared = case.shape.shared // case.page
        if not shared:
            raise Absent("no shared prefix")
        import flashinfer

        bs = len(case.lens)
        counts = np.diff(case.indptr) - shared
        own = np.concatenate(
            [case.pages[a + shared : b] for a, b in zip(case.indptr, case.indptr[1:], strict=False)]
        )
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
        wrapper.plan(
            [torch.tensor([0, bs], **case.on), torch.arange(bs + 1, **case.on)],
            [
                torch.tensor([0, shared], **case.on),
                torch.tensor(np.concatenate([[0], np.cumsum(counts)]), **case.on),
            ],
            [torch.from_numpy(case.pages[:shared]).cuda(), torch.from_numpy(own).cuda()],
            [torch.tensor([case.page], **case.on), last_lens(case.lens, case.page).cuda()],
            case.heads,
            case.kv_heads,
            case.head_dim,
            case.page,
            causal=False,
            q_data_type=case.q.dtype,
        )
        return Ready(run=lambda: wrapper.run(case.q, (case.k, case.v)), keep=wrapper)


class FlashInferPerHead(FlashInfer):
    """Pages of each head: every head is a request with one head, over pages that hold one head each (page * heads + head)."""

    def __init__(self, tensor_cores: bool) -> None:
        self.tensor_cores = tensor_cores
        self.name = "flashinfer-tc" if tensor_cores else "flashinfer-cuda"

    def prepare(self, case: Case) -> Ready:
        heads = case.kv_heads
        if not case.shape.per_head or heads != case.heads or len(case.lens) != 1:
            raise Absent("for one request whose heads each have their own pages")
        import flashinfer

        k, v = (
            x.transpose(1, 2).reshape(-1, case.page, 1, case.head_dim).contiguous() for x in (case.k, case.v)
        )
        listed = case.pages[case.head_pages[0]] * heads + np.arange(heads)[:, None]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_tensor_cores=self.tensor_cores
        )
        wrapper.plan(
            torch.arange(heads + 1, dtype=torch.int32) * case.shape.per_head,
            torch.from_numpy(listed.ravel().astype(np.int32)).cuda(),
            torch.full((heads,), case.page, dtype=torch.int32),
            1,
            1,
            case.head_dim,
            case.page,
            q_data_type=case.q.dtype,
            kv_data_type=case.k.dtype,
        )
        q = case.q.view(heads, 1, case.head_dim)
        out = torch.empty_like(q)
        return Ready(
            run=lambda: wrapper.run(q, (k, v), out=out),
            out=out,
            view=lambda x: x.view(1, heads, -1),
            keep=wrapper,
        )


class FlashAttention3Cache:
    """flash_attn_with_kvcache over a dense copy of the cache: the wheel takes no page table."""

    name = "fa3"

    def version(self) -> str:
        return installed("fa3-fwd")

    def prepare(self, case: Case) -> Ready:
        plain(case)
        if case.k.dtype != case.q.dtype:
            raise Absent("fp8 only with fp8 queries")
        queries = int(case.qo_lens.max())
        if int(case.qo_lens.min()) != queries:
            raise Absent("as many queries in every request")
        longest, count = int(case.lens.max()), len(case.lens)
        if 2 * longest * count * case.kv_heads * case.head_dim * 2 > DENSE_LIMIT:
            raise Absent("a dense copy would be too large")
        from fa3_fwd_interface import flash_attn_with_kvcache

        k, v = (x.new_zeros(count, longest, *x.shape[2:]) for x in (case.k, case.v))
        for r in range(count):
            slots = case.tokens(r)
            for dense, paged in ((k, case.k), (v, case.v)):
                dense[r, : len(slots)] = paged.flatten(0, 1)[slots]
        lens, q = torch.from_numpy(case.lens).cuda(), case.q.view(count, queries, *case.q.shape[1:])

        def run() -> Any:
            found = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True)
            return found[0] if isinstance(found, tuple) else found

        return Ready(run=run, view=lambda x: x.flatten(0, 1), keep=(k, v))
