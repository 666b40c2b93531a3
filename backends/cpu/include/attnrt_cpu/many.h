// SPDX-License-Identifier: Apache-2.0
// Many rows: heads outside. A tile's K is transposed into panels of NR keys, its V cut into panels of NR numbers, once
// for all rows of the item, and rows are multiplied by them a chunk at a time, so that a chunk's scores stay in the
// first-level cache. Meanwhile the next tile's rows are fetched.

// Lines of memory that are needed soon, fetched a few at a time between the loops: all at once would hold them up.
struct Feed {
  struct Piece {
    const char* at;
    int lines;
  };
  Piece* piece;
  int count, next, line;
  int64_t lines;  // left

  void clear() { count = next = line = 0, lines = 0; }
  void add(const char* row, int64_t bytes) {
    const char* at = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(row) / LINE * LINE);
    piece[count] = {at, static_cast<int>((row + bytes - at + LINE - 1) / LINE)};
    lines += piece[count++].lines;
  }
  void step(int wanted) {
    for (; wanted > 0 && next < count; --wanted) {
      __builtin_prefetch(piece[next].at + static_cast<int64_t>(line) * LINE, 0, 2);
      --lines;
      if (++line == piece[next].lines) line = 0, ++next;
    }
  }
};

struct ManyRows : Item {
  static constexpr int kChunk = 48;  // rows, a multiple of MR

  struct Seen {
    Tile tile;
    int k0, k1;  // keys that some row may see
  };
  // Rows [r0, r1) of the chunk take keys [k0, k1); `safe`: not each of them sees each key; `first`: none before.
  struct Stretch {
    int r0, r1, k0, k1;
    bool safe, first;
  };

  int lowest, highest;  // positions that some row may see
  int64_t furthest;     // offset past the last of them
  Seen now, later;      // a tile and the one after it
  Feed feed;
  float ones[kChunk];
  float *s, *alpha, *fresh, *wide, *k_packed, *v_packed;
  Sight* sight;
  int32_t* seen;
  Stretch stretch[3 * kChunk];

  ManyRows(const attnrt_call& c, const Hooks& h, const WorkItem& i) : Item(c, h, i, 1) {
    for (float& one : ones) one = 1.0f;
  }

  void carve(Carve& c) {
    Item::carve(c);
    s = c.take<float>(kChunk * lds);
    alpha = c.take<float>(kChunk + W);
    fresh = c.take<float>(kChunk + W);
    wide = c.take<float>(8 * (dim_pad > dim_vo_pad ? dim_pad : dim_vo_pad));
    sight = c.take<Sight>(kChunk);
    seen = c.take<int32_t>(kv_tile);
    k_packed = c.take<float>(static_cast<int64_t>(kv_tile) * dim_pad);
    v_packed = c.take<float>(static_cast<int64_t>(kv_tile) * dim_vo_pad);
    feed.piece = c.take<Feed::Piece>(2 * static_cast<int64_t>(kv_tile));
    carve_tile(c, now.tile);
    carve_tile(c, later.tile);
  }

  void run() {
    const int head = item.head_begin;
    load_rows(head);
    lowest = INT32_MAX, highest = INT32_MIN, furthest = 0;
    for (int r = 0; r < rows; ++r) {
      const Row& row = row_of[r];
      if (row.low < lowest) lowest = row.low;
      if (row.high > highest) highest = row.high;
      if (row.limit > furthest) furthest = row.limit;
    }
    run_leaves(head, [&](int64_t lo, int64_t hi, int64_t first) { run_leaf(head, lo, hi, first); });
  }

  void run_leaf(int head, int64_t lo, int64_t hi, int64_t first) {
    if (first < hi) look_up(later, head, lo, hi, first);
    for (int64_t at = first; at < hi; at += kv_tile) {
      std::swap(now, later);
      pack_k(head);
      pack_v(head);
      feed.clear();
      if (at + kv_tile < hi) {
        look_up(later, head, lo, hi, at + kv_tile);
        foresee(head);
      }
      int chunks = (rows + kChunk - 1) / kChunk;
      for (int r = 0; r < rows; r += kChunk, --chunks) {
        const int64_t calls = static_cast<int64_t>(chunks) * ((kv_tile + dim_vo_pad) / NR);
        const int share = static_cast<int>((feed.lines + calls - 1) / calls);
        multiply(r, r + kChunk < rows ? r + kChunk : rows, share);
      }
    }
  }

  void look_up(Seen& one, int head, int64_t lo, int64_t hi, int64_t at) {
    Tile& tile = one.tile;
    tile.first = at;
    resolve(call, part, item.row, head, lo, hi, kv_tile, tile);
    int64_t k0 = tile.begin, k1 = furthest - at < tile.end ? furthest - at : tile.end;
    if (tile.linear) {
      const int64_t a = static_cast<int64_t>(lowest) - tile.pos[0], b = static_cast<int64_t>(highest) - tile.pos[0];
      if (a > k0) k0 = a;
      if (b + 1 < k1) k1 = b + 1;
    }
    one.k0 = static_cast<int>(k0 < k1 ? k0 : 0);
    one.k1 = static_cast<int>(k0 < k1 ? k1 : 0);
  }

  void foresee(int head) {
    const int64_t size = element_size(call.kv_dtype);
    for (int j = later.k0; j < later.k1; ++j)
      if (later.tile.live[j]) {
        feed.add(k_at(later.tile, head, j), dim * size);
        feed.add(v_at(later.tile, head, j), dim_vo * size);
      }
  }

  void pack_k(int head) {
    const bool in_place = call.kv_dtype == ATTNRT_F32 && !hooks.key;
    for (int j = now.k0 / 8 * 8; j < now.k1; j += 8) {
      const float* row[8];
      for (int n = 0; n < 8; ++n) {
        const int key = j + n;
        if (key < now.k0 || key >= now.k1 || !now.tile.live[key]) {
          row[n] = zeros;
        } else if (in_place) {
          row[n] = reinterpret_cast<const float*>(k_at(now.tile, head, key));
        } else {
          float* to = wide + n * dim_pad;
          wide_k_row(now.tile, head, key, to);
          row[n] = to;
        }
      }
      loops.transpose8(row, dim, k_packed + static_cast<int64_t>(j / NR * NR) * dim_pad + j % NR);
    }
  }

  void pack_v(int head) {
    for (int j = now.k0; j < now.k1; ++j) {
      const float* row = wide;
      if (!now.tile.live[j]) {
        row = zeros;
      } else if (call.kv_dtype == ATTNRT_F32 && !hooks.value && dim_vo % NR == 0) {
        row = reinterpret_cast<const float*>(v_at(now.tile, head, j));
      } else {
        wide_v_row(now.tile, head, j, wide);
      }
      for (int d = 0; d < dim_vo_pad; d += NR) {
        float* to = v_packed + static_cast<int64_t>(d) * kv_tile + j * NR;
        store(to, load(row + d));
        store(to + W, load(row + d + W));
      }
    }
  }

  // Rows [r0, r1) against the tile; `share` lines are fetched with each panel.
  void multiply(int r0, int r1, int share) {
    const int count = r1 - r0;
    if (now.k0 >= now.k1 || !look(r0, count)) return;
    const float* q_row = q + static_cast<int64_t>(r0) * dim_pad;
    for (int j = now.k0 / NR * NR; j < now.k1; j += NR) {
      feed.step(share);
      int a = 0, b = count;  // rows that need the panel
      while (a < b && !(sight[a].from < j + NR && sight[a].to > j)) a += MR;
      if (a >= b) continue;
      while (!(sight[b - 1].from < j + NR && sight[b - 1].to > j)) --b;
      loops.panel_scores(b - a, q_row + static_cast<int64_t>(a) * dim_pad, dim_pad,
                         k_packed + static_cast<int64_t>(j) * dim_pad, dim, s + a * lds + j, lds);
    }
    soften(hooks, row_of + r0, p, part, now.tile, sight, 0, count, lds, seen, s, leaf_ml + 2 * static_cast<int64_t>(r0),
           alpha, fresh);
    const int stretches = divide(count);
    for (int d = 0; d < dim_vo_pad; d += NR) {
      feed.step(share);
      float* acc = leaf_acc + static_cast<int64_t>(r0) * dim_vo_pad + d;
      for (int i = 0; i < stretches; ++i) {
        const Stretch& x = stretch[i];
        // alpha once; a factor of one changes no bit
        loops.panel_accumulate[x.safe](x.r1 - x.r0, s + x.r0 * lds, lds, v_packed + static_cast<int64_t>(d) * kv_tile,
                                       x.k0, x.k1, acc + static_cast<int64_t>(x.r0) * dim_vo_pad, dim_vo_pad,
                                       x.first ? alpha + x.r0 : ones);
      }
    }
  }

  // What each row of the chunk sees. Rows are multiplied MR at a time, so that all of such a block cover what one of
  // them sees. Returns whether any row sees a key.
  bool look(int r0, int count) {
    bool found = false;
    for (int a = 0; a < count; a += MR) {
      const int b = a + MR < count ? a + MR : count;
      int k0 = kv_tile, k1 = 0;
      for (int r = a; r < b; ++r) {
        sight[r] = sight_of(hooks, row_of[r0 + r], now.tile);
        if (sight[r].begin >= sight[r].end) continue;
        if (sight[r].begin < k0) k0 = sight[r].begin;
        if (sight[r].end > k1) k1 = sight[r].end;
      }
      if (k0 < k1) {
        found = true;
        for (int r = a; r < b; ++r) sight[r].cover(k0, k1);
      }
    }
    return found;
  }

  // Cuts the chunk's weights into stretches in which all rows see all keys, and the rest.
  int divide(int count) {
    int n = 0;
    for (int a = 0; a < count; a += MR) {
      if (sight[a].from >= sight[a].to) continue;
      const int b = a + MR < count ? a + MR : count;
      int k0 = kv_tile, k1 = 0, c0 = 0, c1 = kv_tile;
      bool whole = true;
      for (int r = a; r < b; ++r) {
        const Sight& own = sight[r];
        whole = whole && own.whole;
        if (own.begin >= own.end) continue;
        k0 = own.begin < k0 ? own.begin : k0;
        k1 = own.end > k1 ? own.end : k1;
        c0 = own.begin > c0 ? own.begin : c0;
        c1 = own.end < c1 ? own.end : c1;
      }
      if (!whole || c0 >= c1) {
        stretch[n++] = {a, b, k0, k1, true, true};
        continue;
      }
      if (k0 == c0 && k1 == c1) {
        Stretch* last = n ? &stretch[n - 1] : nullptr;
        if (last && last->r1 == a && last->first && !last->safe && last->k0 == k0 && last->k1 == k1)
          last->r1 = b;
        else
          stretch[n++] = {a, b, k0, k1, false, true};
        continue;
      }
      if (k0 < c0) stretch[n++] = {a, b, k0, c0, true, true};
      stretch[n++] = {a, b, c0, c1, false, k0 == c0};
      if (c1 < k1) stretch[n++] = {a, b, c1, k1, true, false};
    }
    return n;
  }
};
