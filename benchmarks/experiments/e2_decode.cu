// SPDX-License-Identifier: Apache-2.0
// E2 and E4: decode microkernels (queries on M=64, swap-AB at N = 8, 16, 32, mma.sync both ways) and the cost of the fold.
//
// bf16, 32 query / 8 KV heads, head_dim 128, pages of 16 in random order, NHD. Every variant is checked against float64 on sampled
// rows, and its bits are compared between worker counts and cuts. Times: median over graph replays, per launch; launches rotate over
// disjoint page sets so that the L2 is cold and clean.
#include <cmath>

#include "decode_m.cuh"
#include "decode_swap.cuh"
using namespace exp_decode;

// The frame without arithmetic: what the loader alone reaches.
template <int Stages, int CtasPerSm>
__global__ void __launch_bounds__(kThreads, CtasPerSm) decode_stream(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const int begin = p.worker_indptr[blockIdx.x], end = p.worker_indptr[blockIdx.x + 1];
  if (begin == end) return;
  Loader<Stages> ld(p, smem_addr(smem), begin, end);
#pragma unroll
  for (int i = 0; i < Stages - 1; ++i) ld.issue();
  int slot = 0, x = 0;
  for (int i = begin; i < end; ++i) {
    const Item it = p.items[i];
    for (int s = 2 * it.tile0; s < 2 * it.tile1; ++s) {
      cp_async_wait<Stages - 2>();
      __syncthreads();
      ld.issue();
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        int4 v = *(const int4*)(smem + slot * kStage + j * 2048 + threadIdx.x * 16);
        x ^= v.x ^ v.y ^ v.z ^ v.w;
      }
      slot = slot + 1 == Stages ? 0 : slot + 1;
    }
  }
  if (x == 0x12345678) p.out[threadIdx.x] = 1;
}

__global__ void fill_bf16(unsigned short* x, size_t n, unsigned seed, float scale) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    x[i] = (unsigned short)pack2<Half16::bf16>(__uint_as_float((unsigned)bf16_uniform(hash32(i * 0x9e3779b97f4a7c15ull + seed)) << 16) * scale, 0.f);
}

typedef void (*Kernel)(Params);
struct Variant {
  const char* name;
  Kernel f;
  int smem, ctas;
  bool checked;
};

static constexpr int smem_swap(int stages, int n) { return stages * kStage + n * 256 + n / 8 * 1024 + n * 16 + 64; }

struct Problem {
  int requests, kv_len, sets;
  int pairs() const { return requests * kHeads; }
  int tiles() const { return kv_len / kTile; }
};

struct Plan {
  std::vector<Item> items;
  std::vector<int> indptr;
  std::vector<PairSlots> pairs;
  int slots = 0, cut = 0;
};

// Contiguous runs of equal length, their ends rounded to multiples of `unit` tiles (a multiple of the leaf).
static Plan make_plan(const Problem& pr, int workers, int leaf, int unit) {
  Plan pl;
  long total = (long)pr.pairs() * pr.tiles();
  pl.pairs.assign(pr.pairs(), PairSlots{0, 0, 0});
  pl.indptr.push_back(0);
  auto border = [&](int w) { return std::min(total, (total * w / workers + unit / 2) / unit * unit); };
  for (int w = 0; w < workers; ++w) {
    for (long x = border(w), e = border(w + 1); x < e;) {
      int pair = x / pr.tiles(), t0 = x % pr.tiles();
      int t1 = std::min<long>(pr.tiles(), t0 + (e - x));
      PairSlots& ps = pl.pairs[pair];
      if (t0 == 0 && t1 == pr.tiles()) {
        pl.items.push_back({pair, t0, t1, -1});
      } else {
        if (ps.parts == 0) ps.slot0 = pl.slots;
        int n = t0 == 0 ? 1 : (t1 - t0 + leaf - 1) / leaf;
        pl.items.push_back({pair, t0, t1, pl.slots});
        ps.slots += n, ps.parts += 1, pl.slots += n;
        pl.cut += t0 != 0;
      }
      x += t1 - t0;
    }
    pl.indptr.push_back((int)pl.items.size());
  }
  return pl;
}

struct Device {
  unsigned short *q, *k, *v, *out;
  int* table;
  Item* items;
  int* indptr;
  PairSlots* pairs;
  float* part;
  float2* ml;
  unsigned* counters;
  std::vector<int> perm;
};
static Device D;
constexpr int kPages = 16384, kMaxRequests = 64, kMaxSlots = 40000;
static int g_fail = 0;

static void upload(const Plan& pl) {
  if (pl.slots > kMaxSlots) fprintf(stderr, "too many slots\n"), exit(1);
  CHECK(cudaMemcpy(D.items, pl.items.data(), pl.items.size() * sizeof(Item), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(D.indptr, pl.indptr.data(), pl.indptr.size() * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(D.pairs, pl.pairs.data(), pl.pairs.size() * sizeof(PairSlots), cudaMemcpyHostToDevice));
}

static Params params(const Problem& pr, int set, int leaf, int merge) {
  int ppr = pr.kv_len / kPage;
  return Params{D.q, D.k, D.v, D.table + (size_t)set * pr.requests * ppr, ppr, D.items, D.indptr, D.pairs, D.part, D.ml, D.counters, D.out,
                (float)(1.4426950408889634 / sqrt(128.0)), leaf, merge, pr.pairs()};
}

static void launch(const Variant& v, int workers, const Params& p, cudaStream_t s, bool pdl) {
  v.f<<<workers, kThreads, v.smem, s>>>(p);
  CHECK(cudaGetLastError());
  if (p.merge != kMergeKernel) return;
  cudaLaunchConfig_t c{};
  c.gridDim = dim3(p.num_pairs), c.blockDim = dim3(kThreads), c.stream = s;
  cudaLaunchAttribute a{};
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization, a.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &a, c.numAttrs = pdl;
  CHECK(cudaLaunchKernelEx(&c, merge_kernel, p));
}

static std::vector<unsigned short> run_once(const Problem& pr, const Variant& v, int workers, int leaf, int unit, int merge) {
  size_t n = (size_t)pr.pairs() * kGroup * kDim;
  upload(make_plan(pr, workers, leaf, unit));
  CHECK(cudaMemset(D.out, 0xff, n * 2));
  CHECK(cudaMemset(D.part, 0xff, (size_t)kMaxSlots * kGroup * kDim * 4));
  launch(v, workers, params(pr, pr.sets - 1, leaf, merge), 0, false);
  CHECK(cudaDeviceSynchronize());
  std::vector<unsigned short> o(n);
  CHECK(cudaMemcpy(o.data(), D.out, n * 2, cudaMemcpyDeviceToHost));
  return o;
}

// Largest ||out - ref|| / ||ref|| over sampled (pair, row); float64 softmax attention of the bf16 inputs.
static double worst_error(const Problem& pr, const std::vector<unsigned short>& out) {
  int ppr = pr.kv_len / kPage;
  const int* table = D.perm.data() + (size_t)(pr.sets - 1) * pr.requests * ppr;
  std::vector<unsigned short> page(kPage * kHeads * kDim), q(kGroup * kDim);
  double worst = 0;
  for (int pair : {0, 1, pr.pairs() / 3, pr.pairs() / 2 + 3, pr.pairs() - 2, pr.pairs() - 1}) {
    int req = pair / kHeads, head = pair % kHeads;
    std::vector<float> kf((size_t)pr.kv_len * kDim), vf(kf.size());
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < ppr; ++i) {
        CHECK(cudaMemcpy(page.data(), (half ? D.v : D.k) + (size_t)table[req * ppr + i] * page.size(), page.size() * 2, cudaMemcpyDeviceToHost));
        for (int r = 0; r < kPage; ++r)
          for (int d = 0; d < kDim; ++d) (half ? vf : kf)[(size_t)(i * kPage + r) * kDim + d] = bf16_to_float(page[(r * kHeads + head) * kDim + d]);
      }
    CHECK(cudaMemcpy(q.data(), D.q + (size_t)pair * kGroup * kDim, q.size() * 2, cudaMemcpyDeviceToHost));
    for (int row = 0; row < kGroup; ++row) {
      std::vector<double> s(pr.kv_len), o(kDim, 0.0);
      double mx = -1e300, l = 0, e = 0, r2 = 0;
      for (int j = 0; j < pr.kv_len; ++j) {
        double a = 0;
        for (int d = 0; d < kDim; ++d) a += (double)bf16_to_float(q[row * kDim + d]) * kf[(size_t)j * kDim + d];
        s[j] = a / sqrt(128.0), mx = std::max(mx, s[j]);
      }
      for (int j = 0; j < pr.kv_len; ++j) {
        double x = exp(s[j] - mx);
        l += x;
        for (int d = 0; d < kDim; ++d) o[d] += x * vf[(size_t)j * kDim + d];
      }
      for (int d = 0; d < kDim; ++d) {
        double x = bf16_to_float(out[((size_t)pair * kGroup + row) * kDim + d]) - o[d] / l;
        e += x * x, r2 += o[d] / l * o[d] / l;
        if (!(x == x)) e = INFINITY;
      }
      worst = std::max(worst, sqrt(e / r2));
    }
  }
  return worst;
}

static double time_us(const Problem& pr, const Variant& v, int workers, int leaf, int merge, bool pdl) {
  cudaStream_t s;
  CHECK(cudaStreamCreate(&s));
  cudaGraph_t g;
  cudaGraphExec_t ge;
  int n = pr.sets > 1 ? pr.sets : 4;
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < n; ++i) launch(v, workers, params(pr, i % pr.sets, leaf, merge), s, pdl);
  CHECK(cudaStreamEndCapture(s, &g));
  CHECK(cudaGraphInstantiate(&ge, g, 0));
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<double> t;
  for (int r = 0; r < 17; ++r) {
    CHECK(cudaEventRecord(a, s));
    CHECK(cudaGraphLaunch(ge, s));
    CHECK(cudaEventRecord(b, s));
    CHECK(cudaEventSynchronize(b));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, a, b));
    if (r > 1) t.push_back(ms * 1e3 / n);
  }
  CHECK(cudaGraphExecDestroy(ge));
  CHECK(cudaGraphDestroy(g));
  CHECK(cudaStreamDestroy(s));
  return median(t);
}

static void bench(const char* exp, const Problem& pr, const Variant& v, int sms, int leaf, int unit, int merge, bool pdl = false) {
  int workers = sms * v.ctas;
  Plan pl = make_plan(pr, workers, leaf, unit);
  upload(pl);
  double us = time_us(pr, v, workers, leaf, merge, pdl), bytes = (double)pr.requests * pr.kv_len * kHeads * kDim * 4;
  printf("{\"exp\":\"%s\",\"variant\":\"%s\",\"bs\":%d,\"kv\":%d,\"leaf\":%d,\"unit\":%d,\"merge\":\"%s\",\"slots\":%d,\"cuts\":%d,\"us\":%.2f,\"tb_s\":%.3f}\n",
         exp, v.name, pr.requests, pr.kv_len, leaf * kTile, unit * kTile, merge == 0 ? "none" : merge == 1 ? "last" : pdl ? "kernel+pdl" : "kernel",
         pl.slots, pl.cut, us, bytes / us * 1e-6);
  fflush(stdout);
}

int main() {
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  const int sms = prop.multiProcessorCount;
  size_t pool = (size_t)kPages * kPage * kHeads * kDim;
  CHECK(cudaMalloc(&D.k, pool * 2));
  CHECK(cudaMalloc(&D.v, pool * 2));
  size_t nq = (size_t)kMaxRequests * kHeads * kGroup * kDim;
  CHECK(cudaMalloc(&D.q, nq * 2));
  CHECK(cudaMalloc(&D.out, nq * 2));
  CHECK(cudaMalloc(&D.table, kPages * 4));
  CHECK(cudaMalloc(&D.items, 1 << 20));
  CHECK(cudaMalloc(&D.indptr, 1 << 16));
  CHECK(cudaMalloc(&D.pairs, 1 << 16));
  CHECK(cudaMalloc(&D.part, (size_t)kMaxSlots * kGroup * kDim * 4));
  CHECK(cudaMalloc(&D.ml, (size_t)kMaxSlots * kGroup * 8));
  CHECK(cudaMalloc(&D.counters, kMaxRequests * kHeads * 4));
  CHECK(cudaMemset(D.counters, 0, kMaxRequests * kHeads * 4));
  fill_bf16<<<1024, 256>>>(D.k, pool, 1, 1.f);
  fill_bf16<<<1024, 256>>>(D.v, pool, 2, 1.f);
  fill_bf16<<<64, 256>>>(D.q, nq, 3, 8.f);
  D.perm.resize(kPages);
  for (int i = 0; i < kPages; ++i) D.perm[i] = i;
  for (int i = kPages - 1; i > 0; --i) std::swap(D.perm[i], D.perm[hash32(i + 17) % (i + 1)]);
  CHECK(cudaMemcpy(D.table, D.perm.data(), kPages * 4, cudaMemcpyHostToDevice));
  CHECK(cudaDeviceSynchronize());

  std::vector<Variant> vs = {
      {"stream only 4x3", decode_stream<3, 4>, 3 * kStage, 4, false},
      {"swap wgmma n8 4x3", decode_swap<true, 8, 3, 4>, smem_swap(3, 8), 4, true},
      {"swap wgmma n16 4x3", decode_swap<true, 16, 3, 4>, smem_swap(3, 16), 4, true},
      {"swap wgmma n32 3x3", decode_swap<true, 32, 3, 3>, smem_swap(3, 32), 3, true},
      {"swap mma n8 4x3", decode_swap<false, 8, 3, 4>, smem_swap(3, 8), 4, true},
      {"mma m16 4x3", decode_m16<3, 4>, 3 * kStage + 1024, 4, true},
      {"wgmma m64 3x4", decode_m64<4, 3>, 4 * kStage + 2048 + 4096, 3, true},
      {"swap wgmma n8 3x4", decode_swap<true, 8, 4, 3>, smem_swap(4, 8), 3, true},
      {"mma m16 3x4", decode_m16<4, 3>, 4 * kStage + 1024, 3, true},
      {"swap mma n8 2x6", decode_swap<false, 8, 6, 2>, smem_swap(6, 8), 2, true},
  };
  for (auto& v : vs) {
    CHECK(cudaFuncSetAttribute(v.f, cudaFuncAttributeMaxDynamicSharedMemorySize, v.smem));
    int n = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, v.f, kThreads, v.smem));
    cudaFuncAttributes at;
    CHECK(cudaFuncGetAttributes(&at, v.f));
    printf("{\"exp\":\"E2\",\"variant\":\"%s\",\"registers\":%d,\"local_bytes\":%d,\"ctas_per_sm\":%d,\"smem\":%d}\n", v.name, at.numRegs,
           (int)at.localSizeBytes, n, v.smem);
  }

  // Right first: float64 on sampled rows; the same bits for other worker counts, cuts and merges.
  Problem small{16, 1024, 16}, big{64, 4096, 1};
  std::vector<std::vector<unsigned short>> outs;
  std::vector<const char*> names;
  for (auto& v : vs) {
    if (!v.checked) continue;
    auto a = run_once(small, v, sms * v.ctas, 4, 4, kMergeLast), b = run_once(small, v, 7, 4, 4, kMergeLast),
         c = run_once(small, v, 128, 4, 16, kMergeLast), d = run_once(small, v, sms * v.ctas, 4, 4, kMergeKernel);
    double err = worst_error(small, a);
    bool same = a == b && a == c && a == d;
    auto e = run_once(big, v, sms * v.ctas, 8, 8, kMergeLast), f = run_once(big, v, 512, 8, 64, kMergeLast);
    double err2 = worst_error(big, e);
    bool ok = same && e == f && err < 6e-3 && err2 < 6e-3;
    g_fail += !ok;
    int twin = -1;
    for (size_t i = 0; i < outs.size() && twin < 0; ++i)
      if (outs[i] == a) twin = i;
    printf("{\"exp\":\"E2\",\"variant\":\"%s\",\"rel_err_small\":%.2e,\"rel_err_big\":%.2e,\"same_bits_any_cut\":%s,\"first_with_same_bits\":\"%s\",\"ok\":%s}\n",
           v.name, err, err2, same && e == f ? "true" : "false", twin < 0 ? "-" : names[twin], ok ? "true" : "false");
    outs.push_back(a), names.push_back(v.name);
  }
  fflush(stdout);

  for (auto& v : vs) {
    bench("E2", small, v, sms, 4, 4, v.checked ? kMergeLast : kMergeNone);
    bench("E2", big, v, sms, 64, 64, kMergeLast);  // whole rows, one leaf
    bench("E2", big, v, sms, 8, 8, kMergeLast);    // leaves of 512, equal runs
  }
  // E4a: leaves folded in registers (whole rows) and cut rows (equal runs)
  for (int i : {1, 4, 5, 6})
    for (int leaf : {4, 8, 16, 32, 64}) {
      bench("E4a", big, vs[i], sms, leaf, 64, kMergeLast);
      if (leaf < 64) bench("E4b", big, vs[i], sms, leaf, leaf, kMergeLast);
    }
  // E4c: S states of 256 keys each, 512 states in all, one per CTA; how they are merged
  for (int i : {4})
    for (int S : {2, 4, 8, 16, 32}) {
      Problem pr{64 / S, 256 * S, 16};
      bench("E4c", pr, vs[i], sms, 4, 4, kMergeNone);
      bench("E4c", pr, vs[i], sms, 4, 4, kMergeLast);
      bench("E4c", pr, vs[i], sms, 4, 4, kMergeKernel);
      bench("E4c", pr, vs[i], sms, 4, 4, kMergeKernel, true);
    }
  fprintf(stderr, "E2: %d variants failed\n", g_fail);
  return g_fail != 0;
}
