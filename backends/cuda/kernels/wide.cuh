// SPDX-License-Identifier: Apache-2.0
// The wide kernel (sm_90): rows of the decode class in tiles of up to 64, of one request (drafts) or of many that share
// keys, so that K and V are read once for all of them. A warpgroup multiplies (wgmma, queries on M), four warps load
// (wide_loader.cuh); two CTAs share an SM, each with 64 KB of stages, so that one computes while the other waits.
//
// A row has the bits that the tile and decode kernels give it: tiles of 64 keys, k-steps of 16 in the same order (E1:
// the instruction does not matter), the same exponentials, and their sums in the same order: a lane there adds keys 2t,
// 2t + 1, 2t + 8, 2t + 9 of its warp's sixteen, and so does a lane here, which holds all four sixteens of a tile and
// keeps a sum for each.
//
// The order of a tile's work is that of its pipes: the second row's maximum stands beside the first one's exponentials,
// and the wait for the product with V between the rows, so that O's factors and what is packed stand beside the second
// row's. Of what ptxas would put in one heap, `after`, `computed` and that wait say the order.
//
// A lane (g = lane / 4, t = lane % 4) holds rows g and g + 8 of its warp's sixteen; of S keys 8j + 2t (+1), of O
// columns 8j + 2t (+1).
#pragma once
#include "attnrt_variant.h"
#include "masks.cuh"
#include "wide_loader.cuh"
#include "wide_results.cuh"

namespace attnrt {

template <class Config, class Variant>
class Wide : public WideResults<Config, Variant> {
  using L = WideLayout<Config, Variant>;
  using Base = WideResults<Config, Variant>;
  using Base::base_, Base::close, Base::kO, Base::kSixteens, Base::lane_, Base::meta_, Base::p_, Base::params_;
  using Base::group_, Base::row_of, Base::smem_, Base::sum_leaf, Base::warp_;
  using typename Base::Rows;
  static constexpr ptx::Half16 kH = kHalf<Config::q_type>;
  static constexpr int kS = L::kTile / 2;  // registers of scores: row g: 4j, 4j + 1, row g + 8: 4j + 2, 4j + 3

  // Nothing is done to a score before its row's maximum is known, which is scaled alone: the order stays where the
  // factor is positive.
  static constexpr bool kRaw = Variant::use_softmax && !Variant::has_logits;

 public:
  __device__ __forceinline__ Wide(const RunParams& p, const ParamRef* params, char* smem) : Base(p, params, smem) {
    const bool raw = kRaw && p.sm_scale > 0.0f;
    float unit[1] = {raw ? p.sm_scale * kLog2e : 1.0f};
    ptx::wgmma_pin(unit);  // it would be made for each tile else
    unit_ = unit[0];
    plain_ = raw ? kWideWhole : 0;
    keys_ = static_cast<unsigned>(ptx::desc_sw128(base_ + L::kOffsetStages, 0, 1024));
    values_ = static_cast<unsigned>(ptx::desc_sw128(base_ + L::kOffsetStages + L::kStageBytes, L::kSlabKv, 1024));
  }

  // Tile by tile, pass by pass, until the loaders say that it was the last one. The tensor cores multiply the weights
  // of a tile with V while the softmax of the next one runs, also where that one begins a leaf: the leaf before is
  // folded then. At the end of a pass one more round catches up.
  __device__ __forceinline__ void run() {
    tile_ = table_ = 0;
    at_tile();
    float o[kO];
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] = 0.0f;
    unsigned q[L::kDim / 16][4];
    float m[2] = {neg_inf(), neg_inf()}, l[2][kSixteens] = {};
    float s[kS];
    unsigned w[kS / 2] = {};
    int leaf = 0;
    int before = 0;  // flags of the tile before: whether one is left to be multiplied with V, and what it ends
    // Behind another kernel this one's text has to come from memory while its first keys do: one round for nothing,
    // which neither waits for a barrier nor arrives on one, and multiplies what happens to lie there.
    if (!p_.first && plain_) before = kRehearsal;
#pragma unroll 1
    for (;;) {
      float shrink[2] = {1.0f, 1.0f}, least[2];
      int flags = 0;
      bool all = true;
      const bool more = !(before & kWideEndsPass), fresh = !before;
      if (more) {
        if (!(before & kRehearsal)) ptx::mbar_wait(full_, parity_);
        flags = before & kRehearsal ? kWideWhole : static_cast<int>(ptx::ld_shared(span_));
        if (flags & kWideOver) break;
        if (flags & kWideCopied) ptx::fence_proxy_async();
        if (fresh) load_q(q);
      }
      // O is one value from here on, whichever way it came: copies between the products would serialise them (C7514).
      ptx::wgmma_pin(o);
      // At the end of a pass the first product, at its beginning the second multiplies what happens to be there, and
      // nobody looks: a branch would serialise them (C7515).
      multiply_scores(s, q);
      if (more && !(flags & plain_)) all = whole();
      if (before & kWaits) wait_values();
      if (before & kWideCopied) ptx::fence_proxy_async();
      multiply_values(o, w, before & kAdds);
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(s);
      if (more) {
        if (!(before & kRehearsal)) release(full_);
        if (!(flags & plain_)) logits(s, all);
        raise(s, m, shrink, least);
        exponentials<0>(s, l, shrink, least);
      }
      // A leaf that has ended is not to be changed any more, and the next product with V forgets it.
      const bool ended = before & kWideEndsLeaf;
      float factor[2] = {ended ? 1.0f : shrink[0], ended ? 1.0f : shrink[1]};
      ptx::wgmma_pin(factor);  // registers of their own: among the exponentials `shrink` is in use
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(o);
      if (before & kWaits) release(full_values());
      if (more) {
        if constexpr (Variant::use_softmax) {
#pragma unroll
          for (int i = 0; i < kO; ++i) o[i] *= factor[i / 2 % 2];
        }
        pack<0>(w, s);
        exponentials<1>(s, l, shrink, least);
        pack<1>(w, s);
      }
      if (ended) {
        close(o, leaf, !more);
        ++leaf;
        if (!more) {
          leaf = before = 0;
          __syncwarp();
          if (lane_ == 0) ptx::mbar_arrive(ptx::smem_addr(&meta_.spare));
          continue;
        }
      }
      if (before & kRehearsal) {
        before = 0;
        m[0] = m[1] = neg_inf();
#pragma unroll
        for (int i = 0; i < 2 * kSixteens; ++i) l[i / kSixteens][i % kSixteens] = 0.0f;
        continue;
      }
      if (flags & kWideEndsLeaf) sum_leaf(m, l);
      const int adds = fresh || ended ? 0 : kAdds;
      before = (flags & (kWideEndsLeaf | kWideEndsPass | kWideCopied)) | kWaits | adds;
      ++tile_;
      table_ = table_ + 1 == L::kTiles ? 0 : table_ + 1;
      at_tile();
    }
  }

 private:
  // Of a tile, beside what the loaders say: it waits for its product with V; that is added to what O holds.
  static constexpr int kWaits = 32, kAdds = 64, kRehearsal = 128;
  // Stages go in pairs, the K and the V of a tile.
  static constexpr unsigned kPairs = L::kStages / 2;
  static_assert(!(kPairs & (kPairs - 1)), "a power of two");

  // What the tile at hand asks for first, made at the end of the one before: there other warps have the time.
  __device__ __forceinline__ void at_tile() {
    full_ = base_ + L::kOffsetMeta + tile_ % kPairs * 16;
    parity_ = tile_ / kPairs & 1;
    span_ = ptx::smem_addr(&meta_.span[table_][warp_].z);
    keys_now_ = keys_ + tile_ % kPairs * (2 * L::kStageBytes / 16);
  }

  // Of the tile before: the barrier of its V, whose bytes are there after the wait.
  __device__ __forceinline__ unsigned full_values() const {
    return base_ + L::kOffsetMeta + (tile_ - 1) % kPairs * 16 + 8;
  }
  __device__ __forceinline__ void wait_values() const { ptx::mbar_wait(full_values(), (tile_ - 1) / kPairs & 1); }

  // This warp has read the stage that this barrier tells to be full.
  __device__ __forceinline__ void release(unsigned full) const {
    __syncwarp();
    if (ptx::elect_one()) ptx::mbar_arrive(full + L::kStages * 8);
  }

  // Q of this warp's rows as operands of the products.
  __device__ __forceinline__ void load_q(unsigned (&q)[L::kDim / 16][4]) const {
#pragma unroll
    for (int i = 0; i < L::kDim / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        q[i][j] = *reinterpret_cast<const unsigned*>(
            smem_ + L::template place_of<L::kSlabQ>(row_of(j % 2), 2 * i + j / 2) + lane_ % 4 * 4);
    sync();  // where Q lay, folded accumulators will
  }

  // Of the warps that compute.
  __device__ __forceinline__ static void sync() { ptx::bar_sync(1, 128 * L::kGroups); }

  // Scores of the tile at hand, as a group of its own.
  __device__ __forceinline__ void multiply_scores(float (&s)[kS], const unsigned (&q)[L::kDim / 16][4]) const {
    const unsigned long long k = ptx::desc_sw128(0, 0, 1024) | keys_now_;
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < L::kDim / 16; ++i)
      ptx::Wgmma<kH, L::kTile>::template rs<0>(s, q[i], ptx::desc_add(k, i / 4 * L::kSlabKv + i % 4 * 32), i > 0);
    ptx::wgmma_commit();
  }

  // Adds weights times the V of the tile before, as a group of its own.
  __device__ __forceinline__ void multiply_values(float (&o)[kO], const unsigned (&w)[kS / 2], bool add) const {
    const unsigned long long v =
        ptx::desc_sw128(0, 0, 1024) | (values_ + (tile_ - 1) % kPairs * (2 * L::kStageBytes / 16));
    ptx::wgmma_pin(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < L::kTile / 16; ++i) {
      const unsigned a[4] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
      ptx::Wgmma<kH, L::kDim>::template rs<1>(o, a, ptx::desc_add(v, i * 2048), i > 0 || add);
    }
    ptx::wgmma_commit();
  }

  // ------------------------------------------------------------------ what rows see
  __device__ __forceinline__ int key_of(int i) const { return i / 4 * 8 + lane_ % 4 * 2 + i % 2; }

  // Whether this warp's rows see all keys of the tile: then nothing is tested per element.
  __device__ __forceinline__ bool whole() const {
    if constexpr (!Variant::mask_is_interval) return false;
    const Rows& rows = this->rows();
    int4 all = meta_.span[table_][0];
#pragma unroll
    for (int i = 1; i < L::kLoaders; ++i) {
      const int4 span = meta_.span[table_][i];
      all.x = min(all.x, span.x);
      all.y = max(all.y, span.y);
      all.z &= span.z;
    }
    // All of it is read at once, where && would wait for one answer before it asked for the next.
    return (all.z & kWideLive) & (all.x >= rows.low_max) & (all.y <= rows.high_min) &
           (all.w + L::kTile <= rows.limit_min) & !(Variant::reads_index_mask && rows.any_mask);
  }

  // Variant and mask (`all`: nothing is hidden), and the scale where it is not for the softmax to apply; the result is
  // a base-2 logit (-inf: unseen), or a weight (0: unseen) without a softmax.
  __device__ __forceinline__ void logits(float (&s)[kS], bool all) const {
    const Rows& rows = this->rows();
    if (!plain_) {
      const float scale = kRaw ? p_.sm_scale * kLog2e : p_.sm_scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Ctx c;
        typename Variant::Row row;
        if constexpr (Variant::has_logits) {
          c = row_ctx<Config, Variant>(p_, rows, row_of(half) % kWideRows, meta_.pass.head);
          row = Variant::row(params_, c);
        }
#pragma unroll
        for (int j = 0; j < kS / 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 4 * j + 2 * half + e;
            float& x = s[i];
            if constexpr (Variant::has_logits) {
              c.kv_pos = meta_.pos[table_][key_of(i)];
              c.kv_slot = meta_.slot[table_][key_of(i)];
            }
            // What a hook does not read must not be contracted with the difference to come: elsewhere a mask stands
            // between.
            x = Variant::has_logits ? Variant::logits(params_, row, c, x * scale) : __fmul_rn(x, scale);
            if constexpr (Variant::has_logits && Variant::use_softmax) x = __fmul_rn(x, kLog2e);
          }
      }
    }
    if (all) return;
    unsigned long long seen;
    if (!in_range(rows, seen)) seen = seen_bits(rows, meta_.span[table_][0].w);
#pragma unroll
    for (int i = 0; i < kS; ++i) {
      if (!(seen >> (i / 4 * 8 + i % 4) & 1)) s[i] = Variant::use_softmax ? neg_inf() : 0.0f;
    }
  }

  // As seen_bits, where positions run on and every row sees an interval of them.
  __device__ __forceinline__ bool in_range(const Rows& rows, unsigned long long& seen) const {
    if constexpr (!Variant::mask_is_interval) return false;
    const int4(&span)[L::kLoaders] = meta_.span[table_];
    if (!(span[0].z & span[1].z & span[2].z & span[3].z & kWideRuns) || (Variant::reads_index_mask && rows.any_mask))
      return false;
    const auto upper = [&](int i) { return static_cast<unsigned>(span[i].z) & 0xffff0000u; };
    const unsigned long long there =
        static_cast<unsigned long long>(upper(3) | upper(2) >> 16) << 32 | upper(1) | upper(0) >> 16;
    const int tile = span[0].w, first = span[1].w;
    const auto below = [](int n) { return n < L::kTile ? (1ull << n) - 1 : ~0ull; };
    seen = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row_of(half) % kWideRows;
      const int from = min(max(rows.low[r], first), first + L::kTile) - first;
      const int end = min(max(rows.high[r], first - 1), first + L::kTile - 1) - (first - 1);
      const unsigned long long bits = below(min(end, max(rows.limit[r] - tile, 0))) & ~below(from) & there;
      seen |= (bits >> lane_ % 4 * 2 & 0x0303030303030303ull) << 2 * half;
    }
    return true;
  }

  // Which of this lane's scores are seen, one bit each: four to a byte.
  __device__ __forceinline__ unsigned long long seen_bits(const Rows& rows, int tile) const {
    const unsigned char* mask = Variant::reads_index_mask ? meta_.plan.parts[meta_.pass.part].mask : nullptr;
    unsigned long long bits = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int r = row_of(half) % kWideRows;
      Ctx c;
      typename Variant::Row row;
      if constexpr (!Variant::mask_is_interval) {
        c = row_ctx<Config, Variant>(p_, rows, r, meta_.pass.head);
        row = Variant::row(params_, c);
      }
#pragma unroll 1
      for (int j = 0; j < kS / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * half + e, key = key_of(i);
          const bool yes = sees<Variant>(params_, rows, mask, r, row, c, meta_.pos[table_][key], tile + key,
                                         [&] { return meta_.slot[table_][key]; });
          bits |= (yes ? 1ull : 0ull) << (i / 4 * 8 + i % 4);
        }
    }
    return bits;
  }

  // ------------------------------------------------------------------ softmax
  // The new running maximum; `least` is what exponents subtract, `shrink` what l and O are to be multiplied by.
  __device__ __forceinline__ void raise(const float (&s)[kS], float (&m)[2], float (&shrink)[2],
                                        float (&least)[2]) const {
    if constexpr (!Variant::use_softmax) {
      m[0] = m[1] = 0.0f;
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float chain[4] = {s[2 * half], s[2 * half + 1], s[2 * half + 4], s[2 * half + 5]};
#pragma unroll
      for (int i = 4; i < kS / 2; ++i) {
        float& x = chain[i % 4];
        x = fmaxf(x, s[i / 2 * 4 + 2 * half + i % 2]);
      }
      if (half) chain[0] = fmaxf(chain[0], ptx::after(least[0]));
      float top = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      top = fmaxf(m[half], kRaw ? __fmul_rn(top, unit_) : top);
      shrink[half] = exp2_diff(m[half], top);
      m[half] = top;
      least[half] = top == neg_inf() ? 0.0f : top;  // 2^(-inf - 0) is 0, too
    }
  }

  // From a row's scores to its weights, and their sums.
  template <int kHalf>
  __device__ __forceinline__ void exponentials(float (&s)[kS], float (&l)[2][kSixteens], const float (&shrink)[2],
                                               const float (&least)[2]) const {
    if constexpr (!Variant::use_softmax) return;
    float sums = shrink[1];
#pragma unroll
    for (int b = 0; b < kSixteens; ++b) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float& x = s[8 * b + n / 2 * 4 + 2 * kHalf + n % 2];
        x = ptx::ex2(__fsub_rn(kRaw ? __fmul_rn(x, unit_) : x, least[kHalf]));
        sum = n ? __fadd_rn(sum, x) : x;
      }
      l[kHalf][b] = fmaf(l[kHalf][b], shrink[kHalf], sum);
      sums += l[kHalf][b];
    }
    // A store that never happens, but only the sums can tell: ptxas would else sink all of this below the wait for
    // the product under which it is meant to run.
    if (kHalf == 0) ptx::computed(sums, base_);
  }

  // A row's weights as operands.
  template <int kHalf>
  __device__ __forceinline__ static void pack(unsigned (&w)[kS / 2], const float (&s)[kS]) {
#pragma unroll
    for (int i = kHalf; i < kS / 2; i += 2) w[i] = ptx::pack2<kH>(s[2 * i], s[2 * i + 1]);
  }

  unsigned tile_;                             // at hand, of all that the loaders bring
  int table_;                                 // its tables
  unsigned full_, parity_, span_, keys_now_;  // of it: K's barrier and its phase, flags, K as an operand
  unsigned keys_, values_;                    // the first stages as operands (lower halves of descriptors)
  float unit_;                                // what the softmax multiplies scores by
  int plain_;                                 // the flag of a tile whose scores need nothing before
};

// What comes before all that waits: barriers, by one lane of every warp, since initialisations of several lanes come
// one after the other.
template <class Config, class Variant>
__device__ __forceinline__ void wide_prepare(const KvMaps& maps, char* smem) {
  using L = WideLayout<Config, Variant>;
  auto& meta = *reinterpret_cast<WideMeta<L, Variant>*>(smem + L::kOffsetMeta);
  if (threadIdx.x % 32) return;
  const int warp = threadIdx.x / 32 % 4;
  const bool empty = threadIdx.x >= 128;
#pragma unroll
  for (int i = 0; i < L::kStages; i += 4)
    ptx::mbar_init(ptx::smem_addr(empty ? &meta.empty[i + warp] : &meta.full[i + warp]),
                   empty ? 4 * L::kGroups : WideLoader<Config, Variant>::kFullCount);
  if (threadIdx.x == 0) ptx::mbar_init(ptx::smem_addr(&meta.spare), 4 * L::kGroups);
  ptx::mbar_init_fence();
  if (threadIdx.x == 0 && maps.box_log2 == kWideBoxLog2) {
    ptx::tma_prefetch_map(&maps.k);
    ptx::tma_prefetch_map(&maps.v);
  }
}

// The kernel: reads its worker's line, gives registers to those that compute, starts the roles.
template <class Config, class Variant>
__device__ __forceinline__ void wide_attend(const RunParams& p, const ParamRef* params, const KvMaps& maps,
                                            char* smem) {
  using L = WideLayout<Config, Variant>;
  using M = WideMeta<L, Variant>;
  using Loader = WideLoader<Config, Variant>;
  M& meta = *reinterpret_cast<M*>(smem + L::kOffsetMeta);
  // All of it is asked for at once. The header lies in shared memory from then on, since what is read again and again
  // would come from L2: shared memory takes the whole first-level cache.
  const int* const header = reinterpret_cast<const int*>(p.plan);
  constexpr int kWords = sizeof(PlanHeader) / 4, kRounds = (kWords + L::kThreads - 1) / L::kThreads;
  int words[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int n = i * L::kThreads + threadIdx.x;
    words[i] = n < kWords ? header[n] : 0;
  }
  const unsigned at = kFirstAt + (p.lines - gridDim.x + blockIdx.x) * sizeof(FirstItem);
  int word = 0;
  if (at + sizeof(FirstItem) <= p.behind + sizeof(PlanHeader)) word = header[at / 4 + threadIdx.x % 32];
  if (!p.plan->wide_items) return;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int n = i * L::kThreads + threadIdx.x;
    if (n < kWords) reinterpret_cast<int*>(&meta.plan)[n] = words[i];
  }
  __syncthreads();
  const PlanHeader& plan = meta.plan;
  const int workers = plan.wide_workers, worker = plan.num_workers + blockIdx.x;
  if (blockIdx.x >= workers) return;
  if (!plan.wide_firsts || plan.num_workers + workers != p.lines || workers != gridDim.x) {
    word = 0;
    if (plan.worker_indptr[worker] == plan.worker_indptr[worker + 1]) return;
  } else {
    const int flags = __shfl_sync(0xffffffffu, word, kFirstFlags);
    if (blockIdx.x >= plan.wide_firsts || !(flags & kFirstItem)) return;
  }
  if (threadIdx.x < 128) {
    ptx::reg_dealloc<72>();
    Loader(p, params, maps, smem, meta, word).run(worker);
  } else {
    ptx::reg_alloc<184>();
    Wide<Config, Variant>(p, params, smem).run();
  }
}

}  // namespace attnrt
