// SPDX-License-Identifier: Apache-2.0
// Partial states and the two functions that end every row: combine() folds two states, finish() turns one into out and
// lse. Attend and merge both call these, so that a row has one sequence of roundings however it was split.
//
// A state is (m, l, acc): running maximum of the base-2 logits, sum of 2^(t - m), and the sum of 2^(t - m) * v, not
// divided. m = -inf marks the empty state. Softmax-free variants keep m = 0 once a key was seen, so that combine()
// adds.

ATTNRT_INLINE bool is_empty(const float* ml) { return ml[0] == minus_infinity(); }

// a <- a + b, left operand first; an empty operand leaves the other's bits. No product is fused with the addition.
static void combine(float* a_ml, float* a_acc, const float* b_ml, const float* b_acc, int dim) {
  if (is_empty(b_ml)) return;
  if (is_empty(a_ml)) {
    a_ml[0] = b_ml[0];
    a_ml[1] = b_ml[1];
    __builtin_memcpy(a_acc, b_acc, sizeof(float) * static_cast<size_t>(dim));
    return;
  }
  const float m = a_ml[0] > b_ml[0] ? a_ml[0] : b_ml[0];
  const float sa = exp2_nonpositive(a_ml[0] - m), sb = exp2_nonpositive(b_ml[0] - m);
  a_ml[0] = m;
  a_ml[1] = a_ml[1] * sa + b_ml[1] * sb;
  for (int d = 0; d < dim; ++d) a_acc[d] = a_acc[d] * sa + b_acc[d] * sb;
}

// Write row `qo_row` of query head c.qo_head. `acc` is destroyed.
static void finish(const attnrt_call& call, const Hooks& hooks, const attnrt::Ctx& c, int64_t qo_row, const float* ml,
                   float* acc) {
  const int dim = call.head_dim_vo;
  const Params p = static_cast<Params>(call.params);
  const int64_t out = qo_row * call.out_stride_row + c.qo_head * call.out_stride_head;
  float* lse = call.lse ? call.lse + qo_row * call.lse_stride_row + c.qo_head * call.lse_stride_head : nullptr;
  if (is_empty(ml)) {
    for (int d = 0; d < dim; ++d) store_element(call.out, out + d, call.out_dtype, 0.0f);
    if (lse) *lse = minus_infinity();
    return;
  }
  float m = ml[0], l = ml[1];
  if (hooks.use_softmax) {
    if (hooks.sink) {
      const float sink = hooks.sink(p, c) * LOG2_E;
      const float top = m > sink ? m : sink;
      const float scale = exp2_nonpositive(m - top);
      l = l * scale + exp2_nonpositive(sink - top);
      m = top;
      for (int d = 0; d < dim; ++d) acc[d] = acc[d] * scale;
    }
    for (int d = 0; d < dim; ++d) acc[d] = acc[d] / l;
  }
  // -0 becomes 0: whether a sum of nothing but zeros carries a sign would depend on the keys a tile happened to hold.
  for (int d = 0; d < dim; ++d) acc[d] = acc[d] + 0.0f;
  if (hooks.output) hooks.output(p, c, dim, acc);
  switch (call.out_dtype) {
    case ATTNRT_F32:
      __builtin_memcpy(static_cast<float*>(call.out) + out, acc, sizeof(float) * static_cast<size_t>(dim));
      break;
    case ATTNRT_BF16:
      for (int d = 0; d < dim; ++d) static_cast<uint16_t*>(call.out)[out + d] = to_bf16(acc[d]);
      break;
    default:
      for (int d = 0; d < dim; ++d) store_element(call.out, out + d, call.out_dtype, acc[d]);
  }
  if (lse) *lse = static_cast<float>(static_cast<double>(m) * LN_2 + log(static_cast<double>(l)));
}
