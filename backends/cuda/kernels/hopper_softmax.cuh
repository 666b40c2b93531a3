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
  using Base::base_, Base::cap_of, Base::scaled_by, Base::factor_, Base::kS, Base::lane_, Base::mask_bits, Base::meta_,
      Base::negate_, Base::p_, Base::params_;
  using Base::shift_, Base::unit;
  using typename Base::Cap;
  using typename Base::Row;
  using typename Base::View;
  static constexpr ptx::Half16 kH = kHalf<Config::q_type>;
  static constexpr int kO = L::kDimVo / 2;
  static constexpr int kWords = kS * L::kElementQ / 4;  // of weights
  static constexpr bool kLinear = L::kLinear;
  // Exponentials come behind the wait for the product with V: products of 8-bit numbers are half as long, so that too
  // little time is under them.
  static constexpr bool kBehind = L::kNarrow;
  static constexpr bool kMaximaByBits = kO > 32 || L::kGroups > 2;
  // Pairs of weights of a thread. Beside a softmax other things may be done, because exponentials are issued at an
  // eighth of a warp's rate: raise calls beside(-1, 0) before it begins, both call beside(n, x) before pair n, where x
  // is a weight of the one before.
  static constexpr int kPairs = kS / 2;
  struct Alone {
    __device__ __forceinline__ void operator()(int, float) const {}
  };

  // Hooks on the scores of tile t, whose first key has that offset. kRuns: positions run on and all keys are there.
  // Where hooks have quick forms, one look at their arguments says whether these hold for all of a warp's scores.
  // bias: what is still to be added to each row's scores (add_slope). Weights that are logistic functions are still
  // powers.
  template <bool kRuns>
  __device__ __forceinline__ void hooks(float (&s)[kS], const Row (&rows)[2], int t, int offset,
                                        float (&bias)[2]) const {
    if constexpr (Variant::linear_bias) {
      add_slope<kRuns>(s, rows, t, offset, bias);
    } else if constexpr (L::kCapped || L::kScaled) {  // with their exponents
    } else if constexpr (Variant::has_logits || !Variant::use_softmax) {
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
    if constexpr (Variant::is_logistic) {
      return Variant::power(params, row.hook, c, score);
    } else if constexpr (Variant::row_units) {
      return Variant::reduced(params, row.hook, c, score);
    } else {
      return Variant::logits(params, row.hook, c, score);
    }
  }

  // A bias that is linear in the key's position is slope * (position of the thread's first key - origin), which is one
  // number for a row and a tile, and slope * column, which is one instruction for a score. Where positions do not run
  // on a key's column is what it lies behind the thread's first: the same numbers, where they do.
  template <bool kRuns>
  __device__ __forceinline__ void add_slope(float (&s)[kS], const Row (&rows)[2], int t, int offset,
                                            float (&bias)[2]) const {
    const float slope[2] = {Variant::slope(rows[0].hook), Variant::slope(rows[1].hook)};
    const int stage = t % L::kStages;
    int first = offset + shift_ + lane_ % 4 * 2;
    if (kRuns || this->record().runs) {
#pragma unroll
      for (int i = 0; i < kS; ++i) s[i] = __fmaf_rn(slope[i / 2 % 2], static_cast<float>(column(i)), s[i]);
    } else {
      first = first_position(stage) + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < kS; ++i) {
        const int behind = isub(meta_.pos[stage][column(i) + lane_ % 4 * 2], first);
        s[i] = __fmaf_rn(slope[i / 2 % 2], to_float(behind), s[i]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bias[half] = __fmul_rn(slope[half], to_float(isub(first, Variant::origin(rows[half].hook, rows[half].ctx))));
      if (!kRuns && negate_) bias[half] = -bias[half];
    }
  }

  // Position of a tile's first key, counted back from the first that exists.
  __device__ __forceinline__ int first_position(int stage) const {
    int first = 0;
    bool found = false;
#pragma unroll
    for (int part = 0; part < L::kTile / 32; ++part) {
      const int start = meta_.start[stage][L::kLinear ? part : 0];
      first = found || start == kDeadKey ? first : start - 32 * part;
      found = found || start != kDeadKey;
    }
    return first;
  }

  // Hooks and masks; without hooks a tile that all rows see whole is left alone. Scores that are capped with their
  // exponents are masked then.
  __device__ __forceinline__ void logits(float (&s)[kS], const Row (&rows)[2], int t, int offset, const View& view,
                                         float (&bias)[2]) const {
    hooks<false>(s, rows, t, offset, bias);
    if (negate_) {
#pragma unroll
      for (int i = 0; i < kS; ++i) s[i] = -s[i];
    }
    if constexpr (Variant::is_logistic) {  // a key that is hidden has no part in its neighbour's weight
      if (!view.all) mask_bits(s, view.bits);
      logistics<false>(s);
    }
    if (view.all || L::kCapped) return;
    mask_bits(s, view.bits);
  }

  // tanh(factor * x) / factor is x times this near 0.
  __device__ __forceinline__ static float polynomial(const Cap& cap, float x) {
    const float u = __fmul_rn(x, x);
    return __fmaf_rn(__fmaf_rn(__fmaf_rn(u, cap.u3, cap.u2), u, cap.u1), u, TANH_0);
  }
  __device__ __forceinline__ static bool is_near(const Cap& cap, float x) {
    return __fmul_rn(fabsf(x), cap.factor) < TANH_NEAR;
  }
  __device__ __forceinline__ static float capped_far(const Cap& cap, float x) {
    const float far = __fmul_rn(tanh_far(__fmul_rn(fabsf(x), cap.factor)), ptx::rcp(cap.factor));
    return x < 0.0f ? -far : far;
  }
  __device__ __forceinline__ static float capped(const Cap& cap, float x) {
    return select(is_near(cap, x), __fmul_rn(x, polynomial(cap, x)), capped_far(cap, x));
  }
  // The same for a multiple of it, less what exponents subtract: as exponents of 2. A score has the same bits whether
  // it is known to be near or not: other scores of a warp do not matter.
  __device__ __forceinline__ static float near_power(const Cap& scaled, float x, float top) {
    const float u = __fmul_rn(x, x);
    return __fmaf_rn(x, __fmaf_rn(__fmaf_rn(__fmaf_rn(u, scaled.u3, scaled.u2), u, scaled.u1), u, scaled.u0), -top);
  }

  // Weights 1 / (1 + 2^x), for two keys side by side by one reciprocal of (1 + 2^x) (1 + 2^y): three results of the
  // slow pipe instead of four. Powers above kMostPower count as that, so that the product is a number; kLooks: one look
  // at all of a warp's powers says whether there is one.
  template <bool kLooks>
  __device__ __forceinline__ static void logistics(float (&s)[kS]) {
    constexpr float kMostPower = 63.0f;
    if constexpr (kLooks) {
      int most[4] = {0, 0, 0, 0};
#pragma unroll
      for (int i = 0; i < kS; i += 2) {
        most[i / 2 % 4] = __vimax3_s32(most[i / 2 % 4], __float_as_int(s[i]), __float_as_int(s[i + 1]));
      }
      most[0] = __vimax3_s32(most[0], most[1], max(most[2], most[3]));
      if (__any_sync(0xffffffffu, most[0] > __float_as_int(kMostPower))) {
#pragma unroll
        for (int i = 0; i < kS; ++i) s[i] = ptx::min_nan(s[i], kMostPower);
      }
    }
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &x = s[4 * n + 2 * half], &y = s[4 * n + 2 * half + 1];
        const float a = ptx::ex2(kLooks ? x : ptx::min_nan(x, kMostPower));
        const float b = ptx::ex2(kLooks ? y : ptx::min_nan(y, kMostPower));
        const float c = __fadd_rn(1.0f, b), r = ptx::rcp(__fmaf_rn(a, c, c));
        x = __fmul_rn(r, c);
        y = __fmaf_rn(r, a, r);
      }
  }

  // The new maxima; top is what exponents subtract, shrink what l and O have to be multiplied by. Where there is a
  // softmax the first row's weights are computed here, too, in place, and summed (not kBehind).
  //
  // Maxima and conversions share a pipe that runs at half its rate beside busy tensor cores (4 clocks a warp),
  // exponentials have another (8): so the second row's maximum is found under the first row's exponentials, and
  // kBits, where a row has nearly always seen a score above 0 before, maxima are those of bits, three at a time. (At
  // 64 dims that brings two warpgroups nothing, and spills.)
  template <bool kBits, class Beside = Alone>
  __device__ __forceinline__ void raise(float (&s)[kS], float (&m)[2], float (&top)[2], float (&shrink)[2],
                                        float (&sum)[2], const float (&bias)[2], const View& view, bool& near,
                                        Beside&& beside = {}) const {
    shrink[0] = shrink[1] = 1.0f;
    if constexpr (!Variant::use_softmax) {
      m[0] = m[1] = 0.0f;
      float some = 0.0f;
#pragma unroll
      for (int i = 0; i < 16; ++i) some = __fadd_rn(some, s[i]);
      ptx::computed(fmaxf(some, 0.0f), base_);  // as below; it keeps about half of the hooks above the wait
      return;
    }
    if constexpr (L::kCapped) return raise_capped<kBits>(s, m, top, shrink, sum, view, near);
    beside(-1, 0.0f);
    float x, y;
    const float least[2] = {kLinear ? s[0] : m[0], kLinear ? s[2] : m[1]};  // m has its bias already
    if constexpr (kBits && (!Variant::has_logits || kLinear || L::kScaled) && kMaximaByBits) {
      int a = extreme<true>(0, s, least[0]), b = extreme<true>(1, s, least[1]);
      x = of_quad(__int_as_float(a), bias[0], m[0]);
      if (__any_sync(0xffffffffu, (a | b) < 0)) {  // bits of negative numbers ascend as these descend
        a = a < 0 ? extreme<false>(0, s, least[0]) : a;
        b = b < 0 ? extreme<false>(1, s, least[1]) : b;
        x = of_quad(__int_as_float(a), bias[0], m[0]);
      }
      y = __int_as_float(b);
    } else {
      x = of_quad(largest(0, s, least[0]), bias[0], m[0]);
      y = largest(1, s, least[1]);
    }
    settle(0, x, m, top, shrink, bias);
    if constexpr (!kBehind) exponentials<0>(s, top[0], top[0], sum, beside);
    settle(1, of_quad(y, bias[1], m[1]), m, top, shrink, bias);
    // A store that never happens, but only these numbers can tell: ptxas would else sink all of this below the wait for
    // the product under which it is meant to run.
    if constexpr (!kBehind) ptx::computed(sum[0] + shrink[1], base_);
  }

  // The same for capped scores. A maximum is that of scores as they come, capped alone. kBits: the largest of the
  // signed and of the unsigned bits say which is the largest and how far from 0 they go. near: the second row's scores
  // are as they were, and near 0; else they are exponents.
  template <bool kBits>
  __device__ __forceinline__ void raise_capped(float (&s)[kS], float (&m)[2], float (&top)[2], float (&shrink)[2],
                                               float (&sum)[2], const View& view, bool& near) const {
    constexpr float kNothing[2] = {0.0f, 0.0f};
    const Cap cap[2] = {cap_of(factor_[0]), cap_of(factor_[L::kCapped])};
    const Cap scaled[2] = {scaled_by(cap[0], unit(0)), scaled_by(cap[1], unit(1))};
    const auto rise = [&](int half, float x) { settle(half, fmaxf(m[half], x), m, top, shrink, kNothing); };
    near = false;
    if constexpr (kBits && kMaximaByBits) {
      const int a = extreme<true>(0, s, s[0]), b = extreme<true>(1, s, s[2]);
      const float low_a = __uint_as_float(highest(0, s)), low_b = __uint_as_float(highest(1, s));
      const float x = __int_as_float(a), y = __int_as_float(b);
      const bool yes = is_near(cap[0], fmaxf(fabsf(x), fabsf(low_a))) && is_near(cap[1], fmaxf(fabsf(y), fabsf(low_b)));
      near = __all_sync(0xffffffffu, yes && (a | b) >= 0);
      if (near) {
        const float most_x = of_quad(x, 0.0f, neg_inf());
        rise(0, __fmul_rn(most_x, polynomial(cap[0], most_x)));
        near_exponentials<0>(s, scaled[0], top[0], top[0], sum);
        const float most_y = of_quad(y, 0.0f, neg_inf());
        rise(1, __fmul_rn(most_y, polynomial(cap[1], most_y)));
        ptx::computed(sum[0] + shrink[1], base_);  // as above
        return;
      }
    }
    float widest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kS; ++i) widest[i / 2 % 2] = fmaxf(widest[i / 2 % 2], fabsf(s[i]));
    const bool close = __all_sync(0xffffffffu, is_near(cap[0], widest[0]) && is_near(cap[1], widest[1]));
    if (!view.all) mask_bits(s, view.bits);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = of_quad(largest(half, s, neg_inf()), 0.0f, neg_inf());
      rise(half, x == neg_inf() ? x : capped(cap[half], x));  // nothing seen yet stays that
    }
    ptx::wgmma_pin(s);  // else what both ways compute would be computed before the branch, and wait in registers
    if (close) {
#pragma unroll
      for (int i = 0; i < kS; ++i) s[i] = near_power(scaled[i / 2 % 2], s[i], top[i / 2 % 2]);
    } else {
#pragma unroll
      for (int i = 0; i < kS; ++i) {
        const int half = i / 2 % 2;
        s[i] = select(is_near(cap[half], s[i]), near_power(scaled[half], s[i], top[half]),
                      __fmaf_rn(capped_far(cap[half], s[i]), unit(half), -top[half]));
      }
    }
    if (!view.all) mask_bits(s, view.bits);
    sum_up<0>(s, sum, [](float x, int) { return ptx::ex2(x); });
    ptx::computed(sum[0] + shrink[1], base_);  // as above
  }

  // Weights 2^(s c - m c) as operands, and their sums. after: a number of the product under which raise ran.
  // Most of the second row's exponentials need it: ptxas would else lift them above the wait for that product, and
  // leave none for conversions to run under.
  template <class Beside = Alone>
  __device__ __forceinline__ void weights(float (&s)[kS], unsigned (&w)[kWords], float (&l)[2], const float (&top)[2],
                                          const float (&shrink)[2], float (&sum)[2], float after, bool near,
                                          Beside&& beside = {}) const {
    if constexpr (L::kCapped) {
      if (near) {
        near_exponentials<1>(s, scaled_by(cap_of(factor_[L::kCapped]), unit(1)), top[1],
                             fmaxf(top[1], ptx::after(after)), sum);
      } else {
        sum_up<1>(s, sum, [](float x, int) { return ptx::ex2(x); });
      }
    } else if constexpr (Variant::use_softmax) {
      if constexpr (kBehind) exponentials<0>(s, top[0], fmaxf(top[0], ptx::after(after)), sum, beside);
      exponentials<1>(s, top[1], fmaxf(top[1], ptx::after(after)), sum, beside);
    }
#pragma unroll
    for (int n = 0; n < kWords / 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (L::kNarrow) {
          const float *x = s + 8 * n + 2 * half, *y = x + 4;
          w[2 * n + half] = ptx::pack4_e4m3(x[0], x[1], y[0], y[1]);
        } else {
          w[2 * n + half] = ptx::pack2<kH>(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
        }
      }
    if constexpr (!Variant::use_softmax) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = __fmaf_rn(l[half], shrink[half], sum[half]);
  }

  // What exponents subtract under a maximum of x, both as exponents of 2: weights in 8 bits begin at 2^kLift (settle).
  static constexpr float kLift = 8.0f;
  __device__ __forceinline__ static float lifted(float x) { return L::kNarrow ? __fsub_rn(x, kLift) : x; }

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

  // The largest of the bits of a row's scores as numbers without a sign: of those below 0 if there is one.
  __device__ __forceinline__ static unsigned highest(int half, const float (&s)[kS]) {
    unsigned chain[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < kS / 4; ++n) {
      const unsigned x = __float_as_uint(s[4 * n + 2 * half]), y = __float_as_uint(s[4 * n + 2 * half + 1]);
      chain[n % 2] = __vimax3_u32(chain[n % 2], x, y);
    }
    return max(chain[0], chain[1]);
  }

  // The largest of a row's scores that its quad found, or m.
  __device__ __forceinline__ static float of_quad(float x, float bias, float m) {
    if constexpr (kLinear) x = __fadd_rn(x, bias);
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return kLinear ? fmaxf(x, m) : x;
  }

  // x: the largest score of a row so far. m follows when it has fallen behind by more than a factor of 2^kSlack, so
  // that O is seldom multiplied; weights are 2^kSlack at most. (The idea is FlashAttention-4's.) Weights in 8 bits
  // begin at 2^kLift instead of 1, because their smallest number is 2^-9, and may not pass 448.
  __device__ __forceinline__ void settle(int half, float x, float (&m)[2], float (&top)[2], float (&shrink)[2],
                                         const float (&bias)[2]) const {
    constexpr float kSlack = L::kNarrow ? 0.5f : 8.0f;
    const float before = __fmul_rn(m[half], unit(half)), now = __fmul_rn(x, unit(half));  // -inf stays -inf
    const bool stays = __fsub_rn(now, before) <= kSlack;
    // Rows that see nothing yet subtract 0: every weight is 2^-inf.
    top[half] = x == neg_inf() ? 0.0f : lifted(stays ? before : now);
    shrink[half] = ptx::ex2(__fsub_rn(lifted(before), top[half]));
    m[half] = stays ? m[half] : x;
    if constexpr (kLinear) top[half] = __fmaf_rn(-bias[half], unit(half), top[half]);
  }

  // 2^(s c - top) of one row, in place, and their sum; later: top, for all but the first pairs.
  template <int kRow, class Beside>
  __device__ __forceinline__ void exponentials(float (&s)[kS], float top, float later, float (&sum)[2],
                                               Beside& beside) const {
    sum_up<kRow>(
        s, sum, [&](float x, int n) { return ptx::ex2(__fmaf_rn(x, unit(kRow), n < 4 ? -top : -later)); }, beside);
  }
  template <int kRow>
  __device__ __forceinline__ static void near_exponentials(float (&s)[kS], const Cap& scaled, float top, float later,
                                                           float (&sum)[2]) {
    sum_up<kRow>(s, sum, [&](float x, int n) { return ptx::ex2(near_power(scaled, x, n < 4 ? top : later)); });
  }

  // weigh(score, n) of one row, in place, and their sum pair by pair.
  template <int kRow, class F, class Beside = Alone>
  __device__ __forceinline__ static void sum_up(float (&s)[kS], float (&sum)[2], F&& weigh, Beside&& beside = {}) {
    sum[kRow] = 0.0f;
#pragma unroll
    for (int n = 0; n < kS / 4; ++n) {
      beside(kRow * (kS / 4) + n, n > 0 ? s[4 * n + 2 * kRow - 3] : 0.0f);
      float &x = s[4 * n + 2 * kRow], &y = s[4 * n + 2 * kRow + 1];
      x = weigh(x, n);
      y = weigh(y, n);
      sum[kRow] = __fadd_rn(sum[kRow], __fadd_rn(x, y));
    }
  }
};

}  // namespace attnrt
