// SPDX-License-Identifier: Apache-2.0
// Merging finished (v, lse) pairs of disjoint sets of keys, as attnrt/merge.py writes it down: float32, in part order,
// explicit rounding, empty parts skipped by selection. One warp per (row, head), lanes over numbers; every lane folds
// the weights itself, which is cheaper than sharing them.
#pragma once
#include "types.cuh"

namespace attnrt {

// Parts at one distance from each other; a merge of two arrays is two segments of one part. Strides in elements.
// python: backends/cuda/merge_parts.py writes the same layout.
struct MergeSegment {
  const char* v;
  const float* lse;  // null: the parts are added
  long long v_part, v_row, v_head, v_dim;
  long long lse_part, lse_row, lse_head;
  long long parts;
};

struct MergePartsParams {
  MergeSegment segments[2];
  char* out;
  float* out_lse;
  long long out_row, out_head, out_dim;
  long long out_lse_row, out_lse_head;
  int num_segments, rows, heads, dim;
};

constexpr int kMergeWidth = 4;  // numbers per lane and pass

template <Dtype T>
__device__ __forceinline__ void merge_parts(const MergePartsParams& p) {
  typedef typename Bits<T>::type Element;
  const float empty = __int_as_float(0xff800000);
  const int lane = threadIdx.x % 32;
  const long long warps = static_cast<long long>(gridDim.x) * (blockDim.x / 32);
  const long long total = static_cast<long long>(p.rows) * p.heads;
  for (long long i = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; i < total; i += warps) {
    const long long row = i / p.heads, head = i % p.heads;
    float m = empty, l = 1.0f;
    // At least one pass, so that lse is merged where dim is 0.
    for (int d0 = 0; d0 == 0 || d0 < p.dim; d0 += 32 * kMergeWidth) {
      float acc[kMergeWidth] = {};
      m = empty;
      l = 1.0f;
      for (int s = 0; s < p.num_segments; ++s) {
        const MergeSegment& g = p.segments[s];
        for (long long part = 0; part < g.parts; ++part) {
          const Element* v = reinterpret_cast<const Element*>(g.v) + part * g.v_part + row * g.v_row + head * g.v_head;
          float sa = 1.0f, sb = 1.0f;
          bool first = s == 0 && part == 0;
          if (g.lse != nullptr) {
            const float mb = g.lse[part * g.lse_part + row * g.lse_row + head * g.lse_head];
            if (mb == empty) continue;
            first = m == empty;
            if (first) {
              m = mb;
            } else {
              const float top = mb > m ? mb : m;
              sa = expf(__fsub_rn(m, top));
              sb = expf(__fsub_rn(mb, top));
              l = __fadd_rn(__fmul_rn(l, sa), sb);
              m = top;
            }
          }
#pragma unroll
          for (int j = 0; j < kMergeWidth; ++j) {
            const int d = d0 + 32 * j + lane;
            if (d >= p.dim) continue;
            const float b = to_float<T>(v[d * g.v_dim]);
            acc[j] = first ? b : __fadd_rn(__fmul_rn(acc[j], sa), __fmul_rn(b, sb));
          }
        }
      }
      Element* out = reinterpret_cast<Element*>(p.out) + row * p.out_row + head * p.out_head;
#pragma unroll
      for (int j = 0; j < kMergeWidth; ++j) {
        const int d = d0 + 32 * j + lane;
        if (d < p.dim) out[d * p.out_dim] = from_float<T>(l == 1.0f ? acc[j] : __fdiv_rn(acc[j], l));
      }
    }
    __syncwarp();  // out_lse may be the lse of a part, which other lanes read until here
    if (p.out_lse != nullptr && lane == 0)
      p.out_lse[row * p.out_lse_row + head * p.out_lse_head] = (m == empty || l == 1.0f) ? m : __fadd_rn(m, logf(l));
  }
}

}  // namespace attnrt
