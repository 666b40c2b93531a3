# SPDX-License-Identifier: Apache-2.0
"""Random batches of every kind against dense float64, and each twice in different clothes: the bits agree."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np

import attnrt as at
from attnrt import formats, testing

v = at.variants

VARIANTS = (
    (v.causal(),),
    (),
    (v.causal(), v.sliding_window(9)),
    (v.sliding_window(4, 2), v.softcap(2.0)),
    (v.rope(8), v.causal(), v.sink_logits(0.5)),
    (v.causal(), v.alibi()),
    (v.causal(), v.sigmoid()),
)
DTYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float8_e4m3fn"))
lengths = st.one_of(st.integers(0, 3), st.integers(0, 70), st.integers(200, 700))


@st.composite
def specs(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7, 16]))
    q_dtype, kv_dtype = draw(st.sampled_from(DTYPES))
    return at.AttentionSpec(
        num_qo_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 6)),
        head_dim_vo=8 * draw(st.integers(1, 6)),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        variant=draw(st.sampled_from(VARIANTS)),
        kv_layout=draw(st.sampled_from(["NHD", "HND"])),
        sm_scale=draw(st.sampled_from([None, 0.5])),
    )


@st.composite
def cases(draw):
    spec = draw(specs())
    count = draw(st.integers(0, 5))
    qo = [draw(st.one_of(st.integers(0, 2), st.integers(0, 40))) for _ in range(count)]
    kv = [draw(lengths) for _ in range(count)]
    return testing.make_case(spec, qo, kv, seed=draw(st.integers(0, 2**32 - 1)))


layouts = st.builds(
    testing.Layout,
    builder=st.sampled_from(["paged", "block_table", "ragged"]),
    page_size=st.integers(1, 50),
    seed=st.integers(0, 9),
    spare=st.integers(0, 9),
    fill=st.sampled_from([float("nan"), 0.0, 1e30]),
    form=st.sampled_from(["plain", "interleaved", "strided", "transposed", "pool"]),
)
#: What must not change a bit.
ways = st.fixed_dictionaries(
    {
        "scheduler": st.sampled_from(["lpt", "round_robin", "one_cta_per_request"]),
        "workers": st.sampled_from([1, 2, 5, 132]),
        "slots": st.sampled_from([None, 0, 3, 5000]),
        "pad": st.integers(0, 5),
    }
)


def dressed(case, layout, way, backend):
    """Plan, run and check a case; the results of its own rows."""
    if layout.builder == "ragged" and layout.form in ("interleaved", "pool"):
        layout = testing.Layout(builder="ragged", fill=layout.fill, spare=layout.spare)
    batch = testing.lay_out(case, layout)
    rows = int(case.qo_lens.sum())
    limits = at.Limits(
        len(case.q),
        rows + way["pad"],
        5000,
        max_partial_slots=way["slots"],
        max_workers=way["workers"],
    )
    attn = at.Attention(case.spec, backend=backend, scheduler=way["scheduler"], limits=limits)
    result = testing.run_batch(case, batch, backend, attn=attn, pad_to=rows + way["pad"])
    plan = attn._runtime.tenant.loaded.plan
    answer = testing.oracle_answer(case.spec, batch.index, batch.q, batch.kv, num_rows=plan.num_rows)
    testing.compare(case.spec, answer, result.out, result.lse)
    return testing.Result(out=result.out[:rows], lse=None if result.lse is None else result.lse[:rows])


@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(case=cases(), one=layouts, two=layouts, way=ways, other=ways)
def test_right_and_the_same(backend, case, one, two, way, other):
    first = dressed(case, one, way, backend)
    second = dressed(case, two, other, backend)
    testing.same(first, second, f"{one}, {way} against {two}, {other}:")


@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(case=cases(), layout=layouts, data=st.data())
def test_one_request_among_others(backend, case, layout, data):
    """A request drawn from a batch, alone, has its bits."""
    hypothesis.assume(len(case.q))
    request = data.draw(st.integers(0, len(case.q) - 1))
    plain = {"scheduler": "lpt", "workers": 3, "slots": None, "pad": 0}
    together = testing.rows_of(dressed(case, layout, plain, backend), case, request)
    alone = dressed(testing.take(case, [request]), layout, plain | {"workers": 1}, backend)
    testing.same(together, alone, f"request {request} alone")


@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    spec=specs(),
    prefix=st.integers(0, 600),
    own=st.lists(st.integers(0, 90), min_size=1, max_size=5),
    size=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 999),
)
def test_cascade_is_flat(backend, spec, prefix, own, size, seed):
    """A prefix of any length as a level of its own against the same pages listed for each request."""
    rng = np.random.default_rng(seed)
    prefix -= prefix % size
    qo = [int(rng.integers(1, min(4, n) + 1)) if n else 0 for n in own]
    rows, pages = np.r_[0, np.cumsum(qo)], [-(-n // size) for n in own]
    ids = rng.permutation(prefix // size + sum(pages)).astype(np.int32)
    shared, rest = ids[: prefix // size], ids[prefix // size :]
    indptr = np.r_[0, np.cumsum(pages)]
    lens = [prefix + n for n in own]
    listed = [np.r_[shared, rest[indptr[r] : indptr[r + 1]]] for r in range(len(own))]
    flat = formats.paged(
        rows, np.r_[0, np.cumsum([len(x) for x in listed])], np.concatenate(listed), lens, size
    )
    levels = [formats.paged(rows, indptr, rest, own, size)]
    if prefix:
        levels.insert(0, formats.paged([0, rows[-1]], [0, len(shared)], shared, [prefix], size))
    spec_case = testing.make_case(spec, [int(rows[-1])], [max(len(ids) * size, 1)], seed=seed)
    q, k, values = spec_case.q[0], spec_case.k[0], spec_case.v[0]
    results = []
    for index in (
        flat,
        formats.cascade(*levels) if len(levels) > 1 else levels[0],
        formats.share(flat, min_tokens=size),
    ):
        batch = testing.Batch(index=index, q=q, kv=(k, values), params={})
        results.append(testing.run_batch(spec_case, batch, backend))
    answer = testing.oracle_answer(spec, flat, q, (k, values))
    testing.compare(spec, answer, results[0].out, results[0].lse)
    for other, name in zip(results[1:], ("cascade", "share"), strict=True):
        testing.same(results[0], other, name)
