// SPDX-License-Identifier: Apache-2.0
// What the decode kernel does about states of a query that several items share: the loading warp finds where they are
// counted and which they are, the warps that compute count those that they store, and who counts a query's last one,
// from whichever CTAs, folds all of them in their order, here and now.
#pragma once
#include "cursor.cuh"
#include "decode_layout.cuh"
#include "merge.cuh"
#include "rows.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeMerges {
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;
  using Rows = DecodeRows<L, Variant>;

 public:
  // Into the row tables of a pass, by one warp: a lane per row searches the merge list, which rises with row and head,
  // unless FirstItem says it (`known`). Reads nothing of those tables: another warp may still be laying them out.
  __device__ __forceinline__ static void find(M& meta, const PlanHeader& plan, const FirstItem& f, const PartDesc& part,
                                              int set, bool known, int head, int first) {
    Rows& rows = meta.rows[set];
    const int lane = threadIdx.x % 32;
    if constexpr (L::kStreams) {
      const WorkItem& item = f.item;
      if (lane == 0)
        rows.last = f.next >= f.end && head + 1 >= item.head_end &&
                    first + L::kRows >= (item.q_end - item.q_begin) * Config::group;
    }
    if (known) {
      const int count = f.merge_end - f.merge_begin;
      if (lane < L::kRows) {
        rows.counter[lane] = lane == 0 && plan.counters ? f.counter + head - f.item.head_begin : -1;
        rows.merge_begin[lane] = f.merge_begin;
        rows.merge_end[lane] = f.merge_end;
      }
      if (count <= L::kSlots) {
#pragma unroll
        for (int i = 0; i < L::kSlots; i += 32)
          if (lane + i < count) meta.slots[lane + i] = plan.merge_slots[f.merge_begin + lane + i];
        if (lane == 0) rows.slots = meta.slots - f.merge_begin;
      } else {
        if (lane == 0) rows.slots = plan.merge_slots;
        ptx::prefetch_l2(plan.merge_slots + f.merge_begin);
      }
      return;
    }
    if (lane >= L::kRows) return;
    if (lane == 0) rows.slots = plan.merge_slots;
    const int query = f.item.q_begin + (first + lane) / Config::group;
    const int row = query < f.item.q_end ? query_row(part, query).qo_row : -1;
    const bool wanted = row >= 0 && (lane == 0 || (first + lane) % Config::group == 0);
    int low = 0;
#pragma unroll 1
    for (int high = plan.num_merges; high - low > 1;) {
      const int middle = (low + high) / 2;
      const MergeRow& at = plan.merge_rows[middle];
      if (at.qo_row < row || (at.qo_row == row && at.head_begin <= head)) {
        low = middle;
      } else {
        high = middle;
      }
    }
    rows.counter[lane] = -1;
    if (!wanted || !plan.counters) return;
    const MergeRow at = plan.merge_rows[low];
    rows.counter[lane] = low * (at.head_end - at.head_begin) + head - at.head_begin;
    ptx::prefetch_l2(plan.merge_slots + at.slot_begin);
    rows.merge_begin[lane] = at.slot_begin;
    rows.merge_end[lane] = at.slot_end;
  }

  // Counts so many states of each of the pass's queries; one warp, once all of them are stored.
  __device__ __forceinline__ static void count(M& meta, const PlanHeader& plan, const Rows& rows, int states) {
    const int r = threadIdx.x % 32;
    bool last = false;
    if (r < L::kRows && rows.counter[r] >= 0) {
      const int heads = min(Config::group - (rows.first + r) % Config::group, L::kRows - r);
      const unsigned all = (rows.merge_end[r] - rows.merge_begin[r]) * Config::group, mine = states * heads;
      unsigned* const counter = plan.counters + rows.counter[r];
      last = ptx::count_up(counter, mine) + mine == all;
      if (last) *counter = 0;
    }
    const unsigned found = __ballot_sync(0xffffffffu, last);
    if (r == 0) meta.last = found;
  }

  // Merges the queries that begin with the rows of `last`; the warps of a group take heads and slices of columns in
  // turn. ring: the group's stages.
  __device__ __forceinline__ static void merge(const RunParams& p, const PlanHeader& plan, const ParamRef* params,
                                               const Rows& rows, unsigned last, int warp, char* ring) {
    if (!last) return;
    if constexpr (L::kStreams) {
      if (rows.last && !plan.pairwise) {
#pragma unroll 1
        for (; last; last &= last - 1) streamed(p, plan, params, rows, __ffs(last) - 1, warp, ring);
        return;
      }
    }
    const Merge<Config, Variant, L::kMergeBatch, L::kSlices> merge(p, plan, params, rows.slots, warp % L::kSlices);
#pragma unroll 1
    for (int r = 0; r < L::kRows; ++r) {
      if (!(last >> r & 1)) continue;
#pragma unroll 1
      for (int i = warp / L::kSlices; i < Config::group; i += L::kWarps / L::kSlices) {
        const int head = rows.head * Config::group + i;
        finish(merge, p, rows, r, head, merge.states(rows.merge_begin[r], rows.merge_end[r], head));
      }
    }
  }

  // Rows of the merge list that no item has: the empty set.
  __device__ __noinline__ static void finish_empty(const RunParams& p, const PlanHeader& plan, const ParamRef* params,
                                                   int worker, int workers) {
    const Merge<Config, Variant, 2> merge(p, plan, params);
#pragma unroll 1
    for (int i = worker; i < plan.num_merges; i += workers) {
      const MergeRow row = plan.merge_rows[i];
      if (row.slot_begin != row.slot_end) continue;
#pragma unroll 1
      for (int head = row.head_begin * Config::group; head < row.head_end * Config::group; ++head)
        merge.finish(row, head, merge.empty());
    }
  }

 private:
  // The query that begins with row r: a head a warp, and two where there are more than warps.
  __device__ __forceinline__ static void streamed(const RunParams& p, const PlanHeader& plan, const ParamRef* params,
                                                  const Rows& rows, int r, int warp, char* ring) {
    constexpr int kLanes = Config::group > L::kWarps ? 16 : 32, kSpace = L::kStages * L::kStageBytes / L::kWarps;
    warp = same(warp);  // found here, not before the loop over tiles
    const int i = warp * (32 / kLanes) + threadIdx.x % 32 / kLanes;
    if (same(i) >= Config::group) return;
    const Merge<Config, Variant, 1, 1, kLanes> merge(p, plan, params, rows.slots, 0);
    const int head = rows.head * Config::group + min(i, Config::group - 1), begin = same(rows.merge_begin[r]);
    const auto state = merge.template streamed<kSpace>(begin, same(rows.merge_end[r]), head, ring + warp * kSpace);
    if (i < Config::group) finish(merge, p, rows, r, head, state);
  }

  template <class Rowwise>
  __device__ __forceinline__ static void finish(const Rowwise& merge, const RunParams& p, const Rows& rows, int r,
                                                int head, const typename Rowwise::State& state) {
    Ctx c = row_ctx<Config, Variant>(p, rows, r, rows.head);
    c.qo_head = head;
    merge.finish(c, state);
  }
};

}  // namespace attnrt
