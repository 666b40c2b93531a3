// SPDX-License-Identifier: Apache-2.0
// Shared memory of the wide kernel (wide.cuh): the folded accumulators of a pass's rows, and Q before them; a ring of
// stages, each the K or the V of one tile; the tables that the loading warps write for the computing ones.
//
// Two CTAs share an SM. Operands lie as wgmma wants them: slabs of 64 elements, a row of a slab is 128 bytes under the
// 128-byte swizzle, [slab][row][64].
#pragma once
#include "cursor.cuh"
#include "hopper_ptx.cuh"
#include "layout.cuh"

namespace attnrt {

template <class Config, class Variant>
struct WideLayout {
  static constexpr int kGroups = 1;   // warpgroups that compute, of 64 rows each
  static constexpr int kLoaders = 4;  // warps that load
  static constexpr int kThreads = 128 * (kGroups + 1);
  static constexpr int kRows = 64 * kGroups;
  static_assert(kGroups == 1 && kRows == kLoaders * 16, "a loading warp for the rows of each that computes");
  static constexpr int kTile = 64;
  static constexpr int kDim = Config::head_dim;
  static_assert(Config::kv_tile == kTile, "one numeric class with the tile kernel");
  static_assert((kDim == 64 || kDim == 128) && Config::head_dim_vo == kDim && !Config::shared_kv,
                "heads that the wide kernel takes");
  static_assert(!Variant::has_query && !Variant::has_key && !Variant::has_value, "no hooks on q, k, v");

  static constexpr int kSlabQ = kRows * 128;  // bytes of one slab
  static constexpr int kSlabKv = kTile * 128;
  static constexpr int kBytesQ = kSlabQ * (kDim / 64);
  static constexpr int kStageBytes = kSlabKv * (kDim / 64);
  static constexpr int kStages = kDim == 64 ? 8 : 4;
  static constexpr int kTiles = kStages / 2 + 1;  // tiles with a key in the ring or in use
  static constexpr bool kHooks = Variant::has_logits || !Variant::mask_is_interval;

  // Q comes by shared memory into registers; its place is the first half of that of the folded accumulators. States on
  // their way to memory lie there, too, in rows of kPitch bytes: eight rows' words fall into as many banks.
  static constexpr int kPitch = kDim * 4 + 32;
  static constexpr int kBytesTotal = kRows * kPitch;
  static constexpr int kOffsetStages = kBytesTotal;
  static constexpr int kOffsetMeta = kOffsetStages + kStages * kStageBytes;

  // Byte of 16-byte chunk `chunk` of a row, in slabs of kSlab bytes.
  template <int kSlab>
  __device__ __forceinline__ static int place_of(int row, int chunk) {
    return chunk / 8 * kSlab + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
  }
};

// Boxes of 16 tokens: the maps of a run that has this kernel are of such ones (backends/cuda/kernel.py), or are none.
constexpr int kWideBoxLog2 = 4;

// What WideMeta::span says of a loading warp's 16 keys, and of the tile. kWideRuns: the list's positions run on, and
// the upper half has a bit for each key that is there. kWideWhole, to the computing warp of the same number: its rows
// see all of the tile (not said of a pass's first).
constexpr int kWideLive = 1, kWideEndsLeaf = 2, kWideEndsPass = 4, kWideOver = 8, kWideCopied = 16, kWideRuns = 32,
              kWideWhole = 64, kWideAll = static_cast<int>(0xffff0000u) | kWideRuns | kWideLive;

// The query rows of a pass that one warp multiplies, as fill_rows lays them out; the loading warp of the same number
// does.
constexpr int kWideRows = 16;
template <class Variant>
using WideRows = RowTable<kWideRows, Variant>;

struct WidePass {
  int head, first, part, rows;       // of the item; row at which the pass starts; rows from there on
  int slot, leaf_states, fold, pad;  // leaf_states: of a leaf, from one leaf's states to the next one's
};

template <class L, class Variant>
struct WideMeta {
  unsigned long long full[L::kStages], empty[L::kStages];  // barriers
  unsigned long long spare;                                // the pass's rows are done with
  PlanHeader plan;
  FirstItem first[L::kLoaders];  // the item at hand in each loading warp; at first, all that its worker's line says
  KvList list[L::kLoaders];      // and its keys under the head at hand
  int live_end[L::kLoaders];     // those of the item that any of its rows has
  // Least and largest position of the live keys, flags, offset of the tile (of the second: position of its first key,
  // where positions run on).
  int4 span[L::kTiles][L::kLoaders];
  WidePass pass;
  WideRows<Variant> rows[L::kRows / kWideRows];
  int state[L::kRows];  // place of each row's state, of the first leaf; -1: there is no such row
  float4 leaf[128 * L::kGroups], total[128 * L::kGroups];  // maxima and sums of the last leaf, of those folded before
  int pos[L::kTiles][L::kTile];
  int slot[L::kHooks ? L::kTiles : 1][L::kHooks ? L::kTile : 1];
};

template <class Config, class Variant>
__host__ __device__ constexpr int wide_smem_bytes() {
  return WideLayout<Config, Variant>::kOffsetMeta + sizeof(WideMeta<WideLayout<Config, Variant>, Variant>);
}

}  // namespace attnrt
