// SPDX-License-Identifier: Apache-2.0
// What the experiment programs share: error checks, random bits, statistics. No part of the runtime.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../backends/cuda/ptx.cuh"

#define CHECK(call)                                                                           \
  do {                                                                                        \
    cudaError_t err_ = (call);                                                                \
    if (err_ != cudaSuccess) {                                                                \
      fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(err_)); \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)

// Counter-based hash: 32 well-mixed bits of a 64-bit counter.
__host__ __device__ inline unsigned hash32(unsigned long long x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return (unsigned)x;
}

// Uniform in [-1, 1) from 32 random bits, rounded to 8 significant bits, as bfloat16 bits.
__host__ __device__ inline unsigned short bf16_uniform(unsigned h) {
  float f = (float)(int)(h >> 8 << 8) * (1.0f / 2147483648.0f);
  unsigned u;
#ifdef __CUDA_ARCH__
  u = __float_as_uint(f);
#else
  memcpy(&u, &f, 4);
#endif
  return (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

inline float bf16_to_float(unsigned short b) {
  unsigned u = (unsigned)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0.0 : v[v.size() / 2];
}
