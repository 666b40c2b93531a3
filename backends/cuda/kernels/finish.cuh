// SPDX-License-Identifier: Apache-2.0
// The end of a row: sink, division, output hook, cast, log-sum-exp. One definition, compiled into attend and merge.
#pragma once
#include "attnrt_variant.h"
#include "layout.cuh"
#include "state.cuh"

namespace attnrt {

// What finish() needs to know of a row.
struct FinishRow {
  float inverse;  // factor on acc; 0: the empty set, which no output hook touches (softmax-free: not told apart)
  float lse;
};

// Folds the learned sink in (a key without value; it enters once, here) and prepares the division. An empty set gives 0
// and -inf. One instruction each for 1 / l and log2 l (l is at least 1 but for rounding: the largest weight is 1):
// errors of one unit in the last place and 2^-22.
template <class Variant>
__device__ __forceinline__ FinishRow finish_head(const ParamRef* params, const Ctx& c, float m, float l) {
  FinishRow row;
  if constexpr (!Variant::use_softmax) {
    row.inverse = 1.0f;
    row.lse = neg_inf();
    return row;
  }
  const bool empty = m == neg_inf();  // before the sink: a row that sees no key stays the identity of merge
  float scale = 1.0f;
  if constexpr (Variant::has_sink) {
    const Fold f = fold_head<true>(m, l, __fmul_rn(Variant::sink(params, c), kLog2e), 1.0f);
    scale = f.take == 0 ? f.scale_a : 1.0f;
    m = f.m;
    l = f.l;
  }
  row.inverse = empty ? 0.0f : __fmul_rn(scale, ptx::rcp(l));
  if constexpr (Variant::has_sink && Variant::has_output) {
    if (!empty) row.inverse = fmaxf(row.inverse, 0x1p-126f);  // all keys may weigh nothing beside the sink
  }
  row.lse = empty ? neg_inf() : __fmul_rn(__fadd_rn(m, ptx::lg2(l)), kLn2);
  return row;
}

// One number of the output row.
template <class Config, class Variant>
__device__ __forceinline__ typename Bits<Config::out_type>::type finish_value(const ParamRef* params, const Ctx& c,
                                                                              const FinishRow& row, int d, float acc) {
  float o = row.inverse == 0.0f ? 0.0f : __fmul_rn(acc, row.inverse);
  if constexpr (Variant::has_output) o = row.inverse == 0.0f ? 0.0f : Variant::output(params, c, d, o);
  return from_float<Config::out_type>(o);
}

template <class Config>
__device__ __forceinline__ char* out_address(const RunParams& p, int qo_row, int qo_head, int d) {
  return p.out +
         (static_cast<long long>(qo_row) * p.out_stride_row + static_cast<long long>(qo_head) * p.out_stride_head + d) *
             kBytes<Config::out_type>;
}

__device__ __forceinline__ void store_lse(const RunParams& p, int qo_row, int qo_head, float lse) {
  if (p.lse)
    p.lse[static_cast<long long>(qo_row) * p.lse_stride_row + static_cast<long long>(qo_head) * p.lse_stride_head] =
        lse;
}

}  // namespace attnrt
