// SPDX-License-Identifier: Apache-2.0
// Element types of q, K, V and out: vector loads that widen to float32 exactly, scalar stores that round to nearest even.
// Hardware conversions are used only where they give the same bits as the integer form.

ATTNRT_INLINE float bits_to_float(uint32_t b) {
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
}

ATTNRT_INLINE uint32_t float_to_bits(float f) {
  uint32_t b;
  __builtin_memcpy(&b, &f, 4);
  return b;
}

typedef uint16_t v16_mem __attribute__((vector_size(2 * ATTNRT_LANES), aligned(1), may_alias));
typedef uint8_t v8_mem __attribute__((vector_size(ATTNRT_LANES), aligned(1), may_alias));

// Small float held in the top bits below the sign of an int32 lane; `gain` moves its exponent bias to float32's. Subnormals
// come out right because the product is exact.
ATTNRT_INLINE vf widen(vi magnitude, vi sign, float gain) {
  return float_of(bits_of(float_of(magnitude) * splat(gain)) | sign);
}

struct F32 {
  typedef float type;
  ATTNRT_INLINE vf load8(const type *p) { return load(p); }
  ATTNRT_INLINE float load1(type x) { return x; }
};

struct BF16 {
  typedef uint16_t type;
  ATTNRT_INLINE vf load8(const type *p) {
    return float_of(__builtin_convertvector(*reinterpret_cast<const v16_mem *>(p), vi) << 16);
  }
  ATTNRT_INLINE float load1(type x) { return bits_to_float(static_cast<uint32_t>(x) << 16); }
};

struct F16 {
  typedef uint16_t type;
  ATTNRT_INLINE vf load8(const type *p) {
#if ATTNRT_LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif ATTNRT_LANES == 8 && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#else
    const vi x = __builtin_convertvector(*reinterpret_cast<const v16_mem *>(p), vi);
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
  ATTNRT_INLINE vf load8(const type *p) {
    const vi x = __builtin_convertvector(*reinterpret_cast<const v8_mem *>(p), vi);
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
  ATTNRT_INLINE vf load8(const type *p) {
    const vi x = __builtin_convertvector(*reinterpret_cast<const v8_mem *>(p), vi);
    const vi magnitude = x & 0x7f, sign = (x & 0x80) << 24;
    const vi special = magnitude >= 0x7c;
    const vi quiet = magnitude > 0x7c ? splat_int(0x400000) : splat_int(0);
    return special ? float_of((magnitude << 21) | 0x7f800000 | quiet | sign) : widen(magnitude << 21, sign, 0x1p112f);
  }
  ATTNRT_INLINE float load1(type x) { return F16::load1(static_cast<uint16_t>(x) << 8); }
};

// dst[0 : n] = src[0 : n] widened, dst[n : padded] = 0. `padded` is a multiple of W.
template <class T>
static void widen_row(const void *src, int64_t first, int n, int padded, float *dst) {
  const typename T::type *p = static_cast<const typename T::type *>(src) + first;
  int d = 0;
  for (; d + W <= n; d += W) store(dst + d, T::load8(p + d));
  for (; d < n; ++d) dst[d] = T::load1(p[d]);
  for (; d < padded; ++d) dst[d] = 0.0f;
}

typedef void (*WidenRow)(const void *, int64_t, int, int, float *);

ATTNRT_INLINE WidenRow widen_row_of(int dtype) {
  switch (dtype) {
    case ATTNRT_F32: return widen_row<F32>;
    case ATTNRT_F16: return widen_row<F16>;
    case ATTNRT_BF16: return widen_row<BF16>;
    case ATTNRT_E4M3: return widen_row<E4M3>;
    default: return widen_row<E5M2>;
  }
}

ATTNRT_INLINE uint16_t to_bf16(float x) {
  const uint32_t b = float_to_bits(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((b >> 16) | 0x40u);
  return static_cast<uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

ATTNRT_INLINE uint16_t to_f16(float x) {
  const uint32_t b = float_to_bits(x), sign = (b >> 16) & 0x8000u;
  const uint32_t magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // subnormal: let an addition round at 2^-24
    const float r = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(r) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

// Nearest even, saturated at the largest finite number; NaN stays NaN, infinities saturate. `mantissa` bits, exponent `bias`,
// `largest` the code of the largest finite number, `nan` the code of NaN.
ATTNRT_INLINE uint8_t to_fp8(float x, int mantissa, int bias, uint32_t largest, uint32_t nan) {
  const uint32_t b = float_to_bits(x), sign = (b >> 24) & 0x80u;
  const uint32_t magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | nan);
  const int drop = 23 - mantissa;
  uint32_t code;
  if (magnitude < static_cast<uint32_t>(128 - bias) << 23) {  // below the smallest normal number
    const uint32_t half = static_cast<uint32_t>(127 + 1 - bias + drop) << 23;  // 2^(1 - bias - mantissa + 23): its ulp is the step
    code = float_to_bits(bits_to_float(magnitude) + bits_to_float(half)) - half;
  } else {
    const uint32_t rounded = magnitude + (1u << (drop - 1)) - 1u + ((magnitude >> drop) & 1u);
    code = (rounded >> drop) - (static_cast<uint32_t>(127 - bias) << mantissa);
  }
  return static_cast<uint8_t>(sign | (code > largest ? largest : code));
}

ATTNRT_INLINE void store_element(void *dst, int64_t i, int dtype, float x) {
  switch (dtype) {
    case ATTNRT_F32: static_cast<float *>(dst)[i] = x; break;
    case ATTNRT_F16: static_cast<uint16_t *>(dst)[i] = to_f16(x); break;
    case ATTNRT_BF16: static_cast<uint16_t *>(dst)[i] = to_bf16(x); break;
    case ATTNRT_E4M3: static_cast<uint8_t *>(dst)[i] = to_fp8(x, 3, 7, 0x7eu, 0x7fu); break;
    default: static_cast<uint8_t *>(dst)[i] = to_fp8(x, 2, 15, 0x7bu, 0x7eu); break;
  }
}

ATTNRT_INLINE int64_t element_size(int dtype) { return dtype == ATTNRT_F32 ? 4 : dtype <= ATTNRT_BF16 ? 2 : 1; }
