// SPDX-License-Identifier: Apache-2.0
// Sums of products of 8-bit numbers, kept in float32. Tensor cores of sm_90 cut each of 32 products off at 13 bits
// behind the leading one of the sum so far, so that a sum of numbers of one sign loses half a part in 10000 with every
// eight keys (measured: docs/performance/prefill.md): O goes to shared memory every few tiles, and starts anew. (Sums
// in two levels are DeepSeek-V3's and SageAttention2's.)
#pragma once
#include "hopper_layout.cuh"

namespace attnrt {

// Each of 256 threads (two warpgroups) keeps its own numbers, 16 bytes side by side for neighbours. `at`: of the
// thread's first.
constexpr int kKeptStride = 256 * 16;

// kept = kept * scale + o, of nothing 0 * scale + o, as add_kept has it: zeros that a row does not see would else have
// a say in signs. Registers 4j and 4j + 1 are of the thread's first row.
template <int kN>
__device__ __forceinline__ void keep_sums(unsigned at, const float (&o)[kN], const float (&scale)[2], bool kept) {
#pragma unroll
  for (int i = 0; i < kN; i += 4) {
    unsigned x[4] = {0, 0, 0, 0};
    if (kept) ptx::ld_shared16(x, at + i / 4 * kKeptStride);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = __float_as_uint(__fmaf_rn(__uint_as_float(x[j]), scale[j / 2], o[i + j]));
    ptx::st_shared16(at + i / 4 * kKeptStride, x);
  }
}

// x += kept * scale, for kX of a thread's numbers from number `first` on. Where nothing is kept 0 is added, so that the
// sign of a zero does not depend on it.
template <int kX>
__device__ __forceinline__ void add_kept(unsigned at, int first, float (&x)[kX], const float (&scale)[2], bool kept) {
#pragma unroll
  for (int i = 0; i < kX; i += 4) {
    unsigned y[4] = {0, 0, 0, 0};
    if (kept) ptx::ld_shared16(y, at + (first + i) / 4 * kKeptStride);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i + j] = __fmaf_rn(__uint_as_float(y[j]), scale[j / 2], x[i + j]);
  }
}

}  // namespace attnrt
