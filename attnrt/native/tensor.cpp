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
#include "capsules.h"
#include "host.h"
#include "repeats.h"
#include "ways.h"

namespace {

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
PyObject* py_signature(PyObject*, PyObject* const* args, Py_ssize_t n) {
  constexpr int kMaxArrays = 16;
  if (n > kMaxArrays) {
    PyErr_Format(PyExc_ValueError, "signature takes at most %d arrays", kMaxArrays);
    return nullptr;
  }
  std::int64_t words[kMaxArrays * kWordsPerArray];
  Py_ssize_t used = 0;
  PyObject* pointers = PyTuple_New(n);
  for (Py_ssize_t i = 0; pointers && i < n; ++i) {
    unsigned long long ptr;
    if (!form_of(args[i], words, used, ptr)) {
      Py_DECREF(pointers);
      Py_RETURN_NONE;
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
    {"stage", py_stage, METH_VARARGS, nullptr},
    {"widest", py_widest, METH_VARARGS, nullptr},
    {"scan", py_scan, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

constexpr int kRevision = 5;  // raise it with every change of what Python calls, together with attnrt/reading.py

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
  PyObject* repeats = PyType_FromSpec(&repeats_spec);
  if (!repeats || PyModule_AddObjectRef(module, "Repeats", repeats) < 0) return nullptr;
  Py_DECREF(repeats);
  if (PyModule_AddIntConstant(module, "REVISION", kRevision) < 0) return nullptr;
  Py_DECREF(view);
  return module;
}
