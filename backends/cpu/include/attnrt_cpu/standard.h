// SPDX-License-Identifier: Apache-2.0
// What kernels take from outside, included before any compiler target is set: its inline functions must stay portable.
// No header of the C++ library: <cmath> alone would take longer than the rest of a variant's compilation.
#pragma once
#include <stdint.h>

#include "attnrt_cpu/abi.h"
#include "attnrt_variant.h"
