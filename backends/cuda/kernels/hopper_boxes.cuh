// SPDX-License-Identifier: Apache-2.0
// The loader of boxes: one warp each for K and V issues TMA boxes, one box per run of 2^box_log2 tokens (a page, or a
// whole tile where KV is contiguous); a warp brings Q by 16-byte asynchronous copies and one writes the rows' table.
// Boxes of few rows stack in a swizzled tile exactly as one big box would. Keys that are not there: a box without a
// page is out of bounds and arrives as zeros; the rest of a page is cleared in V between arrival and hand-over (weight
// 0 times NaN would be NaN).
#pragma once
#include "hopper_passes.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperBoxes : public HopperPasses<Config, Variant, Loading::boxes> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperPasses<Config, Variant, Loading::boxes>;
  using Base::arrived_k, Base::arrived_v, Base::bar, Base::base_, Base::lane_, Base::locate, Base::maps_, Base::meta_;
  using Base::tell, Base::tells, Base::run_queries, Base::run_rows, Base::walk_boxes, Base::warp_;
  using typename Base::Tile;

 public:
  // Arrivals that complete a full barrier: boxes and the table that goes with them come from two hands.
  static constexpr int kArrivalsTable = ptx::kWarpArrivals;
  static constexpr int kArrivalsQ = ptx::kWarpArrivals;
  static constexpr int kArrivalsHalf = ptx::kWarpArrivals;
  static constexpr int kArrivalsK = 1 + ptx::kWarpArrivals;
  // V has no table, so that its elected thread speaks for the warp, except to a tool that looks for every lane's
  // arrival.
  static constexpr bool kEveryLane = ptx::kWarpArrivals > 1;
  static constexpr int kArrivalsV = 1 + (kEveryLane ? ptx::kWarpArrivals : 0);
  static constexpr bool kConsumersFence = false;

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (warp_ == 1) {
      run_queries();
    } else if (warp_ == 2) {
      run_rows();
    } else {
      run_boxes(warp_ == 3);
    }
  }

 private:
  // Coordinates of this lane's box (page -1: nothing there), and where a tile goes: its buffer, the barrier that its
  // bytes complete, and the one that says that the buffer is free.
  struct Place {
    int token, page, head;
  };
  struct Buffer {
    unsigned dst, full, empty, parity;
  };

  // One tile of K or V as kBoxes boxes: lane b holds the coordinates of box b. All coordinates are fetched before the
  // wait and before the elected thread issues: under elect.sync an operation costs 26 clocks, in a loop with shuffles
  // 130.
  template <int kBoxes>
  __device__ __forceinline__ void issue_boxes(const TensorMap& map, bool values, const Buffer& to,
                                              const Place& from) const {
    constexpr int kMost = L::kRawSlabsK > L::kRawSlabsV ? L::kRawSlabsK : L::kRawSlabsV;
    const int slabs = values ? L::kRawSlabsV : L::kRawSlabsK;
    int tokens[kBoxes], pages[kBoxes];
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      tokens[b] = __shfl_sync(0xffffffffu, from.token, b);
      pages[b] = __shfl_sync(0xffffffffu, from.page, b);
    }
    ptx::mbar_wait(to.empty, to.parity);
    if (ptx::elect_one()) {
      ptx::mbar_arrive_expect_tx(to.full, L::kTile * slabs * 128);
#pragma unroll
      for (int b = 0; b < kBoxes; ++b)
#pragma unroll
        for (int c = 0; c < kMost; ++c) {
          if (L::kRawSlabsK != L::kRawSlabsV && c >= slabs) continue;
          ptx::tma_load_4d(to.dst + b * (L::kTile / kBoxes) * 128 + c * L::kSlabKv, &map, to.full,
                           c * (128 / L::kElementKv), tokens[b], from.head, pages[b]);
        }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void issue(const TensorMap& map, bool values, const Buffer& to, const Place& from) const {
    static_assert(L::kTile == 64 || L::kTile == 128, "boxes of 16 to 128 tokens, none larger than a tile");
    switch (maps_.box_log2) {
      case 7:
        if constexpr (L::kTile == 128) return issue_boxes<1>(map, values, to, from);
        return;
      case 6:
        return issue_boxes<L::kTile / 64>(map, values, to, from);
      case 5:
        return issue_boxes<L::kTile / 32>(map, values, to, from);
      default:
        return issue_boxes<L::kTile / 16>(map, values, to, from);
    }
  }

  // Rows of a tile before `from` and from `to` on.
  __device__ __forceinline__ void clear_rows(unsigned tile, int from, int to) const {
#pragma unroll 1
    for (int after = 0; after < 2; ++after) {
      const int first = after ? max(min(to, L::kTile), 0) : 0, stop = after ? L::kTile : min(max(from, 0), L::kTile);
#pragma unroll 1
      for (int i = first * 8 + lane_; i < stop * 8; i += 32) {
#pragma unroll
        for (int c = 0; c < L::kRawSlabsV; ++c) ptx::fill_shared16(tile + c * L::kSlabKv + i * 16, 0);
      }
    }
  }

  // K or V: one code for both warps, because the code of the boxes is long.
  __device__ __forceinline__ void run_boxes(bool values) {
    const TensorMap& map = values ? maps_.v : maps_.k;
    const FastDiv div = values ? maps_.page_v : maps_.page_k;
    const unsigned tiles = base_ + (values ? L::kOffsetV + L::kRawV : L::kOffsetK + L::kRawK);
    const unsigned bytes = values ? L::kBytesV : L::kBytesK;
    const unsigned full = values ? arrived_v(0) : arrived_k(0);
    const unsigned empty = values ? bar(meta_.v_empty[0]) : bar(meta_.k_empty[0]);
    if (ptx::elect_one()) ptx::tma_prefetch_map(&map);
    int t = 0, patches = 0;
    walk_boxes(map, div, values ? L::kDimVo : L::kDim, [&](const Tile& tile, int head, long long slot, int pos) {
      const int stage = t % L::kStages;
      const unsigned dst = tiles + stage * bytes;
      const int from = tile.live_low - tile.offset, to = tile.live_high - tile.offset;  // rows that hold keys
      const bool patched = values && (from > 0 || to < L::kTile);
      Place place;
      locate(div, slot, place.token, place.page);
      place.head = head;
      const Buffer buffer = {dst, patched ? bar(meta_.patch) : full + stage * 8, empty + stage * 8,
                             (t / L::kStages & 1) ^ 1u};
      ATTNRT_TRACE(values ? 5 : 4, t, 0);
      issue(map, values, buffer, place);
      ATTNRT_TRACE(values ? 5 : 4, t, 2);
      if (!values) {
#pragma unroll 1
        for (int part = 0; tells(tile) && part < L::kTile / 32; ++part) {
          const int key = part * 32 + lane_, box = key >> maps_.box_log2, rest = key - (box << maps_.box_log2);
          const long long first = __shfl_sync(0xffffffffu, slot, box);
          const int first_pos = __shfl_sync(0xffffffffu, pos, box);
          tell(tile, stage, part, first < 0 ? -1 : first + rest, first_pos + rest);
        }
      } else if (patched) {
        ptx::mbar_wait(bar(meta_.patch), patches & 1);
        ++patches;
        clear_rows(dst, from, to);
        ptx::fence_proxy_async();
      }
      if (!values || kEveryLane) ptx::mbar_arrive_warp(full + stage * 8, lane_);
      if (patched) {  // the boxes arrived elsewhere: one arrival stands for them
        __syncwarp();
        if (lane_ == 0) ptx::mbar_arrive(full + stage * 8);
      }
      ++t;
    });
  }
};

}  // namespace attnrt
