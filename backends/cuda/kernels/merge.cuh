// SPDX-License-Identifier: Apache-2.0
// Folds the stored states of rows that several items share, then finishes them. One warp per (row, query head), lanes
// over columns, or several warps with a slice of the columns each.
#pragma once
#include "attnrt_variant.h"
#include "finish.cuh"

namespace attnrt {

// kMost: accumulators of four columns in flight, where registers are few. kSlices: of a head's columns.
template <class Config, class Variant, int kMost = 8, int kSlices = 1>
class Merge {
  static constexpr int kCols = (Config::head_dim_vo / kSlices + 31) / 32;  // columns per lane
  static constexpr bool kVector =
      Config::head_dim_vo % 32 == 0 && (kCols == 2 || kCols == 4);  // neighbours, else lane, lane + 32, ...
  static constexpr int kBatch = kCols <= 4 ? kMost : kCols <= 8 ? 4 : 2;
  static_assert(kSlices == 1 || Config::head_dim_vo % (32 * kSlices) == 0, "whole lanes");
  static constexpr int kLevels = 24;  // pairwise tree: up to 2^24 leaves
  // States of a warp on their way to shared memory, and of one step, where a lane's columns are sixteen bytes.
  static constexpr bool kStreams = kVector && kCols == 4;
  static constexpr int kRing = 16, kStep = 4, kRowBytes = 4 * Config::head_dim_vo;
  static_assert(32 % kRing == 0 && kRing % kStep == 0, "places by number");

 public:
  static constexpr int kRingBytes = kStreams ? 4 * kRing * kRowBytes : 16;  // of four warps

  struct State {
    float m, l, acc[kCols];
  };

  // `plan` is the header or its top (no part of which is read but by find_request).
  __device__ __forceinline__ Merge(const RunParams& p, const PlanHeader& plan, const ParamRef* params)
      : Merge(p, plan, params, plan.merge_slots, 0) {}

  // The same with another copy of the list's slots, by place in the list, and for a slice of the columns.
  __device__ __forceinline__ Merge(const RunParams& p, const PlanHeader& plan, const ParamRef* params, const int* slots,
                                   int slice)
      : p_(p),
        plan_(plan),
        params_(params),
        slots_(slots),
        lane_(threadIdx.x % 32),
        first_(slice * (Config::head_dim_vo / kSlices)) {}

  // All rows, as a kernel of its own. What the plan says of a warp's first row is read before `wait`, which is for the
  // states: three links of a chain of reads, each as long as the way to memory. ring: shared memory, kRingBytes.
  template <class Wait>
  __device__ __forceinline__ void run(char* ring, Wait&& wait) {
    // What decides who runs comes from one lane: else exchanges are not known as those of whole warps, and each of them
    // is there twice.
    const auto same = [](int x) { return __shfl_sync(0xffffffffu, x, 0); };
    const unsigned warp = same(threadIdx.x / 32), warps = blockDim.x / 32, heads = p_.num_qo_heads;
    // All of the header at once. Where there are counters, the decode kernel has merged.
    const MergeRow* const rows = plan_.merge_rows;
    const unsigned total = same(plan_.num_merges * heads * (plan_.counters == nullptr));
    const bool pairs = same(plan_.pairwise);
    Ahead ahead = {0, 0, reinterpret_cast<const char*>(plan_.partial_acc),
                   reinterpret_cast<const float2*>(plan_.partial_ml)};
    bool waited = false;
#pragma unroll 1
    for (unsigned i = blockIdx.x * warps + warp; i < total; i += warps * gridDim.x) {
      MergeRow row = rows[i / heads];
      const int head = i % heads, kv_head = head / Config::group;
      row.slot_begin = same(row.slot_begin);
      row.slot_end = same(row.slot_end);
      if (same(kv_head < row.head_begin || kv_head >= row.head_end)) continue;
      look_ahead(ahead, row.slot_begin, row.slot_end, head);
      if (!waited) wait();
      waited = true;
      ATTNRT_MARK(26);
      State s;
      if (pairs) {
        s = pairwise(row.slot_begin, row.slot_end, head);
      } else if constexpr (kStreams) {
        s = streamed(row.slot_begin, row.slot_end, head, ahead, ring + warp * (kRing * kRowBytes));
      } else {
        s = sequential(row.slot_begin, row.slot_end, head);
      }
      finish(row, head, s);
      ATTNRT_MARK(27);
    }
    if (!waited) wait();
  }

  // The fold of a row's entries of the merge list.
  __device__ __forceinline__ State states(int begin, int end, int head) const {
    return plan_.pairwise ? pairwise(begin, end, head) : sequential(begin, end, head);
  }

  __device__ __forceinline__ static State empty() {
    State s;
    s.m = neg_inf();
    s.l = 0.0f;
#pragma unroll
    for (int i = 0; i < kCols; ++i) s.acc[i] = 0.0f;
    return s;
  }

  __device__ __forceinline__ void finish(const MergeRow& merge, int head, const State& s) const {
    Ctx c;
    c.kv_pos = 0;
    c.kv_slot = 0;
    c.qo_row = merge.qo_row;
    c.qo_head = head;
    c.kv_head = head / Config::group;
    c.request = -1;
    c.qo_pos = c.qo_len = c.kv_len = 0;
    if constexpr (Variant::has_sink || Variant::has_output) find_request(c);
    finish(c, s);
  }

  __device__ __forceinline__ void finish(const Ctx& c, const State& s) const {
    typedef typename Bits<Config::out_type>::type Element;
    const FinishRow row = finish_head<Variant>(params_, c, s.m, s.l);
    if (lane_ == 0 && first_ == 0) store_lse(p_, c.qo_row, c.qo_head, row.lse);
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      const int col = col_of(i);
      if (col < Config::head_dim_vo) {
        *reinterpret_cast<Element*>(out_address<Config>(p_, c.qo_row, c.qo_head, col)) =
            finish_value<Config, Variant>(params_, c, row, col, s.acc[i]);
      }
    }
  }

 private:
  __device__ __forceinline__ int col_of(int i) const { return first_ + (kVector ? lane_ * kCols + i : lane_ + 32 * i); }

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

  // States are fewer than 2^32: their numbers would fill a hundred gigabytes.
  __device__ __forceinline__ unsigned state_of(int entry, int head) const {
    return static_cast<unsigned>(slots_[entry]) * p_.num_qo_heads + head;
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
    const Fold f = fold_head<Variant::use_softmax>(a.m, a.l, b.m, b.l);
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
    for (int step = 1; step < 32; step *= 2) {
      const float left = __shfl_sync(0xffffffffu, to.upto, max(lane_ - step, 0));
      if (lane_ >= step) to.upto = fmaxf(to.upto, left);
    }
    to.upto = fmaxf(to.upto, largest);
    float before = __shfl_sync(0xffffffffu, to.upto, max(lane_ - 1, 0));
    if (lane_ == 0) before = largest;
    const Fold f = fold_head<Variant::use_softmax>(before, 0.0f, m, 0.0f);
    to.a = f.scale_a;
    to.b = f.scale_b;
    to.l = f.take == 1 ? 0.0f : __fmul_rn(ml.y, f.scale_b);
    to.skipped = __ballot_sync(0xffffffffu, f.take == 1);
    return to;
  }

  // Folds state e of those that the lanes have the factors of. There is no branch: adding -0 changes no bit, and
  // -0 * 0 + x is x, so empty states and the first one that is not take the same way.
  __device__ __forceinline__ static void add(State& s, const Factors& f, int e, const float (&acc)[kCols]) {
    const float a = __shfl_sync(0xffffffffu, f.a, e), b = __shfl_sync(0xffffffffu, f.b, e);
    const bool skip = f.skipped >> e & 1;
    s.l = __fadd_rn(__fmul_rn(s.l, a), __shfl_sync(0xffffffffu, f.l, e));
#pragma unroll
    for (int j = 0; j < kCols; ++j) s.acc[j] = __fadd_rn(__fmul_rn(s.acc[j], a), skip ? -0.0f : __fmul_rn(acc[j], b));
  }

  // In order. What a state needs is read for many at once, since each read costs the latency of memory: the heads of 32
  // states by the lanes, then the accumulators of kBatch, each of which makes room for a later one.
  __device__ __forceinline__ State sequential(int begin, int end, int head) const {
    State s = empty();
#pragma unroll
    for (int j = 0; j < kCols; ++j) s.acc[j] = -0.0f;
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

  // What is known before there are states: this lane's of the 32 at hand and of those to come, and where all lie.
  struct Ahead {
    unsigned now, next;
    const char* acc;
    const float2* ml;
  };

  __device__ __forceinline__ unsigned state_at(int entry, int end, int head) const {
    return state_of(min(entry, end - 1), head);
  }

  __device__ __forceinline__ void look_ahead(Ahead& a, int begin, int end, int head) const {
    if (begin < end) a.now = state_at(begin + lane_, end, head);
    if (begin + 32 < end) a.next = state_at(begin + 32 + lane_, end, head);
  }

  // As `sequential`, with kRing accumulators on their way to shared memory: registers hold fewer, and a loop over them
  // is as much text as all of them. A lane reads what it has asked for itself.
  __device__ __forceinline__ State streamed(int begin, int end, int head, Ahead a, char* ring) const {
    const int all = end - begin;
    if (all <= 0) return empty();
    State s = empty();
#pragma unroll
    for (int j = 0; j < kCols; ++j) s.acc[j] = -0.0f;
    float2 ml = load_head(a.ml, a.now), later = make_float2(0.0f, 0.0f);
    ring += lane_ * 16;
    const char* const from = a.acc + lane_ * 16;
    const auto ask = [&](int n, unsigned at) {
      if (n < all)
        ptx::cp_async16(ptx::smem_addr(ring + n % kRing * kRowBytes), from + at * static_cast<long long>(kRowBytes));
    };
    // In groups of kStep, of which the last may be empty.
#pragma unroll 1
    for (int n = 0; n < kRing; n += kStep) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) ask(n + i, __shfl_sync(0xffffffffu, a.now, n + i));
      ptx::cp_async_commit();
    }
    if (all > 32) later = load_head(a.ml, a.next);
#pragma unroll 1
    for (int first = 0; first < all; first += 32) {
      unsigned after = a.next;
      if (first + 64 < all) after = state_at(begin + first + 64 + lane_, end, head);
      const Factors f = factors(s.m, ml, min(32, all - first));
#pragma unroll 1
      for (int e = 0; e < 32 && first + e < all; e += kStep) {
        ptx::cp_async_wait<kRing / kStep - 1>();
        const unsigned states = e + kRing < 32 ? a.now : a.next;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          const float4 x = *reinterpret_cast<const float4*>(ring + (e + i) % kRing * kRowBytes);
          const float acc[4] = {x.x, x.y, x.z, x.w};
          add(s, f, e + i, acc);
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i)
          ask(first + e + i + kRing, __shfl_sync(0xffffffffu, states, (e + i + kRing) % 32));
        ptx::cp_async_commit();
      }
      s.m = __shfl_sync(0xffffffffu, f.upto, 31);
      a.now = a.next;
      a.next = after;
      ml = later;
      if (first + 64 < all) later = load_head(a.ml, a.next);
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

  // Request and position of the row, for a sink or an output hook that reads them; -1: no request has it (padding).
  // Merge rows do not carry them, since few variants ask: the warp looks the row up in the parts.
  __device__ __forceinline__ void find_request(Ctx& c) const {
#pragma unroll 1
    for (int i = 0; i < p_.plan->num_parts && c.request < 0; ++i) {
      const PartDesc& part = p_.plan->parts[i];
      int at = part.qo_index == nullptr && c.qo_row < part.queries ? c.qo_row : -1;
#pragma unroll 1
      for (int first = 0; part.qo_index && first < part.queries && at < 0; first += 32) {
        const bool hit = first + lane_ < part.queries && part.qo_index[first + lane_] == c.qo_row;
        const unsigned hits = __ballot_sync(0xffffffffu, hit);
        if (hits) at = first + __ffs(hits) - 1;
      }
      if (at < 0) continue;
      c.request = part.request[at];
      c.qo_pos = part.qo_pos[at] + bound_shift(p_, c.request);
      c.qo_len = p_.plan->qo_lens[c.request];
      c.kv_len = kv_len_of(p_, c.request);
    }
  }

  const RunParams& p_;
  const PlanHeader& plan_;
  const ParamRef* params_;
  const int* slots_;
  int lane_, first_;  // column of the slice
};

}  // namespace attnrt
