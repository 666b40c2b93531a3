# SPDX-License-Identifier: Apache-2.0
"""What was found for the latest object of a kind, for things that several attentions and threads share."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

__all__ = ["Latest"]

T = TypeVar("T")


class Latest(Generic[T]):
    """One value, under the identity of an object and a key beside it.

    The object is not held: a kernel outlives the workspaces that it runs in, a module the indexes that it has seen, and neither
    must keep their memory. Owner and value are read and written as one, so that a thread never gets what another has put
    meanwhile.
    """

    __slots__ = ("_entry",)

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Any] | None, Any, T | None] = (None, None, None)

    def get(self, owner: object, key: Any = None) -> T | None:
        """The value that was put for the owner and an equal key; None if another has been put since."""
        held, also, value = self._entry
        return value if held is not None and held() is owner and also == key else None

    def put(self, value: T, owner: object, key: Any = None) -> T:
        """Remember a value; returned as it is."""
        self._entry = (weakref.ref(owner), key, value)
        return value
