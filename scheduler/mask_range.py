# SPDX-License-Identifier: Apache-2.0
"""Which keys an index's mask leaves to each query, as far as the planner can tell: bits on the host, a range per query.

Custom masks are often triangles or bands; items that ended where a mask does cost half, and workers would not be level if items
were priced by keys that nobody sees. A mask on a device says nothing: nobody has looked.
"""

from __future__ import annotations

import numpy as np

from attnrt.formats.base import BlockSparse
from attnrt.scheduler.problem import FAR

__all__ = ["mask_range"]


def mask_range(part: BlockSparse) -> tuple[np.ndarray, np.ndarray] | None:
    """Offsets ``[lo, hi)`` in the request that hold every key that the mask lets each query see; int64 [queries] both.

    To whole bytes of the mask, so a few hidden keys may be inside. A query of which the mask says nothing has (-FAR, FAR), one
    that it lets see nothing (FAR, -FAR). None: nothing is known of the whole part (no mask, a mask or lengths on a device, keys
    whose positions do not run on, lists per head).
    """
    if (
        not isinstance(part.mask, np.ndarray)
        or part.mask_offset is None
        or part.mask_begin is None
        or part.requests.bound_kv_lens is not None
        or part.kv_pos is None
        or part.heads != 1
    ):
        return None
    lo, hi = np.full(len(part.request), -FAR, np.int64), np.full(len(part.request), FAR, np.int64)
    for row in range(part.num_rows):
        first, last = int(part.qo_indptr[row]), int(part.qo_indptr[row + 1])
        bits = _rows(part.mask, part.mask_offset[first:last])
        if bits is None:
            continue
        start, end = (int(part.kv_offset[row] + x[row]) for x in (part.kv_begin, part.kv_end))
        begin = int(part.mask_begin[row])
        seen = bits[:, : -(-max(end - begin, 0) // 8)] != 0
        if not seen.shape[1]:
            continue
        some, length = seen.any(axis=1), seen.shape[1]
        from_byte, to_byte = seen.argmax(axis=1), length - seen[:, ::-1].argmax(axis=1)
        if begin > start:  # keys before those that the mask speaks of are seen
            lo[first:last], hi[first:last] = start, np.where(some, begin + 8 * to_byte, begin)
        else:
            lo[first:last] = np.where(some, begin + 8 * from_byte, FAR)
            hi[first:last] = np.where(some, begin + 8 * to_byte, -FAR)
    return lo, hi


def _rows(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray | None:
    """Bytes of a block row's queries [queries, bytes], where their bits begin at whole bytes at even distances."""
    if not len(offsets) or offsets[0] < 0 or offsets[0] % 8:
        return None
    step = int(offsets[1] - offsets[0]) if len(offsets) > 1 else (len(mask) - int(offsets[0]) // 8) * 8
    if step <= 0 or step % 8 or (np.diff(offsets) != step).any():
        return None
    begin, size = int(offsets[0]) // 8, step // 8
    end = begin + len(offsets) * size
    return mask[begin:end].reshape(len(offsets), size) if end <= len(mask) else None
