# SPDX-License-Identifier: Apache-2.0
"""Move the cut between a shared prefix and what is each request's own back to a leaf boundary, where lists allow it.

formats.share leaves the blocks of the prefix in each request's own list, in front of the live range. So a leaf that straddles the
cut need not go to a bridge (align.py), which copies lists and leaves two items where one would do: the own list begins a few
keys earlier, the shared one ends there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnrt.latest import Latest
from attnrt.scheduler.align import leaf_ends
from attnrt.scheduler.problem import classes_of

if TYPE_CHECKING:
    from attnrt.formats.base import BlockSparse, Composite
    from attnrt.scheduler.base import Traits

__all__ = ["recut"]

#: The parts made last: a plan of the same index has the same ones, so that a workspace does not load them again.
_latest: Latest[tuple[BlockSparse, ...]] = Latest()


def recut(index: Composite, traits: Traits, group: int) -> tuple[BlockSparse, ...]:
    """The parts of a composite, cut at leaf boundaries as far as a request's own list reaches back.

    Parameters
    ----------
    index : Composite
        Its own parts are returned unless its flat form has the lists of the last of two.
    traits : Traits
    group : int
        Query heads per KV head.
    """
    parts, flat = index.parts, index.flat
    if flat is None or len(parts) != 2 or parts[1].indices is not flat.indices:
        return parts
    prefix, own = parts
    if own.indptr is not flat.indptr or own.heads > 1 or prefix.heads > 1 or prefix.qo_index is None:
        return parts
    known = _latest.get(index, (traits, group))
    return _latest.put(_recut(prefix, own, traits, group), index, (traits, group)) if known is None else known


def _recut(prefix: BlockSparse, own: BlockSparse, traits: Traits, group: int) -> tuple[BlockSparse, ...]:
    klass = classes_of(own.requests, traits, group)
    row_of = np.full(own.num_qo, -1, np.int64)  # row of the own part of each row of q
    listed = slice(0, len(own.request)) if own.qo_index is None else own.qo_index
    row_of[listed] = np.repeat(np.arange(own.num_rows), np.diff(own.qo_indptr))
    begin, end = own.kv_begin.copy(), prefix.kv_end.copy()
    for row in range(prefix.num_rows):
        queries = slice(int(prefix.qo_indptr[row]), int(prefix.qo_indptr[row + 1]))
        kinds, sharers = klass[prefix.request[queries]], row_of[prefix.qo_index[queries]]  # type: ignore[index]
        cut = int(prefix.kv_offset[row] + prefix.kv_end[row])
        alike = len(kinds) and (kinds == kinds[0]).all() and (sharers >= 0).all()
        if not alike or (own.kv_offset[sharers] != 0).any() or (own.kv_begin[sharers] != cut).any():
            continue
        leaf = int(leaf_ends(traits.classes[int(kinds[0])].ruler, np.array([cut]))[0][0])
        begin[sharers] = leaf
        end[row] = max(leaf - int(prefix.kv_offset[row]), int(prefix.kv_begin[row]))
    if (end == prefix.kv_end).all():
        return prefix, own
    return replace(prefix, kv_end=end), replace(own, kv_begin=begin)
