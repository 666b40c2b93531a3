// SPDX-License-Identifier: Apache-2.0
// The loading warp of the decode kernel. It walks the worker's items (heads, passes over the rows, leaves, tiles) and
// fills a stage whenever one is free, K and V of a tile in turn; before the first tile of a pass it lays out the rows
// and Q. All that it waits for (items, lists, block ids, rows) is hidden behind the stages that are on their way, and
// none of its instructions stand in the way of those that compute.
//
// A lane finds the slots of two keys, l and l + 32, or the addresses of one run of 16, one tile ahead; all lanes copy.
#pragma once
#include "cursor.cuh"
#include "decode_layout.cuh"
#include "loader.cuh"
#include "merge.cuh"
#include "rows.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeLoader {
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;
  static constexpr int kChunks = L::kRowBytes / 16;
  static constexpr int kRowsAtOnce = 32 / kChunks;

 public:
  // Arrivals that fill a stage: every lane's copies, and the tables.
  static constexpr int kFullCount = 32 + ptx::kWarpArrivals;

  __device__ __forceinline__ DecodeLoader(const RunParams& p, const ParamRef* params, char* smem, M& meta)
      : p_(p), params_(params), smem_(smem), meta_(meta), lane_(threadIdx.x % 32), item_(meta.item) {
    stage_ = table_ = set_ = 0;
    phase_ = spare_phase_ = 1;
    const unsigned long long strides = p.q_stride_row | p.q_stride_head;
    q_vectors_ = !((reinterpret_cast<unsigned long long>(p.q) | strides * 2) & 15);
  }

  __device__ __forceinline__ void run() {
    const PlanHeader& plan = *p_.plan;
    int next = 0, end = 0;
    constexpr int kFields = sizeof(WorkItem) / sizeof(int);
    int field = 0,
        guess = blockIdx.x;  // where no worker has two items, number b is worker b's: read it beside its number
    if (blockIdx.x < plan.num_workers) {
      if (lane_ < kFields && guess < plan.num_items) field = reinterpret_cast<const int*>(plan.work + guess)[lane_];
      next = plan.worker_indptr[blockIdx.x];
      end = plan.worker_indptr[blockIdx.x + 1];
    }
#pragma unroll 1
    for (; next < end; ++next) {
      ATTNRT_MARK(2);
      if (lane_ < kFields) {
        if (next != guess) field = reinterpret_cast<const int*>(plan.work + next)[lane_];
        reinterpret_cast<int*>(&meta_.item)[lane_] = field;
      }
      guess = -1;
      __syncwarp();
      part_ = plan.parts + item_.part;
      if (next + 1 < end) prefetch_l2(plan.work + next + 1);
      prefetch_l2(part_->request + item_.q_begin);
      prefetch_l2(part_->qo_pos + item_.q_begin);
      if (part_->qo_index) prefetch_l2(part_->qo_index + item_.q_begin);
#pragma unroll 1
      for (int head = item_.head_begin; head < item_.head_end; ++head) {
        list_.open(*part_, item_.row, head);
        ATTNRT_MARK(3);
        has_runs_ = has_runs();
        live_end_ = min(item_.kv_end, bound_limit(p_, item_, *part_));
#pragma unroll 1
        for (int first = 0; first < (item_.q_end - item_.q_begin) * Config::group; first += L::kRows) pass(head, first);
      }
      __syncwarp();  // all lanes have read the item
    }
    if (plan.counters) finish_empty(plan);
    await(meta_.empty[stage_], phase_);
    if (lane_ == 0) meta_.span[table_] = make_int4(0, 0, kOver, 0);
    arrive();
  }

 private:
  __device__ __forceinline__ static void prefetch_l2(const void* at) { ptx::prefetch_l2(at); }
  __device__ __forceinline__ static void await(unsigned long long& barrier, int phase) {
    ptx::mbar_wait(ptx::smem_addr(&barrier), phase);
  }

  // This stage is complete when all lanes' copies have landed. The tables are written by now.
  __device__ __forceinline__ void arrive() {
    const unsigned barrier = ptx::smem_addr(&meta_.full[stage_]);
    ptx::cp_async_mbar_arrive_noinc(barrier);
    ptx::mbar_arrive_warp(barrier, lane_);
    if (++stage_ == L::kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // The keys of the item for kRows of its rows. An item without keys has one tile of dead ones: the empty set.
  __device__ __forceinline__ void pass(int head, int first) {
    const RulerDesc& ruler = p_.plan->rulers[item_.klass];
    const bool any = item_.kv_begin < item_.kv_end;
    int leaf = item_.leaf_begin;
    const int start = ruler.start(leaf);
    int tile = any ? first_tile<L::kTile>(start, item_.kv_begin) : start;
    int stop = any ? min(ruler.start(leaf + 1), item_.kv_end) : start;
    look_up(tile);
    ATTNRT_MARK(4);
    int tiles = 0;  // so far
    bool more = true;
#pragma unroll 1
    while (more) {
      const int now = tile;
      int pos[2], slot[2];
      const bool dense = place(now, pos, slot);
      const unsigned long long from = dense ? run_at(head) : 0;
      [[maybe_unused]] const int run_slot = id_[0] * static_cast<int>(part_->block.divisor) + token_[0];
      int flags = dense ? kAllLive | kDense : 0;
      if ((tile += L::kTile) >= stop) {
        flags |= kLastOfLeaf;
        if (++leaf >= item_.leaf_end) {
          flags |= kLastOfPass;
          more = false;
        } else {
          tile = ruler.start(leaf);
          stop = min(ruler.start(leaf + 1), item_.kv_end);
        }
      }
      if (more) look_up(tile);
#pragma unroll 1
      for (int values = 0; values < 2; ++values) {
        await(meta_.empty[stage_], phase_);
        const PagedKv& kv = values ? p_.v : p_.k;
        if (dense) {
          const int at = list_.pos + now - list_.offset;
          if (lane_ == 0 && !values) meta_.span[table_] = make_int4(at, at + L::kTile - 1, flags, now);
          if constexpr (L::kHooks) {
            if (!values) {
#pragma unroll
              for (int key = lane_; key < L::kTile; key += 32)
                meta_.slot[table_][key] = __shfl_sync(0xffffffffu, run_slot, key / 16) + key % 16;
            }
          }
          copy_runs(kv, from, 4 * values);
        } else {
          if (!values) tabulate(now, flags, pos, slot);
          copy(kv, head, slot);
        }
        // The rest of what the pass needs is laid out while the first keys are on their way.
        if (!values && tiles == 0) open(head, first);
        if (item_.slot >= 0 && (values ? !more && tiles == 0 : tiles == 1)) find_merges(head, first);
        arrive();
        ATTNRT_MARK(values ? 7 : 6);
      }
      ++tiles;
      table_ = table_ + 1 == L::kTiles ? 0 : table_ + 1;
    }
    if (++set_ == L::kSets) {
      set_ = 0;
      spare_phase_ ^= 1;
    }
  }

  // The usual case, in a few instructions: blocks of the cache's own pages, 16 tokens or a multiple, so that a tile is
  // four runs of 16 tokens. Lanes 0 to 3 find the runs' addresses in K, lanes 4 to 7 in V.
  __device__ __forceinline__ bool has_runs() const {
    const unsigned block = part_->block.divisor;
    return list_.indices && !list_.block_pos && !(block & 15) && !(list_.offset & 15) && block == p_.k.page.divisor &&
           block == p_.v.page.divisor && p_.k.vectors && p_.v.vectors;
  }

  // Address of this lane's run; its block is a page.
  __device__ __forceinline__ unsigned long long run_at(int head) const {
    const PagedKv& kv = lane_ & 4 ? p_.v : p_.k;
    const long long at = static_cast<long long>(id_[0]) * kv.stride_page +
                         static_cast<long long>(token_[0]) * kv.stride_token +
                         static_cast<long long>(head) * kv.stride_head;
    return reinterpret_cast<unsigned long long>(kv.ptr) + at * kBytes<Config::kv_type>;
  }

  // Reads the block ids of this lane's keys, or of its run. Nothing depends on them before place().
  __device__ __forceinline__ void look_up(int tile) {
    dense_ = has_runs_ && !(tile & 15) && tile >= item_.kv_begin && tile + L::kTile <= live_end_;
    if (dense_) {
      id_[0] = block_of(tile + (lane_ & 3) * 16, token_[0]);
    } else {
      look_up_keys(tile);
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
      if (offset < item_.kv_begin || offset >= live_end_) continue;
      token_[h] = offset - list_.offset;
      id_[h] = 0;
      if (list_.indices) id_[h] = block_of(offset, token_[h]);
    }
  }

  // True: four runs of live keys. Else slots (-1: no key) and positions of this lane's keys.
  __device__ __forceinline__ bool place(int tile, int (&pos)[2], int (&slot)[2]) {
    const unsigned divisor = part_->block.divisor;
    if (dense_) {
      const long long end = (static_cast<long long>(id_[0]) + 1) * divisor;
      if (__all_sync(0xffffffffu, id_[0] >= 0 && end <= p_.k.num_slots)) return true;
      look_up_keys(tile);  // some id names no block
    }
    const long long base = list_.indices ? 0 : list_.base;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pos[h] = kDeadKey;
      slot[h] = -1;
      if (id_[h] < 0) continue;
      const long long at = static_cast<long long>(id_[h]) * divisor + base + token_[h];
      if (static_cast<unsigned long long>(at) >= static_cast<unsigned long long>(p_.k.num_slots)) continue;
      slot[h] = static_cast<int>(at);
      const int entry = tile + 32 * h + lane_ - list_.offset;
      pos[h] = list_.pos + entry;
      if (list_.block_pos) {
        unsigned block, token;
        part_->block.split(entry, block, token);
        pos[h] = list_.block_pos[block] + static_cast<int>(token);
      }
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
      meta_.pos[table_][32 * h + lane_] = pos[h];
      if constexpr (L::kHooks) meta_.slot[table_][32 * h + lane_] = live[h] ? slot[h] : 0;
    }
    if (lane_ == 0) meta_.span[table_] = make_int4(low, high, flags, tile);
  }

  // Row k + (row of this lane) of a stage, where row k is k whole steps of kRowsAtOnce: the swizzle of k's low bits is
  // an XOR.
  __device__ __forceinline__ static unsigned row_at(unsigned to, int k) {
    return L::kRowBytes == 64 ? to + k * 64 : (to ^ (k % 8 << 4)) + k * 128;
  }
  __device__ __forceinline__ unsigned stage_at(int row, int chunk) const {
    return ptx::smem_addr(smem_ + stage_ * L::kStageBytes) + swizzled<L::kRowBytes>(row, chunk);
  }

  // Four runs of 16 tokens, whose addresses lanes `lane` onward have.
  __device__ __forceinline__ void copy_runs(const PagedKv& kv, unsigned long long from, int lane) const {
    const int row = lane_ / kChunks, chunk = lane_ % kChunks;
    const unsigned to = stage_at(row, chunk);
    const long long stride = kv.stride_token * kBytes<Config::kv_type>;
    const long long mine = row * stride + chunk * 16, step = kRowsAtOnce * stride;
#pragma unroll
    for (int k = 0; k < L::kTile; k += 16) {
      unsigned long long src = __shfl_sync(0xffffffffu, from, lane + k / 16) + mine;
#pragma unroll
      for (int i = 0; i < 16; i += kRowsAtOnce, src += step)
        ptx::cp_async16(row_at(to, k + i), reinterpret_cast<const void*>(src));
    }
  }

  // Rows of any slots.
  __device__ __forceinline__ void copy(const PagedKv& kv, int head, const int (&slot)[2]) const {
    unsigned long long from[2];
    unsigned there[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const char* at = kv.ptr;  // any address will do where nothing is read
      if (slot[h] >= 0) at += slot_offset(kv, static_cast<unsigned>(slot[h]), head) * kBytes<Config::kv_type>;
      from[h] = reinterpret_cast<unsigned long long>(at);
      there[h] = __ballot_sync(0xffffffffu, slot[h] >= 0);
    }
    char* stage = smem_ + stage_ * L::kStageBytes;
    if (kv.vectors) {
      const int row = lane_ / kChunks, chunk = lane_ % kChunks;
      const unsigned to = stage_at(row, chunk);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned live = there[h] >> row;
#pragma unroll 4
        for (int i = 0; i < 32; i += kRowsAtOnce) {
          const unsigned long long src = __shfl_sync(0xffffffffu, from[h], i + row) + chunk * 16;
          ptx::cp_async16(row_at(to, 32 * h + i), reinterpret_cast<const void*>(src), live >> i & 1 ? 16 : 0);
        }
      }
    } else {
      typedef typename Bits<Config::kv_type>::type Element;
#pragma unroll 1
      for (int key = 0; key < L::kTile; ++key) {
        const Element* src =
            reinterpret_cast<const Element*>(__shfl_sync(0xffffffffu, key < 32 ? from[0] : from[1], key % 32));
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

  // Where the states of the pass's queries are counted and merged: a lane per row searches the merge list, which rises
  // with row and head. While the last keys are on their way.
  __device__ __forceinline__ void find_merges(int head, int first) const {
    auto& rows = meta_.rows[set_];
    const PlanHeader& plan = *p_.plan;
    if (lane_ >= L::kRows) return;
    const int row = rows.qo_row[lane_];
    const bool wanted = row >= 0 && (lane_ == 0 || (first + lane_) % Config::group == 0);
    int low = 0;
#pragma unroll 1
    for (int high = plan.num_merges; high - low > 1;) {
      const int middle = (low + high) / 2;
      const MergeRow& at = plan.merge_rows[middle];
      if (at.qo_row < row || (at.qo_row == row && at.head_begin <= head)) {
        low = middle;
      } else {
        high = middle;
      }
    }
    rows.counter[lane_] = -1;
    if (!wanted || !plan.counters) return;
    const MergeRow at = plan.merge_rows[low];
    rows.counter[lane_] = low * (at.head_end - at.head_begin) + head - at.head_begin;
    prefetch_l2(plan.merge_slots + at.slot_begin);
    rows.merge_begin[lane_] = at.slot_begin;
    rows.merge_end[lane_] = at.slot_end;
  }

  // Rows of the merge list that no item has: the empty set.
  __device__ __noinline__ void finish_empty(const PlanHeader& plan) const {
    const Merge<Config, Variant, L::kMergeBatch> merge(p_, params_);
#pragma unroll 1
    for (int i = blockIdx.x; i < plan.num_merges; i += gridDim.x) {
      const MergeRow row = plan.merge_rows[i];
      if (row.slot_begin != row.slot_end) continue;
#pragma unroll 1
      for (int head = row.head_begin * Config::group; head < row.head_end * Config::group; ++head)
        merge.finish(row, head, merge.empty());
    }
  }

  // Rows and Q of a pass.
  __device__ __forceinline__ void open(int head, int first) {
    auto& rows = meta_.rows[set_];
    await(meta_.spare[set_], spare_phase_);
    fill_rows<Config, Variant>(p_, params_, item_, *part_, head, first, rows);
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
    char* q = smem_ + L::kOffsetQ + set_ * (L::kRows * L::kPitchQ);
    if (q_vectors_) {
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
  char* smem_;
  M& meta_;
  int lane_;
  int stage_, phase_;  // to fill next
  int table_;          // of the next tile
  int set_, spare_phase_;
  bool q_vectors_;
  const WorkItem& item_;
  const PartDesc* part_;
  KvList list_;
  int live_end_;           // keys of the item that any of its rows has
  int id_[2], token_[2];   // block and place in it of this lane's keys, or of its run, in the tile to come
  bool has_runs_, dense_;  // tiles of this list may be, the one to come is, four runs
};

}  // namespace attnrt
