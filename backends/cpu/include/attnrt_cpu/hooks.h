// SPDX-License-Identifier: Apache-2.0
// What one variant adds to the kernels: a table of functions, each called once per row or once per row and tile. A
// variant compiled on first use is this file and its own text alone; all the rest (attend.h, merge.h) is built with the
// package, which keeps that compilation well under a second.

// Keys [first, first + kv_tile) of a request, by offset. Key j of the tile has the arrays' entry j.
struct Tile {
  int64_t first;
  int begin, end;  // hull of the live keys, counted in the tile
  bool holes;      // some key inside the hull is dead
  bool linear;     // position of key j is pos[0] + j
  int32_t* pos;    // [kv_tile]
  int32_t* live;   // [kv_tile] -1 live, 0 dead
  int64_t* slot;   // [kv_tile] slot in the pool
  int64_t *k, *v;  // [kv_tile] first element of head 0's row
};

// A query-head row of an item.
struct Row {
  attnrt::Ctx ctx;     // kv_pos and kv_slot unset
  const void* values;  // V::Row: what the variant keeps per row
  int low, high;       // visible positions, inclusive
  int64_t limit;       // offset past the last key of the row's request
  int64_t mask_bit;    // bit of the key at offset 0 in the index's mask (may be negative)
  int64_t mask_from;   // offset of the first masked key; INT64_MAX: no mask
};

typedef const attnrt::ParamRef* Params;
typedef void (*PairHook)(Params p, const attnrt::Ctx& c, int dim, float* x);

// A hook that the variant lacks is null.
struct Hooks {
  bool use_softmax, has_mask, mask_is_interval, reads_index_mask;
  int64_t values_size;  // bytes of V::Row
  void (*row)(Params p, const attnrt::Ctx& c, void* values, int& low, int& high);
  PairHook query, key, value;  // x[0 : dim] in place
  // Logits of keys [begin, end) in place of their scores, base 2 if there is a softmax.
  void (*logits)(Params p, const Row& r, const Tile& tile, int begin, int end, float* s);
  // Clears seen[j] of keys in [begin, end) that the row may not see; only where the mask is not an interval.
  void (*mask)(Params p, const Row& r, const Tile& tile, int begin, int end, int32_t* seen);
  void (*output)(Params p, const attnrt::Ctx& c, int dim, float* x);
  float (*sink)(Params p, const attnrt::Ctx& c);
};

// Head of the family's table (loops.h): the two workers, which take the variant as hooks.
struct Drivers {
  int (*attend)(const attnrt_call* call, const Hooks& hooks, int worker);
  int (*merge)(const attnrt_call* call, const Hooks& hooks, int worker, int num_workers);
};

constexpr float LOG2_E = 1.44269504088896340736f;

template <class V>
struct HooksOf {
  typedef attnrt::Ctx Ctx;

  static void row(Params p, const Ctx& c, void* values, int& low, int& high) {
    const typename V::Row r = V::row(p, c);
    *static_cast<typename V::Row*>(values) = r;
    if constexpr (V::has_mask) V::visible(r, low, high);
  }

  static void query(Params p, const Ctx& c, int dim, float* x) {
    const int over = V::query_dim ? V::query_dim : dim, count = attnrt::pair_count(V::query_pairing, over);
    for (int d = 0; d < count; ++d)
      V::query(p, c, d, x[attnrt::pair_first(V::query_pairing, d)], x[attnrt::pair_second(V::query_pairing, over, d)]);
  }

  static void key(Params p, const Ctx& c, int dim, float* x) {
    const int over = V::key_dim ? V::key_dim : dim, count = attnrt::pair_count(V::key_pairing, over);
    for (int d = 0; d < count; ++d)
      V::key(p, c, d, x[attnrt::pair_first(V::key_pairing, d)], x[attnrt::pair_second(V::key_pairing, over, d)]);
  }

  static void value(Params p, const Ctx& c, int dim, float* x) {
    const int over = V::value_dim ? V::value_dim : dim, count = attnrt::pair_count(V::value_pairing, over);
    for (int d = 0; d < count; ++d)
      V::value(p, c, d, x[attnrt::pair_first(V::value_pairing, d)], x[attnrt::pair_second(V::value_pairing, over, d)]);
  }

  static void logits(Params p, const Row& r, const Tile& tile, int begin, int end, float* s) {
    constexpr float unit = V::use_softmax ? LOG2_E : 1.0f;  // a weight of -0 would read as a key not seen: + 0
    const Ctx base = r.ctx;
    const typename V::Row row = *static_cast<const typename V::Row*>(r.values);
    const int32_t* pos = tile.pos;
    const int64_t* slot = tile.slot;
    const int32_t* live = tile.live;
    if (tile.linear && !tile.holes) {
#pragma GCC ivdep
      for (int j = begin; j < end; ++j) {
        Ctx c = base;
        c.kv_pos = pos[0] + j;
        c.kv_slot = slot[j];
        s[j] = V::logits(p, row, c, s[j]) * unit + 0.0f;
      }
      return;
    }
    for (int j = begin; j < end; ++j) {
      Ctx c = base;
      c.kv_pos = pos[j];
      c.kv_slot = live[j] ? slot[j] : 0;
      s[j] = V::logits(p, row, c, s[j]) * unit + 0.0f;
    }
  }

  static void mask(Params p, const Row& r, const Tile& tile, int begin, int end, int32_t* seen) {
    const typename V::Row row = *static_cast<const typename V::Row*>(r.values);
    Ctx c = r.ctx;
    for (int j = begin; j < end; ++j) {
      c.kv_pos = tile.pos[j];
      c.kv_slot = seen[j] ? tile.slot[j] : 0;
      seen[j] &= -static_cast<int32_t>(V::mask(p, row, c));
    }
  }

  static void output(Params p, const Ctx& c, int dim, float* x) {
    for (int d = 0; d < dim; ++d) x[d] = V::output(p, c, d, x[d]);
  }

  static float sink(Params p, const Ctx& c) { return V::sink(p, c); }

  static constexpr Hooks make() {
    Hooks h{V::use_softmax,
            V::has_mask,
            V::mask_is_interval,
            V::reads_index_mask,
            sizeof(typename V::Row),
            row,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr,
            nullptr};
    if constexpr (V::has_query) h.query = query;
    if constexpr (V::has_key) h.key = key;
    if constexpr (V::has_value) h.value = value;
    if constexpr (V::has_logits || !V::use_softmax) h.logits = logits;
    if constexpr (V::has_mask && !V::mask_is_interval) h.mask = mask;
    if constexpr (V::has_output) h.output = output;
    if constexpr (V::has_sink) h.sink = sink;
    return h;
  }
};

template <class V>
static int attend_worker(const attnrt_call* call, int worker, int) {
  static constexpr Hooks hooks = HooksOf<V>::make();
  return static_cast<const Drivers*>(call->loops)->attend(call, hooks, worker);
}

template <class V>
static int merge_worker(const attnrt_call* call, int worker, int num_workers) {
  static constexpr Hooks hooks = HooksOf<V>::make();
  return static_cast<const Drivers*>(call->loops)->merge(call, hooks, worker, num_workers);
}
