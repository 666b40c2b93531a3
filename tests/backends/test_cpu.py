# SPDX-License-Identifier: Apache-2.0
"""The C++ CPU backend against dense float64, in every instruction family that this machine runs."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.backends.cpu import CpuBackend
from attnrt.backends.cpu.families import families
from attnrt.dtypes import as_dtype

v = at.variants
DTYPES = [
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float8_e5m2"),
]


@pytest.fixture(params=families())
def cpu(request):
    return CpuBackend(family=request.param)


def spec_of(variants=(), **changes):
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32, "q_dtype": "float32"}
    return at.AttentionSpec(**(fields | changes), variant=variants)


def checked(case, backend, **layout):
    """Run a laid out case and compare with the oracle."""
    batch = testing.lay_out(case, **layout)
    attn = at.Attention(case.spec, backend=backend, device="cpu")
    plan = attn.plan(batch.index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True, **batch.params)
    testing.check(plan, batch.q, batch.kv, out, lse, **batch.params)
    return out, lse


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("seed", range(8))
def test_shapes(cpu, dtypes, seed):
    """Random head counts, dims, lengths, pages: dims that fill no vector, groups that fill no block of rows."""
    rng = np.random.default_rng([seed, len(dtypes[1])])
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 17]))
    shared = bool(rng.random() < 0.2)
    dim = int(rng.choice([8, 13, 40, 64, 72, 96, 128, 192]))
    spec = spec_of(
        (v.causal(), v.sliding_window(int(rng.integers(1, 200)))) if seed % 2 else v.causal(),
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_vo=int(rng.integers(1, dim + 1)) if shared or rng.random() < 0.5 else None,
        q_dtype=dtypes[0],
        kv_dtype=dtypes[1],
        kv_layout=str(rng.choice(["NHD", "HND"])),
        shared_kv=shared,
        sm_scale=0.2 if shared else None,
    )
    qo_lens = rng.integers(0, 40, 4)
    case = testing.make_case(spec, qo_lens, rng.integers(0, 300, 4), seed=seed)
    checked(case, cpu, page_size=int(rng.choice([1, 3, 16, 48, 100])))


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 16, 71])
@pytest.mark.parametrize("qo_len", [1, 2, 30])
def test_any_group(cpu, group, qo_len):
    spec = spec_of(v.causal(), num_qo_heads=group, num_kv_heads=1)
    checked(testing.make_case(spec, [qo_len], [150], seed=group), cpu)


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kv_dtype", [None, "bfloat16"])
def test_queries_in_8_bits(cpu, q_dtype, kv_dtype):
    """Held to what float32 queries are: they are widened, nothing is rounded to their format."""
    spec = spec_of(v.causal(), q_dtype=q_dtype, kv_dtype=kv_dtype, out_dtype="float32")
    case = testing.make_case(spec, [40, 1, 9], [150, 300, 9], seed=6)
    batch = testing.lay_out(case, page_size=16)
    result = testing.run_batch(case, batch, cpu)
    answer = testing.oracle_answer(spec, batch.index, batch.q, batch.kv)
    testing.compare(replace(spec, q_dtype="float32"), answer, result.out, result.lse)


def test_long_rows_are_folded(cpu):
    """Many leaves, split over workers, in both classes."""
    spec = spec_of(v.causal(), head_dim=16)
    checked(testing.make_case(spec, [1, 3, 20], [9000, 700, 8500], seed=3), cpu)


def test_multi_head_latent_attention(cpu):
    spec = spec_of(
        v.causal(),
        num_qo_heads=16,
        num_kv_heads=1,
        head_dim=576,
        head_dim_vo=512,
        shared_kv=True,
        sm_scale=0.07,
    )
    checked(testing.make_case(spec, [1, 4], [100, 70], seed=4), cpu, page_size=64)


def test_more_queries_than_keys(cpu):
    """Rows without a visible key are empty sets, a whole tile of them too."""
    case = testing.make_case(spec_of(v.causal()), [5, 130, 3, 0], [2, 2, 0, 4], seed=5)
    out, lse = checked(case, cpu)
    empty = np.r_[0:3, 5:133, 135:138]
    assert not out[empty].any() and (lse[empty] == -np.inf).all()
    assert np.isfinite(lse[3:5]).all()


@pytest.mark.parametrize("qo_len", [1, 40])
def test_first_tiles_fully_masked(cpu, qo_len):
    spec = spec_of((v.causal(), v.sliding_window(10)))
    checked(testing.make_case(spec, [qo_len], [700], seed=6), cpu)


def test_tree_mask_over_several_tiles(cpu):
    """Siblings lie in different tiles of queries and keys; an all-false row is an empty set."""
    rng = np.random.default_rng(7)
    spec = spec_of((v.causal(), v.custom_mask()), num_qo_heads=8, num_kv_heads=1)
    parents = [-1, *(int(rng.integers(max(i - 3, 0), i)) for i in range(1, 150))]
    base = formats.paged([0, 150], [0, 17], rng.permutation(20)[:17], [260], 16)
    index = formats.tree(base, parents=parents)
    k, val = (rng.standard_normal((20, 16, 1, 32), np.float32) for _ in range(2))
    q = rng.standard_normal((150, 8, 32), np.float32)
    attn = at.Attention(spec, backend=cpu, device="cpu")
    plan = attn.plan(index)
    out, lse = attn.run(q, (k, val), return_lse=True)
    testing.check(plan, q, (k, val), out, lse)


@pytest.mark.parametrize("qo_len", [1, 2, 4, 8])
def test_window_with_several_queries_and_fp8(cpu, qo_len):
    for kv_len in range(120, 137, 4):
        spec = spec_of(
            (v.causal(), v.sliding_window(127)), q_dtype="bfloat16", kv_dtype="float8_e4m3fn", kv_layout="HND"
        )
        checked(testing.make_case(spec, [qo_len], [kv_len], seed=kv_len), cpu)


@pytest.mark.parametrize("qo_len", [1, 20])
def test_nan_stays_with_those_who_see_it(cpu, qo_len):
    """NaN in a live V or K reaches the rows that see its key, and no bit of the others."""
    spec = spec_of(v.causal())
    case = testing.make_case(spec, [qo_len], [90], seed=8)
    out, _ = checked(case, cpu)
    for name in ("k", "v"):
        for key in (89, 80, 75):
            array = getattr(case, name)[0]
            old = array[key, 0].copy()
            array[key, 0] = np.nan
            batch = testing.lay_out(case)
            got, lse = (np.asarray(x) for x in _run(spec, cpu, batch))
            array[key, 0] = old
            sees = np.arange(90 - qo_len, 90) >= key
            assert np.isnan(got[sees][:, :2]).all()
            assert (got[~sees] == out[~sees]).all() and (got[:, 2:] == out[:, 2:]).all()
            assert np.isnan(lse[sees][:, :2]).all() == (name == "k")


def _run(spec, backend, batch):
    attn = at.Attention(spec, backend=backend, device="cpu")
    attn.plan(batch.index)
    return attn.run(batch.q, batch.kv, return_lse=True, **batch.params)


def test_infinite_logits(cpu):
    """A key whose logit is -inf is not seen; a row of nothing else is an empty set, and its V's NaN harms nobody."""
    spec = spec_of(v.full(), num_qo_heads=1, num_kv_heads=1, head_dim=8)
    q = np.ones((2, 1, 8), np.float32)
    k, val = np.zeros((3, 1, 8), np.float32), np.ones((3, 1, 8), np.float32)
    k[1], val[1] = -np.inf, np.nan
    batch = testing.Batch(index=formats.ragged([0, 2], [0, 3]), q=q, kv=(k, val), params={})
    out, lse = _run(spec, cpu, batch)
    np.testing.assert_array_equal(out, np.ones((2, 1, 8), np.float32))
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)
    k[:] = -np.inf
    out, lse = _run(spec, cpu, batch)
    assert not out.any() and (lse == -np.inf).all()


def test_lse_is_natural(cpu):
    """Ten equal keys of logit 0: ln 10."""
    spec = spec_of(v.full())
    case = testing.make_case(spec, [1], [10], seed=9)
    case.k[0][...] = 0
    _, lse = checked(case, cpu)
    np.testing.assert_allclose(lse, np.log(10), rtol=1e-6)


@pytest.mark.parametrize("power", [31, 32])
@pytest.mark.parametrize("qo_len", [1, 20])
def test_offsets_past_32_bits(power, qo_len):
    """Only the last page of a pool of more than 2^31 (2^32) numbers is live; the rest is never touched memory."""
    spec = spec_of(v.causal(), num_qo_heads=2, num_kv_heads=1, head_dim=64, kv_dtype="float8_e4m3fn")
    pages = (1 << power) // (16 * 64) + 1
    rng = np.random.default_rng(10)
    caches = [np.zeros((pages, 16, 1, 64), np.uint8).view(ml_dtypes.float8_e4m3fn) for _ in range(2)]
    for cache in caches:
        cache[-1] = rng.standard_normal((16, 1, 64)).astype(cache.dtype)
    q = rng.standard_normal((qo_len, 2, 64), np.float32)
    small = tuple(cache[-1:] for cache in caches)
    results = []
    for kv, page in ((tuple(caches), pages - 1), (small, 0)):
        index = formats.paged([0, qo_len], [0, 1], [page], [16], 16)
        results.append(_run(spec, "cpu", testing.Batch(index=index, q=q, kv=kv, params={})))
    assert results[0][0].any()
    for big, little in zip(*results, strict=True):
        np.testing.assert_array_equal(big, little)


def test_out_of_range_ids_are_holes():
    """An id that the pool does not have is guarded where it is read: bound arrays are not checked on the host."""
    spec = spec_of(v.causal())
    rng = np.random.default_rng(11)
    kv = tuple(rng.standard_normal((5, 4, 2, 32), np.float32) for _ in range(2))
    q = rng.standard_normal((1, 4, 32), np.float32)
    results = []
    for third in (-1, 5, 2**31 - 1):
        ids = np.array([0, 3, 1, 4], np.int32)
        attn = at.Attention(spec, backend="cpu", device="cpu")
        attn.plan(formats.paged([0, 1], [0, 4], ids, [15], 4))
        for part in attn._runtime.tenant.loaded.parts:  # as a bound array would change under a loaded plan
            view = part.indices.numpy()
            view.flags.writeable = True
            view[2] = third
        results.append(attn.run(q, kv).tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_append_rounds_like_ml_dtypes(cpu, dtype):
    """Every float16 number and some float32 ones, scaled, to nearest even, saturated; negative slots are skipped."""
    from attnrt.backends.base import AppendCall, PagedView
    from attnrt.backends.cpu.kernel import DTYPE_CODES
    from attnrt.tensor import TensorView

    assert dtype in DTYPE_CODES
    rng = np.random.default_rng(12)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    wild = (rng.standard_normal(1 << 15) * 10.0 ** rng.integers(-45, 38, 1 << 15)).astype(np.float32)
    x = np.concatenate([every, wild]).reshape(-1, 2, 64)
    kind = as_dtype(dtype).numpy
    cache = np.zeros((len(x) // 16 + 1, 16, 2, 64), kind)
    slots = rng.permutation(len(cache) * 16)[: len(x)].astype(np.int64)
    slots[::7] = -1
    kernel = cpu.compile(spec_of(v.causal()), formats.base.Features(), at.device.CPU)
    view = TensorView(cache)
    pool = PagedView(
        ptr=view.ptr,
        dtype=dtype,
        num_pages=len(cache),
        page_size=16,
        stride_page=2048,
        stride_token=128,
        stride_head=64,
    )
    scale = np.array([1.0, 0.37], np.float32) if kind.itemsize == 1 else None
    kernel.append(
        AppendCall(
            k=TensorView(x), v=None, k_cache=pool, v_cache=None, slots=TensorView(slots),
            positions=None, rope=None, k_scale=scale, v_scale=None,
        )
    )  # fmt: skip
    want = np.zeros((len(cache) * 16, 2, 64), kind)
    values = x if scale is None else x / scale[None, :, None]
    if kind.itemsize == 1:
        values = np.clip(values, -float(ml_dtypes.finfo(kind).max), float(ml_dtypes.finfo(kind).max))
    with np.errstate(over="ignore", invalid="ignore"):
        want[slots[slots >= 0]] = values[slots >= 0].astype(kind)
    got, want = cache.reshape(want.shape).astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_copy_pages(layout):
    from attnrt.backends.base import PagedView
    from attnrt.backends.cpu.kernel import copy_pages
    from attnrt.tensor import TensorView

    rng = np.random.default_rng(13)
    wide = rng.standard_normal((6, 4, 3, 12), np.float32).astype(np.float16)
    cache = wide[..., :8]
    before = wide.copy()
    view = TensorView(cache)
    page, first, second, _ = view.strides
    token, head = (first, second) if layout == "NHD" else (second, first)
    size, heads = (4, 3) if layout == "NHD" else (3, 4)
    pool = PagedView(
        ptr=view.ptr,
        dtype="float16",
        num_pages=6,
        page_size=size,
        stride_page=page,
        stride_token=token,
        stride_head=head,
    )
    copy_pages(pool, np.array([0, 5]), np.array([3, 1]), heads, 8)
    before[[3, 1], ..., :8] = before[[0, 5], ..., :8]
    np.testing.assert_array_equal(wide, before)


def test_reasons():
    """What it cannot take it says, by name."""
    backend = CpuBackend()
    features = formats.base.Features()
    assert backend.why_not(spec_of(v.causal()), features, at.device.CPU) == ()
    gpu = at.device.Device(kind="cuda", index=0)
    assert "cuda:0" in " ".join(backend.why_not(spec_of(), features, gpu))
    with pytest.raises(at.UnsupportedError, match="sse9"):
        CpuBackend(family="sse9")


def test_prebuilt_header_is_what_the_printer_prints():
    from attnrt.backends.cpu.prebuilt import HEADER, header_text, prebuilt_index

    assert HEADER.read_text() == header_text()
    assert prebuilt_index(v.compose((v.causal(), v.softcap(50.0)))) == 3
    assert prebuilt_index(v.compose(v.alibi())) is None
