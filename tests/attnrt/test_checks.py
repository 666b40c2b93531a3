# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrt import _tensor_native as native
from attnrt import checks, dtypes
from attnrt.errors import ArgumentError, DtypeError
from attnrt.tensor import TensorView


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=100), st.sampled_from(["i4", "i8"]))
def test_scan(values, dtype):
    x = np.array(values, dtype)
    assert native.scan(x) == (min(values), max(values), values == sorted(values))


def test_scan_long_arrays(rng):
    for n in (1, 7, 8, 9, 1000, 4097):
        x = rng.integers(-1000, 1000, n).astype(np.int32)
        assert native.scan(x) == (x.min(), x.max(), bool((np.diff(x) >= 0).all()))
        x.sort()
        assert native.scan(x)[2]
        for at in {1, n // 2, n - 1} - {0, n}:  # a single fall anywhere is seen
            y = x.copy()
            y[at] = y[at - 1] - 1
            assert not native.scan(y)[2]
    for bad in (
        np.zeros(0, np.int32),
        np.zeros(3, np.float32),
        np.zeros(3, np.uint32),
        np.zeros(6, np.int32)[::2],
    ):
        with pytest.raises((ValueError, BufferError)):
            native.scan(bad)


class TestHostInts:
    @pytest.mark.parametrize("dtype", ["i4", "i8", "u4", "u8", "i1", "u1", "i2", "u2"])
    def test_integer_types_convert_where_no_value_changes(self, dtype):
        got = checks.host_ints(np.array([0, 3, 100], dtype), "x")
        assert got.dtype == np.int32 and got.flags.c_contiguous and list(got) == [0, 3, 100]

    def test_int32_is_not_copied(self):
        x = np.arange(5, dtype=np.int32)
        assert checks.host_ints(x, "x") is x
        strided = np.arange(10, dtype=np.int32)[::2]
        assert list(checks.host_ints(strided, "x")) == [0, 2, 4, 6, 8]
        assert checks.host_ints(strided, "x").flags.c_contiguous

    def test_c10_int64_that_does_not_fit(self):
        for big in (2**31, -(2**31) - 1):
            with pytest.raises(ArgumentError, match="kv_indptr must hold values that fit in int32"):
                checks.host_ints(np.array([0, big]), "kv_indptr")
        with pytest.raises(ArgumentError, match="fit in int32"):
            checks.host_ints(np.array([2**31], np.uint32), "x")
        assert checks.host_ints(np.array([2**31 - 1, -(2**31)]), "x")[1] == -(2**31)

    @pytest.mark.parametrize(
        "x", [np.zeros(3), np.zeros(3, bool), [0.0, 1.0], [True, False], np.array(["1"]), ["a"]]
    )
    def test_other_types_are_refused(self, x):
        with pytest.raises(DtypeError, match="x must be int32"):
            checks.host_ints(x, "x")

    def test_lists(self):
        assert list(checks.host_ints([1, 2], "x")) == [1, 2]
        assert checks.host_ints([], "x").dtype == np.int32
        assert checks.host_ints(range(3), "x").shape == (3,)
        assert checks.host_ints([[1, 2], [3, 4]], "x", ndim=2).shape == (2, 2)
        for bad in ([[1], [2, 3]], [1, None], [2**70]):
            with pytest.raises(ArgumentError, match=r"^x must"):
                checks.host_ints(bad, "x")

    def test_frameworks(self):
        torch = pytest.importorskip("torch")
        jnp = pytest.importorskip("jax.numpy")
        for x in (torch.arange(3, dtype=torch.int32), torch.arange(3), jnp.arange(3, dtype="int32")):
            assert list(checks.host_ints(x, "x", high=2)) == [0, 1, 2]
        with pytest.raises(DtypeError):
            checks.host_ints(torch.zeros(3), "x")

    def test_device_arrays_are_refused(self, producer):
        x = producer(np.zeros(3, np.int32), shape=(3,), code=0, device=(2, 0))
        with pytest.raises(ArgumentError, match="kv_lens must be a host array; got cuda:0"):
            checks.host_ints(x, "kv_lens")

    def test_what_is_no_array_is_named(self):
        with pytest.raises(DtypeError, match="kv_lens must be an array"):
            checks.host_ints(7, "kv_lens")

    def test_rules_name_the_first_offender(self):
        x = np.array([4, 0, 9, -1, 12], np.int32)
        with pytest.raises(ArgumentError, match=r"x must be at least 0; got x\[3\] = -1"):
            checks.host_ints(x, "x", low=0)
        with pytest.raises(ArgumentError, match=r"x must be at most 8; got x\[2\] = 9"):
            checks.host_ints(x, "x", high=8)
        with pytest.raises(ArgumentError, match=r"x must never fall; got x\[1\] = 0"):
            checks.host_ints(x, "x", monotone=True)
        with pytest.raises(ArgumentError, match=r"x must be at least 0; got x\[1, 0\] = -5"):
            checks.host_ints(np.array([[1, 2], [-5, -6]], np.int32), "x", low=0, ndim=2)
        with pytest.raises(ArgumentError, match="x must have 6 entries; got 5"):
            checks.host_ints(x, "x", length=6)
        with pytest.raises(ArgumentError, match=r"x must have 1 axis; got shape \(1, 5\)"):
            checks.host_ints(x[None], "x")
        assert checks.host_ints(x, "x", low=-1, high=12) is x


def test_indptr():
    assert list(checks.indptr([0, 0, 3], "p", length=3, total=3)) == [0, 0, 3]
    assert list(checks.indptr([0], "p")) == [0]
    for bad, text in (
        ([], "at least one entry"),
        ([1, 2], r"begin with 0; got p\[0\] = 1"),
        ([0, 2, 1], r"never fall; got p\[2\] = 1"),
        ([0, 4], r"end with 3; got p\[-1\] = 4"),
    ):
        with pytest.raises(ArgumentError, match=text):
            checks.indptr(bad, "p", total=3)


def test_integer():
    assert checks.integer(np.int64(3), "n", 1, 3) == 3
    for bad in (0, 4):
        with pytest.raises(ArgumentError, match=f"n must be from 1 to 3; got {bad}"):
            checks.integer(bad, "n", 1, 3)
    with pytest.raises(ArgumentError, match="n must be at least 1"):
        checks.integer(0, "n", 1)
    for bad in (True, 1.0, "1", None, np.float32(1), np.bool_(True)):
        with pytest.raises(DtypeError, match="n must be an integer"):
            checks.integer(bad, "n")


def test_real():
    assert checks.real(np.float32(0.5), "s") == 0.5 and checks.real(2, "s") == 2.0
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ArgumentError, match="s must be finite"):
            checks.real(bad, "s")
    with pytest.raises(ArgumentError, match="greater than 0"):
        checks.real(0.0, "s", above=0)
    with pytest.raises(ArgumentError, match="at least 0"):
        checks.real(-1.0, "s", low=0)
    for bad in (True, "1", None, 1j, np.zeros(1), np.bool_(False)):
        with pytest.raises(DtypeError, match="s must be a number"):
            checks.real(bad, "s")


def test_flag_and_one_of():
    assert checks.flag(np.bool_(True), "f") is True
    with pytest.raises(DtypeError, match="True or False"):
        checks.flag(1, "f")
    assert checks.one_of("a", "c", ("a", "b")) == "a"
    with pytest.raises(ArgumentError, match="one of 'a', 'b'; got 'z'"):
        checks.one_of("z", "c", ("a", "b"))


def test_shape_and_dtype():
    view = TensorView(np.zeros((3, 4), np.float32))
    assert checks.check_shape(view, "q", (None, 4)) is view
    with pytest.raises(ArgumentError, match=r"q must have shape \[rows, dim\] = \[any, 5\]; got \[3, 4\]"):
        checks.check_shape(view, "q", (None, 5), "[rows, dim]")
    with pytest.raises(ArgumentError, match=r"got \[3, 4\]"):
        checks.check_shape(view, "q", (3, 4, 1))
    assert checks.check_dtype(view, "q", dtypes.float16, dtypes.float32) is view
    with pytest.raises(DtypeError, match="q must be float16 or int32; got float32"):
        checks.check_dtype(view, "q", dtypes.float16, dtypes.int32)
