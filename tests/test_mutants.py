# SPDX-License-Identifier: Apache-2.0
"""The script of planted faults: every substitution still finds its place, and a few mutants really turn their test red."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import mutants

ROOT = Path(__file__).resolve().parents[1]


def test_every_fault_finds_its_place():
    """The text that a mutant replaces is in its file once, and its test's module exists."""
    for mutant in mutants.MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r}"
    for mutant in mutants.MUTANTS:
        assert all((ROOT / "tests" / word).exists() for word in mutant.test.split() if word.endswith(".py"))
    kinds = [m.kind for m in mutants.MUTANTS]
    assert len(kinds) >= 24 and kinds.count("native") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window off by one", "lse in base 2", "a prefix is cut inside a leaf"])
def test_a_planted_fault_turns_its_test_red(name):
    (mutant,) = (m for m in mutants.MUTANTS if m.name == name)
    assert mutants.run(mutant) is not None
