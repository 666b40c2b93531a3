// SPDX-License-Identifier: Apache-2.0
// The same fold with states on their way to a warp's own shared memory: registers hold fewer, and a loop over them is
// as much text as all of them.
#pragma once
#include "merge_states.cuh"

namespace attnrt {

template <class Config, int kMost, int kSlices, int kLanes, bool kSoftmax>
class MergeStream : public MergeStates<Config, kMost, kSlices, kLanes, kSoftmax> {
  using Base = MergeStates<Config, kMost, kSlices, kLanes, kSoftmax>;
  using Base::add, Base::factors, Base::load_head, Base::none_yet, Base::state_of;
  using typename Base::Factors;

 protected:
  using Base::kCols, Base::lane_, Base::plan_;

 private:
  static constexpr int kStep = 4;                                // states that are asked for, then folded, together
  static constexpr int kRowBytes = 4 * Config::head_dim_vo;      // of a head's accumulators
  static constexpr int kStateBytes = kRowBytes * (32 / kLanes);  // of a warp's heads, one behind the other
  static constexpr int kPieces = kRowBytes / 16;
  // Pieces that a lane copies of its head's state, or states that the lanes of a head ask for at once.
  static constexpr int kParts = kPieces > kLanes ? kPieces / kLanes : 1;
  static constexpr int kAsked = kPieces < kLanes ? kLanes / kPieces : 1;

 public:
  using Base::empty;
  using typename Base::State;
  static constexpr bool kStreams =
      kSlices == 1 && Config::head_dim_vo % 32 == 0 && (kCols == 2 || kCols == 4 || kCols == 8 && kLanes < 32);

  // States that so many bytes hold.
  __host__ __device__ static constexpr int places(int bytes) {
    const int fit = bytes / (kStep * kStateBytes) * kStep;
    return fit < kLanes ? fit : kLanes;
  }

 protected:
  using Base::Base;

  // What is known before there are states: this lane's of the kLanes at hand and of those to come, and where all lie.
  struct Ahead {
    unsigned now, next;
    const char* acc;
    const float2* ml;
  };

  __device__ __forceinline__ Ahead nothing_ahead() const {
    return {0, 0, reinterpret_cast<const char*>(plan_.partial_acc), reinterpret_cast<const float2*>(plan_.partial_ml)};
  }
  __device__ __forceinline__ void look_ahead(Ahead& a, int begin, int end, int head) const {
    if (begin < end) a.now = state_at(begin + lane_, end, head);
    if (begin + kLanes < end) a.next = state_at(begin + kLanes + lane_, end, head);
  }

  // A row's states, kPlaces of them on their way to `ring`.
  template <int kPlaces>
  __device__ __forceinline__ State streamed(int begin, int end, int head, Ahead a, char* ring) const {
    static_assert(kStreams && kPlaces <= kLanes && kPlaces % kStep == 0, "places by number, states by lane");
    const int all = end - begin;
    State s = none_yet();
    Factors f = {};
    float2 ml = make_float2(neg_inf(), 0.0f);
    if (all > 0) ml = load_head(a.ml, a.now);
    const char* const from = a.acc + lane_ % kPieces * 16;
    if constexpr (kLanes < 32) ring += threadIdx.x % 32 / kLanes * kRowBytes;
    unsigned after = 0;
    int place = 0;
    // States n to n + kStep - 1 are folded and make room for those kPlaces after them.
#pragma unroll 1
    for (int n = -kPlaces; n < all; n += kStep) {
      if (n >= 0) {
        if (n % kLanes == 0) {
          if (n > 0) {
            a.now = a.next;
            a.next = after;
          }
          if (n + 2 * kLanes < all) after = state_at(begin + n + 2 * kLanes + lane_, end, head);
          f = factors(s.m, ml, min(kLanes, all - n));
          s.m = __shfl_sync(0xffffffffu, f.upto, kLanes - 1, kLanes);
          if (n + kLanes < all) ml = load_head(a.ml, a.next);
        }
        ptx::cp_async_wait<kPlaces / kStep - 1>();
        if constexpr (kAsked > 1) __syncwarp();  // else a lane reads what it has asked for itself
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          float acc[kCols];
          read(ring + (place + i) * kStateBytes, acc);
          add(s, f, n % kLanes + i, acc);
        }
        if constexpr (kAsked > 1) __syncwarp();
      }
      if (n + kPlaces < all) {
        const unsigned states = n < 0 || n % kLanes + kPlaces < kLanes ? a.now : a.next;
        char* const to = ring + (place + lane_ / kPieces) * kStateBytes + lane_ % kPieces * 16;
#pragma unroll
        for (int i = 0; i < kStep; i += kAsked) {
          const int mine = n + kPlaces + i + lane_ / kPieces;
          const unsigned number = __shfl_sync(0xffffffffu, states, mine % kLanes, kLanes);
          if (mine < all) {
#pragma unroll
            for (int own = 0; own < kParts; ++own)
              ptx::cp_async16(ptx::smem_addr(to + i * kStateBytes + own * (16 * kLanes)),
                              from + number * static_cast<long long>(kRowBytes) + own * (16 * kLanes));
          }
        }
      }
      ptx::cp_async_commit();  // a group may be empty
      place = place + kStep == kPlaces ? 0 : place + kStep;
    }
    return s.m == neg_inf() ? empty() : s;
  }

 private:
  __device__ __forceinline__ unsigned state_at(int entry, int end, int head) const {
    return state_of(min(entry, end - 1), head);
  }

  // The lane's columns of a head's state.
  __device__ __forceinline__ void read(const char* state, float (&acc)[kCols]) const {
    if constexpr (kCols == 2) {
      const float2 x = reinterpret_cast<const float2*>(state)[lane_];
      acc[0] = x.x, acc[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < kCols; i += 4) {
        const float4 x = reinterpret_cast<const float4*>(state)[i / 4 * kLanes + lane_];
        acc[i] = x.x, acc[i + 1] = x.y, acc[i + 2] = x.z, acc[i + 3] = x.w;
      }
    }
  }
};

}  // namespace attnrt
