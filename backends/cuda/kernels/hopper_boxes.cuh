// SPDX-License-Identifier: Apache-2.0
// The loader of boxes: one warp each for K and V issues TMA boxes, one box per run of 2^box_log2 tokens (a page, or a
// whole tile where KV is contiguous); a warp brings Q by 16-byte asynchronous copies and one writes the rows' table.
// Boxes of few rows stack in a swizzled tile exactly as one big box would. Keys that are not there: a box without a
// page is out of bounds and arrives as zeros; the rest of a page is cleared in V between arrival and hand-over (weight
// 0 times NaN would be NaN).
#pragma once
#include "hopper_tables.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperBoxes : public HopperTables<Config, Variant, Loading::boxes> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperTables<Config, Variant, Loading::boxes>;
  using Base::arrived_k, Base::arrived_v, Base::bar, Base::base_, Base::describe, Base::describe_runs, Base::kNoShift,
      Base::lane_, Base::maps_;
  using Base::meta_, Base::run_queries, Base::run_rows, Base::walk_tiles, Base::warp_;
  using typename Base::Tile;

 public:
  // Arrivals that complete a full barrier: boxes and the table that goes with them come from two hands.
  static constexpr int kArrivalsQ = (L::kBuffersQ == 2 ? 2 : 1) * ptx::kWarpArrivals;
  static constexpr int kArrivalsHalf = ptx::kWarpArrivals;
  static constexpr int kArrivalsK = 1 + ptx::kWarpArrivals;
  static constexpr int kArrivalsV = 1;
  static constexpr bool kConsumersFence = false;

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (warp_ == 0) {
      run_boxes_k();
    } else if (warp_ == 1) {
      run_queries();
    } else if (warp_ == 2) {
      run_rows();
    } else {
      run_boxes_v();
    }
  }

 private:
  // One tile of K or V as kBoxes boxes: lane b holds the coordinates of box b (page -1: nothing there). All coordinates
  // are fetched before the elected thread issues: under elect.sync an operation costs 26 clocks, in a loop with
  // shuffles 130.
  template <int kSlabs, int kBoxes>
  __device__ __forceinline__ void issue_boxes(const TensorMap& map, unsigned dst, unsigned full, int token, int page,
                                              int head) const {
    int tokens[kBoxes], pages[kBoxes];
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      tokens[b] = __shfl_sync(0xffffffffu, token, b);
      pages[b] = __shfl_sync(0xffffffffu, page, b);
    }
    if (ptx::elect_one()) {
      ptx::mbar_arrive_expect_tx(full, L::kTile * kSlabs * 128);
#pragma unroll
      for (int b = 0; b < kBoxes; ++b)
#pragma unroll
        for (int c = 0; c < kSlabs; ++c) {
          ptx::tma_load_4d(dst + b * (L::kTile / kBoxes) * 128 + c * L::kSlabKv, &map, full, c * (128 / L::kElementKv),
                           tokens[b], head, pages[b]);
        }
    }
    __syncwarp();
  }

  template <int kSlabs>
  __device__ __forceinline__ void issue(const TensorMap& map, unsigned dst, unsigned full, int token, int page,
                                        int head) const {
    static_assert(L::kTile == 64 || L::kTile == 128, "boxes of 16 to 128 tokens, none larger than a tile");
    switch (maps_.box_log2) {
      case 7:
        if constexpr (L::kTile == 128) return issue_boxes<kSlabs, 1>(map, dst, full, token, page, head);
        return;
      case 6:
        return issue_boxes<kSlabs, L::kTile / 64>(map, dst, full, token, page, head);
      case 5:
        return issue_boxes<kSlabs, L::kTile / 32>(map, dst, full, token, page, head);
      default:
        return issue_boxes<kSlabs, L::kTile / 16>(map, dst, full, token, page, head);
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
      for (int c = 0; c < L::kRawSlabsV; ++c) {
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
      const unsigned dst = base_ + L::kOffsetV + stage * L::kBytesV + L::kRawV;
      const int from = tile.live_low - tile.offset, to = tile.live_high - tile.offset;  // rows that hold keys
      int token, page;
      locate(maps_.page_v, slot, token, page);
      ptx::mbar_wait(bar(meta_.v_empty[stage]), (t / L::kStages & 1) ^ 1);
      if (from <= 0 && to >= L::kTile) {
        issue<L::kRawSlabsV>(maps_.v, dst, arrived_v(stage), token, page, head);
      } else {
        issue<L::kRawSlabsV>(maps_.v, dst, bar(meta_.patch), token, page, head);
        ptx::mbar_wait(bar(meta_.patch), patches & 1);
        ++patches;
        clear_rows(dst, 0, min(max(from, 0), L::kTile));
        clear_rows(dst, max(min(to, L::kTile), 0), L::kTile);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ptx::mbar_arrive(arrived_v(stage));
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
      issue<L::kRawSlabsK>(maps_.k, base_ + L::kOffsetK + stage * L::kBytesK + L::kRawK, arrived_k(stage), token, page,
                           head);
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
      ptx::mbar_arrive_warp(arrived_k(stage), lane_);
      ++t;
    });
  }
};

}  // namespace attnrt
