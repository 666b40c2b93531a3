# SPDX-License-Identifier: Apache-2.0
"""Loading: staging outlives its copy, a load is one copy to places that do not move, the extension's helpers.

A device that runs late is played by host memory whose copies and kernels wait in a queue until somebody waits for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import memory, testing
from attnrt.backends.reference import ReferenceBackend

sys.path.insert(0, str(Path(__file__).parent))
from small_batches import LIMITS, batch_of, spec_of

v = at.variants


# ------------------------------------------------------------------------------------------------- layout


class LateOps(memory.HostOps):
    """Host memory played as a device: nothing happens before somebody waits for it."""

    direct = False

    def __init__(self):
        self.queue, self.done, self.copies, self.captured = [], 0, [], False

    def enqueue(self, work):
        self.queue.append(work)

    def staging(self, nbytes):
        return np.full(nbytes, 0x7F, np.uint8)

    def copy(self, address, source, nbytes, stream):
        self.copies.append(nbytes)
        self.enqueue(lambda: memory.HostOps.copy(self, address, source, nbytes, stream))

    def record(self, stream):
        return len(self.queue)

    def wait_host(self, event):
        while self.done < event:
            self.queue[self.done]()
            self.done += 1

    def capturing(self, stream):
        return self.captured

    def stream(self, stream, view=None):
        return 0 if stream is None else stream


class LateBackend(ReferenceBackend):
    """The reference, enqueued; with a header like a backend that captures graphs."""

    name = "late"
    header_nbytes = 40

    def __init__(self, ops):
        self.ops = ops

    def compile(self, spec, features, device):
        kernel, ops = super().compile(spec, features, device), self.ops

        class Late:
            def pack_header(self, loaded, target):
                assert target.nbytes == 40
                target[:8] = np.frombuffer(np.int64(loaded.work.ptr).tobytes(), np.uint8)

            def attend(self, call):
                ops.enqueue(lambda: kernel.attend(call))

            def merge(self, call):
                ops.enqueue(lambda: kernel.merge(call))

        return Late()


@pytest.fixture
def late():
    ops = LateOps()
    memory.register_ops("cpu", lambda index: ops)
    yield ops
    memory.register_ops("cpu", lambda index: memory.HostOps())


@pytest.mark.parametrize("limits", [None, at.Limits(70, 80, 5000)])
def test_staging_outlives_its_copy(late, limits):
    """The host runs seven plans ahead of the device: each run sees its own plan (a ring of staging buffers)."""
    spec = spec_of()
    attn = at.Attention(spec, backend=LateBackend(late), limits=limits)
    steps = [
        batch_of(spec, [1] * n, [kv] * n, seed=n)
        for n, kv in ((64, 40), (64, 1), (3, 90), (1, 400), (64, 2), (2, 2), (9, 9))
    ]
    outs = [np.empty((len(s.q), 4, 16), np.float32) for s in steps]
    plans = []
    for step, out in zip(steps, outs, strict=True):
        plans.append(attn.plan(step.index))
        attn.run(step.q, step.kv, out=out)
    assert late.done < len(late.queue), "the device was not behind: the test says nothing"
    late.wait_host(len(late.queue))
    for step, out, plan in zip(steps, outs, plans, strict=True):
        testing.check(plan, step.q, step.kv, out)


def test_load_is_one_copy(late):
    spec = spec_of()
    limits = at.Limits(500, 8000, 100_000, max_parts=2)
    attn = at.Attention(spec, backend=LateBackend(late), limits=limits)
    for qo, kv in (([1, 2], [40, 7]), ([1], [1000]), ([0], [0])):
        late.copies.clear()
        batch = batch_of(spec, qo, kv)
        attn.plan(batch.index)
        assert len(late.copies) == 1, "more than one copy"
        assert late.copies[0] < 64 * 1024, "the copy is as long as the limits"


def test_addresses_of_the_header_and_scratch_never_move(late):
    spec = spec_of()
    attn = at.Attention(spec, backend=LateBackend(late), limits=at.Limits(70, 80, 5000))
    seen = set()
    for qo, kv in (([1] * 64, [40] * 64), ([1], [1000]), ([5, 1], [9, 9])):
        attn.plan(batch_of(spec, qo, kv).index)
        loaded = attn._runtime.tenant.loaded
        seen.add((loaded.header.ptr, loaded.partial_acc.ptr, loaded.partial_ml.ptr))
        late.wait_host(len(late.queue))
        packed = int(loaded.header.numpy()[:8].view(np.int64)[0])
        assert packed == loaded.work.ptr, "the header is not the loaded plan's"
    assert len(seen) == 1


def test_capture_rules(late):
    """Inside a capture nothing may be allocated: limits, out and lse are asked for."""
    spec = spec_of()
    batch = batch_of(spec, [1], [9])
    out, lse = np.empty((1, 4, 16), np.float32), np.empty((1, 4), np.float32)
    free = at.Attention(spec, backend=LateBackend(late))
    fixed = at.Attention(spec, backend=LateBackend(late), limits=LIMITS)
    for attn in (free, fixed):
        attn.plan(batch.index)
    late.captured = True
    with pytest.raises(at.CaptureError, match="limits"):
        free.run(batch.q, batch.kv, out=out)
    with pytest.raises(at.CaptureError, match="out"):
        fixed.run(batch.q, batch.kv)
    with pytest.raises(at.CaptureError, match="lse"):
        fixed.run(batch.q, batch.kv, out=out, return_lse=True)
    queued = len(late.queue)
    fixed.run(batch.q, batch.kv, out=out, lse=lse)
    assert len(late.queue) == queued + 2


def test_stage_writes_inside_its_target_alone():
    """What brings a plan to staging: contiguous arrays to their places, nothing outside, nothing of a strided one."""
    from attnrt.tensor import native

    rng = np.random.default_rng()
    target, base = np.full(256, 7, np.uint8), 16
    arrays = (
        rng.integers(0, 99, 5, np.int32),
        None,
        rng.integers(0, 99, (3, 4)),
        rng.integers(0, 9, 6, np.uint8),
    )
    places = (0, 0, 24, 128)
    expected = target.copy()
    for array, place in zip(arrays, places, strict=True):
        if array is not None:
            expected[base + place : base + place + array.nbytes] = array.reshape(-1).view(np.uint8)
    native.stage(target, base, arrays, places)
    np.testing.assert_array_equal(target, expected)
    wide = np.zeros((4, 8), np.int32)
    for bad, error in (
        ((target, 0, (arrays[0],), (240,)), ValueError),
        ((target, -8, (arrays[0],), (0,)), ValueError),
        ((target, 0, (arrays[0],), (-4,)), ValueError),
        ((target, 0, (arrays[0],), (0, 4)), ValueError),
        ((target, 0, (wide[:, :3],), (0,)), (ValueError, BufferError)),
    ):
        with pytest.raises(error):
            native.stage(*bad)
    np.testing.assert_array_equal(target, expected)


def test_widest():
    from attnrt.tensor import native

    rows = np.random.default_rng().integers(0, 1000, (50, 14), np.int32)
    assert native.widest(rows, 2, 3) == max(0, int((rows[:, 3] - rows[:, 2]).max()))
    assert native.widest(rows[:0], 2, 3) == 0
    for bad in ((rows, 2, 14), (rows, -1, 3), (rows.astype(np.int64), 2, 3), (rows[0], 0, 1)):
        with pytest.raises(ValueError, match="widest"):
            native.widest(*bad)
