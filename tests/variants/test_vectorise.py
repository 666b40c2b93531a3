# SPDX-License-Identifier: Apache-2.0
"""The loops that kernels run over the keys of a tile become vector code (g++ says so)."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

import attnrt.variants as av

LOOP = """
using V = attnrt::Variant;
void logits(const attnrt::ParamRef* p, attnrt::Ctx c, int base, float* s, int n) {
  const V::Row r = V::row(p, c);
  for (int j = 0; j < n; ++j) { attnrt::Ctx k = c; k.kv_pos = base + j; s[j] = V::logits(p, r, k, s[j]); }
}
void mask(const attnrt::ParamRef* p, attnrt::Ctx c, int base, int* seen, int n) {
  const V::Row r = V::row(p, c);
  for (int j = 0; j < n; ++j) { attnrt::Ctx k = c; k.kv_pos = base + j; seen[j] &= -int(V::mask(p, r, k)); }
}
"""
LINES = {"logits": 4, "mask": 8}


@av.mask
def every_other(ctx):
    return ((ctx.qo_pos - ctx.kv_pos) & 1) == 0


CASES = [
    ("logits", av.softcap(30.0)),
    ("logits", av.sigmoid()),
    ("logits", av.alibi()),
    ("logits", (av.fp8_scales(), av.softcap(30.0), av.alibi())),
    ("mask", av.causal()),
    ("mask", (av.causal(), av.sliding_window(64))),
    ("mask", every_other),
]


@pytest.mark.parametrize(("loop", "variants"), CASES)
def test_vectorised(loop, variants, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None or "Free Software" not in _run([compiler, "--version"]).stdout:
        pytest.skip("needs g++")
    if (
        int(_run([compiler, "-dumpversion"]).stdout.split(".")[0]) < 12
        or "x86" not in _run(["uname", "-m"]).stdout
    ):
        pytest.skip("needs g++ 12 on x86")
    path = tmp_path / "loop.cpp"
    path.write_text(av.compose(variants).cpp_source() + f'#line 1 "loop"\n{LOOP.lstrip()}')
    flags = [
        "-std=c++17",
        "-O2",
        "-ftree-vectorize",
        "-fvect-cost-model=dynamic",
        "-ffp-contract=off",
        "-mavx2",
    ]
    result = _run(
        [compiler, *flags, "-fopt-info-vec", "-I", av.include_dir(), "-c", str(path), "-o", "/dev/null"]
    )
    assert result.returncode == 0, result.stderr
    assert re.search(rf"^loop:{LINES[loop]}:\d+: .*loop vectorized", result.stderr, re.MULTILINE), (
        result.stderr
    )


def _run(command):
    return subprocess.run(command, capture_output=True, text=True, check=False)
