# SPDX-License-Identifier: Apache-2.0
"""Builders by name, ours and others'."""

import importlib.metadata
from dataclasses import replace

import numpy as np
import pytest

import attnrt.formats as f
from attnrt.errors import ArgumentError, AttnrtError, DtypeError

BUILDERS = (
    *("ragged", "paged", "block_table", "bsr", "token_sparse", "pages_per_head", "radix"),
    *("share", "cascade", "shared_prefix", "tree", "streaming", "concat", "take"),
)


def test_our_own():
    assert set(BUILDERS) <= set(f.names())
    for name in BUILDERS:
        assert f.registry.get(name) is getattr(f, name)
    assert set(f.__all__) <= set(dir(f))


@pytest.fixture
def fresh(monkeypatch):
    """The registry's tables, put back afterwards."""
    monkeypatch.setattr(f.registry, "_entries", dict(f.registry._entries))
    monkeypatch.setattr(f.registry, "_points", None)
    return f.registry


def test_register(fresh):
    @f.register("reversed_pages")
    def reversed_pages(lens, page_size):
        """Doc."""
        pages = -(-np.asarray(lens) // page_size)
        indptr = np.concatenate(([0], np.cumsum(pages)))
        return f.paged(np.arange(len(lens) + 1), indptr, np.arange(indptr[-1])[::-1], lens, page_size)

    index = f.reversed_pages([5, 3], 4)
    assert index.indices.tolist() == [2, 1, 0] and reversed_pages.__doc__ == "Doc."
    assert f.registry.get("reversed_pages") is reversed_pages and "reversed_pages" in f.names()
    with pytest.raises(ArgumentError, match="reversed_pages"):
        f.register("reversed_pages")(lambda: None)
    with pytest.raises(ArgumentError, match="paged"):
        f.register("paged")(lambda: None)
    with pytest.raises(AttributeError):
        f.no_such_layout  # noqa: B018
    with pytest.raises(ArgumentError, match="no_such_layout"):
        f.registry.get("no_such_layout")


def test_what_a_registered_builder_returns_is_checked(fresh):
    good = f.paged([0, 1], [0, 1], [0], [4], 4)
    with pytest.raises(AttnrtError, match="kv_end"):
        f.register("broken")(lambda: replace(good, kv_end=np.array([5], np.int32)))()
    with pytest.raises(ArgumentError, match="other"):
        f.register("other")(lambda: 3)()


def test_entry_points(fresh, monkeypatch):
    point = importlib.metadata.EntryPoint("from_a_package", "attnrt.formats.ragged:ragged", "attnrt.formats")
    found = importlib.metadata.EntryPoints([point])
    monkeypatch.setattr(importlib.metadata, "entry_points", found.select)
    assert "from_a_package" in f.names()
    assert f.from_a_package([0, 1], [0, 3]).num_qo == 1


def test_bad_names_and_entries_are_refused_at_once(fresh):
    before = f.names()
    for name in ("two words", "a-b", "", 3):
        with pytest.raises(ArgumentError, match="name must be"):
            f.register(name)
    with pytest.raises(DtypeError, match="index builder must be callable"):
        f.register("mine")(3)
    assert f.names() == before
