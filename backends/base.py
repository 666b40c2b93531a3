# SPDX-License-Identifier: Apache-2.0
"""What a backend is: reasons why not, traits for the planner, and kernels that run a plan.

A backend gets a ``Call`` of named array views and enqueues; it allocates nothing, waits for nothing and checks nothing that
the runtime has checked already (shapes, dtypes, devices, ranges of host ids).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from attnrt.device import Device
    from attnrt.formats.base import Features
    from attnrt.scheduler.base import Plan, Traits
    from attnrt.spec import AttentionSpec
    from attnrt.tensor import TensorView

__all__ = ["AppendCall", "Backend", "Call", "Kernel", "Loaded", "PagedView", "PartViews"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedView:
    """K or V as a pool of slots: slot s lies in page ``s // page_size`` at token ``s % page_size``.

    ``ptr`` in bytes; strides in elements, 64-bit, signed; the last axis has stride 1. ``page_size`` is the cache's own, which
    may differ from a part's block size C (a part with C = 1 lists single slots of a paged cache).
    """

    ptr: int
    dtype: str
    num_pages: int
    page_size: int
    stride_page: int
    stride_token: int
    stride_head: int
    owner: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class PartViews:
    """The arrays of one part (formats.base.BlockSparse) where the kernels can read them; None where the part has none."""

    block_size: int
    heads: int
    qo_indptr: TensorView
    qo_index: TensorView | None
    request: TensorView
    qo_pos: TensorView
    indptr: TensorView
    indices: TensorView | None
    kv_base: TensorView | None
    kv_pos: TensorView | None
    block_pos: TensorView | None
    kv_begin: TensorView
    kv_end: TensorView
    kv_offset: TensorView
    mask: TensorView | None
    mask_offset: TensorView | None
    mask_begin: TensorView | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """A plan in the workspace: all that stays the same between two loads. Backends may cache what they pack from it by identity.

    Attributes
    ----------
    plan : Plan
        For its host numbers (counts, traits, tree).
    parts : tuple of PartViews
    qo_lens, kv_lens : int32 [num_requests]; bound_kv_lens the same or None
    work : int32 [num_items, len(WORK_FIELDS)]; worker_indptr : int32 [all_workers + 1]
    merge_rows : int32 [num_merges, len(MERGE_FIELDS)]; merge_slots, merge_leaves : int32 [entries]
    partial_acc : float32 [slots, num_qo_heads, head_dim_vo], acc not divided
    partial_ml : float32 [slots, num_qo_heads, 2], running maximum m (base-2 logits) and sum l
    header : uint8 [header_nbytes] at an address that no load changes, or None; what the kernel's ``pack_header`` wrote.
        The other views of a load may lie elsewhere than those of the load before (the workspace packs each load
        tightly, so that it is one short copy): a captured graph reads addresses and counts in the header.
    counters : (int, int)
        Address of int32 numbers, as many as the kernel's ``counters`` asked for: zero after a load, and every run leaves
        them so.
    room : (int, int)
        Bytes of memory before the header's start, where plans lie up to it, and behind its end, where indexes begin.
    """

    plan: Plan
    parts: tuple[PartViews, ...]
    qo_lens: TensorView
    kv_lens: TensorView
    bound_kv_lens: TensorView | None
    work: TensorView
    worker_indptr: TensorView
    merge_rows: TensorView
    merge_slots: TensorView
    merge_leaves: TensorView
    partial_acc: TensorView
    partial_ml: TensorView
    header: TensorView | None = None
    counters: tuple[int, int] = (0, 0)
    room: tuple[int, int] = (0, 0)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of work, worker_indptr, merge_rows, merge_slots, merge_leaves, qo_lens, kv_lens, bound_kv_lens (0: none), partial_acc
        and partial_ml: what a header holds, without a view for each."""
        views = (self.work, self.worker_indptr, self.merge_rows, self.merge_slots, self.merge_leaves)
        lengths = (self.qo_lens, self.kv_lens, self.bound_kv_lens)
        return tuple(
            0 if view is None else view.ptr for view in (*views, *lengths, self.partial_acc, self.partial_ml)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One run.

    Attributes
    ----------
    loaded : Loaded
    q : [num_rows, num_qo_heads, head_dim]
    k, v : PagedView (v over k's memory with shared_kv)
    out : [num_rows, num_qo_heads, head_dim_vo]
    lse : float32 [num_rows, num_qo_heads] or None
    params : bound parameter table of the variant (variants.Composed.bind)
    sm_scale : float
    stream : int
        Native stream handle; 0 on the CPU.
    """

    loaded: Loaded
    q: TensorView
    k: PagedView
    v: PagedView
    out: TensorView
    lse: TensorView | None
    params: Any
    sm_scale: float
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AppendCall:
    """Store row i of k and v at ``slots[i]`` (negative: skip).

    ``rope`` rotates k by ``positions`` first; the scales divide before the cast to fp8 (nearest even, saturated).
    ``slots_given``: the slots are the caller's, not the loaded plan's.

    Of a gather, which goes the other way: row i of k and v becomes what the cache has at ``slots[i]`` (negative: zeros), k
    rotated by ``positions`` if there is a ``rope``; scales are None, ``slots_given`` is not read.
    """

    k: TensorView
    v: TensorView | None
    k_cache: PagedView
    v_cache: PagedView | None
    slots: TensorView
    positions: TensorView | None
    rope: Any
    k_scale: Any
    v_scale: Any
    stream: int = 0
    slots_given: bool = False


class Kernel(Protocol):
    """Machine code for one (spec, features, device).

    Optional: ``pack_header`` (see Backend); ``counters(plan, limits)``, how many ``Loaded.counters`` it wants;
    ``profile(call)``, which runs a call and returns (worker, start_ns, stop_ns) of every item, int64 [items, 3];
    ``gather(call)`` of an AppendCall; ``place(name, array)``, a parameter's host array where kernels can read it;
    ``prepare(plan, limits)``, which compiles what runs of a plan need (plan None: of any plan within limits; both None: all)
    where ``compile`` puts that off; ``steady(loaded, limits)``, from which plans like the loaded one may be brought to the
    device without it (attnrt/step.py).
    """

    def attend(self, call: Call) -> None:
        """Run every work item: partial states, or finished rows of out and lse."""
        ...

    def merge(self, call: Call) -> None:
        """Fold and finish every row of the merge list."""
        ...

    def append(self, call: AppendCall) -> Any:
        """Store new K and V rows into the cache. May return what does it for other addresses without Python: ``native``, the
        addresses of a C function and its record (native/repeats.h), and ``failed(code)``."""
        ...


class Backend(Protocol):
    """A way to run plans. ``name`` is its registry name.

    These attributes are optional. ``header_nbytes`` (0), and ``header_nbytes_per_worker`` (0) more for each worker of the
    traits that is of no team or of one of ``header_teams`` (none): room that the backend wants at a fixed device address for
    each attention; its kernels then have ``pack_header(loaded, target)``, which fills a writable uint8 array of that length on
    the host, and the copy of the load brings it there. ``partial_itemsize`` (4): 8 makes partial states float64.
    """

    name: str

    def why_not(self, spec: AttentionSpec, features: Features, device: Device) -> tuple[str, ...]:
        """Reasons why this backend cannot take it; empty: it can."""
        ...

    def traits(
        self, spec: AttentionSpec, features: Features, device: Device, deterministic: str = "batch"
    ) -> Traits:
        """Answer to the planner; pure, needs no machine beyond the device's name. Optional: ``traits_within(spec, traits,
        limits)``, the same for an attention with limits."""
        ...

    def compile(self, spec: AttentionSpec, features: Features, device: Device) -> Kernel:
        """Machine code, from a cache where possible; raises CompileError."""
        ...
