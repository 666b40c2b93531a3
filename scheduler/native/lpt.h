// SPDX-License-Identifier: Apache-2.0
// Longest first to the least-loaded worker: scheduler/assign.py's LPT, the same assignment item by item.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "buffer.h"
#include "level.h"

// Items first, first + step, ... of equal cost: a run of a tile under one head range after another.
struct Alike {
  int32_t tile, first, step, count;
};

class LongestFirst {
 public:
  // Least-loaded worker by a tournament: inner node i keeps the smaller load of its two children, of equals the left
  // one, which is the lower worker. Costs are not negative, so the first items go to workers 0, 1, 2, ... unless some
  // cost is 0; and so the bits of a load, read as an integer, compare as the load does. With integers the way up has no
  // branch, whose outcome nobody could foresee.
  // alike [kinds]: all items; sections [n], or null: numbers of which a lower one goes first, whatever the costs; then
  // workers are levelled (level.h), and load() is not what they have.
  // begins [workers], or null: what loads begin with; load() is with it.
  double assign(const double* costs, const Alike* alike, size_t kinds, const int32_t* sections, const double* begins,
                size_t n, int32_t workers) {
    sort_by_cost(costs, alike, kinds);
    list(costs, alike, kinds, n);
    const double longest = n ? costs[ids_.get()[0]] : 0.0;
    const bool positive = n && !begins && costs[ids_.get()[n - 1]] > 0.0;
    if (sections) sort_by_section(sections, n);
    one_each_ = n == 0 || (positive && n <= size_t(workers));
    if (one_each_) return longest;
    const int32_t* in_order = ids_.get();
    int32_t* worker_at = workers_.need(n);
    int32_t leaves = 1;
    while (leaves < workers) leaves *= 2;
    leaves_ = leaves;
    int64_t* load = load_.need(size_t(leaves) * 2);
    int32_t* who = who_.need(size_t(leaves) * 2);
    const size_t ahead = positive ? std::min(n, size_t(workers)) : 0;
    for (int32_t w = 0; w < leaves; ++w) {
      load[leaves + w] = w < workers ? 0 : bits_of(std::numeric_limits<double>::infinity());
      who[leaves + w] = w;
    }
    for (int32_t w = 0; begins && w < workers; ++w) load[leaves + w] = bits_of(begins[w]);
    for (size_t i = 0; i < ahead; ++i) {
      worker_at[i] = int32_t(i);
      load[size_t(leaves) + i] = bits_of(0.0 + costs[in_order[i]]);
    }
    if (n > ahead) {
      for (int32_t node = leaves - 1; node > 0; --node) {
        const int32_t child = 2 * node + int32_t(load[2 * node + 1] < load[2 * node]);
        load[node] = load[child];
        who[node] = who[child];
      }
      for (size_t i = ahead; i < n; ++i) {
        const int32_t worker = leaves > 1 ? who[1] : 0;
        worker_at[i] = worker;
        uint32_t node = uint32_t(leaves + worker);
        int64_t mine = bits_of(load_of(load[node]) + costs[in_order[i]]);
        int32_t me = worker;
        load[node] = mine;
        while (node > 1) {
          const int64_t other = load[node ^ 1];
          const int32_t them = who[node ^ 1];
          // All ones if the other one wins; a sibling to the left also wins a tie.
          const int64_t lose = (other - (mine + int64_t(node & 1))) >> 63;
          mine ^= (mine ^ other) & lose;
          me ^= (me ^ them) & int32_t(lose);
          node >>= 1;
          load[node] = mine;
          who[node] = me;
        }
      }
    }
    if (sections) {
      double* loads = loads_.need(size_t(workers));
      for (int32_t w = 0; w < workers; ++w) loads[w] = load_of(load[leaves + w]);
      return levelling_.run({costs, in_order, sections, n}, worker_at, loads, workers);
    }
    int64_t makespan = 0;
    for (int32_t w = 0; w < workers; ++w) makespan = std::max(makespan, load[leaves + w]);
    return load_of(makespan);
  }

  // What a worker has, after assign(costs, ..., n, ...).
  double load(const double* costs, size_t n, int32_t worker) const {
    if (!one_each_) return load_of(load_.get()[size_t(leaves_) + size_t(worker)]);
    return size_t(worker) < n ? costs[ids_.get()[worker]] : 0.0;
  }
  bool one_each() const { return one_each_; }                  // worker_of() is 0, 1, 2, ... and not written
  const int32_t* order() const { return ids_.get(); }          // [n] items, longest first
  const int32_t* worker_of() const { return workers_.get(); }  // [n] worker of order()[i]

 private:
  static int64_t bits_of(double load) {
    int64_t bits;
    std::memcpy(&bits, &load, sizeof bits);
    return bits;
  }
  static double load_of(int64_t bits) {
    double load;
    std::memcpy(&load, &bits, sizeof load);
    return load;
  }

  // Kinds longest first, equal costs by their number: `keys` hold the complemented bits of a cost (costs are finite and
  // not negative), `kinds_` the kind. A stable radix sort over the bits that differ at all; where these are few, key
  // and number travel in one word.
  void sort_by_cost(const double* costs, const Alike* alike, size_t n) {
    uint64_t *from = keys_.need(n), *to = keys2_.need(n);
    int32_t* ids_out = kinds_.need(n);
    uint64_t varies = 0;
    for (size_t i = 0; i < n; ++i) {
      from[i] = ~uint64_t(bits_of(costs[alike[i].first]));
      varies |= from[i] ^ from[0];
    }
    if (!varies) {
      for (size_t i = 0; i < n; ++i) ids_out[i] = int32_t(i);
      return;
    }
    const int low = __builtin_ctzll(varies), high = 64 - __builtin_clzll(varies);
    if (high - low <= 32) {
      const uint64_t mask = (uint64_t(1) << (high - low)) - 1;
      for (size_t i = 0; i < n; ++i) from[i] = ((from[i] >> low) & mask) << 32 | i;
      if (n <= 96) {
        std::sort(from, from + n);
      } else {
        for (int shift = 32; shift < 32 + high - low; shift += 8) {
          uint32_t at[256] = {}, sum = 0;
          for (size_t i = 0; i < n; ++i) at[(from[i] >> shift) & 255] += 1;
          for (uint32_t& d : at) sum += d, d = sum - d;
          for (size_t i = 0; i < n; ++i) to[at[(from[i] >> shift) & 255]++] = from[i];
          std::swap(from, to);
        }
      }
      for (size_t i = 0; i < n; ++i) ids_out[i] = int32_t(from[i]);
      return;
    }
    for (size_t i = 0; i < n; ++i) ids_out[i] = int32_t(i);
    const uint64_t* by = from;
    std::sort(ids_out, ids_out + n, [by](int32_t a, int32_t b) { return by[a] != by[b] ? by[a] < by[b] : a < b; });
  }

  // The items of the kinds in order: of equal costs by item id, so runs of one tile that cost the same go in turn.
  void list(const double* costs, const Alike* alike, size_t kinds, size_t n) {
    const int32_t* in_order = kinds_.get();
    int32_t* to = ids_.need(n);
    for (size_t k = 0, end; k < kinds; k = end) {
      const Alike& like = alike[in_order[k]];
      const auto same = [&](const Alike& other) {
        return other.tile == like.tile && costs[other.first] == costs[like.first];
      };
      for (end = k + 1; end < kinds && same(alike[in_order[end]]);) ++end;
      const int32_t past = like.first + like.count * like.step;
      if (end == k + 1)
        for (int32_t item = like.first; item < past; item += like.step) *to++ = item;
      else
        for (int32_t more = 0; more < past - like.first; more += like.step)
          for (size_t j = k; j < end; ++j) *to++ = alike[in_order[j]].first + more;
    }
  }

  // Stable, so that items stay longest first inside a section.
  void sort_by_section(const int32_t* sections, size_t n) {
    int32_t last = 0;
    for (size_t i = 0; i < n; ++i) last = std::max(last, sections[i]);
    if (last == 0) return;
    int32_t *at = starts_.need(size_t(last) + 2), *to = ids2_.need(n), *from = ids_.get();
    std::fill(at, at + last + 2, 0);
    for (size_t i = 0; i < n; ++i) at[sections[i] + 1] += 1;
    for (int32_t s = 0; s <= last; ++s) at[s + 1] += at[s];
    for (size_t i = 0; i < n; ++i) to[at[sections[from[i]]]++] = from[i];
    std::copy(to, to + n, from);
  }

  Buffer<uint64_t> keys_, keys2_;
  Buffer<int32_t> kinds_, ids_, ids2_, starts_, workers_, who_;
  Buffer<int64_t> load_;
  Buffer<double> loads_;
  Levelling levelling_;
  int32_t leaves_ = 1;
  bool one_each_ = false;
};
