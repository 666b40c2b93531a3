// SPDX-License-Identifier: Apache-2.0
// What the planner and alignment both ask of a problem.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

extern "C" {
#include "planner_abi.h"
}
#include "ruler.h"

// Whether a part's queries are what tables over `rows` rows of q are sized for. The builders check this; an index made
// by hand may not, and a wrong row here would be a write outside.
inline bool in_range(const attnrt_problem& problem, const attnrt_part& part, int32_t rows) {
  if (part.qo_indptr[0] != 0 || part.qo_indptr[part.num_rows] != part.num_queries) return false;
  uint32_t bad = 0;
  for (int r = 0; r < part.num_rows; ++r) bad |= part.qo_indptr[r + 1] < part.qo_indptr[r];
  for (int q = 0; q < part.num_queries; ++q) bad |= uint32_t(part.request[q]) >= uint32_t(problem.num_requests);
  if (part.qo_index)
    for (int q = 0; q < part.num_queries; ++q) bad |= uint32_t(part.qo_index[q]) >= uint32_t(rows);
  else
    bad |= part.num_queries > rows;
  return bad == 0;
}

inline bool in_range(const attnrt_problem& problem) {
  return std::all_of(problem.part, problem.part + problem.num_parts,
                     [&](const attnrt_part& part) { return in_range(problem, part, problem.num_rows); });
}

// Head ranges that rows are kept apart by.
inline int32_t units_of(const attnrt_problem& problem) {
  const bool apart = std::any_of(problem.part, problem.part + problem.num_parts,
                                 [](const attnrt_part& part) { return part.heads > 1; });
  return apart ? problem.num_kv_heads : 1;
}

// Numeric class of each request.
inline void classes_of(const attnrt_problem& problem, std::vector<int32_t>& found) {
  const attnrt_traits& traits = *problem.traits;
  found.resize(size_t(problem.num_requests));
  for (int i = 0; i < problem.num_requests; ++i) {
    const int64_t rows = int64_t(problem.qo_lens[i]) * problem.group;
    int k = 0;
    while (k + 1 < traits.num_classes && traits.classes[k].max_rows >= 0 && rows > traits.classes[k].max_rows) ++k;
    found[size_t(i)] = k;
  }
}
