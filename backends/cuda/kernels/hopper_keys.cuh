// SPDX-License-Identifier: Apache-2.0
// The keys of a worker's tiles, as a loader of the Hopper prefill family walks them: which block and slot each has, and
// what consumers are told of them.
#pragma once
#include "hopper_layout.cuh"

namespace attnrt {

template <class Config, class Variant, Loading kHow>
class HopperKeys {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;

 public:
  __device__ __forceinline__ HopperKeys(const RunParams& p, const ParamRef* params, const KvMaps& maps, char* smem)
      : p_(p),
        params_(params),
        maps_(maps),
        base_(ptx::smem_addr(smem)),
        meta_(*reinterpret_cast<M*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    bound_ = p.plan->bound_kv_lens != nullptr;
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  }

 protected:
  // A tile as offsets in the request: its first key, the keys that the item wants, the keys that exist in memory.
  struct Tile {
    int offset;
    int low, high;
    int live_low, live_high;
    int shift;  // from an offset to its position, kNoShift: blocks say where they lie, or some are holes
  };
  static constexpr int kNoShift = -0x7fffffff;
  // Whether anybody asks where keys stand: what rows see by offset alone runs on whatever the blocks' positions.
  static constexpr bool kPositions = Variant::has_mask || Variant::has_logits || Variant::has_key || Variant::has_value;

  // A lane looks up the first key of its box (boxes), or its own of 32 keys (gather).
  __device__ __forceinline__ int lookup_key() const { return kHow == Loading::boxes ? lane_ << maps_.box_log2 : lane_; }

  // Listed block of the key at an offset, or -1. The load is issued a tile ahead: its latency is that of L2 or worse.
  // `block_size` is a copy of the part's: what lies behind its pointer would be read again for every tile.
  template <int kKeys = L::kTile>
  __device__ __forceinline__ int fetch_block(const FastDiv& block_size, const KvList& list, const Tile& tile,
                                             int offset) const {
    const int key = offset + lookup_key();
    const int span = kHow == Loading::boxes ? 1 << maps_.box_log2 : 1;  // a box may begin before what is live in it
    if (key + span <= tile.live_low || key >= min(tile.live_high, offset + kKeys)) return -1;
    if (!list.indices) return 0;
    unsigned block, token;
    block_size.split(key - list.offset, block, token);
    return static_cast<int>(block) < list.entries ? list.indices[block] : -1;
  }

  // Slot and position of the key whose block that is; slot -1: no key.
  __device__ __forceinline__ long long slot_in(const FastDiv& block_size, const KvList& list, int offset, int id,
                                               int& pos) const {
    const int j = offset + lookup_key() - list.offset;
    pos = list.pos + j;
    if (id < 0) return -1;
    long long slot = list.base + j;
    if (list.indices) {
      unsigned block, token;
      block_size.split(j, block, token);
      slot = static_cast<long long>(id) * block_size.divisor + token;
      if (kPositions && list.block_pos) pos = list.block_pos[block] + static_cast<int>(token);
    }
    return slot < p_.k.num_slots ? slot : -1;
  }

  // Whether consumers need to be told of a tile's keys one by one.
  __device__ __forceinline__ static bool tells(const Tile& tile) { return L::kNeedsKeys || tile.shift == kNoShift; }

  // Writes 32 keys of the key table, one a lane (there if slot >= 0), and, where the pass does not say it, what they
  // have in common.
  __device__ __forceinline__ void tell(const Tile& tile, int stage, int part, long long slot, int pos) const {
    if (!tells(tile)) return;
    const int key = part * 32 + lane_, offset = tile.offset + key;
    const bool live = slot >= 0 && offset >= tile.low && offset < tile.high;
    meta_.pos[stage][key] = live ? pos : kDeadKey;
    if constexpr (L::kNeedsSlots) meta_.slot[stage][key] = live ? static_cast<int>(slot) : 0;
    if (tile.shift != kNoShift) return;
    if constexpr (L::kStarts) {  // whatever of it the item wants: rows' bits hang on it
      const unsigned exist = __ballot_sync(0xffffffffu, slot >= 0);
      const int first = exist ? __ffs(exist) - 1 : 0;
      if (lane_ == first) meta_.start[stage][part] = exist ? pos - first : kDeadKey;
    }
    const unsigned there = __ballot_sync(0xffffffffu, live);
    KeyRange range;
    range.low = __reduce_min_sync(0xffffffffu, live ? pos : 0x7fffffff);
    range.high = __reduce_max_sync(0xffffffffu, live ? pos : kDeadKey);
    range.base = 0;
    range.kind = there == 0xffffffffu ? kKeysLive : 0;
    if (there == 0) {
      range.kind = kKeysRun;
    } else {
      const int first = __ffs(there) - 1;
      const unsigned filled = there >> first;
      range.base = range.low - first;
      // One run of keys, each where the lowest position says that it is.
      if (__all_sync(0xffffffffu, !live || pos - lane_ == range.base) && (filled & (filled + 1)) == 0) {
        range.kind |= kKeysRun;
      }
    }
    if (lane_ == 0) meta_.range[stage][part] = range;
  }

  // Of the keys that are there those that the item wants, and whether their positions run on.
  __device__ __forceinline__ static void narrow(const WorkItem& item, const FastDiv& block_size, const KvList& list,
                                                bool solid, Tile& tile) {
    tile.low = max(item.kv_begin, tile.live_low);
    tile.high = min(item.kv_end, tile.live_high);
    tile.shift = (kPositions && list.block_pos) || !solid ? kNoShift : list.pos - list.offset;
    if (list.indices) {
      const long long listed = list.offset + static_cast<long long>(list.entries) * block_size.divisor;
      tile.high = static_cast<int>(min(static_cast<long long>(tile.high), listed));
    }
  }

  // Coordinates of a slot under one map.
  __device__ __forceinline__ static void locate(const FastDiv& div, long long slot, int& token, int& page) {
    unsigned p, t;
    div.split(static_cast<unsigned>(slot), p, t);
    token = slot < 0 ? 0 : static_cast<int>(t);
    page = slot < 0 ? -1 : static_cast<int>(p);
  }

  __device__ __forceinline__ static unsigned bar(const unsigned long long& b) { return ptx::smem_addr(&b); }

  // Barriers of the loader's arrivals: those of consumers, or of the stage that rewrites.
  __device__ __forceinline__ unsigned arrived_q(int buffer) const {
    return bar(L::kRewritesQ && L::kBuffersQ == 2 ? meta_.q_raw[buffer] : meta_.q_full[buffer]);
  }
  __device__ __forceinline__ unsigned arrived_half(int group) const {
    return bar(L::kRewritesQ ? meta_.q_raw[group] : meta_.half_full[group]);
  }
  __device__ __forceinline__ unsigned arrived_k(int stage) const {
    return bar(L::kRewritesK ? meta_.k_raw[stage] : meta_.k_full[stage]);
  }
  __device__ __forceinline__ unsigned arrived_v(int stage) const {
    return bar(L::kRewritesV ? meta_.v_raw[stage] : meta_.v_full[stage]);
  }

  const RunParams& p_;
  const ParamRef* params_;
  const KvMaps& maps_;
  const unsigned base_;
  M& meta_;
  int lane_, warp_;
  bool bound_;  // lengths of requests may be shorter than the plan's
};

}  // namespace attnrt
