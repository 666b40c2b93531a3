# SPDX-License-Identifier: Apache-2.0
"""The reference backend: NumPy float64, the same plans, slow and plain. The oracle of plans; "auto" never takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from attnrt.scheduler.base import Traits
from attnrt.scheduler.machines import token_traits, traits_of

if TYPE_CHECKING:
    from attnrt.backends.base import AppendCall, Call, PagedView
    from attnrt.device import Device
    from attnrt.formats.base import Features
    from attnrt.spec import AttentionSpec
    from attnrt.tensor import TensorView

__all__ = ["ReferenceBackend", "load"]


class ReferenceKernel:
    """One spec's kernel: a run reads everything from the call."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def attend(self, call: Call) -> None:
        from attnrt.backends.reference.attend import attend_items

        attend_items(call)

    def merge(self, call: Call) -> None:
        from attnrt.backends.reference.merge import merge_rows

        merge_rows(call)

    def profile(self, call: Call) -> np.ndarray:
        """Run a call and time its items: (worker, start_ns, stop_ns), int64 [items, 3]."""
        from attnrt.backends.reference.attend import attend_items

        clock: list[tuple[int, int]] = []
        attend_items(call, clock)
        self.merge(call)
        times = np.array(clock, np.int64).reshape(-1, 2)
        worker = np.repeat(
            np.arange(len(call.loaded.plan.work.worker_indptr) - 1),
            np.diff(call.loaded.plan.work.worker_indptr),
        )
        first = times[:, 0].min() if len(times) else 0
        return np.column_stack([worker, times - first])

    def copy_pages(
        self, pools: tuple[PagedView, ...], pages: tuple[TensorView, TensorView], stream: int
    ) -> None:
        """Copy pages of K and V to other pages of the same pools."""
        from attnrt.backends.reference.views import cache_array

        source, target = (view.numpy() for view in pages)
        for pool, dim in zip(pools, (self.spec.head_dim, self.spec.head_dim_vo), strict=False):
            cache = cache_array(pool, self.spec.num_kv_heads, dim)
            cache[target] = cache[source]

    def append(self, call: AppendCall) -> None:
        from attnrt.backends.reference.append import append_rows

        append_rows(call)

    def gather(self, call: AppendCall) -> None:
        from attnrt.backends.reference.append import gather_rows

        gather_rows(call)


class ReferenceBackend:
    """NumPy on the CPU: every variant that has a NumPy form, every layout, every dtype, float64 inside."""

    name = "reference"
    partial_itemsize = 8

    def why_not(self, spec: AttentionSpec, features: Features, device: Device) -> tuple[str, ...]:
        reasons = []
        if device.kind != "cpu":
            reasons.append(f"runs on the CPU, not on {device}")
        if spec.composed.texts:
            reasons.append("cannot run C++ text: " + ", ".join(t.label for t in spec.composed.texts))
        return tuple(reasons)

    def traits(
        self, spec: AttentionSpec, features: Features, device: Device, deterministic: str = "batch"
    ) -> Traits:
        traits = replace(traits_of("cpu"), name="reference", num_workers=4)
        return token_traits(traits) if deterministic == "token" else traits

    def compile(self, spec: AttentionSpec, features: Features, device: Device) -> ReferenceKernel:
        return ReferenceKernel(spec)


def load() -> ReferenceBackend:
    """The backend, for the registry."""
    return ReferenceBackend()
