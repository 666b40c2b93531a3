// SPDX-License-Identifier: Apache-2.0
// A decode step from lengths to the device in one call: the index's arrays are read, the planner runs, plan, header and
// index are written to pinned memory and sent. It does what api.plan and workspace.load do (and gives the same bytes)
// for the plain case alone: one part on the host, one tenant, no item of a team of workers. For anything else load()
// answers None before a byte has been written, and the long way is taken, which also says what is wrong.
//
// All that stays from step to step comes as one struct of 64-bit numbers (attnrt/step.py packs it) and as bytes of a
// header that the backend wrote; addresses and counts are written over it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

extern "C" {
#include "../../scheduler/native/planner_abi.h"
}
#include "../../backends/cuda/native/first.h"

namespace {

constexpr int kRing = 3;
constexpr int kItemWords = 14, kMergeWords = 5;  // WORK_FIELDS, MERGE_FIELDS
constexpr int kPointers = 11, kCounts = 12;      // of PlanHeader, before its rulers
constexpr int kHeaderMerges = 1, kHeaderBoxes = 5, kHeaderItems = 8;

// Fields of a part, in the order of the index area (layout.PART_FIELDS).
enum Field {
  kQoIndptr,
  kQoIndex,
  kRequest,
  kQoPos,
  kIndptr,
  kKvBase,
  kKvPos,
  kKvBegin,
  kKvEnd,
  kKvOffset,
  kMaskOffset,
  kMaskBegin,
  kBlockPos,
  kIndices,
  kMask,
  kFields
};
const char* const kNames[kFields] = {"qo_indptr",   "qo_index",   "request",   "qo_pos",  "indptr",
                                     "kv_base",     "kv_pos",     "kv_begin",  "kv_end",  "kv_offset",
                                     "mask_offset", "mask_begin", "block_pos", "indices", "mask"};
// Pointers of a header's part, in its order (pack.PART_POINTERS).
const Field kPartPointers[] = {kQoIndex,  kRequest, kQoPos, kIndptr,   kIndices, kKvBase,     kKvPos,
                               kBlockPos, kKvBegin, kKvEnd, kKvOffset, kMask,    kMaskOffset, kMaskBegin};
constexpr int kPartPointerCount = 14, kPartQueries = kPartPointerCount * 8 + 16;  // a FastDiv and heads lie between

// What stays from step to step; attnrt/step.py packs it in this order.
struct Fixed {
  std::uint64_t plan, take, send, wait, traits;
  std::int64_t num_kv_heads, group, mode, left, right, max_slots;
  std::int64_t workers, own_workers;                            // with the teams'; without
  std::int64_t max_requests, max_rows, max_entries, num_pages;  // -1: no limit
  std::int64_t max_qo_len, max_kv_len, min_qo_len;              // of one request; the same
  std::int64_t align, device, cell, plan_room, header, index_room, slots_room;
  std::int64_t part_at;           // of a header's first part
  std::int64_t counters_per_row;  // of a merge row
  std::int64_t block, heads;
  std::uint64_t staging[kRing];
  std::int64_t staging_bytes;
  std::uint64_t events[kRing];
  std::uint64_t first;  // attnrt_cuda_first_items, or 0: the header has no room for what it writes
  std::int64_t first_at, firsts_at, rulers_at, kv_tile;  // bytes from the header's start; keys
  std::int64_t positions;                                // 0: kernels never ask where a block's keys stand
  std::int64_t run;                                      // Sharing.run, or 0
};

typedef int (*PlanFunction)(const attnrt_problem*, attnrt_counts*);
typedef void (*TakeFunction)(std::int32_t*);
typedef int (*SendFunction)(int, std::uint64_t, const void*, std::size_t, std::uint64_t, std::uint64_t);
typedef int (*WaitFunction)(int, std::uint64_t);
typedef decltype(&attnrt_cuda_first_items) FirstFunction;

template <class F>
F function(std::uint64_t address) {
  return reinterpret_cast<F>(static_cast<std::uintptr_t>(address));
}

struct Step {
  PyObject_HEAD Fixed fixed;
  PyObject *header, *type, *features;  // bytes; BlockSparse; the index's Features, by identity
  PyObject *part, *requests;           // whose arrays lie in the index area, or null
  std::uint64_t at[kFields + 2];       // where
  bool sent[kRing];
  int turn;
};

PyObject* names[kFields];
PyObject *s_requests, *s_features, *s_block_size, *s_heads, *s_num_qo, *s_max_block, *s_qo_lens, *s_kv_lens, *s_bound;

std::int64_t up(std::int64_t n, std::int64_t align) { return (n + align - 1) / align * align; }

// Arrays of one call; let go of at its end.
class Arrays {
 public:
  ~Arrays() {
    for (int i = 0; i < used_; ++i) PyBuffer_Release(&buffers_[i]);
  }
  // The attribute as a contiguous array of 4- or 8-byte integers; None: null. False: anything else.
  bool read(PyObject* owner, PyObject* name, int itemsize, const Py_buffer*& found) {
    found = nullptr;
    PyObject* array = PyObject_GetAttr(owner, name);
    if (!array) return false;
    bool good = true;
    if (array != Py_None) {
      Py_buffer& b = buffers_[used_];
      good = PyObject_GetBuffer(array, &b, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0;
      if (good) {
        ++used_;
        good = b.itemsize == itemsize && b.format && std::strchr("ilq", b.format[0]) && !b.format[1];
        found = &b;
      }
    }
    Py_DECREF(array);
    return good;
  }

 private:
  Py_buffer buffers_[kFields + 2];
  int used_ = 0;
};

bool number(PyObject* owner, PyObject* name, std::int64_t& out) {
  PyObject* x = PyObject_GetAttr(owner, name);
  if (!x) return false;
  out = PyLong_AsLongLong(x);
  Py_DECREF(x);
  return !(out == -1 && PyErr_Occurred());
}

bool is_none(PyObject* owner, PyObject* name) {
  PyObject* x = PyObject_GetAttr(owner, name);
  const bool yes = x == Py_None;
  Py_XDECREF(x);
  return yes;
}

// One index on its way.
struct Job {
  Arrays arrays;
  const Py_buffer* all[kFields + 2];  // qo_lens, kv_lens, then the part's
  std::int64_t num_qo, max_block;

  const Py_buffer* field(int i) const { return all[2 + i]; }
  std::int64_t length(int i) const { return field(i) ? field(i)->len / field(i)->itemsize : 0; }
  const std::int32_t* ints(int i) const { return field(i) ? static_cast<const std::int32_t*>(field(i)->buf) : nullptr; }
};

bool read_index(const Step& s, PyObject* index, PyObject* requests, Job& job) {
  const Fixed& f = s.fixed;
  PyObject* size = PyObject_GetAttr(index, s_block_size);
  PyObject* block = size && PyTuple_Check(size) && PyTuple_Size(size) == 2 ? PyTuple_GetItem(size, 1) : nullptr;
  const bool same = block && PyLong_AsLongLong(block) == f.block;
  Py_XDECREF(size);
  std::int64_t heads;
  if (!same || !number(index, s_heads, heads) || heads != f.heads) return false;
  if (!number(index, s_num_qo, job.num_qo) || !number(index, s_max_block, job.max_block)) return false;
  if (!is_none(requests, s_bound)) return false;
  if (!job.arrays.read(requests, s_qo_lens, 4, job.all[0]) || !job.arrays.read(requests, s_kv_lens, 4, job.all[1]))
    return false;
  for (int i = 0; i < kMask; ++i)
    if (!job.arrays.read(index, names[i], i == kKvBase || i == kMaskOffset ? 8 : 4, job.all[2 + i])) return false;
  job.all[2 + kMask] = nullptr;
  for (int i : {int(kQoIndptr), int(kRequest), int(kQoPos), int(kIndptr), int(kKvBegin), int(kKvEnd), int(kKvOffset)})
    if (!job.field(i)) return false;
  return job.all[0] && job.all[1] && job.all[0]->len == job.all[1]->len && job.length(kQoIndptr) > 0;
}

bool within(std::int64_t needed, std::int64_t limit) { return limit < 0 || needed <= limit; }

// Requests without queries are as long as any.
bool lengths_within(const Fixed& f, const Job& job, std::int64_t requests) {
  if (f.max_qo_len < 0 && f.max_kv_len < 0 && f.min_qo_len < 0) return true;
  const std::int32_t* queries = static_cast<const std::int32_t*>(job.all[0]->buf);
  const std::int32_t* keys = static_cast<const std::int32_t*>(job.all[1]->buf);
  std::int32_t longest = 0, most_keys = 0, shortest = INT32_MAX;
  for (std::int64_t i = 0; i < requests; ++i) {
    longest = std::max(longest, queries[i]);
    most_keys = std::max(most_keys, keys[i]);
    shortest = std::min(shortest, queries[i] ? queries[i] : INT32_MAX);
  }
  return within(longest, f.max_qo_len) && within(most_keys, f.max_kv_len) && within(f.min_qo_len, shortest);
}

bool within_limits(const Fixed& f, const Job& job) {
  const std::int64_t requests = job.all[0]->len / 4;
  const std::int64_t listed = std::max(job.length(kIndices), job.length(kBlockPos));
  const std::int64_t pages = job.field(kKvBase) ? 0 : job.max_block + 1;
  return within(requests, f.max_requests) && within(job.num_qo, f.max_rows) && within(listed, f.max_entries) &&
         within(pages, f.num_pages) && lengths_within(f, job, requests);
}

bool plan_index(const Fixed& f, const Job& job, attnrt_counts& counts) {
  attnrt_part part{};
  part.num_rows = static_cast<std::int32_t>(job.length(kQoIndptr) - 1);
  part.heads = static_cast<std::int32_t>(f.heads);
  part.num_queries = static_cast<std::int32_t>(job.length(kRequest));
  part.qo_indptr = job.ints(kQoIndptr);
  part.qo_index = job.ints(kQoIndex);
  part.request = job.ints(kRequest);
  part.qo_pos = job.ints(kQoPos);
  part.kv_pos = job.ints(kKvPos);
  part.kv_begin = job.ints(kKvBegin);
  part.kv_end = job.ints(kKvEnd);
  part.kv_offset = job.ints(kKvOffset);
  attnrt_problem problem{};
  problem.traits = reinterpret_cast<const attnrt_traits*>(static_cast<std::uintptr_t>(f.traits));
  problem.part = &part;
  problem.num_parts = 1;
  problem.num_kv_heads = static_cast<std::int32_t>(f.num_kv_heads);
  problem.group = static_cast<std::int32_t>(f.group);
  problem.num_requests = static_cast<std::int32_t>(job.all[0]->len / 4);
  problem.num_rows = static_cast<std::int32_t>(job.num_qo);
  problem.mode = static_cast<std::int32_t>(f.mode);
  problem.scattered = f.run && !job.field(kKvBase) && f.block % f.run;
  problem.qo_lens = static_cast<const std::int32_t*>(job.all[0]->buf);
  problem.kv_lens = static_cast<const std::int32_t*>(job.all[1]->buf);
  problem.left = f.left;
  problem.right = f.right;
  problem.max_slots = f.max_slots;
  return function<PlanFunction>(f.plan)(&problem, &counts) == 0 && counts.items > 0 && counts.slots <= f.slots_room;
}

// Whether no team has an item: those would want more of a header, and kernels of their own.
bool no_team(const Fixed& f, const attnrt_counts& counts, const std::int32_t* items) {
  const std::int32_t* workers = items + counts.items * kItemWords;
  return workers[f.own_workers] == workers[f.workers];
}

// Where a load's pieces lie: bytes from the start of its span, as layout.plan_offsets has them.
struct Spans {
  std::int64_t indptr, rows, slots, leaves, items, counters, header, index, total;
  std::int64_t at[kFields + 2];
};

Spans lay_out(const Fixed& f, const Job& job, const attnrt_counts& counts, std::int64_t counters, bool resident) {
  Spans s{};
  auto put = [&](std::int64_t& at, std::int64_t bytes) {
    at = s.total;
    s.total += up(bytes, f.align);
  };
  put(s.indptr, 4 * (f.workers + 1));
  put(s.rows, 4 * kMergeWords * counts.merges);
  put(s.slots, 4 * counts.entries);
  put(s.leaves, 4 * counts.entries);
  put(s.items, 4 * kItemWords * counts.items);
  put(s.counters, 4 * counters);
  s.header = s.total;
  s.total += f.header;
  s.index = s.total;
  for (int i = 0; !resident && i < kFields + 2; ++i) put(s.at[i], job.all[i] ? job.all[i]->len : 0);
  return s;
}

// Each worker's first item behind a header whose rulers are there (backends/cuda/pack.py fill_first).
void write_first(const Fixed& f, const Job& job, const attnrt_counts& counts, const std::int32_t* plan, char* header) {
  attnrt_first_part_t part{};
  part.request = job.ints(kRequest);
  part.qo_pos = job.ints(kQoPos);
  part.qo_index = job.ints(kQoIndex);
  part.indptr = job.ints(kIndptr);
  part.indices = job.ints(kIndices);
  part.kv_pos = job.ints(kKvPos);
  part.kv_offset = job.ints(kKvOffset);
  part.block = static_cast<std::int32_t>(f.block);
  part.heads = static_cast<std::int32_t>(f.heads);
  part.listed = job.field(kKvBase) == nullptr;
  part.positions = f.positions && job.field(kBlockPos);
  const std::int32_t* workers = plan + counts.items * kItemWords;
  const std::int32_t count = function<FirstFunction>(f.first)(
      plan, workers, static_cast<int>(f.own_workers), workers + f.workers + 1, static_cast<int>(counts.merges),
      reinterpret_cast<const std::int32_t*>(header + f.rulers_at), static_cast<int>(f.kv_tile), &part,
      reinterpret_cast<std::int32_t*>(header + f.first_at));
  std::memcpy(header + f.firsts_at, &count, sizeof count);
}

void write(const Step& s, const Job& job, const Spans& at, const attnrt_counts& counts, const std::int32_t* plan,
           std::int64_t counters, bool resident, char* to) {
  const Fixed& f = s.fixed;
  const std::int32_t* next = plan;
  auto copy = [&](std::int64_t place, std::int64_t words) {
    std::memcpy(to + place, next, static_cast<std::size_t>(4 * words));
    next += words;
  };
  copy(at.items, counts.items * kItemWords);
  copy(at.indptr, f.workers + 1);
  copy(at.rows, counts.merges * kMergeWords);
  copy(at.slots, counts.entries);
  copy(at.leaves, counts.entries);
  std::memset(to + at.counters, 0, static_cast<std::size_t>(4 * counters));
  // The header: places of arrays and counts over the backend's own bytes.
  char* header = to + at.header;
  std::memcpy(header, PyBytes_AsString(s.header), static_cast<std::size_t>(PyBytes_Size(s.header)));
  const std::uint64_t start = static_cast<std::uint64_t>(f.cell + f.plan_room - at.header);
  std::uint64_t pointers[kPointers];
  std::memcpy(pointers, header, sizeof pointers);
  const std::int64_t places[] = {at.items, at.indptr, at.rows, at.slots, at.leaves};
  for (int i = 0; i < 5; ++i) pointers[i] = start + static_cast<std::uint64_t>(places[i]);
  pointers[5] = s.at[0];
  pointers[6] = s.at[1];
  pointers[kPointers - 1] = counters ? start + static_cast<std::uint64_t>(at.counters) : 0;
  std::memcpy(header, pointers, sizeof pointers);
  const std::int32_t merges = static_cast<std::int32_t>(counts.merges), items = static_cast<std::int32_t>(counts.items);
  std::memcpy(header + sizeof pointers + 4 * kHeaderMerges, &merges, 4);
  std::memcpy(header + sizeof pointers + 4 * kHeaderItems, &items, 4);
  const std::int32_t no_boxes[] = {-1, -1, 0};
  std::memcpy(header + sizeof pointers + 4 * kHeaderBoxes, no_boxes, sizeof no_boxes);
  std::uint64_t fields[kPartPointerCount];
  for (int i = 0; i < kPartPointerCount; ++i) {
    const Field name = kPartPointers[i];
    fields[i] = job.field(name) && (name != kBlockPos || f.positions) ? s.at[2 + name] : 0;
  }
  std::memcpy(header + f.part_at, fields, sizeof fields);
  const std::int32_t queries = static_cast<std::int32_t>(job.length(kRequest));
  std::memcpy(header + f.part_at + kPartQueries, &queries, 4);
  if (f.first) write_first(f, job, counts, plan, header);
  for (int i = 0; !resident && i < kFields + 2; ++i)
    if (job.all[i]) std::memcpy(to + at.at[i], job.all[i]->buf, static_cast<std::size_t>(job.all[i]->len));
}

void remember(Step& s, PyObject* part, PyObject* requests) {
  PyObject *old = s.part, *other = s.requests;
  s.part = Py_XNewRef(part);
  s.requests = Py_XNewRef(requests);
  Py_XDECREF(old);
  Py_XDECREF(other);
}

PyObject* decline() {
  PyErr_Clear();
  Py_RETURN_NONE;
}

// load(index, stream) -> ((plan's arrays, items, merges, entries), slots, turn of the ring), or None: the long way, and
// nothing has changed. An int: the driver's error.
PyObject* step_load(PyObject* object, PyObject* const* args, Py_ssize_t n) {
  Step& s = *reinterpret_cast<Step*>(object);
  const Fixed& f = s.fixed;
  if (n != 2) {
    PyErr_SetString(PyExc_TypeError, "load takes an index and a stream");
    return nullptr;
  }
  PyObject* index = args[0];
  const std::uint64_t stream = PyLong_AsUnsignedLongLong(args[1]);
  if (PyErr_Occurred() || reinterpret_cast<PyObject*>(Py_TYPE(index)) != s.type) return decline();
  PyObject* features = PyObject_GetAttr(index, s_features);
  const bool known = features == s.features;
  Py_XDECREF(features);
  if (!known) return decline();
  PyObject* requests = PyObject_GetAttr(index, s_requests);
  if (!requests) return decline();
  PyObject* result = nullptr;
  {
    Job job;
    attnrt_counts counts;
    bool good = read_index(s, index, requests, job) && within_limits(f, job) && plan_index(f, job, counts);
    const std::int64_t words =
        good ? counts.items * kItemWords + f.workers + 1 + counts.merges * kMergeWords + 2 * counts.entries : 0;
    PyObject* plan = good ? PyByteArray_FromStringAndSize(nullptr, 4 * words) : nullptr;
    if (plan) {
      std::int32_t* numbers = reinterpret_cast<std::int32_t*>(PyByteArray_AsString(plan));
      function<TakeFunction>(f.take)(numbers);
      const bool resident = s.part == index && s.requests == requests;
      const std::int64_t counters = counts.merges * f.counters_per_row;
      const Spans at = lay_out(f, job, counts, counters, resident);
      good = no_team(f, counts, numbers) && at.header <= f.plan_room && at.total - at.index <= f.index_room &&
             at.total <= f.staging_bytes;
      if (good) {
        if (!resident) {
          remember(s, nullptr, nullptr);
          const std::int64_t base = f.cell + f.plan_room + f.header - at.index;
          for (int i = 0; i < kFields + 2; ++i) s.at[i] = static_cast<std::uint64_t>(base + at.at[i]);
        }
        char* staged = reinterpret_cast<char*>(static_cast<std::uintptr_t>(f.staging[s.turn]));
        const int device = static_cast<int>(f.device);
        int code = 0;
        if (s.sent[s.turn]) {
          Py_BEGIN_ALLOW_THREADS;
          code = function<WaitFunction>(f.wait)(device, f.events[s.turn]);
          Py_END_ALLOW_THREADS;
        }
        if (!code) {
          write(s, job, at, counts, numbers, counters, resident, staged);
          Py_BEGIN_ALLOW_THREADS;
          code = function<SendFunction>(f.send)(device, static_cast<std::uint64_t>(f.cell + f.plan_room - at.header),
                                                staged, static_cast<std::size_t>(at.total), stream, f.events[s.turn]);
          Py_END_ALLOW_THREADS;
        }
        if (code) {
          result = PyLong_FromLong(code);
        } else {
          if (!resident) remember(s, index, requests);
          s.sent[s.turn] = true;
          result = Py_BuildValue("(OLLL)Li", plan, counts.items, counts.merges, counts.entries, counts.slots, s.turn);
          s.turn = (s.turn + 1) % kRing;
        }
      }
      Py_DECREF(plan);
    }
  }
  Py_DECREF(requests);
  if (!result && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError)) return nullptr;
  return result ? result : decline();
}

// forget(): another load has written the index area.
PyObject* step_forget(PyObject* object, PyObject*) {
  remember(*reinterpret_cast<Step*>(object), nullptr, nullptr);
  Py_RETURN_NONE;
}

// Step(fixed, header, index type, features)
PyObject* step_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *fixed, *header, *index_type, *features;
  if (!PyArg_ParseTuple(args, "O!O!OO:Step", &PyBytes_Type, &fixed, &PyBytes_Type, &header, &index_type, &features))
    return nullptr;
  Step* self = reinterpret_cast<Step*>(PyType_GenericAlloc(type, 0));
  if (!self) return nullptr;
  self->header = Py_NewRef(header);
  self->type = Py_NewRef(index_type);
  self->features = Py_NewRef(features);
  if (PyBytes_Size(fixed) == sizeof(Fixed)) std::memcpy(&self->fixed, PyBytes_AsString(fixed), sizeof(Fixed));
  const std::int64_t bytes = PyBytes_Size(header);
  if (PyBytes_Size(fixed) != sizeof(Fixed) || bytes > self->fixed.header ||
      self->fixed.part_at + kPartQueries + 4 > bytes) {
    PyErr_SetString(PyExc_ValueError, "Step takes the struct of native/step.cpp and a header that fits it");
    Py_DECREF(reinterpret_cast<PyObject*>(self));
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
}

void step_dealloc(PyObject* object) {
  Step* self = reinterpret_cast<Step*>(object);
  PyTypeObject* type = Py_TYPE(object);
  remember(*self, nullptr, nullptr);
  Py_XDECREF(self->header);
  Py_XDECREF(self->type);
  Py_XDECREF(self->features);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

PyMethodDef step_methods[] = {
    {"load", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(step_load)), METH_FASTCALL, nullptr},
    {"forget", step_forget, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot step_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(step_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(step_dealloc)},
    {Py_tp_methods, step_methods},
    {0, nullptr},
};
PyType_Spec step_spec = {"attnrt._step_native.Step", sizeof(Step), 0, Py_TPFLAGS_DEFAULT, step_slots};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT, "attnrt._step_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__step_native() {
  for (int i = 0; i < kFields; ++i) names[i] = PyUnicode_InternFromString(kNames[i]);
  s_requests = PyUnicode_InternFromString("requests");
  s_features = PyUnicode_InternFromString("features");
  s_block_size = PyUnicode_InternFromString("block_size");
  s_heads = PyUnicode_InternFromString("heads");
  s_num_qo = PyUnicode_InternFromString("num_qo");
  s_max_block = PyUnicode_InternFromString("max_block");
  s_qo_lens = PyUnicode_InternFromString("qo_lens");
  s_kv_lens = PyUnicode_InternFromString("kv_lens");
  s_bound = PyUnicode_InternFromString("bound_kv_lens");
  PyObject* module = PyModule_Create(&module_def);
  PyObject* type = PyType_FromSpec(&step_spec);
  if (!module || !type || PyModule_AddObjectRef(module, "Step", type) < 0) return nullptr;
  Py_DECREF(type);
  // Raised with every change of Fixed or of what lies where; attnrt/step.py knows the same number.
  if (PyModule_AddIntConstant(module, "REVISION", 5) < 0) return nullptr;
  return module;
}
