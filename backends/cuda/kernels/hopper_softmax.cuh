// SPDX-License-Identifier: Apache-2.0
// From scores to weights: hooks on scores, the running maximum, exponentials and their sums (hopper_attend.cuh says
// what is fixed about their order).
#pragma once
#include "hopper_masks.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperSoftmax : public HopperMasks<Config, Variant> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperMasks<Config, Variant>;

 protected:
  using Base::Base;
  using Base::base_, Base::kS, Base::lane_, Base::mask_bits, Base::meta_, Base::negate_, Base::p_, Base::params_;
  using Base::shift_, Base::unit;
  using typename Base::Row;
  using typename Base::View;
  static constexpr ptx::Half16 kH = kHalf<Config::q_type>;
  static constexpr int kO = L::kDimVo / 2;

  // Hooks on the scores of tile t, whose first key has that offset. kRuns: positions run on and all keys are there.
  // Where hooks have quick forms, one look at their arguments says whether these hold for all of a warp's scores.
  template <bool kRuns>
  __device__ __forceinline__ void hooks(float (&s)[kS], const Row (&rows)[2], int t, int offset) const {
    if constexpr (Variant::has_logits || !Variant::use_softmax) {
      if constexpr (Variant::quick_logits) {
        Doubt doubt[4];  // as many chains as hide the latency of a maximum
#pragma unroll
        for (int i = 0; i < kS; ++i) {
          hooked<kRuns>(quick<true, kRuns>(doubt[i % 4], offset, i), rows, t, offset, i, s[i]);
        }
        ptx::forget();
        const bool raised = doubt[0].raised() | doubt[1].raised() | doubt[2].raised() | doubt[3].raised();
        if (!__any_sync(0xffffffffu, raised)) {
#pragma unroll
          for (int i = 0; i < kS; ++i) {
            s[i] = hooked<kRuns>(quick<false, kRuns>(doubt[0], offset, i), rows, t, offset, i, s[i]);
          }
          return;
        }
      }
#pragma unroll
      for (int i = 0; i < kS; ++i) {
        const AtKey at = {params_, column(i)};
        s[i] = hooked<kRuns>(at, rows, t, offset, i, s[i]);
      }
    }
  }

  // Element i of a thread's scores: key 8 (i / 4) + 2 (lane % 4) + i % 2, row i / 2 % 2.
  __device__ __forceinline__ static constexpr int column(int i) { return i / 4 * 8 + i % 2; }

  template <bool kAsks, bool kRuns>
  __device__ __forceinline__ Quick<kAsks, kRuns> quick(Doubt& doubt, int offset, int i) const {
    return {{params_, column(i)}, &doubt, offset + shift_ + lane_ % 4 * 2};
  }

  template <bool kRuns, class Params>
  __device__ __forceinline__ float hooked(const Params& params, const Row (&rows)[2], int t, int offset, int i,
                                          float x) const {
    const Row& row = rows[i / 2 % 2];
    const int stage = t % L::kStages, key = column(i) + lane_ % 4 * 2;
    Ctx c = row.ctx;
    c.kv_pos = kRuns ? offset + shift_ + lane_ % 4 * 2 + column(i) : meta_.pos[stage][key];
    if constexpr (L::kNeedsSlots) c.kv_slot = meta_.slot[stage][key];
    const float score = Variant::scales_score || Variant::keeps_units ? x : x * p_.sm_scale;
    if constexpr (Variant::row_units) {
      return Variant::reduced(params, row.hook, c, score);
    } else {
      return Variant::logits(params, row.hook, c, score);
    }
  }

  // Hooks and masks; without hooks a tile that all rows see whole is left alone.
  __device__ __forceinline__ void logits(float (&s)[kS], const Row (&rows)[2], int t, int offset,
                                         const View& view) const {
    hooks<false>(s, rows, t, offset);
    if (negate_) {
#pragma unroll
      for (int i = 0; i < kS; ++i) s[i] = -s[i];
    }
    if (view.all) return;
    mask_bits(s, view.bits);
  }

  // The new maxima; top is what exponents subtract, shrink what l and O have to be multiplied by. Where there is a
  // softmax the first row's weights are computed here, too, in place, and summed.
  //
  // Maxima and conversions share a pipe that runs at half its rate beside busy tensor cores (4 clocks a warp),
  // exponentials have another (8): so the second row's maximum is found under the first row's exponentials, and
  // kBits, where a row has nearly always seen a score above 0 before, maxima are those of bits, three at a time. (At
  // 64 dims that brings nothing, and spills.)
  template <bool kBits>
  __device__ __forceinline__ void raise(float (&s)[kS], float (&m)[2], float (&top)[2], float (&shrink)[2],
                                        float (&sum)[2]) const {
    shrink[0] = shrink[1] = 1.0f;
    if constexpr (!Variant::use_softmax) {
      m[0] = m[1] = 0.0f;
      float some = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) some = __fadd_rn(some, s[i]);
      ptx::computed(fmaxf(some, 0.0f), base_);  // as below; it keeps about half of the hooks above the wait
      return;
    }
    float x, y;
    if constexpr (kBits && !Variant::has_logits && (kO > 32 || L::kGroups > 2)) {
      int a = extreme<true>(0, s, m[0]), b = extreme<true>(1, s, m[1]);
      x = of_quad(__int_as_float(a));
      if (__any_sync(0xffffffffu, (a | b) < 0)) {  // bits of negative numbers ascend as these descend
        a = a < 0 ? extreme<false>(0, s, m[0]) : a;
        b = b < 0 ? extreme<false>(1, s, m[1]) : b;
        x = of_quad(__int_as_float(a));
      }
      y = __int_as_float(b);
    } else {
      x = of_quad(largest(0, s, m[0]));
      y = largest(1, s, m[1]);
    }
    settle(0, x, m, top, shrink);
    exponentials<0>(s, top[0], top[0], sum);
    settle(1, of_quad(y), m, top, shrink);
    // A store that never happens, but only these numbers can tell: ptxas would else sink all of this below the wait for
    // the product under which it is meant to run.
    ptx::computed(sum[0] + shrink[1], base_);
  }

  // Weights 2^(s c - m c) as 16-bit operands, and their sums. after: a number of the product under which raise ran.
  // Most of the second row's exponentials need it: ptxas would else lift them above the wait for that product, and
  // leave none for conversions to run under.
  __device__ __forceinline__ void weights(float (&s)[kS], unsigned (&w)[kS / 2], float (&l)[2], const float (&top)[2],
                                          const float (&shrink)[2], float (&sum)[2], float after) const {
    if constexpr (Variant::use_softmax) exponentials<1>(s, top[1], fmaxf(top[1], ptx::after(after)), sum);
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        w[2 * n + half] = ptx::pack2<kH>(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
      }
    if constexpr (!Variant::use_softmax) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = __fmaf_rn(l[half], shrink[half], sum[half]);
  }

  __device__ __forceinline__ void rescale(float (&o)[kO], const float (&shrink)[2]) const {
    if constexpr (!Variant::use_softmax) return;
    if (__all_sync(0xffffffffu, shrink[0] == 1.0f && shrink[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] *= shrink[i / 2 % 2];
  }

 private:
  // A thread's largest score of a row, or m.
  __device__ __forceinline__ static float largest(int half, const float (&s)[kS], float m) {
    float chain[2] = {m, m};
#pragma unroll
    for (int n = 0; n < kS / 4; ++n) {
      // the second row's chain is long, because its latency is hidden
      chain[0] = fmaxf(chain[0], s[4 * n + 2 * half]);
      chain[1 - half] = fmaxf(chain[1 - half], s[4 * n + 2 * half + 1]);
    }
    return half ? chain[0] : fmaxf(chain[0], chain[1]);
  }

  // The largest, or the smallest, of the bits of a thread's scores of a row and m.
  template <bool kLargest>
  __device__ __forceinline__ static int extreme(int half, const float (&s)[kS], float m) {
    int chain[2] = {__float_as_int(m), __float_as_int(m)};
#pragma unroll
    for (int n = 0; n < kS / 4; ++n) {
      const int x = __float_as_int(s[4 * n + 2 * half]), y = __float_as_int(s[4 * n + 2 * half + 1]);
      chain[n % 2] = kLargest ? __vimax3_s32(chain[n % 2], x, y) : __vimin3_s32(chain[n % 2], x, y);
    }
    return kLargest ? max(chain[0], chain[1]) : min(chain[0], chain[1]);
  }

  __device__ __forceinline__ static float of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }

  // x: the largest score of a row so far. m follows when it has fallen behind by more than a factor of 2^kSlack, so
  // that O is seldom multiplied; weights are 2^kSlack at most. (The idea is FlashAttention-4's.)
  __device__ __forceinline__ void settle(int half, float x, float (&m)[2], float (&top)[2], float (&shrink)[2]) const {
    constexpr float kSlack = 8.0f;
    const float before = __fmul_rn(m[half], unit(half)), now = __fmul_rn(x, unit(half));  // -inf stays -inf
    const bool stays = __fsub_rn(now, before) <= kSlack;
    // Rows that see nothing yet subtract 0: every weight is 2^-inf.
    top[half] = x == neg_inf() ? 0.0f : stays ? before : now;
    shrink[half] = ptx::ex2(__fsub_rn(before, top[half]));
    m[half] = stays ? m[half] : x;
  }

  // 2^(s c - top) of one row, in place, and their sum; later: top, for all but the first pairs.
  template <int kRow>
  __device__ __forceinline__ void exponentials(float (&s)[kS], float top, float later, float (&sum)[2]) const {
    sum[kRow] = 0.0f;
#pragma unroll
    for (int n = 0; n < kS / 4; ++n) {
      float &x = s[4 * n + 2 * kRow], &y = s[4 * n + 2 * kRow + 1];
      x = ptx::ex2(__fmaf_rn(x, unit(kRow), n < 4 ? -top : -later));
      y = ptx::ex2(__fmaf_rn(y, unit(kRow), n < 4 ? -top : -later));
      sum[kRow] = __fadd_rn(sum[kRow], __fadd_rn(x, y));
    }
  }
};

}  // namespace attnrt
