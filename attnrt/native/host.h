// SPDX-License-Identifier: Apache-2.0
// Small helpers of the host: aligned memory, a framework's current stream, one pass over an index array.
#pragma once
#include <algorithm>

#include "ways.h"

namespace {

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

// stage(target, base, arrays, places): copies the bytes of contiguous arrays (None: nothing) to target[base + place]
PyObject* py_stage(PyObject*, PyObject* args) {
  PyObject *target, *arrays, *places;
  Py_ssize_t base;
  if (!PyArg_ParseTuple(args, "OnO!O!:stage", &target, &base, &PyTuple_Type, &arrays, &PyTuple_Type, &places))
    return nullptr;
  const Py_ssize_t n = PyTuple_Size(arrays);
  Py_buffer to;
  if (PyObject_GetBuffer(target, &to, PyBUF_WRITABLE) < 0) return nullptr;
  bool good = n == PyTuple_Size(places);
  if (!good) PyErr_SetString(PyExc_ValueError, "stage takes a place for each array");
  for (Py_ssize_t i = 0; good && i < n; ++i) {
    PyObject* array = PyTuple_GetItem(arrays, i);
    if (array == Py_None) continue;
    const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(places, i));
    Py_buffer from;
    good = !(at == -1 && PyErr_Occurred()) && PyObject_GetBuffer(array, &from, PyBUF_C_CONTIGUOUS) == 0;
    if (!good) break;
    good = base >= 0 && at >= 0 && base + at + from.len <= to.len;
    if (good)
      std::memcpy(static_cast<char*>(to.buf) + base + at, from.buf, static_cast<std::size_t>(from.len));
    else
      PyErr_SetString(PyExc_ValueError, "stage would write outside its target");
    PyBuffer_Release(&from);
  }
  PyBuffer_Release(&to);
  if (!good) return nullptr;
  Py_RETURN_NONE;
}

// widest(array, low, high) -> the largest array[:, high] - array[:, low] of a compact int32 [n, width] array, 0 if it
// is empty
PyObject* py_widest(PyObject*, PyObject* args) {
  PyObject* x;
  int low, high;
  if (!PyArg_ParseTuple(args, "Oii:widest", &x, &low, &high)) return nullptr;
  Py_buffer buffer;
  if (PyObject_GetBuffer(x, &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) return nullptr;
  const Py_ssize_t width = buffer.ndim == 2 ? buffer.shape[1] : 0;
  if (buffer.itemsize != 4 || low < 0 || high < 0 || low >= width || high >= width) {
    PyBuffer_Release(&buffer);
    PyErr_SetString(PyExc_ValueError, "widest takes an int32 array of rows and two of their places");
    return nullptr;
  }
  const std::int32_t* row = static_cast<const std::int32_t*>(buffer.buf);
  std::int32_t most = 0;
  for (Py_ssize_t i = 0; i < buffer.shape[0]; ++i, row += width) most = std::max(most, row[high] - row[low]);
  PyBuffer_Release(&buffer);
  return PyLong_FromLong(most);
}

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

}  // namespace
