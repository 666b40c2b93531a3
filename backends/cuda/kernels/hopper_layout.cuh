// SPDX-License-Identifier: Apache-2.0
// The Hopper prefill family: shared memory, barriers and the walk over a worker's list that loaders and consumers
// share. It runs prefill, append and mixed batches of Attention on sm_90 (docs/performance.md, Prefill);
// benchmarks/experiments/prefill.cu builds, checks and times it, prefill_emulate.sh checks it on a CPU.
//
// One CTA per SM: a loader warpgroup and Config::warpgroups (two or three) consumer warpgroups of 64 rows each.
// Operands lie as wgmma wants them: slabs of 64 elements, a slab row is 128 bytes with the 128-byte swizzle,
// [slab][row][64]. Q and the K and V tiles have two buffers each. Where q is in 8 bits products are, too: slabs have
// 128 elements, and V lies by head dims, [dim][key], for such products want both operands by what they sum over.
#pragma once
#include "cursor.cuh"
#include "finish.cuh"
#include "hopper_ptx.cuh"
#include "types.cuh"

// An experiment's hook: the clock at stage `kind` of tile or pass t, by role: consumer warpgroups 0 and 1, the loader's
// warps for Q 2, rows 3, K 4, V 5.
#ifndef ATTNRT_TRACE
#define ATTNRT_TRACE(role, t, kind)
#endif

namespace attnrt {

// A tensor map (CUtensorMap) by value.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

// How the box loader sees K and V: 4-D maps (head_dim, token, head, page) of boxes (64, 2^box_log2, 1, 1). A pool whose
// tokens have one stride across pages is one page of num_slots tokens (page.divisor 2^31), so that boxes may start at
// any slot.
struct KvMaps {
  TensorMap k, v;
  FastDiv page_k, page_v;
  int box_log2;  // tokens per box, at most kTile; index blocks, cache pages and list offsets are multiples of it, or
                 // the list is affine
};

enum class Loading { boxes, gather };

// Whether K and V of a plan come in the boxes of these maps: what its lists and pages allow must be as large as they.
__device__ __forceinline__ bool reads_boxes(const RunParams& p, const KvMaps& maps) {
  const bool anywhere = maps.page_k.divisor == 1u << 31 && maps.page_v.divisor == 1u << 31;
  return (anywhere ? p.plan->box_log2 : p.plan->page_box_log2) >= maps.box_log2;
}

// Config: q_type (16 bits, or e4m3), kv_type (the same, or 8 bits), out_type; group, head_dim, head_dim_vo (multiples
// of 64), kv_tile, warpgroups.
template <class Config, class Variant>
struct HopperLayout {
  static constexpr int kGroups = Config::warpgroups;
  // What a stage of its own rewrites between load and multiply (hopper_rewrite.cuh).
  static constexpr bool kWidens = Config::kv_type != Config::q_type;
  static_assert(!kWidens || kBytes<Config::kv_type> == 1, "caches in q's type or in 8 bits");
  static constexpr int kElementQ = kBytes<Config::q_type>;
  static constexpr bool kNarrow = kElementQ == 1;  // products of 8-bit numbers
  static constexpr bool kRewritesQ = Variant::has_query;
  static constexpr bool kRewritesK = kWidens || Variant::has_key;
  static constexpr bool kRewritesV = kWidens || kNarrow || Variant::has_value;
  // The hooks on q and K (or on q alone) are a rotation by position, "half" pairing, and its table fits beside those of
  // masks and hooks.
  static constexpr int kTurned = Variant::query_dim == 0 ? Config::head_dim : Variant::query_dim;
  static constexpr bool kTurns =
      Config::turns &&
      (kTurned <= 128 || !(Variant::reads_index_mask || Variant::has_logits || !Variant::mask_is_interval));
  static constexpr int kTurnPairs = kTurns ? kTurned / 2 : 0;
  static constexpr bool kHooks = Variant::has_query || Variant::has_key || Variant::has_value;
  static constexpr bool kRewrites = kRewritesQ || kRewritesK || kRewritesV;
  static_assert(!kNarrow || (Config::q_type == Dtype::e4m3 && !kWidens && !kHooks && Variant::use_softmax),
                "8-bit products of what is stored");
  // Three warpgroups of consumers have few registers: what a loop does not need is found again behind it.
  static constexpr bool kLean = kGroups > 2;
  // A warpgroup does without the last tile of a leaf if none of its rows sees a key of it: with three, the diagonal
  // leaves one of them such a tile in every pass.
  static constexpr bool kSkips = kLean && Variant::mask_is_interval && !Variant::reads_index_mask;
  static constexpr int kThreads = 128 * (kGroups + (kRewrites ? 2 : 1));
  static constexpr int kRows = 64 * kGroups;
  static constexpr int kTile = Config::kv_tile;
  static constexpr int kStages = 2;
  static constexpr int kDim = Config::head_dim;
  static constexpr int kDimVo = Config::head_dim_vo;
  static constexpr int kSlabDims = 128 / kElementQ;  // numbers of a slab's row
  static_assert(kDim % kSlabDims == 0 && kDimVo % kSlabDims == 0 && (!kNarrow || (kDimVo == 128 && kTile == 128)),
                "whole slabs");
  static constexpr int kMaskRows = Variant::reads_index_mask ? kRows : 2;
  // A bias that is linear in the position asks for tables of keys only where positions do not run on. What lies in
  // shared memory may depend on logits by has_logits and logits_need_keys alone: those who bring keys know no more.
  static constexpr bool kLinear = Variant::linear_bias, kStarts = Variant::has_logits;
  // Scores capped by a tanh: HopperSoftmax::raise_capped, which is not made for masks of bits.
  static constexpr bool kCapped = Variant::is_capped && !Variant::reads_index_mask;
  // Scores that are multiplied by a number of their row and nothing else: part of what makes them exponents.
  static constexpr bool kScaled = Variant::is_scaled;
  static constexpr bool kNeedsSlots =
      Variant::logits_need_keys || !Variant::mask_is_interval || (Variant::has_key && !kTurns) || Variant::has_value;
  // The table of keys, whatever the list.
  static constexpr bool kNeedsKeys = kNeedsSlots || Variant::has_key;

  static constexpr int kSlabQ = kRows * 128;  // bytes of one slab
  static constexpr int kSlabKv = kTile * 128;
  static constexpr int kBytesQ = kSlabQ * (kDim / kSlabDims);
  static constexpr int kBytesK = kSlabKv * (kDim / kSlabDims);
  static constexpr int kBytesV = kSlabKv * (kDimVo / kSlabDims);
  // Slabs of a tile as it is loaded, 128 bytes of each row in each; they are the last ones of the stage.
  static constexpr int kElementKv = kBytes<Config::kv_type>;
  static constexpr int kRawSlabsK = (kDim * kElementKv + 127) / 128;
  static constexpr int kRawSlabsV = (kDimVo * kElementKv + 127) / 128;
  static constexpr int kRawK = kBytesK - kRawSlabsK * kSlabKv;
  static constexpr int kRawV = kBytesV - kRawSlabsV * kSlabKv;
  // Two buffers of Q where they fit beside the tiles and 20 KB of tables; else one, and each warpgroup's half of it has
  // barriers of its own, because it is free as soon as that warpgroup has its last scores.
  static constexpr int kBuffersQ = 2 * kBytesQ + kStages * (kBytesK + kBytesV) <= 207 * 1024 ? 2 : 1;
  static constexpr int kOffsetK = kBuffersQ * kBytesQ;
  static constexpr int kOffsetV = kOffsetK + kStages * kBytesK;
  // Float32 sums of 8-bit products (hopper_kept.cuh), and the keys after which O goes there.
  static constexpr bool kKeeps = kNarrow && Config::two_level;
  static_assert(!kKeeps || kGroups == 2, "kKeptStride");
  static constexpr int kBytesKept = kKeeps ? 128 * kGroups * kDimVo / 2 * 4 : 0;
  static constexpr int kKeptKeys = 512;
  static constexpr int kOffsetKept = kOffsetV + kStages * kBytesV;
  static constexpr int kOffsetMeta = kOffsetKept + kBytesKept;
  // Passes whose tables are there at once: they are written two passes ahead of Q, because passes of one tile leave no
  // time for them. 6 KB each, where they fit.
  static constexpr int kTables = Variant::reads_index_mask || kOffsetMeta > 193 * 1024 ? 2 : 4;
  // What follows from a row's entry is worked out by the loader where its table fits, else by consumers.
  static constexpr bool kWorkedOut = kOffsetMeta <= 193 * 1024;
  // Rows of a tile whose places the gather deals out at a time: all of them, where their table fits.
  static constexpr int kDealt = kTurns && !kWorkedOut ? 32 : kTile;
  // Finished rows of 16 bits go through shared memory, 1 KB for each consumer warp, where it fits.
  static constexpr bool kStaged =
      kBytes<Config::out_type> == 2 && !kTurns && (kWorkedOut || !Variant::reads_index_mask);
  // They are written among the exponentials of the next pass's first tile in forms whose registers have room for it.
  static constexpr bool kLate = kStaged && kDim == kDimVo && kDim <= 128 && Variant::mask_is_interval &&
                                Variant::use_softmax && !Variant::has_logits && !Variant::reads_index_mask &&
                                !Variant::has_output && !kRewrites && !Config::folds;
  __device__ __forceinline__ static int table(int pass) { return pass & (kTables - 1); }
};

// One pass: up to kRows rows of an item under one KV head.
struct PassRecord {
  WorkItem item;
  int head, first;
  int begin, stop;  // first tile and one past the last key of the item's first leaf
  int runs;         // 1: positions run on with offsets, and no key between the first and the last is missing
  int shift, live_begin,
      live_end;  // then: position of offset 0 and the offsets of the keys that are there, end >= begin
  int done;      // 1: no pass, the list has ended
};

// What a loader needs of a pass beside its record. One warp reads the plan, a few passes ahead of all others:
// a walk is a chain of loads that take six hundred clocks each.
struct PassKeys {
  KvList list;
  int low, high, live_low, live_high, shift;  // HopperKeys::Tile
  FastDiv block;                              // of the part
  const int* qo_index;                        // of the part
};

// The plan's rulers and the part at hand, of the warp that reads the plan; a header has them so with its first part.
struct PlanTables {
  RulerDesc rulers[kMaxClasses];
  PartDesc part;
};
static_assert(sizeof(RulerDesc) * kMaxClasses % alignof(PartDesc) == 0, "nothing between rulers and parts");

// The first pass of a worker of this kernel, behind the header in the place of other workers' first items where those
// have none (native/first.cpp): Q, K and V are asked for after one wait for memory and some twenty instructions.
struct FirstPass {
  PassRecord pass;
  int there;  // 0: this worker's is not known
  PassKeys keys;
  int items_begin, items_end;  // the worker's, this one with them
  int pad[18];
};
static_assert(sizeof(FirstPass) == 2 * sizeof(FirstItem) && sizeof(PassRecord) == 92 && sizeof(PassKeys) == 80,
              "two lines, known to native/first.cpp");

// Offset of the first live key at or past a position, and one past the last at or before it; clamped first, because the
// subtraction may overflow.
template <class Pass>
__device__ __forceinline__ int offset_from(const Pass& pass, int pos) {
  return min(max(pos, pass.shift + pass.live_begin), pass.shift + pass.live_end) - pass.shift;
}
template <class Pass>
__device__ __forceinline__ int offset_past(const Pass& pass, int pos) {
  return max(min(pos, pass.shift + pass.live_end - 1), pass.shift + pass.live_begin - 1) - pass.shift + 1;
}

// What 32 consecutive keys of a tile have in common, where the pass does not say it (PassRecord::runs).
struct alignas(16) KeyRange {
  int low, high;  // positions of live keys
  int base;       // kKeysRun: position of the first key
  int kind;       // kKeysLive | kKeysRun
};
constexpr long long kNothing = -0x7fffffffffffffffLL - 1;
constexpr int kKeysLive = 1;  // all are there
constexpr int kKeysRun = 2;   // those that are there lie side by side and their positions ascend by one

// What loaders tell consumers, and the barriers. A pass record and its row table are one, and so are a stage of K and
// its key table. Q goes its own way: its buffer is free when the last scores of a pass are there, a table when its rows
// are written, one tile later and more.
template <class L>
struct HopperMeta {
  int pos[L::kStages][L::kTile];  // positions of the keys; kDeadKey: no key
  int slot[L::kStages][L::kNeedsSlots ? L::kTile : 4];
  KeyRange range[L::kStages][4];  // by 32 keys
  // For hooks on scores, where positions do not run on: by 32 keys the position of the first one, counted back from the
  // first that exists, kDeadKey if none does.
  alignas(16) int start[L::kStages][L::kStarts ? 4 : 1];
  int4 row[L::kTables][L::kRows];  // row of q and out (-1: none), position, lowest and highest visible key position
  int2 row_request[L::kTables][L::kRows];               // request; its true length where the host only knew a bound
  int2 seen[L::kTables][L::kWorkedOut ? L::kRows : 2];  // offsets that the row sees where positions run on: [x, y)
  long long out_at[L::kTables][L::kWorkedOut ? L::kRows : 2];  // elements of the row's place in out; kNothing: no row
  // By 32 rows, of those that are there: highest lowest visible position, lowest highest one, shortest true length, and
  // the first offset that a mask of some row's own speaks of, or (kSkips) one past the last that some row sees.
  int4 span[L::kTables][L::kRows / 32];
  long long mask_bit[L::kTables][L::kMaskRows];  // of the key at offset 0, counted from address 0
  int mask_from[L::kTables][L::kMaskRows];
  alignas(16) int unit[2][L::kDealt];  // gather: where the rows of a tile of K and of V lie (copy_tile)
  alignas(L::kStaged ? 64 : 4) char staged[L::kStaged ? 4 * L::kGroups : 1][L::kStaged ? 1024 : 4];
  PassRecord pass[L::kTables];
  PassKeys keys[L::kTables];
  PlanTables tables;
  unsigned long long table_full[L::kTables], table_empty[L::kTables];
  unsigned long long pass_full[L::kTables];  // what loaders ask of a pass is there, its rows not yet
  unsigned long long q_full[2], q_empty[2];  // where Q has two buffers
  unsigned long long k_full[L::kStages], k_empty[L::kStages];
  unsigned long long v_full[L::kStages], v_empty[L::kStages];
  unsigned long long patch;
  alignas(16) float2 turns[L::kTurns ? 14 * L::kTurnPairs : 1];  // TurnTable of hopper_rewrite.cuh
  // What is loaded but still to be rewritten; q_raw by buffer, or by half where there is one.
  unsigned long long q_raw[L::kRewritesQ ? 2 : 1];
  unsigned long long k_raw[L::kRewritesK ? L::kStages : 1], v_raw[L::kRewritesV ? L::kStages : 1];
  unsigned long long half_full[L::kBuffersQ == 1 ? L::kGroups : 1], half_empty[L::kBuffersQ == 1 ? L::kGroups : 1];
};

template <class Config, class Variant>
__host__ __device__ constexpr int hopper_smem_bytes() {
  return HopperLayout<Config, Variant>::kOffsetMeta + sizeof(HopperMeta<HopperLayout<Config, Variant>>);
}

// First tile and one past the last key of a leaf, as an item sees it. A leaf without keys still has one tile, of dead
// keys, so that its rows are written by the same code as all others.
template <int kTile>
__device__ __forceinline__ void leaf_range(const RulerDesc& of, int kv_begin, int kv_end, int leaf, int& first,
                                           int& stop) {
  // RulerDesc::start of this leaf and the next: all is loaded before any of it is used, a load may take 600 clocks.
  const RulerDesc ruler = of;
  int start = 0, size = ruler.tail;
  bool found = false;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int n = min(leaf, ruler.count[i]);
    start += n * ruler.size[i];
    leaf -= n;
    size = !found && n < ruler.count[i] ? ruler.size[i] : size;
    found = found || n < ruler.count[i];
  }
  start += leaf * ruler.tail;
  first = first_tile<kTile>(start, kv_begin);
  stop = max(min(start + size, kv_end), first + 1);
}
template <int kTile>
__device__ __forceinline__ void leaf_range(const RunParams& p, const WorkItem& item, int leaf, int& first, int& stop) {
  leaf_range<kTile>(p.plan->rulers[item.klass], item.kv_begin, item.kv_end, leaf, first, stop);
}

}  // namespace attnrt
