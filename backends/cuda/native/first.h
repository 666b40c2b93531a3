// SPDX-License-Identifier: Apache-2.0
// Each worker's first item with all that its first copy of K needs, in one line of memory (FirstItem of
// kernels/params.cuh): a short run would otherwise wait for memory once for each of header, worker, item, list, rows
// and block ids.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Host arrays of one part (formats/base.py BlockSparse); null where absent or on the device.
typedef struct {
  const int32_t* request;
  const int32_t* qo_pos;
  const int32_t* qo_index;
  const int32_t* indptr;
  const int32_t* indices;
  const int32_t* kv_pos;
  const int32_t* kv_offset;
  const int32_t* kv_begin;
  const int32_t* kv_end;
  const int64_t* kv_base;
  int32_t block;  // tokens per block
  int32_t heads;
  int32_t listed;     // blocks are listed, on the host or on the device (not: affine)
  int32_t positions;  // blocks have positions of their own
} attnrt_first_part_t;

// Writes the first items of workers 0, 1, ... to `first` and returns how many: none after them has an item. items,
// worker_indptr, merge_rows: the plan's arrays (scheduler/base.py); rulers: RulerDesc of each class; kv_tile: keys per
// tile; rows that wait for a merge are found in merge_rows, which rises with row and head.
int attnrt_cuda_first_items(const int32_t* items, const int32_t* worker_indptr, int workers, const int32_t* merge_rows,
                            int num_merges, const int32_t* rulers, int kv_tile, const attnrt_first_part_t* parts,
                            int32_t* first);

// What the first passes of the Hopper kernel's workers follow from: arrays of the plan, from the team's first worker
// on.
typedef struct {
  const int32_t* items;
  const int32_t* worker_indptr;
  const int32_t* rulers;  // RulerDesc of each class
  const void* described;  // PartDesc of each part, with the addresses that the device has
  const attnrt_first_part_t* parts;
  int32_t workers;
  int32_t kv_tile;
  int32_t solid;  // no list has a hole
} attnrt_first_team_t;

// Writes the first pass of each worker of the team (FirstPass of kernels/hopper_layout.cuh) and returns how many
// workers it has. Lengths must be known to the host.
int attnrt_cuda_first_passes(const attnrt_first_team_t* team, int32_t* first);

#ifdef __cplusplus
}
#endif
