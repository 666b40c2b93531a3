// SPDX-License-Identifier: Apache-2.0
// The stage between load and multiply of the Hopper prefill family: a warpgroup of its own that rewrites tiles where
// they lie. It exists only for caches in 8 bits, whose numbers become q's type (exactly), for variants that map q, K or
// V (in float32, rounded once, as the other CUDA kernels do), and for products of 8-bit numbers, which want V by head
// dims. Loaders then arrive on the raw barriers, and this stage on the full ones.
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

// Rows row0 ... row0 + kRows (a warp's own, a multiple of 16) of an 8-bit tile in the last slabs of a stage, in place.
// kColumns numbers. Rows are asked for kAhead steps before they are converted: one warp per scheduler has nothing else
// to hide a load's latency, and no row is written before all of its lanes have it.
template <Dtype From, Dtype To, int kColumns, int kSlab, int kRows>
__device__ __forceinline__ void widen_rows(unsigned tile, int row0, int lane) {
  constexpr int kRaw = (kColumns + 127) / 128;                // slabs of the raw tile
  constexpr int kFirst = kColumns / 64 - kRaw;                // the first of them
  constexpr int kLanes = kColumns < 128 ? kColumns / 16 : 8;  // per row: 16 numbers each, of every raw slab
  constexpr int kPer = 32 / kLanes;                           // rows per step: 4 or 8
  constexpr int kSteps = kRows / kPer, kAhead = 2;
  const int c = lane % kLanes, sub = lane / kLanes;
  const unsigned rows = tile + (row0 + sub) * 128;
  unsigned x[kSteps][kRaw][4];
  // Numbers 16c ... of raw slab s become chunks 2c and 2c + 1 of slab 2s + c / 4. Lanes of two slabs meet in a bank: to
  // exchange their words would cost more.
#pragma unroll
  for (int n = 0; n < kSteps + kAhead; ++n) {
#pragma unroll
    for (int s = 0; s < kRaw; ++s) {
      if (n >= kSteps || s * 8 + c >= kColumns / 16) continue;
      ptx::ld_shared16(x[n][s], rows + n * kPer * 128 + (kFirst + s) * kSlab + ((c ^ (sub + n * kPer)) & 7) * 16);
    }
    __syncwarp();
    const int m = n - kAhead;
#pragma unroll
    for (int s = 0; s < kRaw; ++s) {
      if (m < 0 || s * 8 + c >= kColumns / 16) continue;
      const unsigned to = rows + m * kPer * 128 + (2 * s + c / 4) * kSlab;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        unsigned y[4];
        widen<From, To>(x[m][s][2 * j], y[0], y[1]);
        widen<From, To>(x[m][s][2 * j + 1], y[2], y[3]);
        ptx::st_shared16(to + ((c % 4 * 2 + j) ^ ((sub + m * kPer) & 7)) * 16, y);
      }
    }
  }
}

// V in 8 bits, 128 keys by 128 head dims, becomes head dims by keys in place; a warp has 32 keys, and all four are
// here. Of each 16 keys those come side by side whose weights a thread has side by side as it packs them: byte 4q + e
// is key 8 (e / 2) + 2q + e % 2. (A sum over keys does not ask for their order, so nothing has to move among threads.)
class Transposer {
 public:
  __device__ __forceinline__ Transposer(int warp, int lane)
      : from_((32 * warp + lane) * 128 + lane % 8 * 16), odd_first_(lane >= 16) {
    // As a lane of st_matrices: rows of one parity in its first half, of the other in its second, so that no bank is
    // asked twice.
    const int j = lane % 8, dim = 2 * j + ((j >= 4) ^ (lane / 8 % 2)), chunk = 2 * warp + lane / 16;
    to_ = dim * 128 + ((chunk ^ dim) & 7) * 16;
  }

  // bar: a named barrier of these four warps.
  __device__ __forceinline__ void run(unsigned tile, int bar) const {
    unsigned x[8][4];  // 16 head dims each: keys 0 to 7, 8 to 15, 16 to 23, 24 to 31 of the warp's
#pragma unroll
    for (int c = 0; c < 8; ++c) ptx::ld_matrices_turned(x[c], tile + (from_ ^ c * 16));
    ptx::bar_sync(bar, 128);
    const unsigned even = 0x6420, odd = 0x7531;
    const unsigned first = odd_first_ ? odd : even, second = odd_first_ ? even : odd;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      ptx::st_matrices(tile + to_ + c * 2048, ptx::bytes_of(x[c][0], x[c][1], first),
                       ptx::bytes_of(x[c][0], x[c][1], second), ptx::bytes_of(x[c][2], x[c][3], first),
                       ptx::bytes_of(x[c][2], x[c][3], second));
    }
  }

 private:
  unsigned from_, to_;
  bool odd_first_;
};

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

// Turns whole rows by position (variants/rotary.py), "half" pairing, four pairs a lane at a time. The angle of position
// 32 b + 8 g + t is that of 32 b, plus that of t from a table, plus g times that of 8: one sine and cosine of a pair
// serve 32 rows, and a row of the next g costs four instructions a pair. Which way a row is reached does not matter to
// its bits: the sum has one order.
struct Turn {
  float c, s;
};
__device__ __forceinline__ Turn turn_of(int pos, long long phase) {
  const float x = static_cast<float>(static_cast<int>(imul(static_cast<long long>(pos), phase) >> 32)) * 0x1p-31f;
  return {f_cospi(x), f_sinpi(x)};
}
__device__ __forceinline__ Turn operator+(const Turn& a, const Turn& b) {
  return {__fmaf_rn(a.c, b.c, -__fmul_rn(a.s, b.s)), __fmaf_rn(a.s, b.c, __fmul_rn(a.c, b.s))};
}

// In shared memory, by [row][half of a unit of four pairs][unit], so that neighbouring lanes read neighbouring words:
// the turns of positions 0 to 8, the pairs' phases, and a row for each warp with the turns of the 32 positions at hand.
template <int kUnits>
struct TurnTable {
  static constexpr int kEight = 8, kPhases = 9, kOwnRow = 10;
  unsigned at;
  __device__ __forceinline__ static int place(int row, int d) {
    return ((row * 2 + d / 2 % 2) * kUnits + d / 4) * 2 + d % 2;
  }
  __device__ __forceinline__ void read(int row, int unit, Turn (&x)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned w[4];
      ptx::ld_shared16(w, at + ((row * 2 + half) * kUnits + unit) * 16);
      x[2 * half] = {__uint_as_float(w[0]), __uint_as_float(w[1])};
      x[2 * half + 1] = {__uint_as_float(w[2]), __uint_as_float(w[3])};
    }
  }
  // A warp's row becomes the turns of a position.
  __device__ __forceinline__ void turn_to(int own, int pos, int lane) const {
    __syncwarp();
#pragma unroll 2
    for (int d = lane; d < 4 * kUnits; d += 32) {
      unsigned w[2];
      ptx::ld_shared8(w, at + place(kPhases, d) * 8);
      const Turn x = turn_of(pos, static_cast<long long>(w[0] | static_cast<unsigned long long>(w[1]) << 32));
      ptx::st_shared8(at + place(own, d) * 8, {__float_as_uint(x.c), __float_as_uint(x.s)});
    }
    __syncwarp();
  }
};

// Four pairs of a row: numbers x of the first half, y of the second.
template <Dtype T>
__device__ __forceinline__ void turn_pairs(const Turn (&a)[4], unsigned (&x)[2], unsigned (&y)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float x0 = low_float<T>(x[i]), x1 = high_float<T>(x[i]), y0 = low_float<T>(y[i]), y1 = high_float<T>(y[i]);
    const Turn &u = a[2 * i], &v = a[2 * i + 1];
    x[i] = ptx::pack2<kHalf<T>>(__fmaf_rn(x0, u.c, -__fmul_rn(y0, u.s)), __fmaf_rn(x1, v.c, -__fmul_rn(y1, v.s)));
    y[i] = ptx::pack2<kHalf<T>>(__fmaf_rn(y0, u.c, __fmul_rn(x0, u.s)), __fmaf_rn(y1, v.c, __fmul_rn(x1, v.s)));
  }
}

template <Dtype T, int kOver, int kSlab, int kRows>
class RowTurner {
  static constexpr int kUnits = kOver / 8;
  static constexpr int kSpan = (kUnits & -kUnits) > 16 ? 16 : (kUnits & -kUnits);  // units of a row at a time
  static constexpr int kPer = 32 / kSpan > 8 ? 8 : 32 / kSpan;                     // and of so many rows
  static constexpr int kTogether = 4;  // rows whose numbers are asked for before the first is turned
  typedef TurnTable<kUnits> Table;

 public:
  // Rows row0 ... row0 + kRows of a tile are this warp's. pos(row): position of a row of the tile.
  template <class Pos>
  __device__ __forceinline__ static void run(unsigned tile, unsigned turns, int row0, int lane, int warp,
                                             const Pos& pos) {
    const int mine = pos(row0 + lane % kRows);
    const unsigned there = __ballot_sync(0xffffffffu, mine != kDeadKey);
    if (there == 0) return;
    const int lead = __ffs(there) - 1;
    const int first = isub(__shfl_sync(0xffffffffu, mine, lead), lead);  // where row row0 would be
    if (__all_sync(0xffffffffu, mine == kDeadKey || mine == iadd(first, lane % kRows))) {
      run_on(tile, turns, row0, lane, warp, first);
    } else {
      run_any(tile + row0 * 128, {turns}, Table::kOwnRow + warp, lane, [&](int row) { return pos(row0 + row); });
    }
  }

  // The same where positions run on from that of row row0, by blocks of 32 that begin at multiples of 32.
  __device__ __forceinline__ static void run_on(unsigned tile, unsigned turns, int row0, int lane, int warp,
                                                int first) {
    const Table table = {turns};
    const int off = first & 31, own = Table::kOwnRow + warp;
    tile += row0 * 128;
#pragma unroll 1
    for (int block = -off; block < kRows; block += 32) {
      table.turn_to(own, iadd(first, block), lane);
      if (lane / kSpan >= kPer) continue;
#pragma unroll 1
      for (int unit = lane % kSpan; unit < kUnits; unit += kSpan) {
        Turn eight[4];
        table.read(Table::kEight, unit, eight);
#pragma unroll 1
        for (int t = lane / kSpan; t < 8; t += kPer) {
          Turn a[4], rest[4];
          table.read(own, unit, a);
          table.read(t, unit, rest);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = a[i] + rest[i];
          turn_eighths(place(tile, block + t, unit), place(tile, block + t, unit + kUnits), block + t, a, eight);
        }
      }
    }
  }

 private:
  // Where a unit's numbers lie in a row: those of the first half, and kUnits on those of the second.
  __device__ __forceinline__ static unsigned place(unsigned tile, int row, int unit) {
    return tile + row * 128 + unit / 16 * kSlab + ((unit / 2 ^ row) & 7) * 16 + unit % 2 * 8;
  }

  // Rows row, row + 8, row + 16 and row + 24, as far as they are this warp's; a: the turns of the first.
  __device__ __forceinline__ static void turn_eighths(unsigned x_at, unsigned y_at, int row, Turn (&a)[4],
                                                      const Turn (&eight)[4]) {
#pragma unroll
    for (int begin = 0; begin < 4; begin += kTogether) {
      unsigned x[kTogether][2], y[kTogether][2];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int g = begin + n;
        if (static_cast<unsigned>(row + 8 * g) >= kRows) continue;
        ptx::ld_shared8(x[n], x_at + g * 1024);
        ptx::ld_shared8(y[n], y_at + g * 1024);
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int g = begin + n;
        turn_pairs<T>(a, x[n], y[n]);
        if (static_cast<unsigned>(row + 8 * g) < kRows) {
          ptx::st_shared8(x_at + g * 1024, x[n]);
          ptx::st_shared8(y_at + g * 1024, y[n]);
        }
#pragma unroll
        for (int i = 0; g < 3 && i < 4; ++i) a[i] = a[i] + eight[i];
      }
    }
  }

  // Any positions: neighbours are of the same 32 as a rule.
  template <class Pos>
  __device__ __forceinline__ static void run_any(unsigned tile, const Table& table, int own, int lane, const Pos& pos) {
    bool filled = false;
    int block = 0;  // position whose turns the warp's row holds
#pragma unroll 1
    for (int step = 0; step < kRows; step += kPer) {
      const int row = step + lane / kSpan % kPer, at = pos(row);
      bool todo = lane / kSpan < kPer && at != kDeadKey;
      for (unsigned left; (left = __ballot_sync(0xffffffffu, todo)) != 0;) {
        const int wanted = __shfl_sync(0xffffffffu, at & ~31, __ffs(left) - 1);
        if (!filled || wanted != block) table.turn_to(own, wanted, lane);
        filled = true;
        block = wanted;
        if (!todo || (at & ~31) != wanted) continue;
        todo = false;
#pragma unroll 1
        for (int unit = lane % kSpan; unit < kUnits; unit += kSpan) {
          Turn a[4], more[4];
          table.read(own, unit, a);
          table.read(at & 7, unit, more);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = a[i] + more[i];
          table.read(Table::kEight, unit, more);
#pragma unroll 1
          for (int g = at >> 3 & 3; g > 0; --g) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = a[i] + more[i];
          }
          const unsigned x_at = place(tile, row, unit), y_at = place(tile, row, unit + kUnits);
          unsigned x[2], y[2];
          ptx::ld_shared8(x, x_at);
          ptx::ld_shared8(y, y_at);
          turn_pairs<T>(a, x, y);
          ptx::st_shared8(x_at, x);
          ptx::st_shared8(y_at, y);
        }
      }
    }
  }
};

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

  // In the order in which consumers want them: a pass's Q, K of tile t + 1, V of tile t. What a pass is, the rows'
  // table says: walking the plan beside a tile's numbers takes more registers than this stage has.
  __device__ __forceinline__ void run() {
    if constexpr (L::kTurns) fill_table();
    int t = 0;
    Ctx before = {};
#pragma unroll 1
    for (int count = 0;; ++count) {
      const int table = L::table(count);
      ptx::mbar_wait(bar(meta_.table_full[table]), count / L::kTables & 1);
      const PassRecord& pass = meta_.pass[table];
      if (pass.done) break;
      const Ctx c = context(pass);
      if constexpr (L::kRewritesQ) queries(count, pass);
      int offset = pass.begin, stop = pass.stop, leaf = pass.item.leaf_begin;
#pragma unroll 1
      for (;;) {
        if constexpr (L::kRewritesK) keys(t, c, pass, offset);
        if constexpr (L::kRewritesV) {
          if (t > 0) values(t - 1, before);
          before = c;
        }
        ++t;
        offset += L::kTile;
        if (offset < stop) continue;
        if (++leaf >= pass.item.leaf_end) break;
        leaf_range<L::kTile>(p_, pass.item, leaf, offset, stop);
      }
    }
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
  __device__ __forceinline__ Ctx context(const PassRecord& pass) const {
    Ctx c = {};
    c.kv_head = pass.head;
    c.qo_head = pass.head * Config::group;
    if constexpr ((Variant::has_key && !L::kTurns) || Variant::has_value) {
      const PartDesc& part = p_.plan->parts[pass.item.part];
      c.request = part.request[pass.item.q_begin + pass.first / Config::group];
      c.qo_len = p_.plan->qo_lens[c.request];
      c.kv_len = kv_len_of(p_, c.request);
    }
    return c;
  }

  __device__ __forceinline__ void keys(int t, const Ctx& c, const PassRecord& pass, int offset) const {
    const int stage = t % L::kStages;
    const unsigned tile = base_ + L::kOffsetK + stage * L::kBytesK;
    ptx::mbar_wait(bar(meta_.k_raw[stage]), t / L::kStages & 1);
    if constexpr (L::kWidens) widen_rows<Config::kv_type, kTo, L::kDim, L::kSlabKv, kMine>(tile, warp_ * kMine, lane_);
    if constexpr (L::kTurns && Variant::has_key) {
      __syncwarp();
      typedef RowTurner<kTo, kOver, L::kSlabKv, kMine> Turner;
      if (pass.runs) {
        Turner::run_on(tile, table(), warp_ * kMine, lane_, warp_, pass.shift + offset + warp_ * kMine);
      } else {
        Turner::run(tile, table(), warp_ * kMine, lane_, warp_, [&](int row) { return meta_.pos[stage][row]; });
      }
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
    if constexpr (L::kNarrow) Transposer(warp_, lane_).run(tile, 1 + L::kGroups);
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

  __device__ __forceinline__ void queries(int count, const PassRecord& pass) const {
    const int buffer = count & 1, rows = L::table(count);
    const unsigned tile = base_ + (buffer & (L::kBuffersQ - 1)) * L::kBytesQ;
    if constexpr (L::kBuffersQ == 2) {
      ptx::mbar_wait(bar(meta_.q_raw[buffer]), count >> 1 & 1);
      map_queries<kMineQ>(tile, warp_ * kMineQ, rows, pass);
      hand_over(bar(meta_.q_full[buffer]));
    } else {
#pragma unroll 1
      for (int group = 0; group < L::kGroups; ++group) {
        ptx::mbar_wait(bar(meta_.q_raw[group]), count & 1);
        map_queries<16>(tile, group * 64 + warp_ * 16, rows, pass);
        hand_over(bar(meta_.half_full[group]));
      }
    }
  }

  template <int kRows>
  __device__ __forceinline__ void map_queries(unsigned tile, int row0, int rows, const PassRecord& pass) const {
    if constexpr (L::kTurns) {
      return RowTurner<kTo, kOver, L::kSlabQ, kRows>::run(tile, table(), row0, lane_, warp_,
                                                          [&](int row) { return meta_.row[rows][row].y; });
    }
    map_rows<kTo, Variant::query_pairing, Variant::query_dim, L::kDim, L::kSlabQ, kRows>(
        tile, row0, lane_, [&](int row, int d, float& x0, float& x1) {
          const int4 entry = meta_.row[rows][row];
          if (entry.x < 0) return;
          const int qo_head = pass.head * Config::group + (pass.first + row) % Config::group;
          const Ctx c = query_ctx(p_, meta_.row_request[rows][row].x, entry.x, entry.y, pass.head, qo_head);
          Variant::query(params_, c, d, x0, x1);
        });
  }

  // ------------------------------------------------------------------ rotation by position
  static constexpr int kOver = L::kTurned;

  __device__ __forceinline__ unsigned table() const { return ptx::smem_addr(&meta_.turns[0]); }
  __device__ __forceinline__ void fill_table() const {
    if constexpr (L::kTurns) {
      typedef TurnTable<kOver / 8> Table;
      for (int d = threadIdx.x % 128; d < kOver / 2; d += 128) {
        const long long phase = element<long long>(params_[Variant::slot_rope_phase], d);
#pragma unroll 1
        for (int pos = 0; pos <= Table::kEight; ++pos) {
          const Turn x = turn_of(pos, phase);
          meta_.turns[Table::place(pos, d)] = make_float2(x.c, x.s);
        }
        meta_.turns[Table::place(Table::kPhases, d)] =
            make_float2(__uint_as_float(static_cast<unsigned>(phase)),
                        __uint_as_float(static_cast<unsigned>(static_cast<unsigned long long>(phase) >> 32)));
      }
      ptx::bar_sync(1 + L::kGroups, 128);
    }
  }

  const RunParams& p_;
  const ParamRef* params_;
  const unsigned base_;
  M& meta_;
  int lane_, warp_;
};

}  // namespace attnrt
