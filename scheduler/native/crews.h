// SPDX-License-Identifier: Apache-2.0
// Which workers take which tiles: the machine's own and the teams', how many of the last team's work at all, and what
// lists share a cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "costs.h"
#include "tile.h"

// Workers that begin late (scheduler/crews.py).
constexpr int32_t kTaken = 1, kWaves = 4;
constexpr double kMemory = 0.6;

class Crews {
 public:
  // Tiles are put in order of their crews. False: there are not so many partial slots as `needed`, before any cut.
  bool form(const attnrt_problem& problem, const Costs& costs, std::vector<Tile>& tiles, int64_t& needed);

  Crew* begin() { return crews; }
  Crew* end() { return crews + count; }
  const Crew* begin() const { return crews; }
  const Crew* end() const { return crews + count; }

 private:
  int crew_of(const Tile& tile) const;
  void find_sections(const Crew& crew, std::vector<Tile>& tiles) const;
  void overlap(const Costs& costs, const std::vector<Tile>& tiles);
  void find_ends(const Costs& costs, const Crew& team, const std::vector<Tile>& tiles);
  static double reading(const attnrt_crew& team, int32_t multiprocessors);
  void stagger(double alone);

  const attnrt_problem* pr = nullptr;
  const attnrt_traits* tr = nullptr;
  Crew crews[3];
  int count = 0;
  std::vector<double> ends;  // of the last team, by its workers
  std::vector<double> sums;  // of its cheapest items
  std::vector<std::pair<double, int32_t>> alike;
};

inline int Crews::crew_of(const Tile& t) const {
  int found = 0;
  for (int k = 1; k < tr->num_crews; ++k)
    if (t.klass >= tr->crews[k].first_class && t.queries() * pr->group > tr->crews[k].rows) found = k;
  return found;
}

inline bool Crews::form(const attnrt_problem& problem, const Costs& costs, std::vector<Tile>& tiles, int64_t& needed) {
  pr = &problem;
  tr = problem.traits;
  count = tr->num_crews;
  needed = 0;
  size_t begin = 0;
  for (int k = 0; k < count; ++k) {
    Crew& crew = crews[k];
    crew.traits = &tr->crews[k];
    const auto mine = [this, k](const Tile& t) { return crew_of(t) == k; };
    crew.begin = begin;
    if (k + 1 == count || std::all_of(tiles.data() + begin, tiles.data() + tiles.size(), mine))
      begin = tiles.size();
    else
      begin = size_t(std::stable_partition(tiles.begin() + ptrdiff_t(begin), tiles.end(), mine) - tiles.begin());
    crew.end = begin;
    crew.base_slots = 0;
    for (size_t i = crew.begin; i < crew.end; ++i) {
      Tile& t = tiles[i];
      t.slot = kDirect, t.fold = 1;
      if (is_direct(problem, t, 1)) continue;
      t.slot = 0, t.fold = t.first && !problem.pairwise;
      crew.base_slots += t.whole_slots();
    }
    needed += crew.base_slots;
    if (crew.traits->section) find_sections(crew, tiles);
  }
  overlap(costs, tiles);
  return needed <= problem.max_slots;
}

// How many workers of the last team have items, so that the others' kernels run beside it.
inline void Crews::overlap(const Costs& costs, const std::vector<Tile>& tiles) {
  for (int k = 0; k < count; ++k) crews[k].workers = tr->crews[k].num_workers;
  crews[0].early = 0, crews[0].late_at = 0.0;
  Crew& last = crews[count - 1];
  const attnrt_crew& team = *last.traits;
  if (count < 2 || team.overlap <= 0.0 || last.begin == last.end) return;
  double mine = 0.0;
  for (int k = 0; k + 1 < count; ++k)
    mine = mine + costs.whole(crews[k], tiles) * tr->crews[k].unit / tr->crews[k].num_workers;
  if (mine <= 0.0) return;
  find_ends(costs, last, tiles);
  double best = std::numeric_limits<double>::infinity();
  for (int32_t workers = 1; workers <= int32_t(ends.size()); ++workers) {
    const double alone = ends[size_t(workers) - 1];
    const double done = alone * reading(team, team.num_workers - workers - kTaken);
    const double end = mine <= done ? alone : alone + (mine - done);
    if (end < best) best = end, last.workers = workers;
  }
  if (pr->mode == 0 && !ends.empty()) stagger(ends[size_t(last.workers) - 1]);
}

// When a team ends at best, by its workers: some worker has as many items as all have in the mean, rounded up.
inline void Crews::find_ends(const Costs& costs, const Crew& team, const std::vector<Tile>& tiles) {
  alike.resize(team.end - team.begin);
  size_t items = 0;
  for (size_t i = team.begin; i < team.end; ++i) {
    alike[i - team.begin] = {costs.unit(team, tiles[i], tiles[i]) * team.traits->unit, tiles[i].heads()};
    items += size_t(tiles[i].heads());
  }
  std::sort(alike.begin(), alike.end());
  sums.resize(items + 1);
  double sum = sums[0] = 0.0;
  size_t n = 0;
  for (const auto& [cost, heads] : alike)
    for (int32_t head = 0; head < heads; ++head) sums[++n] = sum += cost;
  ends.resize(sum > 0.0 ? size_t(team.traits->num_workers) : 0);
  for (size_t k = 1; k <= ends.size(); ++k)
    ends[k - 1] = std::max({sum / double(k), sums[(items + k - 1) / k], alike.back().first});
}

// Part of what the whole machine reads that so many multiprocessors read beside a team.
inline double Crews::reading(const attnrt_crew& team, int32_t multiprocessors) {
  const double part = double(std::max(0, multiprocessors)) / team.num_workers;
  return std::min(part / team.overlap, kMemory + (1.0 - kMemory) * part);
}

// The machine's own workers begin on the multiprocessors that the last team leaves, and on others as these come free.
inline void Crews::stagger(double alone) {
  Crew &own = crews[0], &last = crews[count - 1];
  const int32_t share = own.traits->share;
  if (!share || own.workers % share || last.traits->num_workers != own.workers / share) return;
  for (int k = 1; k + 1 < count; ++k)
    if (crews[k].begin < crews[k].end) return;
  const int32_t together = own.workers / share, early = together - last.workers - kTaken;
  if (early * kWaves < together) return;
  own.early = early;
  own.late_at = alone;
  own.ahead = alone * reading(*last.traits, early) * together / early;
  own.begins.resize(size_t(own.workers));
  for (int32_t w = 0; w < own.workers; ++w) own.begins[size_t(w)] = w % together < early ? 0.0 : own.ahead;
}

// Lists lie one after the other: how many keys come before each tile's. Rows of one request choose among the same keys
// and count as one list of all that it has.
inline void Crews::find_sections(const Crew& crew, std::vector<Tile>& tiles) const {
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
