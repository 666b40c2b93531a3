// SPDX-License-Identifier: Apache-2.0
// The rows of a pass as a loader of the Hopper prefill family describes them to consumers, and Q itself.
#pragma once
#include "context.cuh"
#include "hopper_copies.cuh"
#include "hopper_keys.cuh"

namespace attnrt {

template <class Config, class Variant, Loading kHow>
class HopperTables : public HopperKeys<Config, Variant, kHow> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperKeys<Config, Variant, kHow>;

 protected:
  using Base::bar, Base::base_, Base::bound_, Base::kNoShift, Base::lane_, Base::meta_, Base::p_;
  using Base::Base;
  using Base::params_;
  using typename Base::Tile;

  // Offset of row `first + r` of an item in q, or kNoRow.
  __device__ __forceinline__ long long query_offset(const WorkItem& item, const PartDesc& part, int head,
                                                    int row) const {
    const int query = item.q_begin + row / Config::group;
    if (query >= item.q_end) return kNoRow;
    const long long qo_row = part.qo_index ? part.qo_index[query] : query;
    return qo_row * p_.q_stride_row +
           static_cast<long long>(head * Config::group + row % Config::group) * p_.q_stride_head;
  }

  // What the plan says of a query: loaded for several rows at once, because each load may take a thousand clocks.
  struct Query {
    int at;  // index in the part's queries, or -1
    int request, qo_row, pos;
  };
  __device__ __forceinline__ Query fetch_query(const WorkItem& item, const PartDesc& part, int row) const {
    const int query = item.q_begin + row / Config::group;
    Query x = {-1, 0, query, 0};
    if (query < item.q_end) {
      x.at = query;
      x.request = part.request[query];
      x.pos = part.qo_pos[query];
      if (part.qo_index) x.qo_row = part.qo_index[query];
    }
    return x;
  }

  // The record of a pass but for its item.
  struct Bounds {
    int begin, stop, runs, shift, live_begin, live_end;
  };
  __device__ __forceinline__ static Bounds bounds_of(const KvList& list, const Tile& tile) {
    Bounds x;
    x.runs = tile.shift != kNoShift;
    x.shift = list.pos - list.offset;
    x.live_begin = tile.low;
    x.live_end = max(tile.high, tile.low);
    return x;
  }

  // Table entry of row r of a pass.
  struct Entry {
    int4 row;
    int2 request;
    long long bit;
    int from;
  };
  __device__ __forceinline__ Entry make_row(const WorkItem& item, const PartDesc& part, int head, int first, int r,
                                            const Query& query) const {
    int4 row = make_int4(-1, 0, 0x7fffffff, kDeadKey);
    int2 request = make_int2(0, 0x7fffffff);
    long long bit = kNoMask;
    int from = 0;
    if (query.at >= 0) {
      request.x = query.request;
      const int shift = bound_ ? bound_shift(p_, request.x) : 0;
      row.x = query.qo_row;
      row.y = query.pos + shift;
      row.z = kDeadKey + 1;
      row.w = 0x7fffffff;
      if (bound_) request.y = kv_len_of(p_, request.x);
      if constexpr (Variant::has_mask) {
        const int qo_head = head * Config::group + (first + r) % Config::group;
        const Ctx c = query_ctx(p_, request.x, row.x, row.y, head, qo_head);
        Variant::visible(Variant::row(params_, c), row.z, row.w);
        row.z = max(row.z, kDeadKey + 1);
      }
      if constexpr (Variant::reads_index_mask) {
        if (part.mask_offset && part.mask_offset[query.at] >= 0) {
          from = part.mask_begin[item.row] + shift;
          bit = reinterpret_cast<long long>(part.mask) * 8 + part.mask_offset[query.at] - from;
        }
      }
    }
    return {row, request, bit, from};
  }

  // A warp's work, after the buffer is free: row r belongs to lane r % 32. What follows from an entry is worked out
  // here and not before, because entries wait in registers.
  __device__ __forceinline__ void write_row(const Entry& entry, const Bounds& bounds, int head, int first, int r,
                                            int pass) const {
    meta_.row[L::table(pass)][r] = entry.row;
    meta_.row_request[L::table(pass)][r] = entry.request;
    const int4 row = entry.row;
    const int limit = entry.request.y;
    const bool there = row.x >= 0;
    if constexpr (L::kWorkedOut) {
      meta_.seen[L::table(pass)][r] = make_int2(offset_from(bounds, row.z), min(offset_past(bounds, row.w), limit));
      const long long qo_head = head * Config::group + (first + r) % Config::group;
      meta_.out_at[L::table(pass)][r] = there ? row.x * p_.out_stride_row + qo_head * p_.out_stride_head : kNothing;
    }
    // Rows past the item's end do not make the others' tiles partial.
    int4 span;
    span.x = __reduce_max_sync(0xffffffffu, there ? row.z : kDeadKey);
    span.y = __reduce_min_sync(0xffffffffu, there ? row.w : 0x7fffffff);
    span.z = __reduce_min_sync(0xffffffffu, there ? limit : 0x7fffffff);
    span.w = 0x7fffffff;
    if constexpr (Variant::reads_index_mask) {
      span.w = __reduce_min_sync(0xffffffffu, entry.bit != kNoMask ? entry.from : 0x7fffffff);
    } else if constexpr (L::kSkips) {
      span.w = __reduce_max_sync(0xffffffffu, there ? min(offset_past(bounds, row.w), limit) : 0);
    }
    if (lane_ == 0) meta_.span[L::table(pass)][r / 32] = span;
    if constexpr (Variant::reads_index_mask) {
      meta_.mask_bit[L::table(pass)][r] = entry.bit;
      meta_.mask_from[L::table(pass)][r] = entry.from;
    }
  }

  __device__ __forceinline__ static void write_bounds(PassRecord& record, const Bounds& x, int head, int first) {
    record.head = head;
    record.first = first;
    record.begin = x.begin;
    record.stop = x.stop;
    record.runs = x.runs;
    record.shift = x.shift;
    record.live_begin = x.live_begin;
    record.live_end = x.live_end;
    record.done = 0;
  }

  // The table of a pass, and Q's buffer where there are two. Long waits as a rule: they must not take issue slots from
  // the consumers.
  __device__ __forceinline__ void wait_table(int pass) const {
    while (!ptx::mbar_try_wait(bar(meta_.table_empty[L::table(pass)]), (pass / L::kTables & 1) ^ 1)) ptx::nap(40);
  }
  __device__ __forceinline__ void wait_queries(int pass) const {
    while (!ptx::mbar_try_wait(bar(meta_.q_empty[pass & 1]), (pass >> 1 & 1) ^ 1)) ptx::nap(40);
  }

  // Where there is one buffer of Q: the half of a warpgroup is free for pass `count`.
  __device__ __forceinline__ void wait_half(int group, int count) const {
    ptx::mbar_wait(bar(meta_.half_empty[group]), (count & 1) ^ 1);
  }

  // Whether `rows` rows of Q lie as copy_even wants them, and where the first of the pass lies then.
  __device__ __forceinline__ bool evenly(const WorkItem& item, const PartDesc& part, int head, int first, int row,
                                         int rows, const char*& at) const {
    at = p_.q + ((item.q_begin + first / Config::group) * p_.q_stride_row +
                 static_cast<long long>(head * Config::group) * p_.q_stride_head) *
                    L::kElementQ;
    return 32 % Config::group == 0 && vector_queries() && !part.qo_index &&
           item.q_begin + (first + row + rows) / Config::group <= item.q_end;
  }

  // 32 rows of Q, from row `row` of a pass on.
  __device__ __forceinline__ void copy_queries(const WorkItem& item, const PartDesc& part, int head, int first, int row,
                                               int pass) const {
    const char* at;
    const bool even = evenly(item, part, head, first, row, 32, at);
    copy_queries(even, at, item, part, head, first, row, pass);
  }
  __device__ __forceinline__ void copy_queries(bool even, const char* at, const WorkItem& item, const PartDesc& part,
                                               int head, int first, int row, int pass) const {
    const unsigned tile = base_ + (pass & (L::kBuffersQ - 1)) * L::kBytesQ;
    if constexpr (32 % Config::group == 0) {
      if (even) {
        return copy_even<kWordsQ, L::kSlabQ, Config::group>(at, tile, row, p_.q_stride_row * L::kElementQ,
                                                            p_.q_stride_head * L::kElementQ, lane_);
      }
    }
    gather_any<kWordsQ, L::kSlabQ, L::kElementQ>(vector_queries(), p_.q, tile, row,
                                                 query_offset(item, part, head, first + row + lane_), lane_);
  }

  __device__ __forceinline__ bool vector_queries() const {
    return ((reinterpret_cast<unsigned long long>(p_.q) | (p_.q_stride_row | p_.q_stride_head) * L::kElementQ) & 15) ==
           0;
  }

 private:
  static constexpr int kWordsQ = L::kDim * L::kElementQ / 2;  // of 16 bits, of a row
};

}  // namespace attnrt
