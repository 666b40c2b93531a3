// SPDX-License-Identifier: Apache-2.0
// Bridge parts: lists of the leaves that straddle cuts, as scheduler/bridge.py and bridge_mask.py make them.
//
// Made in two passes: plan() finds every size and all that is short, write() puts block ids, positions and mask bits
// straight into the caller's buffer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

#include "bridge_mask.h"
#include "lists.h"
#include "narrow.h"

// Division by a block size, which most often is a power of two.
struct Blocks {
  int32_t size = 1;
  int shift = 0;

  Blocks() {}
  explicit Blocks(int32_t n) : size(n), shift(n > 0 && (n & (n - 1)) == 0 ? __builtin_ctz(uint32_t(n)) : -1) {}

  int64_t floor(int64_t x) const { return shift >= 0 ? x >> shift : x / size; }  // x >= 0
  int64_t within(int64_t x) const { return shift >= 0 ? x & (size - 1) : (x % size + size) % size; }
};

// What one list of one part gives to a gap: keys [lo, hi).
struct Piece {
  int32_t group, unit, part, row;
  int64_t lo, hi;
  int64_t offset;            // of the list
  int64_t entry;             // first entry of the list in the part's indices
  Blocks own;                // of the part
  bool first;                // of its list
  int64_t begin, count, to;  // first block in its list, blocks, first entry in the bridge
};

struct Pad {
  int64_t at, count;  // entries without keys before a list's first piece
};

struct Bridge {
  attnrt_aligned_part made;
  int32_t size = 1;
  bool affine = true;
  int64_t entries = 0, mask_bits = 0;
  std::vector<Piece> pieces;
  std::vector<Pad> pads;
  std::vector<int32_t> groups;
  std::vector<Range> keys;  // [groups] all keys of a group's lists, where bits are packed anew
};

class Bridges {
 public:
  void clear() { count = 0; }
  bool plan(const Lists& lists, size_t gap, Arrays& out);  // false: left to the readable form
  bool write(const Lists& lists, Bridge& bridge, int32_t* indices, int32_t* block_pos, uint8_t* mask) const;

  size_t count = 0;
  std::vector<Bridge> all;  // the first `count` are of this alignment

 private:
  bool find_pieces(const Lists& lists, size_t gap);
  bool make(const Lists& lists, int32_t size, Arrays& out);
  bool place_lists(const Lists& lists, Bridge& b, Arrays& out);
  void find_positions(const Lists& lists, Bridge& b, const std::vector<int64_t>& list_at);
  void queries(const Lists& lists, Bridge& b, Arrays& out) const;
  bool mask(const Lists& lists, Bridge& b, Arrays& out) const;
  bool keep_bound_mask(const Lists& lists, Bridge& b, int32_t part, Arrays& out) const;

  std::vector<Piece> pieces_;
  std::vector<int32_t> size_;   // [groups] 0: no bridge
  std::vector<int32_t> sizes_;  // all of them, largest first
  std::vector<int64_t> list_at_, offset_;
  std::vector<int32_t> begin_, end_;
};

inline int64_t position(const attnrt_part& source, const Piece& piece, int64_t j) {
  return source.block_pos ? int64_t(source.block_pos[piece.entry + piece.own.floor(j)]) + piece.own.within(j)
                          : int64_t(source.kv_pos[piece.row]) + j;
}

inline bool Bridges::plan(const Lists& lists, size_t gap, Arrays& out) {
  if (!find_pieces(lists, gap)) return false;
  sizes_.clear();
  for (const int32_t size : size_)
    if (size && std::find(sizes_.begin(), sizes_.end(), size) == sizes_.end()) sizes_.push_back(size);
  std::sort(sizes_.rbegin(), sizes_.rend());
  for (const int32_t size : sizes_)
    if (!make(lists, size, out)) return false;
  return true;
}

// Pieces by list and offset, and the block size of each group's bridge: that of its parts if it is one and all pieces
// begin and meet at block edges of one phase, else 1.
inline bool Bridges::find_pieces(const Lists& lists, size_t gap) {
  const size_t P = size_t(lists.parts), U = size_t(lists.units);
  pieces_.clear();
  size_.assign(size_t(lists.groups), 0);
  for (size_t g = 0; g < size_t(lists.groups); ++g) {
    const size_t lead = pieces_.size();
    bool good = true;
    for (size_t u = 0; u < U; ++u) {
      const size_t l = g * U + u;
      if (gap >= size_t(lists.found[l])) continue;
      const Range& cut = lists.gap[l * P + gap];
      bool first = true;
      for (size_t i = 0; i < P; ++i) {
        const Range& live = lists.live[l * P + i];
        const int64_t lo = std::max(live.lo, cut.lo), hi = std::min(live.hi, cut.hi);
        if (lo >= hi) continue;
        const int32_t p = lists.part[l * P + i], row = lists.row[g * P + size_t(p)];
        const attnrt_part& source = lists.pr->part[p];
        if (source.bound) return false;
        Piece piece = {};
        piece.group = int32_t(g), piece.unit = int32_t(u), piece.part = p, piece.row = row;
        piece.lo = lo, piece.hi = hi, piece.first = first;
        piece.offset = source.kv_offset[row], piece.own = Blocks(source.block);
        piece.entry = source.indptr[int64_t(row) * source.heads + (source.heads > 1 ? int64_t(u) : 0)];
        if (lo < piece.offset || piece.entry < 0) return false;
        const int64_t last = piece.own.floor(hi - 1 - piece.offset);
        if ((source.indices || source.block_pos) && piece.entry + last >= source.entries) return false;
        pieces_.push_back(piece);
        const Piece& by = pieces_[lead];
        good = good && source.indices && piece.own.size == by.own.size;
        good = good && piece.own.within(piece.offset) == by.own.within(by.offset);
        good = good && (first || piece.own.within(lo - piece.offset) == 0);
        first = false;
      }
    }
    if (pieces_.size() > lead) size_[g] = good ? pieces_[lead].own.size : 1;
  }
  return true;
}

inline bool Bridges::make(const Lists& lists, int32_t size, Arrays& out) {
  if (all.size() == count) all.emplace_back();
  Bridge& b = all[count++];
  b.size = size;
  b.pieces.clear(), b.pads.clear(), b.groups.clear();
  for (int32_t g = 0; g < lists.groups; ++g)
    if (size_[size_t(g)] == size) b.groups.push_back(g);
  if (sizes_.size() == 1)
    b.pieces.swap(pieces_);
  else
    std::copy_if(pieces_.begin(), pieces_.end(), std::back_inserter(b.pieces),
                 [&](const Piece& piece) { return size_[size_t(piece.group)] == size; });
  b.made = {};
  b.made.source = -1, b.made.heads = lists.units, b.made.block = size, b.made.rows = int32_t(b.groups.size());
  b.made.bound_mask = b.made.indices = b.made.block_pos = b.made.kv_pos = b.made.mask = -1;
  b.made.mask_offset = b.made.mask_begin = b.made.limit_lo = b.made.limit_hi = -1;
  if (!place_lists(lists, b, out)) return false;
  queries(lists, b, out);
  return mask(lists, b, out);
}

// Where each list begins, ends and is padded so that the heads of a group share offsets.
inline bool Bridges::place_lists(const Lists& lists, Bridge& b, Arrays& out) {
  const size_t U = size_t(lists.units);
  const Blocks size(b.size);
  for (Piece& piece : b.pieces) {
    piece.begin = size.floor(piece.lo - piece.offset);
    piece.count = size.floor(piece.hi - piece.offset + b.size - 1) - piece.begin;
  }
  offset_.assign(b.groups.size(), std::numeric_limits<int64_t>::max());
  size_t k = 0;
  for (const Piece& piece : b.pieces) {
    while (b.groups[k] != piece.group) ++k;
    if (piece.first) offset_[k] = std::min(offset_[k], piece.offset + piece.begin * b.size);
  }
  list_at_.assign(b.groups.size() * U + 1, 0);
  begin_.assign(b.groups.size() * U, 0);
  end_.assign(b.groups.size() * U, 0);
  int64_t to = 0;
  size_t i = 0;
  for (size_t l = 0; l < b.groups.size() * U; ++l) {
    list_at_[l] = to;
    for (; i < b.pieces.size() && b.pieces[i].group == b.groups[l / U] && b.pieces[i].unit == int32_t(l % U); ++i) {
      Piece& piece = b.pieces[i];
      const int64_t offset = offset_[l / U];
      if (piece.first) {
        const int64_t pad = size.floor(piece.offset + piece.begin * b.size - offset);
        if (pad) b.pads.push_back({to, pad});
        to += pad;
        begin_[l] = int32_t(piece.lo - offset);
      }
      end_[l] = int32_t(piece.hi - offset);
      piece.to = to;
      to += piece.count;
    }
  }
  list_at_.back() = to;
  if (to > std::numeric_limits<int32_t>::max()) return false;
  b.entries = to;
  b.made.entries = int32_t(to);
  const auto put = [&out](const auto& values) {
    const int32_t at = out.here();
    out.ints.resize(out.ints.size() + values.size());
    std::transform(values.begin(), values.end(), out.ints.begin() + at, [](auto value) { return int32_t(value); });
    return at;
  };
  b.made.indptr = put(list_at_);
  b.made.kv_begin = put(begin_);
  b.made.kv_end = put(end_);
  b.made.kv_offset = put(offset_);
  find_positions(lists, b, list_at_);
  if (b.affine) b.made.kv_pos = put(offset_);  // holds starts by now
  return true;
}

// Whether key positions follow by one in all lists of a group; `offset_` becomes the position of entry 0 of the group's
// first list.
inline void Bridges::find_positions(const Lists& lists, Bridge& b, const std::vector<int64_t>& list_at) {
  const size_t U = size_t(lists.units);
  b.affine = true;
  int32_t group = -1;
  size_t k = 0;
  for (const Piece& piece : b.pieces) {
    const attnrt_part& source = lists.pr->part[piece.part];
    while (b.groups[k] != piece.group) ++k;
    const int64_t in_list = piece.to - list_at[k * U + size_t(piece.unit)];
    if (piece.group != group) {
      group = piece.group;
      offset_[k] = position(source, piece, piece.begin * b.size) - in_list * b.size;
    }
    int64_t want = offset_[k] + in_list * b.size;
    const int64_t steps = source.block_pos ? piece.count : 1;
    for (int64_t t = 0; t < steps && b.affine; ++t, want += b.size)
      b.affine = position(source, piece, (piece.begin + t) * b.size) == want;
  }
}

inline void Bridges::queries(const Lists& lists, Bridge& b, Arrays& out) const {
  const size_t P = size_t(lists.parts);
  b.made.qo_indptr = out.here();
  out.ints.resize(out.ints.size() + b.groups.size() + 1);
  int32_t* end = out.ints.data() + b.made.qo_indptr;
  int32_t total = *end = 0;
  for (const int32_t g : b.groups) {
    const int32_t n = lists.begin[size_t(g) + 1] - lists.begin[size_t(g)];
    *++end = total += n;
    b.made.most_queries = std::max(b.made.most_queries, n);
  }
  b.made.queries = total;
  b.made.qo_index = out.here();
  b.made.request = b.made.qo_index + total;
  b.made.qo_pos = b.made.request + total;
  out.ints.resize(out.ints.size() + 3 * size_t(total));
  int32_t* to = out.ints.data() + b.made.qo_index;
  for (const int32_t g : b.groups) {
    int p = lists.parts - 1;
    while (lists.row[size_t(g) * P + size_t(p)] < 0) --p;
    const attnrt_part& source = lists.pr->part[p];
    for (int32_t i = lists.begin[size_t(g)]; i < lists.begin[size_t(g) + 1]; ++i, ++to) {
      const int32_t q = lists.place[size_t(lists.qo_rows[size_t(i)]) * P + size_t(p)];
      to[0] = lists.qo_rows[size_t(i)];
      to[total] = source.request[q];
      to[2 * total] = source.qo_pos[q];
    }
  }
}

// Offsets of a bridge's mask; host bits are packed by write(), a bound mask is kept where it alone speaks.
inline bool Bridges::mask(const Lists& lists, Bridge& b, Arrays& out) const {
  int32_t lowest = -1;
  bool on_host = true, several = false;
  for (const Piece& piece : b.pieces) {
    const attnrt_part& source = lists.pr->part[piece.part];
    if (!source.has_mask) continue;
    on_host = on_host && source.has_mask == 1;
    several = several || (lowest >= 0 && piece.part != lowest);
    lowest = lowest < 0 ? piece.part : std::min(lowest, piece.part);
  }
  b.mask_bits = 0;
  b.keys.clear();
  if (lowest < 0) return true;
  if (!on_host) return !several && keep_bound_mask(lists, b, lowest, out);
  b.keys.assign(b.groups.size(), {std::numeric_limits<int64_t>::max(), 0});
  size_t k = 0;
  for (const Piece& piece : b.pieces) {
    while (b.groups[k] != piece.group) ++k;
    b.keys[k] = {std::min(b.keys[k].lo, piece.lo), std::max(b.keys[k].hi, piece.hi)};
  }
  b.made.mask_offset = out.here_long();
  b.made.mask_begin = out.here();
  out.longs.resize(out.longs.size() + size_t(b.made.queries));
  int64_t* to = out.longs.data() + b.made.mask_offset;
  for (k = 0; k < b.groups.size(); ++k) {
    const size_t g = size_t(b.groups[k]);
    out.ints.push_back(int32_t(b.keys[k].lo));
    for (int32_t i = lists.begin[g]; i < lists.begin[g + 1]; ++i) {
      *to++ = b.mask_bits;
      b.mask_bits += b.keys[k].hi - b.keys[k].lo;
    }
  }
  const int64_t bytes = (b.mask_bits + 7) / 8;
  b.made.mask_bytes = int32_t(bytes);
  return bytes <= std::numeric_limits<int32_t>::max();
}

inline bool Bridges::keep_bound_mask(const Lists& lists, Bridge& b, int32_t part, Arrays& out) const {
  const attnrt_part& source = lists.pr->part[part];
  if (!source.mask_offset || !source.mask_begin) return false;
  b.made.bound_mask = part;
  b.made.mask_offset = out.here_long();
  b.made.mask_begin = out.here();
  size_t i = 0;
  for (const int32_t group : b.groups) {
    const size_t g = size_t(group);
    int32_t begin = 0;
    bool masked = false;
    for (; i < b.pieces.size() && b.pieces[i].group == group; ++i) {
      const Piece& piece = b.pieces[i];
      if (piece.part != part) continue;
      const bool last = i + 1 == b.pieces.size() || b.pieces[i + 1].group != group || b.pieces[i + 1].first;
      begin = source.mask_begin[piece.row];
      if (!last || (begin < piece.lo && !piece.first)) return false;  // keys of other parts would read its bits
      masked = true;
    }
    out.ints.push_back(begin);
    for (int32_t m = lists.begin[g]; m < lists.begin[g + 1]; ++m) {
      const size_t at = size_t(lists.qo_rows[size_t(m)]) * size_t(lists.parts) + size_t(part);
      out.longs.push_back(masked ? source.mask_offset[lists.place[at]] : -1);
    }
  }
  return true;
}

// Block ids, positions where they do not follow by one, and mask bits. False: left to the readable form.
inline bool Bridges::write(const Lists& lists, Bridge& b, int32_t* ids, int32_t* pos, uint8_t* mask) const {
  int64_t most = -1;
  for (const Piece& piece : b.pieces) {
    const attnrt_part& source = lists.pr->part[piece.part];
    int32_t* to = ids + piece.to;
    const int64_t j = piece.begin * b.size;  // first key in its list
    if (!source.indices) {
      if (!source.kv_base) return false;
      const int64_t base = source.kv_base[piece.row] + j;
      for (int64_t t = 0; t < piece.count; ++t) to[t] = int32_t(base + t);
      most = std::max(most, base + piece.count - 1);
    } else if (b.size == piece.own.size) {
      const int32_t* from = source.indices + piece.entry + piece.begin;
      int32_t top = -1;
      for (int64_t t = 0; t < piece.count; ++t) {
        to[t] = from[t];
        top = std::max(top, from[t]);
      }
      most = std::max<int64_t>(most, top);
    } else {
      const int32_t* from = source.indices + piece.entry + piece.own.floor(j);
      int64_t within = piece.own.within(j);
      for (int64_t t = 0; t < piece.count; ++from, within = 0) {
        const int64_t n = std::min<int64_t>(piece.own.size - within, piece.count - t);
        const int64_t slot = int64_t(*from) * piece.own.size + within;
        if (*from == -1) {
          std::fill_n(to + t, n, -1);
        } else {
          for (int64_t k = 0; k < n; ++k) to[t + k] = int32_t(slot + k);
          most = std::max(most, slot + n - 1);
        }
        t += n;
      }
    }
    if (b.affine) continue;
    if (source.block_pos) {
      for (int64_t t = 0; t < piece.count; ++t)
        pos[piece.to + t] = int32_t(position(source, piece, (piece.begin + t) * b.size));
    } else {
      const uint32_t start = uint32_t(source.kv_pos[piece.row] + j);
      for (int64_t t = 0; t < piece.count; ++t) pos[piece.to + t] = int32_t(start + uint32_t(t) * uint32_t(b.size));
    }
  }
  for (const Pad& pad : b.pads) {
    std::fill_n(ids + pad.at, pad.count, -1);
    const int64_t end = pad.at + pad.count;
    if (!b.affine)
      for (int64_t at = pad.at; at < end; ++at) pos[at] = int32_t(pos[end] - (end - at) * b.size);
  }
  if (most > std::numeric_limits<int32_t>::max()) return false;
  b.made.max_block = int32_t(most);
  if (!b.mask_bits) return true;
  fill_bits(mask, b.mask_bits);
  int64_t row_bit = 0;
  size_t k = 0, i = 0;
  for (; k < b.groups.size(); ++k) {
    const size_t g = size_t(b.groups[k]);
    const int64_t width = b.keys[k].hi - b.keys[k].lo;
    for (; i < b.pieces.size() && b.pieces[i].group == b.groups[k]; ++i) {
      const Piece& piece = b.pieces[i];
      const attnrt_part& source = lists.pr->part[piece.part];
      if (!source.has_mask || !source.mask_offset || !source.mask_begin) continue;
      const int64_t start = source.mask_begin[piece.row], lo = std::max(piece.lo, start), n = piece.hi - lo;
      if (n <= 0) continue;
      for (int32_t m = lists.begin[g]; m < lists.begin[g + 1]; ++m) {
        const size_t at = size_t(lists.qo_rows[size_t(m)]) * size_t(lists.parts) + size_t(piece.part);
        const int64_t offset = source.mask_offset[lists.place[at]], from = offset + lo - start;
        if (offset < 0) continue;
        if (from + n > source.mask_bytes * 8) return false;
        copy_bits(mask, row_bit + (m - lists.begin[g]) * width + lo - b.keys[k].lo, source.mask, from, n);
      }
    }
    row_bit += width * (lists.begin[g + 1] - lists.begin[g]);
  }
  return true;
}
