// SPDX-License-Identifier: Apache-2.0
// A libcuda without a GPU: memory is the host's, kernels do nothing, and every call that enqueues, allocates or waits
// is written down, so that a test can say what a run does to a stream, what happens under capture, and what a failing
// call leaves behind. Streams and events are made-up numbers. Only what backends/cuda/native/driver.cpp asks for is
// here.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace {
// Calls come from several threads, without the interpreter's lock.
std::mutex guard;
std::string trace;
std::set<void*> captured;
std::map<std::string, int> failing;
std::map<void*, std::string> kernels;
uintptr_t next_event = 0x1000;
int smem_bytes = 100000;
const int kIllegalUnderCapture = 900, kRelaxed = 2;
int ended_captures = 0;
thread_local int capture_mode = 0;

int note(const char* what, void* stream, const std::string& more = "") {
  char text[64];
  int n = 0;
  uintptr_t s = reinterpret_cast<uintptr_t>(stream);
  do text[n++] = "0123456789"[s % 10];
  while (s /= 10);
  std::string digits;
  while (n) digits += text[--n];
  std::lock_guard<std::mutex> lock(guard);
  auto found = failing.find(what);
  if (found != failing.end() && found->second) return found->second;
  trace += std::string(what) + " " + digits + (more.empty() ? "" : " " + more) + "\n";
  return 0;
}
int forbidden(const char* what) {
  std::lock_guard<std::mutex> lock(guard);
  auto found = failing.find(what);
  if (found != failing.end() && found->second) return found->second;
  trace += std::string(what) + "\n";
  if (captured.empty() || capture_mode == kRelaxed) return 0;
  ++ended_captures;
  return kIllegalUnderCapture;
}
}  // namespace

extern "C" {
struct Config {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  void* attributes;
  unsigned num_attributes;
};

const char* fake_trace() { return trace.c_str(); }
void fake_clear() { trace.clear(); }
void fake_capture(void* stream, int on) {
  if (on)
    captured.insert(stream);
  else
    captured.erase(stream);
}
int fake_ended_captures() { return ended_captures; }
void fake_fail(const char* what, int code) { failing[what] = code; }

int cuInit(unsigned) { return failing["init"]; }
int cuDriverGetVersion(int* v) { return *v = 13000, 0; }
int cuGetErrorString(int code, const char** text) { return *text = code == 2 ? "out of memory" : "made-up error", 0; }
int cuDeviceGetCount(int* n) { return *n = 2, 0; }
int cuDeviceGet(int* d, int i) { return *d = i, 0; }
int cuDeviceGetName(char* name, int size, int) { return strncpy(name, "Fake", size), 0; }
int cuDeviceGetAttribute(int* v, int attribute, int) {
  *v = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : 232448;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** c, int d) { return *c = reinterpret_cast<void*>(uintptr_t(d) + 1), 0; }
static thread_local void* current[16];
static thread_local int depth = 0;
int cuCtxPushCurrent_v2(void* c) { return current[++depth] = c, 0; }
int cuCtxPopCurrent_v2(void** c) { return *c = current[depth--], 0; }
int cuCtxGetCurrent(void** c) { return *c = current[depth], 0; }
int cuCtxGetDevice(int* d) { return *d = static_cast<int>(reinterpret_cast<uintptr_t>(current[depth])) - 1, 0; }
int cuMemAlloc_v2(uint64_t* p, size_t n) {
  const int code = forbidden("alloc");
  if (code) return code;
  return *p = reinterpret_cast<uint64_t>(aligned_alloc(256, (n + 255) / 256 * 256)), 0;
}
int cuMemFree_v2(uint64_t p) { return free(reinterpret_cast<void*>(p)), forbidden("free"); }
int cuMemHostAlloc(void** p, size_t n, unsigned) {
  const int code = forbidden("host_alloc");
  return code ? code : (*p = malloc(n), 0);
}
int cuMemFreeHost(void* p) { return free(p), forbidden("host_free"); }
int cuMemcpyHtoDAsync_v2(uint64_t d, const void* s, size_t n, void* stream) {
  const int code = note("copy", stream, std::to_string(n));
  if (!code) memcpy(reinterpret_cast<void*>(d), s, n);
  return code;
}
int cuMemcpyHtoD_v2(uint64_t d, const void* s, size_t n) {
  return memcpy(reinterpret_cast<void*>(d), s, n), forbidden("copy_sync");
}
int cuMemcpyDtoH_v2(void* d, uint64_t s, size_t n) {
  return memcpy(d, reinterpret_cast<void*>(s), n), forbidden("fetch");
}
int cuMemsetD8Async(uint64_t d, unsigned char v, size_t n, void* s) {
  return memset(reinterpret_cast<void*>(d), v, n), note("set", s);
}
int cuPointerGetAttribute(void* out, int, uint64_t) { return *static_cast<int*>(out) = 0, 0; }
int cuStreamSynchronize(void* s) { return note("sync", s); }
int cuStreamIsCapturing(void* s, int* on) { return *on = captured.count(s) ? 1 : 0, 0; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), 0; }
int cuStreamWaitEvent(void* s, void* e, unsigned) {
  return note("wait", s, std::to_string(reinterpret_cast<uintptr_t>(e)));
}
int cuEventCreate(void** e, unsigned) {
  std::lock_guard<std::mutex> lock(guard);
  return *e = reinterpret_cast<void*>(next_event++), 0;
}
int cuEventDestroy_v2(void*) { return 0; }
int cuEventRecord(void* e, void* s) { return note("record", s, std::to_string(reinterpret_cast<uintptr_t>(e))); }
int cuEventQuery(void*) { return 0; }
int cuEventSynchronize(void*) { return forbidden("event_sync"); }
int cuLibraryLoadData(void** l, const void*, void*, void**, unsigned, void*, void**, unsigned) {
  return *l = &trace, 0;
}
int cuLibraryUnload(void*) { return 0; }
int cuLibraryGetGlobal(uint64_t* p, size_t* n, void*, const char*) {
  return *p = reinterpret_cast<uint64_t>(&smem_bytes), *n = 4, 0;
}
int cuLibraryGetKernel(void** k, void*, const char* name) {
  std::lock_guard<std::mutex> lock(guard);
  *k = new char;
  kernels[*k] = name;
  return 0;
}
int cuKernelGetFunction(void** f, void* k) { return *f = k, 0; }
int cuKernelGetAttribute(int* v, int, void*, int) { return *v = 64, 0; }
int cuKernelSetAttribute(int, int, void*, int) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void*, int, size_t) { return *n = 2, 0; }
int cuTensorMapEncodeTiled(void* map, int, unsigned, void* address, const uint64_t*, const uint64_t*, const uint32_t*,
                           const uint32_t*, int, int, int, int) {
  if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(address) % 16) return 1;
  memset(map, 0, 128);
  return memcpy(map, &address, sizeof address), 0;
}
int cuTensorMapReplaceAddress(void* map, void* address) {
  if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(address) % 16) return 1;
  return memcpy(map, &address, sizeof address), 0;
}
// The first bytes of the last launch's parameter.
static char parameter[208];  // pack.LAUNCH_RUN
const char* fake_parameter() { return parameter; }
int cuLaunchKernelEx(const Config* c, void* k, void** parameters, void**) {
  std::string name;
  {
    std::lock_guard<std::mutex> lock(guard);
    name = kernels[k];
  }
  memcpy(parameter, parameters[0], name == "attnrt_copy_pages" ? 96 : sizeof parameter);
  return note("launch", c->stream, name + " " + std::to_string(c->grid_x));
}
}
