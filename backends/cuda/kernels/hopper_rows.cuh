// SPDX-License-Identifier: Apache-2.0
// The rows of a consumer thread of the Hopper prefill family: which they are, what hooks may ask about them, and which
// keys all rows of the warpgroup see. Row r of a pass is query r / group, head r % group.
#pragma once
#include "context.cuh"
#include "hopper_layout.cuh"
#include "types.cuh"

namespace attnrt {

template <class Config, class Variant>
class HopperRows {
  using L = HopperLayout<Config, Variant>;
  using M = HopperMeta<L>;

 public:
  __device__ __forceinline__ HopperRows(const RunParams& p, const ParamRef* params, char* smem)
      : p_(p), params_(params), base_(ptx::smem_addr(smem)), meta_(*reinterpret_cast<M*>(smem + L::kOffsetMeta)) {
    lane_ = threadIdx.x % 32;
    group_ = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
    warp_ = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    // A negative scale turns the order of scores round: scores are negated instead. Zero becomes a number too small to
    // matter.
    const bool natural =
        (Variant::has_logits && !Variant::keeps_units && !L::kCapped && !L::kScaled) || !Variant::use_softmax;
    const float scale = natural ? 1.0f : p.sm_scale;
    negate_ = scale < 0.0f;
    scale_ = fmaxf(fabsf(scale), kLeastScale) * kLog2e;
  }

 protected:
  struct Row {
    typename Variant::Row hook;
    Ctx ctx;
    int first, last;  // offsets that the row sees where positions run on: [first, last)
  };

  static constexpr float kLeastScale = 1e-30f;
  // What makes a row's scores exponents of 2.
  __device__ __forceinline__ float unit(int half) const {
    return Variant::row_units ? unit_[Variant::row_units ? half : 0] : scale_;
  }

  // This thread's rows are g and g + 8 of its warp's sixteen.
  __device__ __forceinline__ int row_of(int half) const { return group_ * 64 + warp_ * 16 + half * 8 + lane_ / 4; }

  __device__ __forceinline__ const PassRecord& record() const { return meta_.pass[L::table(pass_)]; }

  // What hooks may ask about row r of a pass.
  __device__ __forceinline__ Ctx context(int pass, int r) const {
    const PassRecord& record = meta_.pass[L::table(pass)];
    const int4 entry = meta_.row[L::table(pass)][r];
    const int qo_head = record.head * Config::group + (record.first + r) % Config::group;
    return query_ctx(p_, meta_.row_request[L::table(pass)][r].x, entry.x, entry.y, record.head, qo_head);
  }

  // Most of it has been worked out by the loader's warp: this is code that runs once a pass, at the speed of
  // instruction fetch, while no product is under way.
  __device__ __forceinline__ void load_rows(Row (&rows)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Row& row = rows[half];
      const int r = row_of(half);
      row.ctx = context(pass_, r);
      row.hook = Variant::row(params_, row.ctx);
      if constexpr (L::kCapped) {
        factor_[half] = fmaxf(Variant::factor(row.hook) * fabsf(p_.sm_scale), kLeastScale);
        unit_[half] = fmaxf(Variant::unit(row.hook) * factor_[half] * kLog2e, kLeastScale);
      } else if constexpr (L::kScaled) {
        unit_[half] = fmaxf(Variant::unit(row.hook) * fabsf(p_.sm_scale) * kLog2e, kLeastScale);
      } else if constexpr (Variant::row_units) {
        unit_[half] = Variant::unit(row.hook) * kLog2e;
      }
      if constexpr (Variant::scales_score && !L::kScaled) Variant::scale(row.hook, p_.sm_scale);
      if constexpr (Variant::keeps_units) {
        Variant::scale(row.hook, copysignf(fmaxf(fabsf(p_.sm_scale), kLeastScale), p_.sm_scale));
      }
      if constexpr (Variant::is_logistic) Variant::turn(row.hook);
      const int2 seen = seen_by(r);
      row.first = seen.x;
      row.last = seen.y;
    }
    // What all rows of the warpgroup see, as offsets where positions run on: its warps must go the same way, because
    // they multiply together.
    const PassRecord& pass = record();
    const int4 all = span();
    runs_ = Variant::mask_is_interval && pass.runs;
    idle_ = all.x == kDeadKey;
    shift_ = pass.shift;
    whole_begin_ = offset_from(pass, all.x);
    whole_end_ = min(offset_past(pass, all.y), all.z);
    if constexpr (L::kSkips) {
      seen_end_ = runs_ ? all.w : 0x7fffffff;
    } else {
      whole_end_ = min(whole_end_, all.w);
    }
    if (!runs_ || negate_) {
      whole_begin_ = 0x7fffffff;
      whole_end_ = 0;
    }
  }

  // Of a row whose logits are cap * tanh(factor * score): capped scores are tanh(factor * score) / factor, near 0 the
  // polynomial of tanh_near in the score itself, with these multiples of the powers of its square. Factors so large
  // that their powers are no numbers: then the cap is too small for its shape to matter.
  struct Cap {
    float factor, u0, u1, u2, u3;
  };
  __device__ __forceinline__ static Cap cap_of(float factor) {
    const float square = factor * factor, known = factor < 1e5f ? square : 0.0f;
    return {factor, TANH_0, TANH_1 * known, TANH_2 * known * square, TANH_3 * known * square * square};
  }

  __device__ __forceinline__ static Cap scaled_by(const Cap& x, float by) {
    return {x.factor, x.u0 * by, x.u1 * by, x.u2 * by, x.u3 * by};
  }

  // HopperMeta::seen and out_at of row r, and where else it goes.
  __device__ __forceinline__ int2 seen_by(int r) const {
    if constexpr (L::kWorkedOut) {
      return meta_.seen[L::table(pass_)][r];
    } else {
      const int4 row = meta_.row[L::table(pass_)][r];
      return make_int2(offset_from(record(), row.z),
                       min(offset_past(record(), row.w), meta_.row_request[L::table(pass_)][r].y));
    }
  }
  __device__ __forceinline__ long long place(int pass, int r, long long stride_row, long long stride_head) const {
    const PassRecord& record = meta_.pass[L::table(pass)];
    const int row = meta_.row[L::table(pass)][r].x;
    const long long head = record.head * Config::group + (record.first + r) % Config::group;
    return row >= 0 ? row * stride_row + head * stride_head : kNothing;
  }
  __device__ __forceinline__ long long out_at(int pass, int r) const {
    if constexpr (L::kWorkedOut) {
      return meta_.out_at[L::table(pass)][r];
    } else {
      return place(pass, r, p_.out_stride_row, p_.out_stride_head);
    }
  }

  // HopperMeta::span of the warpgroup's rows.
  __device__ __forceinline__ int4 span() const {
    const int4 x = meta_.span[L::table(pass_)][2 * group_], y = meta_.span[L::table(pass_)][2 * group_ + 1];
    return make_int4(max(x.x, y.x), min(x.y, y.y), min(x.z, y.z), L::kSkips ? max(x.w, y.w) : min(x.w, y.w));
  }

  const RunParams& p_;
  const ParamRef* params_;
  const unsigned base_;
  M& meta_;
  int lane_, group_, warp_;
  int tile_, pass_;              // so far: they number buffers and phases
  int whole_begin_, whole_end_;  // offsets
  int seen_end_;                 // kSkips: no row sees this offset or one behind it
  int shift_;                    // where positions run on: position of offset 0
  bool negate_, runs_;           // runs_: positions run on with offsets
  bool idle_ = false;            // the warpgroup has no row
  float scale_, unit_[Variant::row_units ? 2 : 1];
  float factor_[L::kCapped ? 2 : 1];
};

}  // namespace attnrt
