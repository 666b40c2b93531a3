// SPDX-License-Identifier: Apache-2.0
// The stage between load and multiply: rewrites a tile of K or V in q's 16-bit type, with the key or value hook applied
// in float32. It exists only for caches stored in another type and for variants that map keys or values.
#pragma once
#include "rows.cuh"

namespace attnrt {

// Row `key` of a raw tile into a row of the multiply tile. kColumns real columns, zero up to kPadded.
template <Dtype From, Dtype To, int kColumns, int kPadded, int kPairing, int kPairDim, class Map>
__device__ __forceinline__ void convert_row(const char* raw, char* out, int lane, bool live, const Map& map) {
  typedef typename Bits<From>::type Source;
  typedef typename Bits<To>::type Target;
  const Source* src = reinterpret_cast<const Source*>(raw);
  Target* dst = reinterpret_cast<Target*>(out);
  if (!live) {
#pragma unroll 1
    for (int d = lane; d < kPadded; d += 32) dst[d] = Target(0);
    return;
  }
  constexpr int kOver = kPairDim == 0 ? kColumns : kPairDim;
  constexpr int kMapped = kPairing == PAIR_NONE ? 0 : kOver;
#pragma unroll 1
  for (int d = lane; d < pair_count(kPairing, kOver); d += 32) {
    const int i = pair_first(kPairing, d), j = pair_second(kPairing, kOver, d);
    float x0 = to_float<From>(src[i]), x1 = to_float<From>(src[j]);
    map(d, x0, x1);
    dst[i] = from_float<To>(x0);
    if (kPairing != PAIR_SINGLE) dst[j] = from_float<To>(x1);
  }
  if constexpr (kBytes<From> == 1 && kMapped == 0 && kColumns % 4 == 0) {
    // Plain fp8: four numbers per step.
#pragma unroll 1
    for (int d = 4 * lane; d < kColumns; d += 128) {
      const unsigned x = *reinterpret_cast<const unsigned*>(src + d);
      unsigned lo = fp8x2_to_half2<From>(static_cast<unsigned short>(x & 0xffffu));
      unsigned hi = fp8x2_to_half2<From>(static_cast<unsigned short>(x >> 16));
      if constexpr (To == Dtype::bf16) {
        lo = ptx::pack2<ptx::Half16::bf16>(half_to_float(lo & 0xffffu), half_to_float(lo >> 16));
        hi = ptx::pack2<ptx::Half16::bf16>(half_to_float(hi & 0xffffu), half_to_float(hi >> 16));
      }
      *reinterpret_cast<uint2*>(dst + d) = make_uint2(lo, hi);
    }
  } else {
#pragma unroll 1
    for (int d = kMapped + lane; d < kColumns; d += 32) dst[d] = from_float<To>(to_float<From>(src[d]));
  }
#pragma unroll 1
  for (int d = kColumns + lane; d < kPadded; d += 32) dst[d] = Target(0);
}

// Both tiles of a stage. Every warp rewrites the rows that it loaded, so only the reader needs a barrier afterwards.
template <class Config, class Variant>
__device__ __forceinline__ void convert_tile(const RunParams& p, const ParamRef* params, int kv_head, int request,
                                             char* smem, int stage, const Meta<Layout<Config, Variant>>& meta) {
  using L = Layout<Config, Variant>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const char* raw = smem + L::kOffsetStages + stage * L::kStageBytes;
#pragma unroll 1
  for (int i = 0; i < L::kWarpKeys; ++i) {
    const int key = warp * L::kWarpKeys + i;
    const bool live = meta.pos[stage][key] != kDeadKey;
    Ctx c;
    c.request = request;
    c.qo_pos = c.qo_row = 0;
    c.kv_pos = meta.pos[stage][key];
    c.kv_slot = meta.slot[stage][key];
    c.qo_head = kv_head * Config::group;
    c.kv_head = kv_head;
    c.qo_len = p.plan->qo_lens[request];
    c.kv_len = kv_len_of(p, request);
    if constexpr (L::kConvertK) {
      convert_row<Config::kv_type, Config::q_type, Config::head_dim, L::kDim,
                  Variant::has_key ? Variant::key_pairing : PAIR_NONE, Variant::key_dim>(
          raw + key * L::kRawPitchK, smem + L::kOffsetK + key * L::kPitchK, lane, live,
          [&](int d, float& x0, float& x1) { Variant::key(params, c, d, x0, x1); });
    }
    if constexpr (L::kConvertV && !L::kVFromK) {
      convert_row<Config::kv_type, Config::q_type, Config::head_dim_vo, L::kDimVo,
                  Variant::has_value ? Variant::value_pairing : PAIR_NONE, Variant::value_dim>(
          raw + L::kRawBytesK + key * L::kRawPitchV, smem + L::kOffsetV + key * L::kPitchV, lane, live,
          [&](int d, float& x0, float& x1) { Variant::value(params, c, d, x0, x1); });
    }
  }
}

}  // namespace attnrt
