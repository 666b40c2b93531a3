// SPDX-License-Identifier: Apache-2.0
// Typed pointers into libcuda, resolved once. The driver's ABI is stable, so the few types we need are declared here.
#include "driver.h"

#include <dlfcn.h>
#include <string.h>

#include <mutex>
#include <string>

namespace {

typedef int Result;
typedef void* Handle;
typedef int Device;

// CUlaunchConfig and CUlaunchAttribute of cuda.h (CUDA 11.8 and later).
struct LaunchAttribute {
  int id;
  char pad[8 - sizeof(int)];
  union {
    char raw[64];
    int flag;
  } value;
};
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  Handle stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
const int kProgrammaticStreamSerialization = 6;
const int kMaxDynamicSharedBytes = 8;
const int kRelaxed = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED

struct Driver {
  Result (*Init)(unsigned);
  Result (*DriverGetVersion)(int*);
  Result (*GetErrorString)(Result, const char**);
  Result (*DeviceGetCount)(int*);
  Result (*DeviceGet)(Device*, int);
  Result (*DeviceGetName)(char*, int, Device);
  Result (*DeviceGetAttribute)(int*, int, Device);
  Result (*DevicePrimaryCtxRetain)(Handle*, Device);
  Result (*CtxPushCurrent)(Handle);
  Result (*CtxPopCurrent)(Handle*);
  Result (*CtxGetCurrent)(Handle*);
  Result (*CtxGetDevice)(Device*);
  Result (*MemAlloc)(uint64_t*, size_t);
  Result (*MemFree)(uint64_t);
  Result (*MemHostAlloc)(void**, size_t, unsigned);
  Result (*MemFreeHost)(void*);
  Result (*MemcpyHtoDAsync)(uint64_t, const void*, size_t, Handle);
  Result (*MemcpyHtoD)(uint64_t, const void*, size_t);
  Result (*MemcpyDtoH)(void*, uint64_t, size_t);
  Result (*MemsetD8Async)(uint64_t, unsigned char, size_t, Handle);
  Result (*PointerGetAttribute)(void*, int, uint64_t);
  Result (*StreamSynchronize)(Handle);
  Result (*StreamIsCapturing)(Handle, int*);
  Result (*ThreadExchangeStreamCaptureMode)(int*);
  Result (*StreamWaitEvent)(Handle, Handle, unsigned);
  Result (*EventCreate)(Handle*, unsigned);
  Result (*EventDestroy)(Handle);
  Result (*EventRecord)(Handle, Handle);
  Result (*EventQuery)(Handle);
  Result (*EventSynchronize)(Handle);
  Result (*LibraryLoadData)(Handle*, const void*, void*, void**, unsigned, void*, void**, unsigned);
  Result (*LibraryUnload)(Handle);
  Result (*LibraryGetGlobal)(uint64_t*, size_t*, Handle, const char*);
  Result (*LibraryGetKernel)(Handle*, Handle, const char*);
  Result (*KernelGetFunction)(Handle*, Handle);
  Result (*KernelGetAttribute)(int*, int, Handle, Device);
  Result (*KernelSetAttribute)(int, int, Handle, Device);
  Result (*OccupancyMaxActiveBlocks)(int*, Handle, int, size_t);
  Result (*LaunchKernelEx)(const LaunchConfig*, Handle, void**, void**);
  Result (*TensorMapEncodeTiled)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                 const uint32_t*, int, int, int, int);
  Result (*TensorMapReplaceAddress)(void*, void*);
};

Driver cu;
bool opened = false;
std::mutex lock;
std::string why = "not tried yet";
const int kMaxDevices = 64;
Handle contexts[kMaxDevices];

template <class F>
bool find(void* lib, F& slot, const char* name) {
  slot = reinterpret_cast<F>(dlsym(lib, name));
  if (!slot) why = std::string("libcuda has no ") + name + " (driver older than CUDA 12?)";
  return slot != nullptr;
}

bool resolve(void* lib) {
  return find(lib, cu.Init, "cuInit") && find(lib, cu.DriverGetVersion, "cuDriverGetVersion") &&
         find(lib, cu.GetErrorString, "cuGetErrorString") && find(lib, cu.DeviceGetCount, "cuDeviceGetCount") &&
         find(lib, cu.DeviceGet, "cuDeviceGet") && find(lib, cu.DeviceGetName, "cuDeviceGetName") &&
         find(lib, cu.DeviceGetAttribute, "cuDeviceGetAttribute") &&
         find(lib, cu.DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain") &&
         find(lib, cu.CtxPushCurrent, "cuCtxPushCurrent_v2") && find(lib, cu.CtxPopCurrent, "cuCtxPopCurrent_v2") &&
         find(lib, cu.CtxGetCurrent, "cuCtxGetCurrent") && find(lib, cu.CtxGetDevice, "cuCtxGetDevice") &&
         find(lib, cu.MemAlloc, "cuMemAlloc_v2") && find(lib, cu.MemFree, "cuMemFree_v2") &&
         find(lib, cu.MemHostAlloc, "cuMemHostAlloc") && find(lib, cu.MemFreeHost, "cuMemFreeHost") &&
         find(lib, cu.MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2") && find(lib, cu.MemcpyHtoD, "cuMemcpyHtoD_v2") &&
         find(lib, cu.MemcpyDtoH, "cuMemcpyDtoH_v2") && find(lib, cu.MemsetD8Async, "cuMemsetD8Async") &&
         find(lib, cu.PointerGetAttribute, "cuPointerGetAttribute") &&
         find(lib, cu.StreamSynchronize, "cuStreamSynchronize") &&
         find(lib, cu.StreamIsCapturing, "cuStreamIsCapturing") && find(lib, cu.StreamWaitEvent, "cuStreamWaitEvent") &&
         find(lib, cu.ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode") &&
         find(lib, cu.EventCreate, "cuEventCreate") && find(lib, cu.EventDestroy, "cuEventDestroy_v2") &&
         find(lib, cu.EventRecord, "cuEventRecord") && find(lib, cu.EventQuery, "cuEventQuery") &&
         find(lib, cu.EventSynchronize, "cuEventSynchronize") && find(lib, cu.LibraryLoadData, "cuLibraryLoadData") &&
         find(lib, cu.LibraryUnload, "cuLibraryUnload") && find(lib, cu.LibraryGetGlobal, "cuLibraryGetGlobal") &&
         find(lib, cu.LibraryGetKernel, "cuLibraryGetKernel") &&
         find(lib, cu.KernelGetFunction, "cuKernelGetFunction") &&
         find(lib, cu.KernelGetAttribute, "cuKernelGetAttribute") &&
         find(lib, cu.KernelSetAttribute, "cuKernelSetAttribute") &&
         find(lib, cu.OccupancyMaxActiveBlocks, "cuOccupancyMaxActiveBlocksPerMultiprocessor") &&
         find(lib, cu.LaunchKernelEx, "cuLaunchKernelEx") &&
         find(lib, cu.TensorMapEncodeTiled, "cuTensorMapEncodeTiled") &&
         find(lib, cu.TensorMapReplaceAddress, "cuTensorMapReplaceAddress");
}

// Makes the device's primary context current for one call and puts the caller's back. When it is current already, as it
// is under any framework on its own device, nothing is pushed: two driver calls less on the launch path.
class Use {
 public:
  explicit Use(int device) : result_(-1), pushed_(false) {
    if (!opened || device < 0 || device >= kMaxDevices) return;
    if (!contexts[device] && (result_ = attnrt_cuda_retain(device)) != 0) return;
    Handle current = nullptr;
    result_ = cu.CtxGetCurrent(&current);
    if (result_ == 0 && current != contexts[device]) {
      result_ = cu.CtxPushCurrent(contexts[device]);
      pushed_ = result_ == 0;
    }
  }
  ~Use() {
    Handle dropped;
    if (pushed_) cu.CtxPopCurrent(&dropped);
  }
  int result() const { return result_; }

 private:
  int result_;
  bool pushed_;
};

// Marks calls of this thread that belong to no capture. Without it, memory that the garbage collector frees in the
// middle of a capture, or a workspace that another thread makes meanwhile, fails and ends that capture (torch captures
// in the global mode, which forbids such calls to every thread).
class Apart {
 public:
  Apart() {
    if (opened) cu.ThreadExchangeStreamCaptureMode(&mode_);
  }
  ~Apart() {
    if (opened) cu.ThreadExchangeStreamCaptureMode(&mode_);
  }

 private:
  int mode_ = kRelaxed;  // what the destructor puts back, once exchanged
};

Handle handle(uint64_t value) { return reinterpret_cast<Handle>(value); }

Result enqueue(const attnrt_launch_t& launch, unsigned grid, void* params, uint64_t stream) {
  LaunchAttribute attribute;
  LaunchConfig config = {grid, 1, 1, launch.threads, 1, 1, launch.smem, handle(stream), &attribute, 0};
  if (launch.pdl) {
    memset(&attribute, 0, sizeof attribute);
    attribute.id = kProgrammaticStreamSerialization;
    attribute.value.flag = 1;
    config.num_attributes = 1;
  }
  void* arguments[1] = {params};
  return cu.LaunchKernelEx(&config, handle(launch.kernel), arguments, nullptr);
}

}  // namespace

#define WITH_DEVICE(device, call) \
  Use use(device);                \
  return use.result() ? use.result() : (call)
#define APART_WITH_DEVICE(device, call) \
  Apart apart;                          \
  WITH_DEVICE(device, call)

extern "C" {

int attnrt_cuda_open(void) {
  std::lock_guard<std::mutex> guard(lock);
  if (opened) return 0;
  void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!lib) {
    why = std::string("the NVIDIA driver's library cannot be opened: ") + dlerror();
    return -1;
  }
  if (!resolve(lib)) return -1;
  Result r = cu.Init(0);
  if (r) {
    const char* text = nullptr;
    cu.GetErrorString(r, &text);
    why = std::string("cuInit failed: ") + (text ? text : "unknown error");
    return r;
  }
  why.clear();
  opened = true;
  return 0;
}

const char* attnrt_cuda_why(void) { return why.c_str(); }

const char* attnrt_cuda_error(int code) {
  const char* text = nullptr;
  if (!opened) return "the driver is not loaded";
  if (code < 0 || cu.GetErrorString(code, &text) || !text) return "unknown error";
  return text;
}

int attnrt_cuda_device_count(int* count) { return opened ? cu.DeviceGetCount(count) : -1; }
int attnrt_cuda_driver_version(int* version) { return opened ? cu.DriverGetVersion(version) : -1; }

int attnrt_cuda_device_name(int device, char* name, int size) {
  Device d;
  Result r = opened ? cu.DeviceGet(&d, device) : -1;
  return r ? r : cu.DeviceGetName(name, size, d);
}

int attnrt_cuda_device_attribute(int device, int attribute, int* value) {
  Device d;
  Result r = opened ? cu.DeviceGet(&d, device) : -1;
  return r ? r : cu.DeviceGetAttribute(value, attribute, d);
}

int attnrt_cuda_retain(int device) {
  if (!opened || device < 0 || device >= kMaxDevices) return -1;
  std::lock_guard<std::mutex> guard(lock);
  if (contexts[device]) return 0;
  Device d;
  Result r = cu.DeviceGet(&d, device);
  Handle ctx = nullptr;
  if (!r) r = cu.DevicePrimaryCtxRetain(&ctx, d);
  if (!r) contexts[device] = ctx;
  return r;
}

int attnrt_cuda_current_device(int* device) {
  if (!opened) return -1;
  Handle ctx = nullptr;
  Result r = cu.CtxGetCurrent(&ctx);
  if (r) return r;
  if (!ctx) {
    *device = 0;
    return 0;
  }
  return cu.CtxGetDevice(device);
}

int attnrt_cuda_alloc(int device, size_t bytes, uint64_t* ptr) { APART_WITH_DEVICE(device, cu.MemAlloc(ptr, bytes)); }
int attnrt_cuda_free(int device, uint64_t ptr) { APART_WITH_DEVICE(device, cu.MemFree(ptr)); }
int attnrt_cuda_host_alloc(int device, size_t bytes, void** ptr) {
  APART_WITH_DEVICE(device, cu.MemHostAlloc(ptr, bytes, 0x01 /* portable */));
}
int attnrt_cuda_host_free(int device, void* ptr) { APART_WITH_DEVICE(device, cu.MemFreeHost(ptr)); }
int attnrt_cuda_memcpy_htod_async(int device, uint64_t dst, const void* src, size_t bytes, uint64_t stream) {
  WITH_DEVICE(device, cu.MemcpyHtoDAsync(dst, src, bytes, handle(stream)));
}
int attnrt_cuda_memcpy_htod(int device, uint64_t dst, const void* src, size_t bytes) {
  APART_WITH_DEVICE(device, cu.MemcpyHtoD(dst, src, bytes));
}
int attnrt_cuda_memcpy_dtoh(int device, void* dst, uint64_t src, size_t bytes) {
  APART_WITH_DEVICE(device, cu.MemcpyDtoH(dst, src, bytes));
}
int attnrt_cuda_memset_async(int device, uint64_t dst, int value, size_t bytes, uint64_t stream) {
  WITH_DEVICE(device, cu.MemsetD8Async(dst, static_cast<unsigned char>(value), bytes, handle(stream)));
}
int attnrt_cuda_pointer_device(uint64_t ptr, int* device) {
  return opened ? cu.PointerGetAttribute(device, 9 /* CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL */, ptr) : -1;
}

int attnrt_cuda_stream_sync(int device, uint64_t stream) {
  APART_WITH_DEVICE(device, cu.StreamSynchronize(handle(stream)));
}
int attnrt_cuda_stream_capturing(int device, uint64_t stream, int* capturing) {
  WITH_DEVICE(device, cu.StreamIsCapturing(handle(stream), capturing));
}
int attnrt_cuda_stream_wait(int device, uint64_t stream, uint64_t event) {
  WITH_DEVICE(device, cu.StreamWaitEvent(handle(stream), handle(event), 0));
}
int attnrt_cuda_event_create(int device, uint64_t* event) {
  APART_WITH_DEVICE(device, cu.EventCreate(reinterpret_cast<Handle*>(event), 0x02 /* no timing */));
}
int attnrt_cuda_event_destroy(int device, uint64_t event) { APART_WITH_DEVICE(device, cu.EventDestroy(handle(event))); }
int attnrt_cuda_send(int device, uint64_t dst, const void* src, size_t bytes, uint64_t stream, uint64_t event) {
  Use use(device);
  Result r = use.result();
  if (!r) r = cu.MemcpyHtoDAsync(dst, src, bytes, handle(stream));
  return r ? r : cu.EventRecord(handle(event), handle(stream));
}
int attnrt_cuda_event_record(int device, uint64_t event, uint64_t stream) {
  WITH_DEVICE(device, cu.EventRecord(handle(event), handle(stream)));
}
int attnrt_cuda_event_query(int device, uint64_t event) { APART_WITH_DEVICE(device, cu.EventQuery(handle(event))); }
int attnrt_cuda_event_sync(int device, uint64_t event) {
  APART_WITH_DEVICE(device, cu.EventSynchronize(handle(event)));
}

int attnrt_cuda_library_load(int device, const void* image, uint64_t* library) {
  APART_WITH_DEVICE(
      device, cu.LibraryLoadData(reinterpret_cast<Handle*>(library), image, nullptr, nullptr, 0, nullptr, nullptr, 0));
}
int attnrt_cuda_library_unload(int device, uint64_t library) {
  APART_WITH_DEVICE(device, cu.LibraryUnload(handle(library)));
}
int attnrt_cuda_library_global(int device, uint64_t library, const char* name, uint64_t* ptr, size_t* bytes) {
  APART_WITH_DEVICE(device, cu.LibraryGetGlobal(ptr, bytes, handle(library), name));
}
int attnrt_cuda_kernel_get(int device, uint64_t library, const char* name, uint64_t* kernel) {
  Apart apart;
  Use use(device);
  Handle found = nullptr, function = nullptr;
  Result r = use.result();
  if (!r) r = cu.LibraryGetKernel(&found, handle(library), name);
  // Loads the code now: what is loaded lazily would be loaded by the first launch, which may lie inside a capture.
  if (!r) r = cu.KernelGetFunction(&function, found);
  *kernel = reinterpret_cast<uint64_t>(found);
  return r;
}
int attnrt_cuda_kernel_attribute(int device, uint64_t kernel, int attribute, int* value) {
  Use use(device);
  Device d;
  Result r = use.result();
  if (!r) r = cu.DeviceGet(&d, device);
  return r ? r : cu.KernelGetAttribute(value, attribute, handle(kernel), d);
}
int attnrt_cuda_kernel_set_smem(int device, uint64_t kernel, int bytes) {
  Apart apart;
  Use use(device);
  Device d;
  Result r = use.result();
  if (!r) r = cu.DeviceGet(&d, device);
  return r ? r : cu.KernelSetAttribute(kMaxDynamicSharedBytes, bytes, handle(kernel), d);
}
int attnrt_cuda_kernel_occupancy(int device, uint64_t kernel, int threads, size_t smem, int* ctas) {
  Use use(device);
  Handle function = nullptr;
  Result r = use.result();
  if (!r) r = cu.KernelGetFunction(&function, handle(kernel));
  return r ? r : cu.OccupancyMaxActiveBlocks(ctas, function, threads, smem);
}

int attnrt_cuda_launch(const attnrt_launch_t* launch, void* params, uint64_t stream) {
  Use use(launch->device);
  return use.result() ? use.result() : enqueue(*launch, launch->grid, params, stream);
}

int attnrt_cuda_tensor_map(int device, void* map, int type, uint64_t address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box) {
  Use use(device);
  if (use.result()) return use.result();
  const uint32_t ones[4] = {1, 1, 1, 1};
  const int plain = 0, swizzle128 = 3, promote128 = 2, zeros = 0;
  return cu.TensorMapEncodeTiled(map, type, 4, reinterpret_cast<void*>(address), dims, strides, box, ones, plain,
                                 swizzle128, promote128, zeros);
}

int attnrt_cuda_run(const attnrt_run_t* run, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse,
                    float scale, uint64_t stream) {
  Use use(run->launches[0].device);
  Result r = use.result();
  int capturing = 0;
  if (!r) r = cu.StreamIsCapturing(handle(stream), &capturing);
  if (!r && capturing && run->forbid_capture) return ATTNRT_CAPTURING;
  if (!r && run->at_maps && (k | v) % 16) return ATTNRT_CAPTURING;
  char* args = run->args;
  const int vectors_k = run->aligned_k && k % 16 == 0, vectors_v = run->aligned_v && v % 16 == 0;
  memcpy(args + run->at_q, &q, sizeof q);
  memcpy(args + run->at_k, &k, sizeof k);
  memcpy(args + run->at_v, &v, sizeof v);
  memcpy(args + run->at_out, &out, sizeof out);
  memcpy(args + run->at_lse, &lse, sizeof lse);
  memcpy(args + run->at_scale, &scale, sizeof scale);
  memcpy(args + run->at_vectors_k, &vectors_k, sizeof vectors_k);
  memcpy(args + run->at_vectors_v, &vectors_v, sizeof vectors_v);
  if (!r && run->at_maps) {
    r = cu.TensorMapReplaceAddress(args + run->at_maps, reinterpret_cast<void*>(k));
    if (!r) r = cu.TensorMapReplaceAddress(args + run->at_maps + 128, reinterpret_cast<void*>(v));
  }
  int first = 1;
  for (int i = 0; !r && i < run->num_launches; ++i) {
    const unsigned grid = capturing ? run->launches[i].grid : run->eager_grid[i];
    if (!grid) continue;
    if (run->at_first) memcpy(args + run->at_first, &first, sizeof first);
    r = enqueue(run->launches[i], grid, args, stream);
    first = 0;
  }
  return r;
}

}  // extern "C"
