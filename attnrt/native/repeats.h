// SPDX-License-Identifier: Apache-2.0
// Calls that come again: a table of forms (dtypes, shapes, strides of the arrays) that have run under the loaded plan.
// A call whose arrays have a known form is launched from here through a C function pointer; Python sees one call and
// makes no object. Whatever is not plainly the same is left to Python by answering None, which also says what is wrong.
#pragma once
#include <vector>

#include "ways.h"

namespace {

constexpr int kWordsPerArray = 4 + 2 * kMaxDims;

// What two arrays of one form have in common: dtype and device identities, framework, flags and ndim, then shape and
// strides. False: not plainly readable.
bool form_of(PyObject* x, std::int64_t* words, Py_ssize_t& used, unsigned long long& ptr) {
  ptr = 0;
  if (x == Py_None) {
    words[used++] = 0;
    return true;
  }
  Raw raw;
  bool immutable = false;
  PyObject* framework;
  if (Py_TYPE(x) == g.view_type) {
    if (!read_view(x, raw, immutable)) return false;
    framework = reinterpret_cast<View*>(x)->framework;
  } else {
    const TypeInfo* info = g.view_type ? type_info(x) : &kUnknown;
    if (!read_fast(x, *info, raw)) return false;
    framework = info->framework;
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
  return true;
}

constexpr int kCallArrays = 5;  // q, k, v, out, lse, or what an append has in their places
constexpr std::size_t kMaxForms = 64;
constexpr int kUnderCapture = -2;  // the function launched nothing: Python says why (ATTNRT_CAPTURING of the CUDA shim)

// Writes addresses, scale and stream into the packed record and launches; 0: done.
typedef int (*CallFunction)(const void* record, std::uint64_t q, std::uint64_t k, std::uint64_t v, std::uint64_t out,
                            std::uint64_t lse, float scale, std::uint64_t stream);

struct Form {
  std::vector<std::int64_t> words;
  long long low[kCallArrays], high[kCallArrays];  // bytes of each array from its address
  CallFunction function;
  const void* record;
  double scale;
  int device;
  const dl::ExchangeApi* api;  // of q's type
  PyObject* current;           // () -> stream, where the api cannot say
  PyObject* owner;             // keeps the record; owner.failed(code) raises
};

struct Repeats {
  PyObject_HEAD std::vector<Form>* forms;
  std::size_t last;
  PyObject *acquire, *release, *plan;
  bool shared_kv, apart;
  std::uint64_t stream;
};

void forget_forms(Repeats* self) {
  std::vector<Form> old;  // what is let go of may run code: the table is empty by then
  old.swap(*self->forms);
  self->last = 0;
  for (Form& form : old) {
    Py_DECREF(form.current);
    Py_DECREF(form.owner);
  }
}

// Repeats(acquire, release, shared_kv, apart): the lock of the attention; apart: refuse results that may overlap what
// is read.
PyObject* repeats_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *acquire, *release;
  int shared_kv, apart;
  if (!PyArg_ParseTuple(args, "OOpp:Repeats", &acquire, &release, &shared_kv, &apart)) return nullptr;
  Repeats* self = reinterpret_cast<Repeats*>(PyType_GenericAlloc(type, 0));
  if (!self) return nullptr;
  self->forms = new std::vector<Form>();
  self->acquire = Py_NewRef(acquire);
  self->release = Py_NewRef(release);
  self->plan = Py_NewRef(Py_None);
  self->shared_kv = shared_kv;
  self->apart = apart;
  return reinterpret_cast<PyObject*>(self);
}

void repeats_dealloc(PyObject* object) {
  Repeats* self = reinterpret_cast<Repeats*>(object);
  PyTypeObject* type = Py_TYPE(object);
  if (self->forms) forget_forms(self);
  delete self->forms;
  Py_XDECREF(self->acquire);
  Py_XDECREF(self->release);
  Py_XDECREF(self->plan);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

// begin(plan): another plan is loaded; no form has run under it.
PyObject* repeats_begin(PyObject* object, PyObject* plan) {
  Repeats* self = reinterpret_cast<Repeats*>(object);
  forget_forms(self);
  PyObject* old = self->plan;
  self->plan = Py_NewRef(plan);
  Py_DECREF(old);
  Py_RETURN_NONE;
}

// follow(plan): another plan is loaded under which every form runs as it did under the one before.
PyObject* repeats_follow(PyObject* object, PyObject* plan) {
  Repeats* self = reinterpret_cast<Repeats*>(object);
  PyObject* old = self->plan;
  self->plan = Py_NewRef(plan);
  Py_DECREF(old);
  Py_RETURN_NONE;
}

// add(arrays, function, record, extents, scale, device, current, owner, stream): a call of these arrays has run on
// `stream`, after the load. Later ones on that stream may be launched from here. extents: (low, high) of each array or
// None.
PyObject* repeats_add(PyObject* object, PyObject* args) {
  Repeats* self = reinterpret_cast<Repeats*>(object);
  PyObject *arrays, *extents, *current, *owner;
  unsigned long long function, record, stream;
  double scale;
  int device;
  if (!PyArg_ParseTuple(args, "O!KKO!diOOK:add", &PyTuple_Type, &arrays, &function, &record, &PyTuple_Type, &extents,
                        &scale, &device, &current, &owner, &stream))
    return nullptr;
  if (PyTuple_Size(arrays) != kCallArrays || PyTuple_Size(extents) != kCallArrays) {
    PyErr_SetString(PyExc_ValueError, "add takes five arrays and their extents");
    return nullptr;
  }
  Form form{};
  std::int64_t words[kCallArrays * kWordsPerArray];
  Py_ssize_t used = 0;
  for (int i = 0; i < kCallArrays; ++i) {
    unsigned long long ptr;
    if (!form_of(PyTuple_GetItem(arrays, i), words, used, ptr)) Py_RETURN_NONE;
    PyObject* extent = PyTuple_GetItem(extents, i);
    if (extent != Py_None && !PyArg_ParseTuple(extent, "LL", &form.low[i], &form.high[i])) return nullptr;
  }
  self->stream = stream;
  for (const Form& known : *self->forms)
    if (known.words.size() == static_cast<std::size_t>(used) &&
        !std::memcmp(known.words.data(), words, used * sizeof *words))
      Py_RETURN_NONE;
  if (self->forms->size() == kMaxForms) forget_forms(self);
  form.words.assign(words, words + used);
  form.function = reinterpret_cast<CallFunction>(static_cast<std::uintptr_t>(function));
  form.record = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(record));
  form.scale = scale;
  form.device = device;
  PyObject* q = PyTuple_GetItem(arrays, 0);
  form.api = Py_TYPE(q) == g.view_type ? nullptr : type_info(q)->api;
  form.current = Py_NewRef(current);
  form.owner = Py_NewRef(owner);
  self->forms->push_back(form);
  Py_RETURN_NONE;
}

const Form* find_form(Repeats* self, const std::int64_t* words, Py_ssize_t used) {
  const std::vector<Form>& forms = *self->forms;
  auto same = [&](const Form& form) {
    return form.words.size() == static_cast<std::size_t>(used) &&
           !std::memcmp(form.words.data(), words, used * sizeof *words);
  };
  if (self->last < forms.size() && same(forms[self->last])) return &forms[self->last];
  for (std::size_t i = 0; i < forms.size(); ++i) {
    if (same(forms[i])) {
      self->last = i;
      return &forms[i];
    }
  }
  return nullptr;
}

// The byte ranges are apart: whether arrays whose ranges meet do overlap is Python's question.
bool ranges_apart(const Form& form, const unsigned long long* at) {
  for (int result = 3; result < kCallArrays; ++result) {
    const long long low = at[result] + form.low[result], high = at[result] + form.high[result];
    if (form.low[result] == form.high[result]) continue;
    for (int i = 0; i < result; ++i) {
      const long long other_low = at[i] + form.low[i], other_high = at[i] + form.high[i];
      if (form.low[i] != form.high[i] && low < other_high && other_low < high) return false;
    }
  }
  return true;
}

// 1: *stream is what the caller means and what the form last ran on; 0: Python must look.
int same_stream(const Repeats* self, const Form& form, PyObject* given) {
  std::uint64_t stream;
  if (given != Py_None) {
    if (!PyLong_CheckExact(given)) return 0;
    stream = PyLong_AsUnsignedLongLong(given);
  } else {
    void* found = nullptr;
    if (form.api && form.api->current_stream && form.api->current_stream(2, form.device, &found) == 0) {
      stream = reinterpret_cast<std::uintptr_t>(found);
    } else {
      PyErr_Clear();
      PyObject* number = PyObject_CallFunctionObjArgs(form.current, nullptr);
      stream = number ? PyLong_AsUnsignedLongLong(number) : 0;
      Py_XDECREF(number);
    }
  }
  if (PyErr_Occurred()) {
    PyErr_Clear();
    return 0;
  }
  return stream == self->stream;
}

// Whether the lock was free; it is ours then.
bool take(Repeats* self) {
  PyObject* got = PyObject_CallFunctionObjArgs(self->acquire, Py_False, nullptr);
  const bool ours = got == Py_True;
  Py_XDECREF(got);
  PyErr_Clear();
  return ours;
}

void give_back(Repeats* self) {
  PyObject* done = PyObject_CallFunctionObjArgs(self->release, nullptr);
  Py_XDECREF(done);
  PyErr_Clear();
}

// run(q, kv, plan, out, lse, return_lse, sm_scale, stream) -> out, or (out, lse), or None: take the long way
PyObject* repeats_run(PyObject* object, PyObject* const* args, Py_ssize_t n) {
  Repeats* self = reinterpret_cast<Repeats*>(object);
  if (n != 8) {
    PyErr_SetString(PyExc_TypeError, "run takes eight arguments");
    return nullptr;
  }
  PyObject *q = args[0], *k = args[1], *v = Py_None, *plan = args[2], *out = args[3], *lse = args[4];
  PyObject *pair = args[5], *scale_given = args[6];
  if (self->apart && out == Py_None) Py_RETURN_NONE;  // a run's result is to be made
  if (self->forms->empty() || (plan != Py_None && plan != self->plan)) Py_RETURN_NONE;
  if (!self->shared_kv) {
    if (!PyTuple_CheckExact(k) || PyTuple_Size(k) != 2) Py_RETURN_NONE;
    v = PyTuple_GetItem(args[1], 1);
    k = PyTuple_GetItem(args[1], 0);
  }
  if (pair != Py_False && (pair != Py_True || lse == Py_None)) Py_RETURN_NONE;
  std::int64_t words[kCallArrays * kWordsPerArray];
  unsigned long long at[kCallArrays];
  Py_ssize_t used = 0;
  PyObject* arrays[kCallArrays] = {q, k, v, out, lse};
  for (int i = 0; i < kCallArrays; ++i)
    if (!form_of(arrays[i], words, used, at[i])) Py_RETURN_NONE;
  const Form* found = find_form(self, words, used);
  if (!found || (self->apart && !ranges_apart(*found, at))) Py_RETURN_NONE;
  double scale = found->scale;
  if (scale_given != Py_None) {
    if (!PyFloat_CheckExact(scale_given)) Py_RETURN_NONE;
    scale = PyFloat_AsDouble(scale_given);
    if (!(scale - scale == 0.0)) Py_RETURN_NONE;
  }
  if (!take(self)) Py_RETURN_NONE;
  // Reading may have run code that loaded another plan; from here on nobody does.
  found = find_form(self, words, used);
  if (!found || (plan != Py_None && plan != self->plan) || !same_stream(self, *found, args[7])) {
    give_back(self);
    Py_RETURN_NONE;
  }
  const CallFunction function = found->function;
  const void* record = found->record;
  const std::uint64_t stream = self->stream, values = v == Py_None ? at[1] : at[2];
  PyObject* owner = Py_NewRef(found->owner);
  int code;
  Py_BEGIN_ALLOW_THREADS;  // a full queue waits, perhaps for a callback that needs the interpreter
  code = function(record, at[0], at[1], values, at[3], at[4], static_cast<float>(scale), stream);
  Py_END_ALLOW_THREADS;
  give_back(self);
  PyObject* result = nullptr;
  if (code == kUnderCapture) {
    result = Py_NewRef(Py_None);
  } else if (code) {
    result = PyObject_CallMethod(owner, "failed", "i", code);
  } else if (pair == Py_True) {
    result = PyTuple_Pack(2, out, lse);
  } else {
    result = Py_NewRef(out == Py_None ? Py_True : out);
  }
  Py_DECREF(owner);
  return result;
}

PyMethodDef repeats_methods[] = {
    {"begin", repeats_begin, METH_O, nullptr},
    {"follow", repeats_follow, METH_O, nullptr},
    {"add", repeats_add, METH_VARARGS, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(repeats_run)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot repeats_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(repeats_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(repeats_dealloc)},
    {Py_tp_methods, repeats_methods},
    {0, nullptr},
};

PyType_Spec repeats_spec = {"attnrt._tensor_native.Repeats", sizeof(Repeats), 0, Py_TPFLAGS_DEFAULT, repeats_slots};

}  // namespace
