# SPDX-License-Identifier: Apache-2.0
"""The native reader of paged indexes answers as the readable way does, or not at all."""

from dataclasses import fields
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrt.formats as f
from attnrt.errors import AttnrtError

paged_module = import_module("attnrt.formats.paged")
native = paged_module.native
pytestmark = pytest.mark.skipif(native is None, reason="the native reader is not built")


def arrays(b):
    return [np.ascontiguousarray(x, np.int32) for x in (b.qo_indptr, b.kv_indptr, b.indices, b.kv_lens)]


def readable(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_module, "native", None)
        return f.paged(*args)


@given(data=st.data())
def test_both_ways_are_equal(kit, data):
    b = data.draw(kit.batches())
    args = arrays(b)
    assert native.paged(*args, b.size) is not None
    fast, slow = f.paged(*args, b.size), readable(*args, b.size)
    kit.seen(fast)
    for field in fields(fast):
        one, other = getattr(fast, field.name), getattr(slow, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype and np.array_equal(one, other) and not one.flags.writeable
        elif field.name == "requests":
            assert np.array_equal(one.qo_lens, other.qo_lens) and np.array_equal(one.kv_lens, other.kv_lens)
        else:
            assert one == other
    for array in args:
        array[:] = -77
    assert fast.indices.tolist() == slow.indices.tolist()


@given(data=st.data())
def test_one_changed_number_is_judged_alike(kit, data):
    b = data.draw(kit.batches(max_requests=3, max_kv=9))
    args = arrays(b)
    which = data.draw(st.sampled_from([i for i, x in enumerate(args) if len(x)]))
    at = data.draw(st.integers(0, len(args[which]) - 1))
    args[which][at] = data.draw(st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 7, 2**31 - 1]))
    if args[0][-1] > 10**6:
        return  # a legal batch of 2**31 queries
    try:
        slow = readable(*args, b.size)
    except AttnrtError as error:
        assert native.paged(*args, b.size) is None
        with pytest.raises(type(error)) as again:
            f.paged(*args, b.size)
        assert str(again.value) == str(error)
    else:
        for name in ("qo_indptr", "indptr", "indices", "kv_end", "qo_pos", "request", "max_block"):
            assert np.array_equal(getattr(f.paged(*args, b.size), name), getattr(slow, name))


@given(data=st.data())
def test_tables(kit, data):
    b = data.draw(kit.batches())
    width = max(b.counts, default=0) + 1
    wide = b.rng.integers(-(2**31), 2**31 - 1, (2 * b.n, width + 2)).astype(np.int32)
    table = wide[::2, 1 : 1 + width]
    for r in range(b.n):
        live = -(-b.kv_lens[r] // b.size)
        table[r, :live] = b.indices[b.kv_indptr[r] : b.kv_indptr[r] + live]
    qo_indptr, _, _, kv_lens = arrays(b)
    read = native.table(qo_indptr, table, kv_lens, b.size)
    assert read is not None
    fast = f.block_table(qo_indptr, table, kv_lens, b.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_module, "native", None)
        slow = f.block_table(qo_indptr, table, kv_lens, b.size)
    assert kit.seen(fast) == kit.seen(slow) == kit.by_hand(b)
    assert fast.max_block == slow.max_block and np.array_equal(fast.indices, slow.indices)
    if b.n:
        kv_lens[0] = width * b.size + 1
        assert native.table(qo_indptr, table, kv_lens, b.size) is None
        kv_lens[0] = 1
        table[0, 0] = -2
        assert native.table(qo_indptr, table, kv_lens, b.size) is None
        assert native.table(qo_indptr, table.astype(np.int64), kv_lens, b.size) is None
        assert native.table(qo_indptr, wide[::2, ::2], kv_lens, b.size) is None
        assert native.table(qo_indptr[:-1].copy(), table, kv_lens, b.size) is None


def test_what_it_leaves_to_the_readable_way(kit):
    good = [np.array(x, np.int32) for x in ([0, 1, 2], [0, 1, 2], [1, 0], [2, 2])]
    assert native.paged(*good, 2) is not None
    for i in range(4):
        for other in (
            good[i].astype(np.int64),
            good[i].astype(np.uint32),
            good[i].astype(np.float32),
            good[i][None],
            np.repeat(good[i], 2)[::2],
            good[i].tolist(),
            None,
            good[i].tobytes(),
            kit.OnDevice(good[i].shape),
        ):
            args = list(good)
            args[i] = other
            assert native.paged(*args, 2) is None
    for size in (0, -1, 2**31):
        assert native.paged(*good, size) is None
