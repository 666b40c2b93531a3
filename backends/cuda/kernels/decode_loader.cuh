// SPDX-License-Identifier: Apache-2.0
// The loader of the decode kernel: walks the worker's items ahead of the compute loop and fills one stage per call, K
// and V of a tile in turn. Each warp brings the 16 keys of a tile that it scores later; lane l finds the slot of key l
// % 16, all lanes copy. The block id of the next tile's key is read one tile ahead, so that no copy waits for the
// index.
//
// A CTA that has an SM to itself has one warp per scheduler, so every instruction here is time, and a short kernel
// meets every instruction for the first time: hence one way through for all kinds of steps, and no second copy of any
// of it.
#pragma once
#include "cursor.cuh"
#include "decode_layout.cuh"
#include "loader.cuh"

namespace attnrt {

template <class Config, class Variant>
class DecodeLoader {
  using L = DecodeLayout<Config, Variant>;
  using M = DecodeMeta<L, Variant>;
  static constexpr int kChunks = L::kRowBytes / 16;
  static constexpr int kRowsAtOnce = 32 / kChunks;

 public:
  // Calls of issue() before every stage is filled: the first only looks the first tile up.
  static constexpr int kFirstCalls = L::kStages + 1;

  __device__ __forceinline__ DecodeLoader(const RunParams& p, char* ring, M& meta, int begin, int end)
      : p_(p), ring_(ring), meta_(meta), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {
    fill_ = L::kStages - 1;
    table_ = -1;
    values_ = live_ = true;
    slot_ = id_ = -1;
    token_ = 0;
    DecodeCursor& at = mine();
    at.next = begin;
    at.end = end;
    at.leaf = at.leaf_end = at.pass = at.passes = at.head = at.head_end = at.tile = at.stop = 0;
  }

  // Fills the next stage, or nothing past the end; closes a group either way.
  __device__ __forceinline__ void issue() {
    if (live_) {
      if (!values_) place();
      if (table_ >= 0) copy(values_ ? p_.v : p_.k);
      if (values_) {
        table_ = table_ + 1 == L::kTiles ? 0 : table_ + 1;
        live_ = advance(mine());
        look_up();
      }
      values_ = !values_;
    }
    ptx::cp_async_commit();
    fill_ = fill_ + 1 == L::kStages ? 0 : fill_ + 1;
  }

 private:
  __device__ __forceinline__ DecodeCursor& mine() const { return meta_.cursors[warp_]; }

  // To the next tile: of the leaf, or of the next leaf, pass over the rows, KV head, item. False: there is none. All
  // lanes have read the cursor before the first one writes it.
  __device__ __forceinline__ bool advance(DecodeCursor& at) {
    int tile = at.tile + L::kTile;
    const bool inside = tile < at.stop;
    __syncwarp();
    if (inside) {
      at.tile = tile;
      return true;
    }
    int next = at.next, pass = at.pass, head = at.head, leaf = at.leaf + 1;
    const int end = at.end, leaf_end = at.leaf_end, passes = at.passes, head_end = at.head_end;
    __syncwarp();
    const WorkItem* item = p_.plan->work + next - 1;
    if (leaf >= leaf_end) {
      if (++pass >= passes) {
        if (++head >= head_end) {
          do {
            if (next >= end) return false;
            item = p_.plan->work + next++;
          } while (item->kv_begin >= item->kv_end);
          head = item->head_begin;
          at.next = next;
          at.head_end = item->head_end;
          at.leaf_end = item->leaf_end;
          at.begin = item->kv_begin;
          at.passes = passes_of<L::kRows, Config::group>(*item);
        }
        const PartDesc& part = p_.plan->parts[item->part];
        KvList list;
        list.open(part, item->row, head);
        at.live_end = min(item->kv_end, bound_limit(p_, *item, part));
        at.block = part.block;
        at.indices = list.indices;
        at.block_pos = list.block_pos;
        at.base = list.indices ? 0 : list.base;
        at.offset = list.offset;
        at.entries = list.entries;
        at.pos_shift = list.pos - list.offset;
        at.head = head;
        pass = 0;
      }
      at.pass = pass;
      leaf = item->leaf_begin;
    }
    at.leaf = leaf;
    const RulerDesc& ruler = p_.plan->rulers[item->klass];
    at.tile = first_tile<L::kTile>(ruler.start(leaf), item->kv_begin);
    at.stop = min(ruler.start(leaf + 1), item->kv_end);
    return true;
  }

  // Reads the block id of this lane's key of the tile under the cursor. Nothing depends on it before the next place().
  __device__ __forceinline__ void look_up() {
    const DecodeCursor& at = mine();
    const int offset = at.tile + warp_ * L::kWarpKeys + lane_ % L::kWarpKeys;
    id_ = -1;
    if (live_ && offset >= at.begin && offset < at.live_end) {
      token_ = offset - at.offset;
      id_ = 0;
      if (at.indices) {
        unsigned block, token;
        at.block.split(token_, block, token);
        token_ = static_cast<int>(token);
        id_ = static_cast<int>(block) < at.entries ? at.indices[block] : -1;
      }
    }
  }

  // Slot and position of this lane's key; the tile's table for the compute loop.
  __device__ __forceinline__ void place() {
    const DecodeCursor& at = mine();
    const int key = warp_ * L::kWarpKeys + lane_ % L::kWarpKeys;
    int pos = kDeadKey;
    slot_ = -1;
    if (id_ >= 0) {
      const long long slot = static_cast<long long>(id_) * at.block.divisor + at.base + token_;
      if (static_cast<unsigned long long>(slot) < static_cast<unsigned long long>(p_.k.num_slots)) {
        slot_ = static_cast<int>(slot);
        pos = at.tile + key + at.pos_shift;
        if (at.block_pos) {
          unsigned block, token;
          at.block.split(at.tile + key - at.offset, block, token);
          pos = at.block_pos[block] + static_cast<int>(token);
        }
      }
    }
    const bool live = slot_ >= 0;
    const int low = __reduce_min_sync(0xffffffffu, live ? pos : 0x7fffffff);
    const int high = __reduce_max_sync(0xffffffffu, pos);
    int flags = __all_sync(0xffffffffu, live) ? kAllLive : 0;
    if (at.tile + L::kTile >= at.stop) flags |= at.leaf + 1 >= at.leaf_end ? kLastOfLeaf | kLastOfPass : kLastOfLeaf;
    if (lane_ < L::kWarpKeys) {
      meta_.pos[table_][key] = pos;
      if constexpr (L::kHooks) meta_.slot[table_][key] = live ? slot_ : 0;
    }
    if (lane_ == 0) meta_.span[table_][warp_] = make_int4(low, high, flags, at.tile);
  }

  __device__ __forceinline__ void copy(const PagedKv& kv) const {
    const bool live = slot_ >= 0;
    const char* mine_from = kv.ptr;  // any address will do where nothing is read
    if (live) mine_from += slot_offset(kv, static_cast<unsigned>(slot_), mine().head) * kBytes<Config::kv_type>;
    const unsigned long long from = reinterpret_cast<unsigned long long>(mine_from);
    char* stage = ring_ + fill_ * L::kStageBytes;
    const unsigned there = __ballot_sync(0xffffffffu, live);
    if (kv.vectors) {
      const int row = lane_ / kChunks, chunk = lane_ % kChunks;
      const unsigned to = ptx::smem_addr(stage) + swizzled<L::kRowBytes>(warp_ * L::kWarpKeys + row, chunk);
#pragma unroll
      for (int i = 0; i < L::kWarpKeys; i += kRowsAtOnce) {
        // Row i + row: i moves whole rows, and the swizzle of i's low bits is an XOR.
        const unsigned dst = L::kRowBytes == 64 ? to + i * 64 : (to ^ (i % 8 << 4)) + i * 128;
        const unsigned lo = __shfl_sync(0xffffffffu, static_cast<unsigned>(from), i + row);
        const unsigned hi = __shfl_sync(0xffffffffu, static_cast<unsigned>(from >> 32), i + row);
        const unsigned long long src = (static_cast<unsigned long long>(hi) << 32 | lo) + chunk * 16;
        ptx::cp_async16(dst, reinterpret_cast<const void*>(src), there >> (i + row) & 1 ? 16 : 0);
      }
    } else {
      typedef typename Bits<Config::kv_type>::type Element;
#pragma unroll 1
      for (int i = 0; i < L::kWarpKeys; ++i) {
        const Element* src = reinterpret_cast<const Element*>(__shfl_sync(0xffffffffu, from, i));
        const int key = warp_ * L::kWarpKeys + i;
#pragma unroll 1
        for (int d = lane_; d < L::kDim; d += 32) {
          const int byte = d * kBytes<Config::kv_type>;
          *reinterpret_cast<Element*>(stage + swizzled<L::kRowBytes>(key, byte / 16) + byte % 16) =
              there >> i & 1 ? src[d] : Element(0);
        }
      }
    }
  }

  const RunParams& p_;
  char* ring_;
  M& meta_;
  int lane_, warp_;
  int fill_;        // stage to fill next
  int table_;       // table of the tile under the cursor
  int id_, token_;  // block and place in it of this lane's key in the tile to come
  int slot_;        // of the tile under the cursor; -1: no key
  bool values_;     // V of the tile is next
  bool live_;
};

}  // namespace attnrt
