// SPDX-License-Identifier: Apache-2.0
// What items cost, and how long a way to cut takes: the prices of the traits, and the model of workers that share a
// multiprocessor (scheduler/base.py, Sharing). Sums run in the order of scheduler/costs.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lpt.h"
#include "problem.h"
#include "tile.h"

constexpr double kGoodBalance = 1.05;
constexpr int32_t kWarps = 2;  // that load for a worker at most while every multiprocessor has work

// Keys of a run at most, of so many heads.
inline int64_t longest_run(double limit, int32_t heads) {
  return std::max<int64_t>(1, int64_t(std::ceil(limit / heads)));
}

// The leaf before which a run of a tile from key `begin` on ends; 0: it goes on to the tile's end. An eighth more than
// `longest` is not worth a cut.
inline int32_t next_cut(const Ruler& ruler, const Tile& t, int64_t begin, int64_t longest) {
  if (t.kv_end - begin <= longest + longest / 8) return 0;
  const int32_t next = ruler.leaf_of(begin + longest - 1) + 1;
  return ruler.start(next) < t.kv_end ? next : 0;
}

// Whether ends of leaves have a price.
inline bool counts_ends(const Crew& crew) { return crew.traits->stored + crew.traits->folded > 0.0; }

class Costs {
 public:
  void of(const attnrt_problem& problem) { pr = &problem; }

  // So many keys of a tile for one KV head.
  double unit(const Crew& crew, const Tile& t, int64_t keys) const {
    const attnrt_crew& cost = *crew.traits;
    const double rows = double(t.queries() * pr->group), size = double(keys);
    return cost.fixed + cost.alpha * rows + cost.beta * size + cost.beta_rows * rows * size;
  }
  double unit(const Crew& crew, const Tile& t, const Run& run) const {
    const int64_t size = crew.traits->tile;
    const double ends = run.fold ? crew.traits->folded : crew.traits->stored;
    int64_t keys = int64_t(run.kv_end) - run.kv_begin;
    if (size) keys = ((run.kv_end + size - 1) / size - run.kv_begin / size) * size;
    return unit(crew, t, keys) + ends * double(run.leaf_end - run.leaf_begin);
  }

  // All tiles of a crew, uncut.
  double whole(const Crew& crew, const std::vector<Tile>& tiles) const {
    double sum = 0.0;
    for (size_t i = crew.begin; i < crew.end; ++i) sum += tiles[i].heads() * unit(crew, tiles[i], tiles[i]);
    return sum;
  }

  // A candidate's time after `assigned` gave its items away with this makespan: the busiest worker's, or, where workers
  // share multiprocessors, as Sharing says, from the time on at which all have begun.
  double time(const Crew& crew, const Candidate& c, const LongestFirst& assigned, double makespan) {
    const int32_t share = crew.traits->share, workers = crew.workers;
    if (!share) return makespan;
    const int32_t together = (workers + share - 1) / share;
    // Of one item each, longest first, the first multiprocessor has most, and the longest.
    const bool first_alone = assigned.one_each() && !crew.traits->section;
    const int32_t some = first_alone ? 1 : together;
    loads.assign(size_t(some), {});
    const double ahead = crew.early ? crew.ahead : 0.0;  // what is left when the last ones begin
    for (int32_t first = 0; first < workers; first += together)
      for (int32_t m = 0; m < some && first + m < workers; ++m)
        loads[size_t(m)].add(std::max(0.0, assigned.load(c.costs.get(), c.count, first + m) - ahead));
    const bool spare = first_alone
                           ? int64_t(c.count) < together
                           : std::any_of(loads.begin(), loads.end(), [](const Load& own) { return own.busy == 0; });
    double busiest = 0.0, slowest = 0.0;
    for (const Load& own : loads) {
      busiest = std::max(busiest, own.sum);
      if (own.busy) slowest = std::max(slowest, own.longest / rate(crew, own.busy, spare));
    }
    busiest /= share;
    if (crew.early) {
      double longest = 0.0;
      for (const Load& own : loads) longest = std::max(longest, own.longest);
      slowest = longest / rate(crew, share, false);
      return crew.late_at + std::max({c.mean - crew.late_at, busiest * crew.late_at / crew.ahead, slowest});
    }
    return std::max(c.mean + crew.traits->busy * (busiest - c.mean), slowest);
  }

  // When an item that a late worker begins with has ended; where all begin together, its cost.
  double item_time(const Crew& crew, double cost) const {
    return crew.early ? crew.late_at + cost / rate(crew, crew.traits->share, false) : cost;
  }

  // Of merges, and of second items.
  double of_cuts(const Crew& crew, const Candidate& c) const {
    const attnrt_crew& t = *crew.traits;
    const double merge = t.share ? t.merge + t.fold * double(c.states) : t.fixed * pr->num_kv_heads;
    return (c.cuts ? merge : 0.0) + (int64_t(c.count) > crew.workers ? t.again : 0.0);
  }

  double score(const Crew& crew, const Candidate& c) const { return c.time + of_cuts(crew, c); }

  // What a candidate scores at least, however its items are assigned.
  double least(const Crew& crew, const Candidate& c) const {
    if (!crew.traits->share) return c.longest + of_cuts(crew, c);
    return std::max(c.mean, c.longest / rate(crew, 1, true)) + of_cuts(crew, c);
  }

 private:
  // What the workers of a multiprocessor have.
  struct Load {
    double sum, longest;
    int32_t busy;  // workers with work
    void add(double load) {
      sum += load;
      longest = std::max(longest, load);
      busy += load > 0.0;
    }
  };

  // Times its share that a worker reads where so many of its multiprocessor have work; `spare`: some multiprocessor has
  // none.
  double rate(const Crew& crew, int32_t busy, bool spare) const {
    const attnrt_crew& t = *crew.traits;
    const int32_t warps = t.share / busy;
    return std::min(t.alone, (pr->scattered ? t.scattered : t.warp) * (spare ? warps : std::min(warps, kWarps)));
  }

  const attnrt_problem* pr = nullptr;
  std::vector<Load> loads;  // each multiprocessor's
};

// What is known of a crew's tiles before any is cut: bounds of all candidates.
class Extent {
 public:
  void of(const Costs& costs, const Crew& crew, const std::vector<Tile>& tiles) {
    costliest = nullptr;
    whole = by_leaves = by_keys = 0.0;
    for (size_t i = crew.begin; i < crew.end; ++i) {
      const Tile& t = tiles[i];
      const double start = t.heads() * std::max(0.0, costs.unit(crew, t, 0));
      whole += t.heads() * t.cost;
      const double stored = std::max(0.0, crew.traits->stored - crew.traits->folded);  // where one is folded now
      whole += t.heads() * stored * double(t.leaf_end - t.leaf_begin);
      by_leaves += start * double(std::max(0, t.leaf_end - t.leaf_begin - 1));
      by_keys += start * double(t.keys());
      if (!costliest || t.cost > costliest->cost) costliest = &t;
    }
  }

  // Whether a candidate's longest item is certain to be longer than is good, found without a cut: the first run of the
  // costliest tile is, beside a mean of more cuts than there can be. (Sums in another order than a candidate's mean: a
  // millionth is more than that can make.)
  bool too_long(const Costs& costs, const Crew& crew, const std::vector<Ruler>& rulers, int32_t heads,
                double limit) const {
    if (!costliest) return false;
    const Tile& t = *costliest;
    const Ruler& ruler = rulers[size_t(t.klass)];
    const int32_t step = std::min(heads, t.heads()), next = next_cut(ruler, t, t.kv_begin, longest_run(limit, step));
    double least = t.cost;  // it stays whole where slots do not suffice
    const Run first = {t.kv_begin, next ? int32_t(ruler.start(next)) : t.kv_end, t.leaf_begin, next, 0, t.fold};
    if (next) least = std::min(least, costs.unit(crew, t, first));
    const double cuts = std::min(by_leaves, by_keys * heads / limit);
    return costs.item_time(crew, step * least) > (kGoodBalance + 1e-6) * crew.mean(whole + cuts);
  }

 private:
  const Tile* costliest = nullptr;
  double whole = 0.0, by_leaves = 0.0, by_keys = 0.0;  // costs: uncut; of cuts at all leaves; of a cut after each key
};
