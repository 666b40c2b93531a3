// SPDX-License-Identifier: Apache-2.0
// What becomes of a leaf of the wide kernel: folded onto the leaves before it, stored as a state, or, at the end of its
// pass, divided and written as rows.
#pragma once
#include "finish.cuh"
#include "wide_loader.cuh"

namespace attnrt {

template <class Config, class Variant>
class WideResults {
  using L = WideLayout<Config, Variant>;
  using M = WideMeta<L, Variant>;

 protected:
  using Rows = WideRows<Variant>;
  static constexpr int kO = L::kDim / 2;
  static constexpr int kSixteens = L::kTile / 16;

  __device__ __forceinline__ WideResults(const RunParams& p, const ParamRef* params, char* smem)
      : p_(p),
        params_(params),
        smem_(smem),
        base_(ptx::smem_addr(smem)),
        meta_(*reinterpret_cast<M*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    group_ = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  }

  // Row of the pass, and the table that this warp's sixteen lie in.
  __device__ __forceinline__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }
  __device__ __forceinline__ const Rows& rows() const { return meta_.rows[group_ * 4 + warp_]; }

  // Maximum and sum of the leaf's exponentials: the four lanes of a row, then the sixteens in order.
  __device__ __forceinline__ void sum_leaf(float (&m)[2], float (&l)[2][kSixteens]) const {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Variant::use_softmax) {
#pragma unroll
        for (int b = 0; b < kSixteens; ++b) {
          float x = l[half][b];
          x += __shfl_xor_sync(0xffffffffu, x, 1);
          x += __shfl_xor_sync(0xffffffffu, x, 2);
          sum[half] = b == 0 ? x : sum[half] + x;
          l[half][b] = 0.0f;
        }
      }
    }
    sums(meta_.leaf) = make_float4(m[0], m[1], sum[0], sum[1]);
    m[0] = m[1] = neg_inf();
  }

  // The leaf is folded, stored, or, at the end of its pass, its rows are written. Nothing, and a leaf of which a row
  // sees nothing, count as -0, which changes no sum by a bit (a * 1 + -0 * 0 is a).
  __device__ __forceinline__ void close(float (&o)[kO], int leaf, bool ends) const {
    const WidePass& pass = meta_.pass;
    const float4 now = sums(meta_.leaf);
    if (__any_sync(0xffffffffu, now.x == neg_inf() || now.y == neg_inf())) {
#pragma unroll
      for (int i = 0; i < kO; ++i) o[i] = (i / 2 % 2 ? now.y : now.x) == neg_inf() ? -0.0f : o[i];
    }
    if (!pass.fold && pass.slot >= 0) {
      store_leaf(pass, leaf, o, now);
      return;
    }
    // The accumulators of a leaf that is to be folded or written lie in this thread's memory, four by four: registers
    // hold O, Q and the scores already, and rolled loops can write what lies there. Values that are read or not have to
    // be set before: ptxas keeps their registers for the whole loop else.
    const bool first = leaf == 0;
    float4 before = make_float4(neg_inf(), neg_inf(), 0.0f, 0.0f);
    if (!first) before = sums(meta_.total);
    const Sums sum = {{now.x, now.y}, {now.z, now.w}};
    Sums total = {{before.x, before.y}, {before.z, before.w}};
    Fold f[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      f[half] = fold_head<Variant::use_softmax>(total.m[half], total.l[half], sum.m[half], sum.l[half]);
      total.m[half] = f[half].m;
      total.l[half] = f[half].l;
    }
    sums(meta_.total) = make_float4(total.m[0], total.m[1], total.l[0], total.l[1]);
#pragma unroll
    for (int j = 0; j < kO / 4; ++j) {
      before = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
      if (!first) before = folded(j);
      const float a[4] = {before.x, before.y, before.z, before.w};
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = __fadd_rn(__fmul_rn(a[i], f[i / 2].scale_a), __fmul_rn(o[4 * j + i], f[i / 2].scale_b));
      }
      folded(j) = make_float4(x[0], x[1], x[2], x[3]);
    }
    if (!ends) return;
    if (pass.slot >= 0) {
      store_state(pass, total);
    } else {
      finish(pass, total);
    }
  }

  const RunParams& p_;
  const ParamRef* params_;
  char* smem_;
  const unsigned base_;
  M& meta_;
  int lane_, group_, warp_;

 private:
  struct Sums {  // of two rows
    float m[2], l[2];
  };

  // This thread's place among those of the warps that compute: maxima of rows g and g + 8, their sums.
  __device__ __forceinline__ static float4& sums(float4 (&all)[128 * L::kGroups]) { return all[threadIdx.x - 128]; }

  // Columns 8j + 2t and the next of row g, then of row g + 8.
  __device__ __forceinline__ float4& folded(int j) const {
    return reinterpret_cast<float4*>(smem_)[j * 128 * L::kGroups + threadIdx.x - 128];
  }

  // Place of a row's state, of leaf `leaf` of those that are not folded; negative: there is no such row.
  __device__ __forceinline__ static long long place(int state, const WidePass& pass, int leaf) {
    return state < 0 ? -1 : state + static_cast<long long>(leaf) * pass.leaf_states;
  }

  // The state of a leaf that is not folded. Its warp's rows go through shared memory, so that all lanes write one row
  // at a time; bulk copies, whose addresses are uniform, would be asked for lane by lane, 80 clk each.
  __device__ __forceinline__ void store_leaf(const WidePass& pass, int leaf, const float (&o)[kO],
                                             const float4& now) const {
    char* rows = smem_ + warp_ * 16 * L::kPitch;
    __syncwarp();  // the leaf before has been read
    float2* const to = reinterpret_cast<float2*>(rows + lane_ / 4 * L::kPitch) + lane_ % 4;
#pragma unroll
    for (int j = 0; j < kO / 4; ++j) {
      to[4 * j] = make_float2(o[4 * j], o[4 * j + 1]);
      to[4 * j + L::kPitch] = make_float2(o[4 * j + 2], o[4 * j + 3]);  // eight rows on
    }
    const int* const states = meta_.state + warp_ * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long at = place(states[half * 8 + lane_ / 4], pass, leaf);
      if (lane_ % 4 == 0 && at >= 0)
        reinterpret_cast<float2*>(meta_.plan.partial_ml)[at] = make_float2(half ? now.y : now.x, half ? now.w : now.z);
    }
    __syncwarp();
    float* const acc = meta_.plan.partial_acc + leaf * static_cast<long long>(pass.leaf_states) * L::kDim;
    constexpr int kLanes = L::kDim / 4, kAtOnce = 32 / kLanes;  // of a row, 16 bytes each
#pragma unroll 4
    for (int i = 0; i < 16; i += kAtOnce) {
      const int r = i + lane_ / kLanes, state = states[r];
      const float4 x = reinterpret_cast<const float4*>(rows + r * L::kPitch)[lane_ % kLanes];
      if (state >= 0) reinterpret_cast<float4*>(acc + static_cast<long long>(state) * L::kDim)[lane_ % kLanes] = x;
    }
  }

  __device__ __forceinline__ void store_state(const WidePass& pass, const Sums& sum) const {
    float* to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long at = place(meta_.state[row_of(half)], pass, 0);
      to[half] = nullptr;
      if (at < 0) continue;
      if (lane_ % 4 == 0) reinterpret_cast<float2*>(meta_.plan.partial_ml)[at] = make_float2(sum.m[half], sum.l[half]);
      to[half] = meta_.plan.partial_acc + at * L::kDim + lane_ % 4 * 2;
    }
#pragma unroll 4
    for (int j = 0; j < kO / 4; ++j) {
      const float4 x = folded(j);
      if (to[0]) *reinterpret_cast<float2*>(to[0] + 8 * j) = make_float2(x.x, x.y);
      if (to[1]) *reinterpret_cast<float2*>(to[1] + 8 * j) = make_float2(x.z, x.w);
    }
  }

  __device__ __forceinline__ void finish(const WidePass& pass, const Sums& sum) const {
    typedef typename Bits<Config::out_type>::type Element;
    const Rows& rows = this->rows();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int r = row_of(half) % kWideRows;
      if (rows.qo_row[r] < 0) continue;
      const Ctx c = row_ctx<Config, Variant>(p_, rows, r, pass.head);
      const FinishRow row = finish_head<Variant>(params_, c, half ? sum.m[1] : sum.m[0], half ? sum.l[1] : sum.l[0]);
      if (lane_ % 4 == 0) store_lse(p_, c.qo_row, c.qo_head, row.lse);
      Element* to = reinterpret_cast<Element*>(out_address<Config>(p_, c.qo_row, c.qo_head, 0)) + lane_ % 4 * 2;
#pragma unroll 4
      for (int j = 0; j < kO / 4; ++j) {
        const float4 x = folded(j);
        const int col = 8 * j + lane_ % 4 * 2;
        to[8 * j] = finish_value<Config, Variant>(params_, c, row, col, half ? x.z : x.x);
        to[8 * j + 1] = finish_value<Config, Variant>(params_, c, row, col + 1, half ? x.w : x.y);
      }
    }
  }
};

}  // namespace attnrt
