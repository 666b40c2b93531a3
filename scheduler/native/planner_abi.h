// SPDX-License-Identifier: Apache-2.0
// What Python and the planner say to each other. Read by cffi as well: declarations only. Arrays are as in
// formats/base.py.

// Raised with every change below, so that Python notices a library built before it.
enum { ATTNRT_PLANNER_ABI = 2 };

// One part of the index.
typedef struct {
  int32_t num_rows;
  int32_t heads;              // lists per block row: 1 or num_kv_heads
  int32_t num_queries;        // entries of request, qo_pos, qo_index
  const int32_t* qo_indptr;   // [num_rows + 1]
  const int32_t* qo_index;    // [queries] or NULL
  const int32_t* request;     // [queries]
  const int32_t* qo_pos;      // [queries]
  const int32_t* kv_pos;      // [num_rows] or NULL: positions are not affine, nothing is cut off
  const int32_t* kv_begin;    // [num_rows * heads]
  const int32_t* kv_end;      // [num_rows * heads]
  const int32_t* kv_offset;   // [num_rows]
  const int64_t* limit_lo;    // [queries * heads] or NULL, offsets in the request
  const int64_t* limit_hi;    // the same, exclusive
  const int64_t* visible_lo;  // [queries] or NULL: positions a query may see, where they are not left and right of it
  const int64_t* visible_hi;  // the same, exclusive
} attnrt_part;

// A numeric class: its ruler as spans of equal leaves, the last one without end.
typedef struct {
  int64_t max_rows;  // -1: all
  int32_t q_tile;
  int32_t num_spans;
  int64_t span_start[8];  // offset of the first key
  int64_t span_leaf[8];   // leaf of the first key
  int64_t span_size[8];   // keys per leaf
} attnrt_class;

typedef struct {
  double alpha, beta, beta_rows, fixed;
  int32_t num_workers;
  int32_t num_classes;
  int32_t split_heads;
  attnrt_class classes[8];
} attnrt_traits;

typedef struct {
  const attnrt_traits* traits;
  const attnrt_part* part;  // [num_parts]
  int32_t num_parts;
  int32_t num_kv_heads;
  int32_t group;  // query heads per KV head
  int32_t num_requests;
  int32_t num_rows;  // rows of q, padding included
  int32_t mode;      // 0 lpt, 1 round robin, 2 one worker per request
  int32_t pairwise;
  int32_t bound_kv_lens;
  const int32_t* qo_lens;  // [num_requests]
  const int32_t* kv_lens;  // [num_requests]
  int64_t left, right;     // a query at p sees keys p - left .. p + right
  int64_t max_slots;
} attnrt_problem;

typedef struct {
  int64_t items;
  int64_t merges;
  int64_t entries;
  int64_t slots;  // partial slots used; where they do not suffice, the number needed
} attnrt_counts;

// Plan into this thread's scratch. 0: done; 1: max_slots do not suffice even without a cut;
// 2: qo_indptr, request or qo_index point outside.
int attnrt_plan(const attnrt_problem* problem, attnrt_counts* counts);

// Copy the last plan of this thread: items [items * 14], worker_indptr [num_workers + 1], merge rows [merges * 5],
// slots [entries], leaves [entries], one behind the other.
void attnrt_take(int32_t* out);
