// SPDX-License-Identifier: Apache-2.0
// Element types of out and of the cache: scalar stores that round to nearest even.

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

// Nearest even, saturated at the largest finite number; NaN stays NaN, infinities saturate. `mantissa` bits, exponent
// `bias`, `largest` the code of the largest finite number, `nan` the code of NaN.
ATTNRT_INLINE uint8_t to_fp8(float x, int mantissa, int bias, uint32_t largest, uint32_t nan) {
  const uint32_t b = float_to_bits(x), sign = (b >> 24) & 0x80u;
  const uint32_t magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | nan);
  const int drop = 23 - mantissa;
  uint32_t code;
  if (magnitude < static_cast<uint32_t>(128 - bias) << 23) {  // below the smallest normal number
    const uint32_t half = static_cast<uint32_t>(127 + 1 - bias + drop)
                          << 23;  // 2^(1 - bias - mantissa + 23): its ulp is the step
    code = float_to_bits(bits_to_float(magnitude) + bits_to_float(half)) - half;
  } else {
    const uint32_t rounded = magnitude + (1u << (drop - 1)) - 1u + ((magnitude >> drop) & 1u);
    code = (rounded >> drop) - (static_cast<uint32_t>(127 - bias) << mantissa);
  }
  return static_cast<uint8_t>(sign | (code > largest ? largest : code));
}

ATTNRT_INLINE void store_element(void* dst, int64_t i, int dtype, float x) {
  switch (dtype) {
    case ATTNRT_F32:
      static_cast<float*>(dst)[i] = x;
      break;
    case ATTNRT_F16:
      static_cast<uint16_t*>(dst)[i] = to_f16(x);
      break;
    case ATTNRT_BF16:
      static_cast<uint16_t*>(dst)[i] = to_bf16(x);
      break;
    case ATTNRT_E4M3:
      static_cast<uint8_t*>(dst)[i] = to_fp8(x, 3, 7, 0x7eu, 0x7fu);
      break;
    default:
      static_cast<uint8_t*>(dst)[i] = to_fp8(x, 2, 15, 0x7bu, 0x7eu);
      break;
  }
}

ATTNRT_INLINE int64_t element_size(int dtype) { return dtype == ATTNRT_F32 ? 4 : dtype <= ATTNRT_BF16 ? 2 : 1; }
