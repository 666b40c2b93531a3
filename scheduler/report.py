# SPDX-License-Identifier: Apache-2.0
"""Reading a plan: its digest, its numbers, a trace for a timeline viewer, one row in words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from attnrt.errors import ArgumentError
from attnrt.scheduler.base import DIRECT, WORK_FIELDS, Plan

__all__ = ["digest", "explain", "loads", "stats", "trace"]

_PART_ARRAYS = (
    "qo_indptr",
    "qo_index",
    "request",
    "qo_pos",
    "indptr",
    "indices",
    "kv_base",
    "kv_pos",
    "block_pos",
    "kv_begin",
    "kv_end",
    "kv_offset",
    "mask",
    "mask_offset",
    "mask_begin",
)


def digest(plan: Plan) -> str:
    """sha256 over every host array of the plan and of its parts, with names, dtypes and shapes; hex.

    Bound (device) arrays count by name alone: their contents are not the plan's.
    """
    total = hashlib.sha256()

    def add(name: str, array: Any) -> None:
        if isinstance(array, np.ndarray):
            total.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
            total.update(np.ascontiguousarray(array).tobytes())
        elif array is not None:
            total.update(f"{name}:bound;".encode())

    total.update(f"{plan.tree}:{plan.deterministic}:{plan.num_slots}:{plan.num_rows};".encode())
    for name, array in (
        ("items", plan.work.items),
        ("worker_indptr", plan.work.worker_indptr),
        ("merge_rows", plan.merge.rows),
        ("merge_slots", plan.merge.slots),
        ("merge_leaves", plan.merge.leaves),
    ):
        add(name, array)
    for i, part in enumerate(plan.parts):
        total.update(f"part{i}:{part.block_size}:{part.heads}:{part.num_qo};".encode())
        for name in _PART_ARRAYS:
            add(name, getattr(part, name))
    requests = plan.index.requests
    add("qo_lens", requests.qo_lens)
    add("kv_lens", requests.kv_lens)
    add("bound_kv_lens", requests.bound_kv_lens)
    return total.hexdigest()


def loads(plan: Plan) -> np.ndarray:
    """Cost of every worker, float64 [all_workers]."""
    worker = np.repeat(np.arange(plan.traits.all_workers), np.diff(plan.work.worker_indptr))
    return np.bincount(worker, weights=plan.work["cost"], minlength=plan.traits.all_workers)


def stats(plan: Plan) -> dict[str, float]:
    """Numbers of a plan.

    Returns
    -------
    dict
        ``makespan``, ``mean`` (cost of the busiest worker, and of all over their number; where teams work beside the others,
        those of the busiest of them), ``max_over_mean`` (1 for an empty plan), ``items``, ``direct_items``, ``idle_workers``,
        ``merge_rows``, ``partial_slots``, ``partial_bytes`` (written once and read once).
    """
    sizes = [plan.traits.num_workers, *(team.num_workers for team in plan.traits.teams)]
    crews = [load for load in np.split(loads(plan), np.cumsum(sizes)[:-1]) if len(load)]
    load = max(crews, key=lambda load: load.max())
    makespan, mean = float(load.max()), float(load.mean())
    spec = plan.spec
    dim = spec.head_dim if spec.head_dim_vo is None else spec.head_dim_vo
    return {
        "makespan": makespan,
        "mean": mean,
        "max_over_mean": makespan / mean if mean else 1.0,
        "items": len(plan.work),
        "direct_items": int((plan.work["slot"] == DIRECT).sum()),
        "idle_workers": int((np.diff(plan.work.worker_indptr) == 0).sum()),
        "merge_rows": len(plan.merge),
        "partial_slots": plan.num_slots,
        "partial_bytes": plan.num_slots * spec.num_qo_heads * (dim + 2) * 4,
    }


def trace(plan: Plan, path: str | Path) -> None:
    """Write the schedule as Chrome trace-event JSON (one thread per worker, one microsecond per unit of cost)."""
    events: list[dict[str, Any]] = []
    items = plan.work.items.tolist()
    for worker in range(plan.traits.all_workers):
        clock = 0
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": worker, "args": {"name": f"worker {worker}"}}
        )
        for i in range(int(plan.work.worker_indptr[worker]), int(plan.work.worker_indptr[worker + 1])):
            fields = dict(zip(WORK_FIELDS, items[i], strict=True))
            request = int(plan.parts[fields["part"]].request[fields["q_begin"]])
            events.append(
                {
                    "ph": "X",
                    "name": f"request {request}",
                    "cat": plan.traits.classes[fields["klass"]].name,
                    "pid": 0,
                    "tid": worker,
                    "ts": clock,
                    "dur": fields["cost"],
                    "args": fields,
                }
            )
            clock += fields["cost"]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def explain(plan: Plan, row: int, head: int) -> str:
    """Which items and slots make row ``row``, query head ``head`` of the output, in words.

    Raises
    ------
    ArgumentError
        No such row or head.
    """
    for name, value, end in (("row", row, plan.num_rows), ("head", head, plan.spec.num_qo_heads)):
        if not 0 <= value < end:
            raise ArgumentError(name, f"must be in [0, {end})", value)
    kv_head = head // plan.spec.group
    lines = [f"row {row}, query head {head} (KV head {kv_head}):"]
    worker = np.repeat(np.arange(plan.traits.all_workers), np.diff(plan.work.worker_indptr))
    for i, item in enumerate(plan.work.items.tolist()):
        f = dict(zip(WORK_FIELDS, item, strict=True))
        part = plan.parts[f["part"]]
        rows = (
            range(f["q_begin"], f["q_end"])
            if part.qo_index is None
            else part.qo_index[f["q_begin"] : f["q_end"]].tolist()
        )
        if row in rows and f["head_begin"] <= kv_head < f["head_end"]:
            lines.append(_item_line(plan, f, i, int(worker[i]), rows.index(row)))
    for qo_row, head_begin, head_end, begin, end in plan.merge.rows.tolist():
        if qo_row == row and head_begin <= kv_head < head_end:
            slots = plan.merge.slots[begin:end].tolist()
            how = "left to right" if plan.tree == "sequential" else "pairwise by leaf"
            lines.append(f"  merge: slots {slots} {how}" if slots else "  empty set: out = 0, lse = -inf")
    return "\n".join(lines)


def _item_line(plan: Plan, f: dict[str, int], item: int, worker: int, query: int) -> str:
    name = plan.traits.classes[f["klass"]].name
    where = f"  item {item} on worker {worker}, part {f['part']}, block row {f['row']}, class {name}: "
    if f["kv_begin"] == f["kv_end"]:
        return where + "no visible key, writes the empty set"
    leaves = (
        f"leaf {f['leaf_begin']}"
        if f["leaf_end"] - f["leaf_begin"] == 1
        else f"leaves {f['leaf_begin']}-{f['leaf_end'] - 1}"
    )
    keys = f"keys {f['kv_begin']}-{f['kv_end'] - 1} ({leaves})"
    if f["slot"] == DIRECT:
        return where + keys + ", writes out itself"
    count = f["q_end"] - f["q_begin"]
    states = 1 if f["fold"] else f["leaf_end"] - f["leaf_begin"]
    slots = [f["slot"] + k * count + query for k in range(states)]
    return (
        where
        + keys
        + (f", folded into slot {slots[0]}" if f["fold"] else f", one state per leaf in slots {slots}")
    )
