// SPDX-License-Identifier: Apache-2.0
// The way back: rows of the cache side by side, in their type or another, K rotated where a hook says so.
#pragma once
#include "append.cuh"

namespace attnrt {

// 16 bytes of a cache's row in the rows' type: the same, or 16 bits for 8.
template <Dtype From, Dtype To>
__device__ __forceinline__ void put_piece(const uint4& x, typename Bits<To>::type* to) {
  if constexpr (From == To) {
    *reinterpret_cast<uint4*>(to) = x;
  } else {
    const unsigned in[4] = {x.x, x.y, x.z, x.w};
    unsigned out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out[i] = fp8x2_to_half2<From>(static_cast<unsigned short>(in[i / 2] >> i % 2 * 16));
      if constexpr (To == Dtype::bf16)
        out[i] = ptx::pack2<ptx::Half16::bf16>(half_to_float(out[i] & 0xffffu), half_to_float(out[i] >> 16));
    }
    uint4* pieces = reinterpret_cast<uint4*>(to);
    pieces[0] = make_uint4(out[0], out[1], out[2], out[3]);
    pieces[1] = make_uint4(out[4], out[5], out[6], out[7]);
  }
}

// Numbers kFirst and on of all heads of one slot; a slot that is not there gives zeros. Four pieces of 16 bytes a lane
// are on their way before the first is stored, where everything lies on 16-byte lines.
template <Dtype From, Dtype To, int kFirst, int kDim>
__device__ __forceinline__ void gather_row(const PagedKv& kv, long long slot, bool there, char* row,
                                           long long stride_head, int heads, int lane) {
  typedef typename Bits<From>::type Stored;
  typedef typename Bits<To>::type Row;
  constexpr int kPiece = 16 / kBytes<From>, kPieces = (kDim - kFirst) / kPiece, kAhead = 4;
  const Stored* from = reinterpret_cast<const Stored*>(kv.ptr);
  Row* to = reinterpret_cast<Row*>(row);
  if constexpr (kFirst == 0 && kDim % kPiece == 0 && (From == To || (kBytes<From> == 1 && kBytes<To> == 2))) {
    const bool lines = ((reinterpret_cast<unsigned long long>(row) | stride_head * kBytes<To>)&15) == 0;
    if (there && kv.vectors && lines) {
      for (int first = lane; first < heads * kPieces; first += 32 * kAhead) {
        uint4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int c = first + 32 * i;
          if (c < heads * kPieces)
            x[i] = *reinterpret_cast<const uint4*>(from + append_offset(kv, slot, c / kPieces) + c % kPieces * kPiece);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int c = first + 32 * i;
          if (c < heads * kPieces) put_piece<From, To>(x[i], to + c / kPieces * stride_head + c % kPieces * kPiece);
        }
      }
      return;
    }
  }
  for (int head = 0; head < heads; ++head)
    for (int d = kFirst + lane; d < kDim; d += 32) {
      const Stored x = there ? from[append_offset(kv, slot, head) + d] : Stored(0);
      to[head * stride_head + d] = append_value<From, To>(x, 0.0f);
    }
}

// Eight numbers side by side, of 8 or 16 bits each, and their values.
template <Dtype T>
struct Eight {
  unsigned words[2 * kBytes<T>];
  __device__ __forceinline__ static Eight load(const typename Bits<T>::type* from) {
    Eight x;
    if constexpr (kBytes<T> == 2) {
      const uint4 y = *reinterpret_cast<const uint4*>(from);
      x.words[0] = y.x;
      x.words[1] = y.y;
      x.words[2] = y.z;
      x.words[3] = y.w;
    } else {
      const uint2 y = *reinterpret_cast<const uint2*>(from);
      x.words[0] = y.x;
      x.words[1] = y.y;
    }
    return x;
  }
  __device__ __forceinline__ float operator[](int i) const {
    constexpr int kBits = 8 * kBytes<T>, kInWord = 32 / kBits;
    return to_float<T>(static_cast<typename Bits<T>::type>(words[i / kInWord] >> i % kInWord * kBits));
  }
};

// Eight pairs of one row, from numbers at[0] and at[1] of each head on; `first`: the number of the first pair. Eight
// heads between loads and stores, so that what the hook computes from the position alone is computed once.
template <class Config, class Variant, bool kApart>
__device__ __forceinline__ void rotate_eight(const ParamRef* params, Ctx c, int first, const int (&at)[2],
                                             const typename Bits<Config::kv_type>::type* from, long long from_stride,
                                             typename Bits<Config::row_type>::type* to, long long to_stride,
                                             int heads) {
  constexpr Dtype kFrom = Config::kv_type, kTo = Config::row_type;
  constexpr int kAhead = 8;
  for (int head = 0; head < heads; head += kAhead) {
    Eight<kFrom> in[kAhead][2];
    uint4 out[kAhead][2];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        in[i][half] = Eight<kFrom>::load(from + min(head + i, heads - 1) * from_stride + at[half]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      c.kv_head = min(head + i, heads - 1);
      float x[8][2];
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        x[d][0] = kApart ? in[i][0][d] : in[i][d / 4][2 * d % 8];
        x[d][1] = kApart ? in[i][1][d] : in[i][d / 4][2 * d % 8 + 1];
        Variant::key(params, c, first + d, x[d][0], x[d][1]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float a = kApart ? x[2 * j][half] : x[4 * half + j][0];
          const float b = kApart ? x[2 * j + 1][half] : x[4 * half + j][1];
          y[j] = from_float<kTo>(a) | static_cast<unsigned>(from_float<kTo>(b)) << 16;
        }
        out[i][half] = make_uint4(y[0], y[1], y[2], y[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (head + i < heads) *reinterpret_cast<uint4*>(to + (head + i) * to_stride + at[half]) = out[i][half];
  }
}

// The numbers of K that the key hook maps, of all rows, where they lie on 16-byte lines and in pairs; false: nothing
// was done. A lane has eight pairs of a row in every head, and a warp as many rows as that takes lanes.
template <class Config, class Variant, int kOver>
__device__ __forceinline__ bool rotate_rows(const AppendParams& p, const ParamRef* params, int warp, int warps,
                                            int lane) {
  constexpr bool kApart = Variant::key_pairing == PAIR_HALF;
  constexpr int kLanes = kOver % 16 ? 32 : kOver / 16, kRows = 32 / kLanes;
  if constexpr (kOver % 16 || 32 % kLanes || !(kApart || Variant::key_pairing == PAIR_INTERLEAVED) ||
                kBytes<Config::row_type> != 2 || kBytes<Config::kv_type> > 2) {
    return false;
  } else {
    typedef typename Bits<Config::kv_type>::type Stored;
    typedef typename Bits<Config::row_type>::type Row;
    const long long strides = p.k_stride_row | p.k_stride_head;
    if (!p.k_cache.vectors || (reinterpret_cast<unsigned long long>(p.k) | strides * 2) & 15) return false;
    const int first = lane % kLanes * 8;
    const int at[2] = {kApart ? first : first * 2, kApart ? first + kOver / 2 : first * 2 + 8};
    for (int row = warp * kRows + lane / kLanes; row < p.rows; row += warps * kRows) {
      const long long slot = p.slots[row];
      Row* to = reinterpret_cast<Row*>(const_cast<char*>(p.k)) + row * p.k_stride_row;
      if (slot < 0 || slot >= p.k_cache.num_slots) {
        for (int head = 0; head < p.heads; ++head)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint4*>(to + head * p.k_stride_head + at[half]) = make_uint4(0, 0, 0, 0);
        continue;
      }
      Ctx c;
      c.request = c.qo_pos = c.qo_head = c.qo_row = c.qo_len = c.kv_len = 0;
      c.kv_pos = p.positions[row];
      c.kv_slot = slot;
      const Stored* from = reinterpret_cast<const Stored*>(p.k_cache.ptr) + append_offset(p.k_cache, slot, 0);
      rotate_eight<Config, Variant, kApart>(params, c, first, at, from, p.k_cache.stride_head, to, p.k_stride_head,
                                            p.heads);
    }
    return true;
  }
}

// Row i of k and v is what the cache has at slots[i], zeros where that is no slot; the key hook rotates k.
template <class Config, class Variant>
__device__ __forceinline__ void gather_rows(const AppendParams& p, const ParamRef* params) {
  typedef typename Bits<Config::row_type>::type Row;
  typedef typename Bits<Config::kv_type>::type Stored;
  constexpr int kOver = Variant::key_dim == 0 ? Config::head_dim : Variant::key_dim;
  constexpr int kMapped = Variant::has_key ? kOver : 0, kRowBytes = kBytes<Config::row_type>;
  const int lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const bool rotated = Variant::has_key && rotate_rows<Config, Variant, kOver>(p, params, warp, warps, lane);
  if (rotated && kMapped == Config::head_dim && p.v == nullptr) return;
  for (int row = warp; row < p.rows; row += warps) {
    const long long slot = p.slots[row];
    const bool there = slot >= 0 && slot < p.k_cache.num_slots;
    char* k = const_cast<char*>(p.k) + row * p.k_stride_row * kRowBytes;
    if constexpr (Variant::has_key) {
      // Four heads between loads and stores, so that what the hook computes from the position alone is computed once.
      constexpr int kAhead = 4;
      Ctx c;
      c.request = c.qo_pos = c.qo_head = c.qo_row = c.qo_len = c.kv_len = 0;
      c.kv_pos = p.positions[row];
      c.kv_slot = slot;
      for (int d = lane; !rotated && d < pair_count(Variant::key_pairing, kOver); d += 32) {
        const int a = pair_first(Variant::key_pairing, d), b = pair_second(Variant::key_pairing, kOver, d);
        for (int first = 0; first < p.heads; first += kAhead) {
          float x0[kAhead], x1[kAhead];
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const int head = min(first + i, p.heads - 1);
            const Stored* from = reinterpret_cast<const Stored*>(p.k_cache.ptr) + append_offset(p.k_cache, slot, head);
            x0[i] = there ? to_float<Config::kv_type>(from[a]) : 0.0f;
            x1[i] = there ? to_float<Config::kv_type>(from[b]) : 0.0f;
          }
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            c.kv_head = min(first + i, p.heads - 1);
            Variant::key(params, c, d, x0[i], x1[i]);
          }
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            if (first + i >= p.heads) break;
            Row* to = reinterpret_cast<Row*>(k) + (first + i) * p.k_stride_head;
            to[a] = from_float<Config::row_type>(there ? x0[i] : 0.0f);
            if (Variant::key_pairing != PAIR_SINGLE) to[b] = from_float<Config::row_type>(there ? x1[i] : 0.0f);
          }
        }
      }
    }
    gather_row<Config::kv_type, Config::row_type, kMapped, Config::head_dim>(p.k_cache, slot, there, k, p.k_stride_head,
                                                                             p.heads, lane);
    if (p.v == nullptr) continue;
    char* v = const_cast<char*>(p.v) + row * p.v_stride_row * kRowBytes;
    gather_row<Config::kv_type, Config::row_type, 0, Config::head_dim_vo>(p.v_cache, slot, there, v, p.v_stride_head,
                                                                          p.heads, lane);
  }
}

}  // namespace attnrt
