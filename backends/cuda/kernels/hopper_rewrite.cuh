// SPDX-License-Identifier: Apache-2.0
// The stage between load and multiply of the Hopper prefill family: a warpgroup of its own that rewrites tiles where
// they lie. It exists only for caches in 8 bits, whose numbers become q's type (exactly), and for variants that map q,
// K or V (in float32, rounded once, as the other CUDA kernels do). Loaders then arrive on the raw barriers, and this
// stage on the full ones.
//
// An 8-bit tile is loaded into the last slabs of its stage, a slab row holding 128 numbers: a row is read whole by one
// warp before any of it is written, so that no staging buffer is needed and the stages of K and V stay two.
#pragma once
#include "attnrt_variant.h"
#include "context.cuh"
#include "hopper_layout.cuh"
#include "types.cuh"

namespace attnrt {

// Four 8-bit numbers as four of type To, exactly. Few instructions of the pipe that maxima and packing need: it runs at
// half its rate beside the tensor cores, and is what this stage is bound by.
template <Dtype From, Dtype To>
__device__ __forceinline__ void widen(unsigned x, unsigned& lo, unsigned& hi) {
  ptx::widen_fp8<From == Dtype::e4m3>(x, lo, hi);
  if constexpr (To == Dtype::bf16) {
    lo = ptx::pack2<ptx::Half16::bf16>(half_to_float(static_cast<unsigned short>(lo & 0xffffu)),
                                       half_to_float(static_cast<unsigned short>(lo >> 16)));
    hi = ptx::pack2<ptx::Half16::bf16>(half_to_float(static_cast<unsigned short>(hi & 0xffffu)),
                                       half_to_float(static_cast<unsigned short>(hi >> 16)));
  }
}

// Rows row0 ... row0 + kRows (a warp's own) of an 8-bit tile in the last slabs of a stage, in place. kColumns numbers.
// A good many loads come before the first conversion: one warp per scheduler has nothing else to hide their latency.
template <Dtype From, Dtype To, int kColumns, int kSlab, int kRows>
__device__ __forceinline__ void widen_rows(unsigned tile, int row0, int lane) {
  constexpr int kRaw = (kColumns + 127) / 128;                // slabs of the raw tile
  constexpr int kFirst = kColumns / 64 - kRaw;                // the first of them
  constexpr int kLanes = kColumns < 128 ? kColumns / 16 : 8;  // per row: 16 numbers each, of every raw slab
  constexpr int kPer = 32 / kLanes;                           // rows per step
  constexpr int kSteps = 2;  // 8 rows or 16: their low bits are those of the lane and the step
  static_assert(kRows % (kPer * kSteps) == 0);
  const int c = lane % kLanes, sub = lane / kLanes;
  // Numbers 16c ... of raw slab s become chunks 2c and 2c + 1 of slab 2s + c / 4. Lanes of two slabs meet in a bank: to
  // exchange their words would cost more.
#pragma unroll 1
  for (int i = 0; i < kRows; i += kPer * kSteps) {
    const unsigned rows = tile + (row0 + i + sub) * 128;
    unsigned x[kSteps][kRaw][4];
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int s = 0; s < kRaw; ++s) {
        const int row = sub + n * kPer;
        if (s * 8 + c < kColumns / 16) {
          ptx::ld_shared16(x[n][s], rows + n * kPer * 128 + (kFirst + s) * kSlab + ((c ^ row) & 7) * 16);
        }
      }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int s = 0; s < kRaw; ++s) {
        if (s * 8 + c >= kColumns / 16) continue;
        const unsigned to = rows + n * kPer * 128 + (2 * s + c / 4) * kSlab;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int chunk = (c % 4 * 2 + j) ^ ((sub + n * kPer) & 7);
          unsigned y[4];
          widen<From, To>(x[n][s][2 * j], y[0], y[1]);
          widen<From, To>(x[n][s][2 * j + 1], y[2], y[3]);
          ptx::st_shared16(to + chunk * 16, y);
        }
      }
  }
}

template <Dtype T>
__device__ __forceinline__ float low_float(unsigned x) {
  return to_float<T>(static_cast<unsigned short>(x & 0xffffu));
}
template <Dtype T>
__device__ __forceinline__ float high_float(unsigned x) {
  return to_float<T>(static_cast<unsigned short>(x >> 16));
}

// Maps the pairs of a warp's rows row0 ... row0 + kRows (multiples of 8) in place: map(row, d, x0, x1). A lane takes
// the same words of every row, so that what depends on d alone is computed once for eight rows, and an address is one
// XOR.
template <Dtype T, int kPairing, int kPairDim, int kColumns, int kSlab, int kRows, class Map>
__device__ __forceinline__ void map_rows(unsigned tile, int row0, int lane, const Map& map) {
  constexpr int kOver = kPairDim == 0 ? kColumns : kPairDim;
  constexpr bool kHalves = kPairing == PAIR_HALF;
  constexpr int kUnits = kHalves ? kOver / 4 : kOver / 2;  // words, or pairs of words, of a row
  constexpr int kSpan =
      (kUnits & -kUnits) > 32 ? 32 : (kUnits & -kUnits);  // units of a row that a warp takes at a time
  constexpr int kPer = 32 / kSpan;                        // and of so many rows
  static_assert(kSpan >= 4 && kOver % (kHalves ? 16 : 8) == 0, "hopper_config lets no other through");
  const int sub = lane / kSpan;
#pragma unroll 1
  for (int rows = 0; rows < kRows; rows += 8) {
#pragma unroll 1
    for (int first = 0; first < kUnits; first += kSpan) {
      const int unit = first + lane % kSpan, other = unit + kOver / 4;
      const unsigned at = tile + (row0 + rows + sub) * 128;
      const unsigned x_at = at + unit / 32 * kSlab + ((unit / 4 ^ sub) & 7) * 16 + unit % 4 * 4;
      const unsigned y_at = at + other / 32 * kSlab + ((other / 4 ^ sub) & 7) * 16 + other % 4 * 4;
      unsigned x[kSpan / 4], y[kSpan / 4];
#pragma unroll
      for (int j = 0; j < 8; j += kPer) {
        x[j / kPer] = ptx::ld_shared((x_at ^ j * 16) + j * 128);
        if constexpr (kHalves) y[j / kPer] = ptx::ld_shared((y_at ^ j * 16) + j * 128);
      }
#pragma unroll
      for (int j = 0; j < 8; j += kPer) {
        unsigned& word = x[j / kPer];
        const int row = row0 + rows + sub + j;
        float a = low_float<T>(word), b = high_float<T>(word), c = 0.0f, d = 0.0f;
        if constexpr (kHalves) {
          c = low_float<T>(y[j / kPer]);
          d = high_float<T>(y[j / kPer]);
          map(row, 2 * unit, a, c);
          map(row, 2 * unit + 1, b, d);
          y[j / kPer] = ptx::pack2<kHalf<T>>(c, d);
        } else if constexpr (kPairing == PAIR_INTERLEAVED) {
          map(row, unit, a, b);
        } else {
          map(row, 2 * unit, a, c);
          map(row, 2 * unit + 1, b, d);
        }
        word = ptx::pack2<kHalf<T>>(a, b);
      }
#pragma unroll
      for (int j = 0; j < 8; j += kPer) {
        ptx::st_shared((x_at ^ j * 16) + j * 128, x[j / kPer]);
        if constexpr (kHalves) ptx::st_shared((y_at ^ j * 16) + j * 128, y[j / kPer]);
      }
    }
  }
}

// Turns whole rows by position (variants/rotary.py), "half" pairing: the angle of a position is that of the multiple of
// 8 below it plus that of the rest. Eight rows whose positions run on from a multiple of 8 share the first, the second
// lies in a table: a tenth of the instructions of a sine and a cosine for each pair. A row's bits do not depend on
// which of the two ways it goes. table: [8][kOver / 2] of (cosine, sine); at(d): phase of pair d, pos(row): its
// position.
struct Turn {
  float c, s;
};
__device__ __forceinline__ Turn turn_of(int pos, long long phase) {
  const float x = static_cast<float>(static_cast<int>(imul(static_cast<long long>(pos), phase) >> 32)) * 0x1p-31f;
  return {f_cospi(x), f_sinpi(x)};
}
__device__ __forceinline__ void turn(const Turn& a, float cos, float sin, float& x0, float& x1) {
  const float c = __fmaf_rn(a.c, cos, -__fmul_rn(a.s, sin)), s = __fmaf_rn(a.s, cos, __fmul_rn(a.c, sin));
  const float y0 = __fmaf_rn(x0, c, -__fmul_rn(x1, s));
  x1 = __fmaf_rn(x1, c, __fmul_rn(x0, s));
  x0 = y0;
}

template <Dtype T, int kOver, int kSlab, int kRows, class At, class Pos>
__device__ __forceinline__ void turn_rows(unsigned tile, unsigned table, int row0, int lane, const At& at,
                                          const Pos& pos) {
  constexpr int kUnits = kOver / 4;
  constexpr int kSpan = (kUnits & -kUnits) > 32 ? 32 : (kUnits & -kUnits);
  constexpr int kPer = 32 / kSpan;
  const int sub = lane / kSpan;
#pragma unroll 1
  for (int rows = row0; rows < row0 + kRows; rows += 8) {
    const int mine = pos(rows + lane % 8), first_pos = __shfl_sync(0xffffffffu, mine, 0);
    const bool shared = first_pos % 8 == 0 && __all_sync(0xffffffffu, mine == first_pos + lane % 8 || mine == kDeadKey);
#pragma unroll 1
    for (int first = 0; first < kUnits; first += kSpan) {
      const int unit = first + lane % kSpan, other = unit + kOver / 4;
      const unsigned row_at = tile + (rows + sub) * 128;
      const unsigned x_at = row_at + unit / 32 * kSlab + ((unit / 4 ^ sub) & 7) * 16 + unit % 4 * 4;
      const unsigned y_at = row_at + other / 32 * kSlab + ((other / 4 ^ sub) & 7) * 16 + other % 4 * 4;
      const long long phase[2] = {at(2 * unit), at(2 * unit + 1)};
      Turn base[2] = {turn_of(first_pos, phase[0]), turn_of(first_pos, phase[1])};
#pragma unroll
      for (int j = 0; j<8; j += 4> kPer ? 4 : kPer) {
        constexpr int kSteps = 4 > kPer ? 4 / kPer : 1;
        unsigned x[kSteps], y[kSteps], w[kSteps][4];
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          const int row = j + n * kPer;
          x[n] = ptx::ld_shared((x_at ^ row * 16) + row * 128);
          y[n] = ptx::ld_shared((y_at ^ row * 16) + row * 128);
          const int rest = shared ? row + sub : pos(rows + row + sub) & 7;
          ptx::ld_shared16(w[n], table + (rest * (kOver / 2) + 2 * unit) * 8);
        }
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          if (!shared) {
            const int whole = pos(rows + j + n * kPer + sub) & ~7;
            base[0] = turn_of(whole, phase[0]);
            base[1] = turn_of(whole, phase[1]);
          }
          float a = low_float<T>(x[n]), b = high_float<T>(x[n]), c = low_float<T>(y[n]), d = high_float<T>(y[n]);
          turn(base[0], __uint_as_float(w[n][0]), __uint_as_float(w[n][1]), a, c);
          turn(base[1], __uint_as_float(w[n][2]), __uint_as_float(w[n][3]), b, d);
          x[n] = ptx::pack2<kHalf<T>>(a, b);
          y[n] = ptx::pack2<kHalf<T>>(c, d);
        }
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
          const int row = j + n * kPer;
          ptx::st_shared((x_at ^ row * 16) + row * 128, x[n]);
          ptx::st_shared((y_at ^ row * 16) + row * 128, y[n]);
        }
      }
    }
  }
}

template <class Config, class Variant, class Loader>
class HopperRewriter {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;
  static constexpr Dtype kTo = Config::q_type;
  static constexpr int kMine = L::kTile / 4;  // keys of a tile that a warp rewrites
  static constexpr int kMineQ = L::kRows / 4;

 public:
  __device__ __forceinline__ HopperRewriter(const RunParams& p, const ParamRef* params, char* smem)
      : p_(p), params_(params), base_(ptx::smem_addr(smem)), meta_(*reinterpret_cast<M*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  }

  // In the order in which consumers want them: a pass's Q, K of tile t + 1, V of tile t.
  __device__ __forceinline__ void run() {
    if constexpr (L::kTurns) fill_table();
    int t = 0, count = 0;
    Ctx before = {};
    walk_passes<L::kRows, Config::group>(p_, blockIdx.x, [&](const WorkItem& item, int head, int first) {
      const Ctx c = context(item, head, first);
      if constexpr (L::kRewritesQ) queries(count, head, first);
#pragma unroll 1
      for (int leaf = item.leaf_begin; leaf < max(item.leaf_end, item.leaf_begin + 1); ++leaf) {
        int offset, stop;
        leaf_range<L::kTile>(p_, item, leaf, offset, stop);
#pragma unroll 1
        for (; offset < stop; offset += L::kTile) {
          if constexpr (L::kRewritesK) keys(t, c);
          if constexpr (L::kRewritesV) {
            if (t > 0) values(t - 1, before);
            before = c;
          }
          ++t;
        }
      }
      ++count;
    });
    if constexpr (L::kRewritesV) {
      if (t > 0) values(t - 1, before);
    }
  }

 private:
  __device__ __forceinline__ static unsigned bar(const unsigned long long& b) { return ptx::smem_addr(&b); }

  // What this warp has written is there for products, and for who waits for the barrier.
  __device__ __forceinline__ void hand_over(unsigned full) const {
    ptx::fence_proxy_async();
    ptx::mbar_arrive_warp(full, lane_);
  }

  // What hooks on keys and values may ask: the pass's first request stands for all, as in the other kernels.
  __device__ __forceinline__ Ctx context(const WorkItem& item, int head, int first) const {
    Ctx c = {};
    c.kv_head = head;
    c.qo_head = head * Config::group;
    if constexpr (Variant::has_key || Variant::has_value) {
      const PartDesc& part = p_.plan->parts[item.part];
      c.request = part.request[item.q_begin + first / Config::group];
      c.qo_len = p_.plan->qo_lens[c.request];
      c.kv_len = kv_len_of(p_, c.request);
    }
    return c;
  }

  __device__ __forceinline__ void keys(int t, const Ctx& c) const {
    const int stage = t % L::kStages;
    const unsigned tile = base_ + L::kOffsetK + stage * L::kBytesK;
    ptx::mbar_wait(bar(meta_.k_raw[stage]), t / L::kStages & 1);
    if constexpr (L::kWidens) widen_rows<Config::kv_type, kTo, L::kDim, L::kSlabKv, kMine>(tile, warp_ * kMine, lane_);
    if constexpr (L::kTurns) {
      __syncwarp();
      turn_rows<kTo, kOver, L::kSlabKv, kMine>(
          tile, table(), warp_ * kMine, lane_, [&](int d) { return phase(d); },
          [&](int row) { return meta_.pos[stage][row]; });
    } else if constexpr (Variant::has_key) {
      __syncwarp();
      map_rows<kTo, Variant::key_pairing, Variant::key_dim, L::kDim, L::kSlabKv, kMine>(
          tile, warp_ * kMine, lane_, [&](int row, int d, float& x0, float& x1) {
            Ctx key = c;
            key.kv_pos = meta_.pos[stage][row];
            key.kv_slot = meta_.slot[stage][row];
            Variant::key(params_, key, d, x0, x1);
          });
    }
    hand_over(bar(meta_.k_full[stage]));
  }

  __device__ __forceinline__ void values(int t, const Ctx& c) const {
    const int stage = t % L::kStages;
    const unsigned tile = base_ + L::kOffsetV + stage * L::kBytesV;
    ptx::mbar_wait(bar(meta_.v_raw[stage]), t / L::kStages & 1);
    if constexpr (L::kWidens)
      widen_rows<Config::kv_type, kTo, L::kDimVo, L::kSlabKv, kMine>(tile, warp_ * kMine, lane_);
    if constexpr (Variant::has_value) {
      __syncwarp();
      map_rows<kTo, Variant::value_pairing, Variant::value_dim, L::kDimVo, L::kSlabKv, kMine>(
          tile, warp_ * kMine, lane_, [&](int row, int d, float& x0, float& x1) {
            Ctx key = c;
            key.kv_pos = meta_.pos[stage][row];
            key.kv_slot = meta_.slot[stage][row];
            if (key.kv_pos != kDeadKey) Variant::value(params_, key, d, x0, x1);  // zeros stay zeros
          });
      ptx::mbar_arrive_warp(bar(meta_.k_empty[stage]), lane_);  // the table of keys is not read any more
    }
    hand_over(bar(meta_.v_full[stage]));
  }

  __device__ __forceinline__ void queries(int count, int head, int first) const {
    const int buffer = count & 1, rows = L::table(count);
    const unsigned tile = base_ + (buffer & (L::kBuffersQ - 1)) * L::kBytesQ;
    ptx::mbar_wait(bar(meta_.table_full[rows]), count / L::kTables & 1);
    if constexpr (L::kBuffersQ == 2) {
      ptx::mbar_wait(bar(meta_.q_raw[buffer]), count >> 1 & 1);
      map_queries<kMineQ>(tile, warp_ * kMineQ, rows, head, first);
      hand_over(bar(meta_.q_full[buffer]));
    } else {
#pragma unroll 1
      for (int group = 0; group < L::kGroups; ++group) {
        ptx::mbar_wait(bar(meta_.q_raw[group]), count & 1);
        map_queries<16>(tile, group * 64 + warp_ * 16, rows, head, first);
        hand_over(bar(meta_.half_full[group]));
      }
    }
  }

  template <int kRows>
  __device__ __forceinline__ void map_queries(unsigned tile, int row0, int rows, int head, int first) const {
    if constexpr (L::kTurns) {
      return turn_rows<kTo, kOver, L::kSlabQ, kRows>(
          tile, table(), row0, lane_, [&](int d) { return phase(d); }, [&](int row) { return meta_.row[rows][row].y; });
    }
    map_rows<kTo, Variant::query_pairing, Variant::query_dim, L::kDim, L::kSlabQ, kRows>(
        tile, row0, lane_, [&](int row, int d, float& x0, float& x1) {
          const int4 entry = meta_.row[rows][row];
          if (entry.x < 0) return;
          const int qo_head = head * Config::group + (first + row) % Config::group;
          const Ctx c = query_ctx(p_, meta_.row_request[rows][row].x, entry.x, entry.y, head, qo_head);
          Variant::query(params_, c, d, x0, x1);
        });
  }

  // ------------------------------------------------------------------ rotation by position
  static constexpr int kOver = Variant::key_dim == 0 ? L::kDim : Variant::key_dim;

  __device__ __forceinline__ long long phase(int d) const {
    if constexpr (L::kTurns) return element<long long>(params_[Variant::slot_rope_phase], d);
    return 0;
  }
  __device__ __forceinline__ unsigned table() const { return ptx::smem_addr(&meta_.turns[0]); }
  __device__ __forceinline__ void fill_table() const {
    for (int i = threadIdx.x % 128; i < 8 * (kOver / 2); i += 128) {
      const Turn x = turn_of(i / (kOver / 2), phase(i % (kOver / 2)));
      meta_.turns[i] = make_float2(x.c, x.s);
    }
    ptx::bar_sync(1 + L::kGroups, 128);
  }

  const RunParams& p_;
  const ParamRef* params_;
  const unsigned base_;
  M& meta_;
  int lane_, warp_;
};

}  // namespace attnrt
