# SPDX-License-Identifier: Apache-2.0
"""attnrt as a provider: with limits, as an engine that captures graphs runs it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import specs
import torch
from cases import Case
from harness import Absent, Ready

import attnrt as at
from attnrt.formats.base import alignment_of

__all__ = ["Ours", "OursFlat", "OursGathered", "OursHND", "OursOneLevel", "OursPagesNHD"]


def flat_index(case: Case) -> Any:
    """The shape's own layout: pages, contiguous, pages of each head, blocks, with its mask."""
    shape = case.shape
    if shape.variant == "blocks":
        starts = np.concatenate([[0], np.cumsum(case.blocks.sum(1))]).astype(np.int32)
        columns = np.nonzero(case.blocks)[1].astype(np.int32)
        return at.formats.bsr(starts, columns, (shape.block, shape.block), num_cols=shape.kv[0])
    if shape.per_head:
        pages = np.stack(
            [
                case.pages[case.indptr[r] : case.indptr[r + 1]][chosen]
                for r, chosen in enumerate(case.head_pages)
            ]
        ).astype(np.int32)
        counts = np.full(pages.shape[:2], shape.per_head, np.int32)
        return at.formats.pages_per_head(
            case.qo_indptr, pages, counts, case.lens, case.page, kv_pos=case.head_pages * np.int32(case.page)
        )
    if not case.page:
        index = at.formats.ragged(case.qo_indptr, case.indptr)
    else:
        index = at.formats.paged(case.qo_indptr, case.indptr, case.pages, case.lens, page_size=case.page)
    if shape.variant == "tree":
        return at.formats.tree(index, np.concatenate(case.parents))
    if shape.variant == "custom":
        return at.formats.tree(index, mask=case.masks)
    return index


def limits_of(index: Any, spec: at.AttentionSpec, case: Case) -> at.Limits:
    """A promise that holds this index and its like."""
    parts = index.parts_for(spec.composed.reads_key_positions)
    listed = sum(0 if p.indices is None else len(p.indices) for p in parts)
    bits = sum(0 if p.mask is None else p.mask.nbytes for p in parts)
    more, masked = 0, 0
    if (
        len(parts) > 1
    ):  # the leaves across the cuts, of at most 4096 keys, in single tokens and with mask bits
        more, masked = 4096 * len(case.lens), 512 * len(case.q) if bits else 0
    # What an engine knows of its pages; cuts of shared prefixes may lie anywhere.
    alignment = math.gcd(128, alignment_of(parts)) if len(parts) == 1 else 1
    return at.Limits(
        len(case.lens),
        len(case.q),
        listed + more,
        max_parts=len(parts),
        max_mask_bytes=bits + masked,
        max_qo_len=int(case.qo_lens.max()),
        max_kv_len=int(case.lens.max()),
        min_qo_len=int(case.qo_lens.min()),
        kv_alignment=alignment if alignment >= 16 else None,
        max_padding=0,
    )


class Ours:
    """attnrt in its default mode, or another.

    Parameters
    ----------
    mode : {"batch", "run"}
        ``deterministic=``.
    share : bool
        Common prefixes are found by page ids and read once.
    """

    kv_layout = "NHD"

    def __init__(self, mode: str = "batch", share: bool = True) -> None:
        self.mode, self.share = mode, share
        self.name = "attnrt" if mode == "batch" else f"attnrt ({mode})"

    def version(self) -> str:
        return at.__version__

    def index(self, case: Case) -> Any:
        found = flat_index(case)
        return at.formats.share(found) if self.share and case.shape.prefix else found

    def kv(self, case: Case) -> tuple[Any, Any]:
        return case.k, case.v

    def spec(self, case: Case) -> at.AttentionSpec:
        return specs.spec_of(case.shape, self.kv_layout)

    def prepare(self, case: Case) -> Ready:
        index = self.index(case)
        spec = self.spec(case)
        attn = at.Attention(
            spec,
            backend=specs.BACKEND,
            device=specs.DEVICE,
            limits=limits_of(index, spec, case),
            deterministic=self.mode,
        )
        attn.plan(index)
        out, kv = case.new_out(), self.kv(case)
        return Ready(run=lambda: attn.run(case.q, kv, out=out), out=out, keep=(attn, kv))


class OursFlat(Ours):
    """The same without looking for common prefixes."""

    def __init__(self) -> None:
        super().__init__(share=False)
        self.name = "attnrt (flat)"


class OursOneLevel(Ours):
    """8-bit products summed as tensor cores do it, like the peers' (``two_level=False``)."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "attnrt (one level)"

    def spec(self, case: Case) -> at.AttentionSpec:
        if case.q.element_size() != 1:
            raise Absent("8-bit products only")
        return dataclasses.replace(super().spec(case), two_level=False)


class OursHND(Ours):
    """A page holds head after head, so that a head's page is contiguous."""

    kv_layout = "HND"

    def kv(self, case: Case) -> tuple[Any, Any]:
        return tuple(x.transpose(1, 2).contiguous() for x in (case.k, case.v))  # type: ignore[return-value]


class OursGathered(Ours):
    """K and V are brought side by side first (``Attention.gather``), rotated where the variant says so; all of it is timed."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "attnrt (gathered)"

    def prepare(self, case: Case) -> Ready:
        shape, spec = case.shape, specs.spec_of(case.shape, self.kv_layout)
        index = flat_index(case)
        if (
            len(index.parts) > 1
            or shape.per_head
            or min(shape.qo_lens) < 64
            or not (shape.page == 1 or shape.kv_dtype != spec.q_dtype or shape.variant == "rope")
        ):
            raise Absent("prompts over single tokens, 8-bit caches or rotated keys only")
        rotates = shape.variant == "rope"
        found = at.formats.gathered(index)
        wide = dataclasses.replace(
            spec, kv_dtype=spec.q_dtype, variant=specs.variant_of(shape, rotates_keys=not rotates)
        )
        where = {"backend": specs.BACKEND, "device": specs.DEVICE}
        cache, attn = (
            at.Attention(spec, **where),
            at.Attention(wide, **where, limits=limits_of(found.index, wide, case)),
        )
        attn.plan(found.index)
        slots = torch.from_numpy(found.slots.copy()).to(case.device)
        more = (
            {
                "rope": specs.rotation(shape),
                "positions": torch.from_numpy(found.positions.copy()).to(case.device),
            }
            if rotates
            else {}
        )
        k = case.q.new_empty(len(slots), case.kv_heads, shape.head_dim)
        # V that lies side by side in q's type stays where it is.
        lies = case.v.dtype == case.q.dtype and np.array_equal(
            found.slots, np.arange(case.v[..., 0, 0].numel())
        )
        v = None if lies else case.q.new_empty(len(slots), case.kv_heads, shape.dim_vo)
        values = case.v if lies else v
        out = case.new_out()

        def run() -> None:
            cache.gather((case.k, case.v), slots, k, v, **more)
            attn.run(case.q, (k, values), out=out)

        return Ready(run=run, out=out, keep=(cache, attn, slots, k, values, more))


class OursPagesNHD(Ours):
    """Pages of each head, heads of a token beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "attnrt (NHD)"
