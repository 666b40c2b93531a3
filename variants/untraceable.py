# SPDX-License-Identifier: Apache-2.0
"""The error for code that cannot become an expression, and the search for the user's line.

A hook is called once, with expression nodes in place of numbers. Whatever asks a node for its value (``if``,
``while``, ``float()``, an unknown function) cannot be answered at that moment, and the error must name the
line of the *user's* function, not the line of ours that noticed it.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, NoReturn

from attnrt.errors import ArgumentError

__all__ = ["TraceError", "Untraceable", "untraceable"]

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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    where = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("<unknown>", 0)
    return TraceError(what, "cannot be traced", got, hint, filename=where[0], line=where[1])


_SELECT = "use at.variants.where(condition, a, b), which evaluates both sides and picks one"


class Untraceable:
    """What a traced value cannot answer: each question raises the error with the line and the way out."""

    __slots__ = ()

    def __bool__(self) -> NoReturn:
        raise untraceable(
            "a decision on a traced value (if, while, and, or, not, min, max, in, a chained comparison)",
            _SELECT + "; & | ~ in place of and, or, not; at.variants.minimum and maximum for min and max",
        )

    def __float__(self) -> NoReturn:
        raise untraceable(
            "a call that needs the number behind a traced value (math.*, float())",
            "use the function of the same name in at.variants (exp, log, tanh, sqrt, floor, ...) or to_float",
        )

    def __int__(self) -> NoReturn:
        raise untraceable("int() of a traced value", "use at.variants.to_int")

    def __round__(self, *_: object) -> NoReturn:
        raise untraceable("round() of a traced value", "use at.variants.floor(x + 0.5)")

    def __trunc__(self) -> NoReturn:
        raise untraceable("math.trunc() of a traced value", "use at.variants.to_int")

    def __divmod__(self, _: object) -> NoReturn:
        raise untraceable("divmod() of a traced value", "use // and %")

    __rdivmod__ = __divmod__

    def __index__(self) -> NoReturn:
        raise untraceable(
            "an array or range indexed by a traced value",
            "make the array a parameter of the hook (def f(score, ctx, *, table)), then index it",
        )

    def __iter__(self) -> NoReturn:
        raise untraceable("a loop over a traced value", "write the terms out, or index a parameter array")

    def __len__(self) -> NoReturn:
        raise untraceable("len() of a traced value", "pass the length as a parameter")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise untraceable(
            "a NumPy call on a traced value, or an array indexed by one",
            "use NumPy's elementwise functions or at.variants.*; make the array a parameter of the hook",
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise untraceable(f"the attribute .{name} of a traced value", "a traced value is a plain number")
