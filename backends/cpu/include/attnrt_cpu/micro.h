// SPDX-License-Identifier: Apache-2.0
// The four inner loops. All that a row's bits see of them is the order of operations of one (row, key) or (row, d)
// pair, and that order is the same for every number of rows R, so that rows may share a tile with any others:
//
//   dots           score = lane i adds q[d] * k[d] for d = i, i + W, ... by fma, then sum_lanes' tree  (few rows)
//   panel_scores   score = fma over d = 0, 1, ... in one lane per key                                  (many rows)
//   accumulate_*   acc[d] = fma over visible keys in rising order, after one multiply by alpha         (both)
//
// A key that a row may not see carries weight -0.0; with kSafe its V is never multiplied for that row, so that NaN
// there does no harm. Without kSafe every key of the range is visible to every row.

// out[i] = sum_lanes(x[i]) of eight vectors, bit for bit.
ATTNRT_INLINE void sum_lanes8(const vf* x, float* out) {
#if ATTNRT_LANES >= 8
#if ATTNRT_LANES == 16
  __m256 y[8];
  for (int i = 0; i < 8; ++i) y[i] = _mm256_add_ps(_mm512_castps512_ps256(x[i]), _mm512_extractf32x8_ps(x[i], 1));
#else
  const __m256* y = reinterpret_cast<const __m256*>(x);
#endif
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(y[4], y[5]), _mm256_hadd_ps(y[6], y[7]));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
#else
  for (int i = 0; i < 8; ++i) out[i] = sum_lanes(x[i]);
#endif
}

ATTNRT_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Rows that will be needed a tile later, fetched line by line in the order of their addresses (memory answers such an
// order fastest) into the second-level cache: the first one is busy.
struct Ahead {
  const void *const *row, *const *end;
  int64_t at, bytes;
  ATTNRT_INLINE Ahead make(const void* const* rows, int k0, int k1, int64_t bytes) {
    return {rows ? rows + k0 : nullptr, rows ? rows + k1 : nullptr, 0, bytes};
  }
  __attribute__((always_inline)) void step() {
    if (row == end) return;
    __builtin_prefetch(static_cast<const char*>(*row) + at, 0, 2);
    at += LINE;
    if (at >= bytes) at = 0, ++row;
  }
};

template <bool kSafe>
ATTNRT_INLINE vf accumulate(vf p, vf v, vf acc) {
  if constexpr (kSafe) return select(bits_of(p) == splat_int(INT32_MIN), acc, fma(p, v, acc));
  return fma(p, v, acc);
}

// ---- few rows: lanes over head_dim ----

// s[r * lds + j] = q[r] . k[j] for j in [k0, k1); reads k[j] and writes s up to 7 entries past k1. K keys by R rows at
// once, so that R * K sums hide the latency of fma and each load serves several.
template <class T, int R>
static void dots(const float* q, int64_t ldq, const void* const* k, int k0, int k1, int dim, float* s, int64_t lds,
                 const void* const* ahead) {
  constexpr int K = R == 1 ? 8 : R == 2 ? 4 : 3;
  constexpr int kSums = (R * K + 7) / 8 * 8;
  constexpr int64_t kLine = LINE / static_cast<int64_t>(sizeof(typename T::type));
  typedef const typename T::type* Row;
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = q + r * ldq;
  const int64_t end = dim;
  for (int j = k0; j < k1; j += K) {
    vf acc[kSums];
    for (int i = 0; i < kSums; ++i) acc[i] = splat(0.0f);
    Row keys[K];
    for (int i = 0; i < K; ++i) keys[i] = static_cast<Row>(k[j + i]);
    Row next[K];
    for (int i = 0; i < K; ++i) next[i] = static_cast<Row>(ahead ? ahead[j + i] : k[j + i]);
    int64_t d = 0;
    do {
      if (ahead)  // a line of each at a time: a burst would hold up the loads
        for (int i = 0; i < K; ++i) __builtin_prefetch(next[i] + d, 0, 2);
      const int64_t stop = d + kLine < end ? d + kLine : end;
      do {
        vf y[K];
        for (int i = 0; i < K; ++i) y[i] = T::load8(keys[i] + d);
        for (int r = 0; r < R; ++r) {
          const vf x = load(rows[r] + d);
          for (int i = 0; i < K; ++i) acc[i * R + r] = fma(x, y[i], acc[i * R + r]);
        }
        d += W;
      } while (d < stop);
    } while (d < end);
    float sums[kSums];
    for (int i = 0; i < kSums; i += 8) sum_lanes8(acc + i, sums + i);
    for (int i = 0; i < K; ++i)
      for (int r = 0; r < R; ++r) s[r * lds + j + i] = sums[i * R + r];
  }
}

// acc[r][d : d + N * W] over rows v[j] of memory.
template <class T, int R, int N, bool kSafe>
ATTNRT_INLINE void accumulate_strip(const float* p, int64_t ldp, const void* const* v, int k0, int k1, int d,
                                    float* acc, int64_t lda, const float* alpha, Ahead& ahead) {
  typedef const typename T::type* Row;
  vf sum[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = load(acc + r * lda + d + n * W) * splat(alpha[r]);
  int j = k0;
  do {
    const Row row = static_cast<Row>(v[j]) + d;
    for (int n = 0; n < N; n += 2) ahead.step();
    vf x[N];
    for (int n = 0; n < N; ++n) x[n] = T::load8(row + n * W);
    for (int r = 0; r < R; ++r) {
      const vf weight = splat(p[r * ldp + j]);
      for (int n = 0; n < N; ++n) sum[r][n] = accumulate<kSafe>(weight, x[n], sum[r][n]);
    }
  } while (++j < k1);
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(acc + r * lda + d + n * W, sum[r][n]);
}

template <class T, int R, bool kSafe>
static void accumulate_rows(const float* p, int64_t ldp, const void* const* v, int k0, int k1, int dim, float* acc,
                            int64_t lda, const float* alpha, const void* const* rows_ahead) {
  Ahead ahead = Ahead::make(rows_ahead, k0, k1, dim * static_cast<int64_t>(sizeof(typename T::type)));
  constexpr int N = R == 1 ? 8 : R == 2 ? 4 : 3;  // enough independent sums to hide the latency of fma
  int d = 0;
  for (; d + N * W <= dim && dim - d != 4 * W; d += N * W)
    accumulate_strip<T, R, N, kSafe>(p, ldp, v, k0, k1, d, acc, lda, alpha, ahead);
  for (; d + 2 * W <= dim; d += 2 * W) accumulate_strip<T, R, 2, kSafe>(p, ldp, v, k0, k1, d, acc, lda, alpha, ahead);
  for (; d < dim; d += W) accumulate_strip<T, R, 1, kSafe>(p, ldp, v, k0, k1, d, acc, lda, alpha, ahead);
}

template <class T>
static constexpr RowLoops row_loops() {
  return {{dots<T, 1>, dots<T, 2>, dots<T, 3>, dots<T, 4>},
          {{accumulate_rows<T, 1, false>, accumulate_rows<T, 2, false>, accumulate_rows<T, 3, false>,
            accumulate_rows<T, 4, false>},
           {accumulate_rows<T, 1, true>, accumulate_rows<T, 2, true>, accumulate_rows<T, 3, true>,
            accumulate_rows<T, 4, true>}}};
}

// ---- many rows: packed panels ----

// Keys 0..7 of 8 rows, transposed: panel[d * NR + i] = rows[i][d].
static void transpose8(const float* const* rows, int dim, float* panel) {
  int d = 0;
#if ATTNRT_LANES >= 8
  for (; d + 8 <= dim; d += 8) {
    __m256 x[8], y[8];
    for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(rows[i] + d);
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
      y[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = _mm256_shuffle_ps(y[4 * i], y[4 * i + 2], 0x44);
      x[4 * i + 1] = _mm256_shuffle_ps(y[4 * i], y[4 * i + 2], 0xee);
      x[4 * i + 2] = _mm256_shuffle_ps(y[4 * i + 1], y[4 * i + 3], 0x44);
      x[4 * i + 3] = _mm256_shuffle_ps(y[4 * i + 1], y[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(panel + (d + i) * NR, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
      _mm256_storeu_ps(panel + (d + i + 4) * NR, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
    }
  }
#endif
  for (; d < dim; ++d)
    for (int i = 0; i < 8; ++i) panel[d * NR + i] = rows[i][d];
}

// s[r][0 : NR] = q[r] . panel, one lane per key.
template <int R>
static void panel_scores(const float* q, int64_t ldq, const float* panel, int dim, float* s, int64_t lds) {
  vf sum[R][2];
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = splat(0.0f);
  for (int d = 0; d < dim; ++d) {
    const vf k0 = load(panel + d * NR), k1 = load(panel + d * NR + W);
    for (int r = 0; r < R; ++r) {
      const vf x = splat(q[r * ldq + d]);
      sum[r][0] = fma(x, k0, sum[r][0]);
      sum[r][1] = fma(x, k1, sum[r][1]);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(s + r * lds, sum[r][0]);
    store(s + r * lds + W, sum[r][1]);
  }
}

// acc[r][0 : NR] over keys [k0, k1) of a packed V panel [key][NR].
template <int R, bool kSafe>
static void panel_accumulate(const float* p, int64_t ldp, const float* panel, int k0, int k1, float* acc, int64_t lda,
                             const float* alpha) {
  // k0 < k1: a loop that may not run would keep the sums in memory
  vf sum[R][2];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 2; ++n) sum[r][n] = load(acc + r * lda + n * W) * splat(alpha[r]);
  for (int r = 0; r < R; ++r) prefetch(acc + (R + r) * lda);  // the next block's
  int j = k0;
  do {
    const vf v0 = load(panel + j * NR), v1 = load(panel + j * NR + W);
    for (int r = 0; r < R; ++r) {
      const vf weight = splat(p[r * ldp + j]);
      sum[r][0] = accumulate<kSafe>(weight, v0, sum[r][0]);
      sum[r][1] = accumulate<kSafe>(weight, v1, sum[r][1]);
    }
  } while (++j < k1);
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 2; ++n) store(acc + r * lda + n * W, sum[r][n]);
}

// Blocks of at most MR rows: full ones, then one of what is left, built as a sum of powers of two so that few sizes
// exist.
template <int R>
ATTNRT_INLINE void scores_tail(int& rows, const float*& q, int64_t ldq, const float* panel, int dim, float*& s,
                               int64_t lds) {
  while (rows >= R) {
    panel_scores<R>(q, ldq, panel, dim, s, lds);
    q += R * ldq;
    s += R * lds;
    rows -= R;
  }
}

static void panel_scores_all(int rows, const float* q, int64_t ldq, const float* panel, int dim, float* s,
                             int64_t lds) {
  scores_tail<MR>(rows, q, ldq, panel, dim, s, lds);
  if constexpr (MR > 6) scores_tail<6>(rows, q, ldq, panel, dim, s, lds);
  if constexpr (MR > 4) scores_tail<4>(rows, q, ldq, panel, dim, s, lds);
  scores_tail<2>(rows, q, ldq, panel, dim, s, lds);
  scores_tail<1>(rows, q, ldq, panel, dim, s, lds);
}

template <int R, bool kSafe>
ATTNRT_INLINE void accumulate_tail(int& rows, const float*& p, int64_t ldp, const float* panel, int k0, int k1,
                                   float*& acc, int64_t lda, const float*& alpha) {
  while (rows >= R) {
    panel_accumulate<R, kSafe>(p, ldp, panel, k0, k1, acc, lda, alpha);
    p += R * ldp;
    acc += R * lda;
    alpha += R;
    rows -= R;
  }
}

template <bool kSafe>
static void panel_accumulate_all(int rows, const float* p, int64_t ldp, const float* panel, int k0, int k1, float* acc,
                                 int64_t lda, const float* alpha) {
  accumulate_tail<MR, kSafe>(rows, p, ldp, panel, k0, k1, acc, lda, alpha);
  if constexpr (MR > 6) accumulate_tail<6, kSafe>(rows, p, ldp, panel, k0, k1, acc, lda, alpha);
  if constexpr (MR > 4) accumulate_tail<4, kSafe>(rows, p, ldp, panel, k0, k1, acc, lda, alpha);
  accumulate_tail<2, kSafe>(rows, p, ldp, panel, k0, k1, acc, lda, alpha);
  accumulate_tail<1, kSafe>(rows, p, ldp, panel, k0, k1, acc, lda, alpha);
}

static const Loops loops = {
    {attend_items, merge_rows},
    {row_loops<F32>(), row_loops<F16>(), row_loops<BF16>(), row_loops<E4M3>(), row_loops<E5M2>()},
    {widen_row<F32>, widen_row<F16>, widen_row<BF16>, widen_row<E4M3>, widen_row<E5M2>},
    transpose8,
    panel_scores_all,
    {panel_accumulate_all<false>, panel_accumulate_all<true>},
};
