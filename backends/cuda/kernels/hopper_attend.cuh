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

namespace attnrt {

template <class Config, class Variant>
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

  __device__ __forceinline__ void run() {
    tile_ = 0;
    pass_ = 0;
    if (group_ == L::kGroups - 1) turn_end();  // warpgroup 0 goes first
    if (!open_pass(0)) return;
    float s[kS], o[kO], m[2], l[2];
    float total_m[2], total_l[2];
    float total_o[kO];  // lies in local memory: only items of several leaves touch it
    Row rows[2];
    load_rows(rows);
    int leaf = 0, offset = record().begin, stop = record().stop;
    wait_k(tile_);
    multiply_scores(s, 0, tile_);
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(s);
#pragma unroll 1
    for (bool more = true; more;) {
      unsigned w[kS / 2];
      const bool add = run_leaf(s, w, rows, offset, stop, o, m, l);
      // The next leaf of this pass, or the first of the next pass; its first scores go ahead of this leaf's last
      // product.
      const PassRecord& now = record();
      const int leaves = now.item.leaf_end - now.item.leaf_begin;
      const bool ends = leaf + 1 >= leaves;
      if (ends) {
        more = open_pass(pass_ + 1);
      } else {
        leaf_range<L::kTile>(p_, now.item, now.item.leaf_begin + leaf + 1, offset, stop);
      }
      if (more) wait_k(tile_ + 1);
      turn_begin();
      // At the very end this multiplies what is left in the buffers and nobody looks: a branch here would make ptxas
      // serialise (C7515).
      multiply_scores(s, ends ? (pass_ + 1) & 1 : pass_ & 1, tile_ + 1);
      wait_v(tile_);
      multiply_values(o, w, tile_ % L::kStages, add);
      turn_end();
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(o);
      ptx::wgmma_pin(s);
      release(meta_.v_empty[tile_ % L::kStages]);
      ++tile_;

      close_leaf(m, l);
      if (Config::folds && now.item.fold && leaves > 1) fold(leaf == 0, total_o, total_m, total_l, o, m, l);
      if (now.item.slot >= 0) {
        if (!now.item.fold || ends) store_state(now, now.item.fold ? 0 : leaf, rows, o, m, l);
      } else if (ends) {
        finish(rows, pass_ & 1, o, m, l);
      }
      ++leaf;
      if (ends) {
        release(meta_.q_empty[pass_ & 1]);
        if (!more) break;
        ++pass_;
        leaf = 0;
        offset = record().begin;
        stop = record().stop;
        load_rows(rows);
      }
    }
  }

 private:
  __device__ __forceinline__ static unsigned bar(const unsigned long long& b) { return ptx::smem_addr(&b); }

  // ------------------------------------------------------------------ turns
  // Barrier 1 + g is warpgroup g's turn to issue; its predecessor arrives there.
  __device__ __forceinline__ void turn_begin() const {
    if constexpr (L::kGroups > 1) ptx::bar_sync(1 + group_, 256);
  }
  __device__ __forceinline__ void turn_end() const {
    if constexpr (L::kGroups > 1) ptx::bar_arrive(1 + (group_ + 1) % L::kGroups, 256);
  }

  // ------------------------------------------------------------------ products
  __device__ __forceinline__ void multiply_scores(float (&s)[kS], int buffer, int t) const {
    const unsigned long long q = ptx::desc_sw128(base_ + buffer * L::kBytesQ + group_ * 64 * 128, 0, 1024);
    const unsigned long long k = ptx::desc_sw128(base_ + L::kOffsetK + t % L::kStages * L::kBytesK, 0, 1024);
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
    const unsigned long long v = ptx::desc_sw128(base_ + L::kOffsetV + stage * L::kBytesV, L::kSlabKv, 1024);
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
  }
  __device__ __forceinline__ void wait_v(int t) const {
    ptx::mbar_wait(bar(meta_.v_full[t % L::kStages]), t / L::kStages & 1);
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
    return !meta_.pass[pass & 1].done;
  }

  __device__ __forceinline__ void load_rows(Row (&rows)[2]) {
    int low_max = kDeadKey, high_min = 0x7fffffff, limit_min = 0x7fffffff, any_mask = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Row& row = rows[half];
      const int r = row_of(half);
      const int4 entry = meta_.row[pass_ & 1][r];
      const int2 request = meta_.row_request[pass_ & 1][r];
      Ctx& c = row.ctx;
      c.request = request.x;
      c.qo_row = entry.x;
      c.qo_pos = entry.y;
      c.kv_head = record().head;
      c.qo_head = c.kv_head * Config::group + (record().first + r) % Config::group;
      c.qo_len = p_.plan->qo_lens[c.request];
      c.kv_len = kv_len_of(p_, c.request);
      c.kv_pos = 0;
      c.kv_slot = 0;
      row.hook = Variant::row(params_, c);
      row.low = entry.z;
      row.high = entry.w;
      row.limit = request.y;
      row.mask_bit = kNoMask;
      row.mask_from = 0;
      if constexpr (Variant::reads_index_mask) {
        row.mask_bit = meta_.mask_bit[pass_ & 1][r];
        row.mask_from = meta_.mask_from[pass_ & 1][r];
        any_mask |= row.mask_bit != kNoMask;
      }
      if (c.qo_row >= 0) {  // rows past the item's end see nothing, and do not make the others' tiles partial
        low_max = max(low_max, row.low);
        high_min = min(high_min, row.high);
        limit_min = min(limit_min, row.limit);
      }
    }
    low_max_ = __reduce_max_sync(0xffffffffu, low_max);
    high_min_ = __reduce_min_sync(0xffffffffu, high_min);
    limit_min_ = __reduce_min_sync(0xffffffffu, limit_min);
    any_mask_ = Variant::reads_index_mask && __any_sync(0xffffffffu, any_mask);
  }

  // Whether every row of the warp sees the whole tile.
  __device__ __forceinline__ bool whole(int offset) const {
    if (!Variant::mask_is_interval) return false;
    const int4 range = meta_.range[tile_ % L::kStages][lane_ % 4];
    const bool yes = range.z && range.x >= low_max_ && range.y <= high_min_;
    return __all_sync(0xffffffffu, yes) && !any_mask_ && offset + L::kTile <= limit_min_;
  }

  __device__ __forceinline__ bool seen(const Row& row, const Ctx& c, int pos, int offset,
                                       const unsigned char* mask) const {
    bool yes = pos >= row.low && pos <= row.high && offset < row.limit;
    if constexpr (!Variant::mask_is_interval) yes = yes && Variant::mask(params_, row.hook, c);
    if constexpr (Variant::reads_index_mask) {
      if (yes && row.mask_bit != kNoMask && offset >= row.mask_from) {
        const long long bit = row.mask_bit + offset;
        yes = mask[bit >> 3] >> (bit & 7) & 1;
      }
    }
    return yes;
  }

  // Hooks and masks on a score tile; without hooks a tile that all rows see whole is left alone.
  __device__ __forceinline__ void logits(float (&s)[kS], const Row (&rows)[2], int offset) const {
    const int stage = tile_ % L::kStages;
    const bool all = whole(offset);
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
    } else {
      if (negate_) {
#pragma unroll
        for (int i = 0; i < kS; ++i) s[i] = -s[i];
      }
    }
    if (!all) {
      const unsigned char* mask = Variant::reads_index_mask ? p_.plan->parts[record().item.part].mask : nullptr;
#pragma unroll
      for (int n = 0; n < L::kTile / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = n * 8 + lane_ % 4 * 2 + e;
          const int pos = meta_.pos[stage][key];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Ctx c = rows[half].ctx;
            c.kv_pos = pos;
            if constexpr (L::kNeedsSlots) c.kv_slot = meta_.slot[stage][key];
            float& x = s[4 * n + 2 * half + e];
            x = seen(rows[half], c, pos, offset + key, mask) ? x : (Variant::use_softmax ? neg_inf() : 0.0f);
          }
        }
    }
  }

  // ------------------------------------------------------------------ softmax
  // s becomes 2^(s c - m c) under the new maximum; l follows, shrink is what O has to be multiplied by.
  __device__ __forceinline__ void weights(float (&s)[kS], float (&m)[2], float (&l)[2], float (&shrink)[2]) const {
    if constexpr (!Variant::use_softmax) {
      m[0] = m[1] = 0.0f;
      shrink[0] = shrink[1] = 1.0f;
      return;
    }
    float even[2] = {m[0], m[1]}, odd[2] = {m[0], m[1]};
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        even[half] = fmaxf(even[half], s[4 * n + 2 * half]);
        odd[half] = fmaxf(odd[half], s[4 * n + 2 * half + 1]);
      }
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = fmaxf(even[half], odd[half]);
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
      // Rows that see nothing yet subtract 0: every weight is 2^-inf.
      top[half] = x == neg_inf() ? 0.0f : __fmul_rn(x, scale_);
      const float before = __fmul_rn(m[half], scale_);  // -inf stays -inf
      shrink[half] = ptx::ex2(__fsub_rn(before, top[half]));
      m[half] = x;
    }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < kS / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = s[4 * n + 2 * half];
        float& y = s[4 * n + 2 * half + 1];
        x = ptx::ex2(__fmaf_rn(x, scale_, -top[half]));
        y = ptx::ex2(__fmaf_rn(y, scale_, -top[half]));
        sum[half] = __fadd_rn(sum[half], __fadd_rn(x, y));
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = __fmaf_rn(l[half], shrink[half], sum[half]);
  }

  // A store that never happens, but only the sums of all weights can tell: ptxas would else sink the exponentials below
  // the wait for the products under which they are meant to run.
  __device__ __forceinline__ void weights_done(const float (&l)[2]) const {
    if constexpr (!Variant::use_softmax) return;
    ptx::computed(l[0] + l[1], base_);
  }

  __device__ __forceinline__ void pack(const float (&s)[kS], unsigned (&w)[kS / 2]) const {
#pragma unroll
    for (int i = 0; i < kS / 2; ++i) w[i] = ptx::pack2<kH>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void rescale(float (&o)[kO], const float (&shrink)[2]) const {
    if (!Variant::use_softmax || __all_sync(0xffffffffu, shrink[0] == 1.0f && shrink[1] == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kO; ++i) o[i] *= shrink[i / 2 % 2];
  }

  // ------------------------------------------------------------------ a leaf
  // From the scores of its first tile in s to the weights of its last in w, whose product with V is still to come
  // (added to o, or the first: the result). m holds raw maxima here (before the factor scale_).
  __device__ __forceinline__ bool run_leaf(float (&s)[kS], unsigned (&w)[kS / 2], const Row (&rows)[2], int offset,
                                           int stop, float (&o)[kO], float (&m)[2], float (&l)[2]) {
    float shrink[2];
    m[0] = m[1] = neg_inf();
    l[0] = l[1] = 0.0f;
    logits(s, rows, offset);
    release(meta_.k_empty[tile_ % L::kStages]);
    weights(s, m, l, shrink);
    pack(s, w);
    bool add = false;
#pragma unroll 1
    for (offset += L::kTile; offset < stop; offset += L::kTile) {
      ++tile_;
      wait_k(tile_);
      turn_begin();
      multiply_scores(s, pass_ & 1, tile_);
      wait_v(tile_ - 1);
      multiply_values(o, w, (tile_ - 1) % L::kStages, add);
      turn_end();
      ptx::wgmma_wait<1>();
      ptx::wgmma_pin(s);
      logits(s, rows, offset);
      release(meta_.k_empty[tile_ % L::kStages]);
      weights(s, m, l, shrink);
      weights_done(l);
      ptx::wgmma_wait<0>();
      ptx::wgmma_pin(o);
      release(meta_.v_empty[(tile_ - 1) % L::kStages]);
      pack(s, w);
      rescale(o, shrink);
      add = true;
    }
    return add;
  }

  // The quad's sums, and the maxima as base-2 logits.
  __device__ __forceinline__ void close_leaf(float (&m)[2], float (&l)[2]) const {
    if constexpr (!Variant::use_softmax) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] = __fadd_rn(l[half], __shfl_xor_sync(0xffffffffu, l[half], 1));
      l[half] = __fadd_rn(l[half], __shfl_xor_sync(0xffffffffu, l[half], 2));
      m[half] = __fmul_rn(m[half], scale_);
    }
  }

  // Leaf onto total; the result is in both.
  __device__ __forceinline__ void fold(bool first, float (&total_o)[kO], float (&total_m)[2], float (&total_l)[2],
                                       float (&o)[kO], float (&m)[2], float (&l)[2]) const {
    volatile float* memory = total_o;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (first) {
        total_m[half] = neg_inf();
        total_l[half] = 0.0f;
      }
      Fold f = fold_head<Variant::use_softmax>(total_m[half], total_l[half], m[half], l[half]);
      total_m[half] = m[half] = f.m;
      total_l[half] = l[half] = f.l;
#pragma unroll
      for (int i = 0; i < kO; ++i) {
        if (i / 2 % 2 != half) continue;
        if (!first) o[i] = fold_acc(f, memory[i], o[i]);
        memory[i] = o[i];
      }
    }
  }

  // ------------------------------------------------------------------ results
  __device__ __forceinline__ void store_state(const PassRecord& pass, int leaf, const Row (&rows)[2],
                                              const float (&o)[kO], const float (&m)[2], const float (&l)[2]) const {
    const WorkItem& item = pass.item;
    const int queries = item.q_end - item.q_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows[half].ctx.qo_row < 0) continue;
      const int query = (pass.first + row_of(half)) / Config::group;
      const long long at =
          (static_cast<long long>(item.slot) + leaf * queries + query) * p_.num_qo_heads + rows[half].ctx.qo_head;
      if (lane_ % 4 == 0) reinterpret_cast<float2*>(p_.plan->partial_ml)[at] = make_float2(m[half], l[half]);
      float* to = p_.plan->partial_acc + at * L::kDimVo + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < L::kDimVo / 8; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(o[4 * n + 2 * half], o[4 * n + 2 * half + 1]);
      }
    }
  }

  // Divides and writes 64 rows. 16-bit results go through the buffer where Q lay (its last product is done), so that
  // rows leave in 16-byte pieces; a warp's sixteen rows are its own, but the products of its neighbours may still read
  // theirs: hence the barrier.
  __device__ __forceinline__ void finish(const Row (&rows)[2], int buffer, float (&o)[kO], const float (&m)[2],
                                         const float (&l)[2]) const {
    constexpr bool kStaged = kBytes<Config::out_type> == 2;
    const bool vectors =
        kStaged &&
        ((reinterpret_cast<unsigned long long>(p_.out) | (p_.out_stride_row | p_.out_stride_head) * 2) & 15) == 0;
    long long to[2];
    if (vectors) ptx::bar_sync(1 + L::kGroups + group_, 128);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Ctx& c = rows[half].ctx;
      const FinishRow row = finish_head<Variant>(params_, c, m[half], l[half]);
      to[half] = c.qo_row < 0 ? kNothing : c.qo_row * p_.out_stride_row + c.qo_head * p_.out_stride_head;
      if (lane_ % 4 == 0 && c.qo_row >= 0) store_lse(p_, c.qo_row, c.qo_head, row.lse);
#pragma unroll
      for (int n = 0; n < L::kDimVo / 8; ++n) {
        const int col = n * 8 + lane_ % 4 * 2;
        const auto x = finish_value<Config, Variant>(params_, c, row, col, o[4 * n + 2 * half]);
        const auto y = finish_value<Config, Variant>(params_, c, row, col + 1, o[4 * n + 2 * half + 1]);
        if (vectors) {
          const int r = row_of(half);
          const unsigned at =
              base_ + buffer * L::kBytesQ + n / 8 * L::kSlabQ + r * 128 + ((n ^ r) & 7) * 16 + lane_ % 4 * 4;
          ptx::st_shared(at, static_cast<unsigned>(x) | static_cast<unsigned>(y) << 16);
        } else if (to[half] != kNothing) {
          auto* row_out = reinterpret_cast<typename Bits<Config::out_type>::type*>(p_.out) + to[half] + col;
          row_out[0] = x;
          row_out[1] = y;
        }
      }
    }
    if (!vectors) return;
    __syncwarp();
    constexpr int kChunks = L::kDimVo / 8, kPer = 32 / kChunks;  // chunks of 16 bytes per row, rows per instruction
    static_assert(kChunks <= 32 && 8 % kPer == 0, "rows of up to 512 bytes");
    const int chunk = lane_ % kChunks;
#pragma unroll
    for (int i = 0; i < 16; i += kPer) {
      const int r = i + lane_ / kChunks;
      const long long at = __shfl_sync(0xffffffffu, to[i / 8], r % 8 * 4);
      const int row = group_ * 64 + warp_ * 16 + r;
      const unsigned from = base_ + buffer * L::kBytesQ + chunk / 8 * L::kSlabQ + row * 128 + ((chunk ^ row) & 7) * 16;
      unsigned x[4];
      ptx::ld_shared16(x, from);
      if (at != kNothing) *reinterpret_cast<uint4*>(p_.out + at * 2 + chunk * 16) = make_uint4(x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
  }

  static constexpr long long kNothing = -0x7fffffffffffffffLL - 1;

  const RunParams& p_;
  const ParamRef* params_;
  const unsigned base_;
  M& meta_;
  int lane_, group_, warp_;
  int tile_, pass_;  // so far: they number buffers and phases
  int low_max_, high_min_, limit_min_;
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
    HopperConsumer<Config, Variant>(p, params, smem).run();
  }
}

}  // namespace attnrt
