// SPDX-License-Identifier: Apache-2.0
// Fold the partial states of rows that no single item finishes.

struct Merge {
  const attnrt_call& call;
  const Hooks& hooks;
  float *ml, *acc;  // states of the pairwise tree's stack, the running state first
  int32_t level[40];

  const float* state_ml(int64_t slot, int head) const {
    return call.plan.partial_ml + (slot * call.num_qo_heads + head) * 2;
  }
  const float* state_acc(int64_t slot, int head) const {
    return call.plan.partial_acc + (slot * call.num_qo_heads + head) * call.head_dim_vo;
  }

  void put(int at, int64_t slot, int head) {
    const float* from = state_ml(slot, head);
    ml[2 * at] = from[0];
    ml[2 * at + 1] = from[1];
    __builtin_memcpy(acc + static_cast<int64_t>(at) * call.head_dim_vo, state_acc(slot, head),
                     sizeof(float) * static_cast<size_t>(call.head_dim_vo));
  }

  void sequential(const MergeRow& row, int head) {
    for (int i = row.slot_begin; i < row.slot_end; ++i) {
      const int64_t slot = call.plan.merge_slots[i];
      if (i == row.slot_begin)
        put(0, slot, head);
      else
        combine(ml, acc, state_ml(slot, head), state_acc(slot, head), call.head_dim_vo);
    }
  }

  // Split at the largest power of two below the span, by absolute leaf index, as a binary counter: the stack holds
  // aligned subtrees of falling size. A sibling that has no state is empty: the subtree rises without a fold.
  void pairwise(const MergeRow& row, int head) {
    const int64_t dim = call.head_dim_vo;
    int size = 0;
    int64_t next = 0;
    for (int i = row.slot_begin; i < row.slot_end; ++i) {
      const int64_t leaf = call.plan.merge_leaves[i];
      // Leaves that were left out between the last state and this one are empty: finish the subtrees they complete.
      for (; size > 0 && next < leaf; ++next) size = rise(size, next, false);
      put(size, call.plan.merge_slots[i], head);
      level[size] = 0;
      size = rise(size + 1, leaf, true);
      next = leaf + 1;
    }
    for (; size > 1; --size)
      combine(ml + 2 * (size - 2), acc + (size - 2) * dim, ml + 2 * (size - 1), acc + (size - 1) * dim,
              call.head_dim_vo);
  }

  // Close subtrees that end with `leaf`. `present`: the top of the stack is that leaf's own state.
  int rise(int size, int64_t leaf, bool present) {
    const int64_t dim = call.head_dim_vo;
    int height = 0;
    bool have = present;
    for (int64_t index = leaf; index & 1; index >>= 1, ++height) {
      const int below = have ? size - 2 : size - 1;
      const bool sibling = below >= 0 && level[below] == height;
      if (have && sibling) {
        combine(ml + 2 * below, acc + below * dim, ml + 2 * (size - 1), acc + (size - 1) * dim, call.head_dim_vo);
        --size;
      } else if (sibling) {
        have = true;
      }
      if (have) level[size - 1] = height + 1;
    }
    return size;
  }

  void run(const MergeRow& row) {
    attnrt::Ctx c{};
    c.request = -1;
    c.qo_row = row.qo_row;
    if (call.plan.row_request) c.request = call.plan.row_request[row.qo_row];
    if (c.request >= 0) {
      const attnrt_plan& plan = call.plan;
      c.qo_len = plan.qo_lens[c.request];
      c.kv_len = kv_len_of(plan, c.request);
      c.qo_pos = plan.row_pos[row.qo_row] - (plan.kv_lens[c.request] - c.kv_len);
    }
    const int group = call.num_qo_heads / call.num_kv_heads;
    for (int head = row.head_begin * group; head < row.head_end * group; ++head) {
      c.qo_head = head;
      c.kv_head = head / group;
      ml[0] = minus_infinity();
      if (call.plan.pairwise)
        pairwise(row, head);
      else
        sequential(row, head);
      finish(call, hooks, c, row.qo_row, ml, acc);
    }
  }
};

static int merge_rows(const attnrt_call* call, const Hooks& hooks, int worker, int num_workers) {
  const attnrt_plan& plan = call->plan;
  constexpr int kStack = 40;
  const size_t ml_bytes = kStack * 2 * sizeof(float);
  if (!scratch().reserve(ml_bytes + kStack * sizeof(float) * static_cast<size_t>(call->head_dim_vo))) return 1;
  Merge merge{*call,
              hooks,
              reinterpret_cast<float*>(scratch().memory),
              reinterpret_cast<float*>(scratch().memory + ml_bytes),
              {}};
  const MergeRow* rows = reinterpret_cast<const MergeRow*>(plan.merges);
  for (int64_t i = worker; i < plan.num_merges; i += num_workers) merge.run(rows[i]);
  return 0;
}
