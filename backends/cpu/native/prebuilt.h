// SPDX-License-Identifier: Apache-2.0
// Printed by backends/cpu/prebuilt.py: the variants whose kernels are built with the package.
#pragma once
#include "attnrt_variant.h"
namespace attnrt {
struct Full {
  static constexpr bool use_softmax = true;
  static constexpr bool has_logits = false;
  static constexpr bool has_mask = false;
  static constexpr bool has_query = false;
  static constexpr bool has_key = false;
  static constexpr bool has_value = false;
  static constexpr bool has_output = false;
  static constexpr bool has_sink = false;
  static constexpr bool mask_is_interval = true;
  static constexpr bool reads_index_mask = false;
  static constexpr int num_params = 0;
  struct Row {  };
  template <class P> ATTNRT_HD static Row row([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    return Row{};
  }
  static constexpr bool scales_score = false;
  static constexpr bool keeps_units = false;
  static constexpr bool row_units = false;
  static constexpr bool is_scaled = false;
  ATTNRT_HD static void scale([[maybe_unused]] Row& r, [[maybe_unused]] float by) {
  }
  ATTNRT_HD static float unit([[maybe_unused]] const Row& r) {
    return 1.0f;
  }
  static constexpr bool quick_logits = false;
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    return s;
  }
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, const Ctx& c, float s) {
    return logits(p, row(p, c), c, s);
  }
  static constexpr bool is_capped = false;
  ATTNRT_HD static float factor([[maybe_unused]] const Row& r) { return 1.0f; }
  static constexpr bool linear_bias = false;
  static constexpr bool logits_need_keys = false;
  ATTNRT_HD static float slope([[maybe_unused]] const Row& r) { return 0.0f; }
  ATTNRT_HD static int origin([[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return 0;
  }
  static constexpr bool is_logistic = false;
  ATTNRT_HD static void turn([[maybe_unused]] Row& r) {
  }
  template <class P> ATTNRT_HD static float power([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    return 0.0f;
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return true;
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, const Ctx& c) {
    return mask(p, row(p, c), c);
  }
  ATTNRT_HD static void visible([[maybe_unused]] const Row& r, int& low, int& high) {
    low = INT_LOWEST;
    high = INT_HIGHEST;
  }
  static constexpr int query_pairing = PAIR_NONE;
  static constexpr int query_dim = 0;
  template <class P> ATTNRT_HD static void query([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int key_pairing = PAIR_NONE;
  static constexpr int key_dim = 0;
  template <class P> ATTNRT_HD static void key([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int value_pairing = PAIR_NONE;
  static constexpr int value_dim = 0;
  template <class P> ATTNRT_HD static void value([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  template <class P> ATTNRT_HD static float output([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float o) {
    return o;
  }
  template <class P> ATTNRT_HD static float sink([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    return 0.0f;
  }
};
}  // namespace attnrt
#include "attnrt_variant.h"
namespace attnrt {
struct Causal {
  static constexpr bool use_softmax = true;
  static constexpr bool has_logits = false;
  static constexpr bool has_mask = true;
  static constexpr bool has_query = false;
  static constexpr bool has_key = false;
  static constexpr bool has_value = false;
  static constexpr bool has_output = false;
  static constexpr bool has_sink = false;
  static constexpr bool mask_is_interval = true;
  static constexpr bool reads_index_mask = false;
  static constexpr int num_params = 0;
  struct Row { int high; };
  template <class P> ATTNRT_HD static Row row([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    return Row{c.qo_pos};
  }
  static constexpr bool scales_score = false;
  static constexpr bool keeps_units = false;
  static constexpr bool row_units = false;
  static constexpr bool is_scaled = false;
  ATTNRT_HD static void scale([[maybe_unused]] Row& r, [[maybe_unused]] float by) {
  }
  ATTNRT_HD static float unit([[maybe_unused]] const Row& r) {
    return 1.0f;
  }
  static constexpr bool quick_logits = false;
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    return s;
  }
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, const Ctx& c, float s) {
    return logits(p, row(p, c), c, s);
  }
  static constexpr bool is_capped = false;
  ATTNRT_HD static float factor([[maybe_unused]] const Row& r) { return 1.0f; }
  static constexpr bool linear_bias = false;
  static constexpr bool logits_need_keys = false;
  ATTNRT_HD static float slope([[maybe_unused]] const Row& r) { return 0.0f; }
  ATTNRT_HD static int origin([[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return 0;
  }
  static constexpr bool is_logistic = false;
  ATTNRT_HD static void turn([[maybe_unused]] Row& r) {
  }
  template <class P> ATTNRT_HD static float power([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    return 0.0f;
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return (c.kv_pos <= r.high);
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, const Ctx& c) {
    return mask(p, row(p, c), c);
  }
  ATTNRT_HD static void visible([[maybe_unused]] const Row& r, int& low, int& high) {
    low = INT_LOWEST;
    high = r.high;
  }
  static constexpr int query_pairing = PAIR_NONE;
  static constexpr int query_dim = 0;
  template <class P> ATTNRT_HD static void query([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int key_pairing = PAIR_NONE;
  static constexpr int key_dim = 0;
  template <class P> ATTNRT_HD static void key([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int value_pairing = PAIR_NONE;
  static constexpr int value_dim = 0;
  template <class P> ATTNRT_HD static void value([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  template <class P> ATTNRT_HD static float output([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float o) {
    return o;
  }
  template <class P> ATTNRT_HD static float sink([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    return 0.0f;
  }
};
}  // namespace attnrt
#include "attnrt_variant.h"
namespace attnrt {
struct CausalWindow {
  static constexpr bool use_softmax = true;
  static constexpr bool has_logits = false;
  static constexpr bool has_mask = true;
  static constexpr bool has_query = false;
  static constexpr bool has_key = false;
  static constexpr bool has_value = false;
  static constexpr bool has_output = false;
  static constexpr bool has_sink = false;
  static constexpr bool mask_is_interval = true;
  static constexpr bool reads_index_mask = false;
  static constexpr int num_params = 2;
  static constexpr int slot_window_left = 0;
  static constexpr int slot_window_right = 1;
  struct Row { int low; int high; };
  template <class P> ATTNRT_HD static Row row([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    const int t0 = scalar<int>(p[slot_window_left], c.qo_head);
    const bool t1 = t0 < 0;
    const int t2 = sat_sub(c.qo_pos, t0);
    const int t3 = select(t1, INT_LOWEST, t2);
    const int t4 = scalar<int>(p[slot_window_right], c.qo_head);
    const bool t5 = t4 < 0;
    const int t6 = sat_add(c.qo_pos, t4);
    const int t7 = select(t5, 2147483647, t6);
    const int t8 = min_of(c.qo_pos, t7);
    return Row{t3, t8};
  }
  static constexpr bool scales_score = false;
  static constexpr bool keeps_units = false;
  static constexpr bool row_units = false;
  static constexpr bool is_scaled = false;
  ATTNRT_HD static void scale([[maybe_unused]] Row& r, [[maybe_unused]] float by) {
  }
  ATTNRT_HD static float unit([[maybe_unused]] const Row& r) {
    return 1.0f;
  }
  static constexpr bool quick_logits = false;
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    return s;
  }
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, const Ctx& c, float s) {
    return logits(p, row(p, c), c, s);
  }
  static constexpr bool is_capped = false;
  ATTNRT_HD static float factor([[maybe_unused]] const Row& r) { return 1.0f; }
  static constexpr bool linear_bias = false;
  static constexpr bool logits_need_keys = false;
  ATTNRT_HD static float slope([[maybe_unused]] const Row& r) { return 0.0f; }
  ATTNRT_HD static int origin([[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return 0;
  }
  static constexpr bool is_logistic = false;
  ATTNRT_HD static void turn([[maybe_unused]] Row& r) {
  }
  template <class P> ATTNRT_HD static float power([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    return 0.0f;
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return (c.kv_pos >= r.low) & (c.kv_pos <= r.high);
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, const Ctx& c) {
    return mask(p, row(p, c), c);
  }
  ATTNRT_HD static void visible([[maybe_unused]] const Row& r, int& low, int& high) {
    low = r.low;
    high = r.high;
  }
  static constexpr int query_pairing = PAIR_NONE;
  static constexpr int query_dim = 0;
  template <class P> ATTNRT_HD static void query([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int key_pairing = PAIR_NONE;
  static constexpr int key_dim = 0;
  template <class P> ATTNRT_HD static void key([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int value_pairing = PAIR_NONE;
  static constexpr int value_dim = 0;
  template <class P> ATTNRT_HD static void value([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  template <class P> ATTNRT_HD static float output([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float o) {
    return o;
  }
  template <class P> ATTNRT_HD static float sink([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    return 0.0f;
  }
};
}  // namespace attnrt
#include "attnrt_variant.h"
namespace attnrt {
struct CausalSoftcap {
  static constexpr bool use_softmax = true;
  static constexpr bool has_logits = true;
  static constexpr bool has_mask = true;
  static constexpr bool has_query = false;
  static constexpr bool has_key = false;
  static constexpr bool has_value = false;
  static constexpr bool has_output = false;
  static constexpr bool has_sink = false;
  static constexpr bool mask_is_interval = true;
  static constexpr bool reads_index_mask = false;
  static constexpr int num_params = 1;
  static constexpr int slot_softcap = 0;
  struct Row { float v0; float v1; int high; };
  template <class P> ATTNRT_HD static Row row([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    const float t0 = scalar<float>(p[slot_softcap], c.qo_head);
    const float t1 = 1.0f / t0;
    return Row{t1, t0, c.qo_pos};
  }
  static constexpr bool scales_score = true;
  static constexpr bool keeps_units = false;
  static constexpr bool row_units = true;
  static constexpr bool is_scaled = false;
  ATTNRT_HD static void scale([[maybe_unused]] Row& r, [[maybe_unused]] float by) {
    r.v0 = r.v0 * by;
  }
  ATTNRT_HD static float unit([[maybe_unused]] const Row& r) {
    return r.v1;
  }
  static constexpr bool quick_logits = true;
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    const float t0 = s * r.v0;
    const float t1 = f_tanh(t0, p);
    const float t2 = r.v1 * t1;
    return t2;
  }
  template <class P> ATTNRT_HD static float logits([[maybe_unused]] const P& p, const Ctx& c, float s) {
    return logits(p, row(p, c), c, s);
  }
  template <class P> ATTNRT_HD static float reduced([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    const float t0 = s * r.v0;
    const float t1 = f_tanh(t0, p);
    return t1;
  }
  static constexpr bool is_capped = true;
  ATTNRT_HD static float factor([[maybe_unused]] const Row& r) { return r.v0; }
  static constexpr bool linear_bias = false;
  static constexpr bool logits_need_keys = false;
  ATTNRT_HD static float slope([[maybe_unused]] const Row& r) { return 0.0f; }
  ATTNRT_HD static int origin([[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return 0;
  }
  static constexpr bool is_logistic = false;
  ATTNRT_HD static void turn([[maybe_unused]] Row& r) {
  }
  template <class P> ATTNRT_HD static float power([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c, [[maybe_unused]] float s) {
    return 0.0f;
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, [[maybe_unused]] const Row& r, [[maybe_unused]] const Ctx& c) {
    return (c.kv_pos <= r.high);
  }
  template <class P> ATTNRT_HD static bool mask([[maybe_unused]] const P& p, const Ctx& c) {
    return mask(p, row(p, c), c);
  }
  ATTNRT_HD static void visible([[maybe_unused]] const Row& r, int& low, int& high) {
    low = INT_LOWEST;
    high = r.high;
  }
  static constexpr int query_pairing = PAIR_NONE;
  static constexpr int query_dim = 0;
  template <class P> ATTNRT_HD static void query([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int key_pairing = PAIR_NONE;
  static constexpr int key_dim = 0;
  template <class P> ATTNRT_HD static void key([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  static constexpr int value_pairing = PAIR_NONE;
  static constexpr int value_dim = 0;
  template <class P> ATTNRT_HD static void value([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float& x0, [[maybe_unused]] float& x1) {
  }
  template <class P> ATTNRT_HD static float output([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c, [[maybe_unused]] int d, [[maybe_unused]] float o) {
    return o;
  }
  template <class P> ATTNRT_HD static float sink([[maybe_unused]] const P& p, [[maybe_unused]] const Ctx& c) {
    return 0.0f;
  }
};
}  // namespace attnrt
