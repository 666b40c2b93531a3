// SPDX-License-Identifier: Apache-2.0
// What Python and the planner say to each other. Read by cffi as well: declarations only. Arrays are as in
// formats/base.py.

// Raised with every change below, so that Python notices a library built before it.
enum { ATTNRT_PLANNER_ABI = 10 };

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
  // From here on only alignment reads.
  int32_t block;               // tokens per KV block
  int32_t entries;             // length of indices
  int32_t has_mask;            // 0: none, 1: on the host, 2: bound
  int64_t mask_bytes;          // on the host
  const int32_t* indptr;       // [num_rows * heads + 1]
  const int32_t* indices;      // [entries] or NULL: affine, or bound (then `bound`)
  int32_t bound;               // indices lie on a device
  const int64_t* kv_base;      // [num_rows] or NULL
  const int32_t* block_pos;    // [entries] or NULL
  const uint8_t* mask;         // [mask_bytes] or NULL
  const int64_t* mask_offset;  // [queries] or NULL
  const int32_t* mask_begin;   // [num_rows] or NULL
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

// Workers that share a kernel, and their costs.
typedef struct {
  double alpha, beta, beta_rows, fixed;
  double unit, overlap;
  double alone, warp, scattered, busy, again, merge, fold;
  double stored, folded;  // of ends of leaves
  int64_t section;        // keys times KV heads of a section, 0: none
  int32_t num_workers;
  int32_t share;              // workers of a multiprocessor, 0: they share nothing
  int32_t first_class, rows;  // it takes tiles of classes from here on with more query-head rows than so many
  int32_t tile;               // costs count keys by so many, at multiples of it; 0: one by one
  int32_t num_sizes;          // of tiles, to be weighed where items are few; 0: none
  int32_t size_rows[4];       // most query-head rows, rising
  int32_t size_cost[4];       // of a key, in hundredths
} attnrt_crew;

typedef struct {
  attnrt_crew crews[3];  // the first takes what no other does; of two that would take a tile, the later one does
  int32_t num_crews;
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
  int32_t scattered;       // blocks are no multiples of the run that workers read fastest
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

// One part of an aligned index, as Python makes it. The last lines are places of arrays in the buffer, in int32s from
// its start; -1: none, or the source's own.
typedef struct {
  int32_t source;  // what is left of this part; -1: a bridge
  int32_t rows, heads, queries;
  int32_t most_queries, block;  // block size of a bridge
  int32_t entries, max_block;
  int32_t mask_bytes;
  int32_t bound_mask;  // the part whose bound mask a bridge keeps, -1: none
  int32_t qo_indptr, qo_index, request, qo_pos, kv_begin, kv_end;
  int32_t indptr, indices, kv_pos, block_pos, kv_offset;
  int32_t mask, mask_offset, mask_begin;
  int32_t limit_lo, limit_hi;
} attnrt_aligned_part;

typedef struct {
  int32_t parts;
  int64_t length;  // int32s that attnrt_align_take writes
} attnrt_aligned;

// Align the problem's parts into this thread's scratch. 0: done; 2: as of attnrt_plan; 3: they are aligned as they are;
// 4: left to the readable form (which may raise).
int attnrt_align(const attnrt_problem* problem, attnrt_aligned* aligned);

// Write the last alignment of this thread: attnrt_aligned_part [parts], then the arrays. The problem then points at the
// aligned parts, which live until the next alignment. 0: done; 4: as of attnrt_align.
int attnrt_align_take(attnrt_problem* problem, int32_t* out);

// Plan into this thread's scratch. 0: done; 1: max_slots do not suffice even without a cut;
// 2: qo_indptr, request or qo_index point outside.
int attnrt_plan(const attnrt_problem* problem, attnrt_counts* counts);

// Copy the last plan of this thread: items [items * 14], worker_indptr [workers of all crews + 1], merge rows [merges *
// 5], slots [entries], leaves [entries], one behind the other.
void attnrt_take(int32_t* out);
