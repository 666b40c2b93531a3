// SPDX-License-Identifier: Apache-2.0
// Shared memory of the decode kernel: a ring of stages, each the K or the V of one tile, then P, Q and the row tables.
//
// Four CTAs share an SM, so a CTA has 56 KB: 48 KB of stages, all in flight, is what hides the latency of HBM
// (measured: 64 KB per SM reach 97 % of its rate, 192 KB leave room for four tiles of compute). Stages are swizzled
// instead of padded, since every byte counts.
#pragma once
#include "layout.cuh"

namespace attnrt {

template <class Config, class Variant>
struct DecodeLayout {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTile = 64;
  static constexpr int kWarpKeys = kTile / kWarps;
  static constexpr int kBlocks = Config::q_blocks;  // of 8 query rows
  static constexpr int kRows = 8 * kBlocks;
  static constexpr int kDim = Config::head_dim;
  static constexpr int kWarpCols = kDim / kWarps;  // rows of O^T that a warp accumulates
  static constexpr int kColTiles = kWarpCols / 16;
  static constexpr bool kFp8 = kBytes<Config::kv_type> == 1;
  static_assert(Config::kv_tile == kTile, "one numeric class with the tile kernel");
  static_assert((kDim == 64 || kDim == 128) && Config::head_dim_vo == kDim && !Config::shared_kv,
                "heads that the decode kernel takes");

  static constexpr int kRowBytes = kDim * kBytes<Config::kv_type>;
  static constexpr int kStageBytes = kTile * kRowBytes;
  static constexpr int kStages = 49152 / kStageBytes < 6 ? 49152 / kStageBytes : 6;
  static constexpr int kTiles = kStages / 2 + 1;  // tiles with a key in the ring or in use

  static constexpr bool kHooks = Variant::has_logits || !Variant::mask_is_interval;
  static constexpr int kPitchQ = kDim * 2 + 16;
  static constexpr int kOffsetP = kStages * kStageBytes;
  static constexpr int kOffsetQ = kOffsetP + kBlocks * kTile * 16;
  static constexpr int kOffsetMeta = kOffsetQ + kRows * kPitchQ;
};

// Byte of 16-byte chunk `chunk` of row `row` in a stage, so that ldmatrix meets no bank twice. Rows of 256 bytes lie as
// two slabs.
template <int kRowBytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  if constexpr (kRowBytes == 64) return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
  return chunk / 8 * (64 * 128) + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

// Where the loader of one warp is, in shared memory, where it costs no registers. All lanes write the same numbers, and
// each reads what it wrote itself.
struct DecodeCursor {
  const int* indices;  // listed blocks of the row and head, or null: affine
  const int* block_pos;
  long long base;  // affine: slot of entry 0; else 0
  FastDiv block;
  int offset, entries;  // of the list (KvList)
  int pos_shift;        // position of a key minus its offset, where block_pos is null
  int begin, live_end;  // keys of the item that any of its rows has
  int next, end;        // items of the worker; the cursor is in the one before `next`
  int leaf, leaf_end, pass, passes, head, head_end;
  int tile, stop;  // offset in the request of the tile's first key, end of the leaf's keys
};

// What DecodeMeta::span says of a tile.
constexpr int kAllLive = 1, kLastOfLeaf = 2, kLastOfPass = 4;

template <class L, class Variant>
struct DecodeMeta {
  static constexpr int kRows = L::kRows;
  static constexpr int kMasks = Variant::reads_index_mask ? kRows : 1;
  long long mask_bit[kMasks];  // as in Meta
  DecodeCursor cursors[L::kWarps];
  int pos[L::kTiles][L::kTile];
  int slot[L::kHooks ? L::kTiles : 1][L::kHooks ? L::kTile : 1];
  int4 span[L::kTiles]
           [L::kWarps];  // of a warp's 16 keys: least and largest position of the live ones, flags, offset of the tile
  float reduce[L::kWarps][kRows];
  int qo_row[kRows];
  int qo_head[kRows];
  int qo_pos[kRows];
  int request[kRows];
  int low[kRows];
  int high[kRows];
  int limit[kRows];
  int mask_from[kMasks];
  int low_max, high_min, limit_min, any_mask;
};

}  // namespace attnrt
