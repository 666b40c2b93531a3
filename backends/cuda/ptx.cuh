// SPDX-License-Identifier: Apache-2.0
// Thin wrappers of the PTX instructions that the kernels use: one function per instruction, no policy.
//
// Compiles under nvcc and NVRTC alike, so it includes nothing; 16-bit floats travel packed in 32-bit registers.
// Parts that need sm_90(a) are guarded by __CUDA_ARCH__, the rest runs from sm_80 on.
// Units: addresses in shared memory are 32-bit byte addresses of the shared window (smem_addr), sizes are bytes.
#pragma once

#define ATTNRT_DEV static __device__ __forceinline__

namespace attnrt {
namespace ptx {

typedef unsigned int u32;
typedef unsigned long long u64;

// 16-bit element type of an MMA operand.
enum class Half16 { bf16, fp16 };

// ---------------------------------------------------------------- addresses, lanes, conversions

// 32-bit shared-window byte address of a generic pointer into shared memory.
ATTNRT_DEV u32 smem_addr(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Lane index within the warp, 0..31.
ATTNRT_DEV u32 lane_id() {
  u32 r;
  asm("mov.u32 %0, %%laneid;" : "=r"(r));
  return r;
}

// One lane of the (converged) warp gets true; ptxas knows that it is a single thread.
ATTNRT_DEV bool elect_one() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  u32 p;
  asm volatile("{.reg .pred P; elect.sync _|P, 0xffffffff; selp.b32 %0, 1, 0, P;}" : "=r"(p));
  return p != 0;
#else
  return lane_id() == 0;
#endif
}

// 2^x, flush to zero, max relative error 2^-22 (16 results per clock and SM on sm_90).
ATTNRT_DEV float ex2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// log2(x), flush to zero.
ATTNRT_DEV float lg2(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 1/x within one unit in the last place, flush to zero; __frcp_rn is a call with a slow path.
ATTNRT_DEV float rcp(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Two float32 to two 16-bit floats, nearest even; lo lands in bits 0..15.
template <Half16 T>
ATTNRT_DEV u32 pack2(float lo, float hi) {
  u32 r;
  if constexpr (T == Half16::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

// Four bytes picked from x; nibble i of Sel names byte i of the result, its top bit asks for eight copies of that
// byte's sign (which __byte_perm masks away).
template <int Sel>
ATTNRT_DEV u32 prmt(u32 x) {
  u32 r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "n"(Sel));
  return r;
}

// ---------------------------------------------------------------- cp.async (sm_80)

// 16 bytes from global to shared, L2 only; bytes past src_bytes (0 or 16) are written as zero without being read.
ATTNRT_DEV void cp_async16(u32 dst, const void* src, u32 src_bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes) : "memory");
}

// The same of what is not read again soon: it leaves L2 before other data does.
ATTNRT_DEV void cp_async16_once(u32 dst, const void* src, u32 src_bytes = 16) {
  constexpr unsigned long long kEvictFirst = 0x12F0000000000000;  // what createpolicy.fractional makes of 1.0
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src), "r"(src_bytes),
               "l"(kEvictFirst)
               : "memory");
}

// Closes the group of this thread's cp.async issued since the last commit.
ATTNRT_DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups are still in flight.
template <int N>
ATTNRT_DEV void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---------------------------------------------------------------- ldmatrix, movmatrix, mma.sync (sm_80)

// Four 8x8 b16 matrices; lane i gives the 16-byte row address of row i%8 of matrix i/8.
ATTNRT_DEV void ldmatrix_x4(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

// The same, each matrix transposed on the way.
ATTNRT_DEV void ldmatrix_x4_trans(u32 (&r)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

// Two 8x8 matrices; lanes 0..15 give the row addresses.
ATTNRT_DEV void ldmatrix_x2(u32 (&r)[2], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(addr)
               : "memory");
}

// Two 8x8 matrices, transposed; lanes 0..15 give the row addresses.
ATTNRT_DEV void ldmatrix_x2_trans(u32 (&r)[2], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(addr)
               : "memory");
}

// d[16x8] += a[16x16] b[16x8], float32 accumulation; g = lane/4, t = lane%4:
// a0 (g, 2t..) a1 (g+8, 2t..) a2 (g, 2t+8..) a3 (g+8, 2t+8..); b0 (k 2t.., n g) b1 (k 2t+8.., n g); d (g, 2t..) (g+8,
// 2t..).
template <Half16 T>
ATTNRT_DEV void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T == Half16::bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---------------------------------------------------------------- barriers of the CTA

// Named barrier id (1..15; 0 is __syncthreads) over `threads` threads, a multiple of 32: arrive and wait.
ATTNRT_DEV void bar_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Arrive without waiting.
ATTNRT_DEV void bar_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Reads past the first-level cache what another CTA of the same kernel has written; x stays if not `wanted`.
ATTNRT_DEV void load_l2(const float* p, float (&x)[1], bool wanted) {
  asm volatile("{.reg .pred P; setp.ne.b32 P, %2, 0; @P ld.global.cg.f32 %0, [%1];}"
               : "+f"(x[0])
               : "l"(p), "r"(static_cast<int>(wanted))
               : "memory");
}
ATTNRT_DEV void load_l2(const float2* p, float (&x)[2], bool wanted) {
  asm volatile("{.reg .pred P; setp.ne.b32 P, %3, 0; @P ld.global.cg.v2.f32 {%0,%1}, [%2];}"
               : "+f"(x[0]), "+f"(x[1])
               : "l"(p), "r"(static_cast<int>(wanted))
               : "memory");
}
ATTNRT_DEV void load_l2(const float4* p, float (&x)[4], bool wanted) {
  asm volatile("{.reg .pred P; setp.ne.b32 P, %5, 0; @P ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];}"
               : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
               : "l"(p), "r"(static_cast<int>(wanted))
               : "memory");
}

// Adds to a counter of the device; release before, acquire after, for the whole device.
ATTNRT_DEV u32 count_up(u32* counter, u32 by) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(by) : "memory");
  return old;
}

// Hint: the line of this address is wanted in L2.
ATTNRT_DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---------------------------------------------------------------- mbarrier (sm_80)

// Initialises an 8-byte barrier that completes after `count` arrivals (and all expected bytes).
ATTNRT_DEV void mbar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// One arrival (release at CTA scope).
ATTNRT_DEV void mbar_arrive(u32 bar) {
  asm volatile("{.reg .b64 S; mbarrier.arrive.shared.b64 S, [%0];}" ::"r"(bar) : "memory");
}

// Arrivals of a warp, as part of the count given to mbar_init. Lane 0 speaks for the others, whose accesses come before
// its arrival by causality. racecheck of compute-sanitizer does not follow that and reports them: for it a text is
// compiled in which all lanes arrive (scripts/gpu_sanitize.sh).
#ifdef ATTNRT_EVERY_LANE_ARRIVES
constexpr u32 kWarpArrivals = 32;
#else
constexpr u32 kWarpArrivals = 1;
#endif
ATTNRT_DEV void mbar_arrive_warp(u32 bar, int lane) {
  __syncwarp();
  if (kWarpArrivals == 32 || lane == 0) mbar_arrive(bar);
}

// This thread's earlier cp.async arrive on the barrier when done; the arrival is part of the count given to mbar_init.
ATTNRT_DEV void cp_async_mbar_arrive_noinc(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

// The same with an arrival of its own, which the phase at hand waits for beside those that it was initialised for.
ATTNRT_DEV void cp_async_mbar_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(bar) : "memory");
}

// True once the phase of the given parity has completed; may suspend the thread for a while (sm_90).
ATTNRT_DEV bool mbar_try_wait(u32 bar, u32 parity) {
  u32 ok;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred P; mbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2; selp.b32 %0, 1, 0, P;}"
               : "=r"(ok)
               : "r"(bar), "r"(parity)
               : "memory");
#else
  asm volatile("{.reg .pred P; mbarrier.test_wait.parity.shared.b64 P, [%1], %2; selp.b32 %0, 1, 0, P;}"
               : "=r"(ok)
               : "r"(bar), "r"(parity)
               : "memory");
#endif
  return ok != 0;
}

// Waits for the phase of the given parity.
ATTNRT_DEV void mbar_wait(u32 bar, u32 parity) {
  while (!mbar_try_wait(bar, parity)) {
  }
}

// Waits until a count in shared memory has come so far.
ATTNRT_DEV void wait_for(const u32* count, int least) {
  while (static_cast<int>(*static_cast<const volatile u32*>(count)) < least) {
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
// Makes mbarrier.init visible to the asynchronous proxy (and to the cluster).
ATTNRT_DEV void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival that also adds `bytes` to what the current phase waits for.
ATTNRT_DEV void mbar_arrive_expect_tx(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// ---------------------------------------------------------------- TMA and bulk copies (sm_90)

// Loads one box of a 4-D tensor map (coordinates in elements, innermost first) to shared; bytes count on `bar`.
ATTNRT_DEV void tma_load_4d(u32 dst, const void* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], "
      "[%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Fetches a tensor map's descriptor into the cache.
ATTNRT_DEV void tma_prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Orders this thread's shared-memory accesses (st.shared, cp.async) before later ones of wgmma, TMA: before the
// barrier.
ATTNRT_DEV void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---------------------------------------------------------------- dependent launches (sm_90)

// Waits until the preceding grid has completed and its memory is visible (no-op without the launch attribute).
ATTNRT_DEV void grid_dep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next grid of the stream start once every CTA has said so.
ATTNRT_DEV void grid_dep_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL) || __CUDA_ARCH_SPECIFIC__ == 900
// ---------------------------------------------------------------- wgmma (sm_90a)

// Register budget per thread of this warpgroup (multiple of 8, 24..256); every warp of the warpgroup executes it.
template <int Regs>
ATTNRT_DEV void reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Regs));
}
template <int Regs>
ATTNRT_DEV void reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Regs));
}

// Shared-memory matrix descriptor, 128-byte swizzle, tile base 1024-byte aligned.
// K-major operand: rows of 128 bytes, sbo = bytes from one 8-row group to the next (1024; 0 repeats the first 8 rows),
// lbo unused;
//   a k16 step inside the row adds 32 bytes. MN-major operand: 8 k-rows of 64 MN elements form an atom, sbo = bytes
//   between atoms along k, lbo = bytes between atoms along MN; a k16 step adds two atoms.
ATTNRT_DEV u64 desc_sw128(u32 addr, u32 lbo, u32 sbo) {
  return (u64)((addr & 0x3ffff) >> 4) | ((u64)(lbo >> 4) << 16) | ((u64)(sbo >> 4) << 32) | (1ull << 62);
}

// Descriptor without swizzle (8x16-byte core matrices of 128 contiguous bytes). MN-major: lbo = bytes between core
// matrices along k, sbo = along MN. K-major: lbo = along k, sbo = along MN.
ATTNRT_DEV u64 desc_plain(u32 addr, u32 lbo, u32 sbo) {
  return (u64)((addr & 0x3ffff) >> 4) | ((u64)(lbo >> 4) << 16) | ((u64)(sbo >> 4) << 32);
}

// The descriptor `bytes` further on (bytes: multiple of 16).
ATTNRT_DEV u64 desc_add(u64 desc, u32 bytes) { return desc + (bytes >> 4); }

// Orders register and shared-memory accesses before the next wgmma; needed before the first and after register writes.
ATTNRT_DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
ATTNRT_DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups of this warpgroup's wgmma are in flight.
template <int N>
ATTNRT_DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving uses of d across a wgmma_wait.
template <int R>
ATTNRT_DEV void wgmma_pin(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64xN] = a[64x16] b[16xN] + (accumulate ? d : 0) with float32 accumulation, asynchronous until wgmma_wait.
// d: N/2 registers; thread (warp w, g, t): d[4j + 0,1] = (16w + g, 8j + 2t + 0,1), d[4j + 2,3] = (16w + g + 8, ...).
// ss: A and B by descriptor; TransA, TransB = 1: the operand is MN-major. rs: A in registers, laid out as for
// mma_m16n8k16.
template <Half16 T, int N>
struct Wgmma;

#define ATTNRT_U1 "%0,%1,%2,%3"
#define ATTNRT_U2 ATTNRT_U1 ",%4,%5,%6,%7"
#define ATTNRT_U3 ATTNRT_U2 ",%8,%9,%10,%11"
#define ATTNRT_U4 ATTNRT_U3 ",%12,%13,%14,%15"
#define ATTNRT_U6 ATTNRT_U4 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define ATTNRT_U8 ATTNRT_U6 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define ATTNRT_U12 ATTNRT_U8 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define ATTNRT_U16 ATTNRT_U12 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define ATTNRT_U24                                                                   \
  ATTNRT_U16                                                                         \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83" \
  ",%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define ATTNRT_U32                                                                              \
  ATTNRT_U24                                                                                    \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114" \
  ",%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define ATTNRT_Q(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ATTNRT_D1(d) ATTNRT_Q(d, 0)
#define ATTNRT_D2(d) ATTNRT_D1(d), ATTNRT_Q(d, 4)
#define ATTNRT_D3(d) ATTNRT_D2(d), ATTNRT_Q(d, 8)
#define ATTNRT_D4(d) ATTNRT_D3(d), ATTNRT_Q(d, 12)
#define ATTNRT_D6(d) ATTNRT_D4(d), ATTNRT_Q(d, 16), ATTNRT_Q(d, 20)
#define ATTNRT_D8(d) ATTNRT_D6(d), ATTNRT_Q(d, 24), ATTNRT_Q(d, 28)
#define ATTNRT_D12(d) ATTNRT_D8(d), ATTNRT_Q(d, 32), ATTNRT_Q(d, 36), ATTNRT_Q(d, 40), ATTNRT_Q(d, 44)
#define ATTNRT_D16(d) ATTNRT_D12(d), ATTNRT_Q(d, 48), ATTNRT_Q(d, 52), ATTNRT_Q(d, 56), ATTNRT_Q(d, 60)
#define ATTNRT_D24(d)                                                                                                  \
  ATTNRT_D16(d), ATTNRT_Q(d, 64), ATTNRT_Q(d, 68), ATTNRT_Q(d, 72), ATTNRT_Q(d, 76), ATTNRT_Q(d, 80), ATTNRT_Q(d, 84), \
      ATTNRT_Q(d, 88), ATTNRT_Q(d, 92)
#define ATTNRT_D32(d)                                                                                     \
  ATTNRT_D24(d), ATTNRT_Q(d, 96), ATTNRT_Q(d, 100), ATTNRT_Q(d, 104), ATTNRT_Q(d, 108), ATTNRT_Q(d, 112), \
      ATTNRT_Q(d, 116), ATTNRT_Q(d, 120), ATTNRT_Q(d, 124)

// One specialisation per (element type, N): U = N/8 register quads; P0.. are the operand numbers after the
// accumulators.
#define ATTNRT_WGMMA(T, TS, N, U, P0, P1, P2, P3, P4, P5, P6)                                                        \
  template <>                                                                                                        \
  struct Wgmma<Half16::T, N> {                                                                                       \
    static constexpr int regs = N / 2;                                                                               \
    template <int TransA, int TransB>                                                                                \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TS   \
                   "." TS " {" ATTNRT_U##U "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";}"                    \
                   : ATTNRT_D##U(d)                                                                                  \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB)                                       \
                   : "memory");                                                                                      \
    }                                                                                                                \
    template <int TransB>                                                                                            \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {         \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TS   \
                   "." TS " {" ATTNRT_U##U "}, {%" #P0 ",%" #P1 ",%" #P2 ",%" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";}" \
                   : ATTNRT_D##U(d)                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TransB)                \
                   : "memory");                                                                                      \
    }                                                                                                                \
  };

#define ATTNRT_WGMMA_ALL(T, TS)                               \
  ATTNRT_WGMMA(T, TS, 8, 1, 4, 5, 6, 7, 8, 9, 10)             \
  ATTNRT_WGMMA(T, TS, 16, 2, 8, 9, 10, 11, 12, 13, 14)        \
  ATTNRT_WGMMA(T, TS, 24, 3, 12, 13, 14, 15, 16, 17, 18)      \
  ATTNRT_WGMMA(T, TS, 32, 4, 16, 17, 18, 19, 20, 21, 22)      \
  ATTNRT_WGMMA(T, TS, 48, 6, 24, 25, 26, 27, 28, 29, 30)      \
  ATTNRT_WGMMA(T, TS, 64, 8, 32, 33, 34, 35, 36, 37, 38)      \
  ATTNRT_WGMMA(T, TS, 96, 12, 48, 49, 50, 51, 52, 53, 54)     \
  ATTNRT_WGMMA(T, TS, 128, 16, 64, 65, 66, 67, 68, 69, 70)    \
  ATTNRT_WGMMA(T, TS, 192, 24, 96, 97, 98, 99, 100, 101, 102) \
  ATTNRT_WGMMA(T, TS, 256, 32, 128, 129, 130, 131, 132, 133, 134)

ATTNRT_WGMMA_ALL(bf16, "bf16")
ATTNRT_WGMMA_ALL(fp16, "f16")

// Four k-steps one after the other, the first of which accumulates or not: one statement, because the time until there
// is PTX goes with the operands of statements. kStepA, kStepB: bytes from a step's operand in shared memory to the
// next's.
template <Half16 T, int N>
struct WgmmaChain;
// The same for numbers in e4m3: k-steps of 32 numbers, operands are K-major; A in registers is laid out as for
// mma.m16n8k32. ss: as above; rs: as above, without transposition.
template <int N>
struct WgmmaChainE4m3;

#define ATTNRT_WGMMA_STEP(TS, N, U, A, B, P, TRANS) \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TS "." TS " {" U "}, " A ", " B ", " P ", 1, 1, " TRANS "; "
#define ATTNRT_WGMMA_STEP8(N, U, A, B, P) \
  "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" U "}, " A ", " B ", " P ", 1, 1; "
#define ATTNRT_WGMMA_QUAD(P0, P1, P2, P3) "{%" #P0 ",%" #P1 ",%" #P2 ",%" #P3 "}"
// clang-format off: statement by statement.
// P0.. are the operand numbers after the accumulators.
#define ATTNRT_WGMMA_CHAIN(T, TS, N, U, P0, P1, P2, P3, P4, P5, P6, P7, P8, P9, P10, P11, P12, P13, P14, P15, P16, \
                           P17, P18, P19)                                                                          \
  template <>                                                                                                      \
  struct WgmmaChain<Half16::T, N> {                                                                                \
    template <int TransA, int TransB, int kStepA, int kStepB>                                                      \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                   \
      asm volatile("{.reg .pred p, q; .reg .b64 a, b; setp.ne.b32 p, %" #P2 ", 0; setp.eq.b32 q, 0, 0; "           \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, "%" #P0, "%" #P1, "p", "%" #P3 ", %" #P4)                 \
                   "add.s64 a, %" #P0 ", %" #P5 "; add.s64 b, %" #P1 ", %" #P6 "; "                                \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, "a", "b", "q", "%" #P3 ", %" #P4)                         \
                   "add.s64 a, a, %" #P5 "; add.s64 b, b, %" #P6 "; "                                              \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, "a", "b", "q", "%" #P3 ", %" #P4)                         \
                   "add.s64 a, a, %" #P5 "; add.s64 b, b, %" #P6 "; "                                              \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, "a", "b", "q", "%" #P3 ", %" #P4) "}"                     \
                   : ATTNRT_D##U(d)                                                                                \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB), "n"(kStepA >> 4),                  \
                     "n"(kStepB >> 4)                                                                              \
                   : "memory");                                                                                    \
    }                                                                                                              \
    template <int TransB, int kStepB>                                                                              \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {            \
      asm volatile("{.reg .pred p, q; .reg .b64 b; setp.ne.b32 p, %" #P17 ", 0; setp.eq.b32 q, 0, 0; "             \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P0, P1, P2, P3), "%" #P16, "p",         \
                                     "%" #P18)                                                                     \
                   "add.s64 b, %" #P16 ", %" #P19 "; "                                                             \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P4, P5, P6, P7), "b", "q", "%" #P18)    \
                   "add.s64 b, b, %" #P19 "; "                                                                     \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P8, P9, P10, P11), "b", "q", "%" #P18)  \
                   "add.s64 b, b, %" #P19 "; "                                                                     \
                   ATTNRT_WGMMA_STEP(TS, N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P12, P13, P14, P15), "b", "q",          \
                                     "%" #P18) "}"                                                                 \
                   : ATTNRT_D##U(d)                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),       \
                     "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]),             \
                     "r"(a[15]), "l"(b), "r"(accumulate), "n"(TransB), "n"(kStepB >> 4)                            \
                   : "memory");                                                                                    \
    }                                                                                                              \
  };

#define ATTNRT_WGMMA_CHAIN8(N, U, P0, P1, P2, P3, P4, P5, P6, P7, P8, P9, P10, P11, P12, P13, P14, P15, P16, P17, P18) \
  template <>                                                                                                      \
  struct WgmmaChainE4m3<N> {                                                                                       \
    template <int kStepA, int kStepB>                                                                              \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                   \
      asm volatile("{.reg .pred p, q; .reg .b64 a, b; setp.ne.b32 p, %" #P2 ", 0; setp.eq.b32 q, 0, 0; "           \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, "%" #P0, "%" #P1, "p")                                       \
                   "add.s64 a, %" #P0 ", %" #P3 "; add.s64 b, %" #P1 ", %" #P4 "; "                                \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, "a", "b", "q")                                               \
                   "add.s64 a, a, %" #P3 "; add.s64 b, b, %" #P4 "; "                                              \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, "a", "b", "q")                                               \
                   "add.s64 a, a, %" #P3 "; add.s64 b, b, %" #P4 "; "                                              \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, "a", "b", "q") "}"                                           \
                   : ATTNRT_D##U(d)                                                                                \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kStepA >> 4), "n"(kStepB >> 4)                           \
                   : "memory");                                                                                    \
    }                                                                                                              \
    template <int kStepB>                                                                                          \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], const u32* a, u64 b, int accumulate) {            \
      asm volatile("{.reg .pred p, q; .reg .b64 b; setp.ne.b32 p, %" #P17 ", 0; setp.eq.b32 q, 0, 0; "             \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P0, P1, P2, P3), "%" #P16, "p")            \
                   "add.s64 b, %" #P16 ", %" #P18 "; "                                                             \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P4, P5, P6, P7), "b", "q")                 \
                   "add.s64 b, b, %" #P18 "; "                                                                     \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P8, P9, P10, P11), "b", "q")               \
                   "add.s64 b, b, %" #P18 "; "                                                                     \
                   ATTNRT_WGMMA_STEP8(N, ATTNRT_U##U, ATTNRT_WGMMA_QUAD(P12, P13, P14, P15), "b", "q") "}"         \
                   : ATTNRT_D##U(d)                                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]),       \
                     "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]),             \
                     "r"(a[15]), "l"(b), "r"(accumulate), "n"(kStepB >> 4)                                         \
                   : "memory");                                                                                    \
    }                                                                                                              \
  };

ATTNRT_WGMMA_CHAIN(bf16, "bf16", 64, 8, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41,
                   42, 43, 44, 45, 46, 47, 48, 49, 50, 51)
ATTNRT_WGMMA_CHAIN(fp16, "f16", 64, 8, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41,
                   42, 43, 44, 45, 46, 47, 48, 49, 50, 51)
ATTNRT_WGMMA_CHAIN(bf16, "bf16", 128, 16, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73,
                   74, 75, 76, 77, 78, 79, 80, 81, 82, 83)
ATTNRT_WGMMA_CHAIN(fp16, "f16", 128, 16, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73,
                   74, 75, 76, 77, 78, 79, 80, 81, 82, 83)
ATTNRT_WGMMA_CHAIN8(128, 16, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82)
ATTNRT_WGMMA_CHAIN(bf16, "bf16", 256, 32, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137,
                   138, 139, 140, 141, 142, 143, 144, 145, 146, 147)
ATTNRT_WGMMA_CHAIN(fp16, "f16", 256, 32, 128, 129, 130, 131, 132, 133, 134, 135, 136, 137,
                   138, 139, 140, 141, 142, 143, 144, 145, 146, 147)
// clang-format on
#endif  // sm_90a

}  // namespace ptx
}  // namespace attnrt
