// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

// Scratch that only grows and is never cleared: what it held before is garbage.
template <class T>
class Buffer {
 public:
  T* need(size_t n) {
    if (n > size_) {
      size_ = n + n / 2;
      data_.reset(new T[size_]);
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
};
