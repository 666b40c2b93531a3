// SPDX-License-Identifier: Apache-2.0
// What becomes of a leaf's O: folded onto the leaves before it, stored as a state, or divided and written as rows.
#pragma once
#include "hopper_kept.cuh"
#include "hopper_softmax.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperResults : public HopperSoftmax<Config, Variant> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperSoftmax<Config, Variant>;

 protected:
  using Base::Base;
  using Base::context, Base::kO, Base::lane_, Base::meta_, Base::p_, Base::params_, Base::row_of;
  using Base::unit;

  // What is known of a leaf before its last product: after find_places its pass's tables are not read any more.
  enum class Fate { nothing, state, rows };
  struct Closing {
    Fate fate;
    bool folds, first;
    float m[2], l[2];
    float scale[L::kKeeps ? 2 : 1];  // of sums that are kept, if there are any
    bool kept;
    FinishRow row[2];
    long long to[2];  // element of the output row, or row of the partial states; kNothing: none
    Ctx ctx[2];
  };

  // Where this thread's sums are kept (kKeeps).
  __device__ __forceinline__ unsigned kept_at() const {
    return this->base_ + L::kOffsetKept + (this->group_ * 128 + this->warp_ * 32 + lane_) * 16;
  }

  // ------------------------------------------------------------------ the end of a leaf
  // The quad's sums, the maxima as base-2 logits, the fold onto the leaves before, what divides the rows.
  __device__ __forceinline__ void close_leaf(Closing& closing, int pass, int leaf, bool ends, const float (&m)[2],
                                             const float (&l)[2]) const {
    if constexpr (!Config::folds) find_fate(closing, pass, leaf, ends);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = l[half];
      if constexpr (Variant::use_softmax) {
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
      }
      closing.l[half] = x;
      closing.m[half] = Variant::use_softmax ? this->lifted(__fmul_rn(m[half], unit(half))) : m[half];
    }
    if constexpr (!Config::folds) find_places(closing, pass, leaf);
  }

  __device__ __forceinline__ void find_fate(Closing& closing, int pass, int leaf, bool ends) const {
    const PassRecord& record = meta_.pass[L::table(pass)];
    const WorkItem& item = record.item;
    closing.folds = Config::folds && item.fold && item.leaf_end - item.leaf_begin > 1;
    closing.first = leaf == 0;
    closing.fate =
        item.slot < 0 ? (ends ? Fate::rows : Fate::nothing) : (!item.fold || ends ? Fate::state : Fate::nothing);
  }

  // Where the leaf's rows go, and what divides them. With folds as late as it can be, so that it waits in no register
  // while the next scores become weights: a spilled register comes back from memory.
  __device__ __forceinline__ void find_places(Closing& closing, int pass, int leaf) const {
    const PassRecord& record = meta_.pass[L::table(pass)];
    const WorkItem& item = record.item;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row_of(half);
      if constexpr (Variant::has_sink || Variant::has_output) closing.ctx[half] = context(pass, r);
      closing.to[half] = this->out_at(pass, r);
    }
    if (closing.fate == Fate::state) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (closing.to[half] == kNothing) continue;
        const int row = record.first + row_of(half), part = item.fold ? 0 : leaf;
        closing.to[half] =
            (static_cast<long long>(item.slot) + part * (item.q_end - item.q_begin) + row / Config::group) *
                p_.num_qo_heads +
            record.head * Config::group + row % Config::group;
      }
    }
    if (closing.fate == Fate::rows) divide(closing, pass);
  }

  // What rows are divided by, and their log-sum-exp: even lanes for one row, odd lanes for the other.
  __device__ __forceinline__ void divide(Closing& closing, int pass) const {
    if constexpr (L::kLate) return divide_both(closing, pass);
    const bool odd = lane_ & 1;
    Ctx c = {};
    if constexpr (Variant::has_sink) c = odd ? closing.ctx[1] : closing.ctx[0];
    const FinishRow row =
        finish_head<Variant>(params_, c, odd ? closing.m[1] : closing.m[0], odd ? closing.l[1] : closing.l[0]);
    if (p_.lse && lane_ % 4 < 2) {
      const long long at = this->place(pass, row_of(odd), p_.lse_stride_row, p_.lse_stride_head);
      if (at != kNothing) p_.lse[at] = row.lse;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      closing.row[half] = {__shfl_sync(0xffffffffu, row.inverse, lane_ / 4 * 4 + half), 0.0f};
    }
  }

  // The same without an exchange among lanes: no instruction waits for divisors of late rows.
  __device__ __forceinline__ void divide_both(Closing& closing, int pass) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      closing.row[half] = finish_head<Variant>(params_, Variant::has_sink ? closing.ctx[half] : Ctx{}, closing.m[half],
                                               closing.l[half]);
    }
    if (p_.lse) {
      const int odd = lane_ & 1;
      const long long at = this->place(pass, row_of(odd), p_.lse_stride_row, p_.lse_stride_head);
      if (lane_ % 4 < 2 && at != kNothing) p_.lse[at] = odd ? closing.row[1].lse : closing.row[0].lse;
    }
  }

  // Registers of O that are taken at a time, 32 columns of both rows: registers are full here.
  static constexpr int kChunk = 16;

  // ------------------------------------------------------------------ late rows
  // Finished rows that are written beside the weights of the next pass's first tile: what there is of them but O.
  struct Late {
    int at[2];  // where this thread's pieces of them go, in 16 bytes; kNowhere: no row waits
    float inverse[2];
    unsigned piece[2][4];  // of the round at hand
  };
  static constexpr int kNowhere = -0x7fffffff - 1;
  __device__ __forceinline__ static void clear(Late& late) {
    late.at[0] = late.at[1] = kNowhere;
    late.inverse[0] = late.inverse[1] = 0.0f;
  }

  // Whether the leaf's rows can be late: all of a warp's or none.
  __device__ __forceinline__ bool delay(Late& late, const Closing& closing, bool more) const {
    bool cannot = false;  // a row without keys, which is not multiplied, or one that lies too far away for `at`
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = closing.to[half] != kNothing;
      const bool far = static_cast<unsigned>(closing.to[half] >> 32) + 2 > 3;  // 2^33 elements or more
      cannot |= there & (far | (closing.m[half] == neg_inf()));
      late.at[half] = there ? static_cast<int>(closing.to[half] >> 3) + lane_ % 4 : kNowhere;
      late.inverse[half] = closing.row[half].inverse;
    }
    const bool can = !__any_sync(0xffffffffu, cannot);
    const bool yes = more & (closing.fate == Fate::rows) & vectorised() & can;
    if (!yes) late.at[0] = late.at[1] = kNowhere;
    return yes;
  }

  // Rows go by rounds of 32 columns. Where registers are there the first is asked for before the next scores have come.
  static constexpr int kRounds = kO / kChunk;
  static constexpr bool kAhead = !L::kLean;
  __device__ __forceinline__ void begin_late(Late& late, const float (&o)[kO]) const {
    if constexpr (kAhead) put_late(late, o, 0);
  }

  // HopperSoftmax::Alone. A round is written when what was staged has come, and the next one staged. Where no row waits
  // nothing comes of it.
  __device__ __forceinline__ void write_late(Late& late, const float (&o)[kO], int step, float weight) const {
    if (!kAhead && step < 0) put_late(late, o, 0);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (step != (kAhead && round == 0 ? 6 : Base::kPairs - 1 - (kAhead ? 7 : 10) * (kRounds - 1 - round))) continue;
      // No weight is this number, but ptxas does not know: it would else write as soon as it may, and wait.
      const bool weighed = __float_as_uint(weight) != 0x80000001u;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        char* const to = p_.out + late.at[half] * 16LL;
        if (late.at[half] != kNowhere && weighed) store16(to + round * 64, late.piece[half]);
      }
      if (round + 1 < kRounds) put_late(late, o, round + 1);
    }
  }
  __device__ __forceinline__ void put_late(Late& late, const float (&o)[kO], int round) const {
    unsigned y[kChunk / 4][2];
#pragma unroll
    for (int n = 0; n < kChunk / 4; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = kChunk * round + 4 * n + 2 * half;
        y[n][half] = pair(__fmul_rn(o[at], late.inverse[half]), __fmul_rn(o[at + 1], late.inverse[half]));
      }
    stage(y, round > 0, [&](int half, const unsigned (&x)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) late.piece[half][i] = x[i];
    });
  }

  // ------------------------------------------------------------------ results
  struct Chunk {
    float x[kChunk];
  };
  __device__ __forceinline__ Chunk chunk(const Closing& closing, const float (&o)[kO], int first) const {
    Chunk y;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) y.x[i] = o[first + i];
    if constexpr (L::kKeeps) add_kept(kept_at(), first, y.x, closing.scale, closing.kept);
    return y;
  }
  // Numbers of four bytes are written in one way, whatever the strides.
  static constexpr bool kStraight = kBytes<Config::out_type> == 4;

  // What becomes of a leaf: folded onto those before it, stored as a state, or, at the end of its pass, finished rows.
  // O itself stays as it is: a changed O that came back into the loop by a branch would make ptxas serialise the
  // products (C7514). Rows that cannot be written in the usual way wait in local memory, so that their code is there
  // once and not once for each register: the time to compile a variant goes with its instructions.
  __device__ __forceinline__ void results(Closing& closing, int pass, int leaf, bool ends, const float (&o)[kO],
                                          float* total) const {
    Fold fold[2];
    if constexpr (Config::folds) {
      if (pass < 0) return;
      find_fate(closing, pass, leaf, ends);
      if (closing.folds) fold_heads(closing, fold, total);
      find_places(closing, pass, leaf);
    }
    alignas(16) float held[Config::folds ? 4 : kO];
    float* const to = Config::folds ? total : held;
    const bool vectors = kStraight || vectorised();
    bool waits = false;
    if (closing.folds) {
      waits = fold_results(closing, fold, vectors, o, to);
    } else if (closing.fate != Fate::nothing) {
      waits = store_results(closing, vectors, o, to);
    }
    if (waits) store_waiting(closing, vectors, to);
  }

  // A leaf's states or rows; true: its rows are in `held` and wait.
  __device__ __forceinline__ bool store_results(const Closing& closing, bool vectors, const float (&o)[kO],
                                                float* held) const {
    if (closing.fate == Fate::state) {
      const States to = states_of(closing);
#pragma unroll
      for (int first = 0; first < kO; first += kChunk) store_state(closing, to, first / 4, chunk(closing, o, first).x);
      return false;
    }
    if (kStraight || (vectors && all_have_keys(closing))) {
      const Rows to = rows_of(closing);
#pragma unroll
      for (int first = 0; first < kO; first += kChunk)
        store_rows<false>(closing, to, first / 4, chunk(closing, o, first).x);
      return false;
    }
#pragma unroll
    for (int first = 0; first < kO; first += kChunk) {
      const Chunk y = chunk(closing, o, first);
#pragma unroll
      for (int i = 0; i < kChunk; i += 4) put(held + first + i, y.x[i], y.x[i + 1], y.x[i + 2], y.x[i + 3]);
    }
    return true;
  }

  // The same of a leaf that is folded onto `total`: it stays there, but for what the last leaf leaves.
  __device__ __forceinline__ bool fold_results(const Closing& closing, const Fold (&fold)[2], bool vectors,
                                               const float (&o)[kO], float* total) const {
    States states;
    if (closing.fate == Fate::state) states = states_of(closing);
    const Rows rows = rows_of(closing);
#pragma unroll
    for (int first = 0; first < kO; first += kChunk) {
      Chunk y = chunk(closing, o, first);
      if (!closing.first) fold_chunk(fold, y.x, total + first);
      if (closing.fate == Fate::state) {
        store_state(closing, states, first / 4, y.x);
      } else if (closing.fate == Fate::rows && vectors) {
        store_rows<true>(closing, rows, first / 4, y.x);
      } else {
#pragma unroll
        for (int i = 0; i < kChunk; i += 4) put(total + first + i, y.x[i], y.x[i + 1], y.x[i + 2], y.x[i + 3]);
      }
    }
    return closing.fate == Fate::rows && !vectors;
  }

  // Rows that wait, in a loop: local memory is as far away as any, but they are few.
  __device__ __forceinline__ void store_waiting(const Closing& closing, bool vectors, const float* from) const {
    const Rows to = rows_of(closing);
#pragma unroll 1
    for (int first = 0; first < kO; first += kChunk) {
      float x[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; i += 4) {
        const float4 y = get(from + first + i);
        x[i] = y.x;
        x[i + 1] = y.y;
        x[i + 2] = y.z;
        x[i + 3] = y.w;
      }
      if (vectors) {
        store_rows<true>(closing, to, first / 4, x);
      } else {
        store_elements(closing, first / 4, x);
      }
    }
  }

  // Where a thread's pieces of its rows go, found once: behind a branch it would be found anew for each of them. The
  // address of states comes from memory, so that only who stores some asks for it.
  struct Rows {
    char* at[2];
  };
  struct States {
    float* at[2];
  };
  __device__ __forceinline__ Rows rows_of(const Closing& closing) const {
    Rows x;
#pragma unroll
    for (int half = 0; half < 2; ++half) x.at[half] = p_.out + closing.to[half] * 2 + lane_ % 4 * 16;
    return x;
  }
  __device__ __forceinline__ States states_of(const Closing& closing) const {
    States x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x.at[half] = p_.plan->partial_acc + closing.to[half] * L::kDimVo + lane_ % 4 * 2;
    }
    return x;
  }

  __device__ __forceinline__ static float4 get(const volatile float* p) { return make_float4(p[0], p[1], p[2], p[3]); }
  __device__ __forceinline__ static void put(volatile float* p, float a, float b, float c, float d) {
    p[0] = a;
    p[1] = b;
    p[2] = c;
    p[3] = d;
  }
  // Leaf onto total, in local memory but for what the last leaf leaves: last m and l, by row. Memory is a
  // thousand cycles away, so that several words are asked for before one is used.
  __device__ __forceinline__ void fold_heads(Closing& closing, Fold (&fold)[2], float* total) const {
    const float4 x = closing.first ? make_float4(neg_inf(), neg_inf(), 0.0f, 0.0f) : get(total + kO);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fold[half] =
          fold_head<Variant::use_softmax>(half ? x.y : x.x, half ? x.w : x.z, closing.m[half], closing.l[half]);
      closing.m[half] = fold[half].m;
      closing.l[half] = fold[half].l;
    }
    if (closing.fate == Fate::nothing) put(total + kO, closing.m[0], closing.m[1], closing.l[0], closing.l[1]);
  }
  __device__ __forceinline__ void fold_chunk(const Fold (&fold)[2], float (&x)[kChunk], float* total) const {
    float4 before[kChunk / 4];
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) before[i] = get(total + 4 * i);
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      x[i] = fold_acc(fold[0], before[i / 4].x, x[i]);
      x[i + 1] = fold_acc(fold[0], before[i / 4].y, x[i + 1]);
      x[i + 2] = fold_acc(fold[1], before[i / 4].z, x[i + 2]);
      x[i + 3] = fold_acc(fold[1], before[i / 4].w, x[i + 3]);
    }
  }

  // Functions of x write groups of 8 columns from `group` on: registers 2 half + e of each, columns 2 (lane % 4) + e.
  __device__ __forceinline__ void store_state(const Closing& closing, const States& to, int group,
                                              const float (&x)[kChunk]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (closing.to[half] == kNothing) continue;
      if (group == 0 && lane_ % 4 == 0) {
        reinterpret_cast<float2*>(p_.plan->partial_ml)[closing.to[half]] =
            make_float2(closing.m[half], closing.l[half]);
      }
#pragma unroll
      for (int n = 0; n < kChunk / 4; ++n) {
        *reinterpret_cast<float2*>(to.at[half] + (group + n) * 8) =
            make_float2(x[4 * n + 2 * half], x[4 * n + 2 * half + 1]);
      }
    }
  }

  // Element col of a finished row, before the cast.
  __device__ __forceinline__ float finished(const Ctx& c, const FinishRow& row, int col, float acc) const {
    const float x = row.inverse == 0.0f ? 0.0f : __fmul_rn(acc, row.inverse);
    if constexpr (Variant::has_output) return row.inverse == 0.0f ? 0.0f : Variant::output(params_, c, col, x);
    return x;
  }

  // Whether rows are written 16 bytes at a time.
  __device__ __forceinline__ bool vectorised() const {
    return kBytes<Config::out_type> == 2 &&
           ((reinterpret_cast<unsigned long long>(p_.out) | (p_.out_stride_row | p_.out_stride_head) * 2) & 15) == 0;
  }
  __device__ __forceinline__ bool all_have_keys(const Closing& closing) const {
    bool empty = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      empty = empty || (closing.to[half] != kNothing && closing.row[half].inverse == 0.0f);
    }
    return !__any_sync(0xffffffffu, empty);
  }

  __device__ __forceinline__ void store_elements(const Closing& closing, int group, const float (&x)[kChunk]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (closing.to[half] == kNothing) continue;
      auto* out = reinterpret_cast<typename Bits<Config::out_type>::type*>(p_.out) + closing.to[half] + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < kChunk / 4; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = (group + n) * 8 + e;
          out[at] = from_float<Config::out_type>(
              finished(closing.ctx[half], closing.row[half], at + lane_ % 4 * 2, x[4 * n + 2 * half + e]));
        }
    }
  }

  // Divides and writes 32 columns. kEmpty: some row may be without keys. Once a pass, at the speed of instruction
  // fetch: the fewer instructions, the better.
  template <bool kEmpty>
  __device__ __forceinline__ void store_rows(const Closing& closing, const Rows& to, int group,
                                             const float (&x)[kChunk]) const {
    if constexpr (kStraight) {
      store_elements(closing, group, x);
    } else {
      unsigned y[kChunk / 4][2];
#pragma unroll
      for (int n = 0; n < kChunk / 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const FinishRow& row = closing.row[half];
          const int at = 4 * n + 2 * half, col = (group + n) * 8 + lane_ % 4 * 2;
          if constexpr (kEmpty || Variant::has_output) {
            y[n][half] = pair(finished(closing.ctx[half], row, col, x[at]),
                              finished(closing.ctx[half], row, col + 1, x[at + 1]));
          } else {
            y[n][half] = pair(__fmul_rn(x[at], row.inverse), __fmul_rn(x[at + 1], row.inverse));
          }
        }
      if constexpr (L::kStaged) {
        store_staged(closing, to, group, y);
      } else {
        store_exchanged(closing, to, group, y);
      }
    }
  }
  __device__ __forceinline__ static unsigned pair(float x, float y) {
    return ptx::pack2<kHalf<Config::out_type>>(x, y);
  }

  // By way of the warp's own shared memory: 16 rows of 64 bytes, whose 16-byte pieces change places so that no bank is
  // asked twice.
  __device__ __forceinline__ void store_staged(const Closing& closing, const Rows& to, int group,
                                               const unsigned (&y)[kChunk / 4][2]) const {
    stage(y, group > 0, [&](int half, const unsigned (&x)[4]) {
      if (closing.to[half] != kNothing) store16(to.at[half] + group * 16, x);
    });
  }
  // take(half, x) gets the lane's piece of each of its rows. again: the warp has read what it staged before.
  template <class F>
  __device__ __forceinline__ void stage(const unsigned (&y)[kChunk / 4][2], bool again, F&& take) const {
    const int g = lane_ / 4, t = lane_ % 4;
    const unsigned own = ptx::smem_addr(meta_.staged[this->group_ * 4 + this->warp_]);
    // As a lane of st_matrices: row lane % 16, pieces 0 and 1 by lane / 16 (2 and 3: xor 32).
    const unsigned put = own + lane_ % 16 * 64 + ((lane_ / 16 ^ lane_ / 2 % 4) * 16);
    const unsigned get = own + g * 64 + ((t ^ g / 2 % 4) * 16);  // row g; row g + 8 lies 512 bytes on
    if (again) __syncwarp();
    ptx::st_matrices(put, y[0][0], y[0][1], y[1][0], y[1][1]);
    ptx::st_matrices(put ^ 32, y[2][0], y[2][1], y[3][0], y[3][1]);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned x[4];
      ptx::ld_shared16(x, get + half * 512);
      take(half, x);
    }
  }
  __device__ __forceinline__ static void store16(char* to, const unsigned (&x)[4]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
  }

  // A quad holds four columns' worth of 16 bytes in pairs of elements: a 4 x 4 transposition among its lanes gives each
  // lane 16 bytes of its own.
  __device__ __forceinline__ void store_exchanged(const Closing& closing, const Rows& to, int group,
                                                  const unsigned (&y)[kChunk / 4][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned x[4] = {y[0][half], y[1][half], y[2][half], y[3][half]};
      transpose<1>(x[0], x[1]);
      transpose<1>(x[2], x[3]);
      transpose<2>(x[0], x[2]);
      transpose<2>(x[1], x[3]);
      if (closing.to[half] != kNothing) store16(to.at[half] + group * 16, x);
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
};

}  // namespace attnrt
