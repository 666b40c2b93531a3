# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import sys

import pytest

from attnrt.errors import ArgumentError, DtypeError
from attnrt.registry import Registry

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Install a fake distribution with one entry point of group attnrt.tests."""

    def install(dist, name, target):
        info = tmp_path / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(METADATA.format(name=dist))
        (info / "entry_points.txt").write_text(f"[attnrt.tests]\n{name} = {target}\n")

    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    return install


def test_register_and_get():
    registry = Registry("scheduler")

    @registry.register("lpt")
    def lpt():
        return 1

    assert registry.get("lpt") is lpt and "lpt" in registry and "x" not in registry
    registry.register("greedy", len)
    assert registry.register("greedy", len) is len  # the same again is no clash
    assert registry.names() == ("greedy", "lpt")


def test_unknown_names_list_the_known_ones():
    registry = Registry("scheduler")
    registry.register("lpt", len)
    with pytest.raises(ArgumentError, match=r"scheduler must be a known name; got 'ltp'\. Known: lpt"):
        registry.get("ltp")
    with pytest.raises(ArgumentError, match=r"^backend must"):
        registry.get("ltp", label="backend")


def test_duplicate_and_empty_names():
    registry = Registry("scheduler")
    registry.register("lpt", len)
    with pytest.raises(ArgumentError, match=r"scheduler name must not be taken; got 'lpt'\. Known: lpt"):
        registry.register("lpt", max)
    assert registry.get("lpt") is len
    for bad in ("", 3):
        with pytest.raises(ArgumentError, match="non-empty string"):
            registry.register(bad, len)


def test_entry_points_load_when_asked_for(plug_in):
    plug_in("good", "zigzag", "math:sqrt")
    plug_in("broken", "missing", "no_such_module_anywhere:x")
    registry = Registry("scheduler", "attnrt.tests")
    registry.register("lpt", len)
    assert registry.get("lpt") is len
    assert registry.names() == ("lpt", "missing", "zigzag")
    import math

    assert registry.get("zigzag") is math.sqrt and "zigzag" in registry
    with pytest.raises(ArgumentError, match=r"must load from its entry point 'no_such_module_anywhere:x'"):
        registry.get("missing")
    with pytest.raises(ArgumentError, match="must not be taken"):
        registry.register("missing", len)


def test_names_taken_by_two_packages(plug_in):
    plug_in("one", "zigzag", "math:sqrt")
    plug_in("two", "zigzag", "math:floor")
    with pytest.raises(ArgumentError, match="taken twice"):
        Registry("scheduler", "attnrt.tests").names()


def test_an_entry_point_cannot_take_a_built_in_name(plug_in):
    plug_in("one", "lpt", "math:sqrt")
    registry = Registry("scheduler", "attnrt.tests")
    registry.register("lpt", len)
    assert registry.get("lpt") is len
    with pytest.raises(ArgumentError, match="'lpt' by math:sqrt and attnrt"):
        registry.names()


@pytest.mark.parametrize("name", ["two words", "a-b", "1st", "a.b"])
def test_names_of_functions_are_identifiers(name):
    for kind, named in (("backend", "a backend"), ("index builder", "an index builder")):
        registry = Registry(kind, functions=True)
        for register in (lambda r: r.register(name, len), lambda r: r.register(name)):
            with pytest.raises(
                ArgumentError, match=f"must be an identifier; got '{name}'. It names {named}$"
            ):
                register(registry)
        assert registry.names() == ()


@pytest.mark.parametrize("entry", [3, "x", {}])
def test_functions_are_callable(entry):
    registry = Registry("backend", functions=True)
    with pytest.raises(DtypeError, match="backend must be callable; got"):
        registry.register("mine", entry)
    assert registry.names() == ()
    assert Registry("scheduler").register("mine-too", entry) is entry  # objects are not functions
