// SPDX-License-Identifier: Apache-2.0
// New rows of K and V into the cache, rows of the cache side by side, and pages copied to other pages.
#pragma once
#include "attnrt_variant.h"
#include "params.cuh"
#include "rows.cuh"
#include "types.cuh"

namespace attnrt {

constexpr int kMaxScaledHeads = 128;

// python: backends/cuda/append.py writes the same layout. Row strides in elements. What rows are read by an append is
// written by a gather.
struct AppendParams {
  const char* k;
  long long k_stride_row, k_stride_head;
  const char* v;  // null: the cache has no V of its own
  long long v_stride_row, v_stride_head;
  PagedKv k_cache, v_cache;
  const long long* slots;  // negative, or past the pool: skip the row
  const int* positions;    // read by a rotation of k
  int rows, heads;
  float k_scale[kMaxScaledHeads], v_scale[kMaxScaledHeads];  // the stored number is x / scale; 0: no scale
};

__device__ __forceinline__ long long append_offset(const PagedKv& kv, long long slot, int head) {
  unsigned page, token;
  kv.page.split(static_cast<unsigned>(slot), page, token);
  return static_cast<long long>(page) * kv.stride_page + static_cast<long long>(token) * kv.stride_token +
         static_cast<long long>(head) * kv.stride_head;
}

// Rows that come in the cache's own type without a scale, or with 1, are copied bit by bit (a conversion would lose the
// sign of NaN); others are scaled in float32 and rounded once.
template <Dtype From, Dtype To>
__device__ __forceinline__ typename Bits<To>::type append_value(typename Bits<From>::type x, float scale) {
  if constexpr (From == To) {
    return scale == 0.0f || scale == 1.0f ? x : from_float<To>(__fdiv_rn(to_float<From>(x), scale));
  } else {
    return from_float<To>(__fdiv_rn(to_float<From>(x), scale == 0.0f ? 1.0f : scale));
  }
}

// Config: row_type, kv_type (Dtype); head_dim, head_dim_vo (int). Variant: its key hook rotates k, if it has one. One
// warp per (row, KV head), lanes over numbers.
template <class Config, class Variant>
__device__ __forceinline__ void append_rows(const AppendParams& p, const ParamRef* params) {
  typedef typename Bits<Config::row_type>::type Row;
  typedef typename Bits<Config::kv_type>::type Stored;
  constexpr int kOver = Variant::key_dim == 0 ? Config::head_dim : Variant::key_dim;
  constexpr int kMapped = Variant::has_key ? kOver : 0;
  const int lane = threadIdx.x % 32;
  const long long warps = static_cast<long long>(gridDim.x) * (blockDim.x / 32);
  const long long total = static_cast<long long>(p.rows) * p.heads;
  for (long long i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < total; i += warps) {
    const int row = static_cast<int>(i / p.heads), head = static_cast<int>(i % p.heads);
    const long long slot = p.slots[row];
    if (slot < 0 || slot >= p.k_cache.num_slots) continue;
    const Row* k = reinterpret_cast<const Row*>(p.k) + row * p.k_stride_row + head * p.k_stride_head;
    Stored* k_to = reinterpret_cast<Stored*>(const_cast<char*>(p.k_cache.ptr)) + append_offset(p.k_cache, slot, head);
    if constexpr (Variant::has_key) {
      Ctx c;
      c.request = c.qo_pos = c.qo_head = c.qo_row = c.qo_len = c.kv_len = 0;
      c.kv_pos = p.positions[row];
      c.kv_head = head;
      c.kv_slot = slot;
      for (int d = lane; d < pair_count(Variant::key_pairing, kOver); d += 32) {
        const int a = pair_first(Variant::key_pairing, d), b = pair_second(Variant::key_pairing, kOver, d);
        float x0 = to_float<Config::row_type>(k[a]), x1 = to_float<Config::row_type>(k[b]);
        Variant::key(params, c, d, x0, x1);
        k_to[a] = append_value<Dtype::f32, Config::kv_type>(__float_as_uint(x0), p.k_scale[head % kMaxScaledHeads]);
        if (Variant::key_pairing != PAIR_SINGLE)
          k_to[b] = append_value<Dtype::f32, Config::kv_type>(__float_as_uint(x1), p.k_scale[head % kMaxScaledHeads]);
      }
    }
    for (int d = kMapped + lane; d < Config::head_dim; d += 32)
      k_to[d] = append_value<Config::row_type, Config::kv_type>(k[d], p.k_scale[head % kMaxScaledHeads]);
    if (p.v == nullptr) continue;
    const Row* v = reinterpret_cast<const Row*>(p.v) + row * p.v_stride_row + head * p.v_stride_head;
    Stored* v_to = reinterpret_cast<Stored*>(const_cast<char*>(p.v_cache.ptr)) + append_offset(p.v_cache, slot, head);
    for (int d = lane; d < Config::head_dim_vo; d += 32)
      v_to[d] = append_value<Config::row_type, Config::kv_type>(v[d], p.v_scale[head % kMaxScaledHeads]);
  }
}

// 16 bytes of a cache's row in the rows' type.
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
  if constexpr (kFirst == 0 && kDim % kPiece == 0 && (From == To || kBytes<From> == 1)) {
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

// The way back: row i of k and v is what the cache has at slots[i], zeros where that is no slot; the key hook rotates
// k.
template <class Config, class Variant>
__device__ __forceinline__ void gather_rows(const AppendParams& p, const ParamRef* params) {
  typedef typename Bits<Config::row_type>::type Row;
  typedef typename Bits<Config::kv_type>::type Stored;
  constexpr int kOver = Variant::key_dim == 0 ? Config::head_dim : Variant::key_dim;
  constexpr int kMapped = Variant::has_key ? kOver : 0, kRowBytes = kBytes<Config::row_type>;
  const int lane = threadIdx.x % 32, warps = gridDim.x * (blockDim.x / 32);
  for (int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < p.rows; row += warps) {
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
      for (int d = lane; d < pair_count(Variant::key_pairing, kOver); d += 32) {
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

// python: backends/cuda/append.py writes the same layout.
struct CopyParams {
  PagedKv pool;
  const long long* from;  // [pages] ids; a pair with an id outside of the pool is skipped
  const long long* to;
  long long num_pages;  // of the pool
  int pages, heads, head_dim;
};

// One warp per (page, token, KV head). No page is both read and written: the host has checked that.
template <Dtype T>
__device__ __forceinline__ void copy_pages(const CopyParams& p) {
  typedef typename Bits<T>::type Element;
  const int lane = threadIdx.x % 32, size = p.pool.page.divisor;
  const long long warps = static_cast<long long>(gridDim.x) * (blockDim.x / 32);
  const long long total = static_cast<long long>(p.pages) * size * p.heads;
  for (long long i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < total; i += warps) {
    const int head = static_cast<int>(i % p.heads), token = static_cast<int>(i / p.heads % size);
    const long long pair = i / p.heads / size;
    const long long from = p.from[pair], to = p.to[pair];
    if (from < 0 || to < 0 || from >= p.num_pages || to >= p.num_pages) continue;
    const long long inside = token * p.pool.stride_token + head * p.pool.stride_head;
    Element* pool = reinterpret_cast<Element*>(const_cast<char*>(p.pool.ptr)) + inside;
    for (int d = lane; d < p.head_dim; d += 32) pool[to * p.pool.stride_page + d] = pool[from * p.pool.stride_page + d];
  }
}

}  // namespace attnrt
