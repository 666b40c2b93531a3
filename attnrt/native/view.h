// SPDX-License-Identifier: Apache-2.0
// The record of one array, and the tables that setup() fills: dtypes, devices, types.
#pragma once
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#include "dlpack.h"

namespace {

namespace dl = attnrt::dlpack;

constexpr int kMaxDims = 32;
constexpr int kMaxNumpyDtypes = 64;
constexpr int kMaxCudaDevices = 64;

// Filled once by setup() and kept for the life of the process; all entries are owned references.
struct Setup {
  PyObject* dtypes[32][5];  // by DLPack code and log2(bytes)
  PyObject* numpy_dtypes[kMaxNumpyDtypes];
  PyObject* numpy_matches[kMaxNumpyDtypes];
  int num_numpy_dtypes;
  PyObject* ndarray;
  PyTypeObject* view_type;
  PyObject* slow;    // slow(x, dtype, stream) -> TensorView
  PyObject* coerce;  // coerce(view, dtype) -> TensorView
  PyObject* cpu;     // Device
  PyObject* cuda[kMaxCudaDevices];
  PyObject* device_of;  // device_of((type, id)) -> Device
} g;

PyObject *s_data, *s_device_id, *s_itemsize, *s_ptr, *s_shape, *s_strides;
PyObject *s_dtype, *s_array_struct, *s_requires_grad, *s_is_neg, *s_exchange;

// ---------------------------------------------------------------------------------------------- the view

struct View {
  PyObject_HEAD unsigned long long ptr;
  PyObject* shape;
  PyObject* strides;
  PyObject* dtype;
  PyObject* device;
  PyObject* owner;
  PyObject* framework;
  char readonly;
  char immutable;
};

PyMemberDef view_members[] = {
    {"ptr", T_ULONGLONG, offsetof(View, ptr), READONLY, nullptr},
    {"shape", T_OBJECT_EX, offsetof(View, shape), READONLY, nullptr},
    {"strides", T_OBJECT_EX, offsetof(View, strides), READONLY, nullptr},
    {"dtype", T_OBJECT_EX, offsetof(View, dtype), READONLY, nullptr},
    {"device", T_OBJECT_EX, offsetof(View, device), READONLY, nullptr},
    {"owner", T_OBJECT_EX, offsetof(View, owner), READONLY, nullptr},
    {"framework", T_OBJECT_EX, offsetof(View, framework), READONLY, nullptr},
    {"readonly", T_BOOL, offsetof(View, readonly), READONLY, nullptr},
    {"immutable", T_BOOL, offsetof(View, immutable), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

int view_traverse(PyObject* self, visitproc visit, void* arg) {
  View* v = reinterpret_cast<View*>(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(v->owner);
  return 0;  // the other fields are tuples of ints and interned values: no cycle goes through them
}

void view_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  View* v = reinterpret_cast<View*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_CLEAR(v->shape);
  Py_CLEAR(v->strides);
  Py_CLEAR(v->dtype);
  Py_CLEAR(v->device);
  Py_CLEAR(v->framework);
  Py_CLEAR(v->owner);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// Steals shape and strides; the rest is borrowed. NULL with an exception set on failure.
PyObject* new_view(unsigned long long ptr, PyObject* shape, PyObject* strides, PyObject* dtype, PyObject* device,
                   PyObject* owner, PyObject* framework, bool readonly, bool immutable) {
  PyObject* self = (shape && strides) ? PyType_GenericAlloc(g.view_type, 0) : nullptr;
  if (!self) {
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return nullptr;
  }
  View* v = reinterpret_cast<View*>(self);
  v->ptr = ptr;
  v->shape = shape;
  v->strides = strides;
  v->dtype = Py_NewRef(dtype);
  v->device = Py_NewRef(device);
  v->owner = Py_NewRef(owner);
  v->framework = Py_NewRef(framework);
  v->readonly = readonly;
  v->immutable = immutable;
  return self;
}

PyObject* int_tuple(const std::int64_t* values, int n) {
  PyObject* out = PyTuple_New(n);
  for (int i = 0; out && i < n; ++i) {
    PyObject* item = PyLong_FromLongLong(values[i]);
    if (!item || PyTuple_SetItem(out, i, item) < 0) Py_CLEAR(out);
  }
  return out;
}

// Strides that cannot matter (a dimension of size 1, an array without elements) become what a compact array would
// have: producers fill them with anything, and kernels would have to special-case alignment and "last stride is 1".
void canonical_strides(const std::int64_t* shape, std::int64_t* strides, int ndim) {
  bool empty = false;
  for (int i = 0; i < ndim; ++i) empty |= shape[i] == 0;
  std::int64_t next = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (empty || shape[i] == 1) strides[i] = next;
    next = strides[i] * (shape[i] > 0 ? shape[i] : 1);
  }
}

int log2_bytes(int bits) {
  switch (bits) {
    case 8:
      return 0;
    case 16:
      return 1;
    case 32:
      return 2;
    case 64:
      return 3;
    default:
      return 4;
  }
}

PyObject* dtype_of(dl::DataType t) {  // borrowed, or NULL without an exception
  return (t.lanes == 1 && t.code < 32) ? g.dtypes[t.code][log2_bytes(t.bits)] : nullptr;
}

PyObject* device_of(dl::Device d) {              // borrowed, or NULL without an exception
  if (d.type == 1 || d.type == 3) return g.cpu;  // 3: pinned host memory
  if (d.type != 2 || d.id < 0 || d.id >= kMaxCudaDevices) return nullptr;
  if (!g.cuda[d.id]) {
    g.cuda[d.id] = PyObject_CallFunction(g.device_of, "((ii))", 2, static_cast<int>(d.id));
    if (!g.cuda[d.id]) PyErr_Clear();
  }
  return g.cuda[d.id];
}

}  // namespace
