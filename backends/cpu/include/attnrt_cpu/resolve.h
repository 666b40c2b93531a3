// SPDX-License-Identifier: Apache-2.0
// From an index to addresses: which keys of a tile are live, where their K and V lie, and at which positions.

// Columns of a work item and of a merge (scheduler.base.WORK_FIELDS, MERGE_FIELDS).
struct WorkItem {
  int32_t part, row, q_begin, q_end, head_begin, head_end, kv_begin, kv_end, leaf_begin, leaf_end, slot, klass, fold,
      cost;
};
static_assert(sizeof(WorkItem) == 14 * 4, "one column per field");
struct MergeRow {
  int32_t qo_row, head_begin, head_end, slot_begin, slot_end;
};
static_assert(sizeof(MergeRow) == 5 * 4, "one column per field");

// Keys of a request: the bound number where there is one, kept within what the plan was made for.
ATTNRT_INLINE int kv_len_of(const attnrt_plan& plan, int request) {
  const int most = plan.kv_lens[request];
  if (!plan.bound_kv_lens) return most;
  const int bound = plan.bound_kv_lens[request];
  return bound < 0 ? 0 : bound < most ? bound : most;
}

// First offset of a leaf. Past the steps it may pass 2^31: 64-bit.
static int64_t leaf_start(const attnrt_class& klass, int64_t leaf) {
  int64_t offset = 0;
  for (int i = 0; i < klass.num_steps; ++i) {
    const int64_t count = klass.steps[2 * i], size = klass.steps[2 * i + 1];
    if (leaf < count) return offset + leaf * size;
    offset += count * size;
    leaf -= count;
  }
  return offset + leaf * klass.tail;
}

// Fill `tile` for list (row, head) of a part. `begin`, `end`: offsets outside which the item does not look.
static void resolve(const attnrt_call& call, const attnrt_part& part, int row, int head, int64_t begin, int64_t end,
                    int kv_tile, Tile& tile) {
  const int64_t list = static_cast<int64_t>(row) * part.heads + (part.heads == 1 ? 0 : head);
  const int64_t shift = part.kv_offset[row], C = part.block_size;
  const int64_t lo = begin > shift + part.kv_begin[list] ? begin : shift + part.kv_begin[list];
  const int64_t hi = end < shift + part.kv_end[list] ? end : shift + part.kv_end[list];
  const int64_t last = tile.first + kv_tile;
  tile.begin = static_cast<int>(lo > tile.first ? (lo < last ? lo - tile.first : kv_tile) : 0);
  tile.end = static_cast<int>(hi < last ? (hi > tile.first ? hi - tile.first : 0) : kv_tile);
  tile.holes = false;
  tile.linear = part.block_pos == nullptr;
  for (int j = 0; j < kv_tile; ++j) tile.live[j] = 0;
  if (tile.begin >= tile.end) {
    tile.begin = tile.end = 0;
    return;
  }
  const int64_t num_slots = call.k.num_pages * call.k.page_size;
  const int32_t* blocks = part.indices ? part.indices + part.indptr[list] : nullptr;
  const int32_t* positions = part.block_pos ? part.block_pos + part.indptr[list] : nullptr;
  const int64_t base_pos = positions ? 0 : static_cast<int64_t>(part.kv_pos[row]) + tile.first - shift;
  if (!positions)
    for (int j = 0; j < kv_tile; ++j) tile.pos[j] = static_cast<int32_t>(base_pos + j);
  int64_t in_list = tile.first + tile.begin - shift;
  int64_t block = in_list / C, token = in_list - block * C;
  int first_live = kv_tile, last_live = -1;
  for (int j = tile.begin; j < tile.end;) {
    const int64_t run = C - token < tile.end - j ? C - token : tile.end - j;  // keys that share a block
    const int64_t id = blocks ? blocks[block] : 0;
    const int64_t slot = blocks ? id * C + token : part.kv_base[row] + in_list;
    const int64_t count = blocks ? run : tile.end - j;
    if (id < 0 || slot < 0 || slot + count > num_slots) {  // a hole, or an id that the pool does not have
      tile.holes = true;
      for (int64_t i = 0; i < count; ++i) tile.k[j + i] = tile.v[j + i] = -1;
    } else {
      if (first_live == kv_tile) first_live = j;
      last_live = j + static_cast<int>(count) - 1;
      int64_t page = slot / call.k.page_size, in_page = slot - page * call.k.page_size;
      for (int64_t i = 0; i < count; ++i) {
        tile.live[j + i] = -1;
        tile.slot[j + i] = slot + i;
        tile.k[j + i] = page * call.k.stride_page + in_page * call.k.stride_token;
        tile.v[j + i] = page * call.v.stride_page + in_page * call.v.stride_token;
        if (++in_page == call.k.page_size) in_page = 0, ++page;
      }
    }
    if (positions)
      for (int64_t i = 0; i < count; ++i) tile.pos[j + i] = static_cast<int32_t>(positions[block] + token + i);
    j += static_cast<int>(count);
    in_list += count;
    token = 0;
    ++block;
  }
  tile.begin = first_live < kv_tile ? first_live : 0;
  tile.end = last_live + 1;
}
