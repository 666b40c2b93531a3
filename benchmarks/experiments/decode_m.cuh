// SPDX-License-Identifier: Apache-2.0
// Decode with queries on M: wgmma m64 (decode_m64) and mma.sync m16n8k16 (decode_m16). Rows past the live ones are
// padding.
#pragma once
#include "decode_common.cuh"

namespace exp_decode {

// wgmma: S[64 x 64 keys] = Q K^T, P stays in registers as the A operand of O[64 x 128] = P V. The descriptor of Q
// repeats its 8 rows (stride 0), so Q takes 2 KB; only rows 0..7 (warp 0, first halves) are used, the other warps
// multiply zeros.
template <int Stages, int CtasPerSm>
__global__ void __launch_bounds__(kThreads, CtasPerSm) decode_m64(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* s_q = smem + Stages * kStage;
  float* racc = (float*)(s_q + 2048) + threadIdx.x % 32;  // folded accumulator of warp 0, number j at racc[32 j]
  __shared__ int s_flag;
  const u32 ring = smem_addr(smem), a_q = smem_addr(s_q);
  const int tid = threadIdx.x, w = __shfl_sync(~0u, tid / 32, 0), lane = tid % 32, g = lane / 4, t = lane % 4;
  grid_dep_launch();
  const Worker wk = p.workers[blockIdx.x];
  const int begin = wk.begin, end = wk.end;
  Loader<Stages> ld(p, ring, wk);
  grid_dep_wait();
  if (begin == end) return;
#pragma unroll 1
  for (int i = 0; i < Stages - 1; ++i) ld.issue();
  int slot = 0;
  auto advance = [&] { slot = slot + 1 == Stages ? 0 : slot + 1; };
  auto await_stage = [&] {
    cp_async_wait<Stages - 2>();
    fence_proxy_async();
    __syncthreads();
  };

  Item it = wk.first;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    {
      int row = tid / 16, col = tid % 16;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < kGroup) x = *(const uint4*)(p.q + ((size_t)it.pair * kGroup + row) * kDim + col * 8);
      *(uint4*)(s_q + (col / 8) * 1024 + row * 128 + ((col % 8 ^ row) << 4)) = x;
    }
    float rm = 0, rl = 0;
    bool have = false;
    int leaf_slot = it.slot0;
#pragma unroll 1
    for (int tile = it.tile0; tile < it.tile1;) {
      const int leaf_end = min(it.tile1, (tile / p.leaf_tiles + 1) * p.leaf_tiles);
      float m = kNegInf, l = 0.f, acc[64];
#pragma unroll
      for (int a = 0; a < 64; ++a) acc[a] = 0.f;
#pragma unroll 1
      for (; tile < leaf_end; ++tile) {
        await_stage();
        ld.issue();
        float s[32];
        const u64 dk = desc_sw128(ring + slot * kStage, 16, 1024), dq = desc_sw128(a_q, 16, 0);
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < 8; ++ks)
          Wgmma<Half16::bf16, 64>::template ss<0, 0>(s, desc_add(dq, ks / 4 * 1024 + ks % 4 * 32),
                                                     desc_add(dk, ks / 4 * (kTile * 128) + ks % 4 * 32), ks > 0);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(s);
        advance();
        u32 pa[4][4];
#pragma unroll
        for (int ks = 0; ks < 4; ++ks) pa[ks][0] = pa[ks][1] = pa[ks][2] = pa[ks][3] = 0;
        if (w == 0) {
          float mx = fmaxf(s[0], s[1]);
#pragma unroll
          for (int j = 1; j < 16; ++j) mx = fmaxf(mx, j % 2 ? s[j / 2 * 4 + 1] : s[j / 2 * 4]);
          mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 1));
          mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 2));
          float mn = fmaxf(m, mx * p.scale_log2), corr = ex2(m - mn), sum = 0.f;
          m = mn;
#pragma unroll
          for (int ks = 0; ks < 4; ++ks) {
            float e0 = ex2(__fmaf_rn(s[8 * ks], p.scale_log2, -mn)),
                  e1 = ex2(__fmaf_rn(s[8 * ks + 1], p.scale_log2, -mn));
            float e2 = ex2(__fmaf_rn(s[8 * ks + 4], p.scale_log2, -mn)),
                  e3 = ex2(__fmaf_rn(s[8 * ks + 5], p.scale_log2, -mn));
            sum += (e0 + e1) + (e2 + e3);
            pa[ks][0] = pack2<Half16::bf16>(e0, e1);
            pa[ks][2] = pack2<Half16::bf16>(e2, e3);
          }
          l = __fmaf_rn(l, corr, sum);
#pragma unroll
          for (int j = 0; j < 16; ++j) acc[4 * j] *= corr, acc[4 * j + 1] *= corr;
        }
        await_stage();
        ld.issue();
        const u64 dv = desc_sw128(ring + slot * kStage, kTile * 128, 1024);
        wgmma_pin(acc);
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < 4; ++ks)
          Wgmma<Half16::bf16, 128>::template rs<1>(acc, pa[ks], desc_add(dv, ks * 2048), 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(acc);
        advance();
      }
      if (w == 0) {
        l = __fadd_rn(l, __shfl_xor_sync(~0u, l, 1));
        l = __fadd_rn(l, __shfl_xor_sync(~0u, l, 2));
        if (!have) {
          rm = m, rl = l;
#pragma unroll
          for (int j = 0; j < 32; ++j) racc[32 * j] = acc[j / 2 * 4 + j % 2];
        } else {
          Weights f = fold_ml(rm, rl, m, l);
#pragma unroll
          for (int j = 0; j < 32; ++j) racc[32 * j] = fold_acc(racc[32 * j], acc[j / 2 * 4 + j % 2], f);
        }
        have = true;
        if ((it.tile0 != 0 || tile == it.tile1) && g < kGroup) {
          float inv = rcp(rl);
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            if (it.slot0 < 0)
              *(u32*)(p.out + ((size_t)it.pair * kGroup + g) * kDim + 8 * j + 2 * t) =
                  pack2<Half16::bf16>(__fmul_rn(racc[64 * j], inv), __fmul_rn(racc[64 * j + 32], inv));
            else
              *(float2*)(p.part + ((size_t)leaf_slot * kGroup + g) * kDim + 8 * j + 2 * t) =
                  make_float2(racc[64 * j], racc[64 * j + 32]);
          }
          if (it.slot0 >= 0 && t == 0) p.ml[(size_t)leaf_slot * kGroup + g] = make_float2(rm, rl);
        }
        if (it.tile0 != 0) ++leaf_slot, have = false;
      }
    }
    if (it.slot0 >= 0) finish_item(p, it, &s_flag);
    __syncthreads();
    if (i + 1 < end) it = p.items[i + 1];
  }
}

// mma.sync: warp w multiplies Q with keys 16w.., P goes through shared memory, then the warp owns d 32w.. of O for all
// 64 keys, so the keys of a tile are summed in one order, as in a prefill warpgroup.
template <int Stages, int CtasPerSm>
__global__ void __launch_bounds__(kThreads, CtasPerSm) decode_m16(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* s_p = smem + Stages * kStage;  // [8 queries, 64 keys], 128-byte swizzle
  __shared__ float s_red[4][8];
  __shared__ int s_flag;
  const u32 ring = smem_addr(smem), a_p = smem_addr(s_p);
  const int tid = threadIdx.x, w = __shfl_sync(~0u, tid / 32, 0), lane = tid % 32, g = lane / 4, t = lane % 4;
  grid_dep_launch();
  const Worker wk = p.workers[blockIdx.x];
  const int begin = wk.begin, end = wk.end;
  Loader<Stages> ld(p, ring, wk);
  grid_dep_wait();
  if (begin == end) return;
#pragma unroll 1
  for (int i = 0; i < Stages; ++i) ld.issue();
  int slot = 0;
  auto advance = [&] { slot = slot + 1 == Stages ? 0 : slot + 1; };
  // The slot of K is refilled after the barrier inside the softmax, the slot of V after the next tile's first barrier:
  // at the wait for V Stages - 1 younger groups are open, at the wait for K one less, except at the first tile.
  bool first = true;
  auto await_k = [&] {
    if (first)
      cp_async_wait<Stages - 1>();
    else
      cp_async_wait<Stages - 2>();
    __syncthreads();
    if (!first) ld.issue();
    first = false;
  };
  auto await_v = [&] {
    cp_async_wait<Stages - 1>();
    __syncthreads();
  };

  Item it = wk.first;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    u32 qa[8][2];  // rows 8..15 of the A operand are zero
#pragma unroll
    for (int ks = 0; ks < 8; ++ks)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        qa[ks][h] =
            g < kGroup ? *(const u32*)(p.q + ((size_t)it.pair * kGroup + g) * kDim + ks * 16 + h * 8 + 2 * t) : 0u;
    float rm = 0, rl = 0, racc[8];
    bool have = false;
    int leaf_slot = it.slot0;
#pragma unroll 1
    for (int tile = it.tile0; tile < it.tile1;) {
      const int leaf_end = min(it.tile1, (tile / p.leaf_tiles + 1) * p.leaf_tiles);
      float m = kNegInf, l = 0.f, acc[4][4];
#pragma unroll
      for (int a = 0; a < 16; ++a) acc[a / 4][a % 4] = 0.f;
#pragma unroll 1
      for (; tile < leaf_end; ++tile) {
        await_k();
        float s[2][4];
#pragma unroll
        for (int a = 0; a < 8; ++a) s[a / 4][a % 4] = 0.f;
        {
          const int key = w * 16 + (lane & 7) + (lane >> 4) * 8, c0 = lane >> 3 & 1;
          // the ring is 1024-byte aligned: a k-step is one XOR on the address
          const u32 kb = ring + slot * kStage + key * 128 + ((c0 ^ (key & 7)) << 4);
#pragma unroll
          for (int ks = 0; ks < 8; ++ks) {
            u32 b[4], a[4] = {qa[ks][0], 0, qa[ks][1], 0};
            ldmatrix_x4(b, (kb ^ (ks % 4 << 5)) + ks / 4 * (kTile * 128));
            mma_m16n8k16<Half16::bf16>(s[0], a, b[0], b[1]);
            mma_m16n8k16<Half16::bf16>(s[1], a, b[2], b[3]);
          }
        }
        advance();
        float mx = fmaxf(fmaxf(s[0][0], s[0][1]), fmaxf(s[1][0], s[1][1]));
        mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 1));
        mx = fmaxf(mx, __shfl_xor_sync(~0u, mx, 2));
        if (t == 0) s_red[w][g] = mx;
        __syncthreads();
        ld.issue();
        mx = fmaxf(fmaxf(s_red[0][g], s_red[1][g]), fmaxf(s_red[2][g], s_red[3][g]));
        float mn = fmaxf(m, mx * p.scale_log2), corr = ex2(m - mn);
        m = mn;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          float e0 = ex2(__fmaf_rn(s[n][0], p.scale_log2, -mn)), e1 = ex2(__fmaf_rn(s[n][1], p.scale_log2, -mn));
          sum += e0 + e1;
          *(u32*)(s_p + g * 128 + ((w * 2 + n ^ g) << 4) + t * 4) = pack2<Half16::bf16>(e0, e1);
        }
        l = __fmaf_rn(l, corr, sum);
#pragma unroll
        for (int n = 0; n < 4; ++n) acc[n][0] *= corr, acc[n][1] *= corr;
        await_v();
        {
          const int row = lane & 15, col = (w & 1) * 4 + (lane >> 4);
          const u32 vb = ring + slot * kStage + (w >> 1) * (kTile * 128) + row * 128 + ((col ^ (row & 7)) << 4);
          const u32 pb = a_p + (lane & 7) * 128 + ((lane >> 3 ^ (lane & 7)) << 4);
#pragma unroll
          for (int kp = 0; kp < 2; ++kp) {
            u32 pr[4];
            ldmatrix_x4(pr, pb ^ (kp << 6));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              u32 a[4] = {pr[2 * h], 0, pr[2 * h + 1], 0};
#pragma unroll
              for (int n = 0; n < 2; ++n) {
                u32 b[4];
                ldmatrix_x4_trans(b, (vb ^ (n << 5)) + (kp * 2 + h) * 2048);
                mma_m16n8k16<Half16::bf16>(acc[2 * n], a, b[0], b[1]);
                mma_m16n8k16<Half16::bf16>(acc[2 * n + 1], a, b[2], b[3]);
              }
            }
          }
        }
        advance();
      }
      l = __fadd_rn(l, __shfl_xor_sync(~0u, l, 1));
      l = __fadd_rn(l, __shfl_xor_sync(~0u, l, 2));
      if (t == 0) s_red[w][g] = l;
      __syncthreads();
      l = __fadd_rn(__fadd_rn(s_red[0][g], s_red[1][g]), __fadd_rn(s_red[2][g], s_red[3][g]));
      if (!have) {
        rm = m, rl = l;
#pragma unroll
        for (int j = 0; j < 8; ++j) racc[j] = acc[j / 2][j % 2];
      } else {
        Weights f = fold_ml(rm, rl, m, l);
#pragma unroll
        for (int j = 0; j < 8; ++j) racc[j] = fold_acc(racc[j], acc[j / 2][j % 2], f);
      }
      have = true;
      if (it.tile0 == 0 && tile < it.tile1) continue;
      if (g < kGroup) {
        float inv = rcp(rl);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          int d = w * 32 + n * 8 + 2 * t;
          if (it.slot0 < 0)
            *(u32*)(p.out + ((size_t)it.pair * kGroup + g) * kDim + d) =
                pack2<Half16::bf16>(__fmul_rn(racc[2 * n], inv), __fmul_rn(racc[2 * n + 1], inv));
          else
            *(float2*)(p.part + ((size_t)leaf_slot * kGroup + g) * kDim + d) =
                make_float2(racc[2 * n], racc[2 * n + 1]);
        }
        if (it.slot0 >= 0 && t == 0 && w == 0) p.ml[(size_t)leaf_slot * kGroup + g] = make_float2(rm, rl);
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
