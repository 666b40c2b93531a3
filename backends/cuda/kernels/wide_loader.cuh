// SPDX-License-Identifier: Apache-2.0
// The loading warps of the wide kernel. All four walk the worker's items (heads, passes over the rows, leaves, tiles)
// and fill every stage together, 16 keys each; with the first tile of a pass each lays out 16 of its rows and their Q.
// What the first item's copies need lies in a line of the worker's (FirstItem). Where lists are of blocks of 16 tokens
// or a multiple, lanes find the slots of 32 runs of 16 keys at once, and an elected lane asks for a run as boxes of a
// tensor map (TMA). Tiles in which a key is missing, and other lists: lane l finds the address of key l % 16 of its
// warp's keys, in K (l < 16) or in V, and all lanes copy 16 bytes at a time.
//
// Copies arrive on a stage's barrier when they land; the computing warps then order their products after them
// (fence.proxy.async).
#pragma once
#include "cursor.cuh"
#include "hopper_layout.cuh"
#include "loader.cuh"
#include "rows.cuh"
#include "wide_layout.cuh"

namespace attnrt {

template <class Config, class Variant>
class WideLoader {
  using L = WideLayout<Config, Variant>;
  using M = WideMeta<L, Variant>;
  typedef typename Bits<Config::kv_type>::type Element;
  static constexpr int kKeys = L::kTile / L::kLoaders;  // of a warp
  static constexpr int kChunks = L::kDim / 8;           // of 16 bytes, in a row
  static constexpr int kRowsAtOnce = 32 / kChunks;
  static constexpr int kBoxBytes = kKeys * 128;  // of a slab
  static constexpr int kWindow = 32 * kKeys, kNoWindow = -0x7fffffff;
  static_assert(kKeys == 1 << kWideBoxLog2, "a box is a warp's keys");

 public:
  // Arrivals that fill a stage: one of each warp; its boxes and its lanes' copies are counted as they are asked for.
  static constexpr int kFullCount = L::kLoaders;

  // `word`: this lane's of the worker's line.
  __device__ __forceinline__ WideLoader(const RunParams& p, const ParamRef* params, const KvMaps& maps, char* smem,
                                        M& meta, int word)
      : p_(p), params_(params), maps_(maps), smem_(smem), meta_(meta), lane_(threadIdx.x % 32) {
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    reinterpret_cast<int*>(&meta_.first[warp_])[lane_] = word;
    __syncwarp();
    given_ = line().flags;
    tile_ = table_ = 0;
    spare_phase_ = 1;
    later_ = false;
    const unsigned long long strides = p.q_stride_row | p.q_stride_head;
    q_vectors_ = !((reinterpret_cast<unsigned long long>(p.q) | strides * 2) & 15);
  }

  __device__ __forceinline__ void run(int worker) {
    const PlanHeader& plan = meta_.plan;
    FirstItem& at = meta_.first[warp_];
    if (!(given_ & kFirstItem)) {
      if (lane_ < 2) (&at.next)[lane_] = plan.worker_indptr[worker + lane_];
      given_ = 0;
      __syncwarp();
    }
    const WorkItem& item = at.item;
#pragma unroll 1
    for (;;) {
      if (!given_) {
        const int next = at.next;
        if (next >= at.end) break;
        __syncwarp();
        constexpr int kFields = sizeof(WorkItem) / sizeof(int);
        if (lane_ < kFields)
          reinterpret_cast<int*>(&at.item)[lane_] = reinterpret_cast<const int*>(plan.work + next)[lane_];
        if (lane_ == 0) at.next = next + 1;
        __syncwarp();
      }
      const int rows = (item.q_end - item.q_begin) * Config::group;
      // Keys that no other item reads leave L2 first, so that states stay there until they are merged.
      once_ = static_cast<unsigned>(part().most * Config::group - 1) < L::kRows;
#pragma unroll 1
      for (int head = item.head_begin; head < item.head_end; ++head) {
        open_list(item, head);
#pragma unroll 1
        for (int first = 0; first < rows; first += L::kRows) pass(item, head, first, rows - first);
      }
      given_ = 0;
      __syncwarp();  // all lanes have read the item
    }
    wait_empty(tile_, 0);
    if (lane_ == 0) meta_.span[table_][warp_] = make_int4(0, 0, kWideOver, 0);
    arrive(stage_of(tile_, 0), 0, false);
  }

 private:
  __device__ __forceinline__ const PartDesc& part() const { return meta_.plan.parts[line().item.part]; }
  __device__ __forceinline__ const FirstItem& line() const { return meta_.first[warp_]; }
  __device__ __forceinline__ const KvList& list() const { return meta_.list[warp_]; }

  // The list of the item's keys under a head.
  __device__ __forceinline__ void open_list(const WorkItem& item, int head) {
    const PartDesc& part = this->part();
    KvList list;
    if (given_ & kFirstList) {
      const FirstItem& first = line();
      list.entries = first.entries;
      list.indices = part.indices + first.list;
      list.block_pos = part.block_pos ? part.block_pos + first.list : nullptr;
      list.base = 0;
      list.pos = first.pos;
      list.offset = first.offset;
    } else {
      list.open(part, item.row, head);
    }
    const int limit = bound_limit(meta_.plan, item, part);
    __syncwarp();
    if (lane_ == 0) {
      meta_.list[warp_] = list;
      meta_.live_end[warp_] = min(item.kv_end, limit);
    }
    __syncwarp();
    const bool listed = list.indices && !list.block_pos && !(part.block.divisor & (kKeys - 1));
    runs_ = maps_.box_log2 == kWideBoxLog2 && listed && !(list.offset & (kKeys - 1));
    window_ = window_end_ = kNoWindow;
  }

  // This warp's part of the stage is complete when its boxes, of so many bytes, and its lanes' copies have landed. Its
  // tables are written by now.
  __device__ __forceinline__ void arrive(int stage, unsigned bytes, bool copies) {
    const unsigned barrier = ptx::smem_addr(&meta_.full[stage]);
    if (copies) ptx::cp_async_mbar_arrive(barrier);
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive_expect_tx(barrier, bytes);
  }

  // Stage of a tile's K (0) or V (1); this waits until it is free.
  __device__ __forceinline__ static int stage_of(unsigned tile, int which) {
    return tile % (L::kStages / 2) * 2 + which;
  }
  __device__ __forceinline__ void wait_empty(unsigned tile, int which) const {
    ptx::mbar_wait(ptx::smem_addr(&meta_.empty[stage_of(tile, which)]), (tile / (L::kStages / 2) & 1) ^ 1);
  }

  // Boxes of V are asked for behind the K of the next tile, as they are used, since a stage of K is free earlier: this
  // keeps what they need, and then asks for those of the tile before.
  __device__ __forceinline__ void keep_values(int slot, int page) {
    later_ = true;
    later_slot_ = slot;
    later_page_ = page;
  }
  __device__ __forceinline__ void load_kept(int head) {
    if (!later_) return;
    later_ = false;
    wait_empty(tile_ - 1, 1);
    box(stage_of(tile_ - 1, 1), maps_.v, maps_.page_v, later_slot_, later_page_, head);
  }

  // The keys of the item for kRows of its rows. An item without keys has one tile of dead ones: the empty set.
  __device__ __forceinline__ void pass(const WorkItem& item, int head, int first, int rows) {
    const RulerDesc& ruler = meta_.plan.rulers[item.klass];
    const bool any = item.kv_begin < item.kv_end;
    int leaf = item.leaf_begin;
    const int start = ruler.start(leaf);
    int tile = any ? first_tile<L::kTile>(start, item.kv_begin) : start;
    int stop = any ? min(ruler.start(leaf + 1), item.kv_end) : start;
    if (given_ & kFirstIds) {
      window_end_ = tile;
      after_id_ = lane_ < 4 ? line().ids[lane_] : -1;
    }
    bool more = true, opened = false;
#pragma unroll 1
    while (more) {
      const int now = tile;
      const int live_end = meta_.live_end[warp_];
      const bool dense = runs_ && now >= item.kv_begin && now + L::kTile <= live_end && in_runs(now);
      if (dense && opened) {  // as many as end before their leaf does
        const int run = (now - window_) / kKeys;
        const unsigned bad = ~(good_ >> run);
        const int good = bad ? __ffs(bad) - 1 : 32;
        const int count = min(good * kKeys, min(stop - 1, live_end) - now) / L::kTile;
        if (count > 0) {
          dense_tiles(count, run, now, head);
          tile += count * L::kTile;
          continue;
        }
      }
      int pos = kDeadKey, slot = -1;
      unsigned long long from = 0;
      unsigned there = 0xffffffffu;
      if (dense) {
        slot = __shfl_sync(0xffffffffu, run_slot_, (now - window_) / kKeys + warp_);
        pos = list().pos + now + warp_ * kKeys - list().offset;
      } else {
        find(item, now, pos, slot);
        there = __ballot_sync(0xffffffffu, slot >= 0);
        const PagedKv& mine = lane_ < kKeys ? p_.k : p_.v;
        const char* at = mine.ptr;  // any address will do where nothing is read
        if (slot >= 0) at += slot_offset(mine, static_cast<unsigned>(slot), head) * kBytes<Config::kv_type>;
        from = reinterpret_cast<unsigned long long>(at);
      }
      int flags = dense ? kWideAll : (there == 0xffffffffu ? kWideLive : 0) | kWideCopied;
      if (!dense && !list().block_pos) flags |= static_cast<int>(there << 16) | kWideRuns;
      if ((tile += L::kTile) >= stop) {
        flags |= kWideEndsLeaf;
        if (++leaf >= item.leaf_end) {
          flags |= kWideEndsPass;
          more = false;
        } else {
          tile = ruler.start(leaf);
          stop = min(ruler.start(leaf + 1), item.kv_end);
        }
      }
      if (!dense) load_kept(head);
      wait_empty(tile_, 0);
      if (dense) {
        load_keys(slot, head);
      } else {
        copy(L::kOffsetStages + stage_of(tile_, 0) * L::kStageBytes, p_.k.vectors, from, there, 0);
      }
      tabulate(now, flags, dense, pos, slot, opened);
      // The rows are laid out while the first keys are on their way.
      if (!opened) open(item, head, first, rows);
      arrive(stage_of(tile_, 0), dense ? kBoxBytes * (L::kDim / 64) : 0, !dense || !opened);
      opened = true;
      if (dense) {
        load_kept(head);
        unsigned page, token;
        maps_.page_v.split(slot, page, token);
        keep_values(slot, static_cast<int>(page));
      } else {
        wait_empty(tile_, 1);
        copy(L::kOffsetStages + stage_of(tile_, 1) * L::kStageBytes, p_.v.vectors, from, there, kKeys);
        arrive(stage_of(tile_, 1), 0, true);
      }
      next_tile();
    }
    load_kept(head);
    spare_phase_ ^= 1;
  }

  // Tiles of runs that neither begin their pass nor end their leaf: most of a long list. `run`: of the first one, in
  // the window.
  __device__ __forceinline__ void dense_tiles(int count, int run, int tile, int head) {
    int pos = list().pos + tile + warp_ * kKeys - list().offset;
    run += warp_;
#pragma unroll 1
    for (; count > 0; --count) {
      const int slot = __shfl_sync(0xffffffffu, run_slot_, run);
      const int page_k = __shfl_sync(0xffffffffu, run_page_k_, run);
      const int page_v = __shfl_sync(0xffffffffu, run_page_v_, run);
      wait_empty(tile_, 0);
      tabulate(tile, kWideAll, true, pos, slot, true);
      __syncwarp();
      box(stage_of(tile_, 0), maps_.k, maps_.page_k, slot, page_k, head);
      load_kept(head);
      keep_values(slot, page_v);
      next_tile();
      run += L::kTile / kKeys;
      tile += L::kTile;
      pos += L::kTile;
    }
  }

  // This warp's rows of a stage, from a slot in a page on; arrives.
  __device__ __forceinline__ void box(int stage, const TensorMap& map, const FastDiv& pages, int slot, int page,
                                      int head) const {
    if (ptx::elect_one()) {
      const unsigned full = ptx::smem_addr(&meta_.full[stage]);
      const unsigned to = ptx::smem_addr(smem_) + L::kOffsetStages + stage * L::kStageBytes + warp_ * kBoxBytes;
      const int token = slot - page * static_cast<int>(pages.divisor);
      ptx::mbar_arrive_expect_tx(full, kBoxBytes * (L::kDim / 64));
#pragma unroll
      for (int c = 0; c < L::kDim / 64; ++c) load(to + c * L::kSlabKv, map, full, c * 64, token, head, page);
    }
    __syncwarp();
  }

  // A box.
  __device__ __forceinline__ void load(unsigned to, const TensorMap& map, unsigned full, int column, int token,
                                       int head, int page) const {
    if (once_) {
      ptx::tma_load_4d_once(to, &map, full, column, token, head, page);
    } else {
      ptx::tma_load_4d(to, &map, full, column, token, head, page);
    }
  }

  __device__ __forceinline__ void next_tile() {
    ++tile_;
    table_ = table_ + 1 == L::kTiles ? 0 : table_ + 1;
  }

  // Id of the block that holds the key at an offset of the request (-1: not listed), and the key's place in it.
  __device__ __forceinline__ int block_of(int offset, int& token) const {
    unsigned block, rest;
    part().block.split(offset - list().offset, block, rest);
    token = static_cast<int>(rest);
    return static_cast<int>(block) < list().entries ? list().indices[block] : -1;
  }

  // Whether a tile of live keys is four runs, each in one page of K and of V; lanes have the slots of the 32 runs from
  // offset `window_` on. The ids behind those are asked for when these are looked at.
  __device__ __forceinline__ bool in_runs(int tile) {
    if (tile < window_ || tile >= window_end_) {
      const FastDiv& block = part().block;
      int token, id = after_id_;
      if (tile != window_end_) id = block_of(tile + lane_ * kKeys, token);
      window_ = tile;
      window_end_ = tile + (given_ & kFirstIds ? L::kTile : kWindow);
      given_ &= ~kFirstIds;
      if (window_end_ < meta_.live_end[warp_]) after_id_ = block_of(window_end_ + lane_ * kKeys, token);
      unsigned number, rest, page_k, page_v, of_k, of_v;
      block.split(tile + lane_ * kKeys - list().offset, number, rest);
      const long long slot = static_cast<long long>(id) * block.divisor + rest;
      run_slot_ = static_cast<int>(slot);
      maps_.page_k.split(run_slot_, page_k, of_k);
      maps_.page_v.split(run_slot_, page_v, of_v);
      run_page_k_ = static_cast<int>(page_k);
      run_page_v_ = static_cast<int>(page_v);
      const bool good = id >= 0 && slot + kKeys <= p_.k.num_slots && of_k + kKeys <= maps_.page_k.divisor &&
                        of_v + kKeys <= maps_.page_v.divisor;
      good_ = __ballot_sync(0xffffffffu, good);
    }
    return (good_ >> (tile - window_) / kKeys & 15) == 15;
  }

  // Slot (-1: no key) and position of this lane's key in a tile.
  __device__ __forceinline__ void find(const WorkItem& item, int tile, int& pos, int& slot) const {
    const int offset = tile + warp_ * kKeys + lane_ % kKeys, entry = offset - list().offset;
    if (offset < item.kv_begin || offset >= meta_.live_end[warp_]) return;
    int token = entry, id = 0;
    if (list().indices) id = block_of(offset, token);
    if (id < 0) return;
    const long long base = list().indices ? 0 : list().base;
    const long long at = static_cast<long long>(id) * part().block.divisor + base + token;
    if (static_cast<unsigned long long>(at) >= static_cast<unsigned long long>(p_.k.num_slots)) return;
    slot = static_cast<int>(at);
    pos = list().pos + entry;
    if (list().block_pos) {
      unsigned block, rest;
      part().block.split(entry, block, rest);
      pos = list().block_pos[block] + static_cast<int>(rest);
    }
  }

  // Tables of this warp's keys; `dense`: the tile is runs, of which pos and slot are the first one's; `opened`: this
  // warp's rows are laid out.
  __device__ __forceinline__ void tabulate(int tile, int flags, bool dense, int pos, int slot, bool opened) {
    int low = pos, high = pos + kKeys - 1;
    if (Variant::mask_is_interval && dense && opened && lane_ == 0) {
      const WideRows<Variant>& rows = meta_.rows[warp_];
      const int begin = pos - warp_ * kKeys;
      // All of it is read at once, where && would wait for one answer before it asked for the next.
      if ((begin >= rows.low_max) & (begin + L::kTile - 1 <= rows.high_min) & (tile + L::kTile <= rows.limit_min) &
          !(Variant::reads_index_mask && rows.any_mask))
        flags |= kWideWhole;
    }
    if (dense) {
      pos += lane_;
      slot += lane_;
    } else {
      low = __reduce_min_sync(0xffffffffu, slot >= 0 ? pos : 0x7fffffff);
      high = __reduce_max_sync(0xffffffffu, pos);
    }
    if (lane_ < kKeys) {
      meta_.pos[table_][warp_ * kKeys + lane_] = pos;
      if constexpr (L::kHooks) meta_.slot[table_][warp_ * kKeys + lane_] = max(slot, 0);
    }
    if (lane_ == 0)
      meta_.span[table_][warp_] = make_int4(low, high, flags, warp_ == 1 ? list().pos + tile - list().offset : tile);
  }

  // This warp's rows of the tile's K, from slot `begin` on.
  __device__ __forceinline__ void load_keys(int begin, int head) const {
    unsigned page, token;
    maps_.page_k.split(begin, page, token);
    const int stage = stage_of(tile_, 0);
    const unsigned to = ptx::smem_addr(smem_) + L::kOffsetStages + stage * L::kStageBytes + warp_ * kBoxBytes;
    const unsigned full = ptx::smem_addr(&meta_.full[stage]);
    if (ptx::elect_one()) {
#pragma unroll
      for (int c = 0; c < L::kDim / 64; ++c)
        load(to + c * L::kSlabKv, maps_.k, full, c * 64, static_cast<int>(token), head, static_cast<int>(page));
    }
    __syncwarp();
  }

  // This warp's rows of a stage, or of Q, which lie in the same way; lane `lane` + i has the address of row i, and bit
  // `lane` + i of `there` says whether it is one.
  __device__ __forceinline__ void copy(int at, bool vectors, unsigned long long from, unsigned there, int lane) const {
    static_assert(L::kSlabQ == L::kSlabKv && kKeys == kWideRows, "one way to lie");
    char* stage = smem_ + at;
    if (vectors) {
      const int sub = lane_ / kChunks, chunk = lane_ % kChunks;
      const unsigned to = ptx::smem_addr(stage) + L::template place_of<L::kSlabKv>(warp_ * kKeys + sub, chunk);
      const unsigned live = there >> (lane + sub);
#pragma unroll 4
      for (int i = 0; i < kKeys; i += kRowsAtOnce) {
        const unsigned long long src = __shfl_sync(0xffffffffu, from, lane + i + sub) + chunk * 16;
        // Rows i and sub share no bit: the swizzle of i is an XOR.
        ptx::cp_async16((to ^ (i % 8 << 4)) + i * 128, reinterpret_cast<const void*>(src), live >> i & 1 ? 16 : 0);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kKeys; ++i) {
        const Element* src = reinterpret_cast<const Element*>(__shfl_sync(0xffffffffu, from, lane + i));
        const bool live = there >> (lane + i) & 1;
#pragma unroll 1
        for (int d = lane_; d < L::kDim; d += 32)
          *reinterpret_cast<Element*>(stage + L::template place_of<L::kSlabKv>(warp_ * kKeys + i, d / 8) + d % 8 * 2) =
              live ? src[d] : Element(0);
      }
    }
  }

  // This warp's rows of a pass, and their Q.
  __device__ __forceinline__ void open(const WorkItem& item, int head, int first, int count) {
    const int r = first + warp_ * kWideRows + lane_ % kWideRows, query = item.q_begin + r / Config::group;
    const bool real = query < item.q_end;
    // All that is read is asked for at once.
    QueryRow found{0, -1, 0};
    if (real) {
      const PartDesc& part = this->part();
      const FirstItem& line = this->line();
      found.qo_row = given_ & kFirstRows ? line.qo_row + query - item.q_begin
                     : part.qo_index     ? part.qo_index[query]
                                         : query;
      const bool one = given_ & kFirstRequest;
      found.request = one ? line.request : part.request[query];
      found.qo_pos = one ? line.qo_pos + query - item.q_begin : part.qo_pos[query];
    }
    ptx::mbar_wait(ptx::smem_addr(&meta_.spare), spare_phase_);
    const char* q = p_.q;  // any address will do where nothing is read
    if (real) q += (found.qo_row * p_.q_stride_row + (head * Config::group + r % Config::group) * p_.q_stride_head) * 2;
    copy(0, q_vectors_, reinterpret_cast<unsigned long long>(q), __ballot_sync(0xffffffffu, real), 0);
    fill_rows<Config, Variant>(p_, meta_.plan, params_, item, part(), head, first + warp_ * kWideRows,
                               meta_.rows[warp_], [&](int) { return found; });
    if (lane_ < kWideRows) {
      const int at = (item.slot + query - item.q_begin) * p_.num_qo_heads + head * Config::group + r % Config::group;
      meta_.state[warp_ * kWideRows + lane_] = real ? at : -1;
    }
    if (lane_ == 0 && warp_ == 0) {
      WidePass& pass = meta_.pass;
      pass.head = head;
      pass.first = first;
      pass.part = item.part;
      pass.rows = count;
      pass.slot = item.slot;
      pass.leaf_states = (item.q_end - item.q_begin) * p_.num_qo_heads;
      pass.fold = item.fold;
    }
    given_ &= ~(kFirstRows | kFirstRequest);
  }

  const RunParams& p_;
  const ParamRef* params_;
  const KvMaps& maps_;
  char* smem_;
  M& meta_;
  int lane_, warp_;
  unsigned tile_;                // whose K is to be asked for next
  int table_;                    // its tables
  bool later_;                   // the V of the tile before is still to be asked for,
  int later_slot_, later_page_;  // this warp's rows from a slot in a page on
  int spare_phase_;
  int given_;  // flags of what the line says of the item at hand and is still to be used
  bool q_vectors_;
  bool runs_;                    // of 16 keys: the list is of blocks of so many or a multiple
  int window_, window_end_;      // offsets: from the first of 32 runs (4 of a line's) on, or kNoWindow
  int run_slot_;                 // first slot of this lane's run
  int run_page_k_, run_page_v_;  // and its pages
  unsigned good_;                // which of the runs lie in one page of K and one of V
  int after_id_;                 // block of this lane's run in the next window
  bool once_;                    // no other item reads these keys
};

}  // namespace attnrt
