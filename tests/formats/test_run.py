# SPDX-License-Identifier: Apache-2.0
"""Every builder through every CPU backend: the dense answer, unseen memory poisoned; forms of one index to the bit."""

import numpy as np
import pytest

import attnrt as at
from attnrt.variants.expr import make
from attnrt.variants.trace import CTX
from attnrt.variants.variant import PairMap, input_node

f = at.formats
HEADS, KV_HEADS, DIM = 4, 2, 16
SIZE = 7  # tokens per page, no power of two


class Batch:
    """Requests that share beginnings, in one pool of pages; leaves of 256 keys are crossed at odd places."""

    def __init__(self, rng, qo_lens):
        self.rng, self.qo_lens, n = rng, list(qo_lens), len(qo_lens)
        self.kv_lens = rng.integers(300, 700, n)
        counts = -(-self.kv_lens // SIZE)
        ids = rng.permutation(int(counts.sum()) + 20)
        self.lists = [ids[a : a + c] for a, c in zip(np.cumsum(counts) - counts, counts, strict=True)]
        for r in range(1, n):
            self.lists[r][:20] = self.lists[0][:20]
        for r in range(2, n):
            self.lists[r][:33] = self.lists[2][:33]
        self.qo_indptr = np.concatenate(([0], np.cumsum(qo_lens)))
        self.indptr = np.concatenate(([0], np.cumsum(counts)))
        self.num_qo = int(self.qo_indptr[-1])
        self.flat = f.paged(self.qo_indptr, self.indptr, np.concatenate(self.lists), self.kv_lens, SIZE)
        shape = (len(ids), SIZE, KV_HEADS, DIM)
        self.k, self.v = (rng.standard_normal(shape).astype(np.float32) for _ in "kv")
        self.q = rng.standard_normal((self.num_qo, HEADS, DIM)).astype(np.float32)

    def chains(self):
        return np.concatenate([np.arange(length) - 1 for length in self.qo_lens])


@pytest.fixture(params=[(1, 1, 1, 1), (3, 1, 8, 2), (0, 40, 1, 5)], ids=["decode", "mixed", "prefill"])
def batch(request, rng):
    return Batch(rng, request.param)


@pytest.fixture
def rng():
    return np.random.default_rng()


def run(backend, index, q, k, v, variant):
    spec = at.AttentionSpec(
        num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_dtype="float32", variant=variant
    )
    attn = at.Attention(spec, backend=backend, device="cpu")
    attn.plan(index)
    return attn.run(q, (k, v), return_lse=True)


def keys_table(index):
    """[row][kv head]: the oracle's keys."""
    heads = max(part.heads for part in index.parts)
    table = [[f.keys_of(index, row, head) for head in range(heads)] for row in range(index.num_qo)]
    return [[keys[head % heads] for head in range(KV_HEADS)] for keys in table]


def slots_of(x):
    return x.reshape(-1, KV_HEADS, DIM)


def poisoned(table, pool):
    """Copies of K and V in which every slot that no query is listed with holds NaN."""
    both = [x.copy() for x in pool]
    dead = np.ones(len(slots_of(both[0])), bool)
    for keys in table:
        for one in keys:
            dead[one.slots] = False
    for x in both:
        slots_of(x)[dead] = np.nan
    return both


def dense(table, q, k, v, causal):
    """float64 from the oracle's keys."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row in range(len(q)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            keys = table[row][kv_head]
            seen = keys.slots[keys.positions <= keys.qo_pos] if causal else keys.slots
            if len(seen):
                kk, vv = (slots_of(x)[seen, kv_head].astype(np.float64) for x in (k, v))
                s = kk @ q[row, head].astype(np.float64) / np.sqrt(DIM)
                lse[row, head] = s.max() + np.log(np.exp(s - s.max()).sum())
                out[row, head] = np.exp(s - lse[row, head]) @ vv
    return out, lse


def close(got, want):
    return all(np.allclose(x, y, rtol=0, atol=2e-5) for x, y in zip(got, want, strict=True))


def kinds(b):
    """One index of every kind over the batch."""
    n, rng = len(b.qo_lens), b.rng
    table = rng.integers(-(2**31), 2**31 - 1, (n, max(map(len, b.lists)) + 2))
    for r, ids in enumerate(b.lists):
        table[r, : len(ids)] = ids
    yield "paged", b.flat
    yield "block_table", f.block_table(b.qo_indptr, table, b.kv_lens, SIZE)
    chosen = [np.sort(rng.permutation(k)[: 200 + r]) for r, k in enumerate(b.kv_lens)]
    slots = [ids[c // SIZE] * SIZE + c % SIZE for ids, c in zip(b.lists, chosen, strict=True)]
    counts = np.cumsum([0, *map(len, chosen)])
    yield (
        "token_sparse",
        f.token_sparse(b.qo_indptr, counts, np.concatenate(slots), np.concatenate(chosen), kv_lens=b.kv_lens),
    )
    pages, where = np.zeros((2, n, KV_HEADS, 30), int)
    for r, ids in enumerate(b.lists):
        for h in range(KV_HEADS):
            picked = np.sort(np.r_[rng.permutation(len(ids) - 1)[:29], len(ids) - 1])
            pages[r, h], where[r, h] = ids[picked], picked * SIZE
    yield (
        "pages_per_head",
        f.pages_per_head(b.qo_indptr, pages, np.full((n, KV_HEADS), 30), b.kv_lens, SIZE, kv_pos=where),
    )
    yield (
        "each position",
        f.paged(
            b.qo_indptr,
            b.indptr,
            np.concatenate(b.lists),
            b.kv_lens,
            SIZE,
            kv_pos=[rng.integers(0, k, k) for k in b.kv_lens],
        ),
    )
    yield "streaming", f.streaming(b.flat, 4, 250)
    yield "streaming in the cache", f.streaming(b.flat, 4, 250, "cache")
    yield "streaming in tiles", f.streaming(b.flat, 4, 250, tile=16)
    yield "share", f.share(b.flat)
    parents = [int(rng.integers(-1, i)) for length in b.qo_lens for i in range(length)]
    yield "tree", f.tree(f.share(b.flat), parents)
    yield (
        "mask",
        f.tree(b.flat, mask=[rng.random((q, k)) < 0.5 for q, k in zip(b.qo_lens, b.kv_lens, strict=True)]),
    )
    half = b.qo_indptr[2]
    yield (
        "concat",
        f.concat(
            f.take(f.streaming(b.flat, 4, 250), [0, 1]), f.tree(f.take(b.flat, range(2, n)), parents[half:])
        ),
    )


def test_every_builder_is_dense(batch, backend):
    for name, index in kinds(batch):
        index.check(full=True)
        table = keys_table(index)
        k, v = poisoned(table, (batch.k, batch.v))
        for causal in (True, False):
            variant = at.variants.causal() if causal else at.variants.full()
            got = run(backend, index, batch.q, k, v, variant)
            assert close(got, dense(table, batch.q, batch.k, batch.v, causal)), (name, causal)


def test_forms_of_one_index_have_the_same_bits(batch, backend):
    b, causal = batch, at.variants.causal()
    want = run(backend, b.flat, b.q, b.k, b.v, causal)
    prefix = f.paged([0, b.num_qo], [0, 20], b.lists[0][:20], [20 * SIZE], SIZE)
    rest = [ids[20:] for ids in b.lists]
    own = f.paged(
        b.qo_indptr, np.cumsum([0, *map(len, rest)]), np.concatenate(rest), b.kv_lens - 20 * SIZE, SIZE
    )
    slots = [
        (ids[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:k]
        for ids, k in zip(b.lists, b.kv_lens, strict=True)
    ]
    starts = np.cumsum([0, *b.kv_lens])
    forms = {
        "share": f.share(b.flat, 1),
        "share of two parts": f.share(b.flat, 1, max_parts=2),
        "cascade": f.shared_prefix(prefix, own),
        "page size 1": f.paged(b.qo_indptr, starts, np.concatenate(slots), b.kv_lens, 1),
        "a chain of drafts": f.tree(b.flat, b.chains()),
        "a chain of drafts, shared": f.tree(f.share(b.flat), b.chains()),
        "a causal mask": f.tree(
            b.flat, mask=[np.tri(q, k, k - q, dtype=bool) for q, k in zip(b.qo_lens, b.kv_lens, strict=True)]
        ),
    }
    for name, index in forms.items():
        got = run(backend, index, b.q, b.k, b.v, causal)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(want, got, strict=True)), name
    ragged = [x.reshape(-1, KV_HEADS, DIM)[np.concatenate(slots)] for x in (b.k, b.v)]
    got = run(backend, f.ragged(b.qo_indptr, starts), b.q, *ragged, causal)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(want, got, strict=True))


def test_a_request_alone_has_the_bits_it_has_in_the_batch(batch, backend):
    b, causal = batch, at.variants.causal()
    for index in (b.flat, f.share(b.flat), f.streaming(b.flat, 4, 250), f.tree(b.flat, b.chains())):
        want = run(backend, index, b.q, b.k, b.v, causal)
        for r in range(len(b.qo_lens)):
            rows = slice(b.qo_indptr[r], b.qo_indptr[r + 1])
            alone = run(backend, f.take(index, [r]), b.q[rows], b.k, b.v, causal)
            assert all(x[rows].tobytes() == y.tobytes() for x, y in zip(want, alone, strict=True))


def test_streamed_tokens_have_one_answer_alone_and_in_a_chunk(backend, rng):
    """Each query reads a list of its own, so a chunk of 5 and five decode steps agree within rounding of their class."""
    b = Batch(rng, [5])
    chunk = run(backend, f.streaming(b.flat, 4, 250), b.q, b.k, b.v, at.variants.full())[0]
    for i in range(5):
        step = f.paged([0, 1], [0, len(b.lists[0])], b.lists[0], [b.kv_lens[0] - 4 + i], SIZE)
        one = run(backend, f.streaming(step, 4, 250), b.q[i : i + 1], b.k, b.v, at.variants.full())[0]
        assert np.allclose(one[0], chunk[i], rtol=0, atol=2e-5)


def test_bsr_is_dense(backend, rng):
    for R, C, M, N in ((1, 1, 6, 9), (16, 5, 40, 33), (3, 64, 7, 500)):
        grid = rng.random((-(-M // R), -(-N // C))) < 0.5
        lists = [rng.permutation(np.flatnonzero(row)) for row in grid]
        index = f.bsr(
            np.cumsum([0, *map(len, lists)]),
            np.concatenate([*lists, np.zeros(0, int)]),
            (R, C),
            N,
            num_rows=M,
        )
        k, v = rng.standard_normal((2, N, KV_HEADS, DIM)).astype(np.float32)
        q = rng.standard_normal((M, HEADS, DIM)).astype(np.float32)
        table = keys_table(index)
        for causal in (True, False):
            variant = at.variants.causal() if causal else at.variants.full()
            assert close(run(backend, index, q, k, v, variant), dense(table, q, k, v, causal))


@pytest.mark.parametrize("size", [1, 3, 24, 48, 256, 512, 544, 1000])
def test_c58_any_page_size_runs_to_the_same_bits(backend, rng, size):
    kv = 700
    flat = rng.standard_normal((2, kv, KV_HEADS, DIM)).astype(np.float32)
    q = rng.standard_normal((2, HEADS, DIM)).astype(np.float32)
    want = run(backend, f.ragged([0, 2], [0, kv]), q, *flat, at.variants.causal())
    pages = -(-kv // size)
    ids = rng.permutation(pages + 1)[:pages]
    pool = np.full((2, pages + 1, size, KV_HEADS, DIM), np.nan, np.float32)
    for j in range(kv):
        pool[:, ids[j // size], j % size] = flat[:, j]
    got = run(backend, f.paged([0, 2], [0, pages], ids, [kv], size), q, *pool, at.variants.causal())
    assert all(x.tobytes() == y.tobytes() for x, y in zip(want, got, strict=True))


def test_c56_a_table_padded_with_a_poisoned_page(backend, rng):
    """NaN in page 0, the table padded with it, 5 keys of pages of 4, window 2."""
    k, v = rng.standard_normal((2, 4, 4, KV_HEADS, DIM)).astype(np.float32)
    k[0], v[0] = np.nan, np.nan
    q = rng.standard_normal((1, HEADS, DIM)).astype(np.float32)
    index = f.block_table([0, 1], [[3, 1, 0, 0]], [5], 4)
    got = run(backend, index, q, k, v, at.variants.sliding_window(2))
    seen = f.token_sparse([0, 1], [0, 3], [14, 15, 4], [2, 3, 4])
    assert close(got, dense(keys_table(seen), q, k, v, True))


def test_c50_nothing_runs(backend):
    k, v = np.full((2, 3, 4, KV_HEADS, DIM), np.nan, np.float32)
    for index in (
        f.paged([0], [0], [], [], 4),
        f.paged([0, 0, 0], [0, 1, 2], [1, 2], [4, 4], 4),
        f.share(f.paged([0, 0, 0], [0, 1, 2], [1, 2], [4, 4], 4)),
        f.streaming(f.paged([0], [0], [], [], 4), 1, 1),
        f.tree(f.paged([0], [0], [], [], 4), []),
        f.ragged([0], [0]),
    ):
        out, lse = run(backend, index, np.zeros((0, HEADS, DIM), np.float32), k, v, at.variants.causal())
        assert out.shape == (0, HEADS, DIM) and lse.shape == (0, HEADS)
    index = f.paged([0, 0, 1, 1, 2], [0, 0, 1, 1, 1], [2], [0, 3, 0, 0], 4)
    k[2, :3], v[2, :3] = 1, 2
    out, lse = run(backend, index, np.ones((2, HEADS, DIM), np.float32), k, v, at.variants.causal())
    assert np.allclose(out[0], 2) and (out[1] == 0).all() and np.isneginf(lse[1]).all()


@pytest.mark.parametrize("tokens", [35, 37, 48])
def test_parts_of_other_page_sizes_see_a_whole_pool_of_slots(backend, rng, tokens):
    """A pool of slots need not end with a page: single tokens behind its last whole page of 16 are keys like others."""
    chosen = np.array([tokens - 1, 3, tokens - 2])
    index = f.concat(f.paged([0, 1], [0, 1], [1], [9], 16), f.token_sparse([0, 1], [0, 3], chosen))
    k, v = (rng.standard_normal((tokens, KV_HEADS, DIM)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((2, HEADS, DIM)).astype(np.float32)
    out, lse = run(backend, index, q, k, v, None)
    for row, slots in enumerate((np.arange(16, 25), chosen)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            weights = np.exp(k[slots, kv_head].astype(np.float64) @ q[row, head] / DIM**0.5)
            want = weights @ v[slots, kv_head] / weights.sum()
            np.testing.assert_allclose(out[row, head], want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(lse[row, head], np.log(weights.sum()), rtol=1e-5, atol=1e-5)


def test_a_mask_that_speaks_of_no_key(backend, rng):
    """``mask_begin`` behind every request's keys leaves no bit to read; all keys are seen."""
    lens = np.array([9, 0, 5])
    flat = f.paged([0, 2, 3, 4], [0, 2, 2, 3], [2, 0, 1], lens, SIZE)
    index = f.tree(flat, mask=[np.zeros((n, 0), bool) for n in (2, 1, 1)], mask_begin=lens)
    k, v = (rng.standard_normal((3 * SIZE, KV_HEADS, DIM)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((4, HEADS, DIM)).astype(np.float32)
    out, _ = run(backend, index, q, k, v, None)
    first, last = np.array([*range(2 * SIZE, 3 * SIZE), 0, 1]), np.arange(SIZE, SIZE + 5)
    for row, listed in enumerate((first, first, last[:0], last)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            weights = np.exp(k[listed, kv_head].astype(np.float64) @ q[row, head] / DIM**0.5)
            want = weights @ v[listed, kv_head] / max(weights.sum(), 1e-9)
            np.testing.assert_allclose(out[row, head], want, rtol=1e-4, atol=1e-5)


def test_keys_that_differ_by_request_are_not_shared(backend, rng):
    """A hook on k that reads its request has no one answer for a list that several requests read."""
    x = input_node("x0")
    gain = make("param", "float32", attr="gain")[CTX.request]
    hook = PairMap(dim=None, pairing="single", y0=x * gain)
    variant = at.variants.Variant(name="own", params=(at.variants.Param(name="gain", rank=1),), key=hook)
    spec = at.AttentionSpec(
        num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, q_dtype="float32", variant=variant
    )
    attn = at.Attention(spec, backend=backend, device="cpu")
    flat = f.paged([0, 1, 2], [0, 42, 84], [*range(40), 40, 41, *range(40), 42, 43], [290, 293], SIZE)
    for index in (f.share(flat), f.concat(f.share(flat), flat)):
        assert len(index.parts) > 1
        with pytest.raises(at.UnsupportedError, match="must not share keys between requests"):
            attn.plan(index)
    own = f.tree(flat, [-1, -1])  # parts of which each request reads its own
    k, v = (rng.standard_normal((44, SIZE, KV_HEADS, DIM)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((2, HEADS, DIM)).astype(np.float32)
    gains = np.array([0.5, 2.0], np.float32)
    for index in (flat, own):
        attn.plan(index)
        out = attn.run(q, (k, v), gain=gains)
        for row in range(2):
            keys, values = index.gather((k, v), row, 1)
            weights = np.exp(keys.astype(np.float64) @ q[row, 2] * gains[row] / DIM**0.5)
            np.testing.assert_allclose(out[row, 2], weights @ values / weights.sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_infinities_that_cancel_are_nan_without_a_warning(backend, rng):
    index = f.ragged([0, 1], [0, 4])
    k, v = (rng.standard_normal((4, KV_HEADS, DIM)).astype(np.float32) for _ in "kv")
    v[1, 0, 3], v[2, 0, 3] = np.inf, -np.inf
    out, _ = run(backend, index, rng.standard_normal((1, HEADS, DIM)).astype(np.float32), k, v, None)
    assert np.isnan(out[0, :2, 3]).all() and np.isnan(out).sum() == 2
