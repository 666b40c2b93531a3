# SPDX-License-Identifier: Apache-2.0
"""Requests and positions: what every builder reads before it looks at its own layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.formats.arrays import INT_MAX, bound_array, frozen, host_ints, iota, is_device, largest, lens_of
from attnrt.formats.base import Requests

__all__ = ["Queries", "first_key_positions", "key_positions", "read_kv_lens", "read_queries"]


class Queries:
    """The queries of a batch: ``indptr``, ``request``, ``pos``, ``longest`` (most queries of one request)."""

    __slots__ = ("count", "indptr", "longest", "pos", "request")

    def __init__(self, indptr: np.ndarray, request: np.ndarray, pos: np.ndarray, longest: int) -> None:
        self.indptr = indptr
        self.request = request
        self.pos = pos
        self.count = len(pos)
        self.longest = longest


def read_kv_lens(
    kv_lens: Any, max_kv_lens: Any, count: int, of: str = "requests"
) -> tuple[np.ndarray, int, Any]:
    """Host lengths (upper bounds when bound), the longest of them, and the bound array or None.

    ``of`` says what there are ``count`` of, and which array says so.
    """
    bound = None
    name, values = "kv_lens", kv_lens
    if is_device(kv_lens):
        if max_kv_lens is None:
            raise ArgumentError(
                "max_kv_lens",
                "must be given when kv_lens is a device array",
                None,
                "plan() needs host upper bounds of the lengths that each run reads.",
            )
        bound = bound_array("kv_lens", kv_lens, exactly=count, of=of)
        name, values = "max_kv_lens", max_kv_lens
    elif max_kv_lens is not None:
        raise ArgumentError("max_kv_lens", "must be left out when kv_lens is a host array", "both")
    lens = host_ints(name, values, length=count, of=of)
    return lens, max(largest(name, lens), 0), bound


def read_queries(
    qo_indptr: Any, kv_lens: np.ndarray, bound: Any, qo_pos: Any, longest_kv: int
) -> tuple[Requests, Queries]:
    """Requests and queries from qo_indptr; positions are bottom-right unless ``qo_pos`` [num_qo] gives them.

    Query i of a request with qo_len queries and kv_len keys has position kv_len - qo_len + i. ``qo_indptr`` may be an array
    already read (frozen by us), which is then taken as it is.
    """
    indptr = host_ints("qo_indptr", qo_indptr, length=len(kv_lens) + 1, of="requests + 1")
    lens, longest = lens_of("qo_indptr", indptr)
    total, count = indptr.item(-1), len(lens)
    requests = Requests(qo_lens=lens, kv_lens=kv_lens, bound_kv_lens=bound)
    if longest == 1 and total == count:  # all decode: no repeat
        request = iota(count)
        pos = kv_lens - 1 if qo_pos is None else None
    else:
        request = np.repeat(iota(count), lens)
        frozen(request)
        # kv_len - qo_len + (row - indptr[request]) = row + (kv_len - indptr[request + 1])
        pos = iota(total) + np.repeat(kv_lens - indptr[1:], lens) if qo_pos is None else None
    if pos is None:
        pos = host_ints("qo_pos", qo_pos, length=total, of="queries")
    else:
        frozen(pos)
    if longest_kv + total > INT_MAX:
        raise ArgumentError("kv_lens", "must keep positions within int32", longest_kv)
    return requests, Queries(indptr, request, pos, longest)


def first_key_positions(kv_pos: Any, count: int) -> np.ndarray:
    """int32 [requests]: the position of each request's first key, from an array of that shape."""
    return host_ints(
        "kv_pos",
        kv_pos,
        length=count,
        of="requests: the position of each one's first key; for one position per key give a list of arrays",
    )


def key_positions(kv_pos: Any, kv_lens: np.ndarray) -> np.ndarray | None:
    """Per-key positions, concatenated over requests, if ``kv_pos`` is a sequence of one array per request; else None."""
    if not isinstance(kv_pos, (list, tuple)) or not kv_pos or not hasattr(kv_pos[0], "__len__"):
        return None
    if len(kv_pos) != len(kv_lens):
        raise ArgumentError("kv_pos", f"must have {len(kv_lens)} arrays (one per request)", len(kv_pos))
    parts = [
        host_ints(f"kv_pos[{i}]", one, length=int(kv_lens[i]), of="keys") for i, one in enumerate(kv_pos)
    ]
    return np.concatenate(parts)
