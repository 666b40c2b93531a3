# SPDX-License-Identifier: Apache-2.0
"""A spec's kernels on a device as programs: texts that are compiled and loaded one by one, when a plan first needs them.

A compiler takes two seconds for all kernels of a spec, and a plan needs one or two of them: who brings a variant that nobody has
seen waits for those alone. The merge kernel's text leaves out all that it does not read of a variant (render.py), so that it is
in the cache as soon as any variant of those dims has been merged. Where a plan needs several, they are compiled at once: a text
keeps a compiler and a core busy, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from attnrt.backends.cuda.render import DECODE, entry_names, render, render_roles, threads_of
from attnrt.backends.cuda.tables import decode_groups

if TYPE_CHECKING:
    from attnrt.backends.cuda.modules import Module
    from attnrt.spec import AttentionSpec

__all__ = ["Programs"]


class Programs:
    """The programs of one (spec, device); each holds one kernel.

    Parameters
    ----------
    spec : AttentionSpec
    load : callable (source, names, roles) -> Module
        Compiles a text with these kernels (or finds it in the cache) and loads it. ``roles``: the same kernel's text for each
        role of its warps, where there are several; a compiler may take either.
    hopper : bool
        Whether the device has the instructions of sm_90a.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        load: Callable[[str, tuple[str, ...], tuple[str, ...]], Module],
        hopper: bool,
    ) -> None:
        self.spec, self._load = spec, load
        self.names = entry_names(spec, hopper)
        self._modules: dict[str, Module] = {}  # held: a library that is let go of takes its kernels along
        self._locks: dict[str, threading.Lock] = {}

    def entry(self, name: str) -> Any:
        """attnrt_launch_t of a kernel, without its grid; compiles if it is not there yet.

        Raises
        ------
        CompileError
        """
        found = self._modules.get(name)
        if found is None:
            with self._locks.setdefault(name, threading.Lock()):
                found = self._modules.get(name)
                if found is None:
                    found = self._load(render(self.spec, name), (name,), render_roles(self.spec, name))
                    # A text may be for fewer groups than the device has room for.
                    groups = min(found.groups, decode_groups(self.spec)) if name == DECODE else 1
                    found.entry(name).threads = threads_of(self.spec, name) * groups
                    self._modules[name] = found
        return found.entry(name)

    def prepare(self, names: Iterable[str]) -> None:
        """Compile those of the kernels that are not there yet, each in a thread; raises what the first of them raises."""
        missing = [name for name in names if name not in self._modules]
        if len(missing) < 2:
            for name in missing:
                self.entry(name)
            return
        with ThreadPoolExecutor(len(missing), "attnrt-compile") as pool:
            for made in [pool.submit(self.entry, name) for name in missing]:
                made.result()
