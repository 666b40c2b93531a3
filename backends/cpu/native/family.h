// SPDX-License-Identifier: Apache-2.0
// What one instruction family offers. Each family_*.cpp sets the compiler's target, then includes family_table.h.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

#include "attnrt_cpu/scratch.h"
#include "attnrt_cpu/standard.h"
#include "prebuilt.h"

namespace attnrt_cpu {

constexpr int NUM_PREBUILT = 4;

struct Family {
  const char* name;
  const void* loops;  // the family's Loops
  attnrt_kernel kernels[NUM_PREBUILT];
  int (*store_rows)(const attnrt_store*);
  int (*copy_pages)(const attnrt_page_copy*);
  double (*read)(const float*, int64_t);
};

const Family* family_avx512();
const Family* family_avx2();
const Family* family_plain();

}  // namespace attnrt_cpu
