// SPDX-License-Identifier: Apache-2.0
// Reads the arrays of a paged index, or of a block table, in one pass: check, copy, lengths, bottom-right positions.
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

// An int32 array, held while this lives; data is null if the object is anything else. One axis: compact. Two axes: rows
// of `width` adjacent numbers, `stride` numbers apart.
class Ints {
 public:
  explicit Ints(PyObject* x, int ndim = 1) {
    if (PyObject_GetBuffer(x, &buffer_, (ndim == 1 ? PyBUF_C_CONTIGUOUS : PyBUF_STRIDES) | PyBUF_FORMAT) < 0) {
      PyErr_Clear();
      return;
    }
    held_ = true;
    const char* format = buffer_.format;
    const bool ints = format && (format[0] == 'i' || format[0] == 'l') && format[1] == 0 && buffer_.itemsize == 4;
    if (!ints || buffer_.ndim != ndim) return;
    size = buffer_.shape[0];
    if (ndim == 2) {
      width = buffer_.shape[1];
      stride = buffer_.strides[0] / 4;
      if (width > 1 && buffer_.strides[1] != 4) return;
      if (buffer_.strides[0] % 4) return;
    }
    data = static_cast<const std::int32_t*>(buffer_.buf);
  }
  ~Ints() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  Ints(const Ints&) = delete;
  Ints& operator=(const Ints&) = delete;

  const std::int32_t* data = nullptr;
  Py_ssize_t size = 0, width = 0, stride = 0;

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

// What both readers share: qo_indptr and kv_lens are right, and kv_lens fit `room(r)` keys each.
struct Queries {
  bool fits = false;
  std::int64_t count = 0, longest = 0;
};

template <typename Room>
Queries measure(const Ints& qo, const Ints& lens, Room room) {
  Queries found;
  const Py_ssize_t n = lens.size;
  if (!lens.data || !is_indptr(qo) || qo.size != n + 1) return found;
  bool fits = true;
  std::int64_t longest_kv = 0;
  for (Py_ssize_t r = 0; r < n; ++r) {
    const std::int64_t len = lens.data[r];
    fits &= len >= 0 && len <= room(r);
    found.longest = std::max<std::int64_t>(found.longest, static_cast<std::int64_t>(qo.data[r + 1]) - qo.data[r]);
    longest_kv = std::max(longest_kv, len);
  }
  found.count = qo.data[n];
  found.fits = fits && longest_kv + found.count <= INT32_MAX;
  return found;
}

// An uninitialised result: bytes, int32: qo_indptr [n + 1], kv_indptr [n + 1], kv_lens [n], qo_lens [n], request
// [num_qo], qo_pos [num_qo], indices [entries].
class Result {
 public:
  Result(const Ints& qo, const Ints& lens, const Queries& queries, std::int64_t entries) : queries_(queries) {
    const Py_ssize_t n = lens.size;
    const std::int64_t count = 2 * (n + 1) + 2 * n + 2 * queries.count + entries;
    bytes_ = PyBytes_FromStringAndSize(nullptr, 4 * static_cast<Py_ssize_t>(count));
    if (!bytes_) return;
    auto* out = reinterpret_cast<std::int32_t*>(PyBytes_AsString(bytes_));
    std::memcpy(out, qo.data, 4 * (n + 1));
    kv_indptr = out += n + 1;
    std::memcpy(out += n + 1, lens.data, 4 * n);
    std::int32_t* qo_lens = out += n;
    std::int32_t* request = out += n;
    std::int32_t* qo_pos = out += queries.count;
    indices = out + queries.count;
    for (Py_ssize_t r = 0; r < n; ++r) {
      qo_lens[r] = qo.data[r + 1] - qo.data[r];
      for (std::int32_t q = qo.data[r]; q < qo.data[r + 1]; ++q) {
        request[q] = static_cast<std::int32_t>(r);
        qo_pos[q] = lens.data[r] - qo.data[r + 1] + q;
      }
    }
  }

  // (bytes, num_qo, longest qo_len, largest id), or None where an id is below -1.
  PyObject* finish(Range ids) {
    if (ids.low < -1) {
      Py_DECREF(bytes_);
      Py_RETURN_NONE;
    }
    return Py_BuildValue("NLLi", bytes_, static_cast<long long>(queries_.count),
                         static_cast<long long>(queries_.longest), ids.high);
  }

  std::int32_t* kv_indptr = nullptr;
  std::int32_t* indices = nullptr;  // null: out of memory

 private:
  Queries queries_;
  PyObject* bytes_ = nullptr;
};

// paged(qo_indptr, kv_indptr, kv_indices, kv_lens, page_size) -> a Result or None
PyObject* py_paged(PyObject*, PyObject* args) {
  PyObject *qo_object, *kv_object, *ids_object, *lens_object;
  long long size;
  if (!PyArg_ParseTuple(args, "OOOOL:paged", &qo_object, &kv_object, &ids_object, &lens_object, &size)) return nullptr;
  const Ints qo(qo_object), kv(kv_object), ids(ids_object), lens(lens_object);
  if (size < 1 || size > INT32_MAX || !ids.data || !is_indptr(kv)) Py_RETURN_NONE;
  const Py_ssize_t n = kv.size - 1;
  if (lens.size != n || ids.size != kv.data[n]) Py_RETURN_NONE;
  const Queries queries =
      measure(qo, lens, [&](Py_ssize_t r) { return (static_cast<std::int64_t>(kv.data[r + 1]) - kv.data[r]) * size; });
  if (!queries.fits) Py_RETURN_NONE;
  Result result(qo, lens, queries, ids.size);
  if (!result.indices) return nullptr;
  std::memcpy(result.kv_indptr, kv.data, 4 * kv.size);
  return result.finish(copy_range(result.indices, ids.data, ids.size));
}

// table(qo_indptr, table, kv_lens, page_size) -> the same; rows of the table may lie apart, as in a slice of a wider
// one
PyObject* py_table(PyObject*, PyObject* args) {
  PyObject *qo_object, *table_object, *lens_object;
  long long size;
  if (!PyArg_ParseTuple(args, "OOOL:table", &qo_object, &table_object, &lens_object, &size)) return nullptr;
  const Ints qo(qo_object), lens(lens_object);
  const Ints table(table_object, 2);
  const Py_ssize_t n = table.size, width = table.width;
  if (size < 1 || size > INT32_MAX || !table.data || lens.size != n) Py_RETURN_NONE;
  const Queries queries = measure(qo, lens, [&](Py_ssize_t) { return static_cast<std::int64_t>(width) * size; });
  if (!queries.fits) Py_RETURN_NONE;
  std::int64_t entries = 0;
  for (Py_ssize_t r = 0; r < n; ++r) entries += (lens.data[r] + size - 1) / size;
  if (entries > INT32_MAX) Py_RETURN_NONE;
  Result result(qo, lens, queries, entries);
  if (!result.indices) return nullptr;
  Range all{INT32_MAX, -1};
  std::int64_t at = 0;
  for (Py_ssize_t r = 0; r < n; ++r) {
    const auto pages = static_cast<Py_ssize_t>((lens.data[r] + size - 1) / size);
    result.kv_indptr[r] = static_cast<std::int32_t>(at);
    const Range row = copy_range(result.indices + at, table.data + r * table.stride, pages);
    all = {std::min(all.low, row.low), std::max(all.high, row.high)};
    at += pages;
  }
  result.kv_indptr[n] = static_cast<std::int32_t>(at);
  return result.finish(all);
}

PyMethodDef methods[] = {{"paged", py_paged, METH_VARARGS, nullptr},
                         {"table", py_table, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "attnrt._formats_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__formats_native() { return PyModule_Create(&module_def); }
