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
#include "hopper_layout.cuh"
#include "types.cuh"

// An experiment's hook: the clock at stage `kind` of tile t, by role (consumer warpgroups from 0).
#ifndef ATTNRT_TRACE
#define ATTNRT_TRACE(role, t, kind)
#endif

namespace attnrt {

template <class Config, class Variant, class Loader>
class HopperConsumer {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;
  static constexpr ptx::Half16 kH = kHalf<Config::q_type>;
  static constexpr int kS =
      L::kTile / 2;  // registers of a score tile: (row g: 4j, 4j + 1), (row g + 8: 4j + 2, 4j + 3)
  static constexpr int kO = L::kDimVo / 2;

  struct Row {
    typename Variant::Row hook;
    Ctx ctx;
    long long mask_bit;
    int mask_from;
    int low, high, limit;
  };

  // How the warp's rows see a tile: all of it, or bit by bit.
  static constexpr int kParts = L::kTile / 32;
  struct View {
    bool all;
    unsigned bits[kParts][2];  // what each row sees of 32 keys, from this thread's first key on
    unsigned partial;          // bit p: some row of the warp does not see all of part p
  };

  // What is known of a leaf before its last product: after this its pass's tables are not read any more.
  enum class Fate { nothing, state, rows };
  struct Closing {
    Fate fate;
    bool folds, first;
    float m[2], l[2];
    FinishRow row[2];
    long long to[2];  // element of the output row, or row of the partial states; kNothing: none
    Ctx ctx[2];
  };

 public:
  __device__ __forceinline__ HopperConsumer(const RunParams& p, const ParamRef* params, char* smem)
      : p_(p), params_(params), base_(ptx::smem_addr(smem)), meta_(*reinterpret_cast<M*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    group_ = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    // A negative scale turns the order of scores round: scores are negated instead. Zero becomes a number too small to
    // matter.
    const float scale = Variant::has_logits || !Variant::use_softmax ? 1.0f : p.sm_scale;
    negate_ = scale < 0.0f;
    scale_ = fmaxf(fabsf(scale), 1e-30f) * kLog2e;
  }

  // One iteration per tile: the scores of the next tile, whatever row block it belongs to, then the last product of
  // this one. A row block is written after the first weights of its successor: there is no stop between blocks. What
  // needs no scores (masks as bits, the next block's rows, the end of a leaf) runs under the product that makes them.
  __device__ __forceinline__ void run() {
    tile_ = 0;
    pass_ = 0;
    if (group_ == L::kGroups - 1) turn_end();  // warpgroup 0 goes first
    if (!open_pass(0)) return;
    float s[kS], o[kO], m[2] = {neg_inf(), neg_inf()}, l[2] = {0.0f, 0.0f}, top[2] = {0.0f, 0.0f}, shrink[2];
    float total[kO + 4];  // lies in local memory: only items of several leaves touch it; last m and l
    unsigned w[kS / 2];
    Row rows[2];
    int leaf = 0, offset = record().begin, stop = record().stop;
    bool add = false;
    wait_k(0);
    multiply_scores(s, 0, 0);
    load_rows(rows);
    View view;
    look(view, rows, 0, offset);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(s);
    logits(s, rows, 0, offset, view);
    release(meta_.k_empty[0]);
    raise(s, m, top, shrink);
    weights(s, w, l, top, shrink);
#pragma unroll 1
    for (;;) {
      offset += L::kTile;
      run_whole(s, w, o, m, l, top, shrink, rows, offset, stop, add);
      // The next tile: of this leaf, of the next leaf of this pass, or of the next pass.
      const int pass = pass_;
      bool ends = false, more = true;
      const bool closes = offset >= stop;
      if (closes) {
        const WorkItem& item = record().item;
        ends = leaf + 1 >= item.leaf_end - item.leaf_begin;
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
      multiply_scores(s, pass_ & 1, tile_ + 1);
      Closing closing;
      if (closes) {
        turn_end();  // the other warpgroup does the same work under its own product
        close_leaf(closing, pass, leaf, ends, m, l);
        m[0] = m[1] = neg_inf();
        l[0] = l[1] = 0.0f;
        if (ends) release(meta_.q_empty[pass & 1]);
        if (ends && more) load_rows(rows);
      }
      if (more) look(view, rows, tile_ + 1, offset);  // tables of a pass that does not exist lead anywhere
      wait_v(tile_);
      multiply_values(o, w, tile_ % L::kStages, add);
      if (!closes) turn_end();
      ATTNRT_TRACE(group_, tile_, 3);
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(s);
      ATTNRT_TRACE(group_, tile_, 4);
      if (more) {
        logits(s, rows, tile_ + 1, offset, view);
        release(meta_.k_empty[(tile_ + 1) % L::kStages]);
        raise(s, m, top, shrink);
      }
      // By now the product with V is done or nearly so: its weights make room for the next ones as these come.
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(o);
      ATTNRT_TRACE(group_, tile_, 5);
      release(meta_.v_empty[tile_ % L::kStages]);
      weights(s, w, l, top, shrink);
      ATTNRT_TRACE(group_, tile_, 6);
      add = !closes;
      ++tile_;
      if (!closes) {
        rescale(o, shrink);
        continue;
      }
      results(closing, o, total);
      leaf = ends ? 0 : leaf + 1;
      if (!more) break;
    }
  }

 private:
  // The same iteration for tiles of this leaf that all rows see whole, from `offset` on: most of a long row, without a
  // branch but its own, and with everything that depends on the buffer's number a step ahead.
  __device__ __forceinline__ void run_whole(float (&s)[kS], unsigned (&w)[kS / 2], float (&o)[kO], float (&m)[2],
                                            float (&l)[2], float (&top)[2], float (&shrink)[2], const Row (&rows)[2],
                                            int& offset, int stop, bool& add) {
    static_assert(L::kStages == 2, "buffers alternate");
    if (offset >= stop || offset < whole_begin_ || offset + L::kTile > whole_end_) return;
    const int end = min(stop, whole_end_ - L::kTile + 1);
    unsigned next = (tile_ + 1) % 2;
    unsigned k = base_ + L::kOffsetK + next * L::kBytesK, v = base_ + L::kOffsetV + (1 - next) * L::kBytesV;
    const unsigned long long q = ptx::desc_sw128(base_ + (pass_ & 1) * L::kBytesQ + group_ * 64 * 128, 0, 1024);
    ptx::wgmma_pin(o);
#pragma unroll 1
    for (; offset < end; offset += L::kTile) {
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
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(s);
      ATTNRT_TRACE(group_, tile_, 4);
      hooks(s, rows, tile_ + 1);
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
    if constexpr (Loader::kConsumersFence) ptx::fence_proxy_async();
  }
  __device__ __forceinline__ void wait_v(int t) const {
    ptx::mbar_wait(bar(meta_.v_full[t % L::kStages]), t / L::kStages & 1);
    if constexpr (Loader::kConsumersFence) ptx::fence_proxy_async();
  }
  __device__ __forceinline__ void release(const unsigned long long& empty) const {
    __syncwarp();  // lane 0 speaks for lanes that may still be reading the key table
    if (lane_ == 0) ptx::mbar_arrive(bar(empty));
  }

  // ------------------------------------------------------------------ rows
  // This thread's rows are g and g + 8 of its warp's sixteen.
  __device__ __forceinline__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }

  __device__ __forceinline__ const PassRecord& record() const { return meta_.pass[pass_ & 1]; }

  // Waits for a pass's Q and tables; false: the list has ended.
  __device__ __forceinline__ bool open_pass(int pass) const {
    ptx::mbar_wait(bar(meta_.q_full[pass & 1]), pass >> 1 & 1);
    if constexpr (Loader::kConsumersFence) ptx::fence_proxy_async();
    return !meta_.pass[pass & 1].done;
  }

  // What hooks may ask about row r of a pass.
  __device__ __forceinline__ Ctx context(int pass, int r) const {
    const PassRecord& record = meta_.pass[pass & 1];
    const int4 entry = meta_.row[pass & 1][r];
    Ctx c;
    c.request = meta_.row_request[pass & 1][r].x;
    c.qo_row = entry.x;
    c.qo_pos = entry.y;
    c.kv_head = record.head;
    c.qo_head = c.kv_head * Config::group + (record.first + r) % Config::group;
    c.qo_len = p_.plan->qo_lens[c.request];
    c.kv_len = kv_len_of(p_, c.request);
    c.kv_pos = 0;
    c.kv_slot = 0;
    return c;
  }

  __device__ __forceinline__ void load_rows(Row (&rows)[2]) {
    int low_max = kDeadKey, high_min = 0x7fffffff, limit_min = 0x7fffffff, any_mask = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Row& row = rows[half];
      const int r = row_of(half);
      row.ctx = context(pass_, r);
      row.hook = Variant::row(params_, row.ctx);
      row.low = meta_.row[pass_ & 1][r].z;
      row.high = meta_.row[pass_ & 1][r].w;
      row.limit = meta_.row_request[pass_ & 1][r].y;
      row.mask_bit = kNoMask;
      row.mask_from = 0;
      if constexpr (Variant::reads_index_mask) {
        row.mask_bit = meta_.mask_bit[pass_ & 1][r];
        row.mask_from = meta_.mask_from[pass_ & 1][r];
      }
    }
    // What all rows of the warpgroup see: its warps must go the same way, because they multiply together.
#pragma unroll
    for (int r = group_ * 64 + lane_; r < (group_ + 1) * 64; r += 32) {
      const int4 entry = meta_.row[pass_ & 1][r];
      if (entry.x < 0) continue;  // rows past the item's end do not make the others' tiles partial
      low_max = max(low_max, entry.z);
      high_min = min(high_min, entry.w);
      limit_min = min(limit_min, meta_.row_request[pass_ & 1][r].y);
      if constexpr (Variant::reads_index_mask) any_mask |= meta_.mask_bit[pass_ & 1][r] != kNoMask;
    }
    low_max_ = __reduce_max_sync(0xffffffffu, low_max);
    high_min_ = __reduce_min_sync(0xffffffffu, high_min);
    limit_min_ = __reduce_min_sync(0xffffffffu, limit_min);
    any_mask_ = Variant::reads_index_mask && __any_sync(0xffffffffu, any_mask);
    // Tiles that all rows see whole, where positions run on with offsets.
    const PassRecord& pass = record();
    whole_begin_ = max(low_max_, pass.shift + pass.live_begin) - pass.shift;
    whole_end_ = min(min(high_min_, pass.shift + pass.live_end - 1) - pass.shift + 1, limit_min_);
    if (!Variant::mask_is_interval || any_mask_ || negate_ || pass.live_begin >= pass.live_end) {
      whole_begin_ = 0x7fffffff;
      whole_end_ = 0;
    }
  }

  // Whether every row of the warpgroup sees the whole tile.
  __device__ __forceinline__ bool whole(int t, int offset) const {
    if (!Variant::mask_is_interval) return false;
    const KeyRange range = meta_.range[t % L::kStages][lane_ % 4];
    const bool yes = (range.kind & kKeysLive) && range.low >= low_max_ && range.high <= high_min_;
    return __all_sync(0xffffffffu, yes) && !any_mask_ && offset + L::kTile <= limit_min_;
  }

  // What rows see of tile t, before its scores are known. Key by key only where positions do not run on or a hook
  // decides, in loops that are not unrolled: their loads would take the registers of the products (ptxas would
  // serialise, C7511).
  __device__ __forceinline__ void look(View& view, const Row (&rows)[2], int t, int offset) const {
    view.all = false;
    bool runs = false;
    if constexpr (Variant::mask_is_interval) {
      view.all = (offset >= whole_begin_ && offset + L::kTile <= whole_end_) || whole(t, offset);
      if (view.all) return;
      runs = __all_sync(0xffffffffu, meta_.range[t % L::kStages][lane_ % 4].kind & kKeysRun);
    }
    view.partial = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned& bits = view.bits[part][half];
        bits = runs ? run_bits(rows[half], t, offset, part) : key_bits(rows[half], t, offset, part);
        if constexpr (Variant::reads_index_mask) bits = masked_bits(rows[half], offset + part * 32, bits);
      }
      const bool partial = (view.bits[part][0] & view.bits[part][1]) != 0xffffffffu;
      view.partial |= (__any_sync(0xffffffffu, partial) ? 1u : 0u) << part;
#pragma unroll
      for (int half = 0; half < 2; ++half) view.bits[part][half] >>= lane_ % 4 * 2;
    }
  }

  // What a row sees of 32 keys that run on, the index's mask aside.
  __device__ __forceinline__ unsigned run_bits(const Row& row, int t, int offset, int part) const {
    const KeyRange range = meta_.range[t % L::kStages][part];
    // The first and the last key that the row sees, by place; the clamps keep differences from overflowing.
    const int low = min(max(row.low, range.low), max(range.high, range.base - 1) + 1) - range.base;
    const int high =
        min(max(min(row.high, range.high), range.base - 1) - range.base, max(row.limit - offset - part * 32, 0) - 1);
    return (high < 0 ? 0u : 0xffffffffu >> (31 - min(high, 31))) & (low > 31 ? 0u : 0xffffffffu << max(low, 0));
  }

  // The same for any keys: this thread's eight of them, the others 0.
  __device__ __forceinline__ unsigned key_bits(const Row& row, int t, int offset, int part) const {
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int place = i / 2 * 8 + lane_ % 4 * 2 + i % 2, key = part * 32 + place;
      Ctx c = row.ctx;
      c.kv_pos = meta_.pos[t % L::kStages][key];
      if constexpr (L::kNeedsSlots) c.kv_slot = meta_.slot[t % L::kStages][key];
      bool yes = c.kv_pos >= row.low && c.kv_pos <= row.high && offset + key < row.limit;
      if constexpr (!Variant::mask_is_interval) yes = yes && Variant::mask(params_, row.hook, c);
      bits |= (yes ? 1u : 0u) << place;
    }
    return bits;
  }

  // Bits of 32 keys from offset `start` on, and the index's mask. Only bytes of keys that are seen are read.
  __device__ __forceinline__ unsigned masked_bits(const Row& row, int start, unsigned bits) const {
    if (row.mask_bit == kNoMask) return bits;
    const int before = row.mask_from - start;  // keys that the mask does not speak of
    const unsigned asked = bits & (before <= 0 ? 0xffffffffu : before >= 32 ? 0u : 0xffffffffu << before);
    if (asked == 0) return bits;
    const unsigned char* mask = p_.plan->parts[record().item.part].mask;
    const long long first = row.mask_bit + start;
    const long long from = (first + __ffs(asked) - 1) >> 3, last = (first + 31 - __clz(asked)) >> 3;
    unsigned value[5], found = 0;  // 32 bits lie in five bytes at the most; all are asked for before one is used
#pragma unroll
    for (int i = 0; i < 5; ++i) value[i] = from + i <= last ? mask[from + i] : 0;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int place = static_cast<int>((from + i) * 8 - first);
      found |= place >= 0 ? value[i] << min(place, 31) : value[i] >> -place;
    }
    return bits & (found | ~asked);
  }

  // Two instructions per score, none where all is seen.
  __device__ __forceinline__ void mask_bits(float (&s)[kS], const View& view) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!(view.partial >> part & 1)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[16 * part + 4 * n + 2 * half + e];
            x = view.bits[part][half] >> (n * 8 + e) & 1 ? x : hidden_score();
          }
    }
  }

  __device__ __forceinline__ static float hidden_score() { return Variant::use_softmax ? neg_inf() : 0.0f; }

  // Hooks on the scores of tile t.
  __device__ __forceinline__ void hooks(float (&s)[kS], const Row (&rows)[2], int t) const {
    const int stage = t % L::kStages;
    if constexpr (Variant::has_logits || !Variant::use_softmax) {
#pragma unroll
      for (int n = 0; n < L::kTile / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = n * 8 + lane_ % 4 * 2 + e;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Ctx c = rows[half].ctx;
            c.kv_pos = meta_.pos[stage][key];
            if constexpr (L::kNeedsSlots) c.kv_slot = meta_.slot[stage][key];
            float& x = s[4 * n + 2 * half + e];
            x = Variant::logits(params_, rows[half].hook, c, x * p_.sm_scale);
          }
        }
    }
  }

  // Hooks and masks; without hooks a tile that all rows see whole is left alone.
  __device__ __forceinline__ void logits(float (&s)[kS], const Row (&rows)[2], int t, int offset,
                                         const View& view) const {
    const int stage = t % L::kStages;
    hooks(s, rows, t);
    if (negate_) {
#pragma unroll
      for (int i = 0; i < kS; ++i) s[i] = -s[i];
    }
    if (view.all) return;
    mask_bits(s, view);
  }

  // ------------------------------------------------------------------ softmax
  // The new maximum; top is what exponents subtract, shrink what l and O have to be multiplied by.
  __device__ __forceinline__ void raise(const float (&s)[kS], float (&m)[2], float (&top)[2],
                                        float (&shrink)[2]) const {
    shrink[0] = shrink[1] = 1.0f;
    if constexpr (!Variant::use_softmax) {
      m[0] = m[1] = 0.0f;
      return;
    }
    float chain[2][4];  // as many as hide the latency of a maximum
#pragma unroll
    for (int i = 0; i < 8; ++i) chain[i / 4][i % 4] = fmaxf(m[i / 4], s[i / 4 * 2 + i % 2 + i % 4 / 2 * 4]);
#pragma unroll
    for (int n = 2; n < kS / 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = chain[i / 2][n % 2 * 2 + i % 2];
        x = fmaxf(x, s[4 * n + i]);
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(fmaxf(chain[half][0], chain[half][1]), fmaxf(chain[half][2], chain[half][3]));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      // Rows that see nothing yet subtract 0: every weight is 2^-inf.
      top[half] = x == neg_inf() ? 0.0f : __fmul_rn(x, scale_);
      const float before = __fmul_rn(m[half], scale_);  // -inf stays -inf
      shrink[half] = ptx::ex2(__fsub_rn(before, top[half]));
      m[half] = x;
    }
    // A store that never happens, but only the maxima can tell: ptxas would else sink all of this below the wait for
    // the product under which it is meant to run.
    ptx::computed(shrink[0] + shrink[1], base_);
  }

  // Weights 2^(s c - m c) as 16-bit operands, and their sums.
  __device__ __forceinline__ void weights(float (&s)[kS], unsigned (&w)[kS / 2], float (&l)[2], const float (&top)[2],
                                          const float (&shrink)[2]) const {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = s[4 * n + 2 * half], y = s[4 * n + 2 * half + 1];
        if constexpr (Variant::use_softmax) {
          x = ptx::ex2(__fmaf_rn(x, scale_, -top[half]));
          y = ptx::ex2(__fmaf_rn(y, scale_, -top[half]));
          sum[half] = __fadd_rn(sum[half], __fadd_rn(x, y));
        }
        w[2 * n + half] = ptx::pack2<kH>(x, y);
      }
    if constexpr (!Variant::use_softmax) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = __fmaf_rn(l[half], shrink[half], sum[half]);
  }

  __device__ __forceinline__ void rescale(float (&o)[kO], const float (&shrink)[2]) const {
    if constexpr (!Variant::use_softmax) return;
    if (__all_sync(0xffffffffu, shrink[0] == 1.0f && shrink[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] *= shrink[i / 2 % 2];
  }

  // ------------------------------------------------------------------ the end of a leaf
  // The quad's sums, the maxima as base-2 logits, the fold onto the leaves before, what divides the rows.
  __device__ __forceinline__ void close_leaf(Closing& closing, int pass, int leaf, bool ends, const float (&m)[2],
                                             const float (&l)[2]) const {
    const PassRecord& record = meta_.pass[pass & 1];
    const WorkItem& item = record.item;
    closing.folds = Config::folds && item.fold && item.leaf_end - item.leaf_begin > 1;
    closing.first = leaf == 0;
    closing.fate =
        item.slot < 0 ? (ends ? Fate::rows : Fate::nothing) : (!item.fold || ends ? Fate::state : Fate::nothing);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = l[half];
      if constexpr (Variant::use_softmax) {
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
      }
      closing.l[half] = x;
      closing.m[half] = Variant::use_softmax ? __fmul_rn(m[half], scale_) : m[half];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Ctx c = closing.ctx[half] = context(pass, row_of(half));
      closing.to[half] = kNothing;
      if (closing.fate == Fate::rows) {
        if (c.qo_row >= 0) closing.to[half] = c.qo_row * p_.out_stride_row + c.qo_head * p_.out_stride_head;
      } else if (c.qo_row >= 0) {
        const int query = (record.first + row_of(half)) / Config::group, part = item.fold ? 0 : leaf;
        closing.to[half] =
            (static_cast<long long>(item.slot) + part * (item.q_end - item.q_begin) + query) * p_.num_qo_heads +
            c.qo_head;
      }
    }
    if (closing.fate == Fate::rows && !closing.folds) divide(closing);
  }

  // What rows are divided by, and their log-sum-exp: even lanes for one row, odd lanes for the other.
  __device__ __forceinline__ void divide(Closing& closing) const {
    const bool odd = lane_ & 1;
    const Ctx c = odd ? closing.ctx[1] : closing.ctx[0];
    const FinishRow row =
        finish_head<Variant>(params_, c, odd ? closing.m[1] : closing.m[0], odd ? closing.l[1] : closing.l[0]);
    if (lane_ % 4 < 2 && c.qo_row >= 0) store_lse(p_, c.qo_row, c.qo_head, row.lse);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      closing.row[half] = {__shfl_sync(0xffffffffu, row.inverse, lane_ / 4 * 4 + half), 0.0f};
    }
  }

  // Leaf onto total, where the result is. O itself stays as it is: a changed O that came back into the loop by a branch
  // would make ptxas serialise the products (C7514).
  __device__ __forceinline__ void fold(Closing& closing, float (&total)[kO + 4], const float (&o)[kO]) const {
    volatile float* memory = total;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total_m = closing.first ? neg_inf() : memory[kO + half];
      const float total_l = closing.first ? 0.0f : memory[kO + 2 + half];
      const Fold f = fold_head<Variant::use_softmax>(total_m, total_l, closing.m[half], closing.l[half]);
      memory[kO + half] = closing.m[half] = f.m;
      memory[kO + 2 + half] = closing.l[half] = f.l;
#pragma unroll
      for (int i = 0; i < kO; ++i) {
        if (i / 2 % 2 != half) continue;
        memory[i] = closing.first ? o[i] : fold_acc(f, memory[i], o[i]);
      }
    }
    if (closing.fate == Fate::rows) divide(closing);
  }

  // ------------------------------------------------------------------ results
  // What becomes of a leaf: folded onto those before it, stored as a state, or, at the end of its pass, finished rows.
  __device__ __forceinline__ void results(Closing& closing, const float (&o)[kO], float (&total)[kO + 4]) const {
    if constexpr (Config::folds) {
      if (closing.folds) {
        fold(closing, total, o);
        const volatile float* memory = total;
        return emit(closing, [&](int i) { return memory[i]; });
      }
    }
    emit(closing, [&](int i) { return o[i]; });
  }

  template <class Get>
  __device__ __forceinline__ void emit(const Closing& closing, Get&& o) const {
    if (closing.fate == Fate::state) store_state(closing, o);
    if (closing.fate == Fate::rows) finish(closing, o);
  }

  template <class Get>
  __device__ __forceinline__ void store_state(const Closing& closing, Get&& o) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const long long at = closing.to[half];
      if (at == kNothing) continue;
      if (lane_ % 4 == 0) {
        reinterpret_cast<float2*>(p_.plan->partial_ml)[at] = make_float2(closing.m[half], closing.l[half]);
      }
      float* to = p_.plan->partial_acc + at * L::kDimVo + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < L::kDimVo / 8; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(o(4 * n + 2 * half), o(4 * n + 2 * half + 1));
      }
    }
  }

  // Element col of a finished row, before the cast.
  __device__ __forceinline__ float finished(const Ctx& c, const FinishRow& row, int col, float acc) const {
    const float x = row.inverse == 0.0f ? 0.0f : __fmul_rn(acc, row.inverse);
    if constexpr (Variant::has_output) return Variant::output(params_, c, col, x);
    return x;
  }

  // Divides and writes rows: 16 bytes at a time where the output allows it, else element by element, in code of its
  // own: a branch inside the loop cost more than everything else here.
  template <class Get>
  __device__ __forceinline__ void finish(const Closing& closing, Get&& o) const {
    if constexpr (kBytes<Config::out_type> == 2) {
      const bool vectors =
          ((reinterpret_cast<unsigned long long>(p_.out) | (p_.out_stride_row | p_.out_stride_head) * 2) & 15) == 0;
      if (vectors) return store_rows(closing, o);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (closing.to[half] == kNothing) continue;
      auto* out = reinterpret_cast<typename Bits<Config::out_type>::type*>(p_.out) + closing.to[half] + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < L::kDimVo / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x =
              finished(closing.ctx[half], closing.row[half], n * 8 + lane_ % 4 * 2 + e, o(4 * n + 2 * half + e));
          out[n * 8 + e] = from_float<Config::out_type>(x);
        }
    }
  }

  // A quad holds four columns' worth of 16 bytes in pairs of elements: a 4 x 4 transposition among its lanes gives each
  // lane 16 bytes of its own.
  template <class Get>
  __device__ __forceinline__ void store_rows(const Closing& closing, Get&& o) const {
    const int lane = lane_ % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      char* out = p_.out + closing.to[half] * 2 + lane * 16;
#pragma unroll
      for (int n = 0; n < L::kDimVo / 8; n += 4) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (n + i) + 2 * half, col = (n + i) * 8 + lane * 2;
          x[i] =
              ptx::pack2<kHalf<Config::out_type>>(finished(closing.ctx[half], closing.row[half], col, o(at)),
                                                  finished(closing.ctx[half], closing.row[half], col + 1, o(at + 1)));
        }
        transpose<1>(x[0], x[1]);
        transpose<1>(x[2], x[3]);
        transpose<2>(x[0], x[2]);
        transpose<2>(x[1], x[3]);
        if (closing.to[half] != kNothing) {
          *reinterpret_cast<uint4*>(out + n * 16) = make_uint4(x[0], x[1], x[2], x[3]);
        }
      }
    }
  }

  // Exchanges a of the lanes that have bit kBit with b of those that have not.
  template <int kBit>
  __device__ __forceinline__ void transpose(unsigned& a, unsigned& b) const {
    const bool high = lane_ & kBit;
    const unsigned other = __shfl_xor_sync(0xffffffffu, high ? a : b, kBit);
    a = high ? other : a;
    b = high ? b : other;
  }

  static constexpr long long kNothing = -0x7fffffffffffffffLL - 1;

  const RunParams& p_;
  const ParamRef* params_;
  const unsigned base_;
  M& meta_;
  int lane_, group_, warp_;
  int tile_, pass_;  // so far: they number buffers and phases
  int low_max_, high_min_, limit_min_;
  int whole_begin_, whole_end_;  // offsets
  bool any_mask_, negate_;
  float scale_;
};

// The kernel: initialises barriers, gives registers to the consumers, starts the roles.
template <class Config, class Variant, class Loader>
__device__ __forceinline__ void hopper_attend(const RunParams& p, const ParamRef* params, const KvMaps& maps,
                                              char* smem) {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;
  if (blockIdx.x >= p.plan->team_workers) return;
  if (threadIdx.x == 0) {
    M& meta = *reinterpret_cast<M*>(smem + L::kOffsetMeta);
    for (int i = 0; i < 2; ++i) {
      ptx::mbar_init(ptx::smem_addr(&meta.q_full[i]), Loader::kArrivalsQ);
      ptx::mbar_init(ptx::smem_addr(&meta.q_empty[i]), 4 * L::kGroups);
    }
    for (int i = 0; i < L::kStages; ++i) {
      ptx::mbar_init(ptx::smem_addr(&meta.k_full[i]), Loader::kArrivalsK);
      ptx::mbar_init(ptx::smem_addr(&meta.k_empty[i]), 4 * L::kGroups);
      ptx::mbar_init(ptx::smem_addr(&meta.v_full[i]), Loader::kArrivalsV);
      ptx::mbar_init(ptx::smem_addr(&meta.v_empty[i]), 4 * L::kGroups);
    }
    ptx::mbar_init(ptx::smem_addr(&meta.patch), 1);
    ptx::mbar_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::reg_dealloc<Loader::kRegs>();
    Loader(p, params, maps, smem).run();
  } else {
    ptx::reg_alloc<Loader::kConsumerRegs>();
    HopperConsumer<Config, Variant, Loader>(p, params, smem).run();
  }
}

}  // namespace attnrt
