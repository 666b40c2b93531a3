# SPDX-License-Identifier: Apache-2.0
"""Compare results with the oracle, under tolerances that follow from the arithmetic and not from what passed.

With unit roundoffs u (of float32 sums: 2**-24; of the weights' operand format p; of the result's format o), D numbers per head
and n keys, and the probabilistic constant LAMBDA of Higham and Mary ("A new approach to probabilistic rounding error analysis",
2019) for sums of k terms, LAMBDA * sqrt(k) * u:

- a logit is off by at most  ds = (LAMBDA * sqrt(D) * u + 4u + h) * (sum abs(q*k) + abs(logit)),  h = 2p where hooks on q or k
  round their results to the operand format;
- a weight by the relative error 2*ds + e + p, e = 2**-20 for the exponential and the fold;
- the result by  sum(weight * abs(v)) * (2*ds + e + p + LAMBDA * sqrt(n) * u) + o * abs(result),
- lse by ds + e + LAMBDA * sqrt(n) * u.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.testing.oracle import Answer, host_array, oracle_answer

if TYPE_CHECKING:
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec

__all__ = ["TOLERANCES", "Tolerance", "bounds", "check", "compare"]

LAMBDA = 6.0
#: Where tensor cores cut off products of 8-bit numbers, of q and the keys, beside the sum that they are added to (sm_90, as
#: measured: docs/performance/prefill.md): each of them loses up to so much of it.
NARROW_U = 2.0**-13
U = 2.0**-24
EXP = 2.0**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Unit roundoffs of a dtype: ``operand`` of weights that enter a product in it (0: kept in float32), ``result`` of out."""

    operand: float
    result: float


#: By dtype: of q for the operand, of out for the result.
TOLERANCES = {
    "float64": Tolerance(operand=0.0, result=2.0**-53),
    "float32": Tolerance(operand=0.0, result=2.0**-24),
    "float16": Tolerance(operand=2.0**-11, result=2.0**-11),
    "bfloat16": Tolerance(operand=2.0**-8, result=2.0**-8),
    "float8_e4m3fn": Tolerance(operand=2.0**-4, result=2.0**-4),
    "float8_e5m2": Tolerance(operand=2.0**-3, result=2.0**-3),
}

#: Half the distance of the smallest numbers of a result's format.
TINY = {"float16": 2.0**-25, "float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}
TOP = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def bounds(spec: AttentionSpec, answer: Answer) -> tuple[np.ndarray, np.ndarray]:
    """Largest honest errors of out and lse, in the shapes of both."""
    operand = TOLERANCES[spec.q_dtype].operand
    result = TOLERANCES[spec.out_dtype].result
    composed = spec.composed
    hooked = 2 * operand if composed.query is not None or composed.key_map is not None else 0.0
    narrow = NARROW_U if spec.q_dtype in TOP and spec.kv_dtype in TOP else 0.0
    ds = (LAMBDA * np.sqrt(spec.head_dim) * U + 4 * U + hooked) * answer.logit
    ds = ds + narrow * np.sqrt(spec.head_dim) * answer.logit
    sums = LAMBDA * np.sqrt(answer.keys) * U
    weight = 2 * ds + EXP + operand + sums + (operand if composed.value is not None else 0.0)
    tiny = TINY.get(spec.out_dtype, 1e-38)
    out = (
        answer.weight * weight[..., None] * 1.01
        + result * np.abs(answer.out) * (1 + weight[..., None])
        + tiny
    )
    if not composed.use_softmax:  # a weight is the logit's own image: its error does not shrink with it
        out += ds[..., None] * np.maximum(answer.keys[..., None], 1)
    return out, ds + EXP + sums + 2.0**-23 * np.abs(np.where(np.isfinite(answer.lse), answer.lse, 0.0))


def compare(spec: AttentionSpec, answer: Answer, out: Any, lse: Any = None) -> dict[str, float]:
    """Compare with an answer; raises AssertionError naming the worst row and head.

    Returns
    -------
    dict
        "out" and "lse": the largest error as a fraction of its bound; "max_error": the largest absolute error of out.
    """
    got = host_array(out, spec.out_dtype).astype(np.float64)
    assert got.shape == answer.out.shape, f"out has shape {got.shape}, not {answer.out.shape}"
    out_bound, lse_bound = bounds(spec, answer)
    top = TOP.get(spec.out_dtype)
    want = answer.out if top is None else np.clip(answer.out, -top, top)
    error = np.where(got == want, 0.0, np.abs(got - want))
    found = {"out": _worst("out", error / out_bound, got, want), "max_error": float(error.max(initial=0.0))}
    empty = answer.keys == 0
    assert not got[empty].any(), (
        f"out of an empty row is not 0: row, head {np.argwhere(empty & got.any(-1))[0]}"
    )
    if lse is not None:
        seen = host_array(lse, "float32").astype(np.float64)
        assert seen.shape == answer.lse.shape, f"lse has shape {seen.shape}, not {answer.lse.shape}"
        with np.errstate(invalid="ignore"):
            miss = np.where(seen == answer.lse, 0.0, np.abs(seen - answer.lse))
        found["lse"] = _worst("lse", miss / lse_bound, seen, answer.lse)
    return found


def _worst(name: str, ratio: np.ndarray, got: np.ndarray, want: np.ndarray) -> float:
    """The largest ratio, NaN counting as infinite; above 1 it is an error."""
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    if ratio.size == 0:
        return 0.0
    at = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    worst = float(ratio[at])
    place = ", ".join(f"{label} {i}" for label, i in zip(("row", "head", "dim"), at, strict=False))
    assert worst <= 1.0, (
        f"{name} is wrong at {place}: {got[at]!r}, not {want[at]!r} ({worst:.3g} times the bound)"
    )
    return worst


def check(
    plan: Plan, q: Any, kv: Any, out: Any, lse: Any = None, *, sm_scale: float | None = None, **params: Any
) -> dict[str, float]:
    """Compare the result of a run with dense float64 attention over the plan's index.

    Parameters
    ----------
    plan : Plan
        What was loaded.
    q, kv, sm_scale, params : as given to run; host arrays.
    out, lse : what run returned.

    Raises
    ------
    AssertionError
        Names the worst row and head, what was found, what is right, and by how much the bound was passed.
    """
    answer = oracle_answer(plan.spec, plan.index, q, kv, sm_scale=sm_scale, num_rows=plan.num_rows, **params)
    return compare(plan.spec, answer, out, lse)
