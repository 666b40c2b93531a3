// SPDX-License-Identifier: Apache-2.0
// The query side of a tile: which rows it holds, what each may see, and Q itself in shared memory. Rows of a tile are
// the item's queries times the query heads of one KV head (grouped-query packing): row r is query r / group, head r %
// group. An item with more rows than the tile has is walked in passes, `first` being the row at which a pass starts.
#pragma once
#include "attnrt_variant.h"
#include "context.cuh"
#include "layout.cuh"

namespace attnrt {

// What a hook may read about row r and its tile; the caller adds the key.
template <class Config, class Variant, class M>
__device__ __forceinline__ Ctx row_ctx(const RunParams& p, const M& meta, int r, int kv_head) {
  return query_ctx(p, meta.request[r], meta.qo_row[r], meta.qo_pos[r], kv_head, meta.qo_head[r]);
}

// What the part says of a query.
struct QueryRow {
  int request, qo_row, qo_pos;
};
__device__ __forceinline__ QueryRow query_row(const PartDesc& part, int query) {
  return {part.request[query], part.qo_index ? part.qo_index[query] : query, part.qo_pos[query]};
}

// Fills the row tables (Meta, DecodeMeta) for one (item, KV head); one warp, a lane per row; `row_of` finds a query's
// QueryRow. Rows past the item's queries see nothing.
template <class Config, class Variant, class M, class RowOf>
__device__ __forceinline__ void fill_rows(const RunParams& p, const PlanHeader& plan, const ParamRef* params,
                                          const WorkItem& item, const PartDesc& part, int kv_head, int first, M& meta,
                                          const RowOf& row_of) {
  static_assert(M::kRows <= 32, "a lane per row");
  const int r = threadIdx.x % 32;
  const int query = item.q_begin + (first + r) / Config::group;
  const bool real = r < M::kRows && query < item.q_end;
  int low = kDeadKey, high = 0x7fffffff, limit = 0x7fffffff;  // a row that is not there hinders no shortcut
  bool masked = false;
  if (r < M::kRows) {
    int qo_row = -1, qo_pos = 0, request = 0;
    if (real) {
      const QueryRow found = row_of(query);
      request = found.request;
      qo_row = found.qo_row;
      qo_pos = found.qo_pos + bound_shift(plan, request);
      if (plan.bound_kv_lens) limit = kv_len_of(plan, request);
      low = kDeadKey + 1;
    }
    if constexpr (Variant::reads_index_mask) {
      masked = real && part.mask_offset && part.mask_offset[query] >= 0;
      const int from = masked ? part.mask_begin[item.row] + bound_shift(plan, request) : 0;
      meta.mask_bit[r] = masked ? part.mask_offset[query] - from : kNoMask;
      meta.mask_from[r] = from;
    }
    meta.request[r] = request;
    meta.qo_row[r] = qo_row;
    meta.qo_head[r] = kv_head * Config::group + (first + r) % Config::group;
    meta.qo_pos[r] = qo_pos;
    meta.limit[r] = limit;
    if constexpr (Variant::has_mask) {
      if (real) {
        const Ctx c = row_ctx<Config, Variant>(p, meta, r, kv_head);
        Variant::visible(Variant::row(params, c), low, high);
        low = max(low, kDeadKey + 1);
      }
    }
    meta.low[r] = real ? low : 0x7fffffff;
    meta.high[r] = real ? high : kDeadKey;
  }
  low = __reduce_max_sync(0xffffffffu, low);
  high = __reduce_min_sync(0xffffffffu, high);
  limit = __reduce_min_sync(0xffffffffu, limit);
  masked = __any_sync(0xffffffffu, masked);
  if (r == 0) {
    meta.low_max = low;
    meta.high_min = high;
    meta.limit_min = limit;
    meta.any_mask = masked;
  }
}

// The same, visible to all of the CTA.
template <class Config, class Variant, class M>
__device__ __forceinline__ void open_rows(const RunParams& p, const ParamRef* params, const WorkItem& item,
                                          const PartDesc& part, int kv_head, int first, M& meta) {
  if (threadIdx.x < 32) {
    fill_rows<Config, Variant>(p, *p.plan, params, item, part, kv_head, first, meta,
                               [&](int query) { return query_row(part, query); });
  }
  __syncthreads();
}

// Maps the pairs of a row in shared memory in place; threads `first`, `first + step`, ... of the row's pairs.
template <int kPairing, int kPairDim, int kHeadDim, Dtype T, class Map>
__device__ __forceinline__ void map_pairs(typename Bits<T>::type* row, int first, int step, const Map& map) {
  constexpr int kOver = kPairDim == 0 ? kHeadDim : kPairDim;
#pragma unroll 1
  for (int d = first; d < pair_count(kPairing, kOver); d += step) {
    const int i = pair_first(kPairing, d), j = pair_second(kPairing, kOver, d);
    float x0 = to_float<T>(row[i]), x1 = to_float<T>(row[j]);
    map(d, x0, x1);
    row[i] = from_float<T>(x0);
    if (kPairing != PAIR_SINGLE) row[j] = from_float<T>(x1);
  }
}

// A number of q in the type of products: the same, or, of 8 bits, one that holds it exactly.
template <class Config>
__device__ __forceinline__ typename Bits<Config::q_type>::type number_of_q(
    typename Bits<Config::q_stored_type>::type x) {
  if constexpr (Config::q_type == Config::q_stored_type) {
    return x;
  } else {
    return from_float<Config::q_type>(to_float<Config::q_stored_type>(x));
  }
}

// Q of the tile into shared memory, zeros in padded rows and columns; the query hook is applied in float32 and rounded
// once.
template <class Config, class Variant>
__device__ __forceinline__ void load_q(const RunParams& p, const ParamRef* params, int kv_head, char* smem,
                                       const Meta<Layout<Config, Variant>>& meta) {
  using L = Layout<Config, Variant>;
  typedef typename Bits<Config::q_type>::type Element;
  typedef typename Bits<Config::q_stored_type>::type Stored;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int r = warp; r < L::kRows; r += L::kWarps) {
    Element* dst = reinterpret_cast<Element*>(smem + L::kOffsetQ + r * L::kPitchK);
    const int qo_row = meta.qo_row[r];
    const int head = meta.qo_head[r];
    const Stored* src = reinterpret_cast<const Stored*>(p.q) + static_cast<long long>(qo_row) * p.q_stride_row +
                        static_cast<long long>(head) * p.q_stride_head;
    for (int d = lane; d < L::kDim; d += 32) {
      dst[d] = qo_row >= 0 && d < Config::head_dim ? number_of_q<Config>(src[d]) : Element(0);
    }
    if constexpr (Variant::has_query) {
      __syncwarp();
      if (qo_row >= 0) {
        const Ctx c = row_ctx<Config, Variant>(p, meta, r, kv_head);
        map_pairs<Variant::query_pairing, Variant::query_dim, Config::head_dim, Config::q_type>(
            dst, lane, 32, [&](int d, float& x0, float& x1) { Variant::query(params, c, d, x0, x1); });
      }
    }
  }
}

}  // namespace attnrt
