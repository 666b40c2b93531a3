# SPDX-License-Identifier: Apache-2.0
"""One kernel out of several programs in PTX, each of which holds one role of its warps (kernels/roles.cuh).

Of a compiler's time more than half goes by until there is PTX, and roles are compiled at the same time; what is left is assembled
once, as a whole: a kernel has one budget of registers, and ptxas ignores setmaxnreg where it cannot see all of a kernel. The
bodies stand one after the other in the first one's entry, each in a scope of its own, so that registers and labels of one name do
not meet; what a program defines beside its entry gets names of its own.

NVRTC is the assembler too. It takes no PTX, but what a text says in asm it hands on to its ptxas as it stands: framed() closes
the function that this asm is in, and opens another one after the joined program. (nvJitLink takes PTX, but compiles it to be
linked, where ptxas knows less: 526 bytes of spills instead of 28 in the Hopper kernel, CUDA 13.0.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["FRAME", "NotJoined", "framed", "join"]

#: The empty kernel that the joined program is framed by.
FRAME = "attnrt_frame"

_COMMENT = re.compile(r"//[^\n]*")
_HEADER = re.compile(r"^\.(?:version|target|address_size)[^\n]*$", re.M)
_FUNCTION = re.compile(r"\.(?:func|entry)\s+(?:\([^)]*\)\s*)?([\w$]+)")
_VARIABLE = re.compile(r"([\w$]+)(?:\[\d*\])*\s*(?:=[^;]*)?;\s*$")


class NotJoined(ValueError):
    """Programs that do not make one kernel; compile it in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A statement of a module: a function, or a variable."""

    text: str
    symbol: str
    function: bool

    @property
    def defines(self) -> bool:
        return self.text.endswith("}") if self.function else not self.text.startswith(".extern")

    @property
    def entry(self) -> bool:
        return self.function and ".entry" in self.text.split("(", 1)[0]


def join(programs: Sequence[str], name: str) -> str:
    """The PTX of kernel ``name`` from that of its roles, without the lines that head a module.

    Parameters
    ----------
    programs : sequence of str
        PTX of each role; the first begins the kernel and branches to ``attnrt_role_1`` and so on.
    name : str
        The entry that each of them has.

    Raises
    ------
    NotJoined
        Entries that differ in more than their body, other constants about the kernel (its shared memory), shared variables of
        a program's own, roles that are not there.
    """
    modules = [_items(text) for text in programs]
    if len(set(map(_said, modules))) > 1:
        raise NotJoined("the programs differ in what they say of the kernel, such as its shared memory")
    modules = [_of_role(items, role) if role else items for role, items in enumerate(modules)]
    entries = []
    for items in modules:
        found = [item for item in items if item.entry]
        if [item.symbol for item in found] != [name]:
            raise NotJoined(f"a program has the entries {[item.symbol for item in found]}, not {name}")
        entries.append(found[0].text.partition("{"))
    if any(head != entries[0][0] for head, _, _ in entries):
        raise NotJoined(f"the programs' {name} differ in more than their body")
    asked = set(re.findall(r"\battnrt_role_(\d+)\b", entries[0][2]))
    if asked != {str(role) for role in range(1, len(programs))}:
        raise NotJoined(f"the first of {len(programs)} programs hands over to roles {sorted(asked)}")
    beside = dict.fromkeys(item.text for items in modules for item in items if not item.entry)
    bodies = [
        (f"attnrt_role_{role}:\n" if role else "") + "{" + body for role, (_, _, body) in enumerate(entries)
    ]
    return "\n".join([*beside, entries[0][0], "{", *bodies, "}"])


def framed(ptx: str) -> str:
    """CUDA C++ that a compiler makes nothing of but this PTX and an empty kernel."""
    return (
        f'extern "C" __global__ void {FRAME}() {{\n'
        f'  asm volatile(R"PTX(ret;\n}}\n{ptx}\n.func {FRAME}_end()\n{{\n)PTX");\n}}\n'
    )


def _items(ptx: str) -> list[_Item]:
    text = _HEADER.sub("", _COMMENT.sub("", ptx))
    items, depth, lines = [], 0, []  # type: ignore[var-annotated]
    for line in filter(str.strip, text.splitlines()):
        lines.append(line)
        depth += line.count("{") - line.count("}")
        if depth or not line.rstrip().endswith((";", "}")):
            continue
        items.append(_item("\n".join(lines)))
        lines = []
    if lines:
        raise NotJoined(f"PTX that ends within {lines[0]!r}")
    return items


def _item(text: str) -> _Item:
    function = _FUNCTION.search(text.split("{", 1)[0])
    if function is not None:
        return _Item(text=text, symbol=function.group(1), function=True)
    variable, space = _VARIABLE.search(text), text.split()
    if variable is None or (".shared" in space and space[0] != ".extern"):
        raise NotJoined(f"PTX with {text.splitlines()[0]!r}")
    return _Item(text=text, symbol=variable.group(1), function=False)


def _said(items: list[_Item]) -> tuple[str, ...]:
    """What a module says of the kernel to the host."""
    return tuple(item.text for item in items if item.symbol.startswith("attnrt_") and not item.function)


def _of_role(items: list[_Item], role: int) -> list[_Item]:
    """What a later role's module needs beside its entry, under names of its own."""
    code = "\n".join(item.text for item in items if item.function)
    data = "\n".join(item.text.partition("=")[2] for item in items if not item.function)
    items = [item for item in items if item.function or item.symbol in code or item.symbol in data]
    own = {item.symbol for item in items if item.defines and not item.entry}
    if not own:
        return items
    names = re.compile(rf"(?<![\w$])(?:{'|'.join(map(re.escape, own))})(?![\w$])")
    return [replace(item, text=names.sub(rf"\g<0>$role{role}", item.text)) for item in items]
