# SPDX-License-Identifier: Apache-2.0
"""The values that every index builder returns: block-sparse arrays over one KV buffer.

A *block row* is a set of queries that read one list of KV blocks. The list names its keys by their place in it,
``j = 0, 1, ...``; key ``j`` lies in block ``indices[j // C]`` at token ``j % C``, that is at slot ``block * C + j % C`` of the
pool. Three numbers follow from ``j`` and nothing else decides anything:

- its *slot*, where its K and V are stored;
- its *position* ``kv_pos + j`` (or ``block_pos[j // C] + j % C``), which masks, RoPE and ALiBi read;
- its *offset in the request* ``kv_offset + j``, by which leaves and tiles are cut (design.md section 4). In a flat index it
  counts the request's live keys from 0; in a part of a composite it continues where the part before ended, so that a cut
  never moves a leaf boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from attnrt.formats.dense import Dense

__all__ = ["HOLE", "BlockSparse", "Composite", "Features", "Index", "Requests", "alignment_of"]

#: A block id that stands for no block: its keys count in offsets and positions and are never seen.
HOLE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Lengths of each request, shared by all parts of an index.

    Attributes
    ----------
    qo_lens, kv_lens : int32 [num_requests]
        Queries and keys of each request, this step's tokens included; where ``bound_kv_lens`` is set, kv_lens are host
        upper bounds. The length of the whole sequence: a pruned list (chosen tokens or pages, a window) holds fewer keys.
    bound_kv_lens : device array int32 [num_requests] or None
        True lengths, read by every run; ``0 <= bound <= kv_lens``. Queries' positions move with them.
    """

    qo_lens: np.ndarray
    kv_lens: np.ndarray
    bound_kv_lens: Any = None

    def __len__(self) -> int:
        return len(self.qo_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """All of an index that may change machine code. Hashable; part of every kernel key."""

    num_parts: int = 1
    per_head: bool = False
    affine: bool = False
    masked: bool = False
    block_pos: bool = False
    qo_index: bool = False
    bound_indices: bool = False
    bound_mask: bool = False
    bound_kv_lens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockSparse:
    """Block rows of queries against lists of KV blocks. int32 host arrays unless said; C-contiguous.

    Attributes
    ----------
    block_size : (R, C)
        R: most queries in a block row (>= 1); C: tokens per KV block (>= 1).
    heads : int
        1: all KV heads share a list; num_kv_heads: each has its own.
    num_qo : int
        Rows of q that the index speaks of; queries are in ``[0, num_qo)``.
    requests : Requests
    qo_indptr : [rows + 1]
        Queries of each block row, as a range of ``request``, ``qo_pos`` and ``qo_index``.
    qo_index : [queries] or None
        Rows of q, each at most once per index part; None: 0, 1, 2, ...
    request, qo_pos : [queries]
        Request and signed logical position of each query.
    indptr : [rows * heads + 1]
        List of (row r, head h): entries ``indptr[r * heads + h] : indptr[r * heads + h + 1]`` of indices.
    indices : [nnz], or a device array, or None
        KV blocks in list order, ``HOLE`` allowed. None: affine, key j of row r is slot ``kv_base[r] + j`` (C is 1).
    kv_base : int64 [rows] or None
    kv_pos : [rows] or None
        Position of list entry 0 (key j has ``kv_pos + j``); None when block_pos is given.
    block_pos : [nnz] or None
        Position of the first key of each listed block.
    kv_begin, kv_end : [rows * heads]
        Live range of each list in j, begin inclusive, end exclusive; ``0 <= kv_begin <= kv_end <= listed blocks * C``.
    kv_offset : [rows]
        Offset in the request of list entry 0; may be negative when kv_begin > 0.
    mask : uint8 [bytes] or device array or None
        Packed bits, little-endian within a byte; a set bit is a visible key.
    mask_offset : int64 [queries] or None
        Bit of each query's first masked key; -1: the query has no mask.
    mask_begin : [rows] or None
        Offset in the request of the first key that the mask speaks of; keys before it are visible. Key at offset o reads bit
        ``mask_offset[q] + o - mask_begin[r]``.
    max_block : int
        Largest block id (affine: largest slot), -1 if none; compared with the pool by run(). Where it is left out and the
        ids are on the host, check() finds it.
    checked : bool
        Set by check() once it has passed, and by our own builders; what is not checked yet, plan() checks. Not copied by
        ``dataclasses.replace``.
    """

    block_size: tuple[int, int]
    heads: int = 1
    num_qo: int
    requests: Requests
    qo_indptr: np.ndarray
    qo_index: np.ndarray | None = None
    request: np.ndarray
    qo_pos: np.ndarray
    indptr: np.ndarray
    indices: Any
    kv_base: np.ndarray | None = None
    kv_pos: np.ndarray | None
    block_pos: np.ndarray | None = None
    kv_begin: np.ndarray
    kv_end: np.ndarray
    kv_offset: np.ndarray
    mask: Any = None
    mask_offset: np.ndarray | None = None
    mask_begin: np.ndarray | None = None
    max_block: int = -1
    features: Features = field(default_factory=Features)
    checked: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        return f"BlockSparse({_counts(self)}, {self.num_rows} block rows, block_size={self.block_size}, heads={self.heads})"

    @property
    def num_rows(self) -> int:
        return len(self.qo_indptr) - 1

    @property
    def page_size(self) -> int:
        return self.block_size[1]

    @property
    def parts(self) -> tuple[BlockSparse, ...]:
        """The index as a tuple of parts, so that flat and composite are read by one loop."""
        return (self,)

    def parts_for(self, positions: bool) -> tuple[BlockSparse, ...]:
        """As of a Composite."""
        return (self,)

    def check(self, full: bool = False) -> None:
        """Raise unless every invariant holds; ``full`` also looks for keys that a query lists twice."""
        from attnrt.formats.check import check

        check(self, full=full)

    def to_dense(self, num_slots: int | None = None) -> Dense:
        """Visibility, positions and offsets as matrices [heads, num_qo, num_slots] (formats/dense.py)."""
        from attnrt.formats.dense import to_dense

        return to_dense(self, num_slots)

    def gather(
        self, kv: Any, row: int, head: int = 0, kv_layout: str = "NHD"
    ) -> tuple[np.ndarray, np.ndarray]:
        """K and V rows, in order, that row ``row`` of q sees under KV head ``head``."""
        from attnrt.formats.dense import gather

        return gather(self, kv, row, head, kv_layout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Composite:
    """Several block-sparse parts over one buffer; a query's keys are the union over parts, each key in one part.

    All parts have the same ``num_qo`` and ``requests`` (the same object). For every query the offset ranges
    ``[kv_offset + kv_begin, kv_offset + kv_end)`` of its parts tile ``[0, its live keys)`` without gap or overlap.
    ``flat`` is the same index in one part where its builder has it, for a planner that finds the parts not worth their cost.
    ``in_line`` are parts with the same keys, slots, offsets and mask bits in fewer lists, where some keys have other positions
    than here: for variants that ask of no key where it stands. ``checked`` is as of a BlockSparse.
    """

    parts: tuple[BlockSparse, ...]
    features: Features = field(default_factory=Features)
    flat: BlockSparse | None = None
    in_line: tuple[BlockSparse, ...] | None = None
    checked: bool = field(default=False, init=False)

    def __repr__(self) -> str:
        return f"Composite({_counts(self)}, {len(self.parts)} parts)"

    @property
    def num_qo(self) -> int:
        return self.parts[0].num_qo

    @property
    def requests(self) -> Requests:
        return self.parts[0].requests

    @property
    def page_size(self) -> int:
        """Tokens per page of the cache: the largest C of the parts."""
        return max(part.block_size[1] for part in self.parts)

    def parts_for(self, positions: bool) -> tuple[BlockSparse, ...]:
        """The parts that are planned, before their cuts are moved: ``in_line`` where there is one and nobody asks for positions
        of keys."""
        return self.parts if positions or self.in_line is None else self.in_line

    def check(self, full: bool = False) -> None:
        """Raise unless every invariant holds; ``full`` also looks for keys that a query lists twice."""
        from attnrt.formats.check import check

        check(self, full=full)

    def to_dense(self, num_slots: int | None = None) -> Dense:
        """Visibility, positions and offsets as matrices [heads, num_qo, num_slots] (formats/dense.py)."""
        from attnrt.formats.dense import to_dense

        return to_dense(self, num_slots)

    def gather(
        self, kv: Any, row: int, head: int = 0, kv_layout: str = "NHD"
    ) -> tuple[np.ndarray, np.ndarray]:
        """K and V rows, in order, that row ``row`` of q sees under KV head ``head``."""
        from attnrt.formats.dense import gather

        return gather(self, kv, row, head, kv_layout)


Index = BlockSparse | Composite


def _counts(index: Index) -> str:
    """Requests, queries and keys of an index, for its repr."""
    return f"{len(index.requests)} requests, {index.num_qo} queries, {int(index.requests.kv_lens.sum())} keys"


def alignment_of(parts: Sequence[BlockSparse]) -> int:
    """A number that every power of two divides at whose multiples keys lie side by side in all lists of a plan; 0: all do."""
    found = 0
    for part in parts:
        found |= int(np.bitwise_or.reduce(part.kv_offset, initial=0))
        if part.kv_base is None:
            found |= part.block_size[1]
    return found
