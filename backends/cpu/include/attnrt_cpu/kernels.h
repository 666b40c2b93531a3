// SPDX-License-Identifier: Apache-2.0
// What a variant's kernels need, in order, inside a namespace named by ATTNRT_FAMILY. Include the standard headers (standard.h) and set the compiler's
// target first; the file may be included once per family and translation unit.

namespace attnrt_cpu {
namespace ATTNRT_FAMILY {

#include "attnrt_cpu/simd.h"
#include "attnrt_cpu/stores.h"
#include "attnrt_cpu/loops.h"
#include "attnrt_cpu/state.h"
#include "attnrt_cpu/resolve.h"
#include "attnrt_cpu/softmax.h"
#include "attnrt_cpu/attend.h"
#include "attnrt_cpu/merge.h"

}  // namespace ATTNRT_FAMILY
}  // namespace attnrt_cpu
