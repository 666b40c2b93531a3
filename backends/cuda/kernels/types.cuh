// SPDX-License-Identifier: Apache-2.0
// Element types: how q, K, V and out are stored, and their exact conversions. Own code instead of the toolkit's fp16,
// bf16 and fp8 headers: those of two toolkits clash under NVRTC, and a machine with only a driver and the NVRTC wheel
// has none.
#pragma once
#include "ptx.cuh"

namespace attnrt {

enum class Dtype { f32, f16, bf16, e4m3, e5m2 };

template <Dtype T>
struct Bits;  // unsigned type of the element's width
template <>
struct Bits<Dtype::f32> {
  typedef unsigned type;
};
template <>
struct Bits<Dtype::f16> {
  typedef unsigned short type;
};
template <>
struct Bits<Dtype::bf16> {
  typedef unsigned short type;
};
template <>
struct Bits<Dtype::e4m3> {
  typedef unsigned char type;
};
template <>
struct Bits<Dtype::e5m2> {
  typedef unsigned char type;
};

template <Dtype T>
constexpr int kBytes = sizeof(typename Bits<T>::type);

__device__ __forceinline__ float half_to_float(unsigned short x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
}

// Two fp8 numbers in the low 16 bits to two float16, exact (NaN kept); sm_89 has the instruction, older parts do it by
// parts.
template <Dtype T>
__device__ __forceinline__ unsigned fp8x2_to_half2(unsigned short x) {
  unsigned r;
#if __CUDA_ARCH__ >= 890
  if constexpr (T == Dtype::e4m3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(x));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r) : "h"(x));
  }
#else
  const unsigned wide = (x & 0xffu) | ((x & 0xff00u) << 8);  // one byte per 16-bit lane
  if constexpr (T == Dtype::e5m2) {
    r = wide << 8;  // e5m2 is the upper byte of a float16
  } else {
    // e4m3 has three mantissa bits and bias 7: as a float16 pattern shifted by 7 it is the value times 2^-8, subnormals
    // included.
    const unsigned sign = (wide & 0x00800080u) << 8;
    const unsigned magnitude = (wide & 0x007f007fu) << 7;
    const unsigned scale = 0x5c005c00u;  // 256 in both lanes
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(magnitude), "r"(scale));
    const unsigned nan = __vcmpeq2(wide & 0x007f007fu, 0x007f007fu) & 0x7fff7fffu;
    r = (r | nan) | sign;
  }
#endif
  return r;
}

template <Dtype T>
__device__ __forceinline__ float to_float(typename Bits<T>::type x) {
  if constexpr (T == Dtype::f32) {
    return __uint_as_float(x);
  } else if constexpr (T == Dtype::bf16) {
    return __uint_as_float(static_cast<unsigned>(x) << 16);
  } else if constexpr (T == Dtype::f16) {
    return half_to_float(x);
  } else {
    return half_to_float(static_cast<unsigned short>(fp8x2_to_half2<T>(x) & 0xffffu));
  }
}

// Nearest even; fp8 saturates to the largest finite number, NaN stays NaN.
template <Dtype T>
__device__ __forceinline__ typename Bits<T>::type from_float(float x) {
  if constexpr (T == Dtype::f32) {
    return __float_as_uint(x);
  } else if constexpr (T == Dtype::bf16) {
    unsigned short r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
  } else if constexpr (T == Dtype::f16) {
    unsigned short r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
  } else {
    // By integer rounding of the float32 pattern, the same on every architecture and as on the CPU.
    constexpr int mantissa = T == Dtype::e4m3 ? 3 : 2;
    constexpr int bias = T == Dtype::e4m3 ? 7 : 15;
    constexpr float largest = T == Dtype::e4m3 ? 448.0f : 57344.0f;
    const unsigned bits = __float_as_uint(x);
    const unsigned sign = (bits >> 24) & 0x80u;
    if (x != x) return static_cast<unsigned char>(sign | 0x7fu);
    float a = fminf(fabsf(x), largest);
    constexpr float smallest_normal = T == Dtype::e4m3 ? 0.015625f : 6.103515625e-5f;
    if (a < smallest_normal) {
      // Subnormal: adding 2^(23 - mantissa) times the smallest normal leaves the rounded integer in the low mantissa
      // bits.
      constexpr float magic = smallest_normal * static_cast<float>(1 << (23 - mantissa));
      return static_cast<unsigned char>(sign | (__float_as_uint(__fadd_rn(a, magic)) - __float_as_uint(magic)));
    }
    unsigned u = __float_as_uint(a);
    u += (1u << (22 - mantissa)) - 1u + ((u >> (23 - mantissa)) & 1u);
    return static_cast<unsigned char>(sign | ((u >> (23 - mantissa)) - ((127u - bias) << mantissa)));
  }
}

// The 16-bit type in which a tile is multiplied: q's own.
template <Dtype Q>
constexpr ptx::Half16 kHalf = Q == Dtype::f16 ? ptx::Half16::fp16 : ptx::Half16::bf16;

}  // namespace attnrt
