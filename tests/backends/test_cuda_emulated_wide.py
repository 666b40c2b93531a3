# SPDX-License-Identifier: Apache-2.0
"""The wide kernel without a GPU (emulated_hopper.py): against float64, and bit for bit against the tile kernel."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.backends.cuda import boxes
from attnrt.backends.cuda.select import has_items
from attnrt.backends.cuda.tables import WIDE
from attnrt.dtypes import as_dtype

sys.path.insert(0, str(Path(__file__).parent))
from emulated_cuda import EmulatedCuda
from emulated_hopper import EmulatedHopper

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

pytestmark = pytest.mark.compile

v = at.variants
DRAFTS = ([5, 1, 13, 0, 16, 3], [330, 77, 30, 9, 140, 0])


def spec(**changes):
    base = {
        "num_qo_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 64,
        "variant": v.causal(),
        "q_dtype": "bfloat16",
    }
    return at.AttentionSpec(**{**base, **changes})


def both(s, lengths, *, workers=2, **layout):
    """One batch through the wide kernel and through the tile kernel: right, and the same to the bit."""
    case = testing.make_case(s, *lengths, seed=3)
    batch = testing.lay_out(case, **layout)
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
    results = []
    for backend in (EmulatedHopper(workers), EmulatedCuda(False)):
        results.append(testing.run_batch(case, batch, backend, device="cpu"))
        testing.compare(s, answer, results[-1].out, results[-1].lse)
    testing.same(*results, "wide and tile kernel")


VARIANTS = {
    "window": (v.causal(), v.sliding_window(37)),
    "alibi": (v.causal(), v.alibi()),
    "sigmoid": (v.causal(), v.sigmoid()),
    "all": (v.causal(), v.sliding_window(300), v.softcap(20.0), v.sink_logits(-1.0)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    both(spec(variant=VARIANTS[name]), ([5, 9], [330, 40]))


@pytest.mark.parametrize("sm_scale", [-0.2, 0.0])
def test_scales_that_turn_the_order(sm_scale):
    """A maximum of unscaled scores is one of scaled ones where the factor is positive."""
    both(spec(sm_scale=sm_scale), ([5, 9], [330, 40]))


@pytest.mark.parametrize("heads", [(3, 1), (8, 2), (13, 1)])
def test_drafts(heads):
    most = 64 // (heads[0] // heads[1])  # past that the Hopper kernel has them, whose bits are others
    lengths = [min(n, most) for n in DRAFTS[0]], DRAFTS[1]
    both(spec(num_qo_heads=heads[0], num_kv_heads=heads[1]), lengths)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 200])
def test_pages(layout, page_size):
    both(spec(kv_layout=layout), ([5, 9], [200, 40]), page_size=page_size)


@pytest.mark.parametrize("page_size", [16, 40])
def test_boxes(page_size):
    """Sixteen keys side by side come as boxes, others row by row: the same bits."""
    s = spec(head_dim=128)
    case = testing.make_case(s, [5, 9], [300, 90], seed=3)
    batch = testing.lay_out(case, page_size=page_size)
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
    results = []
    for by_boxes in (True, False):
        results.append(testing.run_batch(case, batch, EmulatedHopper(boxes=by_boxes), device="cpu"))
        testing.compare(s, answer, results[-1].out, results[-1].lse)
    testing.same(*results, "boxes and rows")


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("variant", [(v.causal(),), (v.causal(), v.softcap(20.0)), (v.causal(), v.sigmoid())])
def test_behind_another_kernel(variant, head_dim, seed):
    """A round for nothing before the first tile leaves nothing behind."""
    s = spec(head_dim=head_dim, variant=variant)
    case = testing.make_case(s, [5, 9, 16], [300, 90, 700], seed=3)
    batch = testing.lay_out(case, page_size=16)
    results = [
        testing.run_batch(case, batch, EmulatedHopper(seed=seed, behind=behind), device="cpu")
        for behind in (True, False)
    ]
    testing.same(*results, "behind a kernel and first")


def test_which_maps_a_run_brings():
    """Those of 16 tokens where the wide kernel reads them, whatever the Hopper kernel could have."""
    view = SimpleNamespace(
        ptr=1 << 20, num_pages=9, page_size=16, stride_page=16 * 128, stride_token=128, stride_head=64
    )
    s = spec(num_qo_heads=4, num_kv_heads=2)
    call = SimpleNamespace(k=view, v=view)
    assert boxes.encoded(boxes.NO_BOXES, True, call, s) == boxes.SMALLEST
    assert boxes.encoded(7, True, call, s) == boxes.SMALLEST and boxes.encoded(7, False, call, s) == 7
    assert boxes.encoded(boxes.NO_BOXES, False, call, s) == boxes.NO_BOXES
    for change in ({"ptr": (1 << 20) + 8}, {"stride_head": 68}, {"stride_token": 0}, {"num_pages": 0}):
        other = SimpleNamespace(**{**vars(view), **change})
        assert boxes.encoded(5, True, SimpleNamespace(k=view, v=other), s) == boxes.NO_BOXES


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_cuts(workers):
    """Runs of leaves on few and many workers: folds in registers, states, merges."""
    both(spec(head_dim=128), ([5, 8], [1200, 650]), workers=workers)


def shared(rows, prefix, suffix, s, page=16):
    """Requests of one query that begin with the same pages, as a cascade and flat."""
    rng = np.random.default_rng()
    common, own = prefix // page, -(-suffix // page)
    pages = np.concatenate(
        [[*range(common), *range(common + i * own, common + (i + 1) * own)] for i in range(rows)]
    )
    indptr = np.arange(rows + 1, dtype=np.int32) * (common + own)
    lens = np.full(rows, prefix + suffix, np.int32)
    flat = at.formats.paged(np.arange(rows + 1, dtype=np.int32), indptr, pages.astype(np.int32), lens, page)
    bf16 = as_dtype("bfloat16").numpy
    q = rng.standard_normal((rows, s.num_qo_heads, s.head_dim)).astype(np.float32).astype(bf16)
    shape = (common + rows * own, page, s.num_kv_heads, s.head_dim)
    return flat, q, tuple(rng.standard_normal(shape).astype(np.float32).astype(bf16) for _ in "kv")


@pytest.mark.parametrize(
    ("rows", "heads", "prefix"),
    [(20, (1, 1), 768), (70, (1, 1), 768), (40, (4, 1), 768), (130, (2, 2), 768), (20, (4, 4), 944)],
)
def test_shared_prefix(rows, heads, prefix):
    """Tiles of one, two and four quarters, both warpgroups and one, passes of several: the bits of the flat batch."""
    s = spec(num_qo_heads=heads[0], num_kv_heads=heads[1])
    flat, q, kv = shared(rows, prefix, 9, s)
    results = []
    for index, backend in ((at.formats.share(flat), EmulatedHopper(3)), (flat, EmulatedCuda(True))):
        attn = at.Attention(s, backend=backend, device="cpu")
        plan = attn.plan(index)
        assert has_items(plan, WIDE) == (index is not flat)
        results.append(attn.run(q, kv, return_lse=True))
    for mine, other in zip(*results, strict=True):
        assert np.array_equal(mine.view(np.uint8), other.view(np.uint8))
    testing.check(plan, q, kv, *results[0])


def test_a_tree():
    """Mask bits of drafts."""
    s, rng = spec(variant=v.custom_mask()), np.random.default_rng()
    qo, kv_lens = [9, 14], [150, 33]
    case = testing.make_case(s, qo, kv_lens, seed=3)
    batch = testing.lay_out(case)
    masks = [rng.random((n, m)) < 0.5 for n, m in zip(qo, kv_lens, strict=True)]
    index = at.formats.tree(batch.index, mask=masks)
    results = []
    for backend in (EmulatedHopper(), EmulatedCuda(False)):
        attn = at.Attention(s, backend=backend, device="cpu")
        plan = attn.plan(index)
        results.append(attn.run(batch.q, batch.kv, return_lse=True))
        testing.check(plan, batch.q, batch.kv, *results[-1])
    for mine, other in zip(*results, strict=True):
        assert np.array_equal(mine.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize("oracle", ["poison", "placement", "layout_invariance", "batch_invariance"])
def test_bitwise(oracle):
    s = spec(variant=(v.causal(), v.softcap(20.0)), num_qo_heads=6)
    getattr(testing, oracle)(testing.make_case(s, [3, 9, 0, 5, 1], [300, 40, 9, 0, 2]), EmulatedHopper())


@v.output
def raised(ctx, d, o):
    return o + 3.0 + at.variants.to_float(d)


@pytest.mark.parametrize("sink", [0.5, 300.0])
@pytest.mark.parametrize("kernel", ["tile", "decode", "hopper"])
def test_no_output_hook_touches_the_empty_set(kernel, sink):
    """Rows without keys are 0 and -inf, whoever finishes them: an item, the merge, or for padding nobody's item. Those whose keys
    weigh nothing beside a sink are not among them."""
    backend = {"tile": EmulatedCuda(False), "decode": EmulatedCuda(), "hopper": EmulatedHopper(1)}[kernel]
    s = spec(variant=(v.causal(), v.sink_logits(sink), raised), out_dtype="float32")
    attn = at.Attention(s, backend=backend, device="cpu")
    rng = np.random.default_rng(7)
    k, value = (rng.standard_normal((900, 1, 64)).astype(as_dtype("bfloat16").numpy) for _ in "kv")
    for queries, keys in (([1, 1], [0, 700]), ([3, 5], [2, 9]), ([40, 5], [9, 0])):
        index = at.formats.ragged(np.cumsum([0, *queries]), np.cumsum([0, *keys]))
        seen = np.concatenate(
            [np.arange(n - m, n) >= 0 for m, n in zip(queries, keys, strict=True)] + [[False]]
        )
        q = rng.standard_normal((len(seen), 4, 64)).astype(k.dtype)
        out, lse = np.full(q.shape, np.nan, np.float32), np.full(q.shape[:2], np.nan, np.float32)
        attn.plan(index, pad_to=len(seen))
        attn.run(q, (k, value), out=out, lse=lse)
        assert (out[~seen] == 0).all() and np.isneginf(lse[~seen]).all()
        assert np.isfinite(lse[seen]).all() and (np.abs(out[seen].mean((1, 2)) - 3.0 - 31.5) < 1.0).all()
