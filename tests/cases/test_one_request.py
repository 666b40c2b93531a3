# SPDX-License-Identifier: Apache-2.0
"""Three requests in 200 settings: whatever surrounds them, each has one sha256 (docs/determinism.md).

A decode step over a long cache, an append and a prefill stand among 0 to 255 random mates, in any order, which share a prefix
with one of them or none; 1 to 132 workers, 0 to many partial slots, three schedulers, pages of 1, 16 and 48 in any physical
order, pools four times as large, listed flat, shared or as a cascade. Head dims, groups, types and variants are drawn.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing
from attnrt.dtypes import as_dtype

v = at.variants

VARIANTS = ((v.causal(),), (v.causal(), v.sliding_window(300)), (), (v.causal(), v.softcap(20.0)))
DTYPES = {
    "host": (("float32", None), ("bfloat16", None), ("float16", "float8_e4m3fn")),
    "gpu": (("bfloat16", None), ("float16", None), ("bfloat16", "float8_e4m3fn")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Numbers of one request: q [qo_len, heads, dim], k and v [kv_len, kv heads, dim]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What must not matter."""

    seed: int
    mates: int
    page_size: int
    form: str
    prefix: int
    workers: int | None
    slots: int | None
    scheduler: str
    pool: int


def draw_spec(rng, kind):
    """head_dim 8 to 576, groups 1 to 16; few KV heads where rows are wide, so that a run stays short."""
    dim = 8 * int(rng.choice([1, 2, 3, 5, 8, 9, 12, 16, 24, 72]))
    q_dtype, kv_dtype = DTYPES[kind][rng.integers(3)]
    kv_heads = int(rng.integers(1, 4)) if dim <= 64 else 1
    return at.AttentionSpec(
        num_qo_heads=kv_heads * int(rng.integers(1, 17 if dim <= 64 else 5)),
        num_kv_heads=kv_heads,
        head_dim=dim,
        head_dim_vo=dim if rng.random() < 0.6 else 8 * int(rng.integers(1, max(dim // 8, 2))),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        variant=VARIANTS[rng.integers(len(VARIANTS))],
        kv_layout=["NHD", "HND"][rng.integers(2)],
    )


def draw_request(spec, rng, qo, kv):
    """Random numbers."""

    def numbers(count, heads, dim, dtype):
        return rng.standard_normal((count, heads, dim), np.float32).astype(as_dtype(dtype).numpy)

    return Request(
        q=numbers(qo, spec.num_qo_heads, spec.head_dim, spec.q_dtype),
        k=numbers(kv, spec.num_kv_heads, spec.head_dim, spec.kv_dtype),
        v=numbers(kv, spec.num_kv_heads, spec.head_dim_vo, spec.kv_dtype),
    )


def part_of(stock, rng, qo, kv, like=None, prefix=0):
    """A request of numbers taken from ``stock``, after the first ``prefix`` keys of ``like``."""
    at_q, at_k = int(rng.integers(len(stock.q) - qo + 1)), int(rng.integers(len(stock.k) - kv + 1))
    k, values = stock.k[at_k : at_k + kv], stock.v[at_k : at_k + kv]
    if like is not None:
        k, values = np.concatenate([like.k[:prefix], k]), np.concatenate([like.v[:prefix], values])
    return Request(q=stock.q[at_q : at_q + qo], k=k, v=values)


def draw_setting(rng, longest):
    form = str(rng.choice(["flat", "shared", "cascade"], p=[0.4, 0.3, 0.3]))
    return Setting(
        seed=int(rng.integers(1 << 30)),
        mates=int(rng.choice([0, 1, 3, 9, 31, 255], p=[0.2, 0.2, 0.25, 0.2, 0.12, 0.03])),
        page_size=int(rng.choice([1, 16, 48])),
        form=form,
        prefix=int(rng.integers(1, longest)),
        workers=[None, 1, 2, 7, 33, 132][rng.integers(6)],
        slots=[None, 5000, 0, 3][rng.integers(4 if form == "flat" else 2)],
        scheduler=str(rng.choice(["lpt", "round_robin", "one_cta_per_request"])),
        pool=int(rng.choice([1, 4])),
    )


class Pool:
    """Pages in random order, poisoned where nothing lives."""

    def __init__(self, spec, size, pages, rng):
        self.size, self.free = size, rng.permutation(pages).tolist()
        self.hnd = spec.kv_layout == "HND"
        self.caches = []
        for dim in (spec.head_dim, spec.head_dim_vo):
            inner = (spec.num_kv_heads, size, dim) if self.hnd else (size, spec.num_kv_heads, dim)
            kind = as_dtype(spec.kv_dtype).numpy
            self.caches.append(np.full((pages, *inner), testing.poison_of(spec.kv_dtype, float("nan")), kind))

    def store(self, k, values):
        """Ids of fresh pages that hold these keys."""
        ids = [self.free.pop() for _ in range(-(-len(k) // self.size))]
        page, place = np.repeat(ids, self.size)[: len(k)].astype(int), np.arange(len(k)) % self.size
        for cache, rows in zip(self.caches, (k, values), strict=True):
            (cache.swapaxes(1, 2) if self.hnd else cache)[page, place] = rows
        return ids


def digests(backend, spec, own, stock, setting, device):
    """sha256 of out and lse of each of ``own`` in a setting."""
    rng = np.random.default_rng(setting.seed)
    root = own[int(rng.integers(len(own)))]  # whose prefix the mates may share
    prefix = min(
        setting.prefix, len(root.k) - len(root.q)
    )  # a cascade's last level holds the queries' own keys
    if setting.mates > 30:
        prefix = min(prefix, 200)
    mates = []
    for _ in range(setting.mates):
        extra, qo = int(rng.integers(0, 40)), int(rng.choice([0, 1, 1, 1, 2, 5, 30]))
        if setting.form == "flat" or (rng.random() < 0.2 and setting.form == "shared"):
            mates.append(part_of(stock, rng, qo, int(rng.integers(0, 150))))
        else:
            mates.append(part_of(stock, rng, qo, qo + extra, root, prefix))
    shared = {id(root), *(id(m) for m in mates)} if setting.form == "cascade" else set()
    everyone = [*own, *mates]
    order = rng.permutation(len(everyone))
    if setting.form == "cascade":  # a level's rows stand together
        order = np.array(sorted(order.tolist(), key=lambda i: id(everyone[i]) not in shared))
    requests = [everyone[i] for i in order]
    needed = sum(-(-len(r.k) // setting.page_size) + 1 for r in requests) + 2 + prefix // setting.page_size
    pool = Pool(spec, setting.page_size, needed * setting.pool, rng)
    index = build(spec, requests, shared, root, prefix, setting, pool)
    q = np.concatenate([r.q for r in requests])
    limits = at.Limits(
        len(requests), len(q) + 3, 500_000, max_parts=16, max_partial_slots=setting.slots, max_workers=setting.workers
    )  # fmt: skip
    attn = at.Attention(spec, backend=backend, scheduler=setting.scheduler, limits=limits, device=device)
    batch = testing.Batch(index=index, q=q, kv=tuple(pool.caches), params={})
    result = testing.run_batch(testing.Case(spec=spec, q=(q,), k=(), v=()), batch, backend, attn=attn)
    starts = np.cumsum([0, *(len(r.q) for r in requests)])
    place = {id(r): i for i, r in enumerate(requests)}
    found = []
    for r in own:
        rows = slice(starts[place[id(r)]], starts[place[id(r)] + 1])
        found.append(hashlib.sha256(result.out[rows].tobytes() + result.lse[rows].tobytes()).hexdigest())
    return found


def build(spec, requests, shared, root, prefix, setting, pool):
    """The index of a setting."""
    size = setting.page_size
    qo = np.cumsum([0, *(len(r.q) for r in requests)])
    if setting.form == "cascade":
        count = sum(id(r) in shared for r in requests)
        top = pool.store(root.k[:prefix], root.v[:prefix])
        begin = [prefix if id(r) in shared else 0 for r in requests]
        pages = [pool.store(r.k[b:], r.v[b:]) for r, b in zip(requests, begin, strict=True)]
        own = paged(qo, pages, [len(r.k) - b for r, b in zip(requests, begin, strict=True)], size)
        rows = [0, qo[count], qo[-1]] if qo[-1] > qo[count] else [0, qo[count]]
        lists = [top, []][: len(rows) - 1]
        return formats.cascade(paged(rows, lists, [prefix, 0][: len(rows) - 1], size), own)
    common = pool.store(root.k[: prefix // size * size], root.v[: prefix // size * size])
    pages = []
    for r in requests:
        lent = (
            len(common)
            if len(r.k) >= len(common) * size and (r is root or same_start(r, root, len(common) * size))
            else 0
        )
        pages.append([*common[:lent], *pool.store(r.k[lent * size :], r.v[lent * size :])])
    flat = paged(qo, pages, [len(r.k) for r in requests], size)
    return formats.share(flat, min_tokens=size) if setting.form == "shared" else flat


def same_start(a, b, count):
    return a.k[:count].tobytes() == b.k[:count].tobytes()


def paged(qo, pages, lens, size):
    ids = np.concatenate([np.zeros(0, int), *(np.array(p, int) for p in pages)])
    return formats.paged(qo, np.cumsum([0, *map(len, pages)]), ids, lens, size)


def check(backend, seed, settings, lengths, kind="host", device=None):
    rng = np.random.default_rng(seed)
    spec = draw_spec(rng, kind)
    own = [draw_request(spec, rng, qo, kv) for qo, kv in lengths]
    stock = draw_request(spec, rng, 100, 400)
    seen: list[dict[str, Setting]] = [{} for _ in own]
    longest = max(kv for _, kv in lengths)
    for _ in range(settings):
        setting = draw_setting(rng, longest)
        for found, digest in zip(seen, digests(backend, spec, own, stock, setting, device), strict=True):
            found.setdefault(digest, setting)
    for found, (qo, kv) in zip(seen, lengths, strict=True):
        assert len(found) == 1, (
            f"qo {qo}, kv {kv} of {spec}: {len(found)} results in {settings} settings: {found}"
        )


@pytest.mark.parametrize("seed", range(2))
def test_one_sha256(seed):
    """200 settings on the CPU backend."""
    check("cpu", seed, 200, [(1, 2600), (5, 700), (70, 150)])


@pytest.mark.parametrize("seed", [10, 11])
def test_one_sha256_on_the_reference(seed):
    check("reference", seed, 12, [(1, 1400), (3, 300)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 40))
def test_one_sha256_for_longer(seed):
    rng = np.random.default_rng(seed)
    check("cpu", seed, 60, [(1, int(rng.integers(1, 9000))), (int(rng.integers(2, 9)), 1500), (200, 200)])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_one_sha256_on_a_gpu(gpu_backend, seed):
    check(gpu_backend, seed, 100, [(1, 9000), (5, 1500), (200, 300)], "gpu", "cuda")
