# SPDX-License-Identifier: Apache-2.0
"""The texts of the shipped kernels through nvcc's front end, and a library of its; no GPU is needed."""

from __future__ import annotations

import subprocess

import pytest

import attnrt as at
from attnrt.backends.cuda import append, merge_parts, nvcc
from attnrt.backends.cuda.render import ATTEND, DECODE, SMEM, entry_names, render
from attnrt.errors import CompileError
from attnrt.variants import compose

if nvcc.find_nvcc()[0] is None:
    pytest.skip("nvcc is not found", allow_module_level=True)
pytestmark = pytest.mark.compile

v = at.variants
HOOKS = (v.rope(64), v.causal(), v.sliding_window(300), v.softcap(20.0), v.alibi(), v.sink_logits(-1.0))
SPECS = {
    "plain": {},
    "all hooks": {"head_dim": 64, "variant": HOOKS},
    "16 rows, fp8": {"num_kv_heads": 2, "kv_dtype": "float8_e4m3fn", "variant": (v.causal(), v.fp8_scales())},
    "sigmoid mask": {"head_dim": 64, "q_dtype": "float16", "variant": (v.custom_mask(), v.sigmoid())},
}


def spec(**changes):
    base = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "q_dtype": "bfloat16"}
    return at.AttentionSpec(**{**base, "variant": v.causal(), **changes})


def texts(name):
    """Of one spec's kernels that differ by more than a flag of theirs."""
    s = spec(**SPECS[name])
    return {kernel: render(s, kernel) for kernel in entry_names(s, True) if not kernel.endswith("_fold")}


def front_end(text, folder):
    """nvcc's errors over a text; nothing is optimised."""
    source = folder / "kernel.cu"
    source.write_text(text)
    flags = ["-std=c++17", "-arch=sm_90a", "-ptx", "-Xcicc=-O0", "-o", str(folder / "kernel.ptx")]
    done = subprocess.run(
        [nvcc.find_nvcc()[0], *flags, str(source)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("name", SPECS)
def test_kernels(name, tmp_path):
    for kernel, text in texts(name).items():
        assert front_end(text, tmp_path) == "", kernel


def test_append_and_merge_of_parts(tmp_path):
    text = append.render_append(spec(), "bfloat16", compose(v.rope(64)))
    assert front_end(text, tmp_path) == ""
    assert front_end(merge_parts.render_merge_parts("float16"), tmp_path) == ""


BAD = "float x = s;\nreturn x * nosuchthing;"


def test_errors_are_seen(tmp_path):
    assert "nosuchthing" in front_end(render(spec(variant=v.cpp("own", logits=BAD)), ATTEND), tmp_path)


def test_a_library(tmp_path):
    """It holds the device code whole, kernel, constant and all; a user's line comes back as from NVRTC."""
    small = spec(head_dim=64)
    nvcc.compile_library(render(small, ATTEND), "sm_90a", tmp_path / "kernel.so", "a kernel")
    image = nvcc.image_of(tmp_path / "kernel.so")
    assert image.startswith(b"\x7fELF") and ATTEND.encode() in image and SMEM.encode() in image
    assert image in (tmp_path / "kernel.so").read_bytes()
    wrong = spec(head_dim=64, variant=(v.causal(), v.cpp("own", logits=BAD)))
    with pytest.raises(CompileError, match="nosuchthing") as caught:
        nvcc.compile_library(render(wrong, DECODE), "sm_90a", tmp_path / "wrong.so", "the kernel of own")
    assert caught.value.line == 2 and not (tmp_path / "wrong.so").exists()
