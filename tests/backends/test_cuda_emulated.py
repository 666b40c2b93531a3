# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels without a GPU (emulated_cuda.py): against float64, and decode bit for bit against the tile kernel."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.backends.cuda.select import decode_queries, has_items, limits_decode, limits_wide, within
from attnrt.backends.cuda.tables import WIDE, traits_for
from attnrt.scheduler.assign import RoundRobin
from attnrt.scheduler.base import Ruler

sys.path.insert(0, str(Path(__file__).parent))
from emulated_cuda import EmulatedCuda

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

pytestmark = pytest.mark.compile

v = at.variants
DECODE = ([1, 1, 2, 0, 1, 1, 2, 1], [700, 77, 70, 9, 0, 1, 2, 600])
MIXED = ([1, 13, 30, 0, 3, 5], [900, 77, 30, 9, 0, 5])


def spec(**changes):
    base = {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "variant": v.causal(),
        "q_dtype": "bfloat16",
    }
    return at.AttentionSpec(**{**base, **changes})


def both(s, lengths, *, early=False, multiprocessors=2, **layout):
    """One batch through both kernels: right, and the same to the bit."""
    case = testing.make_case(s, *lengths, seed=3)
    batch = testing.lay_out(case, **layout)
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
    results = []
    for decode in (True, False):
        backend = EmulatedCuda(decode, early, multiprocessors)
        results.append(testing.run_batch(case, batch, backend, device="cpu"))
        testing.compare(s, answer, results[-1].out, results[-1].lse)
    testing.same(*results, "decode and tile kernel")


VARIANTS = {
    "full": v.full(),
    "causal": v.causal(),
    "window": (v.causal(), v.sliding_window(37)),
    "softcap": (v.causal(), v.softcap(5.0)),
    "alibi": (v.causal(), v.alibi()),
    "sigmoid": (v.causal(), v.sigmoid()),
    "all": (v.causal(), v.sliding_window(300), v.softcap(20.0), v.sink_logits(-1.0)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    both(spec(variant=VARIANTS[name]), DECODE)


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("q_dtype", ["bfloat16", "float16"])
def test_types(q_dtype, kv_dtype, head_dim):
    both(spec(q_dtype=q_dtype, kv_dtype=kv_dtype, head_dim=head_dim), DECODE)


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "passes"])
@pytest.mark.parametrize("dtypes", [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn")], ids="-".join)
@pytest.mark.parametrize("head_dim", [64, 128, 72])
def test_queries_in_8_bits(head_dim, dtypes, lengths):
    """Multiplied in float16, which holds them: as exact as queries in it; aligned or not."""
    q, kv = (f"float8_{name}" for name in dtypes)
    s = spec(q_dtype=q, kv_dtype=kv, out_dtype="float32", head_dim=head_dim)
    case = testing.make_case(s, *lengths, seed=5)
    batch = testing.lay_out(case)
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv)
    bytes_on = np.empty((len(batch.q), 8, head_dim + 1), batch.q.dtype)[..., 1:]  # rows at odd addresses
    bytes_on[:] = batch.q
    results = []
    for decode in (True, False) if head_dim % 64 == 0 else (False,):
        attn = at.Attention(s, backend=EmulatedCuda(decode, False, 2), device="cpu")
        attn.plan(batch.index)
        for rows in (batch.q, bytes_on):
            out, lse = attn.run(rows, batch.kv, return_lse=True)
            testing.compare(replace(s, q_dtype="float16"), answer, out, lse)
            results.append((out, lse))
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@pytest.mark.parametrize("heads", [(3, 1), (9, 3), (13, 1), (16, 1), (4, 4)])
def test_groups(heads):
    both(spec(num_qo_heads=heads[0], num_kv_heads=heads[1]), DECODE)


@pytest.mark.parametrize("early", [False, True])
def test_rows_in_passes(early):
    both(spec(), MIXED, early=early)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("heads", [(8, 2), (16, 1)])
@pytest.mark.parametrize("name", ["causal", "alibi"])
def test_passes_of_warps_that_share_a_group(name, heads, early):
    """Few items of many short passes: warps of idle groups load for others, and each lays out the rows of some passes."""
    s = spec(variant=VARIANTS[name], num_qo_heads=heads[0], num_kv_heads=heads[1])
    both(s, ([16, 8, 40], [30, 0, 70]), early=early, multiprocessors=40)


@pytest.mark.parametrize("name", ["causal", "alibi", "all"])
@pytest.mark.parametrize("lengths", [([16], [50]), ([16, 9], [150, 30]), ([40], [60])])
def test_passes_of_few_tiles_in_turns(name, lengths):
    """Warps that load for one group are passes ahead of those that compute or behind, where they have no tile."""
    both(spec(variant=VARIANTS[name]), lengths, multiprocessors=8)


@pytest.mark.parametrize("lengths", [MIXED, DECODE, ([5], [300])], ids=["mixed", "decode", "wide"])
def test_two_crews(lengths):
    """Each item by its rows to one of two kernels, and the bits of either alone."""
    case = testing.make_case(spec(), *lengths, seed=3)
    batch = testing.lay_out(case)
    results = [testing.run_batch(case, batch, EmulatedCuda(how), device="cpu") for how in (None, True, False)]
    testing.same(results[0], results[1], "two crews and the decode kernel")
    testing.same(results[0], results[2], "two crews and the tile kernel")


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_sizes_about_a_tile(name):
    """Keys and rows at 0, 1 and one below, at and above a tile, a leaf and a pass."""
    qo, kv = [1] * 10 + [2, 3, 8, 9], [0, 1, 63, 64, 65, 127, 128, 129, 255, 257, 64, 65, 8, 256]
    both(spec(variant=VARIANTS[name]), (qo, kv), page_size=17)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 200])
def test_pages(layout, page_size):
    both(spec(kv_layout=layout), DECODE, page_size=page_size)


@pytest.mark.parametrize("multiprocessors", [1, 3, 40])
@pytest.mark.parametrize("early", [False, True])
def test_cuts(multiprocessors, early):
    """Runs of leaves on few and many workers: folds in registers, states, merges."""
    both(spec(head_dim=128), ([1, 1], [2300, 650]), early=early, multiprocessors=multiprocessors)


@pytest.mark.parametrize("decode", [True, False])
def test_workers(decode):
    """One worker folds all leaves in registers, many leave states of one leaf each to a merge: the same bits."""
    case = testing.make_case(spec(out_dtype="float32"), [1, 1], [2300, 650], seed=3)
    batch = testing.lay_out(case)
    few, many = (
        testing.run_batch(case, batch, EmulatedCuda(decode, multiprocessors=n), device="cpu") for n in (1, 40)
    )
    testing.same(few, many, "1 and 40 multiprocessors")


class ShortLeaves(EmulatedCuda):
    """Of one tile each."""

    def traits(self, *args):
        found = super().traits(*args)
        decode = replace(found.classes[0], ruler=Ruler(tail=found.classes[0].kv_tile))
        return replace(found, classes=(decode, *found.classes[1:]))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_merges_of_many_states(head_dim, early):
    """More states than the merge kernel has lanes, or places on their way: as one worker folds them."""
    s = spec(head_dim=head_dim, num_qo_heads=2, num_kv_heads=1, out_dtype="float32")
    case = testing.make_case(s, [1] * 6, [64 * 100, 64 * 65 - 3, 64 * 33, 64 * 17, 64 * 3, 5], seed=3)
    batch = testing.lay_out(case)
    few, many = (testing.run_batch(case, batch, ShortLeaves(False, early, n), device="cpu") for n in (1, 400))
    testing.same(few, many, "1 and 400 multiprocessors")


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize(
    "oracle", ["poison", "placement", "layout_invariance", "batch_invariance", "sentinel"]
)
def test_bitwise(oracle, decode):
    s = spec(variant=(v.causal(), v.softcap(20.0)), num_qo_heads=6)
    getattr(testing, oracle)(testing.make_case(s, [1, 2, 0, 3, 1], [600, 40, 9, 0, 2]), EmulatedCuda(decode))


def test_selection():
    s = spec(num_qo_heads=8, num_kv_heads=2)
    assert decode_queries(s) == 2
    assert decode_queries(spec(head_dim=96)) == 0
    assert decode_queries(spec(variant=(v.rope(64), v.causal()))) == 0  # it maps keys
    attn = at.Attention(s, backend=EmulatedCuda(), device="cpu")
    for qo, decodes in (([1, 1], True), ([2, 1], True), ([1, 3], False), ([], True)):
        batch = testing.lay_out(testing.make_case(s, qo, [9] * len(qo)))
        plan = attn.plan(batch.index, load=False)
        assert has_items(plan, WIDE) != decodes
        assert has_items(plan, None) == (1 in qo)
    assert limits_decode(s, at.Limits(8, 16, 100))
    assert not limits_decode(s, at.Limits(8, 17, 100))
    assert not limits_decode(s, at.Limits(8, 16, 100, max_parts=2))
    assert not limits_decode(spec(head_dim=96), at.Limits(8, 8, 100))


def test_limits_of_drafts_alone():
    """Requests of more queries than a tile of the decode kernel has, and no more than one of the wide kernel: all rows are the
    wide kernel's, whatever block rows they come in, and nobody launches the other."""
    s = spec(num_qo_heads=8, num_kv_heads=2)
    drafts = at.Limits(8, 128, 100, min_qo_len=3, max_qo_len=16)
    assert limits_wide(s, drafts)
    for change in (
        {"min_qo_len": 2},
        {"min_qo_len": None},
        {"max_qo_len": 17},
        {"max_qo_len": None},
        {"max_parts": 2},
    ):
        assert not limits_wide(s, replace(drafts, **change))
    assert not limits_wide(spec(head_dim=96), drafts)
    hopper = traits_for(s, 132, "batch", hopper=True)
    for traits, lowest in ((hopper, 1), (traits_for(s, 132, "batch"), 9)):
        narrow = within(s, traits, drafts)
        assert [narrow.crew_of(0, rows) for rows in (1, 8, 9, 64)] == [
            int(n >= lowest) for n in (1, 8, 9, 64)
        ]
    assert within(s, hopper, replace(drafts, min_qo_len=1)) is hopper


class ManyShortItems(RoundRobin):
    """Of three leaves of a tile each, dealt out in turn: workers have items behind one whose states are a row's last."""

    name = "many_short_items"

    def split(self, keys, num_workers):
        return 3 * 64.0


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((1, 1), 128), ((2, 1), 128), ((4, 1), 128), ((5, 1), 128), ((7, 1), 64), ((5, 5), 64)],
)
def test_decode_merges_many_states(heads, head_dim):
    """The decode kernel's own merges: in registers, through its stages behind a worker's last item and not before others."""
    s = spec(head_dim=head_dim, num_qo_heads=heads[0], num_kv_heads=heads[1], out_dtype="float32")
    case = testing.make_case(s, [1] * 8, [64 * 71, 64 * 33 - 3, 64 * 28, 64 * 9, *[64 * 3] * 4], seed=3)
    batch = testing.lay_out(case)
    results = [
        testing.run_batch(case, batch, ShortLeaves(True, False, n), device="cpu", scheduler=scheduler)
        for n, scheduler in ((1, "lpt"), (60, "lpt"), (1, ManyShortItems()), (2, ManyShortItems()))
    ]
    for result in results[1:]:
        testing.same(results[0], result, "one worker and many")
