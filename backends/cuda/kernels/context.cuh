// SPDX-License-Identifier: Apache-2.0
// What a hook may read about a query.
#pragma once
#include "attnrt_variant.h"
#include "params.cuh"

namespace attnrt {

// The caller adds the key.
__device__ __forceinline__ Ctx query_ctx(const RunParams& p, int request, int qo_row, int qo_pos, int kv_head,
                                         int qo_head) {
  Ctx c;
  c.request = request;
  c.qo_row = qo_row;
  c.qo_pos = qo_pos;
  c.kv_head = kv_head;
  c.qo_head = qo_head;
  c.qo_len = p.plan->qo_lens[request];
  c.kv_len = kv_len_of(p, request);
  c.kv_pos = 0;
  c.kv_slot = 0;
  return c;
}

}  // namespace attnrt
