// SPDX-License-Identifier: Apache-2.0
// Kernels in plain C++, for every machine.
#include "family.h"

#define ATTNRT_FAMILY plain
#define ATTNRT_FAMILY_NAME "plain"
#define ATTNRT_FAMILY_TABLE family_plain
#include "family_table.h"
