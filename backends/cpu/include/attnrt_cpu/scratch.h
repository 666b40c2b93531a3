// SPDX-License-Identifier: Apache-2.0
// Memory of one thread, kept between calls and grown only when a larger item comes. Included once per library, outside
// the namespaces of the instruction families.
#pragma once
#include <stdint.h>
#include <stdlib.h>

namespace attnrt_cpu {

struct Scratch {
  char* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }
  bool reserve(size_t bytes) {
    if (bytes <= size) return true;
    free(memory);
    size = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    memory = static_cast<char*>(aligned_alloc(4096, rounded));
    if (memory) size = rounded;
    return memory != nullptr;
  }
};

inline Scratch& scratch() {
  static thread_local Scratch own;
  return own;
}

// Hands out 64-byte aligned pieces; with no memory behind it, only counts.
struct Carve {
  char* memory;
  size_t used = 0;
  template <class T>
  T* take(int64_t count) {
    char* at = memory + used;
    used += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
};

}  // namespace attnrt_cpu
