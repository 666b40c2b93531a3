// SPDX-License-Identifier: Apache-2.0
// What the planner works on: runs of keys, query tiles, items, and one way to cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "lpt.h"
#include "problem.h"

constexpr int32_t kDirect = -1;

struct Run {
  int32_t kv_begin, kv_end, leaf_begin, leaf_end, slot, fold;

  // Partial states of each of its rows.
  int32_t states() const { return slot == kDirect ? 0 : fold ? 1 : leaf_end - leaf_begin; }
};

// Nearest integer, halves to even, at most the largest int32: adding 1.5 * 2^52 leaves no room for a fraction, and
// unlike nearbyint it is no call.
inline int32_t rounded(double cost) {
  if (cost >= 2147483647.0) return 2147483647;
  const double shifted = cost + 6755399441055744.0;
  return int32_t(shifted - 6755399441055744.0);
}

// A tile is a run as well: all its keys, with the slot and fold of that.
struct Tile : Run {
  int32_t part, row, q_begin, q_end, head_begin, head_end, klass;
  bool first, whole;
  double cost;  // of one KV head, all keys
  int64_t before,
      list_keys;  // keys of the lists before its own, of all KV heads, and of its own; where there are sections

  Tile() {}  // no zeroing: every field is set

  int64_t queries() const { return q_end - q_begin; }
  int64_t keys() const { return int64_t(kv_end) - kv_begin; }
  int32_t heads() const { return head_end - head_begin; }
  // Partial slots while it is not cut.
  int64_t whole_slots() const { return slot == kDirect ? 0 : (fold ? 1 : leaf_end - leaf_begin) * queries(); }
};

// Whether two tiles are cut alike.
inline bool like(const Tile& a, const Tile& b) {
  return a.kv_begin == b.kv_begin && a.kv_end == b.kv_end && a.fold == b.fold && a.klass == b.klass &&
         a.queries() == b.queries() && a.heads() == b.heads();
}

// Whether a tile in so many runs finishes its rows by itself.
inline bool is_direct(const attnrt_problem& problem, const Tile& t, size_t num_runs) {
  return t.whole && num_runs == 1 && !(problem.pairwise && t.leaf_end - t.leaf_begin > 1);
}

struct Item {
  int32_t tile, run, head;
};

// One way to cut and what came of it.
struct Candidate {
  std::vector<Run> runs;           // where some tile was cut; else the tiles are the runs
  std::vector<int32_t> run_begin;  // [tiles + 1]
  Buffer<Item> items;
  Buffer<double> costs;
  std::vector<Alike> alike;  // all items, by kinds
  Buffer<int32_t> order;
  std::vector<int32_t> worker_indptr;
  size_t count = 0;   // items
  int32_t heads = 1;  // KV heads of an item
  int64_t slots = 0;
  int64_t cuts = 0;
  int64_t states = 0;  // of the row with most
  double time = 0.0, mean = 0.0, longest = 0.0;
};

// Workers that share a kernel: tiles begin .. end are theirs, and partial slots from first_slot on.
struct Crew {
  const attnrt_crew* traits = nullptr;
  int32_t workers = 0;  // that may have items
  // Where some of them begin late (scheduler/costs.py): multiprocessors whose workers do not, 0: all begin together;
  // the time when the others begin, what an early worker has done by then, and what each worker's load begins with.
  int32_t early = 0;
  double late_at = 0.0, ahead = 0.0;
  std::vector<double> begins;
  size_t begin = 0, end = 0;
  int64_t first_slot = 0, last_slot = 0;  // one past the last that they may use
  int64_t base_slots = 0;                 // of tiles that are not cut
  Candidate pool[2];
  Candidate* best = nullptr;
  Candidate* next = nullptr;  // the other one

  // Time at best of items that cost so much in all.
  double mean(double cost) const {
    if (!early) return cost / workers;
    return late_at + std::max(0.0, cost - early * traits->share * ahead) / workers;
  }
};

// f(run) for the runs of a crew's tile under a candidate.
template <class F>
void each_run(const std::vector<Tile>& tiles, const Crew& crew, const Candidate& c, size_t tile, F&& f) {
  if (c.cuts == 0) return f(static_cast<const Run&>(tiles[tile]));
  const size_t at = tile - crew.begin;
  for (int32_t r = c.run_begin[at]; r < c.run_begin[at + 1]; ++r) f(c.runs[size_t(r)]);
}
