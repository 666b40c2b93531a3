// SPDX-License-Identifier: Apache-2.0
// Element types of q, K and V: loads that widen to float32 exactly. Hardware conversions are used only where they give
// the same bits as the integer form.

typedef uint16_t v16_mem __attribute__((vector_size(2 * ATTNRT_LANES), aligned(1), may_alias));
typedef uint8_t v8_mem __attribute__((vector_size(ATTNRT_LANES), aligned(1), may_alias));

// Whole numbers to int32 lanes. Compilers split __builtin_convertvector in two halves where one instruction does it.
ATTNRT_INLINE vi widen_ints(const uint16_t* p) {
#if ATTNRT_LANES == 16
  return reinterpret_cast<vi>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif ATTNRT_LANES == 8
  return reinterpret_cast<vi>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const v16_mem*>(p), vi);
#endif
}

ATTNRT_INLINE vi widen_ints(const uint8_t* p) {
#if ATTNRT_LANES == 16
  return reinterpret_cast<vi>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif ATTNRT_LANES == 8
  return reinterpret_cast<vi>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return __builtin_convertvector(*reinterpret_cast<const v8_mem*>(p), vi);
#endif
}

// Small float held in the top bits below the sign of an int32 lane; `gain` moves its exponent bias to float32's.
// Subnormals come out right because the product is exact.
ATTNRT_INLINE vf widen(vi magnitude, vi sign, float gain) {
  return float_of(bits_of(float_of(magnitude) * splat(gain)) | sign);
}

struct F32 {
  typedef float type;
  ATTNRT_INLINE vf load8(const type* p) { return load(p); }
  ATTNRT_INLINE float load1(type x) { return x; }
};

struct BF16 {
  typedef uint16_t type;
  ATTNRT_INLINE vf load8(const type* p) { return float_of(widen_ints(p) << 16); }
  ATTNRT_INLINE float load1(type x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
};

struct F16 {
  typedef uint16_t type;
  ATTNRT_INLINE vf load8(const type* p) {
#if ATTNRT_LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif ATTNRT_LANES == 8
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    const vi x = widen_ints(p);
    const vi magnitude = x & 0x7fff, sign = (x & 0x8000) << 16;
    const vi special = magnitude >= 0x7c00;
    const vi quiet = magnitude > 0x7c00 ? splat_int(0x400000) : splat_int(0);
    return special ? float_of((magnitude << 13) | 0x7f800000 | quiet | sign) : widen(magnitude << 13, sign, 0x1p112f);
#endif
  }
  ATTNRT_INLINE float load1(type x) {
    const uint32_t magnitude = x & 0x7fffu, sign = (x & 0x8000u) << 16;
    if (magnitude >= 0x7c00u)
      return bits_to_float((magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u) | sign);
    return bits_to_float(float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f) | sign);
  }
};

struct E4M3 {  // no infinity; all ones is NaN
  typedef uint8_t type;
  ATTNRT_INLINE vf load8(const type* p) {
    const vi x = widen_ints(p);
    const vi magnitude = x & 0x7f, sign = (x & 0x80) << 24;
    return magnitude == 0x7f ? float_of(sign | 0x7fc00000) : widen(magnitude << 20, sign, 0x1p120f);
  }
  ATTNRT_INLINE float load1(type x) {
    const uint32_t magnitude = x & 0x7fu, sign = (x & 0x80u) << 24;
    if (magnitude == 0x7fu) return bits_to_float(sign | 0x7fc00000u);
    return bits_to_float(float_to_bits(bits_to_float(magnitude << 20) * 0x1p120f) | sign);
  }
};

struct E5M2 {
  typedef uint8_t type;
  ATTNRT_INLINE vf load8(const type* p) {
    const vi x = widen_ints(p);
    const vi magnitude = x & 0x7f, sign = (x & 0x80) << 24;
    const vi special = magnitude >= 0x7c;
    const vi quiet = magnitude > 0x7c ? splat_int(0x400000) : splat_int(0);
    return special ? float_of((magnitude << 21) | 0x7f800000 | quiet | sign) : widen(magnitude << 21, sign, 0x1p112f);
  }
  ATTNRT_INLINE float load1(type x) { return F16::load1(static_cast<uint16_t>(x) << 8); }
};

// dst[0 : n] = src[0 : n] widened, dst[n : padded] = 0. `padded` is a multiple of W.
template <class T>
static void widen_row(const void* src, int64_t first, int n, int padded, float* dst) {
  const typename T::type* p = static_cast<const typename T::type*>(src) + first;
  int d = 0;
  for (; d + W <= n; d += W) store(dst + d, T::load8(p + d));
  for (; d < n; ++d) dst[d] = T::load1(p[d]);
  for (; d < padded; ++d) dst[d] = 0.0f;
}
