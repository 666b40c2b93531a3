# SPDX-License-Identifier: Apache-2.0
"""Which backends there are, and why one cannot take a request."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnrt.errors import ArgumentError
from attnrt.registry import Registry

if TYPE_CHECKING:
    from attnrt.backends.base import Backend
    from attnrt.device import Device
    from attnrt.formats.base import Features
    from attnrt.spec import AttentionSpec

__all__ = ["AUTO", "get", "names", "registry", "status", "why_not"]

#: Entries are functions without arguments that return the Backend; an entry point may name one too.
registry: Registry[Callable[[], Any]] = Registry("backend", "attnrt.backends", functions=True)

#: Order in which backend="auto" asks, by kind of device; names from elsewhere follow. Never "reference".
AUTO: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("nvrtc", "nvcc")}

_MODULES = {
    "reference": "attnrt.backends.reference",
    "cpu": "attnrt.backends.cpu",
    "nvrtc": "attnrt.backends.cuda.nvrtc",
    "nvcc": "attnrt.backends.cuda.nvcc",
}


def _loader(module: str) -> Callable[[], Any]:
    def load() -> Any:
        return importlib.import_module(module).load()

    return load


for _name, _module in _MODULES.items():
    registry.register(_name, _loader(_module))


@functools.cache
def _loaded(name: str) -> Any:
    """The backend of a name, or the reason (str) why it does not load."""
    entry = registry.get(name, "backend")
    try:
        return entry()
    except Exception as error:  # a broken backend breaks nobody but who names it
        return f"does not load: {type(error).__name__}: {error}"


def get(name: str, label: str = "backend") -> Backend:
    """The backend of a name; ``label``: what gave it, for errors.

    Raises
    ------
    ArgumentError
        Unknown (the message lists the known ones), or it does not load.
    """
    registry.get(name, label)
    found = _loaded(name)
    if isinstance(found, str):
        raise ArgumentError(f"backend {name!r}", "must load", found)
    return found


def names() -> tuple[str, ...]:
    """All names, those of entry points included."""
    return registry.names()


def why_not(name: str, spec: AttentionSpec, features: Features, device: Device) -> tuple[str, ...]:
    """Reasons why the backend cannot take it; empty: it can."""
    found = _loaded(name)
    return (found,) if isinstance(found, str) else tuple(found.why_not(spec, features, device))


def status(
    spec: AttentionSpec | None = None, features: Features | None = None, device: Any = None
) -> dict[str, tuple[str, ...]]:
    """Each backend's name with () if it can run, else the reasons why not.

    Parameters
    ----------
    spec : AttentionSpec, optional
        None: a plain float32 layer, so that the reasons are the machine's.
    features : Features, optional
        Of the index (``index.features``); None: those of ``paged``.
    device : device, optional
        None: each backend's own kind.
    """
    from attnrt.device import as_device
    from attnrt.formats.base import Features
    from attnrt.spec import AttentionSpec

    spec = spec or AttentionSpec(num_qo_heads=1, num_kv_heads=1, head_dim=64, q_dtype="float32")
    features = features or Features()
    found = {}
    for name in names():
        kind = "cuda" if name in AUTO["cuda"] else "cpu"
        found[name] = why_not(name, spec, features, as_device(kind if device is None else device))
    return found
