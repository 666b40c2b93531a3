// SPDX-License-Identifier: Apache-2.0
//
// What the printed text of a variant stands on: one header for g++ (C++17), nvcc and NVRTC.
//
// print_cpp.py prints, inside namespace attnrt, a struct that kernels take as a template argument V:
//
//   constexpr bool V::use_softmax        false: weights are the logits themselves, a masked weight is 0, states add
//   constexpr bool V::has_logits, has_mask, has_query, has_key, has_value, has_output, has_sink
//   constexpr bool V::mask_is_interval   visible() says all that mask() says: only tiles that cross an end need mask()
//   constexpr bool V::reads_index_mask   the kernel ANDs the bits of the index as well
//   constexpr bool V::quick_logits       logits() calls functions that have quick forms (Quick)
//   constexpr int  V::num_params         length of the parameter table
//   struct V::Row                        values that are constant along the keys of one query row
//   Row   V::row(p, c)                   computes them; c.kv_pos and c.kv_slot are not read
//   constexpr bool V::scales_score       scale(r, sm_scale) lets logits() take q.k itself instead of q.k * sm_scale
//   constexpr bool V::keeps_units        the same, and what logits() returns is to be multiplied by sm_scale, too
//   constexpr bool V::row_units          the final logit is unit(r), above 0, times reduced(p, r, c, s)
//   constexpr bool V::is_scaled          row_units, and reduced() is s
//   constexpr bool V::is_capped          row_units, and reduced() is tanh(s * factor(r)), factor(r) above 0
//   constexpr bool V::linear_bias        keeps_units, and logits() is s + slope(r) * (c.kv_pos - origin(r, c))
//   constexpr bool V::is_logistic        softmax-free, and after turn(r) logits() is 1 / (1 + 2^power(p, r, c, s))
//   constexpr bool V::logits_need_keys   logits() may read c.kv_pos or c.kv_slot, and is not linear_bias
//   float V::logits(p, r, c, s)          final logit (weight, if softmax-free) from s = q.k * sm_scale
//   bool  V::mask(p, r, c)               whether the key is seen
//   void  V::visible(r, lo, hi)          inclusive interval of kv_pos outside which mask() is false
//   void  V::query|key|value(p, c, d, x0, x1)   maps a pair in place; see pairing below
//   float V::output(p, c, d, o)          element d of the normalised output (after sinks)
//   float V::sink(p, c)                  logit of the learned sink of c.qo_head, natural units, not scaled by sm_scale
//   constexpr int V::query_pairing, V::query_dim (and key_, value_)   PAIR_*; dim 0 means the whole head
//
// Short forms without r compute the row on the spot. p is anything with p[slot] -> const ParamRef&, such as a
// const ParamRef* or a struct that wraps an array in constant memory. c is a Ctx. Hooks that do not exist are identity
// functions, so that a kernel need not test the flags for correctness, only for speed.
//
// logits() and mask() are branch-free: a loop over the keys of a tile with c.kv_pos and s varying vectorises under
// -O3 (the math below is plain arithmetic on the host; never compile it with -ffast-math). mask() comes after
// logits(): select -inf by it, since logits() of a masked key may be anything, NaN included.

#ifndef ATTNRT_VARIANT_H
#define ATTNRT_VARIANT_H

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ATTNRT_HD __host__ __device__ __forceinline__
#else
#define ATTNRT_HD inline __attribute__((always_inline))
#endif
// ATTNRT_BUILTIN_MATH: no header, for text that is all printed; <cmath> takes longer to compile than a variant.
#if !defined(__CUDACC_RTC__) && !defined(ATTNRT_BUILTIN_MATH)
#include <cmath>
#include <cstring>
#endif
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ATTNRT_LIBM(name) name
#else
#define ATTNRT_LIBM(name) __builtin_##name
#endif

namespace attnrt {

// One (query row, key, head). All int32 but kv_slot, the key's element in the pool.
struct Ctx {
  int request, qo_pos, kv_pos, qo_head, kv_head, qo_row, qo_len, kv_len;
  long long kv_slot;
};

// What a pair hook in C++ text returns.
struct Pair {
  float first, second;
};

// One parameter. A number: ptr is null, imm holds its bits. An array: strides in elements, sizes >= 1.
struct ParamRef {
  const void* ptr;
  unsigned long long imm;
  long long strides[4];
  int sizes[4];
};
static_assert(sizeof(ParamRef) == 64, "bind.py packs 64-byte records");

enum Pairing { PAIR_NONE = 0, PAIR_HALF = 1, PAIR_INTERLEAVED = 2, PAIR_SINGLE = 3 };

// Elements of pair d over the first dim numbers of a row.
ATTNRT_HD int pair_first(int pairing, int d) { return pairing == PAIR_INTERLEAVED ? 2 * d : d; }
ATTNRT_HD int pair_second(int pairing, int dim, int d) {
  return pairing == PAIR_INTERLEAVED ? 2 * d + 1 : pairing == PAIR_HALF ? d + dim / 2 : d;
}
ATTNRT_HD int pair_count(int pairing, int dim) {
  return pairing == PAIR_NONE ? 0 : pairing == PAIR_SINGLE ? dim : dim / 2;
}

constexpr int INT_LOWEST = -2147483647 - 1;
constexpr int INT_HIGHEST = 2147483647;

// ---- bits ----------------------------------------------------------------------------------------------------------

ATTNRT_HD float bits_to_float(unsigned b) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(b);
#else
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
#endif
}
ATTNRT_HD unsigned float_to_bits(float f) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(f);
#else
  unsigned b;
  __builtin_memcpy(&b, &f, 4);
  return b;
#endif
}

// c ? a : b for values that cost something. On the host as bits: given a branch, g++ moves the computation of a float
// into it (it might trap), and the loop is lost for vectorisation.
template <class T>
ATTNRT_HD T select(bool c, T a, T b) {
  return c ? a : b;
}
#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
ATTNRT_HD float select(bool c, float a, float b) {
  const unsigned take = 0u - static_cast<unsigned>(c);
  return bits_to_float((float_to_bits(a) & take) | (float_to_bits(b) & ~take));
}
#endif

// ---- parameters ----------------------------------------------------------------------------------------------------

template <class T>
struct Immediate;
template <>
struct Immediate<float> {
  ATTNRT_HD static float get(unsigned long long b) { return bits_to_float(static_cast<unsigned>(b)); }
};
template <>
struct Immediate<int> {
  ATTNRT_HD static int get(unsigned long long b) { return static_cast<int>(static_cast<unsigned>(b)); }
};
template <>
struct Immediate<long long> {
  ATTNRT_HD static long long get(unsigned long long b) { return static_cast<long long>(b); }
};

ATTNRT_HD int clamp_index(int i, int n) { return i < 0 ? 0 : i >= n ? n - 1 : i; }
ATTNRT_HD int clamp_index(long long i, int n) { return i < 0 ? 0 : i >= n ? n - 1 : static_cast<int>(i); }

// A number, or the entry of a head.
template <class T>
ATTNRT_HD T scalar(const ParamRef& r, int head) {
  return r.ptr == nullptr ? Immediate<T>::get(r.imm)
                          : static_cast<const T*>(r.ptr)[clamp_index(head, r.sizes[0]) * r.strides[0]];
}

// An array. An index outside it reads the nearest element inside: nothing outside is ever read.
template <class T, int Rank>
struct View {
  const ParamRef& r;
  template <class... I>
  ATTNRT_HD T operator()(I... i) const {
    static_assert(sizeof...(I) == Rank, "wrong number of indices");
    return static_cast<const T*>(r.ptr)[offset(0, i...)];
  }
  template <class I>
  ATTNRT_HD T operator[](I i) const {
    return (*this)(i);
  }

 private:
  ATTNRT_HD long long offset(int) const { return 0; }
  template <class I, class... Rest>
  ATTNRT_HD long long offset(int axis, I i, Rest... rest) const {
    return clamp_index(i, r.sizes[axis]) * r.strides[axis] + offset(axis + 1, rest...);
  }
};
template <class T, class... I>
ATTNRT_HD T element(const ParamRef& r, I... i) {
  return View<T, static_cast<int>(sizeof...(I))>{r}(i...);
}

// ---- integers: wrapping, total -------------------------------------------------------------------------------------

ATTNRT_HD int iadd(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }
ATTNRT_HD int isub(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) - static_cast<unsigned>(b)); }
ATTNRT_HD int imul(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b)); }
ATTNRT_HD long long iadd(long long a, long long b) {
  return static_cast<long long>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
}
ATTNRT_HD long long isub(long long a, long long b) {
  return static_cast<long long>(static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b));
}
ATTNRT_HD long long imul(long long a, long long b) {
  return static_cast<long long>(static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b));
}
template <class T>
ATTNRT_HD T iabs(T a) {
  return a < 0 ? isub(T(0), a) : a;
}
// Floor division and remainder; divisor 0 gives 0, divisor -1 is taken apart because lowest / -1 traps.
template <class T>
ATTNRT_HD T ifloordiv(T a, T b) {
  const T safe = (b == 0) | (b == -1) ? T(1) : b;
  const T q = a / safe;
  const T floored = q - T((a % safe != 0) & ((a < 0) != (safe < 0)));
  return b == 0 ? T(0) : b == -1 ? isub(T(0), a) : floored;
}
template <class T>
ATTNRT_HD T imod(T a, T b) {
  const T safe = (b == 0) | (b == -1) ? T(1) : b;
  const T r = a % safe;
  const T floored = r + ((r != 0) & ((r < 0) != (safe < 0)) ? safe : T(0));
  return (b == 0) | (b == -1) ? T(0) : floored;
}
ATTNRT_HD int ishl(int a, int n) { return static_cast<int>(static_cast<unsigned>(a) << (n & 31)); }
ATTNRT_HD long long ishl(long long a, long long n) {
  return static_cast<long long>(static_cast<unsigned long long>(a) << (n & 63));
}
ATTNRT_HD int ishr(int a, int n) { return a >> (n & 31); }
ATTNRT_HD long long ishr(long long a, long long n) { return a >> (n & 63); }
ATTNRT_HD int saturate(long long a) {
  return a < INT_LOWEST ? INT_LOWEST : a > INT_HIGHEST ? INT_HIGHEST : static_cast<int>(a);
}
ATTNRT_HD int sat_add(int a, int b) { return saturate(static_cast<long long>(a) + b); }
ATTNRT_HD int sat_sub(int a, int b) { return saturate(static_cast<long long>(a) - b); }
// Towards zero, saturated, NaN to 0. The largest float below 2^31 is 2147483520.
ATTNRT_HD int float_to_int(float x) {
  const float in = x > -2147483648.0f ? (x < 2147483520.0f ? x : 2147483520.0f) : -2147483648.0f;
  const int inside = static_cast<int>(in);
  return x == x ? (x >= 2147483648.0f ? INT_HIGHEST : inside) : 0;
}

template <class T>
ATTNRT_HD T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
ATTNRT_HD T max_of(T a, T b) {
  return a > b ? a : b;
}

// ---- float functions -----------------------------------------------------------------------------------------------
// Device: the CUDA functions, fast intrinsics where only an absolute error matters. Host: plain branch-free arithmetic
// that vectorises (libm calls do not). Errors of the host forms, in units in the last place: exp 2, log 3, tanh 4,
// sinpi and cospi 2; a test holds them.

ATTNRT_HD float f_abs(float x) { return ATTNRT_LIBM(fabsf)(x); }
ATTNRT_HD float f_floor(float x) { return ATTNRT_LIBM(floorf)(x); }
ATTNRT_HD float f_ceil(float x) { return ATTNRT_LIBM(ceilf)(x); }
ATTNRT_HD float f_sqrt(float x) { return ATTNRT_LIBM(sqrtf)(x); }
ATTNRT_HD float f_rsqrt(float x) { return 1.0f / ATTNRT_LIBM(sqrtf)(x); }
ATTNRT_HD float f_pow(float x, float y) { return ATTNRT_LIBM(powf)(x, y); }
ATTNRT_HD float f_sin(float x) { return ATTNRT_LIBM(sinf)(x); }
ATTNRT_HD float f_cos(float x) { return ATTNRT_LIBM(cosf)(x); }
ATTNRT_HD float f_floordiv(float a, float b) { return ATTNRT_LIBM(floorf)(a / b); }
ATTNRT_HD float f_mod(float a, float b) { return a - ATTNRT_LIBM(floorf)(a / b) * b; }

#if defined(__CUDA_ARCH__) || defined(__CUDACC_RTC__)

ATTNRT_HD float f_exp(float x) { return expf(x); }
ATTNRT_HD float f_exp2(float x) { return exp2f(x); }
ATTNRT_HD float f_log(float x) { return logf(x); }
ATTNRT_HD float f_log2(float x) { return log2f(x); }
#if defined(__CUDA_ARCH__)
// As on the host, sin(pi f) and cos(pi f) with f = x - q/2 in [-1/4, 1/4], turned by q quarters: twenty instructions
// for both, all on wide pipes, where sinpif and cospif take sixty and six of the pipe that exponentials need.
// Coefficients: least largest error, 5e-8, 1 at 0.
ATTNRT_HD float sinpi_quarters(float x, int turn) {
  const float shifted = __fmaf_rn(x, 2.0f, 12582912.0f);  // 1.5 * 2^23: the nearest whole number in the low bits
  const unsigned q = __float_as_uint(shifted) + turn;
  const float f = __fmaf_rn(shifted - 12582912.0f, -0.5f, x), z = __fmul_rn(f, f);
  float s = __fmaf_rn(z, -0.58907865f, 2.5497673f), c = __fmaf_rn(z, -1.30727983f, 4.05770159f);
  s = __fmaf_rn(s, z, -5.16770783f);
  c = __fmaf_rn(c, z, -4.93479204f);
  s = __fmul_rn(__fmaf_rn(s, z, 3.14159264f), f);
  c = __fmaf_rn(c, z, 1.0f);
  return __uint_as_float(__float_as_uint(q & 1u ? c : s) ^ (q << 30 & 0x80000000u));
}
ATTNRT_HD float f_sinpi(float x) { return sinpi_quarters(x, 0); }
ATTNRT_HD float f_cospi(float x) { return sinpi_quarters(x, 1); }
#else
ATTNRT_HD float f_sinpi(float x) { return sinpif(x); }
ATTNRT_HD float f_cospi(float x) { return cospif(x); }
#endif
#if defined(__CUDA_ARCH__)
ATTNRT_HD float exp_absolute(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}
ATTNRT_HD float divide_absolute(float a, float b) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  return a * y;
}
#else
ATTNRT_HD float exp_absolute(float x) { return expf(x); }
ATTNRT_HD float divide_absolute(float a, float b) { return a / b; }
#endif

#else

// Adding 1.5 * 2^23 rounds to the nearest whole number and leaves it in the low bits.
constexpr float ROUND = 12582912.0f;

// x * 2^n by two factors, so that subnormal results come out right.
ATTNRT_HD float scale_by_power(float x, int n) {
  const int first = n >> 1;
  return x * bits_to_float(static_cast<unsigned>(first + 127) << 23) *
         bits_to_float(static_cast<unsigned>(n - first + 127) << 23);
}
// exp(r) for |r| <= 0.3466: the Taylor polynomial of degree 7 is 5e-9 off.
ATTNRT_HD float exp_near_zero(float r) {
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  return p * r + 1.0f;
}
ATTNRT_HD float f_exp(float x) {
  x = select(x < -104.0f, -104.0f, x);
  x = select(x > 89.0f, 89.0f, x);
  const float shifted = x * 1.44269504f + ROUND;
  const int n = static_cast<int>(float_to_bits(shifted) - float_to_bits(ROUND));
  const float whole = shifted - ROUND;
  const float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;  // ln 2 in two parts; the first has 15 bits
  return scale_by_power(exp_near_zero(r), n);
}
ATTNRT_HD float f_exp2(float x) {
  x = select(x < -151.0f, -151.0f, x);
  x = select(x > 129.0f, 129.0f, x);
  const float shifted = x + ROUND;
  const int n = static_cast<int>(float_to_bits(shifted) - float_to_bits(ROUND));
  return scale_by_power(exp_near_zero((x - (shifted - ROUND)) * 0.693147181f), n);
}
// x = m * 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
ATTNRT_HD float log_mantissa(float x, float& exponent) {
  const bool tiny = x < 1.17549435e-38f;
  const unsigned bits = float_to_bits(x * (tiny ? 8388608.0f : 1.0f));
  const int e = static_cast<int>(bits - 0x3f3504f3u) >> 23;
  const float f = bits_to_float(bits - (static_cast<unsigned>(e) << 23)) - 1.0f;
  exponent = static_cast<float>(e) - (tiny ? 23.0f : 0.0f);
  const float s = f / (2.0f + f), z = s * s;
  float p = 2.0f / 9;
  p = p * z + 2.0f / 7;
  p = p * z + 2.0f / 5;
  p = p * z + 2.0f / 3;
  return p * z * s + 2.0f * s;
}
ATTNRT_HD float log_edges(float x, float value) {
  const float inf = bits_to_float(0x7f800000u), nan = bits_to_float(0x7fc00000u);
  return select(x >= 0.0f, select(x == 0.0f, -inf, select(x == inf, inf, value)), nan);
}
ATTNRT_HD float f_log(float x) {
  float e;
  const float m = log_mantissa(x, e);
  return log_edges(x, e * 0.693145752f + (m + e * 1.42860677e-6f));
}
ATTNRT_HD float f_log2(float x) {
  float e;
  const float m = log_mantissa(x, e);
  return log_edges(x, e + m * 1.44269504f);
}
// sin(pi x) = sin(pi f), f = x - q/2 in [-1/4, 1/4], turned by q quarters. f is exact.
ATTNRT_HD float sinpi_quarters(float x, int turn) {
  const float shifted = 2.0f * x + ROUND;
  const int q = static_cast<int>(float_to_bits(shifted)) + turn;
  const float f = x - 0.5f * (shifted - ROUND);
  const float y = f * 3.14159265f, z = y * y;
  float s = 1.0f / 362880;
  s = s * z - 1.0f / 5040;
  s = s * z + 1.0f / 120;
  s = s * z - 1.0f / 6;
  s = s * z * y + y;
  float c = -1.0f / 3628800;
  c = c * z + 1.0f / 40320;
  c = c * z - 1.0f / 720;
  c = c * z + 1.0f / 24;
  c = c * z - 0.5f;
  c = c * z + 1.0f;
  const float v = select((q & 1) != 0, c, s);
  return select((q & 2) != 0, -v, v);
}
ATTNRT_HD float f_sinpi(float x) { return sinpi_quarters(x, 0); }
ATTNRT_HD float f_cospi(float x) { return sinpi_quarters(x, 1); }
ATTNRT_HD float exp_absolute(float x) { return f_exp(x); }
ATTNRT_HD float divide_absolute(float a, float b) { return a / b; }

#endif

// a * b + c, on the device rounded once.
ATTNRT_HD float mul_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return a * b + c;
#endif
}

// Near 0 an odd polynomial (the other form cancels), else 1 - 2 / (e^2|x| + 1). On the device the polynomial is x
// R(x^2) with the least relative error for |x| < TANH_NEAR (our own fit, 2^-22.7; 2^-22.0 with its roundings): of as
// few terms as keep a logit right to 1e-5. On the host it is Taylor's.
constexpr float TANH_NEAR = 0.42f;
constexpr float TANH_0 = 0.999999881f, TANH_1 = -0.333307266f, TANH_2 = 0.13258405f, TANH_3 = -0.0469568074f;
ATTNRT_HD float tanh_near(float x) {
  const float u = x * x;
  float r = mul_add(u, TANH_3, TANH_2);
  r = mul_add(r, u, TANH_1);
  r = mul_add(r, u, TANH_0);
  return x * r;
}
ATTNRT_HD float tanh_far(float a) { return 1.0f - divide_absolute(2.0f, exp_absolute(2.0f * a) + 1.0f); }
ATTNRT_HD float f_tanh(float x) {
  const float a = f_abs(x);
  const float far = tanh_far(a);
#if defined(__CUDA_ARCH__)
  return select(a < TANH_NEAR, tanh_near(x), select(x < 0.0f, -far, far));
#else
  const float z = x * x;
  float p = -1382.0f / 155925;
  p = p * z + 62.0f / 2835;
  p = p * z - 17.0f / 315;
  p = p * z + 2.0f / 15;
  p = p * z - 1.0f / 3;
  return select(a < 0.35f, p * z * x + x, select(x < 0.0f, -far, far));
#endif
}
ATTNRT_HD float f_logistic(float x) { return divide_absolute(1.0f, 1.0f + exp_absolute(-x)); }
#if defined(__CUDA_ARCH__)
// The same with one result of the exponentials' pipe instead of two: 1 / d for d = 1 + e^-x from the pattern of d
// (0.0505 off) and the polynomial in the error e of that, our own fit of 1 / (1 - e) with the least relative error:
// 1e-6 with its roundings. Below x = -86 it stays at 2^-125.
ATTNRT_HD float logistic_without_reciprocal(float x) {
  float power, t;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(power) : "f"(x * -1.44269504f), "f"(125.0f));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(power));
  const float d = 1.0f + t, r = __uint_as_float(0x7ef31000u - __float_as_uint(d)), e = __fmaf_rn(-d, r, 1.0f);
  float p = __fmaf_rn(e, 1.00255959f, 1.00255972f);
  p = __fmaf_rn(p, e, 0.99999918f);
  return r * __fmaf_rn(p, e, 0.99999918f);
}
#else
ATTNRT_HD float logistic_without_reciprocal(float x) { return f_logistic(x); }
#endif
ATTNRT_HD float to_float(int x) { return static_cast<float>(x); }

// ---- quick answers -------------------------------------------------------------------------------------------------
// Printed hooks hand p to functions that have more than one form. A kernel that computes many scores at a time may pass
// AtKey, and Quick for the arguments that come as a rule: first Quick<true, ...> for all scores of a tile, which only
// looks at the arguments; if that leaves no doubt, Quick<false, ...> gives the same answers as AtKey, to the bit.

template <class P>
ATTNRT_HD float f_tanh(float x, const P&) {
  return f_tanh(x);
}
template <class P>
ATTNRT_HD float f_logistic(float x, const P&) {
  return f_logistic(x);
}
// How far a key's position lies behind a number that is one for the row.
template <class P>
ATTNRT_HD float distance(int pos, int from, const P&) {
  return to_float(isub(pos, from));
}

// column: a constant of the score at hand, below 2^10, that says which eight keys of its tile it belongs to.
struct AtKey {
  const ParamRef* params;
  int column;
  ATTNRT_HD const ParamRef& operator[](int i) const { return params[i]; }
};
// Three of eight the longer way: neither pipe has to wait for the other.
ATTNRT_HD float f_logistic(float x, const AtKey& p) {
  return 0x52 >> p.column / 8 % 8 & 1 ? logistic_without_reciprocal(x) : f_logistic(x);
}

struct Doubt {
  unsigned high = 0;     // bits 23 and up rise: a distance was too large to be a float with a column added
  float largest = 0.0f;  // argument of a polynomial
  ATTNRT_HD bool raised() const { return high >> 23 || !(largest < TANH_NEAR); }
};
// kRuns: a thread's keys have positions first + column.
template <bool kAsks, bool kRuns>
struct Quick : AtKey {
  Doubt* doubt;
  int first;
};
template <bool kAsks, bool kRuns>
ATTNRT_HD float f_tanh(float x, const Quick<kAsks, kRuns>& p) {
  if constexpr (kAsks) p.doubt->largest = ATTNRT_LIBM(fmaxf)(p.doubt->largest, f_abs(x));
#if defined(__CUDA_ARCH__)
  return tanh_near(x);
#else
  return f_tanh(x);
#endif
}
template <bool kAsks, bool kRuns>
ATTNRT_HD float f_logistic(float x, const Quick<kAsks, kRuns>& p) {
  return f_logistic(x, static_cast<const AtKey&>(p));
}
// One addition a key: what is converted is one number for the row and the tile.
template <bool kAsks, bool kRuns>
ATTNRT_HD float distance(int pos, int from, const Quick<kAsks, kRuns>& p) {
  if constexpr (kRuns) {
    const int rest = isub(p.first, from);
    if constexpr (kAsks) p.doubt->high |= static_cast<unsigned>(iadd(rest, 0x400000));
    return to_float(rest) + static_cast<float>(p.column);
  } else {
    return to_float(isub(pos, from));
  }
}

}  // namespace attnrt

#endif  // ATTNRT_VARIANT_H
