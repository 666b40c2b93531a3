// SPDX-License-Identifier: Apache-2.0
// The passes of a worker's list as loaders take them: one warp reads the plan and writes, a few passes ahead, all that
// consumers and the warps for Q, K and V ask of a pass; these read it from shared memory. A pass may be as short as one
// tile, and a walk through the plan is a chain of loads of six hundred clocks each: so there is one walk, and its links
// are as few as can be.
#pragma once
#include "hopper_tables.cuh"

namespace attnrt {

template <class Config, class Variant, Loading kHow>
class HopperPasses : public HopperTables<Config, Variant, kHow> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperTables<Config, Variant, kHow>;

 protected:
  using Base::arrived_half, Base::arrived_q, Base::bar, Base::bound_, Base::bounds_of, Base::copy_queries, Base::evenly,
      Base::fetch_block, Base::fetch_query, Base::lane_, Base::locate, Base::make_row, Base::meta_, Base::narrow,
      Base::p_, Base::query_offset, Base::slot_in;
  using Base::Base;
  using Base::wait_half, Base::wait_queries, Base::wait_table, Base::write_bounds, Base::write_row;
  using typename Base::Bounds;
  using typename Base::Query;
  using typename Base::Tile;
  static constexpr int kAhead = 4;  // tiles of the next pass that are asked for in L2
  static constexpr int kMostAhead =
      8;  // or as many boxes of theirs: each costs the warp 60 clocks for each of its slabs

  // ------------------------------------------------------------------ the warp that reads the plan
  __device__ __forceinline__ void run_rows() {
    const int* const lists = p_.plan->worker_indptr + p_.plan->num_workers + p_.plan->wide_workers + blockIdx.x;
    // With the first pass come the rulers, which who takes it may ask for, and the first part, most often the only one.
    const auto tables = words_of(*reinterpret_cast<const PlanTables*>(p_.plan->rulers));
    int line[2];
    bool told = find_first(line);
    put_words(meta_.tables, tables);
    if (told) put_first(line);
    const int begin = told ? __shfl_sync(0xffffffffu, line[1], kItemsBegin % 32) : lists[0];
    const int end = told ? __shfl_sync(0xffffffffu, line[1], kItemsBegin % 32 + 1) : lists[1];
    const bool solid = p_.plan->solid;
    int word = told ? line[0] : item_word(begin, end), part = 0, count = 0;
    find_mine();
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const int now = word;
      ptx::whole_warp(this->base_);
      word = item_word(i + 1, end);
      const WorkItem item = item_of(now);
      if (item.part != part) open_part(part = item.part);
      const int rows = (item.q_end - item.q_begin) * Config::group;
#pragma unroll 1
      for (int head = item.head_begin; head < item.head_end; ++head) {
#pragma unroll 1
        for (int first = 0; first < rows; first += L::kRows) {
          write(now, item, head, first, solid, count++, told);
          told = false;
        }
      }
    }
    wait_table(count);
    if (lane_ == 0) meta_.pass[L::table(count)].done = 1;
    ptx::mbar_arrive_warp(bar(meta_.pass_full[L::table(count)]), lane_);
    ptx::mbar_arrive_warp(bar(meta_.table_full[L::table(count)]), lane_);
  }

  // ------------------------------------------------------------------ the others
  // Waits for pass `count`; false: the list has ended.
  __device__ __forceinline__ bool wait_pass(int count) const {
    ptx::mbar_wait(bar(meta_.pass_full[L::table(count)]), count / L::kTables & 1);
    return !meta_.pass[L::table(count)].done;
  }
  // Whether pass `count` is there already.
  __device__ __forceinline__ bool sees_pass(int count) const {
    return ptx::mbar_test_wait(bar(meta_.pass_full[L::table(count)]), count / L::kTables & 1) &&
           !meta_.pass[L::table(count)].done;
  }

  // The first tile of pass `count`.
  __device__ __forceinline__ Tile tile_of(int count) const {
    const PassKeys& keys = meta_.keys[L::table(count)];
    Tile tile;
    tile.offset = meta_.pass[L::table(count)].begin;
    tile.low = keys.low;
    tile.high = keys.high;
    tile.live_low = keys.live_low;
    tile.live_high = keys.live_high;
    tile.shift = keys.shift;
    return tile;
  }

  // Calls f(tile, head, slot, pos) for every tile of the worker's list; slot and pos are those of the lane's box. What
  // a pass says is copied first: its table may be written anew as soon as the pass's last tile is used. `map`, `div`,
  // `columns`: where the first tiles of the next pass are asked for, of lists alone: the hint costs time between two
  // tiles, and where keys lie side by side it has been no gain.
  template <class F>
  __device__ __forceinline__ void walk_boxes(const TensorMap& map, const FastDiv& div, int columns, F&& f) const {
    int first = 0;
    bool known = false;  // `first` is what was found when the pass was looked for
#pragma unroll 1
    for (int count = 0; wait_pass(count); ++count) {
      const PassRecord& pass = meta_.pass[L::table(count)];
      const PassKeys& keys = meta_.keys[L::table(count)];
      const KvList list = keys.list;
      const FastDiv block = keys.block;
      const int head = pass.head, kv_begin = pass.item.kv_begin, kv_end = pass.item.kv_end, klass = pass.item.klass;
      const int leaf_end = pass.item.leaf_end;
      Tile tile = tile_of(count);
      int leaf = pass.item.leaf_begin, stop = pass.stop;
      bool looks = true, found = false;
#pragma unroll 1
      for (;;) {
        int id = known ? first : fetch_block(block, list, tile, tile.offset);
        known = false;
#pragma unroll 1
        for (; tile.offset < stop; tile.offset += L::kTile) {
          const int next = fetch_block(block, list, tile, tile.offset + L::kTile);
          int pos;
          const long long slot = slot_in(block, list, tile.offset, id, pos);
          f(tile, head, slot, pos);
          if (looks && list.indices) found = look_ahead(count + 1, map, div, columns, first);
          looks = false;
          id = next;
        }
        if (++leaf >= leaf_end) break;
        leaf_range<L::kTile>(meta_.tables.rulers[klass], kv_begin, kv_end, leaf, tile.offset, stop);
      }
      known = found;
    }
  }

  __device__ __forceinline__ void run_queries() const {
#pragma unroll 1
    for (int count = 0; wait_pass(count); ++count) {
      ATTNRT_TRACE(2, count, 0);
      const PassRecord& pass = meta_.pass[L::table(count)];
      PartDesc part;
      part.qo_index = meta_.keys[L::table(count)].qo_index;
      if constexpr (L::kBuffersQ == 1) {
#pragma unroll 1
        for (int group = 0; group < L::kGroups; ++group) bring_half(pass, part, group, count);
        look_for_queries(count + 1);
        continue;
      }
      const char* at;
      const bool even = evenly(pass.item, part, pass.head, pass.first, 0, L::kRows, at);
      ATTNRT_TRACE(2, count, 1);
      wait_queries(count);
      ATTNRT_TRACE(2, count, 2);
#pragma unroll 1
      for (int row = 0; row < L::kRows; row += 32) {
        copy_queries(even, at, pass.item, part, pass.head, pass.first, row, count);
      }
      ATTNRT_TRACE(2, count, 3);
      ptx::cp_async_commit();
      look_for_queries(count + 1);
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::mbar_arrive_warp(arrived_q(count & 1), lane_);
      ATTNRT_TRACE(2, count, 4);
    }
  }

 private:
  // What a pass's list is, as one lane each reads it: its first entry and the next list's, base (two words), position,
  // offset, first and last live key.
  enum { kFirst, kNext, kBase, kBaseHigh, kPos, kOffset, kBegin, kEnd };

  // Words from global memory to shared memory, by lane; all of them are asked for before one is stored.
  template <class T>
  struct Words {
    static constexpr int kAll = sizeof(T) / 4, kMine = (kAll + 31) / 32;
    static_assert(sizeof(T) % 4 == 0, "words");
    int x[kMine];
  };
  template <class T>
  __device__ __forceinline__ Words<T> words_of(const T& from) const {
    Words<T> words;
#pragma unroll
    for (int i = 0; i < Words<T>::kMine; ++i) {
      const int at = i * 32 + lane_;
      words.x[i] = at < Words<T>::kAll ? reinterpret_cast<const int*>(&from)[at] : 0;
    }
    return words;
  }
  template <class T>
  __device__ __forceinline__ void put_words(T& to, const Words<T>& words) const {
#pragma unroll
    for (int i = 0; i < Words<T>::kMine; ++i) {
      const int at = i * 32 + lane_;
      if (at < Words<T>::kAll) reinterpret_cast<int*>(&to)[at] = words.x[i];
    }
    __syncwarp();
  }

  // The worker's FirstPass, two words a lane, if there is one.
  static constexpr int kThere = sizeof(PassRecord) / 4, kKeys = kThere + 1, kItemsBegin = kKeys + sizeof(PassKeys) / 4;
  __device__ __forceinline__ bool find_first(int (&line)[2]) const {
    const unsigned at = kFirstAt + blockIdx.x * sizeof(FirstPass);
    const bool room = at + sizeof(FirstPass) <= p_.behind + sizeof(PlanHeader);
    const int* words = reinterpret_cast<const int*>(reinterpret_cast<const char*>(p_.plan) + (room ? at : 0)) + lane_;
    line[0] = words[0];
    line[1] = words[32];
    const bool known = static_cast<int>(blockIdx.x) < p_.plan->team_firsts;
    return room && known && __shfl_sync(0xffffffffu, line[0], kThere) != 0;
  }
  // It becomes the record and the keys of pass 0; its rows are written as those of others are.
  __device__ __forceinline__ void put_first(const int (&line)[2]) const {
    static_assert(kKeys < 32 && kItemsBegin >= 32, "keys lie in both lines");
    int* const pass = reinterpret_cast<int*>(&meta_.pass[0]);
    int* const keys = reinterpret_cast<int*>(&meta_.keys[0]);
    if (lane_ < kThere) pass[lane_] = line[0];
    if (lane_ >= kKeys) keys[lane_ - kKeys] = line[0];
    if (lane_ < kItemsBegin - 32) keys[lane_ + 32 - kKeys] = line[1];
    ptx::mbar_arrive_warp(bar(meta_.pass_full[0]), lane_);
  }

  // Of a pass's rows those that are asked for before the first is used, by 32.
  static constexpr int kFetched = L::kLean ? 1 : L::kRows / 32;

  // Word `lane` of an item of the list.
  static constexpr int kWords = sizeof(WorkItem) / 4;
  __device__ __forceinline__ int item_word(int item, int end) const {
    const bool there = item < end && lane_ < kWords;
    return there ? reinterpret_cast<const int*>(p_.plan->work + item)[lane_] : 0;
  }
  __device__ __forceinline__ static WorkItem item_of(int word) {
    auto get = [&](int i) { return __shfl_sync(0xffffffffu, word, i); };
    return {get(0), get(1), get(2), get(3),  get(4),  get(5),  get(6),
            get(7), get(8), get(9), get(10), get(11), get(12), get(13)};
  }

  __device__ __forceinline__ void open_part(int part) {
    __syncwarp();
    put_words(meta_.tables.part, words_of(p_.plan->parts[part]));
    find_mine();
  }
  __device__ __forceinline__ void find_mine() {
    const PartDesc& x = meta_.tables.part;
    const int* base = reinterpret_cast<const int*>(x.kv_base);
    mine_ = lane_ <= kNext                         ? x.indptr
            : lane_ == kBase || lane_ == kBaseHigh ? base
            : lane_ == kPos                        ? x.kv_pos
            : lane_ == kOffset                     ? x.kv_offset
            : lane_ == kBegin                      ? x.kv_begin
            : lane_ == kEnd                        ? x.kv_end
                                                   : nullptr;
  }

  __device__ __forceinline__ int fetch_list(const WorkItem& item, int head) const {
    const int heads = meta_.tables.part.heads, list = item.row * heads + (heads > 1 ? head : 0);
    const int index = lane_ <= kNext                         ? list + lane_
                      : lane_ == kBase || lane_ == kBaseHigh ? 2 * item.row + lane_ - kBase
                      : lane_ == kPos || lane_ == kOffset    ? item.row
                                                             : list;
    return mine_ ? mine_[index] : 0;
  }

  // `word`: of the item, by lane; `told`: its record and keys are there.
  __device__ __forceinline__ void write(int word, const WorkItem& item, int head, int first, bool solid, int count,
                                        bool told) const {
    ATTNRT_TRACE(3, count, 0);
    const PartDesc& part = meta_.tables.part;
    const int said = fetch_list(item, head);
    Query query[kFetched];
#pragma unroll
    for (int i = 0; i < kFetched; ++i) query[i] = fetch_query(item, part, first + i * 32 + lane_);
    ptx::whole_warp(this->base_);
    auto get = [&](int i) { return __shfl_sync(0xffffffffu, said, i); };
    KvList list;
    list.entries = get(kNext) - get(kFirst);
    list.indices = part.indices ? part.indices + get(kFirst) : nullptr;
    list.block_pos = part.block_pos ? part.block_pos + get(kFirst) : nullptr;
    list.base = static_cast<long long>(static_cast<unsigned long long>(static_cast<unsigned>(get(kBaseHigh))) << 32 |
                                       static_cast<unsigned>(get(kBase)));
    list.pos = get(kPos);
    list.offset = get(kOffset);
    Tile tile;
    tile.live_low = list.offset + get(kBegin);
    tile.live_high = list.offset + get(kEnd);
    if (bound_) tile.live_high = min(tile.live_high, bound_limit(p_, item, part));
    narrow(item, part.block, list, solid, tile);
    Bounds bounds = bounds_of(list, tile);
    leaf_range<L::kTile>(meta_.tables.rulers[item.klass], item.kv_begin, item.kv_end, item.leaf_begin, bounds.begin,
                         bounds.stop);
    ATTNRT_TRACE(3, count, 1);
    wait_table(count);
    ATTNRT_TRACE(3, count, 2);
    if (!told) put_pass(word, bounds, list, tile, head, first, count);
    const auto put = [&](int r, const Query& of) {
      write_row(make_row(item, part, head, first, r, of), bounds, head, first, r, count);
    };
    if constexpr (L::kTurns) {  // registers are few
#pragma unroll
      for (int i = 0; i < L::kRows / 32; ++i) put(i * 32 + lane_, query[i]);
    } else {  // not unrolled: at a kernel's start each line of code is as far away as data
#pragma unroll 1
      for (int r = lane_; r < L::kRows; r += 32) {
        Query next;
        if constexpr (kFetched < L::kRows / 32) next = fetch_query(item, part, first + kFetched * 32 + r);
        put(r, query[0]);
#pragma unroll
        for (int i = 0; i + 1 < kFetched; ++i) query[i] = query[i + 1];
        if constexpr (kFetched < L::kRows / 32) query[kFetched - 1] = next;
      }
    }
    ptx::mbar_arrive_warp(bar(meta_.table_full[L::table(count)]), lane_);
    ATTNRT_TRACE(3, count, 3);
  }

  // The record and the keys of a pass.
  __device__ __forceinline__ void put_pass(int word, const Bounds& bounds, const KvList& list, const Tile& tile,
                                           int head, int first, int count) const {
    const PartDesc& part = meta_.tables.part;
    PassRecord& record = meta_.pass[L::table(count)];
    PassKeys& keys = meta_.keys[L::table(count)];
    if (lane_ < kWords) reinterpret_cast<int*>(&record.item)[lane_] = word;
    if (lane_ == 0) {
      write_bounds(record, bounds, head, first);
      keys.list = list;
      keys.low = tile.low;
      keys.high = tile.high;
      keys.live_low = tile.live_low;
      keys.live_high = tile.live_high;
      keys.shift = tile.shift;
      keys.block = part.block;
      keys.qo_index = part.qo_index;
    }
    ptx::mbar_arrive_warp(bar(meta_.pass_full[L::table(count)]), lane_);
  }

  // Asks for the first tiles of a pass in L2, if it is known: the first keys of a head come from memory. `id`: what
  // fetch_block says of its first tile.
  __device__ __forceinline__ bool look_ahead(int count, const TensorMap& map, const FastDiv& div, int columns,
                                             int& id) const {
    if (!sees_pass(count)) return false;
    const PassRecord& pass = meta_.pass[L::table(count)];
    const KvList list = meta_.keys[L::table(count)].list;
    const FastDiv block = meta_.keys[L::table(count)].block;
    Tile tile = tile_of(count);
    tile.live_high = min(tile.live_high, max(pass.stop, tile.offset + L::kTile));
    id = this->template fetch_block<kAhead * L::kTile>(block, list, tile, tile.offset);
    int pos, token, page;
    const long long slot = slot_in(block, list, tile.offset, id, pos);
    if (slot >= 0 && lane_ < kMostAhead) {
      locate(div, slot, token, page);
#pragma unroll 1
      for (int c = 0; c < columns; c += 128 / L::kElementKv) ptx::tma_prefetch_4d(&map, c, token, pass.head, page);
    }
    return true;
  }

  __device__ __forceinline__ void look_for_queries(int count) const {
    if (!sees_pass(count)) return;
    const PassRecord& pass = meta_.pass[L::table(count)];
    PartDesc part;
    part.qo_index = meta_.keys[L::table(count)].qo_index;
#pragma unroll 1
    for (int row = lane_; row < L::kRows; row += 32) {
      const long long at = query_offset(pass.item, part, pass.head, pass.first + row);
      if (at != kNoRow) ptx::prefetch_l2<L::kDim * L::kElementQ>(p_.q + at * L::kElementQ);
    }
  }

  __device__ __forceinline__ void bring_half(const PassRecord& pass, const PartDesc& part, int group, int count) const {
    wait_half(group, count);
#pragma unroll 1
    for (int row = group * 64; row < group * 64 + 64; row += 32) {
      copy_queries(pass.item, part, pass.head, pass.first, row, 0);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::mbar_arrive_warp(arrived_half(group), lane_);
  }

  const int* mine_ = nullptr;  // what this lane reads of every list
};

}  // namespace attnrt
