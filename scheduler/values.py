# SPDX-License-Identifier: Apache-2.0
"""Frozen, slotted values made on the hot path.

The ``__init__`` of a frozen dataclass goes through ``object.__setattr__`` field by field, which for the values of one plan
costs more than all else that planning asks of Python. A twin has the same slots and is not frozen: fill in every field, then
make it the frozen class by setting ``__class__``, which Python allows between classes of one layout. Only for values that this
package has just made; what a user passes goes through ``__init__``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

__all__ = ["twin"]


def twin(cls: type) -> Any:
    """An open class with the slots of a frozen, slotted dataclass; its bases, if it has any, are slots alone."""
    bases = tuple(base for base in cls.__bases__ if base is not object)
    return type(f"Open{cls.__name__}", bases, {"__slots__": tuple(field.name for field in fields(cls))})
