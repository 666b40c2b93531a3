# SPDX-License-Identifier: Apache-2.0
"""Tools to test attention with: a float64 oracle, checks with derived tolerances, cases in files, bitwise oracles.

Made for those who write a backend, a variant or an index builder elsewhere, and used by the project's own tests.
"""

from attnrt.testing.bitwise import (
    Result,
    batch_invariance,
    capacity,
    history,
    layout_invariance,
    page_size_invariance,
    placement,
    poison,
    rows_of,
    run_batch,
    same,
    sentinel,
    workers,
)
from attnrt.testing.cases import (
    Batch,
    Case,
    Layout,
    lay_out,
    load_case,
    make_case,
    poison_of,
    save_case,
    take,
)
from attnrt.testing.check import TOLERANCES, Tolerance, bounds, check, compare
from attnrt.testing.oracle import Answer, oracle, oracle_answer

__all__ = [
    "TOLERANCES",
    "Answer",
    "Batch",
    "Case",
    "Layout",
    "Result",
    "Tolerance",
    "batch_invariance",
    "bounds",
    "capacity",
    "check",
    "compare",
    "history",
    "lay_out",
    "layout_invariance",
    "load_case",
    "make_case",
    "oracle",
    "oracle_answer",
    "page_size_invariance",
    "placement",
    "poison",
    "poison_of",
    "rows_of",
    "run_batch",
    "same",
    "save_case",
    "sentinel",
    "take",
    "workers",
]
