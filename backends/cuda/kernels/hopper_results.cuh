// SPDX-License-Identifier: Apache-2.0
// What becomes of a leaf's O: folded onto the leaves before it, stored as a state, or divided and written as rows.
#pragma once
#include "hopper_softmax.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperResults : public HopperSoftmax<Config, Variant> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperSoftmax<Config, Variant>;

 protected:
  using Base::Base;
  using Base::context, Base::kO, Base::lane_, Base::meta_, Base::p_, Base::params_, Base::row_of;
  using Base::unit;

  // What is known of a leaf before its last product: after find_places its pass's tables are not read any more.
  enum class Fate { nothing, state, rows };
  struct Closing {
    Fate fate;
    bool folds, first;
    float m[2], l[2];
    FinishRow row[2];
    long long to[2];  // element of the output row, or row of the partial states; kNothing: none
    Ctx ctx[2];
  };

  // ------------------------------------------------------------------ the end of a leaf
  // The quad's sums, the maxima as base-2 logits, the fold onto the leaves before, what divides the rows.
  __device__ __forceinline__ void close_leaf(Closing& closing, int pass, int leaf, bool ends, const float (&m)[2],
                                             const float (&l)[2]) const {
    if constexpr (!Config::folds) find_fate(closing, pass, leaf, ends);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = l[half];
      if constexpr (Variant::use_softmax) {
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
      }
      closing.l[half] = x;
      closing.m[half] = Variant::use_softmax ? __fmul_rn(m[half], unit(half)) : m[half];
    }
    if constexpr (!Config::folds) find_places(closing, pass, leaf);
  }

  __device__ __forceinline__ void find_fate(Closing& closing, int pass, int leaf, bool ends) const {
    const PassRecord& record = meta_.pass[L::table(pass)];
    const WorkItem& item = record.item;
    closing.folds = Config::folds && item.fold && item.leaf_end - item.leaf_begin > 1;
    closing.first = leaf == 0;
    closing.fate =
        item.slot < 0 ? (ends ? Fate::rows : Fate::nothing) : (!item.fold || ends ? Fate::state : Fate::nothing);
  }

  // Where the leaf's rows go, and what divides them. With folds as late as it can be, so that it waits in no register
  // while the next scores become weights: a spilled register comes back from memory.
  __device__ __forceinline__ void find_places(Closing& closing, int pass, int leaf) const {
    const PassRecord& record = meta_.pass[L::table(pass)];
    const WorkItem& item = record.item;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row_of(half);
      if constexpr (Variant::has_sink || Variant::has_output) closing.ctx[half] = context(pass, r);
      closing.to[half] = this->out_at(pass, r);
    }
    if (closing.fate == Fate::state) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (closing.to[half] == kNothing) continue;
        const int row = record.first + row_of(half), part = item.fold ? 0 : leaf;
        closing.to[half] =
            (static_cast<long long>(item.slot) + part * (item.q_end - item.q_begin) + row / Config::group) *
                p_.num_qo_heads +
            record.head * Config::group + row % Config::group;
      }
    }
    if (closing.fate == Fate::rows) divide(closing, pass);
  }

  // What rows are divided by, and their log-sum-exp: even lanes for one row, odd lanes for the other.
  __device__ __forceinline__ void divide(Closing& closing, int pass) const {
    const bool odd = lane_ & 1;
    Ctx c = {};
    if constexpr (Variant::has_sink) c = odd ? closing.ctx[1] : closing.ctx[0];
    const FinishRow row =
        finish_head<Variant>(params_, c, odd ? closing.m[1] : closing.m[0], odd ? closing.l[1] : closing.l[0]);
    if (p_.lse && lane_ % 4 < 2) {
      const long long at = this->place(pass, row_of(odd), p_.lse_stride_row, p_.lse_stride_head);
      if (at != kNothing) p_.lse[at] = row.lse;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      closing.row[half] = {__shfl_sync(0xffffffffu, row.inverse, lane_ / 4 * 4 + half), 0.0f};
    }
  }

  // ------------------------------------------------------------------ results
  // Accumulators of one of a thread's rows, elements 8 n + 2 (lane % 4) + e at 2 n + e, and so many at a time:
  // registers are full here.
  static constexpr int kPart = kO / 2, kMost = L::kHooks ? 8 : 16, kChunk = kMost < kPart ? kMost : kPart;

  // What becomes of a leaf: folded onto those before it, stored as a state, or, at the end of its pass, finished rows.
  // O itself stays as it is: a changed O that came back into the loop by a branch would make ptxas serialise the
  // products (C7514).
  __device__ __forceinline__ void results(Closing& closing, int pass, int leaf, bool ends, const float (&o)[kO],
                                          float* total) const {
    Fold fold[2];
    if constexpr (Config::folds) {
      if (pass < 0) return;
      find_fate(closing, pass, leaf, ends);
      if (closing.folds) fold_heads(closing, fold, total);
      find_places(closing, pass, leaf);
    }
    if constexpr (L::kStaged) {
      if (!closing.folds && stageable(closing)) return store_staged(closing, o);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int first = 0; first < kPart; first += kChunk) {
        float x[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = o[(first + i) / 2 * 4 + 2 * half + i % 2];
        if constexpr (Config::folds) {
          if (closing.folds) fold_chunk(closing, fold[half], x, total + half * kPart + first);
        }
        if (closing.fate == Fate::state) store_state(closing, half, first / 2, x);
        if (closing.fate == Fate::rows) finish(closing, half, first / 2, x);
      }
  }

  __device__ __forceinline__ static float4 get(const volatile float* p) { return make_float4(p[0], p[1], p[2], p[3]); }
  __device__ __forceinline__ static void put(volatile float* p, float a, float b, float c, float d) {
    p[0] = a;
    p[1] = b;
    p[2] = c;
    p[3] = d;
  }
  // Leaf onto total, in local memory but for what the last leaf leaves: last m and l, by row. Memory is a
  // thousand cycles away, so that several words are asked for before one is used.
  __device__ __forceinline__ void fold_heads(Closing& closing, Fold (&fold)[2], float* total) const {
    const float4 x = closing.first ? make_float4(neg_inf(), neg_inf(), 0.0f, 0.0f) : get(total + kO);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fold[half] =
          fold_head<Variant::use_softmax>(half ? x.y : x.x, half ? x.w : x.z, closing.m[half], closing.l[half]);
      closing.m[half] = fold[half].m;
      closing.l[half] = fold[half].l;
    }
    if (closing.fate == Fate::nothing) put(total + kO, closing.m[0], closing.m[1], closing.l[0], closing.l[1]);
  }
  __device__ __forceinline__ void fold_chunk(const Closing& closing, const Fold& fold, float (&x)[kChunk],
                                             float* total) const {
    if (!closing.first) {
      float4 before[kChunk / 4];
#pragma unroll
      for (int i = 0; i < kChunk / 4; ++i) before[i] = get(total + 4 * i);
#pragma unroll
      for (int i = 0; i < kChunk / 4; ++i) {
        x[4 * i] = fold_acc(fold, before[i].x, x[4 * i]);
        x[4 * i + 1] = fold_acc(fold, before[i].y, x[4 * i + 1]);
        x[4 * i + 2] = fold_acc(fold, before[i].z, x[4 * i + 2]);
        x[4 * i + 3] = fold_acc(fold, before[i].w, x[4 * i + 3]);
      }
    }
    if (closing.fate != Fate::nothing) return;
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) {
      put(total + 4 * i, x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
  }

  __device__ __forceinline__ void store_state(const Closing& closing, int half, int group,
                                              const float (&x)[kChunk]) const {
    const long long at = closing.to[half];
    if (at == kNothing) return;
    if (group == 0 && lane_ % 4 == 0) {
      reinterpret_cast<float2*>(p_.plan->partial_ml)[at] = make_float2(closing.m[half], closing.l[half]);
    }
    float* to = p_.plan->partial_acc + at * L::kDimVo + lane_ % 4 * 2;
#pragma unroll
    for (int n = 0; n < kChunk / 2; ++n) {
      *reinterpret_cast<float2*>(to + (group + n) * 8) = make_float2(x[2 * n], x[2 * n + 1]);
    }
  }

  // Element col of a finished row, before the cast.
  __device__ __forceinline__ float finished(const Ctx& c, const FinishRow& row, int col, float acc) const {
    const float x = row.inverse == 0.0f ? 0.0f : __fmul_rn(acc, row.inverse);
    if constexpr (Variant::has_output) return Variant::output(params_, c, col, x);
    return x;
  }

  // Divides and writes rows: 16 bytes at a time where the output allows it, else element by element, in code of its
  // own: a branch inside the loop cost more than everything else here.
  __device__ __forceinline__ void finish(const Closing& closing, int half, int group, const float (&x)[kChunk]) const {
    if constexpr (kBytes<Config::out_type> == 2) {
      const bool vectors =
          ((reinterpret_cast<unsigned long long>(p_.out) | (p_.out_stride_row | p_.out_stride_head) * 2) & 15) == 0;
      if (vectors) return store_rows(closing, half, group, x);
    }
    if (closing.to[half] == kNothing) return;
    auto* out = reinterpret_cast<typename Bits<Config::out_type>::type*>(p_.out) + closing.to[half] + lane_ % 4 * 2;
#pragma unroll
    for (int n = 0; n < kChunk / 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int col = (group + n) * 8 + e;
        const float y = finished(closing.ctx[half], closing.row[half], col + lane_ % 4 * 2, x[2 * n + e]);
        out[col] = from_float<Config::out_type>(y);
      }
  }

  // Whether rows may go by store_staged: they are finished, 16 bytes at a time, and none is without keys.
  __device__ __forceinline__ bool stageable(const Closing& closing) const {
    const bool vectors =
        ((reinterpret_cast<unsigned long long>(p_.out) | (p_.out_stride_row | p_.out_stride_head) * 2) & 15) == 0;
    bool empty = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      empty = empty || (closing.to[half] != kNothing && closing.row[half].inverse == 0.0f);
    }
    return closing.fate == Fate::rows && vectors && !__any_sync(0xffffffffu, empty);
  }

  // Writes a warp's rows by way of its own shared memory, 32 columns at a time: 16 rows of 64 bytes, whose 16-byte
  // pieces change places so that no bank is asked twice. This code runs once a pass, at the speed of instruction fetch:
  // the fewer instructions, the better.
  __device__ __forceinline__ void store_staged(const Closing& closing, const float (&o)[kO]) const {
    constexpr ptx::Half16 kOut = kHalf<Config::out_type>;
    const int g = lane_ / 4, t = lane_ % 4;
    const unsigned own = ptx::smem_addr(meta_.staged[this->group_ * 4 + this->warp_]);
    // As a lane of st_matrices: row lane % 16, pieces 0 and 1 by lane / 16 (2 and 3: xor 32).
    const unsigned put = own + lane_ % 16 * 64 + ((lane_ / 16 ^ lane_ / 2 % 4) * 16);
    const unsigned get = own + g * 64 + ((t ^ g / 2 % 4) * 16);  // row g; row g + 8 lies 512 bytes on
    char* out[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) out[half] = p_.out + closing.to[half] * 2 + t * 16;
#pragma unroll
    for (int n = 0; n < kO / 4; n += 4) {  // of 8 columns
      unsigned y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int half = i % 2, at = (n + i / 2) * 4 + 2 * half, col = (n + i / 2) * 8 + t * 2;
        if constexpr (Variant::has_output) {
          y[i] = ptx::pack2<kOut>(finished(closing.ctx[half], closing.row[half], col, o[at]),
                                  finished(closing.ctx[half], closing.row[half], col + 1, o[at + 1]));
        } else {
          y[i] = ptx::pack2<kOut>(__fmul_rn(o[at], closing.row[half].inverse),
                                  __fmul_rn(o[at + 1], closing.row[half].inverse));
        }
      }
      if (n > 0) __syncwarp();
      ptx::st_matrices(put, y[0], y[1], y[2], y[3]);
      ptx::st_matrices(put ^ 32, y[4], y[5], y[6], y[7]);
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned x[4];
        ptx::ld_shared16(x, get + half * 512);
        if (closing.to[half] != kNothing) {
          *reinterpret_cast<uint4*>(out[half] + n * 16) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }

  // A quad holds four columns' worth of 16 bytes in pairs of elements: a 4 x 4 transposition among its lanes gives each
  // lane 16 bytes of its own.
  __device__ __forceinline__ void store_rows(const Closing& closing, int half, int group,
                                             const float (&x)[kChunk]) const {
    const int lane = lane_ % 4;
    constexpr ptx::Half16 kOut = kHalf<Config::out_type>;
    const float inverse = closing.row[half].inverse;
    char* out = p_.out + closing.to[half] * 2 + lane * 16;
#pragma unroll
    for (int n = 0; n < kChunk / 2; n += 4) {
      unsigned y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 2 * (n + i), col = (group + n + i) * 8 + lane * 2;
        if constexpr (Variant::has_output) {
          y[i] = ptx::pack2<kOut>(finished(closing.ctx[half], closing.row[half], col, x[at]),
                                  finished(closing.ctx[half], closing.row[half], col + 1, x[at + 1]));
        } else {
          y[i] = ptx::pack2<kOut>(__fmul_rn(x[at], inverse), __fmul_rn(x[at + 1], inverse));
          y[i] = inverse == 0.0f ? 0u : y[i];
        }
      }
      transpose<1>(y[0], y[1]);
      transpose<1>(y[2], y[3]);
      transpose<2>(y[0], y[2]);
      transpose<2>(y[1], y[3]);
      if (closing.to[half] != kNothing) {
        *reinterpret_cast<uint4*>(out + (group + n) * 16) = make_uint4(y[0], y[1], y[2], y[3]);
      }
    }
  }

  // Exchanges a of the lanes that have bit kBit with b of those that have not.
  template <int kBit>
  __device__ __forceinline__ void transpose(unsigned& a, unsigned& b) const {
    const bool high = lane_ & kBit;
    const unsigned other = __shfl_xor_sync(0xffffffffu, high ? a : b, kBit);
    a = high ? other : a;
    b = high ? b : other;
  }
};

}  // namespace attnrt
