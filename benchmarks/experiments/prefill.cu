// SPDX-License-Identifier: Apache-2.0
// Builds, checks and times the Hopper prefill family outside the runtime: plans by longest-item-first, contiguous and
// paged caches, every loader. Each timed configuration is compared with a float64 reference on sampled rows, and its
// output with that of other loaders and worker counts bit by bit. One JSON object per line.
//   nvcc -std=c++17 -gencode=arch=compute_90a,code=sm_90a -O3 -I backends/cuda -I variants/include -o prefill
//   benchmarks/experiments/prefill.cu prefill [quick]
// Units: TFLOP/s count 4 * rows * visible keys * head_dim, which for causal squares is half of the full mask up to the
// diagonal.
#include <cuda.h>

#include <algorithm>
#include <numeric>

#ifdef PREFILL_TRACE
// Clocks of one worker: [role][tile or pass][kind]; its consumers' first warps and the loader's warps write them.
__device__ unsigned long long trace_clock[6][512][8];
#define ATTNRT_TRACE(role, t, kind)                                                           \
  if (blockIdx.x == 5 && threadIdx.x % ((role) < 2 ? 128 : 32) == 0 && (t) >= 0 && (t) < 512) \
  trace_clock[role][t][kind] = clock64()
#endif
#include "../../backends/cuda/kernels/hopper_attend.cuh"
#include "../../backends/cuda/kernels/hopper_loader.cuh"
#include "common.cuh"
#include "prefill_variants.hpp"

using namespace attnrt;

struct Launch {
  RunParams run;
  ParamRef params[1];
  KvMaps maps;
  longlong2* clocks;  // [workers]: cycles and nanoseconds
};

template <class Config, class Variant, Loading kHow>
__global__ void __launch_bounds__(HopperLayout<Config, Variant>::kThreads, 1)
    prefill(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(1024) char smem[];
  long long clock = clock64(), ns = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  prefetch_plan(launch.run);
  hopper_attend<Config, Variant, HopperLoader<Config, Variant, kHow>>(launch.run, launch.params, launch.maps, smem);
  if (threadIdx.x == 128) {
    long long later;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(later));
    launch.clocks[blockIdx.x] = make_longlong2(clock64() - clock, later - ns);
  }
}

// ---------------------------------------------------------------- data and reference
__global__ void fill_normal(unsigned short* x, size_t n, unsigned long long seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    const float u = (hash32(seed + 2 * i) + 1.0f) * 2.3283064e-10f, v = hash32(seed + 2 * i + 1) * 2.3283064e-10f;
    x[i] = from_float<Dtype::bf16>(sqrtf(-2.0f * __logf(u)) * cospif(2.0f * v));
  }
}
__global__ void fill_word(unsigned* x, size_t n, unsigned value) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    x[i] = value;
}
// A cheap order-free digest of bits.
__global__ void digest(const unsigned* x, size_t n, unsigned long long* out) {
  unsigned long long h = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    h += hash32(i * 0x9e3779b97f4a7c15ull ^ x[i]);
  atomicAdd(out, h);
}
// Copies tokens of a contiguous pool to their slots of a paged one.
__global__ void scatter(const uint4* from, uint4* to, const int* slot, int tokens, int row16) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)tokens * row16;
       i += (size_t)gridDim.x * blockDim.x)
    to[(size_t)slot[i / row16] * row16 + i % row16] = from[i];
}
__global__ void read_all(const uint4* x, size_t n, unsigned* sink) {
  unsigned h = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    h ^= x[i].x ^ x[i].w;
  if (h == 0x12345678u) *sink = h;
}

struct Problem {
  int batch, q_len, kv_len, qo_heads, kv_heads, dim;
};

// float64 attention of sampled rows: err2, ref2, worst lse difference.
template <class Variant>
__global__ void check_rows(Problem s, const unsigned short* q, const unsigned short* k, const unsigned short* v,
                           const unsigned short* out, const float* lse, const int* rows, double* result) {
  extern __shared__ double logit[];
  __shared__ double part[256];
  const int row = rows[2 * blockIdx.x], head = rows[2 * blockIdx.x + 1], request = row / s.q_len, query = row % s.q_len;
  Ctx c;
  c.request = request;
  c.qo_pos = s.kv_len - s.q_len + query;
  c.qo_row = row;
  c.qo_head = head;
  c.kv_head = head / (s.qo_heads / s.kv_heads);
  c.qo_len = s.q_len;
  c.kv_len = s.kv_len;
  const ParamRef* none = nullptr;
  const auto hook = Variant::row(none, c);
  int low = INT_LOWEST, high = INT_HIGHEST;
  Variant::visible(hook, low, high);
  const unsigned short* qr = q + ((size_t)row * s.qo_heads + head) * s.dim;
  double top = -1e300;
  for (int i = threadIdx.x; i < s.kv_len; i += 256) {
    double x = -1e300;
    if (i >= low && i <= high) {
      const unsigned short* kr = k + (((size_t)request * s.kv_len + i) * s.kv_heads + c.kv_head) * s.dim;
      double dot = 0;
      for (int d = 0; d < s.dim; ++d) dot += (double)to_float<Dtype::bf16>(qr[d]) * to_float<Dtype::bf16>(kr[d]);
      c.kv_pos = i;
      c.kv_slot = i;
      x = dot / sqrt((double)s.dim);
      if (Variant::has_logits) x = Variant::logits(none, hook, c, (float)x);
    }
    logit[i] = x;
    top = max(top, x);
  }
  part[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < 256; ++i) top = max(top, part[i]);
  __syncthreads();
  double sum = 0;
  for (int i = threadIdx.x; i < s.kv_len; i += 256) {
    logit[i] = exp(logit[i] - top);
    sum += logit[i];
  }
  part[threadIdx.x] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < 256; ++i) sum += part[i];
  if (threadIdx.x < s.dim) {
    double o = 0;
    for (int i = 0; i < s.kv_len; ++i)
      o += logit[i] *
           to_float<Dtype::bf16>(v[(((size_t)request * s.kv_len + i) * s.kv_heads + c.kv_head) * s.dim + threadIdx.x]);
    o /= sum;
    const double got = to_float<Dtype::bf16>(out[((size_t)row * s.qo_heads + head) * s.dim + threadIdx.x]), e = got - o;
    atomicAdd(result, e * e);
    atomicAdd(result + 1, o * o);
    if (!(fabs(e) < 1e300)) atomicAdd(result, 1e30);
  }
  if (threadIdx.x == 0) {
    const double e = fabs(lse[(size_t)row * s.qo_heads + head] - (top + log(sum)));
    atomicMax((unsigned long long*)(result + 2), (unsigned long long)__double_as_longlong(e < 1e300 ? e : 1e30));
  }
}

// ---------------------------------------------------------------- device memory of one run
struct Arena {
  char* base;
  size_t used = 0, size;
  explicit Arena(size_t n) : size(n) { CHECK(cudaMalloc(&base, n)); }
  template <class T>
  T* take(size_t n) {
    used = (used + 1023) / 1024 * 1024;
    T* p = reinterpret_cast<T*>(base + used);
    used += n * sizeof(T);
    if (used > size) exit((fprintf(stderr, "arena too small\n"), 1));
    return p;
  }
  template <class T>
  T* put(const std::vector<T>& x) {
    T* p = take<T>(x.size());
    CHECK(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
  }
};

static FastDiv fast_div(unsigned d) {
  unsigned log = 0;
  while ((1ull << log) < d) ++log;
  if ((1ull << log) == d) return {d, 0, log};
  return {d, (unsigned)(((1ull << (31 + log)) + d - 1) / d), log - 1};
}

typedef CUresult (*Encode)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                           const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static TensorMap encode(const PagedKv& kv, int dim, int heads, long long tokens, long long pages, int box) {
  static Encode f = nullptr;
  if (!f) {
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&f, 12000, cudaEnableDefault, &found));
  }
  CUtensorMap map;
  const cuuint64_t dims[4] = {(cuuint64_t)dim, (cuuint64_t)tokens, (cuuint64_t)heads, (cuuint64_t)pages};
  const cuuint64_t strides[3] = {(cuuint64_t)kv.stride_token * 2, (cuuint64_t)kv.stride_head * 2,
                                 (cuuint64_t)kv.stride_page * 2};
  const cuuint32_t boxes[4] = {64, (cuuint32_t)box, 1, 1}, ones[4] = {1, 1, 1, 1};
  const CUresult rc = f(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)kv.ptr, dims, strides, boxes, ones,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (rc != CUDA_SUCCESS) exit((fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", rc), 1));
  TensorMap result;
  memcpy(&result, &map, sizeof result);
  return result;
}

static int workers_of(int wanted) {
  static int sms = 0;
  if (!sms) CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  return wanted ? wanted : sms;
}

struct Bench {
  // PREFILL_GB: less for a profiler, which saves and restores memory.
  Arena arena{(size_t)(getenv("PREFILL_GB") ? atoi(getenv("PREFILL_GB")) : 24) << 30};
  uint4* flush;
  cudaEvent_t start, stop;
  Bench() {
    CHECK(cudaMalloc(&flush, (size_t)256 << 20));
    CHECK(cudaMemset(flush, 1, (size_t)256 << 20));
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
  }
};

struct Result {
  double us, tflops, err, lse_err, ghz, busy_min;
  unsigned long long bits;
};

// page 0: contiguous; hnd: pages hold [head][token]. section: bytes of KV per section of heads, 0: all heads at once.
struct Setup {
  int page = 0, workers = 0, order = 0;
  bool gather = false, hnd = false;
  int reps = 12;
  double fixed = 0.8;
};

template <int kGroup, int kDim, int kWarpgroups, class Variant, bool kGather>
Result run(Bench& b, const Problem& s, const Setup& set) {
  using Config = TileConfig<kGroup, kDim, kWarpgroups>;
  using L = HopperLayout<Config, Variant>;
  Arena& a = b.arena;
  a.used = 0;
  const int rows = s.batch * s.q_len, tokens = s.batch * s.kv_len;
  const size_t kv_n = (size_t)tokens * s.kv_heads * kDim, q_n = (size_t)rows * s.qo_heads * kDim;
  auto* q = a.take<unsigned short>(q_n);
  auto* k = a.take<unsigned short>(kv_n);
  auto* v = a.take<unsigned short>(kv_n);
  auto* out = a.take<unsigned short>(q_n);
  auto* lse = a.take<float>((size_t)rows * s.qo_heads);
  auto* clocks = a.take<longlong2>(1024);
  fill_normal<<<1024, 256>>>(q, q_n, 11);
  fill_normal<<<1024, 256>>>(k, kv_n, 1000000000ull);
  fill_normal<<<1024, 256>>>(v, kv_n, 3000000000ull);
  fill_word<<<1024, 256>>>((unsigned*)out, q_n / 2, 0x7fc07fc0u);

  Launch launch{};
  RunParams& p = launch.run;
  p.q = (const char*)q;
  p.q_stride_row = p.out_stride_row = s.qo_heads * kDim;
  p.q_stride_head = p.out_stride_head = kDim;
  p.out = (char*)out;
  p.lse = lse;
  p.lse_stride_row = s.qo_heads;
  p.lse_stride_head = 1;
  p.sm_scale = 1.0f / sqrtf((float)kDim);
  p.num_qo_heads = s.qo_heads;

  // The cache: contiguous, or pages in random order with spare pages full of NaN between them.
  const int page = set.page ? set.page : 1;
  const int per_request = (s.kv_len + page - 1) / page, pages = s.batch * per_request;
  std::vector<int> table(pages), slots(tokens);
  long long pool = tokens;
  const unsigned short *pk = k, *pv = v;
  if (set.page) {
    const int spare = pages + pages / 8 + 1;
    std::vector<int> order(spare);
    std::iota(order.begin(), order.end(), 0);
    for (int i = spare - 1; i > 0; --i) std::swap(order[i], order[hash32(77 + i) % (i + 1)]);
    for (int i = 0; i < pages; ++i) table[i] = order[i];
    for (int t = 0; t < tokens; ++t)
      slots[t] = table[t / s.kv_len * per_request + t % s.kv_len / page] * page + t % s.kv_len % page;
    pool = (long long)spare * page;
    auto* wk = a.take<unsigned short>((size_t)pool * s.kv_heads * kDim);
    auto* wv = a.take<unsigned short>((size_t)pool * s.kv_heads * kDim);
    fill_word<<<1024, 256>>>((unsigned*)wk, (size_t)pool * s.kv_heads * kDim / 2, 0x7fc07fc0u);
    fill_word<<<1024, 256>>>((unsigned*)wv, (size_t)pool * s.kv_heads * kDim / 2, 0x7fc07fc0u);
    const int* ds = a.put(slots);
    scatter<<<1024, 256>>>((const uint4*)k, (uint4*)wk, ds, tokens, s.kv_heads * kDim / 8);
    scatter<<<1024, 256>>>((const uint4*)v, (uint4*)wv, ds, tokens, s.kv_heads * kDim / 8);
    pk = wk;
    pv = wv;
  }
  auto paged = [&](const unsigned short* x) {
    PagedKv kv{};
    kv.ptr = (const char*)x;
    kv.stride_token = s.kv_heads * kDim;
    kv.stride_head = kDim;
    kv.stride_page = (long long)page * s.kv_heads * kDim;
    kv.num_slots = pool;
    kv.page = fast_div(page);
    kv.vectors = 1;
    return kv;
  };
  p.k = paged(pk);
  p.v = paged(pv);
  const int box = set.page ? std::min(page, L::kTile) : L::kTile;
  if (!set.gather) {
    if (set.page) {
      launch.maps.k = encode(p.k, kDim, s.kv_heads, page, pool / page, box);
      launch.maps.v = encode(p.v, kDim, s.kv_heads, page, pool / page, box);
      launch.maps.page_k = launch.maps.page_v = p.k.page;
    } else {
      launch.maps.k = encode(p.k, kDim, s.kv_heads, pool, 1, box);
      launch.maps.v = encode(p.v, kDim, s.kv_heads, pool, 1, box);
      launch.maps.page_k = launch.maps.page_v = fast_div(1u << 31);
    }
    while ((1 << launch.maps.box_log2) < box) ++launch.maps.box_log2;
  }

  // The plan: one part, one block row per request.
  std::vector<int> request(rows), pos(rows), indptr(s.batch + 1), zeros(s.batch, 0), lens(s.batch, s.kv_len),
      qlens(s.batch, s.q_len);
  std::vector<long long> base(s.batch);
  for (int i = 0; i < rows; ++i) {
    request[i] = i / s.q_len;
    pos[i] = s.kv_len - s.q_len + i % s.q_len;
  }
  for (int i = 0; i <= s.batch; ++i) indptr[i] = i * per_request;
  for (int i = 0; i < s.batch; ++i) base[i] = (long long)i * s.kv_len;
  PlanHeader h{};
  PartDesc& part = h.parts[0];
  part.request = a.put(request);
  part.qo_pos = a.put(pos);
  part.indptr = a.put(indptr);
  part.indices = set.page ? a.put(table) : nullptr;
  part.kv_base = set.page ? nullptr : a.put(base);
  part.kv_begin = a.put(zeros);
  part.kv_end = a.put(lens);
  part.kv_offset = a.put(zeros);
  part.block = fast_div(page);
  part.heads = 1;
  std::vector<WorkItem> items;
  const int queries = L::kRows / kGroup;
  double visible = 0;
  for (int r = 0; r < s.batch; ++r)
    for (int head = 0; head < s.kv_heads; ++head)
      for (int q0 = 0; q0 < s.q_len; q0 += queries) {
        const int q1 = std::min(q0 + queries, s.q_len), shift = s.kv_len - s.q_len;
        int begin = 0, end = s.kv_len;
        if (Variant::has_mask) end = q1 + shift;
        if (std::is_same<Variant, WindowVariant>::value) begin = std::max(0, q0 + shift - kWindow);
        WorkItem w{};
        w.row = r;
        w.q_begin = r * s.q_len + q0;
        w.q_end = r * s.q_len + q1;
        w.head_begin = head;
        w.head_end = head + 1;
        w.kv_begin = begin;
        w.kv_end = end;
        w.leaf_end = 1;
        w.slot = -1;
        w.fold = 1;
        w.cost = (end + L::kTile - 1) / L::kTile - begin / L::kTile;
        items.push_back(w);
        for (int i = q0; i < q1; ++i) {
          const int at = i + shift;
          visible += !Variant::has_mask                            ? s.kv_len
                     : std::is_same<Variant, WindowVariant>::value ? std::min(at, kWindow) + 1
                                                                   : at + 1;
        }
      }
  visible *= kGroup;
  // Longest first inside a section: heads (of all requests) whose K and V fit in part of the L2 together; then to the
  // first free worker.
  const double head_bytes = 4.0 * s.kv_len * kDim;
  const int per_section = set.order == 0 ? 1 << 30 : std::max(1, (int)(set.order * 1048576.0 / head_bytes));
  auto section = [&](const WorkItem& w) { return (w.row * s.kv_heads + w.head_begin) / per_section; };
  std::stable_sort(items.begin(), items.end(), [&](const WorkItem& x, const WorkItem& y) {
    return section(x) != section(y) ? section(x) < section(y) : x.cost > y.cost;
  });
  const int workers = workers_of(set.workers);
  std::vector<std::vector<WorkItem>> lists(workers);
  std::vector<std::pair<double, int>> heap;
  for (int w = 0; w < workers; ++w) heap.push_back({0.0, w});
  auto later = [](const std::pair<double, int>& x, const std::pair<double, int>& y) { return x > y; };
  for (const WorkItem& w : items) {
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.back().first += w.cost + set.fixed;
    lists[heap.back().second].push_back(w);
    std::push_heap(heap.begin(), heap.end(), later);
  }
  std::vector<WorkItem> work;
  std::vector<int> worker_indptr(1, 0);
  for (auto& list : lists) {
    work.insert(work.end(), list.begin(), list.end());
    worker_indptr.push_back((int)work.size());
  }
  h.work = a.put(work);
  h.worker_indptr = a.put(worker_indptr);
  h.qo_lens = a.put(qlens);
  h.kv_lens = a.put(lens);
  h.team_workers = workers;
  h.num_parts = 1;
  h.solid = 1;
  for (auto& ruler : h.rulers) ruler.tail = 1 << 30;
  p.plan = a.put(std::vector<PlanHeader>{h});
  launch.clocks = clocks;

  // Launch, check, time.
  auto kernel = prefill<Config, Variant, Loading::boxes>;
  if constexpr (kGather) {
    if (set.gather) kernel = prefill<Config, Variant, Loading::gather>;
  }
  const int smem = hopper_smem_bytes<Config, Variant>();
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  CHECK(cudaGetLastError());
  kernel<<<workers, L::kThreads, smem>>>(launch);
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  Result res{};
  const int samples = 96;
  std::vector<int> sample(2 * samples);
  for (int i = 0; i < samples; ++i) {
    sample[2 * i] = i < 8 ? (i % 2 ? rows - 1 - i : i) : (int)(hash32(5000 + 3 * i) % rows);
    sample[2 * i + 1] = hash32(9000 + 5 * i) % s.qo_heads;
  }
  const int* dsample = a.put(sample);
  double* result = a.take<double>(4);
  CHECK(cudaMemset(result, 0, 4 * sizeof(double)));
  CHECK(cudaFuncSetAttribute(check_rows<Variant>, cudaFuncAttributeMaxDynamicSharedMemorySize, s.kv_len * 8));
  check_rows<Variant><<<samples, 256, s.kv_len * 8>>>(s, q, k, v, out, lse, dsample, result);
  CHECK(cudaGetLastError());
  unsigned long long* bits = (unsigned long long*)(result + 3);
  digest<<<1024, 256>>>((const unsigned*)out, q_n / 2, bits);
  double host[4];
  CHECK(cudaMemcpy(host, result, sizeof host, cudaMemcpyDeviceToHost));
  res.err = sqrt(host[0] / host[1]);
  res.lse_err = host[2];
  memcpy(&res.bits, &host[3], 8);
  std::vector<double> times;
  for (int i = 0; i < set.reps; ++i) {
    read_all<<<1024, 256>>>(b.flush, ((size_t)256 << 20) / 16, (unsigned*)result);
    CHECK(cudaEventRecord(b.start));
    kernel<<<workers, L::kThreads, smem>>>(launch);
    CHECK(cudaEventRecord(b.stop));
    CHECK(cudaEventSynchronize(b.stop));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, b.start, b.stop));
    times.push_back(ms * 1e3);
  }
  if (!times.empty()) {
    res.us = median(times);
    res.tflops = 4.0 * visible * kDim / res.us * 1e-6;
    std::vector<longlong2> c(workers);
    CHECK(cudaMemcpy(c.data(), clocks, workers * sizeof(longlong2), cudaMemcpyDeviceToHost));
    double cycles = 0, ns = 0, low = 1e30, high = 0;
    for (auto& x : c) {
      cycles += x.x;
      ns += x.y;
      low = std::min(low, (double)x.y);
      high = std::max(high, (double)x.y);
    }
    res.ghz = cycles / ns;
    res.busy_min = low / high;
  }
  return res;
}

template <int kGroup, int kDim, int kWarpgroups, class Variant, bool kGather = false>
Result report(Bench& b, const char* name, const Problem& s, const Setup& set, double target) {
  const Result r = run<kGroup, kDim, kWarpgroups, Variant, kGather>(b, s, set);
  printf(
      "{\"case\":\"%s\",\"B\":%d,\"Sq\":%d,\"Skv\":%d,\"H\":\"%d/"
      "%d\",\"D\":%d,\"page\":%d,\"loader\":\"%s\",\"order\":%d,\"workers\":%d,"
      "\"us\":%.1f,\"tflops\":%.1f,\"target\":%.0f,\"ratio\":%.3f,\"err\":%.2e,\"lse_err\":%.1e,\"ghz\":%.3f,\"busy\":%"
      ".3f,\"bits\":\"%016llx\"}\n",
      name, s.batch, s.q_len, s.kv_len, s.qo_heads, s.kv_heads, s.dim, set.page, set.gather ? "gather" : "boxes",
      set.order, workers_of(set.workers), r.us, r.tflops, target, target ? r.tflops / target : 0.0, r.err, r.lse_err,
      r.ghz, r.busy_min, r.bits);
  fflush(stdout);
  return r;
}

static Setup setup(int page, bool gather, int order, int workers = 0, int reps = 12) {
  Setup s;
  s.page = page;
  s.gather = gather;
  s.order = order;
  s.workers = workers;
  s.reps = reps;
  return s;
}

#ifdef PREFILL_TRACE
// The traced worker's clocks as one line per tile and role, relative to the first.
static void print_trace(const char* name) {
  static unsigned long long c[6][512][8];
  CHECK(cudaMemcpyFromSymbol(c, trace_clock, sizeof c));
  unsigned long long first = ~0ull;
  for (auto& role : c)
    for (auto& tile : role)
      for (auto x : tile)
        if (x) first = std::min(first, x);
  for (int role = 0; role < 6; ++role)
    for (int t = 0; t < 512; ++t) {
      if (!c[role][t][0]) continue;
      printf("trace %s %d %d", name, role, t);
      for (auto x : c[role][t]) printf(" %lld", x ? (long long)(x - first) : -1LL);
      printf("\n");
    }
  memset(c, 0, sizeof c);
  CHECK(cudaMemcpyToSymbol(trace_clock, c, sizeof c));
}
#endif

#ifndef PREFILL_MAIN
int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  Bench b;
  // Right, with odd lengths, cut pages, few workers, every loader: one digest each.
  for (const Problem s : {Problem{3, 333, 333, 4, 4, 128}, Problem{2, 200, 1111, 4, 4, 128}}) {
    for (int workers : {0, 7}) {
      report<1, 128, 2, CausalVariant, true>(b, "check causal", s, setup(0, false, 0, workers, 0), 0);
      report<1, 128, 2, CausalVariant, true>(b, "check causal", s, setup(16, false, 0, workers, 0), 0);
      report<1, 128, 2, CausalVariant, true>(b, "check causal", s, setup(64, false, 0, workers, 0), 0);
      report<1, 128, 2, CausalVariant, true>(b, "check causal", s, setup(1, true, 0, workers, 0), 0);
    }
  }
  const Problem odd{2, 200, 1111, 8, 2, 128};
  report<4, 128, 2, CausalVariant, true>(b, "check group 4", odd, setup(0, false, 0, 0, 0), 0);
  report<4, 128, 2, CausalVariant, true>(b, "check group 4", odd, setup(16, false, 0, 0, 0), 0);
  report<4, 128, 2, CausalVariant, true>(b, "check group 4", odd, setup(16, true, 0, 0, 0), 0);
  if (what == "check") return 0;

  const int sizes[] = {512, 1024, 2048, 4096, 8192, 16384};
  const double fa3[] = {318.8, 443.9, 569.7, 599.6, 629.5, 655.7},
               fa3_full[] = {495.5, 568.4, 616.8, 655.9, 661.9, 670.8};
  for (int i = 0; i < 6; ++i) {
    const Problem s{16384 / sizes[i], sizes[i], sizes[i], 16, 16, 128};
    for (int order : {0, 32}) report<1, 128, 2, CausalVariant, true>(b, "causal", s, setup(0, false, order), fa3[i]);
  }
  if (what == "quick") return 0;
  for (int i = 0; i < 6; ++i)
    report<1, 128, 2, FullVariant>(b, "full", {16384 / sizes[i], sizes[i], sizes[i], 16, 16, 128}, setup(0, false, 32),
                                   fa3_full[i]);
  report<4, 128, 2, CausalVariant, true>(b, "causal", {8, 2048, 2048, 32, 8, 128}, setup(0, false, 32), 556.2);
  report<4, 128, 2, CausalVariant, true>(b, "causal", {2, 8192, 8192, 32, 8, 128}, setup(0, false, 32), 617.8);
  report<4, 128, 2, CausalVariant, true>(b, "causal", {1, 16384, 16384, 32, 8, 128}, setup(0, false, 32), 644.9);
  for (const Problem s : {Problem{32, 1024, 1024, 32, 8, 128}, Problem{8, 2048, 2048, 32, 8, 128},
                          Problem{1, 16384, 16384, 32, 8, 128}, Problem{8, 512, 8192, 32, 8, 128}}) {
    for (int page : {0, 64, 16}) report<4, 128, 2, CausalVariant, true>(b, "paged", s, setup(page, false, 32), 0);
    report<4, 128, 2, CausalVariant, true>(b, "paged", s, setup(1, true, 32), 0);
  }
  for (int size : {2048, 8192, 16384}) {
    const Problem s{16384 / size, size, size, 16, 16, 128};
    report<1, 128, 2, SoftcapVariant>(b, "softcap", s, setup(0, false, 32),
                                      size == 2048   ? 446.3
                                      : size == 8192 ? 501.6
                                                     : 536.4);
    report<1, 128, 2, WindowVariant>(b, "window", s, setup(0, false, 32),
                                     size == 2048   ? 438.4
                                     : size == 8192 ? 373.7
                                                    : 437.9);
    report<1, 128, 2, AlibiVariant>(b, "alibi", s, setup(0, false, 32), 0);
  }
  for (int order : {0, 32})
    report<1, 64, 3, CausalVariant>(b, "causal", {8, 2048, 2048, 32, 32, 64}, setup(0, false, order), 394.4);
  return 0;
}
#endif
