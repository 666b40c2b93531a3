// SPDX-License-Identifier: Apache-2.0
// Which rows of q read the same lists, where cuts lie inside leaves, and what stays with each list: the tables of
// scheduler/align.py, the same numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "problem.h"

struct Range {
  int64_t lo, hi;  // offsets in the request
  bool any() const { return lo < hi; }
};

// A list is a group of alike rows under one head (or all): group * units + unit.
class Lists {
 public:
  void read(const attnrt_problem& problem);

  const attnrt_problem* pr = nullptr;
  int32_t parts = 0, units = 1, groups = 0;
  size_t gaps = 0;                // most stretches of straddled leaves in any list
  std::vector<int32_t> place;     // [rows of q * parts] place in each part, -1: not in it
  std::vector<int32_t> group_of;  // [rows of q], -1: in no part
  std::vector<int32_t> begin;     // [groups + 1]
  std::vector<int32_t> qo_rows;   // [listed rows of q], by group
  std::vector<int32_t> klass;     // [groups]
  std::vector<int32_t> row;       // [groups * parts] block row in each part, -1: none
  std::vector<int32_t> part;      // [lists * parts] parts in order of offset
  std::vector<Range> live;        // [lists * parts] in that order, 0 behind the last
  std::vector<Range> gap;         // [lists * parts] stretches of straddled leaves
  std::vector<int32_t> found;     // [lists] how many
  std::vector<Range> left;        // [groups * parts * units] what stays, by part
  std::vector<uint8_t> stays;     // [groups * parts] whether anything does

  size_t lists() const { return size_t(groups) * size_t(units); }
  bool mixed() const;
  bool leave_over();  // false: heads are cut apart, which NumPy's form refuses

 private:
  void group_rows(const std::vector<int32_t>& req_class);
  void find_ranges();
  void find_gaps();
  void same_for_heads();

  std::vector<int32_t> req_class_, signature_, table_, lead_, at_;
  std::vector<Ruler> rulers_;
};

inline void Lists::read(const attnrt_problem& problem) {
  pr = &problem;
  parts = problem.num_parts;
  units = units_of(problem);
  classes_of(problem, req_class_);
  rulers_.clear();
  for (int i = 0; i < problem.traits->num_classes; ++i) rulers_.emplace_back(problem.traits->classes[i]);
  group_rows(req_class_);
  find_ranges();
  find_gaps();
}

// Whether queries of two classes share a block row.
inline bool Lists::mixed() const {
  for (int p = 0; p < parts; ++p) {
    const attnrt_part& source = pr->part[p];
    for (int r = 0; r < source.num_rows; ++r)
      for (int q = source.qo_indptr[r] + 1; q < source.qo_indptr[r + 1]; ++q)
        if (req_class_[size_t(source.request[q])] != req_class_[size_t(source.request[q - 1])]) return true;
  }
  return false;
}

// Rows of q with the same block row in every part, and the same class, are a group; groups by their first row.
inline void Lists::group_rows(const std::vector<int32_t>& req_class) {
  const size_t rows = size_t(pr->num_rows), width = size_t(parts) + 1;
  place.assign(rows * size_t(parts), -1);
  signature_.assign(rows * width, -1);
  for (int p = 0; p < parts; ++p) {
    const attnrt_part& source = pr->part[p];
    for (int r = 0; r < source.num_rows; ++r) {
      for (int q = source.qo_indptr[r]; q < source.qo_indptr[r + 1]; ++q) {
        const size_t at = size_t(source.qo_index ? source.qo_index[q] : q);
        place[at * size_t(parts) + size_t(p)] = q;
        signature_[at * width + size_t(p)] = r;
        signature_[at * width + width - 1] = req_class[size_t(source.request[q])];
      }
    }
  }
  size_t slots = 16;
  while (slots < 2 * rows) slots *= 2;
  table_.assign(slots, -1);
  group_of.resize(rows);
  lead_.clear();
  klass.clear();
  row.clear();
  const int32_t* last = nullptr;
  int32_t last_group = -1;
  const size_t bytes = width * sizeof(int32_t);
  for (size_t i = 0; i < rows; ++i) {
    const int32_t* mine = &signature_[i * width];
    group_of[i] = -1;
    if (mine[width - 1] < 0) continue;
    if (!last || std::memcmp(mine, last, bytes) != 0) {
      uint64_t hash = 0x9E3779B97F4A7C15u;
      for (size_t k = 0; k < width; ++k) hash = (hash ^ uint32_t(mine[k])) * 0xBF58476D1CE4E5B9u, hash ^= hash >> 29;
      size_t at = size_t(hash) & (slots - 1);
      while (table_[at] >= 0 && std::memcmp(mine, &signature_[size_t(lead_[size_t(table_[at])]) * width], bytes) != 0)
        at = (at + 1) & (slots - 1);
      if (table_[at] < 0) {
        table_[at] = int32_t(lead_.size());
        lead_.push_back(int32_t(i));
        klass.push_back(mine[width - 1]);
        row.insert(row.end(), mine, mine + parts);
      }
      last_group = table_[at];
      last = mine;
    }
    group_of[i] = last_group;
  }
  groups = int32_t(lead_.size());
  begin.assign(size_t(groups) + 1, 0);
  for (size_t i = 0; i < rows; ++i)
    if (group_of[i] >= 0) begin[size_t(group_of[i]) + 1] += 1;
  for (int g = 0; g < groups; ++g) begin[size_t(g) + 1] += begin[size_t(g)];
  at_.assign(begin.begin(), begin.end() - 1);
  qo_rows.resize(size_t(begin[size_t(groups)]));
  for (size_t i = 0; i < rows; ++i)
    if (group_of[i] >= 0) qo_rows[size_t(at_[size_t(group_of[i])]++)] = int32_t(i);
}

// Live offsets of every list, parts in order of offset, parts without keys last.
inline void Lists::find_ranges() {
  const size_t P = size_t(parts);
  part.resize(lists() * P);
  live.resize(lists() * P);
  size_t at = 0;
  for (size_t g = 0; g < size_t(groups); ++g) {
    for (int u = 0; u < units; ++u, at += P) {
      int32_t* order = &part[at];
      Range* out = &live[at];
      for (int p = 0; p < parts; ++p) {
        const attnrt_part& source = pr->part[p];
        const int32_t r = row[g * P + size_t(p)];
        Range mine = {0, 0};
        if (r >= 0) {
          const int64_t entry = int64_t(r) * source.heads + (source.heads > 1 ? u : 0), offset = source.kv_offset[r];
          mine = {offset + source.kv_begin[entry], offset + source.kv_end[entry]};
          if (!mine.any()) mine = {0, 0};
        }
        int i = p;  // insertion keeps equal offsets in order of part
        while (i > 0 && (out[i - 1].any() ? mine.any() && mine.lo < out[i - 1].lo : mine.any())) {
          out[i] = out[i - 1], order[i] = order[i - 1];
          --i;
        }
        out[i] = mine, order[i] = p;
      }
    }
  }
}

// Leaves that straddle cuts; neighbours join.
inline void Lists::find_gaps() {
  const size_t P = size_t(parts);
  gap.assign(lists() * P, {0, 0});
  found.assign(lists(), 0);
  for (size_t l = 0; l < lists(); ++l) {
    const Ruler& ruler = rulers_[size_t(klass[l / size_t(units)])];
    Range* out = &gap[l * P];
    int32_t n = 0;
    for (size_t c = 1; c < P && live[l * P + c].any(); ++c) {
      const int64_t cut = live[l * P + c].lo;
      const int32_t leaf = ruler.leaf_of(cut);
      const int64_t first = ruler.start(leaf), end = ruler.start(int64_t(leaf) + 1);
      if (first >= cut) continue;
      if (n && first <= out[n - 1].hi)
        out[n - 1].hi = end;
      else
        out[n++] = {first, end};
    }
    found[l] = n;
  }
  if (units > 1) same_for_heads();
  gaps = size_t(found.empty() ? 0 : *std::max_element(found.begin(), found.end()));
}

// A list that all heads share is cut for all alike, also for heads that have no keys behind the cut.
inline void Lists::same_for_heads() {
  const size_t P = size_t(parts), U = size_t(units);
  for (size_t g = 0; g < size_t(groups); ++g) {
    bool shared = false;
    for (size_t p = 0; p < P; ++p) shared |= pr->part[p].heads == 1 && row[g * P + p] >= 0;
    if (!shared) continue;
    const auto first = found.begin() + std::ptrdiff_t(g * U);
    const size_t most = g * U + size_t(std::max_element(first, first + std::ptrdiff_t(U)) - first);
    for (size_t l = g * U; l < (g + 1) * U; ++l) {
      if (found[l]) continue;
      found[l] = found[most];
      std::copy_n(gap.begin() + std::ptrdiff_t(most * P), P, gap.begin() + std::ptrdiff_t(l * P));
    }
  }
}

inline bool Lists::leave_over() {
  const size_t P = size_t(parts), U = size_t(units);
  left.resize(lists() * P);
  stays.assign(size_t(groups) * P, 0);
  for (size_t l = 0; l < lists(); ++l) {
    const size_t g = l / U, u = l % U;
    for (size_t i = 0; i < P; ++i) {
      Range mine = live[l * P + i];
      for (int32_t n = 0; n < found[l]; ++n) {
        const Range& cut = gap[l * P + size_t(n)];
        if (std::max(mine.lo, cut.lo) >= std::min(mine.hi, cut.hi)) continue;
        if (cut.lo <= mine.lo)
          mine.lo = std::min(cut.hi, mine.hi);
        else
          mine.hi = cut.lo;
      }
      const size_t p = size_t(part[l * P + i]);
      left[(g * P + p) * U + u] = mine;
      const bool counts = u == 0 || pr->part[p].heads > 1;
      stays[g * P + p] = stays[g * P + p] || (counts && mine.any());
    }
  }
  if (U == 1) return true;
  for (size_t g = 0; g < size_t(groups); ++g) {
    for (size_t p = 0; p < P; ++p) {
      if (pr->part[p].heads > 1) continue;
      const Range* mine = &left[(g * P + p) * U];
      for (size_t u = 1; u < U; ++u)
        if (mine[u].lo != mine[0].lo || mine[u].hi != mine[0].hi) return false;
    }
  }
  return true;
}
