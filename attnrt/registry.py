# SPDX-License-Identifier: Apache-2.0
"""Names for things that others may add: formats, schedulers, variants, backends."""

from __future__ import annotations

import difflib
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, overload

from attnrt.errors import ArgumentError, DtypeError

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named objects, filled by calls and by the entry points of installed packages.

    Entry points are looked up when a name is not known or all names are asked for, and an entry is imported
    only when its name is asked for: a broken plug-in breaks nobody but who names it.

    Parameters
    ----------
    kind : str
        What the entries are, for messages ("scheduler").
    group : str, optional
        Entry point group ("attnrt.schedulers").
    functions : bool
        Entries registered by a call must be callable, and their names identifiers.
    """

    def __init__(self, kind: str, group: str | None = None, *, functions: bool = False) -> None:
        self.kind = kind
        self.functions = functions
        self.group = group
        self._entries: dict[str, T] = {}
        self._points: dict[str, importlib.metadata.EntryPoint] | None = None
        self._lock = threading.RLock()

    @overload
    def register(self, name: str) -> Callable[[T], T]: ...
    @overload
    def register(self, name: str, entry: T) -> T: ...

    def register(self, name: str, entry: T | None = None) -> T | Callable[[T], T]:
        """Add an entry; ``@registry.register("name")`` decorates one.

        Raises
        ------
        ArgumentError
            The name is empty, taken by another entry or, of a function, no identifier.
        DtypeError
            The entry must be callable and is not.
        """
        self.check_name(name)
        if entry is None:
            return lambda decorated: self.register(name, decorated)
        self.check_entry(entry)
        with self._lock:
            if self._entries.get(name, entry) is not entry or name in (self._points or ()):
                raise ArgumentError(
                    f"{self.kind} name", "must not be taken", repr(name), f"Known: {', '.join(self.names())}"
                )
            self._entries[name] = entry
        return entry

    def check_name(self, name: object) -> None:
        """Raise unless an entry could have this name."""
        if not isinstance(name, str) or not name:
            raise ArgumentError("name", "must be a non-empty string", repr(name))
        if self.functions and not name.isidentifier():
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise ArgumentError(
                "name", "must be an identifier", repr(name), f"It names {article} {self.kind}"
            )

    def check_entry(self, entry: object) -> None:
        """Raise unless this could be an entry."""
        if self.functions and not callable(entry):
            raise DtypeError(self.kind, "must be callable", type(entry).__name__)

    def get(self, name: str, label: str = "") -> T:
        """The entry of a name.

        Raises
        ------
        ArgumentError
            The name is unknown (the message lists the known ones), taken twice, or its entry point does not
            load.
        """
        found = self._entries.get(name)
        if found is not None:
            return found
        with self._lock:
            point = self._entry_points().get(name)
            if point is None:
                raise ArgumentError(
                    label or self.kind,
                    "must be a known name",
                    repr(name),
                    f"Known: {', '.join(self.names())}",
                )
            try:
                found = point.load()
            except Exception as error:
                raise ArgumentError(
                    f"{self.kind} {name!r}",
                    f"must load from its entry point {point.value!r}",
                    f"{type(error).__name__}: {error}",
                ) from error
            self._entries[name] = found
            return found

    def meant(self, name: str) -> str:
        """``". Did you mean ...?"``, or the known names, to end an error about an unknown one."""
        near = difflib.get_close_matches(name, self.names(), 1)
        return f". Did you mean {near[0]!r}?" if near else f". Known: {', '.join(self.names())}"

    def names(self) -> tuple[str, ...]:
        """All names, sorted, those of entry points included."""
        return tuple(sorted({*self._entries, *self._entry_points()}))

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._entry_points()

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        with self._lock:
            if self._points is None:
                points: dict[str, importlib.metadata.EntryPoint] = {}
                for point in importlib.metadata.entry_points(group=self.group) if self.group else ():
                    if points.get(point.name, point).value != point.value or point.name in self._entries:
                        other = "attnrt" if point.name in self._entries else points[point.name].value
                        raise ArgumentError(
                            f"{self.kind} name",
                            "must not be taken twice",
                            f"{point.name!r} by {point.value} and {other}",
                            "Uninstall one of the two packages",
                        )
                    points[point.name] = point
                self._points = points
            return self._points
