// SPDX-License-Identifier: Apache-2.0
// Shared memory of the decode kernel: a ring of stages, each the K or the V of one tile, then P, Q, and the tables that
// the loading warp writes for the computing ones.
//
// Four CTAs share an SM, so a CTA has 56 KB: 48 KB of stages, all in flight, is what hides the latency of HBM
// (measured: 64 KB per SM reach 97 % of its rate, 192 KB leave room for four tiles of compute). Stages are swizzled
// instead of padded, since every byte counts.
#pragma once
#include "layout.cuh"

namespace attnrt {

template <class Config, class Variant>
struct DecodeLayout {
  static constexpr int kWarps = 4;  // that compute; one more loads
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
  static constexpr int kSets = kBlocks == 1 && !kHooks ? 2 : 1;  // of Q and its tables: the next pass is laid out early
  static constexpr int kMergeBatch = kBlocks == 1 ? 8 : 4;
  static constexpr int kPitchQ = kDim * 2 + 16;
  static constexpr int kOffsetP = kStages * kStageBytes;
  static constexpr int kOffsetQ = kOffsetP + kBlocks * kTile * 16;
  static constexpr int kOffsetMeta = kOffsetQ + kSets * kRows * kPitchQ;
};

// Byte of 16-byte chunk `chunk` of row `row` in a stage, so that ldmatrix meets no bank twice. Rows of 256 bytes lie as
// two slabs.
template <int kRowBytes>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  if constexpr (kRowBytes == 64) return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
  return chunk / 8 * (64 * 128) + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

// What DecodeMeta::span says of a tile. kDense: its positions rise by one from key to key, and no table says more (but
// for hooks). kOver: there is none, nor any after it.
constexpr int kAllLive = 1, kLastOfLeaf = 2, kLastOfPass = 4, kOver = 8, kDense = 16;

// The query rows of a pass (as in Meta) and what becomes of them.
template <class L, class Variant>
struct DecodeRows {
  static constexpr int kRows = L::kRows;
  static constexpr int kMasks = Variant::reads_index_mask ? kRows : 1;
  long long mask_bit[kMasks];
  int qo_row[kRows];
  int qo_head[kRows];
  int qo_pos[kRows];
  int request[kRows];
  int low[kRows];
  int high[kRows];
  int limit[kRows];
  int mask_from[kMasks];
  int low_max, high_min, limit_min, any_mask;
  int head, first, part;    // of the item; row at which the pass starts
  int slot, queries, fold;  // WorkItem
  // Of the first row of each query (others: -1): the counter of its states, and their range in the merge list.
  int counter[kRows], merge_begin[kRows], merge_end[kRows];
};

template <class L, class Variant>
struct DecodeMeta {
  unsigned long long full[L::kStages], empty[L::kStages];  // barriers
  unsigned long long spare[L::kSets];                      // the set's rows are done with
  WorkItem item;                                           // at hand in the loading warp
  int4 span[L::kTiles];  // least and largest position of the live keys, flags, offset of the tile
  DecodeRows<L, Variant> rows[L::kSets];
  float reduce[L::kWarps][L::kRows];  // maxima
  float sums[L::kWarps][L::kRows];
  int last[L::kRows];  // the query that begins with this row has all its states
  int pos[L::kTiles][L::kTile];
  int slot[L::kHooks ? L::kTiles : 1][L::kHooks ? L::kTile : 1];
};

}  // namespace attnrt
