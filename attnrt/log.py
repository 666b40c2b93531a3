# SPDX-License-Identifier: Apache-2.0
"""The package's logger, "attnrt" of the standard library: what is compiled and how long it took, what auto chose and why.

It is silent unless somebody listens: an application's own handlers, or ATTNRT_LOG, which sets the level and writes to stderr.
"""

from __future__ import annotations

import functools
import logging

from attnrt.config import config

__all__ = ["logger"]


@functools.cache
def logger() -> logging.Logger:
    """The logger, set up at the first call as ATTNRT_LOG says; without it as the application has it."""
    found = logging.getLogger("attnrt")
    level = config().log
    if level is not None:
        found.setLevel(level.upper())
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        found.addHandler(handler)
        found.propagate = False
    return found
