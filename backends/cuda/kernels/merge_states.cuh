// SPDX-License-Identifier: Apache-2.0
// The fold of a row's stored states in their order: lanes over a head's columns; all of a warp's, half of them, or of
// several warps with a slice of the columns each.
//
// Each read costs the latency of memory, so many states are asked for at once: as many as registers hold here, more in
// shared memory (merge_stream.cuh).
#pragma once
#include "attnrt_variant.h"
#include "layout.cuh"
#include "state.cuh"

namespace attnrt {

// The first lane's x, of a whole warp: what the compiler knows to be the same for all lanes. Exchanges behind a branch
// on anything else are there twice, once for a warp whose lanes part.
__device__ __forceinline__ int same(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// kMost: accumulators of four columns in registers. kSlices: of a head's columns. kLanes: of a head, 32 or 16.
template <class Config, int kMost, int kSlices, int kLanes, bool kSoftmax>
class MergeStates {
 protected:
  static constexpr int kCols = (Config::head_dim_vo / kSlices + kLanes - 1) / kLanes;  // columns per lane
  // Neighbours, four at most, else lane, lane + 32, ...
  static constexpr bool kVector = Config::head_dim_vo % 32 == 0 && (kCols == 2 || kCols == 4 || kLanes < 32);
  static constexpr int kBatch = kCols <= 4 ? kMost : kCols <= 8 ? 4 : 2;
  static_assert(kSlices == 1 || Config::head_dim_vo % (32 * kSlices) == 0, "whole lanes");
  static constexpr int kLevels = 24;  // pairwise tree: up to 2^24 leaves

 public:
  struct State {
    float m, l, acc[kCols];
  };

  __device__ __forceinline__ static State empty() {
    State s;
    s.m = neg_inf();
    s.l = 0.0f;
#pragma unroll
    for (int i = 0; i < kCols; ++i) s.acc[i] = 0.0f;
    return s;
  }

 protected:
  // slots: of the merge list, by place in the list.
  __device__ __forceinline__ MergeStates(const PlanHeader& plan, const int* slots, int heads, int slice)
      : plan_(plan),
        slots_(slots),
        lane_(threadIdx.x % kLanes),
        first_(slice * (Config::head_dim_vo / kSlices)),
        heads_(heads) {}

  __device__ __forceinline__ int col_of(int i) const {
    if constexpr (!kVector) return first_ + lane_ + 32 * i;
    constexpr int kNext = kCols < 4 ? kCols : 4;
    return first_ + i / kNext * (kNext * kLanes) + lane_ * kNext + i % kNext;
  }

  // In order. What a state needs is read for many at once: the heads of 32 states by the lanes, then the accumulators
  // of kBatch, each of which makes room for a later one.
  __device__ __forceinline__ State sequential(int begin, int end, int head) const {
    State s = none_yet();
#pragma unroll 1
    for (int first = begin; first < end; first += 32) {
      const int count = min(32, end - first);
      const unsigned mine = state_of(first + min(lane_, count - 1), head);
      const float2 ml = load_head(mine);
      float acc[kBatch][kCols];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) load_acc(__shfl_sync(0xffffffffu, mine, i), acc[i]);
      const Factors f = factors(s.m, ml, count);
#pragma unroll 1
      for (int e = 0; e < count; e += kBatch) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          add(s, f, e + i, acc[i]);
          load_acc(__shfl_sync(0xffffffffu, mine, (e + kBatch + i) % 32), acc[i], e + kBatch < count);
        }
      }
      s.m = __shfl_sync(0xffffffffu, f.upto, 31);
    }
    return s.m == neg_inf() ? empty() : s;
  }

  // Spans split at the largest power of two below them: a binary counter over the absolute leaf index, missing leaves
  // empty.
  __device__ __noinline__ State pairwise(int begin, int end, int head) const {
    State stack[kLevels];
    int depth = 0, e = begin;
    const int last = end > begin ? plan_.merge_leaves[end - 1] : -1;
#pragma unroll 1
    for (int leaf = 0; leaf <= last; ++leaf) {
      State s = plan_.merge_leaves[e] == leaf ? load(e++, head) : empty();
#pragma unroll 1
      for (int level = leaf; level & 1; level >>= 1) {
        State left = stack[--depth];
        fold(left, s);
        s = left;
      }
      stack[depth++] = s;
    }
    if (depth == 0) return empty();
    State s = stack[--depth];
#pragma unroll 1
    while (depth > 0) {
      State left = stack[--depth];
      fold(left, s);
      s = left;
    }
    return s;
  }

  // Neutral to `add`.
  __device__ __forceinline__ static State none_yet() {
    State s = empty();
#pragma unroll
    for (int j = 0; j < kCols; ++j) s.acc[j] = -0.0f;
    return s;
  }

  // States are fewer than 2^32: their numbers would fill a hundred gigabytes.
  __device__ __forceinline__ unsigned state_of(int entry, int head) const {
    return static_cast<unsigned>(slots_[entry]) * heads_ + head;
  }
  // Reads nothing if not `wanted`.
  __device__ __forceinline__ void load_acc(unsigned at, float (&acc)[kCols], bool wanted = true) const {
    const float* from = plan_.partial_acc + static_cast<long long>(at) * Config::head_dim_vo + col_of(0);
    if constexpr (kVector && kCols == 4) {
      ptx::load_l2(reinterpret_cast<const float4*>(from), acc, wanted);
    } else if constexpr (kVector && kCols == 2) {
      ptx::load_l2(reinterpret_cast<const float2*>(from), acc, wanted);
    } else {
#pragma unroll
      for (int i = 0; i < kCols; ++i) {
        float x[1] = {acc[i]};
        ptx::load_l2(from + 32 * i, x, wanted && col_of(i) < Config::head_dim_vo);
        acc[i] = x[0];
      }
    }
  }

  __device__ __forceinline__ float2 load_head(unsigned at) const {
    return load_head(reinterpret_cast<const float2*>(plan_.partial_ml), at);
  }
  __device__ __forceinline__ static float2 load_head(const float2* from, unsigned at) {
    float ml[2];
    ptx::load_l2(from + at, ml, true);
    return make_float2(ml[0], ml[1]);
  }

  __device__ __forceinline__ State load(int entry, int head) const {
    const unsigned at = state_of(entry, head);
    State s = empty();
    const float2 ml = load_head(at);
    s.m = ml.x;
    s.l = ml.y;
    load_acc(at, s.acc);
    return s;
  }

  __device__ __forceinline__ static void fold(State& a, const State& b) {
    const Fold f = fold_head<kSoftmax>(a.m, a.l, b.m, b.l);
    a.m = f.m;
    a.l = f.l;
#pragma unroll
    for (int i = 0; i < kCols; ++i) a.acc[i] = fold_acc(f, a.acc[i], b.acc[i]);
  }

  // Of the folds of 32 states, each in its lane.
  struct Factors {
    float upto;  // largest m so far
    float a, b, l;
    unsigned skipped;
  };

  // The lanes find the factors of all folds at once: a maximum has one value in any order. largest: m of all before.
  __device__ __forceinline__ Factors factors(float largest, const float2& ml, int count) const {
    Factors to;
    const float m = lane_ < count ? ml.x : neg_inf();
    to.upto = m;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const float left = __shfl_sync(0xffffffffu, to.upto, max(lane_ - step, 0), kLanes);
      if (lane_ >= step) to.upto = fmaxf(to.upto, left);
    }
    to.upto = fmaxf(to.upto, largest);
    float before = __shfl_sync(0xffffffffu, to.upto, max(lane_ - 1, 0), kLanes);
    if (lane_ == 0) before = largest;
    const Fold f = fold_head<kSoftmax>(before, 0.0f, m, 0.0f);
    to.a = f.scale_a;
    to.b = f.scale_b;
    to.l = f.take == 1 ? 0.0f : __fmul_rn(ml.y, f.scale_b);
    to.skipped = __ballot_sync(0xffffffffu, f.take == 1) >> (kLanes < 32 ? threadIdx.x % 32 / kLanes * kLanes : 0);
    return to;
  }

  // Folds state e of those that the lanes have the factors of. There is no branch: adding -0 changes no bit, and
  // -0 * 0 + x is x, so empty states and the first one that is not take the same way.
  __device__ __forceinline__ static void add(State& s, const Factors& f, int e, const float (&acc)[kCols]) {
    const float a = __shfl_sync(0xffffffffu, f.a, e, kLanes), b = __shfl_sync(0xffffffffu, f.b, e, kLanes);
    const bool skip = f.skipped >> e & 1;
    s.l = __fadd_rn(__fmul_rn(s.l, a), __shfl_sync(0xffffffffu, f.l, e, kLanes));
#pragma unroll
    for (int j = 0; j < kCols; ++j) s.acc[j] = __fadd_rn(__fmul_rn(s.acc[j], a), skip ? -0.0f : __fmul_rn(acc[j], b));
  }

  const PlanHeader& plan_;
  const int* slots_;
  int lane_, first_;  // of the head's; column of the slice
  int heads_;         // query heads of all
};

}  // namespace attnrt
