# SPDX-License-Identifier: Apache-2.0
"""Dense attention in float64 straight from the index arrays: no plan, no leaf, no kernel, no reduction tree.

It answers from the definitions (docs/design.md section 5): which keys a query sees, the logits in order, one softmax over all
of them. It also says how large an honest error may be, from the magnitudes met on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.tensor import TensorView

if TYPE_CHECKING:
    from attnrt.formats.base import BlockSparse, Index
    from attnrt.spec import AttentionSpec

__all__ = ["Answer", "host_array", "oracle", "oracle_answer", "slot_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The right result, and the magnitudes that bound errors.

    Attributes
    ----------
    out : float64 [rows, num_qo_heads, head_dim_vo]
    lse : float64 [rows, num_qo_heads]
    weight : float64 like out
        Sum of p * abs(v): what relative errors of weights and sums act on.
    logit : float64 like lse
        Largest sum of abs(q * k) * sm_scale and largest final logit, added: what relative errors of a logit act on.
    keys : int64 like lse
        Keys seen.
    """

    out: np.ndarray
    lse: np.ndarray
    weight: np.ndarray
    logit: np.ndarray
    keys: np.ndarray


def host_array(x: Any, dtype: str) -> np.ndarray:
    """Any host array as NumPy in ``dtype`` (its bits where an unsigned array holds them)."""
    return TensorView(x, dtype).numpy()


def slot_rows(spec: AttentionSpec, cache: Any) -> np.ndarray:
    """float64 [slots, num_kv_heads, dim] of a cache in any of its forms (copies it)."""
    array = host_array(cache, spec.kv_dtype)
    if array.ndim == 4:
        if spec.kv_layout == "HND":
            array = array.transpose(0, 2, 1, 3)
        array = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return array.astype(np.float64)


def oracle(
    spec: AttentionSpec,
    index: Index,
    q: Any,
    kv: Any,
    *,
    sm_scale: float | None = None,
    num_rows: int | None = None,
    **params: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) in float64 of host arrays; arguments as Attention.run's."""
    found = oracle_answer(spec, index, q, kv, sm_scale=sm_scale, num_rows=num_rows, **params)
    return found.out, found.lse


def oracle_answer(
    spec: AttentionSpec,
    index: Index,
    q: Any,
    kv: Any,
    *,
    sm_scale: float | None = None,
    num_rows: int | None = None,
    **params: Any,
) -> Answer:
    """``oracle`` with the magnitudes that bound errors."""
    queries = host_array(q, spec.q_dtype).astype(np.float64)
    k_cache, v_cache = (kv, None) if spec.shared_kv else kv
    k = slot_rows(spec, k_cache)
    v = k[..., : spec.head_dim_vo] if v_cache is None else slot_rows(spec, v_cache)
    rows = len(queries) if num_rows is None else num_rows
    hooks = spec.composed.numpy(
        spec.composed.bind(params, num_qo_heads=spec.num_qo_heads, num_kv_heads=spec.num_kv_heads)
    )
    scale = spec.sm_scale if sm_scale is None else sm_scale
    shape = (rows, spec.num_qo_heads)
    answer = Answer(
        out=np.zeros((*shape, spec.head_dim_vo)),
        lse=np.full(shape, -np.inf),
        weight=np.zeros((*shape, spec.head_dim_vo)),
        logit=np.zeros(shape),
        keys=np.zeros(shape, np.int64),
    )
    for (row, kv_head), seen in _visible(spec, index).items():
        for head in range(kv_head * spec.group, (kv_head + 1) * spec.group):
            _row(spec, hooks, scale, answer, row, head, queries[row, head], k, v, seen)
    return answer


@dataclass(slots=True, eq=False)
class _Seen:
    """What one query may see under one KV head, before the variant's own mask."""

    ctx: dict[str, Any]
    slots: list[np.ndarray]
    positions: list[np.ndarray]


def _visible(spec: AttentionSpec, index: Index) -> dict[tuple[int, int], _Seen]:
    found: dict[tuple[int, int], _Seen] = {}
    for part in index.parts:
        for block_row in range(part.num_rows):
            for query in range(int(part.qo_indptr[block_row]), int(part.qo_indptr[block_row + 1])):
                row = query if part.qo_index is None else int(part.qo_index[query])
                for head in range(spec.num_kv_heads):
                    slots, positions = _list(part, block_row, query, head if part.heads > 1 else 0)
                    if (row, head) not in found:
                        found[row, head] = _Seen(_context(part, query, row, head), [], [])
                    found[row, head].slots.append(slots)
                    found[row, head].positions.append(positions)
    return found


def _true_len(part: BlockSparse, request: int) -> int:
    bound = part.requests.bound_kv_lens
    return int(part.requests.kv_lens[request] if bound is None else np.asarray(bound)[request])


def _context(part: BlockSparse, query: int, row: int, head: int) -> dict[str, Any]:
    request = int(part.request[query])
    length = _true_len(part, request)
    return {
        "request": request,
        "qo_pos": int(part.qo_pos[query]) - (int(part.requests.kv_lens[request]) - length),
        "qo_row": row,
        "qo_len": int(part.requests.qo_lens[request]),
        "kv_len": length,
        "kv_head": head,
    }


def _list(part: Any, block_row: int, query: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions of the listed, live, unmasked keys of one query."""
    size = part.block_size[1]
    cell = block_row * part.heads + head
    j = np.arange(int(part.kv_begin[cell]), int(part.kv_end[cell]), dtype=np.int64)
    offset = j + int(part.kv_offset[block_row])
    keep = offset < _true_len(part, int(part.request[query]))
    j, offset = j[keep], offset[keep]
    entry = int(part.indptr[cell]) + j // size
    live = np.ones(len(j), bool)
    if part.indices is None:
        slots = int(part.kv_base[block_row]) + j
    else:
        block = np.asarray(part.indices)[entry].astype(np.int64)
        slots, live = block * size + j % size, block >= 0
    if part.block_pos is None:
        positions = int(part.kv_pos[block_row]) + j
    else:
        positions = part.block_pos[entry].astype(np.int64) + j % size
    if part.mask is not None and int(part.mask_offset[query]) >= 0:
        bits = np.unpackbits(np.asarray(part.mask), bitorder="little")
        place = offset - int(part.mask_begin[block_row])
        at = np.where(place >= 0, int(part.mask_offset[query]) + place, 0)
        live &= (place < 0) | (bits[np.minimum(at, len(bits) - 1)] == 1)
    return slots[live], positions[live]


def _row(
    spec: AttentionSpec,
    hooks: Any,
    scale: float,
    answer: Answer,
    row: int,
    head: int,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: _Seen,
) -> None:
    slots, positions = np.concatenate(seen.slots), np.concatenate(seen.positions)
    kv_head = seen.ctx["kv_head"]
    one = seen.ctx | {"qo_head": head}
    ctx = {name: np.full(len(slots), value) for name, value in one.items()}
    ctx |= {"kv_pos": positions, "kv_slot": slots}
    visible = np.broadcast_to(hooks.mask(ctx), slots.shape)
    slots, ctx = slots[visible], {name: value[visible] for name, value in ctx.items()}
    if len(slots) == 0:
        return
    query = hooks.query({name: np.array([value]) for name, value in one.items()}, q[None])[0]
    keys, values = hooks.key(ctx, k[slots, kv_head]), hooks.value(ctx, v[slots, kv_head])
    logits = np.broadcast_to(hooks.logits(ctx, keys @ query * scale), slots.shape)
    row_ctx = {name: np.array([value]) for name, value in one.items()}
    sink = hooks.sink(row_ctx)
    if spec.composed.use_softmax:
        every = logits if sink is None else np.append(logits, np.broadcast_to(sink, (1,)))
        top = every.max()
        total = np.exp(every - top).sum()
        weights = np.exp(logits - top) / total
        answer.lse[row, head] = top + np.log(total)
    else:
        weights = logits
        answer.lse[row, head] = 0.0
    plain = weights @ values
    answer.out[row, head] = hooks.output(row_ctx, plain[None])[0]
    answer.keys[row, head] = len(slots)
    size = np.abs(keys) @ np.abs(query) * abs(scale)
    answer.logit[row, head] = size.max() + np.abs(logits).max()
    spread = np.abs(weights) @ np.abs(values)
    # an output hook scales errors as it scales numbers
    grown = [hooks.output(row_ctx, (plain + sign * spread)[None])[0] for sign in (-1, 1)]
    answer.weight[row, head] = np.maximum(*(np.abs(g - answer.out[row, head]) for g in grown))
