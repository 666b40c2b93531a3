# SPDX-License-Identifier: Apache-2.0
"""Hard cases of planning: index types, dropped options, state that survives, what differs from the plan, empty batches, sizes."""

from __future__ import annotations

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing

v = at.variants


def test_c10_int64_index_arrays(backend, kit):
    """NumPy's default integers: converted, so that the second request is right too; what does not fit is refused by name."""
    spec = kit.spec(backend, num_qo_heads=32, num_kv_heads=8, head_dim=64)
    arrays = {
        "qo_indptr": np.array([0, 1, 2]), "kv_indptr": np.array([0, 1, 2]),
        "kv_indices": np.array([1, 0]), "kv_lens": formats.kv_lens_of(np.array([0, 1, 2]), np.array([2, 1]), 2),
    }  # fmt: skip
    small = {name: x.astype(np.int32) for name, x in arrays.items()}
    q, kv = kit.draw(1, 2, 32, 64), (kit.draw(2, 2, 2, 8, 64), kit.draw(3, 2, 2, 8, 64))
    want = kit.right(backend, spec, formats.paged(**small, page_size=2), q, kv)
    for name, array in arrays.items():
        for kind in (np.int64, np.uint8, ">i4", np.uint64):
            one = small | {name: np.asarray(array).astype(kind)}
            testing.same(
                want, kit.run(backend, spec, formats.paged(**one, page_size=2), q, kv), f"{kind} {name}"
            )
        for bad in (small[name].astype(np.int64) + (1 << 32), small[name].astype(np.float32)):
            with pytest.raises((at.ArgumentError, at.DtypeError), match=name):
                formats.paged(**(small | {name: bad}), page_size=2)
    flat = formats.paged(**small, page_size=2)
    offsets = formats.mask_offsets(np.array([1, 1]), np.array([2, 1], np.int64))
    assert offsets.dtype == np.int64 and offsets.tolist() == [0, 8, 16]
    with pytest.raises((at.ArgumentError, at.DtypeError), match="parents"):
        formats.tree(flat, parents=np.array([-1.0, -1.0]))


OPTIONS = {
    "logits_soft_cap": 5.0, "softcap": 5.0, "window_left": 3, "alibi_slopes": np.ones(4, np.float32), "k_scale": 0.5,
    "custom_mask": np.ones((1, 9), bool), "mask": np.ones((1, 9), bool), "sinks": np.zeros(4, np.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_c29_an_option_that_the_plan_lacks(backend, kit, name):
    """Given to run() without its variant: an error that names it."""
    spec = kit.spec(backend)
    attn = kit.attention(backend, spec)
    k = kit.draw(2, 9, 2, 16)
    attn.plan(formats.ragged([0, 1], [0, 9]))
    with pytest.raises(at.ArgumentError, match=name):
        kit.again(attn, spec, 1, kit.draw(1, 1, 4, 16), (k, k), **{name: OPTIONS[name]})
    kit.right(backend, spec, formats.ragged([0, 1], [0, 9]), kit.draw(1, 1, 4, 16), (k, k), attn=attn)


def test_c29_an_option_that_the_plan_has(backend, kit):
    """Logits of about 30 under a cap of 5: honoured on every layout, at run time too."""
    spec = kit.spec(backend, v.causal(), v.softcap(50.0))
    q, k = kit.draw(1, 2, 4, 16) * 8, kit.draw(2, 12, 2, 16) * 4
    for index in (formats.ragged([0, 2], [0, 11]), formats.paged([0, 2], [0, 3], [0, 1, 2], [11], 4)):
        wide, narrow = (kit.right(backend, spec, index, q, (k, k), softcap=cap) for cap in (50.0, 5.0))
        assert np.abs(wide.lse - narrow.lse).max() > 1


def test_c31_no_mask_survives_its_plan(backend, kit):
    """A tree's mask, then plain causal, then a window's plan, on one attention: each as on a fresh one."""
    spec = kit.spec(backend)
    flat = formats.ragged([0, 3], [0, 5])
    masked = formats.tree(flat, mask=[np.ones((3, 5), bool)])
    tree = formats.tree(flat, parents=[-1, 0, 0])
    q, kv = kit.draw(1, 3, 4, 16), (kit.draw(2, 5, 2, 16), kit.draw(3, 5, 2, 16))
    attn = kit.attention(backend, spec)
    fresh = {id(x): kit.right(backend, spec, x, q, kv) for x in (flat, masked, tree)}
    for index in (masked, flat, tree, flat, masked, tree, masked, flat):
        testing.same(
            fresh[id(index)], kit.run(backend, spec, index, q, kv, attn=attn), "an earlier plan's mask"
        )
    windowed = kit.spec(backend, v.causal(), v.sliding_window(3), v.softcap(9.0))
    attn = kit.attention(backend, windowed)
    want = kit.right(backend, windowed, flat, q, kv)
    kit.right(backend, windowed, flat, q, kv, attn=attn, window_left=1, softcap=2.0)
    testing.same(want, kit.run(backend, windowed, flat, q, kv, attn=attn), "an earlier run's arguments")


def refused(kit, attn, spec, error, match, q, kv, **arguments):
    out = np.full((5, spec.num_qo_heads, spec.head_dim), 7, np.float32)
    with pytest.raises(error, match=match) as caught:
        if kit.cuda(attn.backend):
            (q, *kv), _ = kit.device_arrays(attn.backend, q, *kv)
            attn.run(q, tuple(kv), **arguments)
        else:
            attn.run(q, kv, out=out.astype(kit.cast(out, spec.out_dtype).dtype), **arguments)
    return caught.value


def test_c42_what_differs_from_the_plan(backend, kit):
    spec = kit.spec(backend, num_qo_heads=8)
    attn = kit.attention(backend, spec)
    q, k = (kit.cast(x, spec.q_dtype) for x in (kit.draw(1, 6, 8, 16), kit.draw(2, 5, 4, 2, 16)))
    with pytest.raises(at.PlanError, match="loaded"):
        attn.run(q[:5], (k, k))
    attn.plan(formats.paged([0, 2, 5], [0, 2, 5], [0, 1, 2, 3, 4], [8, 12], 4))
    for rows in (4, 6):
        error = refused(kit, attn, spec, at.PlanError, "q must have the 5 rows", q[:rows], (k, k))
        assert error.got == rows
    other = np.float32 if kit.cuda(backend) else np.float16
    refused(kit, attn, spec, at.DtypeError, f"q must be {spec.q_dtype}", q[:5].astype(other), (k, k))
    refused(kit, attn, spec, at.DtypeError, "k must be", q[:5], (k.astype(other), k))
    refused(kit, attn, spec, at.ArgumentError, r"q must be \[rows, 8, 16\]", q[:5, :4], (k, k))
    refused(kit, attn, spec, at.ArgumentError, "k must be", q[:5], (k[:, :, :1], k))
    refused(kit, attn, spec, at.PlanError, "pages of 4", q[:5], (k.reshape(10, 2, 2, 16),) * 2)
    refused(kit, attn, spec, at.ArgumentError, "kv must hold the", q[:5], (k[:4], k[:4]))
    with pytest.raises(at.PlanError, match="plan must be made for this"):
        kit.attention(backend, kit.spec(backend)).load(attn.plan(formats.ragged([0, 1], [0, 4]), load=False))


def test_c50_nothing_to_do(backend, kit):
    spec = kit.spec(backend, num_qo_heads=9, num_kv_heads=3, head_dim=8)
    kv = (np.full((1030, 4, 3, 8), np.nan, np.float32),) * 2
    empty = np.zeros((0, 9, 8), np.float32)
    for index in (
        formats.paged([0], [0], [], [], 4),
        formats.paged([0, 0, 0], [0, 1024, 2048], np.tile(np.arange(1024), 2), [4096, 4096], 4),
        formats.ragged([0], [0]),
        formats.ragged([0, 0, 0], [0, 8, 9]),
        formats.share(formats.paged([0, 0, 0], [0, 1, 2], [1, 2], [4, 4], 4)),
        formats.tree(formats.paged([0], [0], [], [], 4), []),
    ):
        result = kit.run(backend, spec, index, empty, kv)
        assert result.out.shape == (0, 9, 8) and result.lse.shape == (0, 9)
        padded = kit.run(backend, spec, index, np.full((3, 9, 8), np.nan, np.float32), kv, pad_to=3)
        assert not padded.out.any() and np.isneginf(padded.lse).all()
    mixed = formats.paged([0, 0, 1, 1, 2], [0, 0, 1, 1, 3], [5, 6, 7], [0, 3, 0, 5], 4)
    kv = (kit.draw(1, 8, 4, 3, 8), kit.draw(2, 8, 4, 3, 8))
    kit.right(backend, spec, mixed, kit.draw(3, 2, 9, 8), kv)
    for x in (np.zeros((0, 9, 8), np.float32), kit.draw(3, 2, 9, 8)):
        if not kit.cuda(backend):
            attn = kit.attention(backend, spec)
            attn.plan(mixed if len(x) else formats.ragged([0], [0]))
            out, lse = attn.run(x, kv, return_lse=True)
            assert (out.shape, out.dtype, lse.shape) == ((len(x), 9, 8), np.float32, (len(x), 9))


@pytest.mark.parametrize("count", [16_385, 16_600, 17_000])
def test_c61_no_capacity_of_a_work_list(backend, kit, count):
    """One query each, 16 heads; one key each, so that every row is right only if its own work was done."""
    count = count // 512 if backend == "reference" else count
    spec = kit.spec(backend, num_qo_heads=16, num_kv_heads=16, head_dim=8)
    k = kit.draw(1, count, 16, 8)
    every = np.arange(count + 1)
    result = kit.run(backend, spec, formats.ragged(every, every), kit.draw(2, count, 16, 8), (k, k))
    assert (result.out == kit.cast(k, spec.out_dtype)).all()


@pytest.mark.parametrize("spread", [1, 1.6, 6.4])
def test_c65_capacity_of_the_cache(backend, kit, spread):
    """40960 tokens in tables and pools that hold from 40960 to 262144: same bits (one tenth of it on the reference)."""
    kv = 4096 if backend == "reference" else 40_960
    size = 64
    spec = kit.spec(backend, num_qo_heads=2, num_kv_heads=1, head_dim=8)
    q, k = kit.draw(1, 1, 2, 8), kit.draw(2, kv // size, size, 1, 8)
    plain = kit.run(
        backend, spec, formats.paged([0, 1], [0, kv // size], np.arange(kv // size), [kv], size), q, (k, k)
    )
    room = int(kv * spread) // size
    pool = np.full((room, size, 1, 8), np.nan, np.float32)
    pool[: len(k)] = k
    table = np.full((1, room), -1)
    table[0, : len(k)] = np.arange(len(k))
    index = formats.block_table([0, 1], table, [kv], size)
    testing.same(plain, kit.run(backend, spec, index, q, (pool, pool)), "capacity")


def test_c109_options_that_contradict(backend, kit):
    """Both masks count; a softmax-free variant has no sinks and no lse; a tree gives ALiBi its positions."""
    flat = formats.ragged([0, 3], [0, 8])
    q, kv = kit.draw(1, 3, 4, 16), (kit.draw(2, 8, 2, 16),) * 2
    mask = np.ones((3, 8), bool)
    mask[:, 2] = False
    masked = formats.tree(flat, mask=[mask])
    both = kit.right(backend, kit.spec(backend, v.causal(), v.custom_mask()), masked, q, kv)
    allowed = formats.tree(flat, mask=[mask & np.tri(3, 8, 5, dtype=bool)])
    testing.same(
        both, kit.run(backend, kit.spec(backend, v.custom_mask()), allowed, q, kv), "causal and a mask"
    )
    testing.same(
        both, kit.run(backend, kit.spec(backend), masked, q, kv), "a mask that the variant does not name"
    )
    with pytest.raises(at.ArgumentError, match="mask"):
        kit.run(backend, kit.spec(backend, v.custom_mask()), flat, q, kv)
    for wrong in (
        (v.sigmoid(), v.sink_logits(0.0)),
        (v.sigmoid(), v.softcap(3.0)),
        (v.softcap(3.0), v.softcap(4.0)),
    ):
        with pytest.raises(at.ArgumentError):
            kit.spec(backend, *wrong)
    free = kit.spec(backend, v.causal(), v.sigmoid())
    attn = kit.attention(backend, free)
    attn.plan(flat)
    with pytest.raises(at.ArgumentError, match="softmax-free"):
        (view, *caches), _ = kit.device_arrays(
            backend, kit.cast(q, free.q_dtype), *(kit.cast(x, free.q_dtype) for x in kv)
        )
        attn.run(view, tuple(caches), return_lse=True)
    kit.right(
        backend, kit.spec(backend, v.causal(), v.alibi()), formats.tree(flat, parents=[-1, 0, 0]), q, kv
    )


@pytest.mark.parametrize("workers", [1, 7])
def test_c109_sigmoid_split_is_unsplit(backend, kit, workers):
    """Softmax-free partial states add, in a fixed order: cut or whole, the same bits."""
    spec = kit.spec(backend, v.causal(), v.sigmoid(), head_dim=8)
    index = formats.ragged([0, 1], [0, 3000])
    q, k = kit.draw(1, 1, 4, 8), kit.draw(2, 3000, 2, 8)
    results = [
        kit.right(
            backend,
            spec,
            index,
            q,
            (k, k),
            attn=kit.attention(backend, spec, limits=at.Limits(1, 1, 9, max_workers=n)),
        )
        for n in (workers, 40)
    ]
    testing.same(*results, "cuts")
