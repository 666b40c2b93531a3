// SPDX-License-Identifier: Apache-2.0
// What becomes of a leaf of the decode kernel: its sums, folded onto the leaves before it, stored as a state, or
// divided and written as rows.
#pragma once
#include "decode_loader.cuh"
#include "finish.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeResults {
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;

 public:
  using Memory = DecodeMemory<Config, Variant>;

  __device__ __forceinline__ DecodeResults(const RunParams& p, const ParamRef* params, const Memory& memory, int warp)
      : p_(p),
        params_(params),
        smem_(memory.smem),
        group_(memory.group_of(warp)),
        own_(memory.own(group_)),
        meta_(*reinterpret_cast<M*>(own_ + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    warp_ = warp % L::kWarps;
    g_ = lane_ / 4;
    t_ = lane_ % 4;
  }

 protected:
  using Rows = DecodeRows<L, Variant>;
  static constexpr int kN = L::kBlocks;
  static constexpr int kCT = L::kColTiles;

  struct State {
    float m[kN][2], l[kN][2];
    float acc[kN][kCT][4];
  };

  // The header's top, there once the first stage is full.
  __device__ __forceinline__ const PlanHeader& plan() const {
    return *reinterpret_cast<const PlanHeader*>(smem_ + meta_.top);
  }

  // Of the warps that compute.
  __device__ __forceinline__ void sync() const { ptx::bar_sync(1 + group_, L::kThreads); }

  __device__ __forceinline__ int row_of(int n, int c) const { return 8 * n + 2 * t_ + c; }

  __device__ __forceinline__ static void clear(State& s) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        s.m[n][c] = neg_inf();
        s.l[n][c] = 0.0f;
#pragma unroll
        for (int j = 0; j < kCT; ++j) s.acc[n][j][c] = s.acc[n][j][c + 2] = 0.0f;
      }
  }

  // Row sums of the leaf: the four pairs of keys of a row, then the warps in order.
  __device__ __forceinline__ void close_leaf(State& state) {
    if constexpr (!Variant::use_softmax) return;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float l[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        l[c] = state.l[n][c];
        l[c] += __shfl_xor_sync(0xffffffffu, l[c], 8);
        l[c] += __shfl_xor_sync(0xffffffffu, l[c], 16);
      }
      if (g_ == 0) *reinterpret_cast<float2*>(&meta_.sums[warp_][row_of(n, 0)]) = make_float2(l[0], l[1]);
    }
    sync();
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 l = *reinterpret_cast<const float2*>(&meta_.sums[0][row_of(n, 0)]);
#pragma unroll
      for (int w = 1; w < L::kWarps; ++w) {
        const float2 x = *reinterpret_cast<const float2*>(&meta_.sums[w][row_of(n, 0)]);
        l.x += x.x;
        l.y += x.y;
      }
      state.l[n][0] = l.x;
      state.l[n][1] = l.y;
    }
  }

  __device__ __forceinline__ static void fold(State& total, const State& leaf) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Fold f = fold_head<Variant::use_softmax>(total.m[n][c], total.l[n][c], leaf.m[n][c], leaf.l[n][c]);
        total.m[n][c] = f.m;
        total.l[n][c] = f.l;
#pragma unroll
        for (int j = 0; j < kCT; ++j)
#pragma unroll
          for (int e = c; e < 4; e += 2) total.acc[n][j][e] = fold_acc(f, total.acc[n][j][e], leaf.acc[n][j][e]);
      }
  }

  // Both of these use the state up.
  __device__ __forceinline__ void store_state(const Rows& rows, int leaf, State& s) const {
#pragma unroll 1
    for (int i = 0; i < 2 * kN; ++i, shift(s)) {
      const int r = row_of(i / 2, i % 2);
      const int query = (rows.first + r) / Config::group;
      if (query >= rows.queries) continue;
      const long long at =
          (static_cast<long long>(rows.slot) + leaf * rows.queries + query) * p_.num_qo_heads + rows.qo_head[r];
      if (warp_ == 0 && g_ == 0) reinterpret_cast<float2*>(plan().partial_ml)[at] = make_float2(s.m[0][0], s.l[0][0]);
      float* to = plan().partial_acc + at * L::kDim;
#pragma unroll
      for (int j = 0; j < kCT; ++j) {
        if constexpr (L::kFp8) {
          *reinterpret_cast<float2*>(to + col_of(j, 0)) = make_float2(s.acc[0][j][0], s.acc[0][j][2]);
        } else {
          to[col_of(j, 0)] = s.acc[0][j][0];
          to[col_of(j, 1)] = s.acc[0][j][2];
        }
      }
    }
  }

  __device__ __forceinline__ void finish(const Rows& rows, State& s) const {
    typedef typename Bits<Config::out_type>::type Element;
#pragma unroll 1
    for (int i = 0; i < 2 * kN; ++i, shift(s)) {
      const int r = row_of(i / 2, i % 2);
      if (rows.qo_row[r] < 0) continue;
      const Ctx c = row_ctx<Config, Variant>(p_, rows, r, rows.head);
      const FinishRow row = finish_head<Variant>(params_, c, s.m[0][0], s.l[0][0]);
      if (warp_ == 0 && g_ == 0) store_lse(p_, c.qo_row, c.qo_head, row.lse);
      Element* to = reinterpret_cast<Element*>(out_address<Config>(p_, c.qo_row, c.qo_head, 0));
#pragma unroll
      for (int j = 0; j < kCT; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int col = col_of(j, half);
          to[col] = finish_value<Config, Variant>(params_, c, row, col, s.acc[0][j][2 * half]);
        }
    }
  }

  const RunParams& p_;
  const ParamRef* params_;
  char* smem_;
  int group_;
  char* own_;  // the group's own memory
  M& meta_;
  int lane_, warp_, g_, t_;

 private:
  // Column of acc[n][j][c + 2 * half].
  __device__ __forceinline__ int col_of(int j, int half) const {
    return warp_ * L::kWarpCols + j * 16 + (L::kFp8 ? 2 * g_ + half : g_ + 8 * half);
  }

  // Moves every row one place down: a rolled loop over the rows takes the first each time, so that what ends a row is
  // compiled once.
  __device__ __forceinline__ static void shift(State& s) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      s.m[n][0] = s.m[n][1];
      s.l[n][0] = s.l[n][1];
      if (n + 1 < kN) {
        s.m[n][1] = s.m[n + 1][0];
        s.l[n][1] = s.l[n + 1][0];
      }
#pragma unroll
      for (int j = 0; j < kCT; ++j)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          s.acc[n][j][e] = s.acc[n][j][e + 1];
          if (n + 1 < kN) s.acc[n][j][e + 1] = s.acc[n + 1][j][e];
        }
    }
  }
};

}  // namespace attnrt
