// SPDX-License-Identifier: Apache-2.0
// Reads the four arrays of a paged index in one pass: check, copy, lengths, bottom-right positions.
//
// An optimisation only. It answers None to whatever is not plainly right (another dtype, a strided array, a broken
// rule), and formats/paged.py then goes the readable way, which converts or raises. In NumPy calls the same costs three
// times as much for one request, because a call is dearer than its work. The result is one bytes object, whose views
// are read-only by nature.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// Several instruction sets, chosen by the loader: the baseline of x86-64 has no 32-bit minimum.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define ATTNRT_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define ATTNRT_CLONES
#endif

struct Range {
  std::int32_t low, high;
};

ATTNRT_CLONES Range copy_range(std::int32_t* to, const std::int32_t* from, Py_ssize_t n) {
  std::int32_t low = INT32_MAX, high = -1;
  for (Py_ssize_t i = 0; i < n; ++i) {
    const std::int32_t x = from[i];
    to[i] = x;
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  return {low, high};
}

// A compact one-dimensional int32 array, held while this lives; data is null if the object is anything else.
class Ints {
 public:
  explicit Ints(PyObject* x) {
    if (PyObject_GetBuffer(x, &buffer_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
      PyErr_Clear();
      return;
    }
    held_ = true;
    const char* format = buffer_.format;
    const bool ints = format && (format[0] == 'i' || format[0] == 'l') && format[1] == 0 && buffer_.itemsize == 4;
    if (ints && buffer_.ndim == 1) {
      data = static_cast<const std::int32_t*>(buffer_.buf);
      size = buffer_.len / 4;
    }
  }
  ~Ints() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  Ints(const Ints&) = delete;
  Ints& operator=(const Ints&) = delete;

  const std::int32_t* data = nullptr;
  Py_ssize_t size = 0;

 private:
  Py_buffer buffer_{};
  bool held_ = false;
};

// Starts at 0 and never falls.
bool is_indptr(const Ints& x) {
  if (!x.data || x.size < 1 || x.data[0] != 0) return false;
  std::int32_t falls = 0;
  for (Py_ssize_t i = 1; i < x.size; ++i) falls |= static_cast<std::int32_t>(x.data[i] < x.data[i - 1]);
  return falls == 0;
}

// paged(qo_indptr, kv_indptr, kv_indices, kv_lens, page_size) -> (bytes, num_qo, longest qo_len, largest id) or None.
// bytes, int32: qo_indptr [n + 1], kv_indptr [n + 1], kv_lens [n], qo_lens [n], request [num_qo], qo_pos [num_qo],
// kv_indices.
PyObject* py_paged(PyObject*, PyObject* args) {
  PyObject *qo_object, *kv_object, *ids_object, *lens_object;
  long long page_size;
  if (!PyArg_ParseTuple(args, "OOOOL:paged", &qo_object, &kv_object, &ids_object, &lens_object, &page_size))
    return nullptr;
  const Ints qo(qo_object), kv(kv_object), ids(ids_object), lens(lens_object);
  if (page_size < 1 || page_size > INT32_MAX || !ids.data || !lens.data || !is_indptr(qo) || !is_indptr(kv))
    Py_RETURN_NONE;
  const Py_ssize_t n = lens.size;
  if (qo.size != n + 1 || kv.size != n + 1 || ids.size != kv.data[n]) Py_RETURN_NONE;
  std::int64_t longest_qo = 0, longest_kv = 0;
  bool fits = true;
  for (Py_ssize_t r = 0; r < n; ++r) {
    const std::int64_t pages = static_cast<std::int64_t>(kv.data[r + 1]) - kv.data[r], len = lens.data[r];
    fits &= len >= 0 && len <= pages * page_size;
    longest_qo = std::max<std::int64_t>(longest_qo, static_cast<std::int64_t>(qo.data[r + 1]) - qo.data[r]);
    longest_kv = std::max(longest_kv, len);
  }
  const std::int64_t num_qo = qo.data[n];
  if (!fits || longest_kv + num_qo > INT32_MAX) Py_RETURN_NONE;

  const std::int64_t count = 2 * (n + 1) + 2 * n + 2 * num_qo + ids.size;
  PyObject* bytes = PyBytes_FromStringAndSize(nullptr, 4 * static_cast<Py_ssize_t>(count));
  if (!bytes) return nullptr;
  auto* out = reinterpret_cast<std::int32_t*>(PyBytes_AsString(bytes));
  std::memcpy(out, qo.data, 4 * (n + 1));
  std::memcpy(out += n + 1, kv.data, 4 * (n + 1));
  std::memcpy(out += n + 1, lens.data, 4 * n);
  std::int32_t* qo_lens = out += n;
  std::int32_t* request = out += n;
  std::int32_t* qo_pos = out += num_qo;
  for (Py_ssize_t r = 0; r < n; ++r) {
    qo_lens[r] = qo.data[r + 1] - qo.data[r];
    for (std::int32_t q = qo.data[r]; q < qo.data[r + 1]; ++q) {
      request[q] = static_cast<std::int32_t>(r);
      qo_pos[q] = lens.data[r] - qo.data[r + 1] + q;
    }
  }
  const Range range = copy_range(out + num_qo, ids.data, ids.size);
  if (range.low < -1) {
    Py_DECREF(bytes);
    Py_RETURN_NONE;
  }
  return Py_BuildValue("NLLi", bytes, static_cast<long long>(num_qo), static_cast<long long>(longest_qo), range.high);
}

PyMethodDef methods[] = {{"paged", py_paged, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "attnrt._formats_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__formats_native() { return PyModule_Create(&module_def); }
