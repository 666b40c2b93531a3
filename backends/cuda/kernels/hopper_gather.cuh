// SPDX-License-Identifier: Apache-2.0
// The loader of single keys: all four warps copy rows by 16-byte asynchronous copies from any slots; dead rows are
// zeros, nothing is read for them. Copies arrive on the barrier by themselves, so that a warp never waits for one;
// consumers then order their products after them (kConsumersFence).
#pragma once
#include "hopper_tables.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperGather : public HopperTables<Config, Variant, Loading::gather> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperTables<Config, Variant, Loading::gather>;
  using Base::arrived_half, Base::arrived_k, Base::arrived_q, Base::arrived_v, Base::bar, Base::base_,
      Base::copy_queries, Base::fetch_query, Base::lane_, Base::make_bounds, Base::make_row;
  using Base::meta_, Base::own_part, Base::p_, Base::tell, Base::vector_queries, Base::wait_half, Base::wait_queries,
      Base::wait_table;
  using Base::walk_tiles, Base::warp_, Base::write_pass, Base::write_row;
  using typename Base::Bounds;
  using typename Base::Query;
  using typename Base::Tile;

 public:
  // Arrivals that complete a full barrier: copies come from every thread, tables from every warp.
  static constexpr int kArrivalsTable = 4 * ptx::kWarpArrivals;
  static constexpr int kArrivalsQ = 128;
  static constexpr int kArrivalsHalf = 64;
  static constexpr int kArrivalsK = L::kTile + L::kTile / 32 * ptx::kWarpArrivals;
  static constexpr int kArrivalsV = L::kTile;
  static constexpr bool kConsumersFence = true;

  using Base::Base;

  __device__ __forceinline__ void run() {
    static_assert(L::kTile == 64 || L::kTile == 128, "a warp brings 32 keys, of K and V or of one of them");
    int t = 0, count = 0, before_head = 0;
    int before = -1;  // V of the tile before is still to come
    walk_tiles([&](const WorkItem& item, const PartDesc& part, int head,
                   int first) { gather_queries(item, part, head, first, count++); },
               [&](const Tile& tile, int head, long long slot, int pos) {
                 if (L::kTile == 64 && warp_ >= 2) {
                   gather_v(t++, static_cast<int>(slot), head);
                   return;
                 }
                 gather_k(tile, t, slot, pos, head);
                 if (L::kTile == 128 && t > 0) gather_v(t - 1, before, before_head);
                 before = static_cast<int>(slot);
                 before_head = head;
                 ++t;
               });
    if (L::kTile == 128 && t > 0) gather_v(t - 1, before, before_head);
    wait_table(count);
    if (warp_ == 0 && lane_ == 0) meta_.pass[L::table(count)].done = 1;
    ptx::mbar_arrive_warp(bar(meta_.table_full[L::table(count)]), lane_);
  }

 private:
  __device__ __forceinline__ void gather_queries(const WorkItem& item, const PartDesc& part, int head, int first,
                                                 int count) {
    const Bounds bounds = make_bounds(item, part, head);
    wait_table(count);
    if constexpr (L::kBuffersQ == 2) wait_queries(count);
#pragma unroll 1
    for (int row = warp_ * 32; row < L::kRows; row += 128) {
      const Query query = fetch_query(item, part, first + row + lane_);
      if constexpr (L::kBuffersQ == 1) wait_half(row / 64, count);
      copy_queries(item, part, head, first, row, count);
      if constexpr (L::kBuffersQ == 1) arrive(arrived_half(row / 64), vector_queries());
      write_row(make_row(item, part, head, first, row + lane_, query), bounds, head, first, row + lane_, count);
    }
    if (warp_ == 0) write_pass(item, bounds, head, first, count);
    if constexpr (L::kBuffersQ == 2) arrive(arrived_q(count & 1), vector_queries());
    ptx::mbar_arrive_warp(bar(meta_.table_full[L::table(count)]), lane_);
  }

  // This thread's copies arrive when they are done; what it stored itself is done.
  __device__ __forceinline__ static void arrive(unsigned full, bool copies) {
    if (copies) {
      ptx::cp_async_mbar_arrive_noinc(full);
    } else {
      ptx::mbar_arrive(full);
    }
  }

  __device__ __forceinline__ void gather_k(const Tile& tile, int t, long long slot, int pos, int head) const {
    const int stage = t % L::kStages;
    const long long from = slot < 0 ? kNoRow : slot_offset(p_.k, static_cast<unsigned>(slot), head);
    ptx::mbar_wait(bar(meta_.k_empty[stage]), (t / L::kStages & 1) ^ 1);
    gather_any<L::kDim * L::kElementKv / 2, L::kSlabKv, L::kElementKv>(
        p_.k.vectors, p_.k.ptr, base_ + L::kOffsetK + stage * L::kBytesK + L::kRawK, warp_ * 32, from, lane_);
    arrive(arrived_k(stage), p_.k.vectors);
    tell(tile, stage, warp_, slot, pos);
    ptx::mbar_arrive_warp(arrived_k(stage), lane_);
  }

  __device__ __forceinline__ void gather_v(int t, int slot, int head) {
    const int stage = t % L::kStages;
    ptx::mbar_wait(bar(meta_.v_empty[stage]), (t / L::kStages & 1) ^ 1);
    const long long from = slot < 0 ? kNoRow : slot_offset(p_.v, static_cast<unsigned>(slot), head);
    gather_any<L::kDimVo * L::kElementKv / 2, L::kSlabKv, L::kElementKv>(
        p_.v.vectors, p_.v.ptr, base_ + L::kOffsetV + stage * L::kBytesV + L::kRawV, own_part() * 32, from, lane_);
    arrive(arrived_v(stage), p_.v.vectors);
  }
};

}  // namespace attnrt
