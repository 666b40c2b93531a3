// SPDX-License-Identifier: Apache-2.0
// Loaders of the Hopper prefill family: they bring Q and the K and V tiles of a worker's list into shared memory, in
// the order in which consumers want them (K of tile t + 1 before V of tile t), and say which keys a tile holds.
// Consumers see barriers and the key table only, never how the bytes came.
//
// boxes: one warp each for K and V issues TMA boxes, one box per run of 2^box_log2 tokens (a page, or a whole tile
// where KV is
//   contiguous); a warp brings Q by 16-byte asynchronous copies and one writes the rows' table. Boxes of few rows stack
//   in a swizzled tile exactly as one big box would. Keys that are not there: a box without a page is out of bounds and
//   arrives as zeros; the rest of a page is cleared in V between arrival and hand-over (weight 0 times NaN would be
//   NaN).
// gather: all four warps copy rows by 16-byte asynchronous copies from any slots; dead rows are zeros, nothing is read
// for them. Copies arrive on the barrier by themselves, so that a warp never waits for one; consumers then order their
// products after them (kConsumersFence).
#pragma once
#include "hopper_layout.cuh"
#include "loader.cuh"

namespace attnrt {

// A row in global memory as a multiple of 16 bytes from the tensor's start: 32 GiB before and behind it (strides may be
// negative). Rows beyond that take copy_far.
constexpr int kNoUnit = -0x7fffffff - 1;
__device__ __forceinline__ bool is_near(long long element) {
  return element == kNoRow || static_cast<unsigned long long>((element >> 3) + 0x7fffffff) <= 0xfffffffeull;
}
__device__ __forceinline__ int unit_of(long long element) {
  return element == kNoRow ? kNoUnit : static_cast<int>(element >> 3);
}

// Copies 32 rows of kColumns 16-bit elements into rows row0... (row0 a multiple of 32) of a swizzled tile: lane i holds
// the place of row row0 + i. kAll: all are there.
template <int kColumns, int kSlab, bool kAll>
__device__ __forceinline__ void copy_rows(const char* src, unsigned tile, int row0, int unit, int lane) {
  constexpr int kChunks = kColumns / 8;        // 16-byte chunks per row: 8 or 16, or 24, 32
  constexpr int kPer = kChunks >= 16 ? 2 : 4;  // rows per instruction
  constexpr int kLanes = 32 / kPer;            // lanes per row
  const int sub = lane / kLanes, chunk0 = lane % kLanes;
  const char* mine = src + chunk0 * 16;
  const unsigned to = tile + chunk0 / 8 * kSlab + (row0 + sub) * 128 + ((chunk0 ^ sub) & 7) * 16;
#pragma unroll
  for (int i = 0; i < 32; i += kPer) {
    const int from = __shfl_sync(0xffffffffu, unit, i + sub);
    const bool there = kAll || from != kNoUnit;
    const char* at = mine + (there ? static_cast<long long>(from) * 16 : 0);
#pragma unroll
    for (int c = 0; c < kChunks; c += kLanes) {
      const unsigned dst = (to ^ (i & 7) * 16) + i * 128 + c / 8 * kSlab;
      if (kChunks % kLanes == 0 || c + chunk0 < kChunks) ptx::cp_async16(dst, at + c * 16, there ? 16 : 0);
    }
  }
}

// The same for rows anywhere; lane i holds the offset of row row0 + i in elements.
template <int kColumns, int kSlab>
__device__ __forceinline__ void copy_far(const char* src, unsigned tile, int row0, long long offset, int lane) {
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const long long from = __shfl_sync(0xffffffffu, offset, i);
    const unsigned dst = tile + lane / 8 * kSlab + (row0 + i) * 128 + ((lane ^ (row0 + i)) & 7) * 16;
    const char* at = src + (from == kNoRow ? 0 : from) * 2 + lane * 16;
    if (lane < kColumns / 8) ptx::cp_async16(dst, at, from == kNoRow ? 0 : 16);
  }
}

template <int kColumns, int kSlab>
__device__ __forceinline__ void gather_rows(const char* src, unsigned tile, int row0, long long offset, int lane) {
  if (!__all_sync(0xffffffffu, is_near(offset))) return copy_far<kColumns, kSlab>(src, tile, row0, offset, lane);
  const int unit = unit_of(offset);
  if (__all_sync(0xffffffffu, unit != kNoUnit)) return copy_rows<kColumns, kSlab, true>(src, tile, row0, unit, lane);
  copy_rows<kColumns, kSlab, false>(src, tile, row0, unit, lane);
}

// The same, number by number, for rows that 16-byte copies cannot reach.
template <int kColumns, int kSlab>
__device__ __forceinline__ void gather_numbers(const char* src, unsigned tile, int row0, long long offset, int lane) {
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const long long from = __shfl_sync(0xffffffffu, offset, i);
    const int row = row0 + i;
#pragma unroll 1
    for (int d = lane * 2; d < kColumns; d += 64) {
      const unsigned short* at = reinterpret_cast<const unsigned short*>(src) + (from == kNoRow ? 0 : from) + d;
      const unsigned x = from == kNoRow ? 0u : at[0] | static_cast<unsigned>(at[1]) << 16;
      ptx::st_shared(tile + d / 64 * kSlab + row * 128 + ((d / 8 ^ row) & 7) * 16 + d % 8 * 2, x);
    }
  }
}

// By 16-byte copies where `vectors`, else number by number: the bits are the same. Offsets in elements.
template <int kColumns, int kSlab>
__device__ __forceinline__ void gather_any(bool vectors, const char* src, unsigned tile, int row0, long long offset,
                                           int lane) {
  if (vectors) {
    gather_rows<kColumns, kSlab>(src, tile, row0, offset, lane);
  } else {
    gather_numbers<kColumns, kSlab>(src, tile, row0, offset, lane);
  }
}

template <class Config, class Variant, Loading kHow>
class HopperLoader {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;

 public:
  // Arrivals that complete a full barrier: boxes and the table that goes with them come from two hands, copies from
  // every thread.
  static constexpr int kArrivalsQ = kHow == Loading::boxes ? 2 : 132;
  static constexpr int kArrivalsK = kHow == Loading::boxes ? 2 : 132;
  static constexpr int kArrivalsV = kHow == Loading::boxes ? 1 : 128;
  static constexpr bool kConsumersFence = kHow == Loading::gather;
  // Registers per thread. A CTA has 504 for 128 threads of the loader and 256 consumers, so that neither side spills;
  // 512 for 128 and 384, where consumers below 160 make ptxas serialise their products (C7512), so that the loader
  // spills.
  static constexpr int kRegs = L::kGroups == 3 ? 32 : 72;
  static constexpr int kConsumerRegs = L::kGroups == 3 ? (512 - kRegs) / 3 : (504 - kRegs) / 2;

  __device__ __forceinline__ HopperLoader(const RunParams& p, const ParamRef* params, const KvMaps& maps, char* smem)
      : p_(p),
        params_(params),
        maps_(maps),
        base_(ptx::smem_addr(smem)),
        meta_(*reinterpret_cast<M*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  }

  __device__ __forceinline__ void run() {
    if constexpr (kHow == Loading::boxes) {
      if (warp_ == 0) {
        run_boxes_k();
      } else if (warp_ == 1) {
        run_queries();
      } else if (warp_ == 2) {
        run_rows();
      } else {
        run_boxes_v();
      }
    } else {
      run_gather();
    }
  }

 private:
  // A tile as offsets in the request: its first key, the keys that the item wants, the keys that exist in memory.
  struct Tile {
    int offset;
    int low, high;
    int live_low, live_high;
    int shift;  // from an offset to its position, kNoShift: blocks say where they lie, or some are holes
  };
  static constexpr int kNoShift = -0x7fffffff;

  // ------------------------------------------------------------------ keys
  // A lane looks up the first key of its box (boxes) or its own key (gather): `at` is the key's place in the tile.
  __device__ __forceinline__ int lookup_key() const {
    return kHow == Loading::boxes ? lane_ << maps_.box_log2 : warp_ * 32 + lane_;
  }

  // Listed block of the key at an offset, or -1. The load is issued a tile ahead: its latency is that of L2 or worse.
  __device__ __forceinline__ int fetch_block(const PartDesc& part, const KvList& list, const Tile& tile,
                                             int offset) const {
    const int key = offset + lookup_key();
    const int span = kHow == Loading::boxes ? 1 << maps_.box_log2 : 1;  // a box may begin before what is live in it
    if (key + span <= tile.live_low || key >= min(tile.live_high, offset + L::kTile)) return -1;
    if (!list.indices) return 0;
    unsigned block, token;
    part.block.split(key - list.offset, block, token);
    return static_cast<int>(block) < list.entries ? list.indices[block] : -1;
  }

  // Slot and position of the key whose block that is; slot -1: no key.
  __device__ __forceinline__ long long slot_in(const PartDesc& part, const KvList& list, int offset, int id,
                                               int& pos) const {
    const int j = offset + lookup_key() - list.offset;
    pos = list.pos + j;
    if (id < 0) return -1;
    long long slot = list.base + j;
    if (list.indices) {
      unsigned block, token;
      part.block.split(j, block, token);
      slot = static_cast<long long>(id) * part.block.divisor + token;
      if (list.block_pos) pos = list.block_pos[block] + static_cast<int>(token);
    }
    return slot < p_.k.num_slots ? slot : -1;
  }

  // Writes 32 keys of the key table (this lane's key is there if slot >= 0) and returns what they have in common.
  __device__ __forceinline__ KeyRange describe(const Tile& tile, int stage, int key, long long slot, int pos) const {
    const int offset = tile.offset + key;
    const bool live = slot >= 0 && offset >= tile.low && offset < tile.high;
    meta_.pos[stage][key] = live ? pos : kDeadKey;
    if constexpr (L::kNeedsSlots) meta_.slot[stage][key] = live ? static_cast<int>(slot) : 0;
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
    return range;
  }

  // The same by four lanes, without a look at any key, where positions run on.
  __device__ __forceinline__ void describe_runs(const Tile& tile, int stage, int part) const {
    const int first = tile.offset + part * 32;
    const int low = max(tile.low, first), high = min(tile.high, first + 32) - 1;
    KeyRange range = {0x7fffffff, kDeadKey, 0, kKeysRun};
    if (low <= high) {
      range = {low + tile.shift, high + tile.shift, first + tile.shift, kKeysRun | (high - low == 31 ? kKeysLive : 0)};
    }
    meta_.range[stage][part] = range;
  }

  // Bounds of what exists in memory under a block row. A list may hold more than its live range; the item may want less
  // of it.
  __device__ __forceinline__ void live_range(const WorkItem& item, const PartDesc& part, const KvList& list, int head,
                                             int& low, int& high) const {
    const int entry = item.row * part.heads + (part.heads > 1 ? head : 0);
    low = list.offset + part.kv_begin[entry];
    high = min(list.offset + part.kv_end[entry], bound_limit(p_, item, part));
  }

  __device__ __forceinline__ void want(const WorkItem& item, const PartDesc& part, const KvList& list, int head,
                                       Tile& tile) const {
    live_range(item, part, list, head, tile.live_low, tile.live_high);
    tile.low = max(item.kv_begin, tile.live_low);
    tile.high = min(item.kv_end, tile.live_high);
    tile.shift = list.block_pos || !p_.plan->solid ? kNoShift : list.pos - list.offset;
    if (list.indices) {
      const long long listed = list.offset + static_cast<long long>(list.entries) * part.block.divisor;
      tile.high = static_cast<int>(min(static_cast<long long>(tile.high), listed));
    }
  }

  // Reads what a walk will ask of the item after this one, so that it lies in the first-level cache by then: the walk's
  // chain of dependent loads would else cost a few thousand clocks at every item. For one warp that has time.
  __device__ __forceinline__ void look_ahead(const WorkItem& item) const {
    const WorkItem* next = &item + 1;
    if (next >= p_.plan->work + p_.plan->worker_indptr[p_.plan->num_workers + blockIdx.x + 1]) return;
    const PartDesc& part = p_.plan->parts[next->part];
    KvList list;
    list.open(part, next->row, next->head_begin);
    Tile tile;
    live_range(*next, part, list, next->head_begin, tile.live_low, tile.live_high);
    int stop;
    leaf_range<L::kTile>(p_, *next, next->leaf_begin, tile.offset, stop);
    ptx::loaded(fetch_block(part, list, tile, tile.offset));
    ptx::loaded(list.pos + static_cast<int>(list.base));
    const int query = next->q_begin + lane_;
    if (query < next->q_end) ptx::loaded(part.request[query] + part.qo_pos[query]);
  }

  // Calls f(tile, head, slot, pos) for every tile of the worker's list; slot and pos are those of the lane's lookup
  // key.
  // open(item, part, head, first) comes before the tiles of each pass.
  template <class Open, class F>
  __device__ __forceinline__ void walk_tiles(Open&& open, F&& f) {
    walk_passes<L::kRows, Config::group>(p_, blockIdx.x, [&](const WorkItem& item, int head, int first) {
      const PartDesc& part = p_.plan->parts[item.part];
      open(item, part, head, first);
      KvList list;
      list.open(part, item.row, head);
      Tile tile;
      want(item, part, list, head, tile);
#pragma unroll 1
      for (int leaf = item.leaf_begin; leaf < max(item.leaf_end, item.leaf_begin + 1); ++leaf) {
        int stop;
        leaf_range<L::kTile>(p_, item, leaf, tile.offset, stop);
        int id = fetch_block(part, list, tile, tile.offset);
#pragma unroll 1
        for (; tile.offset < stop; tile.offset += L::kTile) {
          const int next = fetch_block(part, list, tile, tile.offset + L::kTile);
          int pos;
          const long long slot = slot_in(part, list, tile.offset, id, pos);
          f(tile, head, slot, pos);
          id = next;
        }
      }
    });
  }

  __device__ __forceinline__ static unsigned bar(const unsigned long long& b) { return ptx::smem_addr(&b); }

  // ------------------------------------------------------------------ queries
  // Offset of row `first + r` of an item in q, or kNoRow.
  __device__ __forceinline__ long long query_offset(const WorkItem& item, const PartDesc& part, int head,
                                                    int row) const {
    const int query = item.q_begin + row / Config::group;
    if (query >= item.q_end) return kNoRow;
    const long long qo_row = part.qo_index ? part.qo_index[query] : query;
    return qo_row * p_.q_stride_row +
           static_cast<long long>(head * Config::group + row % Config::group) * p_.q_stride_head;
  }

  // What the plan says of a query: loaded for several rows at once, because each load may take a thousand clocks.
  struct Query {
    int at;  // index in the part's queries, or -1
    int request, qo_row, pos;
  };
  __device__ __forceinline__ Query fetch_query(const WorkItem& item, const PartDesc& part, int row) const {
    const int query = item.q_begin + row / Config::group;
    Query x = {-1, 0, query, 0};
    if (query < item.q_end) {
      x.at = query;
      x.request = part.request[query];
      x.pos = part.qo_pos[query];
      if (part.qo_index) x.qo_row = part.qo_index[query];
    }
    return x;
  }

  // Table entry of row r of a pass.
  __device__ __forceinline__ void write_row(const WorkItem& item, const PartDesc& part, int head, int first, int r,
                                            const Query& query, int buffer) {
    int4 row = make_int4(-1, 0, 0x7fffffff, kDeadKey);
    int2 request = make_int2(0, 0x7fffffff);
    long long bit = kNoMask;
    int from = 0;
    if (query.at >= 0) {
      request.x = query.request;
      const int shift = bound_shift(p_, request.x);
      row.x = query.qo_row;
      row.y = query.pos + shift;
      row.z = kDeadKey + 1;
      row.w = 0x7fffffff;
      if (p_.plan->bound_kv_lens) request.y = kv_len_of(p_, request.x);
      if constexpr (Variant::has_mask) {
        Ctx c;
        c.request = request.x;
        c.qo_row = row.x;
        c.qo_pos = row.y;
        c.kv_head = head;
        c.qo_head = head * Config::group + (first + r) % Config::group;
        c.qo_len = p_.plan->qo_lens[request.x];
        c.kv_len = kv_len_of(p_, request.x);
        c.kv_pos = 0;
        c.kv_slot = 0;
        Variant::visible(Variant::row(params_, c), row.z, row.w);
        row.z = max(row.z, kDeadKey + 1);
      }
      if constexpr (Variant::reads_index_mask) {
        if (part.mask_offset && part.mask_offset[query.at] >= 0) {
          from = part.mask_begin[item.row] + shift;
          bit = part.mask_offset[query.at] - from;
        }
      }
    }
    meta_.row[buffer][r] = row;
    meta_.row_request[buffer][r] = request;
    if constexpr (Variant::reads_index_mask) {
      meta_.mask_bit[buffer][r] = bit;
      meta_.mask_from[buffer][r] = from;
    }
  }

  // The record of a pass; a warp's work, because bounds of lengths are.
  __device__ __forceinline__ void write_pass(const WorkItem& item, const PartDesc& part, int head, int first,
                                             int buffer) {
    KvList list;
    list.open(part, item.row, head);
    Tile tile;
    want(item, part, list, head, tile);
    if (lane_ != 0) return;
    PassRecord& pass = meta_.pass[buffer];
    pass.shift = list.pos - list.offset;
    pass.live_begin = tile.low;
    pass.live_end = tile.shift == kNoShift ? tile.low : tile.high;
    pass.item = item;
    pass.head = head;
    pass.first = first;
    pass.done = 0;
    leaf_range<L::kTile>(p_, item, item.leaf_begin, pass.begin, pass.stop);
  }

  __device__ __forceinline__ void wait_queries(int count) const {
    ptx::mbar_wait(bar(meta_.q_empty[count & 1]), (count >> 1 & 1) ^ 1);
  }

  __device__ __forceinline__ void run_rows() {
    int count = 0;
    walk_passes<L::kRows, Config::group>(p_, blockIdx.x, [&](const WorkItem& item, int head, int first) {
      const PartDesc& part = p_.plan->parts[item.part];
      Query query[L::kRows / 32];
#pragma unroll
      for (int i = 0; i < L::kRows / 32; ++i) query[i] = fetch_query(item, part, first + i * 32 + lane_);
      look_ahead(item);
      wait_queries(count);
      write_pass(item, part, head, first, count & 1);
#pragma unroll
      for (int i = 0; i < L::kRows / 32; ++i) {
        write_row(item, part, head, first, i * 32 + lane_, query[i], count & 1);
      }
      __syncwarp();
      if (lane_ == 0) ptx::mbar_arrive(bar(meta_.q_full[count & 1]));
      ++count;
    });
    wait_queries(count);
    if (lane_ == 0) {
      meta_.pass[count & 1].done = 1;
      ptx::mbar_arrive(bar(meta_.q_full[count & 1]));
    }
  }

  __device__ __forceinline__ void run_queries() {
    int count = 0;
    walk_passes<L::kRows, Config::group>(p_, blockIdx.x, [&](const WorkItem& item, int head, int first) {
      const PartDesc& part = p_.plan->parts[item.part];
#pragma unroll 1
      for (int row = lane_; row < L::kRows; row += 32) {
        const long long at = query_offset(item, part, head, first + row);
        if (at != kNoRow) ptx::prefetch_l2<L::kDim * 2>(p_.q + at * 2);
      }
      wait_queries(count);
#pragma unroll 1
      for (int row = 0; row < L::kRows; row += 32) {
        gather_any<L::kDim, L::kSlabQ>(vector_queries(), p_.q, base_ + (count & 1) * L::kBytesQ, row,
                                       query_offset(item, part, head, first + row + lane_), lane_);
      }
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane_ == 0) ptx::mbar_arrive(bar(meta_.q_full[count & 1]));
      ++count;
    });
    wait_queries(count);
    if (lane_ == 0) ptx::mbar_arrive(bar(meta_.q_full[count & 1]));
  }

  // ------------------------------------------------------------------ boxes
  // One tile of K or V as kBoxes boxes: lane b holds the coordinates of box b (page -1: nothing there). All coordinates
  // are fetched before the elected thread issues: under elect.sync an operation costs 26 clocks, in a loop with
  // shuffles 130.
  template <int kColumns, int kBoxes>
  __device__ __forceinline__ void issue_boxes(const TensorMap& map, unsigned dst, unsigned full, int token, int page,
                                              int head) const {
    int tokens[kBoxes], pages[kBoxes];
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      tokens[b] = __shfl_sync(0xffffffffu, token, b);
      pages[b] = __shfl_sync(0xffffffffu, page, b);
    }
    if (ptx::elect_one()) {
      ptx::mbar_arrive_expect_tx(full, L::kTile * kColumns * 2);
#pragma unroll
      for (int b = 0; b < kBoxes; ++b)
#pragma unroll
        for (int c = 0; c < kColumns / 64; ++c) {
          ptx::tma_load_4d(dst + b * (L::kTile / kBoxes) * 128 + c * L::kSlabKv, &map, full, c * 64, tokens[b], head,
                           pages[b]);
        }
    }
    __syncwarp();
  }

  template <int kColumns>
  __device__ __forceinline__ void issue(const TensorMap& map, unsigned dst, unsigned full, int token, int page,
                                        int head) const {
    static_assert(L::kTile == 128, "boxes of 16 to 128 tokens");
    switch (maps_.box_log2) {
      case 7:
        return issue_boxes<kColumns, 1>(map, dst, full, token, page, head);
      case 6:
        return issue_boxes<kColumns, 2>(map, dst, full, token, page, head);
      case 5:
        return issue_boxes<kColumns, 4>(map, dst, full, token, page, head);
      default:
        return issue_boxes<kColumns, 8>(map, dst, full, token, page, head);
    }
  }

  // Coordinates of a slot under one map.
  __device__ __forceinline__ static void locate(const FastDiv& div, long long slot, int& token, int& page) {
    unsigned p, t;
    div.split(static_cast<unsigned>(slot), p, t);
    token = slot < 0 ? 0 : static_cast<int>(t);
    page = slot < 0 ? -1 : static_cast<int>(p);
  }

  __device__ __forceinline__ void clear_rows(unsigned tile, int first, int stop) const {
    for (int i = lane_; i < (stop - first) * 8; i += 32) {
#pragma unroll
      for (int c = 0; c < L::kDimVo / 64; ++c) {
        ptx::fill_shared16(tile + c * L::kSlabKv + first * 128 + i * 16, 0);
      }
    }
  }

  struct Nothing {
    __device__ __forceinline__ void operator()(const WorkItem&, const PartDesc&, int, int) const {}
  };

  __device__ __forceinline__ void run_boxes_v() {
    if (ptx::elect_one()) ptx::tma_prefetch_map(&maps_.v);
    int t = 0, patches = 0;
    walk_tiles(Nothing(), [&](const Tile& tile, int head, long long slot, int) {
      const int stage = t % L::kStages;
      const unsigned dst = base_ + L::kOffsetV + stage * L::kBytesV;
      const int from = tile.live_low - tile.offset, to = tile.live_high - tile.offset;  // rows that hold keys
      int token, page;
      locate(maps_.page_v, slot, token, page);
      ptx::mbar_wait(bar(meta_.v_empty[stage]), (t / L::kStages & 1) ^ 1);
      if (from <= 0 && to >= L::kTile) {
        issue<L::kDimVo>(maps_.v, dst, bar(meta_.v_full[stage]), token, page, head);
      } else {
        issue<L::kDimVo>(maps_.v, dst, bar(meta_.patch), token, page, head);
        ptx::mbar_wait(bar(meta_.patch), patches & 1);
        ++patches;
        clear_rows(dst, 0, min(max(from, 0), L::kTile));
        clear_rows(dst, max(min(to, L::kTile), 0), L::kTile);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ptx::mbar_arrive(bar(meta_.v_full[stage]));
      }
      ++t;
    });
  }

  __device__ __forceinline__ void run_boxes_k() {
    if (ptx::elect_one()) ptx::tma_prefetch_map(&maps_.k);
    int t = 0;
    walk_tiles(Nothing(), [&](const Tile& tile, int head, long long slot, int pos) {
      const int stage = t % L::kStages;
      int token, page;
      locate(maps_.page_k, slot, token, page);
      ptx::mbar_wait(bar(meta_.k_empty[stage]), (t / L::kStages & 1) ^ 1);
      issue<L::kDim>(maps_.k, base_ + L::kOffsetK + stage * L::kBytesK, bar(meta_.k_full[stage]), token, page, head);
      const bool runs = !L::kNeedsKeys && tile.shift != kNoShift;
      if (runs && lane_ < L::kTile / 32) describe_runs(tile, stage, lane_);
#pragma unroll
      for (int part = 0; !runs && part < L::kTile / 32; ++part) {
        const int key = part * 32 + lane_, box = key >> maps_.box_log2, rest = key - (box << maps_.box_log2);
        const long long first = __shfl_sync(0xffffffffu, slot, box);
        const int first_pos = __shfl_sync(0xffffffffu, pos, box);
        const KeyRange range = describe(tile, stage, key, first < 0 ? -1 : first + rest, first_pos + rest);
        if (lane_ == 0) meta_.range[stage][part] = range;
      }
      __syncwarp();
      if (lane_ == 0) ptx::mbar_arrive(bar(meta_.k_full[stage]));
      ++t;
    });
  }

  // ------------------------------------------------------------------ gather
  __device__ __forceinline__ void gather_queries(const WorkItem& item, const PartDesc& part, int head, int first,
                                                 int count) {
    const int buffer = count & 1;
    wait_queries(count);
#pragma unroll 1
    for (int row = warp_ * 32; row < L::kRows; row += 128) {
      const Query query = fetch_query(item, part, first + row + lane_);
      gather_any<L::kDim, L::kSlabQ>(vector_queries(), p_.q, base_ + buffer * L::kBytesQ, row,
                                     query_offset(item, part, head, first + row + lane_), lane_);
      write_row(item, part, head, first, row + lane_, query, buffer);
    }
    if (warp_ == 0) write_pass(item, part, head, first, buffer);
    arrive(bar(meta_.q_full[buffer]), vector_queries());
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(bar(meta_.q_full[buffer]));
  }

  __device__ __forceinline__ bool vector_queries() const {
    return ((reinterpret_cast<unsigned long long>(p_.q) | (p_.q_stride_row | p_.q_stride_head) * 2) & 15) == 0;
  }

  // This thread's copies arrive when they are done; what it stored itself is done.
  __device__ __forceinline__ static void arrive(unsigned full, bool copies) {
    if (copies) {
      ptx::cp_async_mbar_arrive_noinc(full);
    } else {
      ptx::mbar_arrive(full);
    }
  }

  __device__ __forceinline__ void gather_v(int t, int slot, int head) {
    const int stage = t % L::kStages;
    ptx::mbar_wait(bar(meta_.v_empty[stage]), (t / L::kStages & 1) ^ 1);
    const long long from = slot < 0 ? kNoRow : slot_offset(p_.v, static_cast<unsigned>(slot), head);
    gather_any<L::kDimVo, L::kSlabKv>(p_.v.vectors, p_.v.ptr, base_ + L::kOffsetV + stage * L::kBytesV, warp_ * 32,
                                      from, lane_);
    arrive(bar(meta_.v_full[stage]), p_.v.vectors);
  }

  __device__ __forceinline__ void run_gather() {
    static_assert(L::kTile == 128, "a warp brings 32 keys");
    int t = 0, count = 0, before_head = 0;
    int before = -1;  // V of the tile before is still to come
    walk_tiles([&](const WorkItem& item, const PartDesc& part, int head,
                   int first) { gather_queries(item, part, head, first, count++); },
               [&](const Tile& tile, int head, long long slot, int pos) {
                 const int stage = t % L::kStages;
                 const long long k = slot < 0 ? kNoRow : slot_offset(p_.k, static_cast<unsigned>(slot), head);
                 ptx::mbar_wait(bar(meta_.k_empty[stage]), (t / L::kStages & 1) ^ 1);
                 gather_any<L::kDim, L::kSlabKv>(p_.k.vectors, p_.k.ptr, base_ + L::kOffsetK + stage * L::kBytesK,
                                                 warp_ * 32, k, lane_);
                 arrive(bar(meta_.k_full[stage]), p_.k.vectors);
                 if (!L::kNeedsKeys && tile.shift != kNoShift) {
                   if (lane_ == 0) describe_runs(tile, stage, warp_);
                 } else {
                   const KeyRange range = describe(tile, stage, warp_ * 32 + lane_, slot, pos);
                   if (lane_ == 0) meta_.range[stage][warp_] = range;
                 }
                 __syncwarp();
                 if (lane_ == 0) ptx::mbar_arrive(bar(meta_.k_full[stage]));
                 if (t > 0) gather_v(t - 1, before, before_head);
                 before = static_cast<int>(slot);
                 before_head = head;
                 ++t;
               });
    if (t > 0) gather_v(t - 1, before, before_head);
    wait_queries(count);
    if (warp_ == 0 && lane_ == 0) meta_.pass[count & 1].done = 1;
    ptx::mbar_arrive(bar(meta_.q_full[count & 1]));
    __syncwarp();
    if (lane_ == 0) ptx::mbar_arrive(bar(meta_.q_full[count & 1]));
  }

  const RunParams& p_;
  const ParamRef* params_;
  const KvMaps& maps_;
  const unsigned base_;
  M& meta_;
  int lane_, warp_;
};

}  // namespace attnrt
