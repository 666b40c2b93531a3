# SPDX-License-Identifier: Apache-2.0
"""Variants whose kernels are built with the package: which they are, and the header that holds their text.

``python -m attnrt.backends.cpu.prebuilt`` writes native/prebuilt.h anew; a test holds that it is what the printer prints.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnrt.variants import Composed

__all__ = ["HEADER", "header_text", "prebuilt_index"]

#: Where the header lies, beside this file.
HEADER = Path(__file__).resolve().parent / "native" / "prebuilt.h"


def _variants() -> dict[str, Composed]:
    """Name of the struct -> variant, in the order of the families' tables."""
    from attnrt.variants import causal, compose, full, sliding_window, softcap

    return {
        "Full": compose(full()),
        "Causal": compose(causal()),
        "CausalWindow": compose((causal(), sliding_window(1))),
        "CausalSoftcap": compose((causal(), softcap(1.0))),
    }


def header_text() -> str:
    """Text of native/prebuilt.h."""
    head = (
        "// SPDX-License-Identifier: Apache-2.0\n"
        "// Printed by backends/cpu/prebuilt.py: the variants whose kernels are built with the package.\n"
        "#pragma once\n"
    )
    return head + "".join(variant.cpp_source(name) for name, variant in _variants().items())


@functools.cache
def _keys() -> dict[str, int]:
    return {variant.key: i for i, variant in enumerate(_variants().values())}


def prebuilt_index(variant: Composed) -> int | None:
    """Place of the variant among the prebuilt ones, or None."""
    return _keys().get(variant.key)


if __name__ == "__main__":
    HEADER.write_text(header_text())
