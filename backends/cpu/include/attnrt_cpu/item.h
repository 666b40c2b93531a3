// SPDX-License-Identifier: Apache-2.0
// One work item: queries of a block row against a range of its keys, for a range of KV heads. This file holds what
// both ways to run it share: rows of q, leaves, states. few.h and many.h say how a leaf's tiles are multiplied; which
// of them is taken is a numeric class. All other choices there (blocks, order of heads and rows, skipped tiles, direct
// or widened rows) change no bit.
// Leaves of a folded run fold left to right; under the pairwise tree the planner gives every leaf its own state.

struct Item {
  const attnrt_call& call;
  const Hooks& hooks;
  const Params p;
  const WorkItem& item;
  const attnrt_part& part;
  const attnrt_class& klass;
  int group, num_queries, rows, heads;  // rows: num_queries * group, of one KV head; heads: held at once
  int dim, dim_vo, dim_pad, dim_vo_pad, kv_tile;
  int64_t lds;  // stride of a row of scores: loops write a few entries past the tile
  float *zeros, *q, *run_acc, *leaf_acc, *run_ml, *leaf_ml;
  Row* row_of;
  char* row_values;
  const Loops& loops;
  WidenRow widen;

  Item(const attnrt_call& c, const Hooks& h, const WorkItem& i, int heads_at_once)
      : call(c),
        hooks(h),
        p(static_cast<Params>(c.params)),
        item(i),
        part(c.plan.parts[i.part]),
        klass(c.plan.classes[i.klass]),
        group(c.num_qo_heads / c.num_kv_heads),
        num_queries(i.q_end - i.q_begin),
        rows(num_queries * group),
        heads(heads_at_once),
        dim(c.head_dim),
        dim_vo(c.head_dim_vo),
        dim_pad((dim + NR - 1) / NR * NR),
        dim_vo_pad((dim_vo + NR - 1) / NR * NR),
        kv_tile(klass.kv_tile),
        lds(kv_tile + 16),
        loops(*static_cast<const Loops*>(c.loops)),
        widen(loops.widen[c.kv_dtype]) {}

  void carve(Carve& c) {
    const int64_t all = static_cast<int64_t>(rows) * heads;
    zeros = c.take<float>(dim_pad > dim_vo_pad ? dim_pad : dim_vo_pad);
    q = c.take<float>(all * dim_pad);
    run_acc = c.take<float>(all * dim_vo_pad);
    leaf_acc = c.take<float>(all * dim_vo_pad);
    run_ml = c.take<float>(all * 2);
    leaf_ml = c.take<float>(all * 2);
    row_of = c.take<Row>(all);
    row_values = c.take<char>(all * hooks.values_size);
  }

  void carve_tile(Carve& c, Tile& tile) const {
    tile.pos = c.take<int32_t>(kv_tile);
    tile.live = c.take<int32_t>(kv_tile);
    tile.slot = c.take<int64_t>(kv_tile);
    tile.k = c.take<int64_t>(kv_tile);
    tile.v = c.take<int64_t>(kv_tile);
  }

  // ---- rows ----

  void load_rows(int head0) {
    const attnrt_plan& plan = call.plan;
    const WidenRow widen_q = loops.widen[call.q_dtype];
    const int64_t size = element_size(call.q_dtype);
    for (int h = 0; h < heads; ++h)
      for (int r = 0; r < rows; ++r) {
        const int query = item.q_begin + r / group, request = part.request[query];
        const int kv_len = kv_len_of(plan, request);
        Row& row = row_of[h * rows + r];
        attnrt::Ctx& c = row.ctx;
        c.request = request;
        c.qo_pos = part.qo_pos[query] - (plan.kv_lens[request] - kv_len);
        c.kv_pos = 0;
        c.kv_slot = 0;
        c.kv_head = head0 + h;
        c.qo_head = c.kv_head * group + r % group;
        c.qo_row = part.qo_index ? part.qo_index[query] : query;
        c.qo_len = plan.qo_lens[request];
        c.kv_len = kv_len;
        row.low = INT32_MIN;
        row.high = INT32_MAX;
        char* values = row_values + (h * rows + r) * hooks.values_size;
        row.values = values;
        hooks.row(p, c, values, row.low, row.high);
        row.limit = kv_len;
        row.mask_from = INT64_MAX;
        row.mask_bit = 0;
        if (part.mask && part.mask_offset[query] >= 0) {
          row.mask_from = part.mask_begin[item.row];
          row.mask_bit = part.mask_offset[query] - row.mask_from;
        }
        const int64_t from = c.qo_row * call.q_stride_row + c.qo_head * call.q_stride_head;
        // Rows of q may lie pages apart, where no machine fetches by itself.
        const char* later = static_cast<const char*>(call.q) + (from + 8 * call.q_stride_row) * size;
        for (int64_t at = 0; at < dim * size; at += LINE) __builtin_prefetch(later + at, 0, 3);
        float* to = q + static_cast<int64_t>(h * rows + r) * dim_pad;
        widen_q(call.q, from, dim, dim_pad, to);
        if (hooks.query) hooks.query(p, c, dim, to);
        // Without a logits hook q.k comes out as a base-2 logit.
        const float scale = hooks.logits ? call.sm_scale : call.sm_scale * LOG2_E;
        for (int d = 0; d < dim; ++d) to[d] = to[d] * scale;
      }
  }

  // ---- K and V of a tile ----

  attnrt::Ctx key_ctx(const Tile& tile, int head, int j) const {
    attnrt::Ctx c = row_of[0].ctx;
    c.kv_head = head;
    c.qo_head = head * group;
    c.kv_pos = tile.pos[j];
    c.kv_slot = tile.slot[j];
    return c;
  }

  // Row j of K widened to float32, hook applied; zeros if the key is dead.
  void wide_k_row(const Tile& tile, int head, int j, float* to) const {
    if (!tile.live[j]) {
      __builtin_memset(to, 0, sizeof(float) * static_cast<size_t>(dim_pad));
      return;
    }
    widen(call.k.ptr, tile.k[j] + head * call.k.stride_head, dim, dim_pad, to);
    if (hooks.key) hooks.key(p, key_ctx(tile, head, j), dim, to);
  }

  void wide_v_row(const Tile& tile, int head, int j, float* to) const {
    if (!tile.live[j]) {
      __builtin_memset(to, 0, sizeof(float) * static_cast<size_t>(dim_vo_pad));
      return;
    }
    widen(call.v.ptr, tile.v[j] + head * call.v.stride_head, dim_vo, dim_vo_pad, to);
    if (hooks.value) hooks.value(p, key_ctx(tile, head, j), dim_vo, to);
  }

  // Where row j of K lies; a row of zeros if the key is dead.
  const char* k_at(const Tile& tile, int head, int j) const {
    if (!tile.live[j]) return reinterpret_cast<const char*>(zeros);
    return static_cast<const char*>(call.k.ptr) + (tile.k[j] + head * call.k.stride_head) * element_size(call.kv_dtype);
  }

  const char* v_at(const Tile& tile, int head, int j) const {
    if (!tile.live[j]) return reinterpret_cast<const char*>(zeros);
    return static_cast<const char*>(call.v.ptr) + (tile.v[j] + head * call.v.stride_head) * element_size(call.kv_dtype);
  }

  // ---- leaves ----

  static void clear(float* ml, float* acc, int64_t count, int64_t stride) {
    for (int64_t i = 0; i < count; ++i) {
      ml[2 * i] = minus_infinity();
      ml[2 * i + 1] = 0.0f;
    }
    __builtin_memset(acc, 0, sizeof(float) * static_cast<size_t>(count * stride));
  }

  void store_state(int state, int head0, const float* ml, const float* acc) const {
    for (int h = 0; h < heads; ++h)
      for (int r = 0; r < rows; ++r) {
        const int64_t at = h * rows + r, slot = item.slot + static_cast<int64_t>(state) * num_queries + r / group;
        const int64_t to = slot * call.num_qo_heads + (head0 + h) * group + r % group;
        call.plan.partial_ml[2 * to] = ml[2 * at];
        call.plan.partial_ml[2 * to + 1] = ml[2 * at + 1];
        float* out = call.plan.partial_acc + to * dim_vo;
        const float* in = acc + at * dim_vo_pad;
        const bool empty = is_empty(ml + 2 * at);
        for (int d = 0; d < dim_vo; ++d) out[d] = empty ? 0.0f : in[d];
      }
  }

  // Heads [head0, head0 + heads) of the item. `run_leaf(leaf, lo, hi, first)` adds keys [lo, hi) of a leaf to the
  // leaf's state, in tiles from `first` on.
  template <class RunLeaf>
  void run_leaves(int head0, RunLeaf run_leaf) {
    const int64_t count = static_cast<int64_t>(rows) * heads;
    const bool fold = item.fold || item.slot < 0;
    if (fold && item.leaf_begin >= item.leaf_end) clear(run_ml, run_acc, count, dim_vo_pad);
    for (int leaf = item.leaf_begin; leaf < item.leaf_end; ++leaf) {
      clear(leaf_ml, leaf_acc, count, dim_vo_pad);
      const int64_t start = leaf_start(klass, leaf), next = leaf_start(klass, leaf + 1);
      const int64_t lo = start > item.kv_begin ? start : item.kv_begin, hi = next < item.kv_end ? next : item.kv_end;
      run_leaf(lo, hi, start + (lo - start) / kv_tile * kv_tile);
      if (!fold) {
        store_state(leaf - item.leaf_begin, head0, leaf_ml, leaf_acc);
      } else if (leaf == item.leaf_begin) {  // the fold of nothing and a state is the state
        std::swap(run_ml, leaf_ml);
        std::swap(run_acc, leaf_acc);
      } else {
        for (int64_t i = 0; i < count; ++i)
          combine(run_ml + 2 * i, run_acc + i * dim_vo_pad, leaf_ml + 2 * i, leaf_acc + i * dim_vo_pad, dim_vo);
      }
    }
    if (!fold) return;
    if (item.slot >= 0) {
      store_state(0, head0, run_ml, run_acc);
      return;
    }
    for (int64_t i = 0; i < count; ++i)
      finish(call, hooks, row_of[i].ctx, row_of[i].ctx.qo_row, run_ml + 2 * i, run_acc + i * dim_vo_pad);
  }
};
