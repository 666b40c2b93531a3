// SPDX-License-Identifier: Apache-2.0
// The tile kernel: a persistent CTA of four warps runs the work items of one worker, tensor cores of sm_80 (mma.sync
// m16n8k16).
//
// Division of labour in a tile of kTile keys: each warp scores a quarter of the keys for all rows, the warps agree on
// the row maxima through shared memory, write the weights P there, and each accumulates a quarter of the output columns
// over all keys. So there is one state per row (no per-warp states to fold), registers hold acc[rows][columns / 4], and
// what is added in which order depends on kTile and the four warps alone: a row has the same bits in a tile of 16 rows
// and of 64, in decode and in prefill. The alternative, a warp per 16 rows with all keys, needs no exchange but leaves
// three warps idle in decode and makes decode and prefill two numeric classes.
#pragma once
#include "attnrt_variant.h"
#include "convert.cuh"
#include "finish.cuh"
#include "loader.cuh"
#include "masks.cuh"

namespace attnrt {

template <class Config, class Variant>
class Attend {
  using L = Layout<Config, Variant>;
  static constexpr int kMB = Config::m_blocks;
  static constexpr int kNS = L::kWarpKeys / 8;  // 8-key blocks of scores per warp
  static constexpr int kNO = L::kWarpCols / 8;  // 8-column blocks of output per warp
  // Wide heads have no registers for more.
  static constexpr int kUnrollD = L::kDim > 256 ? 2 : L::kDim / 16;
  static constexpr int kUnrollKeys = L::kDimVo > 256 ? 1 : L::kTile / 16;
  static constexpr ptx::Half16 kH = kHalf<Config::q_type>;

 public:
  __device__ __forceinline__ Attend(const RunParams& p, const ParamRef* params, char* smem)
      : p_(p), params_(params), smem_(smem), meta_(*reinterpret_cast<Meta<L>*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    warp_ = threadIdx.x / 32;
  }

  __device__ __forceinline__ void run() {
    const int wide = p_.plan->wide_workers;
    if (blockIdx.x >= (wide ? wide : p_.plan->num_workers)) return;
    if (p_.plan->worker_indptr[worker()] == p_.plan->worker_indptr[worker() + 1]) return;
    // Padded columns are multiplied too: they must hold zeros, not what the last kernel left.
#pragma unroll 1
    for (int i = threadIdx.x; i < L::kOffsetMeta / 16; i += L::kThreads) {
      reinterpret_cast<uint4*>(smem_)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    Cursor<Config, Variant> ahead(p_, worker());
    stage_ = 0;
    fill_ = 0;
    due_ = L::kStages;
    // Read again where they are needed: the tile loop has no registers to spare for what the first-level cache holds.
    for (int i = p_.plan->worker_indptr[worker()]; i < p_.plan->worker_indptr[worker() + 1]; ++i) {
      const WorkItem& item = p_.plan->work[i];
      for (int head = item.head_begin; head < item.head_end; ++head) {
        for (first_ = 0; first_ < (item.q_end - item.q_begin) * Config::group; first_ += L::kRows)
          run_rows(item, head, ahead);
      }
    }
    ptx::cp_async_wait<0>();
  }

 private:
  // Where there is a crew for items of many rows, this kernel is it.
  __device__ __forceinline__ int worker() const {
    return (p_.plan->wide_workers ? p_.plan->num_workers : 0) + blockIdx.x;
  }

  struct State {
    float m[kMB][2], l[kMB][2];
    float acc[kMB][kNO][4];

    // Moves every row half one place up. A rolled loop that takes the first and shifts visits all of them without an
    // index into registers, and its body is compiled once: what ends a row is large and rare.
    __device__ __forceinline__ void shift() {
#pragma unroll
      for (int b = 0; b < kMB; ++b) {
        m[b][0] = m[b][1];
        l[b][0] = l[b][1];
        if (b + 1 < kMB) {
          m[b][1] = m[b + 1][0];
          l[b][1] = l[b + 1][0];
        }
#pragma unroll
        for (int n = 0; n < kNO; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            acc[b][n][e] = acc[b][n][2 + e];
            if (b + 1 < kMB) acc[b][n][2 + e] = acc[b + 1][n][e];
          }
      }
    }
  };

  // Fills free stages, at first all of them. The only call of the loader: it is inlined, and half of the code.
  __device__ __forceinline__ void fetch(Cursor<Config, Variant>& ahead) {
#pragma unroll 1
    for (; due_ > 0; --due_) {
      if (ahead.advance()) load_tile<Config, Variant>(p_, ahead, smem_, fill_, meta_);
      ptx::cp_async_commit();
      fill_ = fill_ + 1 == L::kStages ? 0 : fill_ + 1;
    }
    due_ = 1;
  }

  __device__ __forceinline__ void run_rows(const WorkItem& item, int head, Cursor<Config, Variant>& ahead) {
    const PartDesc& part = p_.plan->parts[item.part];
    __syncthreads();  // the tile before is done with Q and the row tables
    open_rows<Config, Variant>(p_, params_, item, part, head, first_, meta_);
    load_q<Config, Variant>(p_, params_, head, smem_, meta_);
    if (kMB > 1) blocks_ = (min((item.q_end - item.q_begin) * Config::group - first_, L::kRows) + 15) / 16;
    __syncthreads();

    const RulerDesc& ruler = p_.plan->rulers[item.klass];
    State total;
    clear(total);
    for (int leaf = item.leaf_begin; leaf < item.leaf_end; ++leaf) {
      State state;
      clear(state);
      const int start = ruler.start(leaf);
      const int stop = min(ruler.start(leaf + 1), item.kv_end);
      for (int tile = first_tile<L::kTile>(start, item.kv_begin); tile < stop; tile += L::kTile) {
        __syncthreads();  // all are done with the tile before, whose stage is filled now
        fetch(ahead);
        ptx::cp_async_wait<L::kStages - 1>();
        __syncthreads();  // the tile has arrived for all
        step(item, head, tile, state);
        stage_ = stage_ + 1 == L::kStages ? 0 : stage_ + 1;
      }
      close_leaf(state);
      if (item.fold) {
        fold(total, state);
      } else {
        total = state;
      }
      if (item.slot >= 0 && (!item.fold || leaf + 1 == item.leaf_end)) {
        store_state(item, item.fold ? 0 : leaf - item.leaf_begin, total);
      }
    }
    if (item.slot < 0) finish(total);
  }

  __device__ __forceinline__ static void clear(State& s) {
#pragma unroll
    for (int b = 0; b < kMB; ++b) {
      s.m[b][0] = s.m[b][1] = neg_inf();
      s.l[b][0] = s.l[b][1] = 0.0f;
#pragma unroll
      for (int n = 0; n < kNO; ++n) s.acc[b][n][0] = s.acc[b][n][1] = s.acc[b][n][2] = s.acc[b][n][3] = 0.0f;
    }
  }

  __device__ __forceinline__ int blocks() const { return kMB == 1 ? 1 : blocks_; }
  // Whether a block has no rows; the first one always has.
  __device__ __forceinline__ bool idle(int block) const { return block > 0 && block >= blocks(); }
  __device__ __forceinline__ int row_of(int block, int half) const { return block * 16 + half * 8 + lane_ / 4; }

  // One KV tile: scores, weights, output.
  __device__ __forceinline__ void step(const WorkItem& item, int head, int tile, State& state) {
    const char* k = smem_ + L::kOffsetStages + stage_ * L::kStageBytes;
    const char* v = L::kVFromK ? k : k + L::kRawBytesK;
    if constexpr (L::kConvertK || L::kConvertV) {
      convert_tile<Config, Variant>(p_, params_, head, meta_.request[0], smem_, stage_, meta_);
      if constexpr (L::kConvertK) k = smem_ + L::kOffsetK;
      if constexpr (L::kVFromK) {
        v = k;
      } else if constexpr (L::kConvertV) {
        v = smem_ + L::kOffsetV;
      }
      __syncwarp();
    }
    float s[kMB][kNS][4];
    scores(k, s);
    logits(item, head, tile, s);
    if constexpr (Variant::use_softmax) {
      row_maxima(s);
      __syncthreads();
      weights(s, state);
    } else {
      sums(s, state);
    }
    store_weights(s);
    __syncthreads();
    accumulate(v, state);
  }

  // s = Q K^T over this warp's keys.
  __device__ __forceinline__ void scores(const char* k, float (&s)[kMB][kNS][4]) const {
#pragma unroll
    for (int b = 0; b < kMB; ++b)
#pragma unroll
      for (int n = 0; n < kNS; ++n) s[b][n][0] = s[b][n][1] = s[b][n][2] = s[b][n][3] = 0.0f;
    const unsigned q = ptx::smem_addr(smem_ + L::kOffsetQ) + lane_ % 16 * L::kPitchK + lane_ / 16 * 16;
    const unsigned rows = ptx::smem_addr(k) + warp_ * L::kWarpKeys * L::kPitchK;
    const unsigned k_two = rows + (lane_ / 16 * 8 + lane_ % 8) * L::kPitchK + lane_ / 8 % 2 * 16;
    const unsigned k_one = rows + lane_ % 8 * L::kPitchK + lane_ / 8 % 2 * 16;
#pragma unroll(kUnrollD)
    for (int d = 0; d < L::kDim / 16; ++d) {
      unsigned kb[4];
      if constexpr (kNS == 2) {
        ptx::ldmatrix_x4(kb, k_two + d * 32);
      } else {
        unsigned pair[2];
        ptx::ldmatrix_x2(pair, k_one + d * 32);
        kb[0] = pair[0];
        kb[1] = pair[1];
      }
#pragma unroll
      for (int b = 0; b < kMB; ++b) {
        if (!idle(b)) {
          unsigned a[4];
          ptx::ldmatrix_x4(a, q + b * 16 * L::kPitchK + d * 32);
#pragma unroll
          for (int n = 0; n < kNS; ++n) ptx::mma_m16n8k16<kH>(s[b][n], a, kb[2 * n], kb[2 * n + 1]);
        }
      }
    }
  }

  // Scale, variant, mask; the result is a base-2 logit (-inf: unseen), or a weight (0: unseen) without a softmax.
  __device__ __forceinline__ void logits(const WorkItem& item, int head, int tile, float (&s)[kMB][kNS][4]) const {
    // A tile that every row sees whole needs no test per element.
    const bool whole = meta_.all_live[stage_][warp_] && !meta_.any_mask && Variant::mask_is_interval &&
                       meta_.pos_min[stage_][warp_] >= meta_.low_max &&
                       meta_.pos_max[stage_][warp_] <= meta_.high_min && tile + L::kTile <= meta_.limit_min;
    const float scale = Variant::has_logits || !Variant::use_softmax ? p_.sm_scale : p_.sm_scale * kLog2e;
    const unsigned live = whole ? 0xffffffffu : seen_bits(item, head, tile);
#pragma unroll
    for (int b = 0; b < kMB; ++b) {
      if (idle(b)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Ctx c;
        typename Variant::Row row;
        if constexpr (Variant::has_logits) {
          c = row_ctx<Config, Variant>(p_, meta_, row_of(b, half), head);
          row = Variant::row(params_, c);
        }
#pragma unroll
        for (int n = 0; n < kNS; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[b][n][2 * half + e];
            if constexpr (Variant::has_logits) {
              const int key = key_of(n, e);
              c.kv_pos = meta_.pos[stage_][key];
              c.kv_slot = meta_.slot[stage_][key];
            }
            x = Variant::logits(params_, row, c, x * scale);
            if constexpr (Variant::has_logits && Variant::use_softmax) x *= kLog2e;
            if (!(live >> ((2 * b + half) * 2 * kNS + 2 * n + e) & 1)) x = Variant::use_softmax ? neg_inf() : 0.0f;
          }
      }
    }
  }

  __device__ __forceinline__ int key_of(int n, int e) const { return warp_ * L::kWarpKeys + n * 8 + lane_ % 4 * 2 + e; }

  // Which of this lane's scores are seen, one bit each in the order of logits().
  __device__ __forceinline__ unsigned seen_bits(const WorkItem& item, int head, int tile) const {
    static_assert(4 * kMB * kNS <= 32);
    const unsigned char* mask = Variant::reads_index_mask ? p_.plan->parts[item.part].mask : nullptr;
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 2 * blocks() - 1; i >= 0; --i) {
      const int r = row_of(0, i);
      Ctx c;
      typename Variant::Row row;
      if constexpr (!Variant::mask_is_interval) {
        c = row_ctx<Config, Variant>(p_, meta_, r, head);
        row = Variant::row(params_, c);
      }
#pragma unroll
      for (int k = 2 * kNS - 1; k >= 0; --k)
        bits = bits << 1 | (seen(mask, r, row, c, key_of(k / 2, k % 2), tile) ? 1u : 0u);
    }
    return bits;
  }

  template <class Row>
  __device__ __forceinline__ bool seen(const unsigned char* mask, int r, const Row& row, Ctx& c, int key,
                                       int tile) const {
    return sees<Variant>(params_, meta_, mask, r, row, c, meta_.pos[stage_][key], tile + key,
                         [&] { return meta_.slot[stage_][key]; });
  }

  __device__ __forceinline__ void row_maxima(const float (&s)[kMB][kNS][4]) {
#pragma unroll
    for (int b = 0; b < kMB; ++b) {
      if (idle(b)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = neg_inf();
#pragma unroll
        for (int n = 0; n < kNS; ++n) m = fmaxf(m, fmaxf(s[b][n][2 * half], s[b][n][2 * half + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        if (lane_ % 4 == 0) meta_.reduce[warp_][row_of(b, half)] = m;
      }
    }
  }

  // s becomes 2^(s - m) under the new running maximum; l and acc are brought to it.
  __device__ __forceinline__ void weights(float (&s)[kMB][kNS][4], State& state) const {
#pragma unroll
    for (int b = 0; b < kMB; ++b) {
      if (idle(b)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row_of(b, half);
        const float before = state.m[b][half];
        float m = before;
#pragma unroll
        for (int w = 0; w < L::kWarps; ++w) m = fmaxf(m, meta_.reduce[w][r]);
        const float shrink = exp2_diff(before, m);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kNS; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[b][n][2 * half + e];
            x = exp2_diff(x, m);
            sum += x;
          }
        state.m[b][half] = m;
        state.l[b][half] = fmaf(state.l[b][half], shrink, sum);
#pragma unroll
        for (int n = 0; n < kNO; ++n) {
          state.acc[b][n][2 * half] *= shrink;
          state.acc[b][n][2 * half + 1] *= shrink;
        }
      }
    }
  }

  // Without a softmax the state only remembers that it is not the empty one.
  __device__ __forceinline__ void sums(const float (&)[kMB][kNS][4], State& state) const {
#pragma unroll
    for (int b = 0; b < kMB; ++b) state.m[b][0] = state.m[b][1] = 0.0f;
  }

  __device__ __forceinline__ void store_weights(const float (&s)[kMB][kNS][4]) const {
#pragma unroll
    for (int b = 0; b < kMB; ++b) {
      if (idle(b)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        char* row = smem_ + L::kOffsetP + row_of(b, half) * L::kPitchP + (warp_ * L::kWarpKeys + lane_ % 4 * 2) * 2;
#pragma unroll
        for (int n = 0; n < kNS; ++n) {
          *reinterpret_cast<unsigned*>(row + n * 16) = ptx::pack2<kH>(s[b][n][2 * half], s[b][n][2 * half + 1]);
        }
      }
    }
  }

  // acc += P V over this warp's columns and all keys of the tile.
  __device__ __forceinline__ void accumulate(const char* v, State& state) const {
    const unsigned weights = ptx::smem_addr(smem_ + L::kOffsetP) + lane_ % 16 * L::kPitchP + lane_ / 16 * 16;
    const unsigned cols = ptx::smem_addr(v) + lane_ % 16 * L::kPitchV + warp_ * L::kWarpCols * 2;
#pragma unroll(kUnrollKeys)
    for (int key = 0; key < L::kTile / 16; ++key) {
      unsigned a[kMB][4];
#pragma unroll
      for (int b = 0; b < kMB; ++b)
        if (!idle(b)) ptx::ldmatrix_x4(a[b], weights + b * 16 * L::kPitchP + key * 32);
#pragma unroll
      for (int n = 0; n < kNO; n += 2) {
        unsigned vb[4];
        if (n + 1 < kNO) {
          ptx::ldmatrix_x4_trans(vb, cols + key * 16 * L::kPitchV + n * 16 + lane_ / 16 * 16);
        } else {
          unsigned pair[2];
          ptx::ldmatrix_x2_trans(pair, cols + key * 16 * L::kPitchV + n * 16);
          vb[0] = pair[0];
          vb[1] = pair[1];
        }
#pragma unroll
        for (int b = 0; b < kMB; ++b) {
          if (idle(b)) continue;
          ptx::mma_m16n8k16<kH>(state.acc[b][n], a[b], vb[0], vb[1]);
          if (n + 1 < kNO) ptx::mma_m16n8k16<kH>(state.acc[b][n + 1], a[b], vb[2], vb[3]);
        }
      }
    }
  }

  // Row sums of the leaf: the four lanes of a row, then the warps in order.
  __device__ __forceinline__ void close_leaf(State& state) {
    if constexpr (!Variant::use_softmax) return;
    __syncthreads();  // all have read the maxima of the last tile
#pragma unroll
    for (int b = 0; b < kMB; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float l = state.l[b][half];
        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
        if (lane_ % 4 == 0) meta_.reduce[warp_][row_of(b, half)] = l;
      }
    __syncthreads();
#pragma unroll
    for (int b = 0; b < kMB; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row_of(b, half);
        float l = meta_.reduce[0][r];
#pragma unroll
        for (int w = 1; w < L::kWarps; ++w) l += meta_.reduce[w][r];
        state.l[b][half] = l;
      }
  }

  __device__ __forceinline__ static void fold(State& total, const State& leaf) {
#pragma unroll
    for (int b = 0; b < kMB; ++b)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Fold f =
            fold_head<Variant::use_softmax>(total.m[b][half], total.l[b][half], leaf.m[b][half], leaf.l[b][half]);
        total.m[b][half] = f.m;
        total.l[b][half] = f.l;
#pragma unroll
        for (int n = 0; n < kNO; ++n)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e)
            total.acc[b][n][e] = fold_acc(f, total.acc[b][n][e], leaf.acc[b][n][e]);
      }
  }

  // Both of these use the state up.
  __device__ __forceinline__ void store_state(const WorkItem& item, int leaf, State& state) const {
    const int queries = item.q_end - item.q_begin;
    const long long heads = static_cast<long long>(p_.num_qo_heads);
#pragma unroll 1
    for (int i = 0; i < 2 * blocks(); ++i, state.shift()) {
      const int r = row_of(0, i);
      const int query = (first_ + r) / Config::group;
      if (query >= queries) continue;
      const long long at = (static_cast<long long>(item.slot) + leaf * queries + query) * heads + meta_.qo_head[r];
      if (warp_ == 0 && lane_ % 4 == 0) {
        reinterpret_cast<float2*>(p_.plan->partial_ml)[at] = make_float2(state.m[0][0], state.l[0][0]);
      }
      float* to = p_.plan->partial_acc + at * Config::head_dim_vo;
#pragma unroll
      for (int n = 0; n < kNO; ++n) {
        const int col = col_of(n);
        if (real(col)) to[col] = state.acc[0][n][0];
        if (real(col + 1)) to[col + 1] = state.acc[0][n][1];
      }
    }
  }

  __device__ __forceinline__ void finish(State& state) const {
    typedef typename Bits<Config::out_type>::type Element;
#pragma unroll 1
    for (int i = 0; i < 2 * blocks(); ++i, state.shift()) {
      const int r = row_of(0, i);
      if (meta_.qo_row[r] < 0) continue;
      const Ctx c = row_ctx<Config, Variant>(p_, meta_, r, meta_.qo_head[r] / Config::group);
      const FinishRow row = finish_head<Variant>(params_, c, state.m[0][0], state.l[0][0]);
      if (warp_ == 0 && lane_ % 4 == 0) store_lse(p_, c.qo_row, c.qo_head, row.lse);
      Element* to = reinterpret_cast<Element*>(out_address<Config>(p_, c.qo_row, c.qo_head, 0));
#pragma unroll
      for (int n = 0; n < kNO; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int col = col_of(n) + e;
          if (real(col)) to[col] = finish_value<Config, Variant>(params_, c, row, col, state.acc[0][n][e]);
        }
    }
  }

  __device__ __forceinline__ static bool real(int col) {
    return L::kDimVo == Config::head_dim_vo || col < Config::head_dim_vo;
  }
  __device__ __forceinline__ int col_of(int n) const { return warp_ * L::kWarpCols + n * 8 + lane_ % 4 * 2; }

  const RunParams& p_;
  const ParamRef* params_;
  char* smem_;
  Meta<L>& meta_;
  int lane_, warp_, stage_, fill_, blocks_;
  int due_;    // stages to fill before the next tile
  int first_;  // row of the item at which this pass starts
};

}  // namespace attnrt
