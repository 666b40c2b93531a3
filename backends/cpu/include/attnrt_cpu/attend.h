// SPDX-License-Identifier: Apache-2.0
// One work item: queries of a block row against a range of its keys, for a range of KV heads.
//
// Few rows (token_major): tiles outside, heads inside, so that a page that holds all heads of a token is read once, in
// order; K and V are multiplied where they lie. Many rows: heads outside; a tile's K is transposed into panels of NR
// keys, its V cut into panels of NR numbers, and both are multiplied by blocks of MR rows. Which of the two is a
// numeric class; all other choices here (blocks, order of heads, skipped tiles, direct or widened rows) change no bit.
// Leaves of a folded run fold left to right; under the pairwise tree the planner gives every leaf its own state.

struct Attend {
  const attnrt_call& call;
  const Hooks& hooks;
  const Params p;
  const WorkItem& item;
  const attnrt_part& part;
  const attnrt_class& klass;
  int group, num_queries, rows, heads_at_once;  // rows: num_queries * group, of one KV head
  int dim, dim_vo, dim_pad, dim_vo_pad, kv_tile;
  int64_t lds;              // stride of a row of s: loops write a few entries past the tile
  bool direct_k, direct_v;  // rows of K (V) can be multiplied where they lie
  Tile tile, next_tile;
  bool has_next;  // next_tile is the tile after this one, of the same list
  float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  float *zeros, *q, *run_acc, *leaf_acc, *run_ml, *leaf_ml, *s, *alpha, *fresh, *k_wide, *v_wide;
  Row* row_of;
  char* row_values;
  Sight* sight;
  int32_t* seen;
  const void **k_row, **v_row, **ahead_row;
  const Loops& loops;
  const RowLoops *k_loops, *v_loops;
  WidenRow widen;

  Attend(const attnrt_call& c, const Hooks& h, const WorkItem& i)
      : call(c),
        hooks(h),
        p(static_cast<Params>(c.params)),
        item(i),
        part(c.plan.parts[i.part]),
        klass(c.plan.classes[i.klass]),
        group(c.num_qo_heads / c.num_kv_heads),
        num_queries(i.q_end - i.q_begin),
        rows(num_queries * group),
        heads_at_once(klass.token_major ? i.head_end - i.head_begin : 1),
        dim(c.head_dim),
        dim_vo(c.head_dim_vo),
        dim_pad((dim + NR - 1) / NR * NR),
        dim_vo_pad((dim_vo + NR - 1) / NR * NR),
        kv_tile(klass.kv_tile),
        lds(kv_tile + 16),
        loops(*static_cast<const Loops*>(c.loops)),
        widen(loops.widen[c.kv_dtype]) {
    const bool small = c.kv_dtype != ATTNRT_F32;
    direct_k = !h.key && dim % W == 0 && !(small && rows > 4);
    direct_v = !h.value && dim_vo % W == 0 && !(small && rows > 4);
    k_loops = &loops.rows[direct_k ? c.kv_dtype : ATTNRT_F32];
    v_loops = &loops.rows[direct_v ? c.kv_dtype : ATTNRT_F32];
  }

  void carve(Carve& c) {
    const int64_t all = static_cast<int64_t>(rows) * heads_at_once;
    zeros = c.take<float>(dim_pad > dim_vo_pad ? dim_pad : dim_vo_pad);
    q = c.take<float>(all * dim_pad);
    run_acc = c.take<float>(all * dim_vo_pad);
    leaf_acc = c.take<float>(all * dim_vo_pad);
    run_ml = c.take<float>(all * 2);
    leaf_ml = c.take<float>(all * 2);
    s = c.take<float>(static_cast<int64_t>(rows) * lds);
    alpha = c.take<float>(rows + W);
    fresh = c.take<float>(rows + W);
    k_wide = c.take<float>(static_cast<int64_t>(kv_tile) * dim_pad + 8 * dim_pad);
    v_wide = c.take<float>(static_cast<int64_t>(kv_tile) * dim_vo_pad + dim_vo_pad);
    row_of = c.take<Row>(all);
    row_values = c.take<char>(all * hooks.values_size);
    sight = c.take<Sight>(rows);
    seen = c.take<int32_t>(kv_tile);
    k_row = c.take<const void*>(kv_tile + 8);
    v_row = c.take<const void*>(kv_tile + 8);
    ahead_row = c.take<const void*>(kv_tile);
    for (Tile* t : {&tile, &next_tile}) {
      t->pos = c.take<int32_t>(kv_tile);
      t->live = c.take<int32_t>(kv_tile);
      t->slot = c.take<int64_t>(kv_tile);
      t->k = c.take<int64_t>(kv_tile);
      t->v = c.take<int64_t>(kv_tile);
    }
  }

  bool run() {
    Carve count{nullptr};
    carve(count);
    if (!scratch().reserve(count.used)) return false;
    Carve memory{scratch().memory};
    carve(memory);
    for (int d = 0; d < dim_pad || d < dim_vo_pad; ++d) zeros[d] = 0.0f;
    for (int head = item.head_begin; head < item.head_end; head += heads_at_once) run_heads(head);
    return true;
  }

  // ---- rows ----

  void load_rows(int head0) {
    const attnrt_plan& plan = call.plan;
    const WidenRow widen_q = loops.widen[call.q_dtype];
    for (int h = 0; h < heads_at_once; ++h)
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
        float* to = q + static_cast<int64_t>(h * rows + r) * dim_pad;
        widen_q(call.q, c.qo_row * call.q_stride_row + c.qo_head * call.q_stride_head, dim, dim_pad, to);
        if (hooks.query) hooks.query(p, c, dim, to);
        // Without a logits hook q.k comes out as a base-2 logit.
        const float scale = hooks.logits ? call.sm_scale : call.sm_scale * LOG2_E;
        for (int d = 0; d < dim; ++d) to[d] = to[d] * scale;
      }
  }

  // ---- K and V of a tile ----

  attnrt::Ctx key_ctx(int head, int j) const {
    attnrt::Ctx c = row_of[0].ctx;
    c.kv_head = head;
    c.qo_head = head * group;
    c.kv_pos = tile.pos[j];
    c.kv_slot = tile.slot[j];
    return c;
  }

  // Row j of K widened to float32, hook applied; zeros if the key is dead.
  void wide_k_row(int head, int j, float* to) const {
    if (!tile.live[j]) {
      __builtin_memset(to, 0, sizeof(float) * static_cast<size_t>(dim_pad));
      return;
    }
    widen(call.k.ptr, tile.k[j] + head * call.k.stride_head, dim, dim_pad, to);
    if (hooks.key) hooks.key(p, key_ctx(head, j), dim, to);
  }

  void wide_v_row(int head, int j, float* to) const {
    if (!tile.live[j]) {
      __builtin_memset(to, 0, sizeof(float) * static_cast<size_t>(dim_vo_pad));
      return;
    }
    widen(call.v.ptr, tile.v[j] + head * call.v.stride_head, dim_vo, dim_vo_pad, to);
    if (hooks.value) hooks.value(p, key_ctx(head, j), dim_vo, to);
  }

  // Addresses of rows [k0, k1) and of as many more as the loops read ahead.
  void point_rows(int head, int k0, int k1) {
    const int64_t size = element_size(call.kv_dtype);
    const char *k = static_cast<const char*>(call.k.ptr), *v = static_cast<const char*>(call.v.ptr);
    for (int j = k0; j < k1; ++j) {
      const bool live = tile.live[j] != 0;
      k_row[j] = live ? k + (tile.k[j] + head * call.k.stride_head) * size : static_cast<const void*>(zeros);
      v_row[j] = live ? v + (tile.v[j] + head * call.v.stride_head) * size : static_cast<const void*>(zeros);
      if (!direct_k) {
        float* to = k_wide + static_cast<int64_t>(j) * dim_pad;
        wide_k_row(head, j, to);
        k_row[j] = to;
      }
    }
    for (int j = k1; j < k1 + 8; ++j) k_row[j] = k_row[k1 - 1], v_row[j] = v_row[k1 - 1];
  }

  void widen_values(int head, int k0, int k1) {
    for (int j = k0; j < k1; ++j) {
      float* to = v_wide + static_cast<int64_t>(j) * dim_vo_pad;
      wide_v_row(head, j, to);
      v_row[j] = to;
    }
  }

  void scores_few(int h, int head, int r0, int r1, int k0, int k1) {
    point_rows(head, k0, k1);
    const float* from = q + static_cast<int64_t>(h) * rows * dim_pad;
    const int length = direct_k ? dim : (dim + W - 1) / W * W;
    for (int r = r0; r < r1; r += 4) {
      const int n = r1 - r < 4 ? r1 - r : 4;
      k_loops->dots[n - 1](from + static_cast<int64_t>(r) * dim_pad, dim_pad, k_row, k0, k1, length, s + r * lds, lds,
                           r == r0 && direct_k && direct_v ? v_row : nullptr);
    }
    if (!direct_v) widen_values(head, k0, k1);
  }

  // Rows of K that come next: the same tile's for the next head, or the next tile's; null: not known.
  const void* const* rows_ahead(int h, int head0, int k0, int k1) {
    if (!direct_k || part.heads != 1) return nullptr;
    const bool same = h + 1 < heads_at_once;
    if (!same && !has_next) return nullptr;
    const Tile& from = same ? tile : next_tile;
    const int64_t size = element_size(call.kv_dtype), shift = (head0 + (same ? h + 1 : 0)) * call.k.stride_head;
    for (int j = k0; j < k1; ++j)
      ahead_row[j] = from.live[j] ? static_cast<const char*>(call.k.ptr) + (from.k[j] + shift) * size
                                  : static_cast<const void*>(zeros);
    return ahead_row;
  }

  void values_few(int h, int head0, int r0, int r1, int k0, int k1, bool uneven) {
    float* acc = leaf_acc + static_cast<int64_t>(h) * rows * dim_vo_pad;
    const int length = (dim_vo + W - 1) / W * W;
    const void* const* ahead = rows_ahead(h, head0, k0, k1);
    // Few keys at a time: each is read once per strip of acc, and rows a power of two apart crowd into few sets of the
    // cache. A factor of one changes no bit.
    constexpr int kBlock = 16;
    for (int j = k0; j < k1; j += kBlock) {
      const int stop = j + kBlock < k1 ? j + kBlock : k1;
      for (int r = r0; r < r1; r += 4) {
        const int n = r1 - r < 4 ? r1 - r : 4;
        v_loops->accumulate[uneven][n - 1](s + r * lds, lds, v_row, j, stop, length,
                                           acc + static_cast<int64_t>(r) * dim_vo_pad, dim_vo_pad,
                                           j == k0 ? alpha + r : ones, r == r0 ? ahead : nullptr);
      }
    }
  }

  // Rows [j0, j1) of a tile towards the second-level cache: V while K is multiplied, the next tile's K while V is. Not
  // earlier: rows that are a power of two apart crowd into few sets of a cache.
  void fetch(const attnrt_pool& pool, const Tile& from, const int64_t* first, int head, int j0, int j1,
             int length) const {
    const int64_t size = element_size(call.kv_dtype);
    for (int j = j0; j < j1 && j < kv_tile; ++j) {
      if (!from.live[j]) continue;
      const char* row = static_cast<const char*>(pool.ptr) + (first[j] + head * pool.stride_head) * size;
      for (int64_t at = 0; at < length * size; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
  }

  void scores_many(int head, int r0, int r1, int k0, int k1) {
    const int64_t size = element_size(call.kv_dtype);
    const bool in_place = call.kv_dtype == ATTNRT_F32 && !hooks.key;
    float* wide = k_wide + static_cast<int64_t>(kv_tile) * dim_pad;
    for (int j = k0 / NR * NR; j < k1; j += NR) {
      fetch(call.v, tile, tile.v, head, j, j + NR, dim_vo);
      float* panel = k_wide + static_cast<int64_t>(j) * dim_pad;
      for (int i = 0; i < NR; i += 8) {
        const float* row[8];
        for (int n = 0; n < 8; ++n) {
          const int key = j + i + n;
          const bool live = key >= k0 && key < k1 && tile.live[key];
          if (!live) {
            row[n] = zeros;
          } else if (in_place) {
            row[n] = reinterpret_cast<const float*>(static_cast<const char*>(call.k.ptr) +
                                                    (tile.k[key] + head * call.k.stride_head) * size);
          } else {
            float* to = wide + n * dim_pad;
            wide_k_row(head, key, to);
            row[n] = to;
          }
        }
        loops.transpose8(row, dim, panel + i);
      }
      loops.panel_scores(r1 - r0, q + static_cast<int64_t>(r0) * dim_pad, dim_pad, panel, dim, s + r0 * lds + j, lds);
    }
  }

  void values_many(int head, int r0, int r1, int k0, int k1, bool uneven) {
    float* wide = v_wide + static_cast<int64_t>(kv_tile) * dim_vo_pad;
    for (int j = k0; j < k1; ++j) {
      const float* row = wide;
      if (!tile.live[j]) {
        row = zeros;
      } else if (call.kv_dtype == ATTNRT_F32 && !hooks.value && dim_vo % NR == 0) {
        row = static_cast<const float*>(call.v.ptr) + tile.v[j] + head * call.v.stride_head;
      } else {
        wide_v_row(head, j, wide);
      }
      for (int d = 0; d < dim_vo_pad; d += NR) {
        float* to = v_wide + static_cast<int64_t>(d) * kv_tile + j * NR;
        store(to, load(row + d));
        store(to + W, load(row + d + W));
      }
    }
    const int panels = dim_vo_pad / NR, keys = (kv_tile + panels - 1) / panels;
    for (int d = 0; d < dim_vo_pad; d += NR) {
      if (has_next) fetch(call.k, next_tile, next_tile.k, head, d / NR * keys, (d / NR + 1) * keys, dim);
      const float* panel = v_wide + static_cast<int64_t>(d) * kv_tile;
      float* acc = leaf_acc + static_cast<int64_t>(r0) * dim_vo_pad + d;
      const float* weights = s + r0 * lds;
      loops.panel_accumulate[uneven](r1 - r0, weights, lds, panel, k0, k1, acc, dim_vo_pad, alpha + r0);
    }
  }

  // ---- one tile of one head: h counts the heads held at once ----

  void step(int h, int head) {
    const Row* mine = row_of + static_cast<int64_t>(h) * rows;
    int r0 = rows, r1 = 0, k0 = kv_tile, k1 = 0;
    for (int r = 0; r < rows; ++r) {
      sight[r] = sight_of(hooks, mine[r], tile);
      if (sight[r].begin >= sight[r].end) continue;
      if (r < r0) r0 = r;
      r1 = r + 1;
      if (sight[r].begin < k0) k0 = sight[r].begin;
      if (sight[r].end > k1) k1 = sight[r].end;
    }
    if (r0 >= r1) return;
    if (klass.token_major)
      scores_few(h, head, r0, r1, k0, k1);
    else
      scores_many(head, r0, r1, k0, k1);
    const bool uneven = soften(hooks, mine, p, part, tile, sight, r0, r1, k0, k1, lds, seen, s,
                               leaf_ml + static_cast<int64_t>(h) * rows * 2, alpha, fresh);
    if (klass.token_major)
      values_few(h, head - h, r0, r1, k0, k1, uneven);
    else
      values_many(head, r0, r1, k0, k1, uneven);
  }

  // ---- leaves ----

  static void clear(float* ml, float* acc, int64_t count, int64_t stride) {
    for (int64_t i = 0; i < count; ++i) {
      ml[2 * i] = minus_infinity();
      ml[2 * i + 1] = 0.0f;
    }
    __builtin_memset(acc, 0, sizeof(float) * static_cast<size_t>(count * stride));
  }

  void run_leaf(int leaf, int head0) {
    const int64_t start = leaf_start(klass, leaf), next = leaf_start(klass, leaf + 1);
    const int64_t lo = start > item.kv_begin ? start : item.kv_begin, hi = next < item.kv_end ? next : item.kv_end;
    const int64_t first = start + (lo - start) / kv_tile * kv_tile;
    has_next = false;
    for (int64_t at = first; at < hi; at += kv_tile) {
      if (part.heads == 1) {
        if (has_next) {
          std::swap(tile, next_tile);
        } else {
          tile.first = at;
          resolve(call, part, item.row, 0, lo, hi, kv_tile, tile);
        }
        has_next = at + kv_tile < hi;
        if (has_next) {
          next_tile.first = at + kv_tile;
          resolve(call, part, item.row, 0, lo, hi, kv_tile, next_tile);
        }
      }
      for (int h = 0; h < heads_at_once; ++h) {
        if (part.heads != 1) {
          tile.first = at;
          resolve(call, part, item.row, head0 + h, lo, hi, kv_tile, tile);
        }
        if (tile.begin < tile.end) step(h, head0 + h);
      }
    }
  }

  void store_state(int state, int head0, const float* ml, const float* acc) const {
    for (int h = 0; h < heads_at_once; ++h)
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

  void fold_all(float* a_ml, float* a_acc, const float* b_ml, const float* b_acc) const {
    const int64_t count = static_cast<int64_t>(rows) * heads_at_once;
    for (int64_t i = 0; i < count; ++i)
      combine(a_ml + 2 * i, a_acc + i * dim_vo_pad, b_ml + 2 * i, b_acc + i * dim_vo_pad, dim_vo);
  }

  void run_heads(int head0) {
    const int64_t count = static_cast<int64_t>(rows) * heads_at_once;
    load_rows(head0);
    clear(run_ml, run_acc, count, dim_vo_pad);
    const bool fold = item.fold || item.slot < 0;
    for (int leaf = item.leaf_begin; leaf < item.leaf_end; ++leaf) {
      clear(leaf_ml, leaf_acc, count, dim_vo_pad);
      run_leaf(leaf, head0);
      if (!fold)
        store_state(leaf - item.leaf_begin, head0, leaf_ml, leaf_acc);
      else
        fold_all(run_ml, run_acc, leaf_ml, leaf_acc);
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

static int attend_items(const attnrt_call* call, const Hooks& hooks, int worker) {
  const attnrt_plan& plan = call->plan;
  const WorkItem* items = reinterpret_cast<const WorkItem*>(plan.items);
  for (int i = plan.worker_indptr[worker]; i < plan.worker_indptr[worker + 1]; ++i) {
    Attend attend(*call, hooks, items[i]);
    if (!attend.run()) return 1;
  }
  return 0;
}
