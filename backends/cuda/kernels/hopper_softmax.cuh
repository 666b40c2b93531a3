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
  static constexpr bool kSmallO = kO <= 32;

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
    mask_bits(s, view, rows, offset);
  }

  // The new maximum; top is what exponents subtract, shrink what l and O have to be multiplied by.
  __device__ __forceinline__ void raise(const float (&s)[kS], float (&m)[2], float (&top)[2],
                                        float (&shrink)[2]) const {
    shrink[0] = shrink[1] = 1.0f;
    if constexpr (!Variant::use_softmax) {
      m[0] = m[1] = 0.0f;
      return;
    }
    float chain[2][4];  // as many as hide the latency of a maximum
#pragma unroll
    for (int i = 0; i < 8; ++i) chain[i / 4][i % 4] = fmaxf(m[i / 4], s[i / 4 * 2 + i % 2 + i % 4 / 2 * 4]);
#pragma unroll
    for (int n = 2; n < kS / 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = chain[i / 2][n % 2 * 2 + i % 2];
        x = fmaxf(x, s[4 * n + i]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(fmaxf(chain[half][0], chain[half][1]), fmaxf(chain[half][2], chain[half][3]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      // Rows that see nothing yet subtract 0: every weight is 2^-inf.
      top[half] = x == neg_inf() ? 0.0f : __fmul_rn(x, unit(half));
      const float before = __fmul_rn(m[half], unit(half));  // -inf stays -inf
      shrink[half] = ptx::ex2(__fsub_rn(before, top[half]));
      m[half] = x;
    }
    // A store that never happens, but only the maxima can tell: ptxas would else sink all of this below the wait for
    // the product under which it is meant to run.
    ptx::computed(shrink[0] + shrink[1], base_);
  }

  // Weights 2^(s c - m c) as 16-bit operands, and their sums.
  __device__ __forceinline__ void weights(float (&s)[kS], unsigned (&w)[kS / 2], float (&l)[2], const float (&top)[2],
                                          const float (&shrink)[2]) const {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = s[4 * n + 2 * half], y = s[4 * n + 2 * half + 1];
        if constexpr (Variant::use_softmax) {
          x = ptx::ex2(__fmaf_rn(x, unit(half), -top[half]));
          y = ptx::ex2(__fmaf_rn(y, unit(half), -top[half]));
          sum[half] = __fadd_rn(sum[half], __fadd_rn(x, y));
        }
        w[2 * n + half] = ptx::pack2<kH>(x, y);
      }
    if constexpr (!Variant::use_softmax) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = __fmaf_rn(l[half], shrink[half], sum[half]);
  }

  // Without asking whether it changes anything: where O is small, ptxas puts it among the exponentials.
  __device__ __forceinline__ void rescale_always(float (&o)[kO], const float (&shrink)[2]) const {
    if constexpr (!Variant::use_softmax) return;
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] *= shrink[i / 2 % 2];
  }

  __device__ __forceinline__ void rescale(float (&o)[kO], const float (&shrink)[2]) const {
    if constexpr (!Variant::use_softmax) return;
    if (__all_sync(0xffffffffu, shrink[0] == 1.0f && shrink[1] == 1.0f)) return;
    rescale_always(o, shrink);
  }
};

}  // namespace attnrt
