# SPDX-License-Identifier: Apache-2.0
"""What the CPU backend tells the planner: its workers, numeric classes and costs."""

from __future__ import annotations

import functools

from attnrt.scheduler.base import NumericClass, Ruler, Traits
from attnrt.scheduler.machines import APPEND_RULER, DECODE_RULER, ONE_LEAF

__all__ = ["TOKEN_MAJOR", "cpu_traits"]

#: Classes whose scores are dot products along head_dim; all others multiply packed panels of keys.
TOKEN_MAJOR = frozenset({"decode"})

#: Up to this many query-head rows of a request packing its keys costs more than it saves.
MOST_DECODE_ROWS = 16

_DECODE = NumericClass(name="decode", max_rows=MOST_DECODE_ROWS, kv_tile=64, q_tile=64, ruler=DECODE_RULER)
_APPEND = NumericClass(name="append", max_rows=2048, kv_tile=64, q_tile=96, ruler=APPEND_RULER)
_PREFILL = NumericClass(name="prefill", max_rows=None, kv_tile=64, q_tile=96, ruler=ONE_LEAF)
# Every request in one class: short requests need leaves to be split at, long ones do not mind them.
_TOKEN = NumericClass(name="token", max_rows=None, kv_tile=64, q_tile=96, ruler=Ruler(tail=2048))


@functools.lru_cache(maxsize=64)
def cpu_traits(num_threads: int, group: int, deterministic: str) -> Traits:
    """Traits of a machine with ``num_threads`` threads.

    A (query row, key) pair costs an eighth of reading a key of one KV head: 256 numbers from memory at 4 bytes each against
    256 multiply-adds at 16 per cycle.
    """
    classes = (_TOKEN,) if deterministic == "token" else (_DECODE, _APPEND, _PREFILL)
    return Traits(
        name="cpu", num_workers=num_threads, classes=classes, alpha=1.0, beta=1.0, beta_rows=1 / 8, fixed=16.0
    )
