# SPDX-License-Identifier: Apache-2.0
"""An index over keys that lie side by side, and the slots that they are brought from (``Attention.gather``)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.access import need_host_indices, tokens
from attnrt.formats.arrays import frozen, zeros
from attnrt.formats.base import BlockSparse
from attnrt.formats.check import need_checked, trusted

__all__ = ["Gathered", "gathered"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """What ``gathered`` made of an index.

    Attributes
    ----------
    index : BlockSparse
        The same queries, offsets, positions and mask over K and V of ``len(slots)`` rows.
    slots : int64 [rows]
        Slot of each row in the cache: the live keys of every block row, one after the other.
    positions : int32 [rows]
    """

    index: BlockSparse
    slots: np.ndarray
    positions: np.ndarray


def gathered(index: BlockSparse) -> Gathered:
    """The index of K and V that ``Attention.gather`` brings side by side.

    The result is that of ``index``, to the bit, where K and V are the cache's own numbers.

    Parameters
    ----------
    index : BlockSparse
        One list of blocks per block row, without holes, on the host, positions that run on.

    Raises
    ------
    ArgumentError, UnsupportedError
    """
    if not isinstance(index, BlockSparse):
        raise ArgumentError("index", "must be flat", type(index).__name__)
    if index.heads > 1:
        raise UnsupportedError("index", "must have one list for all heads", f"{index.heads} lists")
    if index.kv_pos is None:
        raise UnsupportedError("index", "must have positions that run on", "positions of each block")
    need_checked(index)
    need_host_indices(index, "gathered()")
    lens = (index.kv_end - index.kv_begin).astype(np.int64)
    first = np.cumsum(lens) - lens
    begin = index.kv_offset.astype(np.int64) + index.kv_begin
    slots, positions = tokens(index, np.arange(index.num_rows), 0, begin, begin + lens)
    if (slots < 0).any():
        raise UnsupportedError(
            "index", "must have no holes", f"{int((slots < 0).sum())} of {len(slots)} keys"
        )
    side_by_side = replace(
        index,
        block_size=(index.block_size[0], 1),
        indptr=zeros(index.num_rows + 1),
        indices=None,
        kv_base=frozen(first - index.kv_begin),
        max_block=len(slots) - 1,
        features=replace(index.features, affine=True),
    )
    return Gathered(index=trusted(side_by_side), slots=frozen(slots), positions=frozen(positions))
