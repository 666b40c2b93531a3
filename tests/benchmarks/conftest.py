# SPDX-License-Identifier: Apache-2.0
"""The tables' modules live beside their scripts, in benchmarks/, which is no package; they need torch, on the CPU here."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
