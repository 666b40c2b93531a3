// SPDX-License-Identifier: Apache-2.0
// The frame that every decode experiment shares: problem, plan, K/V ring filled by cp.async, partial states and their
// fold.
//
// One tile is 64 keys of one KV head; a stage of the ring is the K or the V of one tile (16 KB): two slabs of 64 rows x
// 128 bytes with the 128-byte swizzle. The 128 threads that compute also issue the copies. Work is a flat list of tiles
// cut into one contiguous run per worker; a run is cut into items at (request, KV head) borders. The fold follows the
// rule of docs/design.md: a run from leaf 0 folds in registers and writes one state, a later run writes one state per
// leaf, a row held whole is finished at once.
#pragma once
#include "common.cuh"

namespace exp_decode {
using namespace attnrt::ptx;

constexpr int kThreads = 128;
constexpr int kTile = 64;  // keys per tile
constexpr int kPage = 16;  // keys per page
constexpr int kHeads = 8;  // KV heads
constexpr int kGroup = 4;  // query heads per KV head
constexpr int kDim = 128;
constexpr int kStage = kTile * kDim * 2;  // bytes
constexpr float kNegInf = -__builtin_huge_valf();

enum Merge { kMergeNone = 0, kMergeLast = 1, kMergeKernel = 2, kMergeCta = 3 };

// 32 bytes, one record holds all that an item needs: a second look-up would cost another cold miss (0.4 us) in a short
// kernel.
struct __align__(16) Item {
  int pair;                      // request * kHeads + kv head
  int tile0, tile1;              // tiles of the pair, half open
  int slot0;                     // first partial slot of this item, -1: the row is held whole
  int merge_slot0, merge_slots;  // partial slots of the pair in fold order
  int parts;                     // items that write them
  int pad;
};

struct __align__(16) Worker {
  int begin, end;  // items
  int pad[2];
  Item first;  // copy of items[begin]
};

struct Params {
  const unsigned short* q;  // [requests, kHeads * kGroup, kDim] bfloat16 bits
  const unsigned short* k;  // [pages, kPage, kHeads, kDim]
  const unsigned short* v;
  const int* table;  // [requests, pages_per_request]
  int pages_per_request;
  const Item* items;
  const Worker* workers;  // [workers]
  const Item* merges;     // [merges] one item of each pair that the merge kernel has to fold
  float* part;            // [slots, kGroup, kDim] not divided
  float2* ml;             // [slots, kGroup] (max in base-2 units, sum)
  unsigned* counters;     // [pairs], zero before and after
  unsigned short* out;    // [requests, kHeads * kGroup, kDim]
  float scale_log2;
  int leaf_tiles;
  int merge;
  int num_merges;
};

// ---- fold: explicit rounding, the same in registers and from memory. Folds b into a.
struct Weights {
  float a, b;
};
static __device__ __forceinline__ Weights fold_ml(float& ma, float& la, float mb, float lb) {
  float m = fmaxf(ma, mb);
  Weights w{ex2(__fsub_rn(ma, m)), ex2(__fsub_rn(mb, m))};
  la = __fmaf_rn(lb, w.b, __fmul_rn(la, w.a));
  ma = m;
  return w;
}
static __device__ __forceinline__ float fold_acc(float a, float b, Weights w) {
  return __fmaf_rn(b, w.b, __fmul_rn(a, w.a));
}

static __device__ __forceinline__ unsigned short to_bf16(float x) {
  return (unsigned short)pack2<Half16::bf16>(x, 0.f);
}

// ---- the ring of K and V stages
template <int Stages>
struct Loader {
  const Params& p;
  u32 ring;            // shared address, 1024-byte aligned
  int item, end;       // next item to load and one past the last
  int tile, tile_end;  // next tile of that item
  int half;            // 0: K of the tile is next, 1: V
  int slot;            // ring slot to fill next
  int4 pages;
  unsigned row_off;  // element offset of this thread's row and column inside a page, head excluded
  unsigned dst_off;
  int head;

  int next_pair, next_tile0, next_tile1;  // the item after this one, read ahead

  __device__ Loader(const Params& params, u32 base, const Worker& wk)
      : p(params), ring(base), item(wk.begin), end(wk.end) {
    int row = threadIdx.x % kThreads / 16, c = threadIdx.x % 16;
    row_off = row * kHeads * kDim + c * 8;
    dst_off = (c / 8) * (kTile * 128) + row * 128 + ((c % 8 ^ row) << 4);
    half = slot = 0;
    next_pair = wk.first.pair, next_tile0 = wk.first.tile0, next_tile1 = wk.first.tile1;
    open();
  }
  __device__ __forceinline__ void open() {
    if (item >= end) return;
    tile = next_tile0;
    tile_end = next_tile1;
    head = next_pair % kHeads;
    row_pages = p.table + (size_t)(next_pair / kHeads) * p.pages_per_request;
    pages = *(const int4*)(row_pages + tile * 4);
    if (item + 1 < end) {
      int4 x = *(const int4*)(p.items + item + 1);
      next_pair = x.x, next_tile0 = x.y, next_tile1 = x.z;
    }
  }
  const int* row_pages;

  // Issues the next stage (or nothing at the end) and always closes a group.
  __device__ __forceinline__ void issue() {
    if (item < end) {
      const unsigned short* src = (half ? p.v : p.k) + head * kDim + row_off;
      u32 dst = ring + slot * kStage + dst_off;
      int pg[4] = {pages.x, pages.y, pages.z, pages.w};
#pragma unroll
      for (int i = 0; i < 8; ++i)
        cp_async16(dst + i * 1024, src + (size_t)pg[i / 2] * (kPage * kHeads * kDim) + (i % 2) * (8 * kHeads * kDim));
      if (half) {
        if (++tile == tile_end) {
          ++item;
          open();
        } else {
          pages = *(const int4*)(row_pages + tile * 4);
        }
      }
      half ^= 1;
    }
    cp_async_commit();
    slot = slot + 1 == Stages ? 0 : slot + 1;
  }
};

// ---- merge of one pair's states, by 128 threads: thread -> row tid/32, four numbers of d. kBatch
// states in flight: 4 inside the attention kernel (8 already spill there, and a call would add the callee's registers),
// 16 in a kernel of its own.
template <int kBatch>
static __device__ void merge_pair(const float* part, const float2* states, unsigned short* out, int pair, int slot0,
                                  int slots) {
  int row = threadIdx.x / 32, d = threadIdx.x % 32 * 4;
  const float4* src = (const float4*)(part + ((size_t)slot0 * kGroup + row) * kDim + d);
  const float2* ml = states + (size_t)slot0 * kGroup + row;
  float m = 0, l = 0;
  float4 acc = make_float4(0, 0, 0, 0);
  for (int s0 = 0; s0 < slots; s0 += kBatch) {
    float4 a[kBatch];
    float2 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (s0 + i < slots) {
        a[i] = __ldcg(src + (size_t)(s0 + i) * (kGroup * kDim / 4));
        x[i] = __ldcg(ml + (s0 + i) * kGroup);
      }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (s0 + i < slots) {
        if (s0 + i == 0) {
          m = x[0].x, l = x[0].y, acc = a[0];
        } else {
          Weights w = fold_ml(m, l, x[i].x, x[i].y);
          acc.x = fold_acc(acc.x, a[i].x, w), acc.y = fold_acc(acc.y, a[i].y, w);
          acc.z = fold_acc(acc.z, a[i].z, w), acc.w = fold_acc(acc.w, a[i].w, w);
        }
      }
  }
  float inv = rcp(l);
  uint2 o = make_uint2(pack2<Half16::bf16>(__fmul_rn(acc.x, inv), __fmul_rn(acc.y, inv)),
                       pack2<Half16::bf16>(__fmul_rn(acc.z, inv), __fmul_rn(acc.w, inv)));
  *(uint2*)(out + ((size_t)pair * kGroup + row) * kDim + d) = o;
}

static __global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ Params p) {
  const Item it = p.merges[blockIdx.x];
  grid_dep_wait();
  merge_pair<16>(p.part, p.ml, p.out, it.pair, it.merge_slot0, it.merge_slots);
}

// After this CTA has written its states of `pair`: the last of the pair's writers merges. flag: one shared word.
static __device__ __forceinline__ void finish_item(const Params& p, const Item& it, volatile int* flag) {
  if (p.merge != kMergeLast) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(p.counters + it.pair) : "memory");
    int last = old + 1 == (unsigned)it.parts;
    if (last) p.counters[it.pair] = 0;
    *flag = last;
  }
  __syncthreads();
  if (*flag) merge_pair<4>(p.part, p.ml, p.out, it.pair, it.merge_slot0, it.merge_slots);
}
}  // namespace exp_decode
