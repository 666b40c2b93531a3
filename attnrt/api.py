# SPDX-License-Identifier: Apache-2.0
"""The public surface: Attention, the one-shot ``attention``, warmup."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from attnrt.dispatch import features_of_plan, resolve
from attnrt.errors import ArgumentError, DtypeError
from attnrt.formats.base import BlockSparse, Composite, Features
from attnrt.runtime import Runtime
from attnrt.scheduler import make_plan
from attnrt.scheduler.assign import find
from attnrt.spec import DETERMINISM, AttentionSpec
from attnrt.tensor import TensorView
from attnrt.workspace import Limits, Workspace

if TYPE_CHECKING:
    from attnrt.backends.base import Backend
    from attnrt.device import Device
    from attnrt.formats.base import Index
    from attnrt.scheduler.base import Plan

__all__ = ["Attention", "attention", "warmup"]

#: Features of what every engine has: pages, and ragged K and V.
COMMON = (Features(), Features(affine=True))


class Attention:
    """One attention layer, or several that share heads, dims and variant: plan a batch once, run it for each layer.

    Belongs to one thread and one stream at a time; a second call inside a running one raises PlanError.

    Parameters
    ----------
    spec : AttentionSpec
    backend : str or Backend
        "auto": the first backend of the device without a reason against it; never "reference", never another device.
    scheduler : str or object
        "lpt", "round_robin", "one_cta_per_request", a registered name, or an object with ``assign``. Changes time, never bits.
    device : device, optional
        None: the current CUDA device if a CUDA backend can take the spec, else the CPU.
    limits : Limits, optional
        Needed for graph capture; None: memory grows between runs.
    workspace : Workspace, optional
        Shared with other attentions of the same stream; brings its own limits and device.
    deterministic : {"batch", "token", "run"}
        What a row's bits depend on: its own request ("batch"), not even on qo_len ("token"), the whole call ("run").

    Raises
    ------
    UnsupportedError
        No backend takes it; ``reasons`` says why, by backend.
    ArgumentError, CompileError
    """

    def __init__(
        self,
        spec: AttentionSpec,
        backend: str | Backend = "auto",
        scheduler: Any = "lpt",
        device: Any = None,
        limits: Limits | None = None,
        workspace: Workspace | None = None,
        deterministic: str = "batch",
    ) -> None:
        if not isinstance(spec, AttentionSpec):
            raise ArgumentError("spec", "must be an AttentionSpec", type(spec).__name__)
        if deterministic not in DETERMINISM:
            raise ArgumentError("deterministic", f"must be one of {DETERMINISM}", repr(deterministic))
        if workspace is not None:
            if limits is not None:
                raise ArgumentError("limits", "must be left out with workspace, which has its own", "both")
            if not isinstance(workspace, Workspace):
                raise ArgumentError("workspace", "must be an attnrt.Workspace", type(workspace).__name__)
            device = workspace.device if device is None else device
        chosen, where = resolve(spec, Features(), device, backend)
        if workspace is None:
            workspace = Workspace([spec], limits, where, backend=chosen)
        elif workspace.device != where:
            raise ArgumentError("device", f"must be the workspace's, {workspace.device}", str(where))
        self.spec = spec
        self.scheduler = scheduler
        find(scheduler)  # says now what is wrong with it
        self.workspace = workspace
        self._runtime = Runtime(spec, chosen, where, workspace, deterministic)
        self._append_again = self._runtime.appends.run
        self._again = self._runtime.front.run
        for features in COMMON:
            if not chosen.why_not(spec, features, where):
                self._runtime.machine.traits(
                    features
                )  # says now that a level of determinism is not to be had
                self._runtime.machine.prepare(features)

    @property
    def backend(self) -> str:
        """Name of the backend that runs."""
        return self._runtime.backend.name

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self._runtime.device

    @property
    def limits(self) -> Limits | None:
        """The promise given, or None."""
        return self.workspace.limits

    def plan(self, index: Index, pad_to: int | None = None, load: bool = True, stream: Any = None) -> Plan:
        """Schedule an index; pure host work, except that ``load=True`` then loads the plan.

        Parameters
        ----------
        index : BlockSparse or Composite
            From attnrt.formats.
        pad_to : int, optional
            Rows of q that runs bring, at least the index's; those past the index's get out = 0 and lse = -inf.
        load : bool
            Also ``load(plan, stream)``.
        stream : stream, optional
            None: the current stream of the one GPU framework in the process.

        Raises
        ------
        LimitError
            The plan passes a limit (named); nothing was written.
        ArgumentError, UnsupportedError
        """
        runtime = self._runtime
        if not isinstance(index, (BlockSparse, Composite)):
            raise ArgumentError("index", "must come from attnrt.formats", type(index).__name__)
        if not index.checked:
            index.check()
        if load and pad_to is None:
            found = runtime.step(index, self.scheduler, stream)
            if found is not None:
                return found
        runtime.machine.check_index(index)
        traits = runtime.machine.traits(index.features)
        found = make_plan(
            self.spec,
            index,
            runtime.machine.planning_traits(traits),
            scheduler=self.scheduler,
            pad_to=pad_to,
            deterministic=runtime.deterministic,
        )
        if load:
            runtime.load(found, stream, own=True)
        elif self.workspace.limits is not None:
            self.workspace.limits.check(found, traits)
        return found

    def load(self, plan: Plan, stream: Any = None) -> None:
        """Bring a plan to the device by one asynchronous copy; runs enqueued before are not disturbed.

        Raises
        ------
        PlanError
            The plan was made for another spec, determinism or machine class.
        LimitError
            It passes a limit; nothing was written.
        """
        self._runtime.load(plan, stream)

    def run(
        self,
        q: Any,
        kv: Any,
        plan: Plan | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        sm_scale: float | None = None,
        stream: Any = None,
        **variant_args: Any,
    ) -> Any:
        """Attention of the loaded plan over a KV cache.

        Parameters
        ----------
        q : [rows, num_qo_heads, head_dim]
            In the spec's q_dtype (or an unsigned array of its width with the bits); rows: the plan's.
        kv : (k, v), or one array with shared_kv
            Each [num_pages, page_size, num_kv_heads, head_dim] (NHD), [num_pages, num_kv_heads, page_size, head_dim] (HND), or
            [num_slots, num_kv_heads, head_dim]. Any strides whose last is 1.
        plan : Plan, optional
            If given, it must be the loaded one.
        out : [rows, num_qo_heads, head_dim_vo], optional
        lse : float32 [rows, num_qo_heads], optional
            Natural logarithm of the sum of exp of the final logits; -inf for a row that sees no key.
        return_lse : bool
        sm_scale : float, optional
            None: the spec's.
        stream : stream, optional
            None: the current stream of q's framework.
        **variant_args
            The variant's parameters; what is left out has its default.

        Returns
        -------
        out, or (out, lse) with return_lse
            In the framework and on the device of q.

        Raises
        ------
        PlanError
            No plan is loaded, another one than ``plan``, or q or kv do not fit it. As after every error here, out, lse and the
            cache are untouched and the next call works.
        ArgumentError, DtypeError, CaptureError
        """
        if not variant_args:
            done = self._again(q, kv, plan, out, lse, return_lse, sm_scale, stream)
            if done is not None:
                return done
        return self._runtime.run(q, kv, plan, (out, lse, return_lse), sm_scale, stream, variant_args)

    def append(
        self,
        k: Any,
        v: Any,
        kv: Any,
        slots: Any = None,
        rope: Any = None,
        stream: Any = None,
        **variant_args: Any,
    ) -> None:
        """Store this step's K and V into the cache.

        Parameters
        ----------
        k, v : [rows, num_kv_heads, head_dim], [rows, num_kv_heads, head_dim_vo]
            Both in q's dtype, out's or the cache's. v is None with shared_kv.
        kv : as in run; written.
        slots : integers [rows], optional
            page * page_size + offset of each row; negative: skip. None: where the loaded plan has the key at that query's
            position.
        rope : variant, optional
            ``at.variants.rope(...)``: rotates k by its position before it is stored.
        **variant_args
            k_scale, v_scale of an fp8 cache: x / scale, to nearest even, saturated. Rows of the cache's own dtype with scale
            1 keep their bits.
        """
        plain = rope is None and not variant_args
        if plain and self._append_again(k, kv, None, v, slots, False, None, stream) is not None:
            return
        self._runtime.append(k, v, kv, slots, rope, stream, variant_args)

    def gather(
        self,
        kv: Any,
        slots: Any,
        k: Any,
        v: Any = None,
        rope: Any = None,
        positions: Any = None,
        stream: Any = None,
    ) -> None:
        """Bring rows of the cache side by side, in q's or out's dtype: what append stored, the other way round.

        Keys that many queries read (a prompt over single tokens or an 8-bit cache) are then fetched, converted and rotated once,
        not for each tile of queries: ``at.formats.gathered(index)`` has the slots, and the index over what is written here.

        Parameters
        ----------
        kv : as in run; read.
        slots : integers [rows]
            page * page_size + offset of each row; negative: zeros. An int64 array on the device is read in place, so that a
            capture may hold the call.
        k, v : [rows, num_kv_heads, head_dim], [rows, num_kv_heads, head_dim_vo]; written
            Both in q's dtype, out's (8-bit numbers are exact there; scales are not applied) or the cache's. v None: K alone, for
            a cache without V (shared_kv) or one whose V already lies where the new index looks for it.
        rope : variant, optional
            ``at.variants.rope(...)``: rotates k by ``positions``, rounded once.
        positions : integers [rows], optional
            With ``rope``; an int32 array on the device is read in place.
        stream : stream, optional
            None: the current stream of kv's framework.
        """
        self._runtime.gather(kv, slots, k, v, rope, positions, stream)

    def copy_pages(self, kv: Any, source: Any, target: Any, stream: Any = None) -> None:
        """Copy pages of the cache onto other pages (copy-on-write of shared pages).

        Parameters
        ----------
        kv : as in run; written.
        source, target : integers [n], on the host
            Page ``source[i]`` goes over page ``target[i]``. No page is named twice in target, and none of target is in source, so
            that the order of the copies does not matter. A pool of slots has pages of one token.
        stream : stream, optional
            None: the current stream of kv's framework.
        """
        self._runtime.copy_pages(kv, source, target, stream)

    def prepare(self, index: Index) -> None:
        """Compile what an index needs, so that neither plan nor run does."""
        plan = self.plan(index, load=False)
        self._runtime.machine.prepare(features_of_plan(plan), plan)

    def profile(
        self, q: Any, kv: Any, sm_scale: float | None = None, stream: Any = None, **variant_args: Any
    ) -> Any:
        """Run the loaded plan once and measure it: (worker, start_ns, stop_ns) of every item in the plan's order.

        Returns
        -------
        int64 [items, 3]
            Nanoseconds from the first item's start.

        Raises
        ------
        UnsupportedError
            The backend cannot measure.
        """
        return self._runtime.profile(q, kv, sm_scale, stream, variant_args)

    def __repr__(self) -> str:
        return f"Attention({self.spec!r}, backend={self.backend!r}, device={str(self.device)!r})"


def attention(
    q: Any,
    kv: Any,
    index: Index,
    spec: AttentionSpec | None = None,
    backend: str | Backend = "auto",
    *,
    return_lse: bool = False,
    sm_scale: float | None = None,
    **variant_args: Any,
) -> Any:
    """One-shot attention: heads, dims and dtypes from the arrays, causal, on the arrays' device.

    It compiles and plans for this call alone; an engine keeps an Attention.

    Parameters
    ----------
    q, kv : as in Attention.run
        kv is a pair (k, v) unless ``spec`` says shared_kv.
    index : from attnrt.formats
    spec : AttentionSpec, optional
        None: read from the arrays, with ``causal()``.
    return_lse, sm_scale, **variant_args : as in Attention.run
    """
    q_view = TensorView(q)
    if spec is None:
        spec = _spec_of(q_view, kv)
    attn = Attention(spec, backend=backend, device=q_view.device)
    # On the stream that run() takes for these arrays, there being more than one framework's perhaps.
    attn.plan(index, stream=None if attn.device.kind == "cpu" else attn._runtime.ops.stream(None, q_view))
    return attn.run(q, kv, return_lse=return_lse, sm_scale=sm_scale, **variant_args)


def _spec_of(q: TensorView, kv: Any) -> AttentionSpec:
    from attnrt.variants import causal

    if not isinstance(kv, (tuple, list)) or len(kv) != 2:
        raise ArgumentError("kv", "must be a pair (k, v) where no spec is given", type(kv).__name__)
    k, v = TensorView(kv[0]), TensorView(kv[1])
    for label, view, axes in (("q", q, (3,)), ("k", k, (3, 4)), ("v", v, (3, 4))):
        if len(view.shape) not in axes:
            raise ArgumentError(label, f"must have {' or '.join(map(str, axes))} axes", list(view.shape))
    return AttentionSpec(
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[2],
        head_dim_vo=v.shape[-1],
        q_dtype=q.dtype,
        kv_dtype=k.dtype,
        variant=causal(),
    )


def warmup(
    specs: Sequence[AttentionSpec],
    limits: Limits | None = None,
    backend: str | Backend = "auto",
    device: Any = None,
) -> None:
    """Compile what ragged and paged indexes of many specs need, in parallel, into the backend's cache.

    Parameters
    ----------
    specs : sequence of AttentionSpec
    limits : Limits, optional
        Checked for each spec as Workspace does; decides which kernel sets are needed.
    """
    if isinstance(specs, AttentionSpec):
        raise DtypeError("specs", "must be a sequence of AttentionSpec", "one AttentionSpec", "Write [spec]")
    work = []
    for i, spec in enumerate(specs):
        if not isinstance(spec, AttentionSpec):
            raise DtypeError(f"specs[{i}]", "must be an AttentionSpec", type(spec).__name__)
        chosen, where = resolve(spec, Features(), device, backend)
        if limits is not None:
            Workspace.nbytes([spec], limits, where, backend=chosen)
        work += [(chosen, spec, f, where) for f in COMMON if not chosen.why_not(spec, f, where)]
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(_warm, *item, limits) for item in work]:
            done.result()


def _warm(
    backend: Backend, spec: AttentionSpec, features: Features, device: Device, limits: Limits | None
) -> None:
    kernel = backend.compile(spec, features, device)
    ahead = getattr(kernel, "prepare", None)  # some backends compile when a plan needs it
    if ahead is not None:
        ahead(None, limits)
