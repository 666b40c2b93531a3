// SPDX-License-Identifier: Apache-2.0
// The table of the family ATTNRT_FAMILY, whose accessor is ATTNRT_FAMILY_TABLE.
#include "attnrt_cpu/kernels.h"

namespace attnrt_cpu {
namespace ATTNRT_FAMILY {

#include "attnrt_cpu/simd.h"
#include "attnrt_cpu/stores.h"
#include "attnrt_cpu/loops.h"
#include "attnrt_cpu/state.h"
#include "attnrt_cpu/resolve.h"
#include "attnrt_cpu/softmax.h"
#include "attnrt_cpu/item.h"
#include "attnrt_cpu/few.h"
#include "attnrt_cpu/many.h"
#include "attnrt_cpu/attend.h"
#include "attnrt_cpu/merge.h"
#include "attnrt_cpu/loads.h"
#include "attnrt_cpu/micro.h"
#include "attnrt_cpu/store.h"

// Sum of `count` floats: every line is read once, with enough loads in flight to keep the memory busy.
static double read_all(const float* x, int64_t count) {
  vf sum[8];
  for (int i = 0; i < 8; ++i) sum[i] = splat(0.0f);
  for (int64_t at = 0; at + 8 * W <= count; at += 8 * W)
    for (int i = 0; i < 8; ++i) sum[i] = sum[i] + load(x + at + i * W);
  double total = 0;
  for (int i = 0; i < 8; ++i) total += static_cast<double>(sum_lanes(sum[i]));
  return total;
}

template <class V>
static constexpr attnrt_kernel kernel() {
  return {attend_worker<V>, merge_worker<V>};
}

static const Family table = {
    ATTNRT_FAMILY_NAME,
    &loops,
    {kernel<attnrt::Full>(), kernel<attnrt::Causal>(), kernel<attnrt::CausalWindow>(), kernel<attnrt::CausalSoftcap>()},
    store_rows,
    copy_pages,
    read_all};

}  // namespace ATTNRT_FAMILY

const Family* ATTNRT_FAMILY_TABLE() { return &ATTNRT_FAMILY::table; }

}  // namespace attnrt_cpu
