// SPDX-License-Identifier: Apache-2.0
// What rows of the Hopper prefill family see of a tile, and how scores of the rest are hidden. What needs no scores is
// found while they are computed, as bits of 32 keys.
#pragma once
#include "hopper_rows.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperMasks : public HopperRows<Config, Variant> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperRows<Config, Variant>;

 protected:
  using Base::any_mask_, Base::high_min_, Base::limit_min_, Base::low_max_, Base::whole_begin_, Base::whole_end_;
  using Base::Base, Base::lane_, Base::meta_, Base::p_, Base::params_, Base::record;
  using typename Base::Row;
  static constexpr int kS =
      L::kTile / 2;  // registers of a score tile: (row g: 4j, 4j + 1), (row g + 8: 4j + 2, 4j + 3)

  // How the warp's rows see a tile: all of it, or bit by bit.
  static constexpr int kParts = L::kTile / 32;
  struct View {
    bool all;
    unsigned bits[kParts][2];  // what each row sees of 32 keys, from this thread's first key on
    unsigned partial;          // bit p: some row of the warp does not see all of part p
  };

  // Whether every row of the warpgroup sees the whole tile.
  __device__ __forceinline__ bool whole(int t, int offset) const {
    if (!Variant::mask_is_interval) return false;
    const KeyRange range = meta_.range[t % L::kStages][lane_ % kParts];
    const bool yes = (range.kind & kKeysLive) && range.low >= low_max_ && range.high <= high_min_;
    return __all_sync(0xffffffffu, yes) && !any_mask_ && offset + L::kTile <= limit_min_;
  }

  // What rows see of tile t, before its scores are known. Key by key only where positions do not run on or a hook
  // decides, in loops that are not unrolled: their loads would take the registers of the products (ptxas would
  // serialise, C7511).
  __device__ __forceinline__ void look(View& view, const Row (&rows)[2], int t, int offset) const {
    view.all = false;
    bool runs = false;
    if constexpr (Variant::mask_is_interval) {
      view.all = (offset >= whole_begin_ && offset + L::kTile <= whole_end_) || whole(t, offset);
      if (view.all) return;
      runs = __all_sync(0xffffffffu, meta_.range[t % L::kStages][lane_ % kParts].kind & kKeysRun);
    }
    view.partial = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned& bits = view.bits[part][half];
        bits = runs ? run_bits(rows[half], t, offset, part) : key_bits(rows[half], t, offset, part);
        if constexpr (Variant::reads_index_mask) bits = masked_bits(rows[half], offset + part * 32, bits);
      }
      const bool partial = (view.bits[part][0] & view.bits[part][1]) != 0xffffffffu;
      view.partial |= (__any_sync(0xffffffffu, partial) ? 1u : 0u) << part;
#pragma unroll
      for (int half = 0; half < 2; ++half) view.bits[part][half] >>= lane_ % 4 * 2;
    }
  }

  // What a row sees of 32 keys that run on, the index's mask aside.
  __device__ __forceinline__ unsigned run_bits(const Row& row, int t, int offset, int part) const {
    const KeyRange range = meta_.range[t % L::kStages][part];
    // The first and the last key that the row sees, by place; the clamps keep differences from overflowing.
    const int low = min(max(row.low, range.low), max(range.high, range.base - 1) + 1) - range.base;
    const int high =
        min(max(min(row.high, range.high), range.base - 1) - range.base, max(row.limit - offset - part * 32, 0) - 1);
    return (high < 0 ? 0u : 0xffffffffu >> (31 - min(high, 31))) & (low > 31 ? 0u : 0xffffffffu << max(low, 0));
  }

  // The same for any keys: this thread's eight of them, the others 0.
  __device__ __forceinline__ unsigned key_bits(const Row& row, int t, int offset, int part) const {
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int place = i / 2 * 8 + lane_ % 4 * 2 + i % 2, key = part * 32 + place;
      Ctx c = row.ctx;
      c.kv_pos = meta_.pos[t % L::kStages][key];
      if constexpr (L::kNeedsSlots) c.kv_slot = meta_.slot[t % L::kStages][key];
      bool yes = c.kv_pos >= row.low && c.kv_pos <= row.high && offset + key < row.limit;
      if constexpr (!Variant::mask_is_interval) yes = yes && Variant::mask(params_, row.hook, c);
      bits |= (yes ? 1u : 0u) << place;
    }
    return bits;
  }

  // Bits of 32 keys from offset `start` on, and the index's mask. Only bytes of keys that are seen are read.
  __device__ __forceinline__ unsigned masked_bits(const Row& row, int start, unsigned bits) const {
    if (row.mask_bit == kNoMask) return bits;
    const int before = row.mask_from - start;  // keys that the mask does not speak of
    const unsigned asked = bits & (before <= 0 ? 0xffffffffu : before >= 32 ? 0u : 0xffffffffu << before);
    if (asked == 0) return bits;
    const unsigned char* mask = p_.plan->parts[record().item.part].mask;
    const long long first = row.mask_bit + start;
    const long long from = (first + __ffs(asked) - 1) >> 3, last = (first + 31 - __clz(asked)) >> 3;
    unsigned value[5], found = 0;  // 32 bits lie in five bytes at the most; all are asked for before one is used
#pragma unroll
    for (int i = 0; i < 5; ++i) value[i] = from + i <= last ? mask[from + i] : 0;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int place = static_cast<int>((from + i) * 8 - first);
      found |= place >= 0 ? value[i] << min(place, 31) : value[i] >> -place;
    }
    return bits & (found | ~asked);
  }

  // Two instructions per score, none where all is seen.
  __device__ __forceinline__ void mask_bits(float (&s)[kS], const View& view) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!(view.partial >> part & 1)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[16 * part + 4 * n + 2 * half + e];
            x = view.bits[part][half] >> (n * 8 + e) & 1 ? x : hidden_score();
          }
    }
  }

  __device__ __forceinline__ static float hidden_score() { return Variant::use_softmax ? neg_inf() : 0.0f; }
};

}  // namespace attnrt
