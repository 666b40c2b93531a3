// SPDX-License-Identifier: Apache-2.0
// What consumers of the Hopper prefill family wait for and hand back: Q and the tables of a pass, K and V of a tile.
#pragma once
#include "hopper_results.cuh"

namespace attnrt {

template <class Config, class Variant, class Loader>
class HopperBuffers : public HopperResults<Config, Variant> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperResults<Config, Variant>;

 protected:
  using Base::Base;
  using Base::group_, Base::lane_, Base::meta_, Base::p_, Base::pass_, Base::record, Base::tile_;

  __device__ __forceinline__ static unsigned bar(const unsigned long long& b) { return ptx::smem_addr(&b); }

  __device__ __forceinline__ void wait_k(int t) const { wait_k(bar(meta_.k_full[t % L::kStages]), t / L::kStages & 1); }
  __device__ __forceinline__ void wait_k(unsigned full, unsigned parity) const {
    ptx::mbar_wait(full, parity);
    if constexpr (Loader::kConsumersFence && !L::kRewritesK) ptx::fence_proxy_async();  // else the rewriter has
  }
  __device__ __forceinline__ void wait_v(int t) const { wait_v(bar(meta_.v_full[t % L::kStages]), t / L::kStages & 1); }
  __device__ __forceinline__ void wait_v(unsigned full, unsigned parity) const {
    ptx::mbar_wait(full, parity);
    if constexpr (Loader::kConsumersFence && !L::kRewritesV) ptx::fence_proxy_async();
  }
  __device__ __forceinline__ void release(const unsigned long long& empty) const {
    // lane 0 speaks for lanes that may still be reading the key table
    ptx::mbar_arrive_warp(bar(empty), lane_);
  }

  // Waits for a pass's Q and tables; false: the list has ended.
  __device__ __forceinline__ bool open_pass(int pass) const {
    ptx::mbar_wait(bar(meta_.table_full[L::table(pass)]), pass / L::kTables & 1);
    if (meta_.pass[L::table(pass)].done) return false;
    if constexpr (L::kBuffersQ == 1) {
      ptx::mbar_wait(bar(meta_.half_full[group_]), pass & 1);
    } else {
      ptx::mbar_wait(bar(meta_.q_full[pass & 1]), pass >> 1 & 1);
    }
    if constexpr (Loader::kConsumersFence && !L::kRewritesQ) ptx::fence_proxy_async();
    return true;
  }

  // The last scores of a pass are there.
  __device__ __forceinline__ void release_queries() const {
    release(L::kBuffersQ == 1 ? meta_.half_empty[group_] : meta_.q_empty[pass_ & 1]);
  }

  // A pass for a warpgroup without rows: it hands buffers back. take_turn(): what it owes the others at each tile of a
  // leaf but the first.
  template <class Turn>
  __device__ __forceinline__ void pass_by(const Turn& take_turn) {
    release_queries();  // at once: a stage that rewrites brings the next pass's before this one's last V
    const WorkItem& item = record().item;
    int leaf = item.leaf_begin;
#pragma unroll 1
    do {  // an item without leaves has one tile of dead keys, too
      int begin, stop;
      leaf_range<L::kTile>(p_, item, leaf, begin, stop);
#pragma unroll 1
      for (int offset = begin; offset < stop; offset += L::kTile) {
        wait_k(tile_);
        if (offset > begin) take_turn();
        release(meta_.k_empty[tile_ % L::kStages]);
        wait_v(tile_);
        release(meta_.v_empty[tile_ % L::kStages]);
        ++tile_;
      }
    } while (++leaf < item.leaf_end);
    release(meta_.table_empty[L::table(pass_)]);
    ++pass_;
  }
};

}  // namespace attnrt
