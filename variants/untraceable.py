# SPDX-License-Identifier: Apache-2.0
"""The error for code that cannot become an expression, and the search for the user's line.

A hook is called once, with expression nodes in place of numbers. Whatever asks a node for its value (``if``,
``while``, ``float()``, an unknown function) cannot be answered at that moment, and the error must name the
line of the *user's* function, not the line of ours that noticed it.
"""

from __future__ import annotations

import os
import sys

from attnrt.errors import ArgumentError

__all__ = ["TraceError", "untraceable"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


class TraceError(ArgumentError):
    """A hook holds something that cannot be traced; ``filename`` and ``line`` say where."""

    def __init__(
        self,
        label: str,
        rule: str,
        got: object = None,
        hint: str = "",
        filename: str = "<unknown>",
        line: int = 0,
    ) -> None:
        self.filename = filename
        self.line = line
        super().__init__(f"{filename}:{line}: {label}", rule, got, hint)


def _is_users(filename: str) -> bool:
    """Whether a frame belongs to the user: neither this package nor NumPy's own Python wrappers."""
    inside_numpy = f"{os.sep}numpy{os.sep}" in filename
    return not (os.path.abspath(filename).startswith(_OURS) or inside_numpy)


def untraceable(what: str, hint: str, got: object = None) -> TraceError:
    """Build the error for the innermost frame that is the user's."""
    frame = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    where = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("<unknown>", 0)
    return TraceError(what, "cannot be traced", got, hint, filename=where[0], line=where[1])
