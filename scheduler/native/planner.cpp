// SPDX-License-Identifier: Apache-2.0
// The planner's hot loop. Same steps, same names and same answers, byte for byte, as scheduler/plan_python.py, which
// says why.
//
// Costs are added in the same order as there and without fused multiply-adds (-ffp-contract=off), so that two loads
// that are equal in Python are equal here. Nothing has a fixed capacity but the numbers of parts, classes and spans,
// which the caller checks; scratch belongs to the thread and grows.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "buffer.h"
#include "costs.h"
#include "crews.h"
#include "lpt.h"
#include "merges.h"
#include "problem.h"
#include "query_tiles.h"
#include "tile.h"

namespace {

constexpr double kBadBalance = 1.1;
constexpr double kEvenBalance = 1.25;
constexpr int64_t kManyItems = 4;
constexpr int kWorkFields = 14;

// Work of a worker that shares its multiprocessor, times that of a team beside it (scheduler/costs.py).
constexpr double kBeside = 2.0;
// Where workers share multiprocessors; of teams, whose items cost much to start.
constexpr std::array<double, 4> kLongerRuns = {1.25, 2.0, 3.0, 4.0};
constexpr std::array<double, 2> kLongerItems = {1.125, 1.25};
// Items of equal cost are looked for until the longest is known to this part of it.
constexpr double kSteps = 128.0;

// Where tiles are cut: the longest run in keys x KV heads, or what an item costs at most.
struct Limit {
  double keys = std::numeric_limits<double>::infinity(), cost = 0.0;
  bool any() const { return cost > 0.0 || keys < std::numeric_limits<double>::infinity(); }
};

class Planner {
 public:
  int plan(const attnrt_problem& problem, attnrt_counts& counts);
  void take(int32_t* out) const;

 private:
  void cut(const Crew& crew, Candidate& c, int32_t heads, const Limit& limit);
  void cut_tile(const Tile& tile, int64_t longest);
  void cut_by_cost(const Crew& crew, const Tile& tile, double most);
  double even(const Crew& crew, int32_t heads, double most);
  bool few(const Crew& crew, int32_t heads, double cost);
  int64_t place(std::vector<Run>& out, const Tile& tile, int32_t slot) const;
  void weigh(const Crew& crew, Candidate& c, int32_t heads, const Limit& limit);
  void list_items(const Crew& crew, Candidate& c);
  void assign_lpt(const Crew& crew, Candidate& c);
  void assign_to(const Crew& crew, Candidate& c, bool by_request);
  void deal(const Crew& crew, Candidate& c, const int32_t* in_order, const int32_t* worker_at);
  void gather(const Crew& crew, Candidate& c, double beside);
  void spread(const Crew& crew, Candidate& c);
  void best_candidate(Crew& crew);
  void keep_if_better(Crew& crew, Candidate& c);
  int32_t* take_items(const Crew& crew, int32_t* out) const;

  const attnrt_problem* pr = nullptr;
  QueryTiles found;
  std::vector<Tile>& tiles = found.tiles;
  Costs costs;
  Extent extent;
  Crews crews;
  Merges merges;
  LongestFirst longest_first;
  std::vector<Run> runs;          // of one tile
  std::vector<double> run_costs;  // of one tile
  Buffer<int32_t> worker_of, section_of;
  std::vector<int32_t> at_worker;
};

int Planner::plan(const attnrt_problem& problem, attnrt_counts& counts) {
  pr = &problem;
  if (!in_range(problem)) return 2;
  // 1. Query tiles. 2. Which of them hold all keys of their rows.
  found.find(problem);
  costs.of(problem);
  int64_t needed = 0, items = 0, slots = 0;
  if (!crews.form(problem, costs, tiles, needed)) {
    counts = {0, 0, 0, needed};
    return 1;
  }
  for (Crew& crew : crews) {
    needed -= crew.base_slots;  // of those that come after it
    crew.first_slot = slots;
    crew.last_slot = pr->max_slots - needed;
    best_candidate(crew);
    slots += crew.best->slots;
    items += int64_t(crew.best->count);
  }
  Crew& own = *crews.begin();
  double beside = 0.0;  // time of teams that start on multiprocessors which the machine's own workers leave them
  for (const Crew& crew : crews)
    if (&crew != &own && crew.traits->first_class == 0) beside = std::max(beside, crew.best->time * crew.traits->unit);
  if (pr->mode == 0) gather(own, *own.best, beside);
  merges.list(problem, found, crews, slots);
  counts = {items, int64_t(merges.num_merges), int64_t(merges.num_entries), slots};
  return 0;
}

// 3. Cut runs between leaves.

void Planner::cut_tile(const Tile& t, int64_t longest) {
  const Ruler& ruler = found.rulers[size_t(t.klass)];
  runs.clear();
  int64_t begin = t.kv_begin;
  int32_t leaf = t.leaf_begin;
  for (int32_t next; (next = next_cut(ruler, t, begin, longest)) > 0;) {
    const int64_t end = ruler.start(next);
    runs.push_back({int32_t(begin), int32_t(end), leaf, next, kDirect, 0});
    begin = end, leaf = next;
  }
  runs.push_back({int32_t(begin), t.kv_end, leaf, t.leaf_end, kDirect, 0});
}

// Runs that cost `most` for one KV head at most, each as long as may be; one of a single leaf may cost more.
void Planner::cut_by_cost(const Crew& crew, const Tile& t, double most) {
  const Ruler& ruler = found.rulers[size_t(t.klass)];
  runs.clear();
  Run run = t;
  run.slot = kDirect;
  while (run.leaf_begin < t.leaf_end) {
    Run longer = run;
    for (int32_t end = run.leaf_begin + 1; end <= t.leaf_end; ++end) {
      longer.kv_end = end < t.leaf_end ? int32_t(ruler.start(end)) : t.kv_end;
      longer.leaf_end = end;
      if (end > run.leaf_begin + 1 && costs.unit(crew, t, longer) > most) break;
      run = longer;
    }
    runs.push_back(run);
    run.kv_begin = run.kv_end, run.leaf_begin = run.leaf_end, run.fold = 0;
  }
}

// Whether items that cost so much at most are no more than workers.
bool Planner::few(const Crew& crew, int32_t heads, double cost) {
  int64_t items = 0;
  const Tile* before = nullptr;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    const Tile& t = tiles[i];
    const int32_t step = std::min(heads, t.heads());
    if (!before || !like(t, *before)) cut_by_cost(crew, t, cost / step);
    before = &t;
    items += int64_t(t.heads() / step) * int64_t(std::max<size_t>(1, runs.size()));
  }
  return items <= crew.workers;
}

// What items of equal cost, no more of them than workers, cost at most: as little as there is, and no more than `most`;
// 0: there are none.
double Planner::even(const Crew& crew, int32_t heads, double most) {
  if (!few(crew, heads, most)) return 0.0;
  double low = most / 2;
  while (most - low > most / kSteps) {
    const double cost = (low + most) / 2;
    (few(crew, heads, cost) ? most : low) = cost;
  }
  return most;
}

// Give the runs of a tile (in `runs`) their slots; returns how many.
int64_t Planner::place(std::vector<Run>& out, const Tile& t, int32_t slot) const {
  if (is_direct(*pr, t, runs.size())) {
    out.push_back(runs[0]);
    out.back().slot = kDirect, out.back().fold = 1;
    return 0;
  }
  const int32_t begin = slot;
  for (size_t i = 0; i < runs.size(); ++i) {
    out.push_back(runs[i]);
    Run& run = out.back();
    run.fold = i == 0 && t.first && !pr->pairwise;
    run.slot = slot;
    slot += int32_t((run.fold ? 1 : run.leaf_end - run.leaf_begin) * t.queries());
  }
  return slot - begin;
}

void Planner::cut(const Crew& crew, Candidate& c, int32_t heads, const Limit& limit) {
  c.cuts = 0;
  c.slots = crew.base_slots;
  if (!limit.any()) return;
  const bool by_cost = limit.cost > 0.0;
  const int64_t longest_all = by_cost ? 0 : longest_run(limit.keys, std::min(heads, pr->num_kv_heads)),
                longest_one = by_cost ? 0 : longest_run(limit.keys, 1);
  const auto most_of = [&](const Tile& t) { return limit.cost / std::min(heads, t.heads()); };
  const auto longest_of = [&](const Tile& t) { return t.heads() == 1 ? longest_one : longest_all; };
  // A tile of one leaf has nowhere to be cut.
  const auto is_long = [&](const Tile& t) {
    if (t.leaf_end - t.leaf_begin <= 1) return false;
    return by_cost ? t.cost > most_of(t) : t.keys() > longest_of(t) + longest_of(t) / 8;
  };
  if (std::none_of(tiles.data() + crew.begin, tiles.data() + crew.end, is_long)) return;
  const int64_t room = crew.last_slot - crew.first_slot;
  c.runs.clear();
  c.run_begin.clear();
  int64_t next = crew.first_slot;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    const Tile& t = tiles[i];
    c.run_begin.push_back(int32_t(c.runs.size()));
    runs.assign(1, t);
    if (is_long(t)) {
      by_cost ? cut_by_cost(crew, t, most_of(t)) : cut_tile(t, longest_of(t));
      int64_t more = t.leaf_end - t.leaf_begin;
      if (t.first && !pr->pairwise) more -= runs[0].leaf_end - runs[0].leaf_begin - 1;
      more *= t.queries();
      if (runs.size() > 1 && c.slots + more - t.whole_slots() <= room) {
        c.slots += more - t.whole_slots();
        c.cuts += 1;
      } else {
        runs.assign(1, t);
      }
    }
    next += place(c.runs, t, int32_t(next));
  }
  c.run_begin.push_back(int32_t(c.runs.size()));
}

// 4. Cost and assign.

// Cut, and find what the items would cost: their number, the longest of them, their mean load.
void Planner::weigh(const Crew& crew, Candidate& c, int32_t heads, const Limit& limit) {
  cut(crew, c, heads, limit);
  c.heads = heads;
  size_t n = 0;
  int32_t most = 0;
  double total = 0.0, longest = 0.0;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    const Tile& t = tiles[i];
    const int32_t step = std::min(heads, t.heads()), ranges = t.heads() / step;
    run_costs.clear();  // the same for all heads
    int32_t states = 0;
    each_run(tiles, crew, c, i, [&](const Run& run) {
      states += run.states();
      const double cost = step * (c.cuts ? costs.unit(crew, t, run) : t.cost);
      run_costs.push_back(cost);
      longest = std::max(longest, cost);
    });
    for (int32_t range = 0; range < ranges; ++range)
      for (const double cost : run_costs) total += cost;
    n += run_costs.size() * size_t(ranges);
    most = std::max(most, states);
  }
  c.count = n;
  c.states = most;
  c.longest = longest;
  c.mean = crew.mean(total);
}

// The items of a candidate that has been weighed.
void Planner::list_items(const Crew& crew, Candidate& c) {
  Item* items = c.items.need(c.count);
  double* to = c.costs.need(c.count);
  c.alike.clear();
  int32_t first = 0;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    const Tile& t = tiles[i];
    const int32_t step = std::min(c.heads, t.heads());
    const int32_t ranges = t.heads() / step;
    if (!c.cuts) {
      c.alike.push_back({int32_t(i), first, 1, ranges});
      first += ranges;
      const double cost = step * t.cost;
      for (int32_t head = t.head_begin; head < t.head_end; head += step)
        *items++ = {int32_t(i), int32_t(i), head}, *to++ = cost;
      continue;
    }
    run_costs.clear();
    each_run(tiles, crew, c, i, [&](const Run& run) { run_costs.push_back(step * costs.unit(crew, t, run)); });
    const int32_t first_run = c.run_begin[i - crew.begin], num_runs = int32_t(run_costs.size());
    for (int32_t r = 0; r < num_runs; ++r) c.alike.push_back({int32_t(i), first + r, num_runs, ranges});
    first += num_runs * ranges;
    for (int32_t head = t.head_begin; head < t.head_end; head += step)
      for (int32_t r = 0; r < num_runs; ++r) *items++ = {int32_t(i), first_run + r, head}, *to++ = run_costs[size_t(r)];
  }
}

void Planner::assign_lpt(const Crew& crew, Candidate& c) {
  int32_t* sections = nullptr;
  if (crew.traits->section) {
    sections = section_of.need(c.count);
    for (size_t i = 0; i < c.count; ++i) {
      const Item& item = c.items.get()[i];
      const Tile& t = tiles[size_t(item.tile)];
      sections[i] = int32_t((t.before + item.head * t.list_keys) / crew.traits->section);
    }
  }
  const double makespan = longest_first.assign(c.costs.get(), c.alike.data(), c.alike.size(), sections,
                                               crew.early ? crew.begins.data() : nullptr, c.count, crew.workers);
  c.time = costs.time(crew, c, longest_first, makespan);
  if (!longest_first.one_each()) return deal(crew, c, longest_first.order(), longest_first.worker_of());
  c.worker_indptr.resize(size_t(crew.workers) + 1);
  int32_t* indptr = c.worker_indptr.data();
  for (size_t w = 0; w < c.count; ++w) indptr[w] = int32_t(w);
  std::fill(indptr + c.count, indptr + c.worker_indptr.size(), int32_t(c.count));
  std::copy(longest_first.order(), longest_first.order() + c.count, c.order.need(c.count));
  spread(crew, c);
}

// Items to their workers' ranges, in the order given (null: by id); worker_at says whose each is.
void Planner::deal(const Crew& crew, Candidate& c, const int32_t* in_order, const int32_t* worker_at) {
  const size_t n = c.count, workers = size_t(crew.workers);
  at_worker.assign(workers, 0);
  for (size_t i = 0; i < n; ++i) at_worker[size_t(worker_at[i])] += 1;
  c.worker_indptr.resize(workers + 1);
  int32_t sum = 0;
  for (size_t w = 0; w < workers; ++w) {
    c.worker_indptr[w] = sum;
    sum += at_worker[w];
    at_worker[w] = c.worker_indptr[w];
  }
  c.worker_indptr[workers] = sum;
  int32_t* order = c.order.need(n);
  for (size_t i = 0; i < n; ++i) order[at_worker[size_t(worker_at[i])]++] = in_order ? in_order[i] : int32_t(i);
  spread(crew, c);
}

// The lists of the workers that may have items as those of all, neighbours by twos after as many idle pairs everywhere.
void Planner::spread(const Crew& crew, Candidate& c) {
  const int32_t busy = crew.workers, all = crew.traits->num_workers, pairs = (busy + 1) / 2;
  if (busy == all) return;
  at_worker.assign(size_t(all), 0);
  for (int32_t i = 0; i < busy; ++i)
    at_worker[size_t(i / 2 * (all / 2) / pairs * 2 + i % 2)] =
        c.worker_indptr[size_t(i) + 1] - c.worker_indptr[size_t(i)];
  c.worker_indptr.resize(size_t(all) + 1);
  for (size_t w = 0; w < size_t(all); ++w) c.worker_indptr[w + 1] = c.worker_indptr[w] + at_worker[w];
}

// The workers that have items to as few multiprocessors as hold them, where that is half of all at most and none has
// more to do than kBeside times what runs beside it.
void Planner::gather(const Crew& crew, Candidate& c, double beside) {
  const int32_t share = crew.traits->share, workers = crew.workers;
  if (!share || workers % share || beside <= 0.0) return;
  const std::vector<int32_t>& at = c.worker_indptr;
  int32_t busy = 0, next = 0;
  for (size_t w = 0; w < size_t(workers); ++w) {
    double load = 0.0;
    for (int32_t i = at[w]; i < at[w + 1]; ++i) load += c.costs.get()[c.order.get()[i]];
    if (load > kBeside * beside) return;
    busy += at[w] < at[w + 1];
  }
  if (2 * busy > workers) return;
  const std::vector<int32_t> in_order(c.order.get(), c.order.get() + c.count);
  int32_t* worker_at = worker_of.need(c.count);
  for (size_t w = 0; w < size_t(workers); ++w) {
    if (at[w] == at[w + 1]) continue;
    std::fill(worker_at + at[w], worker_at + at[w + 1], next % share * (workers / share) + next / share);
    ++next;
  }
  deal(crew, c, in_order.data(), worker_at);
}

void Planner::assign_to(const Crew& crew, Candidate& c, bool by_request) {
  const int32_t workers = crew.workers;
  int32_t* worker_at = worker_of.need(c.count);
  for (size_t i = 0; i < c.count; ++i) {
    const Tile& t = tiles[size_t(c.items.get()[i].tile)];
    worker_at[i] = int32_t((by_request ? int64_t(pr->part[t.part].request[t.q_begin]) : int64_t(i)) % workers);
  }
  deal(crew, c, nullptr, worker_at);
  c.time = 0.0;  // one candidate only: nobody asks
}

// 5. Fewer and fewer heads per item, then runs of equal cost, shorter or longer ones; keep the best.

void Planner::best_candidate(Crew& crew) {
  int64_t total = 0, slot = crew.first_slot;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    Tile& t = tiles[i];
    t.cost = costs.unit(crew, t, t);
    if (t.slot != kDirect) {
      t.slot = int32_t(slot);
      slot += t.whole_slots();
    }
    total += t.keys() * t.heads();
  }
  const int32_t workers = crew.workers;
  const bool lpt = pr->mode == 0;
  const double limit = lpt ? double(total) / workers : std::numeric_limits<double>::infinity();
  const int32_t heads = pr->num_kv_heads, most = lpt && pr->traits->split_heads ? heads : 1;
  const bool one_head = most > 1 && crew.traits->section && crew.begin < crew.end;
  if (most > 1) extent.of(costs, crew, tiles);
  crew.best = nullptr;
  crew.next = &crew.pool[0];
  int32_t width = heads;
  for (int32_t n = one_head ? most : 1; n <= most; ++n) {
    if (heads % n) continue;
    width = heads / n;
    if (n < most && extent.too_long(costs, crew, found.rulers, width, limit)) continue;
    Candidate& c = *crew.next;
    weigh(crew, c, width, {limit});
    if (n < most && costs.item_time(crew, c.longest) > kGoodBalance * c.mean) continue;
    list_items(crew, c);
    if (lpt)
      assign_lpt(crew, c);
    else
      assign_to(crew, c, pr->mode == 2);
    keep_if_better(crew, c);
    if (!c.cuts && c.time <= kGoodBalance * c.mean) break;
    if (int64_t(c.count) >= kManyItems * workers) break;
  }
  if (!lpt) return;
  if (crew.best->cuts && counts_ends(crew)) {
    const double cost = even(crew, width, crew.best->time);
    if (cost > 0.0) {
      Candidate& c = *crew.next;
      weigh(crew, c, width, {0.0, cost});
      list_items(crew, c);
      assign_lpt(crew, c);
      keep_if_better(crew, c);
      if (crew.best->time <= kEvenBalance * crew.best->mean) return;
    }
  }
  size_t count = crew.best->count;
  const size_t first_count = count;
  for (const double finer : {2.0, 4.0, 8.0}) {
    const bool many = int64_t(count) >= 4 * kManyItems * workers;
    if (crew.best->time <= kBadBalance * crew.best->mean || many) break;
    Candidate& c = *crew.next;
    weigh(crew, c, width, {limit / finer});
    if (c.count <= count) continue;
    count = c.count;
    list_items(crew, c);
    assign_lpt(crew, c);
    keep_if_better(crew, c);
  }
  const bool share = crew.traits->share, team = &crew != &*crews.begin() && !crew.traits->section;
  if (!(share || team) || !crew.best->cuts) return;
  count = first_count;
  const double* const longer = share ? kLongerRuns.data() : kLongerItems.data();
  const size_t tries = share ? kLongerRuns.size() : kLongerItems.size();
  for (size_t i = 0; i < tries; ++i) {
    Candidate& c = *crew.next;
    weigh(crew, c, width, {limit * longer[i]});
    if (c.count >= count || costs.least(crew, c) >= costs.score(crew, *crew.best)) continue;
    count = c.count;
    list_items(crew, c);
    assign_lpt(crew, c);
    keep_if_better(crew, c);
  }
}

// Keep `next` as the best, and write the coming candidate over the one that lost.
void Planner::keep_if_better(Crew& crew, Candidate& c) {
  if (crew.best && !(costs.score(crew, c) < costs.score(crew, *crew.best))) return;
  crew.best = &c;
  crew.next = crew.best == &crew.pool[0] ? &crew.pool[1] : &crew.pool[0];
}

int32_t* Planner::take_items(const Crew& crew, int32_t* out) const {
  const Candidate& c = *crew.best;
  const int32_t* order = c.order.get();
  const Item *items = c.items.get(), *before = nullptr;
  const int32_t* like = nullptr;  // what was written for `before`
  for (size_t i = 0; i < c.count; ++i, out += kWorkFields) {
    const int32_t id = order[i];
    const Item& item = items[id];
    if (before && item.tile == before->tile && item.run == before->run) {  // the same under other heads
      // Not of the line just before: reading whole what has just been written in pieces would wait for it each time.
      std::memcpy(out, like, kWorkFields * sizeof *out);
      out[4] = item.head, out[5] = item.head + like[5] - like[4];
      continue;
    }
    before = &item, like = out;
    const Tile& t = tiles[size_t(item.tile)];
    const Run& run = c.cuts ? c.runs[size_t(item.run)] : t;
    out[0] = t.part, out[1] = t.row, out[2] = t.q_begin, out[3] = t.q_end;
    out[4] = item.head, out[5] = item.head + std::min(t.heads(), c.heads);
    out[6] = run.kv_begin, out[7] = run.kv_end, out[8] = run.leaf_begin, out[9] = run.leaf_end;
    out[10] = run.slot, out[11] = t.klass, out[12] = run.fold;
    out[13] = rounded(c.costs.get()[id]);
  }
  return out;
}

void Planner::take(int32_t* out) const {
  for (const Crew& crew : crews) out = take_items(crew, out);
  int32_t items_before = 0;
  *out++ = 0;
  for (const Crew& crew : crews) {
    const std::vector<int32_t>& indptr = crew.best->worker_indptr;
    for (size_t w = 1; w < indptr.size(); ++w) *out++ = items_before + indptr[w];
    items_before += indptr.back();
  }
  merges.take(out);
}

// Behind a call, because code that the compiler knows to work on a thread's own object looks its address up again at
// every turn.
[[gnu::noinline]] Planner& planner() {
  thread_local Planner mine;
  return mine;
}

}  // namespace

extern "C" int attnrt_plan(const attnrt_problem* problem, attnrt_counts* counts) {
  return planner().plan(*problem, *counts);
}

extern "C" void attnrt_take(int32_t* out) { planner().take(out); }
