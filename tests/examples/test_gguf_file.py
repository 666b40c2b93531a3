# SPDX-License-Identifier: Apache-2.0
"""The GGUF reader against the gguf package's writer and reader, and Wq's reordering against its definition."""

import numpy as np
import pytest

from attnrt.examples.generate.gguf_file import GGUFFile
from attnrt.examples.generate.weights import halves_from_pairs, read_config

gguf = pytest.importorskip("gguf")


@pytest.fixture
def written(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a.weight": rng.standard_normal((3, 64)).astype(np.float32),
        "b.weight": rng.standard_normal(7).astype(np.float32),
    }
    packed = gguf.quants.quantize(arrays["a.weight"], gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("some.count", 7)
    writer.add_float32("some.theta", 0.5)
    writer.add_bool("some.flag", True)
    writer.add_string("some.text", "wörd")
    writer.add_array("some.list", ["a", "bc", ""])
    writer.add_array("some.ints", [1, -2, 3])
    writer.add_tensor("a.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b.weight", arrays["b.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, arrays


def test_reads_what_the_package_writes(written):
    path, arrays = written
    file = GGUFFile(path)
    assert (
        file.field("some.count") == 7 and file.field("some.theta") == 0.5 and file.field("some.flag") is True
    )
    assert file.field("some.text") == "wörd"
    assert file.field("some.list") == ["a", "bc", ""] and file.field("some.ints") == [1, -2, 3]
    np.testing.assert_array_equal(file.array("b.weight"), arrays["b.weight"])
    assert file.array("a.weight").shape == (3, 64)
    np.testing.assert_allclose(file.array("a.weight"), arrays["a.weight"], atol=0.02)


def test_what_is_missing_is_named(written):
    file = GGUFFile(written[0])
    with pytest.raises(ValueError, match=r"llama\.attention\.head_count"):
        read_config(file)
    with pytest.raises(ValueError, match=r"c\.weight"):
        file.array("c.weight")


def test_pairs_become_halves():
    """Rotating neighbours of the stored rows equals rotating halves of the reordered ones."""
    rng = np.random.default_rng(1)
    heads, dim, width = 3, 8, 5
    stored, x = rng.standard_normal((heads * dim, width)), rng.standard_normal(width)
    angles = rng.standard_normal(dim // 2)
    pairs = (stored @ x).reshape(heads, dim // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    halves = (halves_from_pairs(stored, heads) @ x).reshape(heads, 2, dim // 2)
    np.testing.assert_allclose((halves[:, 0] + 1j * halves[:, 1]) * np.exp(1j * angles), turned)
