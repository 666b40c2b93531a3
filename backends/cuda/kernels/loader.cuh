// SPDX-License-Identifier: Apache-2.0
// Global to shared memory: one KV tile of any layout. Every key's address is computed on its own (slot -> page, token),
// so pages of any size, single tokens and contiguous runs differ in nothing that follows; dead keys are filled with
// zeros, never read.
#pragma once
#include "layout.cuh"

namespace attnrt {

// Element offset of a slot in a paged cache; 64-bit before the first multiply.
__device__ __forceinline__ long long slot_offset(const PagedKv& kv, unsigned slot, int head) {
  unsigned page, token;
  kv.page.split(slot, page, token);
  return static_cast<long long>(page) * kv.stride_page + static_cast<long long>(token) * kv.stride_token +
         static_cast<long long>(head) * kv.stride_head;
}

// Offset of a row that is not there. Real offsets may be negative: strides are signed.
constexpr long long kNoRow = -0x7fffffffffffffffLL - 1;

// Copies kRowsPerWarp rows of kRowBytes bytes in 16-byte pieces, row r from element offset `offset` of lane r (kNoRow:
// zeros).
template <int kRowsPerWarp, int kRowBytes, int kElementBytes, int kPitch>
__device__ __forceinline__ void copy_vectors(const PagedKv& kv, char* dst, long long offset, int lane) {
  constexpr int kChunks = kRowBytes / 16 > 0 ? kRowBytes / 16 : 1;
  constexpr int kTotal = kRowsPerWarp * kChunks;
  const unsigned base = ptx::smem_addr(dst);
#pragma unroll 2
  for (int first = 0; first < kTotal; first += 32) {
    const int i = first + lane;
    const int row = i / kChunks, chunk = i % kChunks;
    const long long from = __shfl_sync(0xffffffffu, offset, row % 32);
    if (kTotal % 32 == 0 || i < kTotal) {
      const char* src = kv.ptr + (from == kNoRow ? 0 : from * kElementBytes + chunk * 16);
      ptx::cp_async16(base + row * kPitch + chunk * 16, src, from == kNoRow ? 0 : 16);
    }
  }
}

// The same, number by number, for rows that 16-byte copies cannot reach. Compiled once for K and V: it is rare and slow
// anyway.
template <int kRowsPerWarp, int kElementBytes>
__device__ __forceinline__ void copy_numbers(const PagedKv& kv, char* dst, int pitch, int elements, long long offset,
                                             int lane) {
  typedef typename Bits<kElementBytes == 1 ? Dtype::e4m3 : Dtype::f16>::type Element;
#pragma unroll 1
  for (int row = 0; row < kRowsPerWarp; ++row) {
    const long long from = __shfl_sync(0xffffffffu, offset, row);
#pragma unroll 1
    for (int d = lane; d < elements; d += 32) {
      const Element x = from == kNoRow ? Element(0) : reinterpret_cast<const Element*>(kv.ptr)[from + d];
      reinterpret_cast<Element*>(dst + row * pitch)[d] = x;
    }
  }
}

// Where lengths are known to the device alone: offset past which none of the item's requests has a key. Rows that end
// earlier mask the rest themselves.
__device__ __forceinline__ int bound_limit(const PlanHeader& plan, const WorkItem& item, const PartDesc& part) {
  if (!plan.bound_kv_lens) return 0x7fffffff;
  int limit = 0;
#pragma unroll 1
  for (int q = item.q_begin + threadIdx.x % 32; q < item.q_end; q += 32)
    limit = max(limit, kv_len_of(plan, part.request[q]));
  return __reduce_max_sync(0xffffffffu, limit);
}
__device__ __forceinline__ int bound_limit(const RunParams& p, const WorkItem& item, const PartDesc& part) {
  return bound_limit(*p.plan, item, part);
}

// Loads the tile under the cursor into a stage. Warp w brings, and later scores, keys w * kWarpKeys onward.
template <class Config, class Variant>
__device__ __forceinline__ void load_tile(const RunParams& p, const Cursor<Config, Variant>& at, char* smem, int stage,
                                          Meta<Layout<Config, Variant>>& meta) {
  using L = Layout<Config, Variant>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key = warp * L::kWarpKeys + lane % L::kWarpKeys;
  const int offset = at.tile + key;
  // Wide heads have no registers to keep the list open between tiles.
  KvList list;
  if constexpr (Config::head_dim_vo > 256) {
    list.open(*at.part, at.item->row, at.head);
  } else {
    list = at.list;
  }
  bool live = offset >= at.item->kv_begin && offset < min(at.item->kv_end, bound_limit(p, *at.item, *at.part));
  long long slot = -1;
  int pos = kDeadKey;
  if (live) {
    const int j = offset - list.offset;
    if (list.indices) {
      unsigned block, token;
      at.part->block.split(j, block, token);
      const int id = static_cast<int>(block) < list.entries ? list.indices[block] : -1;
      slot = id < 0 ? -1 : static_cast<long long>(id) * at.part->block.divisor + token;
      pos = list.block_pos ? (slot < 0 ? 0 : list.block_pos[block] + static_cast<int>(token)) : list.pos + j;
    } else {
      slot = list.base + j;
      pos = list.pos + j;
    }
    live = slot >= 0 && slot < p.k.num_slots;
  }
  if (lane < L::kWarpKeys) {
    meta.pos[stage][key] = live ? pos : kDeadKey;
    meta.slot[stage][key] = live ? static_cast<int>(slot) : 0;
  }
  const int low = __reduce_min_sync(0xffffffffu, live ? pos : 0x7fffffff);
  const int high = __reduce_max_sync(0xffffffffu, live ? pos : kDeadKey);
  const bool all = __all_sync(0xffffffffu, live);
  if (lane == 0) {
    meta.pos_min[stage][warp] = low;
    meta.pos_max[stage][warp] = high;
    meta.all_live[stage][warp] = all;
  }
  char* to = smem + L::kOffsetStages + stage * L::kStageBytes;
  constexpr int kBytesK = Config::head_dim * L::kKvBytes, kBytesV = Config::head_dim_vo * L::kKvBytes;
  constexpr bool kSameRows = kBytesK == kBytesV && L::kRawPitchK == L::kRawPitchV;
#pragma unroll 1
  for (int which = 0; which < (L::kVFromK ? 1 : 2); ++which) {
    const PagedKv& kv = which ? p.v : p.k;
    const int pitch = which ? L::kRawPitchV : L::kRawPitchK;
    char* dst = to + (which ? L::kRawBytesK : 0) + warp * L::kWarpKeys * pitch;
    const long long from = live ? slot_offset(kv, static_cast<unsigned>(slot), at.head) : kNoRow;
    if (!kv.vectors || (which ? kBytesV : kBytesK) % 16 != 0) {
      copy_numbers<L::kWarpKeys, L::kKvBytes>(kv, dst, pitch, which ? Config::head_dim_vo : Config::head_dim, from,
                                              lane);
    } else if (kSameRows || which == 0) {
      copy_vectors<L::kWarpKeys, kBytesK, L::kKvBytes, L::kRawPitchK>(kv, dst, from, lane);
    } else if constexpr (!kSameRows) {
      copy_vectors<L::kWarpKeys, kBytesV, L::kKvBytes, L::kRawPitchV>(kv, dst, from, lane);
    }
  }
}

}  // namespace attnrt
