# SPDX-License-Identifier: Apache-2.0
"""Other arrays than NumPy's: the same logits, the same answers, the same pages.

PyTorch runs here on its CPU tensors, and the way without a framework on host memory of attnrt's own; on a GPU both, CuPy
and both CUDA backends serve the same prompts.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import attnrt as at
from attnrt.examples.generate.arrays import HostArrays, StagedArrays, make_arrays
from attnrt.examples.generate.attention import StepAttention
from attnrt.examples.generate.compare import compare
from attnrt.examples.generate.dense import DenseCache, greedy
from attnrt.examples.generate.engine import Engine, EngineOptions
from attnrt.examples.generate.model import Model
from attnrt.examples.generate.sequence import Request

RECORDED = json.loads((Path(__file__).parent / "smollm_greedy.json").read_text())
NEW = 12
TIE_GAP = 0.03  # as the command's, for float16


@pytest.fixture(params=["torch", "staged"])
def arrays(request):
    """Stand-ins on the CPU for what runs on a GPU."""
    if request.param == "staged":
        return StagedArrays("cpu")
    pytest.importorskip("torch")
    return make_arrays("torch", "cpu")


def make_engine(model, backend="auto", kv_dtype=np.float32, share=None, **options):
    # Two at a time: a prompt that comes later finds pages filled, and copies one of which it needs a part.
    opts = EngineOptions(kv_dtype=kv_dtype, keep_logits=True, **{"max_batch": 2, **options})
    attention = StepAttention(
        model.config,
        backend=backend,
        kv_dtype=np.dtype(kv_dtype).name,
        arrays=model.arrays,
        tree=bool(opts.draft),
        streaming=opts.streaming,
        share_tokens=share,
    )
    return Engine(model, attention, opts)


def serve(engine, prompts, new=NEW, samples=1):
    for i, prompt in enumerate(prompts):
        engine.submit(Request(id=i, prompt=tuple(prompt), max_tokens=new, samples=samples))
    while engine.busy:
        engine.step()
    return sorted(engine.finished, key=lambda s: (s.request.id, s.sample))


def make_prompts(seed=0):
    """Prompts with common beginnings, so that pages are shared and copied."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 61, 50).tolist()
    return [base[:n] + rng.integers(0, 61, m).tolist() for n, m in ((50, 3), (47, 9), (20, 30), (0, 5))] + [
        base
    ]


def test_logits_equal(tiny, arrays):
    tokens = np.random.default_rng(0).integers(0, 61, 40)
    want = DenseCache(tiny, 40).extend(tokens, logits_from=0)
    model = Model(tiny.weights, arrays)
    k = []

    def attend(layer, q, *kv):
        """Dense attention on the host, given and returned in the model's arrays."""
        from attnrt.examples.generate.dense import attention

        q, key, value = (arrays.get(x) for x in (q, *kv))
        k.append(key)
        return arrays.put(attention(q, key, value, first_position=0))

    got = model.forward(tokens, np.arange(40), attend, np.arange(40))
    assert type(got) is np.ndarray and got.dtype == np.float32 and len(k) == 2
    np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize("draft, samples", [(0, 1), (4, 2)])
def test_answers_are_those_of_each_prompt_alone(tiny, arrays, draft, samples):
    engine = make_engine(Model(tiny.weights, arrays), page_size=7, chunk=20, draft=draft)
    found = serve(engine, make_prompts(), samples=samples)
    want = [greedy(tiny, prompt, NEW) for prompt in make_prompts() for _ in range(samples)]
    assert [s.generated for s in found] == want
    assert engine.pool.copies > 0 and sum(s.hits for s in found) > 0
    assert not draft or sum(s.guessed for s in engine.steps) > 0
    result = compare(engine.model, found)
    assert not result.mismatches and result.max_logit_difference < 1e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounded_caches(tiny, arrays, dtype):
    kind = HostArrays().cache((1, 1, 1, 1, 1), dtype).layers[0].dtype
    engine = make_engine(Model(tiny.weights, arrays), kv_dtype=kind, page_size=4)
    result = compare(engine.model, serve(engine, make_prompts()), dtype=kind, tie_gap=0.3)
    assert not result.mismatches and result.tokens == 5 * NEW


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_moving_reads_all_before_it_writes(arrays, dtype):
    shape, rng = (3, 5, 4, 2, 8), np.random.default_rng(1)
    cache, plain = (a.cache(shape, dtype) for a in (arrays, HostArrays()))
    slots = np.arange(20)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        other[...] = rng.standard_normal(shape[1:])
        host(layer)[...] = other.view(np.uint16 if other.itemsize == 2 else np.uint32)
    for source, target in (([5, 7, 9], [4, 5, 6]), ([0, 1, 2], [17, 18, 19]), ([3, 4, 5, 6], [4, 5, 6, 7])):
        expected = [x.reshape(20, -1).copy() for x in plain.layers]
        for x in expected:
            x[target] = x[source]
        cache.move(slots[source], slots[target])
        plain.move(slots[source], slots[target])
        for layer, other, want in zip(cache.layers, plain.layers, expected, strict=True):
            np.testing.assert_array_equal(other.reshape(20, -1), want)
            np.testing.assert_array_equal(host(layer), other.view(host(layer).dtype))


def host(x):
    """The bits of a CPU array of any library, writable."""
    array = at.TensorView(x).numpy()
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


def test_tied_weights_stay_one(tiny, arrays):
    from dataclasses import replace

    tied = Model(replace(tiny.weights, head=tiny.weights.embedding), arrays)
    assert tied.weights.head is tied.weights.embedding
    assert tied.on_host().weights.embedding is tiny.weights.embedding


def test_a_library_is_imported_only_if_it_is_chosen():
    code = (
        "import sys\nfrom attnrt.examples.generate import arrays, command, engine\n"
        "assert type(arrays.make_arrays('auto', 'cpu')) is arrays.HostArrays\n"
        "assert not {'torch', 'cupy', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_auto_on_a_gpu_takes_the_first_that_sees_it(monkeypatch):
    from attnrt.examples.generate import arrays as module

    chosen = []
    monkeypatch.setattr(module, "StagedArrays", lambda device: chosen.append(("neither", device)))
    monkeypatch.setattr(module, "TorchArrays", lambda device: chosen.append(("torch", device)))
    monkeypatch.setattr(module, "CupyArrays", lambda: chosen.append(("cupy", "cuda")))
    for seen in ("torch", "cupy", "neither"):
        monkeypatch.setattr(module, "_sees_gpu", lambda name, seen=seen: name == seen)
        module.make_arrays("auto", "cuda")
    assert chosen == [("torch", "cuda"), ("cupy", "cuda"), ("neither", "cuda")]


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="--arrays torch"):
        make_arrays("torch", "cpu")


# ------------------------------------------------------------------------------------------------------- on a GPU


def gpu_arrays(name):
    if name != "numpy" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return make_arrays(name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy", "numpy"])
@pytest.mark.parametrize(
    "backend, dtype, options",
    [
        ("nvrtc", "float16", {}),
        ("nvrtc", "float16", {"draft": 4}),
        ("nvrtc", "float16", {"streaming": (4, 24)}),
        ("nvrtc", "bfloat16", {"share": 8}),
        ("nvcc", "float16", {}),
    ],
    ids=["plain", "draft", "streaming", "bf16-share", "nvcc"],
)
def test_a_gpu_gives_the_answers_of_the_cpu(tiny_64, name, backend, dtype, options):
    from attnrt.examples.generate.command import TIE_GAPS
    from attnrt.examples.generate.dense import causal, sinks_and_recent

    kind = HostArrays().cache((1, 1, 1, 1, 1), dtype).layers[0].dtype
    model = Model(tiny_64.weights, gpu_arrays(name))
    engine = make_engine(model, backend=backend, kv_dtype=kind, page_size=7, chunk=20, **options)
    found = serve(engine, make_prompts(3), new=8)
    assert engine.attention.backend == backend and engine.attention.arrays.device.startswith("cuda")
    visible = sinks_and_recent(*options["streaming"]) if "streaming" in options else causal
    result = compare(model, found, dtype=kind, q_dtype=kind, visible=visible, tie_gap=TIE_GAPS[dtype])
    assert not result.mismatches and result.tokens == 5 * 8
    assert result.max_logit_difference < TIE_GAPS[dtype]
    assert engine.pool.copies > 0 or "streaming" in options


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy", "numpy"])
def test_a_gpu_gives_the_recorded_ids(smollm, smollm_file, name):
    assert_recorded(smollm, smollm_file, gpu_arrays(name), "nvrtc")


@pytest.mark.slow
def test_float16_gives_the_recorded_ids(smollm, smollm_file):
    assert_recorded(smollm, smollm_file, HostArrays(), "auto")


def assert_recorded(smollm, smollm_file, arrays, backend):
    """A float16 cache gives the ids of float32 up to a near-tie, which it may decide otherwise."""
    stop = frozenset([smollm_file.field("tokenizer.ggml.eos_token_id")])
    model, cases = Model(smollm.weights, arrays), RECORDED["cases"]
    engine = make_engine(model, backend=backend, kv_dtype=np.float16, max_batch=8, stop=stop)
    found = serve(engine, [c["prompt_ids"] for c in cases], new=RECORDED["made"]["max_tokens"])
    for seq, case in zip(found, cases, strict=True):
        pairs = list(zip(seq.generated, case["generated_ids"], strict=False))
        first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if first is None:
            assert seq.generated == case["generated_ids"]
            continue
        before = len(case["prompt_ids"]) + first
        logits = DenseCache(smollm, before).extend(seq.tokens[:before])[-1]
        assert logits[pairs[first][1]] - logits[pairs[first][0]] < TIE_GAP
