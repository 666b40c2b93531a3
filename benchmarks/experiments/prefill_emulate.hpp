// SPDX-License-Identifier: Apache-2.0
// The Hopper prefill kernel on a CPU: stands in for ptx.cuh and the CUDA built-ins, so that the same headers run
// without a GPU. Every CUDA thread is a fiber of one thread; a random fiber runs until it has to wait. Asynchronous
// work (TMA, cp.async, wgmma) happens at a random moment between its issue and the wait that orders it, which shows a
// buffer that is handed over too early or refilled too soon, and a schedule that nobody can leave (deadlock). What it
// cannot show: memory-model faults, missing proxy fences.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__

struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index {
  unsigned x = 0;
};

namespace emu {
constexpr unsigned kBase = 1024;  // shared-window address of the dynamic part
alignas(1024) inline char smem[232448];
struct Group {
  std::vector<std::function<void()>> ops;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned tid;
  bool done = false;
  std::function<bool()> ready;  // what it waits for, or empty
  Group open_copies, open_products;
  std::vector<Group> copies, products;  // committed, oldest first
};
struct Warp {
  unsigned long long slot[2][32];
  int arrived[2] = {0, 0};
  long gen = 0;
};
struct Mbar {
  int count = 0, pending = 0;
  long tx = 0;
  int phase = 0;
};
struct Named {
  int arrived = 0;
  long gen = 0;
};
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Warp> warps;
inline std::vector<int> naps;  // rounds for which a warp does not run
inline std::map<unsigned, Mbar> mbars;
inline Named named[17];
inline std::vector<std::function<void()>> in_flight;  // TMA
inline Fiber* self;
inline ucontext_t scheduler;
inline unsigned long long rng = 1;
inline unsigned random() {
  rng = rng * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(rng >> 33);
}
inline void wait_for(std::function<bool()> ready) {
  if (ready() && random() % 8) return;
  self->ready = std::move(ready);
  swapcontext(&self->context, &scheduler);
}
inline void run_some(std::vector<Group>& groups, size_t keep) {
  while (groups.size() > keep) {
    for (auto& op : groups.front().ops) op();
    groups.erase(groups.begin());
  }
}
inline void tick() {
  if (!in_flight.empty() && random() % 4 == 0) {
    const size_t i = random() % in_flight.size();
    auto op = in_flight[i];
    in_flight.erase(in_flight.begin() + i);
    op();
  }
}
// 64-bit values of the 32 lanes.
inline const unsigned long long* exchange(unsigned long long x) {
  Warp& w = warps[self->tid / 32];
  const long gen = w.gen;
  const int side = gen & 1;
  w.slot[side][self->tid % 32] = x;
  if (++w.arrived[side] == 32) {
    w.arrived[side] = 0;
    ++w.gen;
  } else {
    wait_for([&w, gen] { return w.gen > gen; });
  }
  return w.slot[side];
}
inline void check(Mbar& b) {
  if (b.pending == 0 && b.tx == 0) {
    b.phase ^= 1;
    b.pending = b.count;
  }
}
inline char* at(unsigned addr) {
  if (addr < kBase || addr >= kBase + sizeof smem) {
    fprintf(stderr, "shared address %u\n", addr);
    abort();
  }
  return smem + (addr - kBase);
}
inline unsigned swizzle(unsigned a) { return a ^ ((a >> 7 & 7) << 4); }
inline float bf16(unsigned short b) {
  unsigned u = (unsigned)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline unsigned short to_bf16(float f) {
  unsigned u;
  memcpy(&u, &f, 4);
  return f != f ? 0x7fff : (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float e4m3(unsigned char b) {
  const int e = b >> 3 & 15, m = b & 7;
  const float x = (b & 127) == 127 ? NAN : e ? std::ldexp(1.0f + m / 8.0f, e - 7) : std::ldexp(m / 8.0f, -6);
  return b & 128 ? -x : x;
}
// Nearest even, saturating.
inline unsigned char to_e4m3(float f) {
  const unsigned char sign = std::signbit(f) ? 128 : 0;
  if (f != f) return sign | 127;
  const float x = std::min(std::fabs(f), 448.0f);
  const int e = x < 0.015625f ? -6 : std::ilogb(x);
  const int eighths = static_cast<int>(std::nearbyint(std::ldexp(x, 3 - e)));  // 8 to 16, or below 8 if subnormal
  return sign | static_cast<unsigned char>((e + 6) * 8 + eighths);
}
inline std::function<void()> body;
inline void fiber_main() {
  body();
  self->done = true;
  swapcontext(&self->context, &scheduler);
}
// Runs one CTA; false: a deadlock.
inline bool run(int threads, std::function<void()> f) {
  body = std::move(f);
  fibers.clear();
  warps.assign(threads / 32, Warp());
  mbars.clear();
  in_flight.clear();
  for (auto& n : named) n = Named();
  for (auto& c : smem) c = (char)0xff;  // NaN
  for (int t = 0; t < threads; ++t) {
    auto fb = std::make_unique<Fiber>();
    fb->tid = t;
    fb->stack.reset(new char[131072]);
    getcontext(&fb->context);
    fb->context.uc_stack.ss_sp = fb->stack.get();
    fb->context.uc_stack.ss_size = 131072;
    fb->context.uc_link = nullptr;
    makecontext(&fb->context, fiber_main, 0);
    fibers.push_back(std::move(fb));
  }
  std::vector<Fiber*> runnable;
  naps.assign(threads / 32, 0);
  for (;;) {
    runnable.clear();
    bool left = false;
    for (auto& fb : fibers) {
      if (fb->done) continue;
      left = true;
      if (!fb->ready || fb->ready()) runnable.push_back(fb.get());
    }
    if (!left) return true;
    if (runnable.empty()) {
      if (in_flight.empty()) return false;
      while (!in_flight.empty()) {
        auto op = in_flight.back();
        in_flight.pop_back();
        op();
      }
      continue;
    }
    // Now and then a warp falls asleep for many rounds, wherever it is, so that the others get far ahead of it.
    bool any = false;
    for (auto& n : naps) n = n ? n - 1 : random() % 48 == 0 ? 60 : 0;
    const size_t from = random() % runnable.size();
    for (size_t i = 0; i < runnable.size() || !any; ++i) {
      Fiber* fb = runnable[(from + i) % runnable.size()];
      if (i >= runnable.size()) naps.assign(threads / 32, 0);  // all asleep: wake them
      if (naps[fb->tid / 32]) continue;
      any = true;
      if (fb->done || (fb->ready && !fb->ready())) continue;
      fb->ready = nullptr;
      self = fb;
      swapcontext(&scheduler, &fb->context);
      tick();
    }
  }
}
struct Tid {
  struct X {
    operator unsigned() const { return self->tid; }
  } x;
};
}  // namespace emu

inline emu::Tid threadIdx;
inline Index blockIdx, gridDim;

template <class T>
inline unsigned long long pun(T x) {
  unsigned long long u = 0;
  memcpy(&u, &x, sizeof x);
  return u;
}
template <class T>
inline T unpun(unsigned long long u) {
  T x;
  memcpy(&x, &u, sizeof x);
  return x;
}
template <class T>
inline T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  const int own = emu::self->tid & 31;
  return unpun<T>(emu::exchange(pun(x))[(own & ~(width - 1)) | (lane & (width - 1))]);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return unpun<T>(emu::exchange(pun(x))[(emu::self->tid & 31) ^ mask]);
}
inline int __reduce_min_sync(unsigned, int x) {
  auto* s = emu::exchange(pun(x));
  int r = unpun<int>(s[0]);
  for (int i = 1; i < 32; ++i) r = std::min(r, unpun<int>(s[i]));
  return r;
}
inline int __reduce_max_sync(unsigned, int x) {
  auto* s = emu::exchange(pun(x));
  int r = unpun<int>(s[0]);
  for (int i = 1; i < 32; ++i) r = std::max(r, unpun<int>(s[i]));
  return r;
}
inline int __all_sync(unsigned, int x) {
  auto* s = emu::exchange(x != 0);
  for (int i = 0; i < 32; ++i)
    if (!s[i]) return 0;
  return 1;
}
inline int __any_sync(unsigned, int x) {
  auto* s = emu::exchange(x != 0);
  for (int i = 0; i < 32; ++i)
    if (s[i]) return 1;
  return 0;
}
inline unsigned __ballot_sync(unsigned, int x) {
  auto* s = emu::exchange(x != 0);
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (s[i] ? 1u : 0u) << i;
  return r;
}
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int __clz(unsigned x) { return x == 0 ? 32 : __builtin_clz(x); }
inline void __syncwarp() { emu::exchange(0); }
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned n) {
  return n >= 32 ? hi : n ? lo >> n | hi << (32 - n) : lo;
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) { return __funnelshift_rc(lo, hi, n & 31); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
inline int __vimin3_s32(int a, int b, int c) { return std::min(a, std::min(b, c)); }
inline int __vimax3_s32(int a, int b, int c) { return std::max(a, std::max(b, c)); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return std::max(a, std::max(b, c)); }
inline int __float_as_int(float x) {
  int r;
  memcpy(&r, &x, 4);
  return r;
}
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  const unsigned x = a ^ b;
  return ((x & 0xffffu) ? 0 : 0xffffu) | ((x >> 16) ? 0 : 0xffff0000u);
}
inline float __int_as_float(int x) { return unpun<float>(pun(x)); }
inline float __uint_as_float(unsigned x) { return unpun<float>(pun(x)); }
inline unsigned __float_as_uint(float x) { return unpun<unsigned>(pun(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
using std::max;
using std::min;

namespace attnrt {
namespace ptx {
typedef unsigned u32;
typedef unsigned long long u64;
enum class Half16 { bf16, fp16 };
inline u32 smem_addr(const void* p) { return (u32)((const char*)p - emu::smem) + emu::kBase; }
inline bool elect_one() {
  emu::exchange(0);
  return emu::self->tid % 32 == 0;
}
inline float ex2(float x) { return exp2f(x); }
inline float lg2(float x) { return log2f(x); }
inline float rcp(float x) { return 1.0f / x; }
inline float min_nan(float x, float y) { return x != x || y < x ? x != x ? x : y : x; }
template <Half16 T>
inline u32 pack2(float lo, float hi) {
  return emu::to_bf16(lo) | (u32)emu::to_bf16(hi) << 16;
}
inline void cp_async16(u32 dst, const void* src, u32 bytes = 16) {
  auto op = [=] {
    if (bytes)
      memcpy(emu::at(dst), src, 16);
    else
      memset(emu::at(dst), 0, 16);
  };
  if (emu::random() % 4 == 0)
    op();
  else
    emu::self->open_copies.ops.push_back(op);
}
inline void cp_async_commit() {
  emu::self->copies.push_back(std::move(emu::self->open_copies));
  emu::self->open_copies = {};
}
template <int N>
inline void cp_async_wait() {
  emu::run_some(emu::self->copies, N);
}
inline void st_shared(u32 a, u32 x) { memcpy(emu::at(a), &x, 4); }
inline void fill_shared16(u32 a, u32 x) {
  for (int i = 0; i < 4; ++i) st_shared(a + 4 * i, x);
}
template <bool kE4m3>
inline void widen_fp8(u32 x, u32& lo, u32& hi) {
  u32 half[4];
  for (int i = 0; i < 4; ++i) {
    const u32 b = x >> 8 * i & 0xff;
    half[i] = kE4m3 ? pun(static_cast<_Float16>(emu::e4m3(b))) & 0xffff : b << 8;
  }
  lo = half[0] | half[1] << 16;
  hi = half[2] | half[3] << 16;
}
inline u32 ld_shared(u32 a) {
  u32 x;
  memcpy(&x, emu::at(a), 4);
  return x;
}
inline void st_shared16(u32 a, const u32 (&x)[4]) { memcpy(emu::at(a), x, 16); }
inline void ld_shared16(u32 (&x)[4], u32 a) { memcpy(x, emu::at(a), 16); }
inline void st_matrices(u32 a, u32 x0, u32 x1, u32 x2, u32 x3) {
  const u32 x[4] = {x0, x1, x2, x3}, lane = emu::self->tid % 32;
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = __shfl_sync(0xffffffffu, a, 8 * i + lane / 4);
    memcpy(emu::at(row + lane % 4 * 4), &x[i], 4);
  }
}
inline void ld_matrices_turned(u32 (&x)[4], u32 a) {
  const u32 lane = emu::self->tid % 32;
  for (u32 i = 0; i < 4; ++i) {
    unsigned short of[2];
    for (u32 e = 0; e < 2; ++e) {
      const u32 row = __shfl_sync(0xffffffffu, a, 8 * i + lane % 4 * 2 + e);
      memcpy(&of[e], emu::at(row + lane / 4 * 2), 2);
    }
    x[i] = of[0] | static_cast<u32>(of[1]) << 16;
  }
}
inline u32 bytes_of(u32 a, u32 b, u32 which) {
  const u64 both = a | static_cast<u64>(b) << 32;
  u32 x = 0;
  for (int i = 0; i < 4; ++i) x |= static_cast<u32>(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return x;
}
inline u32 pack4_e4m3(float a, float b, float c, float d) {
  const float x[4] = {a, b, c, d};
  u32 y = 0;
  for (int i = 0; i < 4; ++i) y |= static_cast<u32>(emu::to_e4m3(x[i])) << 8 * i;
  return y;
}
inline void st_shared8(u32 a, const u32 (&x)[2]) { memcpy(emu::at(a), x, 8); }
inline void ld_shared8(u32 (&x)[2], u32 a) { memcpy(x, emu::at(a), 8); }
inline u32 load_if(bool yes, const u32* at) { return yes ? *at : 0; }
inline u32 load_byte_if(bool yes, const unsigned char* at) { return yes ? *at : 0; }
inline void forget() {}
inline void computed(float, u32) {}
inline float after(float) { return -INFINITY; }
inline void renew(int&) {}
inline void loaded(int) {}
inline const char* opaque(const char* p) { return p; }
template <int N>
inline void fresh(float (&)[N]) {}
inline void nap(u32) {}
template <int N>
inline void prefetch_l2(const char*) {}
// The thread's copies so far, and its arrival, at a random moment.
inline void mbar_complete(u32 bar);
inline void cp_async_mbar_arrive_noinc(u32 bar) {
  auto all = std::make_shared<emu::Group>(std::move(emu::self->open_copies));
  emu::self->open_copies = {};
  emu::in_flight.push_back([=] {
    for (auto& op : all->ops) op();
    mbar_complete(bar);
  });
}
// The same with an arrival of its own.
inline void cp_async_mbar_arrive(u32 bar) {
  ++emu::mbars.at(bar).pending;
  cp_async_mbar_arrive_noinc(bar);
}
inline void bar_arrive(u32 id, u32 threads) {
  auto& b = emu::named[id];
  if (++b.arrived == (int)threads) {
    b.arrived = 0;
    ++b.gen;
  }
}
inline void bar_sync(u32 id, u32 threads) {
  auto& b = emu::named[id];
  const long gen = b.gen;
  bar_arrive(id, threads);
  emu::wait_for([&b, gen] { return b.gen > gen; });
}
inline void mbar_init(u32 bar, u32 count) {
  emu::Mbar m;
  m.count = m.pending = count;
  emu::mbars[bar] = m;
}
inline void mbar_init_fence() {}
inline void mbar_complete(u32 bar) {
  auto& b = emu::mbars.at(bar);
  if (b.pending-- == 0) {
    fprintf(stderr, "too many arrivals\n");
    abort();
  }
  emu::check(b);
}
inline void mbar_arrive(u32 bar) {
  mbar_complete(bar);
  if (emu::random() % 4 == 0) {  // the others may get far ahead, right here
    emu::naps[emu::self->tid / 32] = 60;
    emu::self->ready = [] { return true; };
    swapcontext(&emu::self->context, &emu::scheduler);
  }
}
constexpr u32 kWarpArrivals = 1;
inline void mbar_arrive_warp(u32 bar, int lane) {
  __syncwarp();
  if (lane == 0) mbar_arrive(bar);
}
inline void mbar_arrive_expect_tx(u32 bar, u32 bytes) {
  emu::mbars.at(bar).tx += bytes;
  mbar_arrive(bar);
}
inline bool mbar_test_wait(u32 bar, u32 parity) { return emu::mbars.at(bar).phase != (int)parity; }
inline bool mbar_try_wait(u32 bar, u32 parity) {
  emu::wait_for([=] { return mbar_test_wait(bar, parity); });
  return true;
}
inline void mbar_wait(u32 bar, u32 parity) {
  emu::wait_for([=] { return mbar_test_wait(bar, parity); });
}
// opaque: base, strides in bytes of token, head, page; extents of dim, token, head, page; tokens per box; 1: numbers of
// one byte, else of two. A box is 128 bytes wide.
inline void tma_load_4d(u32 dst, const void* map, u32 bar, int c0, int c1, int c2, int c3) {
  emu::in_flight.push_back([=] {
    const u64* m = (const u64*)map;
    for (u64 r = 0; r < m[8]; ++r)
      for (int i = 0; i < (m[9] == 1 ? 128 : 64); ++i) {
        const int bytes = m[9] == 1 ? 1 : 2;
        unsigned short x = 0;
        const long long d = c0 + i, t = c1 + (long long)r;
        if (d >= 0 && d < (long long)m[4] && t >= 0 && t < (long long)m[5] && c2 >= 0 && c2 < (long long)m[6] &&
            c3 >= 0 && c3 < (long long)m[7])
          memcpy(&x, (const char*)m[0] + d * bytes + t * (long long)m[1] + c2 * (long long)m[2] + c3 * (long long)m[3],
                 bytes);
        memcpy(emu::at(emu::swizzle(dst + r * 128 + i * bytes)), &x, bytes);
      }
    auto& b = emu::mbars.at(bar);
    b.tx -= (long)m[8] * 128;
    emu::check(b);
  });
}
inline void tma_load_4d_once(u32 dst, const void* map, u32 bar, int c0, int c1, int c2, int c3) {
  tma_load_4d(dst, map, bar, c0, c1, c2, c3);
}
inline void whole_warp(u32) { __syncwarp(); }
inline void tma_prefetch_map(const void*) {}
inline void tma_prefetch_4d(const void*, int, int, int, int) {}
inline void fence_proxy_async() {}
template <int R>
inline void reg_alloc() {}
template <int R>
inline void reg_dealloc() {}
inline u64 desc_sw128(u32 addr, u32 lbo, u32 sbo) {
  return (u64)((addr & 0x3ffff) >> 4) | ((u64)(lbo >> 4) << 16) | ((u64)(sbo >> 4) << 32) | (1ull << 62);
}
inline u64 desc_add(u64 d, u32 bytes) { return d + (bytes >> 4); }
inline void wgmma_fence() {}
inline void wgmma_commit() {
  emu::self->products.push_back(std::move(emu::self->open_products));
  emu::self->open_products = {};
}
// Collective: no lane goes on before the warp's products are done.
template <int N>
inline void wgmma_wait() {
  emu::run_some(emu::self->products, N);
  emu::exchange(0);
}
template <int R>
inline void wgmma_pin(float (&)[R]) {}
// Element (mn, k) of an operand in shared memory.
inline float element(u64 d, int mn, int k, bool mn_major) {
  const u32 start = (u32)(d & 0x3fff) << 4, lbo = (u32)(d >> 16 & 0x3fff) << 4, sbo = (u32)(d >> 32 & 0x3fff) << 4;
  const u32 a = mn_major ? start + mn / 64 * lbo + k / 8 * sbo + k % 8 * 128 + mn % 64 * 2
                         : start + mn / 8 * sbo + mn % 8 * 128 + k * 2;
  unsigned short x;
  memcpy(&x, emu::at(emu::swizzle(a)), 2);
  return emu::bf16(x);
}
// The same of numbers in e4m3, K-major.
inline float element8(u64 d, int mn, int k) {
  const u32 start = (u32)(d & 0x3fff) << 4, sbo = (u32)(d >> 32 & 0x3fff) << 4;
  return emu::e4m3(*(const unsigned char*)emu::at(emu::swizzle(start + mn / 8 * sbo + mn % 8 * 128 + k)));
}
// What is issued: this thread's part of a product. A group runs as a whole, at once or at its wait.
inline void product(std::function<void()> op) {
  auto& open = emu::self->open_products;
  // Order inside a thread is kept: nothing may run before what was issued earlier.
  open.ops.push_back(std::move(op));
  if (emu::random() % 2 && emu::self->products.empty()) {
    for (auto& o : open.ops) o();
    open.ops.clear();
  }
}
template <Half16 T, int N>
struct Wgmma {
  template <class A>
  static void multiply(float* d, A a, u64 b, bool tb, bool add) {
    const int t = emu::self->tid % 4;
    static thread_local float bk[16];
    for (int j = 0; j < N / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        for (int k = 0; k < 16; ++k) bk[k] = element(b, 8 * j + 2 * t + e, k, tb);
        for (int h = 0; h < 2; ++h) {  // as emulated_cuda.h: 16 products and the accumulator, rounded once
          double sum = 0;
          for (int k = 0; k < 16; ++k) sum += static_cast<double>(a(h, k)) * bk[k];
          d[4 * j + 2 * h + e] = static_cast<float>(sum + (add ? d[4 * j + 2 * h + e] : 0.0f));
        }
      }
  }
  template <int TA, int TB>
  static void ss(float (&d)[N / 2], u64 a, u64 b, int add) {
    float* p = d;
    emu::Fiber* me = emu::self;
    product([=] {
      emu::Fiber* now = emu::self;
      emu::self = me;
      float rows[2][16];
      for (int h = 0; h < 2; ++h)
        for (int k = 0; k < 16; ++k) rows[h][k] = element(a, me->tid / 32 % 4 * 16 + h * 8 + me->tid % 32 / 4, k, TA);
      multiply(p, [&](int h, int k) { return rows[h][k]; }, b, TB, add);
      emu::self = now;
    });
  }
  // A from registers: k 2t, 2t + 1, 2t + 8, 2t + 9 of rows g, g + 8 are this lane's, the others' lie in their own
  // registers.
  template <int TB>
  static void rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, int add) {
    const int quad = emu::self->tid % 32 / 4 * 4;
    auto rows = std::make_shared<std::vector<float>>(32);
    for (int r = 0; r < 4; ++r) {
      const unsigned long long* all = emu::exchange(a[r]);
      for (int t = 0; t < 4; ++t)
        for (int e = 0; e < 2; ++e)
          (*rows)[(r % 2) * 16 + r / 2 * 8 + 2 * t + e] = emu::bf16((unsigned short)(all[quad + t] >> (16 * e)));
    }
    float* p = d;
    product([=] { multiply(p, [&](int h, int k) { return (*rows)[h * 16 + k]; }, b, TB, add); });
  }
};
template <Half16 T, int N>
struct WgmmaChain {
  template <int TA, int TB, int kStepA, int kStepB>
  static void ss(float (&d)[N / 2], u64 a, u64 b, int add) {
    for (int i = 0; i < 4; ++i)
      Wgmma<T, N>::template ss<TA, TB>(d, desc_add(a, i * kStepA), desc_add(b, i * kStepB), add || i > 0);
  }
  template <int TB, int kStepB>
  static void rs(float (&d)[N / 2], const u32* a, u64 b, int add) {
    for (int i = 0; i < 4; ++i) {
      const u32 mine[4] = {a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]};
      Wgmma<T, N>::template rs<TB>(d, mine, desc_add(b, i * kStepB), add || i > 0);
    }
  }
};
template <int N>
struct WgmmaChainE4m3 {
  static constexpr int kSteps = 4;
  template <class A>
  static void multiply(float* d, A a, u64 b, bool add) {
    const int t = emu::self->tid % 4;
    for (int j = 0; j < N / 8; ++j)
      for (int e = 0; e < 2; ++e) {
        float bk[32];
        for (int k = 0; k < 32; ++k) bk[k] = element8(b, 8 * j + 2 * t + e, k);
        for (int h = 0; h < 2; ++h) {
          double sum = 0;
          for (int k = 0; k < 32; ++k) sum += static_cast<double>(a(h, k)) * bk[k];
          d[4 * j + 2 * h + e] = static_cast<float>(sum + (add ? d[4 * j + 2 * h + e] : 0.0f));
        }
      }
  }
  template <int kStepA, int kStepB>
  static void ss(float (&d)[N / 2], u64 a, u64 b, int add) {
    float* p = d;
    emu::Fiber* me = emu::self;
    product([=] {
      emu::Fiber* now = emu::self;
      emu::self = me;
      for (int i = 0; i < kSteps; ++i) {
        float rows[2][32];
        for (int h = 0; h < 2; ++h)
          for (int k = 0; k < 32; ++k)
            rows[h][k] = element8(desc_add(a, i * kStepA), me->tid / 32 % 4 * 16 + h * 8 + me->tid % 32 / 4, k);
        multiply(p, [&](int h, int k) { return rows[h][k]; }, desc_add(b, i * kStepB), add || i > 0);
      }
      emu::self = now;
    });
  }
  // A from registers: k 4t to 4t + 3 and 16 on of rows g, g + 8 are this lane's.
  template <int kStepB>
  static void rs(float (&d)[N / 2], const u32* a, u64 b, int add) {
    const int quad = emu::self->tid % 32 / 4 * 4;
    auto rows = std::make_shared<std::vector<float>>(kSteps * 64);
    for (int r = 0; r < 4 * kSteps; ++r) {
      const unsigned long long* all = emu::exchange(a[r]);
      for (int t = 0; t < 4; ++t)
        for (int e = 0; e < 4; ++e)
          (*rows)[r / 4 * 64 + r % 2 * 32 + r / 2 % 2 * 16 + 4 * t + e] =
              emu::e4m3((unsigned char)(all[quad + t] >> (8 * e)));
    }
    float* p = d;
    emu::Fiber* me = emu::self;
    product([=] {
      emu::Fiber* now = emu::self;
      emu::self = me;
      for (int i = 0; i < kSteps; ++i)
        multiply(p, [&](int h, int k) { return (*rows)[i * 64 + h * 32 + k]; }, desc_add(b, i * kStepB), add || i > 0);
      emu::self = now;
    });
  }
};
}  // namespace ptx
}  // namespace attnrt
inline void __syncthreads() { attnrt::ptx::bar_sync(16, (unsigned)emu::fibers.size()); }
