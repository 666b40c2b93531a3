# SPDX-License-Identifier: Apache-2.0
"""The shortest way through run() and append() (attnrt/native/repeats.h), told by the driver that writes everything down."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_driver import build, run_script

pytest.importorskip("attnrt.backends.cuda._driver")

#: ``short(attn)``: whatever leaves the shortest way fails. ``launched(...)``: the addresses and the scale that a launch got.
TOOLS = """
import contextlib, pytest, threading
from attnrt.backends.cuda import structs

@contextlib.contextmanager
def short(attn):
    def leave(*_):
        raise AssertionError("not the short way")
    runtime = attn._runtime
    runtime.run = runtime.append = leave
    try:
        yield
    finally:
        del runtime.run, runtime.append

def launched():
    return parameter(structs.LAUNCH_RUN, "q", "k", "v", "out", "lse", "sm_scale")

def expected(q, kv, out, lse, scale):
    return [q.ptr, kv[0].ptr, kv[1].ptr, out.ptr, 0 if lse is None else lse.ptr, np.float32(scale)]

s = spec()
limits = at.Limits(8, 32, 256, num_pages=64)
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    library = build(tmp_path_factory.mktemp("driver"))
    return lambda text: run_script(library, TOOLS + text)


def test_new_addresses_scales_and_forms(fake):
    fake("""
for given in (None, limits):
    attn = at.Attention(s, backend=cuda, limits=given)
    plan = attn.plan(paged())
    for with_lse in (False, True):
        first = arrays(s, 4)
        attn.run(*first[:2], out=first[2], lse=first[3] if with_lse else None)
        for i in range(20):
            q, kv, out, lse = arrays(s, 4)
            lse = lse if with_lse else None
            scale = [None, 0.25 + i][i % 2]
            with short(attn):
                more = dict(return_lse=with_lse, sm_scale=scale, stream=[None, 0][i % 2])
                done = attn.run(q, kv, [None, plan][i % 2], out=out, lse=lse, **more)
            assert launched() == expected(q, kv, out, lse, s.sm_scale if scale is None else scale)
            assert (done[0] is out and done[1] is lse) if with_lse else done is out
    for pages in range(8, 8 + 70):  # more forms than are kept
        q, kv, out, lse = arrays(s, 4, pages=pages)
        attn.run(q, kv, out=out)
        with short(attn):
            attn.run(q, kv, out=out)
        assert launched() == expected(q, kv, out, None, s.sm_scale)
""")


def test_what_it_leaves_to_the_long_way(fake):
    """The first run after a load; another plan, stream or form; results over what is read; arguments that need a look."""
    fake("""
from attnrt.tensor import native
attn = at.Attention(s, backend=cuda, limits=limits)
plan, other = attn.plan(paged()), attn.plan(paged(), load=False)
q, kv, out, lse = arrays(s, 4)
fewer = at.empty((3, 8, 64), s.q_dtype, "cuda:0")
attn.run(q, kv, out=out)
trace()
attn.run(q, kv, out=out)
assert kinds() == ["launch"]
for call, error in (
    (lambda: attn.run(q, kv, other, out=out), at.PlanError),
    (lambda: attn.run(q, kv, out=fewer), at.ArgumentError),
    (lambda: attn.run(q, kv, out=out, sm_scale=float("nan")), at.ArgumentError),
    (lambda: attn.run(q, kv, out=out, return_lse=1), at.AttnrtError),
    (lambda: attn.run(q, (kv[0], None), out=out), at.AttnrtError),
    (lambda: attn.run(q, kv, out=over), at.ArgumentError),
):
    over = native.make(kv[1].ptr, out.shape, out.strides, out.dtype, out.device, kv[1], "attnrt", False, False)
    with pytest.raises(error):
        call()
    assert kinds() == []
    attn.run(q, kv, out=out)
    assert launched() == expected(q, kv, out, None, s.sm_scale)
    trace()
attn.run(q, kv, out=out, stream=6)
assert kinds() == ["wait", "launch"]
with short(attn):
    attn.run(q, kv, out=out, stream=6)
lines = trace()
assert len(lines) == 1 and lines[0].startswith("launch 6"), lines
attn.load(other)
trace()
with pytest.raises(AssertionError, match="short"), short(attn):
    attn.run(q, kv, out=out)
with pytest.raises(at.PlanError):
    attn.run(q, kv, plan, out=out)
attn.run(q, kv, other, out=out)
with short(attn):
    attn.run(q, kv, other, out=out)
in_place = attn.run(q, kv, out=q)
assert in_place is q and launched()[3] == q.ptr
""")


def test_a_second_thread_a_failing_driver_and_capture(fake):
    fake("""
free, attn = at.Attention(s, backend=cuda), at.Attention(s, backend=cuda, limits=limits)
q, kv, out, lse = arrays(s, 4)
for a in (free, attn):
    a.plan(paged())
    for _ in range(2):
        a.run(q, kv, out=out)
with attn._runtime.lock:
    with pytest.raises(at.PlanError, match="one thread"):
        attn.run(q, kv, out=out)
driver.fake_fail(b"launch", 2)
with pytest.raises(at.AttnrtError, match="out of memory"):
    attn.run(q, kv, out=out)
driver.fake_fail(b"launch", 0)
with short(attn):
    attn.run(q, kv, out=out)
driver.fake_capture(ctypes.c_void_p(0), 1)
trace()
with pytest.raises(at.CaptureError, match="limits"):
    free.run(q, kv, out=out)
assert kinds() == []
with short(attn):
    attn.run(q, kv, out=out)
assert kinds() == ["launch"] * 6  # what any later plan may need
""")


def test_appends(fake):
    """Plan's slots, or the caller's on the device; other slots sent to the same place and other plans are not mixed up."""
    fake("""
from attnrt.backends.cuda.append import _ROWS
places = np.dtype({"names": ["k", "v", "k_cache", "v_cache", "slots"], "formats": ["<u8"] * 5, "itemsize": 200,
                   "offsets": [0, 24, *(_ROWS.size + i * structs.PAGED_KV.itemsize for i in range(3))]})
attn = at.Attention(s, backend=cuda)
attn.plan(paged((1, 3)))
def rows():
    return [at.empty((4, 2, 64), s.q_dtype, "cuda:0") for _ in "kv"]
q, kv, out, _ = arrays(s, 4)
def slots_now():
    return list(ctypes.cast(int(parameter(places, "slots")[0]), ctypes.POINTER(ctypes.c_int64))[:4])
k, v = rows()
attn.append(k, v, kv)
own = slots_now()
assert own == [39, 3 * 16 + 67, 3 * 16 + 68, 3 * 16 + 69]
for _ in range(5):
    (k, v), kv = rows(), arrays(s, 4)[1]
    with short(attn):
        attn.append(k, v, kv)
    assert parameter(places, "k", "v", "k_cache", "v_cache") == [k.ptr, v.ptr, kv[0].ptr, kv[1].ptr] and slots_now() == own
attn.append(k, v, kv, slots=[5, 6, 7, 8])
assert slots_now() == [5, 6, 7, 8]
attn.append(k, v, kv)
assert slots_now() == own
with short(attn):
    attn.append(k, v, kv)
assert slots_now() == own
given = [at.empty((4,), "int64", "cuda:0") for _ in range(3)]
attn.append(k, v, kv, slots=given[0])
for mine in given:
    with short(attn):
        attn.append(k, v, kv, slots=mine)
    assert parameter(places, "slots") == [mine.ptr]
    with short(attn):
        attn.append(k, v, kv)
    assert slots_now() == own
with pytest.raises(AssertionError, match="short"), short(attn):
    attn.append(k, v, kv, rope=at.variants.rope(64))
attn.plan(paged((1, 3), (41, 71)))
attn.append(k, v, kv)
assert slots_now() == [40, 3 * 16 + 68, 3 * 16 + 69, 3 * 16 + 70]
driver.fake_capture(ctypes.c_void_p(0), 1)
with pytest.raises(at.CaptureError):
    attn.append(k, v, kv)
""")
