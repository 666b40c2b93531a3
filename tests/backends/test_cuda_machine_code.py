# SPDX-License-Identifier: Apache-2.0
"""Operands that are overwritten while a product reads them are found in machine code; no GPU is needed."""

from __future__ import annotations

import pytest

from attnrt.backends.cuda.machine_code import check_code, overwritten_operands
from attnrt.errors import CompileError

nvrtc = pytest.importorskip("attnrt.backends.cuda.nvrtc")
if nvrtc.why_not_nvrtc() is not None:
    pytest.skip(nvrtc.why_not_nvrtc(), allow_module_level=True)
pytestmark = pytest.mark.compile

#: Two products with A in registers; what happens to A between them is filled in.
TEXT = """
extern "C" __global__ void kernel(float* out, const unsigned* in, unsigned long long desc) {
  unsigned a[4] = {in[0], in[1], in[2], in[3]}, b[4] = {in[4], in[5], in[6], in[7]};
  float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile("wgmma.fence.sync.aligned;");
  PRODUCT(a);
  BETWEEN
  PRODUCT(b);
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) out[i * 128 + threadIdx.x] = o[i];
}
"""
PRODUCT = """
#define PRODUCT(x)                                                                                        \\
  asm volatile("wgmma.mma_async.sync.aligned.TYPES {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1REST;" \\
               : "+f"(o[0]), "+f"(o[1]), "+f"(o[2]), "+f"(o[3])                                            \\
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(desc))
"""
#: Of 16-bit numbers and of 8-bit ones: the instruction, what follows its scales, the low byte of its code.
KINDS = {"bf16": ("m64n8k16.f32.bf16.bf16", ", 0", 0xF0), "e4m3": ("m64n8k32.f32.e4m3.e4m3", "", 0xF3)}
kinds = pytest.mark.parametrize("kind", KINDS)
WAIT = 'asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; wgmma.fence.sync.aligned;");'


def code_of(kind, between):
    types, rest, _ = KINDS[kind]
    product = PRODUCT.replace("TYPES", types).replace("REST", rest)
    return nvrtc.compile_source(product + TEXT.replace("BETWEEN", between), "sm_90a", "products")[0]


def patched(kind, image):
    """The same machine code, the second product reading A where the first does."""
    words, low = bytearray(image), KINDS[kind][2]
    at = [i for i in range(0, len(words) - 16, 16) if words[i] == low and words[i + 1] & 15 == 0xD]
    assert len(at) == 2
    words[at[1] + 3] = words[at[0] + 3]
    return bytes(words)


@kinds
def test_products_of_their_own_registers(kind):
    assert overwritten_operands(code_of(kind, "")) == []


@kinds
def test_products_that_share_registers(kind):
    image = patched(kind, code_of(kind, ""))
    assert overwritten_operands(image) == ["kernel"]
    with pytest.raises(CompileError, match="operand that a product still reads"):
        check_code(image, "the kernel of own", "a log")


@kinds
def test_a_wait_between_them(kind):
    assert overwritten_operands(patched(kind, code_of(kind, WAIT))) == []


def test_other_bytes():
    assert overwritten_operands(b"image") == []
