# SPDX-License-Identifier: Apache-2.0
import pickle

import ml_dtypes
import numpy as np
import pytest

from attnrt import dtypes
from attnrt.errors import DtypeError

SPELLINGS = {
    "float32": ["float32", "fp32", "float", np.float32, np.dtype("float32"), "torch.float32"],
    "float16": ["float16", "fp16", "half", np.float16],
    "bfloat16": ["bfloat16", "bf16", "BFloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
    "float8_e4m3fn": ["float8_e4m3fn", "fp8_e4m3", "float8_e4m3", ml_dtypes.float8_e4m3fn],
    "float8_e5m2": ["float8_e5m2", "fp8_e5m2", ml_dtypes.float8_e5m2],
    "float64": ["float64", "double", np.float64],
    "int32": ["int32", np.int32, np.dtype("<i4")],
    "int64": ["int64", np.int64],
    "uint8": ["uint8", np.uint8],
    "bool": ["bool", "bool_", np.bool_, bool],
}


@pytest.mark.parametrize(("name", "spelling"), [(n, s) for n, all_ in SPELLINGS.items() for s in all_])
def test_every_spelling_is_one_object(name, spelling):
    assert dtypes.as_dtype(spelling) is dtypes.DTYPES[name]
    assert dtypes.dtype_name(spelling) == name


@pytest.mark.parametrize("name", list(dtypes.DTYPES))
def test_numpy_dtype_agrees(name):
    dtype = dtypes.DTYPES[name]
    assert dtype.numpy.name == name
    assert dtype.numpy.itemsize == dtype.itemsize == dtype.bits // 8
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    try:
        known_by_string = np.dtype(dtype.numpy.str) == dtype.numpy
    except TypeError:
        known_by_string = False
    assert dtype.is_native == known_by_string


def test_torch_and_jax_dtypes_are_read_by_name():
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    for name in dtypes.DTYPES:
        assert dtypes.as_dtype(getattr(torch, name)).name == name
        assert dtypes.as_dtype(getattr(jnp, name)).name == name


def test_c90_dlpack_codes_agree_with_torch():
    torch = pytest.importorskip("torch")
    from attnrt.tensor import TensorView

    for name, dtype in dtypes.DTYPES.items():
        assert TensorView(torch.empty(3, dtype=getattr(torch, name))).dtype is dtype


@pytest.mark.parametrize(
    "unknown",
    [
        *("float8", "int4", "", "complex64", None, float, int, str, 3, object()),
        *(np.dtype(">f4"), np.complex64, np.dtype("O"), np.dtype("V2"), np.dtype("S4"), np.dtype("M8[s]")),
        *(ml_dtypes.float8_e4m3, np.dtype(ml_dtypes.float8_e4m3), ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4),
    ],
)
def test_unknown_dtypes_raise(unknown):
    if unknown is int:
        assert dtypes.as_dtype(int).name == "int64"
        return
    with pytest.raises(DtypeError, match="kv_dtype must be a known dtype"):
        dtypes.as_dtype(unknown, "kv_dtype")
