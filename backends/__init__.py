# SPDX-License-Identifier: Apache-2.0
"""Backends: ways to run a plan. ``status()`` says which can run here, and why the others cannot."""

from __future__ import annotations

from attnrt.backends.base import AppendCall, Backend, Call, Kernel, Loaded, PagedView, PartViews
from attnrt.backends.status import get, names, registry, status
from attnrt.scheduler.base import Traits

__all__ = [
    "AppendCall",
    "Backend",
    "Call",
    "Kernel",
    "Loaded",
    "PagedView",
    "PartViews",
    "Traits",
    "get",
    "names",
    "register",
    "registry",
    "status",
]

register = registry.register
