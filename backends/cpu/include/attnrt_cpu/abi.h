// SPDX-License-Identifier: Apache-2.0
// The records that cross from Python to machine code. Plain C, read by cffi as well as by the compilers: the text
// between the two marks is what cffi parses, so it holds declarations only.
//
// Strides and offsets count elements and are 64-bit: a pool may hold more than 2^31 of them.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// [cffi begin]
// Element types of q, k, v and out.
enum { ATTNRT_F32 = 0, ATTNRT_F16 = 1, ATTNRT_BF16 = 2, ATTNRT_E4M3 = 3, ATTNRT_E5M2 = 4 };

// A pool of K or V rows: slot s is token s % page_size of page s / page_size. The last axis has stride 1.
typedef struct {
  const void* ptr;
  int64_t num_pages, page_size;
  int64_t stride_page, stride_token, stride_head;
} attnrt_pool;

// One index part (formats.base.BlockSparse); a null pointer where the part has no such array.
typedef struct {
  int32_t block_size;          // C, keys per listed block
  int32_t heads;               // lists per block row: 1, or the number of KV heads
  const int32_t* qo_index;     // [queries] row of q, or null: query i is row i
  const int32_t* request;      // [queries]
  const int32_t* qo_pos;       // [queries] signed logical position
  const int32_t* indptr;       // [rows * heads + 1]
  const int32_t* indices;      // [nnz] block ids, negative: a hole; null: affine
  const int64_t* kv_base;      // [rows] slot of list entry 0 of an affine part
  const int32_t* kv_pos;       // [rows] position of list entry 0
  const int32_t* block_pos;    // [nnz] position of each block's first key
  const int32_t* kv_begin;     // [rows * heads] live range in list order, inclusive
  const int32_t* kv_end;       // [rows * heads] exclusive
  const int32_t* kv_offset;    // [rows] offset in the request of list entry 0
  const uint8_t* mask;         // packed bits, little-endian in a byte
  int64_t mask_bytes;          // bits past them are unset
  const int64_t* mask_offset;  // [queries] first bit, -1: no mask
  const int32_t* mask_begin;   // [rows] offset in the request of the first masked key
} attnrt_part;

// A numeric class (scheduler.base.NumericClass): leaf boundaries come as a table of steps and a tail.
typedef struct {
  int32_t kv_tile;      // keys per tile
  int32_t token_major;  // 1: dot products along head_dim (few rows); 0: packed keys (many rows)
  int32_t num_steps;
  const int32_t* steps;  // [num_steps, 2] count, size
  int32_t tail;          // size of each leaf after the steps
} attnrt_class;

// A loaded plan; columns of items and merges are scheduler.base.WORK_FIELDS and MERGE_FIELDS.
typedef struct {
  const attnrt_part* parts;
  const attnrt_class* classes;
  const int32_t *qo_lens, *kv_lens;  // [requests]
  const int32_t* bound_kv_lens;      // [requests] true lengths, or null
  const int32_t* items;              // [num_items, item_fields]
  const int32_t* worker_indptr;      // [num_workers + 1]
  int32_t num_workers;
  int32_t num_merges;
  const int32_t* merges;        // [num_merges, merge_fields]
  const int32_t* merge_slots;   // [entries]
  const int32_t* merge_leaves;  // [entries]
  float* partial_acc;           // [slots, num_qo_heads, head_dim_vo]
  float* partial_ml;            // [slots, num_qo_heads, 2]
  int32_t pairwise;             // 0: left fold over leaves; 1: pairwise tree
  const int32_t* row_request;   // [num_rows] request and position of each row of q, -1: none; null unless the variant
  const int32_t* row_pos;       //   has a sink or an output hook
} attnrt_plan;

typedef struct {
  attnrt_plan plan;
  int32_t num_qo_heads, num_kv_heads, head_dim, head_dim_vo;
  int32_t q_dtype, kv_dtype, out_dtype, shared_kv;
  const void* q;
  int64_t q_stride_row, q_stride_head;
  attnrt_pool k, v;
  void* out;
  int64_t out_stride_row, out_stride_head;
  float* lse;  // [rows, num_qo_heads] natural log, or null
  int64_t lse_stride_row, lse_stride_head;
  float sm_scale;
  const void* params;  // the variant's own table
  const void* loops;   // inner loops of the family the kernel was compiled for
  int64_t* taken;      // [num_workers, 2] how much of each worker's items is begun; attnrt_run's own
} attnrt_call;

// Rows of K and V to store into a pool; slot < 0 skips the row.
typedef struct {
  const void* src;
  int32_t src_dtype, dst_dtype;
  int64_t src_stride_row, src_stride_head;
  attnrt_pool dst;
  const int64_t* slots;       // [rows]
  const float* scale;         // divides before the store; null: 1
  int64_t scale_stride_head;  // 0: one scale for all heads
  int64_t num_rows;
  int32_t num_heads, head_dim;
} attnrt_store;

// Whole pages copied inside a pool, for copy-on-write.
typedef struct {
  attnrt_pool pool;
  int32_t element_size, num_heads, head_dim;
  const int64_t *from, *to;  // [num_pages] page ids
  int64_t num_pages;
} attnrt_page_copy;

// One worker's share: returns 0, or 1 when memory ran out.
typedef int (*attnrt_worker)(const attnrt_call* call, int worker, int num_workers);

// The machine code of one variant.
typedef struct {
  attnrt_worker attend, merge;
} attnrt_kernel;

// Hash of the headers that the library was built from.
const char* attnrt_headers(void);
// Instruction families that this machine runs, best first; null past the last.
const char* attnrt_family_name(int family);
const void* attnrt_loops(int family);
// Prebuilt kernel `variant` (its place in prebuilt.h) of a family.
attnrt_kernel attnrt_prebuilt(int family, int variant);
// Load a compiled library and fill `kernel`; returns null, or what went wrong.
const char* attnrt_load(const char* path, attnrt_kernel* kernel);
// Run `worker` for workers 0 .. num_workers - 1 on at most num_threads threads. Returns 0, or 1 when memory ran out.
int attnrt_run(attnrt_worker worker, const attnrt_call* call, int num_workers, int num_threads);
int attnrt_store_rows(int family, const attnrt_store* store);
int attnrt_copy_pages(const attnrt_page_copy* copy);
// Read `bytes` of memory with num_threads threads; the machine's read bandwidth is what it takes. Returns a sum.
double attnrt_read(const void* memory, int64_t bytes, int num_threads);
// [cffi end]

#ifdef __cplusplus
}
#endif
