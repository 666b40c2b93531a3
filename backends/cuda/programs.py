# SPDX-License-Identifier: Apache-2.0
"""A spec's kernels on a device as programs: texts that are compiled and loaded one by one, when a plan first needs them.

A compiler takes two seconds for all kernels of a spec, and a plan needs one or two of them: who brings a variant that nobody has
seen waits for those alone. The merge kernel's text leaves out all that it does not read of a variant (render.py), so that it is
in the cache as soon as any variant of those dims has been merged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnrt.backends.cuda.render import DECODE, entry_names, render, threads_of
from attnrt.backends.cuda.tables import decode_groups

if TYPE_CHECKING:
    from attnrt.backends.cuda.kernel import Module
    from attnrt.spec import AttentionSpec

__all__ = ["Programs"]


class Programs:
    """The programs of one (spec, device); each holds one kernel.

    Parameters
    ----------
    spec : AttentionSpec
    load : callable (source, names) -> Module
        Compiles a text with these kernels (or finds it in the cache) and loads it.
    hopper : bool
        Whether the device has the instructions of sm_90a.
    """

    def __init__(
        self, spec: AttentionSpec, load: Callable[[str, tuple[str, ...]], Module], hopper: bool
    ) -> None:
        self.spec, self._load = spec, load
        self.names = entry_names(spec, hopper)
        self._modules: dict[str, Module] = {}  # held: a library that is let go of takes its kernels along
        self._lock = threading.Lock()

    def entry(self, name: str) -> Any:
        """attnrt_launch_t of a kernel, without its grid; compiles if it is not there yet.

        Raises
        ------
        CompileError
        """
        found = self._modules.get(name)
        if found is None:
            with self._lock:  # NVRTC compiles one text at a time in any case
                found = self._modules.get(name)
                if found is None:
                    found = self._load(render(self.spec, name), (name,))
                    # A text may be for fewer groups than the device has room for.
                    groups = min(found.groups, decode_groups(self.spec)) if name == DECODE else 1
                    found.entry(name).threads = threads_of(self.spec, name) * groups
                    self._modules[name] = found
        return found.entry(name)
