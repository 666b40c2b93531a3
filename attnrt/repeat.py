# SPDX-License-Identifier: Apache-2.0
"""The short way through run(): a call like one before, except for addresses, scale and stream.

The layers of a model bring arrays of one form, step after step. What a form needs (checks, packed arguments, where its framework
keeps the current stream) is found by the first run and kept. There are two short ways. A form that has run under the loaded plan
on the same stream is launched by C code alone (native/repeats.h), which makes no object: a launch costs the driver 4 µs, and a
handful of them would add half of that. ``run_again`` takes what that leaves: the first run after a load, another stream, an out
to be made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnrt.device import stream_handle
from attnrt.operands import Form
from attnrt.results import empty_like_caller
from attnrt.tensor import signature, view

if TYPE_CHECKING:
    from attnrt.backends.base import Call
    from attnrt.runtime import Runtime
    from attnrt.scheduler.base import Plan

__all__ = ["NOT_YET", "Quick", "remember", "run_again"]

#: Answer of run_again where the long way must be taken (which also says what is wrong).
NOT_YET = object()


@dataclass(slots=True, eq=False)
class Quick:
    """A form that has run.

    Attributes
    ----------
    form : Form
    repeat : callable (addresses, sm_scale, stream) -> None, with reload(loaded)
        The backend's packed call.
    current : callable () -> int
        The current stream of q's framework.
    unit : int
        Pages as which a pool of slots was read.
    epoch : int
        The load for which it was last compared with the plan.
    """

    form: Form
    repeat: Any
    current: Callable[[], int]
    unit: int
    epoch: int


def remember(
    runtime: Runtime, key: bytes, done: tuple[Form, Call, Any], arrays: tuple[Any, ...], limit: int
) -> None:
    """Keep what a run has found for the next of its form; frameworks whose results are made anew are left out."""
    form, call, repeat = done
    if form.q.framework == "jax":
        return
    if len(runtime.quick) >= limit:
        runtime.quick.clear()
    current = runtime.ops.current_stream(form.q)
    quick = runtime.quick[key] = Quick(form, repeat, current, runtime.needs.unit, runtime.epoch)
    launch_natively(runtime, quick, arrays, call.stream)


def launch_natively(runtime: Runtime, quick: Quick, arrays: tuple[Any, ...], stream: int) -> None:
    """Let later calls of these arrays' form on this stream go the shortest way, until another plan is loaded."""
    if arrays[3] is None or quick.form.q.device.kind != "cuda":
        return
    extents = tuple(None if x is None else (x.low, x.high) for x in quick.form.extents)
    function, record = quick.repeat.native
    runtime.front.add(
        *(arrays, function, record, extents, runtime.sm_scale),
        *(quick.form.q.device.index, quick.current, quick.repeat, stream),
    )


def run_again(
    runtime: Runtime,
    q: Any,
    kv: Any,
    plan: Plan | None,
    results: tuple[Any, Any, bool],
    sm_scale: float | None,
    stream: Any,
) -> Any:
    """The results of a run without variant arguments, or NOT_YET."""
    out, lse, return_lse = results
    if runtime.shared_kv:
        k, v = kv, None
    elif type(kv) is tuple and len(kv) == 2:
        k, v = kv
    else:
        return NOT_YET
    if (return_lse and lse is None) or (sm_scale is not None and type(sm_scale) is not float):
        return NOT_YET
    found = signature(q, k, v, out, lse)
    if found is None:
        return NOT_YET
    key, addresses = found
    quick, tenant = runtime.quick.get(key), runtime.tenant
    if quick is None or (plan is not None and tenant.loaded.plan is not plan):
        return NOT_YET
    if quick.epoch != runtime.epoch and not _renew(runtime, quick):
        return NOT_YET
    if sm_scale is None:
        sm_scale = runtime.sm_scale
    elif sm_scale - sm_scale != 0.0:  # not finite
        return NOT_YET
    handle = quick.current() if stream is None else stream_handle(stream)
    if (out is not None or lse is not None) and addresses not in quick.form.apart:
        quick.form.check_apart(addresses)
    if out is None:
        if runtime.ops.capturing(handle):
            return NOT_YET
        spec = runtime.spec
        shape = (quick.form.q.shape[0], spec.num_qo_heads, spec.head_dim_vo)
        out = empty_like_caller(quick.form.q, shape, runtime.rules.out_dtype)
        addresses = (*addresses[:3], view(out).ptr, addresses[4])
    if handle not in tenant.ordered:
        runtime.workspace.order_run(tenant, handle)
    tenant.run_stream = handle
    quick.repeat(addresses, sm_scale, handle)
    launch_natively(runtime, quick, (q, k, v, results[0], lse), handle)
    return (out, lse) if return_lse else out


def _renew(runtime: Runtime, quick: Quick) -> bool:
    """Compare a form with a newly loaded plan; raises what the long way would."""
    runtime.check_form(quick.form)
    if quick.unit != runtime.needs.unit and 0 in (quick.form.k.page_size, quick.form.v.page_size):
        return False  # a pool of slots is read in the index's pages
    quick.repeat.reload(runtime.tenant.loaded)
    quick.epoch = runtime.epoch
    return True
