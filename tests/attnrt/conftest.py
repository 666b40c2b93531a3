# SPDX-License-Identifier: Apache-2.0
"""A producer of DLPack capsules whose every field a test can set, and which counts what becomes of them."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def capsule_name(capsule: object) -> str:
    return _api.PyCapsule_GetName(capsule).decode()


class Producer:
    """An array-like over ``data`` (a NumPy array that holds the bytes) with any DLPack fields.

    ``deleted`` counts the calls of the deleter; ``asked`` lists the keyword arguments of each ``__dlpack__`` call.
    """

    def __init__(self, data, *, shape, strides=None, code=2, bits=32, lanes=1, byte_offset=0, **rest):
        self.data = data
        self.device = rest.pop("device", (1, 0))
        self.flags = rest.pop("flags", 0)
        self.version = rest.pop("version", (1, 0))  # None: a capsule from before DLPack 1.0
        self.takes_version = rest.pop("takes_version", True)
        self.null = rest.pop("null", False)
        assert not rest
        self.deleted = 0
        self.asked = []
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * max(len(shape), 1))(*strides)
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._count)
        self._tensor = _Tensor(
            None if self.null else data.ctypes.data,
            *self.device,
            len(shape),
            code,
            bits,
            lanes,
            self._shape,
            self._strides,
            byte_offset,
        )
        self._records = []

    def _count(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        if "max_version" in kwargs and not self.takes_version:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked.append(kwargs)
        delete = ctypes.cast(self._deleter, ctypes.c_void_p)
        if self.version is None:
            record, name = _Managed(self._tensor, None, delete), b"dltensor"
        else:
            record = _Versioned(*self.version, None, delete, self.flags, self._tensor)
            name = b"dltensor_versioned"
        self._records.append(record)
        return _api.PyCapsule_New(ctypes.addressof(record), name, None)


@pytest.fixture(autouse=True)
def jax_on_the_cpu(request):
    """JAX arrays of tests that need no GPU lie on the CPU, also where JAX has a GPU."""
    jax = sys.modules.get("jax")
    if jax is None or request.node.get_closest_marker("gpu"):
        yield
        return
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def producer():
    return Producer


@pytest.fixture
def name_of_capsule():
    return capsule_name


@pytest.fixture
def take_over():
    """take_over(capsule): consume it as C would, and return a function that calls the deleter without Python's lock."""

    def take(capsule):
        versioned = capsule_name(capsule) == "dltensor_versioned"
        name = b"dltensor_versioned" if versioned else b"dltensor"
        address = _api.PyCapsule_GetPointer(capsule, name)
        used = b"used_" + name
        _names.append(used)  # the capsule keeps the pointer
        assert _api.PyCapsule_SetName(capsule, used) == 0
        record = (_Versioned if versioned else _Managed).from_address(address)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(record.deleter)
        return lambda: call(address)

    return take


_names: list[bytes] = []


@pytest.fixture
def rng():
    return np.random.default_rng()
