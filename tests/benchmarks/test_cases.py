# SPDX-License-Identifier: Apache-2.0
"""Shapes, data and the float64 reference of the tables, and the whole way through on the CPU backend with a clock that lies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import cases
import decode
import harness
import mixed
import numpy as np
import ours
import prefill
import prefix
import pytest
import report
import shapes
import sparse
import specs
import targets
import torch
from cases import Case
from shapes import Shape

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 64}
VARIANTS = ("causal", "full", "softcap", "window", "alibi", "rope", "sigmoid", "traced", "custom")


class Lying:
    """A clock without a GPU: every time is ``us``, every kernel has ``name``."""

    rounds = 2

    def __init__(self, us: float = 1e6, name: str = "attnrt_decode") -> None:
        self.us, self.name = us, name

    def turn(self, run: Callable[[], Any]) -> tuple[float, float]:
        run()
        return self.us, 1.5

    def kernels(self, run: Callable[[], Any]) -> list[str]:
        run()
        return [self.name]

    def captured(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        return run, run()

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "BACKEND", "cpu")
    monkeypatch.setattr(specs, "DEVICE", "cpu")
    for module in (cases, shapes, specs):
        monkeypatch.setattr(module, "WINDOW", 24)


def listed() -> dict[str, list[Shape]]:
    return {
        "decode": [*decode.shapes(), *decode.random_shapes(60)],
        "prefix": prefix.shapes(),
        "sparse": sparse.shapes(),
        "mixed": mixed.shapes(),
        "prefill": [
            *(*prefill.dense(), *prefill.paged(), *prefill.narrow(), *prefill.variants()),
            *prefill.random_shapes(40),
        ],
    }


def test_cases_have_names_of_their_own_and_a_group() -> None:
    for table, made in listed().items():
        names = [shape.name for shape in made]
        assert len(set(names)) == len(names), table
        for shape in made:
            assert shape.group and shape.heads % shape.kv_heads == 0, shape
            assert all(0 < q <= k for q, k in zip(shape.qo_lens, shape.kv, strict=True)), shape


def test_random_shapes_are_seeded() -> None:
    assert decode.random_shapes(60) == decode.random_shapes(60) and len(prefill.random_shapes(40)) == 40


def test_targets_speak_of_cases_that_exist() -> None:
    """With every case measured, no target may say "not measured"."""
    peers = ("fa3", "flashinfer-fa3", "flashinfer-tc")
    held_to = {
        "decode": decode.targets,
        "prefix": prefix.targets,
        "sparse": lambda _: sparse.targets(),
        "mixed": mixed.targets,
        "prefill": prefill.targets,
    }
    for table, made in listed().items():
        rows = [
            report.Row(case=s.name, provider=p, version="", us=10.0, nbytes=1, flops=1, error=1e-3)
            for s in made
            for p in (
                *("attnrt", "attnrt (run)", "attnrt (flat)", prefill.GATHERED, prefill.ONE_LEVEL),
                *peers,
            )
        ]
        found, wanted = report.Found(rows), held_to[table](targets.groups_of(made))
        silent = [t.name for t in wanted if t.verdict(found)[1] == "not measured"]
        assert wanted and not silent, (table, silent)


def dense_answer(case: Case) -> np.ndarray:
    """float64 [rows, heads, dim]: whole matrices, written apart from the reference that gathers keys."""
    shape, out = case.shape, []
    for r, (qo, kv) in enumerate(zip(case.qo_lens.tolist(), case.lens.tolist(), strict=True)):
        slots = case.tokens(r)
        q = case.q[case.qo_indptr[r] : case.qo_indptr[r + 1]].double().numpy()
        k, v = (x.reshape(-1, *x.shape[-2:])[slots].double().numpy() for x in (case.k, case.v))
        group = shape.heads // shape.kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        at, to = np.arange(kv - qo, kv)[:, None], np.arange(kv)[None]
        if shape.variant == "rope":
            turn = np.exp(-np.log(1e4) * np.arange(shape.head_dim // 2) / (shape.head_dim // 2))

            def turned(x: np.ndarray, where: np.ndarray, turn: np.ndarray = turn) -> np.ndarray:
                z = (x[..., : x.shape[-1] // 2] + 1j * x[..., x.shape[-1] // 2 :]) * np.exp(
                    1j * where[:, None, None] * turn
                )
                return np.concatenate([z.real, z.imag], -1)

            q, k = turned(q, at[:, 0]), turned(k, to[0])
        s = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(shape.head_dim)
        seen = (to <= at) if shape.variant != "full" else np.ones((qo, kv), bool)
        if shape.variant == "window":
            seen &= to > at - cases.WINDOW
        elif shape.variant == "custom":
            seen = case.masks[r]
        elif shape.variant == "softcap":
            s = 30 * np.tanh(s / 30)
        elif shape.variant == "alibi":
            s = s - 2.0 ** (-8 / shape.heads * np.arange(1, shape.heads + 1))[:, None, None] * (at - to)
        elif shape.variant == "traced":
            s = s * (1 + 0.01 * s)
        if shape.variant == "sigmoid":
            w = np.where(seen, 1 / (1 + np.exp(-s) * max(shape.kv)), 0)
        else:
            w = np.where(seen, np.exp(s - s.max(-1, keepdims=True)), 0)
            w /= w.sum(-1, keepdims=True)
        out.append(np.einsum("hij,jhd->ihd", w, v))
    return np.concatenate(out)


@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_agrees_with_whole_matrices(variant: str, page: int) -> None:
    case = Case(Shape(name="x", kv=(40, 7, 33), qo=(5, 7, 1), page=page, variant=variant, **SMALL), "cpu")
    rows, heads, answers = case.samples
    want = dense_answer(case)[rows, heads]
    assert np.allclose(answers.numpy(), want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("variant", [*VARIANTS, "twin", "tree", "blocks", "heads", "prefix", "fp8", "dims"])
def test_ours_agrees_with_the_reference(variant: str) -> None:
    """The index, spec and limits that the tables give attnrt, through the harness: a row comes out."""
    shape = Shape(name="x", kv=(80, 33), qo=(6, 33), page=16, variant=variant, **SMALL)
    shape = {
        "blocks": dataclasses.replace(shape, kv=(64,), qo=(64,), page=0, block=16, kept=0.4),
        "heads": dataclasses.replace(shape, variant="full", kv=(128,), qo=(), heads=2, per_head=3),
        "prefix": dataclasses.replace(shape, variant="causal", kv=(700,) * 3, qo=(), prefix=600),
        "fp8": dataclasses.replace(shape, variant="causal", kv_dtype="float8_e4m3fn"),
        "dims": dataclasses.replace(shape, variant="causal", head_dim=48, head_dim_vo=32, page=0),
    }.get(variant, shape)
    run = harness.Run(Lying(), device="cpu")
    modes = {"heads": [ours.OursHND(), ours.OursPagesNHD()], "prefix": [ours.Ours(), ours.OursFlat()]}
    run.add([shape], modes.get(variant, [ours.Ours(), ours.Ours("run")]))
    assert not run.faults and len(run.rows) == 2
    assert all(0 < row.error < 5e-3 for row in run.rows)


def test_a_shared_prefix_is_shared() -> None:
    case = Case(Shape(name="x", kv=(150,) * 3, prefix=130, **SMALL), "cpu")
    assert case.pool == 8 + 3 * 2 and case.nbytes == (128 + 3 * 22) * 2 * 2 * 64 * 2
    index = ours.Ours().index(case)
    assert len(index.parts) == 2 and index.parts[0].num_rows == 1
    assert not hasattr(ours.OursFlat().index(case), "parts") or len(ours.OursFlat().index(case).parts) == 1


def test_bytes_and_flops() -> None:
    full = Case(Shape(name="x", kv=(4, 6), qo=(2, 1), variant="full", page=0, **SMALL), "cpu")
    assert full.nbytes == 10 * 2 * 2 * 64 * 2 and full.flops == 4 * (2 * 4 + 6) * 4 * 64
    causal = Case(Shape(name="x", kv=(4, 6), qo=(2, 1), page=0, **SMALL), "cpu")
    assert causal.flops == 4 * (3 + 4 + 6) * 4 * 64
    wide = Case(Shape(name="x", kv=(100,), qo=(50,), variant="window", page=0, **SMALL), "cpu")
    assert wide.flops == 4 * 50 * 24 * 4 * 64


class Peer:
    """A provider with a result and a fault of its own."""

    def __init__(
        self, name: str, out: Callable[[Case], torch.Tensor], fault: Exception | None = None
    ) -> None:
        self.name, self.out, self.fault = name, out, fault

    def version(self) -> str:
        if isinstance(self.fault, ImportError):
            raise self.fault
        return "1"

    def prepare(self, case: Case) -> harness.Ready:
        if self.fault:
            raise self.fault
        found = self.out(case)
        out = torch.empty_like(found)
        return harness.Ready(run=lambda: out.copy_(found))


def right(case: Case) -> torch.Tensor:
    return torch.from_numpy(dense_answer(case)).to(torch.bfloat16)


def test_a_run_goes_on_past_what_peers_do(capsys: pytest.CaptureFixture[str]) -> None:
    shape = Shape(name="x", kv=(30,), qo=(30,), page=0, **SMALL)
    run = harness.Run(Lying(name="other"), device="cpu")
    providers = [
        Peer("gone", right, ImportError("gone is not installed")),
        Peer("absent", right, harness.Absent("no")),
        Peer("not built", right, type("MissingJITCacheError", (RuntimeError,), {})("no module")),
        Peer("broken", right, RuntimeError("boom")),
        Peer("wrong", lambda case: right(case) * 1.1),
        Peer("short", lambda case: right(case)[:1]),
        Peer("nan", lambda case: right(case) * float("nan")),
        Peer("good", right),
    ]
    run.add([shape, dataclasses.replace(shape, name="y")], providers)
    assert [(r.case, r.provider) for r in run.rows] == [("x", "good"), ("y", "good")]
    assert (
        run.absent
        == {"absent: no": ["x", "y"], "not built: its module was not compiled beforehand": ["x", "y"]}
        and len(run.faults) == 8
        and sum("error inf" in fault for fault in run.faults) == 4
    )
    assert capsys.readouterr().out.count("gone: skipped") == 1


class Noting(Lying):
    """Remembers who had a turn; its times grow from one turn to the next."""

    rounds = 3

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[str] = []

    def turn(self, run: Any) -> tuple[float, float]:
        run()
        self.turns.append(run.label)
        return 1e6 + len(self.turns), 1.0 + len(self.turns) / 100

    def captured(self, run: Any) -> tuple[Callable[[], Any], Any]:
        returned = run()
        return labelled(f"{run.label}, graph", run), returned


def labelled(label: str, call: Callable[[], Any]) -> Any:
    """The call, with a label."""

    def run() -> Any:
        return call()

    run.label = label  # type: ignore[attr-defined]
    return run


class Changed(Peer):
    """A peer whose calls are changed, and have its name for a label."""

    def __init__(self, name: str, change: Callable[[Callable[[], Any]], Any] = lambda call: call) -> None:
        super().__init__(name, right)
        self.change = change

    def prepare(self, case: Case) -> harness.Ready:
        ready = super().prepare(case)
        return dataclasses.replace(ready, run=labelled(self.name, self.change(ready.run)))


def test_all_are_timed_in_turns() -> None:
    """Every round times each form of each provider, forwards and backwards by turns; medians over rounds, with their clock."""
    clock = Noting()
    run = harness.Run(clock, device="cpu")
    run.add([Shape(name="x", kv=(30,), qo=(30,), page=0, **SMALL)], [Changed("a"), Changed("b")])
    forwards = ["a", "a, graph", "b", "b, graph"]
    assert clock.turns == [*forwards, *forwards[::-1], *forwards]
    a, b = run.rows
    assert (a.eager_us, a.us, b.eager_us, b.us) == tuple(1e6 + n for n in (8, 7, 6, 5))
    assert (a.eager_ghz, a.ghz, b.eager_ghz, b.ghz) == (1.08, 1.07, 1.06, 1.05)


def test_a_replay_after_the_turns_is_checked() -> None:
    """Results that other providers' turns spoil, and graphs that write nothing."""

    class Idle(Lying):
        def captured(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
            return lambda: None, run()  # what was captured has its result, until the check empties it

    shape = Shape(name="x", kv=(30,), qo=(30,), page=0, **SMALL)
    run = harness.Run(Idle(), device="cpu")
    run.add([shape], [Peer("idle", right)])
    assert not run.rows and "error inf after replays" in run.faults[0]


def test_a_turn_that_fails_costs_one_row() -> None:
    calls: list[int] = []

    def change(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            calls.append(1)
            if len(calls) > 5:
                raise RuntimeError("boom")
            return call()

        return run

    run = harness.Run(Noting(), device="cpu")
    run.add([Shape(name="x", kv=(30,), qo=(30,), page=0, **SMALL)], [Changed("bad", change), Changed("good")])
    assert [row.provider for row in run.rows] == ["good"] and run.faults == ["bad on x: RuntimeError boom"]


def test_who_finds_no_memory_beside_others_waits_for_it() -> None:
    """Those that are prepared have their rounds first; who finds none alone is a fault."""
    tries: list[str] = []

    class Large(Peer):
        def prepare(self, case: Case) -> harness.Ready:
            tries.append(self.name)
            if self.name == "too large" or tries.count(self.name) == 1:
                raise torch.OutOfMemoryError("no memory")
            return super().prepare(case)

    run = harness.Run(Lying(), device="cpu")
    shape = Shape(name="x", kv=(30,), qo=(30,), page=0, **SMALL)
    run.add([shape], [Peer("a", right), Large("large", right), Peer("b", right), Large("too large", right)])
    assert [row.provider for row in run.rows] == ["a", "large", "b"] and tries.count("large") == 2
    assert len(run.faults) == 1 and "too large" in run.faults[0]


def test_an_interrupted_run_keeps_its_rows() -> None:
    def interrupt(case: Case) -> torch.Tensor:
        if case.name == "y":
            raise KeyboardInterrupt
        return right(case)

    run = harness.Run(Lying(), device="cpu")
    shape = Shape(name="x", kv=(30,), qo=(30,), page=0, **SMALL)
    run.add([shape, *(dataclasses.replace(shape, name=name) for name in "yz")], [Peer("a", interrupt)])
    assert [row.case for row in run.rows] == ["x"] and run.left_out == ["y", "z"] and not run.faults


def test_impossible_times_are_refused() -> None:
    shape = Shape(name="x", kv=(30,), qo=(30,), page=0, **SMALL)
    run = harness.Run(Lying(us=1e-6), device="cpu")
    run.add([shape], [Peer("good", right)])
    assert not run.rows and "a limit of the machine" in run.faults[0]


@pytest.mark.parametrize("name", ["attnrt_attend", "at::native::copy"])
def test_a_fallback_is_marked(name: str) -> None:
    run = harness.Run(Lying(name=name), device="cpu")
    run.add([Shape(name="x", kv=(30,), **SMALL)], [ours.Ours(), Peer("peer", right)])
    assert [row.fallback for row in run.rows] == [True, False]
    assert math.isnan(report.Found(run.rows).ratio("x"))


def test_time_runs_out() -> None:
    run = harness.Run(Lying(), seconds=-1, device="cpu")
    run.add([Shape(name="x", kv=(30,), **SMALL)], [Peer("good", right)])
    assert run.left_out == ["x"] and not run.rows


def test_kernels_are_compiled_ahead_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """A process for each share of the shapes; what cannot be compiled is said, and the rest is not held up."""
    good = Shape(name="good", kv=(30,), **SMALL)
    specs.warm([good, dataclasses.replace(good, name="bad", kv_dtype="no such type", heads=8)], processes=2)
    said = capsys.readouterr().out
    assert "not compiled: bad" in said and "good" not in said
