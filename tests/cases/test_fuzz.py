# SPDX-License-Identifier: Apache-2.0
"""Garbage in index arrays: a typed error that names the array, or an index whose result is right; never another exception.

Sizes stand at the edges: 0, 1, one below, at and above a page and a tile. Arrays get wrong types, lengths, ranks, strides,
negative and huge numbers.
"""

from __future__ import annotations

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing

v = at.variants
EDGES = (0, 1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65)
HUGE = (-1, -2, 2**31 - 1, -(2**31), 2**31, 2**40, 0, 1, 7, 100)


def spoil(rng, x):
    """The array in some other form, often a wrong one."""
    x = np.array(x)
    forms = (
        lambda: x, lambda: x.astype(np.int64) + rng.integers(-2, 3), lambda: x[:-1], lambda: np.append(x, 3),
        lambda: x.astype(np.float32), lambda: x.astype(bool), lambda: x.astype(np.int8), lambda: x.astype(np.uint64),
        lambda: x[None], lambda: np.repeat(x, 2)[::2], lambda: x[::-1], lambda: None, x.tolist,
        lambda: x.astype(object), lambda: x.astype(">i4"), lambda: one_wrong(rng, x), lambda: one_wrong(rng, x),
    )  # fmt: skip
    return forms[rng.integers(len(forms))]()


def one_wrong(rng, x):
    x = x.astype(np.int64)
    if x.size:
        x.flat[rng.integers(x.size)] = rng.choice(HUGE)
    return x


def arguments(rng, name):
    """Right arguments of a builder."""
    count = int(rng.integers(0, 4))
    qo, kv = rng.integers(0, 4, count), rng.choice(EDGES, count)
    size = int(rng.choice([1, 3, 4, 16]))
    pages = -(-kv // size)
    ids = rng.permutation(int(pages.sum()) + 3)
    rows, lists, keys = (np.r_[0, np.cumsum(x)].astype(np.int32) for x in (qo, pages, kv))
    wide = int(pages.max(initial=0)) + 1
    table = np.full((count, wide), -1)
    for r in range(count):
        table[r, : pages[r]] = ids[lists[r] : lists[r + 1]]
    places = np.concatenate([np.zeros(0, int), *(np.arange(n) for n in kv)])
    paged = {"qo_indptr": rows, "kv_lens": kv, "page_size": size}
    return {
        "paged": paged | {"kv_indptr": lists, "kv_indices": ids[: lists[-1]]},
        "block_table": paged | {"table": table},
        "ragged": {"qo_indptr": rows, "kv_indptr": keys},
        "token_sparse": {"qo_indptr": rows, "kv_indptr": keys, "slots": rng.permutation(keys[-1]), "positions": places},
        "pages_per_head": paged
        | {"pages": rng.integers(0, 8, (count, 2, wide)), "counts": np.repeat(pages[:, None], 2, 1)},
        "bsr": {"indptr": [0, 2, 3], "indices": [0, 4, 1], "block_size": (2, 4), "num_cols": 20},
        "radix": {
            "qo_indptr": rows, "node_parent": [-1, 0, 0], "node_indptr": [0, 4, 6, 9], "node_slots": np.arange(9),
            "request_node": rng.integers(0, 3, count),
        },
    }[name]  # fmt: skip


def wrapped(rng, index):
    """The index, or one made of it, with garbage in that step's arguments too."""
    kind = rng.integers(5)
    if kind == 0:
        return formats.share(index, int(rng.choice([0, 1, 4, -1, 2**40])))
    if kind == 1:
        return formats.tree(index, spoil(rng, [-1] * index.num_qo))
    if kind == 2:
        return formats.streaming(index, *(int(x) for x in rng.choice([-1, 0, 1, 3, 70, 2**31], 2)))
    if kind == 3:
        return formats.take(index, spoil(rng, np.arange(len(index.parts[0].requests))))
    return index


BUILDERS = ("paged", "block_table", "ragged", "token_sparse", "pages_per_head", "bsr", "radix")


@pytest.mark.parametrize("name", BUILDERS)
def test_garbage_is_refused_by_name_or_right(host, kit, name):
    rng = np.random.default_rng([BUILDERS.index(name), len(host)])
    spec = kit.spec(host, v.causal(), head_dim=8)
    attn = kit.attention(host, spec)
    refused = 0
    for _ in range(40):
        given = arguments(rng, name)
        for key, value in given.items():
            if rng.random() < 0.2:
                if isinstance(value, int):
                    given[key] = [0, -1, 1, 3, 2**31, 2**40, 2.5, True, "4"][rng.integers(9)]
                elif not isinstance(value, tuple):
                    given[key] = spoil(rng, value)
        try:
            index = wrapped(rng, getattr(formats, name)(**given))
            index.check(full=True)
        except at.AttnrtError as error:
            assert error.label and error.rule
            refused += 1
            continue
        slots = max((slots_of(part) for part in index.parts), default=0)
        if slots > 100_000 or index.num_qo > 300:
            continue  # legal, and too large to run here
        slots = -(-max(slots, 1) // index.page_size) * index.page_size
        cache = kit.draw(1, slots, 2, 8)
        q = kit.draw(2, index.num_qo, 4, 8)
        kit.right(host, spec, index, q, (cache, cache), attn=attn)
    assert 5 < refused < 40


def slots_of(part):
    return (part.max_block + 1) * part.block_size[1]


@pytest.mark.parametrize("size", [2**31, 2**40])
def test_sizes_past_int32(size):
    """NumPy would raise OverflowError from inside: every size is looked at first."""
    flat = formats.ragged([0, 1], [0, 5])
    calls = (
        lambda: formats.paged([0, 1], [0, 1], [0], [5], size),
        lambda: formats.block_table([0, 1], [[0]], [5], size),
        lambda: formats.pages_per_head(
            [0, 1], np.zeros((1, 2, 1), np.int32), np.ones((1, 2), np.int32), [5], size
        ),
        lambda: formats.bsr([0, 1], [0], (size, 1), 4),
        lambda: formats.bsr([0, 1], [0], (1, size), 4),
        lambda: formats.bsr([0, 1], [0], (1, 1), size),
        lambda: formats.streaming(flat, size, 1),
        lambda: formats.streaming(flat, 1, size),
        lambda: formats.kv_lens_of([0, 1], [1], size),
        lambda: formats.last_page_lens([1], size),
    )
    for call in calls:
        with pytest.raises(at.ArgumentError, match=str(2**31 - 1)):
            call()


def test_nan_everywhere_outside(host, kit):
    """NaN in every number that no query may see, of q's padding too: keys past lengths, holes, other requests' future."""
    spec = kit.spec(host, head_dim=8)
    index = formats.paged([0, 0, 2, 3], [0, 1, 4, 5], [4, 0, -1, 2, 6], [0, 11, 3], 4)
    cache = np.full((8, 4, 2, 8), np.nan, np.float32)
    cache[[0, 2, 6]] = kit.draw(1, 3, 4, 2, 8)
    clean = np.nan_to_num(cache)
    cache[2, 3], cache[6, 3] = np.nan, np.nan
    q = kit.draw(2, 3, 4, 8)
    want = kit.right(host, spec, index, q, (clean, clean))
    testing.same(want, kit.run(host, spec, index, q, (cache, cache)), "NaN outside")


ODD = (None, 0, 3, 10**400, "x", 2.5, True, [1.0], {}, object())


def test_odd_arguments_of_a_run(host, kit):
    """Whatever stands in for an array or a number: a typed error or the right result, and the next run is right."""
    spec = kit.spec(host, v.causal(), v.softcap(5.0), v.sink_logits(0.0), head_dim=8)
    attn = kit.attention(host, spec)
    attn.plan(formats.ragged([0, 2, 5], [0, 20, 27]))
    q, k = kit.draw(1, 5, 4, 8), kit.draw(2, 27, 2, 8)
    want = attn.run(q, (k, k))
    rng = np.random.default_rng(0)
    calls = [((x, (k, k)), {}) for x in ODD]
    calls += [((q, kv), {}) for x in ODD for kv in ((x, k), (k, x), x, (k, k, x), (k,))]
    calls += [
        ((q, (k, k)), {name: x})
        for x in ODD
        for name in ("out", "lse", "sm_scale", "softcap", "sinks", "return_lse")
    ]
    calls += [
        ((q, (k, k)), {name: spoil(rng, np.zeros(4, np.float32))})
        for name in ("softcap", "sinks")
        for _ in range(20)
    ]
    calls += [((spoil(rng, q), (spoil(rng, k), spoil(rng, k))), {}) for _ in range(40)]
    for arguments, named in calls:
        try:
            attn.run(*arguments, **named)
        except at.AttnrtError as error:
            assert error.label and error.rule
        assert attn.run(q, (k, k)).tobytes() == want.tobytes()


def test_a_missing_v_is_not_k(host, kit):
    """(k, None) is refused by run and append alike: below the surface, no V means that V lies in K's rows."""
    spec = kit.spec(host, head_dim=8)
    attn = kit.attention(host, spec)
    attn.plan(formats.ragged([0, 1], [0, 5]))
    k = kit.draw(1, 5, 2, 8)
    for call in (
        lambda: attn.run(kit.draw(2, 1, 4, 8), (k, None)),
        lambda: attn.append(k[:1], k[:1], (k, None), slots=[0]),
    ):
        with pytest.raises(at.DtypeError, match="v must be an array"):
            call()


def test_positions_and_slots_past_int32():
    """Nothing wraps: a key past the last position would be seen by everybody, a slot past 2^31 by nobody."""
    top = 2**31 - 1
    page = formats.paged([0, 1], [0, 1], [0], [16], 16)
    calls = {
        "kv_pos": lambda: formats.bsr([0, 1], [3], (1, 8), 64, kv_pos=[top - 20]),
        "kv_pos ": lambda: formats.cascade(page, page, kv_pos=[top - 10], qo_pos=[top]),
        "kv_pos  ": lambda: formats.cascade(page, page, kv_pos=[top - 20]),
        "index": lambda: formats.tree(formats.ragged([0, 3], [0, 8], kv_pos=[top - 6]), [-1, 0, 1]),
    }
    for label, call in calls.items():
        with pytest.raises(at.ArgumentError, match=f"{label.strip()} must keep positions within int32"):
            call()
    with pytest.raises(at.UnsupportedError, match="slots below 2\\*\\*31"):
        formats.tree(formats.paged([0, 1], [0, 1], [2**28], [16], 16), [-1])
    assert formats.bsr([0, 1], [0], (1, 8), 64, kv_pos=[top - 7]).block_pos.tolist() == [top - 7]
    assert formats.tree(formats.ragged([0, 1], [0, 8], kv_pos=[top - 7]), [-1]).parts[1].block_pos[0] == top
