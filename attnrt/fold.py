# SPDX-License-Identifier: Apache-2.0
"""The fold: how two partial attention states become one. This NumPy text is the norm that kernels mirror.

A raw state of a row and head is (m, l, acc): the largest base-2 logit seen, the sum of exp2(logit - m), and
the sum of exp2(logit - m) * v, which is not divided. m = -inf marks the empty state; its l and acc are never read. Floating-point
sums depend on order and on rounding, so every operation is written out: two rounded products and one rounded
sum, no fused multiply-add. An empty state is skipped by selection, not by a weight of zero: 0 * NaN is NaN,
and acc * 1 + 0 would turn -0 into 0.
"""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["LN2", "LOG2E", "State", "empty_state", "finish", "fold", "fold_states"]

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Raw partial states.

    Attributes
    ----------
    m : ndarray [...]
        Largest logit in base-2 units (natural logit * log2 e); -inf: no key seen.
    l : ndarray [...]
        Sum of exp2(logit - m).
    acc : ndarray [..., dim]
        Sum of exp2(logit - m) * v.

    All three have one dtype, float32 or float64.
    """

    m: np.ndarray
    l: np.ndarray
    acc: np.ndarray


def empty_state(shape: tuple[int, ...], dim: int, dtype: np.dtype | type = np.float32) -> State:
    """The state of no keys: (-inf, 0, 0)."""
    return State(
        m=np.full(shape, -np.inf, dtype), l=np.zeros(shape, dtype), acc=np.zeros((*shape, dim), dtype)
    )


def fold(a: State, b: State) -> State:
    """Fold ``b`` onto ``a``, elementwise over the leading axes; the order of the two matters to the last bit."""
    keep_a, keep_b = b.m == -np.inf, a.m == -np.inf  # both empty: a
    with np.errstate(invalid="ignore", over="ignore"):  # what the two selections below throw away
        m = np.maximum(a.m, b.m)
        sa, sb = np.exp2(a.m - m), np.exp2(b.m - m)
        l = a.l * sa + b.l * sb
        acc = a.acc * sa[..., None] + b.acc * sb[..., None]
    l = np.where(keep_a, a.l, np.where(keep_b, b.l, l))
    acc = np.where(keep_a[..., None], a.acc, np.where(keep_b[..., None], b.acc, acc))
    return State(m=m, l=l, acc=acc)


def fold_states(states: list[State]) -> State:
    """Fold a list left to right."""
    total = states[0]
    for state in states[1:]:
        total = fold(total, state)
    return total


def finish(state: State) -> tuple[np.ndarray, np.ndarray]:
    """Divide and leave base 2: (out [..., dim], lse [...] natural log); the empty state gives (0, -inf)."""
    empty = state.m == -np.inf
    dtype = state.l.dtype.type
    with np.errstate(invalid="ignore", divide="ignore"):
        out = np.where(empty[..., None], dtype(0), state.acc / state.l[..., None])
        lse = np.where(empty, dtype(-np.inf), (state.m + np.log2(state.l)) * dtype(LN2))
    return out, lse
