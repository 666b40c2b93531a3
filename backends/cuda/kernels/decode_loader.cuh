// SPDX-License-Identifier: Apache-2.0
// The loading warp of the decode kernel. It walks the worker's items (heads, passes over the rows, leaves, tiles) and
// fills a stage whenever one is free, K and V of a tile in turn; before the first tile of a pass it lays out the rows
// and Q. All that it waits for (items, lists, block ids, rows) is hidden behind the stages that are on their way, and
// none of its instructions stand in the way of those that compute.
//
// A group without work has a loading warp that would only leave: it loads for another group, and all that load for one
// walk the same items and take a tile each in turn (docs/performance.md, E14).
//
// A lane finds the slots of two keys, l and l + 32, one tile ahead, or the address of one run of 16 tokens for eight
// tiles; all lanes copy.
#pragma once
#include "cursor.cuh"
#include "decode_merge.cuh"
#include "loader.cuh"
#include "rows.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeLoader {
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;
  using Memory = DecodeMemory<Config, Variant>;
  using Merges = DecodeMerges<Config, Variant>;
  // Lanes that copy a row, 16 bytes each, in pieces of 128 bytes: the fewer addresses the better, since a warp can
  // issue a copy in a quarter of the time that the next one's address takes.
  static constexpr int kLanes = L::kRowBytes < 128 ? L::kRowBytes / 16 : 8;
  static constexpr int kPieces = L::kRowBytes / (16 * kLanes);
  static constexpr int kRowsAtOnce = 32 / kLanes;

 public:
  // Arrivals that fill a stage: every lane's copies, and the tables.
  static constexpr int kFullCount = 32 + ptx::kWarpArrivals;

  // `group`: whose warp this is. Which group it loads for is known once the plan's header is there.
  __device__ __forceinline__ DecodeLoader(const RunParams& p, const ParamRef* params, const Memory& memory, int group)
      : p_(p),
        params_(params),
        memory_(memory),
        lane_(threadIdx.x % 32),
        team_(join(group)),
        own_(memory.own(team_.group)),
        meta_(*reinterpret_cast<M*>(own_ + L::kOffsetMeta)),
        walk_(meta_of(group)),
        item_(walk_.first.item),
        plan_(memory.plan()),
        list_(walk_.list) {
    phase_ = 1;
    pass_ = 0;
    skip_ = table_ = team_.place;
    stage_ = 2 * team_.place;
    ring_ = ptx::smem_addr(memory_.smem) + meta_.ring;
    stages_ = meta_.stages;
  }

  __device__ __forceinline__ void run() {
    ATTNRT_MARK(2);
    const PlanHeader& plan = plan_;
    if (team_.place < team_.size) load(team_.group * gridDim.x + blockIdx.x);
    if (plan.counters)
      Merges::finish_empty(p_, plan, params_, memory_.group_of(threadIdx.x / 32) * gridDim.x + blockIdx.x,
                           memory_.groups * gridDim.x);
  }

 private:
  // All items of a worker, of which this warp loads every tile whose turn is its.
  __device__ __forceinline__ void load(int worker) {
    const PlanHeader& plan = plan_;
    // Which items come is kept in shared memory: the lanes' registers are wanted for copies.
    FirstItem& at = walk_.first;
    if (worker < plan.firsts && at.flags & kFirstItem) {
      flags_ |= kGiven;
    } else if (plan.firsts == 0 && worker < plan.num_workers) {
      if (lane_ < 2) (&at.next)[lane_] = plan.worker_indptr[worker + lane_];
    } else if (lane_ == 0) {
      at.next = at.end = 0;
    }
    __syncwarp();
#pragma unroll 1
    for (;; flags_ &= ~kGiven) {
      const WorkItem* const next = plan.work + at.next;
      if (!(flags_ & kGiven)) {
        if (at.next >= at.end) break;
        __syncwarp();
        constexpr int kFields = sizeof(WorkItem) / sizeof(int);
        if (lane_ < kFields) reinterpret_cast<int*>(&at.item)[lane_] = reinterpret_cast<const int*>(next)[lane_];
        if (lane_ == 0) ++at.next;
        __syncwarp();
      }
      part_ = item_.part == 0 ? plan.parts : p_.plan->parts + item_.part;
      if (!(flags_ & kGiven)) {
        prefetch_l2(next + 1);
        prefetch_l2(part_->request + item_.q_begin);
        prefetch_l2(part_->qo_pos + item_.q_begin);
        if (part_->qo_index) prefetch_l2(part_->qo_index + item_.q_begin);
      } else {
        prefetch_l2(next);
      }
#pragma unroll 1
      for (int head = item_.head_begin; head < item_.head_end; ++head) {
        open_list(head);
        ATTNRT_MARK(3);
#pragma unroll 1
        for (int first = 0; first < (item_.q_end - item_.q_begin) * Config::group; first += L::kRows) pass(head, first);
      }
      __syncwarp();  // all lanes have read the item
    }
    if (skip_ > 0) return;
    await(meta_.empty[stage_], phase_);
    if (lane_ == 0) table().span = make_int4(0, 0, kOver, 0);
    complete(meta_.full[stage_]);
  }

  __device__ __forceinline__ M& meta_of(int group) const {
    return *reinterpret_cast<M*>(memory_.own(group) + L::kOffsetMeta);
  }
  __device__ __forceinline__ static void prefetch_l2(const void* at) { ptx::prefetch_l2(at); }
  __device__ __forceinline__ static void await(unsigned long long& barrier, int phase) {
    ptx::mbar_wait(ptx::smem_addr(&barrier), phase);
  }

  __device__ __forceinline__ DecodeTile<L>& table() const { return memory_.tiles(meta_)[table_]; }

  // The stage of this barrier is complete when all lanes' copies have landed. The tables are written by now.
  __device__ __forceinline__ void complete(unsigned long long& full) const {
    const unsigned barrier = ptx::smem_addr(&full);
    ptx::cp_async_mbar_arrive_noinc(barrier);
    ptx::mbar_arrive_warp(barrier, lane_);
  }

  // By fewer stages than there are.
  __device__ __forceinline__ void advance(int by = 1) {
    if ((stage_ += by) >= stages_) {
      stage_ -= stages_;
      phase_ ^= 1;
    }
  }

  // Reads what is there to know of the plan, and tells it to the group. Groups without work have nothing else to wait
  // for; their warps that load begin where those do for which they load besides.
  __device__ __forceinline__ DecodeTeam join(int group) {
    M& mine = meta_of(group);
    read_top(mine, group);
    const PlanHeader& plan = memory_.plan();
    const int workers = plan.firsts ? plan.firsts : plan.num_workers, busy = memory_.busy_of(workers);
    if (lane_ == 0) memory_.share(mine, group, busy);
    __syncwarp();
    // Where every multiprocessor has work, more than two tiles of each at once would only come later.
    const DecodeTeam team = memory_.team_of(group, busy, workers < static_cast<int>(gridDim.x) ? L::kMostGroups : 2);
    if (group >= busy) {
      if (lane_ == 0) memory_.tiles(mine)->span = make_int4(0, 0, kOver, 0);
      complete(mine.full[0]);
      if (team.place < team.size)
        reinterpret_cast<int*>(&mine.first)[lane_] = reinterpret_cast<const int*>(&meta_of(team.group).first)[lane_];
    }
    if (2 * busy <= memory_.groups) ptx::bar_sync(1 + L::kMostGroups, memory_.groups * 32);
    return team;
  }

  // The worker's first item and this group's share of the top of the header, read at once, into shared memory.
  __device__ __forceinline__ void read_top(M& to, int group) {
    const int worker = group * gridDim.x + blockIdx.x;
    const char* header = reinterpret_cast<const char*>(p_.plan);
    const unsigned at = kFirstAt + worker * sizeof(FirstItem);
    int mine = 0;
    if (at + sizeof(FirstItem) <= p_.behind + sizeof(PlanHeader))
      mine = reinterpret_cast<const int*>(header + at)[lane_];
    int i = group * 32 + lane_, word = 0;
    if (i < TopOfPlan::kWords) word = reinterpret_cast<const int*>(header)[i];
    // While these are on their way.
    flags_ = is_near(p_.k, p_.num_qo_heads) && is_near(p_.v, p_.num_qo_heads) ? kNear : 0;
    if (flags_ && p_.k.vectors && p_.v.vectors && p_.k.page.divisor == p_.v.page.divisor) flags_ |= kPages;
#pragma unroll 1
    while (i < TopOfPlan::kWords) {
      memory_.top().words[i] = word;
      if ((i += memory_.groups * 32) < TopOfPlan::kWords) word = reinterpret_cast<const int*>(header)[i];
    }
    reinterpret_cast<int*>(&to.first)[lane_] = mine;
    ptx::bar_sync(1 + L::kMostGroups, memory_.groups * 32);  // of the warps that load
  }

  // The list of blocks of the item's rows under a head.
  __device__ __forceinline__ void open_list(int head) {
    const FirstItem& first = walk_.first;
    KvList list;
    if (flags_ & kGiven && first.flags & kFirstList) {
      list.entries = first.entries;
      list.indices = part_->indices + first.list;
      list.block_pos = part_->block_pos ? part_->block_pos + first.list : nullptr;
      list.base = 0;
      list.pos = first.pos;
      list.offset = first.offset;
    } else {
      list.open(*part_, item_.row, head);
    }
    const int limit = bound_limit(plan_, item_, *part_);
    __syncwarp();
    if (lane_ == 0) {
      list_ = list;
      walk_.live_end = min(item_.kv_end, limit);
    }
    __syncwarp();
    flags_ = (flags_ & ~kRuns) | (flags_ & kPages && has_runs(list) ? kRuns : 0);
    window_ = window_end_ = 0;
  }

  // The keys of the item for kRows of its rows. An item without keys has one tile of dead ones: the empty set.
  __device__ __forceinline__ void pass(int head, int first) {
    const RulerDesc& ruler = plan_.rulers[item_.klass];
    int leaf = item_.leaf_begin, tile, stop;
    ruler.leaf(leaf, tile, stop);
    if (item_.kv_begin < item_.kv_end) {
      tile = first_tile<L::kTile>(tile, item_.kv_begin);
      stop = min(stop, item_.kv_end);
    } else {
      stop = tile;
    }
    if (window_end_ == 0 && flags_ & kGiven && walk_.first.flags & kFirstIds) {
      window_ = tile;
      window_end_ = tile + L::kTile;
      window_id_ = walk_.first.ids[lane_ & 3];
      flags_ &= ~kFound;
    }
    // From tile to tile, of which this warp fills every one whose turn is its: the number of the first such one in the
    // pass comes before any, those of later ones are known ahead by the warps' number.
    int now = 0, order = skip_, ends = 0;
    int pos[2], slot[2];
    bool held = false, dense = false, more = true;
#pragma unroll 1
    for (;;) {
#pragma unroll 1
      for (; skip_ > 0; --skip_) {
        if ((tile += L::kTile) < stop) continue;
        if (++leaf >= item_.leaf_end) {
          more = false;
          --skip_;
          break;
        }
        ruler.leaf(leaf, tile, stop);
        stop = min(stop, item_.kv_end);
      }
      const int run = (now - window_) >> 4;  // the lane that has the tile's first one, if dense
      if (more) look_up(tile);
      ATTNRT_MARK(4);
      if (held) {
        fill(now, order, ends, run, head, first, dense, pos, slot);
        order += team_.size;
      }
      if (team_.size == 1 ? held && order == 1 : !held && order + 1 == team_.size) {
        open(head, first);
        complete(meta_.open[set()]);
      }
      if (!more) break;
      now = tile;
      held = true;
      skip_ = team_.size;
      dense = place(now, head, pos, slot);
      ends = dense ? kAllLive | kDense : 0;
      if (tile + L::kTile >= stop) ends |= leaf + 1 < item_.leaf_end ? kLastOfLeaf : kLastOfLeaf | kLastOfPass;
    }
    ++pass_;
  }

  // K and V of a tile, the one of the pass whose number is `order`.
  __device__ __forceinline__ void fill(int now, int order, int flags, int run, int head, int first, bool dense,
                                       const int (&pos)[2], const int (&slot)[2]) {
    const bool last = flags & kLastOfPass;
#pragma unroll 1
    for (int values = 0; values < 2; ++values) {
      await(meta_.empty[stage_], phase_);
      const PagedKv& kv = values ? p_.v : p_.k;
      if (dense) {
        const int at = list_.pos + now - list_.offset;
        if (lane_ == 0 && !values) table().span = make_int4(at, at + L::kTile - 1, flags, now);
        if constexpr (L::kHooks) {
          if (!values) {
#pragma unroll
            for (int key = lane_; key < L::kTile; key += 32)
              table().slot[key] = __shfl_sync(0xffffffffu, run_slot_, run + key / 16) + key % 16;
          }
        }
        copy_runs(kv, values ? from_v_ : from_k_, run);
      } else {
        if (!values) tabulate(now, flags, pos, slot);
        copy(kv, head, slot);
      }
      // While keys are on their way: the last ones where all is known, the second tile's where there is to search.
      const bool search = values ? order == 0 && last : order == 1;
      if (item_.slot >= 0 && (knows_merge() ? values && last : search)) {
        await_set();
        Merges::find(meta_, plan_, walk_.first, *part_, set(), knows_merge(), head, first);
      }
      complete(meta_.full[stage_]);
      advance(values ? 2 * team_.size - 1 : 1);
      ATTNRT_MARK(values ? 7 : 6);
    }
    if ((table_ += team_.size) >= meta_.tiles) table_ -= meta_.tiles;
  }

  // Whether 32 bits hold the offset of any of the pool's rows in units of 16 bytes, and that of 16 tokens in bytes.
  __device__ __forceinline__ static bool is_near(const PagedKv& kv, int heads) {
    constexpr long long kMost = 0x7ffffff0;
    const auto far = [](long long x) { return x < 0 ? -x : x; };
    unsigned pages, rest;
    kv.page.split(static_cast<unsigned>(kv.num_slots), pages, rest);
    const long long token = far(kv.stride_token) * kBytes<Config::kv_type>;
    const long long bytes = far(kv.stride_page) * kBytes<Config::kv_type> * pages + token * kv.page.divisor +
                            far(kv.stride_head) * kBytes<Config::kv_type> * heads;
    return token <= kMost / 16 && bytes / 16 <= kMost;
  }

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

  // This lane's share of a row, all of it or (there being no row) zeros.
  __device__ __forceinline__ static void copy_row(unsigned to, const char* src, bool there = true) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) ptx::cp_async16(to + i * (64 * 128), src + i * 128, there ? 16 : 0);
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

  __device__ __forceinline__ bool knows_merge() const { return flags_ & kGiven && walk_.first.flags & kFirstMerge; }

  // The rows and Q that the pass has for itself, one set after the other.
  __device__ __forceinline__ int set() const { return pass_ % L::kSets; }

  // Waits until those who compute are through with the pass that had the set before. Passes are opened by warps in
  // turn, so that one may be several passes ahead of those who compute, and a barrier tells a phase from the one before
  // it alone: the passes are counted besides.
  __device__ __forceinline__ void await_set() const {
    if (team_.size > 1) {
#pragma unroll 1
      for (int warp = 0; warp < L::kWarps; ++warp) ptx::wait_for(&meta_.passes[warp], pass_ + 1 - 2 * L::kSets);
    }
    await(meta_.spare[set()], pass_ / L::kSets + 1 & 1);
  }

  // Rows and Q of a pass.
  __device__ __forceinline__ void open(int head, int first) {
    auto& rows = meta_.rows[set()];
    await_set();
    const bool known = flags_ & kGiven && walk_.first.flags & kFirstRow;
    fill_rows<Config, Variant>(p_, plan_, params_, item_, *part_, head, first, rows, [&](int query) {
      const FirstItem& f = walk_.first;
      return known ? QueryRow{f.request, f.qo_row, f.qo_pos} : query_row(*part_, query);
    });
    if (lane_ == 0) {
      rows.head = head;
      rows.first = first;
      rows.part = item_.part;
      rows.slot = item_.slot;
      rows.queries = item_.q_end - item_.q_begin;
      rows.fold = item_.fold;
    }
    __syncwarp();
    typedef typename Bits<Config::q_type>::type Element;
    constexpr int kPieces = L::kDim / 8;  // of 16 bytes
    char* q = own_ + L::kOffsetQ + set() * (L::kRows * L::kPitchQ);
    const unsigned long long strides = p_.q_stride_row | p_.q_stride_head;
    if (!((reinterpret_cast<unsigned long long>(p_.q) | strides * 2) & 15)) {
#pragma unroll
      for (int i = lane_; i < L::kRows * kPieces; i += 32) {
        const int r = i / kPieces, piece = i % kPieces, row = rows.qo_row[r];
        ptx::cp_async16(ptx::smem_addr(q + r * L::kPitchQ + piece * 16), query(row, rows.qo_head[r]) + piece * 16,
                        row < 0 ? 0 : 16);
      }
      if constexpr (Variant::has_query) {
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
      }
    } else {
#pragma unroll 1
      for (int i = lane_; i < L::kRows * L::kDim; i += 32) {
        const int r = i / L::kDim, d = i % L::kDim, row = rows.qo_row[r];
        reinterpret_cast<Element*>(q + r * L::kPitchQ)[d] =
            row < 0 ? Element(0) : reinterpret_cast<const Element*>(query(row, rows.qo_head[r]))[d];
      }
    }
    if constexpr (Variant::has_query) {
      __syncwarp();
#pragma unroll 1
      for (int r = 0; r < L::kRows; ++r) {
        if (rows.qo_row[r] < 0) continue;
        const Ctx c = row_ctx<Config, Variant>(p_, rows, r, head);
        map_pairs<Variant::query_pairing, Variant::query_dim, Config::head_dim, Config::q_type>(
            reinterpret_cast<Element*>(q + r * L::kPitchQ), lane_, 32,
            [&](int d, float& x0, float& x1) { Variant::query(params_, c, d, x0, x1); });
      }
    }
  }

  // Address of a query's head; of a row that is not there (-1), the first one's.
  __device__ __forceinline__ const char* query(int row, int head) const {
    const long long at =
        row < 0 ? 0 : static_cast<long long>(row) * p_.q_stride_row + static_cast<long long>(head) * p_.q_stride_head;
    return p_.q + at * 2;
  }

  const RunParams& p_;
  const ParamRef* params_;
  const Memory memory_;
  int lane_;
  const DecodeTeam team_;
  char* own_;  // the group's for which this warp loads, and its tables
  M& meta_;
  M& walk_;            // this warp's own
  unsigned ring_;      // address of the group's first stage
  int stages_;         // of the group
  int stage_, phase_;  // to fill next
  int skip_;           // tiles until this warp's turn
  // The item at hand is the worker's first, with all that FirstItem says of it; 32 bits reach all of the pools; whose
  // pages have one size, and 16-byte copies reach them too; tiles
  // of the list may be, the one to come is, four runs; the addresses of the window's runs are known.
  static constexpr unsigned kGiven = 1, kNear = 2, kRuns = 4, kTileRuns = 8, kFound = 16, kPages = 32;
  unsigned flags_;
  int table_;  // of the next tile
  int pass_;   // of the worker
  const WorkItem& item_;
  const PlanHeader& plan_;  // its top, in shared memory; not more than one part
  const PartDesc* part_;
  KvList& list_;                         // in shared memory: few of its fields are needed often
  int id_[2];                            // blocks of this lane's keys in the tile to come
  int window_, window_end_, window_id_;  // offsets in the request of the runs whose blocks the lanes hold; this lane's
  int from_k_, from_v_;
  unsigned bad_runs_;  // those that are not in the pool
  int run_slot_;       // with hooks
};

}  // namespace attnrt
