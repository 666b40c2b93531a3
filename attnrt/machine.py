# SPDX-License-Identifier: Apache-2.0
"""What one attention's indexes get: the traits that plans are made with, and the kernels that run them.

Both depend on an index through its features alone and are kept by them; the last ones by identity, because every step asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.dispatch import require, with_mask
from attnrt.errors import ArgumentError, PlanError, UnsupportedError

if TYPE_CHECKING:
    from attnrt.backends.base import Backend, Kernel
    from attnrt.device import Device
    from attnrt.formats.base import Features, Index
    from attnrt.layout import Limits
    from attnrt.scheduler.base import Plan, Traits
    from attnrt.spec import AttentionSpec

__all__ = ["Machine"]


class Machine:
    """A backend on a device, for one spec.

    Parameters
    ----------
    spec : AttentionSpec
    backend : Backend
    device : Device
    limits : Limits or None
    deterministic : str
    """

    def __init__(
        self,
        spec: AttentionSpec,
        backend: Backend,
        device: Device,
        limits: Limits | None,
        deterministic: str,
    ) -> None:
        self.spec, self.backend, self.device = spec, backend, device
        self.limits, self.deterministic = limits, deterministic
        self._kernels: dict[Features, Kernel] = {}
        self._traits: dict[Features, Traits] = {}
        self._planning: dict[Traits, Traits] = {}
        self._recent: tuple[Any, Any] = (None, None)
        self._compiled: tuple[Any, Any] = (None, None)

    def traits(self, features: Features) -> Traits:
        """The backend's traits for an index of these features; raises UnsupportedError if it cannot take them."""
        if features is self._recent[0]:
            return self._recent[1]
        found = self._traits.get(features)
        if found is None:
            require(self.backend, self.spec, features, self.device)
            found = self.backend.traits(self.spec, features, self.device, self.deterministic)
            self._traits[features] = found
        self._recent = (features, found)
        return found

    def planning_traits(self, traits: Traits) -> Traits:
        """The traits within the limits: fewer workers, fewer partial slots."""
        limits = self.limits
        if limits is None:
            return traits
        found = self._planning.get(traits)
        if found is None:
            slots = min(limits.slots(traits), traits.max_partial_slots)
            within = getattr(self.backend, "traits_within", None)  # limits may spare it a kernel
            narrow = limits.narrow(traits if within is None else within(self.spec, traits, limits))
            found = replace(narrow, max_partial_slots=slots)
            self._planning[traits] = found
        return found

    def compile(self, features: Features) -> Kernel:
        """The kernel for an index of these features."""
        found = self._kernels.get(features)
        if found is None:
            spec = with_mask(self.spec) if features.masked else self.spec
            require(self.backend, spec, features, self.device)
            found = self._kernels[features] = self.backend.compile(spec, features, self.device)
        return found

    def prepare(self, features: Features, plan: Plan | None = None) -> Kernel:
        """``compile``, and what a backend puts off until a plan needs it; without a plan: what the limits let plans need."""
        if features is not self._compiled[0]:  # hashing one takes as long as all else here
            self._compiled = (features, self.compile(features))
        kernel = self._compiled[1]
        ahead = getattr(kernel, "prepare", None)
        if ahead is not None and not (plan is None and self.limits is None):
            ahead(plan, self.limits)
        return kernel

    def check_index(self, index: Index) -> None:
        """What an index must have for this spec, beyond its own checks."""
        for part in index.parts:
            if part.heads not in (1, self.spec.num_kv_heads):
                raise ArgumentError(
                    "index",
                    f"must have one list per row or one per KV head ({self.spec.num_kv_heads})",
                    part.heads,
                )
        if len(index.parts) > 1 and self.spec.composed.keys_differ_by_request and _mixes_requests(index):
            raise UnsupportedError(
                "index",
                "must not share keys between requests: a hook on k or v reads ctx.request, qo_len or kv_len",
                index,
                "Plan the flat index",
            )
        if self.spec.composed.reads_index_mask and not any(p.features.masked for p in index.parts):
            raise ArgumentError("index", "must own mask bits for custom_mask()", "an index without a mask")

    def check_plan(self, plan: Plan) -> None:
        """Whether a plan was made for this attention."""
        spec = self.spec
        if plan.spec is not spec and plan.spec != spec:
            raise PlanError("plan", "must be made for this attention's spec", repr(plan.spec))
        own = self.traits(plan.index.features)
        if plan.traits is not own and plan.traits.classes != own.classes:
            raise PlanError(
                "plan",
                f"must be made with the numeric classes of {own.name}",
                plan.traits.name,
                "Use attn.plan(index)",
            )
        if plan.deterministic != self.deterministic:
            raise PlanError(
                "plan", f"must be made for deterministic={self.deterministic!r}", plan.deterministic
            )
        self.check_index(plan.index)


def _mixes_requests(index: Index) -> bool:
    """Whether queries of several requests read one list."""
    for part in index.parts:
        begins = np.repeat(part.qo_indptr[:-1], np.diff(part.qo_indptr))
        if (part.request[: len(begins)] != part.request[begins]).any():
            return True
    return False
