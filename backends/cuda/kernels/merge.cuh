// SPDX-License-Identifier: Apache-2.0
// Rows that several items share: their stored states are folded (merge_states.cuh), then finished. One warp per (row,
// query head), or several with a slice of the columns each.
#pragma once
#include "finish.cuh"
#include "merge_stream.cuh"

namespace attnrt {

template <class Config, class Variant, int kMost = 8, int kSlices = 1, int kLanes = 32>
class Merge : public MergeStream<Config, kMost, kSlices, kLanes, Variant::use_softmax> {
  using Base = MergeStream<Config, kMost, kSlices, kLanes, Variant::use_softmax>;
  using Base::col_of, Base::first_, Base::kCols, Base::lane_, Base::look_ahead, Base::nothing_ahead, Base::pairwise;
  using Base::plan_, Base::sequential;
  using typename Base::Ahead;
  static constexpr int kSpace = 16 * 4 * Config::head_dim_vo;  // of a warp of the merge kernel: sixteen states

 public:
  using Base::empty, Base::kStreams;
  using typename Base::State;
  static constexpr int kRingBytes = kStreams ? 4 * kSpace : 16;  // of four warps

  // `plan` is the header or its top (no part of which is read but by find_request).
  __device__ __forceinline__ Merge(const RunParams& p, const PlanHeader& plan, const ParamRef* params)
      : Merge(p, plan, params, plan.merge_slots, 0) {}

  // The same with another copy of the list's slots, by place in the list, and for a slice of the columns.
  __device__ __forceinline__ Merge(const RunParams& p, const PlanHeader& plan, const ParamRef* params, const int* slots,
                                   int slice)
      : Base(plan, slots, p.num_qo_heads, slice), p_(p), params_(params) {}

  // All rows, as a kernel of its own. What the plan says of a warp's first row is read before `wait`, which is for the
  // states: three links of a chain of reads, each as long as the way to memory. ring: shared memory, kRingBytes.
  template <class Wait>
  __device__ __forceinline__ void run(char* ring, Wait&& wait) {
    const unsigned warp = same(threadIdx.x / 32), warps = blockDim.x / 32, heads = p_.num_qo_heads;
    // All of the header at once. Where there are counters, the decode kernel has merged.
    const MergeRow* const rows = plan_.merge_rows;
    const unsigned total = same(plan_.num_merges * heads * (plan_.counters == nullptr));
    const bool pairs = same(plan_.pairwise);
    Ahead ahead = nothing_ahead();
    bool waited = false;
#pragma unroll 1
    for (unsigned i = blockIdx.x * warps + warp; i < total; i += warps * gridDim.x) {
      MergeRow row = rows[i / heads];
      const int head = i % heads, kv_head = head / Config::group;
      row.slot_begin = same(row.slot_begin);
      row.slot_end = same(row.slot_end);
      if (same(kv_head < row.head_begin || kv_head >= row.head_end)) continue;
      look_ahead(ahead, row.slot_begin, row.slot_end, head);
      if (!waited) wait();
      waited = true;
      ATTNRT_MARK(26);
      State s;
      if (pairs) {
        s = pairwise(row.slot_begin, row.slot_end, head);
      } else if constexpr (kStreams) {
        s = Base::template streamed<Base::places(kSpace)>(row.slot_begin, row.slot_end, head, ahead,
                                                          ring + warp * kSpace);
      } else {
        s = sequential(row.slot_begin, row.slot_end, head);
      }
      finish(row, head, s);
      ATTNRT_MARK(27);
    }
    if (!waited) wait();
  }

  // The fold of a row's entries of the merge list.
  __device__ __forceinline__ State states(int begin, int end, int head) const {
    return plan_.pairwise ? pairwise(begin, end, head) : sequential(begin, end, head);
  }

  // The same in a warp's own shared memory, so many bytes; not for pairs.
  template <int kBytes>
  __device__ __forceinline__ State streamed(int begin, int end, int head, char* ring) const {
    Ahead ahead = nothing_ahead();
    look_ahead(ahead, begin, end, head);
    return Base::template streamed<Base::places(kBytes)>(begin, end, head, ahead, ring);
  }

  __device__ __forceinline__ void finish(const MergeRow& merge, int head, const State& s) const {
    Ctx c;
    c.kv_pos = 0;
    c.kv_slot = 0;
    c.qo_row = merge.qo_row;
    c.qo_head = head;
    c.kv_head = head / Config::group;
    c.request = -1;
    c.qo_pos = c.qo_len = c.kv_len = 0;
    if constexpr (Variant::has_sink || Variant::has_output) find_request(c);
    finish(c, s);
  }

  __device__ __forceinline__ void finish(const Ctx& c, const State& s) const {
    typedef typename Bits<Config::out_type>::type Element;
    const FinishRow row = finish_head<Variant>(params_, c, s.m, s.l);
    if (lane_ == 0 && first_ == 0) store_lse(p_, c.qo_row, c.qo_head, row.lse);
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      const int col = col_of(i);
      if (col < Config::head_dim_vo) {
        *reinterpret_cast<Element*>(out_address<Config>(p_, c.qo_row, c.qo_head, col)) =
            finish_value<Config, Variant>(params_, c, row, col, s.acc[i]);
      }
    }
  }

 private:
  // Request and position of the row, for a sink or an output hook that reads them; -1: no request has it (padding).
  // Merge rows do not carry them, since few variants ask: the warp looks the row up in the parts.
  __device__ __forceinline__ void find_request(Ctx& c) const {
#pragma unroll 1
    for (int i = 0; i < p_.plan->num_parts && c.request < 0; ++i) {
      const PartDesc& part = p_.plan->parts[i];
      int at = part.qo_index == nullptr && c.qo_row < part.queries ? c.qo_row : -1;
#pragma unroll 1
      for (int first = 0; part.qo_index && first < part.queries && at < 0; first += 32) {
        const bool hit = first + lane_ < part.queries && part.qo_index[first + lane_] == c.qo_row;
        const unsigned hits = __ballot_sync(0xffffffffu, hit);
        if (hits) at = first + __ffs(hits) - 1;
      }
      if (at < 0) continue;
      c.request = part.request[at];
      c.qo_pos = part.qo_pos[at] + bound_shift(p_, c.request);
      c.qo_len = p_.plan->qo_lens[c.request];
      c.kv_len = kv_len_of(p_, c.request);
    }
  }

  const RunParams& p_;
  const ParamRef* params_;
};

}  // namespace attnrt
