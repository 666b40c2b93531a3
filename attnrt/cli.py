# SPDX-License-Identifier: Apache-2.0
"""``attnrt COMMAND``: one entry to doctor, plan, bench and generate; each command owns its own options."""

from __future__ import annotations

import importlib
import sys

__all__ = ["main"]

#: Command to (module with ``main(argv) -> int``, what it does).
COMMANDS = {
    "doctor": ("attnrt.doctor", "what can run here, and what is missing"),
    "plan": ("attnrt.scheduler.command", "compare schedulers on recorded lengths"),
    "bench": ("attnrt.bench", "time one batch on the backends of this machine, checked against float64"),
    "generate": ("attnrt.examples.generate", "serve a small language model through the runtime"),
}


def usage() -> str:
    """The help text."""
    import attnrt

    lines = [
        f"attnrt {attnrt.__version__}",
        "",
        "usage: attnrt COMMAND [options]   (attnrt COMMAND --help)",
        "",
    ]
    lines += [f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command; its exit status, or 2 for an unknown one."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] == "--version":
        import attnrt

        print(attnrt.__version__)
        return 0
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] not in COMMANDS:
        print(f"attnrt: there is no command {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[argv[0]][0])
    try:
        return int(module.main(argv[1:]) or 0)
    except BrokenPipeError:  # the reader of our output has gone, as in `attnrt plan ... | head`
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
