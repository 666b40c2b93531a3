// SPDX-License-Identifier: Apache-2.0
// Kernels compiled for AVX2, FMA and F16C. Run only after the machine was asked for them.
#include "family.h"

#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define ATTNRT_FAMILY avx2
#define ATTNRT_FAMILY_NAME "avx2"
#define ATTNRT_FAMILY_TABLE family_avx2
#define ATTNRT_TARGET_AVX2
#include "family_table.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
const attnrt_cpu::Family* attnrt_cpu::family_avx2() { return nullptr; }
#endif
