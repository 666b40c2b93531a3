// SPDX-License-Identifier: Apache-2.0
// The decode kernel: few query rows against many keys, bound by the reading of K and V. Operands are swapped: S^T = K
// Q^T and O^T = V^T P^T, keys (then columns of the output) on M, 8 or 16 query rows on N, so that nothing is multiplied
// in vain; the workers of an SM keep a whole ring of stages in flight (docs/performance.md, E2). A worker is a group of
// four warps that compute and a fifth one that loads (decode_loader.cuh); barriers in shared memory hand the stages
// back and forth. A CTA has several groups (decode_layout.cuh).
//
// A row has the bits that the tile kernel (attend.cuh) gives it: tiles of 64 keys, k-steps of 16 in the same order (an
// element of mma.sync depends on its two vectors alone, whatever the roles: E1), the same exponentials, and sums of
// exponentials in the same order: there a lane adds keys 2t, 2t + 1, 2t + 8, 2t + 9 of every 16, here neighbouring
// lanes exchange theirs and do the same.
//
// fp8 is converted in registers between ldmatrix and mma.sync. Two freedoms make that free of a transpose: head dims
// may be permuted inside a k-step of 16 on both sides alike, and rows of O^T may come in any order.
//
// A lane (g = lane / 4, t = lane % 4) holds S^T of keys 16 warp + g (+8) and query rows 8n + 2t (+1).
#pragma once
#include "attnrt_variant.h"
#include "decode_hint.cuh"
#include "decode_loader.cuh"
#include "decode_results.cuh"
#include "masks.cuh"
#include "roles.cuh"

namespace attnrt {

// fp8 in both bytes of each half of x: the low half as a pair of T, and the high half.
template <Dtype From, Dtype To>
__device__ __forceinline__ void widen(unsigned x, unsigned& low, unsigned& high) {
  low = fp8x2_to_half2<From>(static_cast<unsigned short>(x & 0xffffu));
  high = fp8x2_to_half2<From>(static_cast<unsigned short>(x >> 16));
  if constexpr (To == Dtype::bf16) {
    low = ptx::pack2<ptx::Half16::bf16>(half_to_float(static_cast<unsigned short>(low & 0xffffu)),
                                        half_to_float(static_cast<unsigned short>(low >> 16)));
    high = ptx::pack2<ptx::Half16::bf16>(half_to_float(static_cast<unsigned short>(high & 0xffffu)),
                                         half_to_float(static_cast<unsigned short>(high >> 16)));
  }
}

template <class Config, class Variant>
class Decode : public DecodeResults<Config, Variant> {
  using L = DecodeLayout<Config, Variant>;
  using Base = DecodeResults<Config, Variant>;
  using Base::clear, Base::close_leaf, Base::finish, Base::fold, Base::kCT, Base::kN, Base::plan, Base::row_of;
  using Base::g_, Base::lane_, Base::meta_, Base::own_, Base::p_, Base::params_, Base::smem_, Base::store_state;
  using Base::sync, Base::t_, Base::warp_;
  using typename Base::Rows;
  using typename Base::State;
  using Merges = DecodeMerges<Config, Variant>;
  static constexpr int kSteps = L::kDim / 16;
  static constexpr bool kKeepQ = kN == 1;  // Q's fragments in registers
  static constexpr ptx::Half16 kH = kHalf<Config::q_type>;

 public:
  using Base::Base;

  // Pass by pass, tile by tile, until the loading warp says that it was the last one.
  __device__ __forceinline__ void run() {
    stage_ = phase_ = table_ = set_ = 0;
    [[maybe_unused]] int marked = -1;
    ptx::mbar_wait(ptx::smem_addr(&meta_.full[0]), 0);  // the loading warp knows by then
    if constexpr (kN == 1) ring_ = ptx::smem_addr(smem_) + meta_.ring;
#pragma unroll 1
    for (;;) {
      int4 span = next_span();
      if (span.z & kOver) return;
      ptx::mbar_wait(ptx::smem_addr(&meta_.open[set_]), meta_.passes[warp_] / L::kSets & 1);
      const Rows& rows = meta_.rows[set_];
      int leaf = 0;
      {
        unsigned q[kKeepQ ? kSteps : 1][2];
        if constexpr (kKeepQ) {
#pragma unroll
          for (int d = 0; d < kSteps; ++d) query_step(0, d, q[d]);
        }
        State state, total;
        clear(total);
        clear(state);
#pragma unroll 1
        for (;;) {
          ATTNRT_MARK(8 + (marked += marked < 9));
          float s[kN][4];
          scores(q, s);
          release();
          keys(span, s, state);
          ptx::mbar_wait(ptx::smem_addr(&meta_.full[stage_]), phase_);
          sync();  // and P is written
          accumulate(state);
          release();
          table_ = table_ + 1 == meta_.tiles ? 0 : table_ + 1;
          if (span.z & kLastOfLeaf) {
            close_leaf(state);
            ATTNRT_MARK(18);
            if (rows.fold) {
              fold(total, state);
            } else {
              total = state;
            }
            const bool last = span.z & kLastOfPass;
            if (rows.slot >= 0 && (!rows.fold || last)) store_state(rows, rows.fold ? 0 : leaf, total);
            ++leaf;
            if (last) break;
            clear(state);
          }
          span = next_span();
        }
        if (rows.slot < 0) finish(rows, total);
      }
      ATTNRT_MARK(19);
      if (rows.slot >= 0 && plan().counters) {
        sync();
        if (warp_ == 0) Merges::count(meta_, plan(), rows, rows.fold ? 1 : leaf);
        sync();
        Merges::merge(p_, plan(), params_, rows, meta_.last, warp_, smem_ + meta_.ring);
      }
      ATTNRT_MARK(20);
      ptx::mbar_arrive_warp(ptx::smem_addr(&meta_.spare[set_]), lane_);
      if (lane_ == 0) ++meta_.passes[warp_];
      __syncwarp();
      set_ = set_ + 1 == L::kSets ? 0 : set_ + 1;
    }
  }

 private:
  // B operand of k-step d: Q of 8 rows. For fp8 the head dims of a step are taken in the order in which K's bytes come.
  __device__ __forceinline__ void query_step(int n, int d, unsigned (&b)[2]) const {
    const char* row = own_ + L::kOffsetQ + (set_ * L::kRows + 8 * n + g_) * L::kPitchQ + d * 32;
    if constexpr (L::kFp8) {
      const uint2 x = *reinterpret_cast<const uint2*>(row + t_ * 8);
      b[0] = x.x;
      b[1] = x.y;
    } else {
      b[0] = *reinterpret_cast<const unsigned*>(row + t_ * 4);
      b[1] = *reinterpret_cast<const unsigned*>(row + t_ * 4 + 16);
    }
  }

  __device__ __forceinline__ const DecodeTile<L>& table() const {
    return reinterpret_cast<const DecodeTile<L>*>(smem_ + meta_.first_tile)[table_];
  }

  // Address of the group's first stage; 16 rows have no register for it.
  __device__ __forceinline__ unsigned ring() const {
    return kN == 1 ? ring_ : ptx::smem_addr(smem_) + *static_cast<const volatile int*>(&meta_.ring);
  }

  // The tile at hand, once its K is there.
  __device__ __forceinline__ int4 next_span() const {
    ptx::mbar_wait(ptx::smem_addr(&meta_.full[stage_]), phase_);
    return table().span;
  }

  // This warp has read the stage.
  __device__ __forceinline__ void release() {
    ptx::mbar_arrive_warp(ptx::smem_addr(&meta_.empty[stage_]), lane_);
    if (++stage_ == meta_.stages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // Logits and softmax of the tile: P for all, l and acc under the new maximum.
  __device__ __forceinline__ void keys(const int4& span, float (&s)[kN][4], State& state) const {
    logits(span, s);
    if constexpr (Variant::use_softmax) {
      maxima(s);
      sync();
      weights(s, state);
    } else {
      sync();  // the last tile's P has been read
#pragma unroll
      for (int n = 0; n < kN; ++n) state.m[n][0] = state.m[n][1] = 0.0f;
    }
    store_weights(s);
  }

  // S^T = K Q^T over this warp's 16 keys.
  template <int kQ>
  __device__ __forceinline__ void scores(const unsigned (&q)[kQ][2], float (&s)[kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
    const unsigned stage = ring() + stage_ * L::kStageBytes;
    const int row = warp_ * 16 + lane_ % 16;
    const unsigned base = stage + swizzled<L::kRowBytes>(row, lane_ / 16);  // a later chunk is one XOR away
    constexpr int kLoads = L::kFp8 ? kSteps / 2 : kSteps;
    constexpr int kAtOnce = kN == 1 ? kLoads : 4;
#pragma unroll kAtOnce
    for (int i = 0; i < kLoads; ++i) {
      unsigned k[4];
      ptx::ldmatrix_x4(k, L::kRowBytes == 64 ? base ^ (i << 5) : (base ^ (i % 4 << 5)) + i / 4 * (64 * 128));
      if constexpr (L::kFp8) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          unsigned a[4];
          widen<Config::kv_type, Config::q_type>(k[2 * h], a[0], a[2]);
          widen<Config::kv_type, Config::q_type>(k[2 * h + 1], a[1], a[3]);
          multiply(s, a, q, 2 * i + h);
        }
      } else {
        multiply(s, k, q, i);
      }
    }
  }

  template <int kQ>
  __device__ __forceinline__ void multiply(float (&s)[kN][4], const unsigned (&a)[4], const unsigned (&q)[kQ][2],
                                           int d) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      unsigned b[2];
      if constexpr (kKeepQ) {
        b[0] = q[d][0];
        b[1] = q[d][1];
      } else {
        query_step(n, d, b);
      }
      ptx::mma_m16n8k16<kH>(s[n], a, b[0], b[1]);
    }
  }

  __device__ __forceinline__ int key_of(int half) const { return warp_ * 16 + half * 8 + g_; }

  // As in the tile kernel: scale, variant, mask; a base-2 logit (-inf: unseen), or a weight (0: unseen) without a
  // softmax.
  __device__ __forceinline__ void logits(const int4& span, float (&s)[kN][4]) const {
    const Rows& rows = meta_.rows[set_];
    const int tile = span.w;
    const bool whole = (span.z & kAllLive) && !(Variant::reads_index_mask && rows.any_mask) &&
                       Variant::mask_is_interval && span.x >= rows.low_max && span.y <= rows.high_min &&
                       tile + L::kTile <= rows.limit_min;
    const float scale = Variant::has_logits || !Variant::use_softmax ? p_.sm_scale : p_.sm_scale * kLog2e;
    const unsigned live = whole ? 0xffffffffu : seen_bits(rows, span);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        Ctx ctx;
        typename Variant::Row row;
        if constexpr (Variant::has_logits) {
          ctx = row_ctx<Config, Variant>(p_, rows, row_of(n, c), rows.head);
          row = Variant::row(params_, ctx);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[n][2 * half + c];
          if constexpr (Variant::has_logits) {
            ctx.kv_pos = span.z & kDense ? span.x + key_of(half) : table().pos[key_of(half)];
            ctx.kv_slot = table().slot[key_of(half)];
          }
          x = Variant::logits(params_, row, ctx, x * scale);
          if constexpr (Variant::has_logits && Variant::use_softmax) x *= kLog2e;
          if (!(live >> (4 * n + 2 * c + half) & 1)) x = Variant::use_softmax ? neg_inf() : 0.0f;
        }
      }
  }

  // Which of this lane's scores are seen, bit 4n + 2c + half.
  __device__ __forceinline__ unsigned seen_bits(const Rows& rows, const int4& span) const {
    const unsigned char* mask = Variant::reads_index_mask ? p_.plan->parts[rows.part].mask : nullptr;
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 2 * kN - 1; i >= 0; --i) {
      const int r = row_of(i / 2, i % 2);
      Ctx c;
      typename Variant::Row row;
      if constexpr (!Variant::mask_is_interval) {
        c = row_ctx<Config, Variant>(p_, rows, r, rows.head);
        row = Variant::row(params_, c);
      }
#pragma unroll
      for (int half = 1; half >= 0; --half)
        bits = bits << 1 | (seen(rows, mask, r, row, c, key_of(half), span) ? 1u : 0u);
    }
    return bits;
  }

  template <class Row>
  __device__ __forceinline__ bool seen(const Rows& rows, const unsigned char* mask, int r, const Row& row, Ctx& c,
                                       int key, const int4& span) const {
    const int pos = span.z & kDense ? span.x + key : table().pos[key];
    return sees<Variant>(params_, rows, mask, r, row, c, pos, span.w + key, [&] { return table().slot[key]; });
  }

  __device__ __forceinline__ void maxima(const float (&s)[kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float m[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        m[c] = fmaxf(s[n][c], s[n][2 + c]);
        m[c] = fmaxf(m[c], __shfl_xor_sync(0xffffffffu, m[c], 4));
        m[c] = fmaxf(m[c], __shfl_xor_sync(0xffffffffu, m[c], 8));
        m[c] = fmaxf(m[c], __shfl_xor_sync(0xffffffffu, m[c], 16));
      }
      if (g_ == 0) *reinterpret_cast<float2*>(&meta_.reduce[warp_][row_of(n, 0)]) = make_float2(m[0], m[1]);
    }
  }

  // s becomes 2^(s - m) under the new running maximum; l and acc are brought to it.
  __device__ __forceinline__ void weights(float (&s)[kN][4], State& state) const {
    const bool odd = g_ & 1;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float m[2] = {state.m[n][0], state.m[n][1]};
#pragma unroll
      for (int w = 0; w < L::kWarps; ++w) {
        const float2 x = *reinterpret_cast<const float2*>(&meta_.reduce[w][row_of(n, 0)]);
        m[0] = fmaxf(m[0], x.x);
        m[1] = fmaxf(m[1], x.y);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shrink = exp2_diff(state.m[n][c], m[c]);
        const float near = s[n][c] = exp2_diff(s[n][c], m[c]), far = s[n][2 + c] = exp2_diff(s[n][2 + c], m[c]);
        // Keys 2t, 2t + 1, 2t + 8, 2t + 9 in this order, as a lane of the tile kernel has them.
        const float other_near = __shfl_xor_sync(0xffffffffu, near, 4),
                    other_far = __shfl_xor_sync(0xffffffffu, far, 4);
        const float sum = ((near + other_near) + (odd ? other_far : far)) + (odd ? far : other_far);
        state.m[n][c] = m[c];
        state.l[n][c] = fmaf(state.l[n][c], shrink, sum);
#pragma unroll
        for (int j = 0; j < kCT; ++j) {
          state.acc[n][j][c] *= shrink;
          state.acc[n][j][2 + c] *= shrink;
        }
      }
    }
  }

  // P as [n][key][8 rows].
  __device__ __forceinline__ void store_weights(const float (&s)[kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      char* to = own_ + L::kOffsetP + n * (L::kTile * 16) + key_of(0) * 16 + t_ * 4;
      *reinterpret_cast<unsigned*>(to) = ptx::pack2<kH>(s[n][0], s[n][1]);
      *reinterpret_cast<unsigned*>(to + 128) = ptx::pack2<kH>(s[n][2], s[n][3]);
    }
  }

  // O^T += V^T P^T over this warp's columns and all keys of the tile.
  __device__ __forceinline__ void accumulate(State& state) const {
    int lane = lane_;
    if constexpr (kN == 2) asm volatile("" : "+r"(lane));  // no register is left for the address from tile to tile
    const unsigned weights = ptx::smem_addr(own_ + L::kOffsetP) + lane * 16;
    const unsigned stage = ring() + stage_ * L::kStageBytes;
    // 16-bit: matrices (keys 0-7, columns 0-7), (keys 0-7, columns 8-15), then keys 8-15. fp8: a matrix has 16 columns,
    // so keys 0-7 and 8-15, of one or two column tiles.
    const int key = L::kFp8 ? lane_ % 16 : lane_ % 8 + lane_ / 16 * 8;
    const int chunk = L::kFp8 ? warp_ * kCT + (kCT == 2 ? lane_ / 16 : 0) : warp_ * 2 * kCT + lane_ / 8 % 2;
    const unsigned base = stage + swizzled<L::kRowBytes>(key, chunk);
    constexpr int kStep = L::kRowBytes == 64 ? 1024 : 2048;  // bytes from 16 keys to the next
    constexpr int kTwos = kN == 1 ? L::kTile / 32 : 1;       // 16 rows have no registers for more
#pragma unroll kTwos
    for (int two = 0; two < L::kTile / 32; ++two) {
      unsigned p[kN][4];
#pragma unroll
      for (int n = 0; n < kN; ++n) ptx::ldmatrix_x4_trans(p[n], weights + n * (L::kTile * 16) + two * 512);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int step = 2 * two + h;
        if constexpr (L::kFp8) {
          unsigned v[4];
          if constexpr (kCT == 2) {
            ptx::ldmatrix_x4_trans(v, base + step * kStep);
          } else {
            unsigned pair[2];
            ptx::ldmatrix_x2_trans(pair, base + step * kStep);
            v[0] = pair[0];
            v[1] = pair[1];
          }
#pragma unroll
          for (int j = 0; j < kCT; ++j) {
            // Bytes: (key 2t, column 2g), (key 2t, column 2g + 1), (key 2t + 1, ...): rows g and g + 8 of A stand for
            // columns 2g and 2g + 1.
            unsigned a[4];
            widen<Config::kv_type, Config::q_type>(ptx::prmt<0x3120>(v[2 * j]), a[0], a[1]);
            widen<Config::kv_type, Config::q_type>(ptx::prmt<0x3120>(v[2 * j + 1]), a[2], a[3]);
#pragma unroll
            for (int n = 0; n < kN; ++n) ptx::mma_m16n8k16<kH>(state.acc[n][j], a, p[n][2 * h], p[n][2 * h + 1]);
          }
        } else {
#pragma unroll
          for (int j = 0; j < kCT; ++j) {
            unsigned v[4];
            ptx::ldmatrix_x4_trans(v, (base ^ (j << 5)) + step * kStep);
#pragma unroll
            for (int n = 0; n < kN; ++n) ptx::mma_m16n8k16<kH>(state.acc[n][j], v, p[n][2 * h], p[n][2 * h + 1]);
          }
        }
      }
    }
  }

  unsigned ring_;
  int stage_, phase_, table_, set_;  // at hand
};

// A CTA: groups of warps that compute, then a warp for each group that loads.
template <class Config, class Variant>
class DecodeGroups {
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;
  using Loader = DecodeLoader<Config, Variant>;

 public:
  __device__ __forceinline__ DecodeGroups(const RunParams& p, const ParamRef* params, char* smem)
      : p_(p),
        params_(params),
        memory_{smem, static_cast<int>(blockDim.x) / L::kGroupThreads},
        warp_(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)) {}

  // What needs no memory that the kernel before may still write.
  __device__ __forceinline__ void prepare() {
    // The first touch of a pool is a walk of page tables; let it happen beside those of the plan.
    if (threadIdx.x == 64 && p_.k.num_slots > 0) ptx::prefetch_l2(p_.k.ptr);
    if (threadIdx.x == 96 && p_.k.num_slots > 0) ptx::prefetch_l2(p_.v.ptr);
    // Barriers by all warps of a group and one lane of each: initialisations of several lanes come one after the other.
    M& meta = *reinterpret_cast<M*>(memory_.own(memory_.group_of(warp_)) + L::kOffsetMeta);
    const int mine = memory_.loads(warp_) ? L::kWarps : warp_ % L::kWarps;
    constexpr unsigned kRead = L::kWarps * ptx::kWarpArrivals;
    if (threadIdx.x % 32 == 0) {
      if (mine < L::kWarps) meta.passes[mine] = 0;
#pragma unroll
      for (int i = 0; i < L::kMostStages; i += L::kWarps + 1) {
        if (i + mine >= L::kMostStages) break;
        ptx::mbar_init(ptx::smem_addr(&meta.full[i + mine]), Loader::kFullCount);
        ptx::mbar_init(ptx::smem_addr(&meta.empty[i + mine]), kRead);
      }
      if (mine < L::kSets) {
        ptx::mbar_init(ptx::smem_addr(&meta.open[mine]), Loader::kFullCount);
        ptx::mbar_init(ptx::smem_addr(&meta.spare[mine]), kRead);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    if (roles::kBegins ? memory_.loads(warp_) : roles::holds(0)) {
      if constexpr (roles::holds(0)) Loader(p_, params_, memory_, memory_.group_of(warp_)).run();
    } else if constexpr (roles::holds(1)) {
      DecodeHint<Config, Variant>::first_tile(p_, memory_.group_of(warp_) * gridDim.x + blockIdx.x, warp_ % L::kWarps,
                                              threadIdx.x % 32);
      Decode<Config, Variant>(p_, params_, memory_, warp_).run();
    } else {
      roles::hand_over<1>();
    }
  }

 private:
  const RunParams& p_;
  const ParamRef* params_;
  const DecodeMemory<Config, Variant> memory_;
  int warp_;
};

}  // namespace attnrt
