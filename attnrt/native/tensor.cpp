// SPDX-License-Identifier: Apache-2.0
// The array reader: turns anybody's array into one small record, fast enough to do it for every argument of
// every call. Three ways in, by the array's type (looked up once per type):
//   exchange   the type carries __dlpack_c_exchange_api__: its C function fills a DLTensor on our stack;
//   ndarray    NumPy: __array_struct__ (it also carries ml_dtypes, which NumPy's DLPack and buffers refuse);
//   cupy       CuPy: its attributes (its DLPack gives negative strides divided as unsigned numbers);
//   other      everything else, and every array that is not plainly fine, goes to a Python function that takes its
//              time, reads a capsule through read_capsule() below, and says what is wrong with a typed error.
// This is an extension module and not a cffi one: cffi releases the interpreter lock around each call and cannot pass
// objects, and both cost more than the reading itself. It keeps to the limited C API of Python 3.11 (abi3).
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

// ---------------------------------------------------------------------------------------------- module functions

PyObject* py_view(PyObject*, PyObject* x) { return view_of(x, Py_None, Py_None); }

PyObject* py_views(PyObject*, PyObject* const* args, Py_ssize_t n) {
  PyObject* out = PyTuple_New(n);
  for (Py_ssize_t i = 0; out && i < n; ++i) {
    PyObject* view = view_of(args[i], Py_None, Py_None);
    if (!view || PyTuple_SetItem(out, i, view) < 0) Py_CLEAR(out);
  }
  return out;
}

// signature(*arrays) -> (key, pointers), or None where one of the arrays needs the slow way. The key is equal for
// two calls exactly if the arrays agree in everything but their addresses: who has checked it once need not again.
// Layout per array: dtype and device identities, flags, ndim, then shape and strides as 64-bit integers.
PyObject* py_signature(PyObject*, PyObject* const* args, Py_ssize_t n) {
  constexpr int kMaxArrays = 16;
  constexpr int kMaxWords = 4 + 2 * kMaxDims;
  if (n > kMaxArrays) {
    PyErr_Format(PyExc_ValueError, "signature takes at most %d arrays", kMaxArrays);
    return nullptr;
  }
  std::int64_t words[kMaxArrays * kMaxWords];
  Py_ssize_t used = 0;
  PyObject* pointers = PyTuple_New(n);
  for (Py_ssize_t i = 0; pointers && i < n; ++i) {
    Raw raw;
    unsigned long long ptr = 0;
    if (args[i] == Py_None) {
      words[used++] = 0;
    } else {
      bool ok, immutable = false;
      PyObject* framework;
      if (Py_TYPE(args[i]) == g.view_type) {
        ok = read_view(args[i], raw, immutable);
        framework = reinterpret_cast<View*>(args[i])->framework;
      } else {
        const TypeInfo* info = g.view_type ? type_info(args[i]) : &kUnknown;
        ok = read_fast(args[i], *info, raw);
        framework = info->framework;
      }
      if (!ok) {
        Py_DECREF(pointers);
        Py_RETURN_NONE;
      }
      ptr = raw.ptr;
      words[used++] = reinterpret_cast<std::intptr_t>(raw.dtype);
      words[used++] = reinterpret_cast<std::intptr_t>(raw.device);
      words[used++] = reinterpret_cast<std::intptr_t>(framework);
      words[used++] = raw.ndim * 4 + raw.readonly * 2 + immutable;
      std::memcpy(words + used, raw.shape, sizeof(std::int64_t) * raw.ndim);
      used += raw.ndim;
      std::memcpy(words + used, raw.strides, sizeof(std::int64_t) * raw.ndim);
      used += raw.ndim;
    }
    PyObject* item = PyLong_FromUnsignedLongLong(ptr);
    if (!item || PyTuple_SetItem(pointers, i, item) < 0) Py_CLEAR(pointers);
  }
  if (!pointers) return nullptr;
  PyObject* key = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words), used * sizeof(std::int64_t));
  PyObject* out = key ? PyTuple_New(2) : nullptr;
  if (!out) {
    Py_DECREF(pointers);
    Py_XDECREF(key);
    return nullptr;
  }
  PyTuple_SetItem(out, 0, key);
  PyTuple_SetItem(out, 1, pointers);
  return out;
}

// moved(view, ptr, owner) -> the same view at another address
PyObject* py_moved(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 3 || Py_TYPE(args[0]) != g.view_type) {
    PyErr_SetString(PyExc_TypeError, "moved takes a TensorView, an address and an owner");
    return nullptr;
  }
  const View* v = reinterpret_cast<View*>(args[0]);
  const unsigned long long ptr = PyLong_AsUnsignedLongLong(args[1]);
  if (ptr == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return nullptr;
  return new_view(ptr, Py_NewRef(v->shape), Py_NewRef(v->strides), v->dtype, v->device, args[2], v->framework,
                  v->readonly, v->immutable);
}

// make(ptr, shape, strides, dtype, device, owner, framework, readonly, immutable) -> TensorView
// The slow way's constructor: shape and strides are tuples of ints, already checked.
PyObject* py_make(PyObject*, PyObject* args) {
  unsigned long long ptr;
  PyObject *shape, *strides, *dtype, *device, *owner, *framework;
  int readonly, immutable;
  if (!PyArg_ParseTuple(args, "KO!O!OOOUpp:make", &ptr, &PyTuple_Type, &shape, &PyTuple_Type, &strides, &dtype, &device,
                        &owner, &framework, &readonly, &immutable))
    return nullptr;
  std::int64_t dims[kMaxDims], steps[kMaxDims];
  Py_ssize_t ndim = PyTuple_Size(shape);
  if (ndim > kMaxDims || PyTuple_Size(strides) != ndim) {
    PyErr_Format(PyExc_ValueError, "shape and strides must have one length, at most %d", kMaxDims);
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    steps[i] = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
  }
  if (PyErr_Occurred()) return nullptr;
  const int n = static_cast<int>(ndim);
  canonical_strides(dims, steps, n);
  Py_INCREF(framework);
  PyUnicode_InternInPlace(&framework);  // signature() tells frameworks apart by identity
  PyObject* out =
      new_view(ptr, int_tuple(dims, n), int_tuple(steps, n), dtype, device, owner, framework, readonly, immutable);
  Py_DECREF(framework);
  return out;
}

// ---- capsules in

void release_managed(PyObject* capsule) {
  auto* m = static_cast<dl::Managed*>(PyCapsule_GetPointer(capsule, "attnrt.dlpack"));
  if (m && m->deleter) m->deleter(m);
}

void release_versioned(PyObject* capsule) {
  auto* m = static_cast<dl::ManagedVersioned*>(PyCapsule_GetPointer(capsule, "attnrt.dlpack_versioned"));
  if (m && m->deleter) m->deleter(m);
}

// read_capsule(capsule) -> (ptr, shape, strides | None, code, bits, lanes, device type, device id, readonly, owner)
// Takes the capsule over: it is renamed, and `owner` calls the producer's deleter when it dies.
// Raises ValueError if the capsule was taken before or is none of DLPack's.
PyObject* py_read_capsule(PyObject*, PyObject* capsule) {
  const bool versioned = PyCapsule_IsValid(capsule, "dltensor_versioned");
  if (!versioned && !PyCapsule_IsValid(capsule, "dltensor")) {
    const bool used =
        PyCapsule_IsValid(capsule, "used_dltensor") || PyCapsule_IsValid(capsule, "used_dltensor_versioned");
    PyErr_SetString(PyExc_ValueError, used ? "consumed" : "not a DLPack capsule");
    return nullptr;
  }
  void* raw = PyCapsule_GetPointer(capsule, versioned ? "dltensor_versioned" : "dltensor");
  auto* old = static_cast<dl::Managed*>(raw);
  auto* now = static_cast<dl::ManagedVersioned*>(raw);
  if (versioned && now->version.major != 1) {
    PyErr_Format(PyExc_ValueError, "DLPack version %u", static_cast<unsigned>(now->version.major));
    return nullptr;  // not consumed: the producer's destructor stays in charge
  }
  const dl::Tensor& t = versioned ? now->tensor : old->tensor;
  if (t.ndim < 0 || t.ndim > kMaxDims) {
    PyErr_Format(PyExc_ValueError, "%d dimensions", static_cast<int>(t.ndim));
    return nullptr;
  }
  PyObject* shape = int_tuple(t.shape, t.ndim);
  PyObject* strides = t.strides ? int_tuple(t.strides, t.ndim) : Py_NewRef(Py_None);
  PyObject* owner = (shape && strides) ? PyCapsule_New(raw, versioned ? "attnrt.dlpack_versioned" : "attnrt.dlpack",
                                                       versioned ? release_versioned : release_managed)
                                       : nullptr;
  if (!owner) {
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return nullptr;
  }
  PyCapsule_SetName(capsule, versioned ? "used_dltensor_versioned" : "used_dltensor");
  const bool readonly = versioned && (now->flags & dl::kReadOnly);
  const unsigned long long ptr = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
  return Py_BuildValue("KNNiiiiiNN", ptr, shape, strides, static_cast<int>(t.dtype.code),
                       static_cast<int>(t.dtype.bits), static_cast<int>(t.dtype.lanes), static_cast<int>(t.device.type),
                       static_cast<int>(t.device.id), PyBool_FromLong(readonly), owner);
}

// ---- capsules out

template <class M>
struct Export {  // one allocation for the record and its two arrays
  M managed;
  std::int64_t dims[2 * kMaxDims];
  PyObject* owner;
};

template <class M>
void delete_export(M* m) {
  auto* e = static_cast<Export<M>*>(m->context);
  if (Py_IsInitialized()) {  // any thread, with or without the lock; after the interpreter nothing is left to free
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(e->owner);
    PyGILState_Release(state);
  }
  delete e;
}

template <class M>
void unused_export(PyObject* capsule) {
  constexpr bool versioned = sizeof(M) == sizeof(dl::ManagedVersioned);
  const char* name = versioned ? "dltensor_versioned" : "dltensor";
  if (!PyCapsule_IsValid(capsule, name)) return;  // taken over: its consumer deletes
  auto* m = static_cast<M*>(PyCapsule_GetPointer(capsule, name));
  m->deleter(m);
}

template <class M>
PyObject* export_as(const char* name, const dl::Tensor& t, const std::int64_t* dims, PyObject* owner, bool readonly) {
  auto* e = new (std::nothrow) Export<M>{};
  if (!e) return PyErr_NoMemory();
  std::memcpy(e->dims, dims, sizeof(e->dims));
  e->managed.tensor = t;
  e->managed.tensor.shape = e->dims;
  e->managed.tensor.strides = e->dims + kMaxDims;
  e->managed.context = e;
  e->managed.deleter = delete_export<M>;
  if constexpr (sizeof(M) == sizeof(dl::ManagedVersioned)) {
    e->managed.version = {1, 1};
    e->managed.flags = readonly ? dl::kReadOnly : 0;
  }
  PyObject* capsule = PyCapsule_New(&e->managed, name, unused_export<M>);
  if (!capsule) {
    delete e;
    return nullptr;
  }
  e->owner = Py_NewRef(owner);
  return capsule;
}

// export_capsule(view, code, bits, device type, device id, versioned) -> capsule keeping the view alive
PyObject* py_export_capsule(PyObject*, PyObject* args) {
  PyObject* object;
  int code, bits, device_type, device_id, versioned;
  if (!PyArg_ParseTuple(args, "O!iiiip:export_capsule", g.view_type, &object, &code, &bits, &device_type, &device_id,
                        &versioned))
    return nullptr;
  const View* v = reinterpret_cast<View*>(object);
  std::int64_t dims[2 * kMaxDims] = {};
  const Py_ssize_t ndim = PyTuple_Size(v->shape);
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    dims[i] = PyLong_AsLongLong(PyTuple_GetItem(v->shape, i));
    dims[kMaxDims + i] = PyLong_AsLongLong(PyTuple_GetItem(v->strides, i));
  }
  dl::Tensor t{};
  t.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(v->ptr));
  t.device = {device_type, device_id};
  t.ndim = static_cast<std::int32_t>(ndim);
  t.dtype = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), 1};
  return versioned ? export_as<dl::ManagedVersioned>("dltensor_versioned", t, dims, object, v->readonly)
                   : export_as<dl::Managed>("dltensor", t, dims, object, v->readonly);
}

// ---- memory, streams, scans

void free_block(PyObject* capsule) { std::free(PyCapsule_GetPointer(capsule, "attnrt.block")); }

// allocate(nbytes, alignment) -> (ptr, owner). Zero bytes still get an address of their own.
PyObject* py_allocate(PyObject*, PyObject* args) {
  Py_ssize_t nbytes, alignment;
  if (!PyArg_ParseTuple(args, "nn:allocate", &nbytes, &alignment)) return nullptr;
  void* block = nullptr;
  const std::size_t size = nbytes > 0 ? static_cast<std::size_t>(nbytes) : 1;
  if (nbytes < 0 || posix_memalign(&block, static_cast<std::size_t>(alignment), size) != 0) return PyErr_NoMemory();
  PyObject* owner = PyCapsule_New(block, "attnrt.block", free_block);
  if (!owner) {
    std::free(block);
    return nullptr;
  }
  return Py_BuildValue("KN", static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(block)), owner);
}

// current_stream(x, device type, device id) -> the stream its framework works on, or None where it cannot say
PyObject* py_current_stream(PyObject*, PyObject* args) {
  PyObject* x;
  int device_type, device_id;
  if (!PyArg_ParseTuple(args, "Oii:current_stream", &x, &device_type, &device_id)) return nullptr;
  const TypeInfo* info = g.view_type ? type_info(x) : &kUnknown;
  if (!info->api || !info->api->current_stream) Py_RETURN_NONE;
  void* stream = nullptr;
  if (info->api->current_stream(device_type, device_id, &stream) != 0) return nullptr;
  return PyLong_FromUnsignedLongLong(reinterpret_cast<std::uintptr_t>(stream));
}

// One pass for the three questions a check asks. Compiled for several instruction sets and chosen by the loader: the
// baseline of x86-64 has no 32-bit minimum, and this is most of the cost of checking a long index.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define ATTNRT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define ATTNRT_CLONES
#endif

struct Scan {
  long long low, high;
  bool rising;
};

#define ATTNRT_SCAN(NAME, T)                          \
  ATTNRT_CLONES Scan NAME(const T* x, Py_ssize_t n) { \
    T low = x[0], high = x[0], falls = 0;             \
    for (Py_ssize_t i = 1; i < n; ++i) {              \
      low = x[i] < low ? x[i] : low;                  \
      high = x[i] > high ? x[i] : high;               \
      falls |= static_cast<T>(x[i] < x[i - 1]);       \
    }                                                 \
    return {low, high, falls == 0};                   \
  }

ATTNRT_SCAN(scan32, std::int32_t)
ATTNRT_SCAN(scan64, std::int64_t)

// scan(array) -> (smallest, largest, never falls) of a compact, non-empty int32 or int64 array (anything with a buffer)
PyObject* py_scan(PyObject*, PyObject* x) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(x, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return nullptr;
  const bool integers = buffer.format && std::strchr("ilq", buffer.format[0]) && !buffer.format[1];
  if (!integers || buffer.len <= 0 || (buffer.itemsize != 4 && buffer.itemsize != 8)) {
    PyBuffer_Release(&buffer);
    PyErr_SetString(PyExc_ValueError, "scan takes a non-empty int32 or int64 array");
    return nullptr;
  }
  const Py_ssize_t n = buffer.len / buffer.itemsize;
  const Scan found = buffer.itemsize == 4 ? scan32(static_cast<const std::int32_t*>(buffer.buf), n)
                                          : scan64(static_cast<const std::int64_t*>(buffer.buf), n);
  PyBuffer_Release(&buffer);
  return Py_BuildValue("LLO", found.low, found.high, found.rising ? Py_True : Py_False);
}

// setup(view_type, ndarray, dtypes, numpy dtypes, cpu, device_of, slow, coerce): called once by attnrt.tensor.
// dtypes: {(code, bits): Dtype}; numpy dtypes: {numpy.dtype: Dtype}.
PyObject* py_setup(PyObject*, PyObject* args) {
  PyObject *view_type, *ndarray, *dtypes, *numpy_dtypes, *cpu, *device_of_fn, *slow, *coerce;
  if (!PyArg_ParseTuple(args, "O!OO!O!OOOO:setup", &PyType_Type, &view_type, &ndarray, &PyDict_Type, &dtypes,
                        &PyDict_Type, &numpy_dtypes, &cpu, &device_of_fn, &slow, &coerce))
    return nullptr;
  PyObject *key, *value;
  Py_ssize_t pos = 0;
  while (PyDict_Next(dtypes, &pos, &key, &value)) {
    int code, bits;
    if (!PyArg_ParseTuple(key, "ii", &code, &bits)) return nullptr;
    if (code < 0 || code >= 32 || log2_bytes(bits) == 4) {
      PyErr_SetString(PyExc_ValueError, "a dtype code or width is out of range");
      return nullptr;
    }
    g.dtypes[code][log2_bytes(bits)] = Py_NewRef(value);
  }
  pos = 0;
  while (PyDict_Next(numpy_dtypes, &pos, &key, &value) && g.num_numpy_dtypes < kMaxNumpyDtypes) {
    g.numpy_dtypes[g.num_numpy_dtypes] = Py_NewRef(key);
    g.numpy_matches[g.num_numpy_dtypes++] = Py_NewRef(value);
  }
  g.ndarray = Py_NewRef(ndarray);
  g.cpu = Py_NewRef(cpu);
  g.device_of = Py_NewRef(device_of_fn);
  g.slow = Py_NewRef(slow);
  g.coerce = Py_NewRef(coerce);
  g.view_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(view_type));
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"setup", py_setup, METH_VARARGS, nullptr},
    {"view", py_view, METH_O, nullptr},
    {"views", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_views)), METH_FASTCALL, nullptr},
    {"signature", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_signature)), METH_FASTCALL, nullptr},
    {"make", py_make, METH_VARARGS, nullptr},
    {"moved", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_moved)), METH_FASTCALL, nullptr},
    {"read_capsule", py_read_capsule, METH_O, nullptr},
    {"export_capsule", py_export_capsule, METH_VARARGS, nullptr},
    {"allocate", py_allocate, METH_VARARGS, nullptr},
    {"current_stream", py_current_stream, METH_VARARGS, nullptr},
    {"scan", py_scan, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

constexpr int kRevision = 2;  // raise it with every change of what Python calls, together with attnrt/reading.py

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "attnrt._tensor_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__tensor_native() {
  s_data = PyUnicode_InternFromString("data");
  s_device_id = PyUnicode_InternFromString("device_id");
  s_itemsize = PyUnicode_InternFromString("itemsize");
  s_ptr = PyUnicode_InternFromString("ptr");
  s_shape = PyUnicode_InternFromString("shape");
  s_strides = PyUnicode_InternFromString("strides");
  s_dtype = PyUnicode_InternFromString("dtype");
  s_array_struct = PyUnicode_InternFromString("__array_struct__");
  s_requires_grad = PyUnicode_InternFromString("requires_grad");
  s_is_neg = PyUnicode_InternFromString("is_neg");
  s_exchange = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  PyObject* module = PyModule_Create(&module_def);
  PyObject* view = PyType_FromSpec(&view_spec);
  if (!module || !view || PyModule_AddObjectRef(module, "View", view) < 0) return nullptr;
  if (PyModule_AddIntConstant(module, "REVISION", kRevision) < 0) return nullptr;
  Py_DECREF(view);
  return module;
}
