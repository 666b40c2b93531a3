// SPDX-License-Identifier: Apache-2.0
// Rows that no single item finishes, with the slots of their states in the order of leaves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "crews.h"
#include "query_tiles.h"
#include "tile.h"

constexpr int kMergeFields = 5;

struct State {
  int32_t leaf, slot;
};

class Merges {
 public:
  // slots: partial slots that the crews' best candidates use.
  void list(const attnrt_problem& problem, const QueryTiles& found, const Crews& crews, int64_t slots);

  int32_t* take(int32_t* out) const {
    out = put(out, merge_rows.get(), num_merges * kMergeFields);
    out = put(out, merge_slots.get(), num_entries);
    return put(out, merge_leaves.get(), num_entries);
  }

  size_t num_merges = 0, num_entries = 0;

 private:
  void list_row(int64_t row, int32_t unit, int32_t units, int32_t width);
  static int32_t* put(int32_t* out, const int32_t* from, size_t n) {
    if (n) std::memcpy(out, from, n * sizeof(int32_t));
    return out + n;
  }

  std::vector<uint8_t> done;
  std::vector<int64_t> state_end;
  Buffer<State> states;
  Buffer<int32_t> merge_rows, merge_slots, merge_leaves;
};

inline void Merges::list(const attnrt_problem& problem, const QueryTiles& found, const Crews& crews, int64_t slots) {
  const std::vector<Tile>& tiles = found.tiles;
  const int32_t units = found.units;
  const auto each_tile = [&](auto&& f) {
    for (const Crew& crew : crews)
      for (size_t i = crew.begin; i < crew.end; ++i) f(crew, i);
  };
  num_merges = num_entries = 0;
  const size_t cells = size_t(problem.num_rows) * size_t(units);
  merge_rows.need(cells * kMergeFields);
  if (slots == 0 && problem.num_parts == 1 && units == 1 && !problem.part[0].qo_index) {
    for (int64_t row = problem.part[0].qo_indptr[problem.part[0].num_rows]; row < problem.num_rows; ++row) {
      const int32_t entry[kMergeFields] = {int32_t(row), 0, problem.num_kv_heads, 0, 0};
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
    each_run(tiles, crew, *crew.best, i, [&](const Run& run) {
      direct = direct || run.slot == kDirect;
      states_here += run.states();
    });
    uint8_t* is_done = done.data();
    int64_t* next_end = state_end.data() + 1;
    each_cell(problem, units, t, [=](int64_t cell, int) {
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
    each_run(tiles, crew, *crew.best, i, [&](const Run& run) {
      if (run.slot == kDirect) return;
      const int32_t n = run.states(), queries = int32_t(t.queries());
      const int32_t leaf = run.leaf_begin, slot = run.slot;
      int64_t* ends = state_end.data();
      each_cell(problem, units, t, [=](int64_t cell, int q) {
        State* to = all + ends[cell];
        for (int32_t k = 0; k < n; ++k) to[k] = {leaf + k, slot + k * queries + q};
        ends[cell] += n;
      });
    });
  });
  // state_end[cell] has moved to the end of the cell's states, which is where the next cell's begin.
  for (int64_t row = 0; row < problem.num_rows; ++row)
    for (int32_t unit = 0; unit < units; ++unit)
      if (!done[size_t(row * units + unit)]) list_row(row, unit, units, problem.num_kv_heads / units);
}

inline void Merges::list_row(int64_t row, int32_t unit, int32_t units, int32_t width) {
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
