// SPDX-License-Identifier: Apache-2.0
// The planner's hot loop. Same steps, same names and same answers, byte for byte, as scheduler/plan_python.py, which
// says why.
//
// Costs are added in the same order as there and without fused multiply-adds (-ffp-contract=off), so that two loads
// that are equal in Python are equal here. Nothing has a fixed capacity but the numbers of parts, classes and spans,
// which the caller checks; scratch belongs to the thread and grows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "buffer.h"
#include "lpt.h"
#include "problem.h"
#include "tile.h"

namespace {

constexpr double kGoodBalance = 1.05;
constexpr double kBadBalance = 1.1;
constexpr int64_t kManyItems = 4;
constexpr int64_t kFar = int64_t(1) << 40;
constexpr int kWorkFields = 14;
constexpr int kMergeFields = 5;

int64_t longest_run(double limit, int32_t heads) { return std::max<int64_t>(1, int64_t(std::ceil(limit / heads))); }

// What is known of a crew's tiles before any is cut: bounds of all candidates.
struct Extent {
  const Tile* longest = nullptr;                       // the costliest, or null
  double whole = 0.0, by_leaves = 0.0, by_keys = 0.0;  // costs: uncut; of cuts at all leaves; of a cut after each key
};

class Planner {
 public:
  int plan(const attnrt_problem& problem, attnrt_counts& counts);
  void take(int32_t* out) const;

 private:
  void find_tiles();
  void tiles_of(int part, int row, int q_begin, int q_end, int klass);
  void find_keys(Tile& tile) const;
  void mark_rows();
  int crew_of(const Tile& tile) const;
  bool form_crews(int64_t& needed);
  void overlap();
  double whole_cost(const Crew& crew) const;
  void find_sections(const Crew& crew);
  void best_candidate(Crew& crew);
  void keep_if_better(Crew& crew, Candidate& c);
  void weigh(const Crew& crew, Candidate& c, int32_t heads, double limit);
  void list_items(const Crew& crew, Candidate& c);
  void cut(const Crew& crew, Candidate& c, int32_t heads, double limit);
  int32_t next_cut(const Tile& tile, int64_t begin, int64_t longest) const;
  void cut_tile(const Tile& tile, int64_t longest);
  int64_t place(std::vector<Run>& out, const Tile& tile, int32_t slot) const;
  double unit_cost(const Crew& crew, const Tile& tile, int64_t keys) const;
  double unit_cost(const Crew& crew, const Tile& tile, const Run& run) const {
    return unit_cost(crew, tile, int64_t(run.kv_end) - run.kv_begin);
  }
  Extent extent_of(const Crew& crew) const;
  bool too_long(const Crew& crew, const Extent& extent, int32_t heads, double limit) const;
  void assign_lpt(const Crew& crew, Candidate& c);
  double time_of(const Crew& crew, const Candidate& c, double makespan);
  double cost_of_cuts(const Crew& crew, const Candidate& c) const;
  double alone(const Crew& crew) const { return pr->scattered ? crew.traits->scattered : crew.traits->alone; }
  void assign_to(const Crew& crew, Candidate& c, bool by_request);
  void deal(const Crew& crew, Candidate& c, const int32_t* in_order, const int32_t* worker_at);
  void merges();
  void list_row(int64_t row, int32_t unit);
  template <class F>
  void each_cell(const Tile& tile, F&& f) const;

  // Partial slots of a tile that is not cut.
  static int64_t whole_slots(const Tile& tile) {
    return tile.slot == kDirect ? 0 : (tile.fold ? 1 : tile.leaf_end - tile.leaf_begin) * tile.queries();
  }
  const Run& run_at(const Candidate& c, size_t tile, int32_t run) const {
    return c.cuts ? c.runs[size_t(run)] : tiles[tile];
  }
  template <class F>
  void each_run(const Crew& crew, const Candidate& c, size_t tile, F&& f) const {
    if (c.cuts == 0) return f(static_cast<const Run&>(tiles[tile]), int32_t(tile));
    const size_t at = tile - crew.begin;
    for (int32_t r = c.run_begin[at]; r < c.run_begin[at + 1]; ++r) f(c.runs[size_t(r)], r);
  }
  // f(tile, run) for all tiles in the form that was chosen for their crew.
  template <class F>
  void each_tile(F&& f) const {
    for (int k = 0; k < tr->num_crews; ++k)
      for (size_t i = crews[k].begin; i < crews[k].end; ++i) f(crews[k], i);
  }
  bool is_direct(const Tile& tile, size_t num_runs) const {
    return tile.whole && num_runs == 1 && !(pr->pairwise && tile.leaf_end - tile.leaf_begin > 1);
  }

  const attnrt_problem* pr = nullptr;
  const attnrt_traits* tr = nullptr;
  int32_t units = 1;
  std::vector<Ruler> rulers;
  std::vector<int32_t> req_class;
  std::vector<int> steps;  // queries per tile of each class
  std::vector<Tile> tiles;
  std::vector<Run> runs;
  Crew crews[3];
  int64_t slots = 0;  // partial slots used
  std::vector<int32_t> count, first;
  std::vector<double> run_costs, load_of;  // of a tile's runs; of multiprocessors
  LongestFirst longest_first;
  Buffer<int32_t> worker_of, section_of;
  std::vector<int32_t> at_worker;
  std::vector<uint8_t> done;
  std::vector<int64_t> state_end;
  Buffer<State> states;
  Buffer<int32_t> merge_rows, merge_slots, merge_leaves;
  size_t num_merges = 0, num_entries = 0;
};

int Planner::plan(const attnrt_problem& problem, attnrt_counts& counts) {
  pr = &problem;
  tr = problem.traits;
  units = units_of(problem);
  if (!in_range(problem)) return 2;
  rulers.clear();
  steps.clear();
  for (int i = 0; i < tr->num_classes; ++i) {
    rulers.emplace_back(tr->classes[i]);
    steps.push_back(std::max(1, tr->classes[i].q_tile / pr->group));
  }
  classes_of(problem, req_class);
  find_tiles();
  if (pr->num_parts > 1) {
    mark_rows();
    tiles.erase(std::remove_if(tiles.begin(), tiles.end(), [](const Tile& t) { return t.keys() == 0; }), tiles.end());
  }
  int64_t needed = 0, items = 0;
  if (!form_crews(needed)) {
    counts = {0, 0, 0, needed};
    return 1;
  }
  slots = 0;
  for (int k = 0; k < tr->num_crews; ++k) {
    Crew& crew = crews[k];
    crew.first_slot = slots;
    crew.last_slot = pr->max_slots;
    for (int later = k + 1; later < tr->num_crews; ++later) crew.last_slot -= crews[later].base_slots;
    best_candidate(crew);
    slots += crew.best->slots;
    items += int64_t(crew.best->count);
  }
  merges();
  counts = {items, int64_t(num_merges), int64_t(num_entries), slots};
  return 0;
}

// 1. Query tiles of one class and limit, and the keys that each may see.

void Planner::find_tiles() {
  tiles.clear();
  for (int p = 0; p < pr->num_parts; ++p) {
    const attnrt_part& part = pr->part[p];
    const size_t width = size_t(part.heads) * sizeof(int64_t);
    for (int row = 0; row < part.num_rows; ++row) {
      const int end = part.qo_indptr[row + 1];
      int begin = part.qo_indptr[row];
      while (begin < end) {
        const int klass = req_class[size_t(part.request[begin])];
        int q = begin + 1;
        for (; q < end; ++q) {
          if (part.request[q] != part.request[q - 1] && req_class[size_t(part.request[q])] != klass) break;
          if (part.limit_lo) {
            const int64_t a = int64_t(q) * part.heads, b = int64_t(begin) * part.heads;
            if (std::memcmp(part.limit_lo + a, part.limit_lo + b, width) != 0) break;
            if (std::memcmp(part.limit_hi + a, part.limit_hi + b, width) != 0) break;
          }
        }
        tiles_of(p, row, begin, q, klass);
        begin = q;
      }
    }
  }
}

void Planner::tiles_of(int p, int row, int q_begin, int q_end, int klass) {
  const attnrt_part& part = pr->part[p];
  const int step = steps[size_t(klass)];
  for (int q = q_begin; q < q_end; q += step) {
    for (int head = 0; head < part.heads; ++head) {
      tiles.emplace_back();
      Tile& t = tiles.back();
      t.part = p, t.row = row, t.q_begin = q, t.q_end = std::min(q + step, q_end), t.klass = klass;
      t.head_begin = part.heads > 1 ? head : 0;
      t.head_end = part.heads > 1 ? head + 1 : pr->num_kv_heads;
      t.kv_begin = t.kv_end = t.leaf_begin = t.leaf_end = 0;
      t.first = t.whole = true;
      find_keys(t);
    }
  }
}

void Planner::find_keys(Tile& t) const {
  const attnrt_part& part = pr->part[t.part];
  const int head = part.heads > 1 ? t.head_begin : 0;
  const int64_t entry = int64_t(t.row) * part.heads + head, offset = part.kv_offset[t.row];
  int64_t lo = offset + part.kv_begin[entry], hi = offset + part.kv_end[entry];
  if (part.limit_lo) {
    const int64_t at = int64_t(t.q_begin) * part.heads + head;
    lo = std::max(lo, part.limit_lo[at]);
    hi = std::min(hi, part.limit_hi[at]);
  }
  if (part.kv_pos) {
    int64_t first = kFar, end = -kFar;
    for (int q = t.q_begin; q < t.q_end; ++q) {
      if (part.visible_lo) {
        first = std::min(first, part.visible_lo[q]);
        end = std::max(end, part.visible_hi[q]);
      } else {
        const int64_t pos = part.qo_pos[q];
        first = std::min(first, (pr->bound_kv_lens ? pos - pr->kv_lens[part.request[q]] : pos) - pr->left);
        end = std::max(end, pos + pr->right + 1);
      }
    }
    const int64_t shift = offset - part.kv_pos[t.row];
    lo = std::max(lo, first + shift);
    hi = std::min(hi, end + shift);
  }
  if (lo >= hi) return;
  const Ruler& ruler = rulers[size_t(t.klass)];
  t.kv_begin = int32_t(lo), t.kv_end = int32_t(hi);
  t.leaf_begin = ruler.leaf_of(lo), t.leaf_end = ruler.leaf_of(hi - 1) + 1;
}

// 2. Which tiles hold the first leaf, or all leaves, of their rows.

template <class F>
void Planner::each_cell(const Tile& t, F&& f) const {
  const int32_t* qo_index = pr->part[t.part].qo_index;
  const int begin = t.q_begin, end = t.q_end;
  if (units == 1) {
    for (int q = begin; q < end; ++q) f(qo_index ? int64_t(qo_index[q]) : int64_t(q), q - begin);
    return;
  }
  for (int q = begin; q < end; ++q) {
    const int64_t row = qo_index ? qo_index[q] : q;
    for (int32_t u = t.head_begin; u < t.head_end; ++u) f(row * units + u, q - begin);
  }
}

void Planner::mark_rows() {
  const size_t cells = size_t(pr->num_rows) * size_t(units);
  count.assign(cells, 0);
  first.assign(cells, std::numeric_limits<int32_t>::max());
  int32_t *counts = count.data(), *firsts = first.data();
  for (const Tile& t : tiles) {
    if (t.keys() == 0) continue;
    const int32_t leaf = t.leaf_begin;
    each_cell(t, [=](int64_t cell, int) {
      counts[cell] += 1;
      firsts[cell] = std::min(firsts[cell], leaf);
    });
  }
  for (Tile& t : tiles) {
    if (t.keys() == 0) continue;
    const int32_t leaf = t.leaf_begin;
    bool is_first = true, is_whole = true;
    each_cell(t, [&, leaf](int64_t cell, int) {
      is_first &= firsts[cell] == leaf;
      is_whole &= counts[cell] == 1;
    });
    t.first = is_first, t.whole = is_whole;
  }
}

// 3. Cut runs between leaves.

// The leaf before which a run from key `begin` on ends; 0: it goes on to the tile's end.
int32_t Planner::next_cut(const Tile& t, int64_t begin, int64_t longest) const {
  if (t.kv_end - begin <= longest + longest / 8) return 0;
  const Ruler& ruler = rulers[size_t(t.klass)];
  const int32_t next = ruler.leaf_of(begin + longest - 1) + 1;
  return ruler.start(next) < t.kv_end ? next : 0;
}

void Planner::cut_tile(const Tile& t, int64_t longest) {
  const Ruler& ruler = rulers[size_t(t.klass)];
  runs.clear();
  int64_t begin = t.kv_begin;
  int32_t leaf = t.leaf_begin;
  for (int32_t next; (next = next_cut(t, begin, longest)) > 0;) {
    const int64_t end = ruler.start(next);
    runs.push_back({int32_t(begin), int32_t(end), leaf, next, kDirect, 0});
    begin = end, leaf = next;
  }
  runs.push_back({int32_t(begin), t.kv_end, leaf, t.leaf_end, kDirect, 0});
}

// Give the runs of a tile (in `runs`) their slots; returns how many.
int64_t Planner::place(std::vector<Run>& out, const Tile& t, int32_t slot) const {
  if (is_direct(t, runs.size())) {
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

void Planner::cut(const Crew& crew, Candidate& c, int32_t heads, double limit) {
  c.cuts = 0;
  c.slots = crew.base_slots;
  if (!(limit < std::numeric_limits<double>::infinity())) return;
  const int64_t longest_all = longest_run(limit, std::min(heads, pr->num_kv_heads)),
                longest_one = longest_run(limit, 1);
  const auto longest_of = [&](const Tile& t) { return t.heads() == 1 ? longest_one : longest_all; };
  // A tile of one leaf has nowhere to be cut.
  const auto is_long = [&](const Tile& t) {
    return t.leaf_end - t.leaf_begin > 1 && t.keys() > longest_of(t) + longest_of(t) / 8;
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
      cut_tile(t, longest_of(t));
      int64_t more = t.leaf_end - t.leaf_begin;
      if (t.first && !pr->pairwise) more -= runs[0].leaf_end - runs[0].leaf_begin - 1;
      more *= t.queries();
      if (runs.size() > 1 && c.slots + more - whole_slots(t) <= room) {
        c.slots += more - whole_slots(t);
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

double Planner::unit_cost(const Crew& crew, const Tile& t, int64_t keys) const {
  const attnrt_crew& cost = *crew.traits;
  const double rows = double(t.queries() * pr->group), size = double(keys);
  return cost.fixed + cost.alpha * rows + cost.beta * size + cost.beta_rows * rows * size;
}

Extent Planner::extent_of(const Crew& crew) const {
  Extent found;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    const Tile& t = tiles[i];
    const double start = t.heads() * std::max(0.0, unit_cost(crew, t, 0));
    found.whole += t.heads() * t.cost;
    found.by_leaves += start * double(std::max(0, t.leaf_end - t.leaf_begin - 1));
    found.by_keys += start * double(t.keys());
    if (!found.longest || t.cost > found.longest->cost) found.longest = &t;
  }
  return found;
}

// Whether a candidate's longest item is certain to be longer than is good, found without a cut: the first run of the
// costliest tile is, beside a mean of more cuts than there can be. (Sums in another order than weigh's: a millionth is
// more than that can make.)
bool Planner::too_long(const Crew& crew, const Extent& extent, int32_t heads, double limit) const {
  if (!extent.longest) return false;
  const Tile& t = *extent.longest;
  const int32_t step = std::min(heads, t.heads()), next = next_cut(t, t.kv_begin, longest_run(limit, step));
  double least = t.cost;  // it stays whole where slots do not suffice
  if (next) least = std::min(least, unit_cost(crew, t, rulers[size_t(t.klass)].start(next) - t.kv_begin));
  const double cuts = std::min(extent.by_leaves, extent.by_keys * heads / limit);
  return step * least > (kGoodBalance + 1e-6) * ((extent.whole + cuts) / crew.workers);
}

// Cut, and find what the items would cost: their number, the longest of them, their mean load.
void Planner::weigh(const Crew& crew, Candidate& c, int32_t heads, double limit) {
  cut(crew, c, heads, limit);
  c.heads = heads;
  size_t n = 0;
  int64_t most = 0;
  double total = 0.0, longest = 0.0;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    const Tile& t = tiles[i];
    const int32_t step = std::min(heads, t.heads()), ranges = t.heads() / step;
    run_costs.clear();  // the same for all heads
    int64_t states = 0;
    each_run(crew, c, i, [&](const Run& run, int32_t) {
      if (run.slot != kDirect) states += run.fold ? 1 : run.leaf_end - run.leaf_begin;
      const double cost = step * (c.cuts ? unit_cost(crew, t, run) : t.cost);
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
  c.mean = total / crew.workers;
}

// The items of a candidate that has been weighed.
void Planner::list_items(const Crew& crew, Candidate& c) {
  Item* items = c.items.need(c.count);
  double* costs = c.costs.need(c.count);
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
        *items++ = {int32_t(i), int32_t(i), head}, *costs++ = cost;
      continue;
    }
    run_costs.clear();
    each_run(crew, c, i, [&](const Run& run, int32_t) { run_costs.push_back(step * unit_cost(crew, t, run)); });
    const int32_t first_run = c.run_begin[i - crew.begin], num_runs = int32_t(run_costs.size());
    for (int32_t r = 0; r < num_runs; ++r) c.alike.push_back({int32_t(i), first + r, num_runs, ranges});
    first += num_runs * ranges;
    for (int32_t head = t.head_begin; head < t.head_end; head += step)
      for (int32_t r = 0; r < num_runs; ++r)
        *items++ = {int32_t(i), first_run + r, head}, *costs++ = run_costs[size_t(r)];
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
  c.time = time_of(
      crew, c, longest_first.assign(c.costs.get(), c.alike.data(), c.alike.size(), sections, c.count, crew.workers));
  if (!longest_first.one_each()) return deal(crew, c, longest_first.order(), longest_first.worker_of());
  c.worker_indptr.resize(size_t(crew.traits->num_workers) + 1);
  int32_t* indptr = c.worker_indptr.data();
  for (size_t w = 0; w < c.count; ++w) indptr[w] = int32_t(w);
  std::fill(indptr + c.count, indptr + c.worker_indptr.size(), int32_t(c.count));
  std::copy(longest_first.order(), longest_first.order() + c.count, c.order.need(c.count));
}

// The busiest worker's; where workers share multiprocessors, as Sharing says.
double Planner::time_of(const Crew& crew, const Candidate& c, double makespan) {
  const int32_t share = crew.traits->share, workers = crew.workers;
  if (!share) return makespan;
  const int32_t together = (workers + share - 1) / share;
  // Of one item each, longest first, the first multiprocessor has most.
  const int32_t some = longest_first.one_each() && !crew.traits->section ? 1 : together;
  load_of.assign(size_t(some), 0.0);
  for (int32_t first = 0; first < workers; first += together)
    for (int32_t m = 0; m < some && first + m < workers; ++m)
      load_of[size_t(m)] += longest_first.load(c.costs.get(), c.count, first + m);
  const double busiest = *std::max_element(load_of.begin(), load_of.end());
  return std::max(c.mean + crew.traits->busy * (busiest / share - c.mean), makespan / alone(crew));
}

// Of merges, and of second items.
double Planner::cost_of_cuts(const Crew& crew, const Candidate& c) const {
  const attnrt_crew& t = *crew.traits;
  if (!t.share) return c.cuts ? t.fixed * pr->num_kv_heads : 0.0;
  const double merge = c.cuts ? t.merge + t.fold * double(c.states) : 0.0;
  return merge + (int64_t(c.count) > crew.workers ? t.again : 0.0);
}

// Items to their workers' ranges, in the order given (null: by id); worker_at says whose each is.
void Planner::deal(const Crew& crew, Candidate& c, const int32_t* in_order, const int32_t* worker_at) {
  const size_t n = c.count, workers = size_t(crew.workers);
  at_worker.assign(workers, 0);
  for (size_t i = 0; i < n; ++i) at_worker[size_t(worker_at[i])] += 1;
  c.worker_indptr.resize(size_t(crew.traits->num_workers) + 1);
  int32_t sum = 0;
  for (size_t w = 0; w < workers; ++w) {
    c.worker_indptr[w] = sum;
    sum += at_worker[w];
    at_worker[w] = c.worker_indptr[w];
  }
  std::fill(c.worker_indptr.begin() + ptrdiff_t(workers), c.worker_indptr.end(), sum);
  int32_t* order = c.order.need(n);
  for (size_t i = 0; i < n; ++i) order[at_worker[size_t(worker_at[i])]++] = in_order ? in_order[i] : int32_t(i);
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

// 5. Fewer and fewer heads per item, then shorter runs; keep the best.

int Planner::crew_of(const Tile& t) const {
  int found = 0;
  for (int k = 1; k < tr->num_crews; ++k)
    if (t.klass >= tr->crews[k].first_class && t.queries() * pr->group > tr->crews[k].rows) found = k;
  return found;
}

// Who takes which tiles, and how many partial slots they need before any cut. false: there are not so many.
bool Planner::form_crews(int64_t& needed) {
  needed = 0;
  size_t begin = 0;
  for (int k = 0; k < tr->num_crews; ++k) {
    Crew& crew = crews[k];
    crew.traits = &tr->crews[k];
    const auto mine = [this, k](const Tile& t) { return crew_of(t) == k; };
    crew.begin = begin;
    if (k + 1 == tr->num_crews || std::all_of(tiles.data() + begin, tiles.data() + tiles.size(), mine))
      begin = tiles.size();
    else
      begin = size_t(std::stable_partition(tiles.begin() + ptrdiff_t(begin), tiles.end(), mine) - tiles.begin());
    crew.end = begin;
    crew.base_slots = 0;
    for (size_t i = crew.begin; i < crew.end; ++i) {
      Tile& t = tiles[i];
      t.slot = kDirect, t.fold = 1;
      if (is_direct(t, 1)) continue;
      t.slot = 0, t.fold = t.first && !pr->pairwise;
      crew.base_slots += whole_slots(t);
    }
    needed += crew.base_slots;
    if (crew.traits->section) find_sections(crew);
  }
  overlap();
  return needed <= pr->max_slots;
}

double Planner::whole_cost(const Crew& crew) const {
  double sum = 0.0;
  for (size_t i = crew.begin; i < crew.end; ++i) sum += tiles[i].heads() * unit_cost(crew, tiles[i], tiles[i]);
  return sum;
}

// How many workers of the last team have items, so that the others' kernels run beside it.
void Planner::overlap() {
  for (int k = 0; k < tr->num_crews; ++k) crews[k].workers = tr->crews[k].num_workers;
  Crew& last = crews[tr->num_crews - 1];
  const attnrt_crew& team = *last.traits;
  if (tr->num_crews < 2 || team.overlap <= 0.0) return;
  const double work = whole_cost(last) * team.unit;
  if (work <= 0.0) return;
  double mine = 0.0;
  for (int k = 0; k + 1 < tr->num_crews; ++k)
    mine = mine + whole_cost(crews[k]) * tr->crews[k].unit / tr->crews[k].num_workers;
  if (mine <= 0.0) return;
  double best = std::numeric_limits<double>::infinity();
  for (int32_t workers = 1; workers <= team.num_workers; ++workers) {
    const double alone = work / workers;
    const double done = alone * std::min(1.0, double(team.num_workers - workers) / (team.overlap * team.num_workers));
    const double end = mine <= done ? alone : alone + (mine - done);
    if (end < best) best = end, last.workers = workers;
  }
}

// Lists lie one after the other: how many keys come before each tile's. Rows of one request choose among the same keys
// and count as one list of all that it has.
void Planner::find_sections(const Crew& crew) {
  int64_t before = 0;
  const auto request = [this](const Tile& t) { return pr->part[t.part].request[t.q_begin]; };
  for (size_t i = crew.begin; i < crew.end;) {
    size_t end = i;
    int32_t low = tiles[i].kv_begin, high = tiles[i].kv_end;
    for (; end < crew.end && tiles[end].part == tiles[i].part &&
           (tiles[end].row == tiles[i].row || request(tiles[end]) == request(tiles[i]));
         ++end) {
      low = std::min(low, tiles[end].kv_begin), high = std::max(high, tiles[end].kv_end);
    }
    int64_t keys = int64_t(high) - low;
    if (tiles[end - 1].row != tiles[i].row) keys = std::max<int64_t>(keys, pr->kv_lens[request(tiles[i])]);
    for (size_t j = i; j < end; ++j) tiles[j].before = before, tiles[j].list_keys = keys;
    before += keys * pr->num_kv_heads;
    i = end;
  }
}

void Planner::best_candidate(Crew& crew) {
  int64_t total = 0, slot = crew.first_slot;
  for (size_t i = crew.begin; i < crew.end; ++i) {
    Tile& t = tiles[i];
    t.cost = unit_cost(crew, t, t);
    if (t.slot != kDirect) {
      t.slot = int32_t(slot);
      slot += whole_slots(t);
    }
    total += t.keys() * t.heads();
  }
  const int32_t workers = crew.workers;
  const bool lpt = pr->mode == 0;
  const double limit = lpt ? double(total) / workers : std::numeric_limits<double>::infinity();
  const int32_t heads = pr->num_kv_heads, most = lpt && tr->split_heads ? heads : 1;
  const bool one_head = most > 1 && crew.traits->section && crew.begin < crew.end;
  const Extent extent = most > 1 ? extent_of(crew) : Extent();
  crew.best = nullptr;
  crew.next = &crew.pool[0];
  int32_t width = heads;
  for (int32_t n = one_head ? most : 1; n <= most; ++n) {
    if (heads % n) continue;
    width = heads / n;
    if (n < most && too_long(crew, extent, width, limit)) continue;
    Candidate& c = *crew.next;
    weigh(crew, c, width, limit);
    if (n < most && c.longest > kGoodBalance * c.mean) continue;
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
  size_t count = crew.best->count;
  const size_t first_count = count;
  for (const double finer : {2.0, 4.0, 8.0}) {
    const bool many = int64_t(count) >= 4 * kManyItems * workers;
    if (crew.best->time <= kBadBalance * crew.best->mean || many) break;
    Candidate& c = *crew.next;
    weigh(crew, c, width, limit / finer);
    if (c.count <= count) continue;
    count = c.count;
    list_items(crew, c);
    assign_lpt(crew, c);
    keep_if_better(crew, c);
  }
  if (!crew.traits->share || !crew.best->cuts) return;
  count = first_count;
  for (const double longer : {2.0, 4.0}) {
    Candidate& c = *crew.next;
    weigh(crew, c, width, limit * longer);
    if (c.count >= count) continue;
    count = c.count;
    const double least = std::max(c.mean, c.longest / alone(crew)) + cost_of_cuts(crew, c);
    if (least >= crew.best->time + cost_of_cuts(crew, *crew.best)) continue;
    list_items(crew, c);
    assign_lpt(crew, c);
    keep_if_better(crew, c);
  }
}

// Keep `next` as the best, and write the coming candidate over the one that lost.
void Planner::keep_if_better(Crew& crew, Candidate& c) {
  const auto score = [&](const Candidate& one) { return one.time + cost_of_cuts(crew, one); };
  if (crew.best && !(score(c) < score(*crew.best))) return;
  crew.best = &c;
  crew.next = crew.best == &crew.pool[0] ? &crew.pool[1] : &crew.pool[0];
}

// 6. Rows that merge.

void Planner::merges() {
  num_merges = num_entries = 0;
  const size_t cells = size_t(pr->num_rows) * size_t(units);
  merge_rows.need(cells * kMergeFields);
  if (slots == 0 && pr->num_parts == 1 && units == 1 && !pr->part[0].qo_index) {
    for (int64_t row = pr->part[0].qo_indptr[pr->part[0].num_rows]; row < pr->num_rows; ++row) {
      const int32_t entry[kMergeFields] = {int32_t(row), 0, pr->num_kv_heads, 0, 0};
      std::memcpy(merge_rows.get() + kMergeFields * num_merges++, entry, sizeof entry);
    }
    return;
  }
  done.assign(cells, 0);
  state_end.assign(cells + 1, 0);
  each_tile([&](const Crew& crew, size_t i) {
    const Tile& t = tiles[i];
    int64_t states_here = 0;
    bool direct = false;
    each_run(crew, *crew.best, i, [&](const Run& run, int32_t) {
      direct = direct || run.slot == kDirect;
      if (run.slot != kDirect) states_here += run.fold ? 1 : run.leaf_end - run.leaf_begin;
    });
    uint8_t* is_done = done.data();
    int64_t* next_end = state_end.data() + 1;
    each_cell(t, [=](int64_t cell, int) {
      is_done[cell] |= uint8_t(direct);
      next_end[cell] += states_here;
    });
  });
  for (size_t i = 0; i < cells; ++i) state_end[i + 1] += state_end[i];
  State* all = states.need(size_t(state_end[cells]));
  merge_slots.need(size_t(state_end[cells]));
  merge_leaves.need(size_t(state_end[cells]));
  each_tile([&](const Crew& crew, size_t i) {
    const Tile& t = tiles[i];
    each_run(crew, *crew.best, i, [&](const Run& run, int32_t) {
      if (run.slot == kDirect) return;
      const int32_t n = run.fold ? 1 : run.leaf_end - run.leaf_begin, queries = int32_t(t.queries());
      const int32_t leaf = run.leaf_begin, slot = run.slot;
      int64_t* ends = state_end.data();
      each_cell(t, [=](int64_t cell, int q) {
        State* to = all + ends[cell];
        for (int32_t k = 0; k < n; ++k) to[k] = {leaf + k, slot + k * queries + q};
        ends[cell] += n;
      });
    });
  });
  // state_end[cell] has moved to the end of the cell's states, which is where the next cell's begin.
  for (int64_t row = 0; row < pr->num_rows; ++row)
    for (int32_t unit = 0; unit < units; ++unit)
      if (!done[size_t(row * units + unit)]) list_row(row, unit);
}

void Planner::list_row(int64_t row, int32_t unit) {
  const int32_t width = pr->num_kv_heads / units;
  const size_t cell = size_t(row * units + unit);
  State *begin = states.get() + (cell ? state_end[cell - 1] : 0), *end = states.get() + state_end[cell];
  if (begin == end && num_merges) {
    int32_t* last = merge_rows.get() + (num_merges - 1) * kMergeFields;
    if (last[0] == row && last[3] == last[4] && last[2] == unit * width) {
      last[2] = (unit + 1) * width;
      return;
    }
  }
  const auto rises = [](const State& a, const State& b) {
    return a.leaf != b.leaf ? a.leaf < b.leaf : a.slot < b.slot;
  };
  if (!std::is_sorted(begin, end, rises)) std::sort(begin, end, rises);
  const size_t from = num_entries;
  num_entries += size_t(end - begin);
  int32_t *slots = merge_slots.get() + from, *leaves = merge_leaves.get() + from;
  for (State* s = begin; s != end; ++s) *slots++ = s->slot, *leaves++ = s->leaf;
  const int32_t entry[kMergeFields] = {int32_t(row), unit * width, (unit + 1) * width, int32_t(from),
                                       int32_t(num_entries)};
  std::memcpy(merge_rows.get() + kMergeFields * num_merges++, entry, sizeof entry);
}

void Planner::take(int32_t* out) const {
  for (int k = 0; k < tr->num_crews; ++k) {
    const Candidate& c = *crews[k].best;
    const int32_t* order = c.order.get();
    const Item *items = c.items.get(), *before = nullptr;
    const int32_t* like = nullptr;  // what was written for `before`
    for (size_t i = 0; i < c.count; ++i) {
      const int32_t id = order[i];
      const Item& item = items[id];
      if (before && item.tile == before->tile && item.run == before->run) {  // the same under other heads
        // Not of the line just before: reading whole what has just been written in pieces would wait for it each time.
        std::memcpy(out, like, kWorkFields * sizeof *out);
        out[4] = item.head, out[5] = item.head + like[5] - like[4];
        out += kWorkFields;
        continue;
      }
      before = &item, like = out;
      const Tile& t = tiles[size_t(item.tile)];
      const Run& run = run_at(c, size_t(item.tile), item.run);
      const int32_t step = std::min(t.heads(), c.heads);
      out[0] = t.part, out[1] = t.row, out[2] = t.q_begin, out[3] = t.q_end;
      out[4] = item.head, out[5] = item.head + step;
      out[6] = run.kv_begin, out[7] = run.kv_end, out[8] = run.leaf_begin, out[9] = run.leaf_end;
      out[10] = run.slot, out[11] = t.klass, out[12] = run.fold;
      out[13] = rounded(c.costs.get()[id]);
      out += kWorkFields;
    }
  }
  int32_t items_before = 0;
  for (int k = 0; k < tr->num_crews; ++k) {
    const std::vector<int32_t>& indptr = crews[k].best->worker_indptr;
    for (size_t i = k ? 1 : 0; i < indptr.size(); ++i) *out++ = items_before + indptr[i];
    items_before += indptr.back();
  }
  const auto put = [&out](const int32_t* from, size_t n) {
    if (n) std::memcpy(out, from, n * sizeof(int32_t));
    out += n;
  };
  put(merge_rows.get(), num_merges * kMergeFields);
  put(merge_slots.get(), num_entries);
  put(merge_leaves.get(), num_entries);
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
