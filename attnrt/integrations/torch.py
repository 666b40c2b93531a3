# SPDX-License-Identifier: Apache-2.0
"""An Attention as one opaque operator of PyTorch, for torch.compile.

A compiler that looks into run() would trace its checks and its calls into C. ``operator(attn)`` hides it behind a registered
operator with a fake (shapes and dtypes without data), so that ``torch.compile(fullgraph=True)`` keeps the model in one graph. The
plan is state of the Attention, not an argument: plan() between calls, nothing is traced again.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from attnrt.errors import ArgumentError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnrt.api import Attention

__all__ = ["operator"]

_library = torch.library.Library("attnrt", "FRAGMENT")
_library.define("run(Tensor q, Tensor k, Tensor? v, int attention, bool want_lse) -> (Tensor, Tensor)")

#: Attentions by the number that stands for them in a traced graph.
_known: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()


def _find(number: int) -> Attention:
    found = _known.get(number)
    if found is None:
        raise PlanError("attention", "must live as long as what was compiled with it", f"number {number}")
    return found


def _results(attn: Attention, q: torch.Tensor, want_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """New out and lse; without lse an empty tensor stands for it, since an operator has a fixed number of results."""
    spec = attn.spec
    out = q.new_empty((q.shape[0], spec.num_qo_heads, spec.head_dim_vo), dtype=getattr(torch, spec.out_dtype))
    lse = q.new_empty((q.shape[0], spec.num_qo_heads) if want_lse else (0,), dtype=torch.float32)
    return out, lse


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, attention: int, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    attn = _find(attention)
    out, lse = _results(attn, q, want_lse)
    attn.run(q, k if v is None else (k, v), out=out, lse=lse if want_lse else None)
    return out, lse


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, attention: int, want_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(_find(attention), q, want_lse)


for _key in ("CPU", "CUDA"):
    _library.impl("run", _run, _key)
torch.library.register_fake("attnrt::run", _fake, lib=_library)


def operator(attn: Attention) -> Callable[..., Any]:
    """``run(q, kv, return_lse=False)`` of an attention, as a function that torch.compile takes as it is.

    Parameters
    ----------
    attn : Attention
        Must live as long as the function. Its loaded plan counts when the function runs.

    Returns
    -------
    callable
        (q, kv, return_lse=False) -> out, or (out, lse); kv a pair of tensors, or one tensor with shared_kv. Results are new
        tensors; parameters of the variant have their defaults.

    Examples
    --------
    >>> attend = attnrt.integrations.torch.operator(attn)
    >>> step = torch.compile(lambda q, k, v: attend(q, (k, v)) * 2, fullgraph=True)
    """
    number = id(attn)
    _known[number] = attn
    shared = attn.spec.shared_kv

    def attend(q: torch.Tensor, kv: Any, return_lse: bool = False) -> Any:
        if shared == isinstance(kv, (tuple, list)):
            raise ArgumentError("kv", "must be one tensor with shared_kv, else a pair", type(kv).__name__)
        k, v = (kv, None) if shared else kv
        out, lse = torch.ops.attnrt.run(q, k, v, number, return_lse)
        return (out, lse) if return_lse else out

    return attend
