// SPDX-License-Identifier: Apache-2.0
// From raw scores to weights, one query-head row of one tile: scale, logits hook, masks, running maximum, exp2.

// A query-head row of an item.
template <class V>
struct RowOf {
  attnrt::Ctx ctx;         // kv_pos and kv_slot unset
  typename V::Row row;     // what the variant keeps per row
  int low, high;           // visible positions, inclusive
  int64_t limit;           // offset past the last key of the row's request
  int64_t mask_bit;        // bit of the key at offset 0 in the index's mask (may be negative)
  int64_t mask_from;       // offset of the first masked key; INT64_MAX: no mask
};

// What a row sees of a tile: keys [begin, end), less those whose `seen` is 0 if `partial`.
struct Sight {
  int begin, end;
  bool partial;
};

template <class V>
ATTNRT_INLINE Sight sight_of(const RowOf<V> &r, const Tile &tile) {
  Sight s{tile.begin, tile.end, tile.holes};
  const int64_t limit = r.limit - tile.first;
  if (limit < s.end) s.end = static_cast<int>(limit > 0 ? limit : 0);
  if (tile.linear) {
    const int64_t a = static_cast<int64_t>(r.low) - tile.pos[0], b = static_cast<int64_t>(r.high) - tile.pos[0] + 1;
    if (a > s.begin) s.begin = static_cast<int>(a < s.end ? a : s.end);
    if (b < s.end) s.end = static_cast<int>(b > s.begin ? b : s.begin);
  } else if constexpr (V::has_mask) {
    s.partial = true;
  }
  if constexpr (V::has_mask && !V::mask_is_interval) s.partial = true;
  if constexpr (V::reads_index_mask)
    if (r.mask_from < tile.first + s.end) s.partial = true;
  if (s.end < s.begin) s.end = s.begin;
  return s;
}

// seen[j] = -1 or 0 for keys of the sight.
template <class V>
static void fill_seen(const RowOf<V> &r, const attnrt::ParamRef *p, const attnrt_part &part, const Tile &tile, const Sight &s,
                      int32_t *seen) {
  for (int j = s.begin; j < s.end; ++j) seen[j] = tile.live[j];
  if constexpr (V::has_mask) {
    if (!tile.linear)
      for (int j = s.begin; j < s.end; ++j) seen[j] &= -static_cast<int32_t>((tile.pos[j] >= r.low) & (tile.pos[j] <= r.high));
    if constexpr (!V::mask_is_interval) {
      attnrt::Ctx c = r.ctx;
      for (int j = s.begin; j < s.end; ++j) {
        c.kv_pos = tile.pos[j];
        c.kv_slot = seen[j] ? tile.slot[j] : 0;
        seen[j] &= -static_cast<int32_t>(V::mask(p, r.row, c));
      }
    }
  }
  if constexpr (V::reads_index_mask) {
    const int64_t from = r.mask_from - tile.first;
    for (int j = from > s.begin ? static_cast<int>(from < s.end ? from : s.end) : s.begin; j < s.end; ++j) {
      const int64_t bit = r.mask_bit + tile.first + j;
      const bool inside = bit >= 0 && bit < 8 * part.mask_bytes;
      seen[j] &= inside ? -static_cast<int32_t>((part.mask[bit >> 3] >> (bit & 7)) & 1) : 0;
    }
  }
}

// Logits hook over keys [begin, end), base 2 if there is a softmax.
template <class V>
static void apply_logits(const RowOf<V> &r, const attnrt::ParamRef *p, const Tile &tile, int begin, int end, float scale,
                         float *s) {
  constexpr float unit = V::use_softmax ? LOG2_E : 1.0f;
  const attnrt::Ctx base = r.ctx;
  const typename V::Row row = r.row;
  const int32_t *pos = tile.pos;
  const int64_t *slot = tile.slot;
  const int32_t *live = tile.live;
  if (tile.linear && !tile.holes) {
#pragma GCC ivdep
    for (int j = begin; j < end; ++j) {
      attnrt::Ctx c = base;
      c.kv_pos = pos[0] + j;
      c.kv_slot = slot[j];
      s[j] = V::logits(p, row, c, s[j] * scale) * unit;
    }
    return;
  }
  for (int j = begin; j < end; ++j) {
    attnrt::Ctx c = base;
    c.kv_pos = pos[j];
    c.kv_slot = live[j] ? slot[j] : 0;
    s[j] = V::logits(p, row, c, s[j] * scale) * unit;
  }
}

// Weights of one row, in place of its scores, over keys [u0, u1) (multiples of W around all rows' sights); keys the row does
// not see get -0.0. Updates ml and returns the factor on acc. Sets `uneven` if some key of [k0, k1) is not seen.
template <class V>
static float weights_of(const RowOf<V> &r, const attnrt::ParamRef *p, const attnrt_part &part, const Tile &tile, const Sight &sight,
                        int k0, int k1, float sm_scale, int32_t *seen, float *s, float *ml, bool *uneven) {
  const int u0 = k0 / W * W, u1 = (k1 + W - 1) / W * W;
  const vf hidden = splat(minus_infinity()), minus_zero = splat(-0.0f);
  if (sight.begin > k0 || sight.end < k1 || sight.partial) *uneven = true;
  float alpha = 1.0f;
  bool any_seen = sight.begin < sight.end;
  if (any_seen) {
    if (sight.partial) {
      for (int j = u0; j < u1; ++j) seen[j] = 0;
      fill_seen<V>(r, p, part, tile, sight, seen);
    }
    if constexpr (V::has_logits || !V::use_softmax) apply_logits<V>(r, p, tile, sight.begin, sight.end, sm_scale, s);
    const vf factor = splat(sm_scale * LOG2_E);
    const vi first = splat_int(sight.begin), last = splat_int(sight.end);
    vf top = hidden;
    vi odd = splat_int(0), some = splat_int(0);
    for (int j = u0; j < u1; j += W) {
      vf t = load(s + j);
      if constexpr (!V::has_logits && V::use_softmax) t = t * factor;
      if (j < sight.begin || j + W > sight.end || sight.partial) {
        const vi index = iota() + splat_int(j);
        vi mask = (index >= first) & (index < last);
        if (sight.partial) mask &= load_int(seen + j);
        some |= mask;
        t = select(mask, t, V::use_softmax ? hidden : minus_zero);
      } else {
        some = splat_int(-1);
      }
      if constexpr (V::use_softmax) {
        odd |= t != t;
        top = max(t, top);
      }
      store(s + j, t);
    }
    any_seen = any(some);
    if constexpr (V::use_softmax) {
      const float best = any(odd) ? __builtin_nanf("") : max_lane(top);
      if (best == minus_infinity()) {
        any_seen = false;
      } else {
        const float m = best > ml[0] || best != best ? best : ml[0];
        alpha = exp2_nonpositive(ml[0] - m);
        const vf shift = splat(m);
        vf sum = splat(0.0f);
        vi none = splat_int(0);
        for (int j = u0; j < u1; j += W) {
          const vf t = load(s + j);
          const vf w = exp2_nonpositive(t - shift);
          sum = sum + w;
          const vi gone = t == hidden;
          none |= gone;
          store(s + j, select(gone, minus_zero, w));
        }
        if (any(none)) *uneven = true;
        ml[0] = m;
        ml[1] = ml[1] * alpha + sum_lanes(sum);
      }
    } else if (any_seen) {
      ml[0] = 0.0f;
    }
  }
  if (!any_seen) {
    *uneven = true;
    for (int j = u0; j < u1; j += W) store(s + j, minus_zero);
  }
  return alpha;
}
