# SPDX-License-Identifier: Apache-2.0
"""The arrays of a run, read and checked: q, the KV cache in all its forms, out and lse.

Everything that does not depend on the loaded plan is checked once per *form* (dtypes, shapes, strides, device of all five arrays)
and kept, so that the runs of a model's layers, which differ in addresses only, pay for one dictionary look-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attnrt.backends.base import PagedView
from attnrt.checks import check_dtype
from attnrt.device import Device
from attnrt.dtypes import Dtype, as_dtype
from attnrt.errors import ArgumentError, AttnrtError, DtypeError, PlanError
from attnrt.overlap import Extent, check_apart, check_own
from attnrt.reading import compact_strides
from attnrt.tensor import TensorView, native, view

if TYPE_CHECKING:
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec

__all__ = ["Form", "Needs", "Pool", "Rules", "as_view", "read_form", "slow_signature", "split_kv"]


#: Forms, calls and addresses that are remembered; past it all are forgotten (arrays of ever new shapes or addresses).
REMEMBER = 512


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What a spec on a device asks of arrays, with dtypes looked up once."""

    spec: AttentionSpec
    device: Device
    q_dtype: Dtype
    kv_dtype: Dtype
    out_dtype: Dtype
    lse_dtype: Dtype

    @staticmethod
    def of(spec: AttentionSpec, device: Device) -> Rules:
        names = (spec.q_dtype, spec.kv_dtype, spec.out_dtype, "float32")
        return Rules(spec, device, *(as_dtype(name) for name in names))


@dataclass(slots=True, eq=False)
class Needs:
    """What a loaded plan asks of arrays. (Not frozen: one is made by every load, and that would be most of its cost.)

    ``unit``: tokens of the pages as which a pool of slots is read. Every part's blocks are so many of them, so that no slot that
    a part may name lies past the last whole page.
    """

    num_rows: int
    page_size: int
    unit: int
    page_sizes: frozenset[int]
    slots: int
    affine: bool

    @staticmethod
    def of(plan: Plan) -> Needs:
        parts = plan.index.parts
        if len(parts) == 1:  # the common case, on every step's path
            part = parts[0]
            size = part.block_size[1]
            slots = (part.max_block + 1) * size
            return Needs(plan.num_rows, size, size, frozenset((size,)), slots, part.kv_base is not None)
        sizes = frozenset(part.block_size[1] for part in parts)
        return Needs(
            num_rows=plan.num_rows,
            page_size=plan.index.page_size,
            unit=math.gcd(*sizes),
            page_sizes=sizes,
            slots=max(((part.max_block + 1) * part.block_size[1] for part in parts), default=0),
            affine=all(part.kv_base is not None for part in parts),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Geometry of K or V; ``page_size`` 0: a pool of slots, whose pages are the index's. Strides in elements."""

    num_pages: int
    page_size: int
    stride_page: int
    stride_token: int
    stride_head: int
    dtype: str

    @property
    def slots(self) -> int:
        return self.num_pages * (self.page_size or 1)

    def view(self, ptr: int, page_size: int, owner: Any) -> PagedView:
        """The pool at an address; a pool of slots is read in pages of ``page_size``."""
        pages, size, stride = self.num_pages, self.page_size, self.stride_page
        if size == 0:
            pages, size, stride = pages // page_size, page_size, self.stride_token * page_size
        return PagedView(
            ptr=ptr,
            dtype=self.dtype,
            num_pages=pages,
            page_size=size,
            stride_page=stride,
            stride_token=self.stride_token,
            stride_head=self.stride_head,
            owner=owner,
        )


@dataclass(slots=True, eq=False)
class Form:
    """A checked combination of arrays. ``q``, ``out`` and ``lse`` are views whose addresses are those of the first run of this
    form; ``epoch`` is the load for which it was last compared with the plan, ``apart`` the addresses found not to overlap."""

    q: TensorView
    k: Pool
    v: Pool
    out: TensorView | None
    lse: TensorView | None
    extents: tuple[Extent | None, ...] = ()
    epoch: int = -1
    apart: set[tuple[int, ...]] = field(default_factory=set)

    def result(self, ptr: int, given: TensorView | None, inner: tuple[int, ...], dtype: Dtype) -> TensorView:
        """out or lse at an address: in the given array's shape, or [rows, *inner] newly made."""
        if given is not None:
            return at(given, ptr, None)
        shape = (self.q.shape[0], *inner)
        return native.make(
            *(ptr, shape, compact_strides(shape), dtype, self.q.device, None, self.q.framework, False, False)
        )

    def check_apart(self, addresses: tuple[int, ...]) -> None:
        """Raise if results overlap what a run reads; each set of addresses is looked at once."""
        if addresses not in self.apart:
            check_apart(self.extents, addresses)
            if len(self.apart) >= REMEMBER:
                self.apart.clear()
            self.apart.add(addresses)

    def check(self, needs: Needs) -> None:
        """Compare with the loaded plan."""
        if self.q.shape[0] != needs.num_rows:
            raise PlanError(
                "q",
                f"must have the {needs.num_rows} rows of the loaded plan",
                self.q.shape[0],
                "Plan with pad_to to pad",
            )
        for label, result in (("out", self.out), ("lse", self.lse)):
            if result is not None and result.shape[0] != needs.num_rows:
                raise ArgumentError(label, f"must have q's {needs.num_rows} rows", result.shape[0])
        size = self.k.page_size
        if size and any(n not in (1, size) for n in needs.page_sizes):
            raise PlanError("kv", f"must have pages of {needs.page_size} tokens, as the loaded plan", size)
        if needs.slots > self.k.slots:
            raise ArgumentError(
                "kv",
                f"must hold the {needs.slots} slots ({-(-needs.slots // needs.page_size)} pages) that the index names",
                f"{self.k.slots} slots",
            )


def at(view: TensorView, ptr: int, owner: Any) -> TensorView:
    """``view``'s shape at another address."""
    return native.make(
        *(
            ptr,
            view.shape,
            view.strides,
            view.dtype,
            view.device,
            owner,
            view.framework,
            view.readonly,
            view.immutable,
        )
    )


def as_view(x: Any, label: str, dtype: Dtype | None, device: Device, said_by: str = "") -> TensorView:
    """Read one array (dtype None: any); errors name ``label``, and the field of the spec that says its dtype."""
    try:
        view = x if type(x) is TensorView and x.dtype is dtype else TensorView(x, dtype)
    except (ArgumentError, DtypeError) as error:
        hint = error.hint or (said_by and f"The spec's {said_by} says so")
        raise type(error)(label, error.rule, error.got, hint) from error
    if view.device is not device and view.device != device:
        raise ArgumentError(label, f"must be on {device}", str(view.device), "Move it there, or give device=")
    return view


def split_kv(spec: AttentionSpec, kv: Any) -> tuple[Any, Any]:
    """The caller's (k, v); v is None with shared_kv."""
    if spec.shared_kv:
        if isinstance(kv, (tuple, list)):
            raise ArgumentError(
                "kv", "must be one array with shared_kv", f"{len(kv)} arrays", "V is the start of K's rows"
            )
        return kv, None
    if isinstance(kv, (tuple, list)):
        if len(kv) == 2:
            if kv[1] is None:  # below, no V means that V lies in K's rows
                raise DtypeError("v", "must be an array", "None", "V inside K's rows: shared_kv")
            return kv[0], kv[1]
        raise ArgumentError("kv", "must be a pair (k, v)", f"{len(kv)} arrays")
    raise ArgumentError(
        "kv",
        "must be a pair (k, v)",
        type(kv).__name__,
        "For one array that holds both use attnrt.kv_interleaved(x, axis)",
    )


def read_form(rules: Rules, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Form:
    """Read and check all arrays of a run against the spec."""
    spec, device = rules.spec, rules.device
    q_view = as_view(q, "q", rules.q_dtype, device, "q_dtype")
    check_rows(q_view, "q", spec.num_qo_heads, spec.head_dim)
    k_view, v_view = as_view(k, "k", rules.kv_dtype, device, "kv_dtype"), None
    k_pool = read_pool(spec, k_view, "k", spec.head_dim)
    if v is None:
        v_pool = k_pool
    else:
        v_view = as_view(v, "v", rules.kv_dtype, device, "kv_dtype")
        v_pool = read_pool(spec, v_view, "v", spec.head_dim_vo)
        if (v_pool.num_pages, v_pool.page_size) != (k_pool.num_pages, k_pool.page_size):
            raise ArgumentError(
                "v",
                f"must have k's {k_pool.num_pages} pages of {k_pool.page_size or 1} tokens",
                f"{v_pool.num_pages} pages of {v_pool.page_size or 1}",
            )
    out_view = lse_view = None
    if out is not None:
        out_view = as_view(out, "out", rules.out_dtype, device, "out_dtype")
        check_rows(out_view, "out", spec.num_qo_heads, spec.head_dim_vo)
        check_result(out_view, "out")
    if lse is not None:
        lse_view = check_dtype(as_view(lse, "lse", None, device), "lse", rules.lse_dtype)
        if len(lse_view.shape) != 2 or lse_view.shape[1] != spec.num_qo_heads:
            raise ArgumentError("lse", f"must be [rows, {spec.num_qo_heads}]", list(lse_view.shape))
        check_result(lse_view, "lse")
    bare = [
        None if x is None else at(x, x.ptr, None) for x in (out_view, lse_view)
    ]  # a form keeps nobody's memory
    arrays = (q_view, k_view, v_view, out_view, lse_view)
    extents = tuple(None if x is None else Extent.of(x) for x in arrays)
    q_bare = at(q_view, q_view.ptr, None)
    return Form(q=q_bare, k=k_pool, v=v_pool, out=bare[0], lse=bare[1], extents=extents)


def check_rows(view: TensorView, label: str, heads: int, dim: int) -> None:
    """[rows, heads, dim] with a last stride of 1."""
    shape = view.shape
    if len(shape) != 3 or shape[1] != heads or shape[2] != dim:
        raise ArgumentError(label, f"must be [rows, {heads}, {dim}]", list(shape))
    check_last(view, label)


def check_last(view: TensorView, label: str) -> None:
    """The numbers of a head lie side by side."""
    if view.strides[-1] != 1:
        raise ArgumentError(
            label, "must have a last stride of 1", list(view.strides), "Make the last axis contiguous"
        )


def check_result(view: TensorView, label: str) -> None:
    """A place for results: writable, no element twice."""
    if view.readonly or view.immutable:
        raise ArgumentError(
            label,
            "must be writable",
            f"a read-only {view.framework} array",
            f"Leave {label} out: it is returned",
        )
    if any(s == 0 and n > 1 for s, n in zip(view.strides, view.shape, strict=True)):
        raise ArgumentError(label, "must not name one element twice (stride 0)", list(view.strides))
    check_own(view, label)


def read_pool(spec: AttentionSpec, view: TensorView, label: str, dim: int) -> Pool:
    """[pages, page, heads, dim] (NHD), [pages, heads, page, dim] (HND) or [slots, heads, dim]."""
    shape, strides, heads = view.shape, view.strides, spec.num_kv_heads
    hnd = spec.kv_layout == "HND"
    if len(shape) == 4:
        head_axis, token_axis = (1, 2) if hnd else (2, 1)
        good = shape[head_axis] == heads and shape[3] == dim
    elif len(shape) == 3:
        head_axis, token_axis = 1, 0
        good = shape[1] == heads and shape[2] == dim
    else:
        good = False
    if not good:
        page = f"[pages, {heads}, page_size, {dim}]" if hnd else f"[pages, page_size, {heads}, {dim}]"
        other = len(shape) == 4 and shape[3] == dim and shape[3 - head_axis] == heads
        hint = f'Or kv_layout="{"NHD" if hnd else "HND"}"' if other else ""
        raise ArgumentError(label, f"must be {page} or [slots, {heads}, {dim}]", list(shape), hint)
    check_last(view, label)
    dtype = view.dtype.name
    if len(shape) == 3:
        return Pool(shape[0], 0, 0, strides[0], strides[1], dtype)
    return Pool(shape[0], shape[token_axis], strides[0], strides[token_axis], strides[head_axis], dtype)


def slow_signature(
    rules: Rules, arrays: tuple[Any, ...]
) -> tuple[tuple[Any, tuple[int, ...]], tuple[Any, ...]]:
    """What ``signature`` says, for any array that can be read at all."""
    try:
        views = tuple(None if x is None else view(x) for x in arrays)
    except AttnrtError:
        read_form(rules, *arrays)  # says the same, naming the argument
        raise
    key = tuple(
        None if x is None else (x.shape, x.strides, x.dtype, x.device, x.framework, x.readonly, x.immutable)
        for x in views
    )
    return (key, tuple(0 if x is None else x.ptr for x in views)), views
