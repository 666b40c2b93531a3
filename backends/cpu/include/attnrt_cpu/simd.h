// SPDX-License-Identifier: Apache-2.0
// Vectors of floats for one instruction family, as compiler vector types: one source for AVX-512, AVX2 + FMA and plain
// C++.
//
// This header and all that follow it are included inside a namespace of the family, after the compiler's target is set
// (see kernels.h), so that three families live in one library. The build uses -ffp-contract=off: a multiply and an add
// are two roundings unless the text says `fma`. Where fma is one rounding and where it is two is part of the numeric
// class.

// ATTNRT_TARGET_*: set where the target is an attribute that predefines no macro (clang).
#if defined(ATTNRT_TARGET_AVX512) || \
    (defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__))
#define ATTNRT_LANES 16
#elif defined(ATTNRT_TARGET_AVX2) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#define ATTNRT_LANES 8
#else
#define ATTNRT_LANES 4
#endif

constexpr int W = ATTNRT_LANES;

typedef float vf __attribute__((vector_size(4 * ATTNRT_LANES)));
typedef int32_t vi __attribute__((vector_size(4 * ATTNRT_LANES)));
typedef float vf_mem __attribute__((vector_size(4 * ATTNRT_LANES), aligned(4), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(4 * ATTNRT_LANES), aligned(4), may_alias));

#define ATTNRT_INLINE static inline __attribute__((always_inline))

ATTNRT_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
ATTNRT_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_mem*>(p) = x; }
ATTNRT_INLINE vi load_int(const int32_t* p) { return *reinterpret_cast<const vi_mem*>(p); }
ATTNRT_INLINE void store_int(int32_t* p, vi x) { *reinterpret_cast<vi_mem*>(p) = x; }
ATTNRT_INLINE vi bits_of(vf x) { return reinterpret_cast<vi>(x); }
ATTNRT_INLINE vf float_of(vi x) { return reinterpret_cast<vf>(x); }

#if ATTNRT_LANES == 16
#define ATTNRT_EACH(x) x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x
#elif ATTNRT_LANES == 8
#define ATTNRT_EACH(x) x, x, x, x, x, x, x, x
#else
#define ATTNRT_EACH(x) x, x, x, x
#endif
ATTNRT_INLINE vf splat(float x) { return vf{ATTNRT_EACH(x)}; }
ATTNRT_INLINE vi splat_int(int32_t x) { return vi{ATTNRT_EACH(x)}; }

// One rounding where the family has the instruction.
ATTNRT_INLINE vf fma(vf a, vf b, vf c) {
#if ATTNRT_LANES == 4
  return a * b + c;
#elif defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#elif ATTNRT_LANES == 16
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
#else
  return __builtin_ia32_vfmaddps256(a, b, c);
#endif
}

ATTNRT_INLINE vi iota() {
#if ATTNRT_LANES == 16
  return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif ATTNRT_LANES == 8
  return vi{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return vi{0, 1, 2, 3};
#endif
}

// x, or `least` where x is less; NaN stays.
ATTNRT_INLINE vf at_least(vf x, vf least) {
#if ATTNRT_LANES == 8 && !defined(__clang__)
  return __builtin_ia32_maxps256(least, x);
#else
  return least > x ? least : x;
#endif
}
ATTNRT_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }

// Whether some lane of a mask (0 or -1) is set.
ATTNRT_INLINE bool any(vi mask) {
#if ATTNRT_LANES == 8
  return __builtin_ia32_movmskps256(reinterpret_cast<vf>(mask)) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < W; ++i) all |= mask[i];
  return all != 0;
#endif
}

// The lanes of x in the order i ^ kFlip.
template <int kFlip>
ATTNRT_INLINE vf flip(vf x) {
#if defined(__clang__)
  vf y;
  for (int i = 0; i < W; ++i) y[i] = x[i ^ kFlip];
  return y;
#else
  return __builtin_shuffle(x, iota() ^ kFlip);
#endif
}

// Largest lane; which, if some are NaN, is not said.
ATTNRT_INLINE float max_lane(vf x) {
#if ATTNRT_LANES == 16
  x = at_least(x, flip<8>(x));
#endif
#if ATTNRT_LANES >= 8
  x = at_least(x, flip<4>(x));
#endif
  x = at_least(x, flip<2>(x));
  return at_least(x, flip<1>(x))[0];
}

// Sum of the lanes as a fixed tree of neighbours: ((0+1)+(2+3))+((4+5)+(6+7)). Sixteen lanes add their upper half to
// the lower one first.
ATTNRT_INLINE float sum_lanes(vf x) {
#if ATTNRT_LANES == 16
  x = x + flip<8>(x);
#endif
  x = x + flip<1>(x);
  x = x + flip<2>(x);
#if ATTNRT_LANES >= 8
  x = x + flip<4>(x);
#endif
  return x[0];
}

// 2^x for x <= 0: degree 6 on [-1/2, 1/2] (minimax, relative error of the polynomial 2e-9), results below 2^-126 are 0,
// NaN stays NaN. Adding 1.5 * 2^23 rounds x to a whole number n and leaves it in the low bits; n = -127 makes the
// factor 2^n zero.
ATTNRT_INLINE vf exp2_nonpositive(vf x) {
  const vf magic = splat(12582912.0f);
  const vf y = at_least(x, splat(-127.0f));
  const vf shifted = y + magic;
  const vf f = y - (shifted - magic);
  vf p = splat(1.5353360e-4f);
  p = fma(p, f, splat(1.3398875e-3f));
  p = fma(p, f, splat(9.6184374e-3f));
  p = fma(p, f, splat(5.5503325e-2f));
  p = fma(p, f, splat(2.4022648e-1f));
  p = fma(p, f, splat(6.9314720e-1f));
  p = fma(p, f, splat(1.0f));
  return p * float_of((bits_of(shifted) + (127 - 0x4b400000)) << 23);
}

// One lane of the vector form, so that a fold uses the same function as a tile.
ATTNRT_INLINE float exp2_nonpositive(float x) { return exp2_nonpositive(splat(x))[0]; }

constexpr double LN_2 = 0.693147180559945309417;
ATTNRT_INLINE float minus_infinity() { return -__builtin_inff(); }
