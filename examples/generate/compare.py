# SPDX-License-Identifier: Apache-2.0
"""`--compare`: every sequence once more, alone, in NumPy on the CPU, with plain dense attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .dense import DenseCache, Visible, causal
from .model import Model
from .sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the dense pass found.

    sequences, tokens: how many were compared; max_logit_difference: largest absolute one over all logits of all tokens;
    mismatches: (request, sample, place in the answer) where dense attention would have chosen another token. ties: places
    where it would have too, but by less than the allowed gap.
    """

    sequences: int
    tokens: int
    max_logit_difference: float
    mismatches: tuple[tuple[int, int, int], ...]
    ties: tuple[tuple[int, int, int], ...] = ()


def compare(
    model: Model,
    sequences: Iterable[Sequence],
    *,
    dtype: np.dtype | type = np.float32,
    q_dtype: np.dtype | type = np.float32,
    visible: Visible = causal,
    tie_gap: float = 0.0,
) -> Comparison:
    """Recompute the logits behind every generated token densely, and choose again with the same sampler.

    A sequence runs in one pass over its prompt and answer. Each token being what dense attention chooses after the
    tokens before it means, by induction, that dense decoding from the prompt alone yields the same answer.

    Parameters
    ----------
    sequences : iterable of Sequence
        Finished ones of an engine with keep_logits.
    dtype : dtype
        What K and V are rounded to, as in the engine's pool.
    q_dtype : dtype
        What q is rounded to, as by the engine's attention.
    tie_gap : float
        A token is no mismatch if its dense logit is less than this below that of the dense choice. For rounded caches: sums in
        another order differ in the last bit of float32, and now and then that moves a key to the next number of its dtype.
    """
    model = model.on_host()
    count = tokens = 0
    worst = 0.0
    wrong: list[tuple[int, int, int]] = []
    ties: list[tuple[int, int, int]] = []
    for seq in sequences:
        prompt, answer = len(seq.request.prompt), seq.generated
        cache = DenseCache(model, len(seq.tokens), dtype=dtype, q_dtype=q_dtype)
        logits = cache.extend(seq.tokens[:-1], logits_from=prompt - 1, visible=visible)
        worst = max(worst, float(np.abs(logits - np.stack(seq.logits)).max()))
        for i, token in enumerate(answer):
            choice = seq.sampler.choose(logits[i], prompt + i)
            if choice != token:
                near = abs(logits[i, choice] - logits[i, token]) < tie_gap
                (ties if near else wrong).append((seq.request.id, seq.sample, i))
        count, tokens = count + 1, tokens + len(answer)
    return Comparison(
        sequences=count, tokens=tokens, max_logit_difference=worst, mismatches=tuple(wrong), ties=tuple(ties)
    )
