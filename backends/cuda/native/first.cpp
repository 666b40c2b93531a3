// SPDX-License-Identifier: Apache-2.0
#include "first.h"

#include <algorithm>
#include <cstring>

namespace {

// Columns of items and of merge rows.
enum { kPart, kRow, kQBegin, kQEnd, kHeadBegin, kHeadEnd, kKvBegin, kKvEnd, kLeafBegin, kLeafEnd, kSlot, kClass };
enum { kItemFields = 14, kMergeFields = 5, kRulerFields = 9, kSteps = 4 };
// Numbers of a FirstItem behind its item.
enum { kNext = kItemFields, kEnd, kList, kEntries, kPos, kOffset, kRequest, kQoRow, kQoPos, kBlock, kFlags };
enum { kCounter = kFlags + 1, kMergeBegin, kMergeEnd, kIds, kNumbers = 32 };
enum { kHasList = 1, kHasIds = 2, kHasRow = 4, kHasMerge = 8, kHasItem = 16 };
const int kRun = 16, kRuns = kNumbers - kIds;

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

// The merge row of (row, head), or -1.
int merge_of(const int32_t* rows, int count, int row, int head) {
  int low = 0, high = count;  // the last one at or before it lies in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const int32_t* at = rows + middle * kMergeFields;
    (at[0] < row || (at[0] == row && at[1] <= head) ? low : high) = middle;
  }
  if (!count) return -1;
  const int32_t* at = rows + low * kMergeFields;
  return at[0] == row && at[1] <= head && head < at[2] ? low : -1;
}

}  // namespace

extern "C" int attnrt_cuda_first_items(const int32_t* items, const int32_t* worker_indptr, int workers,
                                       const int32_t* merge_rows, int num_merges, const int32_t* rulers, int kv_tile,
                                       const attnrt_first_part_t* parts, int32_t* first) {
  int busy = workers;
  while (busy > 0 && worker_indptr[busy - 1] == worker_indptr[busy]) --busy;
  for (int w = 0; w < busy; ++w) {
    int32_t* to = first + w * kNumbers;
    const int begin = worker_indptr[w], end = worker_indptr[w + 1];
    std::memset(to, 0, kNumbers * sizeof *to);
    to[kNext] = begin + 1;
    to[kEnd] = end;
    if (begin == end) {  // a worker between others that has none
      to[kNext] = begin;
      continue;
    }
    const int32_t* item = items + begin * kItemFields;
    std::memcpy(to, item, kItemFields * sizeof *to);
    const attnrt_first_part_t& part = parts[item[kPart]];
    int flags = kHasItem;
    const int head = item[kHeadBegin], query = item[kQBegin];
    const int list = item[kRow] * part.heads + (part.heads > 1 ? head : 0);
    const int offset = part.kv_offset[item[kRow]];
    to[kBlock] = part.block;
    if (part.listed && (part.heads == 1 || item[kHeadEnd] - head == 1)) {
      flags |= kHasList;
      to[kList] = part.indptr[list];
      to[kEntries] = part.indptr[list + 1] - part.indptr[list];
      to[kPos] = part.kv_pos ? part.kv_pos[item[kRow]] : 0;
      to[kOffset] = offset;
      const int start = leaf_start(rulers + item[kClass] * kRulerFields, item[kLeafBegin]);
      const int tile = item[kKvBegin] <= start ? start : start + (item[kKvBegin] - start) / kv_tile * kv_tile;
      const int from = tile - offset;  // in the list
      if (part.indices && !part.positions && part.block % kRun == 0 && from >= 0 && from % kRun == 0) {
        flags |= kHasIds;
        for (int i = 0; i < kRuns; ++i) {
          const int block = (from + kRun * i) / part.block;
          to[kIds + i] = block < to[kEntries] ? part.indices[to[kList] + block] : -1;
        }
      }
    }
    if (item[kQEnd] - query == 1) {
      flags |= kHasRow;
      const int row = part.qo_index ? part.qo_index[query] : query;
      to[kRequest] = part.request[query];
      to[kQoRow] = row;
      to[kQoPos] = part.qo_pos[query];
      const int merge = item[kSlot] < 0 ? -1 : merge_of(merge_rows, num_merges, row, head);
      if (merge >= 0) {
        const int32_t* at = merge_rows + merge * kMergeFields;
        flags |= kHasMerge;
        to[kCounter] = merge * (at[2] - at[1]) + head - at[1];
        to[kMergeBegin] = at[3];
        to[kMergeEnd] = at[4];
      }
    }
    to[kFlags] = flags;
  }
  return busy;
}
