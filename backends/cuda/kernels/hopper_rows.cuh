// SPDX-License-Identifier: Apache-2.0
// The rows of a consumer thread of the Hopper prefill family: which they are, what hooks may ask about them, and which
// keys all rows of the warpgroup see. Row r of a pass is query r / group, head r % group.
#pragma once
#include "hopper_layout.cuh"
#include "types.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperRows {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;

 public:
  __device__ __forceinline__ HopperRows(const RunParams& p, const ParamRef* params, char* smem)
      : p_(p), params_(params), base_(ptx::smem_addr(smem)), meta_(*reinterpret_cast<M*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    group_ = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    // A negative scale turns the order of scores round: scores are negated instead. Zero becomes a number too small to
    // matter.
    const float scale = Variant::has_logits || !Variant::use_softmax ? 1.0f : p.sm_scale;
    negate_ = scale < 0.0f;
    scale_ = fmaxf(fabsf(scale), 1e-30f) * kLog2e;
  }

 protected:
  struct Row {
    typename Variant::Row hook;
    Ctx ctx;
    long long mask_bit;
    int mask_from;
    int low, high, limit;
  };

  // This thread's rows are g and g + 8 of its warp's sixteen.
  __device__ __forceinline__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }

  __device__ __forceinline__ const PassRecord& record() const { return meta_.pass[pass_ & 1]; }

  // What hooks may ask about row r of a pass.
  __device__ __forceinline__ Ctx context(int pass, int r) const {
    const PassRecord& record = meta_.pass[pass & 1];
    const int4 entry = meta_.row[pass & 1][r];
    Ctx c;
    c.request = meta_.row_request[pass & 1][r].x;
    c.qo_row = entry.x;
    c.qo_pos = entry.y;
    c.kv_head = record.head;
    c.qo_head = c.kv_head * Config::group + (record.first + r) % Config::group;
    c.qo_len = p_.plan->qo_lens[c.request];
    c.kv_len = kv_len_of(p_, c.request);
    c.kv_pos = 0;
    c.kv_slot = 0;
    return c;
  }

  __device__ __forceinline__ void load_rows(Row (&rows)[2]) {
    int low_max = kDeadKey, high_min = 0x7fffffff, limit_min = 0x7fffffff, any_mask = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Row& row = rows[half];
      const int r = row_of(half);
      row.ctx = context(pass_, r);
      row.hook = Variant::row(params_, row.ctx);
      row.low = meta_.row[pass_ & 1][r].z;
      row.high = meta_.row[pass_ & 1][r].w;
      row.limit = meta_.row_request[pass_ & 1][r].y;
      row.mask_bit = kNoMask;
      row.mask_from = 0;
      if constexpr (Variant::reads_index_mask) {
        row.mask_bit = meta_.mask_bit[pass_ & 1][r];
        row.mask_from = meta_.mask_from[pass_ & 1][r];
      }
    }
    // What all rows of the warpgroup see: its warps must go the same way, because they multiply together.
#pragma unroll
    for (int r = group_ * 64 + lane_; r < (group_ + 1) * 64; r += 32) {
      const int4 entry = meta_.row[pass_ & 1][r];
      if (entry.x < 0) continue;  // rows past the item's end do not make the others' tiles partial
      low_max = max(low_max, entry.z);
      high_min = min(high_min, entry.w);
      limit_min = min(limit_min, meta_.row_request[pass_ & 1][r].y);
      if constexpr (Variant::reads_index_mask) any_mask |= meta_.mask_bit[pass_ & 1][r] != kNoMask;
    }
    low_max_ = __reduce_max_sync(0xffffffffu, low_max);
    high_min_ = __reduce_min_sync(0xffffffffu, high_min);
    limit_min_ = __reduce_min_sync(0xffffffffu, limit_min);
    any_mask_ = Variant::reads_index_mask && __any_sync(0xffffffffu, any_mask);
    // Tiles that all rows see whole, where positions run on with offsets.
    const PassRecord& pass = record();
    whole_begin_ = max(low_max_, pass.shift + pass.live_begin) - pass.shift;
    whole_end_ = min(min(high_min_, pass.shift + pass.live_end - 1) - pass.shift + 1, limit_min_);
    if (!Variant::mask_is_interval || any_mask_ || negate_ || pass.live_begin >= pass.live_end) {
      whole_begin_ = 0x7fffffff;
      whole_end_ = 0;
    }
  }

  const RunParams& p_;
  const ParamRef* params_;
  const unsigned base_;
  M& meta_;
  int lane_, group_, warp_;
  int tile_, pass_;  // so far: they number buffers and phases
  int low_max_, high_min_, limit_min_;
  int whole_begin_, whole_end_;  // offsets
  bool any_mask_, negate_;
  float scale_;
};

}  // namespace attnrt
