// SPDX-License-Identifier: Apache-2.0
// The ways in: which one an array's type takes (looked up once per type), and the reading itself.
#pragma once
#include "view.h"

namespace {

// ---------------------------------------------------------------------------------------------- per type

enum class Way { kExchange, kNdarray, kCupy, kOther };

struct TypeInfo {
  PyObject* type;  // owned
  Way way;
  const dl::ExchangeApi* api;
  PyObject* framework;
  bool has_grad;
};

constexpr int kMaxTypes = 64;
TypeInfo g_types[kMaxTypes];
int g_num_types = 0;

const TypeInfo kUnknown{nullptr, Way::kOther, nullptr, nullptr, false};

PyObject* framework_name(PyObject* type) {  // new reference; the root of the type's module
  PyObject* module = PyObject_GetAttrString(type, "__module__");
  if (!module || !PyUnicode_Check(module)) {
    PyErr_Clear();
    Py_XDECREF(module);
    return PyUnicode_InternFromString("unknown");
  }
  PyObject* parts = PyObject_CallMethod(module, "partition", "s", ".");
  Py_DECREF(module);
  PyObject* root = parts ? PySequence_GetItem(parts, 0) : nullptr;
  Py_XDECREF(parts);
  if (root) PyUnicode_InternInPlace(&root);
  return root;
}

const dl::ExchangeApi* exchange_api(PyObject* type) {
  PyObject* capsule = PyObject_GetAttr(type, s_exchange);
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  auto* api = static_cast<const dl::ExchangeApi*>(PyCapsule_IsValid(capsule, "dlpack_exchange_api")
                                                      ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
                                                      : nullptr);
  while (api && api->version.major > 1) api = api->previous;
  Py_DECREF(capsule);  // the table is static in the framework
  return (api && api->version.major == 1 && api->tensor_from_object) ? api : nullptr;
}

const TypeInfo* type_info(PyObject* x) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(x));
  for (int i = 0; i < g_num_types; ++i)
    if (g_types[i].type == type) return &g_types[i];
  if (g_num_types == kMaxTypes) return &kUnknown;
  TypeInfo info{type, Way::kOther, nullptr, nullptr, false};
  info.framework = framework_name(type);
  if (!info.framework) {
    PyErr_Clear();
    return &kUnknown;
  }
  int is_array = PyObject_IsSubclass(type, g.ndarray);
  PyObject* has_mask = is_array == 1 ? PyObject_GetAttrString(type, "hardmask") : nullptr;
  if (is_array == 1 && !has_mask) {
    info.way = Way::kNdarray;
  } else if (is_array == 0 && (info.api = exchange_api(type))) {
    info.way = Way::kExchange;
  }
  Py_XDECREF(has_mask);
  PyErr_Clear();
  if (info.way == Way::kOther && PyUnicode_CompareWithASCIIString(info.framework, "cupy") == 0) info.way = Way::kCupy;
  if (info.way == Way::kExchange) {
    PyObject* grad = PyObject_GetAttr(type, s_requires_grad);
    info.has_grad = grad != nullptr;
    Py_XDECREF(grad);
    PyErr_Clear();
  }
  Py_INCREF(type);
  g_types[g_num_types] = info;
  return &g_types[g_num_types++];
}

// ---------------------------------------------------------------------------------------------- the fast ways

// 1: a plain array without gradient or negation pending; 0: let the slow way say; -1: exception.
int plainly_readable(PyObject* x, const dl::Tensor& t) {
  PyObject* grad = PyObject_GetAttr(x, s_requires_grad);
  if (!grad) return -1;
  bool plain = grad == Py_False;
  Py_DECREF(grad);
  if (!plain) return 0;
  // A lazily negated tensor (torch: x.conj().imag) describes memory with the wrong sign. It is a view of complex
  // numbers, so all its strides are even: one odd stride spares the method call.
  for (int i = 0; i < t.ndim; ++i)
    if (!t.strides || (t.strides[i] & 1)) return 1;
  PyObject* negated = PyObject_CallMethodObjArgs(x, s_is_neg, nullptr);
  if (!negated) return -1;
  plain = negated == Py_False;
  Py_DECREF(negated);
  return plain;
}

struct Raw {  // an array, read; nothing owned
  unsigned long long ptr;
  int ndim;
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];
  PyObject* dtype;
  PyObject* device;
  bool readonly;
};

bool finish_raw(Raw& raw, long long itemsize) {
  bool empty = false;
  for (int i = 0; i < raw.ndim; ++i) {
    if (raw.shape[i] < 0) return false;
    empty |= raw.shape[i] == 0;
  }
  if (!empty && (raw.ptr == 0 || raw.ptr % itemsize)) return false;
  canonical_strides(raw.shape, raw.strides, raw.ndim);
  return true;
}

// Byte strides become element strides; then as finish_raw.
bool item_strides(Raw& raw, long long itemsize) {
  if (itemsize <= 0) return false;
  for (int i = 0; i < raw.ndim; ++i) {
    if (raw.strides[i] % itemsize && raw.shape[i] > 1) return false;
    raw.strides[i] /= itemsize;
  }
  return finish_raw(raw, itemsize);
}

// The readers return false, with or without an exception, where the slow way must decide.
bool read_exchange(PyObject* x, const TypeInfo& info, Raw& raw) {
  dl::Tensor t{};
  if (info.api->tensor_from_object(x, &t) != 0) return false;
  if (t.ndim < 0 || t.ndim > kMaxDims) return false;
  if (info.has_grad && plainly_readable(x, t) != 1) return false;
  raw.dtype = dtype_of(t.dtype);
  raw.device = device_of(t.device);
  if (!raw.dtype || !raw.device) return false;
  raw.ptr = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
  raw.ndim = t.ndim;
  raw.readonly = false;
  std::int64_t next = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    raw.shape[i] = t.shape[i];
    raw.strides[i] = t.strides ? t.strides[i] : next;
    next *= t.shape[i];
  }
  return finish_raw(raw, t.dtype.bits / 8);
}

struct NumpyInterface {  // behind the capsule of __array_struct__, as NumPy's array interface version 3 defines it
  int two;
  int nd;
  char kind;
  int itemsize;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // bytes
  void* data;
  PyObject* descr;
};

constexpr int kNpyAligned = 0x100, kNpyNotSwapped = 0x200, kNpyWriteable = 0x400;

PyObject* numpy_dtype(PyObject* x) {  // borrowed match, or NULL
  PyObject* dtype = PyObject_GetAttr(x, s_dtype);
  PyObject* match = nullptr;
  for (int i = 0; dtype && i < g.num_numpy_dtypes; ++i) {
    if (g.numpy_dtypes[i] == dtype) {
      match = g.numpy_matches[i];
      break;
    }
  }
  Py_XDECREF(dtype);
  return match;
}

bool read_ndarray(PyObject* x, Raw& raw) {
  raw.dtype = numpy_dtype(x);
  if (!raw.dtype) return false;
  raw.device = g.cpu;
  PyObject* capsule = PyObject_GetAttr(x, s_array_struct);
  if (!capsule) return false;
  auto* a = static_cast<NumpyInterface*>(PyCapsule_GetPointer(capsule, nullptr));
  bool ok = a && a->two == 2 && a->nd <= kMaxDims && (a->flags & kNpyAligned) && (a->flags & kNpyNotSwapped);
  if (ok) {
    raw.ptr = reinterpret_cast<std::uintptr_t>(a->data);
    raw.ndim = a->nd;
    raw.readonly = !(a->flags & kNpyWriteable);
    for (int i = 0; i < a->nd; ++i) {
      raw.shape[i] = a->shape[i];
      raw.strides[i] = a->strides[i];
    }
    ok = item_strides(raw, a->itemsize);
  }
  Py_DECREF(capsule);
  return ok;
}

// A Python int attribute; -1 with an exception on failure.
unsigned long long number_of(PyObject* x, PyObject* name) {
  PyObject* number = PyObject_GetAttr(x, name);
  const unsigned long long value = number ? PyLong_AsUnsignedLongLong(number) : -1ULL;
  Py_XDECREF(number);
  return value;
}

// A tuple of at most kMaxDims ints; its length, or -1.
int numbers_of(PyObject* x, PyObject* name, std::int64_t* out) {
  PyObject* tuple = PyObject_GetAttr(x, name);
  Py_ssize_t n = tuple && PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
  if (n > kMaxDims) n = -1;
  for (Py_ssize_t i = 0; i < n; ++i) out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  Py_XDECREF(tuple);
  return static_cast<int>(n);
}

bool read_cupy(PyObject* x, Raw& raw) {
  raw.dtype = numpy_dtype(x);
  PyObject* data = raw.dtype ? PyObject_GetAttr(x, s_data) : nullptr;
  if (!data) return false;
  raw.ptr = number_of(data, s_ptr);
  const unsigned long long id = number_of(data, s_device_id);
  Py_DECREF(data);
  raw.ndim = numbers_of(x, s_shape, raw.shape);
  const int steps = numbers_of(x, s_strides, raw.strides);
  if (PyErr_Occurred() || raw.ndim < 0 || steps != raw.ndim || id >= kMaxCudaDevices) return false;
  raw.device = device_of({2, static_cast<std::int32_t>(id)});
  raw.readonly = false;
  return raw.device != nullptr && item_strides(raw, static_cast<long long>(number_of(x, s_itemsize)));
}

// A view that was read or made before: its own fields.
bool read_view(PyObject* x, Raw& raw, bool& immutable) {
  const View* v = reinterpret_cast<View*>(x);
  raw.ptr = v->ptr;
  raw.ndim = static_cast<int>(PyTuple_Size(v->shape));
  for (int i = 0; i < raw.ndim; ++i) {
    raw.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(v->shape, i));
    raw.strides[i] = PyLong_AsLongLong(PyTuple_GetItem(v->strides, i));
  }
  raw.dtype = v->dtype;
  raw.device = v->device;
  raw.readonly = v->readonly;
  immutable = v->immutable;
  return true;
}

// False: not plainly readable. Never leaves an exception behind.
bool read_fast(PyObject* x, const TypeInfo& info, Raw& raw) {
  bool ok = info.way == Way::kExchange  ? read_exchange(x, info, raw)
            : info.way == Way::kNdarray ? read_ndarray(x, raw)
            : info.way == Way::kCupy    ? read_cupy(x, raw)
                                        : false;
  if (!ok) PyErr_Clear();
  return ok;
}

PyObject* view_of(PyObject* x, PyObject* dtype, PyObject* stream) {
  if (!g.view_type) {
    PyErr_SetString(PyExc_RuntimeError, "attnrt._tensor_native is used before attnrt.tensor has set it up");
    return nullptr;
  }
  PyObject* view = nullptr;
  if (Py_TYPE(x) == g.view_type) {
    view = Py_NewRef(x);
  } else {
    const TypeInfo* info = type_info(x);
    Raw raw;
    if (!read_fast(x, *info, raw)) return PyObject_CallFunctionObjArgs(g.slow, x, dtype, stream, nullptr);
    view = new_view(raw.ptr, int_tuple(raw.shape, raw.ndim), int_tuple(raw.strides, raw.ndim), raw.dtype, raw.device, x,
                    info->framework, raw.readonly, false);
  }
  if (!view || dtype == Py_None || reinterpret_cast<View*>(view)->dtype == dtype) return view;
  PyObject* out = PyObject_CallFunctionObjArgs(g.coerce, view, dtype, nullptr);
  Py_DECREF(view);
  return out;
}

PyObject* view_new(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"x", "dtype", "stream", nullptr};
  PyObject *x, *dtype = Py_None, *stream = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O$O:TensorView", const_cast<char**>(names), &x, &dtype, &stream))
    return nullptr;
  return view_of(x, dtype, stream);
}

PyType_Slot view_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(view_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(view_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(view_traverse)},
    {Py_tp_members, view_members},
    {0, nullptr},
};

PyType_Spec view_spec = {"attnrt._tensor_native.View", sizeof(View), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, view_slots};

}  // namespace
