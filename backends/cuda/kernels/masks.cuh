// SPDX-License-Identifier: Apache-2.0
// Whether a row sees a key: the one test of all kernels whose rows lie in tables as rows.cuh fills them.
#pragma once
#include "attnrt_variant.h"
#include "layout.cuh"

namespace attnrt {

// Of row r in `rows` and the key at an offset in the request. `row` and `c` are what the variant's mask reads (unset
// where it is an interval), `mask` the packed bits of the item's part. `slot` is asked for where the mask reads it.
template <class Variant, class Rows, class Row, class Slot>
__device__ __forceinline__ bool sees(const ParamRef* params, const Rows& rows, const unsigned char* mask, int r,
                                     const Row& row, Ctx& c, int pos, int offset, Slot&& slot) {
  bool yes = pos != kDeadKey && pos >= rows.low[r] && pos <= rows.high[r] && offset < rows.limit[r];
  if constexpr (!Variant::mask_is_interval) {
    c.kv_pos = pos;
    c.kv_slot = slot();
    yes = yes && Variant::mask(params, row, c);
  }
  if constexpr (Variant::reads_index_mask) {
    if (yes && rows.mask_bit[r] != kNoMask && offset >= rows.mask_from[r]) {
      const long long bit = rows.mask_bit[r] + offset;
      yes = mask[bit >> 3] >> (bit & 7) & 1;
    }
  }
  return yes;
}

}  // namespace attnrt
