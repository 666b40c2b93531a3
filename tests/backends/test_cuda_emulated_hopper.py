# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel behind Attention without a GPU (emulated_hopper.py): right, and the same bits however the keys come."""

from __future__ import annotations

import mmap
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.backends.cuda import first_lines, pack
from attnrt.backends.cuda.tables import hopper_config
from attnrt.dtypes import as_dtype

sys.path.insert(0, str(Path(__file__).parent))
from courses import COURSES, along
from emulated_hopper import EmulatedHopper
from own_maps import own_maps

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

pytestmark = pytest.mark.compile

v = at.variants
#: What head_dim 64 has three warpgroups of consumers for.
BARE = {
    "full": v.full(),
    "window": (v.causal(), v.sliding_window(70)),
    "sinks": (v.causal(), v.sink_logits(-1.0)),
}
LENGTHS = ([70, 1, 0, 40, 33], [150, 60, 9, 40, 20])


def spec(**changes):
    base = {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "variant": v.causal(),
        "q_dtype": "bfloat16",
    }
    return at.AttentionSpec(**{**base, **changes})


def right(s, lengths=LENGTHS, backend=None, **layout):
    backend = backend or EmulatedHopper()
    case = testing.make_case(s, *lengths, seed=3)
    batch = testing.lay_out(case, **layout)
    result = testing.run_batch(case, batch, backend, device="cpu")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
    testing.compare(s, answer, result.out, result.lse)
    return result, backend


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 48, 160])
def test_boxes_and_keys_give_the_same_bits(page_size, layout):
    s = spec(kv_layout=layout)
    by_boxes, backend = right(s, page_size=page_size)
    assert backend.seen == [True]
    by_keys, backend = right(s, backend=EmulatedHopper(boxes=False), page_size=page_size)
    assert backend.seen == [False]
    testing.same(by_boxes, by_keys, "boxes and keys")


@pytest.mark.parametrize("page_size", [17, 32])
def test_sizes_about_a_tile(page_size):
    """Rows and keys one below, at and above a warpgroup's and a tile."""
    _, backend = right(spec(), lengths=([33, 64, 65, 66], [127, 128, 129, 66]), page_size=page_size)
    assert backend.seen == [page_size == 32]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (4, 1), (7, 1), (8, 1)])
def test_passes_of_three_warpgroups(heads, page_size):
    """head_dim 64: rows one below, at and above what one, two and three warpgroups hold, at any head of a query; last tiles that
    one of the three does not see."""
    s = spec(num_qo_heads=heads[0], num_kv_heads=heads[1])
    assert hopper_config(s).rows == 192
    rows = [65, 128, 129, 191, 192, 193, 250]
    queries = [-(-n * heads[1] // heads[0]) for n in rows]
    keys = [n + more for n, more in zip(queries, (0, 3, 64, 130, 191, 0, 77), strict=True)]
    results = []
    for workers in (1, 60):  # and tiles of one warpgroup, because there are so many workers
        found, backend = right(s, (queries, keys), EmulatedHopper(workers, seed=workers), page_size=page_size)
        assert backend.seen == [page_size == 16]
        results.append(found)
    testing.same(*results, "one worker and sixty")


@pytest.mark.parametrize("scheduler", ["lpt", "one_cta_per_request"])
@pytest.mark.parametrize("dim", [64, 128])
def test_warpgroups_without_rows_beside_rows_without_keys(dim, scheduler):
    """Items of one warpgroup's rows, some of which see no key: block rows without blocks, and queries before the first key."""
    s = spec(num_qo_heads=2, num_kv_heads=2, head_dim=dim, variant=v.full())
    rng = np.random.default_rng(5)
    indptr, columns = np.array([0, 2, 2, 5, 5], np.int32), np.array([0, 3, 1, 2, 4], np.int32)
    sparse = at.formats.bsr(indptr, columns, (64, 32), 160)
    late = testing.make_case(replace(s, variant=v.causal()), [130, 70], [3, 20], seed=6)
    batch = testing.lay_out(late)
    q = rng.standard_normal((256, 2, dim)).astype(as_dtype("bfloat16").numpy)
    kv = tuple(rng.standard_normal((5, 32, 2, dim)).astype(q.dtype) for _ in "kv")
    for one, index, queries, cache in ((s, sparse, q, kv), (late.spec, batch.index, batch.q, batch.kv)):
        attn = at.Attention(one, backend=EmulatedHopper(60), device="cpu", scheduler=scheduler)
        attn.plan(index)
        out, lse = attn.run(queries, cache, return_lse=True)
        testing.compare(one, testing.oracle_answer(one, index, queries, cache), out, lse)


@pytest.mark.parametrize("name", ["full", "window", "sinks"])
def test_what_rows_of_three_warpgroups_see(name):
    """Passes whose warpgroups see all, other or no keys of a tile."""
    right(spec(variant=BARE[name]), ([330, 65, 100], [333, 450, 100]))


@pytest.mark.parametrize("course", COURSES)
def test_courses_of_scores_at_64(course):
    """As below, in passes of three warpgroups."""
    s = spec(variant=v.full())
    case = along(testing.make_case(s, [100, 33], [560, 300], seed=5), course)
    batch = testing.lay_out(case, page_size=16)
    result = testing.run_batch(case, batch, EmulatedHopper(), device="cpu")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv)
    testing.compare(s, answer, result.out, result.lse)


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("masked", [False, True])
def test_courses_of_scores(masked, course):
    """Maxima that rise by more or less than the kernel follows, and rows that see nothing above 0."""
    s, rng = spec(head_dim=128, variant=v.custom_mask() if masked else v.full()), np.random.default_rng(8)
    queries, keys = [70, 33], [560, 300]
    case = along(testing.make_case(s, queries, keys, seed=5), course)
    batch = testing.lay_out(case, page_size=16)
    index = batch.index
    if masked:
        index = at.formats.tree(index, mask=[rng.random(x) < 0.8 for x in zip(queries, keys, strict=True)])
    attn = at.Attention(s, backend=EmulatedHopper(), device="cpu")
    plan = attn.plan(index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True)
    testing.check(plan, batch.q, batch.kv, out, lse)


@pytest.mark.parametrize("dim", [64, 128])
def test_rows_whose_log_sums_nobody_wants(dim):
    """A row has the same bits whether its log-sum-exp is wanted or not."""
    case = testing.make_case(spec(head_dim=dim), *LENGTHS, seed=3)
    batch = testing.lay_out(case, page_size=16)
    attn = at.Attention(case.spec, backend=EmulatedHopper(), device="cpu")
    attn.plan(batch.index)
    want, _ = attn.run(batch.q, batch.kv, return_lse=True)
    found = attn.run(batch.q, batch.kv)
    assert np.array_equal(np.asarray(found).view(np.uint16), np.asarray(want).view(np.uint16))


@pytest.mark.parametrize("kind", ["causal", "sinks"])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_written_beside_the_next_weights(dim, kind):
    """Passes behind each other in one worker's list and each in its own (whose rows wait for no other pass): of one tile and of
    several, with rows without keys, into rows that 16 bytes reach and that they do not, with log-sum-exp and without."""
    s = spec(head_dim=dim, variant=BARE.get(kind, v.causal()))
    case = testing.make_case(s, [70, 1, 130, 0, 97, 150], [150, 9, 40, 20, 300, 150], seed=7)
    batch = testing.lay_out(case, page_size=16)
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv)
    results = []
    for workers in (1, 60):
        attn = at.Attention(s, backend=EmulatedHopper(workers, seed=workers), device="cpu")
        attn.plan(batch.index)
        out, lse = attn.run(batch.q, batch.kv, return_lse=True)
        testing.compare(s, answer, out, lse)
        alone = attn.run(batch.q, batch.kv)
        wide = np.zeros((len(batch.q), s.num_qo_heads, dim + 4), as_dtype("bfloat16").numpy)
        attn.run(batch.q, batch.kv, out=wide[:, :, 2:-2])
        assert not wide[:, :, :2].any() and not wide[:, :, -2:].any()
        results += [
            np.asarray(x).view(np.uint16) for x in (out, alone, np.ascontiguousarray(wide[:, :, 2:-2]))
        ]
    assert all(np.array_equal(results[0], x) for x in results)


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
def test_one_buffer_of_queries(dims, page_size):
    """Heads too wide for two: a pass's rows come when the last scores of the one before are there. Boxes up to the tile."""
    s = spec(head_dim=dims[0], head_dim_vo=dims[1])
    lengths = ([70, 1, 150], [150, 9, 350])
    by_boxes, backend = right(s, lengths, EmulatedHopper(1), page_size=page_size)
    assert backend.seen == [page_size > 1]
    by_keys, backend = right(s, lengths, EmulatedHopper(3, boxes=False, seed=2), page_size=page_size)
    assert backend.seen == [False]
    testing.same(by_boxes, by_keys, "boxes and keys")


#: Specs whose tiles are rewritten between load and multiply.
REWRITTEN = {
    "e4m3": {"kv_dtype": "float8_e4m3fn", "head_dim": 128},
    "e4m3 64": {"kv_dtype": "float8_e4m3fn"},
    "e5m2 192/128": {"kv_dtype": "float8_e5m2", "head_dim": 192, "head_dim_vo": 128},
    "rope": {"variant": (v.causal(), v.rope(64))},
    "rope of q": {"variant": (v.causal(), v.rope(64, keys=False))},
    "rope of a part of q, e4m3": {
        "variant": (v.causal(), v.rope(32, keys=False)),
        "head_dim": 128,
        "kv_dtype": "float8_e4m3fn",
    },
    "rope of a part": {"variant": (v.causal(), v.rope(32, interleaved=True)), "head_dim": 128},
    "e4m3, rope of 192": {
        "kv_dtype": "float8_e4m3fn",
        "head_dim": 192,
        "head_dim_vo": 128,
        "variant": (v.causal(), v.rope(192)),
    },
    "rope of 192, softcap": {  # whose tables have no room beside those of hooks
        "head_dim": 192,
        "head_dim_vo": 128,
        "variant": (v.causal(), v.softcap(20.0), v.rope(192)),
    },
    "own": {"variant": (v.causal(), own_maps())},
    "own 192/128": {"variant": (v.causal(), own_maps()), "head_dim": 192, "head_dim_vo": 128},
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_tiles(name):
    s = spec(**REWRITTEN[name])
    lengths = ([70, 1, 150], [150, 9, 350])
    results = []
    for page_size, boxes, seed in ((16, True, 1), (64, True, 2), (16, False, 3), (1, True, 4)):
        backend = EmulatedHopper(2, boxes=boxes, seed=seed)
        results.append(right(s, lengths, backend, page_size=page_size)[0])
        assert backend.seen == [boxes and page_size > 1]
        testing.same(results[0], results[-1], f"pages of {page_size}, boxes {boxes}")


#: Specs whose products are of 8-bit numbers.
NARROW = {
    "causal": {},
    "full, float32": {"variant": v.full(), "out_dtype": "float32"},
    "window": {"variant": (v.causal(), v.sliding_window(70))},
    "softcap": {"variant": (v.causal(), v.softcap(5.0))},
    "alibi": {"variant": (v.causal(), v.alibi())},
    "scales, sinks": {
        "variant": (v.causal(), v.fp8_scales(q_scale=0.5, k_scale=1.5, v_scale=2.0), v.sink_logits(-1.0))
    },
    "groups of 8": {"num_qo_heads": 8, "num_kv_heads": 1},
    "one level": {"two_level": False},
}
E4M3 = {"q_dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "head_dim": 128}


@pytest.mark.parametrize("name", NARROW)
def test_products_of_8_bit_numbers(name):
    """Boxes and keys, whatever the page."""
    s = spec(**{**E4M3, **NARROW[name]})
    lengths = ([70, 1, 40], [150, 9, 720])  # more keys than are summed at one level
    results = []
    for page_size, boxes, seed in ((16, True, 1), (64, True, 2), (16, False, 3), (1, True, 4)):
        backend = EmulatedHopper(2, boxes=boxes, seed=seed)
        results.append(right(s, lengths, backend, page_size=page_size)[0])
        assert backend.seen == [boxes and page_size > 1]
        testing.same(results[0], results[-1], f"pages of {page_size}, boxes {boxes}")


@pytest.mark.parametrize("oracle", ["poison", "batch_invariance"])
def test_products_of_8_bit_numbers_bitwise(oracle):
    """With windows that begin anywhere, and sums that are kept between them."""
    s = spec(**{**E4M3, "variant": (v.causal(), v.sliding_window(700))})
    case = testing.make_case(s, [40, 1, 0, 33], [1250, 60, 9, 720])
    getattr(testing, oracle)(case, EmulatedHopper())


def test_products_of_8_bit_numbers_under_bounds():
    """Where sums are kept does not depend on where a plan's leaves end: true lengths of which some are multiples of the keys
    after which they are, under a plan for more, have the bits of the exact plans."""
    s, most = spec(**{**E4M3, "out_dtype": "float32", "variant": v.full()}), [1300, 600]
    case = testing.make_case(s, [33, 40], most, seed=5)
    batch = testing.lay_out(case, page_size=16)
    true = np.array(most, np.int32)
    requests = replace(batch.index.requests, bound_kv_lens=true)
    features = replace(batch.index.features, bound_kv_lens=True)
    attn = at.Attention(s, backend=EmulatedHopper(), device="cpu")
    attn.plan(replace(batch.index, requests=requests, features=features, max_block=-1))
    for lens in ([1300, 512], [1024, 400], [512, 513], [1152, 0]):
        true[:] = lens
        out, lse = attn.run(batch.q, batch.kv, return_lse=True)
        cut = {side: tuple(x[:n] for x, n in zip(getattr(case, side), lens, strict=True)) for side in "kv"}
        short = replace(case, **cut)
        want = testing.run_batch(short, testing.lay_out(short, page_size=16), EmulatedHopper(), device="cpu")
        testing.same(want, testing.Result(out=out, lse=lse), f"lengths {lens} under a plan for {most}:")


@pytest.mark.parametrize("course", COURSES)
def test_courses_of_scores_in_8_bits(course):
    """Weights are at most what the format holds, however scores rise."""
    s = spec(**E4M3, variant=v.full())
    case = along(testing.make_case(s, [70, 33], [1200, 150], seed=5), course)
    batch = testing.lay_out(case, page_size=16)
    result = testing.run_batch(case, batch, EmulatedHopper(), device="cpu")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv)
    testing.compare(s, answer, result.out, result.lse)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sm_scale", [None, -0.1, 0.0])
@pytest.mark.parametrize("types", ["bfloat16", "e4m3"])
def test_scores_that_are_scaled_alone(types, sm_scale, masked):
    """By a number of each head, whatever the sign of sm_scale: part of what makes scores exponents."""
    own = E4M3 if types == "e4m3" else {"head_dim": 128}
    variant = (v.custom_mask() if masked else v.causal(), v.fp8_scales(q_scale=0.5), v.sink_logits(-1.0))
    s, rng = spec(**own, sm_scale=sm_scale, variant=variant), np.random.default_rng(4)
    case = testing.make_case(s, [70, 33], [300, 150], seed=5)
    batch = testing.lay_out(case, page_size=16)
    masks = [rng.random(x) < 0.8 for x in ((70, 300), (33, 150))]
    index = at.formats.tree(batch.index, mask=masks) if masked else batch.index
    attn = at.Attention(s, backend=EmulatedHopper(), device="cpu")
    plan = attn.plan(index)
    scales = {"k_scale": np.array([0.25, 3.0], np.float32), "v_scale": 2.0}
    out, lse = attn.run(batch.q, batch.kv, return_lse=True, **scales)
    testing.check(plan, batch.q, batch.kv, out, lse, **scales)


def test_queries_in_8_bits_at_odd_addresses():
    s = spec(**E4M3)
    case = testing.make_case(s, [70, 40], [150, 40], seed=7)
    batch = testing.lay_out(case)
    want = testing.run_batch(case, batch, EmulatedHopper(), device="cpu")
    rows = np.empty((len(batch.q), 4, 129), batch.q.dtype)[..., 1:]
    rows[:] = batch.q
    attn = at.Attention(s, backend=EmulatedHopper(), device="cpu")
    attn.plan(batch.index)
    out, lse = attn.run(rows, batch.kv, return_lse=True)
    testing.same(want, testing.Result(out=out, lse=lse), "odd addresses")


@pytest.mark.parametrize("oracle", ["poison", "batch_invariance"])
@pytest.mark.parametrize("name", ["e4m3 64", "own"])
def test_rewritten_tiles_bitwise(name, oracle):
    case = testing.make_case(spec(**REWRITTEN[name]), [40, 1, 0, 33], [150, 60, 9, 20])
    getattr(testing, oracle)(case, EmulatedHopper())


def test_small_pages_come_key_by_key():
    results = []
    for page_size in (1, 7, 16):
        result, backend = right(spec(), page_size=page_size)
        assert backend.seen == [page_size == 16]
        results.append(result)
    testing.same(results[0], results[1], "pages of 1 and 7")
    testing.same(results[0], results[2], "pages of 1 and 16")


VARIANTS = {
    "causal": v.causal(),
    "alibi": (v.causal(), v.alibi()),
    "softcap": (v.causal(), v.softcap(5.0)),
    "window": (v.causal(), v.sliding_window(37)),
    "sigmoid": (v.causal(), v.sigmoid()),
    "all": (v.causal(), v.sliding_window(90), v.softcap(20.0), v.alibi(), v.sink_logits(-1.0)),
}


@pytest.mark.parametrize("name", ["window", "sigmoid", "all", "softcap"])
def test_variants(name):
    right(spec(variant=VARIANTS[name]))


@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_a_bias_in_units_of_the_scores(scale):
    """Positions that run on and are far from 0, ends of tiles and whole ones; scores whose order a negative scale turns round."""
    s = spec(variant=(v.causal(), v.alibi()), sm_scale=scale)
    right(s, ([70, 130], [450, 140]), page_size=16)


@v.logits
def falling(score, ctx, slope=0.3):
    """The same bias as others would write it."""
    return score - slope * (ctx.qo_pos - ctx.kv_pos)


@pytest.mark.parametrize(("hook", "masked"), [("alibi", False), ("alibi", True), ("falling", False)])
def test_a_linear_bias_however_keys_come(masked, hook):
    """Boxes and keys, whole tiles and masked ones: the same bits."""
    bias = v.alibi() if hook == "alibi" else falling
    s = spec(head_dim=128, variant=(v.custom_mask() if masked else v.causal(), bias))
    rng = np.random.default_rng(4)
    case = testing.make_case(s, [70, 33], [560, 300], seed=5)
    masks = [rng.random(x) < 0.8 for x in ((70, 560), (33, 300))]
    for rows in masks:
        rows[:, :200] = True
    results = []
    for page_size, boxes in ((16, True), (16, False), (64, True)):
        batch = testing.lay_out(case, page_size=page_size)
        index = at.formats.tree(batch.index, mask=masks) if masked else batch.index
        attn = at.Attention(s, backend=EmulatedHopper(boxes=boxes), device="cpu")
        plan = attn.plan(index)
        out, lse = attn.run(batch.q, batch.kv, return_lse=True)
        testing.check(plan, batch.q, batch.kv, out, lse)
        results.append(testing.Result(out=out, lse=lse))
        testing.same(results[0], results[-1], f"pages of {page_size}, boxes {boxes}")


def test_rotation_of_rows_that_begin_anywhere():
    """One head a group, so that positions run on from row to row: first rows at 113, 249 and 0."""
    s = spec(num_qo_heads=2, head_dim=128, variant=(v.causal(), v.rope(128)))
    right(s, ([37, 101, 40], [150, 350, 40]))


@pytest.mark.parametrize(
    ("variant", "page_size"), [(v.full(), 16), (v.custom_mask(), 1), ((v.causal(), v.custom_mask()), 16)]
)
def test_a_mask_of_bits(variant, page_size):
    """Rows of bits at any byte over several tiles, some of them past tiles that no mask speaks of; a last row that ends with
    its array."""
    s, rng = spec(variant=variant), np.random.default_rng()
    lens, qo, begin = [603, 33, 290], [40, 33, 3], [rng.integers(130, 300), 0, 250]
    case = testing.make_case(s, qo, lens, seed=3)
    batch = testing.lay_out(case, page_size=page_size)
    masks = [
        rng.random((n, kv - b)) < p for n, kv, b, p in zip(qo, lens, begin, (0.5, 0.1, 0.9), strict=True)
    ]
    masks[0][:, :200] |= rng.random((qo[0], 1)) < 0.5  # words of ones
    index = at.formats.tree(batch.index, mask=masks, mask_begin=np.array(begin, np.int32))
    attn = at.Attention(s, backend=EmulatedHopper(), device="cpu")
    plan = attn.plan(index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True)
    testing.check(plan, batch.q, batch.kv, out, lse)


@pytest.mark.parametrize("block", [(64, 64), (33, 16), (130, 128)])
def test_blocks_of_a_sparse_matrix(block):
    """Blocks wherever they lie: nobody asks for positions, so tiles are whole; row blocks of one warpgroup and of two."""
    s, rng = spec(num_kv_heads=4, variant=v.full()), np.random.default_rng()
    rows, columns = 3, 9
    kept = rng.random((rows, columns)) < 0.6
    kept[0] = False
    starts = np.concatenate([[0], np.cumsum(kept.sum(1))]).astype(np.int32)
    index = at.formats.bsr(starts, np.nonzero(kept)[1].astype(np.int32), block, num_cols=columns * block[1])
    bf16 = as_dtype("bfloat16").numpy
    q = rng.standard_normal((rows * block[0], 4, 64)).astype(np.float32).astype(bf16)
    kv = tuple(rng.standard_normal((columns * block[1], 4, 64)).astype(np.float32).astype(bf16) for _ in "kv")
    attn = at.Attention(s, backend=EmulatedHopper(), device="cpu")
    plan = attn.plan(index)
    out, lse = attn.run(q, kv, return_lse=True)
    testing.check(plan, q, kv, out, lse)


@pytest.mark.parametrize("workers", [1, 3])
def test_trees_over_a_shared_context(workers):
    """Parts with a mask and without one in a worker's list: no mask is read but the item's own."""
    s, rng = spec(variant=v.custom_mask()), np.random.default_rng()
    parents = np.concatenate(
        [np.array([rng.integers(-1, i) if i else -1 for i in range(n)]) for n in (40, 33)]
    )
    pages = [[*range(7), *range(7, 10)], [*range(7), *range(10, 13)]]
    index = at.formats.paged([0, 40, 73], [0, 10, 20], np.concatenate(pages).astype(np.int32), [160, 153], 16)
    index = at.formats.tree(at.formats.share(index), parents.astype(np.int32))
    assert {part.mask is None for part in index.parts} == {False, True}
    bf16 = as_dtype("bfloat16").numpy
    q = rng.standard_normal((73, 4, 64)).astype(np.float32).astype(bf16)
    kv = tuple(rng.standard_normal((13, 16, 2, 64)).astype(np.float32).astype(bf16) for _ in "kv")
    attn = at.Attention(s, backend=EmulatedHopper(workers), device="cpu")
    plan = attn.plan(index)
    out, lse = attn.run(q, kv, return_lse=True)
    testing.check(plan, q, kv, out, lse)


@pytest.mark.parametrize(
    ("oracle", "name"),
    [(x, "causal") for x in ("poison", "batch_invariance", "layout_invariance")]
    + [(x, name) for x in ("poison", "batch_invariance") for name in ("sigmoid", "alibi", "softcap")],
)
def test_bitwise(oracle, name):
    case = testing.make_case(spec(variant=VARIANTS[name]), [40, 1, 0, 33], [150, 60, 9, 20])
    getattr(testing, oracle)(case, EmulatedHopper())


@pytest.mark.parametrize("name", ["alibi", "softcap", "sigmoid"])
def test_holes_of_others(name):
    """A request's bits are the same whether its batch has keys that are not there, and with them tables of positions, or none."""
    s, rng, results = spec(head_dim=128, variant=VARIANTS[name]), np.random.default_rng(3), []
    bf16 = as_dtype("bfloat16").numpy
    q = rng.standard_normal((110, 4, 128)).astype(np.float32).astype(bf16)
    kv = tuple(rng.standard_normal((50, 16, 2, 128)).astype(np.float32).astype(bf16) for _ in "kv")
    pages = rng.permutation(50)[:45].astype(np.int32)
    for hole in (False, True):
        ids = pages.copy()
        ids[2] = at.formats.HOLE if hole else ids[2]
        index = at.formats.paged([0, 40, 110], np.array([0, 10, 45], np.int32), ids, [160, 550], 16)
        attn = at.Attention(s, backend=EmulatedHopper(), device="cpu")
        plan = attn.plan(index)
        out = np.asarray(attn.run(q, kv))
        testing.check(plan, q, kv, out, None)
        results.append(out[40:].view(np.uint16))
    assert np.array_equal(*results)


@pytest.mark.parametrize("dim", [64, 128])
def test_caps_of_other_rows(dim):
    """A row whose scores are near 0 has the same bits beside rows whose scores are not, in tiles that are masked and not."""
    s = spec(head_dim=dim, variant=(v.causal(), v.softcap(3.0)))
    case, results = testing.make_case(s, [70, 33], [560, 300], seed=5), []
    for scale in (1.0, 6.0):
        q = tuple(x.copy() for x in case.q)
        for rows in q:
            rows[...] = rows * np.float32(0.15)
            rows[::3] = rows[::3] * np.float32(scale * 6)
        other = replace(case, q=q)
        batch = testing.lay_out(other, page_size=16)
        result = testing.run_batch(other, batch, EmulatedHopper(), device="cpu")
        answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
        testing.compare(s, answer, result.out, result.lse)
        near = np.concatenate([np.arange(len(x)) % 3 > 0 for x in case.q])
        results.append(np.asarray(result.out)[near].view(np.uint16))
    assert np.array_equal(*results)


@pytest.mark.parametrize("dim", [64, 256])
def test_cut_rows(dim):
    """An append class of leaves of 4096 keys: cut among workers, folded in registers, merged."""
    s = spec(num_qo_heads=1, num_kv_heads=1, head_dim=dim)
    results = [right(s, ([65], [4300]), EmulatedHopper(n))[0] for n in (1, 3)]
    testing.same(*results, "one worker and three")


def test_first_passes_come_with_the_header(monkeypatch):
    """Workers' first passes lie behind the header where nobody else's items do, and change no bit."""
    s, told, fill = spec(variant=(v.causal(), v.sliding_window(50))), [], first_lines.fill_first_passes

    def watched(*args):
        told.append(fill(*args))
        return told[-1]

    monkeypatch.setattr(pack, "fill_first_passes", watched)
    lengths = [70, 40, 33], [250, 60, 170]
    with_them, _ = right(s, lengths, EmulatedHopper(3), page_size=16)
    right(s, ([70, 1], [250, 60]), EmulatedHopper(3), page_size=16)  # with decode rows there is no place
    assert told == [3, 0]
    monkeypatch.setattr(pack, "fill_first_passes", lambda *_: 0)
    without, _ = right(s, lengths, EmulatedHopper(3), page_size=16)
    testing.same(with_them, without, "first passes told and found")


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", ["causal", "softcap", "alibi"])
def test_holes(name, page_size):
    """Keys that are not there in the middle of a list, alone and by whole tiles."""
    s, rng = spec(variant=VARIANTS[name]), np.random.default_rng()
    kv = [450, 70]
    pages = [-(-n // page_size) for n in kv]
    ids = rng.permutation(sum(pages) + 3)[: sum(pages)].astype(np.int32)
    ids[rng.random(len(ids)) < 0.2] = at.formats.HOLE
    ids[128 // page_size : 256 // page_size] = at.formats.HOLE
    indptr = np.cumsum([0, *pages]).astype(np.int32)
    index = at.formats.paged(np.array([0, 40, 73], np.int32), indptr, ids, np.array(kv, np.int32), page_size)
    bf16 = as_dtype("bfloat16").numpy
    q = rng.standard_normal((73, 4, 64)).astype(np.float32).astype(bf16)
    shape = (sum(pages) + 3, page_size, 2, 64)
    kv_arrays = tuple(rng.standard_normal(shape).astype(np.float32).astype(bf16) for _ in "kv")
    backend = EmulatedHopper()
    attn = at.Attention(s, backend=backend, device="cpu")
    plan = attn.plan(index)
    out, lse = attn.run(q, kv_arrays, return_lse=True)
    testing.check(plan, q, kv_arrays, out, lse)
    assert backend.seen == [page_size > 1]


def test_ragged():
    s = spec()
    rng = np.random.default_rng(5)
    qo, kv = np.array([0, 70, 110]), np.array([0, 150, 190])
    index = at.formats.ragged(qo.astype(np.int32), kv.astype(np.int32))
    bf16 = as_dtype("bfloat16").numpy
    q = rng.standard_normal((110, 4, 64)).astype(np.float32).astype(bf16)
    k, w = (rng.standard_normal((190, 2, 64)).astype(np.float32).astype(bf16) for _ in "kv")
    backend = EmulatedHopper()
    attn = at.Attention(s, backend=backend, device="cpu")
    plan = attn.plan(index)
    out, lse = attn.run(q, (k, w), return_lse=True)
    testing.check(plan, q, (k, w), out, lse)
    assert backend.seen == [True]


def far_pages(pages, size, stride_page):
    """A pool of bfloat16 whose pages lie so many bytes apart, in address space that is not backed by memory until written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux: MAP_NORESERVE
    try:
        space = mmap.mmap(-1, stride_page * (pages - 1) + (1 << 20), flags=flags)
    except (OSError, ValueError) as error:
        pytest.skip(f"no such address space: {error}")
    memory = np.frombuffer(space, as_dtype("bfloat16").numpy)
    return np.lib.stride_tricks.as_strided(memory, (pages, size, 2, 64), (stride_page, 256, 128, 2))


@pytest.mark.parametrize("pool", ["backwards", "far"])
def test_strides_of_any_sign_and_size(pool):
    """Pages in reverse, and pages 40 GiB apart: the bits of a compact pool."""
    s, rng = spec(), np.random.default_rng()
    bf16 = as_dtype("bfloat16").numpy
    q = rng.standard_normal((70, 4, 64)).astype(np.float32).astype(bf16)
    index = at.formats.paged([0, 70], [0, 3], np.array([2, 0, 1], np.int32), [90], 32)
    compact = [rng.standard_normal((3, 32, 2, 64)).astype(np.float32).astype(bf16) for _ in "kv"]
    if pool == "backwards":
        other = [np.ascontiguousarray(x[::-1])[::-1] for x in compact]
        assert other[0].strides[0] < 0
    else:
        other = [far_pages(3, 32, 40 << 30) for _ in compact]
        for to, x in zip(other, compact, strict=True):
            to[...] = x
    attn = at.Attention(s, backend=EmulatedHopper(boxes=False), device="cpu")
    plan = attn.plan(index)
    results = []
    for kv in (tuple(compact), tuple(other)):
        out, lse = attn.run(q, kv, return_lse=True)
        results.append(testing.Result(out=out, lse=lse))
    testing.check(plan, q, tuple(compact), results[0].out, results[0].lse)
    testing.same(*results, pool)
