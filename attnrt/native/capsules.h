// SPDX-License-Identifier: Apache-2.0
// DLPack capsules, taken over and handed out; see the array API standard for who deletes what, and when.
#pragma once
#include "view.h"

namespace {

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

}  // namespace
