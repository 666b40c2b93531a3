# SPDX-License-Identifier: Apache-2.0
"""attnrt: attention over any KV-cache layout. Index builders, plans, pluggable backends; see docs/design.md.

Names are loaded when first used, so that ``import attnrt`` costs next to nothing and needs no GPU, compiler
or framework.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "errors": (
        *("ArgumentError", "AttnrtError", "CaptureError", "CompileError", "DtypeError"),
        *("LimitError", "PlanError", "UnsupportedError"),
    ),
    "config": ("Config",),
    "dtypes": ("Dtype",),
    "device": ("Device",),
    "tensor": ("TensorView", "empty", "kv_interleaved"),
    "merge": ("merge_state", "merge_states"),
    "spec": ("AttentionSpec",),
    "workspace": ("Limits", "Workspace"),
    "scheduler": ("Traits", "make_plan"),
    "api": ("Attention", "attention", "warmup"),
}
_MODULES = (
    *("backends", "checks", "config", "device", "dtypes", "errors", "fold", "formats", "merge", "registry"),
    *("scheduler", "tensor", "testing", "variants"),
)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604 - the names are strings, from the table above
    "__version__",
    *sorted(_HOME_OF),
    *("backends", "errors", "formats", "scheduler", "variants"),
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f"attnrt.{home}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"attnrt.{name}")
    raise AttributeError(f"module 'attnrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
