# SPDX-License-Identifier: Apache-2.0
"""What no compiler's log says, looked for in the machine code of sm_90a: products whose operand is overwritten while they run.

A product of a warpgroup (wgmma) reads A from registers for as long as it runs. Where registers are short, ptxas (CUDA 13.0)
gathers A for one product after the other in the same four registers, without a wait between them: the second gathering may
overwrite what the first product still reads. A form of the Hopper kernel at head_dim 256 that had this gave wrong rows on an
H200, the same ones on every run; all forms without it were right.
"""

from __future__ import annotations

import struct

import numpy as np

from attnrt.errors import CompileError

__all__ = ["check_code", "overwritten_operands"]

#: Low 12 bits of an instruction: HGMMA and QGMMA (16 and 8 bits) with A in registers; WARPGROUP, of which this bit says that it
#: waits for products.
_PRODUCTS, _WARPGROUP, _WAITS = (0xDF0, 0xDF3), 0x9C5, 1 << 47


def check_code(image: bytes, label: str, log: str = "") -> None:
    """Refuse machine code that would give wrong numbers.

    Raises
    ------
    CompileError
        ``label`` names whose code it is, ``log`` is the compiler's.
    """
    for name in overwritten_operands(image):
        hint = (
            "Give the variant's hooks less to hold per row; another compiler version may find the registers"
        )
        raise CompileError(
            label, "must not overwrite an operand that a product still reads", name, hint, log=log
        )


def overwritten_operands(image: bytes) -> list[str]:
    """Kernels of a cubin in which two products read A from the same registers, and nothing waits between them."""
    return [name for name, code in _texts(image) if _overwrites(np.frombuffer(code, "<u8")[::2])]


def _overwrites(words: np.ndarray) -> bool:
    """Whether it is so in one kernel; the first word of each instruction."""
    kind = words & 0xFFF
    waits = np.flatnonzero((kind == _WARPGROUP) & ((words & _WAITS) != 0))
    products = np.flatnonzero(np.isin(kind, _PRODUCTS))
    registers = (words[products] >> np.uint64(24)).astype(np.int64) & 0xFF
    at = np.sort(np.searchsorted(waits, products) << 8 | registers)
    return bool((at[1:] == at[:-1]).any())


def _texts(image: bytes) -> list[tuple[str, bytes]]:
    """(name, machine code) of each kernel of an ELF image; of nothing else."""
    if not image.startswith(b"\x7fELF"):
        return []
    (begin,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", image, begin + i * size) for i in range(count)]
    names = sections[names_at][4]
    found = []
    for name_at, _, _, _, offset, length in sections:
        name = image[names + name_at : image.index(b"\0", names + name_at)].decode()
        if name.startswith(".text."):
            found.append((name.removeprefix(".text."), image[offset : offset + length]))
    return found
