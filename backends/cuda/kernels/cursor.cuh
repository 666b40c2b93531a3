// SPDX-License-Identifier: Apache-2.0
// The order in which a CTA walks its work: items, KV heads of an item, passes over its rows, leaves, tiles. The loader
// runs a cursor of its own a few tiles ahead of the compute loop, so that the pipeline stays full across leaves, heads
// and items.
#pragma once
#include "params.cuh"

namespace attnrt {

// One list of KV blocks: a block row under one KV head.
struct KvList {
  const int* indices;  // first listed block, or null: affine
  const int* block_pos;
  long long base;  // affine: slot of entry 0
  int pos;         // position of entry 0 where block_pos is null
  int offset;      // offset in the request of entry 0
  int entries;     // listed blocks

  __device__ __forceinline__ void open(const PartDesc& part, int row, int head) {
    const int list = row * part.heads + (part.heads > 1 ? head : 0);
    const int first = part.indptr[list];
    entries = part.indptr[list + 1] - first;
    indices = part.indices ? part.indices + first : nullptr;
    block_pos = part.block_pos ? part.block_pos + first : nullptr;
    base = part.kv_base ? part.kv_base[row] : 0;
    pos = part.kv_pos ? part.kv_pos[row] : 0;
    offset = part.kv_offset[row];
  }
};

// First tile of a leaf that holds a key at or past `from`: tiles start at multiples of the tile size from the leaf's
// start.
template <int kTile>
__device__ __forceinline__ int first_tile(int leaf_start, int from) {
  return from <= leaf_start ? leaf_start : leaf_start + (from - leaf_start) / kTile * kTile;
}

// How often an item's keys are walked: once for every kRows of its rows.
template <int kRows, int kGroup>
__device__ __forceinline__ int passes_of(const WorkItem& item) {
  return ((item.q_end - item.q_begin) * kGroup + kRows - 1) / kRows;
}

template <int kTile, int kRows, int kGroup>
class TileCursor {
 public:
  // Fields are read where they lie (the first-level cache holds them): copies would cost the compute loop sixty
  // registers.
  const WorkItem* item;
  const PartDesc* part;
  KvList list;
  int head;
  int tile;  // offset in the request of the tile's first key

  __device__ __forceinline__ TileCursor(const RunParams& p, int worker)
      : item(nullptr),
        tile(0),
        p_(p),
        next_(p.plan->worker_indptr[worker]),
        end_(p.plan->worker_indptr[worker + 1]),
        pass_(0),
        leaf_(0),
        stop_(0) {}

  // To the next tile, at first to the first one; false: there is none. One place for every step, because all of it is
  // inlined.
  __device__ __forceinline__ bool advance() {
    tile += kTile;
    if (tile < stop_) return true;
    if (item == nullptr || ++leaf_ >= item->leaf_end) {
      if (item == nullptr || ++pass_ >= passes_of<kRows, kGroup>(*item)) {
        pass_ = 0;
        if (item == nullptr || ++head >= item->head_end) {
          do {
            if (next_ >= end_) return false;
            item = p_.plan->work + next_++;
          } while (item->kv_begin >= item->kv_end);
          part = p_.plan->parts + item->part;
          head = item->head_begin;
        }
        list.open(*part, item->row, head);
      }
      leaf_ = item->leaf_begin;
    }
    const RulerDesc& ruler = p_.plan->rulers[item->klass];
    tile = first_tile<kTile>(ruler.start(leaf_), item->kv_begin);
    stop_ = min(ruler.start(leaf_ + 1), item->kv_end);
    return true;
  }

 private:
  const RunParams& p_;
  int next_, end_, pass_, leaf_, stop_;
};

}  // namespace attnrt
