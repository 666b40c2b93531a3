// SPDX-License-Identifier: Apache-2.0
// Where the keys of a tile of the decode kernel lie, what its table says of them, and their copies into a stage.
//
// A lane finds the slots of two keys, l and l + 32, one tile ahead, or the address of one run of 16 tokens for eight
// tiles; all lanes copy.
#pragma once
#include "decode_join.cuh"
#include "loader.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeKeys : public DecodeJoin<Config, Variant> {
  using Base = DecodeJoin<Config, Variant>;

 protected:
  using Base::flags_, Base::kFound, Base::kNear, Base::kPages, Base::kRuns, Base::kTileRuns, Base::lane_;
  using Base::item_, Base::list_, Base::memory_, Base::meta_, Base::p_, Base::team_, Base::walk_;
  using typename Base::L;
  using typename Base::Memory;
  // Lanes that copy a row, 16 bytes each, in pieces of 128 bytes: the fewer addresses the better, since a warp can
  // issue a copy in a quarter of the time that the next one's address takes.
  static constexpr int kLanes = L::kRowBytes < 128 ? L::kRowBytes / 16 : 8;
  static constexpr int kPieces = L::kRowBytes / (16 * kLanes);
  static constexpr int kRowsAtOnce = 32 / kLanes;

  __device__ __forceinline__ DecodeKeys(const RunParams& p, const Memory& memory, int group) : Base(p, memory, group) {}

  __device__ __forceinline__ DecodeTile<L>& table() const { return memory_.tiles(meta_)[table_]; }

  // The usual case, in a few instructions: blocks of the cache's own pages, 16 tokens or a multiple, so that a tile is
  // four runs of 16 tokens.
  __device__ __forceinline__ bool has_runs(const KvList& list) const {
    const unsigned block = part_->block.divisor;
    return list.indices && !list.block_pos && !(block & 15) && !(list.offset & 15) && block == p_.k.page.divisor;
  }

  // Where a run begins, in units of 16 bytes; its block is a page.
  __device__ __forceinline__ static int run_at(const PagedKv& kv, int page, int token, int head) {
    const long long at = static_cast<long long>(page) * kv.stride_page +
                         static_cast<long long>(token) * kv.stride_token +
                         static_cast<long long>(head) * kv.stride_head;
    return static_cast<int>(at * kBytes<Config::kv_type> / 16);
  }

  // Reads the block ids of this lane's keys, or of 32 runs, one a lane. Nothing depends on them before place().
  __device__ __forceinline__ void look_up(int tile) {
    const bool dense = flags_ & kRuns && !(tile & 15) && tile >= item_.kv_begin && tile + L::kTile <= walk_.live_end;
    flags_ = (flags_ & ~kTileRuns) | (dense ? kTileRuns : 0);
    if (!dense) {
      look_up_keys(tile);
    } else if (tile < window_ || tile >= window_end_) {
      int token;
      window_ = tile;
      window_end_ = tile + 32 * 16;
      window_id_ = block_of(tile + lane_ * 16, token);
      flags_ &= ~kFound;
    }
  }

  // Id of the block that holds the key at an offset of the request, and the key's place in it. -1: not listed.
  __device__ __forceinline__ int block_of(int offset, int& token) const {
    unsigned block, rest;
    part_->block.split(offset - list_.offset, block, rest);
    token = static_cast<int>(rest);
    return static_cast<int>(block) < list_.entries ? list_.indices[block] : -1;
  }

  __device__ __forceinline__ void look_up_keys(int tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int offset = tile + 32 * h + lane_;
      id_[h] = -1;
      if (offset < item_.kv_begin || offset >= walk_.live_end) continue;
      int token;
      id_[h] = list_.indices ? block_of(offset, token) : 0;
    }
  }

  // Addresses of the runs whose ids the lanes hold.
  __device__ __forceinline__ void find_runs(int head) {
    const unsigned divisor = part_->block.divisor;
    unsigned block, token;
    part_->block.split(window_ + lane_ * 16 - list_.offset, block, token);
    from_k_ = run_at(p_.k, window_id_, token, head);
    from_v_ = run_at(p_.v, window_id_, token, head);
    if constexpr (L::kHooks) run_slot_ = window_id_ * static_cast<int>(divisor) + static_cast<int>(token);
    const long long end = (static_cast<long long>(window_id_) + 1) * divisor;
    bad_runs_ = __ballot_sync(0xffffffffu, window_id_ < 0 || end > p_.k.num_slots);
    flags_ |= kFound;
  }

  // True: four runs of live keys. Else slots (-1: no key) and positions of this lane's keys.
  __device__ __forceinline__ bool place(int tile, int head, int (&pos)[2], int (&slot)[2]) {
    if (flags_ & kTileRuns) {
      if (!(flags_ & kFound)) find_runs(head);
      if (!(bad_runs_ >> (tile - window_) / 16 & 15)) return true;
      look_up_keys(tile);  // some id names no block
    }
    const unsigned divisor = part_->block.divisor;
    const long long base = list_.indices ? 0 : list_.base;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pos[h] = kDeadKey;
      slot[h] = -1;
      if (id_[h] < 0) continue;
      const int entry = tile + 32 * h + lane_ - list_.offset;
      unsigned block = 0, token = entry;
      if (list_.indices) part_->block.split(entry, block, token);
      const long long at = static_cast<long long>(id_[h]) * divisor + base + token;
      if (static_cast<unsigned long long>(at) >= static_cast<unsigned long long>(p_.k.num_slots)) continue;
      slot[h] = static_cast<int>(at);
      pos[h] = list_.block_pos ? list_.block_pos[block] + static_cast<int>(token) : list_.pos + entry;
    }
    return false;
  }

  __device__ __forceinline__ void tabulate(int tile, int flags, const int (&pos)[2], const int (&slot)[2]) {
    const bool live[2] = {slot[0] >= 0, slot[1] >= 0};
    const int low = __reduce_min_sync(0xffffffffu, min(live[0] ? pos[0] : 0x7fffffff, live[1] ? pos[1] : 0x7fffffff));
    const int high = __reduce_max_sync(0xffffffffu, max(pos[0], pos[1]));
    if (__all_sync(0xffffffffu, live[0] && live[1])) flags |= kAllLive;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      table().pos[32 * h + lane_] = pos[h];
      if constexpr (L::kHooks) table().slot[32 * h + lane_] = live[h] ? slot[h] : 0;
    }
    if (lane_ == 0) table().span = make_int4(low, high, flags, tile);
  }

  // Row k + (row of this lane) of a stage, where row k is k whole steps of kRowsAtOnce: the swizzle of k's low bits is
  // an XOR.
  __device__ __forceinline__ static unsigned row_at(unsigned to, int k) {
    return L::kRowBytes == 64 ? to + k * 64 : (to ^ (k % 8 << 4)) + k * 128;
  }
  __device__ __forceinline__ unsigned stage_at(int row, int chunk) const {
    return ring_ + stage_ * L::kStageBytes + swizzled<L::kRowBytes>(row, chunk);
  }

  // This lane's share of a row, all of it or (there being no row) zeros. Of the keys of a step nobody reads any twice,
  // but where pages are shared and the plan knows nothing of it.
  __device__ __forceinline__ static void copy_row(unsigned to, const char* src, bool there = true) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) ptx::cp_async16_once(to + i * (64 * 128), src + i * 128, there ? 16 : 0);
  }

  // Four runs of 16 tokens; lanes `lane` onward have where they begin.
  __device__ __forceinline__ void copy_runs(const PagedKv& kv, int from, int lane) const {
    const int row = lane_ / kLanes, chunk = lane_ % kLanes;
    const unsigned to = stage_at(row, chunk);
    const int stride = static_cast<int>(kv.stride_token) * kBytes<Config::kv_type>, step = kRowsAtOnce * stride;
    const char* const mine = kv.ptr + (row * stride + chunk * 16);
#pragma unroll
    for (int k = 0; k < L::kTile; k += 16) {
      const char* const src = mine + static_cast<long long>(__shfl_sync(0xffffffffu, from, lane + k / 16)) * 16;
#pragma unroll
      for (int i = 0; i < 16; i += kRowsAtOnce)
        copy_row(row_at(to, k + i), src + static_cast<long long>(step) * (i / kRowsAtOnce));
    }
  }

  // Rows of any slots. Offsets travel from lane to lane in units of 16 bytes, so that 32 bits hold them.
  template <bool kAll>
  __device__ __forceinline__ void copy_near(const char* base, const int (&near)[2], const unsigned (&there)[2]) const {
    const int row = lane_ / kLanes;
    const unsigned to = stage_at(row, lane_ % kLanes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const unsigned live = there[h] >> row;
      constexpr int kUnroll = kAll ? 4 : 1;
#pragma unroll kUnroll
      for (int i = 0; i < 32; i += kRowsAtOnce) {
        const int at = __shfl_sync(0xffffffffu, near[h], i + row);
        copy_row(row_at(to, 32 * h + i), base + static_cast<long long>(at) * 16, kAll || (live >> i & 1));
      }
    }
  }

  __device__ __forceinline__ void copy(const PagedKv& kv, int head, const int (&slot)[2]) const {
    long long at[2];
    unsigned there[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      at[h] = 0;  // any address will do where nothing is read
      if (slot[h] >= 0) at[h] = slot_offset(kv, static_cast<unsigned>(slot[h]), head) * kBytes<Config::kv_type>;
      there[h] = __ballot_sync(0xffffffffu, slot[h] >= 0);
    }
    if (flags_ & kNear && kv.vectors) {
      const int near[2] = {static_cast<int>(at[0] >> 4), static_cast<int>(at[1] >> 4)};
      const char* base = kv.ptr + lane_ % kLanes * 16;
      if ((there[0] & there[1]) == 0xffffffffu) {
        copy_near<true>(base, near, there);
      } else {
        copy_near<false>(base, near, there);
      }
    } else if (kv.vectors) {
      const int row = lane_ / kLanes, chunk = lane_ % kLanes;
      const unsigned to = stage_at(row, chunk);
#pragma unroll 1
      for (int key = 0; key < L::kTile; key += kRowsAtOnce) {
        const bool high = key >= 32;
        const long long from = __shfl_sync(0xffffffffu, high ? at[1] : at[0], (key + row) % 32);
        copy_row(row_at(to, key), kv.ptr + from + chunk * 16, (high ? there[1] : there[0]) >> (key + row) % 32 & 1);
      }
    } else {
      typedef typename Bits<Config::kv_type>::type Element;
      char* stage = memory_.smem + meta_.ring + stage_ * L::kStageBytes;
#pragma unroll 1
      for (int key = 0; key < L::kTile; ++key) {
        const Element* src =
            reinterpret_cast<const Element*>(kv.ptr + __shfl_sync(0xffffffffu, key < 32 ? at[0] : at[1], key % 32));
        const bool live = (key < 32 ? there[0] : there[1]) >> key % 32 & 1;
#pragma unroll 1
        for (int d = lane_; d < L::kDim; d += 32) {
          const int byte = d * kBytes<Config::kv_type>;
          *reinterpret_cast<Element*>(stage + swizzled<L::kRowBytes>(key, byte / 16) + byte % 16) =
              live ? src[d] : Element(0);
        }
      }
    }
  }

  const PartDesc* part_;
  unsigned ring_;                        // address of the group's first stage
  int stage_;                            // to fill next
  int table_;                            // of the next tile
  int window_, window_end_, window_id_;  // offsets in the request of the runs whose blocks the lanes hold; this lane's
  int from_k_, from_v_;                  // where this lane's run begins
  int run_slot_;                         // with hooks

 private:
  int id_[2];          // blocks of this lane's keys in the tile to come
  unsigned bad_runs_;  // those that are not in the pool
};

}  // namespace attnrt
