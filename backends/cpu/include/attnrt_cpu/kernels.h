// SPDX-License-Identifier: Apache-2.0
// A variant's two workers, inside a namespace named by ATTNRT_FAMILY. Include standard.h and set the compiler's target
// first; the file may be included once per family and translation unit.

namespace attnrt_cpu {
namespace ATTNRT_FAMILY {

#include "attnrt_cpu/hooks.h"

}  // namespace ATTNRT_FAMILY
}  // namespace attnrt_cpu
