// SPDX-License-Identifier: Apache-2.0
// The inner loops as a table. None of them depends on the variant, so they are compiled once per family (micro.h).

constexpr int LINE = 64;                           // bytes of a line of cache
constexpr int NR = 2 * W;                          // keys (or numbers of V) per packed panel
constexpr int MR = W == 16 ? 12 : W == 8 ? 6 : 4;  // rows whose 2 * MR sums fill the vector registers

// s[r][j] = q[r] . k[j] for keys [k0, k1) at k[j]; reads k up to 7 entries past k1. `ahead`: rows to prefetch
// meanwhile, or null.
typedef void (*Dots)(const float* q, int64_t ldq, const void* const* k, int k0, int k1, int dim, float* s, int64_t lds,
                     const void* const* ahead);
// acc[r] = acc[r] * alpha[r] + sum over keys [k0, k1) of p[r][j] * v[j]; `ahead` as above.
typedef void (*AccumulateRows)(const float* p, int64_t ldp, const void* const* v, int k0, int k1, int dim, float* acc,
                               int64_t lda, const float* alpha, const void* const* ahead);
// dst[0 : n] = element first.. of src as float32, dst[n : padded] = 0.
typedef void (*WidenRow)(const void* src, int64_t first, int n, int padded, float* dst);

// For one element type: [R - 1] and [safe][R - 1], R rows at once.
struct RowLoops {
  Dots dots[4];
  AccumulateRows accumulate[2][4];
};

static int attend_items(const attnrt_call* call, const Hooks& hooks, int worker);
static int merge_rows(const attnrt_call* call, const Hooks& hooks, int worker, int num_workers);

struct Loops {
  Drivers drivers;   // first: all that a variant calls
  RowLoops rows[5];  // by element type
  WidenRow widen[5];
  // panel[d * NR + i] = rows[i][d] for 8 rows.
  void (*transpose8)(const float* const* rows, int dim, float* panel);
  // s[r][0 : NR] = q[r] . panel.
  void (*panel_scores)(int rows, const float* q, int64_t ldq, const float* panel, int dim, float* s, int64_t lds);
  // acc[r][0 : NR] over keys [k0, k1) of a panel [key][NR]; [safe].
  void (*panel_accumulate[2])(int rows, const float* p, int64_t ldp, const float* panel, int k0, int k1, float* acc,
                              int64_t lda, const float* alpha);
};
