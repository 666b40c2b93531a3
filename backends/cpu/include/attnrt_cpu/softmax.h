// SPDX-License-Identifier: Apache-2.0
// From raw scores to weights, one query-head row of one tile: scale, logits hook, masks, running maximum, exp2.

// What a row sees of a tile: keys [begin, end), less those whose `seen` is 0 if `partial`.
struct Sight {
  int begin, end;
  int from, to;  // keys whose weights are written, multiples of W; none: the row is left alone
  bool partial;
  bool whole;  // set by soften(): each key of [begin, end) has a weight other than that of a key not seen

  // Weights are wanted for keys [k0, k1).
  void cover(int k0, int k1) {
    from = k0 / W * W;
    to = (k1 + W - 1) / W * W;
  }
};

ATTNRT_INLINE Sight sight_of(const Hooks& hooks, const Row& r, const Tile& tile) {
  Sight s{tile.begin, tile.end, 0, 0, tile.holes, false};
  const int64_t limit = r.limit - tile.first;
  if (limit < s.end) s.end = static_cast<int>(limit > 0 ? limit : 0);
  if (tile.linear) {
    const int64_t a = static_cast<int64_t>(r.low) - tile.pos[0], b = static_cast<int64_t>(r.high) - tile.pos[0] + 1;
    if (a > s.begin) s.begin = static_cast<int>(a < s.end ? a : s.end);
    if (b < s.end) s.end = static_cast<int>(b > s.begin ? b : s.begin);
  } else if (hooks.has_mask) {
    s.partial = true;
  }
  if (hooks.mask) s.partial = true;
  if (hooks.reads_index_mask && r.mask_from < tile.first + s.end) s.partial = true;
  if (s.end < s.begin) s.end = s.begin;
  return s;
}

// seen[j] = -1 or 0 for keys of the sight.
static void fill_seen(const Hooks& hooks, const Row& r, Params p, const attnrt_part& part, const Tile& tile,
                      const Sight& s, int32_t* seen) {
  for (int j = s.begin; j < s.end; ++j) seen[j] = tile.live[j];
  if (hooks.has_mask && !tile.linear)
    for (int j = s.begin; j < s.end; ++j)
      seen[j] &= -static_cast<int32_t>((tile.pos[j] >= r.low) & (tile.pos[j] <= r.high));
  if (hooks.mask) hooks.mask(p, r, tile, s.begin, s.end, seen);
  if (hooks.reads_index_mask) {
    const int64_t from = r.mask_from - tile.first;
    for (int j = from > s.begin ? static_cast<int>(from < s.end ? from : s.end) : s.begin; j < s.end; ++j) {
      const int64_t bit = r.mask_bit + tile.first + j;
      const bool inside = bit >= 0 && bit < 8 * part.mask_bytes;
      seen[j] &= inside ? -static_cast<int32_t>((part.mask[bit >> 3] >> (bit & 7)) & 1) : 0;
    }
  }
}

// Largest of s[u0 : u1], or NaN if one is.
static float max_or_nan(const float* s, int u0, int u1) {
  float best = minus_infinity();
  for (int j = u0; j < u1; ++j) {
    if (s[j] != s[j]) return s[j];
    best = s[j] > best ? s[j] : best;
  }
  return best;
}

// Logits of one row, in place of its scores, over keys [u0, u1) (multiples of W around all rows' sights). Keys that the
// row does not see get the hidden value: -inf, softmax-free -0.0. Returns the largest logit, -inf if no key is seen;
// softmax-free: 0 or -inf.
static float logits_of(const Hooks& hooks, const Row& r, Params p, const attnrt_part& part, const Tile& tile,
                       const Sight& sight, int u0, int u1, int32_t* seen, float* s) {
  const vf hidden = splat(hooks.use_softmax ? minus_infinity() : -0.0f);
  if (sight.begin >= sight.end) {
    for (int j = u0; j < u1; j += W) store(s + j, hidden);
    return minus_infinity();
  }
  if (hooks.logits) hooks.logits(p, r, tile, sight.begin, sight.end, s);
  bool any_seen = true;
  if (sight.begin > u0 || sight.end < u1 || sight.partial) {
    if (sight.partial) {
      for (int j = u0; j < u1; ++j) seen[j] = 0;
      fill_seen(hooks, r, p, part, tile, sight, seen);
    }
    const vi first = splat_int(sight.begin), last = splat_int(sight.end);
    vi some = splat_int(0);
    for (int j = u0; j < u1; j += W) {
      const vi index = iota() + splat_int(j);
      vi mask = (index >= first) & (index < last);
      if (sight.partial) mask &= load_int(seen + j);
      some |= mask;
      store(s + j, select(mask, load(s + j), hidden));
    }
    any_seen = any(some);
  }
  if (!hooks.use_softmax) return any_seen ? 0.0f : minus_infinity();
  vf top = hidden;
  for (int j = u0; j < u1; j += W) top = at_least(top, load(s + j));  // passes over NaN, which the sum will meet
  const float best = max_lane(top);
  return best > minus_infinity() ? best : max_or_nan(s, u0, u1);
}

// Weights 2^(t - m) of one row, in place of its logits t, and their sum; a logit of -inf gives -0.0, a key not seen.
// Sets lanes of `none` where there is one.
ATTNRT_INLINE float weights_of(float* s, int u0, int u1, float m, vi* none) {
  const vf shift = splat(m), hidden = splat(minus_infinity()), minus_zero = splat(-0.0f);
  vf sum = splat(0.0f);
  vi found = splat_int(0);
  for (int j = u0; j < u1; j += W) {
    const vf t = load(s + j);
    const vf w = exp2_nonpositive(t - shift);
    const vi gone = t == hidden;
    sum = sum + w;
    found |= gone;
    store(s + j, select(gone, minus_zero, w));
  }
  *none = found;
  return sum_lanes(sum);
}

// Whether no weight of keys [begin, end) is that of a key not seen.
static bool all_seen(const float* s, int begin, int end) {
  const vi first = splat_int(begin), last = splat_int(end);
  vi none = splat_int(0);
  for (int j = begin / W * W; j < end; j += W) {
    const vi index = iota() + splat_int(j);
    none |= (bits_of(load(s + j)) == splat_int(INT32_MIN)) & (index >= first) & (index < last);
  }
  return !any(none);
}

// Rows [r0, r1) of a tile, whose scores lie in s: weights, running maxima and sums (ml), factors on acc (alpha), and
// whether each row is `whole`. The rows' own arrays are `rows_of`, `sight` and `ml`, the scratch `fresh` [rows + W].
// Three sweeps, so that short chains of operations overlap.
static void soften(const Hooks& hooks, const Row* rows_of, Params p, const attnrt_part& part, const Tile& tile,
                   Sight* sight, int r0, int r1, int64_t lds, int32_t* seen, float* s, float* ml, float* alpha,
                   float* fresh) {
  for (int r = r0; r < r1; ++r) {
    Sight& own = sight[r];
    if (own.from >= own.to) {
      alpha[r] = fresh[r] = 0.0f;
      continue;
    }
    const float best = logits_of(hooks, rows_of[r], p, part, tile, own, own.from, own.to, seen, s + r * lds);
    const float old = ml[2 * r];
    const bool unseen = best == minus_infinity();
    const float m = unseen ? 0.0f : best > old || best != best ? best : old;
    alpha[r] = unseen ? 0.0f : old;
    fresh[r] = m;
    if (!unseen) ml[2 * r] = m;
    own.whole = !own.partial && !unseen;
  }
  if (!hooks.use_softmax) {
    for (int r = r0; r < r1; ++r) alpha[r] = 1.0f;
    return;
  }
  for (int r = r0; r < r1; r += W) store(alpha + r, exp2_nonpositive(load(alpha + r) - load(fresh + r)));
  for (int r = r0; r < r1; ++r) {
    Sight& own = sight[r];
    if (own.from >= own.to) continue;
    vi none;
    const float sum = weights_of(s + r * lds, own.from, own.to, fresh[r], &none);
    ml[2 * r + 1] = ml[2 * r + 1] * alpha[r] + sum;
    if (own.whole && any(none)) own.whole = all_seen(s + r * lds, own.begin, own.end);
  }
}
