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
  using Base::Base;
  using Base::lane_, Base::meta_, Base::params_, Base::pass_, Base::row_of;
  using Base::runs_, Base::span, Base::whole_begin_, Base::whole_end_;
  using typename Base::Row;
  static constexpr int kS =
      L::kTile / 2;  // registers of a score tile: (row g: 4j, 4j + 1), (row g + 8: 4j + 2, 4j + 3)

  // How the warp's rows see a tile: all of it, or bit by bit.
  static constexpr int kParts = L::kTile / 32;
  // Whether a run of offsets is all that a row sees where positions run on.
  static constexpr bool kByRuns = Variant::mask_is_interval && !Variant::reads_index_mask;
  struct View {
    bool all;
    unsigned bits[kParts][2];  // what each row sees of 32 keys, from this thread's first key on; look_at_run: its run
    unsigned partial;          // bit p: some row of the warp does not see all of part p
  };

  __device__ __forceinline__ void load_rows(Row (&rows)[2]) {
    Base::load_rows(rows);
    ahead_.offset = -1;
  }

  // What rows see of tile t, before its scores are known.
  __device__ __forceinline__ void look(View& view, const Row (&rows)[2], int t, int offset) {
    view.all = Variant::mask_is_interval && offset >= whole_begin_ && offset + L::kTile <= whole_end_;
    if (view.all) return;
    if (!runs_) {
      look_at_keys(view, rows, t, offset);
    } else if constexpr (kByRuns) {
      look_at_run(view, rows, offset);
    } else if constexpr (Variant::reads_index_mask) {
      look_at_words(view, rows, offset);
    }
  }

  // ------------------------------------------------------------------ the index's mask where positions run on
  // Each lane of a quad reads what the mask says to its two rows of one part of the tile, as words at multiples of four
  // bytes, a tile ahead, because they come from memory; the quad exchanges what follows from them.
  __device__ __forceinline__ void look_at_words(View& view, const Row (&rows)[2], int offset) {
    unsigned own[2];
    if (ahead_.offset != offset) fetch_words(rows, offset);
    look_at_own(own, rows, offset);
    const unsigned hidden = __ballot_sync(0xffffffffu, (own[0] & own[1]) != 0xffffffffu);
    constexpr unsigned kEvery = kParts == 4 ? 0x11111111u : 0x55555555u;
    view.partial = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      view.partial |= (hidden & kEvery << part ? 1u : 0u) << part;
#pragma unroll
      for (int half = 0; half < 2; ++half) view.bits[part][half] = bits_of(own, part, half);
    }
  }

  // What this thread's rows see of the part that is this lane's. The tile's words are there or on their way, and those
  // of the next are asked for.
  __device__ __forceinline__ void look_at_own(unsigned (&own)[2], const Row (&rows)[2], int offset) {
    const int at = offset + lane_ % kParts * 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      own[half] = low_bits(rows[half].last - at) & ~low_bits(rows[half].first - at);
      const long long bit = meta_.mask_bit[L::table(pass_)][row_of(half)];
      const unsigned silent = low_bits(meta_.mask_from[L::table(pass_)][row_of(half)] - at);
      const unsigned said =
          __funnelshift_r(ahead_.low[half], ahead_.high[half], static_cast<unsigned>(bit) + static_cast<unsigned>(at));
      if (bit != kNoMask) own[half] &= said | silent;
    }
    fetch_words(rows, offset + L::kTile);
  }

  // Tiles in which the mask says all: it speaks of every key to every row of the warp, and nothing else hides one. They
  // begin at offsets from `begin` to `end`. `bit`: of offset 0 for this lane's part, as an address of bits; negative
  // for a row that is not there.
  struct Spoken {
    int begin, end;
    long long bit[2];
  };
  __device__ __forceinline__ void find_spoken(Spoken& x, const Row (&rows)[2]) const {
    x.begin = 0;
    x.end = 0x7fffffff;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row_of(half);
      const long long bit = meta_.mask_bit[L::table(pass_)][r];
      const bool there = meta_.row[L::table(pass_)][r].x >= 0;
      const int from = max(rows[half].first, meta_.mask_from[L::table(pass_)][r]);
      const int end = bit == kNoMask ? -1 : rows[half].last - L::kTile - 1;  // both words hold a bit that is seen
      x.bit[half] = there && bit != kNoMask ? bit + lane_ % kParts * 32 : -1;
      x.begin = max(x.begin, there ? from : 0);
      x.end = min(x.end, there ? end : 0x7fffffff);
    }
    x.begin = __reduce_max_sync(0xffffffffu, x.begin);
    x.end = __reduce_min_sync(0xffffffffu, x.end);
  }
  // As look_at_own.
  __device__ __forceinline__ void look_at_spoken(unsigned (&own)[2], const Spoken& x, const Row (&rows)[2],
                                                 int offset) {
    if (ahead_.offset != offset) fetch_words(rows, offset);
    if (offset < x.begin || offset > x.end) return look_at_own(own, rows, offset);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned shift = static_cast<unsigned>(x.bit[half]) + static_cast<unsigned>(offset);
      const unsigned said = __funnelshift_r(ahead_.low[half], ahead_.high[half], shift);
      own[half] = x.bit[half] < 0 ? 0xffffffffu : said;
    }
    offset += L::kTile;
    if (offset > x.end) return fetch_words(rows, offset);
    ahead_.offset = offset;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned* word = reinterpret_cast<const unsigned*>((x.bit[half] + offset >> 5) * 4);
      ahead_.low[half] = ptx::load_if(x.bit[half] >= 0, word);
      ahead_.high[half] = ptx::load_if(x.bit[half] >= 0, word + 1);
    }
  }

  __device__ __forceinline__ unsigned bits_of(const unsigned (&own)[2], int part, int half) const {
    return __shfl_sync(0xffffffffu, own[half], part, 4) >> lane_ % 4 * 2;
  }

  // Hides scores by what lanes know of their parts. A tile is masked whole or not at all: no branch but one.
  __device__ __forceinline__ void mask_own(float (&s)[kS], const unsigned (&own)[2]) const {
    if (__all_sync(0xffffffffu, (own[0] & own[1]) == 0xffffffffu)) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int half = 0; half < 2; ++half) mask_part(s, bits_of(own, part, half), part, half);
  }

  // Only words that hold a bit of a key that the row sees, and of a row's last ones only bytes that do.
  __device__ __forceinline__ void fetch_words(const Row (&rows)[2], int offset) {
    ahead_.offset = offset;
    const int at = offset + lane_ % kParts * 32;
    const unsigned* word[2];
    int bits[2];  // from the word's first on to the last of a key that the row sees
    bool low[2], high[2], ragged = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long bit = meta_.mask_bit[L::table(pass_)][row_of(half)];
      const int from = max(max(rows[half].first, meta_.mask_from[L::table(pass_)][row_of(half)]) - at, 0);
      const int left = bit == kNoMask ? 0 : rows[half].last - at;
      const int skip = static_cast<int>(bit + at & 31);
      word[half] = reinterpret_cast<const unsigned*>((bit + at >> 5) * 4);
      bits[half] = skip + left;
      low[half] = from < min(left, 32 - skip);
      high[half] = from < min(left, 32) && skip > 0 && bits[half] > 32;
      ragged = ragged || (low[half] && bits[half] <= 24) || (high[half] && bits[half] <= 56);
    }
    ragged = __any_sync(0xffffffffu, ragged);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!ragged) {
        ahead_.low[half] = ptx::load_if(low[half], word[half]);
        ahead_.high[half] = ptx::load_if(high[half], word[half] + 1);
      } else {
        ahead_.low[half] = load_bytes(word[half], low[half] ? bits[half] : 0);
        ahead_.high[half] = load_bytes(word[half] + 1, high[half] ? bits[half] - 32 : 0);
      }
    }
  }

  // The bytes of a word that hold some of its first so many bits.
  __device__ __forceinline__ static unsigned load_bytes(const unsigned* word, int bits) {
    unsigned x = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      x |= ptx::load_byte_if(i < bits, reinterpret_cast<const unsigned char*>(word) + i / 8) << i;
    }
    return x;
  }

  // Of the tile at `offset`: lane i of a quad those of part i.
  struct Words {
    int offset;
    unsigned low[2], high[2];
  };
  Words ahead_ = {-1, {0, 0}, {0, 0}};

  // ------------------------------------------------------------------ masks by position

  // Where positions run on, a row sees one run of offsets: two numbers say it all, counted from this thread's first
  // key. Bits of `partial`, by half of the tile: 0 and 1 if the run of some row of the warp ends before the half does,
  // 2 and 3 if one begins after it.
  __device__ __forceinline__ void look_at_run(View& view, const Row (&rows)[2], int offset) const {
    const int last = min(rows[0].last, rows[1].last) - offset, first = max(rows[0].first, rows[1].first) - offset;
    view.partial = 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      view.partial |= (__any_sync(0xffffffffu, last < (part + 1) * (L::kTile / 2)) ? 1u : 0u) << part;
      view.partial |= (__any_sync(0xffffffffu, first > part * (L::kTile / 2)) ? 4u : 0u) << part;
    }
  }
  __device__ __forceinline__ void mask_run(float (&s)[kS], const View& view, const Row (&rows)[2], int offset) const {
    int bound[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bound[0][half] = rows[half].last - offset - lane_ % 4 * 2;
      bound[1][half] = rows[half].first - offset - lane_ % 4 * 2;
    }

#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int end = 0; end < 2; ++end) {
        if (!(view.partial >> (part + 2 * end) & 1)) continue;
#pragma unroll
        for (int i = part * (kS / 2); i < (part + 1) * (kS / 2); ++i) {
          const int key = i / 4 * 8 + i % 2, at = bound[end][i / 2 % 2];
          const bool seen = end == 0 ? key < at : key >= at;
          s[i] = seen ? s[i] : hidden_score();
        }
      }
    }
  }

  // From bits of 32 keys to those from this thread's first key on.
  __device__ __forceinline__ void finish_part(View& view, int part) const {
    const bool partial = (view.bits[part][0] & view.bits[part][1]) != 0xffffffffu;
    view.partial |= (__any_sync(0xffffffffu, partial) ? 1u : 0u) << part;
#pragma unroll
    for (int half = 0; half < 2; ++half) view.bits[part][half] >>= lane_ % 4 * 2;
  }

  // Key by key only where neither positions run on nor those of 32 keys, or where a hook decides, in loops that are not
  // unrolled: their loads would take the registers of the products (ptxas would serialise, C7511).
  __device__ __forceinline__ void look_at_keys(View& view, const Row (&rows)[2], int t, int offset) const {
    Wanted wanted[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) wanted[half] = load_wanted(half);
    bool runs = false;
    if constexpr (Variant::mask_is_interval) {
      const int4 all = span();
      const KeyRange range = meta_.range[t % L::kStages][lane_ % kParts];
      const bool yes = (range.kind & kKeysLive) && range.low >= all.x && range.high <= all.y;
      view.all = __all_sync(0xffffffffu, yes) && offset + L::kTile <= min(all.z, all.w);
      if (view.all) return;
      runs = __all_sync(0xffffffffu, range.kind & kKeysRun);
    }
    view.partial = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned& bits = view.bits[part][half];
        const int at = offset + part * 32;
        bits = runs ? run_bits(wanted[half], t, offset, part) : key_bits(rows[half], wanted[half], t, offset, part);
        if constexpr (Variant::reads_index_mask) bits = masked_bits(wanted[half], at, bits);
      }
      finish_part(view, part);
    }
  }

  // What the tables say of a thread's row, where offsets do not say it all.
  struct Wanted {
    int low, high, limit;
    int mask_from;
    long long mask_bit;
  };
  __device__ __forceinline__ Wanted load_wanted(int half) const {
    const int r = row_of(half);
    Wanted x;
    x.low = meta_.row[L::table(pass_)][r].z;
    x.high = meta_.row[L::table(pass_)][r].w;
    x.limit = meta_.row_request[L::table(pass_)][r].y;
    x.mask_bit = kNoMask;
    x.mask_from = 0;
    if constexpr (Variant::reads_index_mask) {
      x.mask_bit = meta_.mask_bit[L::table(pass_)][r];
      x.mask_from = meta_.mask_from[L::table(pass_)][r];
    }
    return x;
  }

  // The lowest n bits, none for n <= 0, all for n >= 32.
  __device__ __forceinline__ static unsigned low_bits(int n) {
    return __funnelshift_rc(0xffffffffu, 0u, max(32 - n, 0));
  }

  // What a row sees of 32 keys that run on among others that do not, the index's mask aside.
  __device__ __forceinline__ unsigned run_bits(const Wanted& row, int t, int offset, int part) const {
    const KeyRange range = meta_.range[t % L::kStages][part];
    // The first and the last key that the row sees, by place; the clamps keep differences from overflowing.
    const int low = min(max(row.low, range.low), max(range.high, range.base - 1) + 1) - range.base;
    const int high =
        min(max(min(row.high, range.high), range.base - 1) - range.base, max(row.limit - offset - part * 32, 0) - 1);
    return (high < 0 ? 0u : 0xffffffffu >> (31 - min(high, 31))) & (low > 31 ? 0u : 0xffffffffu << max(low, 0));
  }

  // The same for any keys: this thread's eight of them, the others 0.
  __device__ __forceinline__ unsigned key_bits(const Row& row, const Wanted& wanted, int t, int offset,
                                               int part) const {
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int place = i / 2 * 8 + lane_ % 4 * 2 + i % 2, key = part * 32 + place;
      Ctx c = row.ctx;
      c.kv_pos = meta_.pos[t % L::kStages][key];
      if constexpr (L::kNeedsSlots) c.kv_slot = meta_.slot[t % L::kStages][key];
      bool yes = c.kv_pos >= wanted.low && c.kv_pos <= wanted.high && offset + key < wanted.limit;
      if constexpr (!Variant::mask_is_interval) yes = yes && Variant::mask(params_, row.hook, c);
      bits |= (yes ? 1u : 0u) << place;
    }
    return bits;
  }

  // Bits of 32 keys from offset `start` on, and the index's mask. Only bytes of keys that are seen are read.
  __device__ __forceinline__ unsigned masked_bits(const Wanted& row, int start, unsigned bits) const {
    const unsigned asked = row.mask_bit == kNoMask ? 0u : bits & ~low_bits(row.mask_from - start);
    const long long first = row.mask_bit + start;
    const long long from = (first + __ffs(asked) - 1) >> 3, last = (first + 31 - __clz(asked)) >> 3;
    unsigned value[5], found = 0;  // 32 bits lie in five bytes at the most; all are asked for before one is used
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      value[i] = ptx::load_byte_if(asked && from + i <= last, reinterpret_cast<const unsigned char*>(from + i));
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int place = static_cast<int>((from + i) * 8 - first);
      found |= place >= 0 ? value[i] << min(place, 31) : value[i] >> -place;
    }
    return bits & (found | ~asked);
  }

  // Two instructions per score, none where all is seen.
  __device__ __forceinline__ void mask_bits(float (&s)[kS], const View& view, const Row (&rows)[2], int offset) const {
    if constexpr (kByRuns) {
      if (runs_) return mask_run(s, view, rows, offset);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!(view.partial >> part & 1)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) mask_part(s, view.bits[part][half], part, half);
    }
  }

  // `bits`: from this thread's first key of the part on.
  __device__ __forceinline__ void mask_part(float (&s)[kS], unsigned bits, int part, int half) const {
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[16 * part + 4 * n + 2 * half + e];
        x = bits >> (n * 8 + e) & 1 ? x : hidden_score();
      }
  }

  __device__ __forceinline__ static float hidden_score() { return Variant::use_softmax ? neg_inf() : 0.0f; }
};

}  // namespace attnrt
