// SPDX-License-Identifier: Apache-2.0
// The functions that Python calls: choice of the instruction family, threads, loading of compiled variants.
#include <dlfcn.h>

#include <memory>
#include <new>
#include <string>

#include "family.h"
#include "pool.h"

namespace {

using attnrt_cpu::Family;

// Families this machine runs, best first.
const Family* family(int i) {
  static const Family* found[4] = {};
  static const int count = [] {
    int n = 0;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      found[n++] = attnrt_cpu::family_avx512();
    if (avx2) found[n++] = attnrt_cpu::family_avx2();
#endif
    found[n++] = attnrt_cpu::family_plain();
    return n;
  }();
  return i >= 0 && i < count ? found[i] : nullptr;
}

struct Work {
  attnrt_worker worker;
  const attnrt_call* call;
  int num_workers;
};

int run_worker(void* context, int w) {
  const Work* work = static_cast<const Work*>(context);
  return work->worker(work->call, w, work->num_workers);
}

struct Read {
  const char* memory;
  int64_t bytes;
  int parts;
  double sums[256];
};

int read_part(void* context, int w) {
  Read* read = static_cast<Read*>(context);
  const int64_t share = read->bytes / read->parts / 4096 * 4096;
  read->sums[w] = family(0)->read(reinterpret_cast<const float*>(read->memory + share * w), share / 4);
  return 0;
}

int run_job(int (*run)(void*, int), void* context, int num_workers, int num_threads) {
  attnrt_cpu::Job job;
  job.run = run;
  job.context = context;
  job.num_workers = num_workers;
  attnrt_cpu::Pool::run(job, num_threads);
  return job.failed.load();
}

}  // namespace

extern "C" {

const char* attnrt_family_name(int i) { return family(i) ? family(i)->name : nullptr; }

const void* attnrt_loops(int i) { return family(i)->loops; }

attnrt_kernel attnrt_prebuilt(int i, int variant) { return family(i)->kernels[variant]; }

const char* attnrt_load(const char* path, attnrt_kernel* kernel) {
  static thread_local std::string error;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library) {
    kernel->attend = reinterpret_cast<attnrt_worker>(dlsym(library, "attnrt_attend"));
    kernel->merge = reinterpret_cast<attnrt_worker>(dlsym(library, "attnrt_merge"));
    if (kernel->attend && kernel->merge) return nullptr;
  }
  const char* text = dlerror();
  error = text ? text : "the library lacks attnrt_attend or attnrt_merge";
  return error.c_str();
}

int attnrt_run(attnrt_worker worker, const attnrt_call* call, int num_workers, int num_threads) {
  attnrt_call own = *call;
  std::unique_ptr<int64_t[]> taken(new (std::nothrow) int64_t[2 * static_cast<size_t>(call->plan.num_workers)]());
  if (!taken) return 1;
  own.taken = taken.get();
  Work work{worker, &own, num_workers};
  return run_job(run_worker, &work, num_workers, num_threads);
}

int attnrt_store_rows(int i, const attnrt_store* store) { return family(i)->store_rows(store); }

int attnrt_copy_pages(const attnrt_page_copy* copy) { return family(0)->copy_pages(copy); }

double attnrt_read(const void* memory, int64_t bytes, int num_threads) {
  Read read{static_cast<const char*>(memory), bytes, num_threads < 256 ? num_threads : 256, {}};
  run_job(read_part, &read, read.parts, num_threads);
  double total = 0;
  for (int w = 0; w < read.parts; ++w) total += read.sums[w];
  return total;
}

}  // extern "C"
