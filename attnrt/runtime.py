# SPDX-License-Identifier: Apache-2.0
"""One attention at work: kernels, the loaded plan, and the path of a run from the caller's arrays to the backend.

The path of a run is straight-line code, because it is paid by every layer of every step: one crossing into C reads all arrays
(``signature``), one look-up finds the checked form of them, one comparison of integers ties the form to the loaded plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.arguments import check_capture, check_is_plan, param_of, placer, scale_of
from attnrt.backends.base import Call
from attnrt.checks import flag
from attnrt.device import Device
from attnrt.dispatch import features_of_plan
from attnrt.errors import ArgumentError, CaptureError, PlanError, UnsupportedError
from attnrt.formats.base import Features
from attnrt.loading import Uploads
from attnrt.machine import Machine
from attnrt.operands import REMEMBER, Form, Needs, Rules, at, read_form, slow_signature, split_kv
from attnrt.repeat import NOT_YET, Quick, remember, run_again
from attnrt.results import empty_like_caller, to_caller
from attnrt.step import Stepper
from attnrt.tensor import TensorView, native, signature, view

if TYPE_CHECKING:
    from attnrt.backends.base import Backend, Kernel
    from attnrt.formats.base import Index
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec
    from attnrt.workspace import Tenant, Workspace

__all__ = ["Runtime"]


class Runtime:
    """The state of one Attention below its public surface.

    Parameters
    ----------
    spec : AttentionSpec
    backend : Backend
    device : Device
    workspace : Workspace
    deterministic : str
    """

    def __init__(
        self, spec: AttentionSpec, backend: Backend, device: Device, workspace: Workspace, deterministic: str
    ) -> None:
        self.spec, self.backend, self.device = spec, backend, device
        self.workspace, self.ops, self.lock = workspace, workspace.ops, workspace.lock
        self.tenant: Tenant = workspace.seat(spec)
        self.deterministic = deterministic
        self.machine = Machine(spec, backend, device, workspace.limits, deterministic)
        self.rules = Rules.of(spec, device)
        self.host = workspace.ops.direct
        self.kernel: Any = None  # the loaded plan's Kernel
        self._forms: dict[Any, Form] = {}
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._defaults: Any = None
        self.needs: Any = None  # the loaded plan's Needs
        self._own_slots: tuple[Plan, Any] | None = None
        self.epoch = 0
        self.quick: dict[bytes, Quick] = {}
        self.shared_kv, self.sm_scale = spec.shared_kv, spec.sm_scale
        self._key: bytes | None = None
        self.front = native.Repeats(self.lock.acquire, self.lock.release, spec.shared_kv, True)
        self.appends = native.Repeats(self.lock.acquire, self.lock.release, spec.shared_kv, False)
        self._uploads = Uploads(self.ops, device)
        #: Slots of the smallest pool of the forms that were compared with the loaded plan.
        self.capacity = float("inf")
        self.stepper = Stepper.of(self)

    # ------------------------------------------------------------------------------------------- plans

    def load(self, plan: Plan, stream: Any, own: bool = False) -> None:
        """Load a plan; see Attention.load. ``own``: this attention has just made it."""
        if not own:
            check_is_plan(plan)
            self.machine.check_plan(plan)
        handle = self.ops.stream(stream)
        if self.workspace.limits is not None:
            self.workspace.limits.check(plan, self.tenant.traits)
        kernel = self.machine.prepare(features_of_plan(plan), plan)
        if not self.lock.acquire(blocking=False):
            raise _busy("load")
        try:
            if self.stepper is not None:
                self.stepper.pause()  # whatever comes of it: memory may move before a load fails
            self.workspace.load(self.tenant, plan, kernel, handle)
            if kernel is not self.kernel:
                self.quick.clear()
            self.kernel = kernel
            self.needs = Needs.of(plan)
            self.front.begin(plan)
            self.appends.begin(plan)
            self._forget_forms()
        finally:
            self.lock.release()

    def step(self, index: Index, scheduler: Any, stream: Any) -> Plan | None:
        """Plan and load by one call, where that is possible; None: nothing was done (step.py)."""
        stepper = self.stepper
        if stepper is None or self.kernel is None:
            return None
        handle = self.ops.stream(stream)
        if not self.lock.acquire(blocking=False):
            raise _busy("load")
        try:
            return stepper.step(index, scheduler, handle)
        finally:
            self.lock.release()

    def follow(self, plan: Plan, needs: Needs, same: bool) -> None:
        """A plan was loaded by the stepper; ``same``: all that runs remember holds for it, too."""
        self.needs = needs
        self.appends.begin(plan)
        if same:
            self.front.follow(plan)
            self._calls.clear()
        else:
            self.front.begin(plan)
            self._forget_forms()

    def _forget_forms(self) -> None:
        """No form has been compared with the plan that is loaded now."""
        self.epoch += 1
        self.capacity = float("inf")
        self._calls.clear()

    def check_form(self, form: Form) -> None:
        """Compare a form with the loaded plan."""
        form.check(self.needs)
        self.capacity = min(self.capacity, form.k.slots)

    # ------------------------------------------------------------------------------------------- runs

    def run(
        self,
        q: Any,
        kv: Any,
        plan: Plan | None,
        results: tuple[Any, Any, bool],
        sm_scale: float | None,
        stream: Any,
        params: dict[str, Any],
    ) -> Any:
        """See Attention.run; ``results`` is (out, lse, return_lse)."""
        if not self.lock.acquire(blocking=False):
            raise _busy("run")
        try:
            if self.quick and not params:
                done = run_again(self, q, kv, plan, results, sm_scale, stream)
                if done is not NOT_YET:
                    return done
            call, out, lse, alive = self._call(q, kv, plan, results, sm_scale, stream, params)
            if call.q.framework == "jax":
                for array in alive:  # JAX works on streams that it does not show
                    getattr(array, "block_until_ready", int)()
            self._launch(call, alive if not params and (lse is None or results[1] is not None) else None)
            if call.q.framework == "jax":
                self.ops.synchronize(call.stream)
                out, lse = to_caller(out, "jax"), None if lse is None else to_caller(lse, "jax")
            return (out, lse) if results[2] else out
        finally:
            self.lock.release()

    def profile(self, q: Any, kv: Any, sm_scale: float | None, stream: Any, params: dict[str, Any]) -> Any:
        """See Attention.profile."""
        measure: Any = getattr(self.kernel, "profile", None)
        if self.kernel is not None and measure is None:
            why: dict[str, tuple[str, ...]] = {self.backend.name: ("cannot time single items",)}
            raise UnsupportedError("profile", "needs a backend that measures", reasons=why)
        if not self.lock.acquire(blocking=False):
            raise _busy("profile")
        try:
            call, *_alive = self._call(q, kv, None, (None, None, False), sm_scale, stream, params)
            return measure(call)
        finally:
            self.lock.release()

    def _call(
        self,
        q: Any,
        kv: Any,
        plan: Plan | None,
        results: tuple[Any, Any, bool],
        sm_scale: float | None,
        stream: Any,
        params: dict[str, Any],
    ) -> tuple[Call, Any, Any, tuple[Any, ...]]:
        """The checked call, out and lse as the caller gets them, and what keeps memory alive."""
        out, lse, return_lse = results
        if return_lse.__class__ is not bool:
            return_lse = flag(return_lse, "return_lse")
        spec = self.spec
        loaded = self.tenant.loaded
        if loaded is None or (plan is not None and loaded.plan is not plan):
            if plan is not None:
                check_is_plan(plan)
            raise _not_loaded(plan)
        want_lse = return_lse or lse is not None
        if want_lse and not spec.variant.use_softmax:
            raise ArgumentError(
                "lse", "must not be asked of a softmax-free variant", None, "Its partial results add"
            )
        k, v = split_kv(spec, kv)
        scale = spec.sm_scale if sm_scale is None else scale_of(sm_scale)
        form, ptrs, owners = self._form(q, k, v, out, lse)
        if form.epoch != self.epoch:
            self.check_form(form)
            form.epoch = self.epoch
        handle = 0 if self.host and stream is None else self.ops.stream(stream, form.q)
        capturing = not self.host and self.ops.capturing(handle)
        if capturing:
            check_capture(self.workspace.limits, out, lse, return_lse)
        defaults = self._defaults if not params else None
        table = self._bind(params, capturing) if defaults is None else defaults
        out_ptr, lse_ptr = ptrs[3], ptrs[4]
        if out is None:
            shape = (form.q.shape[0], spec.num_qo_heads, spec.head_dim_vo)
            out = empty_like_caller(form.q, shape, self.rules.out_dtype)
            out_ptr = view(out).ptr
        if lse is None and want_lse:
            lse = empty_like_caller(form.q, (form.q.shape[0], spec.num_qo_heads), self.rules.lse_dtype)
            lse_ptr = view(lse).ptr
        key = (form, ptrs[0], ptrs[1], ptrs[2], out_ptr, lse_ptr, want_lse, scale, handle, table)
        call = self._calls.get(key)
        if call is None:
            if form.out is not None or form.lse is not None:
                form.check_apart(ptrs)
            call = self._new_call(
                form, (*ptrs[:3], out_ptr, lse_ptr if want_lse else None), table, scale, handle
            )
            if len(self._calls) >= REMEMBER:
                self._calls.clear()
            if not params:  # other tables are made for one run
                self._calls[key] = call
        return call, out, lse, owners

    def _new_call(self, form: Form, ptrs: tuple[Any, ...], table: Any, scale: float, handle: int) -> Call:
        """The record a backend gets. It owns no array: the caller's live through the run, and a remembered call keeps none."""
        spec, size = self.spec, self.needs.unit
        q, k, v, out, lse = ptrs
        k_view = form.k.view(k, size, None)
        return Call(
            loaded=self.tenant.loaded,
            q=at(form.q, q, None),
            k=k_view,
            v=k_view if spec.shared_kv else form.v.view(v, size, None),
            out=form.result(out, form.out, (spec.num_qo_heads, spec.head_dim_vo), self.rules.out_dtype),
            lse=None
            if lse is None
            else form.result(lse, form.lse, (spec.num_qo_heads,), self.rules.lse_dtype),
            params=table,
            sm_scale=scale,
            stream=handle,
        )

    def _form(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any
    ) -> tuple[Form, tuple[int, ...], tuple[Any, ...]]:
        """The checked form of a run's arrays, their addresses, and what keeps them alive."""
        arrays = (q, k, v, out, lse)
        found: Any = signature(*arrays)
        if found is None:  # some array is not plainly readable, or is a view already
            found, arrays = slow_signature(self.rules, arrays)
        key, ptrs = found
        self._key = key if type(key) is bytes else None
        known = self._forms.get(key)
        if known is None:
            known = read_form(self.rules, *arrays)
            if len(self._forms) >= REMEMBER:
                self._forms.clear()
            self._forms[key] = known
        return known, ptrs, arrays

    def _launch(self, call: Call, again: tuple[Any, ...] | None) -> None:
        """Enqueue; ``again``: the arrays, if later calls of their form need not come this way (repeat.py)."""
        kernel, loaded, tenant, handle = self.kernel, call.loaded, self.tenant, call.stream
        if self.host:
            if loaded.work.shape[0]:
                kernel.attend(call)
            if loaded.merge_rows.shape[0]:
                kernel.merge(call)
            return
        if handle not in tenant.ordered:
            self.workspace.order_run(tenant, handle)
        tenant.run_stream = handle
        packer = getattr(kernel, "repeat", None)
        if packer is None:  # a graph must launch even for nothing: its next plan may have work
            kernel.attend(call)
            kernel.merge(call)
            return
        repeat = packer(call, self.workspace.limits)
        lse = 0 if call.lse is None else call.lse.ptr
        repeat((call.q.ptr, call.k.ptr, call.v.ptr, call.out.ptr, lse), call.sm_scale, handle)
        if again is not None and self._key is not None:
            remember(self, self._key, (self._forms[self._key], call, repeat), again, REMEMBER)

    def _bind(self, params: dict[str, Any], capturing: bool = False) -> Any:
        """The variant's parameter table; the defaults' table is kept."""
        spec = self.spec
        composed = spec.variant
        wider = composed.widened_by(params)
        if wider:
            planned = ", ".join(f"{name} {composed.param(name).default}" for name in wider)
            rule = f"must not let a query see more than the plan does ({planned})"
            raise PlanError(wider[0], rule, params[wider[0]], "Give the spec's variant the widest")
        values = {name: param_of(self.device, name, value) for name, value in params.items()}
        place = placer(self.kernel, capturing)
        table = composed.bind(
            values, num_qo_heads=spec.num_qo_heads, num_kv_heads=spec.num_kv_heads, place=place
        )
        if not params:
            self._defaults = table
        return table

    # ------------------------------------------------------------------------------------------- append

    def append(
        self, k: Any, v: Any, kv: Any, slots: Any, rope: Any, stream: Any, params: dict[str, Any]
    ) -> None:
        """See Attention.append."""
        from attnrt.append import append

        self._alone(append, k, v, kv, slots, rope, stream, params)

    def gather(self, kv: Any, slots: Any, k: Any, v: Any, rope: Any, positions: Any, stream: Any) -> None:
        """See Attention.gather."""
        from attnrt.gather import gather

        self._alone(gather, kv, slots, k, v, rope, positions, stream)

    def copy_pages(self, kv: Any, source: Any, target: Any, stream: Any) -> None:
        """See Attention.copy_pages."""
        from attnrt.append import copy_pages

        self._alone(copy_pages, kv, source, target, stream)

    def _alone(self, act: Callable[..., None], *arguments: Any) -> None:
        """Such a call on rows of a cache, while nobody else uses the workspace."""
        if not self.lock.acquire(blocking=False):
            raise _busy(act.__name__)
        try:
            act(self, *arguments)
        finally:
            self.lock.release()

    def any_kernel(self) -> Kernel:
        """A kernel that appends: the loaded plan's, else the one of paged indexes."""
        return self.kernel if self.kernel is not None else self.machine.compile(Features())

    def append_slots(self, plan: Plan) -> tuple[np.ndarray | None, np.ndarray]:
        """Slots and positions of the plan's queries (append.slots_of), found once per plan."""
        from attnrt.append import slots_of

        if self._own_slots is None or self._own_slots[0] is not plan:
            self._own_slots = (plan, slots_of(plan))
            for array in self._own_slots[1]:
                if array is not None:
                    array.flags.writeable = False  # so that it is sent to a device once
        return self._own_slots[1]

    def on_device(self, array: np.ndarray, stream: int, place: int = 0) -> TensorView:
        """A small host array where kernels can read it; arrays that a kernel reads together have different places."""
        if self.host:
            return view(array)
        if self.ops.capturing(stream):
            hint = "append(slots=) of a device array, without rope, is captured"
            raise CaptureError("arrays of the host", "must not be copied inside a capture", None, hint)
        before = self._uploads.sent
        found = self._uploads.bring(array, stream, place)
        if self._uploads.sent != before:  # other slots lie there now than those that remembered appends read
            self.appends.begin(None)
        return found


def _busy(what: str) -> PlanError:
    return PlanError(
        "attention",
        "must be used by one thread at a time",
        f"{what}() inside another call",
        "One Attention per thread",
    )


def _not_loaded(plan: Plan | None) -> PlanError:
    if plan is None:
        return PlanError("plan", "must be loaded before a run", None, "attn.plan(index) loads it")
    return PlanError("plan", "must be the loaded one", "another plan", "attn.load(plan)")
