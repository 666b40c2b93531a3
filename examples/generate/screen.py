# SPDX-License-Identifier: Apache-2.0
"""Text as it comes: a live table where rich and a terminal are there, plain lines anywhere else."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TextIO

from .sequence import Sequence


class Screen(Protocol):
    """Where streamed text goes. Calls come in the order text*, done per sequence, then end, then close."""

    def text(self, seq: Sequence, title: str, new: str) -> None:
        """Show new text of `seq`."""

    def done(self, seq: Sequence, title: str, answer: str) -> None:
        """Show that `seq` is complete; `answer` is all of its text."""

    def end(self, rows: list[tuple[str, str]]) -> None:
        """Show the summary."""

    def close(self) -> None:
        """Give the terminal back, whatever has happened; may be called again."""


class Silent:
    """Shows nothing (--json)."""

    def text(self, seq: Sequence, title: str, new: str) -> None: ...

    def done(self, seq: Sequence, title: str, answer: str) -> None: ...

    def end(self, rows: list[tuple[str, str]]) -> None: ...

    def close(self) -> None: ...


class Plain:
    """Lines with the sequence's number before them; with one sequence alone, the text as it comes."""

    def __init__(self, out: TextIO, *, alone: bool) -> None:
        self._out, self._alone = out, alone
        self._held: dict[Sequence, str] = {}

    def text(self, seq: Sequence, title: str, new: str) -> None:
        if self._alone:
            self._out.write(new)
        else:
            held = self._held.get(seq, "") + new
            *whole, held = held.split("\n")
            for line in whole:
                self._out.write(f"{label(seq)} {line}\n")
            self._held[seq] = held
        self._out.flush()

    def done(self, seq: Sequence, title: str, answer: str) -> None:
        held = self._held.pop(seq, "")
        if self._alone:
            self._out.write("\n")
        elif held:
            self._out.write(f"{label(seq)} {held}\n")
        self._out.flush()

    def end(self, rows: list[tuple[str, str]]) -> None:
        self._out.write("\n")
        for name, value in rows:
            self._out.write(f"{name + ':':<11}{value}\n")
        self._out.flush()

    def close(self) -> None:
        self._out.flush()


class Rich:
    """A table of the sequences that run, with the end of their text; finished answers scroll away above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._tails: dict[Sequence, tuple[str, str]] = {}
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def text(self, seq: Sequence, title: str, new: str) -> None:
        before = self._tails.get(seq, (title, ""))[1]
        self._tails[seq] = (title, (before + new)[-400:])
        self._refresh()

    def done(self, seq: Sequence, title: str, answer: str) -> None:
        from rich.text import Text

        self._tails.pop(seq, None)
        heading = Text.assemble((f"{label(seq)} ", "bold cyan"), (_cut(title, 100), "bold"))
        self._console.print(heading)
        self._console.print(Text(answer.strip()))
        self._console.print()
        self._refresh()

    def end(self, rows: list[tuple[str, str]]) -> None:
        from rich.table import Table

        self.close()
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in rows:
            table.add_row(f"[bold]{name}[/]", value)
        self._console.print(table)

    def close(self) -> None:
        self._live.stop()

    def _refresh(self) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False, box=None, padding=(0, 1), expand=True)
        table.add_column(width=7)
        table.add_column(ratio=1, no_wrap=True)
        table.add_column(ratio=2, no_wrap=True)
        for seq, (title, tail) in self._tails.items():
            width = max(self._console.width * 2 // 3 - 10, 20)
            shown = " ".join(tail.split())[-width:]
            table.add_row(Text(label(seq), "cyan"), Text(_cut(title, 60), "dim"), Text(shown))
        self._live.update(table, refresh=True)


def label(seq: Sequence) -> str:
    """Return the sequence's short name: [request] or [request.sample]."""
    return f"[{seq.request.id}.{seq.sample}]" if seq.request.samples > 1 else f"[{seq.request.id}]"


def make_screen(*, quiet: bool, alone: bool) -> Screen:
    """Choose by what is there: nothing if `quiet`, rich on a terminal that has it, plain lines otherwise."""
    if quiet:
        return Silent()
    if sys.stdout.isatty() and not alone:
        try:
            return Rich()
        except ImportError:
            pass
    return Plain(sys.stdout, alone=alone)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def print_json(value: Any) -> None:
    """Write one JSON document to standard output."""
    import json

    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")
