# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel behind Attention on a GPU of sm_90: float64, and bit for bit whatever batch, pages, arrays, workers bring."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt import testing
from attnrt.backends.cuda import driver
from attnrt.testing.device import execute

sys.path.insert(0, str(Path(__file__).parent))
from courses import COURSES, along
from gpu_arrays import World, head, to_host
from gpu_arrays import spec_128 as spec
from own_maps import own_maps

v = at.variants
pytestmark = pytest.mark.gpu
if driver.why_not() is None and driver.device_attribute(0, driver.MAJOR) != 9:
    pytest.skip("needs sm_90", allow_module_level=True)

#: Appends and prompts beside decode steps and nothing; odd lengths, more queries than keys, rows cut among workers.
LENGTHS = ([200, 1, 0, 130, 17, 600, 33, 90], [333, 1400, 9, 130, 10, 777, 4500, 20])
PROMPTS = ([200, 130, 33], [333, 130, 4500])
#: Products of 8-bit numbers.
E4M3 = {"q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "out_dtype": "bfloat16"}


def right(s, lengths=LENGTHS, backend="nvrtc", **layout):
    """Run a random batch, compare it with dense float64 attention; the plan must have work for the Hopper kernel."""
    case = testing.make_case(s, *lengths, seed=1)
    batch = testing.lay_out(case, **layout)
    plan = at.Attention(s, backend=backend, device="cuda").plan(batch.index, load=False)
    assert plan.work.worker_indptr[plan.traits.num_workers] < len(plan.work)
    result = testing.run_batch(case, batch, backend, device="cuda")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv, **batch.params)
    testing.compare(s, answer, result.out, result.lse)
    return result


VARIANTS = {
    "full": v.full(),
    "window": (v.causal(), v.sliding_window(137)),
    "softcap": (v.causal(), v.softcap(5.0)),
    "alibi": (v.causal(), v.alibi()),
    "sigmoid": (v.causal(), v.sigmoid()),
    "all": (v.causal(), v.sliding_window(300), v.softcap(20.0), v.alibi(), v.sink_logits(-1.0)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name):
    right(spec(variant=VARIANTS[name]))
    right(spec(variant=VARIANTS[name]), page_size=7)


@pytest.mark.parametrize("course", COURSES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_courses_of_scores(dim, course):
    """Maxima that rise by more or less than the kernel follows, and rows that see nothing above 0."""
    s = spec(head_dim=dim, variant=v.full())
    case = along(testing.make_case(s, [200, 130, 600], [333, 1130, 4500], seed=5), course)
    batch = testing.lay_out(case, page_size=16)
    result = testing.run_batch(case, batch, "nvrtc", device="cuda")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv)
    testing.compare(s, answer, result.out, result.lse)


@pytest.mark.parametrize("rows", [300, 3000], ids=["append", "prompt"])
@pytest.mark.parametrize("first", [0.0, 112.0], ids=["even", "a sink"])
def test_long_sums_in_8_bits(rows, first):
    """Values of one sign over many keys, alike in weight or beside one that has most: tensor cores alone would lose a quarter
    of the first and all of the others of the second."""
    s = spec(**E4M3, variant=v.full(), num_qo_heads=1, num_kv_heads=1)
    case = testing.make_case(s, [rows], [16000], seed=5)
    q, k, values = case.q[0].copy(), case.k[0].copy(), case.v[0].copy()
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[0, :, 0] = first  # in units of sqrt(head_dim)
    values[:], values[0] = 1.0, -1.0
    case = replace(case, q=(q,), k=(k,), v=(values,))
    batch = testing.lay_out(case, page_size=16)
    result = testing.run_batch(case, batch, "nvrtc", device="cuda")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv)
    error = np.asarray(result.out, np.float64) - answer.out
    assert np.abs(error).max() < 0.03


@pytest.mark.parametrize("course", COURSES)
def test_courses_of_scores_in_8_bits(course):
    s = spec(**E4M3, variant=v.full())
    case = along(testing.make_case(s, [200, 130, 600], [333, 1130, 4500], seed=5), course)
    batch = testing.lay_out(case, page_size=16)
    result = testing.run_batch(case, batch, "nvrtc", device="cuda")
    answer = testing.oracle_answer(s, batch.index, batch.q, batch.kv)
    testing.compare(s, answer, result.out, result.lse)


@pytest.mark.parametrize("name", ["causal", "softcap"])
def test_masks_of_bits(name):
    """What an index hides; one key by key, one in boxes, with the same bits."""
    world = World(spec(variant={**VARIANTS, "causal": v.causal()}[name]), rows=300, pages=400)
    qo, kv = [200, 1, 99], [333, 900, 99]
    masks = [world.rng.random((q, k)) < 0.5 for q, k in zip(qo, kv, strict=True)]
    masks[2][40:] = False  # rows that see nothing
    flat = world.index(qo, kv)
    want = world.fresh("nvrtc", at.formats.tree(flat, mask=masks))
    ids = [flat.indices[a:b] for a, b in zip(flat.indptr[:-1], flat.indptr[1:], strict=True)]
    tokens = [
        (x[:, None] * 16 + np.arange(16)).reshape(-1)[:n].astype(np.int32)
        for x, n in zip(ids, kv, strict=True)
    ]
    indptr = np.cumsum([0, *kv]).astype(np.int32)
    single = at.formats.paged(flat.qo_indptr, indptr, np.concatenate(tokens), np.array(kv, np.int32), 1)
    testing.same(want, world.fresh("nvrtc", at.formats.tree(single, mask=masks)), "single tokens")


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (192, 128), (256, 256)])
@pytest.mark.parametrize("q_dtype", ["float16", "bfloat16"])
def test_dims_and_types(dims, q_dtype):
    right(spec(head_dim=dims[0], head_dim_vo=dims[1], q_dtype=q_dtype))
    right(spec(head_dim=dims[0], head_dim_vo=dims[1], q_dtype=q_dtype), page_size=1)


#: Specs whose tiles are rewritten between load and multiply; of the last ones q has 8 bits, too, and so have the products.
REWRITTEN = {
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "e5m2, float16": {"kv_dtype": "float8_e5m2", "q_dtype": "float16", "head_dim": 64, "head_dim_vo": 64},
    "e4m3 192/128": {"kv_dtype": "float8_e4m3fn", "head_dim": 192},
    "scales": {"kv_dtype": "float8_e4m3fn", "variant": (v.causal(), v.fp8_scales(k_scale=0.5, v_scale=2.0))},
    "rope": {"variant": (v.causal(), v.rope(128))},
    "rope of a part": {"variant": (v.causal(), v.rope(32, interleaved=True)), "head_dim_vo": 64},
    "rope 192/128": {"variant": (v.causal(), v.rope(64)), "head_dim": 192},
    "rope e4m3": {"variant": (v.causal(), v.rope(64)), "kv_dtype": "float8_e4m3fn"},
    "own": {"variant": (v.causal(), own_maps())},
    "e4m3 of e4m3": E4M3,
    "full, float32 of e4m3": E4M3 | {"variant": v.full(), "out_dtype": "float32"},
    "one level of e4m3": E4M3 | {"two_level": False},
    "softcap of e4m3": E4M3 | {"variant": (v.causal(), v.softcap(5.0))},
    "alibi of e4m3": E4M3 | {"variant": (v.causal(), v.alibi())},
    "scales of e4m3": E4M3
    | {"variant": (v.causal(), v.fp8_scales(q_scale=0.5, k_scale=1.5, v_scale=2.0), v.sink_logits(-1.0))},
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_tiles(name):
    """Boxes and keys, whatever the page: one result."""
    s = spec(**{"head_dim_vo": 128, **REWRITTEN[name]})
    want = right(s, PROMPTS)
    case = testing.make_case(s, *PROMPTS, seed=1)
    for page_size in (1, 16, 64):
        batch = testing.lay_out(case, page_size=page_size)
        testing.same(want, testing.run_batch(case, batch, "nvrtc", device="cuda"), f"pages of {page_size}")


@pytest.mark.parametrize("oracle", ["poison", "batch_invariance", "workers"])
@pytest.mark.parametrize("name", ["e4m3", "rope", "e4m3 of e4m3", "full, float32 of e4m3"])
def test_rewritten_tiles_bitwise(name, oracle):
    case = testing.make_case(spec(**REWRITTEN[name]), *LENGTHS)
    if oracle == "workers":
        testing.workers(case, "nvrtc", (528, 28, 1))
    else:
        getattr(testing, oracle)(case, "nvrtc")


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (9, 3), (28, 4), (16, 1), (71, 1)])
def test_groups(heads):
    right(spec(num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=64, out_dtype="float32"), PROMPTS)


@pytest.mark.parametrize("backend", ["nvrtc", "nvcc"])
def test_pages(backend):
    """Boxes of every size and copies by key, in both orders of heads and tokens: one result."""
    want = right(spec(), backend=backend, builder="ragged")
    for layout in ("NHD", "HND"):
        case = testing.make_case(spec(kv_layout=layout), *LENGTHS, seed=1)
        for page_size in (1, 7, 16, 48, 32, 64, 128, 544):
            batch = testing.lay_out(case, page_size=page_size)
            got = testing.run_batch(case, batch, backend, device="cuda")
            testing.same(want, got, f"{layout} pages of {page_size}")


@pytest.mark.parametrize("name", ["causal", "all"])
@pytest.mark.parametrize("lengths", [LENGTHS, PROMPTS], ids=["mixed", "prompts"])
@pytest.mark.parametrize(
    "oracle",
    ["poison", "placement", "layout_invariance", "capacity", "workers", "batch_invariance", "sentinel"],
)
def test_bitwise(oracle, lengths, name):
    case = testing.make_case(spec(variant={**VARIANTS, "causal": v.causal()}[name]), *lengths)
    if oracle == "workers":
        testing.workers(case, "nvrtc", (528, 524, 264, 28, 1))
    else:
        getattr(testing, oracle)(case, "nvrtc")


@pytest.mark.parametrize("lengths", [LENGTHS, PROMPTS], ids=["mixed", "prompts"])
@pytest.mark.parametrize("oracle", ["poison", "workers", "batch_invariance", "sentinel"])
def test_passes_of_three_warpgroups_bitwise(oracle, lengths):
    """head_dim 64: 192 rows, or fewer where items are fewer than workers."""
    case = testing.make_case(spec(head_dim=64, head_dim_vo=64), *lengths)
    if oracle == "workers":
        testing.workers(case, "nvrtc", (528, 524, 264, 28, 1))
    else:
        getattr(testing, oracle)(case, "nvrtc")


@pytest.mark.parametrize("page_size", [16, 1])
def test_history_changes_nothing(page_size):
    cases = [testing.make_case(spec(), *lengths, seed=7) for lengths in (LENGTHS, ([1, 2], [300, 20]))]
    testing.history(*cases, "nvrtc", page_size=page_size)


def test_arrays_off_16_byte_lines():
    """q, K and V shifted by one number: copied number by number, with the same bits."""
    import torch

    world = World(spec(), rows=300, pages=200)
    index = world.index([200, 1, 99], [333, 900, 99])
    want = world.fresh("nvrtc", index)

    def shifted(x):
        flat = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:]
        flat.copy_(x.reshape(-1))
        return flat.view(x.shape)

    attn = at.Attention(world.spec, backend="nvrtc", device="cuda")
    attn.plan(index)
    k, w = world.gpu_kv
    for arrays in (
        (world.gpu_q, k, w),
        (world.gpu_q, shifted(k), w),
        (world.gpu_q, k, shifted(w)),
        (shifted(world.gpu_q), k, w),
        (shifted(world.gpu_q), shifted(k), shifted(w)),
        (world.gpu_q, k, w),
    ):
        out, lse = world.results(300)
        attn.run(arrays[0], arrays[1:], out=out, lse=lse)
        testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), "arrays off their lines")


@pytest.mark.parametrize("bound", [False, True], ids=["host", "device"])
def test_holes(bound):
    """Pages that are not there; on the device also ids outside the pool."""
    import torch

    world = World(spec(), rows=300, pages=200)
    qo, kv = [200, 1, 99], [333, 900, 700]
    lists = world.lists(kv)
    for ids in lists:
        ids[world.rng.random(len(ids)) < 0.2] = -1
        ids[8:16] = -1
    qo_indptr, indptr = np.cumsum([0, *qo]), np.cumsum([0, *map(len, lists)])
    ids = np.concatenate(lists)
    want = world.fresh("nvrtc", at.formats.paged(qo_indptr, indptr, ids, kv, 16))
    if not bound:
        return
    far = np.where(ids < 0, 1 << 20, ids).astype(np.int32)
    attn = at.Attention(world.spec, backend="nvrtc", device="cuda")
    attn.plan(at.formats.paged(qo_indptr, indptr, torch.from_numpy(far).cuda(), kv, 16))
    out, lse = world.results(300)
    attn.run(world.gpu_q, world.gpu_kv, out=out, lse=lse)
    testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), "ids outside the pool")


def test_a_shared_prefix():
    """Prompts behind one prefix: as parts, the bits of the flat index."""
    world = World(spec(), rows=300, pages=400)
    lens, qo = np.array([900, 700, 800, 650]), [100, 1, 90, 40]
    lists = [world.rng.permutation(400)[: -(-n // 16)].astype(np.int32) for n in lens]
    for ids in lists[1:]:
        ids[:37] = lists[0][:37]
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    flat = at.formats.paged(
        np.cumsum([0, *qo]).astype(np.int32), indptr, np.concatenate(lists), lens.astype(np.int32), 16
    )
    want = world.fresh("nvrtc", flat)
    shared = at.formats.share(flat, min_tokens=64)
    assert len(shared.parts) > 1
    testing.same(want, world.fresh("nvrtc", shared), "sharing the prefix")


def keys_alone(world, tokens, keys):
    """One request of so many queries over single tokens of the pool."""
    ids = world.rng.permutation(400 * 16)[:keys].astype(np.int32)
    ends = (np.array([0, n], np.int32) for n in (tokens, keys))
    return at.formats.paged(*ends, ids, np.array([keys], np.int32), 1)


def graph_serves(limits, first, later, pad_to=256):
    """A graph captured under one index gives under later ones, padded or not, the bits of runs of their own."""
    import torch

    world = World(spec(), rows=256, pages=400)
    attn = at.Attention(world.spec, backend="nvrtc", limits=limits, device="cuda")
    out, lse = world.results(256)
    index = world.index(*first)
    attn.plan(index, pad_to=pad_to)
    rows = pad_to or index.num_qo
    q, results = world.gpu_q[:rows], {"out": out[:rows], "lse": lse[:rows]}
    attn.run(q, world.gpu_kv, **results)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(q, world.gpu_kv, **results)
    for index in later(world):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        attn.plan(index, pad_to=pad_to)
        graph.replay()
        torch.cuda.synchronize()
        got = head(testing.Result(out=to_host(out), lse=to_host(lse)), index.num_qo)
        if index.num_qo:
            testing.same(world.fresh("nvrtc", index), got, "the graph")


def test_a_graph_serves_boxes_and_keys():
    """Captured under pages of 16, replayed under bridges of single tokens, decode steps alone, prompts alone."""

    def later(world):
        zero = np.array([0], np.int32)
        return (
            world.index([200, 1], [333, 900]),
            world.index([1, 1, 1], [900, 20, 4000]),
            keys_alone(world, 120, 500),
            world.index([20, 20], [5000, 20]),
            at.formats.paged(np.array([0], np.int32), zero, zero[:0], zero[:0], 16),
        )

    graph_serves(at.Limits(16, 256, 8192, max_parts=3), ([1, 40], [100, 300]), later)


@pytest.mark.parametrize("longest", [4096, 6000])
def test_a_graph_of_promised_lengths(longest):
    """No decode steps, and requests of one leaf: the kernels that are left serve pages, single tokens, prompts and empty rows."""

    def later(world):
        return (
            world.index([200, 0], [333, 900]),
            world.index([17, 100, 30], [longest, 100, 999]),
            keys_alone(world, 120, longest),
            keys_alone(world, 17, 40),
        )

    limits = at.Limits(16, 256, 8192, max_kv_len=longest, min_qo_len=17)
    graph_serves(limits, ([20, 40], [100, 300]), later)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("shortest", "longest"), [(17, 4096), (17, 6000), (1, 6000)])
def test_a_graph_of_aligned_blocks(shortest, longest, padded):
    """No launch for keys one by one; where requests are one leaf, none is a decode step and no row is padding, one in all."""

    def later(world):
        return (
            world.index([200, 0], [333, 900]),
            world.index([17, 100, 30], [longest, 100, 999]),
            world.index([shortest, 33], [777, 40]),
        )

    lengths = {"max_kv_len": longest, "min_qo_len": shortest}
    limits = at.Limits(16, 256, 8192, **lengths, kv_alignment=16, max_padding=None if padded else 0)
    graph_serves(limits, ([20, 40], [100, 300]), later, pad_to=256 if padded else None)


def test_true_lengths_on_the_device():
    import torch

    world = World(spec(), rows=256, pages=400)
    most, qo = [900, 300, 3000], [100, 1, 60]
    lists = world.lists(most)
    qo_indptr, indptr = np.cumsum([0, *qo]), np.cumsum([0, *map(len, lists)])
    true = torch.tensor(most, dtype=torch.int32, device="cuda")
    attn = at.Attention(world.spec, backend="nvrtc", device="cuda")
    attn.plan(at.formats.paged(qo_indptr, indptr, np.concatenate(lists), true, 16, max_kv_lens=most))
    q = world.gpu_q[:161]
    for lens in (most, [899, 258, 2049], [130, 3, 70], [1, 0, 0]):
        true.copy_(torch.tensor(lens))
        out, lse = attn.run(q, world.gpu_kv, return_lse=True)
        short = [x[: -(-n // 16)] for x, n in zip(lists, lens, strict=True)]
        exact = at.formats.paged(qo_indptr, np.cumsum([0, *map(len, short)]), np.concatenate(short), lens, 16)
        want = world.fresh("nvrtc", exact)
        testing.same(want, testing.Result(out=to_host(out), lse=to_host(lse)), f"lengths {lens}")


def test_compilers_agree():
    """NVRTC and nvcc of one version compile one text."""
    case = testing.make_case(spec(), *LENGTHS)
    batch = testing.lay_out(case)
    testing.same(*(testing.run_batch(case, batch, name, device="cuda") for name in ("nvrtc", "nvcc")), "nvcc")


def test_a_list_per_head():
    """Each KV head reads pages of its own."""
    s = spec()
    world = World(s, rows=200, pages=300)
    qo, kv = np.array([120, 60]), np.array([200, 333])
    lists = [world.rng.permutation(300)[: -(-n // 16)].astype(np.int32) for n in kv for _ in range(2)]
    indptr = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    request = np.repeat(np.arange(2), qo).astype(np.int32)
    within = np.concatenate([np.arange(n) for n in qo])
    index = at.formats.BlockSparse(
        block_size=(120, 16),
        heads=2,
        num_qo=180,
        requests=at.formats.Requests(qo_lens=qo.astype(np.int32), kv_lens=kv.astype(np.int32)),
        qo_indptr=np.array([0, 120, 180], np.int32),
        request=request,
        qo_pos=(kv[request] - qo[request] + within).astype(np.int32),
        indptr=indptr,
        indices=np.concatenate(lists),
        kv_pos=np.zeros(2, np.int32),
        kv_begin=np.zeros(4, np.int32),
        kv_end=np.repeat(kv, 2).astype(np.int32),
        kv_offset=np.zeros(2, np.int32),
        max_block=299,
        features=at.formats.Features(per_head=True),
    )
    attn = at.Attention(s, backend="nvrtc", device="cuda")
    plan = attn.plan(index)
    out = np.full((180, 8, 128), np.nan).astype(world.q.dtype)
    lse = np.full((180, 8), np.nan, np.float32)
    execute(attn, world.q[:180], world.kv, out=out, lse=lse)
    testing.check(plan, world.q[:180], world.kv, out, lse)
