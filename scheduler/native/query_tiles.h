// SPDX-License-Identifier: Apache-2.0
// Block rows cut into query tiles of one numeric class, the keys that each may see, and which of them hold all keys of
// their rows: scheduler/tiles.py, the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "problem.h"
#include "tile.h"

constexpr int64_t kFar = int64_t(1) << 40;

// f(cell, query) for every row of q and head range that a tile's states belong to; query counts from the tile's first.
template <class F>
void each_cell(const attnrt_problem& problem, int32_t units, const Tile& t, F&& f) {
  const int32_t* qo_index = problem.part[t.part].qo_index;
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

class QueryTiles {
 public:
  // Of a problem that is in_range.
  void find(const attnrt_problem& problem);

  std::vector<Tile> tiles;
  std::vector<Ruler> rulers;  // of each class
  int32_t units = 1;

 private:
  void cut();
  void narrow(const attnrt_crew& team);
  int64_t items_of(const attnrt_crew& team) const;
  int64_t longest(const attnrt_crew& team);
  void cut_row(int part, int row);
  void tiles_of(int part, int row, int q_begin, int q_end, int klass);
  void find_keys(Tile& tile) const;
  void mark_rows();

  const attnrt_problem* pr = nullptr;
  std::vector<int> rows;   // of q's heads per tile, and
  std::vector<int> steps;  // queries, of each class
  std::vector<int32_t> req_class;
  std::vector<int32_t> count, first;
  std::vector<int64_t> costs, ends;  // of few items
};

inline void QueryTiles::find(const attnrt_problem& problem) {
  pr = &problem;
  units = units_of(problem);
  rulers.clear();
  rows.clear();
  for (int i = 0; i < pr->traits->num_classes; ++i) {
    rulers.emplace_back(pr->traits->classes[i]);
    rows.push_back(pr->traits->classes[i].q_tile);
  }
  classes_of(problem, req_class);
  cut();
  for (int k = 1; k < pr->traits->num_crews; ++k) narrow(pr->traits->crews[k]);
  if (pr->num_parts == 1) return;
  mark_rows();
  tiles.erase(std::remove_if(tiles.begin(), tiles.end(), [](const Tile& t) { return t.keys() == 0; }), tiles.end());
}

inline void QueryTiles::cut() {
  steps.clear();
  for (const int n : rows) steps.push_back(std::max(1, n / pr->group));
  tiles.clear();
  for (int p = 0; p < pr->num_parts; ++p)
    for (int row = 0; row < pr->part[p].num_rows; ++row) cut_row(p, row);
}

// Where a team has few items: tiles of that size with which its longest worker ends first.
inline void QueryTiles::narrow(const attnrt_crew& team) {
  constexpr int kFew = 3;
  const size_t first = size_t(team.first_class);
  const int64_t items = team.num_sizes && first < rows.size() ? items_of(team) : 0;
  if (items == 0 || items >= int64_t(kFew) * team.num_workers) return;
  const std::vector<int> own = rows;
  std::vector<int> best = rows, now;
  int64_t least = longest(team);
  for (int i = team.num_sizes - 2; i >= 0; --i) {
    rows = own;
    for (size_t k = first; k < rows.size(); ++k) rows[k] = std::min(own[k], team.size_rows[i]);
    now = rows;
    cut();
    const int64_t found = longest(team);
    if (found < least) least = found, best = rows;
  }
  rows = best;
  if (now != best) cut();
}

// Its tiles, one for each KV head.
inline int64_t QueryTiles::items_of(const attnrt_crew& team) const {
  int64_t items = 0;
  for (const Tile& t : tiles) items += t.klass >= team.first_class ? t.heads() : 0;
  return items;
}

// When the last of its workers ends, by whole numbers: longest first, runs of keys cut to leaves.
inline int64_t QueryTiles::longest(const attnrt_crew& team) {
  costs.clear();
  for (const Tile& t : tiles) {
    if (t.klass < team.first_class) continue;
    const attnrt_class& klass = pr->traits->classes[t.klass];
    const int64_t leaf = klass.span_size[klass.num_spans - 1], keys = t.keys();
    int size = 0;
    while (size + 1 < team.num_sizes && t.queries() * pr->group > team.size_rows[size]) ++size;
    for (int64_t begin = 0; begin < std::max<int64_t>(1, keys); begin += leaf) {
      const int64_t cost = team.size_cost[size] * (int64_t(team.fixed) + std::min(leaf, keys - begin));
      costs.insert(costs.end(), size_t(t.heads()), cost);
    }
  }
  std::sort(costs.begin(), costs.end(), std::greater<int64_t>());
  ends.assign(size_t(team.num_workers), 0);  // a heap, the least first
  for (const int64_t cost : costs) {
    std::pop_heap(ends.begin(), ends.end(), std::greater<int64_t>());
    ends.back() += cost;
    std::push_heap(ends.begin(), ends.end(), std::greater<int64_t>());
  }
  return *std::max_element(ends.begin(), ends.end());
}

// Query ranges of one class and limit.
inline void QueryTiles::cut_row(int p, int row) {
  const attnrt_part& part = pr->part[p];
  const size_t width = size_t(part.heads) * sizeof(int64_t);
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

// Of so many queries as the class has in a tile, and of one list.
inline void QueryTiles::tiles_of(int p, int row, int q_begin, int q_end, int klass) {
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

inline void QueryTiles::find_keys(Tile& t) const {
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

// Which tiles hold the first leaf, or all leaves, of their rows.
inline void QueryTiles::mark_rows() {
  const size_t cells = size_t(pr->num_rows) * size_t(units);
  count.assign(cells, 0);
  first.assign(cells, std::numeric_limits<int32_t>::max());
  int32_t *counts = count.data(), *firsts = first.data();
  for (const Tile& t : tiles) {
    if (t.keys() == 0) continue;
    const int32_t leaf = t.leaf_begin;
    each_cell(*pr, units, t, [=](int64_t cell, int) {
      counts[cell] += 1;
      firsts[cell] = std::min(firsts[cell], leaf);
    });
  }
  for (Tile& t : tiles) {
    if (t.keys() == 0) continue;
    const int32_t leaf = t.leaf_begin;
    bool is_first = true, is_whole = true;
    each_cell(*pr, units, t, [&, leaf](int64_t cell, int) {
      is_first &= firsts[cell] == leaf;
      is_whole &= counts[cell] == 1;
    });
    t.first = is_first, t.whole = is_whole;
  }
}
