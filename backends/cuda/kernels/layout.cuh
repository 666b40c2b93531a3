// SPDX-License-Identifier: Apache-2.0
// Shared memory of the tile kernel, as constants of its configuration. The host computes the same total (render.py asks
// the compiled kernel through attnrt_smem_bytes), so that occupancy and the opt-in above 48 KB never disagree with the
// code.
#pragma once
#include "cursor.cuh"
#include "types.cuh"

namespace attnrt {

__host__ __device__ constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Config: q_type (of products), q_stored_type, kv_type, out_type (Dtype); group, head_dim, head_dim_vo, m_blocks
// (16-row blocks per tile), kv_tile, stages (int); shared_kv (bool). Variant: the printed variant struct.
template <class Config, class Variant>
struct Layout {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * Config::m_blocks;
  static constexpr int kTile = Config::kv_tile;
  static constexpr int kStages = Config::stages;
  static constexpr int kWarpKeys = kTile / kWarps;  // keys whose scores a warp computes
  static constexpr int kDim = round_up(Config::head_dim, 16);
  static constexpr int kDimVo = round_up(Config::head_dim_vo, 8 * kWarps);
  static constexpr int kWarpCols = kDimVo / kWarps;  // output columns that a warp accumulates

  static constexpr int kKvBytes = kBytes<Config::kv_type>;
  // A tile is rewritten between load and multiply if it is not stored in q's type or a hook maps its rows.
  static constexpr bool kConvertK = Config::kv_type != Config::q_type || Variant::has_key;
  static constexpr bool kConvertV = Config::kv_type != Config::q_type || Variant::has_value;
  // V read from K's rows in shared memory: only when no key hook has changed them.
  static constexpr bool kVFromK = Config::shared_kv && !Variant::has_key && !Variant::has_value;

  // Row pitches in bytes: an odd number of 16-byte units, so that ldmatrix and 16-byte stores meet no bank twice.
  static constexpr int kPitchK = kDim * 2 + 16;
  static constexpr int kPitchV = kVFromK ? kPitchK : kDimVo * 2 + 16;
  static constexpr int kPitchP = kTile * 2 + 16;
  static constexpr int kRawPitchK = kConvertK ? round_up(Config::head_dim * kKvBytes, 16) : kPitchK;
  static constexpr int kRawPitchV = kConvertV ? round_up(Config::head_dim_vo * kKvBytes, 16) : kPitchV;

  static constexpr int kRawBytesK = kTile * kRawPitchK;
  static constexpr int kRawBytesV = kVFromK ? 0 : kTile * kRawPitchV;
  static constexpr int kStageBytes = kRawBytesK + kRawBytesV;

  static constexpr int kOffsetQ = 0;
  static constexpr int kOffsetP = kOffsetQ + kRows * kPitchK;
  static constexpr int kOffsetStages = round_up(kOffsetP + kRows * kPitchP, 128);
  static constexpr int kOffsetK = kOffsetStages + kStages * kStageBytes;  // converted tiles, one of each
  static constexpr int kOffsetV = kOffsetK + (kConvertK ? kTile * kPitchK : 0);
  static constexpr int kOffsetMeta = round_up(kOffsetV + (kConvertV && !kVFromK ? kTile * kPitchV : 0), 16);
};

template <class Config, class Variant>
using Cursor = TileCursor<Config::kv_tile, 16 * Config::m_blocks, Config::group>;

// Per stage: positions and slots of the tile's keys, and what each warp's keys have in common.
constexpr int kDeadKey = -2147483647 - 1;

template <class L>
struct Meta {
  static constexpr int kRows = L::kRows;
  int pos[L::kStages][L::kTile];       // kDeadKey: no key
  int slot[L::kStages][L::kTile];      // read by ctx.kv_slot and key hooks
  int pos_min[L::kStages][L::kWarps];  // over live keys
  int pos_max[L::kStages][L::kWarps];
  int all_live[L::kStages][L::kWarps];
  float reduce[L::kWarps][L::kRows];  // row maxima, then row sums
  int qo_row[L::kRows];               // row of q; rows past the tile's end have -1
  int qo_head[L::kRows];
  int qo_pos[L::kRows];
  int request[L::kRows];
  int low[L::kRows];  // visible key positions, inclusive
  int high[L::kRows];
  int limit[L::kRows];           // true request length: keys at offsets >= it are not there
  long long mask_bit[L::kRows];  // bit of the key at offset 0, or kNoMask
  int mask_from[L::kRows];
  int low_max, high_min, limit_min, any_mask;
};
// The same of kernels that keep nothing else beside their rows (fill_rows writes either); without mask bits their two
// columns have one entry.
template <int kCount, class Variant>
struct RowTable {
  static constexpr int kRows = kCount;
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
};
constexpr long long kNoMask = -0x7fffffffffffffffLL - 1;

}  // namespace attnrt
