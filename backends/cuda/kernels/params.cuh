// SPDX-License-Identifier: Apache-2.0
// What the host hands to the kernels: one struct by value per launch, and a header in the workspace that changes with
// the plan.
//
// A captured graph freezes the struct, so it holds only what outlives a plan (addresses of the workspace, the caller's
// tensors, parameters of the variant). Everything that a later plan may change (parts, counts, work) is read through
// those addresses. python: backends/cuda/structs.py has the same layouts; a test compares the sizes and offsets.
#pragma once

// benchmarks/experiments/decode_profile.py makes this a time stamp.
#ifndef ATTNRT_MARK
#define ATTNRT_MARK(n)
#endif

namespace attnrt {

// Waits for the end of the kernel before: all are launched so that their CTAs may start while it runs (sm_90).
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the CTAs of the next kernel start where there is room; they wait for the end of this one
// (wait_for_predecessors).
__device__ __forceinline__ void release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Division of a 31-bit number by a constant: n / d = (n * mul) >> (32 + shift), or n >> shift when mul is 0 (d a power
// of two).
struct FastDiv {
  unsigned divisor;
  unsigned mul;
  unsigned shift;

  __device__ __forceinline__ void split(unsigned n, unsigned& quotient, unsigned& rest) const {
    quotient = mul ? __umulhi(n, mul) >> shift : n >> shift;
    rest = n - quotient * divisor;
  }
};

// K or V as a pool of slots. Strides in elements.
struct PagedKv {
  const char* ptr;
  long long stride_page;
  long long stride_token;
  long long stride_head;
  long long num_slots;  // every slot at or past it reads as a dead key
  FastDiv page;         // the cache's own page size
  int vectors;          // 1: base and strides are multiples of 16 bytes, rows come by 16-byte asynchronous copies
};

// One part of the index (formats/base.py BlockSparse); pointers into the workspace or to the caller's bound arrays,
// null where absent.
struct PartDesc {
  const int* qo_index;
  const int* request;
  const int* qo_pos;
  const int* indptr;
  const int* indices;
  const long long* kv_base;
  const int* kv_pos;
  const int* block_pos;
  const int* kv_begin;
  const int* kv_end;
  const int* kv_offset;
  const unsigned char* mask;
  const long long* mask_offset;
  const int* mask_begin;
  FastDiv block;  // tokens per block C
  int heads;      // lists per row: 1 or num_kv_heads
  int queries;    // length of qo_index, request and qo_pos
  int most;       // of the longest block row; 0: not known
};

// Leaf boundaries of a numeric class (scheduler/base.py Ruler): up to four runs of equal leaves, then a tail.
struct RulerDesc {
  int count[4];
  int size[4];
  int tail;

  __device__ __forceinline__ int start(int leaf) const {
    int offset = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = leaf < count[i] ? leaf : count[i];
      offset += n * size[i];
      leaf -= n;
    }
    return offset + leaf * tail;
  }

  // A leaf's first key, and the one behind its last.
  __device__ __forceinline__ void leaf(int number, int& first, int& end) const {
    int size_of_leaf = 0;
    first = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool here = number < count[i];  // from the leaf's own run on, which leaves nothing of its number
      const int n = here ? number : count[i];
      if (here && size_of_leaf == 0) size_of_leaf = size[i];
      first += n * size[i];
      number -= n;
    }
    if (size_of_leaf == 0) {
      first += number * tail;
      size_of_leaf = tail;
    }
    end = first + size_of_leaf;
  }
};

// Columns of a work item and of a merge row (scheduler/base.py WORK_FIELDS, MERGE_FIELDS).
struct WorkItem {
  int part, row, q_begin, q_end, head_begin, head_end, kv_begin, kv_end, leaf_begin, leaf_end, slot, klass, fold, cost;
};
struct MergeRow {
  int qo_row, head_begin, head_end, slot_begin, slot_end;
};

// The plan as the device sees it, at an address that no load changes.
constexpr int kMaxParts = 16;
constexpr int kMaxClasses = 4;
struct PlanHeader {
  const WorkItem* work;
  const int* worker_indptr;
  const MergeRow* merge_rows;
  const int* merge_slots;
  const int* merge_leaves;
  const int* qo_lens;
  const int* kv_lens;
  const int* bound_kv_lens;  // null: kv_lens are true
  float* partial_acc;        // [slots, num_qo_heads, head_dim_vo]
  float* partial_ml;         // [slots, num_qo_heads, 2]: m (base 2), l
  unsigned* counters;        // states written so far of each (merge row, KV head); null: the merge kernel merges
  int num_workers;
  int num_merges;
  int num_parts;
  int pairwise;      // reduction tree: 0 sequential, 1 pairwise
  int team_workers;  // of the Hopper kernel; lists of workers lie in this order: num_workers, wide_workers,
                     // team_workers
  // Every list may be read in boxes of 2^box_log2 tokens that begin at multiples of so many, whatever pages the cache
  // has, or 2^page_box_log2 where a box must lie in one page; negative: none.
  int box_log2, page_box_log2;
  int solid;  // no list has a hole; 0 where lists lie on the device, because nobody has looked
  int num_items;
  int wide_workers;  // of the kernel for items of many rows; 0: items of any rows lie with num_workers
  int firsts;        // workers whose first item lies behind the header: all that have any; 0: nobody has written them
  int wide_items;    // of the kernel for items of many rows
  int folds;         // 1: an item of the Hopper kernel has several leaves to be folded into one state
  int wide_firsts;   // as `firsts`, of the workers of the kernel for items of many rows; theirs lie behind the others'
  int team_firsts;   // workers of the Hopper kernel whose FirstPass lies behind the header: all, or none
  int pad;
  RulerDesc rulers[kMaxClasses];
  PartDesc parts[kMaxParts];
};

// A worker's first item with all that its first copies need, in one line of memory behind the header, so that a short
// run waits for memory twice before its first keys and not six times (native/first.cpp writes it).
struct FirstItem {
  WorkItem item;
  int next, end;                   // the worker's other items
  int list, entries, pos, offset;  // KvList: first entry in indptr's order, and what there is of it
  int request, qo_row, qo_pos;     // of the item's first query
  int block;                       // tokens per block
  int flags;
  int counter, merge_begin, merge_end;  // of the item's only query under its first head
  int ids[4];                           // blocks of the four runs of 16 tokens from the first tile on
};
// Flags: which of these are there. kFirstRow: the query is the item's only one; kFirstRows: its first 64 queries have
// rows one after the other; kFirstRequest: and are one request's, whose positions are so, too.
constexpr int kFirstList = 1, kFirstIds = 2, kFirstRow = 4, kFirstMerge = 8, kFirstItem = 16, kFirstRows = 32,
              kFirstRequest = 64;
constexpr int kFirstFlags = 24;      // place of the flags among its numbers
constexpr unsigned kFirstAt = 2560;  // bytes from the header's start
static_assert(sizeof(FirstItem) == 128 && sizeof(PlanHeader) <= kFirstAt && kFirstAt % 128 == 0, "lines of their own");

// What stays the same for every replay of a captured graph: the caller's tensors and the address of the plan.
struct RunParams {
  const PlanHeader* plan;
  unsigned before, behind;  // bytes that belong to the plan on this side of its header and behind PlanHeader
  const char* q;
  long long q_stride_row, q_stride_head;  // elements
  PagedKv k, v;
  char* out;
  long long out_stride_row, out_stride_head;
  float* lse;  // null: not wanted
  long long lse_stride_row, lse_stride_head;
  float sm_scale;
  int num_qo_heads;
  int first;  // 1: this is the first kernel of the run
  int lines;  // places for first items: of num_workers and wide_workers of every plan
};

// Kernels of a run that want nothing of each other overlap: the first of them waits for what came before the run and
// then lets the next one start, which so need not wait. But nobody may take a run for done before all of it is: the
// last CTA of a kernel that has not waited at its start waits at its end.
__device__ __forceinline__ void begin_run(const RunParams& p) {
  if (p.first) wait_for_predecessors();
  release_dependents();
}
// For a kernel that waits for all of its run, but reads the plan before: the first one of a run has not been waited
// for.
__device__ __forceinline__ void wait_if_first(const RunParams& p) {
  if (p.first) wait_for_predecessors();
}
__device__ __forceinline__ void end_run(const RunParams& p) {
#if __CUDA_ARCH__ >= 900
  if (!p.first && blockIdx.x == gridDim.x - 1) wait_for_predecessors();
#endif
}

// Asks for the plan in L2: its header, and what lies before it and behind the first items, eight lines each way for
// each CTA. A short kernel would otherwise wait for memory once for every link of header, item, list and block ids.
// Being a hint, it may come before the wait for predecessors.
__device__ __forceinline__ void prefetch_plan(const RunParams& p) {
#if __CUDA_ARCH__ >= 800
  constexpr unsigned kLine = 128, kLines = (sizeof(PlanHeader) + kLine - 1) / kLine, kShare = 8;
  static_assert(kLines <= 32, "a warp asks for the header");
  const char* plan = reinterpret_cast<const char*>(p.plan);
  const unsigned lane = threadIdx.x % 32, line = (blockIdx.x * kShare + lane % kShare) * kLine;
  const char* want = plan + lane * kLine;
  bool wanted = threadIdx.x < kLines;
  if (threadIdx.x / 32 == 1) {
    const unsigned index = kFirstAt + p.lines * static_cast<unsigned>(sizeof(FirstItem)) + line;
    want = lane < kShare ? plan - line - kLine : plan + index;
    wanted = lane < kShare ? line + kLine <= p.before : lane < 2 * kShare && index <= p.behind;
  }
  if (wanted) asm volatile("prefetch.global.L2 [%0];" ::"l"(want));
#endif
}

// Keys of a request: the bound number where there is one, kept within what the plan was made for.
__device__ __forceinline__ int kv_len_of(const PlanHeader& plan, int request) {
  const int most = plan.kv_lens[request];
  return plan.bound_kv_lens ? max(0, min(most, plan.bound_kv_lens[request])) : most;
}
__device__ __forceinline__ int kv_len_of(const RunParams& p, int request) { return kv_len_of(*p.plan, request); }

// How far the true length moves keys and the queries' positions from where the plan has them (<= 0).
__device__ __forceinline__ int bound_shift(const PlanHeader& plan, int request) {
  return plan.bound_kv_lens ? kv_len_of(plan, request) - plan.kv_lens[request] : 0;
}
__device__ __forceinline__ int bound_shift(const RunParams& p, int request) { return bound_shift(*p.plan, request); }

}  // namespace attnrt
