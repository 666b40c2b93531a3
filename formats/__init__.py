# SPDX-License-Identifier: Apache-2.0
"""Index values and index builders: how a cache layout becomes block-sparse arrays (docs/formats.md).

A layout of your own is a function that returns an index, registered with ``@attnrt.formats.register("name")`` or through the
entry point group ``attnrt.formats``; it is then ``attnrt.formats.name`` (docs/add_a_layout.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from attnrt.errors import ArgumentError
from attnrt.formats.access import tokens
from attnrt.formats.base import HOLE, BlockSparse, Composite, Features, Index, Requests
from attnrt.formats.batches import concat, take
from attnrt.formats.composite import cascade, composite, shared_prefix
from attnrt.formats.dense import Dense, Keys, keys_of, to_dense
from attnrt.formats.gathered import Gathered, gathered
from attnrt.formats.paged import block_table, kv_lens_of, last_page_lens, paged
from attnrt.formats.radix import radix
from attnrt.formats.ragged import ragged
from attnrt.formats.share import share
from attnrt.formats.sparse import bsr, pages_per_head, token_sparse
from attnrt.formats.streaming import streaming
from attnrt.formats.tree import mask_offsets, tree
from attnrt.registry import Registry

__all__ = [
    "HOLE",
    "BlockSparse",
    "Composite",
    "Dense",
    "Features",
    "Gathered",
    "Index",
    "Keys",
    "Requests",
    "block_table",
    "bsr",
    "cascade",
    "composite",
    "concat",
    "gathered",
    "keys_of",
    "kv_lens_of",
    "last_page_lens",
    "mask_offsets",
    "names",
    "paged",
    "pages_per_head",
    "radix",
    "ragged",
    "register",
    "registry",
    "share",
    "shared_prefix",
    "streaming",
    "take",
    "to_dense",
    "token_sparse",
    "tokens",
    "tree",
]

#: Builders by name: ours, registered ones, and those of entry points.
registry: Registry[Callable[..., Index]] = Registry("index builder", "attnrt.formats", functions=True)

for _builder in (
    *(ragged, paged, block_table, bsr, token_sparse, pages_per_head, radix),
    *(share, cascade, shared_prefix, tree, streaming, concat, take),
):
    registry.register(_builder.__name__, _builder)


def register(name: str) -> Callable[[Callable[..., Index]], Callable[..., Index]]:
    """Decorator that names a builder; what it returns is checked once, cheaply (``index.check()``), at every call."""

    registry.check_name(name)

    def add(builder: Callable[..., Index]) -> Callable[..., Index]:
        registry.check_entry(builder)
        checked = _checked(name, builder)
        registry.register(name, checked)
        return checked

    return add


def names() -> tuple[str, ...]:
    """Names of all builders, those of installed packages included."""
    return registry.names()


def _checked(name: str, builder: Callable[..., Index]) -> Callable[..., Index]:
    @functools.wraps(builder)
    def build(*args: Any, **kwargs: Any) -> Index:
        index = builder(*args, **kwargs)
        if not isinstance(index, (BlockSparse, Composite)):
            raise ArgumentError(name, "must return a BlockSparse or a Composite", type(index).__name__)
        index.check()
        return index

    return build


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and name in registry:
        return registry.get(name)
    raise AttributeError(f"module 'attnrt.formats' has no attribute {name!r}{registry.meant(name)}")
