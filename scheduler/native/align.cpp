// SPDX-License-Identifier: Apache-2.0
// Alignment of a composite: the same parts and limits, byte for byte, as scheduler/align.py, which says why. Tables in
// lists.h, what stays in narrow.h, what moves in bridge.h; here they become one buffer.

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "bridge.h"
#include "lists.h"
#include "narrow.h"
#include "problem.h"

namespace {

constexpr int kOutside = 2, kAsTheyAre = 3, kReadable = 4;

class Aligner {
 public:
  int align(const attnrt_problem& problem, attnrt_aligned& aligned);
  int take(attnrt_problem& problem, int32_t* out);

 private:
  void lay_out();
  void move(attnrt_aligned_part& made, int32_t ints, int32_t longs) const;
  attnrt_part view(const attnrt_problem& problem, const attnrt_aligned_part& made, const int32_t* out) const;

  Lists lists;
  Narrow narrow;
  Bridges bridges;
  Arrays arrays;
  std::vector<attnrt_aligned_part> made;
  std::vector<Bridge*> bridge_of;  // [made] null: what is left of a part
  std::vector<attnrt_part> views;
  int64_t length = 0;
};

int Aligner::align(const attnrt_problem& problem, attnrt_aligned& aligned) {
  if (!in_range(problem)) return kOutside;
  lists.read(problem);
  if (lists.gaps == 0 && !lists.mixed()) return kAsTheyAre;
  if (!lists.leave_over()) return kReadable;
  arrays.ints.clear();
  arrays.longs.clear();
  made.clear();
  bridge_of.clear();
  bridges.clear();
  for (int p = 0; p < problem.num_parts; ++p) {
    made.push_back(narrow.part(lists, p, arrays));
    bridge_of.push_back(nullptr);
  }
  for (size_t n = 0; n < lists.gaps; ++n)
    if (!bridges.plan(lists, n, arrays)) return kReadable;
  for (size_t i = 0; i < bridges.count; ++i) {
    made.push_back(bridges.all[i].made);
    bridge_of.push_back(&bridges.all[i]);
  }
  size_t kept = 0;
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i].queries == 0) continue;
    made[kept] = made[i];
    bridge_of[kept++] = bridge_of[i];
  }
  kept = kept ? kept : 1;  // a part without queries, so that there is one
  made.resize(kept);
  bridge_of.resize(kept);
  lay_out();
  if (length > std::numeric_limits<int32_t>::max()) return kReadable;
  aligned.parts = int32_t(made.size());
  aligned.length = length;
  return 0;
}

// The buffer: parts, 64-bit arrays, 32-bit arrays, then the long arrays of bridges.
void Aligner::lay_out() {
  length = int64_t(made.size() * sizeof(attnrt_aligned_part) / sizeof(int32_t));
  const int64_t longs = length;
  length += 2 * int64_t(arrays.longs.size());
  const int64_t ints = length;
  length += int64_t(arrays.ints.size());
  for (size_t i = 0; i < made.size(); ++i) {
    move(made[i], int32_t(ints), int32_t(longs));
    const Bridge* bridge = bridge_of[i];
    if (!bridge) continue;
    made[i].indices = int32_t(length);
    length += bridge->entries;
    if (!bridge->affine) {
      made[i].block_pos = int32_t(length);
      length += bridge->entries;
    }
    if (bridge->mask_bits) {
      made[i].mask = int32_t(length);
      length += (bridge->mask_bits + 31) / 32;
    }
    if (length > std::numeric_limits<int32_t>::max()) return;
  }
}

void Aligner::move(attnrt_aligned_part& part, int32_t ints, int32_t longs) const {
  for (int32_t* place : {&part.qo_indptr, &part.qo_index, &part.request, &part.qo_pos, &part.kv_begin, &part.kv_end,
                         &part.indptr, &part.kv_pos, &part.kv_offset, &part.mask_begin})
    if (*place >= 0) *place += ints;
  for (int32_t* place : {&part.mask_offset, &part.limit_lo, &part.limit_hi})
    if (*place >= 0) *place = longs + 2 * *place;
}

int Aligner::take(attnrt_problem& problem, int32_t* out) {
  int32_t* to = out + made.size() * sizeof(attnrt_aligned_part) / sizeof(int32_t);
  std::memcpy(to, arrays.longs.data(), arrays.longs.size() * sizeof(int64_t));
  to += 2 * arrays.longs.size();
  std::memcpy(to, arrays.ints.data(), arrays.ints.size() * sizeof(int32_t));
  views.clear();
  for (size_t i = 0; i < made.size(); ++i) {
    if (Bridge* bridge = bridge_of[i]) {
      int32_t* pos = bridge->affine ? nullptr : out + made[i].block_pos;
      uint8_t* mask = bridge->mask_bits ? reinterpret_cast<uint8_t*>(out + made[i].mask) : nullptr;
      if (!bridges.write(lists, *bridge, out + made[i].indices, pos, mask)) return kReadable;
      made[i].max_block = bridge->made.max_block;
    }
    views.push_back(view(problem, made[i], out));
  }
  std::memcpy(out, made.data(), made.size() * sizeof(attnrt_aligned_part));
  problem.part = views.data();
  problem.num_parts = int32_t(views.size());
  return 0;
}

// The part as the planner reads it.
attnrt_part Aligner::view(const attnrt_problem& problem, const attnrt_aligned_part& from, const int32_t* out) const {
  attnrt_part part = {};
  part.num_rows = from.rows, part.heads = from.heads, part.num_queries = from.queries;
  part.qo_indptr = out + from.qo_indptr, part.qo_index = out + from.qo_index;
  part.request = out + from.request, part.qo_pos = out + from.qo_pos;
  part.kv_begin = out + from.kv_begin, part.kv_end = out + from.kv_end;
  if (from.source >= 0) {
    part.kv_pos = problem.part[from.source].kv_pos;
    part.kv_offset = problem.part[from.source].kv_offset;
  } else {
    part.kv_pos = from.kv_pos < 0 ? nullptr : out + from.kv_pos;
    part.kv_offset = out + from.kv_offset;
  }
  if (from.limit_lo >= 0) {
    part.limit_lo = reinterpret_cast<const int64_t*>(out + from.limit_lo);
    part.limit_hi = reinterpret_cast<const int64_t*>(out + from.limit_hi);
  }
  return part;
}

// Behind a call, as in planner.cpp.
[[gnu::noinline]] Aligner& aligner() {
  thread_local Aligner mine;
  return mine;
}

}  // namespace

extern "C" int attnrt_align(const attnrt_problem* problem, attnrt_aligned* aligned) {
  return aligner().align(*problem, *aligned);
}

extern "C" int attnrt_align_take(attnrt_problem* problem, int32_t* out) { return aligner().take(*problem, out); }
