// SPDX-License-Identifier: Apache-2.0
// Rows of Q, K and V as the Hopper prefill family's loaders copy them one by one into a swizzled tile: 16 bytes at a
// time, or number by number; the bits are the same.
#pragma once
#include "hopper_layout.cuh"
#include "loader.cuh"

namespace attnrt {

// A row in global memory as a multiple of 16 bytes from the tensor's start: 32 GiB before and behind it (strides may be
// negative). Rows beyond that take copy_far.
constexpr int kNoUnit = -0x7fffffff - 1;
template <int kElement>
__device__ __forceinline__ bool is_near(long long element) {
  return element == kNoRow ||
         static_cast<unsigned long long>((element >> (kElement == 2 ? 3 : 4)) + 0x7fffffff) <= 0xfffffffeull;
}
template <int kElement>
__device__ __forceinline__ int unit_of(long long element) {
  return element == kNoRow ? kNoUnit : static_cast<int>(element >> (kElement == 2 ? 3 : 4));
}

// Copies 32 rows of kColumns * 2 bytes into rows row0... (row0 a multiple of 32) of a swizzled tile: lane i holds
// the place of row row0 + i. Three instructions a copy: the row's unit from the lane that has it (places are dealt out
// first, so that a group of kLanes lanes finds all of its own within itself), an address, the copy. Not unrolled: these
// are rows at the ends of requests, and what every variant compiles should be short.
template <int kColumns, int kSlab>
__device__ __forceinline__ void copy_rows(const char* src, unsigned tile, int row0, int unit, int lane) {
  constexpr int kChunks = kColumns / 8;        // 16-byte chunks per row: 8 or 16, or 24, 32
  constexpr int kPer = kChunks >= 16 ? 2 : 4;  // rows per instruction
  constexpr int kLanes = 32 / kPer;            // lanes per row
  const int sub = lane / kLanes, chunk0 = lane % kLanes;
  const char* mine = ptx::opaque(src + chunk0 * 16);
  const unsigned to = tile + chunk0 / 8 * kSlab + (row0 + sub) * 128 + ((chunk0 ^ sub) & 7) * 16;
  const int own = __shfl_sync(0xffffffffu, unit, lane % kLanes * kPer + sub);
#pragma unroll 1
  for (int i = 0; i < 32; i += 8) {
    int from[8 / kPer];
#pragma unroll
    for (int j = 0; j < 8 / kPer; ++j) from[j] = __shfl_sync(0xffffffffu, own, i / kPer + j, kLanes);
#pragma unroll
    for (int j = 0; j < 8 / kPer; ++j) {
      const bool there = from[j] != kNoUnit;
      const char* at = mine + (there ? static_cast<long long>(from[j]) * 16 : 0);
#pragma unroll
      for (int c = 0; c < kChunks; c += kLanes) {
        const unsigned dst = (to ^ j * kPer * 16) + (i + j * kPer) * 128 + c / 8 * kSlab;
        if (kChunks % kLanes == 0 || c + chunk0 < kChunks) ptx::cp_async16(dst, at + c * 16, there ? 16 : 0);
      }
    }
  }
}

// The same for all rows of a tile, by one warp, none of them missing: lane i has the units of rows i, 32 + i, ...
// They are dealt out through shared memory (`units`), kDealt rows at a time and four to a read: an address and a copy
// are all that each copy costs.
template <int kColumns, int kSlab, int kDealt, int kParts>
__device__ __forceinline__ void copy_tile(const char* src, unsigned tile, const int (&unit)[kParts], int* units,
                                          int lane) {
  constexpr int kChunks = kColumns / 8, kPer = kChunks >= 16 ? 2 : 4, kLanes = 32 / kPer;
  constexpr int kMine = kDealt / kPer;  // of them this lane's: those of one place among kPer
  const int sub = lane / kLanes, chunk0 = lane % kLanes;
  const char* mine = ptx::opaque(src + chunk0 * 16);
  const unsigned to = tile + chunk0 / 8 * kSlab + sub * 128 + ((chunk0 ^ sub) & 7) * 16;
  unsigned swizzled[4];  // rows that are a multiple of 8 apart have the same
#pragma unroll
  for (int j = 0; j < 4; ++j) swizzled[j] = to ^ (j * kPer & 7) * 16;
  const int4* here = reinterpret_cast<const int4*>(units + sub * kMine);
#pragma unroll
  for (int row0 = 0; row0 < kParts * 32; row0 += kDealt) {
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kDealt / 32; ++part) {
      units[lane % kPer * kMine + (part * 32 + lane) / kPer] = unit[row0 / 32 + part];
    }
    __syncwarp();
    int4 ahead = here[0];
#pragma unroll
    for (int first = 0; first < kMine; first += 4) {
      const int4 u = ahead;
      if (first + 4 < kMine) ahead = here[first / 4 + 1];  // before the copies: none of them waits for it
      const char* at[4] = {mine + static_cast<long long>(u.x) * 16, mine + static_cast<long long>(u.y) * 16,
                           mine + static_cast<long long>(u.z) * 16, mine + static_cast<long long>(u.w) * 16};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < kChunks; c += kLanes) {
          const unsigned dst = swizzled[j] + (row0 + (first + j) * kPer) * 128 + c / 8 * kSlab;
          if (kChunks % kLanes == 0 || c + chunk0 < kChunks) ptx::cp_async16(dst, at[j] + c * 16);
        }
      }
    }
  }
}

// The same for 32 rows of Q that are all there and lie at even distances: row r is query r / kGroup, head r % kGroup, a
// query step_row bytes behind the one before, a head step_head. A third of the instructions.
template <int kColumns, int kSlab, int kGroup>
__device__ __forceinline__ void copy_even(const char* src, unsigned tile, int row0, long long step_row,
                                          long long step_head, int lane) {
  constexpr int kChunks = kColumns / 8, kPer = kChunks >= 16 ? 2 : 4, kLanes = 32 / kPer;
  constexpr int kHeads = kGroup > kPer ? kGroup / kPer : 1;    // instructions per query
  constexpr int kQueries = kGroup > kPer ? 1 : kPer / kGroup;  // queries per instruction
  static_assert(32 % kGroup == 0, "rows of a query in one call");
  const int sub = lane / kLanes, chunk0 = lane % kLanes;
  const unsigned to = tile + chunk0 / 8 * kSlab + (row0 + sub) * 128 + ((chunk0 ^ sub) & 7) * 16;
  const char* from[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    from[i] =
        src + row0 / kGroup * step_row + sub / kGroup * step_row + (i * kPer + sub % kGroup) * step_head + chunk0 * 16;
  }
#pragma unroll
  for (int i = 0; i < 32; i += kPer) {
    const char*& at = from[i / kPer % kHeads];
#pragma unroll
    for (int c = 0; c < kChunks; c += kLanes) {
      if (kChunks % kLanes == 0 || c + chunk0 < kChunks) {
        ptx::cp_async16((to ^ (i & 7) * 16) + i * 128 + c / 8 * kSlab, at + c * 16);
      }
    }
    at += kQueries * step_row;
  }
}

// The same for rows anywhere; lane i holds the offset of row row0 + i in elements.
template <int kColumns, int kSlab, int kElement>
__device__ __forceinline__ void copy_far(const char* src, unsigned tile, int row0, long long offset, int lane) {
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const long long from = __shfl_sync(0xffffffffu, offset, i);
    const unsigned dst = tile + lane / 8 * kSlab + (row0 + i) * 128 + ((lane ^ (row0 + i)) & 7) * 16;
    const char* at = src + (from == kNoRow ? 0 : from) * kElement + lane * 16;
    if (lane < kColumns / 8) ptx::cp_async16(dst, at, from == kNoRow ? 0 : 16);
  }
}

template <int kColumns, int kSlab, int kElement>
__device__ __forceinline__ void gather_rows(const char* src, unsigned tile, int row0, long long offset, int lane) {
  if (!__all_sync(0xffffffffu, is_near<kElement>(offset))) {
    return copy_far<kColumns, kSlab, kElement>(src, tile, row0, offset, lane);
  }
  copy_rows<kColumns, kSlab>(src, tile, row0, unit_of<kElement>(offset), lane);
}

// The same, two bytes at a time, for rows that 16-byte copies cannot reach.
template <int kColumns, int kSlab, int kElement>
__device__ __forceinline__ void gather_numbers(const char* src, unsigned tile, int row0, long long offset, int lane) {
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const long long from = __shfl_sync(0xffffffffu, offset, i);
    const int row = row0 + i;
#pragma unroll 1
    for (int d = lane * 2; d < kColumns; d += 64) {
      const char* at = src + (from == kNoRow ? 0 : from) * kElement + d * 2;
      unsigned x = 0;
      if (from != kNoRow) {
        if constexpr (kElement == 2) {
          const unsigned short* y = reinterpret_cast<const unsigned short*>(at);
          x = y[0] | static_cast<unsigned>(y[1]) << 16;
        } else {
          const unsigned char* y = reinterpret_cast<const unsigned char*>(at);
          x = y[0] | static_cast<unsigned>(y[1]) << 8 | static_cast<unsigned>(y[2]) << 16 |
              static_cast<unsigned>(y[3]) << 24;
        }
      }
      ptx::st_shared(tile + d / 64 * kSlab + row * 128 + ((d / 8 ^ row) & 7) * 16 + d % 8 * 2, x);
    }
  }
}

// By 16-byte copies where `vectors`, else number by number: the bits are the same. Offsets in elements of
// kElement bytes, kColumns * 2 bytes a row.
template <int kColumns, int kSlab, int kElement>
__device__ __forceinline__ void gather_any(bool vectors, const char* src, unsigned tile, int row0, long long offset,
                                           int lane) {
  if (vectors) {
    gather_rows<kColumns, kSlab, kElement>(src, tile, row0, offset, lane);
  } else {
    gather_numbers<kColumns, kSlab, kElement>(src, tile, row0, offset, lane);
  }
}

}  // namespace attnrt
