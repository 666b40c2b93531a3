// SPDX-License-Identifier: Apache-2.0
// PTX wrappers that only the Hopper prefill family uses; same rules as ptx.cuh.
#pragma once
#include "ptx.cuh"

namespace attnrt {
namespace ptx {

// True once the phase of the given parity has completed; never waits.
ATTNRT_DEV bool mbar_test_wait(u32 bar, u32 parity) {
  u32 ok;
  asm volatile("{.reg .pred P; mbarrier.test_wait.parity.shared::cta.b64 P, [%1], %2; selp.b32 %0, 1, 0, P;}"
               : "=r"(ok)
               : "r"(bar), "r"(parity)
               : "memory");
  return ok != 0;
}

ATTNRT_DEV void st_shared(u32 addr, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(x) : "memory"); }

// Four 8-bit numbers to four float16, exactly; in order.
template <bool kE4m3>
ATTNRT_DEV void widen_fp8(u32 x, u32& lo, u32& hi) {
  if constexpr (kE4m3) {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b;}"
        : "=r"(lo), "=r"(hi)
        : "r"(x));
  } else {
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e5m2x2 %0, a; cvt.rn.f16x2.e5m2x2 %1, b;}"
        : "=r"(lo), "=r"(hi)
        : "r"(x));
  }
}

ATTNRT_DEV u32 ld_shared(u32 addr) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(addr) : "memory");
  return x;
}

ATTNRT_DEV void st_shared16(u32 addr, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// 16 bytes at a 16-byte aligned address, all four words the same.
ATTNRT_DEV void fill_shared16(u32 addr, u32 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(addr), "r"(x) : "memory");
}

ATTNRT_DEV void ld_shared16(u32 (&x)[4], u32 addr) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(addr)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers from the fragments of a product: lane i brings the address of row i % 8 of
// matrix i / 8.
ATTNRT_DEV void st_matrices(u32 addr, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The same for 8 bytes.
ATTNRT_DEV void st_shared8(u32 addr, const u32 (&x)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(addr), "r"(x[0]), "r"(x[1]) : "memory");
}
ATTNRT_DEV void ld_shared8(u32 (&x)[2], u32 addr) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(addr) : "memory");
}

// Does nothing for x >= -1, but as a store that might happen it keeps ptxas from moving what x depends on below the
// next synchronising instruction.
ATTNRT_DEV void computed(float x, u32 addr) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0fBF800000; @p st.shared.b32 [%1], %0;}" ::"f"(x), "r"(addr)
               : "memory");
}

// The smaller of two numbers, NaN if one is.
ATTNRT_DEV float min_nan(float x, float y) {
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(x), "f"(y));
  return x;
}

// -inf, which only the machine knows: what takes it in can not be done before x is there.
ATTNRT_DEV float after(float x) {
  asm("min.f32 %0, %1, 0fFF800000;" : "=f"(x) : "f"(x));
  return x;
}

// A word, or a byte, of global memory, or 0, without a branch: behind one ptxas would not trust the warp to be whole
// again, and keep what all its lanes share out of uniform registers.
ATTNRT_DEV u32 load_if(bool yes, const u32* at) {
  u32 x;
  asm("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.u32 %0, [%1];}"
      : "=r"(x)
      : "l"(at), "r"(static_cast<u32>(yes)));
  return x;
}
ATTNRT_DEV u32 load_byte_if(bool yes, const unsigned char* at) {
  u32 x;
  asm("{.reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.u8 %0, [%1];}"
      : "=r"(x)
      : "l"(at), "r"(static_cast<u32>(yes)));
  return x;
}
// The compiler reads again what it has read from memory before, instead of keeping it.
ATTNRT_DEV void forget() { asm volatile("" ::: "memory"); }

// Asks for `kBytes` from an address on in L2.
template <int kBytes>
ATTNRT_DEV void prefetch_l2(const char* p) {
#pragma unroll
  for (int i = 0; i < kBytes; i += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(p + i));
}

// Registers of an accumulator that hold nothing: what became of the last product may lie elsewhere.
template <int N>
ATTNRT_DEV void fresh(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i]));
}

// tma_load_4d of what nobody else reads: it leaves L2 before other data does.
ATTNRT_DEV void tma_load_4d_once(u32 dst, const void* map, u32 bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "{.reg .b64 P; createpolicy.fractional.L2::evict_first.b64 P, 1.0; "
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3,%4,%5,%6}], [%2], P;}" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Asks for one box of a 4-D tensor map in L2.
ATTNRT_DEV void tma_prefetch_4d(const void* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1,%2,%3,%4}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers, each transposed, as the fragments of a product: lane i brings the address of
// row i % 8 of matrix i / 8, and gets rows 2 (i % 4) and 2 (i % 4) + 1 of column i / 4 of each.
ATTNRT_DEV void ld_matrices_turned(u32 (&x)[4], u32 addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(addr)
               : "memory");
}

// Four bytes of a and b (numbers 0 to 3 and 4 to 7), chosen by the nibbles of `which`, the lowest first.
ATTNRT_DEV u32 bytes_of(u32 a, u32 b, u32 which) {
  u32 x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(which));
  return x;
}

// Four numbers in e4m3, rounded to the nearest even, what is larger than 448 to that; in order.
ATTNRT_DEV u32 pack4_e4m3(float a, float b, float c, float d) {
  u32 x;
  asm("{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; "
      "mov.b32 %0, {lo, hi};}"
      : "=r"(x)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return x;
}

// Tells ptxas that all lanes of the warp are here, by an instruction that only a whole warp may execute: it does not
// see that from __syncwarp, and writes each exchange among lanes a second time, one lane's way at a time. Reads the 16
// bytes at a shared address, which nobody waits for.
ATTNRT_DEV void whole_warp(u32 addr) {
  __syncwarp();
  asm volatile("{.reg .b32 x; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {x}, [%0];}" ::"r"(addr) : "memory");
}

// Sleeps for about `ns` nanoseconds.
ATTNRT_DEV void nap(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// A pointer that the compiler does not take apart into sums.
ATTNRT_DEV const char* opaque(const char* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// What follows from x is worked out again, instead of being kept.
ATTNRT_DEV void renew(int& x) { asm volatile("" : "+r"(x)); }

// A use that keeps the load of x.
ATTNRT_DEV void loaded(int x) { asm volatile("" ::"r"(x)); }

}  // namespace ptx
}  // namespace attnrt
