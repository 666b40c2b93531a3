# SPDX-License-Identifier: Apache-2.0
"""Merging finished attention results over disjoint sets of keys: (v, lse) pairs, in part order, in float32.

The same fold as attnrt.fold, started from finished pairs: each part is the state m = lse, l = 1, acc = v, in natural
logarithms so that a part that meets only empty ones comes back bit for bit (scaling lse to base 2 and back
would not).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from attnrt import dtypes
from attnrt.dtypes import Dtype
from attnrt.errors import ArgumentError, DtypeError, UnsupportedError
from attnrt.memory import load_provider
from attnrt.results import empty_like_caller, to_caller
from attnrt.tensor import TensorView

__all__ = ["MergeCall", "merge_state", "merge_states", "register_merge"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergeCall:
    """One merge, checked: what an implementation for a kind of device gets.

    Attributes
    ----------
    v : tuple of TensorView
        Each [rows, heads, dim], one dtype, any strides.
    lse : tuple of TensorView or None
        Each [rows, heads] float32 (float64 beside float64 v), natural log; None: the parts are added.
    out : TensorView
        [rows, heads, dim] of v's dtype; may be the memory of one of the parts.
    out_lse : TensorView or None
        [rows, heads] of lse's dtype.
    stream : object
        The caller's stream, or None: the current one of the arrays' framework.
    """

    v: tuple[TensorView, ...]
    lse: tuple[TensorView, ...] | None
    out: TensorView
    out_lse: TensorView | None
    stream: object = None


_implementations: dict[str, Callable[[MergeCall], None]] = {}


def register_merge(kind: str, implementation: Callable[[MergeCall], None]) -> None:
    """Register how arrays on a kind of device ("cpu", "cuda") are merged; a backend calls this when it is loaded."""
    _implementations[kind] = implementation


def merge_state(
    va: Any, lse_a: Any, vb: Any, lse_b: Any, *, out: Any = None, out_lse: Any = None, stream: object = None
) -> tuple[Any, Any]:
    """Merge two results over disjoint keys; as `merge_states` with parts (a, b).

    Parameters
    ----------
    va, vb : array [rows, heads, dim]
    lse_a, lse_b : array [rows, heads] float32, or both None
    out, out_lse : array, optional
        Where to write; may be va, lse_a or vb, lse_b themselves.

    Returns
    -------
    (v, lse)
        In the framework and dtype of va.
    """
    if (lse_a is None) != (lse_b is None):
        raise ArgumentError("lse_b", "must be given exactly if lse_a is", "one of the two")
    v = (_read(va, "va"), _read(vb, "vb"))
    lse = None if lse_a is None else (_read(lse_a, "lse_a"), _read(lse_b, "lse_b"))
    return _merge(v, lse, ("va", "vb"), ("lse_a", "lse_b"), (out, out_lse, stream))


def merge_states(
    v: Any, lse: Any, *, out: Any = None, out_lse: Any = None, stream: object = None
) -> tuple[Any, Any]:
    """Merge results over disjoint sets of keys, in part order, in float32.

    out = sum_i exp(lse_i - m) v_i / sum_i exp(lse_i - m) and lse = m + log(sum_i exp(lse_i - m)), m the running
    maximum; parts with lse = -inf are skipped whatever their v holds.

    Parameters
    ----------
    v : array [parts, rows, heads, dim]
        As an all-gather leaves it; float32, float16 or bfloat16 (float64: computed in float64), any strides.
    lse : array [parts, rows, heads] float32 or None
        Natural log. None: softmax-free parts, which are added.
    out, out_lse : array, optional
        [rows, heads, dim] and [rows, heads]: where to write. They must be given under stream capture.
    stream : optional
        Handle or stream object for device arrays; None: the current one of the arrays' framework.

    Returns
    -------
    (v, lse)
        In the framework and dtype of v; lse is None if it was. All parts empty: (0, -inf).

    Raises
    ------
    ArgumentError, DtypeError
        Shapes, dtypes or devices differ; an output cannot be written.
    UnsupportedError
        No loaded backend merges on that device.
    """
    stacked = _read(v, "v")
    if stacked.ndim != 4 or stacked.shape[0] < 1:
        raise ArgumentError("v", "must be [parts, rows, heads, dim] with at least one part", stacked.shape)
    weights = None
    if lse is not None:
        stacked_lse = _read(lse, "lse")
        if stacked_lse.shape != stacked.shape[:3]:
            raise ArgumentError(
                "lse", f"must be [parts, rows, heads] = {stacked.shape[:3]}", stacked_lse.shape
            )
        weights = stacked_lse.unstack()
    return _merge(stacked.unstack(), weights, ("v", "v"), ("lse", "lse"), (out, out_lse, stream))


def _read(x: Any, label: str) -> TensorView:
    try:
        return TensorView(x)
    except (ArgumentError, DtypeError) as error:
        raise type(error)(label, error.rule, error.got, error.hint) from error


_LSE_DTYPE: dict[Dtype, Dtype] = {
    dtypes.float64: dtypes.float64,
    dtypes.float32: dtypes.float32,
    dtypes.float16: dtypes.float32,
    dtypes.bfloat16: dtypes.float32,
}


def _merge(
    v: tuple[TensorView, ...],
    lse: tuple[TensorView, ...] | None,
    v_labels: tuple[str, str],
    lse_labels: tuple[str, str],
    rest: tuple[Any, Any, object],
) -> tuple[Any, Any]:
    out, out_lse, stream = rest
    first = v[0]
    if first.ndim != 3:
        raise ArgumentError(v_labels[0], "must be [rows, heads, dim]", first.shape)
    lse_dtype = _LSE_DTYPE.get(first.dtype)
    if lse_dtype is None:
        raise DtypeError(v_labels[0], "must be float32, float16, bfloat16 or float64", first.dtype)
    if lse is None and out_lse is not None:
        raise ArgumentError(
            "out_lse", "must not be given where lse is None", hint="Softmax-free parts have no lse"
        )
    for part in v[1:]:
        _same(part, first.shape, first.dtype, first, v_labels[1])
    for i, part in enumerate(lse or ()):
        _same(part, first.shape[:2], lse_dtype, first, lse_labels[min(i, 1)])
    implementation = _implementation(first.device.kind)

    result = empty_like_caller(first, first.shape, first.dtype) if out is None else out
    out_view = _writable(result, first.shape, first.dtype, first, "out")
    result_lse, lse_view = None, None
    if lse is not None:
        result_lse = empty_like_caller(first, first.shape[:2], lse_dtype) if out_lse is None else out_lse
        lse_view = _writable(result_lse, first.shape[:2], lse_dtype, first, "out_lse")
    implementation(MergeCall(v=v, lse=lse, out=out_view, out_lse=lse_view, stream=stream))
    if out is None:
        result = to_caller(result, first.framework)
    if lse is not None and out_lse is None:
        result_lse = to_caller(result_lse, first.framework)
    return result, result_lse


def _implementation(kind: str) -> Callable[[MergeCall], None]:
    reason = None if kind in _implementations else load_provider(kind)
    found = _implementations.get(kind)
    if found is None:
        raise UnsupportedError(
            "merge_states", "must have an implementation for the device", kind, reason or ""
        )
    return found


def _same(x: TensorView, shape: tuple[int, ...], dtype: Dtype, first: TensorView, label: str) -> None:
    if x.dtype is not dtype:
        raise DtypeError(label, f"must be {dtype}", x.dtype)
    if x.shape != shape:
        raise ArgumentError(label, f"must have shape {shape}", x.shape)
    if x.device != first.device:
        raise ArgumentError(label, f"must be on {first.device}", x.device)


def _writable(x: Any, shape: tuple[int, ...], dtype: Dtype, first: TensorView, label: str) -> TensorView:
    view = _read(x, label)
    if view.immutable or view.readonly:
        raise ArgumentError(label, "must be writable", view.framework, "Leave it out: the result is returned")
    _same(view, shape, dtype, first, label)
    return view


def _merge_host(call: MergeCall) -> None:
    """The NumPy form of the merge on finished pairs; other implementations give the same bits but for exp and log."""
    parts = [x.numpy() for x in call.v]
    dtype = np.float64 if call.v[0].dtype is dtypes.float64 else np.float32
    acc = parts[0].astype(dtype)
    if call.lse is None or call.out_lse is None:
        for part in parts[1:]:
            acc = acc + part.astype(dtype)
        call.out.numpy()[...] = acc.astype(call.out.dtype.numpy)
        return
    weights = [x.numpy() for x in call.lse]
    m, l = weights[0].astype(dtype), np.ones(weights[0].shape, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            b, mb = part.astype(dtype), weight.astype(dtype)
            keep_a, keep_b = mb == -np.inf, m == -np.inf
            top = np.maximum(m, mb)
            sa, sb = np.exp(m - top), np.exp(mb - top)
            l = np.where(keep_a, l, np.where(keep_b, dtype(1), l * sa + sb))
            mixed = acc * sa[..., None] + b * sb[..., None]
            acc = np.where(keep_a[..., None], acc, np.where(keep_b[..., None], b, mixed))
            m = top
        empty = m == -np.inf
        out = np.where(empty[..., None], dtype(0), acc / l[..., None])
        lse = np.where(
            empty | (l == 1), m, m + np.log(l)
        )  # l = 1: nothing was added, m is the answer, -0 too
    call.out.numpy()[...] = out.astype(call.out.dtype.numpy)
    call.out_lse.numpy()[...] = lse


register_merge("cpu", _merge_host)
