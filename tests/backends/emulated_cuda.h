// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels as host code: one CTA after the other, its threads as fibers that switch at every collective
// operation.
//
// Takes the place of ptx.cuh and of the compiler's built-ins. What matters for correctness is kept: an operation of a
// warp happens at once when its last lane arrives; __syncthreads waits for all; an asynchronous copy lands as late as
// allowed (at the wait for its group) or as early as possible (at once), by `eager`; threads run in an order drawn anew
// every round, so that a missing barrier shows. A tensor-core element is the sum of 16 products and the accumulator in
// double, rounded once: as on the machine, roles and neighbours do not matter.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define ATTNRT_DEV static inline

struct Dim {
  unsigned x;
};
static Dim threadIdx, blockIdx, blockDim, gridDim;
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
static inline To emu_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To r;
  std::memcpy(&r, &x, sizeof r);
  return r;
}
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32);
}
static inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
static inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
static inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  const unsigned x = a ^ b;
  return ((x & 0xffffu) ? 0 : 0xffffu) | ((x >> 16) ? 0 : 0xffff0000u);
}
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }

static inline float emu_from_half(unsigned short x) { return static_cast<float>(emu_bits<_Float16>(x)); }
static inline unsigned short emu_to_half(float x) { return emu_bits<unsigned short>(static_cast<_Float16>(x)); }
static inline unsigned short emu_to_bf16(float x) {
  const unsigned u = __float_as_uint(x);
  if (x != x) return static_cast<unsigned short>(u >> 16 | 0x40);
  return static_cast<unsigned short>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline unsigned emu_mul_half2(unsigned a, unsigned b) {
  const unsigned lo = emu_to_half(emu_from_half(a & 0xffff) * emu_from_half(b & 0xffff));
  return lo | static_cast<unsigned>(emu_to_half(emu_from_half(a >> 16) * emu_from_half(b >> 16))) << 16;
}

// ---------------------------------------------------------------- fibers

namespace emu {
constexpr int kThreads = 1024, kStack = 128 << 10;
alignas(1024) static char shared[256 << 10];

struct Copy {
  char* dst;
  const char* src;
  unsigned bytes;
};
struct Fiber {
  void* sp;
  bool over;
  std::vector<std::vector<Copy>> groups;  // open one last
};
static Fiber fibers[kThreads];
static int threads;  // of a CTA, a multiple of 32
static std::vector<char> stacks;
static void* home;
static int current;
static bool eager;
static uint64_t events;  // collectives that came to an end: progress
static void (*entry)(const void*);
static const void* argument;
static uint64_t seed = 1;

// A barrier in shared memory (mbarrier), and copies that arrive on one when they land.
struct Barrier {
  uint16_t count, pending;
  uint32_t phase;
};
struct Landing {
  std::vector<Copy> copies;
  Barrier* barrier;
};
static std::vector<Landing> landings;
static void arrive(Barrier* barrier) {
  if (--barrier->pending == 0) {
    barrier->pending = barrier->count;
    ++barrier->phase;
  }
  ++events;
}
static void land(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    std::memset(copy.dst, 0, 16);
    std::memcpy(copy.dst, copy.src, copy.bytes);
  }
}
// Some of the copies on their way, or all.
static void land_some(bool all) {
  std::vector<Landing> left;
  for (Landing& landing : landings) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    if (!all && seed >> 61) {
      left.push_back(std::move(landing));
    } else {
      land(landing.copies);
      arrive(landing.barrier);
    }
  }
  landings.swap(left);
}

extern "C" void emu_switch(void** save, void* to);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

static void yield() { emu_switch(&fibers[current].sp, home); }
static void body() {
  entry(argument);
  fibers[current].over = true;
  ++events;
  yield();
  abort();
}

static bool run_cta() {
  stacks.resize(static_cast<size_t>(threads) * kStack);
  landings.clear();
  for (int i = 0; i < threads; ++i) {
    void** sp =
        reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stacks.data()) + (i + 1ull) * kStack) & ~uintptr_t(15));
    *--sp = nullptr;
    *--sp = reinterpret_cast<void*>(&body);
    for (int j = 0; j < 6; ++j) *--sp = nullptr;
    fibers[i].sp = sp;
    fibers[i].over = false;
    fibers[i].groups.assign(1, {});
  }
  // Warps are not equally fast: for a while at a time some of them rest.
  uint32_t resting = 0;
  for (int round = 0;; ++round) {
    const uint64_t before = events;
    bool any = false;
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    if (round % 64 == 0) resting = static_cast<uint32_t>(seed >> 33) & static_cast<uint32_t>(seed >> 21);
    const int first = static_cast<int>(seed >> 40), step = static_cast<int>(seed >> 20 | 1);
    for (int k = 0; k < kThreads; ++k) {
      const int i = (first + k * step) & (kThreads - 1);
      if (i >= threads || fibers[i].over) continue;
      any = true;
      if (resting >> i / 32 & 1) continue;
      current = i;
      threadIdx.x = static_cast<unsigned>(i);
      emu_switch(&home, fibers[i].sp);
    }
    if (!any) return true;
    const bool stuck = events == before && !resting;
    if (events == before) resting = 0;
    if (stuck && landings.empty()) return false;  // all wait: lanes disagree about a collective
    land_some(stuck);
  }
}

// One meeting point of `members` threads: the last to arrive does `act`.
struct Meeting {
  int arrived = 0;
  uint64_t generation = 0;
  template <class F>
  void join(int members, F act) {
    const uint64_t mine = generation;
    if (++arrived == members) {
      arrived = 0;
      act();
      ++generation;
      ++events;
    } else {
      while (generation == mine) yield();
    }
  }
};
static Meeting cta, named[16];

// Operands and results of a warp's operation; two sets, since a lane may reach the next operation before the others
// have read.
struct Lane {
  uint64_t in[10];
  uint64_t out[4];
};
struct Warp {
  Meeting meeting;
  Lane lanes[2][32];
};
static Warp warps[kThreads / 32];

template <int kIn, int kOut, class F>
static inline void collective(const uint64_t (&in)[kIn], uint64_t (&out)[kOut], F act) {
  Warp& warp = warps[current / 32];
  Lane* lanes = warp.lanes[warp.meeting.generation & 1];
  const int lane = current % 32;
  for (int i = 0; i < kIn; ++i) lanes[lane].in[i] = in[i];
  warp.meeting.join(32, [&] { act(lanes); });
  for (int i = 0; i < kOut; ++i) out[i] = lanes[lane].out[i];
}
static bool launch(void (*kernel)(const void*), unsigned grid, const void* args, bool early, int block = 128) {
  entry = kernel;
  argument = args;
  eager = early;
  gridDim.x = grid;
  threads = block;
  blockDim.x = static_cast<unsigned>(block);
  for (unsigned b = 0; b < grid; ++b) {
    blockIdx.x = b;
    std::memset(shared, 0xff, sizeof shared);  // NaN
    if (!run_cta()) return false;
  }
  return true;
}
}  // namespace emu

static inline void __syncthreads() {
  emu::cta.join(emu::threads, [] {});
}
static inline void __syncwarp() {
  uint64_t none[1] = {0}, out[1];
  emu::collective(none, out, [](emu::Lane*) {});
}
template <class T>
static inline T __shfl_sync(unsigned, T x, int from, int width = 32) {
  from = (static_cast<int>(threadIdx.x % 32) & ~(width - 1)) | (from & (width - 1));
  uint64_t in[2] = {0, static_cast<uint64_t>(from)}, out[1];
  std::memcpy(in, &x, sizeof x);
  emu::collective(in, out, [](emu::Lane* l) {
    for (int i = 0; i < 32; ++i) l[i].out[0] = l[l[i].in[1]].in[0];
  });
  std::memcpy(&x, out, sizeof x);
  return x;
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T x, int by) {
  return __shfl_sync(mask, x, static_cast<int>(threadIdx.x % 32) ^ by);
}
static inline int __reduce_max_sync(unsigned, int x) {
  uint64_t in[1] = {static_cast<uint64_t>(static_cast<int64_t>(x))}, out[1];
  emu::collective(in, out, [](emu::Lane* l) {
    int64_t best = INT64_MIN;
    for (int i = 0; i < 32; ++i)
      best = static_cast<int64_t>(l[i].in[0]) > best ? static_cast<int64_t>(l[i].in[0]) : best;
    for (int i = 0; i < 32; ++i) l[i].out[0] = static_cast<uint64_t>(best);
  });
  return static_cast<int>(static_cast<int64_t>(out[0]));
}
static inline int __reduce_min_sync(unsigned mask, int x) { return ~__reduce_max_sync(mask, ~x); }
static inline unsigned __ballot_sync(unsigned, bool x) {
  uint64_t in[1] = {x}, out[1];
  emu::collective(in, out, [](emu::Lane* l) {
    uint64_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= l[i].in[0] << i;
    for (int i = 0; i < 32; ++i) l[i].out[0] = bits;
  });
  return static_cast<unsigned>(out[0]);
}
static inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }
static inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }

namespace attnrt {
namespace ptx {
typedef unsigned int u32;
typedef unsigned long long u64;
enum class Half16 { bf16, fp16 };

ATTNRT_DEV u32 smem_addr(const void* p) { return static_cast<u32>(static_cast<const char*>(p) - emu::shared); }
ATTNRT_DEV float ex2(float x) { return exp2f(x); }
ATTNRT_DEV float lg2(float x) { return log2f(x); }
ATTNRT_DEV float rcp(float x) { return 1.0f / x; }
template <Half16 T>
ATTNRT_DEV float wide(unsigned x) {
  return T == Half16::bf16 ? __uint_as_float((x & 0xffffu) << 16) : emu_from_half(static_cast<unsigned short>(x));
}
template <Half16 T>
ATTNRT_DEV u32 pack2(float lo, float hi) {
  return T == Half16::bf16 ? emu_to_bf16(lo) | static_cast<u32>(emu_to_bf16(hi)) << 16
                           : emu_to_half(lo) | static_cast<u32>(emu_to_half(hi)) << 16;
}
template <int Sel>
ATTNRT_DEV u32 prmt(u32 x) {
  u32 r = 0;
  for (int i = 0; i < 4; ++i) r |= (x >> 8 * (Sel >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}
ATTNRT_DEV void cp_async16(u32 dst, const void* src, u32 bytes = 16) {
  if (dst % 16 || dst + 16 > sizeof emu::shared || (bytes && reinterpret_cast<uintptr_t>(src) % 16)) abort();
  const emu::Copy copy = {emu::shared + dst, static_cast<const char*>(src), bytes};
  if (emu::eager) {
    std::memset(copy.dst, 0, 16);
    std::memcpy(copy.dst, copy.src, bytes);
  } else {
    emu::fibers[emu::current].groups.back().push_back(copy);
  }
}
ATTNRT_DEV void cp_async16_once(u32 dst, const void* src, u32 bytes = 16) { cp_async16(dst, src, bytes); }
ATTNRT_DEV void cp_async_commit() { emu::fibers[emu::current].groups.emplace_back(); }
template <int N>
ATTNRT_DEV void cp_async_wait() {
  auto& groups = emu::fibers[emu::current].groups;
  while (static_cast<int>(groups.size()) - 1 > N) {
    emu::land(groups.front());
    groups.erase(groups.begin());
  }
}
ATTNRT_DEV void prefetch_l2(const void*) {}
template <class T, int kCount>
ATTNRT_DEV void load_l2(const T* p, float (&x)[kCount], bool wanted) {
  static_assert(sizeof(T) == sizeof(x), "one word of each");
  if (wanted) memcpy(x, p, sizeof(x));
}
ATTNRT_DEV u32 count_up(u32* counter, u32 by) {
  const u32 old = *counter;
  *counter = old + by;
  return old;
}
ATTNRT_DEV emu::Barrier* barrier_at(u32 bar) { return reinterpret_cast<emu::Barrier*>(emu::shared + bar); }
ATTNRT_DEV void mbar_init(u32 bar, u32 count) {
  *barrier_at(bar) = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0};
}
ATTNRT_DEV void mbar_arrive(u32 bar) { emu::arrive(barrier_at(bar)); }
constexpr u32 kWarpArrivals = 1;
ATTNRT_DEV void mbar_arrive_warp(u32 bar, int lane) {
  __syncwarp();
  if (lane == 0) mbar_arrive(bar);
}
ATTNRT_DEV void cp_async_mbar_arrive_noinc(u32 bar) {
  emu::Landing landing = {{}, barrier_at(bar)};
  auto& groups = emu::fibers[emu::current].groups;
  for (auto& group : groups) landing.copies.insert(landing.copies.end(), group.begin(), group.end());
  groups.assign(1, {});
  emu::landings.push_back(landing);
  if (emu::eager) emu::land_some(true);
}
ATTNRT_DEV void mbar_wait(u32 bar, u32 parity) {
  while ((barrier_at(bar)->phase & 1) == parity) emu::yield();
}
ATTNRT_DEV void wait_for(const u32* count, int least) {
  while (static_cast<int>(*count) < least) emu::yield();
}
ATTNRT_DEV void bar_sync(u32 id, u32 threads) {
  emu::named[id].join(static_cast<int>(threads), [] {});
}
template <int kMatrices, bool kTrans>
ATTNRT_DEV void ldmatrix(u32 (&r)[kMatrices], u32 addr) {
  uint64_t in[1] = {addr}, out[4];
  emu::collective(in, out, [](emu::Lane* l) {
    for (int i = 0; i < 32; ++i)
      for (int m = 0; m < kMatrices; ++m) {
        const int g = i / 4, t = i % 4;
        if (kTrans) {
          unsigned short lo, hi;
          std::memcpy(&lo, emu::shared + l[8 * m + 2 * t].in[0] + 2 * g, 2);
          std::memcpy(&hi, emu::shared + l[8 * m + 2 * t + 1].in[0] + 2 * g, 2);
          l[i].out[m] = lo | static_cast<u32>(hi) << 16;
        } else {
          u32 x;
          std::memcpy(&x, emu::shared + l[8 * m + g].in[0] + 4 * t, 4);
          l[i].out[m] = x;
        }
      }
  });
  for (int m = 0; m < kMatrices; ++m) r[m] = static_cast<u32>(out[m]);
}
ATTNRT_DEV void ldmatrix_x4(u32 (&r)[4], u32 addr) { ldmatrix<4, false>(r, addr); }
ATTNRT_DEV void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) { ldmatrix<4, true>(r, addr); }
ATTNRT_DEV void ldmatrix_x2(u32 (&r)[2], u32 addr) { ldmatrix<2, false>(r, addr); }
ATTNRT_DEV void ldmatrix_x2_trans(u32 (&r)[2], u32 addr) { ldmatrix<2, true>(r, addr); }

template <Half16 T>
ATTNRT_DEV void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  uint64_t in[10] = {a[0], a[1], a[2], a[3], b0, b1}, out[4];
  for (int i = 0; i < 4; ++i) in[6 + i] = __float_as_uint(d[i]);
  emu::collective(in, out, [](emu::Lane* l) {
    float a[16][16], b[16][8];
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4;
      for (int r = 0; r < 4; ++r)
        for (int h = 0; h < 2; ++h)
          a[g + 8 * (r & 1)][2 * t + h + 8 * (r >> 1)] = wide<T>(static_cast<u32>(l[i].in[r]) >> 16 * h);
      for (int r = 0; r < 2; ++r)
        for (int h = 0; h < 2; ++h) b[2 * t + h + 8 * r][g] = wide<T>(static_cast<u32>(l[i].in[4 + r]) >> 16 * h);
    }
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < 4; ++e) {
        double sum = 0;
        for (int k = 0; k < 16; ++k)
          sum += static_cast<double>(a[i / 4 + 8 * (e >> 1)][k]) * b[k][2 * (i % 4) + (e & 1)];
        l[i].out[e] = __float_as_uint(static_cast<float>(sum + __uint_as_float(static_cast<u32>(l[i].in[6 + e]))));
      }
  });
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(static_cast<u32>(out[i]));
}
}  // namespace ptx
}  // namespace attnrt
