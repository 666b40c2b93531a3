// SPDX-License-Identifier: Apache-2.0
// The consumers of the Hopper prefill family: warpgroups of 64 rows that multiply what a loader brings
// (hopper_loader.cuh).
//
// Per tile of kTile keys a warpgroup issues S' = Q K^T of the next tile to the tensor cores, then O += P V of the
// current one, and computes the weights of S' while the second runs; P never leaves registers. The stream of tiles does
// not stop at the end of a row block: the first product of the next one is under way while the last is finished and
// written. Warpgroups take turns at issuing (named barriers), so that one's exponentials run under the other's
// products. Row r of a pass is query r / group, head r % group.
//
// Numerics. Keys ascend from the leaf's start in tiles at multiples of kTile; a row's maximum, its shrink factor and
// its sum belong to that row's own thread quad: lane t of the quad adds its keys 8n + 2t, 8n + 2t + 1 pair by pair in
// order of n, the quad adds at the end of the leaf. Weights are 2^(s c - m c) with m the largest s: no bit depends on
// other rows, on the loader, on keys past the last visible one (they add 0 under an unchanged maximum) or on whether
// the multiplication by a shrink factor of 1 is skipped.
#pragma once
#include "hopper_results.cuh"
#include "hopper_rewrite.cuh"
#include "roles.cuh"

namespace attnrt {

template <class Config, class Variant, class Loader>
class HopperConsumer : public HopperResults<Config, Variant> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperResults<Config, Variant>;
  using Base::base_, Base::close_leaf, Base::group_, Base::kH, Base::kO, Base::kS, Base::lane_;
  using Base::idle_, Base::find_spoken, Base::look_at_spoken, Base::mask_own, Base::negate_, Base::runs_, Base::rescale,
      Base::results, Base::tile_, Base::weights, Base::whole_begin_, Base::whole_end_;
  using Base::load_rows, Base::logits, Base::look, Base::meta_, Base::p_, Base::pass_, Base::raise, Base::record;
  using typename Base::Closing;
  using typename Base::Fate;
  using typename Base::Row;
  using typename Base::View;

 public:
  using Base::Base;

  // One iteration per tile: the scores of the next tile, whatever row block it belongs to, then the last product of
  // this one. A row block is written after the first weights of its successor: there is no stop between blocks. What
  // needs no scores (masks as bits, the next block's rows, the end of a leaf) runs under the product that makes them.
  // The first iteration closes a block that does not exist (tile and pass -1): it multiplies by weights of 0 whatever
  // lies in V's buffer, and nobody looks. So there is one copy of the code of a tile that is not whole.
  __device__ __forceinline__ void run() {
    tile_ = -1;
    pass_ = -1;
    if (group_ == L::kGroups - 1) turn_end();  // warpgroup 0 goes first
    if (!open_pass(0)) return;
    float s[kS], o[kO], m[2] = {neg_inf(), neg_inf()}, l[2] = {0.0f, 0.0f}, top[2] = {0.0f, 0.0f}, shrink[2];
    alignas(16) float total[Config::folds ? kO + 4 : 4];  // only items of several leaves touch it
    unsigned w[kS / 2];
    Row rows[2];
    View view;
    int leaf = 0, offset = 0, stop = 0;
    bool add = false;
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) w[i] = 0;
#pragma unroll 1
    for (;;) {
      offset += L::kTile;
      run_plain(s, w, o, m, l, top, shrink, rows, leaf, offset, stop, add);
      // The next tile: of this leaf, of the next leaf of this pass, or of the next pass.
      const int pass = pass_;
      bool ends = false, more = true;
      const bool closes = offset >= stop;
      if (closes) {
        const WorkItem& item = record().item;
        ends = pass < 0 || leaf + 1 >= item.leaf_end - item.leaf_begin;
        if (ends) {
          ++pass_;
          more = open_pass(pass_);
          offset = record().begin;
          stop = record().stop;
        } else {
          leaf_range<L::kTile>(p_, item, item.leaf_begin + leaf + 1, offset, stop);
        }
      }
      ATTNRT_TRACE(group_, tile_, 0);
      if (more) wait_k(tile_ + 1);
      ATTNRT_TRACE(group_, tile_, 1);
      turn_begin();
      ATTNRT_TRACE(group_, tile_, 2);
      // O is one value from here on, whichever way it came: copies between the products would serialise them (C7514).
      ptx::wgmma_pin(o);
      // At the very end this multiplies what is left in the buffers and nobody looks: a branch here would make ptxas
      // serialise (C7515).
      multiply_scores(s, pass_ & (L::kBuffersQ - 1), tile_ + 1);
      if (tile_ >= 0) wait_v(tile_);
      multiply_values(o, w, tile_ & 1, add);
      turn_end();
      ATTNRT_TRACE(group_, tile_, 3);
      Closing closing;
      if (closes) {
        closing.fate = Fate::nothing;
        closing.folds = false;
        if (pass >= 0) close_leaf(closing, pass, leaf, ends, m, l);
        m[0] = m[1] = neg_inf();
        l[0] = l[1] = 0.0f;
        if (!Config::folds && ends && pass >= 0) release(meta_.table_empty[L::table(pass)]);
        if (ends && more) load_rows(rows);
      }
      if (more) look(view, rows, tile_ + 1, offset);  // tables of a pass that does not exist lead anywhere
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(s);
      ATTNRT_TRACE(group_, tile_, 4);
      if (more) {
        if (offset + L::kTile >= stop) release_queries(ends ? 0 : closes ? leaf + 1 : leaf);
        logits(s, rows, tile_ + 1, offset, view);
        release(meta_.k_empty[(tile_ + 1) % L::kStages]);
        raise(s, m, top, shrink);
      }
      // By now the product with V is done or nearly so: its weights make room for the next ones as these come.
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(o);
      ATTNRT_TRACE(group_, tile_, 5);
      if (tile_ >= 0) release(meta_.v_empty[tile_ & 1]);
      weights(s, w, l, top, shrink);
      ATTNRT_TRACE(group_, tile_, 6);
      add = !closes;
      ++tile_;
      if (!closes) {
        rescale(o, shrink);
        continue;
      }
      results(closing, pass, leaf, ends, o, total);
      if (Config::folds && ends && pass >= 0) release(meta_.table_empty[L::table(pass)]);
      leaf = ends ? 0 : leaf + 1;
      if (!more) break;
    }
  }

 private:
  // The same iteration for tiles of this leaf that all rows see whole, from `offset` on: most of a long row, without a
  // branch but its own, and with everything that depends on the buffer's number a step ahead. Where there is a mask,
  // tiles of which it speaks, too, if positions run on. (Two such loops would keep descriptors out of uniform
  // registers: 30 moves before each product.)
  __device__ __forceinline__ void run_plain(float (&s)[kS], unsigned (&w)[kS / 2], float (&o)[kO], float (&m)[2],
                                            float (&l)[2], float (&top)[2], float (&shrink)[2], const Row (&rows)[2],
                                            int leaf, int& offset, int stop, bool& add) {
    static_assert(L::kStages == 2, "buffers alternate");
    constexpr bool kMasked = Variant::reads_index_mask;
    if (idle_) return pass_by(leaf, offset, stop);
    if (offset >= stop) return;
    if (kMasked ? !runs_ || negate_ : offset < whole_begin_ || offset + L::kTile > whole_end_) return;
    const int end = kMasked ? stop : min(stop, whole_end_ - L::kTile + 1);
    bool whole = true;
    unsigned own[2];
    typename Base::Spoken spoken;
    if constexpr (kMasked) find_spoken(spoken, rows);
    unsigned next = (tile_ + 1) % 2;
    unsigned k = base_ + L::kOffsetK + next * L::kBytesK, v = base_ + L::kOffsetV + (1 - next) * L::kBytesV;
    const unsigned long long q =
        ptx::desc_sw128(base_ + (pass_ & (L::kBuffersQ - 1)) * L::kBytesQ + group_ * 64 * 128, 0, 1024);
    ptx::wgmma_pin(o);
#pragma unroll 1
    for (; offset < end; offset += L::kTile) {  // tile_ + 1 begins at `offset`
      ATTNRT_TRACE(group_, tile_, 0);
      wait_k(tile_ + 1);
      ATTNRT_TRACE(group_, tile_, 1);
      turn_begin();
      ATTNRT_TRACE(group_, tile_, 2);
      multiply_scores(s, q, ptx::desc_sw128(k, 0, 1024));
      wait_v(tile_);
      multiply_values(o, w, ptx::desc_sw128(v, L::kSlabKv, 1024), add);
      turn_end();
      ATTNRT_TRACE(group_, tile_, 3);
      k = 2 * (base_ + L::kOffsetK) + L::kBytesK - k;
      v = 2 * (base_ + L::kOffsetV) + L::kBytesV - v;
      if constexpr (kMasked) {
        whole = offset >= whole_begin_ && offset + L::kTile <= whole_end_;
        if (!whole) look_at_spoken(own, spoken, rows, offset);
      }
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(s);
      ATTNRT_TRACE(group_, tile_, 4);
      this->template hooks<true>(s, rows, tile_ + 1, offset);
      if (kMasked && !whole) mask_own(s, own);
      release(meta_.k_empty[next]);
      raise(s, m, top, shrink);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(o);
      ATTNRT_TRACE(group_, tile_, 5);
      next ^= 1;
      release(meta_.v_empty[next]);
      weights(s, w, l, top, shrink);
      ATTNRT_TRACE(group_, tile_, 6);
      rescale(o, shrink);
      add = true;
      ++tile_;
    }
    if (offset >= stop) release_queries(leaf);
  }

  // The tiles of this leaf for a warpgroup without rows: it hands buffers back and takes its turns. What O holds then,
  // nobody asks.
  __device__ __forceinline__ void pass_by(int leaf, int& offset, int stop) {
    if (offset >= stop) return;
#pragma unroll 1
    for (; offset < stop; offset += L::kTile) {
      wait_k(tile_ + 1);
      turn_begin();
      turn_end();
      release(meta_.k_empty[(tile_ + 1) % L::kStages]);
      wait_v(tile_);
      release(meta_.v_empty[tile_ % L::kStages]);
      ++tile_;
    }
    release_queries(leaf);
  }

  __device__ __forceinline__ static unsigned bar(const unsigned long long& b) { return ptx::smem_addr(&b); }

  // ------------------------------------------------------------------ turns
#ifdef HOPPER_NO_TURNS
  static constexpr bool kTurns = false;
#else
  static constexpr bool kTurns = true;
#endif
  // Barrier 1 + g is warpgroup g's turn to issue; its predecessor arrives there.
  __device__ __forceinline__ void turn_begin() const {
    if constexpr (L::kGroups > 1 && kTurns) ptx::bar_sync(1 + group_, 256);
  }
  __device__ __forceinline__ void turn_end() const {
    if constexpr (L::kGroups > 1 && kTurns) ptx::bar_arrive(1 + (group_ + 1) % L::kGroups, 256);
  }

  // ------------------------------------------------------------------ products
  __device__ __forceinline__ void multiply_scores(float (&s)[kS], int buffer, int t) const {
    multiply_scores(s, ptx::desc_sw128(base_ + buffer * L::kBytesQ + group_ * 64 * 128, 0, 1024),
                    ptx::desc_sw128(base_ + L::kOffsetK + t % L::kStages * L::kBytesK, 0, 1024));
  }
  __device__ __forceinline__ void multiply_scores(float (&s)[kS], unsigned long long q, unsigned long long k) const {
    if constexpr (Variant::quick_logits) ptx::fresh(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < L::kDim / 16; ++i) {
      ptx::Wgmma<kH, L::kTile>::template ss<0, 0>(s, ptx::desc_add(q, i / 4 * L::kSlabQ + i % 4 * 32),
                                                  ptx::desc_add(k, i / 4 * L::kSlabKv + i % 4 * 32), i > 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_values(float (&o)[kO], const unsigned (&w)[kS / 2], int stage,
                                                  bool add) const {
    multiply_values(o, w, ptx::desc_sw128(base_ + L::kOffsetV + stage * L::kBytesV, L::kSlabKv, 1024), add);
  }
  __device__ __forceinline__ void multiply_values(float (&o)[kO], const unsigned (&w)[kS / 2], unsigned long long v,
                                                  bool add) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < L::kTile / 16; ++i) {
      const unsigned a[4] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
      ptx::Wgmma<kH, L::kDimVo>::template rs<1>(o, a, ptx::desc_add(v, i * 2048), i > 0 || add);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void wait_k(int t) const {
    ptx::mbar_wait(bar(meta_.k_full[t % L::kStages]), t / L::kStages & 1);
    if constexpr (Loader::kConsumersFence && !L::kRewritesK) ptx::fence_proxy_async();  // else the rewriter has
  }
  __device__ __forceinline__ void wait_v(int t) const {
    ptx::mbar_wait(bar(meta_.v_full[t % L::kStages]), t / L::kStages & 1);
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

  // The last scores of a leaf are there: if it is the pass's last, Q's buffer is free.
  __device__ __forceinline__ void release_queries(int leaf) const {
    const WorkItem& item = record().item;
    if (leaf + 1 < item.leaf_end - item.leaf_begin) return;
    release(L::kBuffersQ == 1 ? meta_.half_empty[group_] : meta_.q_empty[pass_ & 1]);
  }
};

// Initialises the barriers.
template <class Config, class Variant, class Loader>
__device__ __forceinline__ void hopper_begin(char* smem) {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;
  static_assert(hopper_smem_bytes<Config, Variant>() <= 227 * 1024, "shared memory of an SM");
  if (threadIdx.x == 0) {
    M& meta = *reinterpret_cast<M*>(smem + L::kOffsetMeta);
    constexpr int kWarps = 4 * L::kGroups * ptx::kWarpArrivals;  // of consumers
    constexpr int kRewriters = 4 * ptx::kWarpArrivals;
    for (int i = 0; i < L::kTables; ++i) {
      ptx::mbar_init(ptx::smem_addr(&meta.table_full[i]), Loader::kArrivalsTable);
      ptx::mbar_init(ptx::smem_addr(&meta.table_empty[i]), kWarps);
      ptx::mbar_init(ptx::smem_addr(&meta.pass_full[i]), Loader::kArrivalsTable);
    }
    for (int i = 0; i < 2; ++i) {
      ptx::mbar_init(ptx::smem_addr(&meta.q_full[i]), L::kRewritesQ ? kRewriters : Loader::kArrivalsQ);
      if constexpr (L::kRewritesQ) {
        ptx::mbar_init(ptx::smem_addr(&meta.q_raw[i]), L::kBuffersQ == 2 ? Loader::kArrivalsQ : Loader::kArrivalsHalf);
      }
      ptx::mbar_init(ptx::smem_addr(&meta.q_empty[i]), kWarps);
    }
    for (int i = 0; i < L::kStages; ++i) {
      ptx::mbar_init(ptx::smem_addr(&meta.k_full[i]), L::kRewritesK ? kRewriters : Loader::kArrivalsK);
      // A hook on values reads the table of keys after consumers have done with it.
      ptx::mbar_init(ptx::smem_addr(&meta.k_empty[i]), kWarps + (Variant::has_value ? kRewriters : 0));
      ptx::mbar_init(ptx::smem_addr(&meta.v_full[i]), L::kRewritesV ? kRewriters : Loader::kArrivalsV);
      if constexpr (L::kRewritesK) ptx::mbar_init(ptx::smem_addr(&meta.k_raw[i]), Loader::kArrivalsK);
      if constexpr (L::kRewritesV) ptx::mbar_init(ptx::smem_addr(&meta.v_raw[i]), Loader::kArrivalsV);
      ptx::mbar_init(ptx::smem_addr(&meta.v_empty[i]), kWarps);
    }
    if constexpr (L::kBuffersQ == 1) {
      for (int i = 0; i < L::kGroups; ++i) {
        ptx::mbar_init(ptx::smem_addr(&meta.half_full[i]), L::kRewritesQ ? kRewriters : Loader::kArrivalsHalf);
        ptx::mbar_init(ptx::smem_addr(&meta.half_empty[i]), kWarps / L::kGroups);
      }
    }
    ptx::mbar_init(ptx::smem_addr(&meta.patch), 1);
    ptx::mbar_init_fence();
  }
  __syncthreads();
}

// The kernel: gives registers to the consumers, starts the roles.
template <class Config, class Variant, class Loader>
__device__ __forceinline__ void hopper_attend(const RunParams& p, const ParamRef* params, const KvMaps& maps,
                                              char* smem) {
  using L = HopperLayout<Config, Variant>;
  if constexpr (roles::kBegins) {
    if (blockIdx.x >= p.plan->team_workers) return;
    hopper_begin<Config, Variant, Loader>(smem);
  }
  if (roles::kBegins ? threadIdx.x < 128 : roles::holds(0)) {
    if constexpr (roles::holds(0)) {
      ptx::reg_dealloc<Loader::kRegs>();
      Loader(p, params, maps, smem).run();
    }
  } else if (L::kRewrites && (roles::kBegins ? threadIdx.x >= 128 * (L::kGroups + 1) : roles::holds(2))) {
    if constexpr (L::kRewrites && roles::holds(2)) {
      ptx::reg_dealloc<Loader::kRewriterRegs>();
      HopperRewriter<Config, Variant, Loader>(p, params, smem).run();
    } else if constexpr (L::kRewrites) {
      roles::hand_over<2>();
    }
  } else if constexpr (roles::holds(1)) {
    ptx::reg_alloc<Loader::kConsumerRegs>();
    HopperConsumer<Config, Variant, Loader>(p, params, smem).run();
  } else {
    roles::hand_over<1>();
  }
}

}  // namespace attnrt
