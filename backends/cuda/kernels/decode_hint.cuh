// SPDX-License-Identifier: Apache-2.0
// What the computing warps of the decode kernel do while they have nothing to compute yet: they ask for the group's
// query and first keys in L2. The loading warp has still to find out much before it can copy them. Only a hint.
#pragma once
#include "decode_layout.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeHint {
  using L = DecodeLayout<Config, Variant>;

 public:
  // A warp for 16 keys, of the first tile of a worker's first item, as far as its line names their blocks.
  __device__ __forceinline__ static void first_tile(const RunParams& p, int worker, int warp, int lane) {
    const unsigned at = kFirstAt + worker * sizeof(FirstItem);
    if (at + sizeof(FirstItem) > p.behind + sizeof(PlanHeader)) return;
    // All that may be wanted is read at once.
    const FirstItem& first = *reinterpret_cast<const FirstItem*>(reinterpret_cast<const char*>(p.plan) + at);
    const int firsts = p.plan->firsts, flags = first.flags, block = first.block, head = first.item.head_begin;
    const int start = first.item.kv_begin - first.offset + warp * 16, entries = first.entries, list = first.list;
    const int row = first.qo_row;
    int id = first.ids[warp];
    if (worker >= firsts || !(flags & kFirstItem)) return;
    if (flags & kFirstRow && warp == 0) query(p, row, head, lane);
    constexpr int kLines = L::kRowBytes <= 128 ? 1 : L::kRowBytes / 128;  // of a key
    int token = lane / kLines;
    if (token >= 16 || start < 0) return;
    if (flags & kFirstIds) {
      token += start & (block - 1) & ~15;
    } else {
      const int* const indices = p.plan->parts[first.item.part].indices;
      if (!(flags & kFirstList) || !indices || block != 1 || start + token >= entries) return;
      id = indices[list + start + token];
      token = 0;
    }
    const bool pages = block == static_cast<int>(p.k.page.divisor) && block == static_cast<int>(p.v.page.divisor);
    if (!pages || id < 0 || (id + 1LL) * block > p.k.num_slots) return;
    row_of(p.k, id, token, head, lane % kLines * 128);
    row_of(p.v, id, token, head, lane % kLines * 128);
  }

 private:
  __device__ __forceinline__ static void query(const RunParams& p, int row, int kv_head, int lane) {
    constexpr int kLines = L::kDim * 2 / 128;
    if (lane >= Config::group * kLines) return;
    const int head = kv_head * Config::group + lane / kLines;
    ptx::prefetch_l2(p.q + (row * p.q_stride_row + head * p.q_stride_head) * 2 + lane % kLines * 128);
  }

  __device__ __forceinline__ static void row_of(const PagedKv& kv, int page, int token, int head, int byte) {
    const long long at = page * kv.stride_page + token * kv.stride_token + head * kv.stride_head;
    ptx::prefetch_l2(kv.ptr + at * kBytes<Config::kv_type> + byte);
  }
};

}  // namespace attnrt
