// SPDX-License-Identifier: Apache-2.0
// The attention state (m, l, acc) and its fold: the one place where partial results meet, compiled into attend and
// merge alike.
//
// m is the running maximum of base-2 logits (-inf: no key seen), l the sum of 2^(s - m), acc the unnormalised output,
// all float32. Every operation is rounded on its own (__fmul_rn, __fadd_rn: the compiler may not contract them), so
// that a fold in registers and a fold of stored states give the same bits. attnrt/fold.py is the normative form.
// Without a softmax states add.
#pragma once
#include "ptx.cuh"

namespace attnrt {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float neg_inf() { return __int_as_float(0xff800000); }

// 2^(x - m) that is 0 for x = -inf, also when m is -inf.
__device__ __forceinline__ float exp2_diff(float x, float m) { return x == neg_inf() ? 0.0f : ptx::ex2(x - m); }

// Factors and head of a fold of state b onto state a; acc values then combine by fold_acc.
struct Fold {
  float m, l;
  float scale_a, scale_b;
  int take;  // 0: combine, 1: the result is a (b is empty), 2: the result is b (a is empty)
};

template <bool kSoftmax>
__device__ __forceinline__ Fold fold_head(float ma, float la, float mb, float lb) {
  Fold f;
  if (mb == neg_inf()) {
    f = {ma, la, 1.0f, 0.0f, 1};
  } else if (ma == neg_inf()) {
    f = {mb, lb, 0.0f, 1.0f, 2};
  } else if constexpr (kSoftmax) {
    f.m = fmaxf(ma, mb);
    f.scale_a = ptx::ex2(ma - f.m);
    f.scale_b = ptx::ex2(mb - f.m);
    f.l = __fadd_rn(__fmul_rn(la, f.scale_a), __fmul_rn(lb, f.scale_b));
    f.take = 0;
  } else {
    f = {0.0f, 1.0f, 1.0f, 1.0f, 0};
  }
  return f;
}

__device__ __forceinline__ float fold_acc(const Fold& f, float a, float b) {
  const float both = __fadd_rn(__fmul_rn(a, f.scale_a), __fmul_rn(b, f.scale_b));
  return f.take == 0 ? both : f.take == 1 ? a : b;  // by selection: a branch for each number takes long to compile
}

}  // namespace attnrt
