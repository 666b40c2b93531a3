// SPDX-License-Identifier: Apache-2.0
// Variants as the printer would write them, and the kernel's constants: shared by prefill.cu and prefill_emulate.cpp.
#pragma once
namespace attnrt {

struct FullVariant {
  static constexpr bool use_softmax = true, has_logits = false, has_mask = false, has_query = false, has_key = false,
                        has_value = false, has_output = false, has_sink = false, mask_is_interval = true,
                        reads_index_mask = false, quick_logits = false, scales_score = false, keeps_units = false,
                        row_units = false, is_capped = false, linear_bias = false, is_logistic = false, logits_need_keys = false;
  static constexpr int query_pairing = PAIR_NONE, key_pairing = PAIR_NONE, value_pairing = PAIR_NONE, query_dim = 0,
                       key_dim = 0, value_dim = 0;
  struct Row {
    int qo_pos;
  };
  template <class P>
  ATTNRT_HD static Row row(const P&, const Ctx& c) {
    return {c.qo_pos};
  }
  template <class P>
  ATTNRT_HD static float logits(const P&, const Row&, const Ctx&, float s) {
    return s;
  }
  template <class P>
  ATTNRT_HD static bool mask(const P&, const Row&, const Ctx&) {
    return true;
  }
  ATTNRT_HD static void visible(const Row&, int&, int&) {}
  template <class P>
  ATTNRT_HD static float output(const P&, const Ctx&, int, float o) {
    return o;
  }
  template <class P>
  ATTNRT_HD static float sink(const P&, const Ctx&) {
    return 0.0f;
  }
};
struct CausalVariant : FullVariant {
  static constexpr bool has_mask = true;
  ATTNRT_HD static void visible(const Row& r, int&, int& high) { high = r.qo_pos; }
};
struct SoftcapVariant : CausalVariant {
  static constexpr bool has_logits = true, quick_logits = true;
  template <class P>
  ATTNRT_HD static float logits(const P& p, const Row&, const Ctx&, float s) {
    return 30.0f * f_tanh(s * (1.0f / 30.0f), p);
  }
};
constexpr int kWindow = 1023;  // left: 1024 keys with the query's own
struct WindowVariant : CausalVariant {
  ATTNRT_HD static void visible(const Row& r, int& low, int& high) {
    low = r.qo_pos - kWindow;
    high = r.qo_pos;
  }
};
struct AlibiVariant : CausalVariant {
  static constexpr bool has_logits = true, quick_logits = true, logits_need_keys = true;
  template <class P>
  ATTNRT_HD static float logits(const P& p, const Row&, const Ctx& c, float s) {
    return mul_add(1.0f / 512.0f, distance(c.kv_pos, c.qo_pos, p), s);
  }
};

// Softmax-free: weights are sigmoids, with the usual bias of -ln(keys) for a fixed number of keys.
struct SigmoidVariant : CausalVariant {
  static constexpr bool use_softmax = false, has_logits = true;
  template <class P>
  ATTNRT_HD static float logits(const P&, const Row&, const Ctx&, float s) {
    return f_logistic(s - 7.6246f);
  }
};

// kFolds: items may hold several leaves.
template <int kGroup, int kHeadDim, int kWarpgroups, bool kFolds = false>
struct TileConfig {
  static constexpr Dtype q_type = Dtype::bf16, kv_type = Dtype::bf16, out_type = Dtype::bf16;
  static constexpr int group = kGroup, head_dim = kHeadDim, head_dim_vo = kHeadDim, kv_tile = 128,
                       warpgroups = kWarpgroups;
  static constexpr bool shared_kv = false;
  static constexpr bool folds = kFolds, turns = false;
};

}  // namespace attnrt
