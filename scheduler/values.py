# SPDX-License-Identifier: Apache-2.0
"""Frozen, slotted values made on the hot path.

The ``__init__`` of a frozen dataclass goes through ``object.__setattr__`` for every field, which costs more than all else
that making a plan asks of Python. Its slots' own setters do the same without the detour. For values whose arrays this
package has just made; whatever a user passes goes through ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

__all__ = ["getters", "setters"]


def setters(cls: type) -> tuple[Callable[[Any, Any], None], ...]:
    """Of each field, in order: ``set(value, x)``. Every one must be called on a value from ``object.__new__``."""
    return tuple(cls.__dict__[field.name].__set__ for field in fields(cls))


def getters(cls: type) -> tuple[Callable[[Any], Any], ...]:
    """Of each field, in order: ``get(value)``."""
    return tuple(cls.__dict__[field.name].__get__ for field in fields(cls))
