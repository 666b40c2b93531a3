// SPDX-License-Identifier: Apache-2.0
// The DLPack protocol's C structures (version 1.x, field order as published by dmlc/dlpack), our own spelling.
#pragma once

#include <cstdint>

namespace attnrt::dlpack {

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; NULL: row-major compact
  std::uint64_t byte_offset;
};

struct Managed {  // capsule "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

constexpr std::uint64_t kReadOnly = 1, kIsCopied = 2;

struct ManagedVersioned {  // capsule "dltensor_versioned"
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

// The table behind the type attribute __dlpack_c_exchange_api__ (capsule "dlpack_exchange_api").
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor*, ManagedVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void*, ManagedVersioned**);
  int (*managed_to_object)(ManagedVersioned*, void**);
  int (*tensor_from_object)(void*, Tensor*);  // may be NULL; borrows, no reference is taken
  int (*current_stream)(std::int32_t type, std::int32_t id, void** stream);
};

}  // namespace attnrt::dlpack
