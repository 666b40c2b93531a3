# SPDX-License-Identifier: Apache-2.0
"""The CUDA backends: NVRTC and nvcc over one set of kernel sources. ``doctor()`` says what is missing for them."""

from __future__ import annotations

__all__ = ["doctor"]


def doctor() -> list[tuple[str, bool, str]]:
    """(name, ok, line) of all that the CUDA backends need; see doctor.py."""
    from attnrt.backends.cuda.report import examine

    return examine()
