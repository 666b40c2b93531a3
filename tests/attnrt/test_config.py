# SPDX-License-Identifier: Apache-2.0
import dataclasses
import os
import re
import warnings
from pathlib import Path

import pytest

import attnrt
from attnrt import config as config_module
from attnrt.config import Config, usable_cache_dir
from attnrt.errors import ArgumentError

ROOT = Path(attnrt.__file__).resolve().parents[1]


def test_defaults():
    c = Config.from_env({})
    assert (c.forbid_compile, c.log, c.cxx, c.backend) == (False, None, None, None)
    assert c.num_threads >= 1 and c.cache_dir.name == "attnrt"
    assert Config.from_env(dict.fromkeys(NAMES, "")) == c
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.log = "debug"


NAMES = (
    *("ATTNRT_CACHE_DIR", "ATTNRT_FORBID_COMPILE", "ATTNRT_NUM_THREADS"),
    *("ATTNRT_LOG", "ATTNRT_CXX", "ATTNRT_BACKEND"),
)


def test_values(tmp_path):
    values = (str(tmp_path), "1", "3", "DEBUG", "clang++", "cpu")
    c = Config.from_env(dict(zip(NAMES, values, strict=True)))
    assert c == Config(
        cache_dir=tmp_path, forbid_compile=True, num_threads=3, log="debug", cxx="clang++", backend="cpu"
    )
    assert Config.from_env({"ATTNRT_CACHE_DIR": "~/x"}).cache_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ATTNRT_FORBID_COMPILE", "maybe"), ("ATTNRT_NUM_THREADS", "0"), ("ATTNRT_NUM_THREADS", "-1")),
        *(("ATTNRT_NUM_THREADS", "two"), ("ATTNRT_NUM_THREADS", "1.5"), ("ATTNRT_LOG", "loud")),
    ],
)
def test_bad_values_name_the_variable(name, value):
    with pytest.raises(ArgumentError, match=f"^{name} must be"):
        Config.from_env({name: value})


def test_the_environment_is_read_in_one_place():
    readers = set()
    names = set(re.findall(r"\bATTNRT_[A-Z_]+\b", Path(config_module.__file__).read_text()))
    for folder in ("attnrt", "formats", "scheduler", "variants", "backends"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if re.search(r"\bos\.(environ|getenv)\b", text):
                readers.add(path.relative_to(ROOT).as_posix())
    readers = {r for r in readers if not r.startswith("attnrt/") or (ROOT / r).resolve() == ROOT / r}
    assert readers == {"attnrt/config.py"}
    assert names == set(NAMES) and len(NAMES) <= 6


@pytest.fixture
def temp(tmp_path, monkeypatch):
    place = tmp_path / "temp"
    place.mkdir()
    monkeypatch.setattr(config_module.tempfile, "gettempdir", lambda: str(place))
    monkeypatch.setattr(config_module.tempfile, "tempdir", str(place))
    usable_cache_dir.cache_clear()
    yield place
    usable_cache_dir.cache_clear()


def test_a_writable_directory_is_made_and_taken(tmp_path, temp):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert usable_cache_dir(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())


def test_c92_fallback_with_one_warning(tmp_path, temp):
    blocked = tmp_path / "file"
    blocked.write_text("")  # the cache directory is a file; below it nothing can be made, even by root
    with pytest.warns(RuntimeWarning, match="ATTNRT_CACHE_DIR") as caught:
        found = {usable_cache_dir(blocked) for _ in range(3)}
    assert len(caught) == 1 and len(found) == 1
    place = found.pop()
    assert place.parent == temp and place.is_dir() and not place.stat().st_mode & 0o077
    with pytest.warns(RuntimeWarning):
        assert usable_cache_dir(blocked / "below") == place


def test_c92_a_fallback_that_others_may_write_is_passed_over(tmp_path, temp):
    blocked = tmp_path / "file"
    blocked.write_text("")
    taken = temp / f"attnrt-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    with pytest.warns(RuntimeWarning):
        found = usable_cache_dir(blocked)
    assert found != taken and found.parent == temp and not found.stat().st_mode & 0o077


def test_c92_a_symlink_is_no_private_directory(tmp_path, temp):
    blocked = tmp_path / "file"
    blocked.write_text("")
    (tmp_path / "elsewhere").mkdir()
    (temp / f"attnrt-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning):
        assert not usable_cache_dir(blocked).is_symlink()
