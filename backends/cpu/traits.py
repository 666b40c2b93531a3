# SPDX-License-Identifier: Apache-2.0
"""What the CPU backend tells the planner: the classes and costs of scheduler/machines.py, its threads as workers."""

from __future__ import annotations

import functools
from dataclasses import replace

from attnrt.scheduler.base import Traits
from attnrt.scheduler.machines import token_traits, traits_of

__all__ = ["TOKEN_MAJOR", "cpu_traits"]

#: Classes whose scores are dot products along head_dim; all others multiply packed panels of keys.
TOKEN_MAJOR = frozenset({"decode"})


@functools.lru_cache(maxsize=64)
def cpu_traits(num_threads: int, deterministic: str) -> Traits:
    """Traits of a machine with ``num_threads`` threads."""
    traits = replace(traits_of("cpu"), num_workers=num_threads)
    return token_traits(traits) if deterministic == "token" else traits
