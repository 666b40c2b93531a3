// SPDX-License-Identifier: Apache-2.0
// The few entry points of the CUDA driver that attnrt needs, found in libcuda at run time: building needs no CUDA
// toolkit and importing needs no GPU. Every function returns the driver's CUresult (0: success), or -1 if the driver is
// not loaded.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Opens libcuda and initialises it; on failure returns non-zero and attnrt_cuda_why() says what was tried.
int attnrt_cuda_open(void);
const char* attnrt_cuda_why(void);
const char* attnrt_cuda_error(int code);

int attnrt_cuda_device_count(int* count);
int attnrt_cuda_device_name(int device, char* name, int size);
int attnrt_cuda_device_attribute(int device, int attribute, int* value);
int attnrt_cuda_driver_version(int* version);
// Retains the device's primary context (kept for the life of the process).
int attnrt_cuda_retain(int device);
int attnrt_cuda_current_device(int* device);

// Memory. `device` selects the primary context; the caller's current context is restored.
int attnrt_cuda_alloc(int device, size_t bytes, uint64_t* ptr);
int attnrt_cuda_free(int device, uint64_t ptr);
int attnrt_cuda_host_alloc(int device, size_t bytes, void** ptr);
int attnrt_cuda_host_free(int device, void* ptr);
int attnrt_cuda_memcpy_htod_async(int device, uint64_t dst, const void* src, size_t bytes, uint64_t stream);
int attnrt_cuda_memcpy_htod(int device, uint64_t dst, const void* src, size_t bytes);
int attnrt_cuda_memcpy_dtoh(int device, void* dst, uint64_t src, size_t bytes);
int attnrt_cuda_memset_async(int device, uint64_t dst, int value, size_t bytes, uint64_t stream);
int attnrt_cuda_pointer_device(uint64_t ptr, int* device);

// Streams and events.
int attnrt_cuda_stream_sync(int device, uint64_t stream);
int attnrt_cuda_stream_capturing(int device, uint64_t stream, int* capturing);
int attnrt_cuda_stream_wait(int device, uint64_t stream, uint64_t event);
int attnrt_cuda_event_create(int device, uint64_t* event);
int attnrt_cuda_event_destroy(int device, uint64_t event);
int attnrt_cuda_event_record(int device, uint64_t event, uint64_t stream);
// A copy to the device and, behind it, the event.
int attnrt_cuda_send(int device, uint64_t dst, const void* src, size_t bytes, uint64_t stream, uint64_t event);
int attnrt_cuda_event_query(int device, uint64_t event);
int attnrt_cuda_event_sync(int device, uint64_t event);

// Kernels.
int attnrt_cuda_library_load(int device, const void* image, uint64_t* library);
int attnrt_cuda_library_unload(int device, uint64_t library);
int attnrt_cuda_library_global(int device, uint64_t library, const char* name, uint64_t* ptr, size_t* bytes);
int attnrt_cuda_kernel_get(int device, uint64_t library, const char* name, uint64_t* kernel);
int attnrt_cuda_kernel_attribute(int device, uint64_t kernel, int attribute, int* value);
int attnrt_cuda_kernel_set_smem(int device, uint64_t kernel, int bytes);
int attnrt_cuda_kernel_occupancy(int device, uint64_t kernel, int threads, size_t smem, int* ctas);

// A 4-D tensor map (CUtensorMap, 128 bytes on a multiple of 64) of 16-bit elements under the 128-byte swizzle; type is
// a CUtensorMapDataType, strides (of axes 1 to 3) are bytes.
int attnrt_cuda_tensor_map(int device, void* map, int type, uint64_t address, const uint64_t* dims,
                           const uint64_t* strides, const uint32_t* box);

// One launch: the kernel takes a single struct by value, `params`. pdl: programmatic stream serialisation.
typedef struct {
  int device;
  uint64_t kernel;
  unsigned grid;
  unsigned threads;
  unsigned smem;
  int pdl;
} attnrt_launch_t;
int attnrt_cuda_launch(const attnrt_launch_t* launch, void* params, uint64_t stream);

// A run whose arguments are packed and differ from call to call in addresses, scale and stream alone: the path that
// every layer of every step pays for. `args` is the struct that all its kernels take; at_* are byte offsets of what is
// written into it.
enum { ATTNRT_MAX_LAUNCHES = 8 };
typedef struct {
  attnrt_launch_t launches[ATTNRT_MAX_LAUNCHES];  // grids for a captured graph, which must serve every later plan
  unsigned eager_grid[ATTNRT_MAX_LAUNCHES];       // grids outside of a capture; 0: not launched
  int num_launches;
  int forbid_capture;        // under capture launch nothing and return ATTNRT_CAPTURING
  int aligned_k, aligned_v;  // the strides allow 16-byte copies
  int at_q, at_k, at_v, at_out, at_lse, at_scale, at_vectors_k, at_vectors_v;
  int at_first;  // 1 is written there for the first launch and 0 for later ones, which overlap with it; 0: nothing is
  int at_maps;   // tensor maps of K and V, one behind the other, whose addresses change with theirs; 0: none
  char* args;    // on a multiple of 64 bytes
} attnrt_run_t;
// Nothing was launched: the call has to go the long way. Under capture it is refused there; K or V off 16-byte lines,
// which tensor maps cannot reach, go to another kernel.
enum { ATTNRT_CAPTURING = -2 };
int attnrt_cuda_run(const attnrt_run_t* run, uint64_t q, uint64_t k, uint64_t v, uint64_t out, uint64_t lse,
                    float scale, uint64_t stream);

#ifdef __cplusplus
}
#endif
