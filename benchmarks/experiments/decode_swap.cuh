// SPDX-License-Identifier: Apache-2.0
// Decode with the operands swapped: S^T = K Q^T and O^T = V^T P^T, keys (then d) on M, queries on N.
// Wg: wgmma m64nNk16 with both operands in shared memory; else mma.sync m16n8k16 (N = 8), a warp owning 16 keys, then
// 32 of d. RowOrder (N = 8): the sum of exponentials is formed in the order of a kernel with queries on M (thread t of
// a quad adds keys 2t, 2t+1 of every 8), so that the whole state has the bits of decode_m64: P goes to shared memory in
// float32 too and warp 0 adds it up. Wgs > 1: that many warpgroups per CTA, each a worker with its own ring; with
// kMergeCta their one item each is a run of the same pair, and the states fold in shared memory. A thread holds S^T of
// keys 16w + g (+8) and queries 8n + 2t (+1); the softmax runs down the columns, across lanes and warps.
#pragma once
#include "decode_common.cuh"

namespace exp_decode {

template <bool Wg, int N, int Stages, int CtasPerSm, bool RowOrder = false, int Wgs = 1>
__global__ void __launch_bounds__(kThreads* Wgs, CtasPerSm) decode_swap(const __grid_constant__ Params p) {
  static_assert(N == 8 || (Wg && !RowOrder), "mma.sync and RowOrder take 8 queries");
  constexpr int kRowE = kTile + 4;  // floats, conflict-free
  constexpr int NG = N / 8, C = 2 * NG, A = Wg ? N / 2 : 4;
  extern __shared__ __align__(1024) unsigned char smem_all[];
  const int wg = Wgs == 1 ? 0 : __shfl_sync(~0u, threadIdx.x / kThreads, 0);
  constexpr int kBytes =
      (Stages * kStage + N * 256 + NG * 1024 + N * 16 + (RowOrder ? 8 * kRowE * 4 : 0) + 1023) / 1024 * 1024;
  unsigned char* smem = smem_all + wg * kBytes;
  unsigned char *s_q = smem + Stages * kStage, *s_p = s_q + N * 256;
  float* s_red = (float*)(s_p + NG * 1024);  // [4, N]
  float* s_e = s_red + 4 * N;                // [8, kRowE] if RowOrder
  __shared__ int s_flag;
  const u32 ring = smem_addr(smem), a_q = smem_addr(s_q), a_p = smem_addr(s_p);
  const int tid = threadIdx.x % kThreads, w = __shfl_sync(~0u, tid / 32, 0), lane = tid % 32, g = lane / 4,
            t = lane % 4;
  grid_dep_launch();
  auto sync = [&] {
    if constexpr (Wgs == 1)
      __syncthreads();
    else
      bar_sync(1 + wg, kThreads);
  };
  const Worker wk = p.workers[blockIdx.x * Wgs + wg];
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
    fence_proxy_async();
    sync();
    if (!first) ld.issue();
    first = false;
  };
  auto await_v = [&] {
    cp_async_wait<Stages - 1>();
    fence_proxy_async();
    sync();
  };

  Item it = wk.first;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    // Q of the item: kGroup live rows of N; the last reads of the old Q ended before the last barrier.
    for (int c = tid; c < N * 16; c += kThreads) {
      int row = c / 16, col = c % 16;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < kGroup) x = *(const uint4*)(p.q + ((size_t)it.pair * kGroup + row) * kDim + col * 8);
      *(uint4*)(s_q + (col / 8) * (N * 128) + row * 128 + ((col % 8 ^ (row & 7)) << 4)) = x;
    }
    float rm[C], rl[C], racc[2][A];  // the run's folded state
    bool have = false;
    int leaf_slot = it.slot0;
    u32 qf[8][2];
    if constexpr (!Wg) {
      sync();
#pragma unroll
      for (int ks = 0; ks < 8; ++ks)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          qf[ks][h] = *(const u32*)(s_q + ks / 4 * (N * 128) + g * 128 + ((ks % 4 * 2 + h ^ g) << 4) + t * 4);
    }

#pragma unroll 1
    for (int tile = it.tile0; tile < it.tile1;) {
      const int leaf_end = min(it.tile1, (tile / p.leaf_tiles + 1) * p.leaf_tiles);
      float m[C], l[C], acc[2][A], row_l = 0.f;
#pragma unroll
      for (int c = 0; c < C; ++c) m[c] = kNegInf, l[c] = 0.f;
#pragma unroll
      for (int a = 0; a < A; ++a) acc[0][a] = acc[1][a] = 0.f;

#pragma unroll 1
      for (; tile < leaf_end; ++tile) {
        await_k();
        float s[N / 2];
        if constexpr (Wg) {
          const u64 dk = desc_sw128(ring + slot * kStage, 16, 1024), dq = desc_sw128(a_q, 16, 1024);
          wgmma_fence();
#pragma unroll
          for (int ks = 0; ks < 8; ++ks)
            Wgmma<Half16::bf16, N>::template ss<0, 0>(s, desc_add(dk, ks / 4 * (kTile * 128) + ks % 4 * 32),
                                                      desc_add(dq, ks / 4 * (N * 128) + ks % 4 * 32), ks > 0);
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_pin(s);
        } else {
#pragma unroll
          for (int c = 0; c < 4; ++c) s[c] = 0.f;
          const int row = w * 16 + (lane & 15);
          // the ring is 1024-byte aligned: a k-step is one XOR on the address, nothing for the compiler to keep in
          // registers
          const u32 kb = ring + slot * kStage + row * 128 + (((lane >> 4) ^ (row & 7)) << 4);
#pragma unroll
          for (int ks = 0; ks < 8; ++ks) {
            u32 a[4];
            ldmatrix_x4(a, (kb ^ (ks % 4 << 5)) + ks / 4 * (kTile * 128));
            mma_m16n8k16<Half16::bf16>(reinterpret_cast<float (&)[4]>(s), a, qf[ks][0], qf[ks][1]);
          }
        }
        advance();
        float cm[C];
#pragma unroll
        for (int c = 0; c < C; ++c) {
          cm[c] = fmaxf(s[c / 2 * 4 + c % 2], s[c / 2 * 4 + 2 + c % 2]);
          cm[c] = fmaxf(cm[c], __shfl_xor_sync(~0u, cm[c], 4));
          cm[c] = fmaxf(cm[c], __shfl_xor_sync(~0u, cm[c], 8));
          cm[c] = fmaxf(cm[c], __shfl_xor_sync(~0u, cm[c], 16));
        }
        if (g == 0)
#pragma unroll
          for (int n = 0; n < NG; ++n)
            *(float2*)(s_red + w * N + n * 8 + 2 * t) = make_float2(cm[2 * n], cm[2 * n + 1]);
        sync();
        ld.issue();
        float corr[2];
#pragma unroll
        for (int n = 0; n < NG; ++n) {
          float2 x0 = *(float2*)(s_red + n * 8 + 2 * t), x1 = *(float2*)(s_red + N + n * 8 + 2 * t);
          float2 x2 = *(float2*)(s_red + 2 * N + n * 8 + 2 * t), x3 = *(float2*)(s_red + 3 * N + n * 8 + 2 * t);
          float mx[2] = {fmaxf(fmaxf(x0.x, x1.x), fmaxf(x2.x, x3.x)), fmaxf(fmaxf(x0.y, x1.y), fmaxf(x2.y, x3.y))};
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float mn = fmaxf(m[2 * n + c], mx[c] * p.scale_log2);
            corr[c] = ex2(m[2 * n + c] - mn);
            m[2 * n + c] = mn;
          }
          float e[4];
#pragma unroll
          for (int c = 0; c < 4; ++c) e[c] = ex2(__fmaf_rn(s[4 * n + c], p.scale_log2, -m[2 * n + c % 2]));
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            if (RowOrder) {
              s_e[(2 * t + c) * kRowE + w * 16 + g] = e[c];
              s_e[(2 * t + c) * kRowE + w * 16 + g + 8] = e[c + 2];
            } else {
              l[2 * n + c] = __fmaf_rn(l[2 * n + c], corr[c], e[c] + e[c + 2]);
            }
          }
          *(u32*)(s_p + n * 1024 + (w * 16 + g) * 16 + t * 4) = pack2<Half16::bf16>(e[0], e[1]);
          *(u32*)(s_p + n * 1024 + (w * 16 + g + 8) * 16 + t * 4) = pack2<Half16::bf16>(e[2], e[3]);
#pragma unroll
          for (int mt = 0; mt < 2; ++mt)
#pragma unroll
            for (int c = 0; c < 4; ++c) acc[mt][4 * n + c] *= corr[c % 2];
        }
        await_v();  // V is here and P is written
        if (RowOrder && w == 0) {
          float c0 = __shfl_sync(~0u, corr[0], g / 2), c1 = __shfl_sync(~0u, corr[1], g / 2), sum = 0.f;
#pragma unroll
          for (int ks = 0; ks < 4; ++ks) {
            float2 a = *(float2*)(s_e + g * kRowE + ks * 16 + 2 * t),
                   b = *(float2*)(s_e + g * kRowE + ks * 16 + 8 + 2 * t);
            sum += (a.x + a.y) + (b.x + b.y);
          }
          row_l = __fmaf_rn(row_l, g % 2 ? c1 : c0, sum);
        }
        if constexpr (Wg) {
          const u64 dv = desc_sw128(ring + slot * kStage, 16, 1024), dp = desc_plain(a_p, 128, 1024);
          wgmma_pin(acc[0]), wgmma_pin(acc[1]);
          wgmma_fence();
#pragma unroll
          for (int mt = 0; mt < 2; ++mt)
#pragma unroll
            for (int ks = 0; ks < 4; ++ks)
              Wgmma<Half16::bf16, N>::template ss<1, 1>(acc[mt], desc_add(dv, mt * (kTile * 128) + ks * 2048),
                                                        desc_add(dp, ks * 256), 1);
          wgmma_commit();
          wgmma_wait<0>();
          wgmma_pin(acc[0]), wgmma_pin(acc[1]);
        } else {
          const int key = (lane & 7) + (lane >> 4) * 8, chunk = (w & 1) * 4 + (lane >> 3 & 1);
          const u32 vb = ring + slot * kStage + (w >> 1) * (kTile * 128) + key * 128 + ((chunk ^ (key & 7)) << 4);
#pragma unroll
          for (int kp = 0; kp < 2; ++kp) {
            u32 b[4];
            ldmatrix_x4_trans(b, a_p + (kp * 32 + lane) * 16);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
              for (int mt = 0; mt < 2; ++mt) {
                u32 a[4];
                ldmatrix_x4_trans(a, (vb ^ (mt << 5)) + (kp * 2 + h) * 2048);
                mma_m16n8k16<Half16::bf16>(reinterpret_cast<float (&)[4]>(acc[mt]), a, b[2 * h], b[2 * h + 1]);
              }
          }
        }
        advance();
      }

      if constexpr (RowOrder) {
        if (w == 0) {
          row_l = __fadd_rn(row_l, __shfl_xor_sync(~0u, row_l, 1));
          row_l = __fadd_rn(row_l, __shfl_xor_sync(~0u, row_l, 2));
          if (t == 0) s_red[g] = row_l;
        }
        sync();
        l[0] = s_red[2 * t], l[1] = s_red[2 * t + 1];
      } else {
        // end of a leaf: the sum over the 64 keys of a column, lanes first, then warps in order
#pragma unroll
        for (int c = 0; c < C; ++c) {
          l[c] = __fadd_rn(l[c], __shfl_xor_sync(~0u, l[c], 4));
          l[c] = __fadd_rn(l[c], __shfl_xor_sync(~0u, l[c], 8));
          l[c] = __fadd_rn(l[c], __shfl_xor_sync(~0u, l[c], 16));
          if (g == 0) s_red[w * N + c / 2 * 8 + 2 * t + c % 2] = l[c];
        }
        sync();
#pragma unroll
        for (int c = 0; c < C; ++c) {
          int q = c / 2 * 8 + 2 * t + c % 2;
          l[c] = __fadd_rn(__fadd_rn(s_red[q], s_red[N + q]), __fadd_rn(s_red[2 * N + q], s_red[3 * N + q]));
        }
      }
      if (!have) {
#pragma unroll
        for (int c = 0; c < C; ++c) rm[c] = m[c], rl[c] = l[c];
#pragma unroll
        for (int a = 0; a < A; ++a) racc[0][a] = acc[0][a], racc[1][a] = acc[1][a];
      } else {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          Weights f = fold_ml(rm[c], rl[c], m[c], l[c]);
#pragma unroll
          for (int mt = 0; mt < 2; ++mt)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              int a = c / 2 * 4 + c % 2 + 2 * h;
              racc[mt][a] = fold_acc(racc[mt][a], acc[mt][a], f);
            }
        }
      }
      have = true;
      const bool run_from_zero = it.tile0 == 0;
      if (run_from_zero && tile < it.tile1) continue;
      // write: the output itself, or one state. One base pointer and constant offsets: the end of a short kernel runs
      // from a cold instruction cache, so its code is kept small.
      static_assert(kGroup == 4, "live queries are those of t = 0, 1 in the first group of 8");
      if (t < 2) {
        const int d = (Wg ? w * 16 : w * 32) + g;
        if (Wgs > 1 && p.merge == kMergeCta) {
          float* o = (float*)smem + 2 * t * kDim + d;  // the ring is empty: this was the worker's last tile
#pragma unroll
          for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int x = 0; x < 4; ++x) o[c * kDim + x / 2 * (Wg ? 64 : 16) + x % 2 * 8] = racc[x / 2][c + x % 2 * 2];
          if (g == 0 && w == 0) *(float4*)(smem + 2048 + 16 * t) = make_float4(rm[0], rl[0], rm[1], rl[1]);
        } else if (it.slot0 < 0) {
          unsigned short* o = p.out + ((size_t)it.pair * kGroup + 2 * t) * kDim + d;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float inv = rcp(rl[c]);
#pragma unroll
            for (int x = 0; x < 4; ++x)
              o[c * kDim + x / 2 * (Wg ? 64 : 16) + x % 2 * 8] = to_bf16(__fmul_rn(racc[x / 2][c + x % 2 * 2], inv));
          }
        } else {
          float* o = p.part + ((size_t)leaf_slot * kGroup + 2 * t) * kDim + d;
#pragma unroll
          for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int x = 0; x < 4; ++x) o[c * kDim + x / 2 * (Wg ? 64 : 16) + x % 2 * 8] = racc[x / 2][c + x % 2 * 2];
          if (g == 0 && w == 0)
            *(float4*)(p.ml + (size_t)leaf_slot * kGroup + 2 * t) = make_float4(rm[0], rl[0], rm[1], rl[1]);
        }
      }
      ++leaf_slot;
      have = false;
    }
    if constexpr (Wgs > 1) {
      if (p.merge == kMergeCta) {  // 512 threads, one number each
        __syncthreads();
        const int row = threadIdx.x / kDim, d = threadIdx.x % kDim;
        float x = ((float*)smem_all)[row * kDim + d];
        float2 ml = *(float2*)(smem_all + 2048 + row * 8);
#pragma unroll
        for (int s = 1; s < Wgs; ++s) {
          const unsigned char* b = smem_all + s * kBytes;
          float2 mb = *(const float2*)(b + 2048 + row * 8);
          x = fold_acc(x, ((const float*)b)[row * kDim + d], fold_ml(ml.x, ml.y, mb.x, mb.y));
        }
        p.out[((size_t)it.pair * kGroup + row) * kDim + d] = to_bf16(__fmul_rn(x, rcp(ml.y)));
        return;
      }
    } else {
      if (it.slot0 >= 0) finish_item(p, it, &s_flag);
    }
    sync();
    if (i + 1 < end) it = p.items[i + 1];
  }
}
}  // namespace exp_decode
