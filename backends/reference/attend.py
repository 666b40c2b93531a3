# SPDX-License-Identifier: Apache-2.0
"""The work items of a plan in NumPy float64.

Bits here obey the same rule as in every backend: a row's state of a leaf is a function of the row and of the keys it sees in
that leaf. NumPy's own reductions do not: a matrix product or a pairwise sum changes its order with the shape. So each q.k is
one sum over the contiguous head dimension, and sums over keys go through ``np.add.reduce`` along an outer axis, which adds
one key after the other; a key that a row does not see adds +0 to a sum that starts at +0, which changes no bit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.backends.reference.views import Part, cache_array, part_arrays, store
from attnrt.fold import LN2, LOG2E, State, empty_state, fold
from attnrt.scheduler.base import DIRECT, WORK_FIELDS

if TYPE_CHECKING:
    from attnrt.backends.base import Call

__all__ = ["Context", "attend_items", "finish_rows"]

#: Keys per step; any number gives the same bits.
CHUNK = 128


@dataclass(slots=True, eq=False)
class Keys:
    """Keys of one list, by offset in the request: [n] each. ``listed`` is False in holes and past the live range."""

    offsets: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    listed: np.ndarray


class Context:
    """The arrays and hooks of one call."""

    def __init__(self, call: Call) -> None:
        loaded, spec = call.loaded, call.loaded.plan.spec
        self.call, self.spec, self.plan = call, spec, loaded.plan
        self.hooks: Any = spec.composed.numpy(call.params)
        self.softmax: bool = spec.composed.use_softmax
        self.parts: list[Part] = part_arrays(loaded)
        self.q, self.out = call.q.numpy(), call.out.numpy()
        self.lse = None if call.lse is None else call.lse.numpy()
        self.k = cache_array(call.k, spec.num_kv_heads, spec.head_dim)
        self.v = cache_array(call.v, spec.num_kv_heads, spec.head_dim_vo)
        self.qo_lens, self.most_kv = loaded.qo_lens.numpy(), loaded.kv_lens.numpy()
        bound = loaded.bound_kv_lens
        self.kv_lens = self.most_kv if bound is None else np.clip(bound.numpy(), 0, self.most_kv)
        self.acc, self.ml = loaded.partial_acc.numpy(), loaded.partial_ml.numpy()

    def heads(self, kv_head: int) -> slice:
        """Query heads of a KV head."""
        group = self.spec.group
        return slice(kv_head * group, (kv_head + 1) * group)

    def row_context(self, part: Part, queries: np.ndarray, kv_head: int) -> dict[str, np.ndarray]:
        """ctx of each (query, query head of the group), [queries * group]."""
        group = self.spec.group
        request = part.request[queries]
        position = part.qo_pos[queries] - (self.most_kv[request] - self.kv_lens[request])
        rows = queries if part.qo_index is None else part.qo_index[queries]
        fields = {
            "request": request,
            "qo_pos": position,
            "qo_row": rows,
            "qo_len": self.qo_lens[request],
            "kv_len": self.kv_lens[request],
            "kv_head": np.full(len(queries), kv_head, np.int32),
        }
        ctx = {name: np.repeat(value, group) for name, value in fields.items()}
        ctx["qo_head"] = np.tile(
            np.arange(kv_head * group, (kv_head + 1) * group, dtype=np.int32), len(queries)
        )
        return ctx


def attend_items(call: Call, clock: list[tuple[int, int]] | None = None) -> None:
    """Run every item: finished rows of out and lse, or partial states; ``clock`` collects (start, stop) in nanoseconds."""
    here = Context(call)
    for row in call.loaded.work.numpy().tolist():
        item = dict(zip(WORK_FIELDS, row, strict=True))
        start = time.perf_counter_ns()
        for head in range(item["head_begin"], item["head_end"]):
            _item(here, item, head)
        if clock is not None:
            clock.append((start, time.perf_counter_ns()))


def _item(here: Context, item: dict[str, int], head: int) -> None:
    part = here.parts[item["part"]]
    queries = np.arange(item["q_begin"], item["q_end"])
    rows = queries if part.qo_index is None else part.qo_index[queries]
    ctx = here.row_context(part, queries, head)
    q = here.q[rows][:, here.heads(head)].astype(np.float64).reshape(len(queries) * here.spec.group, -1)
    q = np.ascontiguousarray(here.hooks.query(ctx, q))
    ruler = here.plan.traits.classes[item["klass"]].ruler
    states = []
    for leaf in range(item["leaf_begin"], item["leaf_end"]):
        begin = max(item["kv_begin"], ruler.start(leaf))
        end = min(item["kv_end"], ruler.start(leaf + 1))
        states.append(_leaf(here, part, item["row"], head, queries, ctx, q, begin, end))
    if item["fold"] or item["slot"] == DIRECT:
        total = empty_state((len(q),), here.spec.head_dim_vo, np.float64)
        for state in states:
            total = fold(total, state)
        states = [total]
    if item["slot"] == DIRECT:
        finish_rows(here, states[0], ctx, rows, here.heads(head))
        return
    shape = (len(queries), here.spec.group)
    for k, state in enumerate(states):
        first = item["slot"] + k * len(queries)
        where = (slice(first, first + len(queries)), here.heads(head))
        here.acc[where] = state.acc.reshape(*shape, -1)
        here.ml[where] = np.stack([state.m, state.l], -1).reshape(*shape, 2)


def _keys(here: Context, part: Part, row: int, head: int, begin: int, end: int, kv_len: int) -> Keys:
    """Keys at offsets begin..end of block row ``row``'s list."""
    offsets = np.arange(begin, end, dtype=np.int64)
    j = offsets - int(part.kv_offset[row])
    cell = row * part.heads + (head if part.heads > 1 else 0)
    listed = (j >= part.kv_begin[cell]) & (j < part.kv_end[cell]) & (offsets < kv_len)
    j = np.where(listed, j, 0)
    size = part.block_size
    entry = np.where(listed, part.indptr[cell] + j // size, 0)
    if part.indices is None:
        slots = part.kv_base[row] + j
    else:
        block = part.indices[entry].astype(np.int64) if listed.any() else np.zeros(len(j), np.int64)
        slots = block * size + j % size
        listed = listed & (block >= 0)
    if part.block_pos is None:
        positions = part.kv_pos[row] + j
    else:
        base = part.block_pos[entry].astype(np.int64) if listed.any() else np.zeros(len(j), np.int64)
        positions = base + j % size
    pool = here.k.shape[0] * here.k.shape[1]
    listed = listed & (slots >= 0) & (slots < pool)  # bound ids are not checked on the host
    return Keys(offsets, np.where(listed, slots, 0), positions, listed)


def _index_mask(part: Part, row: int, queries: np.ndarray, keys: Keys) -> np.ndarray | None:
    """What the index's own mask bits let each query see, [queries, n]."""
    if part.mask is None:
        return None
    seen = np.ones((len(queries), len(keys.offsets)), bool)
    place = keys.offsets - int(part.mask_begin[row])
    for i, query in enumerate(queries):
        start = int(part.mask_offset[query])
        if start >= 0:
            bits = start + np.where(place >= 0, place, 0)
            inside = bits < 8 * len(part.mask)
            seen[i] = place < 0
            bits = bits[inside]  # none where the mask speaks of no key
            seen[i, inside] |= ((part.mask[bits // 8] >> (bits % 8).astype(np.uint8)) & 1).astype(bool)
    return seen


def _leaf(
    here: Context,
    part: Part,
    row: int,
    head: int,
    queries: np.ndarray,
    ctx: dict[str, np.ndarray],
    q: np.ndarray,
    begin: int,
    end: int,
) -> State:
    """State of rows [queries * group] over the keys at offsets begin..end."""
    group = here.spec.group
    logits, seen, values = [], [], []
    for first in range(begin, max(end, begin), CHUNK):
        # queries of one block row may belong to different requests (a shared prefix): each has its own length
        keys = _keys(
            here,
            part,
            row,
            head,
            first,
            min(first + CHUNK, end),
            int(here.kv_lens[part.request[queries]].max()),
        )
        score, visible = _scores(here, ctx, q, keys)
        mask = _index_mask(part, row, queries, keys)
        if mask is not None:
            visible &= np.repeat(mask, group, 0)
        visible &= keys.offsets < ctx["kv_len"][:, None]
        logits.append(score)
        seen.append(visible)
        values.append(_values(here, keys, head, ctx))
    state = empty_state((len(q),), here.spec.head_dim_vo, np.float64)
    if not logits:
        return state
    score, visible = np.concatenate(logits, 1), np.concatenate(seen, 1)
    any_seen = visible.any(1)
    if here.softmax:
        score = np.where(visible, score * LOG2E, -np.inf)
        m = np.where(any_seen, score.max(1), -np.inf)
        with np.errstate(invalid="ignore", over="ignore"):
            weights = np.where(visible, np.exp2(score - m[:, None]), 0.0)
    else:  # weights add: every state has m = 0, so that the fold adds
        m = np.where(any_seen, 0.0, -np.inf)
        weights = np.where(visible, score, 0.0)
    total = np.zeros((len(q), here.spec.head_dim_vo + 1))
    for i, value in enumerate(values):
        span = slice(i * CHUNK, i * CHUNK + len(value))
        total = _add(total, weights[:, span], visible[:, span], value)
    l = total[:, -1] if here.softmax else np.where(any_seen, 1.0, 0.0)
    return State(m=m, l=l, acc=total[:, :-1])


def _scores(
    here: Context, ctx: dict[str, np.ndarray], q: np.ndarray, keys: Keys
) -> tuple[np.ndarray, np.ndarray]:
    """Final logits and visibility, [rows, n] each; logits of unseen keys are anything."""
    page = here.k.shape[1]
    head = int(ctx["kv_head"][0])
    k = here.k[keys.slots // page, keys.slots % page, head].astype(np.float64)
    key_ctx = _key_context(keys, ctx)
    k = np.ascontiguousarray(here.hooks.key(key_ctx, k))
    both = {name: value[:, None] for name, value in ctx.items()}
    both |= {"kv_pos": keys.positions[None], "kv_slot": keys.slots[None]}
    with np.errstate(invalid="ignore", over="ignore"):
        dot = (q[:, None, :] * k[None]).sum(-1)
        score = np.broadcast_to(here.hooks.logits(both, dot * here.call.sm_scale), dot.shape)
    visible = np.broadcast_to(here.hooks.mask(both), dot.shape) & keys.listed[None]
    return score, visible


def _key_context(keys: Keys, ctx: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """ctx of hooks on K and V: fields of the request are those of the first row."""
    count = len(keys.offsets)
    fields = {
        name: np.broadcast_to(ctx[name][:1], (count,)) for name in ("request", "kv_head", "kv_len", "qo_len")
    }
    return fields | {"kv_pos": keys.positions, "kv_slot": keys.slots}


def _values(here: Context, keys: Keys, head: int, ctx: dict[str, np.ndarray]) -> np.ndarray:
    """V rows with a one behind each, [n, head_dim_vo + 1]."""
    page = here.v.shape[1]
    v = here.v[keys.slots // page, keys.slots % page, head].astype(np.float64)
    v = here.hooks.value(_key_context(keys, ctx), v)
    return np.concatenate([v, np.ones((len(v), 1))], 1)


def _add(total: np.ndarray, weights: np.ndarray, visible: np.ndarray, value: np.ndarray) -> np.ndarray:
    """total [rows, dim] + sum of weights * value over keys, one key after the other."""
    terms = np.empty((len(weights), len(value) + 1, value.shape[1]))
    terms[:, 0] = total
    with np.errstate(invalid="ignore", over="ignore"):
        np.multiply(weights[:, :, None], value[None], out=terms[:, 1:])
        terms[:, 1:][~visible] = 0.0  # by selection: an unseen V may be NaN
        return np.add.reduce(terms, axis=1)


def finish_rows(
    here: Context, state: State, ctx: dict[str, np.ndarray], rows: np.ndarray, heads: slice
) -> None:
    """Divide, add the sink, apply the output hook, round, and write rows [queries * heads] of out and lse.

    The empty set is (0, -inf) whatever the variant: neither sink nor output hook touches it.
    """
    empty = state.m == -np.inf
    m, l, acc = state.m, state.l, state.acc
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if here.softmax:
            sink = here.hooks.sink(ctx)
            if sink is not None:
                extra = np.broadcast_to(sink, m.shape) * LOG2E
                top = np.maximum(m, extra)
                l, acc, m = l * np.exp2(m - top) + np.exp2(extra - top), acc * np.exp2(m - top)[:, None], top
            acc = acc / l[:, None]
        out = np.where(empty[:, None], 0.0, here.hooks.output(ctx, acc))
        lse = np.where(empty, -np.inf, (m + np.log2(l)) * LN2)
    count = heads.stop - heads.start
    block = np.empty((len(rows), count, out.shape[-1]), here.out.dtype)
    store(block, out.reshape(block.shape), here.spec.out_dtype)
    here.out[rows, heads] = block
    if here.lse is not None:
        here.lse[rows, heads] = lse.reshape(len(rows), count)
