// SPDX-License-Identifier: Apache-2.0
// Checks the Hopper prefill kernel without a GPU (prefill_emulate.hpp): small problems of every kind against float64,
// rows past the end of pages poisoned with NaN, schedules drawn at random.
//   benchmarks/experiments/prefill_emulate.sh [seeds [part of a case's name]]
#include "prefill_emulate.hpp"
// (ptx.cuh and the built-ins are defined above)
#include "hopper_attend.cuh"
#include "hopper_loader.cuh"
#include "prefill_variants.hpp"

using namespace attnrt;

struct Case {
  const char* name;
  std::vector<int> q_lens, kv_lens;
  int kv_heads, page;  // page 0: contiguous
  bool gather, bound;  // bound: the host knows only kv_lens + 40
  int leaf, states;  // leaf: keys per leaf (0: one leaf); states: 1 partial states instead of rows, one for each leaf;
                     // 2: folded
  bool hnd;
};

static unsigned hash(unsigned long long x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return (unsigned)x;
}
static unsigned short value(unsigned long long i) {
  return emu::to_bf16((int)(hash(i) >> 8) * (2.0f / 16777216.0f) - 1.0f);
}
static FastDiv fast_div(unsigned d) {
  unsigned log = 0;
  while ((1ull << log) < d) ++log;
  if ((1ull << log) == d) return {d, 0, log};
  return {d, (unsigned)(((1ull << (31 + log)) + d - 1) / d), log - 1};
}

static const char* only = "";

template <class Config, class Variant>
bool run(const Case& c, unsigned seed) {
  using L = HopperLayout<Config, Variant>;
  if (!strstr(c.name, only)) return true;
  const int group = Config::group, dim = Config::head_dim, heads = c.kv_heads * group, n = (int)c.q_lens.size();
  int rows = 0;
  long long tokens = 0;
  for (int i = 0; i < n; ++i) rows += c.q_lens[i], tokens += c.kv_lens[i];
  // Pool: NaN everywhere, then the live tokens.
  const int page = c.page ? c.page : 1;
  std::vector<int> table, first_page(n + 1, 0);
  for (int i = 0; i < n; ++i) first_page[i + 1] = first_page[i] + (c.kv_lens[i] + (c.bound ? 40 : 0) + page - 1) / page;
  const int pages = c.page ? first_page[n] * 2 + 3 : (int)tokens + 300;
  const long long pool = (long long)pages * page;
  if (c.page) {
    std::vector<int> order(pages);
    for (int i = 0; i < pages; ++i) order[i] = i;
    for (int i = pages - 1; i > 0; --i) std::swap(order[i], order[hash(seed + i) % (i + 1)]);
    table.assign(order.begin(), order.begin() + first_page[n]);
  }
  const long long st = c.hnd ? dim : (long long)c.kv_heads * dim, sh = c.hnd ? (long long)page * dim : dim,
                  sp = (long long)page * c.kv_heads * dim;
  std::vector<unsigned short> k(pool * c.kv_heads * dim, 0x7fc0), v(k), q((size_t)rows * heads * dim),
      out(q.size(), 0x7fc0);
  std::vector<long long> base(n);
  auto slot_of = [&](int r, int i) {
    return c.page ? (long long)table[first_page[r] + i / page] * page + i % page : base[r] + i;
  };
  long long at = 100;
  for (int r = 0; r < n; ++r) {
    base[r] = at;
    at += c.kv_lens[r] + 13;
    if (!c.page && at > pool) abort();
    for (int i = 0; i < c.kv_lens[r]; ++i)
      for (int h = 0; h < c.kv_heads; ++h)
        for (int d = 0; d < dim; ++d) {
          const long long s = slot_of(r, i), e = s / page * sp + s % page * st + h * sh + d;
          k[e] = value(((seed * 7ull + r) * 100000 + i) * 4096 + h * 512 + d);
          v[e] = value(((seed * 7ull + r) * 100000 + i) * 4096 + h * 512 + d + 1234567891);
        }
  }
  for (size_t i = 0; i < q.size(); ++i) q[i] = value(i + 99999999999ull + seed);
  std::vector<float> lse((size_t)rows * heads, NAN);

  RunParams p{};
  const bool numbers = strstr(c.name, "numbers");  // nothing lies as 16-byte copies want it
  std::vector<unsigned short> shifted(q.size() + 1);
  std::copy(q.begin(), q.end(), shifted.begin() + 1);
  p.q = numbers ? (const char*)(shifted.data() + 1) : (const char*)q.data();
  p.q_stride_row = p.out_stride_row = heads * dim;
  p.q_stride_head = p.out_stride_head = dim;
  p.out = (char*)out.data();
  p.lse = lse.data();
  p.lse_stride_row = heads;
  p.lse_stride_head = 1;
  p.sm_scale = 2.0f / sqrtf((float)dim);
  p.num_qo_heads = heads;
  p.k = {(const char*)k.data(), sp, st, sh, pool, fast_div(page), !numbers};
  p.v = p.k;
  p.v.ptr = (const char*)v.data();
  KvMaps maps{};
  const bool linear = !c.hnd;  // one stride over all slots
  const int box = c.page ? std::min(c.page & -c.page, 128) : 128;
  for (auto m : {&maps.k, &maps.v}) {
    const PagedKv& kv = m == &maps.k ? p.k : p.v;
    const unsigned long long o[9] = {(unsigned long long)kv.ptr,     (unsigned long long)st * 2,
                                     (unsigned long long)sh * 2,     (unsigned long long)sp * 2,
                                     (unsigned long long)dim,        (unsigned long long)(linear ? pool : page),
                                     (unsigned long long)c.kv_heads, (unsigned long long)(linear ? 1 : pages),
                                     (unsigned long long)box};
    memcpy(m->opaque, o, sizeof o);
  }
  maps.page_k = maps.page_v = linear ? fast_div(1u << 31) : fast_div(page);
  while ((1 << maps.box_log2) < box) ++maps.box_log2;

  std::vector<int> request, pos, zeros(n, 0), planned(n), plan_end(n), qlens = c.q_lens, klens = c.kv_lens;
  for (int r = 0; r < n; ++r) planned[r] = c.kv_lens[r] + (c.bound ? 40 : 0);
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < c.q_lens[r]; ++i) {
      request.push_back(r);
      pos.push_back(planned[r] - c.q_lens[r] + i);
    }
  PlanHeader h{};
  PartDesc& part = h.parts[0];
  std::vector<int> indptr = first_page;
  part.request = request.data();
  part.qo_pos = pos.data();
  part.indptr = indptr.data();
  part.indices = c.page ? table.data() : nullptr;
  part.kv_base = c.page ? nullptr : base.data();
  part.kv_begin = zeros.data();
  part.kv_end = planned.data();
  part.kv_offset = zeros.data();
  part.block = fast_div(page);
  part.heads = 1;
  for (auto& ruler : h.rulers) ruler.tail = c.leaf ? c.leaf : 1 << 30;
  const int tail = h.rulers[0].tail, queries = L::kRows / group;
  std::vector<WorkItem> items;
  int row0 = 0, slots = 0;
  std::vector<int> slot_item;
  for (int r = 0; r < n; row0 += c.q_lens[r++])
    for (int q0 = 0; q0 < c.q_lens[r]; q0 += queries) {
      const int q1 = std::min(q0 + queries, c.q_lens[r]), shift = planned[r] - c.q_lens[r];
      WorkItem w{};
      w.row = r;
      w.q_begin = row0 + q0;
      w.q_end = row0 + q1;
      w.head_end = c.kv_heads;
      w.kv_end = Variant::has_mask ? q1 + shift : planned[r];
      if (std::is_base_of<WindowVariant, Variant>::value)
        w.kv_begin = std::max(0, q0 + shift - (c.bound ? 40 : 0) - kWindow);
      if (planned[r] == 0) w.kv_end = 0;
      w.leaf_begin = w.kv_begin / tail;
      w.leaf_end = w.kv_end > w.kv_begin ? (w.kv_end - 1) / tail + 1 : w.leaf_begin;
      w.slot = c.states ? slots : -1;
      w.fold = c.states != 1;
      slots += (q1 - q0) * (w.fold ? 1 : w.leaf_end - w.leaf_begin);
      items.push_back(w);
    }
  std::vector<float> acc((size_t)slots * heads * dim, NAN), ml((size_t)slots * heads * 2, NAN);
  h.partial_acc = acc.data();
  h.partial_ml = ml.data();
  std::vector<int> worker_indptr{0, (int)items.size() / 2, (int)items.size()};
  h.work = items.data();
  h.worker_indptr = worker_indptr.data();
  h.qo_lens = qlens.data();
  h.kv_lens = planned.data();
  h.bound_kv_lens = c.bound ? klens.data() : nullptr;
  h.team_workers = 2;
  h.num_parts = 1;
  h.solid = seed % 2;
  p.plan = &h;
  ParamRef params[1]{};
  for (unsigned w = 0; w < 2; ++w) {
    blockIdx.x = w;
    const bool ended = emu::run(L::kThreads, [&] {
      if (c.gather) {
        hopper_attend<Config, Variant, HopperLoader<Config, Variant, Loading::gather>>(p, params, maps, emu::smem);
      } else {
        hopper_attend<Config, Variant, HopperLoader<Config, Variant, Loading::boxes>>(p, params, maps, emu::smem);
      }
    });
    if (!ended) return printf("%-28s seed %u: DEADLOCK\n", c.name, seed), false;
  }
  // States become rows: the fold of attnrt/fold.py in float64.
  std::vector<double> got(q.size());
  for (size_t i = 0; i < q.size(); ++i) got[i] = emu::bf16(out[i]);
  std::vector<double> got_lse(lse.begin(), lse.end());
  if (c.states)
    for (const WorkItem& w : items)
      for (int i = w.q_begin; i < w.q_end; ++i)
        for (int head = 0; head < heads; ++head) {
          double m = -INFINITY, l = 0;
          std::vector<double> o(dim, 0);
          const int parts = w.fold ? 1 : w.leaf_end - w.leaf_begin;
          for (int s = 0; s < parts; ++s) {
            const size_t e = ((size_t)w.slot + s * (w.q_end - w.q_begin) + i - w.q_begin) * heads + head;
            const double ms = ml[2 * e], ls = ml[2 * e + 1];
            if (ms == -INFINITY) continue;
            const double top = std::max(m, ms), a = exp2(m - top), b = exp2(ms - top);
            for (int d = 0; d < dim; ++d) o[d] = o[d] * a + acc[e * dim + d] * b;
            l = l * a + ls * b;
            m = top;
          }
          for (int d = 0; d < dim; ++d) got[((size_t)i * heads + head) * dim + d] = l > 0 ? o[d] / l : 0;
          got_lse[(size_t)i * heads + head] = l > 0 ? (m + log2(l)) * log(2.0) : -INFINITY;
        }
  double err = 0, ref = 0, lse_err = 0;
  const ParamRef* none = nullptr;
  for (int i = 0; i < rows; ++i)
    for (int head = 0; head < heads; ++head) {
      const int r = request[i];
      Ctx x{};
      x.request = r;
      x.qo_pos = pos[i] + c.kv_lens[r] - planned[r];
      x.qo_row = i;
      x.qo_head = head;
      x.kv_head = head / group;
      const auto hook = Variant::row(none, x);
      int low = INT_LOWEST, high = INT_HIGHEST;
      Variant::visible(hook, low, high);
      std::vector<double> s(c.kv_lens[r], -INFINITY);
      double top = -INFINITY, sum = 0;
      for (int j = 0; j < c.kv_lens[r]; ++j) {
        if (j < low || j > high) continue;
        const long long t = slot_of(r, j), e = t / page * sp + t % page * st + head / group * sh;
        double dot = 0;
        for (int d = 0; d < dim; ++d)
          dot += (double)emu::bf16(q[((size_t)i * heads + head) * dim + d]) * emu::bf16(k[e + d]);
        x.kv_pos = j;
        s[j] = Variant::logits(none, hook, x, (float)(dot * p.sm_scale));
        top = std::max(top, s[j]);
      }
      std::vector<double> o(dim, 0);
      for (int j = 0; j < c.kv_lens[r]; ++j) {
        if (s[j] == -INFINITY) continue;
        const double w = exp(s[j] - top);
        const long long t = slot_of(r, j), e = t / page * sp + t % page * st + head / group * sh;
        sum += w;
        for (int d = 0; d < dim; ++d) o[d] += w * emu::bf16(v[e + d]);
      }
      for (int d = 0; d < dim; ++d) {
        const double want = sum > 0 ? o[d] / sum : 0, e = got[((size_t)i * heads + head) * dim + d] - want;
        err += e * e;
        ref += want * want;
      }
      const double want = sum > 0 ? top + log(sum) : -INFINITY, have = got_lse[(size_t)i * heads + head];
      if (want == -INFINITY ? have != want : !(fabs(have - want) < 1e9)) lse_err = INFINITY;
      if (want != -INFINITY) lse_err = std::max(lse_err, fabs(have - want));
    }
  err = ref > 0 ? sqrt(err / ref) : sqrt(err);
  const bool good = err < 4e-3 && lse_err < 1e-4;
  printf("%-28s seed %u: error %.2e, lse %.1e%s\n", c.name, seed, err, lse_err, good ? "" : "  WRONG");
  fflush(stdout);
  return good;
}

struct ShortWindow : WindowVariant {
  ATTNRT_HD static void visible(const Row& r, int& low, int& high) {
    low = r.qo_pos - 150;
    high = r.qo_pos;
  }
};

int main(int argc, char** argv) {
  const int seeds = argc > 1 ? atoi(argv[1]) : 1;
  if (argc > 2) only = argv[2];
  int bad = 0;
  for (unsigned seed = 1; seed <= (unsigned)seeds; ++seed) {
    emu::rng = seed * 77777;
    auto ok = [&](bool good) { bad += !good; };
    ok(run<TileConfig<1, 128, 2>, CausalVariant>(
        {"causal contiguous", {200, 130}, {200, 333}, 2, 0, false, false, 0, 0, false}, seed));
    ok(run<TileConfig<4, 128, 2>, CausalVariant>(
        {"causal page 16, group 4", {40, 1}, {300, 150}, 1, 16, false, false, 0, 0, false}, seed));
    ok(run<TileConfig<4, 128, 2>, CausalVariant>(
        {"causal page 32 HND", {40, 9}, {300, 150}, 2, 32, false, false, 0, 0, true}, seed));
    ok(run<TileConfig<1, 128, 2>, CausalVariant>({"causal page 1 gather", {140}, {270}, 2, 1, true, false, 0, 0, false},
                                                 seed));
    ok(run<TileConfig<4, 128, 2>, CausalVariant>(
        {"causal page 48 gather HND", {40, 3}, {290, 130}, 2, 48, true, false, 0, 0, true}, seed));
    ok(run<TileConfig<2, 128, 2>, CausalVariant>({"causal by numbers", {70}, {170}, 1, 7, true, false, 0, 0, true},
                                                 seed));
    ok(run<TileConfig<2, 128, 2>, CausalVariant>(
        {"causal bound lengths", {70, 5}, {300, 77}, 1, 16, false, true, 0, 0, false}, seed));
    ok(run<TileConfig<2, 128, 2>, CausalVariant>(
        {"bound lengths, gather", {70, 5}, {300, 77}, 1, 4, true, true, 0, 0, false}, seed));
    ok(run<TileConfig<1, 128, 2, true>, CausalVariant>(
        {"leaves of 256, folded", {100}, {700}, 1, 0, false, false, 256, 0, false}, seed));
    ok(run<TileConfig<1, 128, 2, true>, CausalVariant>(
        {"leaves of 256, one state", {100}, {700}, 1, 64, false, false, 256, 2, false}, seed));
    ok(run<TileConfig<1, 128, 2, true>, CausalVariant>(
        {"leaves of 256, states", {100}, {700}, 1, 0, false, false, 256, 1, false}, seed));
    ok(run<TileConfig<1, 128, 2>, FullVariant>(
        {"full, empty request", {30, 20, 10}, {129, 0, 128}, 1, 0, false, false, 0, 0, false}, seed));
    ok(run<TileConfig<1, 128, 2>, FullVariant>(
        {"empty request, gather", {30, 20, 10}, {129, 0, 128}, 1, 1, true, false, 0, 0, false}, seed));
    ok(run<TileConfig<1, 128, 2>, ShortWindow>({"window", {300}, {600}, 1, 0, false, false, 0, 0, false}, seed));
    ok(run<TileConfig<1, 128, 2>, SoftcapVariant>({"soft-cap", {130}, {130}, 1, 0, false, false, 0, 0, false}, seed));
    ok(run<TileConfig<1, 128, 2>, AlibiVariant>({"alibi", {130}, {260}, 1, 16, false, false, 0, 0, false}, seed));
    ok(run<TileConfig<1, 64, 3>, CausalVariant>({"head_dim 64", {250}, {300}, 2, 0, false, false, 0, 0, false}, seed));
    ok(run<TileConfig<1, 64, 3>, CausalVariant>({"head_dim 64 gather", {250}, {300}, 1, 1, true, false, 0, 0, false},
                                                seed));
  }
  printf(bad ? "%d WRONG\n" : "all right\n", bad);
  return bad != 0;
}
