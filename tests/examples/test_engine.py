# SPDX-License-Identifier: Apache-2.0
"""The serving engine on a small random model: every answer is that of the prompt alone under dense attention."""

import numpy as np
import pytest

import attnrt as at
from attnrt.examples.generate.attention import StepAttention
from attnrt.examples.generate.compare import compare
from attnrt.examples.generate.dense import DenseCache, causal, sinks_and_recent
from attnrt.examples.generate.engine import Engine, EngineOptions
from attnrt.examples.generate.sequence import Request

NEW = 24


def make_prompts(seed):
    """Random prompts of 2 to 80 tokens; most begin like others, at any offset; some are equal."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 61, 60).tolist()
    prompts = [
        base[: rng.integers(0, 60)] + rng.integers(0, 61, rng.integers(2, 25)).tolist() for _ in range(9)
    ]
    return [tuple(p) for p in [*prompts, prompts[3], base[:48], base[:48]]]


def make_engine(model, *, backend="auto", share=None, **options):
    opts = EngineOptions(**options)
    attention = StepAttention(
        model.config,
        backend=backend,
        kv_dtype=np.dtype(opts.kv_dtype).name,
        arrays=model.arrays,
        tree=bool(opts.draft),
        streaming=opts.streaming,
        share_tokens=share,
    )
    return Engine(model, attention, opts)


def serve(engine, prompts, **request):
    for i, prompt in enumerate(prompts):
        engine.submit(
            Request(
                id=i,
                prompt=prompt,
                max_tokens=request.get("max_tokens", NEW),
                samples=request.get("samples", 1),
            )
        )
    while engine.busy:
        engine.step()
    return sorted(engine.finished, key=lambda s: (s.request.id, s.sample))


def alone(model, prompt, visible=causal):
    cache, fed, out = DenseCache(model, len(prompt) + NEW), prompt, []
    while len(out) < NEW:
        out.append(int(cache.extend(fed, visible=visible)[-1].argmax()))
        fed = out[-1:]
    return out


def assert_all_pages_back(engine):
    assert engine.pool.in_use == engine.tree.num_pages() == engine.tree.num_evictable()
    while engine.tree.evict_one():
        pass
    assert engine.pool.in_use == 0


@pytest.mark.parametrize(
    "backend, page_size, chunk, draft, num_pages",
    [
        ("reference", 16, 64, 0, 200),
        ("auto", 16, 64, 0, 200),
        ("auto", 1, 7, 0, 1000),
        ("auto", 4, 16, 0, 120),
        ("auto", 16, 5, 6, 60),
        ("auto", 3, 100, 4, 120),
        ("auto", 48, 64, 8, 30),
    ],
)
def test_answers_are_those_of_each_prompt_alone(tiny, backend, page_size, chunk, draft, num_pages):
    prompts = make_prompts(page_size)
    engine = make_engine(
        tiny, backend=backend, page_size=page_size, chunk=chunk, draft=draft, num_pages=num_pages, max_batch=5
    )
    found = serve(engine, prompts)
    assert [s.generated for s in found] == [alone(tiny, p) for p in prompts]
    assert all(s.finish == "length" for s in found)
    assert sum(s.hits for s in found) > 0
    assert engine.attention.num_runs == len(engine.steps) * tiny.config.num_layers
    assert any(s.decode_rows and s.prefill_rows for s in engine.steps)
    assert_all_pages_back(engine)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_streaming_sees_sinks_and_recent_keys_in_bounded_memory(tiny, page_size):
    prompts = make_prompts(5)
    engine = make_engine(tiny, page_size=page_size, chunk=8, num_pages=400, max_batch=3, streaming=(4, 12))
    found = serve(engine, prompts)
    assert [s.generated for s in found] == [alone(tiny, p, sinks_and_recent(4, 12)) for p in prompts]
    assert engine.pool.peak * page_size <= 3 * (4 + 12 + 8 + 4 * page_size)
    assert engine.pool.in_use == 0


@pytest.mark.parametrize(
    "page_size, draft, streaming", [(16, 0, None), (1, 0, None), (7, 4, None), (4, 0, (4, 12))]
)
def test_samples_of_a_prompt_share_its_pages(tiny, page_size, draft, streaming):
    engine = make_engine(
        tiny, page_size=page_size, chunk=16, num_pages=500, max_batch=8, temperature=0.9, seed=3, draft=draft,
        streaming=streaming, keep_logits=True,
    )  # fmt: skip
    found = serve(engine, make_prompts(8)[:5], samples=3)
    assert len(found) == 15 and len({tuple(s.generated) for s in found}) == 15
    visible = sinks_and_recent(*streaming) if streaming else causal
    result = compare(tiny, found, visible=visible)
    assert result.mismatches == () and result.tokens == 15 * NEW
    assert result.max_logit_difference < 1e-3
    fullest = max(engine.steps, key=lambda s: s.unshared)
    assert fullest.held < fullest.unshared
    assert_all_pages_back(engine)


def test_compare_sees_a_wrong_token_and_a_wrong_logit(tiny):
    engine = make_engine(tiny, keep_logits=True)
    (seq,) = serve(engine, [(1, 2, 3)])
    seq.tokens[3 + 10] = (seq.tokens[3 + 10] + 1) % 61
    result = compare(tiny, [seq])
    assert (0, 0, 10) in result.mismatches and result.max_logit_difference > 1e-2


def test_prompts_that_arrive_together_store_their_prefix_once(tiny):
    prompt = tuple(np.random.default_rng(2).integers(0, 61, 40).tolist())
    engine = make_engine(tiny, page_size=8, chunk=100)
    found = serve(engine, [(*prompt, 1), (*prompt, 2), (*prompt, 3)], max_tokens=1)
    assert [s.hits for s in found] == [0, 40, 40]
    # All in one step: the second and third attend to pages that the first writes in it.
    assert len(engine.steps) == 1
    assert engine.steps[0].prefill_rows == 43 and engine.steps[0].held == 8
    assert [s.generated[0] for s in found] == [alone(tiny, s.request.prompt)[0] for s in found]


def test_a_follow_up_finds_the_answer_stored(tiny):
    engine = make_engine(tiny, page_size=4)
    (first,) = serve(engine, [(5, 6, 7, 8, 9)])
    engine.submit(Request(id=1, prompt=(*first.tokens, 3), max_tokens=NEW))
    while engine.busy:
        engine.step()
    second = engine.finished[1]
    assert second.hits >= 24 and second.generated == alone(tiny, second.request.prompt)


@pytest.mark.parametrize("draft", [0, 4])
def test_stop_token_ends_a_sequence(tiny, draft):
    prompt = (4, 9, 2, 2, 7)
    answer = alone(tiny, prompt)
    stop = answer[9]
    engine = make_engine(tiny, stop=frozenset([stop]), draft=draft)
    (seq,) = serve(engine, [prompt])
    assert seq.generated == answer[: answer.index(stop) + 1] and seq.finish == "stop"


def test_a_rounded_cache_equals_dense_attention_over_rounded_keys(tiny):
    engine = make_engine(tiny, kv_dtype=np.float16, keep_logits=True, page_size=8)
    found = serve(engine, make_prompts(4))
    result = compare(tiny, found, dtype=np.float16)
    assert result.mismatches == () and result.max_logit_difference < 0.05
    exact = compare(tiny, found)
    assert exact.max_logit_difference > result.max_logit_difference


@pytest.mark.parametrize("draft", [0, 4])
def test_a_shared_prefix_part_changes_no_bit(tiny, draft, monkeypatch):
    prompts = make_prompts(11)
    seen, share = [], at.formats.share
    monkeypatch.setattr(at.formats, "share", lambda *args, **kw: seen.append(share(*args, **kw)) or seen[-1])
    plain = make_engine(tiny, page_size=4, keep_logits=True, draft=draft)
    shared = make_engine(tiny, page_size=4, keep_logits=True, draft=draft, share=8)
    for a, b in zip(serve(plain, prompts), serve(shared, prompts), strict=True):
        np.testing.assert_array_equal(np.stack(a.logits), np.stack(b.logits))
    assert len(seen) == len(shared.steps) and max(len(index.parts) for index in seen) > 1


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request(id=3, prompt=(), max_tokens=4), "prompt"),
        (Request(id=3, prompt=(1,), max_tokens=0), "max_tokens"),
        (Request(id=3, prompt=(1,) * 500, max_tokens=20), "context of 512"),
        (Request(id=3, prompt=(1,) * 100, max_tokens=20), "8 pages"),
        (Request(id=3, prompt=(1,), max_tokens=4, samples=9), "max_batch"),
    ],
)
def test_a_request_that_can_never_run_is_refused(tiny, request_, words):
    engine = make_engine(tiny, num_pages=6)
    with pytest.raises(ValueError, match="request 3") as error:
        engine.submit(request_)
    assert words in str(error.value) and not engine.busy
