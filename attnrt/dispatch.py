# SPDX-License-Identifier: Apache-2.0
"""Which backend and device take a spec, and what of a plan decides the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnrt.backends.status import AUTO, get, names, why_not
from attnrt.config import config
from attnrt.device import CPU, Device, as_device
from attnrt.errors import ArgumentError, UnsupportedError
from attnrt.formats.composite import features_of
from attnrt.log import logger

if TYPE_CHECKING:
    from attnrt.backends.base import Backend
    from attnrt.formats.base import Features
    from attnrt.scheduler.base import Plan
    from attnrt.spec import AttentionSpec

__all__ = ["features_of_plan", "require", "resolve", "with_mask"]


def resolve(
    spec: AttentionSpec, features: Features, device: Any = None, backend: str | Backend = "auto"
) -> tuple[Backend, Device]:
    """The backend and the device.

    Parameters
    ----------
    device : device or None
        None: the current CUDA device if a CUDA backend can take the spec, else the CPU.
    backend : str or Backend
        "auto": the first backend of the device without a reason (never "reference", never another device).

    Raises
    ------
    UnsupportedError
        None can; ``reasons`` has each backend's.
    ArgumentError
        Unknown name or device.
    """
    if not isinstance(backend, str):
        if not hasattr(backend, "compile"):
            raise ArgumentError("backend", 'must be "auto", a name or a Backend', type(backend).__name__)
        where = as_device(device) if device is not None else _own_device(backend)
        require(backend, spec, features, where)
        return backend, where
    name = (config().backend or backend) if backend == "auto" else backend
    if name != "auto":
        found = get(name, "backend" if name == backend else "ATTNRT_BACKEND")
        where = as_device(device) if device is not None else _own_device(found)
        require(found, spec, features, where)
        return found, where
    return _auto(spec, features, device)


def require(backend: Backend, spec: AttentionSpec, features: Features, device: Device) -> None:
    """Raise UnsupportedError with the backend's reasons if it cannot take it."""
    reasons = tuple(backend.why_not(spec, features, device))
    if reasons:
        raise UnsupportedError(
            f"backend {backend.name!r}",
            f"must be able to run this on {device}",
            reasons={backend.name: reasons},
        )


def _own_device(backend: Any) -> Device:
    """Where a backend runs if nobody says: its current device, else the CPU."""
    current = getattr(backend, "current_device", None)
    found = None if current is None else current()
    return CPU if found is None else found


def _auto(spec: AttentionSpec, features: Features, device: Any) -> tuple[Backend, Device]:
    reasons: dict[str, tuple[str, ...]] = {}
    if device is None:
        places = [*_cuda_places(reasons), CPU]
    else:
        places = [as_device(device)]
    for where in places:
        for name in _candidates(where):
            why = why_not(name, spec, features, where)
            if not why:
                logger().info("backend='auto' takes %s on %s", name, where)
                return get(name), where
            logger().debug("backend='auto' passes %s by on %s: %s", name, where, "; ".join(why))
            reasons[name] = why
    raise UnsupportedError(
        "backend='auto'", f"must find a backend for {' or '.join(str(p) for p in places)}", reasons=reasons
    )


def _cuda_places(reasons: dict[str, tuple[str, ...]]) -> list[Device]:
    """The current CUDA device, as the first CUDA backend that loads sees it."""
    for name in AUTO["cuda"]:
        try:
            where = _own_device(get(name))
        except ArgumentError as error:
            reasons[name] = (str(error.got),)
            continue
        if where.kind == "cuda":
            return [where]
        reasons[name] = ("no CUDA device",)
    return []


def _candidates(device: Device) -> list[str]:
    first = AUTO.get(device.kind, ())
    known = {name for group in AUTO.values() for name in group} | {"reference"}
    return [*first, *(name for name in names() if name not in known)]


def with_mask(spec: AttentionSpec) -> AttentionSpec:
    """The spec whose kernels read the mask bits of an index: an index that owns bits is never read without them, whether or not
    the variant says custom_mask()."""
    composed = spec.variant
    if composed.reads_index_mask:
        return spec
    return replace(spec, variant=composed.with_index_mask())


def features_of_plan(plan: Plan) -> Features:
    """Features of what the kernels read: the index's, unless its cuts were moved to leaf boundaries."""
    parts, index = plan.parts, plan.index
    if len(parts) == 1 and parts[0] is index:
        return index.features
    if len(parts) == len(index.parts) and all(a is b for a, b in zip(parts, index.parts, strict=True)):
        return index.features
    return features_of(parts)
