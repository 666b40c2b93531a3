# SPDX-License-Identifier: Apache-2.0
"""Decode steps that go to the device by one call (attnrt/step.py), beside the long way over the same fake driver."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
from fake_driver import build, run_script

pytest.importorskip("attnrt.backends.cuda._driver")
pytest.importorskip("attnrt._step_native")

#: ``device(attn)``: all that kernels would read of the loaded plan, by following the header. ``short(attn)``: the long way fails.
TOOLS = """
import contextlib, pytest
from attnrt.backends.cuda import structs
from attnrt.errors import LimitError, PlanError
from attnrt.scheduler.base import MERGE_FIELDS, WORK_FIELDS

@contextlib.contextmanager
def short(attn):
    workspace = attn.workspace
    def leave(*_):
        raise AssertionError("not the short way")
    workspace.load = leave
    try:
        yield
    finally:
        del workspace.load

def device(attn, plan):
    tenant, parts = attn._runtime.tenant, plan.parts
    at_header = tenant.cell.address + tenant.layout.plan
    header = np.frombuffer(ctypes.string_at(at_header, structs.HEADER.itemsize), structs.HEADER)[0]
    def read(pointer, nbytes):
        return ctypes.string_at(int(pointer), nbytes) if pointer else None
    requests, merges, entries = len(plan.index.requests), len(plan.merge), len(plan.merge.slots)
    found = {name: int(header[name]) for name in structs.HEADER.names if structs.HEADER[name].kind in "iu"}
    words = dict(work=len(WORK_FIELDS) * len(plan.work), worker_indptr=plan.traits.all_workers + 1, qo_lens=requests)
    words |= dict(merge_rows=len(MERGE_FIELDS) * merges, merge_slots=entries, merge_leaves=entries, kv_lens=requests)
    words |= dict(counters=merges * plan.spec.num_kv_heads)
    found |= {name: read(header[name], 4 * n) if n else None for name, n in words.items()}
    for name in ("partial_acc", "partial_ml"):
        found[name] = bool(found[name])
    found["rulers"] = header["rulers"][: len(plan.traits.classes)].tobytes()
    part, source = header["parts"][0], parts[0]
    for name in structs.PART_POINTERS:
        array = getattr(source, name, None)
        found["part." + name] = read(part[name], array.nbytes) if array is not None else int(part[name])
        assert array is None or found["part." + name] == array.tobytes(), name
    found |= {"part." + name: part[name].tolist() for name in ("block", "heads", "queries")}
    loaded = tenant.loaded
    assert [int(header[name]) for name in structs.HEADER_POINTERS] == [*loaded.addresses, loaded.counters[0]]
    assert loaded.parts[0].request.ptr == int(part["request"]) and loaded.plan is plan
    return found

def same(a, b):
    assert a.digest == b.digest and a.num_slots == b.num_slots and a.num_rows == b.num_rows and repr(a) == repr(b)
    for one, other in zip((a.work.items, a.work.worker_indptr, a.merge.rows, a.merge.slots, a.merge.leaves),
                          (b.work.items, b.work.worker_indptr, b.merge.rows, b.merge.slots, b.merge.leaves)):
        assert one.dtype == other.dtype and np.array_equal(one, other)

s = spec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
most = at.Limits(40, 40, 4000, num_pages=4000, max_qo_len=1)
rng = np.random.default_rng()

def batch(requests, longest=900, size=16):
    return paged([1] * requests, rng.integers(1, longest, requests).tolist(), size)
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    library = build(tmp_path_factory.mktemp("driver"))
    return lambda text: run_script(library, TOOLS + text)


def test_the_same_plan_and_the_same_bytes(fake):
    fake("""
for given in (None, most):
    attn, other = (at.Attention(s, backend=cuda, limits=given) for _ in "ab")
    other._runtime.stepper = None
    for a in (attn, other):
        a.plan(batch(40))
    quick = 0
    for requests in [40, 1, 7, 40, 40, 33, 16, 2, 1, 40]:
        index = batch(requests)
        for again in range(2):  # the second finds the index there
            long = other.plan(index)
            with contextlib.nullcontext() if given is None else short(attn):  # without limits memory may have to grow
                plan = attn.plan(index)
            quick += not attn._runtime.stepper._stale
            same(plan, long)
            ours, theirs = device(attn, plan), device(other, long)
            assert ours == theirs, [k for k in ours if ours[k] != theirs[k]]
    assert quick > 12, quick
""")


def test_lists_of_tokens_affine_lists_and_heads_of_their_own(fake):
    fake("""
def tokens(requests, longest=300):
    lens = rng.integers(1, longest, requests)
    indptr = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return at.formats.paged(np.arange(requests + 1, dtype=np.int32), indptr, rng.permutation(indptr[-1]).astype(np.int32),
                            lens.astype(np.int32), 1)
def affine(requests, longest=300):
    kv = np.concatenate([[0], np.cumsum(rng.integers(1, longest, requests))]).astype(np.int32)
    return at.formats.ragged(np.arange(requests + 1, dtype=np.int32), kv)
for make in (affine, tokens):
    attn, other = (at.Attention(s, backend=cuda) for _ in "ab")
    other._runtime.stepper = None
    for requests in (90, 90, 40, 9):
        index = make(requests)
        plan, long = attn.plan(index), other.plan(index)
        same(plan, long)
        assert device(attn, plan) == device(other, long)
    with short(attn):
        attn.plan(make(20, 128))  # nothing is cut, so no more partial slots than before
""")


def test_runs_go_on_where_nothing_that_they_remember_has_changed(fake):
    fake("""
def straight(attn):
    "Runs that leave the shortest way fail."
    def leave(*_):
        raise AssertionError("not the shortest way")
    attn._runtime.run = leave

for given in (None, most):
    attn = at.Attention(s, backend=cuda, limits=given)
    q, kv, out, lse = arrays(s, 8, pages=600)
    if given is None:
        attn.plan(batch(40))
        attn.plan(paged((1,) * 8, (900,) * 8))  # as many partial slots as any of the batches below
    for _ in range(3):
        old = attn.plan(batch(8))
        attn.run(q, kv, out=out)
    straight(attn)
    for longest in (100, 300, 900):  # other pages, more of them
        plan = attn.plan(batch(8, longest))
        attn.run(q, kv, plan, out=out)
        trace()
        attn.run(q, kv, out=out)
        assert kinds() == ["launch"]
    del attn._runtime.run
    with pytest.raises(PlanError, match="loaded"):
        attn.run(q, kv, old, out=out)
    attn.plan(batch(5))  # other rows: q no longer fits
    with pytest.raises(PlanError, match="rows"):
        attn.run(q, kv, out=out)
    few = arrays(s, 5, pages=600)
    attn.run(few[0], few[1], out=few[2])
    attn.plan(batch(8))
    small = arrays(s, 8, pages=3)
    with pytest.raises(at.ArgumentError, match="slots"):
        attn.run(small[0], small[1], out=small[2])
    attn.run(q, kv, out=out)
    attn.plan(batch(8, 16))  # the small pool holds it
    attn.run(small[0], small[1], out=small[2]) if attn._runtime.needs.slots <= 48 else None
""")


def test_a_smaller_pool_is_looked_at_again(fake):
    """A form that a short index allowed is compared anew once a longer one is loaded."""
    fake("""
attn = at.Attention(s, backend=cuda)
attn.plan(batch(8, 900))
attn.plan(paged([1], [20]))
small = arrays(s, 1, pages=2)
for _ in range(3):
    attn.run(small[0], small[1], out=small[2])
with short(attn):
    attn.plan(paged([1], [40]))
with pytest.raises(at.ArgumentError, match="slots"):
    attn.run(small[0], small[1], out=small[2])
""")


def test_what_it_leaves_to_the_long_way(fake):
    """Errors, other kinds of indexes, other streams; and the way back."""
    fake("""
attn = at.Attention(s, backend=cuda, limits=at.Limits(40, 80, 4000, num_pages=4000))
eager = at.Attention(s, backend=cuda)
limited = at.Attention(s, backend=cuda, limits=at.Limits(4, 8, 100, num_pages=90, max_qo_len=1))
limited.plan(batch(4, 100))
for index, name in ((batch(5), "max_requests"), (batch(4, 900), "")):
    before = limited._runtime.tenant.loaded
    try:
        limited.plan(index)
    except LimitError as error:
        assert name in error.limit
        assert limited._runtime.tenant.loaded is before
with pytest.raises(LimitError, match="max_qo_len"):
    limited.plan(paged([2], [5]))
with pytest.raises(LimitError, match="num_pages"):
    limited.plan(paged([1], [91 * 16]))
several = at.Attention(s, backend=cuda, limits=at.Limits(4, 8, 200, max_kv_len=300, min_qo_len=2))
several.plan(paged([2, 2], [300, 40]))
with short(several):
    several.plan(paged([2, 0], [300, 7]))
for lens, name in ((([2, 1], [40, 40]), "min_qo_len"), (([2, 2], [301, 40]), "max_kv_len")):
    with pytest.raises(LimitError, match=name):
        several.plan(paged(*lens))
with short(limited):
    limited.plan(batch(4, 100))
for a in (attn, eager):
    q, kv, out, lse = arrays(s, 8, pages=600)
    a.plan(batch(8))
    a.run(q, kv, out=out)
    for index in (paged([40], [300]), paged([1, 40], [40, 300]), batch(8), batch(8)):  # a prefill between two steps
        plan = a.plan(index)
        rows = sum(plan.index.requests.qo_lens.tolist())
        q2, kv2, out2, _ = arrays(s, rows, pages=600)
        trace()
        a.run(q2, kv2, out=out2)
        assert "launch" in kinds()
        assert device(a, plan)["num_items"] == len(plan.work)
    last = batch(8)
    a.plan(last, stream=7)
    trace()
    a.run(q, kv, out=out, stream=9)
    seen = [kind for kind in kinds() if kind != "free"]  # which the garbage collector may do at any time
    assert seen[0] == "wait" and set(seen[1:]) == {"launch"}, seen  # for the load
    a.plan(last, stream=7)  # the run on 9 may still read the plan before
    seen = [kind for kind in kinds() if kind != "free"]  # which the garbage collector may do at any time
    assert seen[:2] == ["record", "wait"] and seen[-2:] == ["copy", "record"], seen
    with short(a):  # which has been waited for: engines capture on one stream and plan on another
        a.plan(last, stream=7)
    a.plan(last, stream=9)
    with short(a):
        a.plan(last, stream=9)
""")


def test_a_failing_driver_is_an_error_and_the_next_step_goes(fake):
    fake(
        """
attn = at.Attention(s, backend=cuda)
attn.plan(batch(8))
before = attn.plan(batch(8))
for call in CALLS:
    driver.fake_fail(call.encode(), 700)
    with pytest.raises(Exception, match="700|made-up"):
        attn.plan(batch(8))
    driver.fake_fail(call.encode(), 0)
    assert attn._runtime.tenant.loaded.plan is before
    before = attn.plan(batch(8))
    device(attn, before)
""".replace("CALLS", '("copy", "record")')
    )


def test_a_ring_that_is_taken_over_is_waited_for(fake):
    """Another scheduler is another struct for the C code, over the same buffers, which may still be on their way."""
    fake("""
attn = at.Attention(s, backend=cuda, limits=most)
index = batch(8)
for _ in range(3):
    attn.plan(index)
attn.scheduler = "round_robin"
attn.plan(index)
trace()
attn.plan(index)
assert kinds() == ["event_sync"] * 3 + ["copy", "record"]
""")


def test_staging_grows_with_the_loads(fake):
    fake("""
from attnrt import step
step._LEAST_STAGING = 256
attn = at.Attention(s, backend=cuda, limits=at.Limits(600, 600, 20000))
for requests, quick in ((2, False), (2, True), (600, False), (600, True), (2, True), (600, True)):
    index = paged([1] * requests, [300] * requests)
    plan = attn.plan(index)
    assert (not attn._runtime.stepper._stale) == quick, requests
    device(attn, plan)
""")
