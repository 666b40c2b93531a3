# SPDX-License-Identifier: Apache-2.0
"""The public surface: frameworks in and out, forms of kv, one-shot calls, choice of backend, warmup."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import attnrt as at
from attnrt import formats, testing

v = at.variants


def spec_of(**changes):
    fields = {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "q_dtype": "float32",
        "variant": v.causal(),
    }
    return at.AttentionSpec(**(fields | changes))


def prepared(backend, **changes):
    spec = spec_of(**changes)
    batch = testing.lay_out(testing.make_case(spec, [2, 3], [20, 7], seed=1), page_size=4)
    attn = at.Attention(spec, backend=backend)
    attn.plan(batch.index)
    return attn, batch


# ------------------------------------------------------------------------------------------------- frameworks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_torch_in_torch_out(backend, dtype):
    torch = pytest.importorskip("torch")
    attn, batch = prepared(backend, q_dtype=dtype)
    want, want_lse = attn.run(batch.q, batch.kv, return_lse=True)

    def tensor(x):
        return torch.from_numpy(x.view(np.uint16).view(np.int16) if x.itemsize == 2 else x).view(
            getattr(torch, dtype)
        )

    q, kv = tensor(batch.q), tuple(tensor(x) for x in batch.kv)
    out, lse = attn.run(q, kv, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == getattr(torch, dtype) and lse.dtype == torch.float32
    assert (
        out.view(torch.uint8).numpy().tobytes() == want.tobytes()
        and lse.numpy().tobytes() == want_lse.tobytes()
    )
    given = torch.full(out.shape, 9.0, dtype=out.dtype)
    assert attn.run(q, kv, out=given) is given and torch.equal(given, out)
    mixed = attn.run(q, batch.kv, lse=lse.numpy())
    assert torch.equal(mixed, out), "frameworks do not mix"
    with pytest.raises(at.ArgumentError, match="grad"):
        attn.run(q.clone().requires_grad_(), kv)


def test_torch_views_and_numpy_mix(backend):
    torch = pytest.importorskip("torch")
    attn, batch = prepared(backend)
    want = attn.run(batch.q, batch.kv)
    wide = torch.zeros(5, 4, 40)
    wide[..., 8:24] = torch.from_numpy(batch.q)
    assert attn.run(wide[..., 8:24], batch.kv).numpy().tobytes() == want.tobytes()


def test_jax_in_jax_out(backend):
    jax = pytest.importorskip("jax")
    attn, batch = prepared(backend)
    want, want_lse = attn.run(batch.q, batch.kv, return_lse=True)
    q, kv = jax.numpy.asarray(batch.q), tuple(jax.numpy.asarray(x) for x in batch.kv)
    out, lse = attn.run(q, kv, return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), want)
    np.testing.assert_array_equal(np.asarray(lse), want_lse)
    with pytest.raises(at.ArgumentError, match="out must be writable"):
        attn.run(q, kv, out=out)
    with pytest.raises(at.ArgumentError, match="k_cache must be writable"):
        attn.append(batch.kv[0][0], batch.kv[1][0], kv, slots=[0, 1, 2, 3])


def test_tensor_views_and_own_memory(backend):
    attn, batch = prepared(backend)
    want = attn.run(batch.q, batch.kv)
    out = at.empty((5, 4, 16), "float32")
    views = tuple(at.TensorView(x) for x in batch.kv)
    assert attn.run(at.TensorView(batch.q), views, out=out) is out
    assert out.numpy().tobytes() == want.tobytes()


# ------------------------------------------------------------------------------------------------- forms of kv


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_one_array_that_holds_both(backend, axis, kv_layout):
    attn, batch = prepared(backend, kv_layout=kv_layout)
    want = attn.run(batch.q, batch.kv)
    both = np.stack(batch.kv, axis)
    assert attn.run(batch.q, at.kv_interleaved(both, axis)).tobytes() == want.tobytes()
    with pytest.raises(at.ArgumentError, match="kv_interleaved"):
        attn.run(batch.q, both)


@pytest.mark.parametrize("dims", [(24, 16), (72, 64), (576, 512)])
def test_shared_kv(backend, dims):
    """V is the start of K's rows; K of one head, read once."""
    dim, vo = dims
    spec = spec_of(num_kv_heads=1, head_dim=dim, head_dim_vo=vo, shared_kv=True, sm_scale=dim**-0.5)
    case = testing.make_case(spec, [1, 3], [30, 5], seed=2)
    batch = testing.lay_out(case, page_size=8)
    attn = at.Attention(spec, backend=backend)
    plan = attn.plan(batch.index)
    out, lse = attn.run(batch.q, batch.kv, return_lse=True)
    testing.check(plan, batch.q, batch.kv, out, lse)
    apart = spec_of(num_kv_heads=1, head_dim=dim, head_dim_vo=vo, sm_scale=dim**-0.5)
    pair = at.Attention(apart, backend=backend)
    pair.plan(batch.index)
    assert pair.run(batch.q, (batch.kv, batch.kv[..., :vo])).tobytes() == out.tobytes()
    with pytest.raises(at.ArgumentError, match="kv must be one array"):
        attn.run(batch.q, (batch.kv, batch.kv))


def test_shared_kv_needs_its_scale():
    with pytest.raises(at.ArgumentError, match="sm_scale must be given"):
        spec_of(num_kv_heads=1, shared_kv=True)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (15, 5), (64, 4)])
def test_any_group(backend, heads):
    spec = spec_of(num_qo_heads=heads[0], num_kv_heads=heads[1])
    batch = testing.lay_out(testing.make_case(spec, [1, 4], [40, 4], seed=3))
    attn = at.Attention(spec, backend=backend)
    plan = attn.plan(batch.index)
    testing.check(plan, batch.q, batch.kv, *attn.run(batch.q, batch.kv, return_lse=True))


def test_heads_must_divide():
    with pytest.raises(at.ArgumentError, match="num_qo_heads must be a multiple"):
        spec_of(num_qo_heads=10, num_kv_heads=4)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_out_dtype(backend, out_dtype):
    spec = spec_of(q_dtype="bfloat16", out_dtype=out_dtype)
    batch = testing.lay_out(testing.make_case(spec, [2], [9]))
    attn = at.Attention(spec, backend=backend)
    plan = attn.plan(batch.index)
    out = attn.run(batch.q, batch.kv)
    assert out.dtype.name == out_dtype
    testing.check(plan, batch.q, batch.kv, out)


# ------------------------------------------------------------------------------------------------- one-shot


def test_attention_reads_the_arrays(backend):
    spec = spec_of(head_dim_vo=24, q_dtype="float16")
    case = testing.make_case(spec, [2, 1], [9, 30], seed=4)
    for builder in ("paged", "ragged"):
        batch = testing.lay_out(case, builder=builder, page_size=4)
        attn = at.Attention(spec, backend=backend)
        attn.plan(batch.index)
        want = attn.run(batch.q, batch.kv)
        assert at.attention(batch.q, batch.kv, batch.index, backend=backend).tobytes() == want.tobytes()
        assert (
            at.attention(batch.q, batch.kv, batch.index, spec=spec, backend=backend).tobytes()
            == want.tobytes()
        )


def test_attention_of_queries_in_8_bits(backend):
    spec = spec_of(q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    batch = testing.lay_out(testing.make_case(spec, [2, 40], [9, 130], seed=4))
    out = at.attention(batch.q, batch.kv, batch.index, backend=backend)
    assert out.dtype.name == "bfloat16"
    testing.compare(spec, testing.oracle_answer(spec, batch.index, batch.q, batch.kv), out)


def test_attention_takes_what_run_takes(backend):
    spec = spec_of(variant=(at.variants.causal(), at.variants.fp8_scales()))
    batch = testing.lay_out(testing.make_case(spec, [2, 1], [9, 30], seed=4))
    attn = at.Attention(spec, backend=backend)
    attn.plan(batch.index)
    given = {"return_lse": True, "sm_scale": 0.3, "k_scale": 0.5}
    for found, want in zip(
        at.attention(batch.q, batch.kv, batch.index, spec, backend, **given),
        attn.run(batch.q, batch.kv, **given),
        strict=True,
    ):
        assert found.tobytes() == want.tobytes()


def test_indexes_print_in_a_line():
    index = formats.paged([0, 1, 2], [0, 4, 8], [0, 1, 2, 3, 0, 1, 2, 4], [64, 64], 16)
    assert (
        repr(index)
        == "BlockSparse(2 requests, 2 queries, 128 keys, 2 block rows, block_size=(1, 16), heads=1)"
    )
    assert repr(formats.share(index, min_tokens=16)) == "Composite(2 requests, 2 queries, 128 keys, 2 parts)"


def test_attention_refuses():
    q = np.zeros((1, 4, 16), np.float32)
    index = formats.ragged([0, 1], [0, 2])
    with pytest.raises(at.ArgumentError, match="kv must be a pair"):
        at.attention(q, np.zeros((2, 4, 16), np.float32), index, backend="reference")
    with pytest.raises(at.ArgumentError, match="k must have 3 or 4 axes"):
        at.attention(q, (np.zeros((2, 4), np.float32),) * 2, index, backend="reference")


# ------------------------------------------------------------------------------------------------- choice


class Backend:
    """A backend that cannot do what it is asked."""

    name = "never"

    def why_not(self, spec, features, device):
        return ("is only a test", f"knows no {spec.q_dtype}")

    def compile(self, spec, features, device):
        raise AssertionError


def test_a_backend_object_says_why_not():
    with pytest.raises(at.UnsupportedError, match="is only a test; knows no float32") as caught:
        at.Attention(spec_of(), backend=Backend())
    assert caught.value.reasons == {"never": ("is only a test", "knows no float32")}


def test_unknown_backend():
    with pytest.raises(at.ArgumentError, match=r"Known: .*reference"):
        at.Attention(spec_of(), backend="fastest")
    with pytest.raises(at.ArgumentError, match="backend must be"):
        at.Attention(spec_of(), backend=3)


def test_reference_is_never_chosen():
    assert "reference" not in {
        name for names in at.backends.status.__globals__["AUTO"].values() for name in names
    }
    status = at.backends.status(device="cpu")
    if any(not why for name, why in status.items() if name != "reference"):
        assert at.Attention(spec_of(), device="cpu").backend != "reference"
    else:
        with pytest.raises(at.UnsupportedError) as caught:
            at.Attention(spec_of(), device="cpu")
        assert "reference" not in caught.value.reasons


def test_reference_is_not_for_a_gpu():
    with pytest.raises(at.UnsupportedError, match="not on cuda:0"):
        at.Attention(spec_of(), backend="reference", device="cuda:0")


def test_status_names_every_backend():
    status = at.backends.status()
    assert {"reference", "cpu", "nvrtc", "nvcc"} <= set(status)
    assert all(
        isinstance(why, tuple) and all(isinstance(w, str) and w for w in why) for why in status.values()
    )


def test_a_registered_backend_is_found():
    class Mine(Backend):
        name = "mine"

    at.backends.register("mine_of_the_test", Mine)
    assert at.backends.status()["mine_of_the_test"][0] == "is only a test"
    with pytest.raises(at.UnsupportedError, match="is only a test"):
        at.Attention(spec_of(), backend="mine_of_the_test")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"deterministic": "no"}, "deterministic must be one of"),
        ({"limits": 3}, "limits must be an attnrt.Limits"),
        ({"workspace": 3}, "workspace must be an attnrt.Workspace"),
        ({"device": "tpu"}, "device must be"),
    ],
)
def test_attention_checks_its_arguments(backend, arguments, match):
    with pytest.raises(at.ArgumentError, match=match):
        at.Attention(spec_of(), backend=backend, **arguments)
    with pytest.raises(at.ArgumentError, match="spec must be an AttentionSpec"):
        at.Attention({}, backend=backend)


def test_index_must_fit_the_spec(backend):
    attn = at.Attention(spec_of(), backend=backend)
    with pytest.raises(at.ArgumentError, match=r"index must come from attnrt\.formats"):
        attn.plan([0, 1])
    three = formats.pages_per_head([0, 1], np.zeros((1, 3, 1), np.int32), np.ones((1, 3), np.int32), [2], 4)
    with pytest.raises(at.ArgumentError, match="one list per row or one per KV head"):
        attn.plan(three)
    masked = at.Attention(spec_of(variant=v.custom_mask()), backend=backend)
    with pytest.raises(at.ArgumentError, match="index must own mask bits"):
        masked.plan(formats.ragged([0, 1], [0, 2]))


def test_pad_to(backend):
    attn, batch = prepared(backend)
    plan = attn.plan(batch.index, pad_to=8)
    q = np.concatenate([batch.q, np.full((3, 4, 16), np.nan, np.float32)])
    out, lse = attn.run(q, batch.kv, return_lse=True)
    testing.check(plan, q, batch.kv, out, lse)
    assert not out[5:].any() and (lse[5:] == -np.inf).all()
    with pytest.raises(at.ArgumentError, match="pad_to must be at least"):
        attn.plan(batch.index, pad_to=4)


def test_prepare_and_warmup(backend):
    attn = at.Attention(spec_of(), backend=backend)
    attn.prepare(formats.ragged([0, 1], [0, 2]))
    at.warmup([spec_of(), spec_of(head_dim=32)], at.Limits(1, 1, 1), backend=backend)
    for bad, match in ((spec_of(), "specs must be a sequence"), ([spec_of(), "spec"], r"specs\[1\] must be")):
        with pytest.raises(at.DtypeError, match=match):
            at.warmup(bad, backend=backend)
    with pytest.raises(at.PlanError):
        attn.run(np.zeros((1, 4, 16), np.float32), (np.zeros((2, 2, 16), np.float32),) * 2)


def test_profile_times_every_item():
    attn, batch = prepared("reference")
    plan = attn._runtime.tenant.loaded.plan
    times = attn.profile(batch.q, batch.kv)
    assert times.shape == (len(plan.work), 3) and times.dtype == np.int64
    assert (times[:, 1] >= 0).all() and (times[:, 2] > times[:, 1]).all() and times[:, 1].min() == 0
    bounds = plan.work.worker_indptr
    assert all((times[bounds[w] : bounds[w + 1], 0] == w).all() for w in range(len(bounds) - 1))


def test_profile_says_why_not():
    attn, batch = prepared("reference")
    kernel = attn._runtime.kernel
    attn._runtime.kernel = type("Plain", (), {"attend": kernel.attend, "merge": kernel.merge})()
    with pytest.raises(at.UnsupportedError, match="cannot time single items"):
        attn.profile(batch.q, batch.kv)


def test_custom_scheduler_changes_no_bit(backend):
    class Backwards:
        def assign(self, costs, num_workers):
            order = np.arange(len(costs), dtype=np.int32)[::-1].copy()
            cuts = np.linspace(0, len(costs), num_workers + 1).astype(np.int32)
            return order, cuts

    attn, batch = prepared(backend)
    want = attn.run(batch.q, batch.kv)
    other = at.Attention(attn.spec, backend=backend, scheduler=Backwards())
    other.plan(batch.index)
    assert other.run(batch.q, batch.kv).tobytes() == want.tobytes()


def test_a_bad_scheduler_is_refused_at_once(backend):
    class Mine:
        def assign(self, costs, num_workers):
            return np.arange(len(costs)), np.zeros(num_workers + 1, np.int32)

    with pytest.raises(at.ArgumentError, match="scheduler must be an object, not a class; got Mine"):
        at.Attention(spec_of(), backend=backend, scheduler=Mine)
    for bad, match in (
        ("fastest", "scheduler must be a known name"),
        (3, "scheduler must be a name or an object"),
    ):
        with pytest.raises(at.ArgumentError, match=match):
            at.Attention(spec_of(), backend=backend, scheduler=bad)


def test_a_cache_of_the_other_layout(backend):
    """The message says which, where the array would fit it."""
    attn, batch = prepared(backend)
    k = np.moveaxis(np.asarray(batch.kv[0]), 1, 2)
    with pytest.raises(at.ArgumentError, match=r"k must be .*; got .*\. Or kv_layout=\"HND\""):
        attn.run(batch.q, (k, k))
    with pytest.raises(at.ArgumentError) as error:
        attn.run(batch.q, (k[..., :8], k))
    assert "kv_layout" not in str(error.value)


def test_the_variable_that_names_no_backend(monkeypatch):
    from attnrt import dispatch

    monkeypatch.setattr(dispatch, "config", lambda: SimpleNamespace(backend="bogus"))
    with pytest.raises(
        at.ArgumentError, match=r"ATTNRT_BACKEND must be a known name; got 'bogus'\. Known: cpu"
    ):
        at.Attention(spec_of()).plan(prepared("cpu")[1].index)
