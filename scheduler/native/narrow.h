// SPDX-License-Identifier: Apache-2.0
// What is left of a part once straddled leaves have gone to bridges: scheduler/align.py's _narrow, the same arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "lists.h"

// Arrays of aligned parts but the long ones of bridges, one behind the other; places in them are counted from 0 here
// and moved once all are known.
struct Arrays {
  std::vector<int32_t> ints;
  std::vector<int64_t> longs;

  int32_t here() const { return int32_t(ints.size()); }
  int32_t here_long() const { return int32_t(longs.size()); }
};

class Narrow {
 public:
  attnrt_aligned_part part(const Lists& lists, int p, Arrays& out);

 private:
  std::vector<int32_t> keep_, group_, rows_;
  std::vector<Range> ends_;
};

inline attnrt_aligned_part Narrow::part(const Lists& lists, int p, Arrays& out) {
  const attnrt_part& source = lists.pr->part[p];
  const size_t P = size_t(lists.parts), U = size_t(lists.units), H = size_t(source.heads);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  const auto left = [&](int32_t g) { return &lists.left[(size_t(g) * P + size_t(p)) * U]; };
  const auto before = [&](int32_t a, int32_t b) {  // class, then ends of the last head first
    if (a == b) return false;
    if (lists.klass[size_t(a)] != lists.klass[size_t(b)]) return lists.klass[size_t(a)] < lists.klass[size_t(b)];
    for (size_t h = H; h-- > 0;)
      if (left(a)[h].lo != left(b)[h].lo) return left(a)[h].lo < left(b)[h].lo;
    for (size_t h = H; h-- > 0;)
      if (left(a)[h].hi != left(b)[h].hi) return left(a)[h].hi < left(b)[h].hi;
    return false;
  };
  const auto row_of = [&](int32_t q) { return source.qo_index ? source.qo_index[q] : q; };
  const auto group_at = [&](int32_t q) { return lists.group_of[size_t(row_of(q))]; };
  const size_t most = size_t(source.num_queries);
  keep_.resize(most);  // the first n count, as in the two beside it
  group_.resize(most);
  rows_.resize(most);
  size_t n = 0;
  ends_.assign(size_t(source.num_rows) * H, {kNone, -kNone});
  attnrt_aligned_part made = {};
  made.source = p, made.rows = source.num_rows, made.heads = source.heads;
  made.qo_indptr = out.here();
  out.ints.resize(out.ints.size() + size_t(source.num_rows) + 1);
  int32_t* indptr = out.ints.data() + made.qo_indptr;
  indptr[0] = 0;
  for (int32_t r = 0; r < source.num_rows; ++r) {
    const size_t start = n;
    bool sorted = true;
    int32_t last = -1;
    for (int32_t q = source.qo_indptr[r]; q < source.qo_indptr[r + 1]; ++q) {
      const int32_t g = group_at(q);
      if (!lists.stays[size_t(g) * P + size_t(p)] || lists.place[size_t(row_of(q)) * P + size_t(p)] != q) continue;
      keep_[n] = q, group_[n] = g, rows_[n++] = r;
      if (g == last) continue;
      sorted = sorted && !(last >= 0 && before(g, last));
      last = g;
      for (size_t h = 0; h < H; ++h) {
        if (!left(g)[h].any()) continue;
        Range& ends = ends_[size_t(r) * H + h];
        ends = {std::min(ends.lo, left(g)[h].lo), std::max(ends.hi, left(g)[h].hi)};
      }
    }
    if (!sorted) {
      std::stable_sort(keep_.begin() + std::ptrdiff_t(start), keep_.begin() + std::ptrdiff_t(n),
                       [&](int32_t a, int32_t b) { return before(group_at(a), group_at(b)); });
      for (size_t i = start; i < n; ++i) group_[i] = group_at(keep_[i]);
    }
    indptr[r + 1] = int32_t(n);
  }
  made.queries = int32_t(n);
  bool same = true;
  for (size_t i = 0; i < n; ++i) {
    if (i && group_[i] == group_[i - 1] && rows_[i] == rows_[i - 1]) continue;
    const Range *mine = left(group_[i]), *ends = &ends_[size_t(rows_[i]) * H];
    for (size_t h = 0; h < H; ++h) same = same && mine[h].lo == ends[h].lo && mine[h].hi == ends[h].hi;
  }
  made.qo_index = out.here();
  made.request = made.qo_index + int32_t(n);
  made.qo_pos = made.request + int32_t(n);
  made.kv_begin = made.qo_pos + int32_t(n);
  made.kv_end = made.kv_begin + int32_t(ends_.size());
  out.ints.resize(out.ints.size() + 3 * n + 2 * ends_.size());
  int32_t* to = out.ints.data() + made.qo_index;
  for (size_t i = 0; i < n; ++i) {
    const int32_t q = keep_[i];
    to[i] = row_of(q), to[n + i] = source.request[q], to[2 * n + i] = source.qo_pos[q];
  }
  for (size_t i = 0; i < ends_.size(); ++i) {
    const int64_t offset = source.kv_offset[i / H];
    const bool any = ends_[i].any();
    const int32_t begin = any ? int32_t(ends_[i].lo - offset) : source.kv_begin[i];
    to[3 * n + i] = begin;
    to[3 * n + ends_.size() + i] = any ? int32_t(ends_[i].hi - offset) : begin;
  }
  made.mask_offset = made.limit_lo = made.limit_hi = -1;
  if (source.mask_offset) {
    made.mask_offset = out.here_long();
    for (size_t i = 0; i < n; ++i) out.longs.push_back(source.mask_offset[keep_[i]]);
  }
  if (!same) {
    made.limit_lo = out.here_long();
    for (size_t i = 0; i < n * H; ++i) out.longs.push_back(left(group_[i / H])[i % H].lo);
    made.limit_hi = out.here_long();
    for (size_t i = 0; i < n * H; ++i) out.longs.push_back(left(group_[i / H])[i % H].hi);
  }
  made.bound_mask = made.indptr = made.indices = made.kv_pos = made.block_pos = made.kv_offset = -1;
  made.mask = made.mask_begin = -1;
  return made;
}
