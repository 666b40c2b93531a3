// SPDX-License-Identifier: Apache-2.0
// Levelling of workers that took items section by section: scheduler/level.py, the same swaps one by one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "buffer.h"

class Levelling {
 public:
  // Items in the order in which they were dealt: order()[i] costs costs[order[i]]; sections by item, rising in order.
  struct Items {
    const double* costs;
    const int32_t* order;
    const int32_t* sections;
    size_t count;
  };

  // worker_at [count]: worker of the i-th item in order, changed; loads [workers]: their costs, changed. The makespan.
  double run(const Items& items, int32_t* worker_at, double* loads, int32_t workers) {
    constexpr int32_t kSwaps = 4;  // for each worker at most
    list(items, worker_at, workers);
    int32_t* by_load = next_.need(size_t(workers));
    for (int32_t w = 0; w < workers; ++w) by_load[w] = w;
    const auto less = [loads](int32_t a, int32_t b) { return loads[a] != loads[b] ? loads[a] < loads[b] : a < b; };
    std::sort(by_load, by_load + workers, less);
    for (int32_t left = kSwaps * workers; left > 0; --left) {
      const int32_t full = by_load[workers - 1];
      int32_t place = 0;
      while (place < workers && !swap(items, worker_at, loads, full, by_load[place])) ++place;
      if (place == workers) break;
      // Both go to where they belong now: between where they were.
      const int32_t spare = by_load[place];
      std::copy(by_load + place + 1, by_load + workers - 1, by_load + place);
      for (const int32_t w : {spare, full}) {
        int32_t* const end = by_load + workers - (w == spare ? 2 : 1);
        int32_t* const at = std::lower_bound(by_load, end, w, less);
        std::copy_backward(at, end, end + 1);
        *at = w;
      }
    }
    std::fill(loads, loads + workers, 0.0);  // anew, in order: differences have rounded otherwise
    for (size_t i = 0; i < items.count; ++i) loads[worker_at[i]] += items.costs[items.order[i]];
    return *std::max_element(loads, loads + workers);
  }

 private:
  // Each worker's items, as places in the order.
  void list(const Items& items, const int32_t* worker_at, int32_t workers) {
    int32_t* begin = begin_.need(size_t(workers) + 1);
    int32_t* own = own_.need(items.count);
    std::fill(begin, begin + workers + 1, 0);
    for (size_t i = 0; i < items.count; ++i) begin[worker_at[i] + 1] += 1;
    for (int32_t w = 0; w < workers; ++w) begin[w + 1] += begin[w];
    int32_t* next = next_.need(size_t(workers));
    std::copy(begin, begin + workers, next);
    for (size_t i = 0; i < items.count; ++i) own[next[worker_at[i]]++] = int32_t(i);
  }

  // Swaps the two items of one section that level two workers best; false: there are none.
  bool swap(const Items& items, int32_t* worker_at, double* loads, int32_t full, int32_t spare) {
    int32_t *given, *got;
    const double gap = loads[full] - loads[spare];
    if (gap <= 0.0 || !find(items, full, spare, gap, given, got)) return false;
    const double more = items.costs[items.order[*given]] - items.costs[items.order[*got]];
    worker_at[*given] = spare, worker_at[*got] = full;
    std::swap(*given, *got);
    loads[full] -= more, loads[spare] += more;
    return true;
  }

  // The two items of one section whose costs differ most nearly by half of the gap, but not by all of it.
  bool find(const Items& items, int32_t full, int32_t spare, double gap, int32_t*& given, int32_t*& got) {
    const int32_t *begin = begin_.get(), *order = items.order, *sections = items.sections;
    int32_t* own = own_.get();
    double best = gap;
    bool found = false;
    int32_t *low = own + begin[spare], *const end = own + begin[spare + 1];
    for (int32_t* x = own + begin[full]; x < own + begin[full + 1]; ++x) {
      const int32_t section = sections[order[*x]];
      while (low < end && sections[order[*low]] < section) ++low;
      for (int32_t* y = low; y < end && sections[order[*y]] == section; ++y) {
        const double more = items.costs[order[*x]] - items.costs[order[*y]];
        if (!(0.0 < more && more < gap && std::fabs(2.0 * more - gap) < best)) continue;
        best = std::fabs(2.0 * more - gap);
        given = x, got = y, found = true;
      }
    }
    return found;
  }

  Buffer<int32_t> begin_, own_, next_;
};
