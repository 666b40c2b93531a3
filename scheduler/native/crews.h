// SPDX-License-Identifier: Apache-2.0
// Which workers take which tiles: the machine's own and the teams', how many of the last team's work at all, and what
// lists share a cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "costs.h"
#include "tile.h"

// Workers that begin late (scheduler/plan_python.py).
constexpr int32_t kTaken = 1, kWaves = 3;
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
  void stagger(const Costs& costs, const std::vector<Tile>& tiles);

  const attnrt_problem* pr = nullptr;
  const attnrt_traits* tr = nullptr;
  Crew crews[3];
  int count = 0;
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
  if (count < 2 || team.overlap <= 0.0) return;
  const double work = costs.whole(last, tiles) * team.unit;
  if (work <= 0.0) return;
  double mine = 0.0;
  for (int k = 0; k + 1 < count; ++k)
    mine = mine + costs.whole(crews[k], tiles) * tr->crews[k].unit / tr->crews[k].num_workers;
  if (mine <= 0.0) return;
  double best = std::numeric_limits<double>::infinity();
  for (int32_t workers = 1; workers <= team.num_workers; ++workers) {
    const double alone = work / workers;
    const double done = alone * std::min(1.0, double(team.num_workers - workers) / (team.overlap * team.num_workers));
    const double end = mine <= done ? alone : alone + (mine - done);
    if (end < best) best = end, last.workers = workers;
  }
  if (pr->mode == 0) stagger(costs, tiles);
}

// The machine's own workers begin on the multiprocessors that the last team leaves, and on others as these come free.
inline void Crews::stagger(const Costs& costs, const std::vector<Tile>& tiles) {
  Crew &own = crews[0], &last = crews[count - 1];
  const int32_t share = own.traits->share;
  if (!share || own.workers % share || last.traits->num_workers != own.workers / share) return;
  for (int k = 1; k + 1 < count; ++k)
    if (crews[k].begin < crews[k].end) return;
  const int32_t together = own.workers / share, early = together - last.workers - kTaken;
  if (early * kWaves < together) return;
  own.early = early;
  own.late_at = costs.whole(last, tiles, false) * last.traits->unit / last.workers;
  own.ahead = own.late_at * std::min(kMemory * together / early + (1.0 - kMemory), 1.0 / last.traits->overlap);
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
