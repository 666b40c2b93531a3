// SPDX-License-Identifier: Apache-2.0
// E1: do the bits of one element of a tensor-core product depend on anything but its own two vectors?
//
// Every CTA is one trial: two vectors x, y of 128 16-bit numbers and a start value c. x sits in one row of A, y in one
// column of B (or the other way round), every other row and column holds zeros, random numbers or NaN/inf garbage; the
// one element x.y + c is kept. The host counts how many of the trials differ in any bit from mma.sync with x in row 0,
// y in column 0 and zeros elsewhere.
#include <cmath>

#include "common.cuh"
using namespace attnrt::ptx;

constexpr int kDim = 128;
constexpr int kTrials = 4096;

struct Case {
  const unsigned short* a;  // [trials, kDim] vector that goes to A (rows)
  const unsigned short* b;  // [trials, kDim] vector that goes to B (columns)
  const float* c;           // [trials] start value
  unsigned* out;            // [trials] bits of the element
  int fill;                 // other rows and columns: 0 zeros, 1 random, 2 random with NaN and inf
  int move;                 // 0: position (0, 0); 1: position by hash of the trial
  int chain;                // 0: all k-steps in one group, 1: one group per k-step, waited for
  unsigned seed;
};

__device__ unsigned short filler(const Case& cs, int side, int pos, int k) {
  if (cs.fill == 0) return 0;
  unsigned h = hash32(((unsigned long long)(cs.seed + blockIdx.x * 2 + side) << 32) | (pos * 1024 + k));
  if (cs.fill == 2 && (h & 3) == 0) return (h & 4) ? 0x7f80 | (h >> 16 & 0x8000) : 0x7fc1 | (h >> 16 & 0x803f);
  return (h & 0x8000) | (0x3c00 + (h >> 16 & 0x0fff));  // finite in bf16 and fp16
}
__device__ float filler_acc(const Case& cs, int pos) {
  if (cs.fill == 0) return 0.f;
  unsigned h = hash32(((unsigned long long)(cs.seed ^ 77) << 32) | (blockIdx.x * 16384 + pos));
  if (cs.fill == 2 && (h & 3) == 0) return __uint_as_float((h & 4) ? 0x7f800000u : 0x7fc00001u);
  return (float)(int)h * 1e-8f;
}
__device__ unsigned short elem(const Case& cs, int side, int pos, int star, int k) {
  return pos == star ? (side ? cs.b : cs.a)[blockIdx.x * kDim + k] : filler(cs, side, pos, k);
}
__device__ unsigned pair(const Case& cs, int side, int pos, int star, int k) {
  return elem(cs, side, pos, star, k) | (unsigned)elem(cs, side, pos, star, k + 1) << 16;
}
__device__ int star_of(const Case& cs, int side, int n) {
  return cs.move ? hash32(cs.seed * 7919ull + blockIdx.x * 2 + side) % n : 0;
}

template <Half16 T>
__global__ void mma_case(Case cs) {
  int lane = threadIdx.x, g = lane / 4, t = lane % 4, i = star_of(cs, 0, 16), j = star_of(cs, 1, 8);
  float d[4];
  for (int r = 0; r < 4; ++r) {
    int row = g + (r / 2) * 8, col = 2 * t + r % 2;
    d[r] = row == i && col == j ? cs.c[blockIdx.x] : filler_acc(cs, row * 8 + col);
  }
  for (int k = 0; k < kDim; k += 16) {
    unsigned a[4] = {pair(cs, 0, g, i, k + 2 * t), pair(cs, 0, g + 8, i, k + 2 * t), pair(cs, 0, g, i, k + 2 * t + 8),
                     pair(cs, 0, g + 8, i, k + 2 * t + 8)};
    mma_m16n8k16<T>(d, a, pair(cs, 1, g, j, k + 2 * t), pair(cs, 1, g, j, k + 2 * t + 8));
  }
  for (int r = 0; r < 4; ++r)
    if (g + (r / 2) * 8 == i && 2 * t + r % 2 == j) cs.out[blockIdx.x] = __float_as_uint(d[r]);
}

// Byte offset of element (pos, k) in a 128-byte-swizzled operand of `extent` rows: K-major in slabs of 64 k, or
// MN-major in slabs of 64 pos.
__device__ unsigned offset(int mn_major, int extent, int pos, int k) {
  int row = mn_major ? k : pos, col = mn_major ? pos : k;
  int slab = (mn_major ? kDim : extent) * 128;
  return (col / 64) * slab + row * 128 + (((col % 64) / 8 ^ (row & 7)) << 4) + (col % 8) * 2;
}

template <Half16 T, int N, bool RS, int TA, int TB>
__global__ void __launch_bounds__(128) wgmma_case(Case cs) {
  extern __shared__ unsigned char raw[];
  unsigned char* base = raw + (1024 - (smem_addr(raw) & 1023)) % 1024;
  constexpr int NP = TB ? (N + 63) / 64 * 64 : N;
  unsigned char *sa = base, *sb = base + 64 * kDim * 2;
  int i = star_of(cs, 0, 64), j = star_of(cs, 1, N), tid = threadIdx.x, w = tid / 32, g = tid % 32 / 4, t = tid % 4;
  for (int e = tid; e < 64 * kDim; e += 128)
    *(unsigned short*)(sa + offset(TA, 64, e / kDim, e % kDim)) = elem(cs, 0, e / kDim, i, e % kDim);
  for (int e = tid; e < NP * kDim; e += 128)
    *(unsigned short*)(sb + offset(TB, NP, e / kDim, e % kDim)) = elem(cs, 1, e / kDim, j, e % kDim);
  float d[N / 2];
#pragma unroll
  for (int r = 0; r < N / 2; ++r) {
    int row = w * 16 + g + (r % 4 / 2) * 8, col = r / 4 * 8 + 2 * t + r % 2;
    d[r] = row == i && col == j ? cs.c[blockIdx.x] : filler_acc(cs, row * N + col);
  }
  fence_proxy_async();
  __syncthreads();
  u64 da = desc_sw128(smem_addr(sa), 16, 1024);
  u64 db = desc_sw128(smem_addr(sb), TB ? kDim * 128 : 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kDim / 16; ++s) {
    u64 b = desc_add(db, TB ? s * 2048 : s / 4 * (NP * 128) + s % 4 * 32);
    if constexpr (RS) {
      int k = s * 16, m = w * 16 + g;
      unsigned a[4] = {pair(cs, 0, m, i, k + 2 * t), pair(cs, 0, m + 8, i, k + 2 * t), pair(cs, 0, m, i, k + 2 * t + 8),
                       pair(cs, 0, m + 8, i, k + 2 * t + 8)};
      wgmma_fence();
      Wgmma<T, N>::template rs<TB>(d, a, b, 1);
    } else {
      Wgmma<T, N>::template ss<TA, TB>(d, desc_add(da, TA ? s * 2048 : s / 4 * 8192 + s % 4 * 32), b, 1);
    }
    if (cs.chain) {
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(d);
      wgmma_fence();
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
#pragma unroll
  for (int r = 0; r < N / 2; ++r) {
    int row = w * 16 + g + (r % 4 / 2) * 8, col = r / 4 * 8 + 2 * t + r % 2;
    if (row == i && col == j) cs.out[blockIdx.x] = __float_as_uint(d[r]);
  }
}

struct Data {
  unsigned short *x, *y;
  float* c;
  unsigned* out;
  const char *type, *dist;
};

typedef void (*Launch)(Case);
static int g_bad = 0;

static std::vector<unsigned> fetch(const Data& d) {
  std::vector<unsigned> v(kTrials);
  CHECK(cudaMemcpy(v.data(), d.out, kTrials * 4, cudaMemcpyDeviceToHost));
  return v;
}
static void compare(const Data& d, const std::vector<unsigned>& ref, Launch f, const char* name) {
  int total = 0, runs = 0;
  for (int role = 0; role < 2; ++role) {
    int bad[3][2] = {};
    for (int fill = 0; fill < 3; ++fill)
      for (int chain = 0; chain < 2; ++chain) {
        CHECK(cudaMemset(d.out, 0xa5, kTrials * 4));
        f(Case{role ? d.y : d.x, role ? d.x : d.y, d.c, d.out, fill, 1, chain, 1234u + 10 * fill + role});
        CHECK(cudaGetLastError());
        auto v = fetch(d);
        for (int t = 0; t < kTrials; ++t) bad[fill][chain] += v[t] != ref[t];
        total += bad[fill][chain], ++runs;
      }
    printf(
        "{\"exp\":\"E1\",\"type\":\"%s\",\"data\":\"%s\",\"instr\":\"%s\",\"x_on\":\"%s\",\"trials\":%d,\"differ_"
        "zero\":%d,"
        "\"differ_random\":%d,\"differ_nan\":%d,\"differ_stepwise\":%d}\n",
        d.type, d.dist, name, role ? "B" : "A", kTrials, bad[0][0], bad[1][0], bad[2][0],
        bad[0][1] + bad[1][1] + bad[2][1]);
  }
  g_bad += total != 0;
}

template <Half16 T>
static void l_mma(Case c) {
  mma_case<T><<<kTrials, 32>>>(c);
}
template <Half16 T, int N, bool RS, int TA, int TB>
static void l_wg(Case c) {
  int smem = 1024 + 64 * kDim * 2 + (N < 64 ? 64 : N) * kDim * 2;
  CHECK(cudaFuncSetAttribute(wgmma_case<T, N, RS, TA, TB>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  wgmma_case<T, N, RS, TA, TB><<<kTrials, 128, smem>>>(c);
}

template <Half16 T, int N>
static void all_n(const Data& d, const std::vector<unsigned>& ref) {
  char s[64];
  snprintf(s, 64, "wgmma n%d ss", N), compare(d, ref, l_wg<T, N, false, 0, 0>, s);
  snprintf(s, 64, "wgmma n%d rs", N), compare(d, ref, l_wg<T, N, true, 0, 0>, s);
  snprintf(s, 64, "wgmma n%d ss A,B MN-major", N), compare(d, ref, l_wg<T, N, false, 1, 1>, s);
  snprintf(s, 64, "wgmma n%d rs B MN-major", N), compare(d, ref, l_wg<T, N, true, 0, 1>, s);
}

template <Half16 T>
static void all(Data d, bool wide, bool with_c) {
  d.type = T == Half16::bf16 ? "bf16" : "fp16";
  d.dist = wide ? (with_c ? "wide,c" : "wide") : (with_c ? "narrow,c" : "narrow");
  std::vector<unsigned short> x(kTrials * kDim), y(x.size());
  std::vector<float> c(kTrials);
  int bits = T == Half16::bf16 ? 7 : 10, bias = T == Half16::bf16 ? 127 : 15,
      span = wide ? (T == Half16::bf16 ? 24 : 12) : 3;
  auto draw = [&](unsigned long long n) {
    unsigned h = hash32(n * 0x9e3779b97f4a7c15ull + 99);
    return (unsigned short)((h & 0x8000) | (bias - (h >> 16) % span) << bits | (h & ((1 << bits) - 1)));
  };
  for (size_t n = 0; n < x.size(); ++n) x[n] = draw(2 * n), y[n] = draw(2 * n + 1);
  for (int n = 0; n < kTrials; ++n) c[n] = with_c ? (float)(int)hash32(n + 555) * (wide ? 1e-7f : 1e-9f) : 0.f;
  CHECK(cudaMemcpy(d.x, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d.y, y.data(), y.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d.c, c.data(), c.size() * 4, cudaMemcpyHostToDevice));
  l_mma<T>(Case{d.x, d.y, d.c, d.out, 0, 0, 0, 1});
  CHECK(cudaGetLastError());
  auto ref = fetch(d);
  // The harness must be able to see a difference: a sequential float32 sum of the same products has other bits in most
  // trials.
  int differ = 0;
  double worst = 0;
  for (int t = 0; t < kTrials; ++t) {
    auto val = [&](unsigned short b) {
      if (T == Half16::bf16) return bf16_to_float(b);
      float m = 1.f + (b & 1023) / 1024.f;
      return ldexpf(b & 0x8000 ? -m : m, (b >> 10 & 31) - 15);
    };
    float s = c[t];
    double e = c[t];
    for (int k = 0; k < kDim; ++k) {
      s += val(x[t * kDim + k]) * val(y[t * kDim + k]);
      e += (double)val(x[t * kDim + k]) * val(y[t * kDim + k]);
    }
    unsigned u;
    memcpy(&u, &s, 4);
    differ += u != ref[t];
    float r;
    memcpy(&r, &ref[t], 4);
    worst = std::max(worst, fabs(r - e) / (fabs(e) + 1e-3));
  }
  printf(
      "{\"exp\":\"E1\",\"type\":\"%s\",\"data\":\"%s\",\"instr\":\"float32 sequential "
      "sum\",\"trials\":%d,\"differ\":%d,"
      "\"mma_max_rel_err\":%.3g}\n",
      d.type, d.dist, kTrials, differ, worst);
  compare(d, ref, l_mma<T>, "mma.sync m16n8k16");
  // Positive control and a question of its own: the same products in another order of k.
  const char* orders[] = {"k-steps of 16 reversed", "shuffled inside each 16", "halves of each 16 swapped",
                          "shuffled inside each 8", "shuffled over all 128"};
  for (int o = 0; o < 5; ++o) {
    std::vector<unsigned short> px(x.size()), py(x.size());
    for (int t = 0; t < kTrials; ++t) {
      int idx[kDim], block = o == 3 ? 8 : o == 4 ? kDim : 16;
      for (int k = 0; k < kDim; ++k) idx[k] = o == 0 ? kDim - 16 - k / 16 * 16 + k % 16 : o == 2 ? (k ^ 8) : k;
      if (o == 1 || o >= 3)
        for (int k = 0; k < kDim; ++k) {
          int j = k / block * block + hash32(t * 1000ull + k) % (k % block + 1);
          std::swap(idx[k], idx[j]);
        }
      for (int k = 0; k < kDim; ++k) px[t * kDim + k] = x[t * kDim + idx[k]], py[t * kDim + k] = y[t * kDim + idx[k]];
    }
    CHECK(cudaMemcpy(d.x, px.data(), x.size() * 2, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(d.y, py.data(), y.size() * 2, cudaMemcpyHostToDevice));
    int bad[2] = {};
    for (int f = 0; f < 2; ++f) {
      (f ? l_wg<T, 64, false, 0, 0> : l_mma<T>)(Case{d.x, d.y, d.c, d.out, 0, 0, 0, 1});
      CHECK(cudaGetLastError());
      auto v = fetch(d);
      for (int t = 0; t < kTrials; ++t) bad[f] += v[t] != ref[t];
    }
    printf(
        "{\"exp\":\"E1\",\"type\":\"%s\",\"data\":\"%s\",\"order\":\"%s\",\"trials\":%d,\"mma_other_bits\":%d,\"wgmma_"
        "other_bits\":%d}\n",
        d.type, d.dist, orders[o], kTrials, bad[0], bad[1]);
  }
  CHECK(cudaMemcpy(d.x, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d.y, y.data(), y.size() * 2, cudaMemcpyHostToDevice));
  all_n<T, 8>(d, ref), all_n<T, 16>(d, ref), all_n<T, 24>(d, ref), all_n<T, 32>(d, ref), all_n<T, 64>(d, ref),
      all_n<T, 128>(d, ref);
}

int main() {
  Data d{};
  CHECK(cudaMalloc(&d.x, kTrials * kDim * 2));
  CHECK(cudaMalloc(&d.y, kTrials * kDim * 2));
  CHECK(cudaMalloc(&d.c, kTrials * 4));
  CHECK(cudaMalloc(&d.out, kTrials * 4));
  for (int m = 0; m < 4; ++m) all<Half16::bf16>(d, m & 1, m & 2);
  all<Half16::fp16>(d, false, true);
  all<Half16::fp16>(d, true, true);
  fprintf(stderr, "E1: %d instruction forms with differing bits\n", g_bad);
  return 0;
}
