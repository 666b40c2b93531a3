// SPDX-License-Identifier: Apache-2.0
// Few rows: tiles outside, heads inside, K and V multiplied where they lie. Time is that of the memory, so K and V are
// read in the order of their addresses, a few keys at a time: where a token's heads lie side by side all heads of those
// keys (a tile of one head would be short pieces a power of two apart, which crowd into few sets of a cache), else head
// by head. Each such block fetches the one after it.

struct FewRows : Item {
  static constexpr int kBlock = 8;  // keys

  struct Hull {
    int r0, r1, k0, k1;  // rows that see a key, keys that a row sees
    bool uneven;         // some row does not see some key of the hull
  };

  bool direct_k, direct_v;  // rows of K (V) can be multiplied where they lie
  bool beside;              // a token's heads lie side by side
  const RowLoops *k_loops, *v_loops;
  Tile tile, next_tile;
  bool has_next;  // next_tile is the tile after this one, of the same list
  float ones[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  float *s, *alpha, *fresh, *k_wide, *v_wide;
  Sight* sight;
  Hull* hull;
  int32_t* seen;
  const void **row, **ahead_row;

  FewRows(const attnrt_call& c, const Hooks& h, const WorkItem& i) : Item(c, h, i, i.head_end - i.head_begin) {
    const bool small = c.kv_dtype != ATTNRT_F32;
    direct_k = !h.key && dim % W == 0 && !(small && rows > 4);
    direct_v = !h.value && dim_vo % W == 0 && !(small && rows > 4);
    beside = c.k.stride_head <= c.k.stride_token && part.heads == 1;
    k_loops = &loops.rows[direct_k ? c.kv_dtype : ATTNRT_F32];
    v_loops = &loops.rows[direct_v ? c.kv_dtype : ATTNRT_F32];
  }

  void carve(Carve& c) {
    Item::carve(c);
    const int64_t all = static_cast<int64_t>(rows) * heads;
    s = c.take<float>(all * lds);
    alpha = c.take<float>(all + W);
    fresh = c.take<float>(rows + W);
    k_wide = c.take<float>(static_cast<int64_t>(kBlock) * dim_pad);
    v_wide = c.take<float>(static_cast<int64_t>(kBlock) * dim_vo_pad);
    sight = c.take<Sight>(all);
    hull = c.take<Hull>(heads);
    seen = c.take<int32_t>(kv_tile);
    row = c.take<const void*>(kv_tile + 8);
    ahead_row = c.take<const void*>(kv_tile + 8);
    carve_tile(c, tile);
    carve_tile(c, next_tile);
  }

  void run() {
    const int head0 = item.head_begin;
    load_rows(head0);
    run_leaves(head0, [&](int64_t lo, int64_t hi, int64_t first) { run_leaf(head0, lo, hi, first); });
  }

  void run_leaf(int head0, int64_t lo, int64_t hi, int64_t first) {
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
      const int together = beside ? heads : 1;
      for (int h = 0; h < heads; h += together) {
        if (part.heads != 1) {
          tile.first = at;
          resolve(call, part, item.row, head0 + h, lo, hi, kv_tile, tile);
        }
        step(head0, h, h + together);
      }
    }
  }

  // The tile, for heads head0 + [h0, h1).
  void step(int head0, int h0, int h1) {
    if (tile.begin >= tile.end) return;
    int k0 = kv_tile, k1 = 0;
    for (int h = h0; h < h1; ++h) {
      const Hull& own = hull[h] = hull_of(h);
      if (own.k0 < k0) k0 = own.k0;
      if (own.k1 > k1) k1 = own.k1;
    }
    for (int j = k0; j < k1; j += kBlock)
      for (int h = h0; h < h1; ++h) scores(head0, h, j, j + kBlock < k1 ? j + kBlock : k1, j + kBlock >= k1);
    for (int h = h0; h < h1; ++h) {
      Hull& own = hull[h];
      const int64_t at = static_cast<int64_t>(h) * rows;
      if (own.k0 >= own.k1) continue;
      soften(hooks, row_of + at, p, part, tile, sight + at, own.r0, own.r1, lds, seen, s + at * lds, leaf_ml + 2 * at,
             alpha + at, fresh);
      for (int r = own.r0; r < own.r1; ++r) {
        const Sight& one = sight[at + r];
        own.uneven |= !one.whole || one.begin > own.k0 || one.end < own.k1;
      }
    }
    for (int j = k0; j < k1; j += kBlock)
      for (int h = h0; h < h1; ++h) values(head0, h, j, j + kBlock < k1 ? j + kBlock : k1, j + kBlock >= k1);
  }

  Hull hull_of(int h) {
    const int64_t at = static_cast<int64_t>(h) * rows;
    Hull own{rows, 0, kv_tile, 0, false};
    for (int r = 0; r < rows; ++r) {
      const Sight& one = sight[at + r] = sight_of(hooks, row_of[at + r], tile);
      if (one.begin >= one.end) continue;
      if (r < own.r0) own.r0 = r;
      own.r1 = r + 1;
      if (one.begin < own.k0) own.k0 = one.begin;
      if (one.end > own.k1) own.k1 = one.end;
    }
    for (int r = own.r0; r < own.r1; ++r) sight[at + r].cover(own.k0, own.k1);
    return own;
  }

  // Rows that the memory should bring while keys [j0, j1) are multiplied, or null: the next block of K, after K's last
  // the first of V, after V's last K of the next head or tile.
  const void* const* ahead(bool values, int head0, int h, int j0, int j1, bool last) {
    const bool from_v = values != last, next_head = !beside && h + 1 < heads;
    if (!direct_k || !direct_v) return nullptr;
    if (values && last && (part.heads != 1 || !(next_head || has_next))) return nullptr;
    const Tile& from = values && last && !next_head ? next_tile : tile;
    const int head = head0 + (!(values && last) || beside ? h : next_head ? h + 1 : 0), shift = last ? -j0 : kBlock;
    for (int j = j0; j < j1; ++j) {
      const int key = j + shift < kv_tile ? j + shift : kv_tile - 1;
      ahead_row[j] = from_v ? v_at(from, head, key) : k_at(from, head, key);
    }
    for (int j = j1; j < j1 + 8; ++j) ahead_row[j] = ahead_row[j1 - 1];
    return ahead_row;
  }

  void scores(int head0, int h, int j0, int j1, bool last) {
    const Hull& own = hull[h];
    const int head = head0 + h;
    const void* const* later = ahead(false, head0, h, j0, j1, last);
    if (j0 < own.k0) j0 = own.k0;
    if (j1 > own.k1) j1 = own.k1;
    if (j0 >= j1) return;
    for (int j = j0; j < j1; ++j) {
      if (direct_k) {
        row[j] = k_at(tile, head, j);
      } else {
        float* to = k_wide + static_cast<int64_t>(j - j0) * dim_pad;
        wide_k_row(tile, head, j, to);
        row[j] = to;
      }
    }
    for (int j = j1; j < j1 + 8; ++j) row[j] = row[j1 - 1];
    const int length = direct_k ? dim : (dim + W - 1) / W * W;
    const int64_t at = static_cast<int64_t>(h) * rows;
    for (int r = own.r0; r < own.r1; r += 4) {
      const int n = own.r1 - r < 4 ? own.r1 - r : 4;
      k_loops->dots[n - 1](q + (at + r) * dim_pad, dim_pad, row, j0, j1, length, s + (at + r) * lds, lds,
                           r == own.r0 ? later : nullptr);
    }
  }

  void values(int head0, int h, int j0, int j1, bool last) {
    const Hull& own = hull[h];
    const int head = head0 + h;
    const void* const* later = ahead(true, head0, h, j0, j1, last);
    if (j0 < own.k0) j0 = own.k0;
    if (j1 > own.k1) j1 = own.k1;
    if (j0 >= j1) return;
    for (int j = j0; j < j1; ++j) {
      if (direct_v) {
        row[j] = v_at(tile, head, j);
      } else {
        float* to = v_wide + static_cast<int64_t>(j - j0) * dim_vo_pad;
        wide_v_row(tile, head, j, to);
        row[j] = to;
      }
    }
    const int length = (dim_vo + W - 1) / W * W;
    const int64_t at = static_cast<int64_t>(h) * rows;
    for (int r = own.r0; r < own.r1; r += 4) {
      const int n = own.r1 - r < 4 ? own.r1 - r : 4;
      // alpha once, with the first block; a factor of one changes no bit
      v_loops->accumulate[own.uneven][n - 1](s + (at + r) * lds, lds, row, j0, j1, length,
                                             leaf_acc + (at + r) * dim_vo_pad, dim_vo_pad,
                                             j0 == own.k0 ? alpha + at + r : ones, r == own.r0 ? later : nullptr);
    }
  }
};
