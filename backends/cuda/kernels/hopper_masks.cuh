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
    unsigned bits[2];  // of this thread's keys by row: bit 2 n + e is key 8 n + 2 (lane % 4) + e of the tile
  };

  __device__ __forceinline__ void load_rows(Row (&rows)[2]) {
    Base::load_rows(rows);
    ahead_.offset = -1;
  }

  // What rows see of tile t, before its scores are known.
  __device__ __forceinline__ void look(View& view, const Row (&rows)[2], int t, int offset) {
    if constexpr (L::kLean) view.bits[0] = view.bits[1] = 0;  // else the last tile's would be kept
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
    deal(view.bits, own);
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

  // This thread's keys from what lanes of the quad know of their parts.
  __device__ __forceinline__ void deal(unsigned (&bits)[2], const unsigned (&own)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bits[half] = 0;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        bits[half] |= mine(__shfl_sync(0xffffffffu, own[half], part, 4)) << part * 8;
      }
    }
  }

  // Of bits of 32 keys those of this thread's eight: pairs at every eighth bit, brought together by a product.
  __device__ __forceinline__ unsigned mine(unsigned bits) const {
    return (bits >> lane_ % 4 * 2 & 0x03030303u) * 0x01041040u >> 24;
  }

  // Hides scores by what lanes know of their parts. A tile is masked whole or not at all: no branch but one.
  __device__ __forceinline__ void mask_own(float (&s)[kS], const unsigned (&own)[2]) const {
    if (__all_sync(0xffffffffu, (own[0] & own[1]) == 0xffffffffu)) return;
    unsigned bits[2];
    deal(bits, own);
    mask_bits(s, bits);
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

  // Where positions run on, a row sees one run of offsets.
  __device__ __forceinline__ void look_at_run(View& view, const Row (&rows)[2], int offset) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int2 seen = make_int2(rows[half].first, rows[half].last);
      if constexpr (L::kLean) seen = this->seen_by(row_of(half));
      view.bits[half] = low_bits(keys_before(seen.y - offset)) & ~low_bits(keys_before(seen.x - offset));
    }
  }
  // How many of the first n keys of a tile are this thread's.
  __device__ __forceinline__ int keys_before(int n) const {
    const int from = max(n - lane_ % 4 * 2, 0);
    return from / 8 * 2 + min(from % 8, 2);
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
    view.bits[0] = view.bits[1] = 0;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      unsigned bits[2];
      if (!runs) key_bits(bits, rows, wanted, t, offset, part);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (runs) bits[half] = run_bits(wanted[half], t, offset, part);
        if constexpr (Variant::reads_index_mask) bits[half] = masked_bits(wanted[half], offset + part * 32, bits[half]);
        view.bits[half] |= mine(bits[half]) << part * 8;
      }
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

  // The same of both rows for any keys: this thread's eight of them, the others 0.
  __device__ __forceinline__ void key_bits(unsigned (&bits)[2], const Row (&rows)[2], const Wanted (&wanted)[2], int t,
                                           int offset, int part) const {
    bits[0] = bits[1] = 0;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int place = i / 2 * 8 + lane_ % 4 * 2 + i % 2, key = part * 32 + place;
      const int pos = meta_.pos[t % L::kStages][key];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Wanted& row = wanted[half];
        bool yes = pos >= row.low && pos <= row.high && offset + key < row.limit;
        if constexpr (!Variant::mask_is_interval) {
          Ctx c = rows[half].ctx;
          c.kv_pos = pos;
          if constexpr (L::kNeedsSlots) c.kv_slot = meta_.slot[t % L::kStages][key];
          yes = yes && Variant::mask(params_, rows[half].hook, c);
        }
        bits[half] |= (yes ? 1u : 0u) << place;
      }
    }
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

  // One instruction per score, and one for eight. `bits`: View::bits.
  __device__ __forceinline__ void mask_bits(float (&s)[kS], const unsigned (&bits)[2]) const {
#pragma unroll
    for (int i = 0; i < kS; ++i) {
      const int key = i / 4 * 2 + i % 2;
      s[i] = bits[i / 2 % 2] >> key & 1 ? s[i] : hidden_score();
    }
  }

  __device__ __forceinline__ static float hidden_score() { return Variant::use_softmax ? neg_inf() : 0.0f; }
};

}  // namespace attnrt
