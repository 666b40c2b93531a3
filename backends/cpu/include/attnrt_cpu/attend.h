// SPDX-License-Identifier: Apache-2.0
// The attend worker: its own items, then what other workers have not begun. Heads of an item with many rows are handed
// out one by one; which thread runs them changes no bit.

// Numbers handed out to all threads of a run, one by one.
ATTNRT_INLINE int64_t take_next(int64_t* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

template <class Path>
static bool run_item(const attnrt_call& call, const Hooks& hooks, const WorkItem& item, int head_begin, int head_end) {
  WorkItem own = item;
  own.head_begin = head_begin;
  own.head_end = head_end;
  Path path(call, hooks, own);
  Carve count{nullptr};
  path.carve(count);
  if (!scratch().reserve(count.used)) return false;
  Carve memory{scratch().memory};
  path.carve(memory);
  for (int d = 0; d < path.dim_pad || d < path.dim_vo_pad; ++d) path.zeros[d] = 0.0f;
  path.run();
  return true;
}

// What is left of one worker's items.
static bool run_queue(const attnrt_call& call, const Hooks& hooks, int worker) {
  const attnrt_plan& plan = call.plan;
  const WorkItem* items = reinterpret_cast<const WorkItem*>(plan.items) + plan.worker_indptr[worker];
  const int64_t count = plan.worker_indptr[worker + 1] - plan.worker_indptr[worker];
  bool many = false;
  for (int64_t i = 0; i < count; ++i) many |= !plan.classes[items[i].klass].token_major;
  // Head by head, so that the items of one request find its K and V in a cache.
  for (int64_t i; many && (i = take_next(call.taken + 2 * worker)) < count * call.num_kv_heads;) {
    const WorkItem& item = items[i % count];
    const int head = static_cast<int>(i / count);
    if (plan.classes[item.klass].token_major || head < item.head_begin || head >= item.head_end) continue;
    if (!run_item<ManyRows>(call, hooks, item, head, head + 1)) return false;
  }
  for (int64_t i; (i = take_next(call.taken + 2 * worker + 1)) < count;) {
    const WorkItem& item = items[i];
    if (!plan.classes[item.klass].token_major) continue;
    if (!run_item<FewRows>(call, hooks, item, item.head_begin, item.head_end)) return false;
  }
  return true;
}

static int attend_items(const attnrt_call* call, const Hooks& hooks, int worker) {
  const int num_workers = call->plan.num_workers;
  for (int i = 0; i < num_workers; ++i)
    if (!run_queue(*call, hooks, (worker + i) % num_workers)) return 1;
  return 0;
}
