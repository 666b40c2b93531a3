// SPDX-License-Identifier: Apache-2.0
// Leaf boundaries: scheduler/base.py's Ruler, with shifts where a leaf's size is a power of two.
#pragma once

#include <cstdint>

class Ruler {
 public:
  explicit Ruler(const attnrt_class& klass) : k(klass) {
    for (int i = 0; i < k.num_spans; ++i) {
      shift[i] = -1;
      if ((k.span_size[i] & (k.span_size[i] - 1)) == 0) shift[i] = __builtin_ctzll(uint64_t(k.span_size[i]));
    }
  }

  int32_t leaf_of(int64_t offset) const {
    int i = 0;
    while (i + 1 < k.num_spans && offset >= k.span_start[i + 1]) ++i;
    const int64_t in = offset - k.span_start[i];
    return int32_t(k.span_leaf[i] + (shift[i] >= 0 ? in >> shift[i] : in / k.span_size[i]));
  }

  int64_t start(int64_t leaf) const {
    int i = 0;
    while (i + 1 < k.num_spans && leaf >= k.span_leaf[i + 1]) ++i;
    return k.span_start[i] + (leaf - k.span_leaf[i]) * k.span_size[i];
  }

 private:
  const attnrt_class& k;
  int shift[8];
};
