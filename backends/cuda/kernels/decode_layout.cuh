// SPDX-License-Identifier: Apache-2.0
// Shared memory of the decode kernel. A CTA is several groups of four warps that compute and one that loads; each group
// is a worker of the plan. They share a ring of stages, each the K or the V of one tile; a group has its own P, Q and
// tables that its loading warp writes for the computing ones.
//
// An SM has one CTA of four groups (fewer where shared memory is smaller: the launch decides). Where all groups have
// work each has 48 KB of the ring in flight, which is what hides the latency of HBM (measured: 64 KB per SM reach 97 %
// of its rate, 192 KB leave room for four tiles of compute). Where fewer have, those share all of it. Stages are
// swizzled instead of padded, since every byte counts.
#pragma once
#include "cursor.cuh"
#include "layout.cuh"

namespace attnrt {

template <class Config, class Variant>
struct DecodeLayout {
  static constexpr int kWarps = 4;  // that compute; one more loads
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kGroupThreads = kThreads + 32;
  static constexpr int kMostGroups = 4;
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
  static constexpr int kStages = 49152 / kStageBytes < 6 ? 49152 / kStageBytes : 6;  // of each group
  static constexpr int kMostStages = kMostGroups * kStages;
  static constexpr int kTiles = kStages / 2 + 1;  // tiles with a key in so many stages or in use

  static constexpr bool kHooks = Variant::has_logits || !Variant::mask_is_interval;
  static constexpr int kSets = kBlocks == 1 && !kHooks ? 2 : 1;  // of Q and its tables: the next pass is laid out early
  static constexpr int kSlots = kBlocks == 1 ? 64 : 16;
  // Of a merge's columns, where there are fewer heads than warps.
  static constexpr int kSlices = Config::group == 1 && kDim == 128 ? 4 : Config::group <= 2 ? 2 : 1;
  // Whether a merge's states come through the group's stages, where nobody wants those any more: behind a worker's last
  // pass. Nowhere where ptxas would spill around the loop over tiles, or where slices leave one column or two to a
  // lane.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kStreams = false;
#else
  static constexpr bool kStreams = kBlocks == 1 && kSlices == 1;
#endif
  // Else so many accumulators are in flight.
  static constexpr int kMergeBatch = (kBlocks == 2 || kStreams ? 2 : 8) * (kSlices == 2 ? 2 : 1);
  static constexpr int kPitchQ = kDim * 2 + 16;
  // In a group's own memory.
  static constexpr int kOffsetP = 0;
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

// What DecodeTile::span says. kDense: its positions rise by one from key to key, and no table says more (but
// for hooks). kOver: there is none, nor any after it.
constexpr int kAllLive = 1, kLastOfLeaf = 2, kLastOfPass = 4, kOver = 8, kDense = 16;

// The query rows of a pass (as in Meta) and what becomes of them.
template <class L, class Variant>
struct DecodeRows : RowTable<L::kRows, Variant> {
  static constexpr int kRows = L::kRows;
  int head, first, part;    // of the item; row at which the pass starts
  int slot, queries, fold;  // WorkItem
  int last;                 // no pass of the worker comes after this one
  const int* slots;         // of the merge list, or a copy of a piece of it, by place in the list
  // Of the first row of each query (others: -1): the counter of its states, and their range in the merge list.
  int counter[kRows], merge_begin[kRows], merge_end[kRows];
};

// The beginning of PlanHeader, up to and with its first part, word by word.
constexpr int kTopOfPlan = 512;  // bytes that it may have
struct alignas(16) TopOfPlan {
  static constexpr int kWords = (sizeof(PlanHeader) - (kMaxParts - 1) * sizeof(PartDesc)) / 4;
  int words[kWords];
};
static_assert(sizeof(TopOfPlan) <= kTopOfPlan, "what the host adds to the groups' memory");

// Keys of a tile.
template <class L>
struct alignas(16) DecodeTile {
  int4 span;  // least and largest position of the live keys, flags, offset of the tile
  int pos[L::kTile];
  int slot[L::kHooks ? L::kTile : 4];
};

template <class L, class Variant>
struct DecodeMeta {
  unsigned long long full[L::kMostStages], empty[L::kMostStages];  // barriers
  unsigned long long open[L::kSets], spare[L::kSets];              // the set's rows and Q are laid out, are done with
  // Of the loading warp, whichever group it loads for: where it is.
  FirstItem first;  // of the worker; its item is overwritten by later ones
  KvList list;      // at hand
  int live_end;     // keys of the item that any of its rows has
  // Of the group.
  int stages, tiles;     // stages of the ring that are this group's, and tables of tiles
  int ring, first_tile;  // where they begin: bytes into shared memory
  int top;               // and where TopOfPlan lies
  DecodeRows<L, Variant> rows[L::kSets];
  float reduce[L::kWarps][L::kRows];  // maxima
  float sums[L::kWarps][L::kRows];
  int slots[L::kSlots];        // of the first item's states in the merge list, where they are so few
  unsigned passes[L::kWarps];  // that each warp is through with
  unsigned last;               // bit r: the query that begins with row r has all its states
};

// Warps that load for a group of warps that compute, tile by tile in turn: of which group, this one's place among them,
// how many they are. A place past the last: nobody's.
struct DecodeTeam {
  int group, place, size;
};

// Where everything lies: the ring, each group's own memory, the tables of tiles, the top of the plan's header.
template <class Config, class Variant>
struct DecodeMemory {
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;
  using Tile = DecodeTile<L>;
  static constexpr int kOne = round_up(L::kOffsetMeta + static_cast<int>(sizeof(M)), 16);
  static constexpr int kRing = L::kStages * L::kStageBytes;
  static constexpr int kTileBytes = static_cast<int>(sizeof(Tile));
  // Dynamic shared memory: so much for each group of a CTA, and kTopOfPlan.
  static constexpr int kGroupBytes = kRing + kOne + L::kTiles * kTileBytes;

  char* smem;
  int groups;  // of the CTA

  // Warps that compute, four for each group, come first.
  __device__ __forceinline__ bool loads(int warp) const { return warp >= groups * L::kWarps; }
  __device__ __forceinline__ int group_of(int warp) const {
    return loads(warp) ? warp - groups * L::kWarps : warp / L::kWarps;
  }
  __device__ __forceinline__ char* own(int group) const { return smem + groups * kRing + group * kOne; }
  __device__ __forceinline__ TopOfPlan& top() const {
    return *reinterpret_cast<TopOfPlan*>(smem + groups * kGroupBytes);
  }
  __device__ __forceinline__ const PlanHeader& plan() const { return reinterpret_cast<const PlanHeader&>(top()); }
  __device__ __forceinline__ Tile* tiles(const M& meta) const {
    return reinterpret_cast<Tile*>(smem + meta.first_tile);
  }

  // Groups of the CTA that have work, the first ones; at least one.
  __device__ __forceinline__ int busy_of(int workers) const {
    // Without a division: many instructions, one after the other, before anything is asked for.
    int busy = 1;
#pragma unroll
    for (int i = 1; i < L::kMostGroups; ++i)
      busy += i < groups && workers > static_cast<int>(i * gridDim.x + blockIdx.x);
    return busy;
  }

  // The loading warps of groups without work fill the rings of those that have some, where all get equally many.
  __device__ __forceinline__ DecodeTeam team_of(int group, int busy, int most) const {
    DecodeTeam team{group, 0, 1};
#pragma unroll
    for (int i = 1; i < L::kMostGroups; ++i) {
      team.place += group >= i * busy;
      team.size += (i + 1) * busy <= groups && i < most;
    }
    team.group -= team.place * busy;
    return team;
  }

  // What of the ring is the group's: it is shared by those groups of the CTA that have work.
  __device__ __forceinline__ void share(M& meta, int group, int busy) const {
    static_assert(L::kMostGroups == 4 && L::kMostStages < 256, "1 / 3 is 171 / 512 for numbers so small");
    const auto part = [&](int x) { return busy == 3 ? x * 171 >> 9 : x >> busy / 2; };
    const int tables = part(groups * L::kTiles), stages = min(part(groups * L::kStages), 2 * tables - 1);
    meta.stages = stages;
    meta.top = groups * kGroupBytes;
    meta.tiles = stages / 2 + 1;
    meta.ring = group * stages * L::kStageBytes;
    // A group without work has nothing of both; what it says to its own warps lies where P would.
    const int place = groups * (kRing + kOne) + group * meta.tiles * kTileBytes;
    meta.first_tile = group < busy ? place : static_cast<int>(own(group) + L::kOffsetP - smem);
  }
};

}  // namespace attnrt
