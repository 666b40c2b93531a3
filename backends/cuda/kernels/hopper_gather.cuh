// SPDX-License-Identifier: Apache-2.0
// The loader of single keys: one warp each for K and V copies the rows of a tile by 16-byte asynchronous copies from
// any slots, one brings Q and one writes the rows' table, as for boxes. Dead rows are zeros, nothing is read for them.
// Copies arrive on the barrier by themselves, so that a warp never waits for one; consumers then order their products
// after them (kConsumersFence).
#pragma once
#include "hopper_passes.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperGather : public HopperPasses<Config, Variant, Loading::gather> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperPasses<Config, Variant, Loading::gather>;
  using Base::arrived_k, Base::arrived_v, Base::bar, Base::base_, Base::fetch_block, Base::lane_, Base::meta_, Base::p_;
  using Base::run_queries, Base::run_rows, Base::slot_in, Base::tell, Base::tells, Base::tile_of, Base::wait_pass;
  using Base::warp_;
  using typename Base::Tile;
  static constexpr int kParts = L::kTile / 32;
  static constexpr int kColumnsK = L::kDim * L::kElementKv / 2, kColumnsV = L::kDimVo * L::kElementKv / 2;

 public:
  // Arrivals that complete a full barrier: a copy arrives for each lane that made it, what a warp wrote for the warp.
  static constexpr int kArrivalsTable = ptx::kWarpArrivals;
  static constexpr int kArrivalsQ = ptx::kWarpArrivals;
  static constexpr int kArrivalsHalf = ptx::kWarpArrivals;
  static constexpr int kArrivalsK = 32 + ptx::kWarpArrivals;
  static constexpr int kArrivalsV = 32;
  static constexpr bool kConsumersFence = true;

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (warp_ == 1) {
      run_queries();
    } else if (warp_ == 2) {
      run_rows();
    } else if constexpr (kColumnsK == kColumnsV) {
      run_keys<kColumnsK>(warp_ == 3);  // one code for both: the code of the copies is long
    } else if (warp_ == 0) {
      run_keys<kColumnsK>(false);
    } else {
      run_keys<kColumnsV>(true);
    }
  }

 private:
  // Of K or V: whether a slot's place is `step` units times the slot and the head's, and no place needs more than 32
  // bits (kNoUnit aside).
  struct Pool {
    bool flat;
    int step;
    unsigned slots;
  };
  static constexpr int kUnit = 16 / L::kElementKv;  // elements of a unit
  __device__ __forceinline__ Pool pool_of(const PagedKv& kv) const {
    const long long step = kv.page.divisor == 1 ? kv.stride_page : kv.stride_token;
    const long long heads = p_.num_qo_heads / Config::group;
    Pool x;
    x.flat = kv.vectors &&
             (kv.page.divisor == 1 || kv.stride_page == step * kv.page.divisor || kv.num_slots <= kv.page.divisor) &&
             kv.num_slots * llabs(step) + heads * llabs(kv.stride_head) < 0x7fffffffLL * kUnit;
    x.step = static_cast<int>(step / kUnit);
    x.slots = static_cast<unsigned>(min(kv.num_slots, 0x80000000LL));  // blocks that are not there are negative
    return x;
  }

  // The list of a pass: which offsets it has blocks for, and the unit of its head.
  struct Keys {
    KvList list;
    FastDiv block;
    int head, low, high, first;
    bool plain;  // blocks of one token in a flat pool
    __device__ __forceinline__ bool whole(int offset) const { return offset >= low && offset + L::kTile <= high; }
  };

  // K or V of the worker's tiles. What a pass says is copied first: its table may be written anew as soon as the pass's
  // last tile is used.
  template <int kColumns>
  __device__ __forceinline__ void run_keys(bool values) const {
    const PagedKv& kv = values ? p_.v : p_.k;
    const Pool pool = pool_of(kv);
    int t = 0;
#pragma unroll 1
    for (int count = 0; wait_pass(count); ++count) {
      const PassRecord& pass = meta_.pass[L::table(count)];
      const int kv_begin = pass.item.kv_begin, kv_end = pass.item.kv_end, klass = pass.item.klass;
      const int leaf_end = pass.item.leaf_end;
      Tile tile = tile_of(count);
      Keys keys;
      keys.list = meta_.keys[L::table(count)].list;
      keys.block = meta_.keys[L::table(count)].block;
      keys.head = pass.head;
      keys.first = static_cast<int>(keys.head * kv.stride_head / kUnit);
      keys.plain = pool.flat && keys.list.indices && keys.block.divisor == 1;
      keys.low = max(tile.live_low, keys.list.offset);
      const long long listed = static_cast<long long>(keys.list.entries) * keys.block.divisor + keys.list.offset;
      keys.high =
          keys.list.indices ? static_cast<int>(min(static_cast<long long>(tile.live_high), listed)) : tile.live_high;
      int leaf = pass.item.leaf_begin, stop = pass.stop;
#pragma unroll 1
      for (;;) {
        int id[kParts];  // of the tile's blocks, loaded a tile ahead
        fetch(id, keys, tile.offset);
#pragma unroll 1
        for (; tile.offset < stop; tile.offset += L::kTile, ++t) {
          int next[kParts];
          fetch(next, keys, tile.offset + L::kTile);
          bring<kColumns>(values, kv, pool, keys, tile, id, t);
#pragma unroll
          for (int part = 0; part < kParts; ++part) id[part] = next[part];
        }
        if (++leaf >= leaf_end) break;
        leaf_range<L::kTile>(meta_.tables.rulers[klass], kv_begin, kv_end, leaf, tile.offset, stop);
      }
    }
  }

  // The blocks of a tile that has all of its keys: what other tiles take, they look up when they come. A warp has a few
  // hundred instructions for a tile, each of which takes six clocks beside the consumers.
  __device__ __forceinline__ void fetch(int (&id)[kParts], const Keys& keys, int offset) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) id[part] = 0;
    if (!keys.whole(offset) || !keys.list.indices) return;
    const int j = offset - keys.list.offset + lane_;
    if (keys.plain) {
      const int* const at = keys.list.indices + j;
#pragma unroll
      for (int part = 0; part < kParts; ++part) id[part] = at[part * 32];
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unsigned block, token;
        keys.block.split(j + part * 32, block, token);
        id[part] = keys.list.indices[block];
      }
    }
  }

  // Units of the rows of a tile that has all of its keys; false: not all of them are there.
  __device__ __forceinline__ bool find(int (&unit)[kParts], const PagedKv& kv, const Pool& pool, const Keys& keys,
                                       const int (&id)[kParts], int offset) const {
    bool there = true;
    if (keys.plain) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        there = there && static_cast<unsigned>(id[part]) < pool.slots;
        unit[part] = id[part] * pool.step + keys.first;
      }
    } else {
      const int j = offset - keys.list.offset + lane_;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const long long slot = slot_at(keys, id[part], j + part * 32);
        const long long from = slot_offset(kv, static_cast<unsigned>(slot), keys.head);
        there = there && slot >= 0 && slot < kv.num_slots && is_near<L::kElementKv>(from);
        unit[part] = unit_of<L::kElementKv>(from);
      }
    }
    return __all_sync(0xffffffffu, there);
  }
  __device__ __forceinline__ static long long slot_at(const Keys& keys, int id, int j) {
    if (!keys.list.indices) return keys.list.base + j;
    unsigned block, token;
    keys.block.split(j, block, token);
    return id < 0 ? -1 : static_cast<long long>(id) * keys.block.divisor + token;
  }

  // Tile t: where its rows lie is known before the wait for its buffer.
  template <int kColumns>
  __device__ __forceinline__ void bring(bool values, const PagedKv& kv, const Pool& pool, const Keys& keys,
                                        const Tile& tile, const int (&id)[kParts], int t) const {
    const int stage = t % L::kStages;
    const unsigned dst =
        base_ + (values ? L::kOffsetV + stage * L::kBytesV + L::kRawV : L::kOffsetK + stage * L::kBytesK + L::kRawK);
    const unsigned full = values ? arrived_v(stage) : arrived_k(stage);
    const unsigned empty = bar(values ? meta_.v_empty[stage] : meta_.k_empty[stage]);
    int unit[kParts];
    const bool quick = kv.vectors && keys.whole(tile.offset) && find(unit, kv, pool, keys, id, tile.offset);
    ATTNRT_TRACE(values ? 5 : 4, t, 0);
    ptx::mbar_wait(empty, (t / L::kStages & 1) ^ 1);
    ATTNRT_TRACE(values ? 5 : 4, t, 1);
    if (quick) {
      copy_tile<kColumns, L::kSlabKv, L::kDealt>(kv.ptr, dst, unit, meta_.unit[values], lane_);
      if (!values && tells(tile)) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          int pos;
          const long long slot = slot_in(keys.block, keys.list, tile.offset + part * 32, id[part], pos);
          tell(tile, stage, part, slot, pos);
        }
      }
    } else {
      bring_parts<kColumns>(values, kv, keys, tile, dst, stage);
    }
    ATTNRT_TRACE(values ? 5 : 4, t, 2);
    // This thread's copies arrive when they are done; what it stored itself is done.
    if (kv.vectors) {
      ptx::cp_async_mbar_arrive_noinc(full);
    } else {
      ptx::mbar_arrive(full);
    }
    if (!values) ptx::mbar_arrive_warp(full, lane_);
  }

  // A tile as 32 keys after the other, some of which may not be there.
  template <int kColumns>
  __device__ __forceinline__ void bring_parts(bool values, const PagedKv& kv, const Keys& keys, const Tile& tile,
                                              unsigned dst, int stage) const {
    int id[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      id[part] = fetch_block(keys.block, keys.list, tile, tile.offset + part * 32);
    }
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      int here = id[0], pos;
#pragma unroll
      for (int i = 1; i < kParts; ++i) here = part == i ? id[i] : here;
      const long long slot = slot_in(keys.block, keys.list, tile.offset + part * 32, here, pos);
      const long long from = slot < 0 ? kNoRow : slot_offset(kv, static_cast<unsigned>(slot), keys.head);
      gather_any<kColumns, L::kSlabKv, L::kElementKv>(kv.vectors, kv.ptr, dst, part * 32, from, lane_);
      if (!values) tell(tile, stage, part, slot, pos);
    }
  }
};

}  // namespace attnrt
