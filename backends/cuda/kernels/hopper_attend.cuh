// SPDX-License-Identifier: Apache-2.0
// The consumers of the Hopper prefill family: warpgroups of 64 rows that multiply what a loader brings
// (hopper_loader.cuh).
//
// A leaf of a row block: the scores of its first tile alone; then, per tile of kTile keys, S' = Q K^T of the next one
// goes to the tensor cores, O += P V of this one behind it, and the weights of S' are computed while the second runs;
// at last the product of the last tile. P never leaves registers. Behind that last product go the first scores of what
// comes next, and under these the leaf's O is finished and written; some forms write it among the exponentials of what
// comes next instead, where a warp has little else to issue (HopperLayout::kLate). In the loop over tiles warpgroups
// take turns at issuing (named barriers), so that one's exponentials run under the other's products; at the ends of
// leaves nobody waits for a turn; nor does anybody for products of 8-bit numbers. With three, a warpgroup none of whose
// rows sees a key of a leaf's last tile hands that tile back and takes its turn, without a product. Row r of a pass is
// query r / group, head r % group.
//
// Numerics. Keys ascend from the leaf's start in tiles at multiples of kTile; a row's maximum, its shrink factor and
// its sum belong to that row's own thread quad: lane t of the quad adds its keys 8n + 2t, 8n + 2t + 1 pair by pair in
// order of n, the quad adds at the end of the leaf. Weights are 2^(s c - m c), where m is the largest s of a tile
// before or of this one, and no weight exceeds 2^8 (hopper_softmax.cuh): no bit depends on other rows, on the loader,
// on keys past the last visible one (they add 0 under an unchanged maximum) or on whether the multiplication by a
// shrink factor of 1 is skipped. Products of 8-bit numbers: weights are 2^(s c - m c + 8), at most 2^8.5, summed in
// float32 before they are rounded to e4m3; where Config::two_level says so the product of each tile that ends at a
// multiple of 512 keys, and each leaf's first one, begins a sum of its own (hopper_kept.cuh).
#pragma once
#include "hopper_buffers.cuh"
#include "hopper_rewrite.cuh"
#include "roles.cuh"

namespace attnrt {

template <class Config, class Variant, class Loader>
class HopperConsumer : public HopperBuffers<Config, Variant, Loader> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperBuffers<Config, Variant, Loader>;
  using Base::bar, Base::open_pass, Base::release, Base::release_queries, Base::wait_k, Base::wait_v;
  using Base::base_, Base::close_leaf, Base::group_, Base::kH, Base::kO, Base::kS, Base::kWords, Base::lane_;
  using Base::idle_, Base::find_spoken, Base::look_at_spoken, Base::mask_own, Base::negate_, Base::runs_, Base::rescale,
      Base::results, Base::seen_end_, Base::tile_, Base::weights, Base::whole_begin_, Base::whole_end_;
  using Base::load_rows, Base::logits, Base::look, Base::meta_, Base::p_, Base::pass_, Base::record;
  using typename Base::Closing;
  using typename Base::Fate;
  using typename Base::Row;
  using typename Base::View;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    if (group_ == L::kGroups - 1) turn_end();  // warpgroup 0 goes first
    tile_ = 0;
    pass_ = 0;
#pragma unroll 1
    while (open_pass(pass_)) {
      Leaf x;
      load_rows(x.rows);
      if (idle_) {
        this->pass_by([&] {
          turn_begin();
          turn_end();
        });
        continue;
      }
      run_on(x);
    }
  }

 private:
  // A warpgroup's share of a leaf.
  struct Leaf {
    float s[kS], o[kO], m[2], l[2], top[2], shrink[2], sum[2];  // scores of the last tile that was multiplied with Q
    float bias[2];                                              // HopperSoftmax::hooks
    unsigned w[kWords];                                         // weights of the tile before it, or of that one
    Row rows[2];
    int leaf, offset, stop;    // of the item; of the tile whose weights are next; one past the last key
    bool near;                 // HopperSoftmax::raise
    bool ends, add;            // the pass's last leaf; O holds something
    int skips;                 // tiles of the leaf behind `stop` that no row of the warpgroup sees: 0 or 1
    typename Base::Late late;  // HopperLayout::kLate
    float scale[2];            // kKeeps: what sums that are kept have to be multiplied by
    bool kept;                 // and whether there are any
  };

  // Passes from pass_ on, until the list ends or one is there in which the warpgroup has no rows.
  __device__ __forceinline__ void run_on(Leaf& x) {
    alignas(16) float total[Config::folds ? kO + 4 : 4];  // only items of several leaves touch it
    x.leaf = 0;
    x.offset = record().begin;
    x.stop = record().stop;
    wait_k(tile_);
    multiply_scores(x.s, pass_ & (L::kBuffersQ - 1), tile_);
    bool more = true;
    if constexpr (L::kLate) {
      ptx::fresh(x.o);
      this->clear(x.late);
    }
#pragma unroll 1
    do {
      run_tiles(x);
      ATTNRT_TRACE(group_, tile_, 0);
      wait_v(tile_);
      multiply_values(x.o, x.w, tile_ & 1, x.add);
      ATTNRT_TRACE(group_, tile_, 1);
      const int skips = L::kSkips ? x.skips : 0;
      if (skips) {
        wait_k(tile_ + 1);
        turn_begin();
        turn_end();
        release(meta_.k_empty[(tile_ + 1) & 1]);
      }
      const int pass = pass_, leaf = x.leaf;
      const bool ends = x.ends;
      if (ends) {
        more = open_pass(++pass_);
        x.leaf = 0;
        x.offset = record().begin;
        x.stop = record().stop;
      } else {
        leaf_range<L::kTile>(p_, record().item, record().item.leaf_begin + ++x.leaf, x.offset, x.stop);
      }
      // If nothing is left, this multiplies what lies in the buffers and nobody looks: a branch here would make ptxas
      // serialise (C7515).
      if (more) wait_k(tile_ + 1 + skips);
      ATTNRT_TRACE(group_, tile_, 2);
      multiply_scores(x.s, pass_ & (L::kBuffersQ - 1), tile_ + 1 + skips);
      ATTNRT_TRACE(group_, tile_, 3);
      Closing closing;
      closing.fate = Fate::nothing;
      closing.folds = false;
      if constexpr (L::kKeeps) {
        closing.scale[0] = x.scale[0];
        closing.scale[1] = x.scale[1];
        closing.kept = x.kept;
      }
      if constexpr (L::kLean) {
        closing.row[0] = closing.row[1] = {0.0f, 0.0f};
        ptx::renew(lane_);
      }
      close_leaf(closing, pass, leaf, ends, x.m, x.l);
      if (!Config::folds && ends) release(meta_.table_empty[L::table(pass)]);
      if (ends && more) {
        load_rows(x.rows);
        more = !idle_;
      }
      ATTNRT_TRACE(group_, tile_, 4);
      bool late = false;
      if constexpr (L::kLate) late = this->delay(x.late, closing, more);
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(x.o);
      ATTNRT_TRACE(group_, tile_, 5);
      release(meta_.v_empty[tile_ & 1]);
      tile_ += skips;
      if (skips) {
        wait_v(tile_);
        release(meta_.v_empty[tile_ & 1]);
      }
      if (late) {
        this->begin_late(x.late, x.o);
      } else {
        results(closing, pass, leaf, ends, x.o, total);
      }
      ATTNRT_TRACE(group_, tile_, 6);
      ++tile_;
      if (Config::folds && ends) release(meta_.table_empty[L::table(pass)]);
    } while (more);
    ptx::wgmma_wait<0>();
  }

  // All of a leaf but its last product; the first scores are under way.
  __device__ __forceinline__ void run_tiles(Leaf& x) {
    View view;
    x.ends = x.leaf + 1 >= record().item.leaf_end - record().item.leaf_begin;
    x.add = false;
    if constexpr (L::kSkips) {
      const int last = (x.stop - 1) / L::kTile * L::kTile;
      // lane 0 says it, so that ptxas knows that all lanes agree
      x.skips = __shfl_sync(0xffffffffu, last > x.offset && seen_end_ <= last, 0);
      if (x.skips) x.stop = last;
    }
    x.m[0] = x.m[1] = neg_inf();
    x.l[0] = x.l[1] = 0.0f;
    if constexpr (L::kKeeps) {
      x.scale[0] = x.scale[1] = 1.0f;
      x.kept = false;
    }
    if constexpr (!L::kLate) ptx::fresh(x.o);
    look(view, x.rows, tile_, x.offset);
    ptx::wgmma_wait<0>();
    if constexpr (L::kLate) {
      const auto rows = [&](int step, float weight) { this->write_late(x.late, x.o, step, weight); };
      take_scores(x, view, tile_, rows);
      weights(x.s, x.w, x.l, x.top, x.shrink, x.sum, x.m[0], x.near, rows);
      ptx::fresh(x.o);
    } else {
      take_scores(x, view, tile_);
      weights(x.s, x.w, x.l, x.top, x.shrink, x.sum, x.m[0], x.near);
    }
    x.offset += L::kTile;
#pragma unroll 1
    for (;;) {
      if constexpr (L::kKeeps) keep(x);
      if (x.offset >= x.stop) break;
      const int before = x.offset;
      run_plain(x);
      if (L::kKeeps && x.offset > before && x.offset % L::kKeptKeys == 0) continue;
      if (x.offset >= x.stop) break;
      ATTNRT_TRACE(group_, tile_, 0);
      wait_k(tile_ + 1);
      ATTNRT_TRACE(group_, tile_, 1);
      turn_begin();
      ATTNRT_TRACE(group_, tile_, 2);
      multiply_scores(x.s, pass_ & (L::kBuffersQ - 1), tile_ + 1);
      wait_v(tile_);
      multiply_values(x.o, x.w, tile_ & 1, x.add);
      turn_end();
      ATTNRT_TRACE(group_, tile_, 3);
      look(view, x.rows, tile_ + 1, x.offset);
      ptx::wgmma_wait<1>();
      ATTNRT_TRACE(group_, tile_, 4);
      take_scores(x, view, tile_ + 1);
      // By now the product with V is done or nearly so: its weights make room for the next ones as these come.
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(x.o);
      ATTNRT_TRACE(group_, tile_, 5);
      release(meta_.v_empty[tile_ & 1]);
      next_weights(x);
      x.offset += L::kTile;
    }
  }

  // Before tiles at multiples of kKeptKeys, whether or not there is such a tile: O is kept, and starts anew with the
  // product that comes next. Where that is does not depend on where the leaf begins or ends.
  __device__ __forceinline__ void keep(Leaf& x) const {
    if (x.offset % L::kKeptKeys != 0 || !x.add) return;
    keep_sums(this->kept_at(), x.o, x.scale, x.kept);
    x.scale[0] = x.scale[1] = 1.0f;
    x.kept = true;
    x.add = false;
  }

  // The scores of tile t, at x.offset, are there: what rows see of them, and the new maxima.
  template <class Beside = typename Base::Alone>
  __device__ __forceinline__ void take_scores(Leaf& x, const View& view, int t, Beside&& beside = {}) {
    ptx::wgmma_pin(x.s);
    if (x.ends && x.offset + L::kTile >= x.stop) release_queries();
    logits(x.s, x.rows, t, x.offset, view, x.bias);
    release(meta_.k_empty[t % L::kStages]);
    this->template raise<false>(x.s, x.m, x.top, x.shrink, x.sum, x.bias, view, x.near, beside);
  }

  // Weights of the tile after this one, at x.offset, and O by their measure.
  __device__ __forceinline__ void next_weights(Leaf& x) {
    weights(x.s, x.w, x.l, x.top, x.shrink, x.sum, x.o[0], x.near);
    ATTNRT_TRACE(group_, tile_, 6);
    rescale(x.o, x.shrink);
    if constexpr (L::kKeeps) {
      x.scale[0] = __fmul_rn(x.scale[0], x.shrink[0]);
      x.scale[1] = __fmul_rn(x.scale[1], x.shrink[1]);
    }
    x.add = true;
    ++tile_;
  }

  // The same iteration for tiles of this leaf that all rows see whole, from x.offset on: most of a long row, without a
  // branch but its own, and with everything that depends on the buffer's number a step ahead. Where there is a mask,
  // tiles of which it speaks, too, if positions run on. (Two such loops would keep descriptors out of uniform
  // registers: 30 moves before each product.)
  __device__ __forceinline__ void run_plain(Leaf& x) {
    static_assert(L::kStages == 2, "buffers alternate");
    constexpr bool kMasked = Variant::reads_index_mask;
    if (kMasked ? !runs_ || negate_ : x.offset < whole_begin_ || x.offset + L::kTile > whole_end_) return;
    int end = kMasked ? x.stop : min(x.stop, whole_end_ - L::kTile + 1);
    if constexpr (L::kKeeps) end = min(end, x.offset / L::kKeptKeys * L::kKeptKeys + L::kKeptKeys);
    bool whole = true;
    unsigned own[2];
    typename Base::Spoken spoken;
    if constexpr (kMasked) find_spoken(spoken, x.rows);
    unsigned next = (tile_ + 1) % 2;
    unsigned k = base_ + L::kOffsetK + next * L::kBytesK, v = base_ + L::kOffsetV + (1 - next) * L::kBytesV;
    const unsigned long long q =
        ptx::desc_sw128(base_ + (pass_ & (L::kBuffersQ - 1)) * L::kBytesQ + group_ * 64 * 128, 0, 1024);
    unsigned parity_k = static_cast<unsigned>(tile_ + 1) / 2 & 1, parity_v = static_cast<unsigned>(tile_) / 2 & 1;
    unsigned full_k = bar(meta_.k_full[next]), full_v = bar(meta_.v_full[1 - next]);
    const unsigned both_k = 2 * bar(meta_.k_full[0]) + 8, both_v = 2 * bar(meta_.v_full[0]) + 8;
    ptx::wgmma_pin(x.o);
#pragma unroll 1
    for (; x.offset < end; x.offset += L::kTile) {  // tile_ + 1 begins at x.offset
      ATTNRT_TRACE(group_, tile_, 0);
      wait_k(full_k, parity_k);
      ATTNRT_TRACE(group_, tile_, 1);
      turn_begin();
      ATTNRT_TRACE(group_, tile_, 2);
      multiply_scores(x.s, q, ptx::desc_sw128(k, 0, 1024));
      wait_v(full_v, parity_v);
      multiply_values(x.o, x.w, ptx::desc_sw128(v, L::kSlabKv, 1024), x.add);
      turn_end();
      ATTNRT_TRACE(group_, tile_, 3);
      k = 2 * (base_ + L::kOffsetK) + L::kBytesK - k;
      v = 2 * (base_ + L::kOffsetV) + L::kBytesV - v;
      full_k = both_k - full_k;
      full_v = both_v - full_v;
      parity_v = parity_k;
      parity_k ^= next;
      if constexpr (kMasked) {
        whole = x.offset >= whole_begin_ && x.offset + L::kTile <= whole_end_;
        if (!whole) look_at_spoken(own, spoken, x.rows, x.offset);
      }
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(x.s);
      ATTNRT_TRACE(group_, tile_, 4);
      this->template hooks<true>(x.s, x.rows, tile_ + 1, x.offset, x.bias);
      if (kMasked && !whole) mask_own(x.s, own);
      if constexpr (Variant::is_logistic) {
        this->template logistics<true>(x.s);
        if (kMasked && !whole) mask_own(x.s, own);
      }
      release(meta_.k_empty[next]);
      this->template raise<true>(x.s, x.m, x.top, x.shrink, x.sum, x.bias, View{true, {}}, x.near);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(x.o);
      ATTNRT_TRACE(group_, tile_, 5);
      next ^= 1;
      release(meta_.v_empty[next]);
      next_weights(x);
    }
    if (x.ends && x.offset >= x.stop) release_queries();
  }

  // ------------------------------------------------------------------ turns
#ifdef HOPPER_NO_TURNS
  static constexpr bool kTurns = false;
#else
  static constexpr bool kTurns = !L::kNarrow;  // their products are too short for it to matter who comes first
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
    if constexpr (Variant::has_logits) ptx::fresh(s);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < L::kDim / L::kSlabDims; ++i) {
      const unsigned long long a = ptx::desc_add(q, i * L::kSlabQ), b = ptx::desc_add(k, i * L::kSlabKv);
      if constexpr (L::kNarrow) {
        ptx::WgmmaChainE4m3<L::kTile>::template ss<32, 32>(s, a, b, i > 0);
      } else {
        ptx::WgmmaChain<kH, L::kTile>::template ss<0, 0, 32, 32>(s, a, b, i > 0);
      }
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_values(float (&o)[kO], const unsigned (&w)[kWords], int stage,
                                                  bool add) const {
    multiply_values(o, w, ptx::desc_sw128(base_ + L::kOffsetV + stage * L::kBytesV, L::kSlabKv, 1024), add);
  }
  __device__ __forceinline__ void multiply_values(float (&o)[kO], const unsigned (&w)[kWords], unsigned long long v,
                                                  bool add) const {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kWords / 16; ++i) {
      if constexpr (L::kNarrow) {
        ptx::WgmmaChainE4m3<L::kDimVo>::template rs<32>(o, w + 16 * i, v, add);
      } else {
        ptx::WgmmaChain<kH, L::kDimVo>::template rs<1, 2048>(o, w + 16 * i, ptx::desc_add(v, i * 4 * 2048),
                                                             i > 0 || add);
      }
    }
    ptx::wgmma_commit();
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
