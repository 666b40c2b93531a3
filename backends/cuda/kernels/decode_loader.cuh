// SPDX-License-Identifier: Apache-2.0
// The loading warp of the decode kernel. It walks the worker's items (heads, passes over the rows, leaves, tiles) and
// fills a stage whenever one is free, K and V of a tile in turn; before the first tile of a pass it lays out the rows
// and Q. All that it waits for (items, lists, block ids, rows) is hidden behind the stages that are on their way, and
// none of its instructions stand in the way of those that compute.
#pragma once
#include "decode_keys.cuh"
#include "rows.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeLoader : public DecodeKeys<Config, Variant> {
  using Base = DecodeKeys<Config, Variant>;
  using Merges = DecodeMerges<Config, Variant>;
  using Base::await, Base::complete, Base::copy, Base::copy_runs, Base::has_runs, Base::look_up, Base::place;
  using Base::flags_, Base::kFound, Base::kGiven, Base::kPages, Base::kRuns, Base::lane_, Base::memory_, Base::meta_;
  using Base::from_k_, Base::from_v_, Base::run_slot_, Base::table, Base::tabulate;
  using Base::item_, Base::list_, Base::own_, Base::p_, Base::part_, Base::plan_, Base::ring_, Base::stage_;
  using Base::table_, Base::team_, Base::walk_, Base::window_, Base::window_end_, Base::window_id_;
  using typename Base::L;
  using typename Base::Memory;

 public:
  // Arrivals that fill a stage: every lane's copies, and the tables.
  static constexpr int kFullCount = 32 + ptx::kWarpArrivals;

  __device__ __forceinline__ DecodeLoader(const RunParams& p, const ParamRef* params, const Memory& memory, int group)
      : Base(p, memory, group), params_(params) {
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

  __device__ __forceinline__ static void prefetch_l2(const void* at) { ptx::prefetch_l2(at); }

  // By fewer stages than there are.
  __device__ __forceinline__ void advance(int by = 1) {
    if ((stage_ += by) >= stages_) {
      stage_ -= stages_;
      phase_ ^= 1;
    }
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
    typedef typename Bits<Config::q_stored_type>::type Stored;
    constexpr int kPieces = L::kDim / 8;  // of 16 bytes
    char* q = own_ + L::kOffsetQ + set() * (L::kRows * L::kPitchQ);
    constexpr int kElementQ = kBytes<Config::q_stored_type>;
    const unsigned long long strides = p_.q_stride_row | p_.q_stride_head;
    if (!((reinterpret_cast<unsigned long long>(p_.q) | strides * kElementQ) & 15)) {
      if constexpr (kElementQ == 1) {
        widen_queries(rows, q);
      } else {
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
      }
    } else {
#pragma unroll 1
      for (int i = lane_; i < L::kRows * L::kDim; i += 32) {
        const int r = i / L::kDim, d = i % L::kDim, row = rows.qo_row[r];
        reinterpret_cast<Element*>(q + r * L::kPitchQ)[d] =
            row < 0 ? Element(0) : number_of_q<Config>(reinterpret_cast<const Stored*>(query(row, rows.qo_head[r]))[d]);
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

  // Queries of 8-bit numbers as 16-bit ones, 16 at a time; all are asked for before one is widened.
  template <class Rows>
  __device__ __forceinline__ void widen_queries(const Rows& rows, char* q) const {
    constexpr int kPieces = L::kDim / 16, kMine = (L::kRows * kPieces + 31) / 32;
    uint4 x[kMine];
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const int i = n * 32 + lane_, r = i / kPieces, row = i < L::kRows * kPieces ? rows.qo_row[r] : -1;
      x[n] = make_uint4(0, 0, 0, 0);
      if (row >= 0) x[n] = *reinterpret_cast<const uint4*>(query(row, rows.qo_head[r]) + i % kPieces * 16);
    }
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const int i = n * 32 + lane_;
      if (i >= L::kRows * kPieces) continue;
      uint4* to = reinterpret_cast<uint4*>(q + i / kPieces * L::kPitchQ + i % kPieces * 32);
      unsigned y[8];
      const unsigned words[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[2 * j] = fp8x2_to_half2<Config::q_stored_type>(static_cast<unsigned short>(words[j] & 0xffffu));
        y[2 * j + 1] = fp8x2_to_half2<Config::q_stored_type>(static_cast<unsigned short>(words[j] >> 16));
      }
      to[0] = make_uint4(y[0], y[1], y[2], y[3]);
      to[1] = make_uint4(y[4], y[5], y[6], y[7]);
    }
  }

  // Address of a query's head; of a row that is not there (-1), the first one's.
  __device__ __forceinline__ const char* query(int row, int head) const {
    const long long at =
        row < 0 ? 0 : static_cast<long long>(row) * p_.q_stride_row + static_cast<long long>(head) * p_.q_stride_head;
    return p_.q + at * kBytes<Config::q_stored_type>;
  }

  const ParamRef* params_;
  int stages_;  // of the group
  int phase_;   // of the stage to fill next
  int skip_;    // tiles until this warp's turn
  int pass_;    // of the worker
};

}  // namespace attnrt
