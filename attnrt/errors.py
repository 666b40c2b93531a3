# SPDX-License-Identifier: Apache-2.0
"""The errors attnrt raises on a user's mistake, a limit or a missing capability.

Each error says four things in fixed fields, so that a program can react to them and a person can read them:
``label`` (the argument or array), ``rule`` (what must hold), ``got`` (what was found) and ``hint`` (the mend).
Our own bugs are ``assert`` failures, never one of these.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "AttnrtError",
    "CaptureError",
    "CompileError",
    "DtypeError",
    "LimitError",
    "PlanError",
    "UnsupportedError",
]


class AttnrtError(Exception):
    """Base of every error that attnrt raises on purpose.

    Parameters
    ----------
    label : str
        The argument, array or feature the error is about.
    rule : str
        What must hold, as a clause that follows the label ("must be int32").
    got : object, optional
        What was found; rendered with ``str``.
    hint : str, optional
        How to mend it.
    """

    def __init__(self, label: str, rule: str, got: object = None, hint: str = "") -> None:
        self.label = label
        self.rule = rule
        self.got = got
        self.hint = hint
        text = f"{label} {rule}"
        if got is not None:
            text += f"; got {got}"
        if hint:
            text += f". {hint}"
        super().__init__(text)


class ArgumentError(AttnrtError, ValueError):
    """A value, shape, length or range is wrong."""


class DtypeError(AttnrtError, TypeError):
    """An array or a name has the wrong dtype."""


class UnsupportedError(AttnrtError, NotImplementedError):
    """No backend can take the request; ``reasons`` maps each backend to why not."""

    def __init__(
        self,
        label: str,
        rule: str,
        got: object = None,
        hint: str = "",
        reasons: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.reasons = dict(reasons or {})
        super().__init__(label, rule, got, hint)
        if self.reasons:
            lines = "".join(f"\n  {name}: {'; '.join(why)}" for name, why in self.reasons.items())
            self.args = (str(self.args[0]) + lines,)


class LimitError(AttnrtError):
    """A plan or a buffer passes a limit that the user promised; nothing was written.

    ``limit`` is the name of the limit, ``needed`` and ``given`` its two numbers.
    """

    def __init__(self, limit: str, needed: int, given: int, hint: str = "") -> None:
        self.limit = limit
        self.needed = needed
        self.given = given
        super().__init__(limit, f"must be at {'least' if needed > given else 'most'} {needed}", given, hint)


class PlanError(AttnrtError):
    """A plan is missing, not loaded, or does not fit what it is used with."""


class CaptureError(AttnrtError):
    """A call inside a stream capture would allocate, synchronise or compile."""


class CompileError(AttnrtError):
    """A kernel did not compile; ``log`` is the compiler's text, ``line`` the line of the user's text if known."""

    def __init__(
        self,
        label: str,
        rule: str,
        got: object = None,
        hint: str = "",
        log: str = "",
        line: int | None = None,
    ) -> None:
        self.log = log
        self.line = line
        super().__init__(label, rule, got, hint)
