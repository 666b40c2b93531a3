// SPDX-License-Identifier: Apache-2.0
#include "first.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// Columns of items and of merge rows.
enum { kPart, kRow, kQBegin, kQEnd, kHeadBegin, kHeadEnd, kKvBegin, kKvEnd, kLeafBegin, kLeafEnd, kSlot, kClass };
enum { kItemFields = 14, kMergeFields = 5, kRulerFields = 9, kSteps = 4 };
enum { kHasList = 1, kHasIds = 2, kHasRow = 4, kHasMerge = 8, kHasItem = 16, kHasRows = 32, kHasRequest = 64 };
const int kRun = 16, kRuns = 4, kMostRows = 64;

// FirstItem of kernels/params.cuh. Nothing of it is cleared ahead: half of the time would go there.
struct FirstItem {
  int32_t item[kItemFields];
  int32_t next, end;
  int32_t list, entries, pos, offset;
  int32_t request, qo_row, qo_pos;
  int32_t block, flags;
  int32_t counter, merge_begin, merge_end;
  int32_t ids[kRuns];
};
static_assert(sizeof(FirstItem) == 128, "pack.FIRST_ITEM_BYTES");

// PartDesc of kernels/params.cuh: the addresses that are read here by place.
struct PartDesc {
  enum { kQoIndex, kIndices = 4, kBlockPos = 7 };
  uint64_t address[14];
  uint32_t block[3];
  int32_t numbers[3];
};
static_assert(sizeof(PartDesc) == 136, "pack.PART");

// FirstPass of kernels/hopper_layout.cuh: PassRecord, PassKeys and the worker's items.
struct FirstPass {
  int32_t item[kItemFields];
  int32_t head, first, begin, stop, runs, shift, live_begin, live_end, done;
  int32_t there;
  uint64_t indices, block_pos;
  int64_t base;
  int32_t pos, offset, entries, none;
  int32_t low, high, live_low, live_high, tile_shift;
  uint32_t block[3];
  uint64_t qo_index;
  int32_t items_begin, items_end;
  int32_t pad[18];
};
static_assert(sizeof(FirstPass) == 256 && offsetof(FirstPass, indices) == 96 && offsetof(FirstPass, qo_index) == 168,
              "PassRecord, PassKeys");

// Offset of a leaf's first key.
int leaf_start(const int32_t* ruler, int leaf) {
  int offset = 0;
  for (int i = 0; i < kSteps; ++i) {
    const int n = std::min<int>(leaf, ruler[i]);
    offset += n * ruler[kSteps + i];
    leaf -= n;
  }
  return offset + leaf * ruler[2 * kSteps];
}

// Place of a merge row among all: by row, then by its first head.
int64_t place(int row, int head) { return (static_cast<int64_t>(row) << 32) + head; }

// The merge row of (row, head), or -1. No step of the search is a jump: what it finds is a coin's toss each time, and a
// jump that is guessed wrong costs as much as three steps.
int merge_of(const int32_t* rows, int count, int row, int head) {
  if (!count) return -1;
  const int32_t* low = rows;  // the last one at or before it is one of `count` from here
  for (const int64_t wanted = place(row, head); count > 1;) {
    const int half = count / 2;
    const int32_t* middle = low + half * kMergeFields;
    low = place(middle[0], middle[1]) <= wanted ? middle : low;
    count -= half;
  }
  return low[0] == row && low[1] <= head && head < low[2] ? static_cast<int>(low - rows) / kMergeFields : -1;
}

// Blocks of the runs from key `from` of a list on, -1 behind its end: a block has a whole number of runs.
void first_ids(const attnrt_first_part_t& part, int from, FirstItem& to) {
  int block = part.block == kRun ? from / kRun : from / part.block;
  int left = (block + 1) * part.block - from;
  for (int i = 0; i < kRuns; ++i) {
    to.ids[i] = block < to.entries ? part.indices[to.list + block] : -1;
    left -= kRun;
    block += left == 0;
    left = left == 0 ? part.block : left;
  }
}

// The list that the item's heads share, and the blocks of its first runs; returns flags.
int first_list(const attnrt_first_part_t& part, const int32_t* item, const int32_t* rulers, int kv_tile,
               FirstItem& to) {
  const int head = item[kHeadBegin];
  to.block = part.block;
  std::fill(to.ids, to.ids + kRuns, 0);
  if (!part.listed || (part.heads > 1 && item[kHeadEnd] - head > 1)) {
    to.list = to.entries = to.pos = to.offset = 0;
    return 0;
  }
  const int list = item[kRow] * part.heads + (part.heads > 1 ? head : 0);
  to.list = part.indptr[list];
  to.entries = part.indptr[list + 1] - to.list;
  to.pos = part.kv_pos ? part.kv_pos[item[kRow]] : 0;
  to.offset = part.kv_offset[item[kRow]];
  const int start = leaf_start(rulers + item[kClass] * kRulerFields, item[kLeafBegin]);
  const int tile = item[kKvBegin] <= start ? start : start + (item[kKvBegin] - start) / kv_tile * kv_tile;
  const int from = tile - to.offset;  // in the list
  if (!part.indices || part.positions || part.block % kRun || from < 0 || from % kRun) return kHasList;
  first_ids(part, from, to);
  return kHasList | kHasIds;
}

// Whether an item's queries, which are several, have rows one after the other, and are one request's; returns flags.
int first_rows(const attnrt_first_part_t& part, int query, int count, const FirstItem& to) {
  bool rows = true, request = true;
  for (int i = 1; i < count; ++i) {
    rows &= !part.qo_index || part.qo_index[query + i] == to.qo_row + i;
    request &= part.request[query + i] == to.request && part.qo_pos[query + i] == to.qo_pos + i;
  }
  return (rows ? kHasRows : 0) | (request ? kHasRequest : 0);
}

// The first query of an item and, where it is the only one, where its states are merged (the merge row, or null);
// returns flags.
int first_row(const attnrt_first_part_t& part, const int32_t* item, const int32_t* merge_rows, int num_merges,
              FirstItem& to, const int32_t*& found) {
  const int query = item[kQBegin], head = item[kHeadBegin];
  to.counter = to.merge_begin = to.merge_end = 0;
  found = nullptr;
  const int count = item[kQEnd] - query;
  if (count < 1) {
    to.request = to.qo_row = to.qo_pos = 0;
    return 0;
  }
  to.request = part.request[query];
  to.qo_row = part.qo_index ? part.qo_index[query] : query;
  to.qo_pos = part.qo_pos[query];
  if (count > 1) return first_rows(part, query, std::min<int>(count, kMostRows), to);
  const int merge = item[kSlot] < 0 ? -1 : merge_of(merge_rows, num_merges, to.qo_row, head);
  const int one = kHasRow | kHasRows | kHasRequest;
  if (merge < 0) return one;
  const int32_t* at = merge_rows + merge * kMergeFields;
  if (item[kHeadEnd] > at[2]) return one;  // where a part has lists per head, each head has a merge row of its own
  to.counter = merge * (at[2] - at[1]) + head - at[1];
  to.merge_begin = at[3];
  to.merge_end = at[4];
  found = at;
  return one | kHasMerge;
}

// Workers whose first items are the same queries and keys under other heads share all but these: what lists and rows
// say is looked up once for them. The last item of each kind, by a few bits of row and leaf.
std::uint64_t pair(const int32_t* columns) {
  std::uint64_t both;
  std::memcpy(&both, columns, sizeof both);
  return both;
}

struct Known {
  const FirstItem* like;
  const int32_t* merge;  // its merge row, or null

  // Whether another item's line differs from this one's in heads alone, whose lists are one.
  bool serves(const int32_t* item) const {
    const int32_t* mine = like->item;
    // By pairs of columns: all but the heads, the fold and the cost.
    const auto differ = [mine, item](int i) { return pair(mine + i) ^ pair(item + i); };
    if (differ(kPart) | differ(kQBegin) | differ(kKvBegin) | differ(kLeafBegin) | differ(kSlot)) return false;
    const int head = item[kHeadBegin];
    return merge ? merge[1] <= head && item[kHeadEnd] <= merge[2] : item[kSlot] < 0;
  }
};
const int kKnown = 128;

}  // namespace

extern "C" int attnrt_cuda_first_items(const int32_t* items, const int32_t* worker_indptr, int workers,
                                       const int32_t* merge_rows, int num_merges, const int32_t* rulers, int kv_tile,
                                       const attnrt_first_part_t* parts, int32_t* first) {
  int busy = workers;
  while (busy > 0 && worker_indptr[busy - 1] == worker_indptr[busy]) --busy;
  FirstItem* to = reinterpret_cast<FirstItem*>(first);
  Known kinds[kKnown] = {};
  for (int w = 0; w < busy; ++w, ++to) {
    const int begin = worker_indptr[w], end = worker_indptr[w + 1];
    if (begin == end) {  // a worker between others that has none
      *to = FirstItem{};
      to->next = to->end = begin;
      continue;
    }
    const int32_t* item = items + begin * kItemFields;
    Known& known = kinds[(item[kRow] * 8 + item[kLeafBegin]) & (kKnown - 1)];
    if (known.like && known.serves(item)) {
      std::memcpy(&to->list, &known.like->list, sizeof *to - offsetof(FirstItem, list));
      if (known.merge) to->counter += item[kHeadBegin] - known.like->item[kHeadBegin];
    } else {
      const attnrt_first_part_t& part = parts[item[kPart]];
      const int flags = first_list(part, item, rulers, kv_tile, *to);
      to->flags = kHasItem | flags | first_row(part, item, merge_rows, num_merges, *to, known.merge);
      known.like = part.heads == 1 ? to : nullptr;
    }
    std::memcpy(to->item, item, sizeof to->item);
    to->next = begin + 1;
    to->end = end;
  }
  return busy;
}

namespace {

// What HopperPasses::write makes of an item's first list: HopperKeys::narrow, bounds_of, leaf_range.
void first_pass(const attnrt_first_team_t& team, const int32_t* item, FirstPass& to) {
  const attnrt_first_part_t& part = team.parts[item[kPart]];
  PartDesc desc;
  std::memcpy(&desc, static_cast<const char*>(team.described) + item[kPart] * sizeof desc, sizeof desc);
  const int row = item[kRow], head = item[kHeadBegin], list = row * part.heads + (part.heads > 1 ? head : 0);
  const int32_t entry = part.indptr ? part.indptr[list] : 0;
  std::memcpy(to.item, item, sizeof to.item);
  to.there = !desc.address[PartDesc::kBlockPos];
  to.head = head;
  to.entries = part.indptr ? part.indptr[list + 1] - entry : 0;
  if (desc.address[PartDesc::kIndices]) to.indices = desc.address[PartDesc::kIndices] + 4 * uint64_t(entry);
  to.base = part.kv_base ? part.kv_base[row] : 0;
  to.pos = part.kv_pos ? part.kv_pos[row] : 0;
  to.offset = part.kv_offset[row];
  to.live_low = to.offset + part.kv_begin[list];
  to.live_high = to.offset + part.kv_end[list];
  to.low = std::max(item[kKvBegin], to.live_low);
  to.high = std::min(item[kKvEnd], to.live_high);
  if (to.indices) to.high = int32_t(std::min<int64_t>(to.high, to.offset + int64_t(to.entries) * part.block));
  to.shift = to.pos - to.offset;
  to.runs = team.solid;
  to.tile_shift = team.solid ? to.shift : -0x7fffffff;
  to.live_begin = to.low;
  to.live_end = std::max(to.high, to.low);
  const int32_t* ruler = team.rulers + item[kClass] * kRulerFields;
  const int start = leaf_start(ruler, item[kLeafBegin]), next = leaf_start(ruler, item[kLeafBegin] + 1);
  const int from = item[kKvBegin];
  to.begin = from <= start ? start : start + (from - start) / team.kv_tile * team.kv_tile;
  to.stop = std::max(std::min(next, item[kKvEnd]), to.begin + 1);
  std::memcpy(to.block, desc.block, sizeof to.block);
  to.qo_index = desc.address[PartDesc::kQoIndex];
}

}  // namespace

extern "C" int attnrt_cuda_first_passes(const attnrt_first_team_t* team, int32_t* first) {
  FirstPass* to = reinterpret_cast<FirstPass*>(first);
  for (int w = 0; w < team->workers; ++w, ++to) {
    *to = FirstPass{};
    to->items_begin = team->worker_indptr[w], to->items_end = team->worker_indptr[w + 1];
    if (to->items_begin < to->items_end) first_pass(*team, team->items + to->items_begin * kItemFields, *to);
  }
  return team->workers;
}
