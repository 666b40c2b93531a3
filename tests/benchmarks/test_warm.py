# SPDX-License-Identifier: Apache-2.0
"""Which of FlashInfer's sources are compiled, and that a packed library comes back under the name it is looked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import warm


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("batch_prefill_paged_kernel_mask_0.cu", True),
        ("batch_prefill_paged_sm90_kernel_mask_1.cu", False),
        ("batch_prefill_ragged_sm90_kernel_mask_1.cu", True),
        ("batch_prefill_jit_binding.cu", True),
    ],
)
def test_called(name: str, kept: bool) -> None:
    assert warm.called(Path(name), "p0 r1") is kept


def test_packing(tmp_path: Path) -> None:
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    library = tmp_path / "one.so"
    subprocess.run(["cc", "-shared", "-o", str(library), str(source)], check=True)
    warm.pack([library], tmp_path / "all.tar.xz")
    assert warm.unpack(tmp_path / "all.tar.xz", tmp_path / "package") == ["one.so"]
    assert (tmp_path / "package" / "data" / "aot" / "one" / "one.so").stat().st_size > 0


def test_a_compiler_that_fails_leaves_no_object(tmp_path: Path) -> None:
    target = tmp_path / "build" / "x.o"
    assert not warm.compile_one(["false", "-o", str(target)]) and not target.exists()
    assert warm.compile_one(["cp", "/dev/null", str(target)]) and target.exists()
