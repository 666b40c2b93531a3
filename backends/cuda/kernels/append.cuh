// SPDX-License-Identifier: Apache-2.0
// New rows of K and V into the cache, and pages copied to other pages.
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
