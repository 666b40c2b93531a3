// SPDX-License-Identifier: Apache-2.0
// The rows of a pass as a loader of the Hopper prefill family describes them to consumers, and Q itself.
#pragma once
#include "hopper_copies.cuh"
#include "hopper_keys.cuh"

namespace attnrt {

template <class Config, class Variant, Loading kHow>
class HopperTables : public HopperKeys<Config, Variant, kHow> {
  using L = HopperLayout<Config, Variant>;
  using Base = HopperKeys<Config, Variant, kHow>;

 protected:
  using Base::Base, Base::arrived_half, Base::arrived_q, Base::bar, Base::base_, Base::kNoShift, Base::lane_,
      Base::look_ahead, Base::meta_, Base::p_;
  using Base::params_, Base::want;
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

  // Table entry of row r of a pass.
  __device__ __forceinline__ void write_row(const WorkItem& item, const PartDesc& part, int head, int first, int r,
                                            const Query& query, int buffer) {
    int4 row = make_int4(-1, 0, 0x7fffffff, kDeadKey);
    int2 request = make_int2(0, 0x7fffffff);
    long long bit = kNoMask;
    int from = 0;
    if (query.at >= 0) {
      request.x = query.request;
      const int shift = bound_shift(p_, request.x);
      row.x = query.qo_row;
      row.y = query.pos + shift;
      row.z = kDeadKey + 1;
      row.w = 0x7fffffff;
      if (p_.plan->bound_kv_lens) request.y = kv_len_of(p_, request.x);
      if constexpr (Variant::has_mask) {
        Ctx c;
        c.request = request.x;
        c.qo_row = row.x;
        c.qo_pos = row.y;
        c.kv_head = head;
        c.qo_head = head * Config::group + (first + r) % Config::group;
        c.qo_len = p_.plan->qo_lens[request.x];
        c.kv_len = kv_len_of(p_, request.x);
        c.kv_pos = 0;
        c.kv_slot = 0;
        Variant::visible(Variant::row(params_, c), row.z, row.w);
        row.z = max(row.z, kDeadKey + 1);
      }
      if constexpr (Variant::reads_index_mask) {
        if (part.mask_offset && part.mask_offset[query.at] >= 0) {
          from = part.mask_begin[item.row] + shift;
          bit = part.mask_offset[query.at] - from;
        }
      }
    }
    meta_.row[buffer][r] = row;
    meta_.row_request[buffer][r] = request;
    if constexpr (Variant::reads_index_mask) {
      meta_.mask_bit[buffer][r] = bit;
      meta_.mask_from[buffer][r] = from;
    }
  }

  // The record of a pass; a warp's work, because bounds of lengths are.
  __device__ __forceinline__ void write_pass(const WorkItem& item, const PartDesc& part, int head, int first,
                                             int buffer) {
    KvList list;
    list.open(part, item.row, head);
    Tile tile;
    want(item, part, list, head, tile);
    if (lane_ != 0) return;
    PassRecord& pass = meta_.pass[buffer];
    pass.shift = list.pos - list.offset;
    pass.live_begin = tile.low;
    pass.live_end = tile.shift == kNoShift ? tile.low : tile.high;
    pass.item = item;
    pass.head = head;
    pass.first = first;
    pass.done = 0;
    leaf_range<L::kTile>(p_, item, item.leaf_begin, pass.begin, pass.stop);
  }

  __device__ __forceinline__ void wait_queries(int count) const {
    ptx::mbar_wait(bar(meta_.q_empty[count & 1]), (count >> 1 & 1) ^ 1);
  }

  __device__ __forceinline__ void run_rows() {
    int count = 0;
    walk_passes<L::kRows, Config::group>(p_, blockIdx.x, [&](const WorkItem& item, int head, int first) {
      const PartDesc& part = p_.plan->parts[item.part];
      Query query[L::kRows / 32];
#pragma unroll
      for (int i = 0; i < L::kRows / 32; ++i) query[i] = fetch_query(item, part, first + i * 32 + lane_);
      look_ahead(item);
      wait_queries(count);
      write_pass(item, part, head, first, count & 1);
#pragma unroll
      for (int i = 0; i < L::kRows / 32; ++i) {
        write_row(item, part, head, first, i * 32 + lane_, query[i], count & 1);
      }
      ptx::mbar_arrive_warp(arrived_q(count & 1), lane_);
      ++count;
    });
    wait_queries(count);
    if (lane_ == 0) meta_.pass[count & 1].done = 1;
    ptx::mbar_arrive_warp(arrived_q(count & 1), lane_);
  }

  // Where there is one buffer of Q: the half of a warpgroup is free for pass `count`.
  __device__ __forceinline__ void wait_half(int group, int count) const {
    ptx::mbar_wait(bar(meta_.half_empty[group]), (count & 1) ^ 1);
  }

  __device__ __forceinline__ void run_queries() {
    int count = 0;
    walk_passes<L::kRows, Config::group>(p_, blockIdx.x, [&](const WorkItem& item, int head, int first) {
      const PartDesc& part = p_.plan->parts[item.part];
#pragma unroll 1
      for (int row = lane_; row < L::kRows; row += 32) {
        const long long at = query_offset(item, part, head, first + row);
        if (at != kNoRow) ptx::prefetch_l2<L::kDim * 2>(p_.q + at * 2);
      }
      if constexpr (L::kBuffersQ == 1) {
#pragma unroll 1
        for (int group = 0; group < L::kGroups; ++group) bring_half(item, part, head, first, group, count);
        ++count;
        return;
      }
      wait_queries(count);
#pragma unroll 1
      for (int row = 0; row < L::kRows; row += 32) {
        gather_any<L::kDim, L::kSlabQ, 2>(vector_queries(), p_.q, base_ + (count & 1) * L::kBytesQ, row,
                                          query_offset(item, part, head, first + row + lane_), lane_);
      }
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::mbar_arrive_warp(arrived_q(count & 1), lane_);
      ++count;
    });
    if constexpr (L::kBuffersQ == 1) return;
    wait_queries(count);
    ptx::mbar_arrive_warp(arrived_q(count & 1), lane_);
  }

  __device__ __forceinline__ void bring_half(const WorkItem& item, const PartDesc& part, int head, int first, int group,
                                             int count) const {
    wait_half(group, count);
#pragma unroll
    for (int row = group * 64; row < group * 64 + 64; row += 32) {
      gather_any<L::kDim, L::kSlabQ, 2>(vector_queries(), p_.q, base_, row,
                                        query_offset(item, part, head, first + row + lane_), lane_);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::mbar_arrive_warp(arrived_half(group), lane_);
  }

  __device__ __forceinline__ bool vector_queries() const {
    return ((reinterpret_cast<unsigned long long>(p_.q) | (p_.q_stride_row | p_.q_stride_head) * 2) & 15) == 0;
  }
};

}  // namespace attnrt
