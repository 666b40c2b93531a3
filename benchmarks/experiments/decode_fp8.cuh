// SPDX-License-Identifier: Apache-2.0
// Decode over an fp8 (e4m3) cache with bf16 queries: mma.sync, keys (then d) on M, K and V converted in registers on
// the way from ldmatrix to the multiply.
//
// Two freedoms make that free of any transpose or extra trip through shared memory. The k index of a product may be
// permuted on both sides alike: a thread's 4 consecutive fp8 of a K row become the fragments k = 2t.., 2t+8.. when Q's
// fragments are taken in the same order. The rows of O^T may be permuted at will: ldmatrix.trans on 16-bit units
// delivers V of d = 2g and 2g + 1 for keys 2t and 2t + 1, so rows g and g + 8 of the fragment stand for d = 2g and 2g
// + 1. Conversion is three instructions per two numbers (sign-replicating byte permute, shift, mask) and leaves K and V
// times 2^-120; 2^60 rides on Q, 2^60 on the exponent of P. A tile is 128 keys of 128 bytes (one stage = 16 KB, one
// 128-byte-swizzled slab).
#pragma once
#include "decode_common.cuh"

namespace exp_decode {
constexpr int kTile8 = 128;

template <int Sel>
static __device__ __forceinline__ u32 e4m3_pair(u32 x) {
  return (prmt<Sel>(x) << 4) & 0x87f087f0u;
}

// Ring of 16 KB stages of 128 keys; the issuing thread moves chunk tid%8 of rows tid/8 + 16 i, one page per i.
template <int Stages>
struct Loader8 {
  const Params& p;
  u32 ring, dst_off;
  int item, end, tile, tile_end, half, slot, head;
  unsigned row_off;  // bytes
  int next_pair, next_tile0, next_tile1;
  const int* row_pages;
  int4 pa, pb;

  __device__ Loader8(const Params& params, u32 base, const Worker& wk)
      : p(params), ring(base), item(wk.begin), end(wk.end) {
    int row = threadIdx.x / 8, c = threadIdx.x % 8;
    row_off = row * kHeads * kDim + c * 16;
    dst_off = row * 128 + ((c ^ (row & 7)) << 4);
    half = slot = 0;
    next_pair = wk.first.pair, next_tile0 = wk.first.tile0, next_tile1 = wk.first.tile1;
    open();
  }
  __device__ __forceinline__ void fetch() {
    pa = *(const int4*)(row_pages + tile * 8);
    pb = *(const int4*)(row_pages + tile * 8 + 4);
  }
  __device__ __forceinline__ void open() {
    if (item >= end) return;
    tile = next_tile0, tile_end = next_tile1;
    head = next_pair % kHeads;
    row_pages = p.table + (size_t)(next_pair / kHeads) * p.pages_per_request;
    fetch();
    if (item + 1 < end) {
      int4 x = *(const int4*)(p.items + item + 1);
      next_pair = x.x, next_tile0 = x.y, next_tile1 = x.z;
    }
  }
  __device__ __forceinline__ void issue() {
    if (item < end) {
      const unsigned char* src = (const unsigned char*)(half ? p.v : p.k) + head * kDim + row_off;
      u32 dst = ring + slot * kStage + dst_off;
      int pg[8] = {pa.x, pa.y, pa.z, pa.w, pb.x, pb.y, pb.z, pb.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) cp_async16(dst + i * 2048, src + (size_t)pg[i] * (kPage * kHeads * kDim));
      if (half) {
        if (++tile == tile_end) {
          ++item;
          open();
        } else {
          fetch();
        }
      }
      half ^= 1;
    }
    cp_async_commit();
    slot = slot + 1 == Stages ? 0 : slot + 1;
  }
};

template <int Stages, int CtasPerSm>
__global__ void __launch_bounds__(kThreads, CtasPerSm) decode_fp8(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* s_p = smem + Stages * kStage;  // P^T [128 keys, 8 queries] bf16
  float* s_red = (float*)(s_p + 2048);          // [4, 8]
  __shared__ int s_flag;
  grid_dep_launch();
  const u32 ring = smem_addr(smem), a_p = smem_addr(s_p);
  const int tid = threadIdx.x, w = __shfl_sync(~0u, tid / 32, 0), lane = tid % 32, g = lane / 4, t = lane % 4;
  const Worker wk = p.workers[blockIdx.x];
  const int begin = wk.begin, end = wk.end;
  Loader8<Stages> ld(p, ring, wk);
  grid_dep_wait();
  if (begin == end) return;
#pragma unroll 1
  for (int i = 0; i < Stages; ++i) ld.issue();
  int slot = 0;
  auto advance = [&] { slot = slot + 1 == Stages ? 0 : slot + 1; };
  bool first = true;
  const float scale = p.scale_log2 * 0x1p60f;

  Item it = wk.first;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    u32 qf[8][2];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      uint2 x = make_uint2(0, 0);
      if (g < kGroup) x = *(const uint2*)(p.q + ((size_t)it.pair * kGroup + g) * kDim + c * 16 + 4 * t);
      // times 2^60: exact in bf16 as long as |q| < 2^67
      qf[c][0] = x.x, qf[c][1] = x.y;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        qf[c][h] = pack2<Half16::bf16>(__uint_as_float(qf[c][h] << 16) * 0x1p60f,
                                       __uint_as_float(qf[c][h] & 0xffff0000u) * 0x1p60f);
    }
    float rm[2], rl[2], racc[2][4];
    bool have = false;
    int leaf_slot = it.slot0;
#pragma unroll 1
    for (int tile = it.tile0; tile < it.tile1;) {
      const int leaf_end = min(it.tile1, (tile / p.leaf_tiles + 1) * p.leaf_tiles);
      float m[2] = {kNegInf, kNegInf}, l[2] = {0.f, 0.f}, acc[2][4] = {};
#pragma unroll 1
      for (; tile < leaf_end; ++tile) {
        if (first)
          cp_async_wait<Stages - 1>();
        else
          cp_async_wait<Stages - 2>();
        __syncthreads();
        if (!first) ld.issue();
        first = false;
        float s[2][4] = {};
        {
          const int row = w * 32 + (lane & 15);
          const u32 kb = ring + slot * kStage + row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
#pragma unroll
          for (int mt = 0; mt < 2; ++mt)
#pragma unroll
            for (int cp = 0; cp < 4; ++cp) {
              u32 r[4];
              ldmatrix_x4(r, (kb ^ (cp << 5)) + mt * 2048);
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                u32 a[4] = {e4m3_pair<0x9180>(r[2 * h]), e4m3_pair<0x9180>(r[2 * h + 1]), e4m3_pair<0xB3A2>(r[2 * h]),
                            e4m3_pair<0xB3A2>(r[2 * h + 1])};
                mma_m16n8k16<Half16::bf16>(s[mt], a, qf[2 * cp + h][0], qf[2 * cp + h][1]);
              }
            }
        }
        advance();
        float cm[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          cm[c] = fmaxf(fmaxf(s[0][c], s[0][c + 2]), fmaxf(s[1][c], s[1][c + 2]));
          cm[c] = fmaxf(cm[c], __shfl_xor_sync(~0u, cm[c], 4));
          cm[c] = fmaxf(cm[c], __shfl_xor_sync(~0u, cm[c], 8));
          cm[c] = fmaxf(cm[c], __shfl_xor_sync(~0u, cm[c], 16));
        }
        if (g == 0) *(float2*)(s_red + w * 8 + 2 * t) = make_float2(cm[0], cm[1]);
        __syncthreads();
        ld.issue();
        float2 x0 = *(float2*)(s_red + 2 * t), x1 = *(float2*)(s_red + 8 + 2 * t), x2 = *(float2*)(s_red + 16 + 2 * t),
               x3 = *(float2*)(s_red + 24 + 2 * t);
        float corr[2],
            mx[2] = {fmaxf(fmaxf(x0.x, x1.x), fmaxf(x2.x, x3.x)), fmaxf(fmaxf(x0.y, x1.y), fmaxf(x2.y, x3.y))};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float mn = fmaxf(m[c], mx[c] * scale);
          corr[c] = ex2(m[c] - mn);
          m[c] = mn;
          float e[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) e[j] = ex2(__fmaf_rn(s[j / 2][c + j % 2 * 2], scale, 60.f - mn));
          l[c] = __fmaf_rn(l[c], corr[c], (e[0] + e[1]) + (e[2] + e[3]));
#pragma unroll
          for (int j = 0; j < 4; ++j) s[j / 2][c + j % 2 * 2] = e[j];
#pragma unroll
          for (int mt = 0; mt < 2; ++mt) acc[mt][c] *= corr[c], acc[mt][c + 2] *= corr[c];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
          *(u32*)(s_p + (w * 32 + j * 8 + g) * 16 + t * 4) =
              pack2<Half16::bf16>(s[j / 2][j % 2 * 2], s[j / 2][j % 2 * 2 + 1]);
        cp_async_wait<Stages - 1>();
        __syncthreads();
        {
          const int row = lane & 15, chunk = 2 * w + (lane >> 4);
          const u32 vb = ring + slot * kStage + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
          for (int kp = 0; kp < 4; ++kp) {
            u32 b[4];
            ldmatrix_x4_trans(b, a_p + (kp * 32 + lane) * 16);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              u32 r[4];
              ldmatrix_x4_trans(r, vb + (kp * 2 + h) * 2048);
#pragma unroll
              for (int mt = 0; mt < 2; ++mt) {
                u32 a[4] = {e4m3_pair<0xA280>(r[2 * mt]), e4m3_pair<0xB391>(r[2 * mt]),
                            e4m3_pair<0xA280>(r[2 * mt + 1]), e4m3_pair<0xB391>(r[2 * mt + 1])};
                mma_m16n8k16<Half16::bf16>(acc[mt], a, b[2 * h], b[2 * h + 1]);
              }
            }
          }
        }
        advance();
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        l[c] = __fadd_rn(l[c], __shfl_xor_sync(~0u, l[c], 4));
        l[c] = __fadd_rn(l[c], __shfl_xor_sync(~0u, l[c], 8));
        l[c] = __fadd_rn(l[c], __shfl_xor_sync(~0u, l[c], 16));
        if (g == 0) s_red[w * 8 + 2 * t + c] = l[c];
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        int q = 2 * t + c;
        l[c] = __fadd_rn(__fadd_rn(s_red[q], s_red[8 + q]), __fadd_rn(s_red[16 + q], s_red[24 + q])) * 0x1p-60f;
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) acc[mt][c] *= 0x1p60f, acc[mt][c + 2] *= 0x1p60f;
        if (!have) {
          rm[c] = m[c], rl[c] = l[c];
#pragma unroll
          for (int mt = 0; mt < 2; ++mt) racc[mt][c] = acc[mt][c], racc[mt][c + 2] = acc[mt][c + 2];
        } else {
          Weights f = fold_ml(rm[c], rl[c], m[c], l[c]);
#pragma unroll
          for (int mt = 0; mt < 2; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) racc[mt][c + 2 * h] = fold_acc(racc[mt][c + 2 * h], acc[mt][c + 2 * h], f);
        }
      }
      have = true;
      if (it.tile0 == 0 && tile < it.tile1) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        int q = 2 * t + c;
        if (q >= kGroup) continue;
        float inv = rcp(rl[c]);
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
          int d = w * 32 + mt * 16 + 2 * g;
          if (it.slot0 < 0)
            *(u32*)(p.out + ((size_t)it.pair * kGroup + q) * kDim + d) =
                pack2<Half16::bf16>(__fmul_rn(racc[mt][c], inv), __fmul_rn(racc[mt][c + 2], inv));
          else
            *(float2*)(p.part + ((size_t)leaf_slot * kGroup + q) * kDim + d) =
                make_float2(racc[mt][c], racc[mt][c + 2]);
        }
        if (it.slot0 >= 0 && g == 0 && w == 0) p.ml[(size_t)leaf_slot * kGroup + q] = make_float2(rm[c], rl[c]);
      }
      ++leaf_slot;
      have = false;
    }
    if (it.slot0 >= 0) finish_item(p, it, &s_flag);
    __syncthreads();
    if (i + 1 < end) it = p.items[i + 1];
  }
}
}  // namespace exp_decode
