// SPDX-License-Identifier: Apache-2.0
// Global to shared memory: one KV tile of any layout. Every key's address is computed on its own (slot -> page, token), so pages
// of any size, single tokens and contiguous runs differ in nothing that follows; dead keys are filled with zeros, never read.
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

// Copies kElements elements of kRowsPerWarp rows, row r from element offset `offset` of lane r (kNoRow: zeros).
template <int kRowsPerWarp, int kElements, int kElementBytes, int kPitch>
__device__ __forceinline__ void copy_rows(const PagedKv& kv, char* dst, long long offset, int lane) {
  constexpr int kRowBytes = kElements * kElementBytes;
  if (kRowBytes % 16 == 0 && kv.vectors) {
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
  } else {
    typedef typename Bits<kElementBytes == 1 ? Dtype::e4m3 : Dtype::f16>::type Element;
#pragma unroll 1
    for (int row = 0; row < kRowsPerWarp; ++row) {
      const long long from = __shfl_sync(0xffffffffu, offset, row);
#pragma unroll 1
      for (int d = lane; d < kElements; d += 32) {
        const Element x = from == kNoRow ? Element(0) : reinterpret_cast<const Element*>(kv.ptr)[from + d];
        reinterpret_cast<Element*>(dst + row * kPitch)[d] = x;
      }
    }
  }
}

// Where lengths are known to the device alone: offset past which none of the item's requests has a key. Rows that end earlier
// mask the rest themselves.
__device__ __forceinline__ int bound_limit(const RunParams& p, const WorkItem& item, const PartDesc& part) {
  if (!p.plan->bound_kv_lens) return 0x7fffffff;
  int limit = 0;
#pragma unroll 1
  for (int q = item.q_begin + threadIdx.x % 32; q < item.q_end; q += 32) limit = max(limit, p.plan->bound_kv_lens[part.request[q]]);
  return __reduce_max_sync(0xffffffffu, limit);
}

// Loads the tile under the cursor into a stage. Warp w brings, and later scores, keys w * kWarpKeys onward.
template <class Config, class Variant>
__device__ __forceinline__ void load_tile(const RunParams& p, const Cursor<Config, Variant>& at, char* smem, int stage,
                                          Meta<Layout<Config, Variant>>& meta) {
  using L = Layout<Config, Variant>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key = warp * L::kWarpKeys + lane % L::kWarpKeys;
  const int offset = at.tile + key;
  bool live = offset >= at.item->kv_begin && offset < min(at.item->kv_end, bound_limit(p, *at.item, *at.part));
  long long slot = -1;
  int pos = kDeadKey;
  if (live) {
    const int j = offset - at.list.offset;
    if (at.list.indices) {
      unsigned block, token;
      at.part->block.split(j, block, token);
      const int id = static_cast<int>(block) < at.list.entries ? at.list.indices[block] : -1;
      slot = id < 0 ? -1 : static_cast<long long>(id) * at.part->block.divisor + token;
      pos = at.list.block_pos ? (slot < 0 ? 0 : at.list.block_pos[block] + static_cast<int>(token)) : at.list.pos + j;
    } else {
      slot = at.list.base + j;
      pos = at.list.pos + j;
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
  char* k = smem + L::kOffsetStages + stage * L::kStageBytes + warp * L::kWarpKeys * L::kRawPitchK;
  const long long from_k = live ? slot_offset(p.k, static_cast<unsigned>(slot), at.head) : kNoRow;
  copy_rows<L::kWarpKeys, Config::head_dim, L::kKvBytes, L::kRawPitchK>(p.k, k, from_k, lane);
  if constexpr (!L::kVFromK) {
    char* v = smem + L::kOffsetStages + stage * L::kStageBytes + L::kRawBytesK + warp * L::kWarpKeys * L::kRawPitchV;
    const long long from_v = live ? slot_offset(p.v, static_cast<unsigned>(slot), at.head) : kNoRow;
    copy_rows<L::kWarpKeys, Config::head_dim_vo, L::kKvBytes, L::kRawPitchV>(p.v, v, from_v, lane);
  }
}

}  // namespace attnrt
