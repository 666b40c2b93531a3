# SPDX-License-Identifier: Apache-2.0
"""What a run does to a stream, told by a driver that writes everything down (fake_driver.cpp): no GPU is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_driver import build, run_script

pytest.importorskip("attnrt.backends.cuda._driver")


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    library = build(tmp_path_factory.mktemp("driver"))
    return lambda text, **environment: run_script(library, text, **environment)


def test_a_load_is_one_copy_and_a_run_only_launches(fake):
    fake("""
s = spec()
attn = at.Attention(s, backend=cuda, limits=at.Limits(8, 32, 256, num_pages=64))
q, kv, out, lse = arrays(s, 4)
trace()
attn.plan(paged())
assert kinds() == ["host_alloc", "copy", "record"]
for _ in range(3):
    attn.run(q, kv, out=out, lse=lse)
    assert kinds() == ["launch"]
attn.plan(paged((1, 3), (900, 70)))  # cut rows
assert kinds()[-2:] == ["copy", "record"]
attn.run(q, kv, out=out, lse=lse)
lines = trace()
assert [line.split()[2] for line in lines] == ["attnrt_wide", "attnrt_decode", "attnrt_merge"], lines
""")


def test_where_nothing_is_wide_the_decode_kernel_merges(fake):
    """Also within limits under which graphs hold the wide and the merge kernel."""
    fake("""
s = spec()
attn = at.Attention(s, backend=cuda, limits=at.Limits(8, 32, 256, max_qo_len=3, max_parts=2, num_pages=64))
q, kv, out, lse = arrays(s, 4)
for lengths, kernels in (
    (((2, 2), (900, 70)), ["attnrt_decode"]),
    (((1, 3), (900, 70)), ["attnrt_decode", "attnrt_wide", "attnrt_merge"]),
    (((2, 2), (70, 900)), ["attnrt_decode"]),
):
    plan = attn.plan(paged(*lengths))
    assert len(plan.merge)
    trace()
    attn.run(q, kv, out=out, lse=lse)
    assert [line.split()[2] for line in trace()] == kernels
""")


def test_a_program_is_compiled_when_a_plan_needs_it(fake):
    """Never inside a run; with limits, which may be captured, all that any plan within them needs, and ahead."""
    fake("""
s = spec()
asked = []
load = Fake.load
def watch(self, source, names, device, label, roles=()):
    asked.extend(names)
    return load(self, source, names, device, label, roles)
Fake.load = watch
def new(**options):
    cuda._kernels.clear()
    asked.clear()
    return at.Attention(s, backend=cuda, **options)
q, kv, out, lse = arrays(s, 4, pages=512)
attn = new()
assert asked == []
decode, mixed, cut = paged((1, 1, 1, 1), (40, 70, 3, 9)), paged((1, 3)), paged((2, 2), (900, 70))
order = ["attnrt_decode", "attnrt_wide"]  # the decode kernel merges what is cut, mixed has no cuts
# The wide kernel has what is too wide for the decode kernel.
for index, count in ((decode, 1), (cut, 1), (mixed, 2), (decode, 2), (cut, 2)):
    attn.plan(index)
    assert asked == order[:count], (asked, count)
    attn.run(q, kv, out=out, lse=lse)
    assert asked == order[:count]
new().prepare(cut)
assert asked == ["attnrt_decode"]
hopper = ["attnrt_hopper_boxes", "attnrt_hopper_gather_fold", "attnrt_hopper_boxes_fold"]
by_key = "attnrt_hopper_gather"
for limits, kernels in (
    (at.Limits(8, 32, 256), [hopper[0], "attnrt_wide", "attnrt_decode", *hopper[1:], "attnrt_merge"]),
    (at.Limits(8, 32, 256, max_qo_len=3), ["attnrt_wide", "attnrt_decode", "attnrt_merge"]),
    (at.Limits(8, 32, 256, max_qo_len=3, max_parts=2), ["attnrt_decode", "attnrt_wide", "attnrt_merge"]),
    (at.Limits(8, 32, 256, max_qo_len=2), ["attnrt_decode"]),
    (at.Limits(8, 16, 256), ["attnrt_decode"]),
    (at.Limits(8, 64, 256, max_kv_len=4096), [hopper[0], "attnrt_wide", "attnrt_decode", by_key, "attnrt_merge"]),
    (at.Limits(8, 64, 256, max_kv_len=4097, min_qo_len=17), [*hopper, "attnrt_merge"]),
    (at.Limits(8, 64, 256, max_kv_len=4096, min_qo_len=17), [hopper[0], by_key, "attnrt_merge"]),
    (at.Limits(8, 64, 256, max_kv_len=4096, min_qo_len=17, max_padding=0), [hopper[0], by_key]),  # whole rows
    (at.Limits(8, 64, 256, max_kv_len=4096, min_qo_len=17, max_padding=0, max_parts=2),
     [hopper[0], by_key, "attnrt_merge"]),
    (at.Limits(8, 9999, 9999, min_qo_len=513, max_padding=0), [hopper[0], by_key]),  # past an append: one leaf
    (at.Limits(8, 64, 256, min_qo_len=16), [hopper[0], "attnrt_wide", "attnrt_decode", *hopper[1:], "attnrt_merge"]),
):
    attn = new(limits=limits)
    assert sorted(asked) == sorted(kernels), asked  # in any order, at once
    attn.plan(paged((limits.min_qo_len + 1, 0), (40, 9)) if limits.min_qo_len else decode)
    assert len(asked) == len(kernels)
cuda._kernels.clear()
asked.clear()
del attn
import gc
gc.collect()
held = sum(isinstance(x, DriverModule) for x in gc.get_objects())
at.warmup([s], backend=cuda)
gc.collect()  # a shared library that nobody holds is closed, with its kernels
assert sum(isinstance(x, DriverModule) for x in gc.get_objects()) == held + 8
hopper = sorted([*hopper, "attnrt_hopper_gather"])
assert sorted(asked) == ["attnrt_attend", "attnrt_decode", *hopper, "attnrt_merge", "attnrt_wide"]
""")


def test_long_requests_go_to_the_hopper_kernel(fake):
    """By boxes or key by key as pages and addresses allow, beside the kernels for the batch's decode steps and drafts."""
    fake("""
s = spec()
def launched(index, size=16, attn=None):
    attn = attn or at.Attention(s, backend=cuda)
    plan = attn.plan(index)
    q, kv, out, lse = arrays(s, plan.num_rows, pages=512, size=size)
    trace()
    attn.run(q, kv, out=out, lse=lse)
    found = [tuple(line.split()[2:]) for line in trace() if line.startswith("launch")]
    return [(name.removeprefix("attnrt_"), int(grid)) for name, grid in found]
boxes, gather, wide = ("hopper_boxes", 132), ("hopper_gather", 132), ("wide", 264)
decode = ("decode", 264)  # two groups to a CTA in the fake
assert launched(paged((17, 40), (40, 70))) == [boxes]
assert launched(paged((1, 40), (40, 70))) == [boxes, decode]
assert launched(paged((5, 40), (40, 70))) == [boxes, wide]
assert launched(paged((1, 5, 40), (9, 40, 70))) == [boxes, wide, decode]
assert launched(paged((16, 16), (40, 70))) == [wide]
assert launched(paged((60,), (5000,))) == [("hopper_boxes", 132), ("merge", 120)]
one = at.Attention(s, backend=cuda, scheduler="round_robin")  # nothing is cut
assert launched(paged((60,), (5000,)), attn=one) == [("hopper_boxes_fold", 132)]
assert launched(paged((17, 40), (40, 70), size=8), size=8) == [gather]
assert launched(paged((17, 40), (40, 70), size=48), size=48) == [boxes]
attn = at.Attention(s, backend=cuda)
for size, kind in ((16, boxes), (16, boxes), (4, gather), (64, boxes), (16, boxes)):
    assert launched(paged((17, 40), (40, 70), size=size), size=size, attn=attn) == [kind]
programs = attn._runtime.kernel.programs  # a CTA that takes a whole multiprocessor gains nothing by an early start
early = {name: programs.entry("attnrt_" + name).pdl for name in ("decode", "attend", "merge", "hopper_boxes", "hopper_gather")}
assert early == dict(decode=1, attend=1, merge=1, hopper_boxes=0, hopper_gather=0)
flat = at.formats.ragged(np.array([0, 30, 60], np.int32), np.array([0, 33, 70], np.int32))
attn.plan(flat)
q = at.empty((60, 8, 64), s.q_dtype, "cuda:0")
kv = tuple(at.empty((70, 2, 64), s.kv_dtype, "cuda:0") for _ in "kv")
trace()
attn.run(q, kv, out=at.empty((60, 8, 64), s.q_dtype, "cuda:0"))
assert [line.split()[2] for line in trace() if "launch" in line] == ["attnrt_hopper_boxes"]
token = at.Attention(s, backend=cuda, deterministic="token")
assert launched(paged((17, 40), (40, 70)), attn=token) == [wide, decode]
""")


def test_a_run_on_another_stream_waits_for_the_load(fake):
    fake("""
s = spec()
attn = at.Attention(s, backend=cuda)
q, kv, out, lse = arrays(s, 4)
attn.plan(paged(), stream=5)
event = [line.split()[2] for line in trace() if line.startswith("record 5")][0]
attn.run(q, kv, out=out, stream=5)
assert kinds() == ["launch"]
for _ in range(2):
    attn.run(q, kv, out=out, stream=6)
    lines = trace()
    assert lines[0] == f"wait 6 {event}" if _ == 0 else len(lines) == 1, lines
attn.plan(paged(), stream=5)  # what runs on 6 may still read the old plan
lines = trace()
recorded = [line.split()[2] for line in lines if line.startswith("record 6")]
copied = [i for i, line in enumerate(lines) if line.startswith("copy 5")]
assert recorded and lines.index(f"wait 5 {recorded[0]}") < copied[0]
""")


def test_one_call_takes_the_stream_of_its_arrays(fake):
    """torch and CuPy are both loaded: what plans for the call is enqueued where the call itself is."""
    fake("""
from types import ModuleType, SimpleNamespace
from attnrt.tensor import TensorView, native
torch = ModuleType("torch")
torch.cuda = SimpleNamespace(is_available=lambda: True)
torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 7)
torch.bfloat16, torch.device = "bfloat16", str
torch.empty = lambda shape, dtype, device: at.empty(shape, dtype, device)
sys.modules.update(torch=torch, cupy=ModuleType("cupy"))
s = spec()
q, kv, *_ = arrays(s, 4)
mine = native.make(q.ptr, q.shape, q.strides, q.dtype, q.device, q, "torch", False, False)
trace()
at.attention(mine, kv, paged(), s, cuda)
lines = trace()
enqueued = [line for line in lines if line.split()[0] in ("copy", "record", "launch", "wait")]
assert {line.split()[1] for line in enqueued} == {"7"} and any(line.startswith("launch") for line in enqueued), lines
""")


def test_capture(fake):
    fake("""
import pytest
s = spec()
q, kv, out, lse = arrays(s, 8)
free = at.Attention(s, backend=cuda)
free.plan(paged(), pad_to=8)
driver.fake_capture(ctypes.c_void_p(9), 1)
for again in range(2):
    with pytest.raises(at.CaptureError, match="limits"):
        free.run(q, kv, out=out, lse=lse, stream=9)
    free.run(q, kv, out=out, lse=lse, stream=3)
driver.fake_capture(ctypes.c_void_p(9), 0)

attn = at.Attention(s, backend=cuda, limits=at.Limits(8, 32, 256, num_pages=64))
attn.plan(paged(), pad_to=8)
attn.run(q, kv, out=out, lse=lse, stream=3)
k = at.empty((4, 2, 64), s.q_dtype, "cuda:0")
trace()
driver.fake_capture(ctypes.c_void_p(9), 1)
for again in range(2):
    with pytest.raises(at.CaptureError, match="out"):
        attn.run(q, kv, stream=9)
    with pytest.raises(at.CaptureError, match="lse"):
        attn.run(q, kv, out=out, return_lse=True, stream=9)
    assert kinds() == []
    attn.run(q, kv, out=out, lse=lse, stream=9)
    lines = trace()  # everything that a later plan may need, and nothing that allocates, waits or copies
    assert [line.split()[2:] for line in lines] == [
        ["attnrt_hopper_boxes", "132"], ["attnrt_wide", "264"], ["attnrt_decode", "264"],
        ["attnrt_hopper_gather_fold", "132"], ["attnrt_hopper_boxes_fold", "132"], ["attnrt_merge", "528"]
    ], lines
with pytest.raises(at.CaptureError):
    attn.append(k, k, kv, slots=[1, 2, 3, 4], stream=9)
with pytest.raises(at.CaptureError):
    attn.copy_pages(kv, [1], [2], stream=9)
driver.fake_capture(ctypes.c_void_p(9), 0)
short = at.Attention(s, backend=cuda, limits=at.Limits(8, 32, 256, num_pages=64, max_qo_len=16))
short.plan(paged(), pad_to=8)
driver.fake_capture(ctypes.c_void_p(9), 1)
trace()
short.run(q, kv, out=out, lse=lse, stream=9)
driver.fake_capture(ctypes.c_void_p(9), 0)
assert [line.split()[2] for line in trace() if "launch" in line] == ["attnrt_wide", "attnrt_decode", "attnrt_merge"]
with pytest.raises(at.LimitError, match="max_qo_len"):
    short.plan(paged((17, 1)))
# Prompts of one leaf: neither decode steps nor longer requests.
prompts = at.Attention(s, backend=cuda, limits=at.Limits(8, 64, 512, num_pages=64, max_kv_len=900, min_qo_len=17))
prompts.plan(paged((17, 0, 30), (900, 5, 30)))
driver.fake_capture(ctypes.c_void_p(9), 1)
trace()
q2, kv2, out2, _ = arrays(s, 47)
prompts.run(q2, kv2, out=out2, stream=9)
driver.fake_capture(ctypes.c_void_p(9), 0)
assert [line.split()[2] for line in trace() if "launch" in line] == [
    "attnrt_hopper_boxes", "attnrt_hopper_gather", "attnrt_merge"
]
aligned = at.Attention(
    s, backend=cuda, limits=at.Limits(8, 64, 512, num_pages=64, max_kv_len=900, min_qo_len=17, kv_alignment=16, max_padding=0)
)
aligned.plan(paged((17, 0, 30), (900, 5, 30)))
driver.fake_capture(ctypes.c_void_p(9), 1)
trace()
aligned.run(q2, kv2, out=out2, stream=9)
driver.fake_capture(ctypes.c_void_p(9), 0)
assert [line.split()[2] for line in trace() if "launch" in line] == ["attnrt_hopper_boxes"]
single = at.formats.paged(*(np.array([0, 17], np.int32),) * 2, np.arange(17, dtype=np.int32), np.array([17], np.int32), 1)
with pytest.raises(at.LimitError) as caught:
    aligned.plan(single)
assert (caught.value.limit, caught.value.needed, caught.value.given) == ("kv_alignment", 1, 16)
with pytest.raises(at.LimitError) as caught:
    aligned.plan(paged((17, 0, 30), (900, 5, 30)), pad_to=50)
assert (caught.value.limit, caught.value.needed, caught.value.given) == ("max_padding", 3, 0)
for index, name, needed in ((paged((17, 16), (40, 40)), "min_qo_len", 16), (paged((17,), (901,)), "max_kv_len", 901)):
    with pytest.raises(at.LimitError) as caught:
        prompts.plan(index)
    assert (caught.value.limit, caught.value.needed) == (name, needed)
""")


def test_a_capture_lives_through_what_does_not_belong_to_it(fake):
    """Memory that is collected meanwhile, and a plan, a workspace and new kernels made by another thread."""
    fake("""
import gc, threading
s = spec()
q, kv, out, lse = arrays(s, 8)
limits = at.Limits(8, 32, 256, num_pages=64)
attn, old = (at.Attention(s, backend=cuda, limits=limits) for _ in range(2))
for one in (attn, old):
    one.plan(paged(), pad_to=8)
    one.run(q, kv, out=out, lse=lse, stream=3)
del one
trace()
driver.fake_capture(ctypes.c_void_p(9), 1)
attn.run(q, kv, out=out, lse=lse, stream=9)
del old
gc.collect()
found = kinds()
assert {"free", "host_free"} <= set(found), found
def other():
    cuda._kernels.clear()
    new = at.Attention(s, backend=cuda, limits=limits)
    for n in range(5):
        new.plan(paged(), pad_to=8, stream=3)
        new.run(q, kv, out=out, lse=lse, stream=3)
    shim.CudaOps(0).synchronize(3)
    done.append(True)
done = []
thread = threading.Thread(target=other)
thread.start()
thread.join()
driver.fake_capture(ctypes.c_void_p(9), 0)
assert done and not driver.fake_ended_captures()
""")


def test_the_ring_of_staging_buffers(fake):
    """Three loads may be in flight; the fourth waits for the first one's copy, on the host."""
    fake("""
s = spec()
attn = at.Attention(s, backend=cuda, limits=at.Limits(8, 32, 256, num_pages=64))
trace()
long = attn._runtime.stepper is None
for i in range(6):  # the first goes the long way, which has a ring of its own
    attn.plan(paged())
    assert ("event_sync" in kinds()) == (i >= (3 if long else 4)), i
attn._runtime.stepper = None
for i in range(5):
    attn.plan(paged())
    assert ("event_sync" in kinds()) == (long or i >= 2), i
""")


def test_a_failing_driver_leaves_the_loaded_plan(fake):
    fake("""
import pytest
s = spec()
attn = at.Attention(s, backend=cuda)
q, kv, out, lse = arrays(s, 4, pages=512)
plan = attn.plan(paged())
attn.run(q, kv, out=out)
longer = paged((1, 3), (4000, 70))
for what, call in (("alloc", lambda: attn.plan(longer)), ("launch", lambda: attn.run(q, kv, out=out, plan=plan))):
    driver.fake_fail(what.encode(), 2)
    with pytest.raises(at.AttnrtError, match="out of memory"):
        call()
    driver.fake_fail(what.encode(), 0)
    attn.run(q, kv, out=out, plan=plan)
attn.plan(longer)
attn.run(q, kv, out=out)
""")


def test_other_devices(fake):
    """Each device has its own context, memory and loads; a run refuses arrays of another device."""
    fake("""
import pytest
s = spec()
for device in ("cuda:1", "cuda:0"):
    attn = at.Attention(s, backend=cuda, device=device)
    assert str(attn.device) == device
    q, kv, out, lse = arrays(s, 4, device=device)
    attn.plan(paged())
    attn.run(q, kv, out=out, lse=lse)
    other = arrays(s, 4, device="cuda:0" if device == "cuda:1" else "cuda:1")
    with pytest.raises(at.ArgumentError, match=f"must be on {device}"):
        attn.run(other[0], kv, out=out)
    attn.run(q, kv, out=out, lse=lse)
with pytest.raises(at.AttnrtError, match="cuda:7"):
    at.Attention(s, backend=cuda, device="cuda:7")
with pytest.raises(at.AttnrtError):
    at.empty((3,), "float32", "cuda:7")
""")


def test_threads(fake):
    """Two attentions in two threads; one attention in two threads is refused."""
    fake("""
import threading
s = spec()
errors = []
def work(device):
    try:
        attn = at.Attention(s, backend=cuda, device=device)
        q, kv, out, lse = arrays(s, 4, device=device)
        for i in range(50):
            attn.plan(paged())
            attn.run(q, kv, out=out, lse=lse)
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(f"cuda:{i % 2}",)) for i in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not errors, errors
attn = at.Attention(s, backend=cuda)
attn.plan(paged())
q, kv, out, lse = arrays(s, 4)
with attn._runtime.lock:
    import pytest
    with pytest.raises(at.PlanError, match="one thread"):
        attn.run(q, kv, out=out)
""")


def test_append_sends_the_plans_slots_once(fake):
    fake("""
s = spec()
attn = at.Attention(s, backend=cuda)
q, kv, out, lse = arrays(s, 4)
k = at.empty((4, 2, 64), s.q_dtype, "cuda:0")
attn.plan(paged())
attn.append(k, k, kv)
assert kinds()[-3:] == ["copy", "record", "launch"]
for layer in range(3):
    attn.append(k, k, kv)
    assert kinds() == ["launch"]
attn.plan(paged())
trace()
attn.append(k, k, kv)
assert kinds()[-3:] == ["copy", "record", "launch"]
slots = np.array([1, 2, 3, 4])
for _ in range(2):
    attn.append(k, k, kv, slots=slots)  # the caller may have changed it
    assert "copy" in kinds()
attn.copy_pages(kv, [1, 2], [3, 4])
assert kinds().count("launch") == 2
""")


def test_parameters_under_capture(fake):
    """Arrays that an eager run has brought to the device are found there; a new one is refused, nothing is copied."""
    fake("""
import pytest
s = spec(variant=(at.variants.causal(), at.variants.alibi()))
attn = at.Attention(s, backend=cuda, limits=at.Limits(8, 32, 256, num_pages=64))
q, kv, out, lse = arrays(s, 4)
attn.plan(paged())
slopes = np.linspace(0.1, 1.0, 8, dtype=np.float32)
attn.run(q, kv, out=out, alibi_slopes=slopes)
trace()
driver.fake_capture(ctypes.c_void_p(9), 1)
attn.run(q, kv, out=out, alibi_slopes=slopes.copy(), stream=9)
assert kinds() == ["launch"] * 6
for again in range(2):
    with pytest.raises(at.CaptureError, match="alibi_slopes must be on the device"):
        attn.run(q, kv, out=out, alibi_slopes=slopes * 2, stream=9)
    assert kinds() == []
driver.fake_capture(ctypes.c_void_p(9), 0)
attn.run(q, kv, out=out, alibi_slopes=slopes * 2)
""")
