# SPDX-License-Identifier: Apache-2.0
"""Digest, stats, trace and explain of a plan."""

from __future__ import annotations

import json

import numpy as np
import plan_cases
import pytest

from attnrt.errors import ArgumentError
from attnrt.scheduler import plan as plan_module
from attnrt.scheduler.plan import make_plan


def planned(kv_lens=(900, 20, 300), **more):
    index = plan_cases.paged([1, 1, 3], list(kv_lens))
    return make_plan(plan_cases.spec(), index, plan_cases.traits(6), pad_to=6, **more)


def test_same_lengths_same_digest():
    digests = {planned().digest for _ in range(3)}
    assert len(digests) == 1
    assert planned((901, 20, 300)).digest not in digests
    assert planned(scheduler="round_robin").digest not in digests


def test_readable_planner_gives_the_same_digest(monkeypatch):
    want = planned().digest
    monkeypatch.setattr(plan_module, "can_plan", lambda traits: False)
    assert planned().digest == want


def test_stats_count_what_is_there():
    plan = planned()
    numbers, cost = plan.stats(), plan.work["cost"].astype(np.float64)
    load = [
        cost[a:b].sum()
        for a, b in zip(plan.work.worker_indptr[:-1], plan.work.worker_indptr[1:], strict=True)
    ]
    assert numbers["makespan"] == max(load) and numbers["mean"] == pytest.approx(sum(load) / 6)
    assert numbers["items"] == len(plan.work) and numbers["partial_slots"] == plan.num_slots > 0
    assert numbers["partial_bytes"] == plan.num_slots * 4 * (64 + 2) * 4
    assert (
        make_plan(plan_cases.spec(), plan_cases.paged([], []), plan_cases.traits()).stats()["max_over_mean"]
        == 1.0
    )


def test_trace_has_every_item_behind_the_one_before(tmp_path):
    plan = planned()
    plan.trace(str(tmp_path / "plan.json"))
    events = [e for e in json.loads((tmp_path / "plan.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(plan.work)
    for worker in range(6):
        mine = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == worker)
        ends = np.cumsum([d for _, d in mine]).tolist()
        assert [t for t, _ in mine] == [0, *ends][: len(mine)]


def test_explain_names_items_and_slots():
    plan = planned()
    text = plan.explain(0, 3)
    assert "KV head 1" in text and "merge: slots" in text and text.count("item") > 1
    assert "writes out itself" in plan.explain(1, 0)
    assert "empty set" in plan.explain(5, 0)
    for row, head in ((6, 0), (0, 4), (-1, 0)):
        with pytest.raises(ArgumentError):
            plan.explain(row, head)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from attnrt.scheduler.picture import picture

    picture(planned(), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    picture(
        make_plan(plan_cases.spec(), plan_cases.paged([], []), plan_cases.traits()), tmp_path / "none.svg"
    )
