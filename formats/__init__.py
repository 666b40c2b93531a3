# SPDX-License-Identifier: Apache-2.0
"""Index values and index builders: how a cache layout becomes block-sparse arrays (docs/formats.md)."""

from attnrt.formats.base import HOLE, BlockSparse, Composite, Features, Index, Requests
from attnrt.formats.dense import Dense, Keys, keys_of, to_dense
from attnrt.formats.paged import block_table, kv_lens_of, last_page_lens, paged
from attnrt.formats.ragged import ragged

__all__ = [
    "HOLE",
    "BlockSparse",
    "Composite",
    "Dense",
    "Features",
    "Index",
    "Keys",
    "Requests",
    "block_table",
    "keys_of",
    "kv_lens_of",
    "last_page_lens",
    "paged",
    "ragged",
    "to_dense",
]
